"""The command from end to end on a tiny model, and its complaints."""

import json
import sys

import pytest
import torch
from hashtrain import Hasher, HasherConfig, ModelShape
from hashtrain.demo import demo_model_path
from sparse_decode import streaming
from sparse_decode.cli import main
from sparse_decode_doubles import tiny_model
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, a hasher and a prompt."""
    root = tmp_path_factory.mktemp("cli")
    model = tiny_model(vocab_size=4096)
    model.save_pretrained(root / "model")
    AutoTokenizer.from_pretrained(demo_model_path()).save_pretrained(root / "model")
    Hasher(HasherConfig("planes", ModelShape.of(model.config), hidden=16)).save_pretrained(root / "hasher")
    Hasher(HasherConfig("planes", ModelShape(1, 4, 2, 16))).save_pretrained(root / "other")
    (root / "prompt.txt").write_text("\n".join(f"def name_{i}(x): return x * {i}" for i in range(20)))
    (root / "empty.txt").write_text(" \n")
    return root


def arguments(folder, *more, prompt="prompt.txt"):
    fixed = ["--model", str(folder / "model"), "--hasher", str(folder / "hasher"), "--max-new-tokens", "6"]
    return ["--prompt-file", str(folder / prompt), *fixed, *more]


def last_line(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_it_streams_and_ends_with_json(folder, capsys):
    assert main(arguments(folder, "--fraction", "0.1")) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out.strip().splitlines()[-1])
    n, made = found["prompt_tokens"], found["sparse"]
    assert captured.out.count("\n") >= 2, "the text stands before the JSON"
    assert made["new_tokens"] == 6
    steps = range(n + 1, n + 6)
    row = 2 * 2 * 16 * 4  # bytes of a token's key and value, of two heads of 16 float32
    assert made["kv_bytes"] == 4 * (n + 5) * row
    assert made["code_bytes"] == 4 * (n + 5) * 2 * 16
    least, most = (sum(t // 10 + extra for t in steps) / sum(steps) for extra in (0, 3))
    assert least <= made["density"] <= most
    assert "tokens per second" in captured.err


def test_a_whole_budget_gives_the_dense_tokens(folder, capsys):
    assert main(arguments(folder, "--fraction", "1", "--compare")) == 0
    found = last_line(capsys)
    assert found["same_tokens"] == 6
    assert found["sparse"]["density"] == 1
    assert found["dense"]["density"] is None
    assert found["dense"]["code_bytes"] == 0
    assert found["dense"]["kv_bytes"] == found["sparse"]["kv_bytes"]


def test_untrained_codes_and_one_token(folder, capsys):
    assert main(arguments(folder, "--hasher", "lsh", "--max-new-tokens", "1")) == 0
    assert last_line(capsys)["sparse"]["tokens_per_second"] is None


def test_a_session_is_written_once_and_continued_by_every_question(folder, tmp_path, capsys):
    session, texts, found, files = tmp_path / "made" / "prompt.kv", [], [], []
    for question in ("def f(x):", "def f(x):", "class A:", None):
        asked = [] if question is None else ["--question", question]
        assert main(arguments(folder, "--session", str(session), *asked, "--compare")) == 0
        *text, last = capsys.readouterr().out.strip().splitlines()
        texts.append(text)
        found.append(json.loads(last))
        files.append(session.read_bytes())
    assert texts[0] == texts[1]
    assert len(set(map(tuple, texts))) == 3, "another question has another answer"
    assert len(set(files)) == 1
    document = found[1]["sparse"]["stored_tokens"]
    assert [run["sparse"]["stored_tokens"] for run in found[:3]] == [0, document, document]
    assert found[0]["dense"]["stored_tokens"] == document, "the dense run reads what the sparse one has written"
    assert 0 < found[3]["sparse"]["stored_tokens"] < found[3]["prompt_tokens"] <= document < found[0]["prompt_tokens"]


def test_a_dense_run_beside_sparse_prompts_leaves_their_session_alone(folder, tmp_path, monkeypatch):
    """Whether the processor has the kernel of sparse prompts or not, which short ones do not need."""
    session, begun = tmp_path / "prompt.kv", []
    monkeypatch.setattr(sys.modules["sparse_decode.attach"], "require_sparse_prompts", lambda model: None)
    monkeypatch.setattr(streaming, "_begun", lambda *given, own=streaming._begun: begun.append(given[1]) or own(*given))
    assert main(arguments(folder, "--session", str(session), "--prompt", "sparse", "--compare")) == 0
    assert begun == [session, None]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--prompt", "sparse"], "sparse prompts need a model in bfloat16 on a CPU with AVX512_BF16"),
        (["--hasher", "no/such/folder"], "no hasher at no/such/folder"),
        (["--hasher", "{folder}/other"], "this hasher belongs to another model"),
        (["--max-new-tokens", "400"], "must fit the model's context of 512"),
        (["--session", "{folder}/prompt.txt"], "prompt.txt is not a usable session file: expected a header"),
        (["--prompt-file", "{folder}"], "cannot read --prompt-file"),
        (["--prompt-file", "{folder}/empty.txt"], "--prompt-file must not be empty"),
    ],
)
def test_wrong_input_is_one_sentence(folder, more, sentence, capsys):
    assert main(arguments(folder, *(word.format(folder=folder) for word in more))) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.startswith("sparse-decode: ")
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_weights_are_of_the_type_that_is_asked_for(folder, capsys):
    for more, dtype in (([], "float32"), (["--dtype", "auto"], "float32"), (["--dtype", "bfloat16"], "bfloat16")):
        assert main(arguments(folder, *more, "--max-new-tokens", "2", "--device", "cpu")) == 0
        found = last_line(capsys)
        assert (found["device"], found["dtype"]) == ("cpu", dtype)
        assert found["sparse"]["kv_bytes"] == 4 * (found["prompt_tokens"] + 1) * 2 * 2 * 16 * (
            4 if dtype == "float32" else 2
        )


@pytest.mark.parametrize(
    ("devices", "more", "sentence"),
    [
        (0, ["--device", "cuda"], "--device cuda does not exist: this machine has no CUDA device that torch can use"),
        (1, [], "hashcore needs cuda-core to compile its CUDA kernels, and it is not installed"),
        (1, ["--dtype", "float32"], "attention over a selection on CUDA takes 16-bit types, got float32"),
    ],
)
def test_what_a_gpu_lacks_is_said_before_the_model_is_read(folder, devices, more, sentence, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(streaming, "load_model", lambda *_: pytest.fail("the model was read"))
    if "cuda-core" in sentence:
        monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert main(arguments(folder, *more)) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_a_model_of_a_gpu_is_read_in_bfloat16_and_refused_in_float32(folder, monkeypatch, capsys):
    asked = []
    load_model = streaming.load_model
    monkeypatch.setattr(streaming, "device_for", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(streaming, "load_model", lambda name, *how: asked.append(how) or load_model(name))
    monkeypatch.setattr(streaming, "require_vocabulary", lambda *_: pytest.fail("the model was used"))
    assert main(arguments(folder)) == 2
    assert "takes 16-bit types, got float32; give --dtype bfloat16" in capsys.readouterr().err
    assert asked == [(torch.bfloat16, "cuda:0")]
