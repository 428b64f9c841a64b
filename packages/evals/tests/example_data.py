"""Worked example of local data: Python classes, with a question about one attribute at the end.

Write its files again with `uv run packages/evals/tests/example_data.py`. The correct word occurs once in the class,
after the same prefix; the wrong ones occur there after other prefixes. The demo model can answer these.
"""

import json
import random
from pathlib import Path
from typing import Any

import evals
from hashtrain.files.atomic import write_text

FOLDER = Path(evals.__file__).parent / "harness" / "example"
PREFIXES = (
    *("marble", "copper", "velvet", "walnut", "garnet", "timber"),
    *("saffron", "pepper", "cobalt", "willow", "juniper", "amber"),
)
ENDINGS = ("queue", "cache", "lock", "stack", "table", "buffer", "index", "stream")
VALUES = ("None", "[]", "{}", "0", "set()")
METHODS = (
    *("name", "value", "path", "token", "source", "target", "field", "record", "result", "offset", "length"),
    *("parser", "reader", "writer", "module", "handler"),
)
FILES = {"shots.jsonl": (1, 10, 3), "short.jsonl": (2, 40, 3), "long.jsonl": (3, 20, 40)}
"""File: seed, items, methods between the attributes and the question."""


def item(draw: random.Random, methods: int) -> dict[str, Any]:
    """Create one item, with the fields that the tasks of the example read."""
    prefixes, endings = draw.sample(PREFIXES, len(ENDINGS)), draw.sample(ENDINGS, len(ENDINGS))
    pairs = zip(prefixes, endings, strict=True)
    lines = ["class Store:", "    def __init__(self):"]
    lines += [f"        self.{prefix}_{ending} = {draw.choice(VALUES)}" for prefix, ending in pairs]
    for _ in range(methods):
        name, given = draw.sample(METHODS, 2)
        lines += ["", f"    def {name}(self, {given}):", f"        return len({given})"]
    asked = draw.randrange(len(ENDINGS))
    choices = [endings[asked], *draw.sample(endings[:asked] + endings[asked + 1 :], 3)]
    draw.shuffle(choices)
    return {
        "context": "\n".join([*lines, "", "    def close(self):", ""]),
        "question": f"        self.{prefixes[asked]}_",
        "choices": choices,
        "label": choices.index(endings[asked]),
        "answers": [endings[asked]],  # LongBench's name of the field; the next two are RULER's
        "outputs": [endings[asked]],
        "max_length": 1024,
    }


def lines_of(file: str) -> str:
    """Return the content of one of `FILES`."""
    seed, count, methods = FILES[file]
    draw = random.Random(seed)
    return "".join(json.dumps(item(draw, methods)) + "\n" for _ in range(count))


def main() -> None:
    """Write every file of the example."""
    for file in FILES:
        write_text(FOLDER / file, lines_of(file))


if __name__ == "__main__":
    main()
