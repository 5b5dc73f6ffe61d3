"""Sphinx configuration."""

import importlib.metadata
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import math_core
from docutils import nodes
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number

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
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["experiments/results", "_build"]

html_theme = "furo"
html_title = f"tyxe {release}"
html_favicon = "favicon.svg"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
pygments_dark_style = "github-dark"  # furo's own underlines modules, as if they were links

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
    """Bring notebooks/ in, and a picture of each for the gallery, out of its own outputs.

    Sphinx reads only what lies below its source directory.
    """
    target = HERE / "notebooks"
    # What was deleted there must not linger here.
    shutil.rmtree(target, ignore_errors=True)
    (target / "pictures").mkdir(parents=True)
    picture = runpy.run_path(str(HERE / "gallery.py"))["picture"]
    # In the order of the gallery, where a test looks for every one of them.
    page = (HERE / "gallery.md").read_text()
    names = list(dict.fromkeys(re.findall(r"\]\(notebooks/(\w+)\.ipynb\)", page)))
    for name in names:
        notebook = HERE.parent / "notebooks" / f"{name}.ipynb"
        shutil.copy2(notebook, target)
        shown = picture(json.loads(notebook.read_text()))
        (target / "pictures" / f"{name}.png").write_bytes(shown)
    # A toctree's glob that matches nothing is a warning, so the page names what there is.
    listed = "\n".join(["```{toctree}", "../gallery", *names, "```"])
    (target / "index.md").write_text(f"# Notebooks\n\n{listed}\n")


def copy_experiments() -> None:
    """Bring the pages of experiments/ in, with their pictures, and tables of their records."""
    source, target = HERE.parent / "experiments", HERE / "experiments"
    shutil.rmtree(target, ignore_errors=True)
    (target / "pages").mkdir(parents=True)
    shutil.copytree(source / "results", target / "results")
    for page in source.glob("pages/*.md"):
        # In the checkout docs/ is a neighbour of experiments/; on the site it is above.
        (target / "pages" / page.name).write_text(
            page.read_text().replace("](../../docs/", "](../../")
        )
    write_tables(target / "results")
    index = (source / "README.md").read_text().replace("](../docs/", "](../")
    (target / "index.md").write_text(index)


def write_tables(folder: Path) -> None:
    """Write the tables that pages include, out of the records that they are of."""
    command = [sys.executable, str(HERE.parent / "experiments" / "run.py"), "tables"]
    subprocess.run([*command, "--out", str(folder)], check=True)
    scripts = "front", "quickstart_table", "gpu_table"
    front, demo, gpu = (runpy.run_path(str(HERE / f"{name}.py")) for name in scripts)
    (folder / "methods.md").write_text(front["table"](""))
    (folder / "quickstart_digits.md").write_text(demo["table"]())
    (folder / "gpu.md").write_text(gpu["table"]())
    works_with = runpy.run_path(str(HERE.parent / "tests" / "integrations" / "works_with.py"))
    (folder / "works_with.md").write_text(works_with["written"]())


def read_from_site(app, docname: str, text: list[str]) -> None:
    """Let links to experiments/ of pages that stand beside it lead to the copies."""
    text[0] = text[0].replace("](../experiments/README.md", "](experiments/index.md")
    text[0] = re.sub(
        r"(\]\(|^```\{include\} )\.\./experiments/", r"\1experiments/", text[0], flags=re.M
    )


copy_notebooks()
copy_experiments()


def visit_math(writer, node) -> None:
    """Write a formula as MathML: browsers show it without a script, and so without a network."""
    display = isinstance(node, nodes.math_block)
    tag = "div" if display else "span"
    writer.body.append(writer.starttag(node, tag, "", CLASS="math notranslate nohighlight"))
    if display and node["number"]:
        number = get_node_equation_number(writer, node)
        writer.body.append(f'<span class="eqno">({number})</span>')
    try:
        converter = math_core.LatexToMathML(fancy_error=False)
        writer.body.append(converter.convert_with_local_state(node.astext(), displaystyle=display))
    except math_core.LatexError as error:
        logging.getLogger(__name__).warning("%s: %s", node.astext(), error, location=node)
    writer.body.append(f"</{tag}>")
    raise nodes.SkipNode


def setup(app) -> None:
    app.connect("source-read", read_from_site)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
