"""Write the notebooks of notebooks/ anew from the Python beside them, executed, or compare both.

A notebook's cells are those of `notebooks/NAME.py` (jupytext's percent format), which is what is
edited and reviewed. docs/conf.py takes the picture of a notebook for the gallery from here.
"""

import argparse
import base64
import os
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
SMALL = "TYXE_SMOKE_TEST"  # the variable by which notebooks run at a small size
# tqdm's, for want of widgets, and what torch 2.15 says of torch-geometric 2.8.
QUIET = "ignore:IProgress not found,ignore:`torch.jit.script` is deprecated"


def written(name):
    """Return the notebook of a Python file, without outputs."""
    import jupytext

    notebook = jupytext.read(NOTEBOOKS / f"{name}.py")
    notebook.metadata, notebook.nbformat, notebook.nbformat_minor = METADATA, 4, 5
    for index, cell in enumerate(notebook.cells):
        # Of jupytext's own: how many lines lie between two cells, and an id drawn anew each time.
        cell.metadata = {key: cell.metadata[key] for key in cell.metadata if key == "tags"}
        cell.id = f"cell-{index}"
    return notebook


def cells(notebook):
    """Return what has to be the same in both files."""
    return [(cell.cell_type, cell.source, cell.metadata.get("tags")) for cell in notebook.cells]


def execute(notebook, small=False):
    """Run a notebook in a kernel of its own, on one core and at a small or at full size."""
    from nbclient import NotebookClient

    env = {key: os.environ[key] for key in os.environ if key not in ("MPLBACKEND", SMALL)}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": QUIET}
    # Of a compiler that looks for CUDA, which says that there is none.
    env |= {"TORCH_LOGS": "-torch.utils.cpp_extension"} | ({SMALL: "1"} if small else {})
    options = {"timeout": 600, "record_timing": False, "coalesce_streams": True}
    folder = {"metadata": {"path": str(NOTEBOOKS)}}
    client = NotebookClient(notebook, kernel_name="python3", resources=folder, **options)
    client.execute(env=env)
    notebook.metadata = METADATA  # as it was: the versions of a machine are no content


def picture(notebook):
    """Return the picture that stands for a notebook, as bytes: of a tagged cell, or the last one.

    Args:
        notebook: a mapping, as the JSON file has it.
    """
    found = [
        (cell, output["data"]["image/png"])
        for cell in notebook["cells"]
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    tagged = [png for cell, png in found if "thumbnail" in cell["metadata"].get("tags", [])]
    return base64.b64decode((tagged or [png for _, png in found])[-1])


def main():
    import nbformat

    names = sorted(path.stem for path in NOTEBOOKS.glob("*.py"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="all, if none is given")
    for name in parser.parse_args().names or names:
        notebook, start = written(name), time.perf_counter()
        execute(notebook)
        path = NOTEBOOKS / f"{name}.ipynb"
        nbformat.write(notebook, path)
        size = path.stat().st_size / 1000
        print(f"{name:24}{time.perf_counter() - start:6.0f} s{size:6.0f} kB", flush=True)


if __name__ == "__main__":
    main()
