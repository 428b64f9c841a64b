"""The hasher of a whole model: one set of hash functions per layer, and its file format.

On disk a hasher is a folder: `config.json` (its config, and which weight file is current), one safetensors file named
after its content, and a README. `config.json` is replaced last, so a kill at any moment leaves either the old hasher or
the new one.
"""

import hashlib
import json
import logging
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType] of its tqdm_class
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor, nn

from hashtrain.config import FORMAT_VERSION, TERMS_OF, HasherConfig, ModelShape
from hashtrain.files.atomic import save_tensors, write_text
from hashtrain.files.untrusted import first_line, inside, open_tensors, read_json_object
from hashtrain.layers import BY_VARIANT, LayerHasher, shapes

_MAX_CONFIG_BYTES = 1 << 20
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FILES = ["config.json", "README.md", "hasher-*.safetensors"]
_WEIGHTS = re.compile(r"hasher-[0-9a-f]{12}\.safetensors", re.ASCII)
_REMEDY = "retrain the hasher"
_log = logging.getLogger(__name__)


def make_layer(config: HasherConfig, layer: int, seed: int | None = 0) -> LayerHasher:
    """Create one layer's hash functions, as `Hasher` does: in host memory, unless `seed` is None."""
    if seed is None:
        return BY_VARIANT[config.variant](config.at(layer), None)
    with torch.device("cpu"):  # whatever the default device: the same numbers everywhere
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        return BY_VARIANT[config.variant](config.at(layer), generator)


class Hasher(nn.Module):
    """Turns queries and keys of every layer into bit codes.

    Args:
        config: variant, size and base model.
        seed: draws the rotations and the MLPs' start; the same seed gives the same hasher. None leaves the tensors
            uninitialised, to be loaded into.
    """

    def __init__(self, config: HasherConfig, seed: int | None = 0):
        super().__init__()
        self.config = config
        self.layers: nn.ModuleList = nn.ModuleList(
            make_layer(config, layer, seed) for layer in range(config.shape.num_layers)
        )

    # What decoding asks of any hasher (`sparse_decode.select.KeyQueryHasher`), as attributes: others may have them too.

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Layers that stay dense when a model decodes with this hasher."""
        return self.config.dense_layers

    @property
    def adapter(self) -> str | None:
        """A digest of the adapter in the model that it was made for, "" if it had none; None if that does not matter,
        or is not known."""
        return self.config.adapter

    @property
    def layer_shares(self) -> tuple[float, ...]:
        """For each layer the budget that suits it, relative to the mean; empty if not measured."""
        return self.config.layer_shares

    @property
    def head_shares(self) -> tuple[tuple[float, ...], ...]:
        """For each layer the budgets that suit its KV heads, relative to their mean; empty if not measured."""
        return self.config.head_shares

    @property
    def reach(self) -> int | None:
        """The longest context that this hasher was made for, in tokens; None if it does not depend on positions, or is
        not known. One without a record reaches as far as the contexts that it was trained on."""
        trained = self.config.training.get("context")
        return self.config.reach or (trained if type(trained) is int else None)

    def layer(self, index: int) -> LayerHasher:
        """Return one layer's hash functions."""
        return cast(LayerHasher, self.layers[index])

    @torch.no_grad()
    def encode_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Hash keys [B, Hkv, T, D] of one layer to int32 codes [B, Hkv, T, W] (eq. 1)."""
        return self.layer(layer).encode_keys(keys)

    @torch.no_grad()
    def encode_queries(self, layer: int, queries: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """Hash queries [B, Hq, T, D] of one layer to planes [B, Hkv, T, P, W] and the planes' weights (eq. 3, 5)."""
        return self.layer(layer).encode_queries(queries)

    def remainder(self, layer: int) -> Tensor | None:
        """Return a layer's coefficients of eq. 15 and slope of eq. 16, float32 [Hq, 6]; None if they are not fitted."""
        found = self.layer(layer)
        return found.remainder if found.calibrated else None

    def require_match(self, model_config: Any) -> None:
        """Check that this hasher was made for a model of this shape.

        Raises: ValueError naming the first difference (layers, heads, head_dim, RoPE).
        """
        mine, theirs = self.config.shape, ModelShape.of(model_config)
        for name, text in (
            ("num_layers", "layers"),
            ("num_query_heads", "query heads"),
            ("num_kv_heads", "KV heads"),
            ("head_dim", "head_dim"),
            ("rope", "RoPE parameters"),
            ("per_layer", "heads and head_dim by layer"),
        ):
            if (want := getattr(mine, name)) != (got := getattr(theirs, name)):
                raise ValueError(
                    f"this hasher belongs to another model ({self.config.base_model or 'unnamed'}): "
                    f"expected {text} {want}, got {got}; train one for this model with `hashtrain --model`"
                )

    def save_pretrained(self, folder: str | Path, card: str = "") -> None:
        """Write the hasher as a folder; an existing one stays intact until the new one is complete.

        Args: folder: created if missing; card: text of the README; "": an existing one stays.
        """
        folder = Path(folder)
        tensors = {name: t.detach().cpu().contiguous() for name, t in self.state_dict().items()}
        weights = _weights_name(tensors)
        save_tensors(tensors, folder / weights, metadata={"format": "pt"})
        write_text(folder / "config.json", json.dumps({**asdict(self.config), "weights": weights}, indent=2) + "\n")
        if card:  # written after the hasher that it describes
            write_text(folder / "README.md", card)
        for stale in folder.glob("hasher-*.safetensors"):
            if stale.name != weights:
                stale.unlink()

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, revision: str | None = None) -> "Hasher":
        """Read a hasher that `save_pretrained` wrote.

        Args: folder: a folder, or a hub id (`owner/name`) of this revision, if no such folder exists.
        Raises: ValueError with one sentence if the folder is missing, malformed, truncated or of another format.
        """
        if not Path(folder).is_dir() and _HUB_ID.fullmatch(str(folder)):
            folder = _download(str(folder), revision)
        folder = Path(folder)
        config, weights, version = _read_config(folder)
        path = folder / weights
        try:
            with open_tensors(inside(path), _REMEDY) as file:
                _check_header(path, file, config, version)  # before any allocation, in case the config is wrong
                tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        except FileNotFoundError as error:
            raise ValueError(f"{path} is missing; {_REMEDY}") from error
        if weights != _weights_name(tensors):
            raise ValueError(f"{path} is damaged: its content does not match its name; {_REMEDY}")
        if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
            raise ValueError(f"{path} holds non-finite numbers in {broken[0]}; {_REMEDY}")
        _update(folder, tensors, version)
        hasher = cls(config, seed=None)
        try:
            hasher.load_state_dict(tensors)
        except ValueError as error:
            raise ValueError(f"{path} holds invalid values: {error}; {_REMEDY}") from error
        return hasher.eval().requires_grad_(False)


def _download(name: str, revision: str | None) -> Path:
    """Download a hasher's files from the hub, and no other file of the repository."""
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES, revision=revision))
    except (OSError, ValueError) as error:  # includes HfHubHTTPError and its offline counterpart
        lost = "not reached, and not in its cache" if isinstance(error, LocalEntryNotFoundError) else first_line(error)
        raise ValueError(f"no hasher {name}: there is no such folder, and none on the Hub ({lost})") from error


def _check_header(path: Path, file: Any, config: HasherConfig, version: int) -> None:
    """Raise ValueError unless the open file's header has exactly the tensors that the config describes."""

    def refuse(reason: str) -> NoReturn:
        raise ValueError(f"{path} does not match config.json: {reason}; {_REMEDY}")

    names, layers = set(file.keys()), config.shape.num_layers
    if layers > len(names):  # before listing that many shapes
        refuse(f"expected tensors of {layers} layers, got {len(names)} tensors")
    wanted = {f"layers.{n}.{name}": size for n in range(layers) for name, size in shapes(config.at(n)).items()}
    if len(names) != len(wanted):
        refuse(f"expected {len(wanted)} tensors, got {len(names)}")
    for name, size in wanted.items():
        if name.endswith("remainder"):
            size = size[0], TERMS_OF.get(version, size[1])
        part = file.get_slice(name) if name in names else None
        found = None if part is None else (part.get_dtype(), *part.get_shape())
        if found != ("F32", *size):
            refuse(f"tensor {name} expected {('F32', *size)}, got {found}")


def _update(folder: Path, tensors: dict[str, Tensor], version: int) -> None:
    """Give the remainders of a hasher of an older version today's terms; say so if they are unset."""
    remainders = {name: x for name, x in tensors.items() if name.endswith("remainder")}
    if version == 4:
        tensors.update(
            {name: torch.cat([x[:, :4], torch.zeros_like(x[:, :1]), x[:, 4:]], 1) for name, x in remainders.items()}
        )
    elif version == 3:
        if any(x.any() for x in remainders.values()):
            _log.warning(
                "%s is of an older version: it is used without its remainder; train it again to have one", folder
            )
        tensors.update({name: torch.zeros_like(x) for name, x in remainders.items()})


def _weights_name(tensors: dict[str, Tensor]) -> str:
    """Name a weight file after its content, so that config.json can switch to a new one in a single write."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].numpy().tobytes())
    return f"hasher-{sha.hexdigest()[:12]}.safetensors"


class _IsModel(ValueError):
    """A folder is a model in place of a hasher."""


def hashers_in(folder: Path) -> list[str]:
    """Return the names of the hashers that `hashtrain` has stored in a folder."""
    return sorted(file.parent.name for file in folder.glob("*/hasher-*.safetensors"))


def _what_is_there(folder: Path) -> str:
    if folder.is_file():
        return f"that is a file, expected a folder such as {folder.parent}"
    if names := hashers_in(folder):
        return f"it holds hashers; name one, such as {folder / names[0]}"
    return "expected a config.json there; train one with `uv run hashtrain`"


def require_own(folder: Path, base_model: str, shape: ModelShape, adapter: str | None = None) -> None:
    """Raise ValueError if a folder that is about to be written is a model, or a hasher of another model or adapter."""
    try:
        found, *_ = _read_config(folder)
    except _IsModel:
        what = "a model"
    except (ValueError, OSError):
        return  # none, or a damaged one, which may be replaced
    else:
        own = (found.base_model, found.shape) == (base_model, shape)
        if own and (None in (adapter, found.adapter) or found.adapter == adapter):
            return
        what = f"a hasher of another {'adapter' if own else 'model'} ({found.base_model or 'unnamed'})"
    raise ValueError(f"{folder} is {what}, which would be replaced; choose another --out, or remove that folder")


def _read_config(folder: Path) -> tuple[HasherConfig, str, int]:
    """Return a hasher's config, the name of its weights, and the version of its format."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"no hasher at {folder}: {_what_is_there(folder)}")
    if "model_type" in read_json_object(inside(path), _REMEDY, _MAX_CONFIG_BYTES, strict=False):
        raise _IsModel(f"{folder} is a model, expected a hasher: a folder that `hashtrain --model {folder}` makes")
    data = read_json_object(inside(path), _REMEDY, _MAX_CONFIG_BYTES)
    weights = data.pop("weights", None)
    if not isinstance(weights, str) or not _WEIGHTS.fullmatch(weights):
        raise ValueError(f"{path} names no weight file in its own folder, got {weights!r}; {_REMEDY}")
    version = data.get("format_version", FORMAT_VERSION)
    if isinstance(version, int) and version in TERMS_OF:
        data["format_version"] = FORMAT_VERSION
    try:
        return HasherConfig.from_dict(data), weights, version
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
