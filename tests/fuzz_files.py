"""Damaged and lying files of untrusted origin: hashers, adapters, published lists, captures, checkpoints, runs,
texts, and a benchmark's lines.

A case damages one file of one kind: the law stands in fuzz_damage.py.
"""

import functools
import json
from dataclasses import asdict, astuple

import torch
from evals.harness.lines import read_lines
from evals.machine import environment
from evals.results import Row, read_result, rows_to_text
from evals.runner import RunFolder
from fuzz_damage import altered, damaged, folder, found, one_of
from fuzz_places import somewhere
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.adapters import base_of
from hashtrain.convert import convert
from hashtrain.data.capture import Capture
from hashtrain.data.texts import read_texts
from hashtrain.hasher import make_layer
from hashtrain.training.checkpoint import load_stored, save_stored
from hashtrain.training.train_config import TrainConfig
from hashtrain.training.trainer import Training
from safetensors.torch import save_file
from transformers import LlamaConfig

SHAPE = ModelShape(1, 2, 1, 32)


def same_state(read, made) -> bool:
    mine = made.state_dict()
    return read.state_dict().keys() == mine.keys() and all(
        torch.equal(x, mine[name]) for name, x in read.state_dict().items()
    )


# ---- Hashers and published lists -----------------------------------------------------------------------------------


@functools.cache
def hasher():
    """A small hasher, its config and the bytes of its weights."""
    made = Hasher(HasherConfig("planes", SHAPE, bits=32, hidden=4, base_model="tiny"), seed=1)
    made.save_pretrained(folder() / "hasher", card="# card")
    config = json.loads((folder() / "hasher" / "config.json").read_text())
    return made, config, (folder() / "hasher" / config["weights"]).read_bytes()


def read_hasher(config: bytes, weights: bytes):
    place = folder() / "laid"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_bytes(config)
    (place / hasher()[1]["weights"]).write_bytes(weights)
    return found(lambda: Hasher.from_pretrained(place), "laid")


def hasher_weights(rng) -> None:
    """Damaged weights, or a header that lies above whole ones."""
    made, config, weights = hasher()
    length = int.from_bytes(weights[:8], "little")
    header = altered(rng, json.loads(weights[8 : 8 + length]))
    lying = len(header).to_bytes(8, "little") + header + weights[8 + length :]
    read = read_hasher(json.dumps(config).encode(), damaged(rng, weights) if rng.random() < 0.5 else lying)
    assert read is None or (same_state(read, made) and read.config == made.config)


def hasher_config(rng) -> None:
    made, config, weights = hasher()
    read = read_hasher(altered(rng, config), weights)
    if read is not None:
        said = json.loads((folder() / "laid" / "config.json").read_text())
        again = json.loads(json.dumps({**asdict(read.config), "weights": said["weights"]}))
        if said.get("planes") == 0:
            del said["planes"]  # which asks for the variant's own
        said["shape"] = again["shape"] | said["shape"]  # what is left out has its default
        assert again == again | said, "the hasher is not what its config says"
        assert same_state(read, made)


MODEL = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=32)


@functools.cache
def published():
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 1, 32, 32), (1, 1, 1, 32)] * 2
    torch.save([torch.randn(size, generator=generator).bfloat16() for size in sizes], folder() / "whole.pth")
    return convert(folder() / "whole.pth", MODEL, folder() / "converted"), (folder() / "whole.pth").read_bytes()


def published_list(rng) -> None:
    whole, content = published()
    (folder() / "damaged.pth").write_bytes(damaged(rng, content))
    read = found(lambda: convert(folder() / "damaged.pth", MODEL, folder() / "out.pth"), "damaged.pth")
    assert read is None or same_state(read, whole)


# ---- Captures and checkpoints --------------------------------------------------------------------------------------


@functools.cache
def captured() -> Capture:
    """A capture of two contexts."""
    stored = Capture(folder() / "capture", 2)
    stored.folder.mkdir(exist_ok=True)  # by a fork
    for number in range(2):
        sizes = {"q.0": (1, 2, 4, 8), "k.0": (1, 1, 4, 8)}
        save_file({k: torch.randn(v) for k, v in sizes.items()}, stored.file(number), metadata={"scaling.0": "0.5"})
    return stored


def shard(rng) -> None:
    """A damaged shard is never read by halves."""
    content = captured().file(0).read_bytes()
    captured().file(0).write_bytes(damaged(rng, content, captured().file(1).read_bytes()))
    read = found(lambda: captured().read(0, 0), "00000.safetensors")
    if read is not None:
        q, k, scaling = read
        assert (q.ndim, k.ndim, q.shape[-1]) == (4, 4, k.shape[-1])
        assert scaling - scaling == 0
    captured().file(0).write_bytes(content)


TRAINING = TrainConfig(steps=20)
PLANES = HasherConfig("planes", SHAPE, bits=32, hidden=4)


@functools.cache
def trained():
    """The tensors and the state of a training, and its file's bytes."""
    training = Training(make_layer(PLANES, 0), 0, Capture(folder(), 1), TRAINING)
    sum(parameter.square().sum() for parameter in training.hasher.parameters()).backward()
    training.optimizer.step()
    training.losses = [1.0]
    save_stored(folder() / "checkpoint", *training._state())
    return *training._state(), (folder() / "checkpoint").read_bytes()


def checkpoint(rng) -> None:
    tensors, state, content = trained()
    path = folder() / "damaged.checkpoint"
    path.write_bytes(damaged(rng, content))
    read = found(lambda: load_stored(path), path.name)
    assert read is None or (
        read[1] == state and all(torch.equal(read[0][name], tensor) for name, tensor in tensors.items())
    )


# ---- Runs of evals and settings ------------------------------------------------------------------------------------

ROW = Row("needle", "lsh", "lsh", 64, 0.1, "visible", 0.1, 1, 0, 0, "decode", "recall", 0.5, 0.4, 0.6, 2, 0, "1.0")
CONFIG = {"task": "needle", "model": "demo", "dense_layers": 1, "budgets": [0.1], "methods": ["lsh"], "seed": 0}
CELL = {"method": "lsh", "budget": 0.1, "kind": "word", "rouge_l": 0.5, "recall": 1.0, "substring": 1.0, "log_prob": -1}


@functools.cache
def run_files():
    """The JSON values of a finished run's files."""
    rows = [ROW, Row(*astuple(ROW)[:1], "recent", "recent", None, *astuple(ROW)[4:])]
    files = {"config": CONFIG, "environment": environment(), "rows": json.loads(rows_to_text(rows))}
    files |= {f"samples/000{i}": {"document": f"{i}", "tokens": "abc", "cells": [CELL, CELL]} for i in range(2)}
    (folder() / "run" / "samples").mkdir(parents=True, exist_ok=True)
    for file, value in files.items():
        (folder() / "run" / f"{file}.json").write_text(json.dumps(value))
    return files


class Document:
    name, digest = "0", "abc"


def stored_run(rng) -> None:
    """A file of a run lies: what is read is whole, and a sample is of this document."""
    name, place = one_of(rng, sorted(run_files())), folder() / "run"
    path = place / f"{name}.json"
    path.write_bytes(altered(rng, run_files()[name]))

    found(lambda: read_result(place), str(place))
    if name == "samples/0000":
        held = RunFolder(place, CONFIG)
        found(lambda: held.sample(0, Document(), dict), "0000.json")
    path.write_text(json.dumps(run_files()[name]))


@functools.cache
def imported() -> None:
    """Read one whole file each, so that what readers import at first use is not measured as memory of a read."""
    for path, content, read in (
        (folder() / "text.jsonl", '{"text": "a"}', lambda path: read_texts([path])),
        (folder() / "lines.jsonl", '{"a": "a"}', lambda path: read_lines([path], ["a"], "")),
    ):
        path.write_text(content)
        read(path)


# ---- Adapters, texts, a benchmark's lines --------------------------------------------------------------------------

ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "owner/name", "r": 4, "rank_pattern": {"q_proj": 2}}


def adapter(rng) -> None:
    place = folder() / "adapter"
    place.mkdir(exist_ok=True)
    (place / "adapter_model.safetensors").touch()
    (place / "adapter_config.json").write_bytes(altered(rng, ADAPTER))
    read = found(lambda: base_of(str(place)), "adapter")
    assert read is None or isinstance(read, str)


ROWS = [{"text": "first words", "id": 1}, {"text": "second, \u00e9\u2028", "id": 2}]


def texts(rng) -> None:
    """A damaged text, plain or in JSON lines: what is read has words."""
    imported()
    path = folder() / one_of(rng, ["text.txt", "text.jsonl"])
    lines = [altered(rng, row) if rng.random() < 0.5 else json.dumps(row).encode() for row in ROWS]
    path.write_bytes(damaged(rng, b"Some words.\n" * 9) if path.suffix == ".txt" else b"\n".join(lines))
    read = found(lambda: read_texts([path]), path.name)
    assert read is None or all(document.text.strip() for document in read)


LINE = {"input": "Who?", "context": "Ann came.", "answers": ["Ann", "Anne"], "length": 2, "all_classes": None}


def benchmark_lines(rng) -> None:
    """Damaged lines of LongBench or RULER: each that is read has a context and answers."""
    imported()
    name, path = one_of(rng, ["answers", "outputs"]), folder() / "lines.jsonl"
    lines = [json.dumps({**LINE, name: LINE["answers"]}).encode() for _ in range(3)]
    lines[int(rng.integers(3))] = altered(rng, {**LINE, name: LINE["answers"]})
    path.write_bytes(b"\n".join(lines))
    read = found(lambda: read_lines([path], {"context", "question", name}, name), path.name)
    if read is not None:
        assert len(read) == sum(bool(line.strip()) for line in path.read_bytes().decode().split("\n"))
        assert all(row["context"].strip() and all(one.strip() for one in row[name]) and row[name] for row in read)


KINDS = (
    *(hasher_weights, hasher_config, published_list, shard),
    *(checkpoint, stored_run, adapter, texts, benchmark_lines),
)


@somewhere
def case(rng) -> int:
    """Damage one file; return 1."""
    one_of(rng, KINDS)(rng)
    return 1
