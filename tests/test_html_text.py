"""Pages become text: what is kept, what is left out, and in which order."""

import sys

import pytest

TOOL = "html_text"


def test_blocks_are_lines_and_spaces_are_single(tool):
    html = (
        "<html><body><h1>Title</h1><p>One\n  sentence,<b> in</b> two\tparts.</p><ul><li>a</li><li>b &amp; c</li></ul>"
    )
    assert tool.page_text(html) == "Title\n\nOne sentence, in two parts.\n\na\n\nb & c"


@pytest.mark.parametrize(
    "hidden",
    [
        "<nav><ul><li>Next<nav>inner</nav>still hidden</li></ul></nav>",
        "<div role=navigation>Next<div><div>deep</div></div>still hidden</div>",
        "<script>if (a < b) { c() }</script>",
        "<style>p { color: red }</style>",
        "<header>Book <img src=x><br>title</header>",  # elements without an end
        "<nav>Next<li>unclosed<li>again</nav>",
    ],
)
def test_navigation_scripts_and_headers_are_left_out_whatever_they_hold(tool, hidden):
    assert tool.page_text(f"<p>before</p>{hidden}<p>after</p>") == "before\n\nafter"


def test_code_keeps_its_lines_and_indentation(tool):
    html = "<p>Run   it:</p><pre>\nfor x in y:\n    go(x)\n</pre><p>Then   stop.</p>"
    assert tool.page_text(html) == "Run it:\n\nfor x in y:\n    go(x)\n\nThen stop."


def test_unclosed_paragraphs_and_stray_ends_lose_nothing(tool):
    assert tool.page_text("<p>one<p>two</nav></pre>  three <p>four") == "one\ntwo\nthree\nfour"
    assert tool.page_text("<p>shown<script>hidden") == "shown"


def test_pages_are_in_natural_order_through_folders(tool, tmp_path):
    names = ["ch10.html", "ch2.html", "ch1.html", "appendix/a10.html", "appendix/a9.html"]
    for name in [*names, "ch3.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = [path.relative_to(tmp_path).as_posix() for path in tool.pages(tmp_path, "*.html")]
    assert found == ["appendix/a9.html", "appendix/a10.html", "ch1.html", "ch2.html", "ch10.html"]


def test_a_folder_becomes_one_file_or_an_error_in_a_sentence(tool, tmp_path, monkeypatch, capsys):
    (tmp_path / "2.html").write_text("<p>second")
    (tmp_path / "10.html").write_text("<p>third")
    (tmp_path / "1.html").write_bytes(b"<p>caf\xe9")  # not UTF-8
    out = tmp_path / "texts" / "all.txt"
    monkeypatch.setattr(sys, "argv", ["html_text", str(tmp_path), str(out)])
    assert tool.main() == 0
    assert out.read_text() == "caf\ufffd\n\nsecond\n\nthird\n"
    monkeypatch.setattr(sys, "argv", ["html_text", str(tmp_path), str(out), "--match", "*.htm"])
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    assert "expected pages *.htm with text" in capsys.readouterr().err
