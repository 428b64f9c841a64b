"""Tables and figures, for every kind of result."""

import pytest
from evals.grid import Grid, percent, to_markdown, to_rich
from evals.report import grids, training_grid
from evals.tasks import iou, ppl
from rich.console import Console

QUIET = Console(quiet=True)


def test_markdown_is_a_title_and_a_table():
    grid = Grid("Title", ["a", "b"], [[["1", "2"]], [["3", "4"]]])
    assert to_markdown(grid) == "Title\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n| 3 | 4 |"
    assert to_rich(grid).row_count == 2


def test_percent():
    assert [percent(x) for x in (1, 0.02, 0.005, 0.01234)] == ["100 %", "2 %", "0.5 %", "1.23 %"]


@pytest.mark.parametrize("settings", [{}, {"methods": ("lsh",), "rules": ("fixed",), "documents": 1}], ids=str)
def test_ppl_tables_name_every_method_and_budget(ppl_command, settings):
    command = ppl_command(budgets=(1.0, 0.1), **settings)
    found = ppl.run(command, QUIET)
    text = (command.out / "report.md").read_text()
    for method in command.methods:
        assert f"| 10 %, {method} |" in text
    assert "| 100 %, lsh |" in text
    assert text.count("| dense |") == 1
    assert (len(grids(found)) > 1) == (len(command.methods) > 1)
    assert text.count("minus each other") == len(grids(found)) - 1
    assert (command.out / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_iou_tables_have_a_line_a_layer(iou_command):
    command = iou_command(methods=("oracle", "lsh"), documents=1)
    found = iou.run(command, QUIET)
    for grid in grids(found):
        assert grid.header == ["layer", "oracle", "lsh"]
        assert [line[0] for line in grid.sections[0]] == ["0 (dense)", "1", "2"]
        assert grid.sections[1][0][:2] == ["mean", "1.000 / 1.000 / 1.00"]
    assert (command.out / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_training_table_reads_hashtrain_metrics():
    layer = {"iou": 0.5, "recall": 0.6, "mass": 0.7}
    side = {"layers": [layer, layer], "mean": layer}
    facts = {"layers": 2, "dense_layers": 1, "fraction": 0.02, "bits": 128, "held_out": 24, "context": 4096, "steps": 9}
    grid = training_grid({**facts, "hashers": {"lsh": {"kv_head": side, "query_head": side}}})
    assert grid.sections[0] == [["0 (dense)", "0.500 / 0.700"], ["1", "0.500 / 0.700"]]
    assert "24 held-out contexts" in grid.title
