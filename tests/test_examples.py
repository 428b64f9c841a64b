"""Every example runs, on things small enough for seconds; the notebook in .ci/run."""

import ast
import dataclasses
import json
import math
import os
import pathlib
import re
import runpy
import subprocess
import sys

import numpy as np
import pytest
from hashcore import BitIndex
from hashtrain import Hasher, HasherConfig
from hashtrain.demo import demo_model_path
from hashtrain.models import load_model
from safetensors import safe_open
from sparse_decode import Budget, attach
from sparse_decode.streaming import load_selector

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
ROOT = pathlib.Path(__file__).resolve().parent.parent
SHOUTING = TEMPLATE.replace("trim }}", "trim | upper }}")  # writes answers otherwise than the model did


def test_embeddings_are_found_more_often_with_planes_and_rerank(tmp_path):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "own.npy", rng.normal(size=(20, 96))[rng.integers(0, 20, 2000)] + rng.normal(size=(2000, 96)))
    script = ROOT / "packages/hashcore/benchmarks/embeddings.py"  # in its own process: it sets the number of threads
    words = ["--vectors", tmp_path / "own.npy", "--queries", "64", "--save", tmp_path / "index"]
    done = subprocess.run([sys.executable, script, *words], check=True, capture_output=True, text=True)
    found = {
        (x["planes"], x["rerank"]): x["recall"] for x in json.loads(done.stdout.splitlines()[-1])["recall"]["given"]
    }
    assert 0.3 < found[1, None] < found[3, None] < found[3, 4] <= 1
    assert len(BitIndex.load(tmp_path / "index")) == 1936
    wrong = subprocess.run([sys.executable, script, "--vectors", tmp_path], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "--vectors must be a regular file" in wrong.stderr


def densities_in(out):
    """Percent of the visible tokens that each layer read, in the last line."""
    return [float(x) for x in re.findall(r"\d: ([\d.]+) %", out.splitlines()[-1])]


@pytest.mark.parametrize(("fraction", "least", "most"), [("1", 100, 100), ("0.1", 8, 10)])
def test_attach_local_compares(load, fraction, least, most, capsys):
    module = load("examples", "attach_local")
    settings = ["--hasher", "lsh", "--prompt-tokens", "300", "--tokens", "6", "--fraction", fraction]
    assert module.main(settings) == 0
    out = capsys.readouterr().out
    densities = densities_in(out)
    assert len(densities) == 6
    assert all(least <= density <= most for density in densities)
    alike, share = re.search(r"the first (\d) tokens agree; .* choose (\d+) %", out).groups()
    if fraction == "1":
        assert (alike, share) == ("6", "100")
    assert 100 * int(alike) / 6 <= int(share) + 1, "the first tokens that agree are among those it would choose"


@pytest.fixture
def asked(load, tmp_path, monkeypatch):
    """`ask` in a folder of its own, on the demo model and the start of a document."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "document.txt").write_text("import os\n" * 900)
    given = ["--model", str(demo_model_path()), "--document", str(tmp_path / "document.txt"), "--question", "What?"]
    return load("examples", "ask"), [*given, "--new-tokens", "4"]


def test_ask_answers_twice_side_by_side(asked, capsys):
    module, words = asked
    assert module.main([*words, "--hasher", "lsh", "--fraction", "0.02"]) == 0
    said = capsys.readouterr()
    lines = {cells[1].strip(): [cell.strip() for cell in cells[2:4]] for cells in map(cells_of, said.out.splitlines())}
    sparse, dense = lines["answer"]
    assert sparse
    assert dense
    share = [float(text.split()[0]) for text in lines["tokens read"]]
    assert share[1] == 100
    assert 1 < share[0] < 4
    assert all(float(text) > 0 for text in lines["ms per token"])


def test_ask_computes_a_document_once(asked, tmp_path, capsys):
    module, words = asked
    for document, question, stored in (("a", "What?", 0), ("a", "Why?", 1), ("b", "Why?", 0)):
        (tmp_path / "document.txt").write_text(f"import {document}\n" * 30)
        assert module.main([*words, "--hasher", "lsh", "--question", question]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if "tokens from the session" in line)
        sparse, dense = (int(cell) for cell in cells_of(line)[2:4])
        assert dense > 60, "the dense run reads what the sparse one has written"
        assert sparse == stored * dense
        assert len([*tmp_path.rglob("*.kv")]) == 1, "one document is kept"


def cells_of(line):
    return [*re.split("[│┃]", line), "", "", "", ""]


@pytest.mark.parametrize("template", [None, SHOUTING], ids=["plain", "cropped"])
def test_chat_with_a_whole_budget_equals_generating_from_the_whole_text(load, template):
    model, tokenizer = load_model(str(demo_model_path()))
    tokenizer.chat_template = template
    with attach(model, load_selector("lsh", model), Budget(1.0)) as attachment:
        kept = load("examples", "chat").Chat(attachment, tokenizer, new_tokens=6)
        for text in ("class A:", "def f(self):", "return self"):
            turn = kept.say(text, str)
    prompt = model.dummy_inputs["input_ids"].new_tensor([kept.ids[: turn.prompt_tokens]])
    plain = model.generate(prompt, attention_mask=prompt.new_ones(prompt.shape), max_new_tokens=6, do_sample=False)
    assert plain[0].tolist() == kept.ids


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
    small = ["--prompt-tokens", "300", "--tokens", "8", "--fraction", "0.1"]
    assert load("examples", "attach_local").main(["--hasher", str(tmp_path / "made"), *small]) == 0
    # 7 steps see 301 to 307 tokens and read 30 of them; layers and heads divide these, whole tokens each.
    asked = 100 * sum([30] * 7) / sum(range(301, 308))
    assert sum(densities_in(capsys.readouterr().out)) / 6 == pytest.approx(asked, rel=0.02)


# ---- README.md: its numbers, and its example once hashers are trained ----------------------------------------------


def test_every_number_in_the_readme_is_stored_or_set_in_the_code():
    """Tables come from stored runs (`update_readme.py --check`); a number in a sentence has its source here."""
    text = (ROOT / "README.md").read_text()
    sentences = re.sub(r"<!-- results:.*?<!-- end -->|^```.*?^```$|`[^`]*`|\]\([^)]*\)", "", text, flags=re.S | re.M)
    numbers = set(re.findall(r"\d(?:[\d.,]*\d)?", sentences))
    bits = {field.name: field.default for field in dataclasses.fields(HasherConfig)}["bits"]
    with safe_open(next(demo_model_path().glob("*.safetensors")), "pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    head = 64
    smol = json.loads((ROOT / "docs/results/smollm2.json").read_text())
    assert numbers == {
        f"{bits}",
        f"{100 * Budget().fraction:g}",
        f"{parameters / 1e6:.1f}",
        f"{head}",
        f"{100 * bits / 8 / (2 * head * 2):.0f}",  # of keys and values of two bytes each
        f"{smol['english']['config']['context']:,}",  # the longest that SmolLM2 takes
        "3.11",  # of Python, as CI installs it
        "3.13",
    }


@pytest.mark.skipif("README_HASHERS" not in os.environ, reason="it names a folder that `uv run hashtrain` wrote")
def test_the_example_of_the_readme_generates(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    *_, code = re.findall(r"^```python\n(.*?)^```$", pathlib.Path("README.md").read_text(), re.M | re.S)
    assert "runs/demo/transform" in code
    (tmp_path / "example.py").write_text(code.replace("runs/demo", os.environ["README_HASHERS"]))
    runpy.run_path(str(tmp_path / "example.py"), run_name="__main__")
    densities = ast.literal_eval(capsys.readouterr().out.strip().rsplit("\n", 1)[1])
    # Layers have shares of their own; together they read what was asked, rounded down to whole tokens.
    assert 0.019 < sum(densities.values()) / len(densities) <= 0.02
