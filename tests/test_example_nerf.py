"""examples/nerf.py: its phases, net and scores, one draw an image, and what is refused."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import pytest
import torch

import tyxe
from tests.oracles.cameras import DISTANCE, FOV, cameras, pixel_grid, views_from

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with views of a ball, the first that is looked at."""
    size, azimuths = 16, np.linspace(0, 360, 9)
    rotation, translation = cameras(azimuths)
    x, y = pixel_grid(size)
    inside = np.hypot(x, y) * math.tan(math.radians(FOV / 2)) < math.tan(math.asin(0.8 / DISTANCE))
    silhouettes = np.tile(255 * inside.astype(np.uint8), (9, 1, 1))
    arrays = {
        "images": (silhouettes[..., None] * np.array([0.8, 0.4, 0.2])).astype(np.uint8),
        "silhouettes": silhouettes,
        "R": rotation.float().numpy(),
        "T": translation.float().numpy(),
        "azimuth_deg": azimuths.astype(np.float32),
        "fov_deg": np.float32(FOV),
    }
    (tmp_path / "cow").mkdir()
    np.savez(tmp_path / "cow" / "cow_views_equator.npz", **arrays)
    monkeypatch.setenv("TYXE_DATA", str(tmp_path))
    return tmp_path


def run(*options: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "examples/nerf.py", *options]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


# --------------------------------------------------------------------------- the example


def test_smoke(folder: Path):
    options = ("--smoke-test", "--kl-factors", "1", "0.1", "--out", str(folder))
    first = run(*options)
    assert first.returncode == 0, first.stderr
    content = json.loads((folder / "nerf.json").read_text())
    assert {"command", "seed", "versions", "machine", "settings"} <= content.keys()
    assert content["command"].startswith("python examples/nerf.py --smoke-test")
    methods = ["deterministic", "deterministic, twice as long", "Bayesian", "Bayesian, KL x 0.1"]
    assert list(content["errors"]) == list(content["phases"]) == methods
    assert list(content["uncertainty"]) == methods[2:]
    for method, row in content["errors"].items():
        assert list(row) == ["train", "held out"]
        for part in row.values():
            assert all(math.isfinite(value) and value > 0 for value in part.values())
            assert part["colour + silhouette"] > part["colour"]
        cells = f"{row['held out']['colour']:.5f} | {row['held out']['colour + silhouette']:.5f}"
        assert f"| {method} | {cells} |" in first.stdout
    assert (folder / "nerf.md").read_text() in first.stdout
    # 6 of 8 views to train, 16 x 16 pixels of three colours and coverage
    assert content["weight of the KL"] == 1 / (4 * 6 * 16 * 16)
    assert content["phases"]["Bayesian"]["KL"] > 0
    for name, start in {
        "nerf.png": b"\x89PNG",
        "nerf_uncertainty.png": b"\x89PNG",
        "nerf.gif": b"GIF8",
    }.items():
        assert (folder / name).read_bytes().startswith(start)
    # As if the run had stopped in the last phase: the others are not run again.
    phases = torch.load(folder / "nerf.pt", weights_only=True)
    del phases["done"]["Bayesian"]
    torch.save(phases, folder / "nerf.pt")
    second = run(*options)
    assert second.returncode == 0, second.stderr
    assert "trained before" not in first.stdout
    lines = second.stdout.splitlines()
    assert lines[0].startswith("deterministic: trained before")
    assert lines[1].startswith("deterministic, twice as long: trained before")
    assert lines[2] == "Bayesian"
    assert "Bayesian, KL x 0.1: trained before" in second.stdout
    again = json.loads((folder / "nerf.json").read_text())
    assert again["errors"] == content["errors"]
    assert again["uncertainty"] == content["uncertainty"]


def test_phases_are_kept_by_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from _nerf import Phases

    def drawn(settings, seed):
        net = torch.nn.Linear(2, 1)

        def fit():
            torch.nn.init.normal_(net.weight)
            return {"curve": [[1, 0.5]]}

        net, record = Phases(tmp_path / "out" / "nerf.pt", settings).run("first", seed, net, fit)
        assert record["curve"] == [[1, 0.5]]
        assert record["CPU seconds"] >= 0
        return net.weight, capsys.readouterr().out

    weight, said = drawn({"steps": 1}, 3)
    assert said == "first\n"
    again, said = drawn({"steps": 1}, 4)
    assert said.startswith("first: trained before, taken from ")
    assert torch.equal(again, weight)
    other, said = drawn({"steps": 2}, 3)
    assert said == "first\n"
    assert torch.equal(other, weight)  # by the same seed


# --------------------------------------------------------------------------- net, loss, scores


def test_field_is_that_of_the_paper():
    from _nerf import Harmonics, RadianceField

    net = RadianceField(60, 256)
    # 360-256-256, 256-1, and 256 + 360 - 256 - 3
    counts = [360 * 256 + 256, 256 * 256 + 256, 257, (256 + 360) * 256 + 256, 256 * 3 + 3]
    assert sum(p.numel() for p in net.parameters()) == sum(counts)
    points = torch.rand(5, 7, 3)
    opacity, colour = net(points, torch.nn.functional.normalize(torch.rand(5, 3), dim=-1))
    assert opacity.shape == (5, 7)
    assert colour.shape == (5, 7, 3)
    assert bool(((opacity >= 0) & (opacity < 0.01)).all())
    found = Harmonics(3)(torch.tensor([[1.0, 2.0, 3.0]]))
    angles = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.4, 0.8, 0.3, 0.6, 1.2])
    torch.testing.assert_close(found, torch.cat([angles.sin(), angles.cos()])[None])


def test_errors_follow_their_formulas():
    from _nerf import errors, huber, image_loss, uncertainty

    d = torch.tensor([0.0, 0.1, -0.3])
    expected = sum(0.1 * (math.sqrt(1 + x**2 / 0.01) - 1) for x in (0.0, 0.1, 0.3)) / 3
    assert huber(d, torch.zeros(3)).item() == pytest.approx(expected)
    views = views_from([0.0, 90.0], size=4)
    views = replace(views, pixels=torch.rand(2, 4, 4, 4).double())
    images = views.pixels.clone()
    images[:, :3] += 0.1
    images[:, 3] -= 0.3
    found = errors(images, views)
    parts = [0.1 * (math.sqrt(1 + x**2 / 0.01) - 1) for x in (0.1, 0.3)]
    assert found["colour"] == pytest.approx(parts[0])
    assert found["colour + silhouette"] == pytest.approx(sum(parts))
    assert found["PSNR"] == pytest.approx(20)  # 10 log10(1 / 0.1^2)
    flat, target = (x.movedim(1, -1) for x in (images, views.pixels))
    assert image_loss(flat, target).item() == pytest.approx(sum(parts))
    draws = torch.rand(8, 2, 4, 5, 5)
    expected = sum(draws[:, :, k].var(0) for k in range(3)).sqrt()
    torch.testing.assert_close(uncertainty(draws), expected)


def test_reliability_of_errors_as_large_as_their_sd():
    from _nerf import reliability

    torch.manual_seed(0)
    size, bins = 200, 5
    sd = 0.01 + 0.2 * torch.rand(1, size, size)
    views = views_from([0.0], size=size)
    pixels = torch.ones(1, 4, size, size)
    pixels[:, 3, :, : size // 4] = 0.0  # beside the object, errors that must not count
    views = replace(views, pixels=pixels)
    noise = (sd / 3**0.5)[:, None] * torch.randn(1, 3, size, size)
    images = pixels.clone()
    images[:, :3] += noise
    images[..., : size // 4] = 9.0
    found = reliability(sd, images, views, bins)
    assert found["rank correlation"] > 0.7
    count = size * size * 3 // 4 // bins
    for expected, error in found["bins"]:
        # Six standard errors. A square of three channels' errors has a relative sd of at most 1.2,
        # (5 / 3 E[sd^4] / E[sd^2]^2 - 1)^0.5, which is that of the lowest bin; its root has half.
        assert error == pytest.approx(expected, rel=6 * 0.6 / count**0.5)
    on_object = sd[..., size // 4 :]
    assert found["sd on the object"] == pytest.approx(on_object.mean().item(), rel=1e-5)
    assert found["sd"] == pytest.approx(sd.mean().item(), rel=1e-5)


def test_one_draw_renders_all_pieces():
    from _nerf import RadianceField
    from _render import TorchRenderer

    torch.manual_seed(0)
    views = views_from([0.0, 120.0], size=6)
    guide = tyxe.guides.AutoNormal
    bnn = tyxe.PytorchBNN(
        RadianceField(4, 8).double(), tyxe.priors.IIDPrior(dist.Normal(0, 1)), guide
    )
    whole, pieces = (TorchRenderer(6, 10, 1.65, 3.75, chunk) for chunk in (10_000, 70))
    with torch.no_grad():
        with bnn.hold_sample():
            expected = whole.images(views, bnn)
            torch.testing.assert_close(pieces.images(views, bnn), expected)
        with bnn.hold_sample():
            assert not torch.allclose(pieces.images(views, bnn), expected)
    # and in training, where the loss of all pieces has the gradient of one draw
    for chunk in (10_000, 70):
        torch.manual_seed(1)
        with bnn.hold_sample():
            images = TorchRenderer(6, 10, 1.65, 3.75, chunk).images(views, bnn)
        (images.square().sum() + bnn.cached_kl_loss).backward()
        gradients = [p.grad.clone() for p in bnn.net_guide.parameters()]
        bnn.zero_grad()
        if chunk == 10_000:
            of_whole = gradients
    for found, expected in zip(gradients, of_whole, strict=True):
        torch.testing.assert_close(found, expected)


# --------------------------------------------------------------------------- bad input


def test_no_data(folder: Path):
    done = run("--data", "nowhere.npz", "--out", str(folder))
    assert done.returncode == 1
    assert done.stderr.startswith("no nowhere.npz in ")
    assert str(folder) in done.stderr
    assert all(word in done.stderr for word in ("TYXE_DATA", "--data", "docs/nerf.md"))
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda arrays: arrays.pop("R"), "fov_deg () float32; expected"),
        (lambda a: a.update(R=a["R"][:, :, :2]), "R (9, 3, 2) float32"),
        (lambda a: a.update(T=a["T"][:3]), "T (3, 3) float32"),
        (lambda a: a.update(images=a["images"] / 255), "images (9, 16, 16, 3) float64"),
        (lambda a: a.update(images=a["images"][:, :12]), "images (9, 12, 16, 3) uint8"),
        (lambda a: a.update(images=np.uint8(3)), "images () uint8"),
        (lambda a: a.clear(), "holds no arrays; expected"),
    ],
)
def test_views_of_another_layout(folder: Path, change, found: str):
    from _views import load

    path = folder / "cow" / "cow_views_equator.npz"
    with np.load(path) as archive:
        arrays = dict(archive)
    change(arrays)
    other = folder / "other.npz"
    np.savez(other, **arrays)
    with pytest.raises(ValueError, match=r"expected images \(V, S, S, 3\), silhouettes") as error:
        load("other.npz")
    assert str(error.value).startswith(str(other))
    assert found in str(error.value)
    assert "R (V, 3, 3), T (V, 3), azimuth_deg (V), fov_deg ()" in str(error.value)


def test_files_that_hold_no_plain_arrays(folder: Path):
    from _views import load

    (folder / "text.npz").write_text("poses")
    np.save(folder / "one.npy", np.zeros(3))
    np.savez(folder / "objects.npz", images=np.array([{}, None]))
    for name, found in (
        ("text.npz", "is no archive of numpy"),
        ("one.npy", "is no archive of numpy"),
        ("objects.npz", "Object arrays cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=rf"{found}.*expected images \(V, S, S, 3\)") as error:
            load(name)
        assert str(error.value).startswith(str(folder / name))


def test_layout_error_is_one_line(folder: Path):
    np.savez(folder / "other.npz", poses=np.zeros((3, 4, 4)))
    done = run("--data", str(folder / "other.npz"), "--out", str(folder))
    assert done.returncode == 1
    assert "holds poses (3, 4, 4) float64; expected images" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_too_few_views(folder: Path):
    with np.load(folder / "cow" / "cow_views_equator.npz") as archive:
        few = {key: array[:4] if array.ndim else array for key, array in archive.items()}
    np.savez(folder / "few.npz", **few)
    done = run("--data", str(folder / "few.npz"), "--out", str(folder))
    assert done.returncode == 1
    assert "few.npz has 4 views; expected at least 5" in done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch3d") is not None, reason="PyTorch3D is installed"
)
def test_missing_pytorch3d(folder: Path):
    done = run("--renderer", "pytorch3d", "--out", str(folder))
    assert done.returncode == 1
    assert done.stderr.startswith("--renderer pytorch3d needs pytorch3d")
    assert "pip install" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_kl_factor_below_zero():
    done = run("--kl-factors", "1", "-0.5")
    assert done.returncode == 2
    assert "--kl-factors has -0.5; expected positive numbers" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu(folder: Path):
    done = run("--device", "cuda", "--out", str(folder))
    assert done.returncode == 2
    assert "--device cuda, but torch finds no GPU" in done.stderr
