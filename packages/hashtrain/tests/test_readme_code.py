"""The Python of README.md runs, and its comments name the shapes and weights that its calls return."""

import pathlib
import re

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


def test_shapes_in_comments_are_those_of_the_results():
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)
    found = {}
    exec(compile(code, "README.md", "exec"), found)
    comments = {line.split(" = ")[0]: line.partition("  # ")[2] for line in code.splitlines() if "int32" in line}
    codes, planes, weights = (found[name] for name in ("codes", "planes", "weights"))
    assert comments == {
        "codes": f"int32 {list(codes.shape)}",
        "planes, weights": f"int32 {list(planes.shape)}, {weights}",
    }
    assert str(codes.dtype) == str(planes.dtype) == "torch.int32"
