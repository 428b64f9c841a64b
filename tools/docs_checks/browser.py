"""Check the pages of a built site in a browser, at the widths of a desktop and of a phone."""

import contextlib
import functools
import html
import http.server
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (1300, 420)
FILLED_LATER = {"search.html"}  # empty until the reader searches
HEIGHT = 1800
PATIENCE = 240  # seconds for all pages
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
HARNESS = pathlib.Path(__file__).with_name("look.html")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without logging."""

    def log_message(self, format: str, *args: Any) -> None:
        pass


def find() -> str | None:
    """Return the path of a browser, None if there is none."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def problems(browser: str, site: pathlib.Path, text: str = "article", widths: Sequence[int] = WIDTHS) -> list[str]:
    """Open every page in a frame of every width; return a sentence for each visible problem.

    Problems are: no text, an image that is not shown, and content that overflows to the right where nothing scrolls.
    Pages that redirect, or are empty until used, are left out.

    Args:
        text: CSS selector of the part of a page to check.
    Raises: RuntimeError if the browser does not finish.
    """
    pages = sorted(
        name
        for path in site.rglob("*.html")
        if (name := path.relative_to(site).as_posix()) not in FILLED_LATER
        and 'http-equiv="refresh"' not in path.read_text(encoding="utf-8")
    )
    asked = json.dumps({"pages": pages, "widths": list(widths), "text": text})
    harness = site / "look.html"
    harness.write_text(HARNESS.read_text(encoding="utf-8").replace("/*ASKED*/ null", asked), encoding="utf-8")
    try:
        with _served(site) as address:
            # Virtual time stops while a page is loading and jumps to the end of the budget when idle.
            shown = _run(browser, "--dump-dom", "--virtual-time-budget=1000000", f"{address}/look.html")
    finally:
        harness.unlink()
    body = re.search(r"<body[^>]*>(\[.*\])\s*</body>", shown, re.S)
    seen = json.loads(html.unescape(body[1])) if body else []
    if len(seen) != len(pages) * len(widths):
        raise RuntimeError(f"expected a look at {len(pages) * len(widths)} pages, got {len(seen)}; run it again")
    return [f"{x['page']} at {x['width']} pixels: {problem}" for x in seen for problem in x["problems"]]


def picture(browser: str, site: pathlib.Path, page: str, width: int, out: pathlib.Path) -> None:
    """Write a screenshot of a page, HEIGHT pixels of it, as PNG. Raises: RuntimeError if the browser writes none."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.unlink(missing_ok=True)
    with _served(site) as address:
        size = f"--window-size={width},{HEIGHT}"
        _run(browser, size, f"--screenshot={out}", "--virtual-time-budget=10000", f"{address}/{page}")
    if not out.is_file():  # a sandboxed browser may see other folders
        raise RuntimeError(f"expected {browser} to write {out}, found nothing; take one that sees this folder")


@contextlib.contextmanager
def _served(folder: pathlib.Path) -> Iterator[str]:
    """Serve a folder on this machine, because pages opened as files may not access each other; yield the address."""
    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _run(browser: str, *options: str) -> str:
    """Run the browser with a fresh profile; return its output."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *OPTIONS, f"--user-data-dir={profile}", *options]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"expected the browser to end within {PATIENCE} s, got no end; run it again") from None
    if done.returncode != 0:
        raise RuntimeError(f"expected the browser to run, got exit code {done.returncode}: {done.stderr[-500:]}")
    return done.stdout
