"""examples/from_gguf.py: a tiny model written as a GGUF file comes back as the folder of the same model."""

import numpy as np
import pytest
import torch
from hashtrain.models import load_model
from transformers import LlamaConfig, LlamaForCausalLM

gguf = pytest.importorskip("gguf", reason="gguf is in a dependency group of its own")

TOKENS = ["<s>", "</s>", "a", "b", "c", "ab", "abc", "Ġ"]
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=len(TOKENS),
    max_position_embeddings=128,
    bos_token_id=0,
    eos_token_id=1,
)
NAMES = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
}
HEADS = {"attn_q": CONFIG.num_attention_heads, "attn_k": CONFIG.num_key_value_heads}
IDS = torch.tensor([[2, 5, 6, 3, 4, 2]])


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection with the two halves of each head's rows in turn, as GGUF keeps llama's queries and keys."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write(path, model, kind):
    """Write the model with weight matrices of this kind of GGML; return it with the weights that they stand for."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(CONFIG.num_hidden_layers)
    writer.add_context_length(CONFIG.max_position_embeddings)
    writer.add_embedding_length(CONFIG.hidden_size)
    writer.add_feed_forward_length(CONFIG.intermediate_size)
    writer.add_head_count(CONFIG.num_attention_heads)
    writer.add_head_count_kv(CONFIG.num_key_value_heads)
    writer.add_layer_norm_rms_eps(CONFIG.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for i in range(CONFIG.num_hidden_layers):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in NAMES.items()}
    state = {}
    for ours, theirs in names.items():
        weight = model.state_dict()[f"{ours}.weight"].numpy()
        of = gguf.GGMLQuantizationType[kind] if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        state[f"{ours}.weight"] = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, of), of).copy())
        if heads := HEADS.get(theirs.rpartition(".")[2]):
            weight = interleaved(weight, heads)
        writer.add_tensor(f"{theirs}.weight", gguf.quantize(weight, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_folder_is_the_model_with_its_tokenizer_and_template(load, tmp_path, kind, capsys):
    torch.manual_seed(0)
    file, out = tmp_path / "tiny.gguf", tmp_path / "new" / "made"
    model = write(file, LlamaForCausalLM(CONFIG).eval(), kind)
    assert load("examples", "from_gguf").main([str(file), f"{out}/", "--dtype", "float32"]) == 0
    assert "2 layers, 4 query and 2 KV heads of 16" in capsys.readouterr().out
    made, tokenizer = load_model(str(out))
    torch.testing.assert_close(made(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)
    assert tokenizer.convert_ids_to_tokens(tokenizer("abcab", add_special_tokens=False).input_ids) == ["abc", "ab"]
    assert tokenizer.apply_chat_template([{"content": "abc"}], tokenize=False) == "abc"
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for place, words in ((cut, "check that it is complete"), (tmp_path / "none", "No such file")):
        assert load("examples", "from_gguf").main([str(place), str(tmp_path / "refused")]) == 2
        assert words in capsys.readouterr().err
    assert list((tmp_path / "new").iterdir()) == [out]
    assert not (tmp_path / "refused").exists()
