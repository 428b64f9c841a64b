"""The vLLM plug-in: `register` is an entry point of the group `vllm.general_plugins`, called in each vLLM process.

It replaces the attention backend of vLLM's CPU platform by ours, which is vLLM's own in layers that are not sparse. The
backend is given by its path and not imported here, because it imports numba, and vLLM must detect its compilers first.
"""

# vLLM is no dependency of this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from typing import Any

BACKEND = "sparse_serve._backend.SpotlightBackend"


def register() -> None:
    """Replace vLLM's CPU attention backend, and check each configuration when it is created."""
    # vLLM is not a dependency: only vLLM calls this function.
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    # Checked here, because in an unsupported configuration our backend might never run and so could not raise an error.
    found = current_platform.check_and_update_config
    if not getattr(found, "checks_spotlight", False):
        current_platform.check_and_update_config = _checked(found)


def _checked(found: Any) -> Any:
    @functools.wraps(found)
    def check_and_update_config(vllm_config: Any) -> None:
        from sparse_serve.refusals import require_serves

        found(vllm_config)
        require_serves(vllm_config)

    check_and_update_config.checks_spotlight = True
    return check_and_update_config
