"""What lies in a model's folder is data: no code of it runs, and one that is broken is one sentence, exit code 2."""

import ast
import importlib
import io
import json
import pathlib
import shutil
import time

import pytest
import torch
from evals.cli import main as evals
from hashtrain.cli import main as hashtrain
from hashtrain.demo import demo_model_path
from hashtrain.models import load_model, require_vocabulary
from sparse_decode.cli import main as sparse_decode
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent
LOADER = "packages/hashtrain/src/hashtrain/models.py"
SECONDS = 10
SIZES = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256}

CHANGES = {  # what one of these is in config.json breaks the model
    "num_hidden_layers": [-1, 0, 3, 1000000, 10**30, 2.5, "2", None, [], True],
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
    "tie_word_embeddings": ["maybe"],
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
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("def name(x): return x\n" * 200)
    return folder / "model"


@pytest.fixture
def copy(model, tmp_path):
    shutil.copytree(model, tmp_path / "model")
    return tmp_path / "model"


def configured(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


SHORT = ["--context", "128", "--documents", "1", "--budgets", "0.1"]
QUICK = ["--contexts", "64", "--repeats", "1", "--steps", "1", "--warmup", "1", "--methods", "sdpa"]


def commands(folder, text):
    """Every command that reads a model, on this one."""
    name, out = str(folder), str(folder.parent / "out")
    lsh = ["--hasher", "lsh", "--max-new-tokens", "1", "--max-prompt-tokens", "9", "--dense-layers", "0"]
    ours = ["--context", "512", "--out", out, "--text", str(text)]
    return {
        "sparse-decode": (sparse_decode, ["--prompt-file", str(text), "--model", name, *lsh]),
        "hashtrain": (hashtrain, ["--model", name, *ours, "--only", "lsh"]),
        "convert": (hashtrain, ["convert", str(text), "--model", name, "--out", out]),
        "evals ppl": (
            evals,
            ["ppl", "--model", name, "--methods", "recent", "--out", out, "--text", str(text), *SHORT],
        ),
        "hashtrain plan": (hashtrain, ["plan", "--model", name]),
        "evals throughput": (
            evals,
            ["throughput", "--shape", name, *QUICK, "--out", out],
        ),
        "evals codesize": (evals, ["codesize", "--shape", name, "--out", out]),
        "chat": (example("chat"), ["--model", name, "--hasher", "lsh"]),
        "attach_local": (example("attach_local"), ["--model", name, "--hasher", "lsh", "--prompt-file", str(text)]),
        "train_folder": (example("train_folder"), [str(text), "--model", name, "--out", out]),
    }


def example(name):
    def main(words):
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(ROOT / "examples")
            return importlib.import_module(name).main(words)

    return main


COMMANDS = list(commands(pathlib.Path("m"), pathlib.Path("t")))


def refused(main, words, capsys):
    """Run a command that must end with a sentence; return it."""
    capsys.readouterr()
    began = time.monotonic()
    try:
        code = main(words)
    except SystemExit as leaving:
        code = leaving.code
    took, said = time.monotonic() - began, capsys.readouterr()
    assert code == 2, (words, code, said)
    assert took < SECONDS, (words, took)
    assert "Traceback" not in said.err + said.out
    last = said.err.strip().splitlines()[-1]
    assert last, words
    return last


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


def loads(path):
    """Calls of transformers' `from_pretrained`, and of `from_config` that leave the question open, as lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        owner, given = ast.unparse(node.func.value), {word.arg: ast.unparse(word.value) for word in node.keywords}
        if node.func.attr == "from_pretrained" and owner not in ("Hasher", "hashtrain.Hasher"):
            yield node.lineno
        if node.func.attr == "from_config" and given.get("trust_remote_code") != "False":
            yield node.lineno


def test_models_are_loaded_in_one_place():
    places = [
        path for name in ("packages/*/src", "packages/*/benchmarks", "examples", "tools") for path in ROOT.glob(name)
    ]
    files = [file for place in places for file in sorted(place.rglob("*.py"))]
    assert len(files) > 150
    found = {str(file.relative_to(ROOT)): lines for file in files if (lines := list(loads(file)))}
    assert found.pop("tools/check_families.py")  # made of a config class of transformers: nothing is loaded
    assert list(found) == [LOADER]
    (line,) = found[LOADER]
    assert "trust_remote_code=False" in (ROOT / LOADER).read_text().splitlines()[line - 1]


def mutants():
    """60 broken folders: (name, what to do to one)."""
    made = []
    for key, values in CHANGES.items():
        made += [(f"{key}={str(value)[:20]}", {key: value}, None) for value in values]
    for name, contents in FILES.items():
        made += [(f"{name}={content[:12]!r}", None, (name, content)) for content in contents]
    return made


MUTANTS = mutants()
HARMLESS = {  # what transformers passes over
    "rope_parameters={'rope_type': 'linea",
    "quantization_config={'quant_method': 'no",
    "generation_config.json=b'['",
    "generation_config.json=b'\\xff'",
}


def test_there_are_enough_mutants_and_the_whole_folder_works(model, capsys):
    assert len(MUTANTS) - len(HARMLESS) >= 60
    main, words = commands(model, model.parent / "text.txt")["sparse-decode"]
    assert main(words) == 0


def mutated(folder, changes, file):
    if changes is not None:
        configured(folder, **changes)
    else:
        (folder / file[0]).write_bytes(file[1])


@pytest.mark.parametrize(("name", "changes", "file"), MUTANTS, ids=[name for name, *_ in MUTANTS])
def test_a_broken_folder_is_one_sentence(name, changes, file, copy, model, capsys):
    mutated(copy, changes, file)
    main, words = commands(copy, model.parent / "text.txt")["sparse-decode"]
    if name in HARMLESS:
        assert main(words) == 0
    else:
        assert refused(main, words, capsys).startswith("sparse-decode: ")


@pytest.mark.parametrize("name", ["hashtrain plan", "evals throughput", "evals codesize"])
@pytest.mark.parametrize("key", ["head_dim", "num_key_value_heads", "vocab_size", "hidden_act", "dtype", "model_type"])
def test_a_config_alone_is_read_or_refused_in_one_sentence(key, name, copy, model, capsys):
    for value in CHANGES[key]:
        configured(copy, **{key: value})
        main, words = commands(copy, model.parent / "text.txt")[name]
        done = main(words)
        said = capsys.readouterr()
        assert done in (0, 2), value
        assert "Traceback" not in said.err + said.out
        assert done == 0 or said.err.strip()


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("layers", [0, 1_000_000])
def test_every_command_refuses_a_broken_folder(name, layers, copy, model, capsys):
    configured(copy, num_hidden_layers=layers)
    main, words = commands(copy, model.parent / "text.txt")[name]
    refused(main, words, capsys)


def test_a_token_that_the_model_has_no_row_for_is_one_sentence(model):
    loaded, _ = load_model(str(model))
    require_vocabulary(loaded, torch.tensor([0, 4095]), torch.tensor([], dtype=torch.long))
    with pytest.raises(ValueError, match="produced token 4096, expected less than 4096"):
        require_vocabulary(loaded, torch.tensor([1]), torch.tensor([4096]))


@pytest.mark.parametrize("name", ["sparse-decode", "evals ppl"])
def test_no_bar_of_transformers_stands_in_a_log(name, model, capfd):
    main, words = commands(model, model.parent / "text.txt")[name]
    assert main(words) == 0
    assert "Loading weights" not in capfd.readouterr().err
