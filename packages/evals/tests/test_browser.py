"""The report in a browser, at the widths of a desktop and of a phone."""

import os
import shutil
import subprocess
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from evals.base_commands import PplCommand
from evals.grid import Grid
from evals.page import Section, section_of, write_page
from evals.tasks import ppl
from rich.console import Console

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
PICTURES = Path("runs/pictures")  # below the repository, beside other results: never in git


def test_a_browser_is_at_hand_in_ci():
    assert BROWSER or not os.environ.get("CI")


@pytest.mark.sample(1)
@pytest.mark.skipif(BROWSER is None, reason="no Chromium to look at the page with")
@pytest.mark.parametrize("width", [1300, 420])
def test_a_browser_shows_the_page(command, tmp_path, width, pytestconfig):
    made = command(PplCommand, methods=("lsh", "planes"), budgets=(0.05, 0.1), rules=("visible",), documents=2)
    ppl.run(made, Console(quiet=True))
    red = Grid("What is `code` in a title", ["a", "b"], [[["x", "1"]]])
    write_page(tmp_path, "A report", [section_of(made.out), Section("Further", ("So.",), (red,), None, "facts")])
    picture = _shot(tmp_path / "report.html", width, tmp_path)
    ink = (np.abs(picture - 1.0) > 0.2).any(-1)
    assert ink.mean() > 0.01
    assert not ink[:, -4:].any()  # wide tables scroll in their box: nothing overflows the page
    coloured = np.ptp(picture, axis=-1) > 0.3  # the curves of the figure; the text is grey, links are blue
    assert coloured.sum() > 100
    pictures = pytestconfig.rootpath / PICTURES if os.environ.get("CI") else tmp_path
    pictures.mkdir(parents=True, exist_ok=True)
    matplotlib.image.imsave(pictures / f"report-{width}.png", picture)


def _shot(page: Path, width: int, folder: Path) -> np.ndarray:
    """Return a screenshot of a page, [height, width, 3], 0 to 1."""
    assert BROWSER is not None
    out = folder / "picture.png"
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
    ]
    size = f"--window-size={width},1800"
    subprocess.run(
        [BROWSER, *options, size, f"--screenshot={out}", page.as_uri()], check=True, capture_output=True, timeout=120
    )
    return matplotlib.image.imread(out)[..., :3]
