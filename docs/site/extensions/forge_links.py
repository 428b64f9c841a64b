"""Links to folders, for which a forge shows README.md or a list of files, and Sphinx has nothing."""

import posixpath
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode


def folder_of(page: str, target: str) -> str:
    """Return the folder, from the root, that `target`, a link on `page`, may name."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def page_for(folder: str, pages: set[str]) -> str | None:
    """Return the page that stands for a folder: its README, else the first one in it; None if it has none.

    Args:
        pages: names of all pages, from the root and without suffix.
    """
    inside = sorted(page for page in pages if posixpath.dirname(page) == folder)
    readme = f"{folder}/README"
    return readme if readme in inside else next(iter(inside), None)


class FolderLinks(SphinxPostTransform):
    """Points links to folders at their pages; a folder of the repository that has none stays as text."""

    default_priority = 8  # before myst_parser's resolver, which would report them as missing

    def run(self, **kwargs: Any) -> None:
        for node in list(self.document.findall(pending_xref)):
            here = node.get("refdoc", self.env.docname)
            folder = folder_of(here, node["reftarget"])
            if node["reftype"] != "myst" or not (Path(self.env.srcdir) / folder).is_dir():
                continue
            page, text = page_for(folder, self.env.found_docs), nodes.inline("", node.astext())
            node.replace_self(text if page is None else make_refnode(self.app.builder, here, page, "", text))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(FolderLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
