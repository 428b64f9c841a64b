"""Measure a session file: its size, saving, loading, the first token behind it, and what stays of it in memory.

    uv run packages/sparse-decode/benchmarks/session.py --model runs/smollm2 --hasher runs/smol/transform
    uv run packages/sparse-decode/benchmarks/session.py --layers 2 --tokens 131072 --no-verify --question 1

With --text, the model reads a prompt from a file; without, its cache is filled with random numbers, so that the keys of
a selection lie nowhere together, which is the worst case for pages of memory. Without --hasher: an untrained
`transform` with arbitrary remainder coefficients. Before each load the system is told to forget the file, so that the
first token includes reading it from disk; `in memory` is the share of the file that it then kept nevertheless.

`first` is the time from a path to the first token of an answer: loading, a question of --question tokens, one step.
`touched` is the share of the mapped bytes, in pages of 4 KB, that one step reads, and 50 steps. `most` is the largest
share that is resident, looked at after every layer, while 50 tokens are generated in half of the memory: whenever more
than half is resident, all is given back to the system, which then reads the file again.
The tokens must be those of the cache that was saved. The last line is JSON.
"""

import argparse
import ctypes
import mmap
import os
import pathlib
import tempfile
import time
from typing import Any

import torch
from hashtrain import Hasher
from hashtrain.data.corpus import token_ids
from hashtrain.models import pretrained, text_decoder
from results import machine, store
from shapes import SHAPES, make_hasher, make_model
from sparse_decode import Attachment, Budget, attach
from transformers import AutoTokenizer, DynamicCache, PreTrainedModel

TOKENS = 50
PAGEOUT = 21  # MADV_PAGEOUT of Linux: clean pages of a file go at once
LIBC = ctypes.CDLL(None)


def mappings(path: pathlib.Path, field: str = "Rss") -> list[tuple[int, int, int]]:
    """Return where a file is mapped: first address, bytes, and the bytes that are resident, or another field's."""
    found: list[tuple[int, int, int]] = []
    mine = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            mine = rest[-1:] == [str(path)]
            if mine:
                first, last = (int(x, 16) for x in name.split("-"))
                found.append((first, last - first, 0))
        elif mine and name == f"{field}:":
            found[-1] = *found[-1][:2], int(rest[0]) << 10
    return found


def share(path: pathlib.Path, field: str = "Rss") -> float:
    """Return the share of a mapped file that is resident, or another field's."""
    held = mappings(path, field)
    return sum(bytes_ for *_, bytes_ in held) / sum(size for _, size, _ in held)


def give_back(path: pathlib.Path) -> None:
    """Let the system take the memory of a mapped file; what it holds is read again when used."""
    for first, size, _ in mappings(path):
        LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), PAGEOUT)


def forget(path: pathlib.Path) -> float:
    """Ask the system to forget a file's content; return the share of it that is still in memory."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        size = path.stat().st_size
        pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            held = ctypes.c_char.from_buffer(mapped)
            LIBC.mincore(ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(size), pages)
            del held
    return sum(page & 1 for page in pages) / len(pages)


def filled(model: PreTrainedModel, given: argparse.Namespace) -> tuple[DynamicCache, torch.Tensor]:
    """Return a cache and its tokens [1, n]: of a text, or random ones."""
    cache, config, n = DynamicCache(config=model.config), model.config, given.tokens
    if given.text is not None:
        tokenizer = pretrained(AutoTokenizer, given.model)
        ids = token_ids(given.text.read_text("utf-8"), tokenizer, n, special=True)[None, :n]
        for part in ids.split(2048, 1):
            model(part, past_key_values=cache, logits_to_keep=1)
        return cache, ids
    ids = torch.randint(config.vocab_size, (1, n), generator=torch.Generator().manual_seed(0))
    size = 1, config.num_key_value_heads, n, config.hidden_size // config.num_attention_heads
    for layer in range(config.num_hidden_layers):
        keys, values = (torch.empty(size, dtype=model.dtype).normal_() for _ in range(2))
        cache.update(keys, values, layer)
    return cache, ids


def answer(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, tokens: int) -> torch.Tensor:
    """Continue a prompt [1, T], of which the cache holds the beginning: [1, T + tokens]."""
    options: dict[str, Any] = {"do_sample": False, "min_new_tokens": tokens, "pad_token_id": 0}
    return model.generate(  # pyright: ignore[reportCallIssue]
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens, **options
    )


def answer_in_half(
    model: PreTrainedModel, prompt: torch.Tensor, cache: DynamicCache, path: pathlib.Path
) -> tuple[torch.Tensor, float]:
    """Continue a prompt in half of the memory of its cache; return its tokens, and the largest share resident."""
    most = [0.0]

    def look(*_: Any) -> None:
        most.append(share(path))
        if most[-1] > 0.5:
            give_back(path)

    layers: Any = text_decoder(model).layers
    handles = [layer.register_forward_hook(look) for layer in layers]
    give_back(path)
    tokens = answer(model, prompt, cache, TOKENS)
    for handle in handles:
        handle.remove()
    return tokens, max(most)


def touched(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, path: pathlib.Path) -> dict[str, float]:
    """Return the shares of a mapped file that one more step reads, and 50 steps."""
    found: dict[str, float] = {}
    for tokens in (1, TOKENS):
        pathlib.Path("/proc/self/clear_refs").write_text("1")  # no page has been touched
        ids = answer(model, ids, cache, tokens)
        found[f"touched by {tokens}"] = share(path, "Referenced")
    return found


@torch.no_grad()
def measure(attachment: Attachment, given: argparse.Namespace, path: pathlib.Path) -> dict[str, Any]:
    model = attachment.model
    cache, ids = filled(model, given)
    prompt = torch.cat([ids, ids[:, 1 : 1 + given.question]], 1)
    began = time.perf_counter()
    attachment.save(cache, path, ids)
    found: dict[str, Any] = {"tokens": ids.shape[1], "save": time.perf_counter() - began}
    found["bytes"] = path.stat().st_blocks * 512
    wanted = answer(model, prompt, cache, TOKENS)
    del cache
    for name in ("cold", "warm"):
        if name == "cold":
            found["in memory"] = forget(path)
        began = time.perf_counter()
        cache, _ = attachment.load(path, prompt, verify=given.verify)
        found[f"load, {name}"] = time.perf_counter() - began
        answer(model, prompt, cache, 1)
        found[f"first, {name}"] = time.perf_counter() - began
    del cache
    cache, _ = attachment.load(path, prompt, verify=given.verify)
    tokens, found["most"] = answer_in_half(model, prompt, cache, path)
    if not torch.equal(tokens, wanted):
        raise SystemExit("the tokens differ from those of the cache that was saved")
    return found | touched(model, tokens, cache, path)


def main() -> None:
    """Measure and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; default: random weights of --shape")
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--layers", type=int, help="of a random model")
    parser.add_argument("--hasher", help="a folder of `hashtrain`")
    parser.add_argument("--text", type=pathlib.Path, help="UTF-8 text that --model reads")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--question", type=int, default=16, help="tokens behind the session")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not compare the checksum")
    parser.add_argument("--folder", type=pathlib.Path, help="of the file; default: a temporary one")
    parser.add_argument("--out", type=pathlib.Path)
    given = parser.parse_args()
    model = make_model(given.model, given.shape, given.layers)
    hasher = Hasher.from_pretrained(given.hasher) if given.hasher else make_hasher(model)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, attach(model, hasher, Budget()) as attachment:
        path = pathlib.Path(folder).resolve() / "session.kv"
        found = measure(attachment, given, path)
    store({"machine": machine(), "model": given.model or given.shape, **found}, given.out)


if __name__ == "__main__":
    main()
