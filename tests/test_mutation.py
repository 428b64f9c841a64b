"""What tools/mutation.py changes, draws and stores; the measurement itself takes 20 minutes."""

import ast
import json
from pathlib import Path

TOOL = "mutation"
ROOT = Path(__file__).resolve().parent.parent
SOURCE = """def f(a: int = 3, b=()) -> int:
    "Words 1."
    a.x = a + 1
    if not b and a.x < 2:
        raise ValueError("at most 2")
    return a.x in b
"""
EXPECTED = {
    (1, "3 -> 4", "def f(a: int=4, b=()) -> int:"),
    (3, "+ -> -", "a.x = a - 1"),
    (3, "1 -> 2", "a.x = a + 2"),
    (3, "removed", "pass"),
    (4, "and -> or", "if not b or a.x < 2:"),
    (4, "without not", "if b and a.x < 2:"),
    (4, "< -> <=", "if not b and a.x <= 2:"),
    (4, "2 -> 3", "if not b and a.x < 3:"),
    (5, "removed", "pass"),
    (6, "in -> not in", "return a.x not in b"),
    (6, "return None", "return None"),
}


def test_each_mutant_differs_in_one_line_and_as_documented(tool):
    plain, found = ast.unparse(ast.parse(SOURCE)).splitlines(), set()
    for mutant in tool.mutants(SOURCE):
        lines = mutant.source.splitlines()
        (place,) = [i for i, line in enumerate(lines) if line != plain[i]]
        assert (place + 1, len(lines)) == (mutant.line, len(plain))
        assert mutant.text == SOURCE.splitlines()[place].strip()
        found.add((mutant.line, mutant.change, lines[place].strip()))
    assert found == EXPECTED
    assert len(tool.mutants(SOURCE)) == len(EXPECTED)


def test_a_change_that_a_line_allows_twice_is_numbered(tool):
    found = tool.mutants("def f():\n    return 0, 0\n")
    assert [mutant.change for mutant in found] == ["return None", "0 -> 1", "0 -> 1 #2"]
    assert found[2].source.endswith("return (0, 1)")


def test_only_the_functions_asked_for_are_changed(tool):
    source = "class C:\n    def g(self):\n        return 0\n" + SOURCE + "x = 1\n"
    assert {mutant.line for mutant in tool.mutants(source, ("g",))} == {3}
    assert len(tool.mutants(source)) == len(EXPECTED) + 2


def test_a_seed_draws_the_same_mutants_each_time(tool):
    possible = tool.mutants(SOURCE)
    assert tool.draw("a", possible, 5, 0, None) == tool.draw("a", possible, 5, 0, None)
    assert tool.draw("a", possible, 5, 0, None) != tool.draw("a", possible, 5, 1, None)
    assert tool.draw("a", possible, 99, 0, None) == possible


def test_survivors_are_counted_and_those_that_are_equivalent_are_not(tool, monkeypatch):
    target, possible = tool.TARGETS["buffer"], tool.mutants(SOURCE)[:4]
    monkeypatch.setitem(
        tool.EQUIVALENT, ("sparse_decode/caches/buffer.py", possible[0].text, possible[0].change), "a reason"
    )
    ends = ["passed", "passed", "failed", "timed out"]
    found = tool.summary(target, SOURCE, 0, possible, ends, None)
    assert found["possible"] == len(EXPECTED)
    assert [x["reason"] for x in found["equivalent"]] == ["a reason"]
    assert [x["line"] for x in found["survivors"]] == [possible[1].line]
    assert (found["tried"], found["killed"], found["score"]) == (4, 2, 0.6667)
    again = tool.draw("buffer", possible, 1, 0, found)
    assert again == possible[:2]
    found = tool.summary(target, SOURCE, 0, again, ["passed", "failed"], found)
    assert (found["tried"], found["killed"], found["score"], found["survivors"]) == (4, 3, 1.0, [])


def test_every_target_has_its_file_functions_and_tests(tool):
    for target in tool.TARGETS.values():
        names = {
            x.name for x in ast.walk(ast.parse((ROOT / target.file).read_text())) if isinstance(x, ast.FunctionDef)
        }
        assert set(target.functions) <= names
        assert all((ROOT / test).is_file() for test in target.tests)


def test_every_survivor_that_is_explained_is_a_line_of_its_file(tool):
    for file, line, _ in tool.EQUIVALENT:
        (path,) = ROOT.glob(f"packages/*/src/{file}")
        assert line in [text.strip() for text in path.read_text().splitlines()], (file, line)


def test_a_module_that_changed_since_is_named(tool):
    name, target = next(iter(tool.TARGETS.items()))
    text = (ROOT / target.file).read_text()
    assert name not in tool.stale({name: tool.summary(target, text, 0, [], [], None)})
    assert name in tool.stale({name: tool.summary(target, text + "\n", 0, [], [], None)})
    assert tool.stale({}) == list(tool.TARGETS)


def test_what_is_stale_is_printed_and_nothing_else(tool, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tool, "TARGETS", {name: tool.TARGETS[name] for name in ("reference", "plan")})
    texts = {name: (ROOT / target.file).read_text() for name, target in tool.TARGETS.items()}
    fresh = {name: tool.summary(tool.TARGETS[name], text, 0, [], [], None) for name, text in texts.items()}
    old = fresh | {"plan": tool.summary(tool.TARGETS["plan"], texts["plan"] + "\n", 0, [], [], None)}
    for stored, said in ((fresh, ""), (old, "plan")):
        (tmp_path / "scores.json").write_text(json.dumps(stored))
        monkeypatch.setattr("sys.argv", ["mutation.py", "--stale", "--out", str(tmp_path / "scores.json")])
        assert tool.main() == 0
        out = capsys.readouterr().out
        assert [name for name in tool.TARGETS if f": {name};" in out] == [said] * bool(said)


def test_what_is_stored_says_of_which_text_it_is_and_left_nothing_unexplained(tool):
    stored = json.loads(tool.OUT.read_text())
    assert stored.keys() <= tool.TARGETS.keys()  # `--stale` names those that were not measured yet
    assert {len(found["sha256"]) for found in stored.values()} == {64}
    assert {name: found["survivors"] for name, found in stored.items() if found["survivors"]} == {}
