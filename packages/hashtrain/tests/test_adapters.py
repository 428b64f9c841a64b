"""Folders of LoRA adapters as models: merged when loaded, recorded in hashers, and refused in one sentence."""

import json
import shutil

import pytest
import torch
from hashtrain import Hasher
from hashtrain.adapters import adapter_of, base_of, other_adapter, tokenizer_of
from hashtrain.cli import main
from hashtrain.models import load_config, load_model
from hashtrain_runs import SMALL, model_and_text
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

peft = pytest.importorskip("peft", reason="the extra `peft` is not installed")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IDS = torch.arange(24)[None]


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_config):
    root = tmp_path_factory.mktemp("adapters")
    model_and_text(root, tiny_config(vocab_size=4096), 4000)
    adapt(load_model(str(root / "model"))[0], root / "adapter")
    return root


@pytest.fixture
def folder(made, tmp_path):
    """A model in `model`, an adapter of it in `adapter`, and a text; a test may change the adapter."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    changed(tmp_path, base_model_name_or_path=str(tmp_path / "model"))
    return tmp_path


def adapt(model, out, seed=0, **settings):
    """Store an adapter with weights that matter; return the model with it."""
    torch.manual_seed(seed)
    how = {"r": 4, "target_modules": ["q_proj", "k_proj"], "rank_pattern": {"k_proj": 2}, **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**how))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(out)
    return adapted


@pytest.mark.parametrize("settings", [{}, {"use_rslora": True}, {"use_dora": True, "lora_alpha": 5}])
def test_an_adapters_folder_is_its_model_with_the_adapter(folder, settings):
    base, _ = load_model(str(folder / "model"))
    plain = base(IDS).logits
    adapted = adapt(base, folder / "adapter", **settings).eval()
    model, tokenizer = load_model(str(folder / "adapter"))
    torch.testing.assert_close(model(IDS).logits, adapted(IDS).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(model(IDS).logits, plain, atol=1e-4)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert tokenizer.vocab_size == len(load_model(str(folder / "model"))[1])
    assert tokenizer_of(str(folder / "adapter")) == str(folder / "model")
    assert load_config(str(folder / "adapter")).num_hidden_layers == 2
    own = AutoModelForCausalLM.from_pretrained(folder / "adapter").eval()  # as the README's Python loads it
    torch.testing.assert_close(own(IDS).logits, model(IDS).logits, atol=1e-5, rtol=1e-5)
    assert adapter_of(own) == adapter_of(model) == adapter_of(adapted) == adapter_of(adapted.base_model.model) != ""
    with adapted.disable_adapter():
        assert adapter_of(adapted) == ""


def test_adapters_of_other_kinds_are_seen(folder):
    how = {"target_modules": ["k_proj"], "feedforward_modules": [], "init_ia3_weights": False}
    adapted = peft.get_peft_model(load_model(str(folder / "model"))[0], peft.IA3Config(**how))
    assert adapter_of(adapted) != ""
    with adapted.disable_adapter():
        assert adapter_of(adapted) == ""


def test_hashers_record_the_adapter_and_tell_it_from_others(folder):
    names = ["--text", str(folder / "text.txt"), *SMALL, "--only", "planes", "--out", str(folder / "run")]
    assert main(["--model", str(folder / "adapter"), *names]) == 0
    hasher = Hasher.from_pretrained(folder / "run" / "planes")
    model, base = load_model(str(folder / "adapter"))[0], load_model(str(folder / "model"))[0]
    assert hasher.config.adapter == adapter_of(model)
    assert other_adapter(hasher, model) is None
    assert f"with the adapter {hasher.config.adapter}, this one has none, unless" in other_adapter(hasher, base)
    other = adapt(base, folder / "second", seed=1)
    assert f"this one has the adapter {adapter_of(other)}" in other_adapter(hasher, other)


def test_the_base_is_found_beside_the_adapter(folder, monkeypatch):
    changed(folder, base_model_name_or_path="/gone/model")
    monkeypatch.chdir(folder / "adapter")
    assert base_of("../adapter") == base_of(str(folder / "adapter")) == str(folder / "model")
    load_model(".")


def changed(folder, **settings):
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"peft_type": "IA3"}, "must be a plain LoRA adapter, got 'IA3'"),
        ({"init_lora_weights": "pissa"}, "got 'LORA' with start 'pissa'; merge it"),
        ({"r": 1 << 40}, "must have ranks of 1 to 16384"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path, got None"),
        ({"base_model_name_or_path": "adapter"}, "must name a model as its base, got another adapter"),
        ({"base_model_name_or_path": "./none"}, "model folder not found"),
        ({"target_modules": ["no_such"]}, "cannot load the model"),
        ({"target_modules": ["v_proj", "q_proj"]}, "lacks .*v_proj.lora_|also has .*k_proj.lora_"),
    ],
)
def test_settings_of_an_adapter_that_cannot_be_used_are_one_sentence(folder, settings, words):
    changed(folder, **settings)
    refused(folder, words)


def test_files_of_an_adapter_that_cannot_be_used_are_one_sentence(folder):
    weights, place = folder / "adapter" / "adapter_model.safetensors", folder / "adapter"
    tensors = load_file(weights)
    save_file(dict(list(tensors.items())[1:]), weights)
    refused(folder, "lacks base_model")
    save_file({**tensors, "more": torch.zeros(1)}, weights)
    refused(folder, "also has more")
    weights.write_bytes(b"\xff" * 64)
    refused(folder, "says its header has")
    weights.rename(place / "adapter_model.bin")
    refused(folder, "holds no adapter_model.safetensors: expected weights in safetensors, never pickles")
    (place / "adapter_config.json").write_text("[")
    refused(folder, "is corrupt")


def refused(folder, words):
    with pytest.raises(ValueError, match=words) as raised:
        load_model(str(folder / "adapter"))
    assert "\n" not in str(raised.value)
