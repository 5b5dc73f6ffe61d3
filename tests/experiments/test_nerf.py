"""experiments/nerf.py: its nets and scores, one draw an image, and what is refused."""

import math
from dataclasses import replace
from pathlib import Path

import nerf
import nerf_scores
import numpy as np
import pytest
import torch

from tests.oracles.cameras import DISTANCE, FOV, cameras, pixel_grid, views_from


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with views of a ball, the first that is looked at."""
    (tmp_path / "cow").mkdir()
    for name, azimuths, elevation in (
        ("cow_views_equator", np.linspace(0, 360, 9), 0.0),
        ("cow_views", np.linspace(0, 360, 5), 60.0),
    ):
        write_ball(tmp_path / "cow" / f"{name}.npz", azimuths, elevation)
    monkeypatch.setenv("TYXE_DATA", str(tmp_path))
    return tmp_path


def write_ball(path: Path, azimuths: np.ndarray, elevation: float = 0.0, size: int = 16) -> None:
    rotation, translation = cameras(azimuths, elevation)
    x, y = pixel_grid(size)
    inside = np.hypot(x, y) * math.tan(math.radians(FOV / 2)) < math.tan(math.asin(0.8 / DISTANCE))
    silhouettes = np.tile(255 * inside.astype(np.uint8), (len(azimuths), 1, 1))
    arrays = {
        "images": (silhouettes[..., None] * np.array([0.8, 0.4, 0.2])).astype(np.uint8),
        "silhouettes": silhouettes,
        "R": rotation.float().numpy(),
        "T": translation.float().numpy(),
        "azimuth_deg": azimuths.astype(np.float32),
        "fov_deg": np.float32(FOV),
    }
    np.savez(path, **arrays)


# --------------------------------------------------------------------------- the experiment


DRAWN = ["Bayesian", "Bayesian, KL x 0.1", "ensemble of 3"]
NETS = [*nerf.METHODS[:2]]


def test_smoke(folder: Path, smoke):
    found = smoke(nerf.experiment, "--kl-factors", "1", "0.1")
    assert [key[0] for key in found.cells] == [*NETS, *DRAWN[:2], "member 2", "member 3", DRAWN[2]]
    for (method, _), cell in found.cells.items():
        assert ("uncertainty" in cell) == (method in DRAWN)
        assert ("KL" in cell) == method.startswith("Bayesian")
        row = cell["errors"]
        assert list(row) == ["train", "held out", "over and under"]
        assert all(part["colour + silhouette"] > part["colour"] > 0 for part in row.values())
        assert f"| {method} | {row['held out']['colour']:.5f} |" in found.page
        # 8 views around, 6 of them to train, and every third of 4 others
        counts = {part: len(seen["error"]) for part, seen in cell["views"].items()}
        assert counts == {"train": 6, "held out": 2, "over and under": 2}
        # ... with 16 x 16 pixels of three colours and coverage
        assert cell.get("weight of the KL", 1 / (4 * 6 * 16 * 16)) == 1 / (4 * 6 * 16 * 16)
    assert found.cells["Bayesian", "0"]["KL"] > 0
    out = found.record.path.parent
    for ending in ("view", "uncertainty", "around", "over", "over_images", "sparsification"):
        assert (out / f"nerf_quarter_{ending}.png").exists()
    page = (out / "nerf_quarter_uncertainty.md").read_text()
    assert [line.split(" | ")[0][2:] for line in page.splitlines()[2:]] == DRAWN
    # The ensemble is the mean of its members.
    files = ["deterministic", "member 2", "member 3", "ensemble of 3"]
    saved = [torch.load(nerf.file_of(found.record, name, "0"))["images"] for name in files]
    members = torch.stack(saved[:3])
    assert not torch.equal(members[0], members[1])
    torch.testing.assert_close(saved[3], members.mean(0))
    seen = found.cells["ensemble of 3", "0"]["views"]["train"]
    own = members[:, 0, 3].std(0).square().mean().sqrt().item()
    assert seen["silhouette sd"][0] == pytest.approx(own, abs=1e-5)


# --------------------------------------------------------------------------- net, loss, scores


def test_field_is_that_of_the_paper():
    net = nerf.RadianceField(60, 256)
    points = torch.rand(5, 7, 3)
    opacity, colour = net(points, torch.nn.functional.normalize(torch.rand(5, 3), dim=-1))
    assert opacity.shape == (5, 7)
    assert colour.shape == (5, 7, 3)
    assert bool(((opacity >= 0) & (opacity < 0.01)).all())
    found = nerf.embedded(torch.tensor([[1.0, 2.0, 3.0]]), 3)
    angles = torch.tensor([0.1, 0.2, 0.4, 0.2, 0.4, 0.8, 0.3, 0.6, 1.2])
    torch.testing.assert_close(found, torch.cat([angles.sin(), angles.cos()])[None])


def test_errors_follow_their_formulas():
    d = torch.tensor([0.0, 0.1, -0.3])
    expected = sum(0.1 * (math.sqrt(1 + x**2 / 0.01) - 1) for x in (0.0, 0.1, 0.3)) / 3
    assert nerf_scores.huber(d, torch.zeros(3)).item() == pytest.approx(expected)
    views = views_from([0.0, 90.0], size=4)
    views = replace(views, pixels=torch.rand(2, 4, 4, 4).double())
    images = views.pixels.clone()
    images[:, :3] += 0.1
    images[:, 3] -= 0.3
    found = nerf_scores.errors(images, views)
    parts = [0.1 * (math.sqrt(1 + x**2 / 0.01) - 1) for x in (0.1, 0.3)]
    assert found["colour"] == pytest.approx(parts[0])
    assert found["colour + silhouette"] == pytest.approx(sum(parts))
    assert found["PSNR"] == pytest.approx(20)  # 10 log10(1 / 0.1^2)
    flat, target = (x.movedim(1, -1) for x in (images, views.pixels))
    assert nerf_scores.image_loss(flat, target).item() == pytest.approx(sum(parts))
    draws = torch.rand(8, 2, 4, 5, 5)
    expected = sum(draws[:, :, k].var(0) for k in range(3)).sqrt()
    torch.testing.assert_close(nerf_scores.uncertainty(draws), expected)


def test_reliability_of_errors_as_large_as_their_sd():
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
    found = nerf_scores.reliability(sd, images, views, bins)
    assert found["rank correlation"] > 0.7
    count = size * size * 3 // 4 // bins
    for expected, error in found["bins"]:
        # Six standard errors. A square of three channels' errors has a relative sd of at most 1.2,
        # (5 / 3 E[sd^4] / E[sd^2]^2 - 1)^0.5, which is that of the lowest bin; its root has half.
        assert error == pytest.approx(expected, rel=6 * 0.6 / count**0.5)
    on_object = sd[..., size // 4 :]
    assert found["sd on the object"] == pytest.approx(on_object.mean().item(), rel=1e-5)
    assert found["sd"] == pytest.approx(sd.mean().item(), rel=1e-5)


def test_sparsification_of_the_best_and_of_a_random_order():
    torch.manual_seed(0)
    error = torch.rand(40_000)
    best = nerf_scores.sparsification(2 * error, error)
    assert best["by sd"] == best["by error"]
    assert best["gain"] == pytest.approx(1)
    # of errors that are uniform in [0, 1], those below 1 - d are left: (1 - d) / sqrt(3)
    for share, left in zip(best["dropped"], best["by sd"], strict=True):
        assert left == pytest.approx((1 - share) / 3**0.5, abs=0.01)
    random = nerf_scores.sparsification(torch.rand(40_000), error)
    assert random["gain"] == pytest.approx(0, abs=0.02)
    worst = nerf_scores.sparsification(-error, error)
    assert worst["by sd"][-1] == pytest.approx(1, abs=0.05)


def test_scores_by_view_are_those_of_one_view():
    torch.manual_seed(0)
    views = views_from([10.0, 80.0], elevation=35.0, size=6)
    pixels = torch.rand(2, 4, 6, 6).double()
    pixels[:, 3] = 1.0
    pixels[0, 3, :3] = 0.2  # beside the object
    views, draws = replace(views, pixels=pixels), torch.rand(5, 2, 4, 6, 6).double()
    found = nerf_scores.by_view(draws.mean(0), views, draws)
    assert found["azimuth"] == [10.0, 80.0]
    assert found["height"] == pytest.approx([35.0, 35.0])
    sd, error = nerf_scores.uncertainty(draws), nerf_scores.colour_error(draws.mean(0), views)
    for name, own in (("sd", sd), ("error", error)):
        expected = [nerf_scores.rms(own[0, 3:]), nerf_scores.rms(own[1])]
        assert found[name] == pytest.approx(expected, abs=1e-5)
    off = draws.mean(0)[:, 3] - pixels[:, 3]
    expected = off.square().mean((1, 2)).sqrt().tolist()
    assert found["silhouette error"] == pytest.approx(expected, abs=1e-5)
    expected = draws[:, :, 3].var(0).mean((1, 2)).sqrt().tolist()
    assert found["silhouette sd"] == pytest.approx(expected, abs=1e-5)


# --------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--data nowhere.npz", "no nowhere.npz in .*TYXE_DATA.*--data.*docs/nerf.md"),
        ("--data few.npz", "few.npz has 4 views; expected at least 5"),
        ("--over large.npz", "large.npz has cameras or images of another size .*--over none$"),
    ],
)
def test_one_line_says_what_the_data_lack(options: str, message: str, folder: Path):
    write_ball(folder / "few.npz", np.linspace(0, 180, 4))
    write_ball(folder / "large.npz", np.linspace(0, 360, 5), 60.0, size=20)
    with pytest.raises(SystemExit, match=message) as left:
        nerf.experiment.main(["--smoke-test", *options.split(), "--out", str(folder / "out")])
    assert len(left.value.code.splitlines()) == 1
