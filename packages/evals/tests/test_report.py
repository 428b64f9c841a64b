"""Tables and figures, for every kind of result."""

import pytest
from evals.grid import Grid, percent, to_markdown, to_rich
from evals.report import grids, protocol
from evals.tasks import iou, ppl
from rich.console import Console

QUIET = Console(quiet=True)


def test_markdown_is_a_title_and_a_table():
    grid = Grid("Title", ["a", "b"], [[["1", "2"]], [["3", "4"]]])
    assert to_markdown(grid) == "Title\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n| 3 | 4 |"
    assert to_rich(grid).row_count == 2


def test_percent():
    assert [percent(x) for x in (1, 0.02, 0.005, 0.01234)] == ["100 %", "2 %", "0.5 %", "1.23 %"]


@pytest.mark.sample(1)
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
        assert grid.sections[1][0][:2] == ["mean", "1.000 / 1.000 / 1.00 / 0 %"]
        assert "rows that find less than half of it" in grid.title
        assert grid.title.endswith(protocol(found.config))
    assert (command.out / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"sink": 1, "recent": 4}, "the first token and the last 4 tokens always read, no layer set to dense"),
        ({"sink": 0, "recent": 0, "dense_layers": 2}, "no token read without a search, the first 2 layers dense"),
        (
            {"sink": 2, "dense_layers": 1, "dense_at": [4]},
            "the first 2 tokens always read, the first layer and layers 4",
        ),
        (
            {"sink": 4, "recent": 64, "ends": "beside"},
            "the first 4 tokens and the last 64 tokens read beside the budget",
        ),
    ],
)
def test_captions_name_the_protocol(settings, said):
    assert protocol({"dense_layers": 0, "dense_at": [], "recent": 0, **settings}).startswith(said)


def test_tables_of_another_protocol_say_so(ppl_command, tmp_path):
    """Those of differences, too; by default they are silent."""
    for settings, said in (({"dense_layers": 1}, True), ({"dense_layers": 0, "sink": 1, "recent": 4}, False)):
        more = {"methods": ("lsh", "planes"), "documents": 1, "out": tmp_path / str(said)}
        command = ppl_command(**more, **settings)
        found = ppl.run(command, QUIET)
        first, *others = grids(found)
        assert protocol(found.config) in first.title
        assert others
        assert all((protocol(found.config) in grid.title) == said for grid in others)


def test_columns_of_words_are_aligned_to_the_left():
    grid = Grid("T", ["a", "b", "c", "d"], [[["x", "-1 %", "all", ""]], [["y", "+2 [1, 3]", "2 %", ""]]])
    assert to_markdown(grid).splitlines()[3] == "| --- | ---: | --- | ---: |"
    assert [column.justify for column in to_rich(grid).columns] == ["left", "right", "left", "right"]
