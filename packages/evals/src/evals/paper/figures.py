"""Each figure of the paper as one of our commands, with what differs from the paper and why."""

from __future__ import annotations

from evals.paper.item import Item
from evals.paper.tables import MODEL, OURS

FIGURES = (
    Item(
        "figure 1",
        "Overview",
        "uv run tools/draw_overview.py",
        ("it is a drawing: docs/algorithm.md describes the same.",),
        nothing_to_store=True,
    ),
    Item(
        "figure 2",
        "Queries and keys lie in cones",
        "evals cones --methods lsh paper transform --context 2048",
        (MODEL, "Angles and components are measured in every layer; the paper shows one."),
        documents=3,
        stored=("cones",),
    ),
    Item(
        "figure 3",
        "The two losses",
        "hashtrain --only paper-exact paper-exact-mse",
        ("it is a drawing; training.png of such a run shows both losses.",),
        nothing_to_store=True,
    ),
    Item(
        "figure 4",
        "Needle in a haystack",
        "evals needle --methods transform lsh magicpig --lengths 256 512 1024",
        (
            MODEL,
            "The haystack is Python and the needle an assignment, which suits the demo model; up to 1,024 tokens, the "
            "paper's up to 8,192.",
        ),
        documents=2,
        stored=("needle_demo",),
    ),
    Item(
        "figure 5",
        "LongBench",
        "evals output-error --methods oracle recent lsh paper transform transform+remainder --context 2048 --rows 32",
        (
            "LongBench needs a hub and a model that follows instructions (`evals longbench`);"
            " this shows each layer's output error instead.",
        ),
        documents=3,
        stored=("output_error",),
    ),
    Item(
        "figure 6 (throughput)",
        "Efficiency: whole steps",
        "evals throughput --methods sdpa eager planes recent --contexts 8192 32768 --batches 1",
        (
            "On the CPU, 4 layers of the attention of Qwen2.5-7B with random weights and caches; the paper runs the "
            "whole model on 8 A100. `--shape qwen2.5-7b --device cuda` does that, `--methods compiled planes-compiled` "
            "adds torch.compile.",
            "Times depend on the machine; leave it idle.",
        ),
        stored=("throughput",),
    ),
    Item(
        "figure 6 (kernels)",
        "Efficiency: each step alone",
        "evals kernels --contexts 32768 131072",
        ("On the CPU; the paper has two steps on a GPU, each within 100 microseconds up to 512K tokens.",),
        stored=("kernel_times",),
    ),
    Item(
        "figure 6 (code size)",
        "Efficiency: bytes stored per token",
        "evals codesize",
        ("By formula, for Qwen2.5-7B; the paper draws MagicPIG and its own.",),
        stored=("codesize",),
    ),
    Item(
        "figure 6 (complexity)",
        "Efficiency: complexity of each step",
        "evals complexity",
        ("By formula, for Qwen2.5-7B.",),
        stored=("complexity",),
    ),
    Item(
        "figure 7",
        "The needle",
        "evals needle --methods transform --lengths 256",
        ("It quotes a prompt; samples/ of this run contain ours.",),
        documents=1,
        nothing_to_store=True,
    ),
    Item(
        "figure 8",
        "The needle's prompt",
        "evals needle --methods transform --lengths 256",
        ("It quotes a prompt; samples/ of this run contain ours.",),
        documents=1,
        nothing_to_store=True,
    ),
    Item(
        "figure 9",
        "Bit packing",
        "uv run pytest packages/hashcore/tests/test_kernels.py -k pack",
        ("it is a listing; this runs the kernel under a simulator and compares it with `hashcore.pack`.",),
        nothing_to_store=True,
    ),
    Item(
        "figure 10",
        "IoU per head",
        "evals iou --methods lsh paper planes transform --rows 32",
        (MODEL, "rows.json has a number for every layer and head; the table shows layers."),
        documents=3,
        stored=("demo_iou",),
    ),
    Item(
        "figure 11",
        "Fidelity by task",
        f"evals longbench --methods oracle lsh quest magicpig {OURS} --tokens 163",
        ("It splits table 4 by LongBench's tasks, whose data come from a hub; samples/ contain every answer.",),
        hub=True,
    ),
)
