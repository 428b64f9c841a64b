"""Tiny models, hashers and an auditor for the tests."""

import functools

import hashcore
import torch
import transformers
from sparse_decode import interface
from sparse_decode.attend import attend, attend_reference
from sparse_decode.interface import Call
from sparse_decode.positions import visible_rows

VOCABULARY = 97
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
TOLERANCE = 1e-5

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_CONFIGS = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}),
}


def tiny_model(family="llama", seed=0, implementation="sdpa", **changes):
    """Make a random model of 4 layers, 4 query heads, 2 KV heads of 16, sharpened so that tokens are well separated."""
    make, extra = _CONFIGS[family]
    torch.manual_seed(seed)
    config = make(**{**_BASE, **extra, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
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


class SignHasher:
    """Codes from a random matrix of +1 and -1, one per KV head: exact on whole numbers. Queries become 3 planes."""

    def __init__(self, kv_heads=2, head_dim=16, bits=128, seed=0):
        generator = torch.Generator().manual_seed(seed)
        self.matrix = torch.randint(0, 2, (kv_heads, head_dim, bits), generator=generator).float() * 2 - 1

    def encode_keys(self, layer, k):
        return hashcore.pack(k.float() @ self.matrix)

    def encode_queries(self, layer, q):
        weights = q.float().unflatten(1, (len(self.matrix), -1)).sum(2) @ self.matrix
        return hashcore.planes(weights)

    def require_match(self, model_config):
        if model_config.num_key_value_heads != len(self.matrix):
            raise ValueError(f"expected KV heads {len(self.matrix)}, got {model_config.num_key_value_heads}")


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
    """Checks every sparse step of a run from outside, against the simplest statement of each law."""

    def __init__(self, monkeypatch):
        self.steps = self.padded = 0
        self.sizes = []
        self._visible = None
        monkeypatch.setattr(interface, "attend", self._attend)
        monkeypatch.setattr(interface, "visible_rows", self._visible_rows)
        monkeypatch.setattr(Call, "codes", functools.partialmethod(_audited_codes, Call.codes))

    def _visible_rows(self, *arguments):
        self._visible = visible_rows(*arguments)
        return self._visible

    def _attend(self, q, k, v, indices, scaling):
        (batch, hkv, n, _), sets = k.shape, indices.shape[1]
        out = attend(q, k, v, indices, scaling)
        selected = as_sets(indices, n)
        visible = torch.ones(1, 1, q.shape[2], n, dtype=torch.bool) if self._visible is None else self._visible
        assert not (selected & ~visible).any(), "selected a token that its row does not see"
        used = selected.any(2).view(batch, hkv, sets // hkv, n).any(2)
        poison = ~used[..., None]
        poisoned = attend(q, k.masked_fill(poison, torch.nan), v.masked_fill(poison, torch.nan), indices, scaling)
        assert torch.equal(out, poisoned), "read a token that was not selected"
        torch.testing.assert_close(out, attend_reference(q, k, v, indices, scaling), atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(out, masked_attention(q, k, v, selected, scaling), atol=TOLERANCE, rtol=TOLERANCE)
        self.steps += 1
        self.padded += int((~visible).any())
        self.sizes.append((visible.sum(-1), (indices >= 0).sum(-1)))
        return out


def _audited_codes(call, original, k):
    codes = original(call, k)
    if codes is not None:
        expected = call.plan.selector.encode_keys(call.layer, k)
        assert codes.shape == expected.shape, "as many codes as cached keys"
        flipped = (hashcore.unpack(codes) != hashcore.unpack(expected)).double().mean()
        assert flipped < 1e-4, "codes are those of the cached keys"  # a product of another shape rounds otherwise
    return codes


def as_sets(indices, n):
    """Turn index lists [..., K] into bool sets [..., n]; asserts ascending, no repeats, -1 only at the end."""
    dead = indices < 0
    assert not (dead[..., :-1] & ~dead[..., 1:]).any()
    steps = indices[..., 1:] - indices[..., :-1]
    assert (steps[~dead[..., 1:]] > 0).all()
    counts = torch.zeros(*indices.shape[:-1], n + 1, dtype=torch.int64)
    counts.scatter_add_(-1, indices.masked_fill(dead, n), torch.ones_like(indices))
    return counts[..., :n] > 0


def masked_attention(q, k, v, selected, scaling):
    """Dense attention over all tokens, restricted to `selected` [B, H, Q, N] by a mask: [B, Q, Hq, Dv]."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    selected = selected.repeat_interleave(q.shape[1] // selected.shape[1], 1)
    logits = (q.float() @ k.transpose(2, 3) * scaling).masked_fill(~selected, -torch.inf)
    return (logits.softmax(-1).nan_to_num(0) @ v).transpose(1, 2).to(q.dtype)
