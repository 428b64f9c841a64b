"""examples/from_gguf.py: a tiny model written as a GGUF file comes back as the folder of the same model."""

import pytest
import torch
from hashtrain.models import load_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

gguf = pytest.importorskip("gguf", reason="gguf is in a dependency group of its own")

# The vocabulary of transformers' own test of Qwen2's tokenizer (tests/models/qwen2), whose ids are known, and more.
MERGES = ["Ġ l", "Ġl o", "Ġlo w", "e r", "0 1", "; }", ";} Ċ", "Ï ĵ", "Ġ #", "# #"]
MERGES += ["2 0", "2 4", "20 24", "' L", "L L", "'L L", "Ċ Ċ", "ĊĊ Ġ", "( y", "Ã ©"]
TOKENS = [*bytes_to_unicode().values()]
TOKENS += ["Ġl", "Ġn", "Ġlo", "Ġlow", "er", "Ġlowest", "Ġnewer", "Ġwider", "01", ";}", ";}Ċ"]
TOKENS += ["Ïĵ", "Ġ#", "##", *(merge.replace(" ", "") for merge in MERGES[10:]), "Ġxyz", "<s>", "</s>"]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
SIZES |= {"num_key_value_heads": 2, "vocab_size": len(TOKENS), "max_position_embeddings": 128}
CONFIG = LlamaConfig(**SIZES, bos_token_id=len(TOKENS) - 2, eos_token_id=len(TOKENS) - 1)
NAMES = {
    **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
    **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"},
}
HEADS = {"attn_q": CONFIG.num_attention_heads, "attn_k": CONFIG.num_key_value_heads}
IDS = torch.tensor([[64, 65, 66, 257, 3, 260]])
# Words by hand from each rule's pattern; a row: text, and its tokens by gpt-2, smollm, qwen2 and llama-bpe.
OF_BYTES = [
    ("l 2024", "l Ġ 2024", "l Ġ 2 0 2 4", "l Ġ 2 0 2 4", "l Ġ 20 2 4"),
    ("w'LLx", "w ' LL x", "w ' LL x", "w 'LL x", "w 'LL x"),
    ("w\n\n  low", "w ĊĊĠ Ġlow", "w ĊĊĠ Ġlow", "w ĊĊ Ġ Ġlow", "w ĊĊ Ġ Ġlow"),
    ("x(y;}\n", "x ( y ;} Ċ", "x ( y ;} Ċ", "x (y ;}Ċ", "x (y ;}Ċ"),
    ("e\u0301 xyz", "e Ì ģ Ġ x y z", "e Ì ģ Ġ x y z", "Ã© Ġ x y z", "e Ì ģ Ġxyz"),
]


def write(path, model, kind, rule="gpt-2", tokenizer="gpt2"):
    """Write the model with weight matrices of this kind of GGML; return it with the weights that they stand for."""
    writer = gguf.GGUFWriter(path, "llama")
    said = {"block_count": CONFIG.num_hidden_layers, "context_length": CONFIG.max_position_embeddings}
    said |= {"embedding_length": CONFIG.hidden_size, "feed_forward_length": CONFIG.intermediate_size}
    said |= {"head_count": CONFIG.num_attention_heads, "head_count_kv": CONFIG.num_key_value_heads}
    said |= {"layer_norm_rms_eps": CONFIG.rms_norm_eps, "rope_freq_base": 10000.0, "vocab_size": len(TOKENS)}
    said |= {"tokenizer_model": tokenizer, "token_list": TOKENS, "token_merges": MERGES, "tokenizer_pre": rule}
    said |= {"bos_token_id": CONFIG.bos_token_id, "eos_token_id": CONFIG.eos_token_id}
    said["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for name, value in said.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for i in range(CONFIG.num_hidden_layers):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in NAMES.items()}
    state = {}
    for ours, theirs in names.items():
        weight = model.state_dict()[f"{ours}.weight"].numpy()
        of = gguf.GGMLQuantizationType[kind] if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        state[f"{ours}.weight"] = torch.from_numpy(gguf.dequantize(gguf.quantize(weight, of), of).copy())
        if heads := HEADS.get(theirs.rpartition(".")[2]):
            # The two halves of each head's rows in turn, as GGUF keeps llama's queries and keys.
            weight = weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
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
    assert tokenizer.apply_chat_template([{"content": "abc"}], tokenize=False) == "abc"
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    for place, words in ((cut, "check that it is complete"), (tmp_path / "none", "No such file")):
        assert load("examples", "from_gguf").main([str(place), str(tmp_path / "refused")]) == 2
        assert words in capsys.readouterr().err
    assert list((tmp_path / "new").iterdir()) == [out]
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize(("number", "rule"), [*enumerate(["gpt-2", "smollm", "qwen2", "llama-bpe"], 1)])
def test_text_gives_the_tokens_that_the_files_rule_says(load, tmp_path, number, rule):
    write(tmp_path / "tiny.gguf", LlamaForCausalLM(CONFIG), "F32", rule)
    assert load("examples", "from_gguf").main([str(tmp_path / "tiny.gguf"), str(tmp_path / "made")]) == 0
    _, tokenizer = load_model(str(tmp_path / "made"))
    for text, *wanted in OF_BYTES:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert " ".join(tokenizer.convert_ids_to_tokens(ids)) == wanted[number - 1]
    if rule == "qwen2":
        ids = tokenizer("lower lower newer 010;}\n\u03d2\u0301 ###", add_special_tokens=False).input_ids
        assert ids == [75, 78, 86, 260, 259, 260, 220, 77, 68, 86, 260, 220, 15, 16, 15, 266, 267, 268, 269]


KINDS = [("gpt2", "tekken"), ("gpt2", "default"), ("gpt2", None), ("llama", "default"), ("bert", "gpt-2"), (None, None)]


@pytest.mark.parametrize(("tokenizer", "rule"), KINDS)
def test_a_tokenizer_or_rule_that_is_not_known_is_refused_by_name(load, tmp_path, rule, tokenizer, capsys):
    write(tmp_path / "tiny.gguf", LlamaForCausalLM(CONFIG), "F32", rule, tokenizer)
    assert load("examples", "from_gguf").main([str(tmp_path / "tiny.gguf"), str(tmp_path / "made")]) == 2
    words = f"splits text as gpt-2, smollm, qwen2, llama-bpe, got {rule!r} in"
    words = words if tokenizer == "gpt2" else f"expected a tokenizer of byte pairs, gpt2, got {tokenizer!r} in"
    assert words in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
