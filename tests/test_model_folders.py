"""What lies in a model's folder is data: no code of it runs, and one that is broken is one sentence, exit code 2."""

import io
import json
import os
import pathlib
import re
import shutil
import socket

import hashtrain
import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.models import load_model
from tiny_model import commands, make_model, refused
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOADER = "packages/hashtrain/src/hashtrain/models.py"

CHANGES = {  # what one of these is in config.json breaks the model
    "num_hidden_layers": [-1, 0, 3, 1000000, 10**30, "2", None, []],
    "hidden_size": [0, -1, 33, 10**12, "32", None, {}],
    "num_attention_heads": [0, -2, 3, 10**9, "2", None],
    "num_key_value_heads": [0, -1, 3, "1"],
    "head_dim": [0, -1, 15, 10**12, "16"],
    "vocab_size": [0, -1, 100, 10**15, "many"],
    "intermediate_size": [0, -5, 31, 10**12],
    "hidden_act": ["no_such", 5, None],
    "rms_norm_eps": ["small", None, [1]],
    "model_type": ["no_such", 7, None, "bert-no", "mamba"],
    "rope_parameters": [{"rope_type": "no_such"}, {"rope_type": "linear", "factor": 0, "rope_theta": 1e4}, 5, "x"],
    "dtype": ["float7", 5],
    "attn_implementation": ["no_such", "flash_attention_2", "owner/kernel", 7],
    "quantization_config": [{"quant_method": "no_such"}, {}, 5],
    "attention_bias": [True, "x"],
}
FILES = {  # what a whole file is replaced by
    "config.json": [b"", b"{", b"[]", b"null", b'{"model_type": "llama"', b"\xff\xfe", b"[" * 100_000, b"{}"],
    "tokenizer.json": [b"", b"{}", b"null", b"\x00" * 64, b'{"version": "1.0", "model": {"type": "BPE"}}'],
    "tokenizer_config.json": [b"{", b"[]", b'{"tokenizer_class": 5}', b"\xff"],
    "model.safetensors": [b"", b"\xff" * 64, (1 << 40).to_bytes(8, "little") + b"{}", b"\x02" + b"\0" * 7 + b"{}"],
    "generation_config.json": [b"[", b"\xff"],
}


@pytest.fixture(scope="module")
def model(folder):
    """A tiny model, a prompt, a text."""
    return make_model(folder)


@pytest.fixture
def copy(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    return tmp_path / "model"


def configured(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


COMMANDS = list(commands(pathlib.Path("m"), pathlib.Path("t")))


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("known", [False, True])
def test_no_code_of_a_model_runs_whatever_standard_input_says(name, known, model, copy, capsys, monkeypatch):
    ran = copy.parent / "ran"
    (copy / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Any: pass\n")
    kinds = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModel"), "code.Any")
    configured(copy, auto_map=kinds, **({} if known else {"model_type": "unheard-of"}))
    told = copy / "tokenizer_config.json"
    tokenizer = {"auto_map": {"AutoTokenizer": ["code.Any", "code.Any"]}, "tokenizer_class": "Any"}
    told.write_text(json.dumps({**json.loads(told.read_text()), **tokenizer}))
    (copy / "custom_generate").mkdir()
    (copy / "custom_generate" / "generate.py").write_text((copy / "code.py").read_text())
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    main, words = commands(copy, model.parent / "text.txt")[name]
    if not known:
        refused(main, words, capsys)
    else:  # what transformers knows is loaded by its own code, or refused for something else
        assert main(words) in (0, 2)
    assert not ran.exists(), "code of the model was run"


@pytest.mark.sample(3)
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_takes_an_adapter_as_its_model(name, copy, model, capsys, monkeypatch):
    peft = pytest.importorskip("peft", reason="the extra `peft` is not installed")
    adapter = copy.parent / "lora" / "adapter"
    peft.get_peft_model(load_model(str(copy))[0], peft.LoraConfig(target_modules=["k_proj"])).save_pretrained(adapter)
    merged, found, ended = hashtrain.models.merged, [], []
    monkeypatch.setattr(hashtrain.models, "merged", lambda base, name: found.append(name) or merged(base, name))
    for folder in (copy, adapter):
        monkeypatch.setattr("sys.stdin", io.StringIO(""))
        main, words = commands(folder, model.parent / "text.txt")[name]
        code = main(words)
        ended.append((code, capsys.readouterr().err if code else ""))
    assert ended[0] == ended[1]
    assert found == [str(adapter)] * (name not in ("convert", "evals throughput")), "two read its config alone"


# Calls of transformers, in code; `from_config` that leaves the question open.
LOADS = re.compile(r"^[^\n#`]*(?<!Hasher)(\.from_pretrained\((.*)|\.from_config\((?!.*trust_remote_code=False))", re.M)


def test_models_are_loaded_in_one_place():
    places = ("packages/*/src", "packages/*/benchmarks", "examples", "tools")
    files = [file for name in places for place in ROOT.glob(name) for file in sorted(place.rglob("*.py"))]
    assert len(files) > 150
    found = [(str(file.relative_to(ROOT)), call) for file in files for call in LOADS.findall(file.read_text("utf-8"))]
    ((place, (_, arguments)),) = found
    assert place == LOADER
    assert "trust_remote_code=False" in arguments


# Broken folders: (name, what to do to one).
MUTANTS = [(f"{key}={str(value)[:20]}", {key: value}, None) for key, values in CHANGES.items() for value in values]
MUTANTS += [(f"{name}={x[:12]!r}", None, (name, x)) for name, contents in FILES.items() for x in contents]
# What transformers passes over.
HARMLESS = {"rope_parameters={'rope_type': 'linea", "quantization_config={'quant_method': 'no"}
HARMLESS |= {"generation_config.json=b'['", "generation_config.json=b'\\xff'"}


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "changes", "file"), [pytest.param(*x, id=x[0]) for x in MUTANTS])
def test_a_broken_folder_is_one_sentence(name, changes, file, copy, model, capsys):
    if changes is not None:
        configured(copy, **changes)
    else:
        (copy / file[0]).write_bytes(file[1])
    main, words = commands(copy, model.parent / "text.txt")["sparse-decode"]  # models load in one place
    if name not in HARMLESS:
        assert refused(main, words, capsys).startswith("sparse-decode: ")
    else:
        assert main(words) == 0


SPECIAL = {
    "pipe": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "folder": pathlib.Path.mkdir,
    "dangling": lambda path: path.symlink_to("none"),
    "circle": lambda path: path.symlink_to(path.name),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(path.name),
}
"""What may lie where a file is expected. A reader would wait for the first, and never finish the second."""
READ = [
    *("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("generation_config.json", "chat_template.jinja", "additional_chat_templates/one.jinja"),
]


def replaced(path, kind, monkeypatch):
    """Put something special where a file of a folder is."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    monkeypatch.chdir(path.parent)  # a socket's address must be short
    SPECIAL[kind](path)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the socket, which nobody closes
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_file_of_a_model_that_is_no_file_is_one_sentence(kind, copy, model, capsys, monkeypatch):
    for name in READ:
        shutil.rmtree(copy)
        shutil.copytree(model, copy)
        replaced(copy / name, kind, monkeypatch)
        main, words = commands(copy, model.parent / "text.txt")["sparse-decode"]
        said = refused(main, words, capsys)
        assert name.split("/")[0] in said, (name, said)
        assert not (copy.parent / "out").exists()


def _index(copy):
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": "../text.txt"}}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_index, "names the file '../text.txt', expected a file of weights in its folder"),
        (lambda copy: configured(copy, transformers_weights="../model.safetensors"), "expected a file of its folder"),
        (lambda copy: os.truncate(copy / "tokenizer.json", (1 << 28) + 1), "tokenizer.json has 268435457 bytes"),
    ],
)
def test_files_elsewhere_and_too_large_are_one_sentence(change, message, copy, model, capsys):
    change(copy)
    main, words = commands(copy, model.parent / "text.txt")["sparse-decode"]
    assert message in refused(main, words, capsys)


@pytest.mark.sample(4)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", SPECIAL)
def test_a_file_of_a_hasher_that_is_no_file_is_one_sentence(kind, weights, model, tmp_path, capsys, monkeypatch):
    Hasher(HasherConfig("lsh", ModelShape.of(AutoConfig.from_pretrained(model)))).save_pretrained(tmp_path / "lsh")
    (stored,) = (tmp_path / "lsh").glob("*.safetensors")
    replaced(stored if weights else stored.parent / "config.json", kind, monkeypatch)
    main, words = commands(model, model.parent / "text.txt")["sparse-decode"]
    words = [str(tmp_path / "lsh") if word == "lsh" else word for word in words]
    assert "hasher" in refused(main, words, capsys)


@pytest.mark.parametrize(("able", "made"), [({"avx2": True}, "float32"), ({"avx512_bf16": True}, "bfloat16")])
def test_a_model_is_computed_in_a_type_that_the_processor_has_instructions_for(
    model, tmp_path, monkeypatch, able, made
):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: able)
    AutoModelForCausalLM.from_pretrained(model).bfloat16().save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path)
    assert str(load_model(str(tmp_path))[0].dtype) == f"torch.{made}"
    assert load_model(str(tmp_path), torch.bfloat16)[0].dtype == torch.bfloat16  # what was asked for
