"""A run on disk: one sample file per document, so that a run killed at any moment goes on where it stopped.

runs/NAME/config.json        the settings; other settings are refused
          environment.json   the software of all samples, and the hardware that made some of them
          samples/0000.json  what one document gave
          rows.json  rows.parquet  report.md  figure.png    when all documents are done
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from evals.documents import Measured
from evals.machine import HARDWARE, environment
from evals.result import read_json, stated, write_json

_GROWS = ("documents",)  # a run may be continued with more documents


class RunFolder:
    """The folder of one run.

    Args:
        folder: made if missing.
        settings: everything the numbers depend on, as JSON values.
        device: where the model runs.
    Raises: ValueError, before anything is written, if the folder holds a run with other settings or other files.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], device: str = "cpu"):
        self.folder: Path = folder
        self._here, self._noted = environment(device), False
        held = folder / "config.json"
        if held.is_file():
            former = read_json(held, "delete that folder or choose another --out")
            _require_same(folder, *(stated(x) if "task" in x else x for x in (former, settings)))
        elif folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no run of evals; choose another --out")
        write_json(held, settings)
        if not self._environment.is_file() or not any(folder.glob("samples/*.json")):
            self.renew()

    @property
    def _environment(self) -> Path:
        return self.folder / "environment.json"

    def renew(self) -> None:
        """State the present environment as that of the run, all of which is measured anew."""
        write_json(self._environment, self._here)

    def _note(self) -> None:
        """Before a sample is made here, refuse other software than the stored samples', and add this hardware.

        Raises: ValueError if a version differs.
        """
        if self._noted:
            return
        stored = environment_of(self.folder)
        for name in self._here.keys() - set(HARDWARE):
            if stored.get(name) != self._here[name]:
                raise ValueError(
                    f"{self.folder} has samples made with {name} {stored.get(name)}, this is {name} "
                    f"{self._here[name]}; choose another --out, or go on with the former version"
                )
        added = {name: _joined(stored.get(name, "not stored"), self._here[name]) for name in HARDWARE}
        if stored != (merged := {**stored, **added}):
            write_json(self._environment, merged)
        self._noted = True

    def sample(
        self,
        number: int,
        document: Measured,
        check: Callable[[dict[str, Any]], None],
        compute: Callable[[], dict[str, Any]],
    ) -> tuple[dict[str, Any], bool]:
        """Return what a document gave, and whether it was computed now: read if stored, else computed and stored.

        Args:
            check: raises KeyError, TypeError or ValueError on a sample that lacks something.
        Raises: ValueError naming the file if it is corrupt or of another text; or, where it is to be computed, if the
            samples before it were made with other versions.
        """
        path = self.folder / "samples" / f"{number:04d}.json"
        identity = {"document": document.name, "tokens": document.digest}
        if not path.exists():
            self._note()
            sample = {**identity, **compute()}
            write_json(path, sample)
            return sample, True
        remedy = "delete that file and type the same command"
        sample = read_json(path, remedy)
        if found := {name: sample.get(name) for name in identity if sample.get(name) != identity[name]}:
            raise ValueError(f"{path} is of another text (expected {identity}, got {found}); {remedy}")
        try:
            check(sample)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is corrupt ({type(error).__name__}: {error}); {remedy}") from error
        return sample, False


def environment_of(folder: Path) -> dict[str, str]:
    """Read what the samples of a run were made with. Raises: ValueError if the file is damaged."""
    path, remedy = folder / "environment.json", "delete that folder or choose another --out"
    found = read_json(path, remedy)
    if wrong := [name for name, value in found.items() if not isinstance(value, str)]:
        raise ValueError(f"{path} is corrupt ({wrong[0]} must be a text); {remedy}")
    return found


def _joined(former: str, here: str) -> str:
    """List the hardware of a run, each once."""
    return former if here in former.split("; ") else f"{former}; {here}"


def _require_same(folder: Path, held: dict[str, Any], settings: dict[str, Any]) -> None:
    for name in sorted((held.keys() | settings.keys()) - set(_GROWS)):
        if held.get(name) != settings.get(name):
            raise ValueError(
                f"{folder} holds a run with other settings: {name} was {held.get(name)}, now {settings.get(name)}; "
                "choose another --out, or delete that folder"
            )


def finite(value: Any) -> float:
    """Return a number of a sample. Raises: ValueError or TypeError if it is none, or not finite."""
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"expected a finite number, got {value!r}")
    return float(value)


def model_identity(model: PreTrainedModel) -> str:
    """Identify a model by its shape and the ends of every parameter: enough to notice a retrained one, and fast."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sha.update(f"{name} {tuple(parameter.shape)}".encode())
        for end in (flat[:64], flat[-64:]):
            sha.update(end.double().cpu().numpy().tobytes())
    return sha.hexdigest()[:12]
