"""A run on disk: one sample file per document, so that a killed run can be resumed.

runs/NAME/config.json        the settings; a run with other settings is rejected
          environment.json   the software, which is that of all samples, and the hardware that last opened the run
          samples/0000.json  the sample of one document
          rows.json  report.md  figure.png    written when all documents are done
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from evals.machine import SOFTWARE, environment
from evals.results import read_json, write_json


class RunFolder:
    """The folder of one run.

    Args: folder: created if missing; settings: everything the results depend on, as JSON values; device: where the
        model runs.
    Raises: ValueError, before anything is written, if the folder holds a run with other settings, samples made with
        other versions, or other files.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], device: str = "cpu"):
        self.folder: Path = folder
        path, environment_path = folder / "config.json", folder / "environment.json"
        here = environment(device)
        if path.is_file():
            former, now = read_json(path, "delete that folder or choose another --out"), dict(settings)
            if environment_path.is_file() and any(folder.glob("samples/*.json")):
                stored = environment_of(folder)
                former |= {name: stored.get(name) for name in SOFTWARE}
                now |= {name: here[name] for name in SOFTWARE}
            continued = {"documents", "names"}  # with more of them
            for name in sorted((former.keys() | now.keys()) - continued):
                if former.get(name) != now.get(name):
                    raise ValueError(
                        f"{folder} holds a run with other settings: {name} was {former.get(name)}, now "
                        f"{now.get(name)}; choose another --out, or delete that folder"
                    )
        elif folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise ValueError(f"{folder} is not empty and holds no run of evals; choose another --out")
        write_json(path, settings)
        write_json(environment_path, here)

    def sample(self, number: int, document: Any, compute: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any], bool]:
        """Return the sample of a document, and whether it was computed now: read if stored, else computed and stored.

        Args: document: has a name that a report may print, and a digest that identifies its content.
        Raises: ValueError naming the file if it is no JSON or of another text.
        """
        path = self.folder / "samples" / f"{number:04d}.json"
        identity = {"document": document.name, "tokens": document.digest}
        if not path.exists():
            sample = {**identity, **compute()}
            write_json(path, sample)
            return sample, True
        remedy = "delete that file and rerun the command"
        sample = read_json(path, remedy)
        if found := {name: sample.get(name) for name in identity if sample.get(name) != identity[name]}:
            raise ValueError(f"{path} is of another text (expected {identity}, got {found}); {remedy}")
        return sample, False


def environment_of(folder: Path) -> dict[str, str]:
    """Read the environment of a run's samples. Raises: ValueError if the file is damaged."""
    path, remedy = folder / "environment.json", "delete that folder or choose another --out"
    found = read_json(path, remedy)
    if wrong := [name for name, value in found.items() if not isinstance(value, str)]:
        raise ValueError(f"{path} is corrupt ({wrong[0]} must be a string); {remedy}")
    return found


def model_identity(model: PreTrainedModel) -> str:
    """Identify a model by its shape and the ends of every parameter: fast, and enough to notice a retrained one."""
    sha = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sha.update(f"{name} {tuple(parameter.shape)}".encode())
        for end in (flat[:64], flat[-64:]):
            sha.update(end.double().cpu().numpy().tobytes())
    return sha.hexdigest()[:12]
