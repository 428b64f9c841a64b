"""Kernel sources: one text per file, with its headers expanded in place.

If the compiler read headers itself, cache keys would not cover them. These texts include nothing, so exactly what is
hashed is compiled. #line directives preserve file names and line numbers in compiler messages.
"""

import ctypes
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"[^\n]*$', re.M)
ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.M)
HASHCORE_KERNELS = Path(__file__).parent.parent / "kernels"

Macros = Mapping[str, str | int]
NUMBERS = {"i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "float": ctypes.c_float}
FIELD = re.compile(r"  (?:const )?(\w+)(\*?) (\w+)(?:\[(\d+)\])?;(?: *//.*)?|\s*(?://.*)?")


@functools.cache
def read_source(folder: Path, name: str) -> str:
    """Return the text of a kernel file with its quoted includes expanded, each header once.

    Headers are searched in the folder of the file and then in hashcore's, so that other packages' kernels can include
    "common.cuh". Includes in angle brackets are kept, for NVRTC's built-in headers.

    Raises: FileNotFoundError if the file or a header is missing.
    """
    return _expand(folder, name, set())


@functools.cache
def structure(folder: Path, file: str, name: str) -> Any:
    """Return a structure of a kernel file as a class of ctypes: its fields have the names and types of the source.

    Fields are numbers, pointers, arrays of numbers and other structures of the file, one a line.
    """
    (body,) = re.findall(rf"^struct {name} {{\n(.*?)^}};", read_source(folder, file), re.M | re.S)
    fields: list[tuple[str, Any]] = []
    for line in body.splitlines():
        if not (found := FIELD.fullmatch(line)):
            raise ValueError(f"{file}, struct {name}: expected one field a line, such as `  i64 size;`, got {line!r}")
        kind, pointer, field, count = found.groups()
        if kind is None:
            continue
        own: Any = ctypes.c_void_p if pointer else NUMBERS.get(kind) or structure(folder, file, kind)
        fields.append((field, own * int(count) if count else own))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


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
