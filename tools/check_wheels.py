"""Build every package's wheel and source archive, and check their content.

    uv run --no-project tools/check_wheels.py           # builds into a temporary folder
    uv run --no-project tools/check_wheels.py dist      # checks the output of `uv build --all-packages -o dist`

A wheel must contain exactly what git tracks below the package's src, the licence, and metadata that installers accept.
It is built from the source archive, which must therefore be complete too. Exit code 1 if anything is wrong.
"""

import email.message
import email.parser
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Files that a package needs but that no import would miss.
MUST_HOLD = {
    "evals": ["harness/example/ruler.yaml"],
    "hashcore": ["kernels/score.cu", "kernels/common.cuh"],
    "hashtrain": ["demo/model/model.safetensors", "demo/model/tokenizer.json", "demo/model/README.md"],
    "sparse_decode": ["kernels/gather.cu", "kernels/slots.cuh"],
    "sparse_serve": ["plugin.py", "_backend.py", "_metrics.py"],
}
LICENCES = ("LICENSE", "NOTICE")
ARCHIVE = ("CHANGELOG.md", "README.md", "pyproject.toml", *LICENCES)
# Joined here, because no file of the project may name an index.
INDEX = re.compile("|".join(r"\.".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"))))


def project(folder: pathlib.Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def folders(root: pathlib.Path = ROOT) -> dict[str, pathlib.Path]:
    """Return the folder of each package's sources: {import name: folder}."""
    return {project(p.parent)["name"].replace("-", "_"): p.parent for p in root.glob("packages/*/pyproject.toml")}


def build(folder: pathlib.Path) -> None:
    """Build all packages: source archives, and wheels from those."""
    subprocess.run(["uv", "build", "--quiet", "--all-packages", "--out-dir", folder], cwd=ROOT, check=True)


def made(folder: pathlib.Path, package: str, pattern: str) -> pathlib.Path:
    """Return the only file of a package that matches `pattern`, such as `*.whl`."""
    found = list(folder.glob(f"{package}-{pattern}"))
    if len(found) != 1:
        raise SystemExit(f"expected one {package}-{pattern} in {folder}, got {len(found)}; build into an empty folder")
    return found[0]


def sources(folder: pathlib.Path) -> set[str]:
    """Return the files below a package's src that git tracks, or would track."""
    git = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "src"]
    listed = subprocess.run(git, cwd=folder, check=True, capture_output=True, text=True).stdout
    return {path.removeprefix("src/") for path in listed.split("\0") if path and (folder / path).is_file()}


def content(package: str, found: set[str], expected: set[str]) -> list[str]:
    """Return what is wrong with a wheel's files: `found`, without its metadata, against `expected`."""
    wrong = []
    if more := sorted(found - expected):
        wrong.append(f"{package}: expected only the files that git tracks below src, also got {', '.join(more)}")
    if less := sorted(expected - found):
        wrong.append(f"{package}: expected all files that git tracks below src, {', '.join(less)} missing")
    needed = {f"{package}/{name}" for name in ("py.typed", *MUST_HOLD.get(package, ()))}
    if less := sorted(needed - found):
        wrong.append(f"{package}: expected {', '.join(less)} in the wheel, found none; has it been moved?")
    return wrong


def metadata(package: str, said: email.message.Message, folder: pathlib.Path) -> list[str]:
    """Return what is wrong with a wheel's metadata, given the package's folder."""
    wanted, wrong = project(folder), []

    def expect(what: str, value: object, got: object) -> None:
        if got != value:
            wrong.append(f"{package}: expected {what} {value!r} in the metadata, got {got!r}; see its pyproject.toml")

    expect("the version", wanted["version"], said["Version"])
    expect("the licence", "Apache-2.0", said["License-Expression"])
    expect("the description's type", "text/markdown", said["Description-Content-Type"])
    expect("the README as description:", True, said.get_payload() == (folder / "README.md").read_text())
    expect("the interpreters", wanted["requires-python"].replace(",", ", "), said["Requires-Python"])
    classifiers = said.get_all("Classifier", [])
    for classifier in ("Private :: Do Not Upload", "Typing :: Typed"):
        expect(f"the classifier {classifier!r}:", True, classifier in classifiers)
    urls = said.get_all("Project-URL", [])
    expect("a project URL:", True, bool(urls))
    expect("URLs of package indexes:", [], [url for url in urls if INDEX.search(url)])
    requirements = said.get_all("Requires-Dist", [])
    expect("requirements by URL or path:", [], [text for text in requirements if " @ " in text])
    return wrong


def wheel(package: str, path: pathlib.Path, folder: pathlib.Path) -> list[str]:
    """Return what is wrong with one wheel."""
    with zipfile.ZipFile(path) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        info = next(name.partition("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        said = email.parser.Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        own = {name: archive.read(at) for name in LICENCES if (at := f"{info}/licenses/{name}") in names}
    wrong = content(package, {name for name in names if not name.startswith(f"{info}/")}, sources(folder))
    if less := [name for name in LICENCES if own.get(name) != (ROOT / name).read_bytes()]:
        less = ", ".join(less)
        wrong.append(f"{package}: expected the repository's own {less} in the wheel; copy them into {folder.name}")
    return wrong + metadata(package, said, folder)


def archive(package: str, path: pathlib.Path) -> list[str]:
    """Return what is wrong with one source archive."""
    with tarfile.open(path) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    wrong = []
    if less := sorted(set(ARCHIVE) - names):
        wrong.append(f"{package}: expected {', '.join(less)} in the source archive, found none; look at source-include")
    if not any(re.fullmatch(r"tests/test_\w+\.py", name) for name in names):
        wrong.append(f"{package}: expected its tests in the source archive, found none; look at source-include")
    return wrong


def complaints(folder: pathlib.Path) -> list[str]:
    """Return what is wrong with everything built into `folder`."""
    wrong = []
    for package, place in sorted(folders().items()):
        wrong += wheel(package, made(folder, package, "*.whl"), place)
        wrong += archive(package, made(folder, package, "*.tar.gz"))
    return wrong


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or any(argument.startswith("-") for argument in arguments):
        print(f"expected nothing or one folder, got {' '.join(arguments)}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        if not arguments:
            build(pathlib.Path(name))
        wrong = complaints(pathlib.Path(arguments[0] if arguments else name))
    for line in wrong:
        print(f"check_wheels: {line}", file=sys.stderr)
    print(f"{len(folders())} wheels and source archives, {len(wrong)} complaints")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
