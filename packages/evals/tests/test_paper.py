"""The paper's tables and figures: their commands, what is skipped, and the differences that they show."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from evals import cli, paper
from evals.result import read_result
from evals.study import PaperCommand
from evals_output import last_line
from hashtrain import ModelShape
from hashtrain.settings.recipes import ABLATIONS, EXACT
from hashtrain.usage import UsageError


def test_every_command_of_the_paper_is_one_of_ours(tmp_path):
    import tyro

    settings = PaperCommand(out=tmp_path, other_hashers=tmp_path)
    for item in paper.ITEMS:
        assert item.differs
        if item.task is None:
            with pytest.raises(ValueError, match="is shown by another program"):
                item.commands(settings)
            assert item.lines(settings) == [item.command]
            continue
        for words, folder in zip(item.commands(settings), item.folders(settings), strict=True):
            command = tyro.extras.subcommand_cli_from_dict(cli.COMMANDS, args=words, prog="evals")
            assert type(command) is cli.TASKS[item.task][0]
            assert command.out == folder
            for mine, budget, theirs, other in item.against:
                assert {mine, theirs} <= set(command.methods)
                assert {budget, other} <= set(command.budgets)


def test_a_device_and_a_type_are_for_every_command_that_runs_a_model(tmp_path):
    import tyro

    settings = PaperCommand(out=tmp_path, other_hashers=tmp_path, device="cuda:1", dtype="bfloat16")
    told = set()
    for item in (item for item in paper.ITEMS if item.task):
        for words in item.commands(settings):
            command = tyro.extras.subcommand_cli_from_dict(cli.COMMANDS, args=words, prog="evals")
            if hasattr(command, "device") and item.task != "kernels":  # whose kernels are the CPU's
                assert (command.device, command.dtype) == ("cuda:1", "bfloat16")
                told.add(item.task)
    assert told >= {"ppl", "iou", "fidelity", "needle", "ruler-synthetic", "output-error", "cones", "throughput"}
    with pytest.raises(UsageError, match="gpu"):
        PaperCommand(device="gpu")


def test_tables_and_figures_are_numbered_as_in_the_paper():
    for kind, last in (("table", 11), ("figure", 11)):
        numbers = dict.fromkeys(i.name.partition(" (")[0] for i in paper.ITEMS if i.name.startswith(kind))
        assert list(numbers) == [f"{kind} {n + 1}" for n in range(last)]
        with pytest.raises(ValueError, match=f"1 to {last}, got 99"):
            paper.chosen(PaperCommand(**{kind: 99}))
    with pytest.raises(UsageError, match="one of"):
        PaperCommand(table=1, all=True)


def test_the_paper_lists_and_runs_its_commands(tmp_path, monkeypatch, capsys):
    assert cli.main(["paper"]) == 0
    assert len(last_line(capsys)["items"]) == len(paper.ITEMS)
    few = tuple(item for item in paper.ITEMS if item.name in ("figure 6 (code size)", "figure 6 (complexity)"))
    monkeypatch.setattr(paper, "ITEMS", few)  # the other parts take minutes
    assert cli.main(["paper", "--figure", "6", "--out", str(tmp_path)]) == 0
    assert last_line(capsys)["items"] == [item.name for item in few]
    assert "figure 6 (complexity): Efficiency" in (tmp_path / "report.md").read_text()
    monkeypatch.undo()
    assert cli.main(["paper", "--table", "7", "--out", str(tmp_path)]) == 2
    assert "is shown by another program: hashtrain --model" in capsys.readouterr().err
    assert cli.main(["paper", "--table", "6", "--out", str(tmp_path)]) == 2
    assert "give --other-hashers" in capsys.readouterr().err


def test_all_leaves_out_what_it_has_no_hashers_for(tmp_path, capsys):
    for name in ("lsh", "paper", "planes", "transform"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    few = {item.name for item in paper.chosen(PaperCommand(all=True, hashers=tmp_path))}
    with_tasks = {item.name for item in paper.ITEMS if item.task and not item.hub and "exact" not in item.name}
    few = {name for name in few if "exact" not in name}
    none = {item.name for item in paper.chosen(PaperCommand(all=True, hashers=tmp_path / "none"))}
    assert {name for name in none if name.startswith("figure 6")} == {n for n in with_tasks if n.startswith("figure 6")}
    deep = {"table 3 (MagicPIG)", "table 3 (MagicPIG, no retrieval)"}  # layer 16 is dense in them
    assert with_tasks - few == {"table 1", "table 6", "table 10", "table 11", "code length"} | deep
    for candidate in ABLATIONS:
        (tmp_path / candidate.name).mkdir(exist_ok=True)
        (tmp_path / candidate.name / "config.json").touch()
    many = {item.name for item in paper.chosen(PaperCommand(all=True, hashers=tmp_path)) if "exact" not in item.name}
    assert with_tasks - many == {"table 6"} | deep
    both = PaperCommand(all=True, hashers=tmp_path, other_hashers=tmp_path)
    assert {i.name for i in paper.chosen(both) if "exact" not in i.name} == with_tasks - deep
    assert not {i.name for i in paper.chosen(both) if i.hub}
    assert {i.name for i in paper.chosen(both) if "exact" in i.name} == {"table 3 (exact, no retrieval)"}
    for candidate in EXACT:
        (tmp_path / candidate.name).mkdir()
        (tmp_path / candidate.name / "config.json").touch()
    exact = {i.name for i in paper.ITEMS if "exact" in i.name}
    assert {i.name for i in paper.chosen(both) if "exact" in i.name} == exact


def test_planes_is_left_out_where_it_is_all_that_the_hashers_lack(tmp_path):
    for folder in ("plain", "with"):
        for name in ("lsh", "paper", "transform", *(["planes"] if folder == "with" else [])):
            (tmp_path / folder / name).mkdir(parents=True)
            (tmp_path / folder / name / "config.json").touch()
    plain, more = (paper.chosen(PaperCommand(all=True, hashers=tmp_path / name)) for name in ("plain", "with"))
    assert [item.name for item in plain] == [item.name for item in more]
    for few, many in zip(plain, more, strict=True):
        gone = set(many.command.split()) - set(few.command.split())
        assert gone <= {"planes"}
        assert ("planes" in few.command.split()) is (few.task == "throughput")  # which makes its own
        assert few.against == tuple(pair for pair in many.against if "planes" not in pair)
    assert [len(item.against) for item in (*plain, *more) if item.name == "table 2"] == [4, 6]
    both = PaperCommand(table=6, hashers=tmp_path / "with", other_hashers=tmp_path / "plain")
    assert "planes" not in paper.chosen(both)[0].command
    about_planes = paper.chosen(PaperCommand(table=10, hashers=tmp_path / "plain"))[0]
    assert "planes" in about_planes.command.split()  # it will say that the hasher is missing


def test_parts_with_layers_that_the_model_lacks_are_left_out(tmp_path, monkeypatch, capsys):
    for name in ("lsh", "paper", "planes", "transform"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    table = PaperCommand(table=3, hashers=tmp_path)
    assert [item.name for item in paper.chosen(table)] == ["table 3", "table 3 (exact, no retrieval)"]
    monkeypatch.setattr(paper, "shape_of", lambda _: ModelShape(17, 2, 1, 32))
    assert [item.name for item in paper.chosen(table)][:2] == ["table 3", "table 3 (MagicPIG)"]
    monkeypatch.undo()
    monkeypatch.setattr(cli, "_run", lambda *_: pytest.fail("a run: it is enough to see what is left out"))
    with pytest.raises(pytest.fail.Exception):
        cli.main(["paper", "--table", "3", "--hashers", str(tmp_path), "--out", str(tmp_path / "out")])
    assert "table 3 (MagicPIG) is skipped: layer 16 is dense in it, and the model has 6 layers" in " ".join(
        capsys.readouterr().err.split()
    )


def stored_run(folder, name, task="ppl", methods=(), model="demo"):
    """Write the head of a stored result; return its path."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"config": {"task": task, "methods": list(methods), "model": model}}))
    return path


QUEST = ("oracle", "lsh", "paper", "planes", "transform", "transform+remainder", "quest", "quest-heads")


def test_the_list_names_every_table_and_figure_with_its_command_and_what_is_stored(tmp_path, capsys):
    stored_run(tmp_path, "quest", methods=QUEST)
    assert cli.main(["paper", "--list", "--results", str(tmp_path)]) == 0
    told = capsys.readouterr()
    last = json.loads(told.out.strip().splitlines()[-1])
    stored = last["stored"]
    assert [name for name, files in stored.items() if files] == ["table 2"]
    for kind, last_number in (("table", 11), ("figure", 11)):
        assert {f"{kind} {n + 1}" for n in range(last_number)} <= {name.partition(" (")[0] for name in stored}
    lines = told.err.splitlines()
    for item in paper.ITEMS:
        at = lines.index(f"{item.name}: {item.title}")
        assert lines[at + 1].split()[0] in ("evals", "hashtrain", "uv")
        if item.nothing_to_store:
            assert "  nothing to store" in lines[at + 1 : at + 4]
    assert f"  stored in {tmp_path}: quest.json" in lines
    counted = [item for item in paper.ITEMS if not item.nothing_to_store]
    assert f"1 of {len(counted)} parts have a stored result (3 %)" in lines
    assert f"1 of {last['shares']['numbers']} tables and figures have one (6 %), 0 of them for every part" in lines


def test_only_runs_of_an_items_task_with_all_its_methods_count(tmp_path):
    settings = PaperCommand(results=tmp_path)
    item = paper.Item("table 2", "Two", "evals ppl --methods oracle quest --budgets 0.02", ("So.",))
    item = replace(item, stored=("quest", "more"))
    assert item.kept(settings) == []
    quest = stored_run(tmp_path, "quest", methods=("oracle", "quest", "lsh"))
    assert item.kept(settings) == [quest]
    stored_run(tmp_path, "quest", task="iou", methods=("oracle", "quest"))
    assert item.kept(settings) == []
    stored_run(tmp_path, "quest", methods=("quest",))
    assert item.kept(settings) == []
    more = stored_run(tmp_path, "more", methods=("oracle",))  # two runs of one model have them all
    assert item.kept(settings) == [quest, more]
    stored_run(tmp_path, "more", methods=("oracle",), model="another")
    assert item.kept(settings) == []
    quest.write_text('{"registers": 8}')  # no run at all, such as the table of the kernel gate
    more.write_text('{"registers": 8}')
    assert item.kept(settings) == []
    assert replace(item, command="another program").kept(settings) == []
    quest.write_text("")
    with pytest.raises(ValueError, match="store the run again"):
        item.kept(settings)


def test_an_item_with_two_sets_of_hashers_needs_two_stored_runs(tmp_path):
    item = next(item for item in paper.ITEMS if item.name == "table 6")
    first = stored_run(tmp_path, "corpora", methods=("planes", "transform", "transform+remainder"))
    assert item.kept(PaperCommand(results=tmp_path)) == []
    other = stored_run(tmp_path, "corpora_other", methods=("planes", "transform", "transform+remainder"))
    assert item.kept(PaperCommand(results=tmp_path)) == [first, other]


def test_a_number_counts_by_any_part_and_as_whole_by_all():
    one = paper.Item("table 1", "One", "evals ppl", ("So.",))
    items = (one, replace(one, name="table 1 (exact)"), replace(one, name="table 2"), replace(one, name="code length"))
    drawn = replace(one, name="figure 1", nothing_to_store=True)
    found = paper.shares((*items, drawn), {"table 1", "code length"})
    assert found == paper.Shares(4, 2, numbers=2, stored_numbers=1, whole_numbers=0, nothing_to_store=1)
    assert paper.shares(items, {"table 1", "table 1 (exact)"}).whole_numbers == 1


def test_four_fifths_of_the_papers_tables_and_figures_have_a_stored_result():
    """By part and by number. Those that need a hub's data count; drawings, listings and quotations do not."""
    settings = PaperCommand(results=Path(__file__).parents[3] / "docs" / "results")
    found = paper.shares(paper.ITEMS, {item.name for item in paper.ITEMS if item.kept(settings)})
    assert found.stored_parts >= 0.8 * found.parts
    assert found.stored_numbers >= 0.8 * found.numbers


def test_an_item_shows_the_differences_it_names(made, tmp_path, monkeypatch, capsys):
    """Two sets of hashers, in which the second's `planes` is the first's `lsh`; and two methods of one set."""
    other = tmp_path / "other"
    shutil.copytree(made.hashers / "lsh", other / "planes")
    words = f"evals iou --methods planes --context 128 --text {made.text} --dense-layers 1 --rows 8 --budgets 0.1 0.2"
    both_ways = ("planes", 0.1, "planes", 0.2), ("planes", 0.2, "planes", 0.1)
    items = (
        paper.Item("table 6", "Two", words, ("So.",), documents=2, twice=True),
        paper.Item("table 10", "One", words, ("So.",), documents=2, against=both_ways),
    )
    monkeypatch.setattr(paper, "ITEMS", items)
    common = ["--model", str(made.model), "--hashers", str(made.hashers), "--out", str(tmp_path / "paper")]
    assert cli.main(["paper", "--all", "--other-hashers", str(other), *common]) == 0
    text = (tmp_path / "paper" / "report.md").read_text()
    assert "planes 10 % - planes 10 %" in text
    assert "planes 10 % - planes 20 %" in text
    stored = json.loads((tmp_path / "paper" / "differences.json").read_text())
    assert {(tuple(x["a"]), tuple(x["b"])) for x in stored["table 10"]} == {
        (("planes", 0.1), ("planes", 0.2)),
        (("planes", 0.2), ("planes", 0.1)),
    }
    assert text.count("paired bootstrap interval") == 2  # one table per item, whatever it compares
    runs = [read_result(tmp_path / "paper" / name) for name in ("table-6", "table-6-other")]
    at = {"method": "planes", "budget": 0.1, "metric": "iou", "heads": "kv_head", "layer": None, "head": None}
    assert runs[0].one(**at).value != runs[1].one(**at).value
