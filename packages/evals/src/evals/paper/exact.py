"""The paper's tables and figures in its own protocol: `paper-exact`, one selection per query head, every token scored.

In every row a budget is 2 % of the full length, at least 20 tokens; no token is always read, and layers 0 and 1 are
dense. For models of hundreds of millions of parameters or more; `items` has those that suit the demo model.
"""

from __future__ import annotations

from evals.paper.item import Item

_ROWS = "--sink 0 --recent 0 --dense-layers 2 --heads query"
_PPL = f"--rules fixed --score all {_ROWS}"
_MAGICPIG = "--dense-layers 0 --dense-at 0 16 --rules fixed --score all"
_BESIDE = "--sink 4 --recent 64 --ends beside"
_ALONE = "--methods recent --budgets 0.0001"
"""A budget too small to select anything beyond the sink and recent tokens."""
_HASHERS = (
    "Hashers: `hashtrain --model MODEL --text TEXT --only lsh linear-exact paper-exact-untrained paper-exact`, whose "
    "schedule is the paper's."
)
_HUB = "LongBench's data come from a hub."

ITEMS = (
    Item(
        "table 1 (exact)",
        "IoU before and after training",
        f"evals iou --methods lsh linear-exact paper-exact-untrained paper-exact {_ROWS}",
        (
            _HASHERS,
            "The oracle's IoU is 1.",
            "Rows are drawn at random; `--rows-from last` uses the paper's, one row of one document.",
        ),
        documents=8,
        stored=("order_iou", "second_exact_iou"),
    ),
    Item(
        "table 1 (exact, perplexity)",
        "Perplexity before and after training",
        f"evals ppl --methods oracle lsh linear-exact paper-exact-untrained paper-exact --budgets 0.02 {_PPL}",
        (_HASHERS,),
        documents=8,
        stored=("order_ppl", "second_exact_order"),
    ),
    Item(
        "table 2 (exact)",
        "Perplexity compared with Quest over budgets",
        f"evals ppl --methods oracle paper-exact quest --budgets 0.2 0.1 0.05 0.031 0.02 {_PPL}",
        (_HASHERS, "Quest's `--heads query` is its published form; its first 128 rows are dense, as in the paper."),
        documents=8,
        stored=("exact_quest", "second_exact_quest"),
    ),
    Item(
        "table 3 (MagicPIG)",
        "MagicPIG with sink and local tokens, with only one kind, with neither",
        f"evals ppl --methods magicpig magicpig-sink magicpig-local magicpig-bare --budgets 0.02 {_MAGICPIG} --sink 0 "
        "--recent 0",
        ("Layers 0 and 16 are dense. A row that draws nothing attends to its own token, where the paper has NaN.",),
        documents=8,
        stored=("exact_magicpig",),
    ),
    Item(
        "table 3 (MagicPIG, no retrieval)",
        "Sink and local tokens alone, layers 0 and 16 dense",
        f"evals ppl {_ALONE} {_MAGICPIG} {_BESIDE}",
        ("The paper's row reads 68 tokens; --rules fixed adds its minimum budget of 20.",),
        documents=8,
        stored=("exact_magicpig_ends",),
    ),
    Item(
        "table 3 (exact)",
        "Retrieval alone, layers 0 and 1 dense",
        f"evals ppl --methods oracle paper-exact --budgets 0.02 {_PPL}",
        (_HASHERS,),
        documents=8,
        stored=("exact_quest", "order_ppl"),
    ),
    Item(
        "table 3 (exact, ends)",
        "Retrieval with sink and local tokens",
        f"evals ppl --methods paper-exact --budgets 0.02 --rules fixed --score all --dense-layers 2 {_BESIDE}",
        (_HASHERS,),
        documents=8,
        stored=("exact_ends", "second_exact_ends"),
    ),
    Item(
        "table 3 (exact, no retrieval)",
        "Sink and local tokens alone, layers 0 and 1 dense",
        f"evals ppl {_ALONE} {_BESIDE} --rules fixed --score all --dense-layers 2",
        ("The paper's row reads 68 tokens; --rules fixed adds its minimum budget of 20.",),
        documents=8,
        stored=("exact_no_retrieval", "second_exact_no_retrieval"),
    ),
    Item(
        "table 6 (exact)",
        "Training corpora",
        f"evals ppl --methods paper-exact --budgets 0.02 {_PPL}",
        (_HASHERS, "The second set of hashers, --other-hashers, was trained on another text."),
        documents=8,
        twice=True,
        stored=("exact_corpora", "exact_corpora_other", "second_exact_corpora_other"),
    ),
    Item(
        "table 10 (exact)",
        "Ranking against reconstruction loss",
        f"evals ppl --methods paper-exact paper-exact-mse paper-exact-reconstruction --budgets 0.02 {_PPL}",
        (
            "`paper-exact-mse` is the paper's squared error; `paper-exact-reconstruction` is one minus the squared "
            "correlation: docs/algorithm.md, eq. 17.",
        ),
        documents=8,
        against=tuple(("paper-exact", 0.02, f"paper-exact-{loss}", 0.02) for loss in ("mse", "reconstruction")),
        stored=("exact_losses",),
    ),
    Item(
        "table 11 (exact)",
        "Hashing against down-projection",
        f"evals ppl --methods paper-exact down-proj-exact --budgets 0.02 {_PPL}",
        ("Down-projection stores head_dim / 16 numbers of 16 bits per KV head, with one projection per query head.",),
        documents=8,
        against=(("paper-exact", 0.02, "down-proj-exact", 0.02),),
        stored=("exact_down_proj", "second_exact_down_proj"),
    ),
    Item(
        "figure 4 (exact)",
        "Needle in a haystack",
        "evals needle --methods paper-exact magicpig --lengths 1024 2048 4096 --sink 0 --recent 0 --dense-layers 2",
        (_HASHERS, "The haystack is Python and the needle an assignment; the paper's lengths go to 8,192."),
        documents=5,
        stored=("exact_needle",),
    ),
    Item(
        "figure 5 (LongBench)",
        "LongBench, by task",
        "evals longbench --methods oracle lsh paper-exact quest --tokens 163 --heads query",
        (_HUB, "Prompts lose their middle, as in LongBench's own script."),
        hub=True,
    ),
    Item(
        "figure 10 (exact)",
        "IoU per head",
        f"evals iou --methods lsh paper-exact-untrained paper-exact {_ROWS}",
        (_HASHERS, "rows.json has a number for every layer and head."),
        documents=8,
        stored=("order_iou",),
    ),
)
