"""A generated figure in docs/figures, which stores the digest of what it was drawn from."""

import argparse
import io
import pathlib
import sys
from collections.abc import Callable

from hashtrain.files.atomic import replace
from matplotlib.figure import Figure
from PIL import Image


def png(figure: Figure, dpi: int, digest: str) -> bytes:
    """Return a figure as PNG with the digest."""
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=dpi, format="png", metadata={"Description": digest})
    return buffer.getvalue()


def drawn_from(figure: pathlib.Path) -> str | None:
    """Return the digest stored in a figure."""
    with Image.open(figure) as image:
        return image.info.get("Description")


def run(description: str | None, out: pathlib.Path, digest: Callable[[], str], draw: Callable[[], bytes]) -> None:
    """Write a figure, or with --check exit 1 if it was drawn from something else.

    Args: description: help text of the command; digest: of what the figure shows now; draw: returns the PNG.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the figure is stale")
    if parser.parse_args().check:
        if not out.is_file() or drawn_from(out) != digest():
            sys.exit(f"{out.name} is stale: what it shows has changed; run `uv run {sys.argv[0]}`")
        return
    image = draw()

    def write(temporary: pathlib.Path) -> None:
        temporary.write_bytes(image)

    replace(out, write)
