"""The benchmarks of lm-evaluation-harness: the adapter against the harness's own model, local data, rows and runs."""

import json
import os
import random
import shutil

import numpy as np
import pytest
import torch
from evals import cli
from evals.benchmarks import BenchmarkCommand, FewshotCommand, LongbenchCommand, RulerBenchmarkCommand
from evals.compare import compare
from evals.methods import DENSE, load_methods
from evals.page import section_of
from evals.tasks import benchmark
from hashtrain.demo import demo_model_path
from hashtrain.usage import UsageError
from rich.console import Console
from sparse_decode import Budget
from transformers import AutoTokenizer

if os.environ.get("CI") != "true":
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed: `uv sync --group lm-eval`")

from evals.harness import load, measure
from evals.harness.adapter import SparseLM
from evals.harness.attributes import FILES, FOLDER, lines_of
from evals.harness.load import as_guest, load_tasks
from evals.harness.measure import budget_of
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

QUIET = Console(quiet=True)
TENTH = Budget(0.1)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model_path())


@pytest.fixture
def sparse(loaded, tokenizer):
    """Build the adapter; dense attention by default."""

    def build(method=DENSE, budget=TENTH, **settings):
        methods = {**loaded.methods, DENSE: load_methods([DENSE], None, None)[0]}
        return SparseLM(loaded.model, tokenizer, methods[method], budget, **{"dense_layers": 1, **settings})

    return build


@pytest.fixture
def own(loaded, tokenizer):
    """The harness's own model."""
    return lambda **settings: HFLM(pretrained=loaded.model, tokenizer=tokenizer, backend="causal", **settings)


def scoring():
    """Contexts and continuations of many lengths; some share a context, some a pass."""
    pairs = [(f"value_{i} = {i}\n" * (2 + i % 3), f"return value_{j}") for i in range(5) for j in (i, 77)]
    pairs += [("for name in names:\n    ", last) for last in ("print", "return", "pass")]
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]


def writing():
    prompts = ["def f(x):\n    return", "import os\n" * 8, "class A:\n    def b(self):", "import re\n" * 8]
    given = {"until": ["\n\n\n"], "max_gen_toks": 8, "do_sample": False}
    return [Instance("generate_until", {}, (prompt, given), i) for i, prompt in enumerate(prompts)]


def scores(lm, requests=None):
    return np.array([value for value, _ in lm.loglikelihood(requests or scoring(), disable_tqdm=True)])


def texts(lm):
    return lm.generate_until(writing(), disable_tqdm=True)


# The adapter


@pytest.mark.parametrize("rows", ["all", "continuation"])
def test_dense_is_the_harness_own_model(sparse, own, rows):
    lm = sparse(sparse_rows=rows)
    expected = own(batch_size=4).loglikelihood(scoring(), disable_tqdm=True)
    found = lm.loglikelihood(scoring(), disable_tqdm=True)
    assert np.abs(np.subtract(*([value for value, _ in answers] for answers in (found, expected)))).max() < 1e-4
    assert [likeliest for _, likeliest in found] == [likeliest for _, likeliest in expected]
    assert texts(lm) == texts(own(batch_size=1))
    assert lm.density == 1


@pytest.mark.parametrize("rows", ["all", "continuation"])
@pytest.mark.parametrize("name", ["oracle", "planes"])
def test_whole_budget_is_dense(sparse, name, rows):
    whole, dense = sparse(name, Budget(1.0), sparse_rows=rows), sparse()
    assert np.abs(scores(whole) - scores(dense)).max() < 1e-4
    assert texts(whole) == texts(dense)
    assert whole.density == 1


@pytest.mark.parametrize("rows", ["all", "continuation"])
def test_some_tokens_are_selected_and_change_the_scores(sparse, rows):
    lm = sparse("planes", sparse_rows=rows)
    assert np.abs(scores(lm) - scores(sparse())).max() > 1e-2
    after_scores = lm.density
    assert 0.05 < after_scores < 0.15
    texts(lm)
    assert lm.density != after_scores  # generated rows are counted, too
    assert lm.density < 0.2


@pytest.mark.parametrize("rows", ["all", "continuation"])
def test_batches_change_nothing(sparse, rows):
    one, many = (sparse("planes", sparse_rows=rows, batch_size=size) for size in (1, 8))
    assert np.abs(scores(one) - scores(many)).max() < 1e-4
    assert one.density == many.density
    assert texts(one) == texts(many)


@pytest.mark.parametrize("name", ["quest", "magicpig-bare"])
def test_a_rival_leaves_no_row_of_a_continuation_dense(sparse, name):
    """Where all rows are sparse, it leaves these first ones dense."""
    requests = [Instance("loglikelihood", {}, ("value = 1\n" * 16, "print"), 0)]  # more than Quest's three pages
    for rows in ("all", "continuation"):
        lm = sparse(name, sparse_rows=rows)
        gap = np.abs(scores(lm, requests) - scores(sparse(), requests)).max()
        assert (gap > 1e-2, lm.density < 1) == (rows == "continuation", rows == "continuation")


def test_company_changes_nothing(sparse):
    """A request scores what it scores alone, whatever is asked beside it."""
    lm = sparse("planes", sparse_rows="continuation")
    alone = [scores(lm, [request])[0] for request in scoring()]
    assert np.abs(scores(lm) - alone).max() < 1e-4


def test_rows_of_the_continuation_are_the_attachments(sparse, loaded, tokenizer):
    """Both kinds of rows against one pass of an attachment that is told where the continuation begins."""
    from sparse_decode import attach

    (request,) = [Instance("loglikelihood", {}, ("value = 1\n" * 6 + "print", "(value)"), 0)]
    context, both = (tokenizer(text).input_ids for text in (request.args[0], "".join(request.args)))
    found = {}
    for rows, start in (("all", 0), ("continuation", len(context) - 1)):
        settings = {"dense_layers": 1, "sparse_rows": start, "remainder": False}
        with attach(loaded.model, loaded.methods["planes"].selector, TENTH, **settings) as attachment:
            logits = loaded.model(torch.tensor([both[:-1]])).logits[0].log_softmax(-1)
            counts = attachment.counts().values()
        targets = torch.tensor(both[len(context) :])
        expected = logits[len(context) - 1 :].gather(-1, targets[:, None]).sum().item()
        lm = sparse("planes", sparse_rows=rows)
        found[rows] = scores(lm, [request])[0]
        assert found[rows] == pytest.approx(expected, abs=1e-4)
        assert (lm.selected, lm.visible) == tuple(map(sum, zip(*counts, strict=True)))
    assert abs(found["all"] - found["continuation"]) > 1e-3


def test_a_context_too_long_is_cut_where_the_harness_cuts_it(sparse, own):
    requests = [Instance("loglikelihood", {}, ("value = 1\n" * 200 + "print", "(value)"), 0)]
    expected = own().loglikelihood(requests, disable_tqdm=True)[0][0]
    whole = sparse("planes", Budget(1.0), sparse_rows="continuation")
    assert scores(whole, requests)[0] == pytest.approx(expected, abs=1e-4)
    some = sparse("planes", sparse_rows="continuation")
    scores(some, requests)
    # 256 tokens see each other; the rows of the continuation are the last ones, in two sparse layers of four heads.
    rows = len(sparse().tok_encode("(value)"))
    assert some.visible == 2 * 4 * sum(range(256 - rows + 1, 257))


def test_a_prompt_too_long_loses_its_middle(sparse, tokenizer):
    text = "".join(f"value_{i} = {i}\n" for i in range(40))
    ids = tokenizer(text).input_ids
    encoded = {side: sparse(truncation_side=side).tok_batch_encode([text], left_truncate_len=50) for side in SIDES}
    assert encoded["left"][0][0].tolist() == ids[-50:]
    assert encoded["middle"][0][0].tolist() == ids[:25] + ids[-25:]
    short = sparse(truncation_side="middle").tok_batch_encode([text], left_truncate_len=len(ids))
    assert short[0][0].tolist() == ids


SIDES = ("left", "middle")


def test_a_density_needs_a_request(sparse):
    with pytest.raises(ValueError, match="expected a request first"):
        _ = sparse("planes").density


def test_a_fixed_budget_is_that_many_tokens():
    visible = torch.tensor([5, 20, 5000])
    assert budget_of("tokens", 20.0).count(visible).tolist() == [5, 20, 20]
    assert budget_of("visible", 0.1).count(visible).tolist() == [1, 2, 500]


# Tasks and their data


def test_the_example_is_made_by_its_rule():
    for file in FILES:
        assert (FOLDER / file).read_text() == lines_of(file)


def folder_with(path, **files):
    for name, text in files.items():
        (path / f"{name}.yaml").write_text(text)
    return {"include_path": (path,), "limit": 2}


def test_a_local_file_includes_a_shipped_task(tmp_path):
    (tmp_path / "mine.jsonl").write_text((FOLDER / "long.jsonl").read_text())
    data = "dataset_path: json\ndataset_kwargs: {data_files: {test: mine.jsonl}}\n"
    given = folder_with(
        tmp_path, a=f"include: longbench_triviaqa\ntask: mine\n{data}", b="include: nobody\ntask: other"
    )
    (found,) = load_tasks(LongbenchCommand(tasks=("mine",), **given))
    assert found.name == "mine"
    assert found.task.config.doc_to_text.startswith("Answer the question based on the given passage.")
    assert len(found.task.instances) == 2
    # Without a name of its own it stands for the shipped task, in groups, too.
    (tmp_path / "a.yaml").write_text(f"include: longbench_triviaqa\n{data}")
    (found,) = load_tasks(LongbenchCommand(tasks=("longbench_triviaqa",), **given))
    assert found.task.config.dataset_path == "json"
    assert found.task.config.dataset_name is None  # that of the shipped data


@pytest.fixture
def few_shipped(tmp_path, monkeypatch):
    """A harness that ships two folders of tasks: reading all of them takes many seconds."""
    for folder in ("arc", "longbench"):
        shutil.copytree(load._SHIPPED / folder, tmp_path / "shipped" / folder)
    monkeypatch.setattr(load, "_SHIPPED", tmp_path / "shipped")


def test_tasks_beyond_the_default_ones_are_found(few_shipped):
    (found,) = load_tasks(LongbenchCommand(tasks=("python_attributes",), include_path=(FOLDER,), limit=1))
    assert found.task.config.doc_to_choice == "{{choices}}"


def test_unknown_names_are_named(few_shipped, tmp_path):
    with pytest.raises(ValueError, match="unknown to lm-evaluation-harness and --include-path: --tasks nobody"):
        load_tasks(LongbenchCommand(tasks=("nobody", "longbench")))
    given = folder_with(tmp_path, a="include: nobody\ntask: mine\ndataset_path: json")
    with pytest.raises(ValueError, match=r"`include: nobody` in .*a\.yaml"):
        load_tasks(LongbenchCommand(tasks=("mine",), **given))


def test_groups_and_tags_are_expanded(few_shipped):
    manager = load._manager(LongbenchCommand())
    leaves = load._leaves(manager, "longbench")
    assert len(leaves) == len(set(leaves)) == 21
    assert {"longbench_lcc", "longbench_triviaqa", "longbench_vcsum"} < set(leaves)


def test_a_missing_data_set_is_named_with_the_way_out(tmp_path):
    with pytest.raises(ValueError, match=r"data set Xnhyacinth/LongBench trec .* --include-path"):
        load_tasks(LongbenchCommand(tasks=("longbench_trec",)))
    broken = "include: longbench_trec\ntask: mine\ndataset_path: json\ndataset_kwargs: {data_files: {test: no.jsonl}}"
    with pytest.raises(ValueError, match="cannot load the data of mine, data set json"):
        load_tasks(LongbenchCommand(tasks=("mine",), **folder_with(tmp_path, a=broken)))


def test_the_same_worked_examples_whatever_was_loaded_before():
    command = FewshotCommand(tasks=("python_attributes",), include_path=(FOLDER,), limit=3)
    random.seed(5)
    before = random.getstate()
    first, again = (load_tasks(command)[0] for _ in range(2))
    assert random.getstate() == before
    assert first.digest == again.digest
    assert first.task.instances[0].args[0].count("class Store") == 6
    for other in (FewshotCommand(**{**vars(command), "seed": 1}), FewshotCommand(**{**vars(command), "shots": 2})):
        assert load_tasks(other)[0].digest != first.digest


def test_guests_leave_stdout_and_random_numbers_alone(capsys):
    with as_guest(3):
        print("guest")
        drawn = random.random(), np.random.random()
    with as_guest(3):
        assert (random.random(), np.random.random()) == drawn
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", "guest\n")


@pytest.mark.parametrize(
    "make",
    [
        lambda: LongbenchCommand(limit=0),
        lambda: LongbenchCommand(tokens=(0,)),
        lambda: LongbenchCommand(tasks=()),
        lambda: LongbenchCommand(shots=-1),
        lambda: LongbenchCommand(batch_size=0),
        lambda: RulerBenchmarkCommand(lengths=(0,)),
    ],
)
def test_settings_that_cannot_be_used(make):
    with pytest.raises(UsageError, match="got"):
        make()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match="must be a folder"):
        LongbenchCommand(include_path=(tmp_path / "nowhere",))


# Runs

RUNS = {
    "fewshot": (FewshotCommand, "python_attributes", ("acc", "acc_norm"), {"shots": 0, "rows": "continuation"}),
    "longbench": (LongbenchCommand, "python_short", ("score", "qa_f1_score"), {}),
    "ruler": (RulerBenchmarkCommand, "python_needle", ("1024",), {"lengths": (256,)}),
}


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example, with its short items in place of the long ones: the model reads 256 tokens."""
    folder = tmp_path_factory.mktemp("example")
    for path in FOLDER.iterdir():
        text = path.read_text().replace("long.jsonl", "short.jsonl").replace("python_long", "python_short")
        (folder / path.name).write_text(text)
    return folder


@pytest.fixture
def build(made, tmp_path, example):
    def command(name, **changed) -> BenchmarkCommand:
        kind, task, _, settings = RUNS[name]
        common = {"model": str(made.model), "hashers": made.hashers, "dense_layers": 1, "limit": 4}
        common |= {"methods": ("planes",), "tasks": (task,), "include_path": (example,), "out": tmp_path / name}
        return kind(**{**common, **settings, **changed})

    return command


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_whole_and_a_second_one_computes_nothing(build, name, monkeypatch):
    command, metrics = build(name), RUNS[name][2]
    found = benchmark.run(command, QUIET)
    assert {row.metric for row in found.rows} == set(metrics)
    assert [row.method for row in found.select(metric=metrics[0])] == [DENSE, "planes"]
    assert {(row.task, row.n, row.phase) for row in found.rows} == {(name, 4, "decode")}
    (row,) = found.select(metric=metrics[0], method="planes")
    if name == "fewshot":  # 20 of some 150 to 170 tokens, at every row of the continuation
        assert (row.budget, row.rule) == (20, "tokens")
        assert 20 / 180 < row.density < 20 / 140
    else:
        assert (row.budget, row.rule) == (0.02, "visible")
        assert 0.01 < row.density < 0.03
    assert section_of(command.out).tables
    written = "".join(path.read_text() for path in command.out.rglob("*.json"))
    assert str(command.out.parent) not in written
    from transformers import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, "forward", None)
    assert benchmark.run(command, QUIET) == found


def test_the_harness_runs_a_model_in_bfloat16(build):
    found = benchmark.run(build("fewshot", dtype="bfloat16", methods=("planes",), limit=2), QUIET)
    assert found.config["dtype"] == "bfloat16"
    assert {row.method for row in found.rows} == {"dense", "planes"}


def test_rows_follow_from_the_items(build):
    command = build("longbench", budgets=(1.0,))
    found = benchmark.run(command, QUIET)
    sample = json.loads((command.out / "samples" / "0000.json").read_text())
    dense, whole = sample["cells"]
    assert dense["texts"] == whole["texts"]
    assert len(dense["texts"]) == len(dense["values"]["score"]) == 4
    row = found.one(metric="score", method=DENSE)
    assert row.value == pytest.approx(np.mean(dense["values"]["score"]))
    assert row.stderr == pytest.approx(np.std(dense["values"]["score"], ddof=1) / 2)


def test_every_method_is_asked_the_same(build, monkeypatch):
    """With worked examples, which are drawn anew for each method."""
    asked = []

    def evaluate(lm, tasks, **settings):
        output = measure.evaluate_as_shipped(lm, tasks, **settings)
        asked.append([x.args for x in tasks["tasks"]["python_attributes"].instances])
        return output

    monkeypatch.setattr(measure, "evaluate_as_shipped", measure.evaluate, raising=False)
    monkeypatch.setattr(measure, "evaluate", evaluate)
    benchmark.run(build("fewshot", shots=1, methods=("recent", "planes"), limit=2), QUIET)
    assert len(asked) == 3
    assert asked[0] == asked[1] == asked[2]
    assert asked[0][0][0].count("class Store") == 2


def test_means_over_tasks_are_plain_ones(build, example, tmp_path):
    two = tmp_path / "two"
    two.mkdir()
    for path in example.iterdir():
        (two / path.name).write_text(path.read_text())
    (two / "second.yaml").write_text(
        (two / "longbench.yaml").read_text().replace("short.jsonl", "shots.jsonl").replace("python_short", "second")
    )
    command = build("longbench", tasks=("python_short", "second"), include_path=(two,))
    found = benchmark.run(command, QUIET)
    for method in (DENSE, "planes"):
        rows = found.select(metric="score", method=method)
        assert [row.where for row in rows] == ["python_short", "second", "mean of 2 tasks"]
        assert rows[2].value == pytest.approx((rows[0].value + rows[1].value) / 2)
        assert rows[2].stderr == pytest.approx(np.hypot(rows[0].stderr, rows[1].stderr) / 2)
        assert rows[2].n == 8


def test_other_data_under_the_same_name_are_refused(build, example, tmp_path):
    benchmark.run(build("ruler"), QUIET)
    other = tmp_path / "other"
    other.mkdir()
    (other / "ruler.yaml").write_text((example / "ruler.yaml").read_text().replace("short.jsonl", "shots.jsonl"))
    (other / "shots.jsonl").write_text((example / "shots.jsonl").read_text())
    with pytest.raises(ValueError, match="of another text"):
        benchmark.run(build("ruler", include_path=(other,)), QUIET)


def test_runs_pair_item_by_item(build, tmp_path):
    first = build("fewshot", methods=("recent", "planes"), out=tmp_path / "first")
    benchmark.run(first, QUIET)
    entries, grid = compare(first.out, first.out, ("planes", "recent"), (None, None))
    cells = json.loads((first.out / "samples" / "0000.json").read_text())["cells"]
    values = {cell["method"]: np.array(cell["values"]["acc"]) for cell in cells}
    (entry,) = [entry for entry in entries if entry["metric"] == "acc"]
    assert entry["mean"] == pytest.approx((values["planes"] - values["recent"]).mean())
    assert entry["task"] == "python_attributes"
    assert "planes 20 tokens - recent 20 tokens, task python_attributes" in grid.sections[0][0][0]
    second = build("fewshot", methods=("recent",), tokens=(), budgets=(0.1,), out=tmp_path / "second")
    benchmark.run(second, QUIET)
    with pytest.raises(ValueError, match="budgets in tokens and the other in shares"):
        compare(first.out, second.out, (None, None), (None, None))


def test_as_typed(build, made, example, capsys):
    command = build("ruler")
    flags = {"model": made.model, "hashers": made.hashers, "tasks": "python_needle", "include-path": example}
    flags |= {"methods": "planes", "limit": 2, "dense-layers": 1, "out": command.out}
    arguments = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    assert cli.main(["ruler", *arguments]) == 0
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert [found["method"] for found in last["results"]] == [DENSE, "planes"]


def test_without_the_harness_it_says_how_to_install_it(build, monkeypatch):
    monkeypatch.setattr(benchmark, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"evals\[lm-eval\]"):
        benchmark.run(build("ruler"), QUIET)
