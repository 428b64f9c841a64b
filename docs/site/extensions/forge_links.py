"""Links that a forge understands and Sphinx does not: to a folder, which shows its README.md."""

from __future__ import annotations

import posixpath
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode


def folder_page(pages: set[str], page: str, target: str) -> str | None:
    """Return the page of the folder that `target`, a link on `page`, names; None if it has none.

    Args:
        pages: names of all pages, from the root and without suffix.
    """
    name = posixpath.normpath(posixpath.join(posixpath.dirname(page), target, "README"))
    return name if name in pages else None


class FolderLinks(SphinxPostTransform):
    """Points links to folders at their pages."""

    default_priority = 8  # before myst_parser's resolver, which would report them as missing

    def run(self, **kwargs: Any) -> None:
        for node in list(self.document.findall(pending_xref)):
            here = node.get("refdoc", self.env.docname)
            page = folder_page(self.env.found_docs, here, node["reftarget"]) if node["reftype"] == "myst" else None
            if page is not None:
                node.replace_self(make_refnode(self.app.builder, here, page, "", nodes.inline("", node.astext())))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_post_transform(FolderLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
