"""No file of the repository unpickles, evaluates text, runs a shell, or runs code that came with a model."""

import ast
import functools
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "jsonpickle"}
CALLS = {
    "eval": "evaluates text",
    "exec": "executes text",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "subprocess.getoutput": "runs a shell",
    "subprocess.getstatusoutput": "runs a shell",
    "tempfile.mktemp": "names a file that another may make first",
    "yaml.load": "makes any object",
    "yaml.full_load": "makes any object",
    "yaml.unsafe_load": "makes any object",
    "torch.save": "writes a pickle",
    "numpy.memmap.dump": "writes a pickle",
}
ALLOWED = {
    ("packages/hashcore/tests/test_readme_code.py", "exec"): "runs the blocks of our own README",
    ("packages/hashtrain/tests/test_cli.py", "torch.save"): "makes what `convert` reads",
    ("packages/hashtrain/tests/test_convert.py", "torch.save"): "makes what `convert` reads",
    ("packages/evals/tests/test_published.py", "torch.save"): "makes what `convert` reads",
    ("packages/sparse-decode/tests/fuzz_cache.py", "pickle"): "pickles caches of its own making",
    ("packages/sparse-decode/tests/test_cache.py", "pickle"): "pickles caches of its own making",
    ("packages/sparse-decode/tests/test_growing.py", "pickle"): "pickles caches of its own making",
    ("packages/sparse-decode/tests/test_surroundings.py", "pickle"): "pickles caches of its own making",
    ("packages/sparse-decode/tests/test_surroundings.py", "torch.save"): "pickles caches of its own making",
    ("packages/sparse-decode/tests/test_surroundings.py", "torch.load"): "pickles caches of its own making",
    ("tests/test_examples.py", "numpy.save"): "makes what an example must refuse",
    ("tests/test_fuzz_hashers.py", "torch.save"): "makes what `convert` reads",
}
SWITCHES = {("shell", True), ("trust_remote_code", True), ("allow_pickle", True), ("weights_only", False)}
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def imported(node):
    """The top-level modules that an import names."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {node.module.partition(".")[0]}
    return set()


def called(call, names):
    """The full name of what is called, through `import ... as` and `from ... import`; empty if it has none."""
    first, _, rest = ast.unparse(call.func).partition(".")
    whole = names.get(first, first) + (f".{rest}" if rest else "")
    return whole.removeprefix("builtins.")


def aliases(tree):
    """What each imported name stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def offences(source, path=""):
    """Every breach of the rules in a piece of Python, as (line, words)."""
    tree = ast.parse(source)
    names = aliases(tree)
    for node in ast.walk(tree):
        for module in imported(node) & MODULES:
            if (path, module) not in ALLOWED:
                yield node.lineno, f"imports {module}"
        if not isinstance(node, ast.Call):
            continue
        name = called(node, names)
        if (path, name) in ALLOWED:
            continue
        if name in CALLS:
            yield node.lineno, f"{name} {CALLS[name]}"
        given = {word.arg: getattr(word.value, "value", ...) for word in node.keywords}
        for word, value in given.items():
            # A value that is not written out may be anything.
            if (word, value) in SWITCHES or (word in {"shell", "trust_remote_code"} and value is ...):
                yield node.lineno, f"{name} with {word}"
        if name == "torch.load" and given.get("weights_only") is not True:
            yield node.lineno, "torch.load without weights_only=True"


@functools.cache
def tracked(ending):
    listed = subprocess.run(
        ["git", "ls-files", "-z", f"*{ending}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [path for path in listed.stdout.split("\0") if path and (ROOT / path).is_file()]


def test_no_python_file_does_what_is_never_done():
    found = [(path, *what) for path in tracked(".py") for what in offences((ROOT / path).read_text("utf-8"), path)]
    assert len(tracked(".py")) > 100
    assert not found


def test_no_python_of_the_documentation_does():
    blocks = [(path, block) for path in tracked(".md") for block in BLOCK.findall((ROOT / path).read_text("utf-8"))]
    assert len(blocks) >= 5
    assert not [(path, *what) for path, block in blocks for what in offences(block)]


def test_every_exception_is_needed():
    for path, name in ALLOWED:
        assert any(name in words for _, words in offences((ROOT / path).read_text("utf-8"))), f"{path} calls no {name}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import dill as d",
        "eval(text)",
        "import builtins\nbuiltins.exec(text)",
        "from os import system as go\ngo('ls')",
        "import subprocess as s\ns.run('ls', shell=True)",
        "run('ls', shell=flag)",
        "import torch\ntorch.load(path)",
        "from torch import load\nload(path, weights_only=flag)",
        "import torch as t\nt.load(path, weights_only=False)",
        "model.from_pretrained(name, trust_remote_code=True)",
        "model.from_pretrained(name, trust_remote_code=given)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import yaml\nyaml.load(text)",
        "import tempfile\ntempfile.mktemp()",
        "import torch\ntorch.save(x, path)",
    ],
)
def test_each_rule_sees_its_breach(source):
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    [
        "import pickletools",
        "model.eval()",
        "import torch\ntorch.load(path, weights_only=True)",
        "import yaml\nyaml.safe_load(text)",
        "tmp_path_factory.mktemp('a')",
        "# pickle, eval(), shell=True\n'pickle.loads'",
        "run(['ls'], shell=False)",
    ],
)
def test_no_rule_sees_one_where_none_is(source):
    assert not list(offences(source))
