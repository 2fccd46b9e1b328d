"""Configures the documentation site: `make docs` builds it into `site/`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_site"))

import streamfold

project = "Streamfold"
author = "the authors of Streamfold"
version = release = streamfold.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "generated_reference",
]
exclude_patterns = ["_site"]
# A heading gets the anchor that GitHub gives it, so that links work in both.
myst_heading_anchors = 4
# Blocks of pictures and of files that no lexer knows are shown as they are.
myst_enable_extensions = ["fieldlist"]
# Fields named like a built-in type make references in signatures ambiguous.
suppress_warnings = ["misc.highlighting_failure", "ref.python"]
# Docstrings quote names in single backticks.
default_role = "code"

# Names of options begin with two hyphens, which must stay two.
smartquotes = False
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# The prompt is not part of what a reader types.
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = "Streamfold"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b5cad", "color-brand-content": "#0b5cad"},
    "dark_css_variables": {"color-brand-primary": "#7ab8ff", "color-brand-content": "#7ab8ff"},
}
