"""What all experiments share: the command line, records, tables, data."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import common
import cora
import numpy as np
import planetoid
import pytest
import runner
import tables
import torch

ROOT = Path(__file__).resolve().parents[2]

# --------------------------------------------------------------------------- a small experiment


SMALL = {
    "methods": {"which": ["a", "b"], "choices": ["a", "b", "c"], "help": "letters"},
    "seeds": {"which": [0, 1], "published": [0, 1, 2], "smoke": [0], "help": "of draws"},
    "as in shared": ["device"],
    "steps": {"is": 10, "published": 1_000, "smoke": 2, "help": "of Adam, 100 % of them"},
    "rate": {"is": 0.1, "help": "of Adam"},
    "images": {"is": 60, "published": None, "help": "to train"},
    "widths": {"is": {"cnn": [4, 3], "mlp": [5]}, "smoke": {"cnn": [2]}, "help": "of layers"},
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(runner.SETTINGS, "small", SMALL)


def check(s):
    if s.rate < 0:
        raise ValueError(f"--rate is {s.rate}; expected a positive number")


class Calls:
    def __init__(self):
        self.made = []

    def run(self, s, method, seed):
        self.made.append((method, seed))
        return {"score": s.steps + seed, "curve": [0.5, 1.0]}


def experiment(calls: Calls, **changed) -> runner.Experiment:
    def table(record):
        return tables.score_table(tables.rows(record.cells), {"score": ".1f"})

    cells = runner.every(calls.run, method="methods", seed="seeds")
    parts = {"cells": cells, "table": table, "facts": {"published": {"a": 1.5}}, **changed}
    return runner.Experiment("small", name="small_{0.device}", check=check, **parts)


def test_cells_are_run_once_and_written_one_by_one(tmp_path: Path, capsys):
    calls = Calls()
    out = ["--out", str(tmp_path / "new")]
    record = experiment(calls).main([*out, "--methods", "b"])
    assert calls.made == [("b", 0), ("b", 1)]
    path = tmp_path / "new" / "small_cpu.json"
    content = json.loads(path.read_text())
    assert content["cells"]["b"]["1"] == {"score": 11, "curve": [0.5, 1.0], "CPU seconds": 0.0}
    assert "[0.5, 1.0]" in path.read_text()
    assert content["cells by"] == ["method", "seed"]
    assert content["published"] == {"a": 1.5}
    assert content["settings"] == {
        "steps": 10, "rate": 0.1, "images": 60, "widths": {"cnn": [4, 3], "mlp": [5]}
    }  # fmt: skip
    assert content["published settings"]["steps"] == 1_000
    assert content["published settings"]["images"] is None
    assert content["machine"]["threads"] == torch.get_num_threads() == 1
    # The other cells are added, the command to the commands.
    experiment(calls).main(out)
    assert calls.made[2:] == [("a", 0), ("a", 1)]
    content = json.loads(path.read_text())
    assert len(content["commands"]) == 2
    assert (
        content["command"]
        == content["commands"][1]
        == f"python experiments/run.py small {' '.join(out)}"
    )
    printed = capsys.readouterr().out
    assert printed.endswith("| | score |\n|---|---|\n| b | 10.5 ± 0.5 |\n| a | 10.5 ± 0.5 |\n")
    assert (tmp_path / "new" / "small_cpu.md").read_text() in printed
    assert record.path == path


def test_a_stopped_run_keeps_its_cells(tmp_path: Path):
    def stopped(s, method, seed):
        if method == "b":
            raise KeyboardInterrupt
        return {"score": 1}

    cells = runner.every(stopped, method="methods", seed="seeds")
    with pytest.raises(KeyboardInterrupt):
        experiment(Calls(), cells=cells).main(["--out", str(tmp_path)])
    calls = Calls()
    experiment(calls).main(["--out", str(tmp_path)])
    assert calls.made == [("b", 0), ("a", 1), ("b", 1)]  # seeds are the outer loop


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--steps", "9"], "steps"),
        (["--smoke-test"], "steps, widths"),
        (["--widths", '{"cnn": [1]}'], "widths"),
    ],
)
def test_results_of_other_settings_are_not_written_over(
    options: list[str], name: str, tmp_path: Path
):
    first = ["--out", str(tmp_path), "--seeds", "0"]
    path = experiment(Calls()).main(first).path
    before = path.read_text()
    message = rf"small_cpu.json has results of other settings \({name}\): give this run an --out"
    with pytest.raises(SystemExit, match=message):
        experiment(Calls()).main([*first, *options])
    assert path.read_text() == before


def test_options_go_before_levels(tmp_path: Path):
    s, _ = experiment(Calls()).parse(["--published", "--smoke-test", "--rate", "0.5"])
    assert (s.steps, s.seeds, s.images, s.rate) == (2, [0], None, 0.5)
    assert s.widths == {"cnn": [2], "mlp": [5]}  # of dictionaries a level names some keys
    s, _ = experiment(Calls()).parse(["--published", "--seeds", "4", "5", "--images", "3"])
    assert (s.steps, s.seeds, s.images) == (1_000, [4, 5], 3)
    record = experiment(Calls()).record(s)
    assert record.path == Path("results/small_cpu_published.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps is 0; expected a positive number"),
        (["--rate", "-1"], "--rate is -1.0; expected a positive number"),
        (["--methods", "d"], "invalid choice: 'd'"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
        (["--table"], "small_cpu.json; run without --table and --figure first"),
    ],
)
def test_bad_options_are_named(options: list[str], message: str, tmp_path: Path, capsys):
    with pytest.raises(SystemExit) as left:
        experiment(Calls()).main([*options, "--out", str(tmp_path / "nothing")])
    assert left.value.code == 2
    assert message in capsys.readouterr().err


def test_a_missing_library_is_one_line_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    message = r'^sklearn is not installed: pip install -e "\.\[examples\]"$'
    with pytest.raises(SystemExit, match=message):
        experiment(Calls()).main([])


def test_table_and_figure_come_from_the_record(tmp_path: Path, monkeypatch):
    drawn = []
    monkeypatch.setattr(runner, "save", lambda figure, path: drawn.append((figure, path.name)))
    own, out = experiment(Calls(), figure=lambda record: {"_a": 1}), ["--out", str(tmp_path)]
    own.main(out)
    page = tmp_path / "small_cpu.md"
    before = page.read_text()
    page.unlink()
    own.main([*out, "--figure"])
    assert drawn == [(1, "small_cpu_a.png")] * 2
    assert not page.exists()
    own.main([*out, "--table"])
    assert page.read_text() == before
    assert len(drawn) == 2


# --------------------------------------------------------------------------- tables


def test_tables_have_means_and_standard_errors():
    # the variance of 1, 2, 6 is 7
    assert tables.over_seeds([1.0, 2.0, 6.0], ".3f") == f"3.000 ± {(7 / 3) ** 0.5:.3f}"
    assert tables.over_seeds([1.0, 2.0, 3.0], ".1f", factor=100) == "200.0 ± 57.7"
    assert tables.over_seeds([1.0, 3.0], ".1f", errors=2) == "2.0 ± 2.0"
    assert tables.over_seeds([1.0, math.inf], ".1f") == "inf"
    assert tables.over_seeds([4.0], ".1f") == "4.0"
    assert tables.over_seeds([], ".1f") == ""
    cells = {
        ("a", "0"): {"x": 1.0},
        ("a", "1"): {"x": 3.0},
        ("b", "0"): {"rows": {"c": {"y": 2.0}}},
    }
    rows = tables.rows(cells)
    assert rows == {"a": [{"x": 1.0}, {"x": 3.0}], "c": [{"y": 2.0}]}
    text = tables.score_table(rows, {"x": ".1f", "y": ".2f"}, {"c": ["8", "9"]}, ["seeds"])
    assert text.splitlines() == [
        "| | seeds | x | y |",
        "|---|---|---|---|",
        "| a | 2 | 2.0 ± 1.0 |  |",
        "| c | 1 |  | 2.00 (9) |",
    ]


# --------------------------------------------------------------------------- data and batches


def refuse(*args: object, **kwargs: object) -> None:
    raise OSError("no network")


MISSING = {
    "notmnist": (lambda: common.arrays("notmnist.npz"), "TYXE_DATA"),
    "cora": (cora.cora, "could not be downloaded: no network.*TYXE_DATA"),
    "mnist": (lambda: common.images("mnist", "train"), "could not download MNIST: no network"),
}


@pytest.mark.parametrize("name", MISSING)
def test_missing_data_says_where_it_looked(name: str, tmp_path: Path, monkeypatch):
    torchvision = pytest.importorskip("torchvision", reason="downloads need torchvision")
    monkeypatch.setattr(torchvision.datasets, "MNIST", refuse)
    monkeypatch.setattr(planetoid.urllib.request, "urlopen", refuse)
    monkeypatch.setenv("TYXE_DATA", str(tmp_path / "given"))
    monkeypatch.setattr(common, "ROOT", tmp_path / "checkout")
    shared, own = tmp_path / "shared" / "data", tmp_path / "checkout" / "data"
    assert common.folders() == [tmp_path / "given", shared, own]
    places = ", ".join(map(str, common.folders()))
    call, message = MISSING[name]
    with pytest.raises(FileNotFoundError, match=rf"no {name}\.npz in {places}.*{message}"):
        call()


def test_images_are_taken_from_the_first_folder_with_colours_first(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(common, "ROOT", tmp_path / "checkout")
    monkeypatch.setenv("TYXE_DATA", str(tmp_path / "given"))
    for folder, value in ((tmp_path / "given", 255), (tmp_path / "shared" / "data", 0)):
        folder.mkdir(parents=True)
        x = np.full((2, 28, 28), value, dtype=np.uint8)
        np.savez(folder / "mnist.npz", x_test=x, y_test=np.array([3, 7], dtype=np.uint8))
    x, y = common.images("mnist", "test")
    assert x.shape == (2, 1, 28, 28)
    assert bool((x == 1).all())
    assert y.tolist() == [3, 7]
    colours = np.arange(2 * 32 * 32 * 3).reshape(2, 32, 32, 3) % 256
    np.savez(tmp_path / "given" / "cifar10_subset.npz", x_train=colours, y_train=np.arange(2))
    expected = torch.from_numpy(colours).permute(0, 3, 1, 2) / 255
    assert torch.equal(common.images("cifar10_subset", "train")[0], expected)
    monkeypatch.delenv("TYXE_DATA")
    assert bool((common.images("mnist", "test")[0] == 0).all())


def test_columns_are_standardised_by_some_rows():
    x = 3 + 2 * torch.randn(200, 4)
    x[:, 3] = 1.0  # a constant column stays finite
    found = common.standardised_columns(x, torch.arange(100))
    torch.testing.assert_close(found[:100].mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(found[:100, :3].std(0), torch.ones(3))
    assert bool(found.isfinite().all())


def test_batches_have_every_point_once():
    batches = common.Batches(torch.arange(10.0), torch.arange(10), 4)
    for _ in range(2):
        inputs, targets = zip(*batches, strict=True)
        assert [len(part) for part in targets] == [4, 4, 2] == [len(part) for part in inputs]
        assert len(batches) == 3
        assert torch.equal(torch.cat(inputs).long(), torch.cat(targets))
        assert torch.cat(targets).sort().values.tolist() == list(range(10))
        assert torch.cat(targets).tolist() != list(range(10))


@pytest.mark.parametrize("mode", ["reflect", "constant"])
def test_crops_are_windows_of_padded_images(mode: str):
    """Random windows, each at its own place, half of them flipped."""
    x = torch.rand(20, 2, 6, 6)
    windows = torch.nn.functional.pad(x, (4, 4, 4, 4), mode=mode).unfold(2, 6, 1)
    windows = windows.unfold(3, 6, 1)  # (20, 2, 9, 9, 6, 6)
    places, flips = set(), 0
    for own, image in zip(windows, common.crops(x, mode), strict=True):
        candidates = own.permute(1, 2, 0, 3, 4).flatten(0, 1)
        straight, flipped = (
            (candidates == each).flatten(1).all(1).nonzero() for each in (image, image.flip(-1))
        )
        assert len(straight) + len(flipped) >= 1
        flips += len(straight) == 0
        places.add(int(torch.cat([straight, flipped])[0]))
    assert len(places) > 5
    assert 0 < flips < 20


# --------------------------------------------------------------------------- a command


def test_an_experiment_is_a_command(tmp_path: Path):
    """From another directory, as somebody may start it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    script = ROOT / "experiments" / "run.py"
    options = ["--smoke-test", "--data", "digits", "--columns", "MAP"]
    command = [sys.executable, str(script), "uci", *options]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    content = json.loads((tmp_path / "results" / "smoke" / "uci.json").read_text())
    assert content["command"] == f"python experiments/run.py uci {' '.join(options)}"
    assert (tmp_path / "results" / "smoke" / "uci.md").read_text() in done.stdout
