"""examples/from_gguf.py: a tiny model written as a GGUF file comes back as the folder of the same model."""

import pathlib

import numpy as np
import pytest
import torch
from hashtrain.models import load_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

gguf = pytest.importorskip("gguf", reason="gguf is in a dependency group of its own")

TOKENS = ["<s>", "</s>", "a", "b", "c", "ab", "abc", "Ġ"]
MERGES = ["a b", "ab c"]
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
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
HEADS = {"attn_q": CONFIG.num_attention_heads, "attn_k": CONFIG.num_key_value_heads}


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a projection with the two halves of each head's rows in turn, as GGUF keeps llama's queries and keys."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def describe(writer) -> None:
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
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def write(path: pathlib.Path, model, kind="F32", without="", more=None) -> pathlib.Path:
    """Write the model with weight matrices of this kind of GGML."""
    writer = gguf.GGUFWriter(path, "llama")
    describe(writer)
    for add in more or ():
        add(writer)
    tied = model.config.tie_word_embeddings
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"} | ({} if tied else {"lm_head": "output"})
    for i in range(CONFIG.num_hidden_layers):
        names |= {f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}" for ours, theirs in NAMES.items()}
    names.pop(without, None)
    for ours, theirs in names.items():
        weight = model.state_dict()[f"{ours}.weight"].numpy()
        if heads := HEADS.get(theirs.rpartition(".")[2]):
            weight = interleaved(weight, heads)
        of = gguf.GGMLQuantizationType[kind] if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(f"{theirs}.weight", gguf.quantize(weight, of), raw_dtype=of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(model, tmp_path_factory) -> pathlib.Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model)


@pytest.fixture
def from_gguf(load):
    before = logging.get_verbosity()
    yield load("examples", "from_gguf")
    logging.set_verbosity(before)


TOKEN_IDS = torch.tensor([[2, 5, 6, 3, 4, 2]])


def test_the_folder_is_the_model_with_its_tokenizer_and_template(from_gguf, file, model, tmp_path, capsys):
    out = tmp_path / "new" / "made"
    assert from_gguf.main([str(file), f"{out}/", "--dtype", "float32"]) == 0
    told = capsys.readouterr()
    assert "2 layers, 4 query and 2 KV heads of 16" in told.out
    assert "does not support" not in told.err
    made, tokenizer = load_model(str(out))
    torch.testing.assert_close(made(TOKEN_IDS).logits, model(TOKEN_IDS).logits, atol=1e-5, rtol=1e-5)
    assert tokenizer.convert_ids_to_tokens(tokenizer("abcab", add_special_tokens=False).input_ids) == ["abc", "ab"]
    assert tokenizer("a</s>", add_special_tokens=False).input_ids == [2, 1]
    assert tokenizer.apply_chat_template([{"content": "abc"}], tokenize=False) == "abc"
    assert tokenizer.eos_token_id == made.generation_config.eos_token_id == 1
    assert list(out.parent.iterdir()) == [out]
    assert getattr(made.config, "quantization_config", None) is None
    (tmp_path / "plain").touch()
    assert {path.stat().st_mode for path in out.iterdir()} == {(tmp_path / "plain").stat().st_mode}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_weights_become_the_plain_ones_that_they_stand_for(from_gguf, tmp_path, kind, tied):
    torch.manual_seed(1)
    config = LlamaConfig(**{**CONFIG.to_dict(), "tie_word_embeddings": tied})
    model = LlamaForCausalLM(config).eval()
    rough = LlamaForCausalLM(config).eval()
    of = gguf.GGMLQuantizationType[kind]
    rough.load_state_dict(
        {
            name: w if w.ndim == 1 else torch.from_numpy(gguf.dequantize(gguf.quantize(w.numpy(), of), of))
            for name, w in model.state_dict().items()
        }
    )
    file = write(tmp_path / "small.gguf", model, kind)
    assert from_gguf.main([str(file), str(tmp_path / "made"), "--dtype", "float32"]) == 0
    made, _ = load_model(str(tmp_path / "made"))
    assert made.config.tie_word_embeddings == tied
    torch.testing.assert_close(made(TOKEN_IDS).logits, rough(TOKEN_IDS).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(made(TOKEN_IDS).logits, model(TOKEN_IDS).logits, atol=1e-5)


def test_a_file_of_the_same_name_in_the_working_folder_is_not_read(from_gguf, file, model, tmp_path, monkeypatch):
    torch.manual_seed(2)
    write(tmp_path / file.name, LlamaForCausalLM(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert from_gguf.main([str(file), "made", "--dtype", "float32"]) == 0
    made, _ = load_model(str(tmp_path / "made"))
    torch.testing.assert_close(made(TOKEN_IDS).logits, model(TOKEN_IDS).logits, atol=1e-5, rtol=1e-5)


def test_weights_are_of_the_asked_type(from_gguf, file, tmp_path):
    assert from_gguf.main([str(file), str(tmp_path / "made")]) == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype="auto").dtype == torch.bfloat16


def test_a_rule_of_words_that_transformers_does_not_know_is_told(from_gguf, model, tmp_path, capsys):
    def another(writer):
        writer.kv_data[0].pop("tokenizer.ggml.pre")
        writer.add_tokenizer_pre("another")

    assert from_gguf.main([str(write(tmp_path / "a.gguf", model, more=[another])), str(tmp_path / "made")]) == 0
    assert "by the rule `another`, which transformers does not support" in capsys.readouterr().err


def refused(from_gguf, capsys, file, out):
    assert from_gguf.main([str(file), str(out)]) == 2
    *bars, told = capsys.readouterr().err.splitlines()
    assert all("GGUF tensors..." in line for line in bars if line), bars  # of transformers, while it reads
    return told


def test_what_cannot_be_converted_is_refused_in_one_sentence(from_gguf, file, tmp_path, capsys, monkeypatch):
    other, out = tmp_path / "other.gguf", tmp_path / "out"
    other.write_bytes(b"PK\3\4 and more")
    out.mkdir()
    new = tmp_path / "new"
    assert "begins with b'GGUF', got b'PK" in refused(from_gguf, capsys, other, new)
    assert "No such file" in refused(from_gguf, capsys, tmp_path / "none", new)
    assert "expected a new name for the folder" in refused(from_gguf, capsys, file, out)
    monkeypatch.setattr(from_gguf, "is_gguf_available", lambda: False)
    assert "expected the package `gguf`" in refused(from_gguf, capsys, file, new)
    assert {path.name for path in tmp_path.iterdir()} == {"other.gguf", "out"}


def test_parts_of_a_model_are_refused_by_name_and_by_what_they_say(from_gguf, file, model, tmp_path, capsys):
    part = tmp_path / "x-00001-of-00003.gguf"
    part.write_bytes(file.read_bytes())
    assert "a part of one" in refused(from_gguf, capsys, part, tmp_path / "made")
    told = write(tmp_path / "x.gguf", model, more=[lambda writer: writer.add_uint16("split.count", 3)])
    assert "one of 3 parts" in refused(from_gguf, capsys, told, tmp_path / "made")


@pytest.mark.parametrize("without", ["model.layers.1.mlp.up_proj", "model.embed_tokens"])
def test_a_file_that_lacks_weights_is_refused(from_gguf, model, tmp_path, capsys, without):
    file = write(tmp_path / "less.gguf", model, without=without)
    error = refused(from_gguf, capsys, file, tmp_path / "made")
    assert "expected every weight" in error
    assert without in error
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("share", [0.001, 0.01, 0.1, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused_in_one_sentence(from_gguf, file, tmp_path, capsys, share):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[: max(4, int(share * file.stat().st_size))])
    assert "check that it is complete" in refused(from_gguf, capsys, cut, tmp_path / "made")


def test_a_failure_leaves_no_folder(from_gguf, file, tmp_path, monkeypatch):
    def fail(model, folder):
        (folder / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    assert from_gguf.main([str(file), str(tmp_path / "made")]) == 2
    assert list(tmp_path.iterdir()) == []
