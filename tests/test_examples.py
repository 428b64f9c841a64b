"""Every example runs, on things small enough for seconds; the notebook in .ci/run."""

import io
import os
import pathlib
import re
import sys

import numpy as np
import pytest
from hashtrain import Hasher
from hashtrain.demo import demo_model_path
from hashtrain.models import load_model
from rich.console import Console
from sparse_decode import Budget, attach
from sparse_decode.streaming import load_selector

EXAMPLES = pathlib.Path(__file__).resolve().parent.parent / "examples"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
SHOUTING = TEMPLATE.replace("trim }}", "trim | upper }}")  # writes answers otherwise than the model did


@pytest.fixture(scope="module")
def bit_index(load):
    return load("examples", "bit_index")


def test_bit_index_finds_more_with_planes_and_rerank(bit_index, tmp_path, capsys):
    found = bit_index.main(["--count", "2000", "--queries", "30", "--save", str(tmp_path / "index")])
    assert found["exact"] == 1
    assert 0.3 < found["1 plane"] < found["3 planes"] < found["3 planes, rerank"] <= 1
    assert (tmp_path / "index").is_file()
    assert "recall@10" in capsys.readouterr().out


def test_bit_index_takes_vectors_of_ones_own(bit_index, tmp_path, capsys):
    np.save(tmp_path / "own.npy", np.random.default_rng(1).normal(size=(300, 64)))
    assert bit_index.main(["--vectors", str(tmp_path / "own.npy"), "--queries", "5"])["exact"] == 1
    assert "295 embeddings of 64 numbers" in capsys.readouterr().out
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(SystemExit):
        bit_index.main(["--vectors", str(tmp_path / "pickled.npy")])
    said = capsys.readouterr().err
    assert "--vectors must be an .npy file of floats" in said
    assert "pickle" not in said.replace("pickled.npy", "")


@pytest.mark.parametrize(("fraction", "least", "most"), [("1", 100, 100), ("0.1", 8, 10)])
def test_attach_local_compares(load, fraction, least, most, capsys):
    module = load("examples", "attach_local")
    settings = ["--hasher", "lsh", "--prompt-tokens", "300", "--tokens", "6", "--fraction", fraction]
    assert module.main(settings) == 0
    out = capsys.readouterr().out
    densities = [float(x) for x in re.findall(r"\d: ([\d.]+) %", out.splitlines()[-1])]
    assert len(densities) == 6
    assert all(least <= density <= most for density in densities)
    alike, share = re.search(r"the first (\d) tokens agree; .* choose (\d+) %", out).groups()
    if fraction == "1":
        assert (alike, share) == ("6", "100")
    assert 100 * int(alike) / 6 <= int(share) + 1, "the first tokens that agree are among those it would choose"


@pytest.mark.parametrize(
    "flag", [("attach_local", "--prompt-file"), ("chat", "--document"), ("ask", "--document")], ids=str
)
def test_a_text_that_never_ends_is_not_waited_for(load, tmp_path, flag, capsys):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/zero"):
        assert load("examples", flag[0]).main([flag[1], str(place), "--hasher", "lsh"]) == 2
        assert "expected a regular file" in capsys.readouterr().err


@pytest.fixture
def asked(load, tmp_path):
    """`ask` in a folder of its own, on the demo model and the start of a document."""
    (tmp_path / "document.txt").write_text("import os\n" * 900)
    given = ["--model", str(demo_model_path()), "--document", str(tmp_path / "document.txt"), "--question", "What?"]
    return load("examples", "ask"), [*given, "--new-tokens", "4"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("fraction", "alike"), [("0.02", False), ("1", True)])
def test_ask_answers_twice_side_by_side(asked, fraction, alike, capsys):
    module, words = asked
    assert module.main([*words, "--hasher", "lsh", "--fraction", fraction]) == 0
    said = capsys.readouterr()
    lines = {cells[1].strip(): [cell.strip() for cell in cells[2:4]] for cells in map(cells_of, said.out.splitlines())}
    sparse, dense = lines["answer"]
    assert sparse
    assert sparse == dense or not alike
    share = [float(text.split()[0]) for text in lines["tokens read"]]
    assert share[1] == 100
    assert share[0] == 100 if alike else 1 < share[0] < 4
    assert all(float(text) > 0 for text in lines["ms per token"])


def cells_of(line):
    return [*re.split("[│┃]", line), "", "", "", ""]


def test_ask_makes_what_is_missing_once(asked, tmp_path, monkeypatch, capsys):
    module, words = asked
    monkeypatch.chdir(tmp_path)
    commands, made = [], []
    monkeypatch.setattr(module.subprocess, "run", lambda words, check: commands.append(words) or Done())
    monkeypatch.setattr(module, "make_hasher", lambda model, out: made.append((model, str(out))))
    monkeypatch.setattr(module, "prompt_of", lambda *given: (_ for _ in ()).throw(ValueError("enough")))
    assert module.main(words[2:]) == 2
    assert [words[0] == "uv" for words in commands] == [True, False]
    assert commands[0][-1] == module.PACKAGE
    assert commands[1][-2:] == ["runs/package/" + module.FILE, "runs/smollm2"]
    assert made == [("runs/smollm2", "runs/ask/smollm2")]
    (tmp_path / "runs" / "smollm2").mkdir(parents=True)
    (tmp_path / "runs" / "ask" / "smollm2" / "transform-start").mkdir(parents=True)
    (tmp_path / "runs" / "ask" / "smollm2" / "transform-start" / "config.json").touch()
    assert module.main(words[2:]) == 2
    assert len(commands) == 2
    assert len(made) == 1


class Done:
    returncode = 0


@pytest.fixture(scope="module")
def chat(load):
    return load("examples", "chat")


@pytest.fixture
def attached():
    model, tokenizer = load_model(str(demo_model_path()))
    with attach(model, load_selector("lsh", model), Budget(0.1)) as attachment:
        yield attachment, tokenizer


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_chat_reuses_its_cache_and_says_how_much(chat, attached, template):
    attachment, tokenizer = attached
    tokenizer.chat_template = template
    kept = chat.Chat(attachment, tokenizer, "import os\n" * 20, new_tokens=5)
    parts = []
    turns = [kept.say(text, parts.append) for text in ("def first(x):", "def second(y):")]
    assert [turn.text for turn in turns] == [m["content"] for m in kept.messages if m["role"] == "assistant"]
    assert "".join(parts) == "".join(turn.text + "\n" for turn in turns)
    assert (turns[0].reused, turns[0].new_tokens) == (0, 5)
    if template is None:
        assert turns[1].reused == turns[0].prompt_tokens + 4, "all but the last token made, which no call has read"
    assert turns[0].prompt_tokens - 1 <= turns[1].reused < turns[1].prompt_tokens
    assert all(0.08 < turn.density < 0.101 for turn in turns)


@pytest.mark.parametrize("template", [None, SHOUTING], ids=["plain", "cropped"])
def test_chat_with_a_whole_budget_equals_generating_from_the_whole_text(chat, template):
    model, tokenizer = load_model(str(demo_model_path()))
    tokenizer.chat_template = template
    with attach(model, load_selector("lsh", model), Budget(1.0)) as attachment:
        kept = chat.Chat(attachment, tokenizer, new_tokens=6)
        for text in ("class A:", "def f(self):", "return self"):
            turn = kept.say(text, str)
    prompt = model.dummy_inputs["input_ids"].new_tensor([kept.ids[: turn.prompt_tokens]])
    plain = model.generate(prompt, attention_mask=prompt.new_ones(prompt.shape), max_new_tokens=6, do_sample=False)
    assert plain[0].tolist() == kept.ids


def test_chat_refuses_what_does_not_fit_and_goes_on(chat, attached, monkeypatch):
    lines = "x = 1\n/reset\n" + "word " * 5000 + "\n\ny = 2\n/quit\nnot read\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    console = Console(file=io.StringIO(), width=200)
    assert chat.converse(chat.Chat(*attached, new_tokens=3), console) == 2
    out = console.file.getvalue()
    assert out.count("of the visible tokens read; 0 of") == 2
    assert "must fit the model's context of 4096" in out


def test_train_folder_stores_a_hasher_that_decodes(load, tmp_path, capsys):
    (tmp_path / "notes").mkdir()
    for part in range(5):
        text = "\n".join(f"value_{i} = compute_{part}(value_{i // 7}, {i * part})" for i in range(40))
        (tmp_path / "notes" / f"{part}.txt").write_text(text)
    settings = ["--context", "256", "--contexts", "2", "--steps", "2", "--out", str(tmp_path / "made")]
    assert load("examples", "train_folder").main([str(tmp_path / "notes"), *settings]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"layer \d: IoU [01]\.\d+ -> [01]\.\d+, attention mass [01]\.\d+ -> [01]\.\d+", out)) == 6
    hasher = Hasher.from_pretrained(tmp_path / "made")
    assert all(hasher.remainder(layer) is not None for layer in range(6))
    small = ["--prompt-tokens", "80", "--tokens", "2"]
    assert load("examples", "attach_local").main(["--hasher", str(tmp_path / "made"), *small]) == 0
