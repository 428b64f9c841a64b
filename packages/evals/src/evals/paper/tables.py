"""Each table of the paper as one of our commands, with what differs from the paper and why."""

from __future__ import annotations

from evals.grid import Grid
from evals.paper.item import Item

MODEL = "The paper's models have 7 to 14 billion parameters; by default this uses the demo model: compare orders."
_TEXT = "The paper's texts are PG19, Proof-Pile and CodeParrot; without --text these are held-out Python modules."
OURS = "planes transform transform+remainder"
_ALONE = "planes transform-start transform"
_LAYERS = "Layers 0 and 1 are dense for every method; the paper's MagicPIG leaves layers 0 and 16 dense."


def _numbers(title: str, header: str, *lines: str) -> Grid:
    return Grid(f"The paper's: {title}", header.split("|"), [[line.split("|") for line in lines]])


TABLES = (
    Item(
        "table 1",
        "IoU and perplexity before and after training",
        f"evals iou --methods oracle lsh linear paper-untrained paper {_ALONE} --rows 32",
        (
            MODEL,
            "IoU is a mean over rows, documents, heads and sparse layers; the paper's is of one row of one "
            "document. LSH before and after training: `lsh`, `linear`; the MLP: `paper-untrained`, `paper`. Perplexity "
            "is in table 2.",
        ),
        documents=6,
        paper=_numbers(
            "IoU / perplexity, top 2 %",
            "model|original|oracle|LSH before|LSH after|MLP before|MLP after",
            "LLaMA2-7B|- / 5.58|1.00 / 5.69|0.17 / 5.86|0.20 / 5.84|0.05 / 20.31|0.41 / 5.72",
            "LLaMA3-8B|- / 6.45|1.00 / 6.63|0.15 / 7.12|0.18 / 7.07|0.07 / 148.2|0.34 / 6.69",
            "Qwen2.5-7B|- / 7.17|1.00 / 7.28|0.13 / 8.81|0.16 / 8.73|0.09 / 22.07|0.35 / 7.31",
        ),
        stored=("demo_iou",),
    ),
    Item(
        "table 2",
        "Perplexity compared with Quest over budgets",
        f"evals ppl --methods oracle lsh paper {OURS} quest quest-heads --budgets 0.25 0.08 0.02 --rules visible",
        (
            MODEL,
            _TEXT,
            "A budget is a share of each row's visible tokens, the paper's of the whole context, at least 20 (--rules "
            "fixed). Quest takes whole pages, at least 3: the density column shows how many tokens that were.",
        ),
        documents=4,
        paper=_numbers(
            "perplexity of LLaMA3-8B",
            "method|PG19|ProofPile|CodeParrot",
            "dense|8.604|3.517|5.219",
            "oracle, 2 %|8.881|3.590|5.353",
            "Quest, 25 %|9.912|4.024|5.893",
            "Quest, 3.1 %|27.510|11.631|14.205",
            "Spotlight, 5 %|8.734|3.552|5.285",
            "Spotlight, 2 %|8.977|3.621|5.434",
        ),
        against=tuple((ours, 0.02, rival, 0.08) for ours in OURS.split() for rival in ("quest", "quest-heads")),
        stored=("quest",),
    ),
    Item(
        "table 3",
        "Perplexity compared with MagicPIG, with and without sink and local tokens",
        f"evals ppl --methods oracle {OURS} magicpig magicpig-bare magicpig-10x150 --budgets 0.02 --rules visible "
        "--match magicpig magicpig-10x150",
        (
            MODEL,
            _TEXT,
            _LAYERS,
            "MagicPIG's first 1,024 rows are dense, as in the paper, and count in its density. Where it draws nothing "
            "the paper reports NaN; here such a row attends to its own token, and `empty` in rows.json is the share.",
            "MagicPIG chooses its own number of tokens: the last tables give ours as many on each context.",
            "`magicpig` is the Spotlight paper's setting, 100 tables of 15 bits; `magicpig-10x150` its authors' own.",
        ),
        documents=4,
        paper=_numbers(
            "perplexity of LLaMA3-8B",
            "method|PG19|ProofPile|CodeParrot",
            "dense|9.56|2.83|2.26",
            "oracle, 2 %|9.89|2.89|2.28",
            "MagicPIG, sink and local|12.65|3.54|2.91",
            "MagicPIG, bare|NaN|NaN|NaN",
            "Spotlight, 2 %|9.99|2.91|2.30",
            "Spotlight, sink and local|9.87|2.89|2.29",
            "sink and local alone|13.89|5.50|3.98",
        ),
        stored=("magicpig",),
    ),
    Item(
        "table 4",
        "Fidelity of generated text",
        f"evals fidelity --methods oracle recent lsh {OURS} quest --context 1024",
        (
            MODEL,
            "Continuations of held-out text instead of LongBench's questions; Rouge-L of Unicode words.",
            "The budget is 2 % of a context of 1,024, about 20 tokens; the paper's 163 are 2 % of 8,192.",
        ),
        documents=6,
        paper=_numbers(
            "Rouge-L to LLaMA3-8B's own answers",
            "method|similarity",
            "oracle, 163 tokens|0.66",
            "LSH, 163|0.37",
            "Quest, 1,024|0.56",
            "Quest, 256|0.34",
            "MagicPIG|0.44",
            "Spotlight, 163|0.58",
        ),
        stored=("demo_fidelity",),
    ),
    Item(
        "table 5",
        "Model sizes",
        "evals ppl --methods oracle transform transform+remainder --budgets 0.02 --rules visible",
        (MODEL, _TEXT, "One model per run, given by --model and --hashers; `evals compare` compares two runs."),
        documents=4,
        paper=_numbers(
            "perplexity of Qwen2.5, dense / Spotlight, top 2 %",
            "model|PG19|Math|Code",
            "1.5B|13.828 / 13.510|4.181 / 4.143|5.081 / 5.064",
            "7B|11.112 / 9.930|3.833 / 3.497|4.951 / 4.645",
            "14B|8.416 / 8.261|3.230 / 3.196|4.472 / 4.440",
        ),
        stored=("second_english", "second_python", "ppl"),
    ),
    Item(
        "table 6",
        "Training corpora",
        f"evals ppl --methods {OURS} --budgets 0.02 --rules visible",
        (
            MODEL,
            "The second set of hashers, --other-hashers, was trained on another text; both are evaluated on the same.",
        ),
        documents=3,
        paper=_numbers(
            "perplexity of LLaMA3-8B, top 2 %",
            "trained on|PG19|Math|Code",
            "ArXiv and books|8.977|3.621|5.434",
            "C4|8.958|3.631|5.417",
            "GitHub code|8.891|3.611|5.393",
        ),
        twice=True,
        stored=("corpora", "corpora_other"),
    ),
    Item(
        "table 7",
        "Training settings",
        "hashtrain --model MODEL --text TEXT --only paper-exact --dry-run",
        ("it lists settings; a run stores its own in config.toml, and with every hasher.",),
        nothing_to_store=True,
    ),
    Item(
        "table 8",
        "Few-shot tasks at 20 tokens",
        f"evals ruler-synthetic --methods oracle recent lsh {OURS} --lengths 512 1024 --kinds single variables copy",
        (
            "The paper's few-shot tasks need a hub: `evals fewshot --tokens 20` is its protocol, 20 tokens in every "
            "row. These are synthetic exercises at 2 % of 512 or 1,024 tokens, 10 or 20 of them, after a dense prompt.",
        ),
        documents=4,
        paper=_numbers(
            "accuracy of LLaMA3-8B, 5 shots, dense / Spotlight at 20 tokens",
            "GLUE|SuperGLUE|OpenBookQA|HellaSwag|PiQA|Winogrande|ARC-E|ARC-C|MathQA|MMLU",
            ".618 / .620|.727 / .736|.378 / .378|.631 / .624|.804 / .804|.772 / .773|.850 / .851|.534 / .533|"
            ".418 / .411|.663 / .664",
        ),
        stored=("demo_exercises",),
    ),
    Item(
        "table 9",
        "Scores on LongBench",
        f"evals longbench --methods oracle quest magicpig {OURS} --tokens 163",
        ("It needs a hub's data and a model that follows instructions.",),
        paper=_numbers(
            "mean scores of LLaMA3-8B by kind of task",
            "method|one document|several|summaries|few-shot|synthetic|code",
            "dense|15.36|9.84|14.79|42.83|12.11|48.93",
            "Quest, 1,024 tokens|15.67|10.44|14.37|46.18|10.41|59.67",
            "MagicPIG|13.41|10.12|13.41|59.84|7.40|67.77",
            "Spotlight, 163 tokens|15.21|9.99|14.30|46.84|9.42|48.54",
        ),
        hub=True,
    ),
    Item(
        "table 10",
        "Ranking against reconstruction loss",
        "evals ppl --methods paper paper-reconstruction planes planes-reconstruction --budgets 0.02 --rules visible",
        (MODEL, _TEXT, "The loss is one minus the squared correlation with exact logits: docs/algorithm.md, eq. 17."),
        documents=4,
        paper=_numbers(
            "perplexity of LLaMA3-8B, top 2 %",
            "loss|PG19|Math|Code",
            "reconstruction|21.341|8.856|11.573",
            "ranking|8.977|3.621|5.434",
        ),
        against=tuple((name, 0.02, f"{name}-reconstruction", 0.02) for name in ("paper", "planes")),
        stored=("losses",),
    ),
    Item(
        "table 11",
        "Hashing against down-projection",
        "evals ppl --methods paper planes planes-64 down-proj --budgets 0.02 --rules visible",
        (
            MODEL,
            _TEXT,
            "Down-projection stores head_dim / 16 numbers of 16 bits: as many bits as head_dim, so `planes-64` is the "
            "fair rival where head_dim is 64.",
        ),
        documents=4,
        paper=_numbers(
            "perplexity of LLaMA3-8B, top 2 %",
            "estimation|PG19|Math|Code",
            "down-projection, 16 x|14.743|5.425|7.619",
            "hashing|8.977|3.621|5.434",
        ),
        against=(("planes-64", 0.02, "down-proj", 0.02), ("paper", 0.02, "down-proj", 0.02)),
        stored=("down_proj",),
    ),
    Item(
        "code length",
        "Length of untrained LSH that finds as much as a learned hash",
        "evals codelength --methods paper linear group-xnor planes-64 planes transform --rows 32",
        (MODEL, "The paper's claim of codes 5 times shorter."),
        documents=3,
        stored=("codelength_all",),
    ),
)
