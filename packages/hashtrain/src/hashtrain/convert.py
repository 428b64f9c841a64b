"""Convert the hashers that the paper's authors published to this project's format.

A published file is a list of tensors, four per layer, starting with layer 0: P0 [1, Hq, D, D], b0 [1, Hq, 1, D], P1,
b1, for `h = SiLU(x P0 + b0) + x` and `h P1 + b1 + h`. The file is a zip with a pickle, of which torch builds tensors
and nothing else (`weights_only`), once the sizes stated in the zip are at most those of this model.
"""

import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hashtrain.config import HasherConfig, ModelShape
from hashtrain.files.untrusted import first_line
from hashtrain.hasher import Hasher

_PER_LAYER = 4
_TRAINED = 8192
"""Tokens of the paper's training contexts, or as many as the model has; the files do not say."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def convert(path: str | Path, model_config: Any, out: str | Path, base_model: str = "") -> Hasher:
    """Convert a published `.pth` list to a hasher of variant `paper` with residuals, and store it in the folder `out`.

    Args:
        path: the file; model_config: the Hugging Face config of the model it was trained for.
        base_model: the model's name, for the hasher's config.
    Returns: the hasher.
    Raises: ValueError with one sentence, before anything is written, if the file is damaged, truncated, or holds
        anything but the tensors of this model's layers.
    """
    path, shape = Path(path), ModelShape.of(model_config)
    d = shape.head_dim
    form: dict[str, Any] = {"bits": d, "hidden": d, "residual": True}
    longest = getattr(model_config.get_text_config(decoder=True), "max_position_embeddings", None)
    reach = min(_TRAINED, longest or _TRAINED)
    config = HasherConfig("paper", shape, **form, reach=reach, base_model=base_model)
    tensors = _read(path, shape)
    state: dict[str, Tensor] = Hasher(config, seed=0).state_dict()
    for layer in range(shape.num_layers):
        for place, name in enumerate(("w1", "b1", "w2", "b2")):
            key = f"layers.{layer}.{name}"
            state[key] = _checked(tensors[_PER_LAYER * layer + place], tuple(state[key].shape), path, layer, place)
    hasher = Hasher(config, seed=None)
    hasher.load_state_dict(state)
    hasher.save_pretrained(out, _card(config, path.name))
    return hasher.eval().requires_grad_(False)


def _read(path: Path, shape: ModelShape) -> list[Any]:
    if not path.is_file():
        raise ValueError(f"no file {path}: expected the published .pth file")
    d, wanted = shape.head_dim, _PER_LAYER * shape.num_layers
    largest = 2 * 4 * shape.num_layers * shape.num_query_heads * (2 * d * d + 2 * d) + (1 << 20)
    try:
        with zipfile.ZipFile(path) as archive:
            if (content := sum(entry.file_size for entry in archive.infolist())) > largest:  # a small file may lie
                raise ValueError(f"it holds {content} bytes, expected at most {largest}")
            if (wrong := archive.testzip()) is not None:  # torch checks no checksum
                raise ValueError(f"the checksum of its {wrong} is wrong")
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # on damaged bytes, the zip reader and the unpickler raise all kinds of errors
        what = f"is truncated, damaged or holds more than tensors ({first_line(error)})"
        raise ValueError(f"{path} {what}; download it again") from error
    if not isinstance(found, list | tuple):
        raise ValueError(f"{path} must hold a list of tensors, got {type(found).__name__}")
    if len(found) != wanted:
        got = f"{len(found)} tensors, {len(found) / _PER_LAYER:g} layers"
        more = "; the published file is truncated" if len(found) < wanted else ""
        raise ValueError(f"{path} holds {got}; expected {wanted}, {shape.num_layers} layers{more}")
    return list(found)


def _checked(tensor: Any, size: tuple[int, ...], path: Path, layer: int, place: int) -> Tensor:
    plain = isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
    if not plain or tensor.dtype not in _DTYPES or tuple(tensor.shape) != (1, *size):
        got = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{path}, tensor {place} of layer {layer}: expected floats of {(1, *size)}, got {got}")
    if not tensor.isfinite().all():
        raise ValueError(f"{path}, tensor {place} of layer {layer} is not finite; download the file again")
    return tensor.detach()[0].float()


def _card(config: HasherConfig, source: str) -> str:
    return (
        f"# Hasher `paper`, converted from `{source}`\n\nBase model: {config.base_model or 'unnamed'}. "
        f"{config.bits} bits per query head, with residuals. Its remainder is not fitted.\n"
    )
