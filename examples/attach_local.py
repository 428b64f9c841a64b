"""Compare the text a model generates with dense attention and with a share of its cache.

    uv run hashtrain                                                       # once: hashers of the demo model
    uv run examples/attach_local.py
    uv run examples/attach_local.py --hasher lsh                           # untrained codes need no training
    uv run examples/attach_local.py --model path/or/hub-id --hasher runs/mine/transform --prompt-file long.txt

Greedy texts never agree again after the first different token. So the dense text is also scored with sparse attention:
the share of its tokens that sparse attention would have chosen as well is the fairer figure.
"""

import argparse
import pathlib
from typing import Any

import torch
from hashtrain.data.corpus import held_out_sources
from hashtrain.demo import DEMO, model_path
from hashtrain.models import load_model
from hashtrain.usage import guarded
from sparse_decode import Attachment, Budget, attach
from sparse_decode.streaming import TimedStreamer, load_selector, read_text, warm_up
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase


def generate(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Tensor, count: int) -> list[int]:
    """Generate `count` tokens greedily after the prompt [1, T], print their rate, and return them."""
    streamer = TimedStreamer(tokenizer, lambda text: print(text, end="", flush=True))
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "streamer": streamer, "do_sample": False}
    model.generate(prompt, max_new_tokens=count, min_new_tokens=count, pad_token_id=0, **settings)  # pyright: ignore[reportCallIssue]
    rate = streamer.tokens_per_second
    print(f"[{len(streamer.tokens)} tokens" + ("" if rate is None else f", {rate:.1f} per second") + "]\n")
    return streamer.tokens


@torch.no_grad()
def agreement(model: PreTrainedModel, prompt: Tensor, written: list[int]) -> float:
    """Return the share of the written tokens that the model, as attached now, finds most likely."""
    new = torch.tensor([written], dtype=prompt.dtype, device=prompt.device)
    logits = model(torch.cat([prompt, new], dim=1), use_cache=False).logits
    return (logits[:, prompt.shape[1] - 1 : -1].argmax(-1) == new).float().mean().item()


def compare(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, given: argparse.Namespace, prompt: Tensor):
    """Generate with both and print the differences. Returns: the agreement and the attachment used for decoding."""
    selector, budget = load_selector(given.hasher, model), Budget(fraction=given.fraction)
    print("--- dense")
    dense = generate(model, tokenizer, prompt, given.tokens)
    print(f"--- {100 * given.fraction:g} % of the cache")
    attached: Attachment
    with attach(model, selector, budget) as attached:  # prefill stays dense, every step after it is sparse
        warm_up(model, prompt)  # compiles the kernels, once per machine
        attached.reset_density()
        sparse = generate(model, tokenizer, prompt, given.tokens)
    same = next((i for i, pair in enumerate(zip(dense, sparse, strict=True)) if pair[0] != pair[1]), len(dense))
    # One forward pass with sparse rows after the prompt is equivalent to decoding them token by token.
    with Attachment(model, selector, budget, sparse_rows=prompt.shape[1]):
        share = agreement(model, prompt, dense)
    print(f"the first {same} tokens agree; sparse attention would choose {100 * share:.0f} % of the dense tokens")
    read = ", ".join(f"{layer}: {100 * density:.2f} %" for layer, density in attached.density().items())
    print(f"share of the visible tokens read, by layer: {read}; all others are dense")
    return share, attached


def run(arguments: list[str] | None) -> int:
    """Parse the arguments, load the model and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEMO, help="folder or hub id; default: the demo model")
    parser.add_argument("--hasher", default="runs/demo/transform", help="a folder of `hashtrain`, or lsh")
    parser.add_argument("--prompt-file", type=pathlib.Path, help="text file; default: a held-out Python module")
    parser.add_argument("--prompt-tokens", type=int, default=3800, help="use at most this many of the first tokens")
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens to generate")
    parser.add_argument("--fraction", type=float, default=0.02, help="share of the visible tokens to attend to")
    given = parser.parse_args(arguments)
    if given.prompt_tokens < 1 or given.tokens < 1:
        parser.error(f"--prompt-tokens and --tokens must be 1 or more, got {given.prompt_tokens} and {given.tokens}")
    model, tokenizer = load_model(model_path(given.model))
    path = given.prompt_file
    text = next(d.text for d in held_out_sources() if d.name == "tempfile.py") if path is None else read_text(path)
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    assert isinstance(ids, Tensor)
    compare(model, tokenizer, given, ids[:, : given.prompt_tokens].to(model.device))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the example. Returns 0, or 2 with one sentence on stderr if the input cannot be used."""
    return guarded("attach_local", lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
