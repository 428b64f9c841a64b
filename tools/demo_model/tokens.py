"""Write the demo model's training tokens: `train.npy` and where its documents start, `starts.npy`.

    uv run python tools/demo_model/tokens.py OUT_DIR

The text is the standard library (including its tests) and the installed packages named below, in an order that keeps
the files of a folder together, so that a long context holds files that refer to each other.
"""

import random
import sys
from pathlib import Path

import numpy as np
from hashtrain.data.corpus import python_sources
from hashtrain.demo import demo_model_path
from hashtrain.models import pretrained
from rich.progress import track
from transformers import AutoTokenizer

# Open licences; the demo model's card lists them.
INSTALLED = (
    *("torch", "transformers", "sympy", "numba", "numpy", "matplotlib", "networkx", "fontTools", "pygments"),
    *("huggingface_hub", "setuptools", "mpmath", "hypothesis", "rich", "jinja2"),
)
MAX_FOLDER_CHARS = 400_000  # limits folders of many nearly identical model files


def folders(documents):
    """Group documents by folder: each folder shuffled and cut to MAX_FOLDER_CHARS, folders in random order."""
    rng, groups = random.Random(0), {}
    for document in documents:
        groups.setdefault(str(Path(document.name).parent), []).append(document)
    order = sorted(groups)
    rng.shuffle(order)
    for folder in order:
        rng.shuffle(groups[folder])
        size = 0
        for document in groups[folder]:
            size += len(document.text)
            if size <= MAX_FOLDER_CHARS or len(document.text) == size:
                yield document


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = pretrained(AutoTokenizer, str(demo_model_path()))
    documents = list(folders(python_sources(tests=True, installed=INSTALLED)))
    pieces, starts, size = [], [], 0
    for document in track(documents, "tokenizing"):
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
        starts.append(size)
        pieces.append(np.array([*ids, tokenizer.eos_token_id], dtype=np.uint16))
        size += len(pieces[-1])
    np.save(out / "train.npy", np.concatenate(pieces))
    np.save(out / "starts.npy", np.array(starts))
    print(f"{len(documents)} documents, {size / 1e6:.1f} M tokens")


if __name__ == "__main__":
    main()
