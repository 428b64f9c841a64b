"""The Python of README.md runs, and its comments name the shapes and weights that its calls return."""

import pathlib
import re
import subprocess
import sys

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
SHOW = "\nfor x in codes, planes:\n    print(x.dtype, list(x.shape))\nprint(weights)\n"


def test_shapes_in_comments_are_those_of_the_results():
    (code,) = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.M | re.S)
    done = subprocess.run([sys.executable, "-c", code + SHOW], capture_output=True, text=True, check=True)
    codes, planes, weights = done.stdout.splitlines()[-3:]
    comments = {line.split(" = ")[0]: line.partition("  # ")[2] for line in code.splitlines() if "int32" in line}
    found = {"codes": codes, "planes, weights": f"{planes}, {weights}"}
    assert {name: f"torch.{comment}" for name, comment in comments.items()} == found
