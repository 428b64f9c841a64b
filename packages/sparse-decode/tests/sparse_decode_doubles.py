"""Tiny models, hashers and an auditor for the tests."""

import functools

import hashcore
import pytest
import torch
import transformers
from hashtrain import Hasher, HasherConfig, ModelShape
from sparse_decode.intervals import causal
from sparse_decode.reference import step_reference, tokens_read
from sparse_decode.select import HashSelector
from sparse_decode.step import SparseLayer
from transformers.cache_utils import QuantizedLayer

VOCABULARY = 97
TOLERANCE = 1e-5

SIZES = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None)
_ALTERNATING = {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_CONFIGS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, _EXPERTS),
    "gemma2": (transformers.Gemma2Config, {**_ALTERNATING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.2}),
    "gemma3": (transformers.Gemma3TextConfig, {**_ALTERNATING, "query_pre_attn_scalar": 16}),
    "gpt_oss": (transformers.GptOssConfig, {**_ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": (transformers.GraniteConfig, {"attention_multiplier": 0.2}),
    "cohere2": (transformers.Cohere2Config, {"sliding_window": 16}),
}
FAMILIES = tuple(_CONFIGS)
QUICK = "llama", "gemma2", "gpt_oss"
"""Those between them have what is unusual: grouped heads, sliding layers, soft-capping, learned sinks."""
UNUSUAL = (*QUICK, "qwen3", "qwen3_moe", "gemma3", "granite", "cohere2")
"""And norms of queries and keys, experts, a factor on the logits. To attention the others are what llama is: they are
generated with (test_generation.py), and tests/check_families.py runs every family."""


def slow_but(quick, values):
    """Return values for `parametrize`, those but the quick ones marked slow."""
    given = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [value if value in quick else pytest.param(*parts, marks=pytest.mark.slow) for value, parts in given]


def config_of(family, **changes):
    """Make the config of a tiny model."""
    make, extra = _CONFIGS[family]
    return make(**{**SIZES, **extra, **changes})


def tiny_model(family="llama", seed=0, implementation=None, **changes):
    """Make a random model of 4 layers, 4 query heads, 2 KV heads of 16, sharpened so that tokens are well separated."""
    torch.manual_seed(seed)
    config = config_of(family, **changes)
    implementation = implementation or ("eager" if family in ("gemma2", "gpt_oss") else "sdpa")  # they know no SDPA
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
            if name.endswith("sinks"):  # as large as the logits, or they would show nowhere
                parameter.copy_(torch.linspace(-1, 3, len(parameter)))
    return model


def prompts(lengths=(40, 27, 33), seed=1):
    """Draw a left-padded batch: ids and attention mask, [B, longest]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = 0
        mask[row, : max(lengths) - length] = 0
    return ids, mask


def generate(model, ids, mask=None, new_tokens=16, **options):
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=mask, **options)


class RoundedLayer(QuantizedLayer):
    """A quantised cache layer, which cannot carry codes."""

    _quantize = _dequantize = None  # it is refused before it stores anything


class SignHasher:
    """Codes from a random matrix of +1 and -1, one per KV head: exact on whole numbers. Queries become 3 planes."""

    def __init__(self, kv_heads=2, head_dim=16, bits=128, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.matrix = torch.randint(0, 2, (kv_heads, head_dim, bits), generator=generator).float() * 2 - 1

    def encode_keys(self, layer, k):
        return hashcore.pack(k.float() @ self.matrix)

    def encode_queries(self, layer, q):
        weights = q.float().unflatten(1, (len(self.matrix), -1)).sum(2) @ self.matrix
        return hashcore.planes(weights, check=False)

    def require_match(self, model_config):
        if model_config.num_key_value_heads != len(self.matrix):
            raise ValueError(f"expected KV heads {len(self.matrix)}, got {model_config.num_key_value_heads}")


class Calibrated(SignHasher):
    """A hasher with some remainder."""

    coefficients = torch.tensor([[-1.0, 0.4, 0.5, 0.1, -0.2, 0.6]]) * torch.tensor([[1.0], [0.8], [1.1], [0.9]])

    def remainder(self, layer):
        return self.coefficients


def hasher_for(model, variant="transform", remainder=True, seed=0, **config):
    """Make a hasher of a tiny model, by default with some remainder."""
    hasher = Hasher(HasherConfig(variant, ModelShape.of(model.config), **config), seed).requires_grad_(False)
    for layer in hasher.layers if remainder else ():
        layer.remainder.copy_(Calibrated.coefficients)
    return hasher


class PaperLikeHasher(SignHasher):
    """One function per query head, shared by queries and keys; the group's codes side by side, one plane."""

    def __init__(self, query_heads=4, kv_heads=2, head_dim=16, bits=64, seed=0):
        super().__init__(query_heads, head_dim, bits, seed)
        self.kv_heads = kv_heads
        self.matrix = self.matrix.unflatten(0, (kv_heads, -1))  # [Hkv, G, D, bits]

    def _concatenate(self, x):
        """[B, Hkv, G, T, D] -> [B, Hkv, T, G * W]"""
        return hashcore.pack(x.float() @ self.matrix).transpose(2, 3).flatten(3)

    def encode_keys(self, layer, k):
        return self._concatenate(k[:, :, None])

    def encode_queries(self, layer, q):
        return self._concatenate(q.unflatten(1, (self.kv_heads, -1)))[..., None, :], (1,)

    def require_match(self, model_config):
        pass


class Auditor:
    """Checks every sparse step of a run from outside, against the reference and the laws of what is read."""

    def __init__(self, monkeypatch):
        self.steps = self.padded = 0
        self.sizes = []
        monkeypatch.setattr(SparseLayer, "step", functools.partialmethod(_audited, SparseLayer.step, self))

    def check(self, layer, x, interval, held, out, step):
        (batch, _, rows, _), n = x.q.shape, x.k.shape[2]
        seen = causal(batch, rows, n, x.q.device) if interval is None else interval.expand(batch, -1, -1)
        self.steps += 1
        self.padded += int(bool(seen[..., 0].any()))
        if layer.selector.needs_codes:
            expected = layer.selector.encode_keys(layer.layer, x.k)
            flipped = (hashcore.unpack(held.codes[:, :, :n]) != hashcore.unpack(expected)).double().mean()
            assert flipped < 1e-4, "codes are those of the cached keys"  # a product of another shape rounds otherwise
        if isinstance(layer.selector, HashSelector):
            close = {"atol": TOLERANCE, "rtol": TOLERANCE} if layer.remainder is None else {"atol": 5e-3, "rtol": 5e-3}
            torch.testing.assert_close(out, step_reference(layer, x, seen), **close)
            if layer.remainder is None:
                each = [(b, r, tuple(seen[b, r].tolist())) for b in range(batch) for r in range(rows)]
                read = [torch.cat(tokens_read(layer, x, *one)) for one in each]
                self.sizes.append((seen[..., 1] - seen[..., 0], torch.tensor([len(one) for one in read])))


def _audited(layer, original, auditor, x, interval, held):
    out = original(layer, x, interval, held)
    auditor.check(layer, x, interval, held, out, original)
    return out


def as_sets(indices, n):
    """Turn index lists [..., K] into bool sets [..., n]; asserts ascending, no repeats, -1 only at the end."""
    dead = indices < 0
    assert not (dead[..., :-1] & ~dead[..., 1:]).any()
    steps = indices[..., 1:] - indices[..., :-1]
    assert (steps[~dead[..., 1:]] > 0).all()
    counts = torch.zeros(*indices.shape[:-1], n + 1, dtype=torch.int64)
    counts.scatter_add_(-1, indices.masked_fill(dead, n), torch.ones_like(indices))
    return counts[..., :n] > 0
