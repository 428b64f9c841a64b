"""The counts of tools/code_size.py: lines of code, long functions, and the files that a call crosses."""

import pytest

TOOL = "code_size"
PYTHON = '''"""A module,
of two lines."""

import os  # a comment behind code

# a comment


def f(x):
    """Double."""
    text = """a string,

    that is data"""
    return text + os.sep


class C:
    x: int
    """Below a name."""
'''
CUDA = """// a comment
#define N 4  // and code

/* two
   lines */
__global__ void f() { char c = '"'; const char* s = "// no comment"; }
"""


def test_lines_of_code_are_those_without_blank_lines_comments_and_docstrings(tool):
    assert tool.code_lines(PYTHON, ".py") == len(["import", "def", "text", "", "data", "return", "class", "x"])
    assert tool.code_lines(CUDA, ".cu") == len(["define", "global"])


def test_a_function_is_as_long_as_its_lines_without_its_docstring(tool):
    assert tool.long_functions(PYTHON, 4) == {"f": 5}
    assert tool.long_functions(PYTHON, 5) == {}


@pytest.fixture
def counted(tool, tmp_path, monkeypatch):
    """A checkout with a package and a tool, and a stand-in for what traces calls."""
    for name, text in {
        "packages/one/src/one/a.py": PYTHON * 30,
        "packages/one/src/one/b.cu": CUDA,
        "tools/t.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "packages/one/tests").mkdir()
    (tmp_path / "packages/one/tests/test_a.py").write_text(PYTHON)
    monkeypatch.setattr(tool, "ways", lambda root: {"a call": ["one/a.py", "one/b.py"], "another": "ValueError: no"})
    return tool.count(tmp_path)


def test_packages_and_tools_are_counted_without_their_tests(tool, counted):
    lines, code = 30 * len(PYTHON.splitlines()), 30 * 8
    assert counted.lines == {"one": (lines + len(CUDA.splitlines()), code + 2), "tools": (0, 0)}
    assert counted.files == {"packages/one/src/one/a.py": lines}
    rows = tool.rows(counted)
    assert rows["lines of packages together (of code)"] == rows["lines of one (of code)"] == f"{lines + 6:,} (242)"
    assert (rows["files over 400 lines"], rows["files crossed by a call"]) == ("1", "2")
    assert rows["files crossed by another"] == "ValueError: no"


def test_another_commit_is_the_first_column(tool, counted, monkeypatch, capsys):
    folders = []
    monkeypatch.setattr(tool, "count", lambda root: folders.append(root) or counted)
    assert tool.main(["--against", "HEAD"]) == 1  # a call could not be traced
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "files crossed by a call" in line]
    assert line.split()[-2:] == ["2", "2"]
    assert folders[1] == tool.ROOT != folders[0]
    with pytest.raises(SystemExit):
        tool.main(["--against", "no-such-commit"])
    assert "expected a commit, got 'no-such-commit'" in capsys.readouterr().err


@pytest.mark.slow
def test_calls_cross_few_files(tool):
    """The bars of calls that reached them; the others are held where they are."""
    most = {
        "a search of numpy arrays": 5,
        "a search of CPU tensors": 5,
        "a search on CUDA": 8,
        "a training step": 7,
        "a decode step on the CPU": 8,
        "a decode step on CUDA": 8,
    }
    found = tool.ways(tool.ROOT)
    assert found.keys() == most.keys()
    assert {name: files for name, files in found.items() if isinstance(files, str)} == {}
    assert {name: files for name, files in found.items() if len(files) > most[name]} == {}
