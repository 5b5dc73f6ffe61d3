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
import torch
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


MISSING = [("ddp.py", "matplotlib"), ("nerf.py", "PIL"), ("transformer.py", "sklearn")]


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


def test_regression(tmp_path: Path):
    stdout, content = smoke("regression.py", "regression", tmp_path)
    titles = ["(a) mean field, inside the handler", "(b) mean field, outside", "(c) HMC"]
    assert list(content["table"]) == titles
    for title, row in content["table"].items():
        assert list(row) == ["sd at data", "sd between", "sd beyond"]
        # the noise, 0.1, is in every predictive standard deviation (float32, so not exactly)
        assert all(value > 0.0999 for value in row.values())
        assert f"{title:45}" + "".join(f"{v:12.3f}" for v in row.values()) in stdout
    assert 0 <= content["hmc"]["acceptance"] <= 1
    assert len(content["hmc"]["effective_sample_size"]) == 5
    assert content["settings"]["hmc_samples"] == 40


def test_uci(tmp_path: Path):
    columns = ["MAP", "MFVI", "bnn", "glm", "glm diag", "refine", "refine diag"]
    options = ("--smoke-test", "--data", "digits", "--out", str(tmp_path))
    first = run("uci.py", *options)
    assert first.returncode == 0, first.stderr
    # what is there is not run again
    second = run("uci.py", *options, "--columns", *columns)
    assert second.stdout.startswith("digits, split 0: refine "), second.stderr
    assert (first.stderr, second.stderr) == ("", "")
    content = json.loads((tmp_path / "uci_digits.json").read_text())
    assert {"command", "seed", "versions", "machine", "settings"} <= content.keys()
    assert len(content["commands"]) == 2
    assert content["commands"][0].startswith("python examples/uci.py --smoke-test")
    assert list(content["published"]) == columns[:5]
    (split,) = content["splits"].values()
    for column in columns:
        row = split[column]
        assert row["precision"] in content["settings"]["prior precisions"]
        assert 0 < row["test"] < 2 * math.log(10)
        assert content["summary"][column]["test NLL"] == row["test"]
    # the table comes from the file alone
    table = run("uci.py", "--table", "--out", str(tmp_path)).stdout
    assert second.stdout.endswith(table)
    cells = table.splitlines()[-1].strip("| ").split(" | ")
    assert cells[:2] == ["digits", "1"]
    assert [cell.split()[0] for cell in cells[2:]] == [f"{split[c]['test']:.3f}" for c in columns]


def test_nets_side_by_side_are_those_nets(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _uci import SideBySide

    torch.manual_seed(0)
    nets = SideBySide(3, [4, 5, 6, 2]).double()
    x = torch.randn(7, 4, dtype=torch.double)
    alike = nets(x)
    torch.testing.assert_close(alike, alike[:, :1].expand_as(alike))  # one start for all
    for parameter in nets.parameters():
        torch.nn.init.normal_(parameter)
    outputs = nets(x)
    assert outputs.shape == (7, 3, 2)
    for index in range(3):
        torch.testing.assert_close(nets.member(index).double()(x), outputs[:, index])


def test_uci_splits_are_stratified_and_standardised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _uci import split

    torch.manual_seed(0)
    x = 3 + 2 * torch.randn(200, 4)
    x[:, 3] = 1.0  # a constant column stays finite
    y = (torch.arange(200) % 4 == 0).long()
    (train, labels), (validation, _), (test, _) = parts = split(x, y, seed=1)
    assert [len(part[0]) for part in parts] == [140, 30, 30]
    assert int(labels.sum()) == 35
    torch.testing.assert_close(train.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(train[:, :3].std(0), torch.ones(3))
    assert bool(torch.cat([validation, test]).isfinite().all())
    assert bool((split(x, y, seed=1)[2][0] == test).all())
    assert not bool((split(x, y, seed=2)[2][0] == test).all())


@pytest.mark.parametrize("data", ["cubic", "step", "banana"])
def test_laplace(data: str, tmp_path: Path):
    """The banana data are stood in for, so that the run does not depend on what the machine has."""
    rng = np.random.default_rng(0)
    labels = np.arange(600, dtype=np.int64) % 2
    centres = np.stack([labels, 1 - labels], 1)
    (tmp_path / "uci").mkdir()
    x = (centres + rng.normal(size=(600, 2))).astype(np.float32)
    np.savez(tmp_path / "uci" / "banana.npz", X=x, y=labels)
    stdout, content = smoke(
        "laplace.py", f"laplace_{data}", tmp_path, "--data", data, TYXE_DATA=str(tmp_path)
    )
    kinds = ["untuned, glm", "untuned, bnn", "tuned, bnn"]
    posteriors = ["Laplace, Hessian", "Laplace, GGN", "Laplace, GGN damped", "HMC"]
    rows = {
        "cubic": [f"{name}, {kind}" for name in ("kron", "diag", "full") for kind in kinds]
        + ["HMC, untuned, bnn"],
        "step": ["true posterior", *posteriors],
        "banana": None,
    }[data]
    table = content["table"]
    assert rows is None or list(table) == rows
    for name, row in table.items():
        assert all(math.isfinite(value) for value in row.values())
        columns = ", ".join(f"{column} {value:.3f}" for column, value in row.items())
        assert f"{name:28}{columns}" in stdout
    if data == "step":
        assert all(0 <= value <= 1 for row in table.values() for value in row.values())
        # The integral does not depend on how long anything was fitted.
        assert table["true posterior"]["p at x = 4"] == pytest.approx(0.992, abs=1e-3)
        assert table["true posterior"]["P(w1 < 0)"] < 1e-5
    if data == "banana":
        assert {name.split(",")[0] for name in table} == {"MAP", "bnn", "glm"}
        assert all(row["error %"] <= 100 for row in table.values())
        assert len(content["by prior precision"]) == 2
    assert content["settings"]["data"] == data


def test_variational_laplace(tmp_path: Path):
    stdout, content = smoke("variational_laplace.py", "variational_laplace", tmp_path)
    assert list(content["table"]) == [
        f"variational {kind}, beta {beta}"
        for beta in ("1", "0.1", "0.01")
        for kind in ("Laplace", "inference")
    ]
    for name, row in content["table"].items():
        assert all(math.isfinite(value) for value in row.values())
        assert f"{name:32}" + "".join(f"{value:14.3f}" for value in row.values()) in stdout
    table = run("variational_laplace.py", "--table", "--out", str(tmp_path)).stdout
    assert len(table.splitlines()) == 2 + 6 + 2


def test_online_laplace(tmp_path: Path):
    images_stood_in_for(tmp_path, ("mnist",))
    options = ("--smoke-test", "--out", str(tmp_path), "--methods")
    methods = ("kron", "kron sum", "diag", "EWC", "approximate")
    # The second call goes on with the runs of the first.
    for chosen in (methods[:2], methods):
        done = run("online_laplace.py", *options, *chosen, TYXE_DATA=str(tmp_path))
        assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "online_laplace_10.json").read_text())
    assert list(content["runs"]) == [f"{method}, lambda 1" for method in methods]
    for group in content["runs"].values():
        rows = group["0"]["accuracy"]
        assert [len(row) for row in rows] == list(range(1, 11))
        assert all(0 <= score <= 1 for row in rows for score in row)
    table = run("online_laplace.py", "--smoke-test", "--table", "--out", str(tmp_path)).stdout
    assert len(table.splitlines()) == 2 + len(methods)
    assert done.stdout.endswith(table)


def test_adversarial(tmp_path: Path):
    images_stood_in_for(tmp_path, ("mnist", "notmnist"))
    stdout, content = smoke("adversarial.py", "adversarial", tmp_path, TYXE_DATA=str(tmp_path))
    methods = ["deterministic", "MC dropout", "mean field", "mean field, sd 0.01"]
    methods += ["Laplace, diag", "Laplace, kron", "Laplace, kron, widest"]
    assert list(content["table"]) == list(content["curves"]) == methods
    settings, limit = content["settings"], math.log(10) + 1e-9
    for name in methods:
        row, curves = content["table"][name], content["curves"][name]
        cells = ", ".join(f"{column} {value:.3f}" for column, value in row.items())
        assert f"{name:22}{cells}" in stdout
        assert 0 <= row["accuracy %"] <= 100
        quantiles = curves["notMNIST entropy quantiles"]
        assert quantiles == sorted(quantiles)
        assert 0 <= quantiles[0] <= quantiles[-1] <= limit
        steps = {"untargeted": len(settings["step lengths"])}
        steps["targeted"] = settings["targeted steps"] + 1
        for attack, count in steps.items():
            accuracy, second, *images = curves[attack].values()
            assert len(accuracy) == len(second) == count
            assert all(0 <= value <= 100 for value in accuracy)
            assert all(0 <= value <= limit for value in second)
            assert all(0 < n <= settings["targeted images"] for n in images)
    assert content["published settings"].keys() <= settings.keys()
    for structure in ("diag", "kron"):
        tuned = content["chosen"][structure]
        assert len(tuned["all"]) == len(settings["N"]) * len(settings["tau"])
        scores = [row["cross-entropy"] for row in tuned["all"]]
        assert tuned["best"]["cross-entropy"] == min(scores)
        good = [row for row in tuned["all"] if row["cross-entropy"] < min(scores) + 5e-4]
        assert tuned["widest"]["entropy"] == max(row["entropy"] for row in good)
        assert tuned["as good"] == len(good)
    # the figure comes from the file alone
    (tmp_path / "adversarial.png").unlink()
    again = run("adversarial.py", "--figure", "--out", str(tmp_path))
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "adversarial.json").read_text()) == content
    assert (tmp_path / "adversarial.png").read_bytes().startswith(PNG)


def test_attacks_follow_their_formulas(monkeypatch: pytest.MonkeyPatch):
    """On a linear net, whose gradient is `W^T (onehot - p)`."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _adversarial import Binarised, averaged, in_parts, targeted, untargeted

    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3).double()
    x, span = torch.rand(7, 5).double(), torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0]).double()
    weight, probs = net.weight.detach(), net(x).detach().softmax(-1)
    torch.testing.assert_close(averaged(net, x, 4).exp(), net(x).softmax(-1))

    def towards(classes, probs):
        return span * ((torch.eye(3).double()[classes] - probs) @ weight).sign()

    etas = [0, 0.5, 3]
    expected = [net(x - eta * towards(probs.argmax(-1), probs)).log_softmax(-1) for eta in etas]
    moved = in_parts(untargeted, net, x, span, etas, 2)
    torch.testing.assert_close(moved, torch.stack(expected).detach())
    path = in_parts(targeted, net, x, span, 0.1, 2, 2)
    assert path.shape == (3, 7, 3)
    for log_probs in path:
        torch.testing.assert_close(log_probs, net(x).detach().log_softmax(-1))
        x = x + 0.1 * towards(torch.zeros(7, dtype=torch.long), log_probs.exp())
    # pixels are drawn anew in every pass
    intensities = torch.tensor([0.0, 0.3, 1.0]).expand(20_000, 3)
    loader = Binarised(intensities, torch.zeros(20_000), 8_000)
    assert len(loader) == 3
    first, second = (torch.cat([batch for batch, _ in loader]) for _ in range(2))
    assert bool(((first == 0) | (first == 1)).all())
    assert bool((first[:, ::2] == torch.tensor([0.0, 1.0])).all())
    assert not bool((first == second).all())
    # six standard errors of 20,000 draws of a variance of 0.21
    assert abs(first[:, 1].mean().item() - 0.3) < 6 * math.sqrt(0.21 / 20_000)


def test_image_laplace(tmp_path: Path):
    rows = ["MAP", "bnn", "bnn damped", "glm kron", "glm diag", "gp"]
    rows += ["glm kron tuned", "glm diag tuned"]
    options = ("--smoke-test", "--out", str(tmp_path))
    first = run("image_laplace.py", *options)
    assert (first.returncode, first.stderr) == (0, ""), first.stderr
    ran = [f"digits, {net}, seed 0: NLL MAP" for net in ("mlp", "cnn")]
    assert [line[: len(ran[0])] for line in first.stdout.splitlines()[:2]] == ran
    # what is there is not run again, and the tables come from the files alone
    table = run("image_laplace.py", "--table", "--out", str(tmp_path)).stdout
    assert run("image_laplace.py", *options).stdout == table
    assert first.stdout.endswith(table)
    for net in ("mlp", "cnn"):
        content = json.loads((tmp_path / f"image_laplace_digits_{net}.json").read_text())
        assert {"command", "seed", "versions", "machine", "settings"} <= content.keys()
        assert content["command"].startswith("python examples/image_laplace.py --smoke-test")
        settings, published = content["settings"], content["published settings"]
        assert settings.keys() == published.keys()
        assert published["epochs"] == 500
        (seed,) = content["seeds"].values()
        assert seed["prior precision"] in settings["prior precisions"]
        assert seed["gp factor"] in settings["gp factors"]
        factors = [p / seed["prior precision"] for p in seed["tuned precision"].values()]
        assert all(factor in settings["tuning factors"] for factor in factors)
        assert list(seed["rows"]) == list(content["summary"]) == rows
        for name, row in seed["rows"].items():
            assert all(math.isfinite(value) and value >= 0 for value in row.values())
            assert max(row["accuracy %"], row["ECE %"]) <= 100
            assert row["OOD AUROC"] <= 1
            assert content["summary"][name]["NLL"] == {"mean": row["NLL"], "standard error": None}
            cells = f"{row['accuracy %']:.2f} | {row['NLL']:.3f} | {row['ECE %']:.2f}"
            assert f"| {name} | {cells} | {row['OOD AUROC']:.3f} |" in table


def test_image_laplace_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _image_laplace import NETS, PUBLISHED, REDUCED, SMOKE, load, summary

    assert PUBLISHED.keys() == REDUCED.keys() == SMOKE.keys()
    precisions = PUBLISHED["prior precisions"]
    assert (len(precisions), precisions[0]) == (16, 0.01)
    assert precisions[-1] == pytest.approx(1_000)
    for kind, weights in {"mlp": 1_494_154, "cnn": 892_010}.items():
        net = NETS[kind](PUBLISHED["widths"][kind])
        assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
        assert sum(parameter.numel() for parameter in net.parameters()) == weights
    # training and validation images do not overlap, and depend on the seed
    parts = [load("digits", SMOKE, seed) for seed in (0, 0, 1)]
    train, validation, test, (unknown,) = parts[0]
    assert [len(part[0]) for part in (train, validation, test)] == [60, 40, 50]
    assert len(unknown) == 50
    assert train[0].shape[1:] == (1, 28, 28)
    assert not (train[0].flatten(1)[:, None] == validation[0].flatten(1)).all(-1).any()
    assert torch.equal(train[0], parts[1][0][0])
    assert not torch.equal(train[0], parts[2][0][0])
    assert torch.equal(test[0], parts[2][2][0])
    seeds = {str(i): {"rows": {"MAP": {"NLL": value}}} for i, value in enumerate((1.0, 3.0))}
    assert summary(seeds) == {"MAP": {"NLL": {"mean": 2.0, "standard error": 1.0}}}


def test_transformer(tmp_path: Path):
    names = ["head", "attention", "linear maps"]
    rows = ["ML", "MAP", *(f"{how}, {name}" for how in ("mean field", "Laplace") for name in names)]
    options = ("--smoke-test", "--out", str(tmp_path))
    first = run("transformer.py", *options)
    assert (first.returncode, first.stderr) == (0, ""), first.stderr
    content = json.loads((tmp_path / "transformer.json").read_text())
    assert {"command", "seed", "versions", "machine", "settings"} <= content.keys()
    (seed,) = content["seeds"].values()
    assert list(seed["rows"]) == list(seed["seconds"]) == list(content["summary"]) == rows
    grid = content["settings"]["prior precisions"]
    assert list(seed["prior precision"]) == rows[5:]
    assert all(precision in grid for precision in seed["prior precision"].values())
    # what is there is not run again, and the table comes from the file alone
    table = run("transformer.py", "--table", "--out", str(tmp_path)).stdout
    assert run("transformer.py", *options).stdout == table
    assert first.stdout.endswith(table)
    for name, row in seed["rows"].items():
        assert all(math.isfinite(value) and value >= 0 for value in row.values())
        assert max(row["AUROC turned"], row["AUROC rows shuffled"]) <= 1
        cells = f"{row['accuracy %']:.2f} | {row['NLL']:.3f} | {row['ECE %']:.2f}"
        assert f"| {name} | {cells} |" in table
    for wrong in (("--seeds", "0"), ("--table", "--out", str(tmp_path / "nothing"))):
        assert run("transformer.py", *wrong).returncode == 2


def test_ddp_makes_the_curves_of_one_process(tmp_path: Path):
    options = ("--smoke-test", "--out", str(tmp_path))
    smoke("ddp.py", "ddp", tmp_path)
    # standalone: on a free port, whoever else is on the machine
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, "examples/ddp.py", *options],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "ddp.json").read_text())
    one, two = content["runs"]["1 process"], content["runs"]["2 processes, same draws"]
    assert one["command"].startswith("python examples/ddp.py --smoke-test")
    assert two["command"].startswith("torchrun --nproc_per_node=2 examples/ddp.py --smoke-test")
    for name, curve in one["curves"].items():
        assert len(curve) == content["settings"]["epochs"]
        assert curve[-1] < curve[0]
        # float64, but for the order of sums
        assert two["curves"][name] == pytest.approx(curve, rel=1e-12)
        assert two["difference"][name] < 1e-12
        assert f"2 processes, same draws, {name}: loss {curve[0]:.1f}" in done.stdout


def test_ddp_refuses_a_batch_that_cannot_be_shared(tmp_path: Path):
    """As torchrun would start it, but for the second process."""
    done = run("ddp.py", "--batch", "63", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2
    assert "a batch of 63 cannot be shared out evenly among 2 processes" in done.stderr
    assert "choose a --batch that 2 divides" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--batch", "0", "a number from 1 to 1,536"),
        ("--batch", "2000", "a number from 1 to 1,536"),
        ("--epochs", "0", "a positive number"),
    ],
)
def test_ddp_refuses_sizes_without_a_step(option: str, value: str, expected: str):
    done = run("ddp.py", option, value)
    assert done.returncode == 2
    assert f"{option} is {value}; expected {expected}" in done.stderr


def test_vcl(tmp_path: Path):
    images_stood_in_for(tmp_path, ("mnist",))
    options = ("--smoke-test", "--out", str(tmp_path))
    methods = ["VCL", "ML", "VCL fast scales", "VCL random", "VCL k-center"]
    runs = [
        run("vcl.py", *options, "--methods", *some, TYXE_DATA=str(tmp_path))
        for some in (methods[:1], methods)
    ]
    assert [done.returncode for done in runs] == [0, 0], runs[-1].stderr
    assert "VCL, 2 epochs, seed 0, after 8/9" in runs[0].stdout
    # What is there is not run again.
    assert "VCL, 2 epochs, seed 0, after" not in runs[1].stdout
    content = json.loads((tmp_path / "split_mnist.json").read_text())
    assert {"versions", "machine", "settings"} <= content.keys()
    assert len(content["commands"]) == 2
    assert list(content["runs"]) == [f"{method}, 2 epochs" for method in methods]
    tasks = content["settings"]["tasks"]
    for group in content["runs"].values():
        (found,) = group.values()
        assert [len(row) for row in found["accuracy"]] == [1, 2, 3, 4, 5]
        assert all(0 <= value <= 1 for row in found["accuracy"] for value in row)
        assert list(found["moves"]) == list(found["head refitted"]) == tasks
        # Two steps a task, in which Adam moves each of the 8 x 784 weights by its rate at most.
        for row in found["moves"].values():
            assert row["updates"] == 2
            assert 0 < row["means moved"] < 2.01e-3 * (8 * 784) ** 0.5
    assert list(tmp_path.glob("*.pt")) == []
    table = run("vcl.py", "--table", "--smoke-test", "--out", str(tmp_path)).stdout
    assert runs[1].stdout.endswith(table)
    assert len(table.splitlines()) == (2 + 5) + 1 + (2 + 5 * 5)
    assert (tmp_path / "split_mnist.png").read_bytes().startswith(PNG)


def test_split_mnist_is_five_pairs_of_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    images_stood_in_for(tmp_path, ("mnist",))
    monkeypatch.setenv("TYXE_DATA", str(tmp_path))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _continual import Shuffled, split_mnist

    train, test = split_mnist()
    assert list(train) == list(test) == ["0/1", "2/3", "4/5", "6/7", "8/9"]
    assert sum(len(y) for _, y in train.values()) == 60_000
    x, y = test["2/3"]
    with np.load(tmp_path / "mnist.npz") as arrays:
        labels = arrays["y_test"]
        wanted = np.isin(labels, (2, 3))
        pixels = arrays["x_test"][wanted].reshape(-1, 784) / np.float32(255)
    assert torch.equal(x, torch.from_numpy(pixels))
    assert y.shape == (wanted.sum(), 1)
    assert y[:, 0].tolist() == (labels[wanted] == 3).tolist()
    assert [len(part[1]) for part in split_mnist(7)[0].values()] == [7] * 5
    # every point once an epoch, in another order, inputs with their targets
    batches = Shuffled(torch.arange(10.0), torch.arange(10), 4)
    for _ in range(2):
        inputs, targets = zip(*batches, strict=True)
        assert [len(part) for part in targets] == [4, 4, 2] == [len(part) for part in inputs]
        assert len(batches) == 3
        assert torch.equal(torch.cat(inputs).long(), torch.cat(targets))
        assert torch.cat(targets).sort().values.tolist() == list(range(10))
        assert torch.cat(targets).tolist() != list(range(10))


@pytest.mark.parametrize("data", ["disjoint", "permuted", "vision"])
def test_task_sequences(data: str, tmp_path: Path):
    images_stood_in_for(tmp_path, ("mnist", "fashion_mnist", "notmnist"))
    rng = np.random.default_rng(0)
    colours = {
        f"{kind}_{split}": values
        for split in ("train", "test")
        for kind, values in (
            ("x", rng.integers(0, 256, (80, 32, 32, 3), dtype=np.uint8)),
            ("y", np.arange(80, dtype=np.uint8) % 10),
        )
    }
    np.savez(tmp_path / "cifar10_subset.npz", **colours)
    stdout, content = smoke(
        "task_sequences.py", f"continual_{data}", tmp_path, "--data", data, TYXE_DATA=str(tmp_path)
    )
    methods = [*content["settings"]["strengths"]]
    assert [name.partition(",")[0] for name in content["runs"]] == methods
    assert {"SI", "ML"} < set(methods)
    for group in content["runs"].values():
        (found,) = group.values()
        count = {"disjoint": 2, "permuted": 2, "vision": 4}[data]
        assert [len(row) for row in found["accuracy"]] == list(range(1, count + 1))
        assert all(0 <= value <= 1 for row in found["accuracy"] for value in row)
    assert list(tmp_path.glob("*.pt")) == []
    options = ("--data", data, "--smoke-test", "--table", "--out", str(tmp_path))
    table = run("task_sequences.py", *options).stdout
    assert stdout.endswith(table)
    assert len(table.splitlines()) == 2 + len(methods)


def test_a_method_that_a_sequence_has_not_is_an_error_of_the_command():
    found = run("task_sequences.py", "--data", "disjoint", "--methods", "EWC", "ML")
    assert found.returncode == 2
    assert (
        "--data disjoint has no strengths for EWC: give --strengths, or --methods among kron"
        in (" ".join(found.stderr.split()))
    )


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
