"""The code length task: how long a code of LSH must be to equal a trained one, and how that is reported."""

import math
from dataclasses import replace

import numpy as np
import pytest
from evals import figures
from evals.commands import CodelengthCommand
from evals.report import codelength_grid, sentences
from evals.result import Result, Row
from evals.tasks import codelength
from hashtrain import Hasher
from matplotlib.figure import Figure
from rich.console import Console

QUIET = Console(quiet=True)


def test_equal_length_worked_out_by_hand():
    bits, iou = np.array([32, 64, 128]), np.array([0.2, 0.3, 0.5])
    assert codelength.equal_length(bits, iou, 0.3) == pytest.approx(64)
    assert codelength.equal_length(bits, iou, 0.4) == pytest.approx(64 * math.sqrt(2))
    assert codelength.equal_length(bits, iou, 0.9) == pytest.approx(128)


@pytest.fixture
def shorter(made, tmp_path):
    """A folder with `planes` of 32 bits and nothing else."""
    hasher = Hasher.from_pretrained(made.hashers / "planes")
    Hasher(replace(hasher.config, bits=32), 5).save_pretrained(tmp_path / "shorter" / "planes")
    return tmp_path / "shorter"


def test_hashers_of_other_lengths_are_measured_beside(command, made, shorter):
    settings = {"methods": ("paper", "planes"), "bits": (32, 128), "rows": 8, "documents": 2}
    asked = command(CodelengthCommand, **settings, more_hashers=(shorter,))
    found = codelength.run(asked, QUIET)
    names = {row.method: row.bits for row in found.rows}
    assert names == {"lsh-32": 32, "lsh-128": 128, "paper": 2 * 64, "planes": 64, "planes at 32": 32}
    at = {"method": "planes at 32", "heads": "kv_head"}
    equal, shorter_by = (found.one(metric=metric, **at) for metric in ("equal_lsh_bits", "times_shorter"))
    assert shorter_by.value == pytest.approx(equal.value / 32)
    assert "| planes at 32 |" in (asked.out / "report.md").read_text()
    own, other = (found.one(metric="iou", heads="kv_head", method=m).value for m in ("planes", "planes at 32"))
    assert own != other
    with pytest.raises(ValueError, match="method_identities"):  # the hashers that were compared are part of the run
        codelength.run(command(CodelengthCommand, **settings), QUIET)


def test_a_folder_without_hashers_of_another_length_is_refused(command, made, shorter, tmp_path):
    for folders, message in (((tmp_path,), "no hasher of planes"), ((shorter, shorter), "planes of 32 bits")):
        with pytest.raises(ValueError, match=message):
            codelength.run(command(CodelengthCommand, methods=("planes",), more_hashers=folders), QUIET)
    with pytest.raises(ValueError, match="planes of 64 bits"):
        codelength.run(command(CodelengthCommand, methods=("planes",), more_hashers=(made.hashers,)), QUIET)


def made_up(values, bits=(32, 2048)):
    """A result in which these hashers equal this many bits of LSH: {method: (own bits, LSH bits)}."""
    at = {"rule": "visible", "density": None, "dense_layers": 2, "sink": 0, "recent": 0, "phase": "rows", "n": 8}
    at |= {"seed": 0, "versions": "", "budget": 0.02, "task": "codelength"}
    rows = []
    for heads, where in (("kv_head", "one set"), ("query_head", "two sets")):
        at |= {"heads": heads, "where": where}
        for length in bits:
            own = {"method": f"lsh-{length}", "variant": "lsh", "bits": length}
            rows.append(Row(metric="iou", value=length / 4096, low=None, high=None, **at, **own))
        for name, (length, equal) in values.items():
            own = {"method": name, "variant": name, "bits": 2 * length if name == "paper" else length}
            rows.append(Row(metric="iou", value=0.4, low=0.3, high=0.5, **at, **own))
            rows.append(Row(metric="equal_lsh_bits", value=equal, low=500.0, high=700.0, **at, **own))
            rows.append(Row(metric="times_shorter", value=equal / length, low=None, high=None, **at, **own))
    config = {"task": "codelength", "bits": list(bits), "methods": ["paper", "planes"], "budgets": [0.02]}
    return Result({**config, "context": 4096, "model": "demo", "heads": None}, {}, rows)


MADE_UP = made_up({"paper": (128, 640.0), "planes": (128, 2048.0), "planes at 64": (64, 32.0)})


def test_the_sentence_says_where_the_curve_ends():
    middle, long, short = list(sentences(MADE_UP))[:3]
    assert middle == (
        "one set: LSH length that equals `paper` at 128 bits, of which a KV head stores 2 codes: 640 [500, 700] bits, "
        "5.0 times as many"
    )
    assert (
        long
        == "one set: LSH length that equals `planes` at 128 bits: more than 2048 bits, more than 16.0 times as many"
    )
    assert short == "one set: LSH length that equals `planes` at 64 bits: 32 or fewer bits, 0.5 or less times as many"


def test_the_table_of_lengths_has_a_line_a_hash_and_length():
    table = codelength_grid(MADE_UP)
    assert [[line[0] for line in section] for section in table.sections] == [
        ["lsh at 32", "lsh at 2048"],
        ["paper at 128"],
        ["planes at 64", "planes at 128"],
    ]
    assert table.sections[0][1][1:4] == ["0.5", "", ""]
    assert table.sections[1][0][1:4] == ["0.4 [0.3, 0.5]", "640 [500, 700]", "5.0"]
    assert table.sections[2][1][4:] == ["0.4 [0.3, 0.5]", "more than 2048", "more than 16.0"]
    assert "mean of 8 held-out contexts of 4096 tokens" in table.title


def test_the_figure_of_lengths_has_a_line_a_hash_over_bits():
    figure = Figure()
    figures.draw_codelength(MADE_UP, figure)
    for axes in figure.axes:
        lines = {line.get_label(): line.get_xdata().tolist() for line in axes.get_lines()}
        assert lines == {"lsh": [32, 2048], "paper": [128], "planes": [64, 128]}
        assert axes.get_xticks().tolist() == [32, 64, 128, 2048]
