"""The task that compares codes of 16 bytes: what it finds, stores and refuses."""

import functools
import json

import numpy as np
import pytest
import torch
from evals import setup
from evals.base_commands import ALWAYS
from evals.codes.base import BYTES
from evals.codes.fit import EXACT, fit
from evals.commands import CodesCommand
from evals.tasks import codes
from evals.tasks.codes import ADDED, BY_HEAD, Cell, measure, worst
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.usage import UsageError
from rich.console import Console

QUIET = Console(quiet=True)
POSITIONS = torch.tensor([40, 64, 100, 127])


@pytest.fixture(scope="module")
def hashers(made, tmp_path_factory):
    """Hashers of 128 bits for the tiny model, and a text to fit on."""
    folder = tmp_path_factory.mktemp("hashers")
    (folder / "text").mkdir()
    for number in range(2):
        (folder / "text" / f"{number}.txt").write_text(" ".join(f"while {n * n + number}:" for n in range(200)))
    shape = Hasher.from_pretrained(made.hashers / "lsh").config.shape
    for name in ("lsh", "transform"):
        Hasher(HasherConfig(name, shape, bits=128, hidden=16), 0).save_pretrained(folder / name)
    return folder


@pytest.fixture
def codes_command(command, hashers):
    more = {"methods": ("lsh", "transform"), "codes": ("pq-32x4", "turboquant"), "hashers": hashers, "rows": 8}
    more["training_text"] = (hashers / "text",)
    more |= {"training_contexts": 2, "training_keys": 100, "documents": 2}
    return lambda **settings: command(CodesCommand, **more | settings)


def test_exact_keys_find_everything_by_head_and_codes_less(loaded, hashers):
    own = {name: Hasher.from_pretrained(hashers / name) for name in ("lsh", "transform")}
    found = fit(loaded.model, [loaded.ids.flip(0)], 100, ("pq-32x4", "itq", "rabitq"), own, 0)
    assert list(found) == [EXACT, "pq-32x4", "itq", "rabitq", "lsh", "transform"]
    cells = measure(loaded.model, loaded.ids, POSITIONS, found, (0.1, 1.0), ALWAYS)
    assert len(cells) == 6 * 2 * 2
    for cell, values in cells.items():
        whole = cell.budget == 1.0 or (cell.method, cell.where) == (EXACT, BY_HEAD)
        assert (np.array(values["iou"]) > 0.999).all() == whole, cell
        assert (np.array(values["mass"]) > 0.999).all() == (cell.budget == 1.0), cell  # as 5 tokens are always read
        assert values["density"] == 1 if cell.budget == 1.0 else values["density"] < 0.11
    best = np.array(cells[Cell(EXACT, 0.1, BY_HEAD)]["mass"])
    assert all((np.array(values["mass"]) <= best + 1e-6).all() for cell, values in cells.items() if cell.budget < 1)
    added = cells[Cell(EXACT, 0.1, ADDED)]
    assert 0.3 < np.mean(added["iou"]) < 1


def test_the_deployed_way_agrees_with_the_overlap_task(codes_command, loaded, hashers):
    from evals.methods import load_methods
    from evals.tasks import iou

    methods = load_methods(("lsh", "transform"), hashers, loaded.model.config)
    expected = iou.measure(loaded.model, loaded.ids, POSITIONS, methods, (0.1,), ALWAYS, ("kv_head",))
    own = codes.hashers_of(methods)
    found = measure(
        loaded.model, loaded.ids, POSITIONS, fit(loaded.model, [loaded.ids], 50, (), own, 0), (0.1,), ALWAYS
    )
    for name in own:
        for metric in codes.METRICS:
            assert found[Cell(name, 0.1, ADDED)][metric] == expected[iou.Cell(name, 0.1, "kv_head")][metric]


def test_a_run_stores_each_layer_the_worst_head_and_paired_differences(codes_command):
    command = codes_command()
    result = codes.run(command, QUIET)
    samples = [json.loads((command.out / "samples" / f"{i:04d}.json").read_text()) for i in range(2)]
    at = {"method": "turboquant", "where": BY_HEAD, "against": None}
    cells = [next(c for c in s["cells"] if (c["method"], c["where"]) == ("turboquant", BY_HEAD)) for s in samples]
    low = np.array([cell["low"] for cell in cells])  # [documents, layers, heads]
    assert result.one(metric="worst", layer=2, **at).value == pytest.approx(low[:, 2].mean(0).min())
    assert result.one(metric="worst", layer=None, **at).value == pytest.approx(low[:, 1:].mean(0).min())  # 0 is dense
    iou = np.array([cell["iou"] for cell in cells])
    assert result.one(metric="iou", layer=1, **at).value == pytest.approx(iou[:, 1].mean())
    whole = result.one(metric="iou", layer=None, **at)
    assert whole.value == pytest.approx(iou[:, 1:].mean())
    assert (whole.bits, whole.n, whole.low < whole.high) == (128, 2, True)
    ours = result.one(metric="iou", layer=None, method="transform", where=BY_HEAD, against=None)
    pair = result.one(metric="iou", method="transform", where=BY_HEAD, against="turboquant")
    assert pair.value == pytest.approx(ours.value - whole.value)
    assert {row.method for row in result.rows} == {EXACT, "lsh", "transform", "pq-32x4", "turboquant"}


def test_a_run_in_bfloat16_fits_and_scores_in_float32(codes_command):
    result = codes.run(codes_command(dtype="bfloat16", documents=1, codes=("pq-32x4", "itq", "rabitq")), QUIET)
    assert result.config["dtype"] == "bfloat16"
    assert result.one(method=EXACT, metric="iou", where=BY_HEAD, layer=None).value > 0.99


def test_a_sample_that_is_missing_is_measured_again_with_the_same_codes(codes_command, monkeypatch):
    """With the same tensors: a model that is loaded again may lie elsewhere, and products round by where they lie."""
    monkeypatch.setattr(setup, "load_model", functools.cache(setup.load_model))
    command = codes_command()
    first = codes.run(command, QUIET)
    (command.out / "samples" / "0001.json").unlink()
    assert codes.run(command, QUIET) == first


def test_the_worst_head_is_the_one_with_the_least_mean():
    low = np.array([[[0.9, 0.1], [0.5, 0.8]], [[0.9, 0.7], [0.3, 0.8]]])  # means .9, .4, .4 and .8
    found = worst(low, 0)
    assert found.mean == pytest.approx(0.4)
    assert (found.low, found.high) == pytest.approx((0.1, 0.7))


def test_text_that_is_scored_is_not_fitted_on(codes_command, made):
    command = codes_command(training_text=(made.text,))
    with pytest.raises(ValueError, match=r"--training-text must hold no scored text, got \d\.txt"):
        codes.run(command, QUIET)
    assert not command.out.exists()


def test_other_training_text_is_another_run(codes_command, made, tmp_path):
    codes.run(codes_command(methods=("lsh",), codes=("turboquant",)), QUIET)
    with pytest.raises(ValueError, match="other settings: training"):
        codes.run(codes_command(methods=("lsh",), codes=("turboquant",), training_contexts=1), QUIET)


def test_hashers_of_other_lengths_are_refused(codes_command, made):
    command = codes_command(hashers=made.hashers)
    with pytest.raises(ValueError, match="codes compares 16 bytes a key, lsh stores 64 bits; leave it out"):
        codes.run(command, QUIET)
    assert not command.out.exists()


def test_too_few_keys_are_refused_before_anything_is_written(codes_command):
    command = codes_command(codes=("pq-16x8",), training_contexts=1)
    with pytest.raises(ValueError, match="pq-16x8 needs at least 256 training keys, got 100"):
        codes.run(command, QUIET)
    assert not command.out.exists()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"codes": ("pq",)}, "--codes takes no pq; expected one of pq-16x8, "),
        ({"codes": ("itq", "itq")}, "without repeats"),
        ({"methods": ("oracle",)}, "--methods of codes takes no oracle; expected one of "),
        ({"heads": "query"}, "codes takes no --heads"),
        ({"shortlist": 4}, "codes takes no --shortlist"),
        ({"values": 0.5}, "codes takes no --values"),
        ({"training_keys": 0}, "at least 1"),
    ],
)
def test_settings_that_cannot_be_used(settings, sentence):
    with pytest.raises(UsageError, match=sentence):
        CodesCommand(**settings)


def test_bytes_are_those_of_the_hashers():
    assert HasherConfig("transform", ModelShape(1, 2, 1, 64)).bits == 8 * BYTES
