"""Sphinx configuration."""

import importlib.metadata
import shutil
from pathlib import Path

HERE = Path(__file__).parent

project = "tyxe"
author = "tyxe developers"
copyright = "2026, tyxe developers"
release = importlib.metadata.version("tyxe-bnn")

# No intersphinx: inventories come over the network, and the documentation builds without one.
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["results", "_build"]

html_theme = "furo"
html_title = "tyxe"

myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# The tests execute the notebooks; here they are rendered with the outputs they were saved with.
nb_execution_mode = "off"

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# pytest runs the examples in docstrings; `make docs` runs those on the pages.
doctest_test_doctest_blocks = ""
# Pickle looks classes up by their module, so a page has to be one.
doctest_global_setup = """
import sys, types, torch

class Page(types.ModuleType):
    def __getattr__(self, name):
        if name not in globals():
            raise AttributeError(name)
        return globals()[name]

__name__ = "page"
sys.modules[__name__] = Page(__name__)
torch.manual_seed(0)
torch.set_num_threads(1)
"""


def copy_notebooks() -> None:
    """Bring notebooks/ in: Sphinx reads only what lies below its source directory."""
    target = HERE / "notebooks"
    # What was deleted there must not linger here.
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    notebooks = sorted((HERE.parent / "notebooks").glob("*.ipynb"))
    for notebook in notebooks:
        shutil.copy2(notebook, target)
    # A toctree's glob that matches nothing is a warning, so the page names what there is.
    listed = "\n".join(["```{toctree}", *(notebook.stem for notebook in notebooks), "```"])
    (target / "index.md").write_text(f"# Notebooks\n\n{listed}\n")


copy_notebooks()
