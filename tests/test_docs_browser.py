"""What tools/build_docs.py finds by looking at pages in a browser, and what it does not hold against them."""

import base64
import os
import struct

import pytest

TEXT = "<p>A page that says what it is about, in more than a few letters.</p>"
PIXEL = base64.b64encode(
    b"BM" + struct.pack("<IIIIiiHHIIiiII", 58, 0, 54, 40, 1, 1, 1, 24, 0, 4, 0, 0, 0, 0) + bytes(4)
)
RIGHT = {
    "plain": TEXT,
    "image": f'{TEXT}<img src="data:image/bmp;base64,{PIXEL.decode()}">',
    "scrolls": f'{TEXT}<div style="overflow-x: auto"><table style="width: 900px"><tr><td>x</td></tr></table></div>',
}
WRONG = {
    "empty": ("<p hidden>Hidden.</p>", ["shows no text"]),
    "image": (f'{TEXT}<img src="none.png">', ["does not show the image none.png"]),
    "wide": (f'{TEXT}<p style="width: 900px"><b>wide</b></p>', ['<p> "wide" reaches to 908 and cannot be scrolled']),
    "cut": (
        f'{TEXT}<div style="overflow: hidden"><pre style="width: 900px">cut</pre></div>',
        ['<pre> "cut" reaches to 908 and cannot be scrolled'],
    ),
}


@pytest.fixture(scope="module")
def browser(load):
    return load("tools", "docs_checks.browser")


@pytest.fixture(scope="module")
def chromium(browser):
    found = browser.find()
    if found is None and not os.environ.get("CI"):
        pytest.skip("no Chromium to look at pages with")
    assert found is not None, "CI must have a Chromium to look at pages with"
    return found


def write(folder, pages) -> None:
    for name, article in pages.items():
        text = f"<!doctype html><title>{name}</title><body><article>{article}</article></body>"
        (folder / f"{name}.html").write_text(text, encoding="utf-8")


def test_pages_that_are_right_pass(browser, chromium, tmp_path):
    write(tmp_path, RIGHT)
    (tmp_path / "index.html").write_text('<meta http-equiv="refresh" content="0; url=plain.html">')
    assert browser.problems(chromium, tmp_path) == []
    assert not (tmp_path / "look.html").exists()


@pytest.mark.slow
def test_what_a_reader_cannot_see_is_told(browser, chromium, tmp_path):
    write(tmp_path, {name: article for name, (article, _) in WRONG.items()})
    expected = [f"{name}.html at 420 pixels: {said}" for name in sorted(WRONG) for said in WRONG[name][1]]
    assert browser.problems(chromium, tmp_path, widths=(420,)) == expected


@pytest.mark.slow
def test_what_is_too_wide_for_a_phone_is_not_for_a_desk(browser, chromium, tmp_path):
    write(tmp_path, {"wide": WRONG["wide"][0]})
    assert browser.problems(chromium, tmp_path, widths=(1300,)) == []


@pytest.mark.slow
def test_a_picture_is_taken_of_where_a_page_sends_its_reader(browser, chromium, tmp_path):
    write(tmp_path, {"ink": f'{TEXT}<div style="background: #f00; height: 1700px"></div>'})
    (tmp_path / "index.html").write_text('<meta http-equiv="refresh" content="0; url=ink.html">')
    browser.picture(chromium, tmp_path, "index.html", 600, out := tmp_path / "pictures" / "ink.png")
    image = pytest.importorskip("matplotlib.image").imread(out)[..., :3]
    assert image.shape == (browser.HEIGHT, 600, 3)
    assert image[900, 300].tolist() == pytest.approx([1, 0, 0], abs=0.1)


def test_a_browser_that_writes_no_picture_is_told(browser, tmp_path):
    blind = tmp_path / "blind"
    blind.write_text("#!/bin/sh\n")
    blind.chmod(0o755)
    (out := tmp_path / "old.png").write_bytes(b"of another day")
    with pytest.raises(RuntimeError, match=r"expected .*blind to write .*old\.png, found nothing"):
        browser.picture(str(blind), tmp_path, "index.html", 600, out)
