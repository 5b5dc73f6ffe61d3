"""examples/resnet.py: all inferences run, stopped runs go on, and bad input is named."""

import json
import math
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PNG = b"\x89PNG\r\n\x1a\n"
NAMES = ["ml", "map", "mean-field", "mean-field-sd-only", "last-layer-mean-field"]
NAMES += ["last-layer-low-rank", "last-layer-laplace", "laplace-kron"]
NAMES += ["variational-laplace", "inducing"]
pytest.importorskip("torchvision", reason="the nets are torchvision's, extra `vision`")


def run(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "examples/resnet.py", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a smoke test of everything."""
    folder = tmp_path_factory.mktemp("resnet")
    done = run("--smoke-test", "--out", str(folder))
    assert (done.returncode, done.stderr) == (0, "")
    (folder / "stdout").write_text(done.stdout)
    return folder


def cells(folder: Path) -> dict:
    return json.loads((folder / "resnet_smoke.json").read_text())["cells"]


def without_seconds(cell: dict) -> dict:
    return {key: value for key, value in cell.items() if not key.endswith(" s")}


def test_all_inferences(smoke: Path):
    content = json.loads((smoke / "resnet_smoke.json").read_text())
    assert {"command", "seed", "versions", "machine", "settings"} <= content.keys()
    assert content["command"].startswith("python examples/resnet.py --smoke-test")
    assert list(content["cells"]) == NAMES
    drawn = [f"{name}, weights drawn" for name in NAMES[2:4]]
    assert list(content["summary"]) == [*NAMES[:3], drawn[0], NAMES[3], drawn[1], *NAMES[4:]]
    assert content["published settings"]["epochs"] == 300
    for name, seeds in content["cells"].items():
        assert list(seeds) == ["0"]
        cell = seeds["0"]
        assert all(0 <= cell[key] < math.inf for key in ("NLL", "train s", "predict s"))
        assert max(cell["accuracy %"], cell["ECE %"]) <= 100
        assert cell["OOD AUROC"] <= 1
        curves = cell["curves"]
        assert sum(curves["counts"]) == 30
        for which in ("test", "OOD"):
            quantiles = curves[f"{which} entropy quantiles"]
            assert quantiles == sorted(quantiles)
            assert 0 <= quantiles[0] <= quantiles[-1] <= math.log(10) + 1e-4
        if "laplace" in name and name != "variational-laplace":
            assert cell["prior precision"] > 0
        else:
            starts_at_random = name in ("ml", "map", "inducing")
            assert len(cell["losses"]) == (3 if starts_at_random else 2)


def test_nothing_is_run_again_and_reports_come_from_the_json(smoke: Path):
    before, printed = cells(smoke), (smoke / "stdout").read_text()
    (smoke / "resnet_smoke.png").unlink()
    again = run("--smoke-test", "--out", str(smoke))
    assert (again.returncode, again.stderr) == (0, "")
    assert again.stdout.startswith("Width 2, 3 epochs, all training images;")
    assert printed.endswith(again.stdout)
    assert (smoke / "resnet_smoke.png").read_bytes().startswith(PNG)
    assert cells(smoke) == before
    row = before["mean-field"]["0"]
    ours = f"| {row['NLL']:.3f} (0.20) | {row['accuracy %']:.2f} (93.28) "
    assert f"| mean-field | 1 {ours}| {row['ECE %']:.2f} (0.97) |" in again.stdout


def test_a_stopped_run_goes_on_as_if_it_had_not_been(smoke: Path, tmp_path: Path):
    options = ("--smoke-test", "--inference", "mean-field", "inducing", "--out", str(tmp_path))
    stops = [
        ("2", "resnet_smoke_ml_0: stopped after 2 of 3 epochs"),  # where the rate is cut
        ("1", "resnet_smoke_mean-field_0: stopped after 1 of 2 epochs"),
    ]
    for count, message in stops:
        done = run(*options, "--stop-after", count)
        assert (done.returncode, done.stderr.strip()) == (1, message)
    done = run(*options)
    assert done.returncode == 0, done.stderr
    resumed, whole = cells(tmp_path), cells(smoke)
    assert [name for name, seeds in resumed.items() if seeds] == ["mean-field", "inducing"]
    for name in ("mean-field", "inducing"):
        assert without_seconds(resumed[name]["0"]) == without_seconds(whole[name]["0"])


def test_low_precision_and_channels_last_change_little(smoke: Path, tmp_path: Path):
    """On a processor, where bfloat16 has eight bits as on a GPU."""
    names = ("mean-field", "variational-laplace", "inducing")
    done = run("--smoke-test", "--amp", "on", "--inference", *names, "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    for name in names:
        (low,), (full,) = cells(tmp_path)[name].values(), cells(smoke)[name].values()
        assert low["losses"] != full["losses"]
        # Twenty layers that round to eight bits, independently: 20 ** 0.5 * 2 ** -8.
        assert low["losses"] == pytest.approx(full["losses"], rel=0.0175)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("width", 0, "--width is 0; expected a positive number"),
        ("subset", -1, "--subset is -1; expected"),
        ("stop_after", 0, "--stop-after is 0"),
        ("device", "cuda:99", "--device cuda:99"),
    ],
)
def test_bad_options_are_named(option: str, value: object, message: str, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _resnet import CPU, chosen

    options = ("width", "epochs", "subset", "stem", "stop_after", "amp", "smoke_test")
    good = {"cpu": True, "seeds": 1, "device": "cpu", **dict.fromkeys(options)}
    args, parser = Namespace(**good), ArgumentParser()
    assert chosen(args, parser) == ("resnet_cpu", CPU)
    assert args.amp == "off"
    with pytest.raises(SystemExit):
        chosen(Namespace(**(good | {option: value})), parser)
    assert message in capsys.readouterr().err


def test_a_table_of_no_results_names_the_missing_file(tmp_path: Path):
    done = run("--table", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "resnet.json; run without --table" in done.stderr.splitlines()[-1]


def test_a_checkpoint_of_other_settings_is_refused(smoke: Path, tmp_path: Path):
    others = ("--checkpoints", str(smoke / "checkpoints"), "--width", "3", "--inference", "map")
    done = run("--smoke-test", *others, "--out", str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "resnet_smoke_map_0.pt is of other settings" in line
    assert "--checkpoints" in line


def test_missing_torchvision_names_the_extra(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _resnet import make_net

    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    with pytest.raises(SystemExit, match=r'pip install -e "\.\[vision\]"'):
        make_net(2, "cifar")


def stand_in(folder: Path, train: int = 30, unknown: int = 20) -> None:
    """Write local image sets."""
    rng = np.random.default_rng(0)
    for name, count in (("cifar10_subset", train), ("svhn_subset", unknown)):
        arrays = {}
        for split in ("train", "test"):
            arrays[f"x_{split}"] = rng.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
            arrays[f"y_{split}"] = np.arange(count, dtype=np.uint8) % 10
        np.savez(folder / f"{name}.npz", **arrays)


def test_images_are_normalised_each_set_by_its_own(tmp_path: Path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _resnet import PUBLISHED, load

    stand_in(tmp_path)
    monkeypatch.setenv("TYXE_DATA", str(tmp_path))
    (x, y), (x_test, y_test), unknown = load(PUBLISHED | {"training images": 25}, "cpu")
    assert x.shape == (25, 3, 32, 32)
    assert (len(x_test), len(unknown)) == (30, 40)  # of a small SVHN both parts
    assert (y[:12] == torch.arange(12) % 10).all()
    assert (y_test == torch.arange(30) % 10).all()
    for images in (x, unknown):
        zeros, ones = torch.zeros(3), torch.ones(3)
        torch.testing.assert_close(images.mean((0, 2, 3)), zeros, atol=1e-5, rtol=0)
        torch.testing.assert_close(images.std((0, 2, 3)), ones)
    with pytest.raises(ValueError, match="is 31, but there are 30 training images"):
        load(PUBLISHED | {"training images": 31}, "cpu")


def test_missing_images_say_where_they_were_looked_for(tmp_path: Path, monkeypatch):
    import torchvision

    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import _data

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", refuse)
    monkeypatch.setattr(_data, "ROOT", tmp_path / "checkout")
    monkeypatch.setenv("TYXE_DATA", str(tmp_path / "given"))
    with pytest.raises(FileNotFoundError, match="could not download CIFAR10: no network") as error:
        _data.colour("cifar10_subset", "CIFAR10", "train")
    assert all(str(folder) in str(error.value) for folder in _data.folders())


@pytest.mark.parametrize("width", [4, 64])
def test_nets_are_torchvisions(width: int, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _resnet import make_net
    from torchvision.models import resnet18

    own = resnet18(num_classes=10)
    for stem, positions in (("cifar", 32), ("strided", 16), ("imagenet", 8)):
        net = make_net(width, stem).eval()
        assert type(net) is type(own)
        assert list(net.state_dict()) == list(own.state_dict())
        seen = []
        net.layer1.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0]))
        assert net(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert seen[0].shape == (2, width, positions, positions)
    assert (
        make_net(width, "cifar", channels_last=True)
        .layer1[0]
        .conv1.weight.is_contiguous(memory_format=torch.channels_last)
    )
    if width == 64:  # the last one is torchvision's own throughout
        shapes = [p.shape for p in net.parameters()]
        assert shapes == [p.shape for p in own.parameters()]


def test_summary_is_over_seeds(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _resnet_report import COLUMNS, summary

    row = {**dict.fromkeys(COLUMNS, 1.0), "train s": 3.0}
    seeds = {str(i): {**row, "NLL": value} for i, value in enumerate((1.0, 2.0, 6.0))}
    seeds["1"]["weights drawn"] = row
    found = summary({"ml": {}, "mean-field": seeds})
    assert list(found) == ["mean-field", "mean-field, weights drawn"]
    assert [row["seeds"] for row in found.values()] == [3, 1]
    # the variance of 1, 2, 6 is 7
    error = pytest.approx(math.sqrt(7 / 3))
    assert found["mean-field"]["NLL"] == {"mean": 3.0, "standard error": error}
    assert found["mean-field, weights drawn"]["NLL"] == {"mean": 1.0, "standard error": None}
    assert "predict s" not in found["mean-field"]


def test_schedules_are_two_to_one(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from _resnet import CPU, PUBLISHED, own

    for name, epochs in (("ml", 300), ("map", 300), ("inducing", 300), ("mean-field", 200)):
        found = own(PUBLISHED, name)
        assert (found["epochs"], found["cut"]) == (epochs, 200)
    assert own(PUBLISHED, "variational-laplace")["beta"] == 0.1
    assert "rank" not in own(CPU, "ml")
    assert own(PUBLISHED, "mean-field")["max scale"] == 0.1
    found = own(PUBLISHED, "inducing")
    assert (found["epochs without KL"], found["epochs of growing KL"]) == (100, 50)
