"""What tools/check_wheels.py and tools/check_install.py find: each rule is broken once, on a small package."""

import importlib.metadata
import io
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
INFO = "small-1.0.0.dist-info"
METADATA = """Metadata-Version: 2.4
Name: small
Version: 1.0.0
License-Expression: Apache-2.0
Classifier: Private :: Do Not Upload
Classifier: Typing :: Typed
Requires-Dist: numpy>=2
Requires-Python: >=3.11, <3.15
Project-URL: Paper, https://example.invalid
Description-Content-Type: text/markdown

# Small
"""
WHEEL = {
    "small/__init__.py": "",
    "small/py.typed": "",
    f"{INFO}/METADATA": METADATA,
    **{f"{INFO}/licenses/{name}": (ROOT / name).read_text() for name in ("LICENSE", "NOTICE")},
}
ARCHIVE = ["CHANGELOG.md", "README.md", "pyproject.toml", "LICENSE", "NOTICE", "tests/test_small.py"]


@pytest.fixture(scope="module")
def wheels(load):
    return load("tools", "check_wheels")


@pytest.fixture(scope="module")
def install(load):
    return load("tools", "check_install")


@pytest.fixture
def place(tmp_path):
    """The folder of the small package; as `git` is asked for its files, they lie in a repository."""
    project = '[project]\nname = "small"\nversion = "1.0.0"\nrequires-python = ">=3.11,<3.15"\n'
    for name, text in {"pyproject.toml": project, "README.md": "# Small\n"}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def complaints(wheels, place, monkeypatch):
    """Make the package's wheel, with files replaced, left out or added; what is wrong with it."""
    monkeypatch.setattr(wheels, "sources", lambda folder: {"small/__init__.py", "small/py.typed"})

    def look(without=(), **changes):
        files = {name: text for name, text in {**WHEEL, **changes.get("files", {})}.items() if name not in without}
        with zipfile.ZipFile(place / "small-1.0.0-py3-none-any.whl", "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        return wheels.wheel("small", wheels.made(place, "small", "*.whl"), place)

    return look


def test_a_sound_wheel_has_no_complaint(complaints):
    assert complaints() == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("small/__init__.py", "small/__init__.py missing"),
        ("small/py.typed", "expected small/py.typed in the wheel"),
        (f"{INFO}/licenses/LICENSE", "expected the repository's own LICENSE"),
        (f"{INFO}/licenses/NOTICE", "expected the repository's own NOTICE"),
    ],
)
def test_a_file_that_is_missing_is_named(complaints, name, sentence):
    assert sentence in complaints(without=[name])[-1]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("small/tests/test_a.py", "", "also got small/tests/test_a.py"),
        ("tests/conftest.py", "", "also got tests/conftest.py"),
        (f"{INFO}/licenses/LICENSE", "Another licence", "the repository's own LICENSE"),
    ],
)
def test_a_file_that_does_not_belong_is_named(complaints, name, text, sentence):
    (said,) = complaints(files={name: text})
    assert sentence in said


@pytest.mark.parametrize(
    ("line", "other"),
    [
        ("Version: 1.0.0", "Version: 1.0.1"),
        ("Apache-2.0", "MIT"),
        ("text/markdown", "text/plain"),
        ("# Small", "# Large"),
        (">=3.11, <3.15", ">=3.10"),
        ("Classifier: Private :: Do Not Upload\n", ""),
        ("Classifier: Typing :: Typed\n", ""),
        ("Project-URL: Paper, https://example.invalid\n", ""),
        ("https://example.invalid", "https://" + ".".join(("pypi", "org")) + "/small"),
        ("numpy>=2", "numpy @ https://example.invalid/numpy.whl"),
    ],
)
def test_metadata_that_differs_is_one_sentence(complaints, line, other):
    assert line in METADATA
    (said,) = complaints(files={f"{INFO}/METADATA": METADATA.replace(line, other)})
    assert said.startswith("small: expected ")


@pytest.mark.parametrize("missing", [None, *ARCHIVE])
def test_a_source_archive_has_what_a_build_and_its_tests_need(wheels, tmp_path, missing):
    path = tmp_path / "small-1.0.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in ARCHIVE:
            if name != missing:
                archive.addfile(tarfile.TarInfo(f"small-1.0.0/{name}"), io.BytesIO())
    said = wheels.archive("small", path)
    assert len(said) == (missing is not None)
    assert not said or ("tests" if missing.startswith("tests") else missing) in said[0]


def test_two_wheels_of_one_package_are_refused(wheels, tmp_path):
    for version in ("1.0.0", "1.0.1"):
        (tmp_path / f"small-{version}-py3-none-any.whl").touch()
    with pytest.raises(SystemExit, match="expected one small"):
        wheels.made(tmp_path, "small", "*.whl")


def test_what_must_be_in_a_wheel_is_known_of_every_package(wheels, install):
    assert wheels.MUST_HOLD.keys() == wheels.folders().keys() == install.QUICK.keys()
    for package, folder in wheels.folders().items():
        held = wheels.sources(folder)
        assert wheels.content(package, held, held) == []
        for name in install.QUICK[package]:
            assert (folder / "tests" / name).is_file()


def test_each_package_carries_the_licence_of_the_repository(wheels):
    for folder in wheels.folders().values():
        for name in wheels.LICENCES:
            assert (folder / name).read_bytes() == (ROOT / name).read_bytes()


def test_what_a_package_needs_of_ours(install):
    assert install.ours("hashcore") == {"hashcore"}
    assert install.ours("hashtrain") == {"hashcore", "hashtrain"}
    assert install.ours("evals") == {"hashcore", "hashtrain", "sparse_decode", "evals"}


def test_hashtrain_brings_what_cuda_needs_where_there_are_gpus():
    """hashcore alone stays small; whoever trains or decodes on Linux x86-64 can compile kernels."""
    stated = [Requirement(text) for text in importlib.metadata.requires("hashtrain") or []]
    (cuda,) = [one for one in stated if one.name == "hashcore" and one.extras == {"cuda"}]
    for system, machine, wanted in (
        ("linux", "x86_64", True),
        ("linux", "aarch64", False),
        ("darwin", "x86_64", False),
    ):
        assert cuda.marker is not None
        assert cuda.marker.evaluate({"sys_platform": system, "platform_machine": machine}) is wanted
    assert not [text for text in importlib.metadata.requires("hashcore") if "cuda-core" in text and "extra" not in text]


@pytest.mark.parametrize(
    ("package", "machine", "wrong"),
    [("hashtrain", "x86_64", 1), ("evals", "x86_64", 1), ("hashtrain", "aarch64", 0), ("hashcore", "x86_64", 0)],
)
def test_a_compiler_that_is_not_brought_is_named(install, monkeypatch, tmp_path, package, machine, wrong):
    def run(command, folder, **how):
        words = str(command[-1])
        missing = "cuda" in words
        answer = "usage" if words == "--help" else str(folder / "here.py")
        return subprocess.CompletedProcess(command, int(missing), answer, "No module named 'cuda'" if missing else "")

    monkeypatch.setattr(install, "run", run)
    monkeypatch.setattr(install.sys, "platform", "linux")
    monkeypatch.setattr(install.platform, "machine", lambda: machine)
    said = install.starts(package, tmp_path / "bin" / "python", tmp_path)
    assert len(said) == wrong
    assert all("expected to import cuda.core, which CUDA needs, got" in line for line in said)


@pytest.mark.parametrize(
    ("more", "size", "sentence"),
    [
        ({}, 1, None),
        ({"hashtrain": "1.0.0"}, 1, "expected ['hashcore'] of ours"),
        ({"torch": None}, 1, "expected ['hashcore', 'llvmlite', 'numba', 'numpy'], got"),
        ({"numpy": "1.26"}, 1, "expected what requirements.txt pins, got numpy 1.26"),
        ({}, 300_000_000, "expected less than 300 MB"),
    ],
)
def test_what_hashcore_brings_is_counted(install, more, size, sentence):
    pinned = dict(sorted(install.pins(), reverse=True))
    names = ("llvmlite", "numba", "numpy", *(name for name, version in more.items() if version is None))
    listed = {"hashcore": "1.0.0", **{name: pinned[name] for name in names}}
    said = install.brought("hashcore", listed | {name: v for name, v in more.items() if v}, size)
    assert bool(said) == (sentence is not None)
    assert sentence is None or any(sentence in line for line in said)


def test_the_lowest_versions_are_asked_for_of_what_is_named_and_without_the_pins(install, monkeypatch, tmp_path):
    asked: list[list[str]] = []
    monkeypatch.setattr(install, "uv", lambda *words: asked.append([str(word) for word in words]) or "")
    monkeypatch.setattr(install.check_wheels, "made", lambda wheels, name, pattern: wheels / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    for lowest in (False, True):
        install.environment("hashtrain", tmp_path, tmp_path, "3.11", lowest)
    _, pinned, _, low = asked
    assert pinned[-4:-2] == ["--constraints", str(ROOT / "requirements.txt")]
    assert "lowest-direct" not in pinned
    assert low[low.index("--resolution") + 1] == "lowest-direct"
    assert not any("requirements.txt" in word for word in low)
    assert not Path(low[low.index("--directory") + 1]).is_relative_to(ROOT)  # where uv would find the constraints
    stated = {text for name in ("hashcore", "hashtrain") for text in install.wanted(name).values()}
    assert {text for text in stated if not text.startswith("hashcore")} <= set(low)
    assert pinned[-2:] == low[-2:] == [str(tmp_path / "hashcore"), str(tmp_path / "hashtrain")]


def test_lowest_versions_need_not_be_pinned(install):
    listed = dict.fromkeys(install.HASHCORE_BRINGS, "0.1")
    assert len(install.brought("hashcore", listed, 1)) == 1
    assert install.brought("hashcore", listed, 1, lowest=True) == []
    assert install.floors("hashcore", listed) == "llvmlite 0.1, numba 0.1, numpy 0.1"


def test_a_python_that_is_not_to_be_had_is_said_in_a_line(install, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    for more, code in ([], 1), (["--if-found"], 0):
        assert install.main(["--python", "3.99", *more]) == code
        assert capsys.readouterr().out.startswith("check_install: Python 3.99 is neither installed nor available here")
