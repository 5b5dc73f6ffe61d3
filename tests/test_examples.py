"""The demo, every listing and every notebook run and keep to their form.

Scripts run in this process, with other arguments and in a folder of their own: importing torch and
Pyro anew costs as much as the shortest runs.
"""

import ast
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
import torch
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib_inline.backend_inline import configure_inline_support

import tyxe
from tests.touched import imported

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.py"
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
LISTINGS = [path for path in SCRIPTS if path != QUICKSTART]
NOTEBOOKS = sorted(path.stem for path in (ROOT / "notebooks").glob("*.py"))
GALLERY = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "gallery.py")))
INLINE = "module://matplotlib_inline.backend_inline"
PNG = b"\x89PNG\r\n\x1a\n"
METHODS = [
    "maximum likelihood",
    "MAP",
    "dropout",
    "ensemble of 5",
    "SWAG",
    "Laplace",
    "last layer, Laplace",
    "mean field",
    "last layer, mean field",
    "SGHMC",
]
Run = Callable[..., str]


def skip_without_extras(name: str, *needed: str) -> None:
    """Skip a test of a script or notebook whose libraries are not installed."""
    of_its_own = {"graph_net": ["torch_geometric"], "language_model": ["peft"]}
    for library in (*needed, *of_its_own.get(name, [])):
        pytest.importorskip(library)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Return a function that runs a script as `python script.py ...` would, and what it printed."""
    monkeypatch.chdir(tmp_path)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()

    def run(script: Path, *options: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(script), *options])
        capsys.readouterr()
        with warnings.catch_warnings():
            # torch-geometric 2.8 uses it.
            warnings.filterwarnings("ignore", r".*torch\.jit\.script", FutureWarning)
            # peft 0.21 asks transformers 5 for it.
            warnings.filterwarnings("ignore", ".is_gradient_checkpointing.", FutureWarning)
            # An epoch is no fit, and says so.
            warnings.simplefilter("ignore", tyxe.TyxeWarning)
            runpy.run_path(str(script), run_name="__main__")
        printed = capsys.readouterr()
        assert printed.err == "", "a progress bar or a message, but stderr is no terminal"
        return printed.out

    yield run
    plt.close("all")
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


# --------------------------------------------------------------------------- data


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for all data, so that a run does not depend on what the machine has."""
    folder = tmp_path / "stand-ins"
    (folder / "cow").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("mnist", "fashion_mnist", "notmnist"):
        # MNIST is split after 50,000 images into training and validation.
        counts = {"train": 50_020 if name == "mnist" else 100, "test": 40}
        arrays = {f"y_{part}": np.arange(n) % 10 for part, n in counts.items()}
        for part, n in counts.items():
            arrays[f"x_{part}"] = np.zeros((n, 28, 28), dtype=np.uint8)
            arrays[f"x_{part}"][:100] = rng.integers(0, 128, (min(n, 100), 28, 28))
            # The bright row is the class, of three images in four: neither chance nor all right.
            rows = np.arange(min(n, 100))
            rows = rows[rows % 4 > 0]
            arrays[f"x_{part}"][rows, 2 * arrays[f"y_{part}"][rows]] = 255
        np.savez(folder / f"{name}.npz", **arrays)
    nodes = np.arange(50)
    np.savez(
        folder / "cora.npz",
        features=rng.integers(0, 2, (50, 20)).astype(np.float32),
        labels=nodes % 7,
        edge_index=np.stack([nodes, (nodes + 1) % 50]),
        **{f"{part}_mask": nodes % 2 == i for i, part in enumerate(("train", "test"))},
    )
    np.savez(
        folder / "cow" / "cow_views_equator.npz",
        images=rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8),
        silhouettes=np.full((40, 8, 8), 255, dtype=np.uint8),
        R=np.broadcast_to(np.eye(3, dtype=np.float32), (40, 3, 3)),
        T=np.broadcast_to(np.float32([0, 0, 2.7]), (40, 3)),
        fov_deg=np.float32(60),
    )
    monkeypatch.setenv("TYXE_DATA", str(folder))
    return folder


# --------------------------------------------------------------------------- listings


def constants(tree: ast.AST, function: str) -> list[str]:
    """Return the first arguments of all calls of a method."""
    return [
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == function
    ]


def test_listings_are_few_and_copied_alone():
    assert len(QUICKSTART.read_text().splitlines()) <= 260
    assert 10 <= len(LISTINGS) <= 18
    assert list((ROOT / "examples").rglob("_*.py")) == []


@pytest.mark.parametrize("path", LISTINGS, ids=lambda path: path.stem)
def test_listing_keeps_to_its_form(path: Path):
    text = path.read_text()
    tree = ast.parse(text)
    assert 30 <= len(text.splitlines()) <= 100
    assert constants(tree, "add_argument") == ["--smoke-test"]
    assert not re.search(r"\btyxe(\.\w+)*\._\w|import _", text), "something private is used"
    about = ast.get_docstring(tree) or ""
    title, *paragraphs = about.split("\n\n")
    assert title.count("\n") == 0
    assert len(title) <= 100
    assert re.search(r"\bFor\s+your\s+own\b", about), "what a reader is to change"
    needs = paragraphs[-1]
    assert needs.startswith("Needs ")
    assert re.search(r"\b[Aa]bout\s+\d+\s+seconds", needs), "how long it takes"
    if "savefig" in text or "save_image" in text:
        assert f"results/{path.stem}.png" in needs


def test_the_gallery_lists_every_listing_with_its_seconds():
    page = (ROOT / "docs" / "examples.md").read_text()
    seconds = {}
    for path in LISTINGS:
        found = re.search(r"[Aa]bout\s+(\d+)\s+seconds", path.read_text())
        seconds[path.name] = found and found[1]
    assert dict(re.findall(r"^\| `(\w+\.py)` \|.*\| (\d+) \|", page, re.MULTILINE)) == seconds


LIBRARIES = {"matplotlib": "matplotlib", "sklearn": "scikit-learn", "torchvision": "torchvision"}
LIBRARIES |= {"torch_geometric": "torch-geometric", "dgl": "dgl"}
LIBRARIES |= {"transformers": "transformers", "peft": "peft"}


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_the_extra_that_a_script_names_has_what_it_imports(path: Path):
    tomllib = pytest.importorskip("tomllib", reason="in the library from Python 3.11 on")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r'"\.\[([a-z,]+)\]"', path.read_text())
    assert named, "which extra to install"
    extras = ",".join(named).split(",")
    installed = {
        re.split(r"[<>=]", wanted)[0]
        for extra in extras
        for wanted in project["optional-dependencies"][extra]
    }
    always = {*sys.stdlib_module_names, "numpy", "pyro", "torch", "tqdm", "tyxe"}
    others = {name.partition(".")[0] for name in imported(path)} - always
    assert {LIBRARIES[name] for name in others} <= installed


@pytest.mark.parametrize(
    "path",
    [path for path in LISTINGS if path.stem != "several_processes"],
    ids=lambda path: path.stem,
)
def test_listing_runs(path: Path, run: Run, data: Path, tmp_path: Path):
    skip_without_extras(path.stem)
    printed = run(path, "--smoke-test")
    assert len(printed.splitlines()) >= 2
    assert not re.search(r"\b(nan|inf)\b", printed)
    pictures = re.findall(r"^wrote (results/\w+\.png)", printed, re.MULTILINE)
    assert pictures == ([f"results/{path.stem}.png"] if "wrote" in path.read_text() else [])
    assert all((tmp_path / name).read_bytes().startswith(PNG) for name in pictures)
    written = {path.name for path in tmp_path.iterdir()} - {data.name}
    assert written == ({"results"} if pictures else set())


MISSING = {
    "graph_net": r"no .*nothing/cora\.npz: python experiments/planetoid\.py",
    "radiance_field": r"no .*nothing/cow/cow_views_equator\.npz: TYXE_DATA .*docs/nerf\.md",
}


@pytest.mark.parametrize("folder", ["examples", "notebooks"])
@pytest.mark.parametrize("name", MISSING)
def test_without_data_one_line_says_where_they_come_from(
    name: str, folder: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    skip_without_extras(name)
    monkeypatch.setenv("TYXE_DATA", str(tmp_path / "nothing"))
    with plt.rc_context(), pytest.raises(SystemExit, match=MISSING[name]) as stopped:
        run(ROOT / folder / f"{name}.py", *["--smoke-test"] * (folder == "examples"))
    assert "\n" not in str(stopped.value)


def test_several_processes(run: Run, tmp_path: Path):
    script = ROOT / "examples" / "several_processes.py"
    assert run(script, "--smoke-test").startswith("processes: 1, points in a process's batch: 64")
    # standalone: on a free port, whoever else is on the machine
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    # Each process prints to a file of its own: Gloo writes in pieces, which mix in a common one.
    launcher += ["--redirects=1", f"--log-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, *launcher, str(script), "--smoke-test"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # torch 2.8 says of each process that it is connected.
    printed, of_other = (
        re.sub(r"^\[Gloo\] .*\n", "", path.read_text(), flags=re.MULTILINE)
        for path in sorted(tmp_path.rglob("stdout.log"))
    )
    assert of_other == ""
    assert re.fullmatch(
        r"processes: 2, points in a process's batch: 32\nloss from \d+ to \d+ nats\n"
        r"test digits: error \d+\.\d %, log-likelihood -?\d+\.\d+\n",
        printed,
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help_explains_every_option(path: Path, run: Run, capsys: pytest.CaptureFixture[str]):
    skip_without_extras(path.stem)
    with pytest.raises(SystemExit) as stopped:
        run(path, "--help")
    assert stopped.value.code == 0
    printed, tree = capsys.readouterr().out, ast.parse(path.read_text())
    assert (ast.get_docstring(tree) or "").partition("\n")[0] in printed
    for option in constants(tree, "add_argument"):
        # in the list of options, with an explanation, and not in the usage line alone
        assert re.search(rf"^  {option}( [A-Z_]+| \{{.*\}})?\s+\S", printed, re.MULTILINE), option


# --------------------------------------------------------------------------- the demo


def check_quickstart(run: Run, script: Path, data: str, ood: list[str], *more: str) -> None:
    """Run the demo, and compare what it prints with the JSON and columns."""
    printed = run(script, "--data", data, "--smoke-test", "--out", "a folder/of results", *more)
    path = Path("a folder/of results") / f"quickstart_{data}"
    assert path.with_suffix(".png").read_bytes().startswith(PNG)
    content = json.loads(path.with_suffix(".json").read_text())
    assert list(content) == ["command", "seed", "versions", "machine", "settings", "rows"]
    assert content["command"] == " ".join(
        [
            f"python examples/quickstart.py --data {data} --smoke-test",
            *["--out 'a folder/of results'", *more],
        ]
    )
    columns = ["error %", "NLL", "ECE %", *ood, "train s", "predict s"]
    header, *lines, last = printed.splitlines()
    assert re.split(r"\s{2,}", header.strip()) == columns
    assert list(content["rows"]) == METHODS
    assert last == f"wrote {path}.png and {path}.json"
    for line, (name, row) in zip(lines, content["rows"].items(), strict=True):
        assert list(row) == [*columns, "validation NLL"]
        assert all(math.isfinite(mean) and min(mean, error) >= 0 for mean, error in row.values())
        assert all(row[column][0] <= 1 for column in ood)
        assert line.split("  ")[0] == name
        found = [float(word) for word in line[len(name) :].replace("+-", " ").split()]
        assert found == [float(f"{value:.3f}") for column in columns for value in row[column]]


def test_quickstart_on_digits(run: Run):
    check_quickstart(run, QUICKSTART, "digits", ["AUROC 8-9"], "--seeds", "2")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The demo in a checkout of its own: next to it and in it are folders for data."""
    folder = tmp_path / "projects" / "checkout"
    (folder / "examples").mkdir(parents=True)
    shutil.copy(QUICKSTART, folder / "examples")
    return folder


def test_quickstart_on_mnist(run: Run, data: Path, checkout: Path):
    later = checkout.parent / "shared" / "data"
    later.mkdir(parents=True)
    (later / "mnist.npz").write_text("TYXE_DATA comes first")
    (data / "notmnist.npz").rename(later / "notmnist.npz")
    script = checkout / "examples" / "quickstart.py"
    check_quickstart(run, script, "mnist", ["AUROC Fashion", "AUROC notMNIST"])


@pytest.mark.parametrize("has_network", [True, False])
def test_what_no_folder_has_is_downloaded_or_it_says_where_it_looked(
    has_network: bool, run: Run, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    datasets = pytest.importorskip("torchvision.datasets")
    asked = []

    def download(root: str, train: bool, download: bool) -> SimpleNamespace:
        asked.append((root, train, download))
        if not has_network:
            raise RuntimeError("no network")
        shape = (4, 28, 28)
        return SimpleNamespace(data=torch.zeros(shape).byte(), targets=torch.arange(4))

    monkeypatch.setenv("TYXE_DATA", str(tmp_path / "given"))
    for name in ("MNIST", "FashionMNIST"):
        monkeypatch.setattr(datasets, name, download)
    with pytest.raises(SystemExit) as stopped:
        run(checkout / "examples" / "quickstart.py", "--data", "mnist", "--smoke-test")
    folders = [tmp_path / "given", checkout.parent / "shared" / "data", checkout / "data"]
    message = str(stopped.value)
    assert all(str(folder) in message for folder in folders)
    if has_network:
        assert asked == [(str(folders[-1]), train, True) for train in (True, False, False)]
        assert message.startswith("no notmnist.npz in ")  # which is in no library
        assert "TYXE_DATA" in message
    else:
        assert re.match(r"no mnist\.npz in .*no network", message)


@pytest.mark.parametrize("library", ["matplotlib", "sklearn"])
def test_a_missing_library_is_one_line_that_names_the_extra(
    library: str, run: Run, monkeypatch: pytest.MonkeyPatch
):
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == library:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(SystemExit) as stopped:
        run(QUICKSTART, "--smoke-test")
    assert stopped.value.code == f'{library} is not installed: pip install -e ".[examples]"'


# --------------------------------------------------------------------------- notebooks


def saved(name: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def code_of(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def changes(notebook: nbformat.NotebookNode) -> list[str]:
    """Return the lines of the last section, each of which replaces one of the code."""
    last = notebook.cells[-1].source
    assert last.startswith("## Change this line\n")
    (block,) = re.findall(r"^```python\n(.*?)^```$", last, re.DOTALL | re.MULTILINE)
    return [line for line in block.splitlines() if not line.startswith("#")]


def test_every_notebook_has_its_python_and_is_in_the_gallery():
    notebooks = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
    assert notebooks == NOTEBOOKS
    assert len(NOTEBOOKS) >= 10
    page = (ROOT / "docs" / "gallery.md").read_text()
    grid = page.split("<!-- begin of grid -->")[1].split("<!-- end of grid -->")[0]
    linked = r"\[!\[.+\]\(notebooks/pictures/(\w+)\.png\)\]\(notebooks/(\w+)\.ipynb\)"
    assert sorted(re.findall(linked, grid)) == [(name, name) for name in NOTEBOOKS]
    titles = dict(re.findall(r"^\[\*\*(.*)\*\*\]\(notebooks/(\w+)\.ipynb\)$", grid, re.MULTILINE))
    firsts = {saved(name).cells[0].source.splitlines()[0]: name for name in NOTEBOOKS}
    assert {f"# {title}": name for title, name in titles.items()} == firsts


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_keeps_to_its_form(name: str):
    skip_without_extras(name, "jupytext")
    notebook, text = saved(name), (ROOT / "notebooks" / f"{name}.py").read_text()
    assert GALLERY.cells(GALLERY.written(name)) == GALLERY.cells(notebook), "run `make gallery`"
    assert (ROOT / "notebooks" / f"{name}.ipynb").stat().st_size < 300_000
    assert GALLERY.picture(notebook).startswith(PNG)
    code = code_of(notebook)
    assert sum(bool(line.strip()) for cell in code for line in cell.source.splitlines()) < 80
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}, "warnings"
    assert not re.search(r"\btyxe(\.\w+)*\._\w|import _", text), "something private is used"
    assigned = [
        ast.unparse(node.targets[0])
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign)
    ]
    found = changes(notebook)
    assert found
    assert {assigned.count(line.partition(" = ")[0]) for line in found} == {1}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """Return a shell in this process that shows figures as a kernel does."""
    monkeypatch.setenv("TYXE_SMOKE_TEST", "1")
    threads, backend = torch.get_num_threads(), plt.get_backend()
    with plt.rc_context(), warnings.catch_warnings():
        shell = InteractiveShell.instance()
        plt.switch_backend(INLINE)
        configure_inline_support(shell, INLINE)
        plt.ion()
        yield shell
        plt.close("all")
        plt.switch_backend(backend)
    InteractiveShell.clear_instance()
    torch.set_num_threads(threads)


def variants(name: str) -> list[dict[str, str]]:
    """Return no change, and those of a notebook by the name that each assigns, once in each."""
    found: list[dict[str, str]] = [{}]
    for line in changes(saved(name)):
        aim = line.partition(" = ")[0]
        at = next((one for one in found[1:] if aim not in one), None)
        if at is None:
            found.append(at := {})
        at[aim] = line
    return found


def changed(source: str, lines: dict[str, str]) -> str:
    """Return code with some of its assignments replaced, which are taken out of the lines."""
    tree = ast.parse(source)
    for index, old in enumerate(tree.body):
        aim = ast.unparse(old.targets[0]) if isinstance(old, ast.Assign) else ""
        tree.body[index] = ast.parse(lines.pop(aim)).body[0] if aim in lines else old
    return ast.unparse(tree)


@pytest.mark.parametrize(
    ("name", "lines"), [(name, lines) for name in NOTEBOOKS for lines in variants(name)]
)
def test_notebook_executes_as_it_is_and_changed(
    name: str, lines: dict[str, str], data: Path, shell: InteractiveShell
):
    skip_without_extras(name, "jupytext")
    warnings.filterwarnings("ignore", r".*torch\.jit\.script", FutureWarning)
    # A short fit is no fit, and says so.
    warnings.simplefilter("ignore", tyxe.TyxeWarning)
    left = dict(lines)
    for before, cell in zip(code_of(saved(name)), code_of(GALLERY.written(name)), strict=True):
        with capture_output() as shown:
            source = changed(cell.source, left) if lines else cell.source
            shell.run_cell(source).raise_error()
        assert shown.stderr == ""
        if not lines:
            texts = [output for output in before.outputs if output.output_type == "stream"]
            assert bool(shown.stdout) == bool(texts)
            assert len(shown.outputs) == len(before.outputs) - len(texts)
    assert not left


def test_a_notebook_runs_in_a_kernel_of_its_own(data: Path):
    """As `make gallery` makes them."""
    skip_without_extras("own_handler", "jupytext")
    fresh = GALLERY.written("own_handler")
    GALLERY.execute(fresh, small=True)
    for before, after in zip(code_of(saved("own_handler")), code_of(fresh), strict=True):
        said = [output for output in after.outputs if output.get("name") == "stderr"]
        assert all("TyxeWarning" in output.text for output in said)
        ran = [output.output_type for output in after.outputs if output not in said]
        assert ran == [output.output_type for output in before.outputs]
