"""The site: Sphinx reads the repository as it is, so that one link works on a forge, in an editor and here.

Build and check it with `uv run --group docs tools/build_docs.py`.
"""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "Spotlight Attention"
author = "the authors of Spotlight Attention"
version = release = version_of("sparse-decode")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "forge_links", "mathml", "public_names"]

# The source folder is the root of the repository; these are its pages.
root_doc = "docs/site/index"
include_patterns = [
    *("*.md", "docs/*.md", *(f"docs/{name}/*.md" for name in ("adr", "how-to", "site", "site/reference"))),
    *("packages/*/README.md", "packages/*/CHANGELOG.md", "examples/*.md"),
    "packages/hashtrain/src/hashtrain/demo/model/README.md",
]
exclude_patterns = [".*", "**/.*", "build", "dist", "runs", "shared"]  # not walked through

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_type_aliases = {"ArrayLike": "ArrayLike"}
default_role = "literal"  # a docstring's `name` is code
maximum_signature_line_length = 80
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = project
html_math_renderer = "mathml"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"
