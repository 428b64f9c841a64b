"""Kernel sources: one text per file, with its headers expanded in place.

If the compiler read headers itself, cache keys would not cover them. These texts include nothing, so exactly what is
hashed is compiled. #line directives preserve file names and line numbers in compiler messages.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.M)
ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.M)
HASHCORE_KERNELS = Path(__file__).parent.parent / "kernels"

Macros = Mapping[str, str | int]


@functools.cache
def read_source(folder: Path, name: str) -> str:
    """Return the text of a kernel file with its quoted includes expanded, each header once.

    Headers are searched in the folder of the file and then in hashcore's, so that other packages' kernels can include
    "common.cuh". Includes in angle brackets are kept, for NVRTC's built-in headers.

    Raises: FileNotFoundError if the file or a header is missing.
    """
    return _expand(folder, name, set())


def _expand(folder: Path, name: str, seen: set[Path]) -> str:
    path = next((f / name for f in (folder, HASHCORE_KERNELS) if (f / name).is_file()), None)
    if path is None:
        raise FileNotFoundError(f"expected {name} in {folder} or {HASHCORE_KERNELS}, found none; reinstall the package")
    if path in seen:
        return ""
    seen.add(path)
    text = ONCE.sub("", path.read_text(encoding="utf-8"))

    def header(found: re.Match[str]) -> str:
        after = text.count("\n", 0, found.start()) + 2
        return f'{_expand(path.parent, found[1], seen)}\n#line {after} "{path.name}"'

    return f'#line 1 "{path.name}"\n{INCLUDE.sub(header, text)}'
