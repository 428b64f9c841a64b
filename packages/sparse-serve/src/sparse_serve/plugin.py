"""How vLLM finds us: `register` is an entry point of its group `vllm.general_plugins`, called in each of its processes.

The attention of its CPU platform is replaced by ours, which is the engine's own wherever nobody asked for a selection.
It is named by its path, not imported: that would import numba, before which vLLM must have looked at its compilers.
"""

# vLLM is no dependency of this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from typing import Any

BACKEND = "sparse_serve._backend.SpotlightBackend"


def register() -> None:
    """Put our attention in the place of vLLM's on the CPU, and check a configuration as soon as it is made."""
    # vLLM is no dependency: whoever calls this has it.
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    # Where our attention would never be asked for, nobody else can say that the request for it goes unheard.
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
