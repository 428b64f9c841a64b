"""Attach to a tiny random model of every causal family of the installed transformers, and look for crashes.

    uv run tests/check_families.py                     # all of them, 10 minutes
    uv run tests/check_families.py llama falcon_h1     # these
    uv run tests/check_families.py --out docs/results/families.json

Each family's config is built with one set of small sizes, under the names that families use for them. Every model that
can be built generates a few tokens dense, attached at a budget of 100 %, detached, and by exact kernels behind a longer
prompt. "equal": token for token, with logits within a tolerance; "refused": an error of one sentence, at `attach` or at
prefill; "not built": the config needs other arguments, or the model cannot generate by itself. Prints one line per
family and exits 1 if one crashes or differs, or if fewer than `LEAST` are equal.
"""

import argparse
import contextlib
import io
import json
import logging
import pathlib
import sys
import warnings
from collections import Counter
from typing import Any, NamedTuple

import torch
import transformers
from hashtrain.files.atomic import write_text
from sparse_decode import Attachment, Budget, LshSelector
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

LEAST = 125
TOLERANCE = 1e-3
MOST_WEIGHTS = 100_000_000
PROMPT, LONG, NEW = 24, 300, 6  # tokens of two prompts, the second for our dense kernels, and new ones
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 96),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 97),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "mamba_chunk_size"), 16),
    **{"hidden_size_per_layer_input": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    **{"moe_intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
}
PARTS: dict[str, Any] = {"image_size": 32, "patch_size": 8, "depth": 2, "out_hidden_size": 64}
"""Sizes of vision and audio parts, in addition to those of the text part."""
CHANGES: tuple[dict[str, Any], ...] = (
    *({}, {"num_key_value_heads": 4}, {"head_dim": None}, {"sliding_window": None}),
    {"layer_types": ["linear_attention", "full_attention"] * 2},
    {"attn_layer_indices": [1, 3], "attn_layer_period": 2, "attn_layer_offset": 1},
    {"num_key_value_heads": 1},
    {"layer_types": ["sliding_attention", "full_attention"] * 2},
    {"is_decoder": True, "num_key_value_heads": 4},
    *({"rotary_dim": 8}, {"attention_types": [[["global"], 4]]}, {"head_dim": None, "num_key_value_heads": 4}),
    {"layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": None, "num_key_value_heads": 4},
    *({"num_experts_per_tok": 1}, {"layer_types": ["conv", "full_attention"] * 2}),
    *({"num_hidden_layers": None}, {"max_position_embeddings": None}),
    {"is_decoder": True, "num_key_value_heads": 4, "default_language": "en_XX"},
    {"is_decoder": True, "num_key_value_heads": 4, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    {"num_heads": 8},
)
"""Changes to the sizes, with None to leave one out, tried in turn until a family can be built."""


class Found(NamedTuple):
    """The outcome for a family: one of the words above, and a remark."""

    verdict: str
    remark: str = ""


def build(name: str, change: dict[str, Any]) -> PreTrainedModel:
    """Create a tiny random model of a family. Raises: any error of its config or its model."""
    left_out = {key for key, value in change.items() if value is None} - {"sliding_window"}
    sizes = {key: value for key, value in {**SIZES, **change}.items() if key not in left_out}
    make: Any = CONFIG_MAPPING[name]
    config = make(**sizes, **parts(make, sizes))
    with torch.device("meta"):  # first without memory, because some are large with any sizes
        weights = sum(x.numel() for x in AutoModelForCausalLM.from_config(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"{weights:,} weights, more than {MOST_WEIGHTS:,}")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def parts(make: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Create the nested configs of a config, of their default classes, with the same small sizes."""
    if not make.sub_configs:
        return {}
    whole = make()
    kinds = {key: type(part) for key in make.sub_configs if (part := getattr(whole, key, None)) is not None}
    return {key: kind(**{**sizes, **PARTS, **parts(kind, sizes)}) for key, kind in kinds.items()}


def generate(model: PreTrainedModel, tokens: int = PROMPT) -> tuple[torch.Tensor, torch.Tensor]:
    """Generate greedily from a prompt: tokens [B, T], logits [steps, B, vocabulary]."""
    ids = torch.randint(3, 90, (2, tokens), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        found: Any = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)  # pyright: ignore[reportCallIssue]
    return found.sequences, torch.stack(found.logits)


def differs(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Return how two generations differ, or an empty string."""
    if not torch.equal(one[0], other[0]):
        return f"tokens differ from number {int((one[0] != other[0]).any(0).int().argmax())} on"
    apart = float((one[1] - other[1]).nan_to_num().abs().max())
    return f"logits are {apart:.2g} apart" if apart > TOLERANCE * max(1.0, float(one[1].abs().max())) else ""


def check(name: str) -> Found:
    """Check one family with the first sizes that work."""
    refused, unbuilt = None, []
    for change in CHANGES:
        found = check_with(name, change)
        if found.verdict in ("equal", "differs", "crashes"):
            return found
        refused = refused or (found if found.verdict == "refused" else None)
        unbuilt.append(found)
    return refused or unbuilt[0]


def check_with(name: str, change: dict[str, Any]) -> Found:
    """Compare one family dense, attached at 100 % under both rules, and detached."""
    try:
        model = build(name, change)
        dense, behind = generate(model), generate(model, LONG)
    except Exception as error:  # third-party models fail in many ways
        return Found("not built", f"{type(error).__name__}: {error}".splitlines()[0][:100])
    if again := differs(dense, generate(model)):
        return Found("not built", f"dense generations differ from each other: {again}")
    layers: tuple[int, ...] = ()
    for rule in (None, 0):
        at = "attach"
        try:
            attachment = Attachment(model, LshSelector(model.config), Budget(1.0), dense_layers=0, sparse_rows=rule)
            at = f"sparse_rows={rule!r}"
            with attachment:
                layers = attachment.layers
                if apart := differs(dense, generate(model)):
                    return Found("differs", f"{at}: {apart}")
                if set(attachment.density()) != set(layers):
                    return Found("differs", f"{at}: layers {sorted(attachment.density())} were sparse")
        except ValueError as error:
            return Found("refused", str(error))
        except Exception as error:  # a crash, which this tool looks for
            return Found("crashes", f"{at}: {type(error).__name__}: {error}"[:200])
        if apart := differs(dense, generate(model)):
            return Found("differs", f"detached: {apart}")
    with Attachment(model):
        if apart := differs(behind, generate(model, LONG)):
            return Found("differs", f"exact, {LONG} tokens: {apart}")
    return Found("equal", f"layers {', '.join(map(str, layers))}")


def main(arguments: list[str]) -> int:
    """Check the named families, or all; return 1 if one crashes or differs, or too few are equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", choices=[[], *CAUSAL], metavar="family")
    parser.add_argument("--out", type=pathlib.Path, help="store what was found of all families as JSON")
    given = parser.parse_args(arguments)
    if (asked := given.families) and given.out:
        parser.error("expected no names of families with --out, which stores all of them")
    transformers.logging.set_verbosity(logging.CRITICAL)
    outcomes: dict[str, Found] = {}
    for name in asked or CAUSAL:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            found = check(name)
        outcomes[name] = found
        print(f"{name:28} {found.verdict:10} {found.remark}", flush=True)
    counts = Counter(found.verdict for found in outcomes.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    if given.out:
        content = {"transformers": transformers.__version__, "families": outcomes}
        write_text(given.out, json.dumps(content, indent=1) + "\n")
    if too_few := not asked and counts["equal"] < LEAST:
        print(f"expected at least {LEAST} equal families; see those that were refused", file=sys.stderr)
    return int(too_few or bool(counts["crashes"] + counts["differs"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
