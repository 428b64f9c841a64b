"""Each table and figure of the paper, as a command of ours, with what differs from the paper and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evals.compare import compare
from evals.grid import Grid
from evals.methods import RIVAL_NAMES, TUNED, without_hasher
from evals.study import PaperCommand

_MODEL = "The paper runs 7 to 14 billion parameters; by default this runs the demo model: compare orders."
_TEXT = "The paper's texts are PG19, Proof-Pile and CodeParrot; without --text these are held-out Python modules."
_OURS = ("planes", "transform", "transform+remainder")
_ALONE = ("planes", "transform-start", "transform")
_LAYERS = "Every method leaves layers 0 and 1 dense; the paper's MagicPIG leaves layers 0 and 16 dense."


@dataclass(frozen=True)
class Item:
    """One table or figure.

    Attributes:
        name: as the paper numbers it; title: what it shows.
        task: the command's name, None if nothing is to be measured; arguments: its own, beside model, hashers and out.
        documents: how many by default.
        differs: what is not as in the paper, and why.
        paper: the paper's own numbers, where the source has them.
        against: (method, budget, other, its budget): differences to show, paired over documents.
        twice: run it with --other-hashers, too, and show the difference.
    """

    name: str
    title: str
    task: str | None
    arguments: tuple[str, ...]
    documents: int
    differs: tuple[str, ...]
    paper: Grid | None = None
    against: tuple[tuple[str, float, str, float], ...] = ()
    twice: bool = False

    def commands(self, settings: PaperCommand) -> list[list[str]]:
        """Write the commands out. Raises: ValueError if there are none, or something for them is not given."""
        if self.task is None:
            raise ValueError(f"{self.name} has no command: {self.differs[0]}")
        if self.twice and settings.other_hashers is None:
            raise ValueError(
                f"{self.name} compares two sets of hashers: make one with `uv run hashtrain --text FOLDER --out OTHER` "
                "and give --other-hashers OTHER"
            )
        hashers = [settings.hashers, settings.other_hashers] if self.twice else [settings.hashers]
        count = str(settings.documents or self.documents)
        found = []
        for folder, made in zip(self.folders(settings), hashers, strict=True):
            words = [self.task, *self.arguments, "--out", str(folder)]
            if self.task not in ("codesize", "complexity"):
                words += ["--model", settings.model, "--hashers", str(made), "--documents", count]
            if self.task == "codelength" and settings.more_hashers:
                words += ["--more-hashers", *map(str, settings.more_hashers)]
            if self.rivals and settings.tuned is not None:
                words += ["--tuned", str(settings.tuned)]
            found.append(words)
        return found

    def folders(self, settings: PaperCommand) -> list[Path]:
        """Say where its runs go."""
        name = self.name.replace(" ", "-")
        return [settings.out / name, *([settings.out / f"{name}-other"] if self.twice else [])]

    @property
    def rivals(self) -> bool:
        """Whether it measures perplexity of rivals, which --tuned may complete."""
        return self.task == "ppl" and not set(RIVAL_NAMES).isdisjoint(self.arguments)

    def lacking(self, settings: PaperCommand) -> list[str]:
        """Name the hashers it needs that are not there."""
        words = list(self.arguments)
        start = words.index("--methods") + 1 if "--methods" in words else len(words)
        end = next((i for i in range(start, len(words)) if words[i].startswith("--")), len(words))
        return without_hasher(words[start:end], settings.hashers)

    def differences(self, settings: PaperCommand) -> list[Grid]:
        """Return the paired differences that it shows, from finished runs."""
        first, last = self.folders(settings)[0], self.folders(settings)[-1]
        pairs = list(self.against)
        if settings.tuned is not None:
            pairs += [(a, x, b + TUNED, y) for a, x, b, y in pairs if b in RIVAL_NAMES]
        found = [compare(first, first, (a, b), (x, y))[1] for a, x, b, y in pairs]
        return [*found, compare(first, last, (None, None), (None, None))[1]] if self.twice else found


def _numbers(title: str, header: str, *lines: str) -> Grid:
    return Grid(f"The paper's: {title}", header.split("|"), [[line.split("|") for line in lines]])


ITEMS = (
    Item(
        "table 1",
        "IoU and perplexity before and after training",
        "iou",
        ("--methods", "oracle", "lsh", "linear", "paper-untrained", "paper", *_ALONE, "--rows", "32"),
        6,
        (
            _MODEL,
            "IoU is a mean over rows, documents, heads and sparse layers; the paper's is of one row of one "
            "document. LSH before and after training: `lsh`, `linear`; the MLP: `paper-untrained`, `paper`. Perplexity "
            "is in table 2.",
        ),
        _numbers(
            "IoU / perplexity, top 2 %",
            "model|original|oracle|LSH before|LSH after|MLP before|MLP after",
            "LLaMA2-7B|- / 5.58|1.00 / 5.69|0.17 / 5.86|0.20 / 5.84|0.05 / 20.31|0.41 / 5.72",
            "LLaMA3-8B|- / 6.45|1.00 / 6.63|0.15 / 7.12|0.18 / 7.07|0.07 / 148.2|0.34 / 6.69",
            "Qwen2.5-7B|- / 7.17|1.00 / 7.28|0.13 / 8.81|0.16 / 8.73|0.09 / 22.07|0.35 / 7.31",
        ),
    ),
    Item(
        "table 2",
        "Perplexity beside Quest over budgets",
        "ppl",
        (
            *("--methods", "oracle", "lsh", "paper", *_OURS, "quest", "quest-heads"),
            *("--budgets", "0.25", "0.08", "0.02", "--rules", "visible"),
        ),
        4,
        (
            _MODEL,
            _TEXT,
            "A budget is of each row's visible tokens; the paper's of the whole context, at least 20 (--rules fixed). "
            "Quest takes whole pages, at least 3: the density column says how many tokens that were.",
        ),
        _numbers(
            "perplexity of LLaMA3-8B",
            "method|PG19|ProofPile|CodeParrot",
            "dense|8.604|3.517|5.219",
            "oracle, 2 %|8.881|3.590|5.353",
            "Quest, 25 %|9.912|4.024|5.893",
            "Quest, 3.1 %|27.510|11.631|14.205",
            "Spotlight, 5 %|8.734|3.552|5.285",
            "Spotlight, 2 %|8.977|3.621|5.434",
        ),
        against=tuple((ours, 0.02, rival, 0.08) for ours in _OURS for rival in ("quest", "quest-heads")),
    ),
    Item(
        "table 3",
        "Perplexity beside MagicPIG, with and without sink and local tokens",
        "ppl",
        (
            *("--methods", "oracle", *_OURS, "magicpig", "magicpig-bare", "magicpig-10x150"),
            *("--budgets", "0.02", "--rules", "visible", "--match", "magicpig"),
        ),
        4,
        (
            _MODEL,
            _TEXT,
            _LAYERS,
            "MagicPIG's first 1,024 rows are dense, as in the paper, and count in its density. Where it draws nothing "
            "the paper reports NaN; here such a row attends to its own token, and `empty` in rows.json says how often.",
            "MagicPIG takes its own number of tokens: the last table gives ours as many on each context.",
        ),
        _numbers(
            "perplexity of LLaMA3-8B",
            "method|PG19|ProofPile|CodeParrot",
            "dense|9.56|2.83|2.26",
            "oracle, 2 %|9.89|2.89|2.28",
            "MagicPIG, sink and local|12.65|3.54|2.91",
            "MagicPIG, bare|NaN|NaN|NaN",
            "Spotlight, 2 %|9.99|2.91|2.30",
        ),
    ),
    Item(
        "table 4",
        "Fidelity of generated text",
        "fidelity",
        ("--methods", "oracle", "recent", "lsh", *_OURS, "quest", "--context", "1024"),
        6,
        (
            _MODEL,
            "Continuations of held-out text in place of LongBench's questions, Rouge-L of Unicode words.",
        ),
        _numbers(
            "Rouge-L to LLaMA3-8B's own answers",
            "method|similarity",
            "oracle, 163 tokens|0.66",
            "LSH, 163|0.37",
            "Quest, 1,024|0.56",
            "Quest, 256|0.34",
            "MagicPIG|0.44",
            "Spotlight, 163|0.58",
        ),
    ),
    Item(
        "table 5",
        "Model sizes",
        None,
        (),
        0,
        ("it needs models of several sizes: give each to `evals ppl --model FOLDER --hashers FOLDER`.",),
    ),
    Item(
        "table 6",
        "Training corpora",
        "ppl",
        ("--methods", *_OURS, "--budgets", "0.02", "--rules", "visible"),
        3,
        (
            _MODEL,
            "The second set of hashers, --other-hashers, was trained on another text; both are judged on the same.",
        ),
        twice=True,
    ),
    Item("table 7", "Training settings", None, (), 0, ("it lists settings: `hashtrain --help` shows ours.",)),
    Item(
        "table 8",
        "Few-shot tasks at 20 tokens",
        "ruler-synthetic",
        (
            *("--methods", "oracle", "recent", "lsh", *_OURS),
            *("--lengths", "512", "1024", "--kinds", "single", "variables", "copy"),
        ),
        4,
        ("The paper's few-shot tasks need a hub (`evals fewshot`); these are exercises made by rule.",),
    ),
    Item(
        "table 9",
        "Ranking against reconstruction loss",
        "iou",
        ("--methods", "paper", "paper-reconstruction", "planes", "planes-reconstruction", "--rows", "32"),
        6,
        (_MODEL, "The loss is one minus the squared correlation with exact logits: docs/algorithm.md, eq. 17."),
        against=tuple((name, 0.02, f"{name}-reconstruction", 0.02) for name in ("paper", "planes")),
    ),
    Item(
        "table 10",
        "Hashing against down-projection",
        "iou",
        ("--methods", "paper", "planes", "planes-64", "down-proj", "--rows", "32"),
        6,
        (
            _MODEL,
            "Down-projection keeps head_dim / 16 numbers of 16 bits: as many bits as head_dim, so `planes-64` is the "
            "fair rival where head_dim is 64.",
        ),
        against=(("planes-64", 0.02, "down-proj", 0.02), ("paper", 0.02, "down-proj", 0.02)),
    ),
    Item(
        "code length",
        "Which length of untrained LSH finds as much as a learned hash",
        "codelength",
        ("--methods", "paper", "linear", "group-xnor", "planes-64", "planes", "transform", "--rows", "32"),
        3,
        (_MODEL, "The paper's claim of codes 5 times shorter."),
    ),
    Item("figure 1", "Overview", None, (), 0, ("it is a drawing: docs/algorithm.md describes the same.",)),
    Item(
        "figure 2",
        "Queries and keys lie in cones",
        "cones",
        ("--context", "2048"),
        3,
        (_MODEL, "Angles and components are measured in every layer; the paper shows one."),
    ),
    Item("figure 3", "The two losses", None, (), 0, ("it is a drawing.",)),
    Item(
        "figure 4",
        "Needle in a haystack",
        "needle",
        ("--methods", "transform", "lsh", "--lengths", "256", "512", "1024"),
        2,
        (_MODEL, "The haystack is Python and the needle an assignment, which the demo model reads best."),
    ),
    Item(
        "figure 5",
        "LongBench",
        "output-error",
        ("--context", "2048", "--rows", "32"),
        3,
        (
            "LongBench needs a hub and a model that follows instructions (`evals longbench`);"
            " this shows each layer's output error instead.",
        ),
    ),
    Item(
        "figure 6",
        "Efficiency: complexity of each step",
        "complexity",
        (),
        0,
        ("By formula, for Qwen2.5-7B; `evals codesize` gives the code sizes.",),
    ),
    Item("figure 7", "The needle", None, (), 0, ("it quotes a prompt; samples/ of figure 4 hold ours.",)),
    Item("figure 8", "The needle's prompt", None, (), 0, ("it quotes a prompt; samples/ of figure 4 hold ours.",)),
    Item("figure 9", "Bit packing", None, (), 0, ("it is a drawing: `hashcore.pack`.",)),
    Item(
        "figure 10",
        "IoU per head",
        "iou",
        ("--methods", "lsh", "paper", "planes", "transform", "--rows", "32"),
        3,
        (_MODEL, "rows.json has a number for every layer and head; the table shows layers."),
    ),
    Item("figure 11", "Fidelity by task", None, (), 0, ("it splits table 4 by LongBench's tasks, which need a hub.",)),
)


def why_not(item: Item, settings: PaperCommand) -> str | None:
    """Say why --all leaves an item out; None if it does not."""
    if item.twice and settings.other_hashers is None:
        return "it needs --other-hashers"
    if lacking := item.lacking(settings):
        return f"{settings.hashers} lacks {', '.join(lacking)}: make them with `uv run hashtrain --only all`"
    return None


def chosen(settings: PaperCommand) -> list[Item]:
    """Return the items that a command names. Raises: ValueError if the paper has no such table or figure."""
    if settings.all:
        return [item for item in ITEMS if item.task and why_not(item, settings) is None]
    for kind, number in (("table", settings.table), ("figure", settings.figure)):
        if number is not None:
            found = [item for item in ITEMS if item.name == f"{kind} {number}"]
            if not found:
                last = sum(item.name.startswith(kind) for item in ITEMS)
                raise ValueError(f"--{kind} takes 1 to {last}, got {number}")
            return found
    return []
