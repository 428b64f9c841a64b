"""Load the tasks of a command with their data: shipped with lm-evaluation-harness, or your own YAML.

A folder may hold LongBench's own files, such as trec.jsonl: each replaces the data of the task of that name. A local
YAML may include a shipped task by its name, and name its data files relative to its own folder:

    include: arc_easy
    task: my_questions           # without it, the file replaces the shipped task
    dataset_path: json
    dataset_kwargs: {data_files: {test: questions.jsonl}}
"""

import contextlib
import hashlib
import json
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import jinja2
import jinja2.meta
import lm_eval.tasks
import numpy as np
import yaml
from datasets.exceptions import DatasetsError
from hashtrain.files.untrusted import one_line
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from evals.harness.lines import read_lines, require_texts
from evals.tasks.benchmark_settings import BenchmarkCommand

_SHIPPED = Path(lm_eval.tasks.__file__).parent
_UNUSABLE = (OSError, ImportError, LookupError, ValueError, DatasetsError, jinja2.TemplateError)
"""Errors of loading a data set: no hub or no file, a missing module, split, resource or field, a wrong format."""


@dataclass(frozen=True)
class BenchmarkTask:
    """One task with its data and its requests built: a document of a run."""

    name: str
    task: "ConfigurableTask"
    digest: str
    """Identifies every prompt and target."""
    numbers: "list[int] | None" = None
    """The items to run; None: as many as --limit says."""

    def items(self, command: BenchmarkCommand) -> dict[str, Any]:
        """Return the arguments with which the harness runs these items."""
        return {"limit": command.limit} if self.numbers is None else {"samples": {self.name: self.numbers}}


@contextlib.contextmanager
def as_guest(seed: int) -> Iterator[None]:
    """Run third-party code: its prints go to stderr, its warnings are ignored, and its random numbers are seeded.

    Afterwards the generators of `random` and numpy have their previous state.
    """
    python, array = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    bar = datasets.is_progress_bar_enabled()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            if not sys.stderr.isatty():
                datasets.disable_progress_bars()
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        if bar:
            datasets.enable_progress_bars()


def load_tasks(command: BenchmarkCommand) -> list[BenchmarkTask]:
    """Load the tasks that `command.tasks` names, in order, with groups and tags expanded.

    Raises: ValueError with one sentence if a name is unknown, or a YAML or a data set cannot be used.
    """
    with as_guest(command.seed):
        try:
            manager = _manager(command)
        except (yaml.YAMLError, jinja2.TemplateError, LookupError, TypeError, AttributeError, OSError) as error:
            where, what = ", ".join(map(str, command.include_path)), f"{type(error).__name__}: {one_line(error)}"
            raise ValueError(f"cannot read the tasks of {where or 'lm-evaluation-harness'} ({what})") from error
        names = list(dict.fromkeys(leaf for name in command.tasks for leaf in _leaves(manager, name)))
        found: dict[str, tuple[ConfigurableTask, bool]] = {}
        for name in names:
            place = manager.task_index[name].yaml_path
            own = place is None or not place.is_relative_to(_SHIPPED)
            found |= {task: (loaded, own) for task, loaded in _load(manager, name).items()}
        return [_built(name, task, own, command) for name, (task, own) in found.items()]


def _manager(command: BenchmarkCommand) -> TaskManager:
    """Index the folders of the default tasks, or all folders if that leaves a name unknown; then the local YAML."""
    unknown: list[str] = []
    for folders in ([_SHIPPED / folder for folder in command.folders], [_SHIPPED]):
        given = {"include_defaults": False, "metadata": command.metadata}
        manager = TaskManager(include_path=[*folders, *command.include_path], **given)
        unknown = _add_local(manager, command)
        unknown += [f"--tasks {name}" for name in command.tasks if name not in manager.task_index]
        if not unknown:
            return manager
    raise ValueError(
        f"unknown to lm-evaluation-harness and --include-path: {', '.join(unknown)}; expected names of tasks, tags or "
        "groups"
    )


def _add_local(manager: TaskManager, command: BenchmarkCommand) -> list[str]:
    """Add the requested local tasks to the index, with their includes and data files resolved.

    Returns: includes that cannot be resolved.
    """
    wanted, unknown = _reachable(manager, command.tasks), []
    for path in sorted(path for folder in command.include_path for path in folder.glob("**/*.yaml")):
        brief = load_yaml(path, recursive=False, resolve_func=False)
        listed = brief.get("include", [])
        names = [listed] if isinstance(listed, str) else listed
        if "group" in brief or "class" in brief or not wanted & {brief.get("task", name) for name in names or [None]}:
            continue  # handled by the harness itself, or not requested
        sources = [_source(manager, path.parent, name) for name in names]
        missing = [name for name, source in zip(names, sources, strict=True) if source is None]
        unknown += [f"`include: {name}` in {path}" for name in missing]
        if not missing:
            _register(manager, load_yaml(path, recursive=False), path.parent, [x for x in sources if x], command)
    for path in sorted(path for folder in command.include_path for path in folder.glob("*.jsonl")):
        name = f"longbench_{path.stem}"
        if name in wanted and (shipped := _source(manager, path.parent, name)):  # no YAML has replaced it
            data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": path.name}}}
            _register(manager, data, path.parent, [shipped], command)
    return unknown


def _reachable(manager: TaskManager, names: tuple[str, ...]) -> set[str]:
    """Return these names, and those of all members of groups and tags among them."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        entry = manager.task_index.get(name)
        if name not in found and entry is not None:
            members = (entry.cfg or {}).get("task")
            waiting += [x for x in members if isinstance(x, str)] if isinstance(members, list) else []
            waiting += entry.tags if entry.kind.name == "TAG" else ()
        found.add(name)
    return found


def _source(manager: TaskManager, folder: Path, name: str) -> Path | None:
    """Find what a YAML includes: a file relative to its folder, or a shipped task."""
    if (folder / name).is_file():
        return folder / name
    entry = manager.task_index.get(name)
    return None if entry is None else entry.yaml_path


def _register(
    manager: TaskManager, own: dict[str, Any], folder: Path, sources: list[Path], command: BenchmarkCommand
) -> None:
    """Add one local task to the index, with its JSON lines read. Raises: ValueError naming a line that is no use."""
    config: dict[str, Any] = {}
    own.pop("include", None)
    for source in sources:
        config |= {key: value for key, value in load_yaml(source).items() if key not in ("tag", "task_list")}
    config = _with_files({**config, **own}, own, folder)
    files = (config.get("dataset_kwargs") or {}).get("data_files")
    if config.get("dataset_path") == "json" and not files:  # which `datasets` takes for all JSON below this folder
        given = "`dataset_path: json` without `dataset_kwargs: {data_files: ...}`"
        raise ValueError(f"{config.get('task')} of {folder} has {given}, expected files")
    named: dict[Any, Any] = files if isinstance(files, dict) else {"train": files}  # as `datasets` does
    splits = {name: [given] if isinstance(given, str) else given for name, given in named.items()}
    if config.get("dataset_path") == "json" and all(map(_are_lines, splits.values())):
        needed = _fields(config)
        data = {name: read_lines([*map(Path, given)], needed, command.references) for name, given in splits.items()}
        config |= {"custom_dataset": lambda **_: datasets.DatasetDict(data), "dataset_kwargs": None}
    any_task = next(entry for entry in manager.task_index.values() if entry.kind.name == "TASK")
    manager.task_index[config["task"]] = replace(any_task, name=config["task"], yaml_path=None, cfg=config, tags=set())


def _are_lines(files: object) -> bool:
    """Whether these are local files that hold JSON objects, one a line, by their names or their first letters."""
    return isinstance(files, list) and bool(files) and all(isinstance(x, str) and _is_lines(Path(x)) for x in files)


def _is_lines(file: Path) -> bool:
    if not file.is_file():
        return False
    if file.suffix == ".jsonl":
        return True
    with file.open("rb") as opened:
        return opened.read(4096).lstrip()[:1] == b"{"


def _fields(config: dict[str, Any]) -> set[str]:
    """Return the fields of an item that a task's templates name."""
    templates = (config.get(name) for name in ("doc_to_text", "doc_to_target", "doc_to_choice", "gen_prefix"))
    parse = jinja2.Environment().parse
    return {
        x for text in templates if isinstance(text, str) for x in jinja2.meta.find_undeclared_variables(parse(text))
    }


def _with_files(config: dict[str, Any], own: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Point a task at its local files; drop the data settings of the task that it includes."""
    if "dataset_path" in own:
        config |= {name: own.get(name) for name in ("dataset_name", "dataset_kwargs", "custom_dataset")}

    def found(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: found(item) for name, item in value.items()}
        if isinstance(value, list):
            return [found(item) for item in value]
        return str(folder / value) if (folder / value).exists() else value

    given = config.get("dataset_kwargs") or {}
    if "data_files" in given:
        config["dataset_kwargs"] = {**given, "data_files": found(given["data_files"])}
    return config


def _leaves(manager: TaskManager, name: str) -> list[str]:
    """Expand a tag, or a group that only lists names, into its tasks."""
    entry = manager.task_index[name]
    members = sorted(entry.tags) if entry.kind.name == "TAG" else (entry.cfg or {}).get("task")
    if not isinstance(members, list) or not all(isinstance(x, str) and x in manager.task_index for x in members):
        return [name]  # a task, or a group that changes its tasks, which is loaded as a whole
    return [leaf for member in members for leaf in _leaves(manager, member)]


def _load(manager: TaskManager, name: str) -> dict[str, ConfigurableTask]:
    try:
        return manager.load([name])["tasks"]  # pyright: ignore[reportReturnType]
    except _UNUSABLE as error:
        config = manager.task_index[name].cfg or {}
        source = " ".join(str(config[key]) for key in ("dataset_path", "dataset_name") if config.get(key))
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"cannot load the data of {name}, data set {source or 'made by the task itself'} ({reason}); to use local "
            f"files, put a YAML file with `include: {name}`, `dataset_path: json` and `dataset_kwargs: {{data_files: "
            "{test: FILE}}` into a folder and name the folder with --include-path"
        ) from error


def _built(name: str, task: ConfigurableTask, own: bool, command: BenchmarkCommand) -> BenchmarkTask:
    """Set the number of examples, as the harness does, and compute a digest of all prompts and targets.

    Args: own: whether it is the user's task, whose answers may have come from any kind of file.
    """
    shots, references = task.config.num_fewshot, command.references
    if shots is None or (shots and command.shots is not None):
        task.set_config("num_fewshot", command.shots or 0)
    task.set_fewshot_seed(command.seed)
    try:
        target: Any = task.config.doc_to_target
        scored = own and references and references in (target, *_fields({"doc_to_target": target}))
        documents: Any = task.eval_docs if scored else ()
        for number, document in enumerate(documents, 1):
            require_texts(document.get(references), references, f"row {number}: ")
        numbers = _of_each_length(task, command)
        task.build_all_requests(limit=command.limit if numbers is None else None, samples=numbers)
        for x in task.instances if task.OUTPUT_TYPE == "generate_until" else ():
            target = task.doc_to_target(x.doc)  # scored before the model is run, because that may take days
            task.process_results(x.doc, [str(target[0]) if isinstance(target, list) else str(target)])
    except (*_UNUSABLE, TypeError, AttributeError, ArithmeticError, StopIteration) as error:
        raise ValueError(
            f"{name} cannot use its data ({type(error).__name__}: {one_line(error)}); check its fields"
        ) from error
    asked = [[x.args, str(task.doc_to_target(x.doc))] for x in task.instances]
    text = json.dumps(asked, default=str)
    return BenchmarkTask(name, task, hashlib.sha256(text.encode()).hexdigest()[:12], numbers)


def _of_each_length(task: ConfigurableTask, command: BenchmarkCommand) -> list[int] | None:
    """Return the numbers of the first `--limit` items of each of RULER's lengths, one after the other in its list."""
    if command.limit is None or len(getattr(command, "lengths", ())) < 2:
        return None
    found: dict[int | None, list[int]] = {}
    documents: Any = task.eval_docs
    for number, document in enumerate(documents):
        found.setdefault(document.get("max_length"), []).append(number)
    return [number for numbers in found.values() for number in numbers[: command.limit]]
