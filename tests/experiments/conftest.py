"""What tests of experiments share: image sets that stand in for real ones, and smoke tests."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import leaderboard_data
import numpy as np
import pytest
import runner
import tables
from matplotlib.figure import Figure

PNG = b"\x89PNG\r\n\x1a\n"
NODES, FEATURES, CLASSES = 300, 40, 7
# Names of numbers from 0 to 1, and above 0.
SHARES = {"agreement", "total variation", "acceptance"}
POSITIVE = {"RMSE", "seconds an epoch"}


def sets(rng: np.random.Generator, count: int, *shape: int) -> dict[str, np.ndarray]:
    """Return arrays of a training and a test set."""
    arrays = {}
    for split in ("train", "test"):
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count, dtype=np.uint8) % 10
    return arrays


def graph() -> dict[str, np.ndarray]:
    """Return arrays in Cora's format, of a random graph."""
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, NODES, (2, 500))
    pairs = np.unique(np.sort(pairs[:, pairs[0] != pairs[1]], axis=0), axis=1)
    index = np.arange(NODES)
    return {
        "features": (rng.random((NODES, FEATURES)) < 0.2).astype(np.float32),
        "labels": index % CLASSES,
        "edge_index": np.concatenate([pairs, pairs[::-1]], 1),
        "train_mask": index < 100,
        "val_mask": (index >= 100) & (index < 200),
        "test_mask": index >= 200,
    }


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of small image sets, so that no run depends on what the machine has."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in ("mnist", "fashion_mnist", "notmnist"):
        np.savez(folder / f"{name}.npz", **sets(rng, 300, 28, 28))
    np.savez(folder / "cifar10_subset.npz", **sets(rng, 80, 32, 32, 3))
    return folder


@pytest.fixture
def stand_ins(image_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Look for data in that folder first."""
    monkeypatch.setenv("TYXE_DATA", str(image_folder))
    return image_folder


@pytest.fixture
def every_set(tmp_path, monkeypatch, image_folder):
    """Look first for data in a folder with a small set for each net of the leaderboard."""
    rng = np.random.default_rng(0)
    (tmp_path / "regression").mkdir()
    x = rng.normal(size=(80, 3)).astype(np.float32)
    for name in ("yacht", "energy", "airfoil"):
        np.savez(tmp_path / "regression" / f"{name}.npz", X=x, y=x[:, :1] + 5)
    np.savez(tmp_path / "cora.npz", **graph())
    np.savez(tmp_path / "svhn_subset.npz", **sets(rng, 80, 32, 32, 3))
    for file in image_folder.glob("*.npz"):
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.setenv("TYXE_DATA", str(tmp_path))
    leaderboard_data.problem.cache_clear()
    yield tmp_path
    leaderboard_data.problem.cache_clear()


def check_numbers(found: object, name: str = "") -> None:
    """Assert that numbers of a cell are finite, and such as their names say."""
    if isinstance(found, dict):
        for key, value in found.items():
            check_numbers(value, key)
    elif isinstance(found, list):
        for value in found:
            check_numbers(value, name)
        if "quantiles" in name:
            assert found == sorted(found), name
    elif isinstance(found, int | float):
        # A probability that a net holds for impossible has an infinite NLL.
        assert math.isfinite(found) or (found > 0 and "NLL" in name), name
        if name.startswith(("accuracy", "error %", "ECE", "interval error")):
            assert 0 <= found <= (100 if "%" in name else 1), name
        elif "AUROC" in name or name in SHARES:
            assert 0 <= found <= 1, name
        elif "entropy" in name and "cross" not in name:
            assert 0 <= found <= math.log(10) + 1e-4, name
        elif name in POSITIVE:
            assert found > 0, name


def check_page(page: str, record: runner.Record) -> int:
    """Assert that a table's numbers are the record's, where columns have the names of numbers."""
    groups: dict[tuple, dict] = {}
    for key, cell in record.cells.items():
        groups.setdefault(key[:-1], {})[key] = cell
    found = [tables.rows(cells) for cells in groups.values()]
    count, columns = 0, []
    for line in page.splitlines():
        name, *texts = [text.strip(" *") for text in line[1:].removesuffix("|").split(" | ")]
        if line.startswith("| |") or not line.startswith("|"):
            columns = texts
        for column, text in zip(columns, texts, strict=False):
            rows = [each[name] for each in found if name in each]
            values = [[row[column] for row in own if column in row] for own in rows]
            values = [statistics.fmean(own) for own in values if own]
            number = text.split(" ")[0].replace(",", "")
            if values and number:
                digits = len(number.partition("e")[0].partition(".")[2])
                unit = 10.0 ** (int(number.partition("e")[2] or 0) - digits)
                assert min(abs(float(number) - v) for v in values) <= 0.51 * unit, (name, column)
                count += 1
    return count


@pytest.fixture
def smoke(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SimpleNamespace]:
    """Return what runs an experiment's smoke test in this process, and looks at what it writes.

    A second run finds everything there and writes the same. Figures have few pixels, which is what
    takes their time.
    """
    save = Figure.savefig

    def run(experiment: runner.Experiment, *options: str) -> SimpleNamespace:
        few = {"dpi": 20}
        monkeypatch.setattr(Figure, "savefig", lambda drawn, path, dpi: save(drawn, path, **few))
        arguments = ["--smoke-test", *options, "--out", str(tmp_path / "out")]
        record = experiment.main(arguments)
        printed = capsys.readouterr()
        assert "\r" not in printed.err, "a progress bar, but stderr is no terminal"
        content = json.loads(record.path.read_text())
        assert {"command", "commands", "date", "versions", "machine", "settings"} <= content.keys()
        assert content["command"].startswith("python experiments/")
        assert content["cells by"] == list(experiment.by)
        files = [path for path in record.path.parent.iterdir() if path.is_file()]
        written = {path.name: path.read_bytes() for path in files}
        pages = {name: text.decode() for name, text in written.items() if name.endswith(".md")}
        for name, data in written.items():
            assert data.startswith(PNG) or not name.endswith(".png")
        for page in pages.values():
            assert printed.out.find(page) >= 0
            check_page(page, record)
        for cell in record.cells.values():
            check_numbers(cell)
        for name in written:
            if name.endswith((".md", ".png")):
                (record.path.parent / name).unlink()
        # It has drawn the same, which is not rendered again.
        monkeypatch.setattr(runner, "save", lambda drawn, path: path.write_bytes(PNG))
        again = experiment.main(arguments)
        assert again.cells == record.cells
        assert json.loads(record.path.read_text()) == content
        assert {p.name for p in record.path.parent.iterdir() if p.is_file()} == set(written)
        assert {n: (record.path.parent / n).read_text() for n in pages} == pages
        assert capsys.readouterr().out in printed.out
        page = pages.get(f"{record.path.stem}.md", "")
        return SimpleNamespace(record=record, content=content, cells=record.cells, page=page)

    return run
