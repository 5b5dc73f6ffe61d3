"""Every example runs, says what it did, and explains its options; the notebook executes."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("[a-z]*.py"))
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
METHODS = [
    "ML",
    "MAP",
    "Laplace",
    "last layer, Laplace",
    "mean field",
    "mean field, sd only",
    "last layer, mean field",
    "last layer, low rank",
]
PNG = b"\x89PNG\r\n\x1a\n"


MISSING = [("quickstart.py", "matplotlib"), ("quickstart.py", "sklearn")]


@pytest.mark.parametrize(("name", "library"), MISSING)
def test_a_missing_library_is_one_line_that_names_the_extra(name: str, library: str):
    code = f"import runpy, sys; sys.path.insert(0, 'examples'); sys.modules[{library!r}] = None; "
    code += f"runpy.run_path('examples/{name}', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == f'{library} is not installed: pip install -e ".[examples]"\n'


def test_every_example_says_what_is_missing():
    for name in EXAMPLES:
        first = re.search(r"^(?:import|from) _.*$", (ROOT / "examples" / name).read_text(), re.M)
        assert first[0] == "import _extras  # noqa: F401", name


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def run(name: str, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"examples/{name}", *options],
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
    )


def smoke(name: str, result: str, folder: Path, *options: str, **variables: str):
    """Run a smoke test; return what it printed and its JSON, after looking at the rest."""
    done = run(name, "--smoke-test", "--out", str(folder), *options, **variables)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stderr, "a progress bar, but stderr is no terminal"
    assert (folder / f"{result}.png").read_bytes().startswith(PNG)
    content = json.loads((folder / f"{result}.json").read_text())
    assert {"command", "seed", "versions", "machine", "settings"} <= content.keys()
    assert content["command"].startswith(f"python examples/{name} --smoke-test")
    return done.stdout, content


def images_stood_in_for(folder: Path, names: tuple[str, ...]) -> None:
    """Write small image sets, so that a run does not depend on what the machine has."""
    rng = np.random.default_rng(0)
    for name in names:
        arrays = {
            f"{kind}_{split}": values
            for split in ("train", "test")
            for kind, values in (
                ("x", rng.integers(0, 256, (300, 28, 28), dtype=np.uint8)),
                ("y", np.arange(300, dtype=np.uint8) % 10),
            )
        }
        if name == "mnist":  # as many as there are, for the split into training and validation
            arrays["x_train"] = np.zeros((60_000, 28, 28), dtype=np.uint8)
            arrays["x_train"][:200] = arrays["x_test"][:200]
            arrays["y_train"] = np.arange(60_000, dtype=np.uint8) % 10
        np.savez_compressed(folder / f"{name}.npz", **arrays)


def check_quickstart(stdout: str, content: dict, ood: list[str]) -> None:
    columns = ["error %", "NLL", "ECE %", *ood, "train s", "predict s"]
    header, *lines = stdout.splitlines()
    assert re.split(r"\s{2,}", header.strip()) == columns
    assert list(content["rows"]) == METHODS
    for line, (name, row) in zip(lines, content["rows"].items(), strict=False):
        assert list(row) == [*columns, "validation NLL"]
        assert all(math.isfinite(value) and value >= 0 for value in row.values())
        assert all(row[column] <= 1 for column in ood)
        assert line.split("  ")[0] == name
        printed = [float(word) for word in line[len(name) :].split()]
        assert printed == [float(f"{row[column]:.3f}") for column in columns]


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_mentions_every_option(name: str):
    done = run(name, "--help")
    assert done.returncode == 0
    source = (ROOT / "examples" / name).read_text()
    options = re.findall(r'add_argument\(\s*"(--[a-z-]+)"', source)
    assert "--smoke-test" in options
    for option in options:
        # in the list of options, with an explanation, and not in the usage line alone
        assert re.search(rf"^  {option}( [A-Z_]+| \{{.*\}})?\s+\S", done.stdout, re.MULTILINE), (
            option
        )


def test_unknown_option_is_refused():
    assert run("quickstart.py", "--dat", "cifar").returncode == 2


def test_results_of_other_settings_are_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _record import recorded

    path = tmp_path / "found.json"
    settings = {"steps": 5, "widths": (4, 3)}
    assert recorded(path, settings) == {}
    content = {"seed": None, "settings": settings, "rows": [1.0]}
    path.write_text(json.dumps(content))
    assert recorded(path, settings)["rows"] == [1.0]
    others = [
        ({"steps": 6, "widths": (4, 3)}, None, "steps"),
        ({"steps": 5}, None, "widths"),
        (settings | {"rate": 0.1}, None, "rate"),
        (settings, 0, "seed"),
    ]
    for other, seed, name in others:
        with pytest.raises(SystemExit, match=rf"found.json has .* \({name}\): give this run"):
            recorded(path, other, seed)
    assert json.loads(path.read_text())["rows"] == [1.0]


def test_quickstart_on_digits(tmp_path: Path):
    stdout, content = smoke("quickstart.py", "quickstart_digits", tmp_path)
    check_quickstart(stdout, content, ["AUROC 8-9"])


def test_quickstart_on_mnist(tmp_path: Path):
    images_stood_in_for(tmp_path, ("mnist", "fashion_mnist", "notmnist"))
    stdout, content = smoke(
        "quickstart.py", "quickstart_mnist", tmp_path, "--data", "mnist", TYXE_DATA=str(tmp_path)
    )
    check_quickstart(stdout, content, ["AUROC Fashion", "AUROC notMNIST"])


def test_missing_data_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import _data

    given, checkout = tmp_path / "given", tmp_path / "checkout"
    monkeypatch.setenv("TYXE_DATA", str(given))
    monkeypatch.setattr(_data, "ROOT", checkout)
    assert _data.folders() == [given, tmp_path / "shared" / "data", checkout / "data"]
    with pytest.raises(FileNotFoundError) as error:
        _data.images("notmnist", "test")
    assert all(str(folder) in str(error.value) for folder in _data.folders())
    assert "TYXE_DATA" in str(error.value)


def test_data_are_taken_from_the_first_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import _data

    monkeypatch.setattr(_data, "ROOT", tmp_path / "checkout")
    for folder, value in ((tmp_path / "given", 255), (tmp_path / "shared" / "data", 0)):
        folder.mkdir(parents=True)
        x = np.full((2, 28, 28), value, dtype=np.uint8)
        np.savez(folder / "mnist.npz", x_test=x, y_test=np.array([3, 7], dtype=np.uint8))
    monkeypatch.setenv("TYXE_DATA", str(tmp_path / "given"))
    x, y = _data.images("mnist", "test")
    assert x.shape == (2, 1, 28, 28)
    assert bool((x == 1).all())
    assert y.tolist() == [3, 7]
    monkeypatch.delenv("TYXE_DATA")
    assert bool((_data.images("mnist", "test")[0] == 0).all())


def test_failed_download_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torchvision = pytest.importorskip("torchvision", reason="downloads need torchvision")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import _data

    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(torchvision.datasets, "MNIST", refuse)
    monkeypatch.setattr(_data, "ROOT", tmp_path / "checkout")
    monkeypatch.delenv("TYXE_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"no mnist\.npz in .*no network"):
        _data.images("mnist", "train")


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebook_executes(name: str, monkeypatch: pytest.MonkeyPatch):
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own puts figures into outputs
    path = ROOT / "notebooks" / name
    assert path.stat().st_size < 300_000
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    fresh = nbformat.from_dict(notebook)
    folder = {"metadata": {"path": str(path.parent)}}
    NotebookClient(fresh, timeout=240, kernel_name="python3", resources=folder).execute()
    for saved, ran in zip(notebook.cells, fresh.cells, strict=True):
        assert [o.output_type for o in saved.get("outputs", [])] == [
            o.output_type for o in ran.get("outputs", [])
        ]
