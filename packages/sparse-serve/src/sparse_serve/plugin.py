"""The vLLM plug-in: `register` is an entry point of the group `vllm.general_plugins`, called in each vLLM process.

On the CPU platform it replaces vLLM's attention backend by ours; on CUDA it registers ours as CUSTOM, and chooses it
for engines that are configured for it. Ours is vLLM's own in layers that are not sparse. A backend is given by its path
and not imported here, because it imports numba, and vLLM must detect its compilers first.
"""

# vLLM is no dependency of this package.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import functools
from typing import Any

BACKEND = "sparse_serve._backend.SpotlightBackend"
GPU_BACKEND = "sparse_serve._gpu_backend.SpotlightBackend"


def register() -> None:
    """Register the backend of this platform, and check each configuration when it is created."""
    # vLLM is not a dependency: only vLLM calls this function.
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    elif current_platform.is_cuda() and not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, GPU_BACKEND)
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
        _choose(vllm_config)

    check_and_update_config.checks_spotlight = True
    return check_and_update_config


def _choose(vllm_config: Any) -> None:
    """Choose our backend on CUDA, if the plug-in is configured. Raises: ValueError if another one is chosen."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from sparse_serve.settings import KEY, Settings

    if not current_platform.is_cuda() or Settings.of(vllm_config.additional_config) is None:
        return
    custom, attention = AttentionBackendEnum.CUSTOM, vllm_config.attention_config
    if (path := custom.get_path()) != GPU_BACKEND:
        raise ValueError(f"{KEY} needs the attention backend CUSTOM, which another plug-in has: {path}; remove one")
    for chosen in (attention.backend, *attention.backend_per_kind.values()):
        if chosen not in (None, custom):
            raise ValueError(f"{KEY} needs the attention backend CUSTOM, got {chosen.name}; leave the choice to it")
    attention.backend = custom
