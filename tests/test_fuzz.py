"""Whatever lies in a file that came from elsewhere: the object that was written comes back, or one sentence.

The law of every test here: the reader returns what the file says, or raises ValueError (a command's settings:
UsageError) with one line that names the file. No other exception, no half of a result, and no memory beyond a limit.
tools/fuzz.py runs the same laws for as long as you like.
"""

import contextlib
import copy
import hashlib
import json
import os
import resource
import sys
from dataclasses import asdict, astuple
from pathlib import Path

import numpy as np
import pytest
import torch
from evals.compare import compare
from evals.page import section_of
from evals.parquet import read_parquet, write_parquet
from evals.result import Result, Row, read_result, rows_to_text
from evals.runner import RunFolder
from hashcore import BitIndex
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.capture import Capture
from hashtrain.checkpoint import load_stored, save_stored
from hashtrain.convert import convert
from hashtrain.hasher import make_layer
from hashtrain.manifest import begin, finish, missing
from hashtrain.settings import with_config
from hashtrain.trainer import TrainConfig, Training
from hashtrain.usage import UsageError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import LlamaConfig

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
LAW = settings(
    deadline=None,
    max_examples=EXAMPLES,
    derandomize="FUZZ_EXAMPLES" not in os.environ,  # a longer run looks elsewhere each time
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
ADDRESS_SPACE, RESIDENT = 1 << 30, 1 << 26  # bytes that one read may add: the second with what libraries set up
SHAPE = ModelShape(1, 2, 1, 32)
NUMBERS = [0, 1, -1, 31, 33, 1 << 20, 1 << 31, (1 << 31) - 1, 1 << 40, 1 << 63, (1 << 64) - 1, 1.5, 1e308]
TEXTS = ["", "..", "../config.json", "/etc/passwd", "a\0b", "\ud800", "x" * 5000, "--help", "layers.0.w", "NaN"]
DEEP = "@deep@", "@digits@", "@huge@", "@twice@"
"""Stand for what `json.dumps` would not write."""


# What is done to files.


@st.composite
def damaged(draw, content: bytes) -> bytes:
    """The bytes with a few changes: bits flipped, pieces cut, doubled, put in, or lengths that lie."""
    data = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.one_of(st.integers(0, len(data)), st.integers(0, min(16, len(data)))))
        match draw(st.sampled_from(["flip", "cut", "truncate", "put", "double", "length", "zeros"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + draw(st.integers(1, 64))]
            case "truncate":
                del data[at:]
            case "put":
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "double":
                data[at:at] = data[at : at + 64]
            case "length":
                data[at : at + 8] = draw(st.sampled_from([x for x in NUMBERS if type(x) is int and x >= 0])).to_bytes(
                    8, "little"
                )
            case "zeros":
                data[at : at + 32] = bytes(len(data[at : at + 32]))
    return bytes(data)


def places(value, path=()):
    """Every place in a JSON value, the whole first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


HOSTILE = st.one_of(
    st.sampled_from([None, True, False, *NUMBERS, *TEXTS, *DEEP, float("nan"), float("inf"), [], {}, [[]], {"a": {}}]),
    st.sampled_from(range(-10, 11)),
    st.sampled_from(["a", "é", "\U0001f40d", " ", "\n", "lsh", "0"]),
)


def hostile():
    """A value that is not expected, and nobody else's."""
    return HOSTILE.map(copy.deepcopy)


@st.composite
def altered(draw, value) -> str:
    """The JSON text of a value with a few places changed, taken out or added."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 2))):
        *path, last = draw(st.sampled_from([place for place in places(value) if place] or [("new",)]))
        holder = value
        for key in path:
            holder = holder[key]
        match draw(st.sampled_from(["set", "set", "remove", "add"])):
            case "set":
                holder[last] = draw(hostile())
            case "remove":
                holder.pop(last, None) if isinstance(holder, dict) else holder.pop(last)
            case "add":
                holder.update(new=draw(hostile())) if isinstance(holder, dict) else holder.append(draw(hostile()))
    text = json.dumps(draw(st.sampled_from([value] * 9 + [[value]])))
    forms = ("[" * 5000 + "]" * 5000, "9" * 5000, "1e999", '{"a": 1, "a": 2}')
    for mark, form in zip(DEEP, forms, strict=True):
        text = text.replace(json.dumps(mark), form)
    return text


# What must hold.


@contextlib.contextmanager
def little_memory():
    """Refuse the process more address space than it has and a bit, and measure what becomes resident."""
    if sys.platform != "linux":
        yield
        return
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    start = peak()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert peak() - start < RESIDENT


def peak() -> int:
    """The largest resident size since it was last cleared, in bytes."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def found(read, name: str, refused: type[Exception] = ValueError):
    """What `read()` returns, or None if it refuses in one line with the file's name."""
    with little_memory():
        try:
            return read()
        except refused as error:
            kind, text = type(error), str(error)
    assert kind is refused
    assert name in text
    assert "\n" not in text
    assert len(text) > len(name) + 10
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


# Hashers.


@pytest.fixture(scope="module")
def hasher(folder):
    """A small hasher's folder, and its state."""
    made = Hasher(HasherConfig("planes", SHAPE, bits=32, hidden=4, base_model="tiny"), seed=1)
    made.save_pretrained(folder / "hasher", card="# card")
    config = json.loads((folder / "hasher" / "config.json").read_text())
    return made, config, (folder / "hasher" / config["weights"]).read_bytes()


def laid(folder: Path, config: str | bytes, name: str, weights: bytes) -> Path:
    place = folder / "laid"
    place.mkdir(exist_ok=True)
    (place / "config.json").write_bytes(config.encode("utf-8", "surrogatepass") if isinstance(config, str) else config)
    (place / name).write_bytes(weights)
    return place


def same_state(read: Hasher, made: Hasher) -> bool:
    mine = made.state_dict()
    return read.state_dict().keys() == mine.keys() and all(
        torch.equal(x, mine[n]) for n, x in read.state_dict().items()
    )


@LAW
@given(st.data())
def test_damaged_weights_are_refused_or_harmless(folder, hasher, data):
    made, config, weights = hasher
    place = laid(folder, json.dumps(config), config["weights"], data.draw(damaged(weights)))
    read = found(lambda: Hasher.from_pretrained(place), "laid")
    assert read is None or (same_state(read, made) and read.config == made.config)


@LAW
@given(st.data())
def test_a_header_of_weights_that_lies_is_refused_or_harmless(folder, hasher, data):
    made, config, weights = hasher
    length = int.from_bytes(weights[:8], "little")
    header = data.draw(altered(json.loads(weights[8 : 8 + length]))).encode("utf-8", "surrogatepass")
    forged = len(header).to_bytes(8, "little") + header + weights[8 + length :]
    place = laid(folder, json.dumps(config), config["weights"], forged)
    read = found(lambda: Hasher.from_pretrained(place), "laid")
    assert read is None or same_state(read, made)


@LAW
@given(st.data())
def test_a_config_that_lies_is_refused_or_meant(folder, hasher, data):
    made, config, weights = hasher
    text = data.draw(st.one_of(altered(config), damaged(json.dumps(config).encode())))
    place = laid(folder, text, config["weights"], weights)
    read = found(lambda: Hasher.from_pretrained(place), "laid")
    if read is not None:
        said = json.loads((place / "config.json").read_text())
        again = json.loads(json.dumps({**asdict(read.config), "weights": said["weights"]}))
        if said.get("planes") == 0:
            del said["planes"]  # which asks for the variant's own
        said["shape"] = again["shape"] | said["shape"]  # what is left out has its default
        assert again == again | said, "the hasher is not what its config says"
        assert same_state(read, made)


@pytest.mark.parametrize("name", ["config.json", "weights", "README.md"])
def test_a_hashers_link_out_of_its_folder_is_refused(tmp_path, hasher, name):
    _, config, weights = hasher
    place = laid(tmp_path, json.dumps(config), config["weights"], weights)
    (place / "README.md").write_text("card")
    named = place / (config["weights"] if name == "weights" else name)
    named.rename(tmp_path / "secret")
    named.symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="is a link to a place outside its folder"):
        Hasher.from_pretrained(place)


def test_the_links_of_the_hubs_cache_are_followed(tmp_path, hasher):
    made, config, weights = hasher
    (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
    place = laid(tmp_path / "models--a--b" / "snapshots", json.dumps(config), config["weights"], weights)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for number, path in enumerate(sorted(place.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(blobs / str(number))
    assert same_state(Hasher.from_pretrained(place), made)


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path, hasher):
    _, config, weights = hasher
    place = laid(tmp_path, json.dumps(config), config["weights"], weights)
    (place / config["weights"]).unlink()
    os.mkfifo(place / config["weights"])
    with pytest.raises(ValueError, match="is no plain file"):
        Hasher.from_pretrained(place)


def test_a_hasher_of_numbers_that_are_not_finite_is_refused(tmp_path):
    made = Hasher(HasherConfig("lsh", SHAPE, bits=32), seed=1)
    made.layer(0).remainder[0, 0] = float("nan")
    made.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not finite, in layers\.0\.remainder"):
        Hasher.from_pretrained(tmp_path)


def test_a_header_of_many_megabytes_is_refused_unread(tmp_path, hasher):
    _, config, _ = hasher
    place = laid(tmp_path, json.dumps(config), config["weights"], (90 << 20).to_bytes(8, "little"))
    os.truncate(place / config["weights"], 91 << 20)  # a hole in the file: no disk
    assert found(lambda: Hasher.from_pretrained(place), "its header has 94371840 bytes, expected at most") is None


# The index.


@pytest.fixture(scope="module")
def index(folder):
    made = BitIndex.from_vectors(np.random.default_rng(0).normal(size=(9, 32)).astype(np.float32), keep="float16")
    made.save(folder / "index")
    return made, (folder / "index").read_bytes()


@LAW
@given(st.data(), st.booleans())
def test_a_damaged_index_is_refused_or_harmless(folder, index, data, mapped):
    made, content = index
    path = folder / "damaged.index"
    path.write_bytes(data.draw(damaged(content)))
    read = found(lambda: BitIndex.load(path, mmap=mapped), path.name)
    assert read is None or (read.codes.tolist(), read.ids.tolist()) == (made.codes.tolist(), made.ids.tolist())


# Captures.


WANTED = {"format": 1, "contexts": 2}


@pytest.fixture
def captured(folder):
    """A whole capture of two contexts."""
    stored = Capture(folder / "capture", 2)
    begin(stored, WANTED)
    generator = torch.Generator().manual_seed(0)
    for number in range(2):
        tensors = {
            f"{name}.0": torch.randn(1, heads, 4, 8, generator=generator) for name, heads in (("q", 2), ("k", 1))
        }
        save_file(tensors, stored.file(number), metadata={"scaling.0": "0.5"})
        record = {"bytes": stored.file(number).stat().st_size}
        record["sha256"] = hashlib.sha256(stored.file(number).read_bytes()).hexdigest()
        stored.file(number).with_suffix(".json").write_text(json.dumps(record))
    finish(stored)
    assert missing(stored, WANTED) == []
    return stored


@settings(LAW, suppress_health_check=[HealthCheck.function_scoped_fixture, *LAW.suppress_health_check])
@given(st.data())
def test_a_manifest_that_lies_is_not_believed(captured, data):
    path = captured.folder / "manifest.json"
    whole = json.loads(path.read_text())
    text = data.draw(st.one_of(altered(whole), damaged(path.read_bytes())))
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    with little_memory():
        lacking = missing(captured, WANTED)
        begin(captured, WANTED)
    assert set(lacking) <= {0, 1}
    path.write_text(json.dumps(whole))
    begin(captured, WANTED)


@settings(LAW, suppress_health_check=[HealthCheck.function_scoped_fixture, *LAW.suppress_health_check])
@given(st.data())
def test_a_damaged_shard_is_missed_and_never_read_by_halves(captured, data):
    content = captured.file(0).read_bytes()
    changed = data.draw(damaged(content))
    captured.file(0).write_bytes(changed)
    assert missing(captured, WANTED) == [0] * (changed != content)
    read = found(lambda: captured.read(0, 0), "00000.safetensors")
    if read is not None:
        q, k, scaling = read
        assert (q.ndim, k.ndim, q.shape[-1]) == (4, 4, k.shape[-1])
        assert scaling - scaling == 0
    captured.file(0).write_bytes(content)


# Checkpoints.


TRAINING = TrainConfig(steps=20)


@pytest.fixture(scope="module")
def checkpoint(folder):
    """The tensors and state of a training, and its file's bytes."""
    training = Training(
        make_layer(HasherConfig("planes", SHAPE, bits=32, hidden=4), 0), 0, Capture(folder, 1), TRAINING
    )
    loss = sum(parameter.square().sum() for parameter in training.hasher.parameters())
    loss.backward()
    training.optimizer.step()
    training.losses = [1.0]
    save_stored(folder / "checkpoint", *training._state())
    return training._state(), (folder / "checkpoint").read_bytes()


@LAW
@given(st.data())
def test_no_damage_to_a_checkpoint_goes_unseen(folder, checkpoint, data):
    (tensors, state), content = checkpoint
    path = folder / "damaged.checkpoint"
    path.write_bytes(data.draw(damaged(content)))
    read = found(lambda: load_stored(path), path.name)
    assert read is None or (
        read[1] == state and all(torch.equal(read[0][name], tensor) for name, tensor in tensors.items())
    )


class Sealed:
    """A checkpoint whose maker knows the format, and lies."""

    path = Path("sealed.checkpoint")

    def __init__(self, tensors, state):
        self.load = lambda: (tensors, state)


@LAW
@given(st.data())
def test_a_checkpoint_of_something_else_changes_nothing(folder, checkpoint, data):
    (tensors, state), _ = checkpoint
    tensors, state = dict(tensors), dict(state)
    for _ in range(data.draw(st.integers(1, 2))):
        if data.draw(st.integers(0, 3)) == 0:
            state[data.draw(st.sampled_from(sorted(state)))] = data.draw(hostile())
            continue
        name = data.draw(st.sampled_from(sorted(tensors)))
        strange = [torch.zeros(0), torch.zeros(3, 2), torch.tensor(1), torch.zeros(5056, dtype=torch.uint8), None]
        chosen = data.draw(st.sampled_from(strange))
        if chosen is None:
            del tensors[name]
        else:
            tensors[data.draw(st.sampled_from([name, f"{name}.more", "optimizer.x", "optimizer.7.step"]))] = chosen
    layer = make_layer(HasherConfig("planes", SHAPE, bits=32, hidden=4), 0, seed=9)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    read = found(lambda: Training(layer, 0, Capture(folder, 1), TRAINING, Sealed(tensors, state)), "sealed.checkpoint")
    if read is None:
        assert all(torch.equal(before[name], tensor) for name, tensor in layer.state_dict().items())
    else:
        assert all(torch.equal(tensors[f"hasher.{name}"], tensor) for name, tensor in layer.state_dict().items())


# Published lists.


MODEL = LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=32)


@pytest.fixture(scope="module")
def published(folder):
    generator = torch.Generator().manual_seed(0)
    sizes = [(1, 1, 32, 32), (1, 1, 1, 32)] * 2
    torch.save([torch.randn(size, generator=generator).bfloat16() for size in sizes], folder / "whole.pth")
    whole = convert(folder / "whole.pth", MODEL, folder / "converted")
    return whole, (folder / "whole.pth").read_bytes()


@LAW
@given(st.data())
def test_a_damaged_published_file_is_refused_or_harmless(folder, published, data):
    whole, content = published
    (folder / "damaged.pth").write_bytes(data.draw(damaged(content)))
    read = found(lambda: convert(folder / "damaged.pth", MODEL, folder / "out.pth"), "damaged.pth")
    assert read is None or same_state(read, whole)


# Runs of evals.


ROW = Row("needle", "lsh", "lsh", 64, 0.1, "visible", 0.1, 1, 0, 0, "decode", "recall", 0.5, 0.4, 0.6, 2, 0, "1.0")
CONFIG = {"task": "needle", "model": "demo", "dense_layers": 1, "budgets": [0.1], "methods": ["lsh"], "seed": 0}
CELL = {"method": "lsh", "budget": 0.1, "kind": "word", "rouge_l": 0.5, "recall": 1.0, "substring": 1.0, "log_prob": -1}


@pytest.fixture(scope="module")
def run(folder):
    """The JSON values of a finished run's files."""
    rows = [ROW, Row(*astuple(ROW)[:1], "recent", "recent", None, *astuple(ROW)[4:])]
    files = {"config": CONFIG, "environment": {"python": "3.12"}, "rows": json.loads(rows_to_text(rows))}
    files |= {f"samples/000{i}": {"document": f"{i}", "tokens": "abc", "cells": [CELL, CELL]} for i in range(2)}
    for name in ("run", "whole-run"):
        (folder / name / "samples").mkdir(parents=True)
        for file, value in files.items():
            (folder / name / f"{file}.json").write_text(json.dumps(value))
    return files


@LAW
@given(st.data())
def test_a_run_that_lies_is_refused_or_shown_as_it_is(folder, run, data):
    name = data.draw(st.sampled_from(sorted(run)))
    path = folder / "run" / f"{name}.json"
    text = data.draw(st.one_of(altered(run[name]), damaged(json.dumps(run[name]).encode())))
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    try:
        read = found(lambda: read_result(folder / "run"), str(folder / "run"))
        if read is not None:
            assert isinstance(read, Result)
            assert all(row.value - row.value == 0 for row in read.rows)
            found(lambda: section_of(folder / "run"), str(folder / "run"))
            everything = (None, None)
            found(lambda: compare(folder / "run", folder / "whole-run", everything, everything), "")
    finally:
        path.write_text(json.dumps(run[name]))


@LAW
@given(st.data())
def test_a_stored_sample_that_lies_is_refused_or_meant(folder, run, data):
    class Document:
        name, digest = "0", "abc"

    held = RunFolder(folder / "whole-run", CONFIG)
    path = folder / "whole-run" / "samples" / "0000.json"
    whole = run["samples/0000"]
    text = data.draw(st.one_of(altered(whole), damaged(json.dumps(whole).encode())))
    path.write_bytes(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text)
    try:
        found(lambda: held.sample(0, Document(), lambda sample: sample["cells"], dict), "0000.json")
    finally:
        path.write_text(json.dumps(whole))


@LAW
@given(st.data())
def test_a_damaged_table_is_refused_or_harmless(folder, data):
    rows = [ROW] * 3
    write_parquet(folder / "rows.parquet", rows)
    path = folder / "damaged.parquet"
    path.write_bytes(data.draw(damaged((folder / "rows.parquet").read_bytes())))
    read = found(lambda: read_parquet(path), path.name)
    assert read is None or read == rows


def test_a_figure_that_links_to_another_place_is_not_shown(folder, run, tmp_path):
    (tmp_path / "secret").write_text("secret")
    (folder / "run" / "figure.png").symlink_to(tmp_path / "secret")
    try:
        with pytest.raises(ValueError, match="is a link to a place outside its folder"):
            section_of(folder / "run")
    finally:
        (folder / "run" / "figure.png").unlink()


# Settings.


TOML = b'bits = 64\nout = "runs/x"\nonly = ["planes", "lsh"]\nlearning_rate = 0.01\nstream = true\n'


@LAW
@given(st.one_of(damaged(TOML), st.sampled_from([b"a = " + b"[" * 9000, b"bits = " + b"9" * 5000, b'out = "--help"'])))
def test_settings_that_cannot_be_are_refused_or_meant(folder, content):
    path = folder / "damaged.toml"
    path.write_bytes(content)
    words = found(lambda: with_config(["train", "--config", str(path)]), "damaged.toml", UsageError)
    assert words is None or words[0] == "train"
    assert words is None or "--help" not in words
