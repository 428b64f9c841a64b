"""Find the files that a call crosses, for tools/code_size.py.

    python tools/code_paths.py path/to/checkout

The last line printed is JSON: by call, the files of the packages, or an error. A call runs a few times before it is
traced, as what it imports, compiles and plans once is not on its way. Then a file counts if a Python function of it is
called. Of a search, the files of hashcore count; of a decode step, those of sparse_decode; of training, those of
hashtrain. No GPU is needed: on CUDA, tensors are fake ones, and launches go to a driver that does nothing. Of a
training step the files count that have a function waiting for the first loss: the way from the command to it.
"""

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from idle_driver import idle_driver

ROOT = Path(sys.argv[1] if __name__ == "__main__" else __file__).resolve()
PLANES, KEPT = (1, 2, 4), 5


def shown(frame: FrameType) -> str:
    """Return the file of a frame as package/file, or an empty string if it is none of the packages'."""
    return frame.f_code.co_filename.partition("/packages/")[2].partition("/src/")[2]


def of(package: str, crossed: Iterable[str]) -> list[str]:
    """Return the files of a package, in order."""
    return sorted({file for file in crossed if file.startswith(f"{package}/")})


def repeated(call: Callable[[], object], package: str) -> list[str]:
    """Return the files of a package whose Python functions the third call crosses."""
    crossed: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            crossed.add(shown(frame))

    call()
    call()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return of(package, crossed)


def codes() -> tuple[Any, Any]:
    """Return three planes of a query, and 200 keys."""
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.integers(0, 9, (3, 4), np.int32), rng.integers(0, 9, (200, 4), np.int32)


def host_search(tensors: bool) -> list[str]:
    """Search numpy arrays, or tensors in host memory."""
    import hashcore
    import torch

    planes, keys = map(torch.from_numpy, codes()) if tensors else codes()
    return repeated(lambda: hashcore.search(planes, keys, KEPT, PLANES), "hashcore")


def cuda_search() -> list[str]:
    """Search tensors on CUDA: to the operator with fake tensors, and from there to the driver with others."""
    import hashcore
    import torch
    from hashcore.cuda import operands, tensor_search
    from torch._subclasses.fake_tensor import FakeTensorMode

    planes, keys = (torch.from_numpy(x)[None] for x in codes())
    out = torch.zeros(1, 1, KEPT, dtype=torch.int32), torch.zeros(1, 1, KEPT, dtype=torch.int64)

    def below() -> None:
        tensor_search.search(planes[None], keys[None], KEPT, PLANES, operands.Bounds(keys.shape[-2], 0, 0, 0), *out)

    with FakeTensorMode():
        given = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in (planes, keys)]
        above = repeated(lambda: hashcore.search(given[0], given[1], KEPT, PLANES), "hashcore")
    launched: list[str] = []
    with idle_driver(lambda: launched.append("kernel")):
        found = of("hashcore", above + repeated(below, "hashcore"))
    if not launched:
        raise RuntimeError("expected launches, got none")
    return found


def decode_step() -> list[str]:
    """Decode a token on the CPU, with a transform hasher and the remainder."""
    import torch
    from hashtrain import ModelShape
    from sparse_decode import Budget, attach
    from transformers import DynamicCache

    doubles = helpers("sparse-decode", "sparse_decode_doubles")
    make = helpers("sparse-decode", "test_fused").make_hasher
    model, (ids, _) = doubles.tiny_model(), doubles.prompts((40,))
    with torch.no_grad(), attach(model, make(shape=ModelShape.of(model.config)), Budget(0.2, min_tokens=4)):
        cache = DynamicCache(config=model.config)
        model(ids[:, :37], past_key_values=cache)
        return repeated(lambda: model(ids[:, :1], past_key_values=cache), "sparse_decode")


def cuda_decode_step() -> list[str]:
    """Decode a token on CUDA, with a transform hasher and the remainder."""
    import torch
    from hashtrain import Hasher, HasherConfig, ModelShape
    from sparse_decode import attach
    from sparse_decode.select import HashSelector

    fake = helpers("sparse-decode", "fake_gpu")
    config = fake.config_of("llama")
    selector = HashSelector(Hasher(HasherConfig("transform", ModelShape.of(config)), 0))
    with fake.fake_gpu(), torch.inference_mode():
        model, cache = fake.model_of(config), fake.cache_of(config, "plain")
        ids = torch.zeros(fake.ROWS, fake.PROMPT, dtype=torch.long, device="cuda")
        model(ids, past_key_values=cache)
        with attach(model, selector, fake.TENTH), fake.told(fake.PROMPT + 1):
            return repeated(lambda: model(ids[:, :1], past_key_values=cache), "sparse_decode")


class Reached(Exception):
    """The first loss was asked for."""


def training_step() -> list[str]:
    """Train a tiny model's layers in this process until the first loss, by the command."""
    from hashtrain import cli
    from hashtrain.training import trainer
    from transformers import LlamaConfig

    runs, found = helpers("hashtrain", "hashtrain_runs"), list[str]()
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4}
    sizes["num_key_value_heads"] = 2
    config = LlamaConfig(vocab_size=4096, num_hidden_layers=2, head_dim=32, max_position_embeddings=1024, **sizes)

    def loss(*_: object) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found.append(shown(frame))
            frame = frame.f_back
        raise Reached

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(trainer, "ranking_loss", loss):
        runs.model_and_text(Path(folder), config, 2000)
        try:
            cli.main(runs.command(Path(folder), Path(folder) / "run", "--only", "planes"))
        except Reached:
            return of("hashtrain", [*found, "hashtrain/training/loss.py"])
    raise RuntimeError("expected a loss, got none: it is not made in this process")


def helpers(package: str, name: str) -> Any:
    """Import what a package's tests share."""
    folder = str(ROOT / "packages" / package / "tests")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


WAYS: dict[str, Callable[[], list[str]]] = {
    "a search of numpy arrays": lambda: host_search(False),
    "a search of CPU tensors": lambda: host_search(True),
    "a search on CUDA": cuda_search,
    "a training step": training_step,
    "a decode step on the CPU": decode_step,
    "a decode step on CUDA": cuda_decode_step,
}


def found(way: Callable[[], list[str]]) -> list[str] | str:
    """Return the files of a way, or what prevented tracing it: the code of an earlier commit may lack what is asked."""
    try:
        return way()
    except Exception as error:  # whatever it is, it is shown in place of the count
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    sys.path[:0] = [str(folder) for folder in ROOT.glob("packages/*/src")]  # before those that are installed
    result = {name: found(way) for name, way in WAYS.items()}
    sys.stdout.flush()
    print("\n" + json.dumps(result))
