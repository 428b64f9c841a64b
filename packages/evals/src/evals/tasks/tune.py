"""Grid-search the rivals' parameters on text that is not used for evaluation, by mean KL from dense.

1. Every setting of the grid, and every published one, is measured on every context.
2. Among the settings that take at most as many tokens as the limit (by default the largest measured density of a
   published setting), the one with the smallest mean KL is chosen.
3. The choice goes to tuned.json with digests of the contexts, which are excluded from evaluation; the grid goes to the
   report.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from hashtrain.data.corpus import python_sources
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from evals.documents import TokenDocument, load_documents
from evals.methods import load_rival
from evals.metrics import Estimate, bootstrap
from evals.results import Result, Row, write_json
from evals.rivals.table import rival_named
from evals.setup import Ready, Sample, each_document, finish, load_with_documents, mean_density, rows_of
from evals.tasks import ppl
from evals.tasks.settings import TuneCommand
from evals.tuned import FILE

FLAGS = {"page": "pages", "bits": "bits", "tables": "tables"}
"""By parameter, the command's field that lists the values to try."""


class Setting(NamedTuple):
    """A point of the grid."""

    name: str
    parameters: Mapping[str, int]

    @property
    def label(self) -> str:
        """The name used in tables."""
        return f"{self.name}, " + ", ".join(f"{k} {v}" for k, v in self.parameters.items())

    @property
    def published(self) -> bool:
        """Whether it is a published setting."""
        return self.parameters in rival_named(self.name).published


def run(command: TuneCommand, console: Console) -> Result:
    """Run the task and store the choice, too: see `evals.tasks`."""

    def make(tokenizer: PreTrainedTokenizerBase) -> list[TokenDocument]:
        count, seed = command.documents, command.seed
        return load_documents(command.text, tokenizer, command.context, count, seed, python_sources)

    settings = grid(command)
    methods = {setting.label: load_rival(*setting, setting.label) for setting in settings}  # rejects invalid parameters
    ready = load_with_documents(command, "tune", console, make)
    ready = replace(ready, methods=list(methods.values()))
    cells = [ppl.Cell(label, "visible", command.budgets[0]) for label in methods]

    def compute(number: int, document: TokenDocument, step: Callable[[str], None]) -> Sample:
        return ppl.measure(ready.model, document.ids, cells, methods, command.always, step, command.phase)

    samples = each_document(command, ready, console, 1 + len(cells), compute)
    kl = {label: [sample["cells"][i]["kl"] for sample in samples] for i, label in enumerate(methods)}
    density = {label: mean_density(samples, i) for i, label in enumerate(methods)}
    chosen = {name: choose(settings, name, kl, density, command.density) for name in command.methods}
    result = finish(command, ready, list(_rows(command, ready, settings, kl, density, chosen)), console)
    data = {
        "parameters": {name: dict(found.parameters) for name, found in chosen.items()},
        "model_identity": ready.settings["model_identity"],
        "budget": command.budgets[0],
        "phase": command.phase,
        "documents": [document.digest for document in ready.documents],
        "versions": ready.settings["versions"],
    }
    write_json(command.out / FILE, data)
    for name, found in chosen.items():
        console.print(f"{name}: {found.label.partition(', ')[2]}, stored in {command.out / FILE}", highlight=False)
    return result


def grid(command: TuneCommand) -> list[Setting]:
    """Return every setting to measure: the command's grid, and the published ones of each rival."""
    found: list[Setting] = []
    for name in command.methods:
        published = rival_named(name).published
        values = [getattr(command, FLAGS[parameter]) for parameter in published[0]]
        points = [dict(zip(published[0], point, strict=True)) for point in itertools.product(*values)]
        points += [dict(point) for point in published if point not in points]
        found += [Setting(name, point) for point in points]
    return found


def choose(
    settings: list[Setting], name: str, kl: Mapping[str, list[float]], density: Mapping[str, float], limit: float | None
) -> Setting:
    """Return a rival's setting with the smallest mean KL among those with a density of at most `limit`.

    Args: kl: per document, by label; limit: by default, the largest density of a published setting.
    Raises: ValueError if every setting takes more.
    """
    own = [setting for setting in settings if setting.name == name]
    most = max(density[s.label] for s in own if s.published) if limit is None else limit
    able = [setting for setting in own if density[setting.label] <= most]
    if not able:
        least = min(density[setting.label] for setting in own)
        raise ValueError(
            f"no setting of {name} takes at most {most:g} of the tokens, the least was {least:.4g}; raise --density"
        )
    return min(able, key=lambda setting: sum(kl[setting.label]))


def _rows(
    command: TuneCommand,
    ready: Ready,
    settings: list[Setting],
    kl: Mapping[str, list[float]],
    density: Mapping[str, float],
    chosen: Mapping[str, Setting],
) -> Iterator[Row]:
    row = rows_of(command, ready, command.phase, len(ready.documents))
    head_dim = ready.shape.at(ready.shape.num_layers - 1).head_dim
    for setting in settings:
        label = setting.label
        at = {"budget": command.budgets[0], "rule": "visible", "density": density[label], "where": setting.name}
        yield row(label, "kl", *bootstrap([[value] for value in kl[label]], command.seed), **at)
        kept = rival_named(setting.name).build(setting.parameters).kept_bits(head_dim)
        own = {"kept_bits": kept, "published": setting.published, "chosen": chosen[setting.name] == setting}
        for name, value in own.items():
            yield row(label, name, Estimate(float(value), None, None), **at)
