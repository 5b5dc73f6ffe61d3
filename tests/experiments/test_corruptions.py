"""experiments/corruptions.py: scores by way and level, and what the corruptions are."""

import statistics

import corruptions
import pytest
import torch
import torch.nn.functional as F

from tests.experiments.conftest import cells_of


def test_corruptions(smoke):
    found = smoke(corruptions.experiment)
    rows = {name: row for cell in found.cells.values() for name, row in cell["rows"].items()}
    assert list(rows) == [*corruptions.PAPER]
    for row in rows.values():
        assert list(row["corrupted"]) == list(corruptions.CORRUPTIONS)
        for scores in row["corrupted"].values():
            assert [len(values) for values in scores.values()] == [5, 5, 5]
    accuracy, nll, ece, *by_way = map(cells_of, found.page.split("\n\n"))
    row = rows["FFG-U"]
    third = [scores["NLL"][2] for scores in row["corrupted"].values()]
    assert nll["FFG-U"][0] == f"{row['NLL']:.2f}"
    assert nll["FFG-U"][3] == f"{statistics.fmean(third):.2f}"
    assert accuracy["FFG-U"][5].endswith(" (57)")
    assert ece["ensemble"][1].endswith(" (4)")
    noise = row["corrupted"]["noise"]["accuracy %"]
    assert by_way[0]["FFG-U"][0] == f"{statistics.fmean(noise):.1f}"


@pytest.mark.parametrize("way", corruptions.CORRUPTIONS)
def test_levels_get_stronger(way: str):
    """Each is further from the image than the one before, and the same at every call."""
    corrupt, strengths = corruptions.CORRUPTIONS[way]
    x = F.interpolate(torch.rand(20, 1, 7, 7), (28, 28), mode="bilinear")
    x, distances = 0.9 * x + 0.1 * torch.rand_like(x), [0.0]
    for strength in strengths:
        found = corrupt(x, strength)
        assert found.shape == x.shape
        assert torch.equal(found, corrupt(x, strength))
        assert 0 <= found.min() <= found.max() <= 1
        distances.append((found - x).square().mean().item())
    assert distances == sorted(distances)
    assert len(set(distances)) == 6


def test_cosines_of_blocks():
    x = torch.rand(2, 3, 20, 28)
    # the basis is orthogonal: without rounding the image comes back
    torch.testing.assert_close(corruptions.rounded_cosines(x, 1e-6), x, atol=1e-5, rtol=0)
    # a constant block has one coefficient, 8 times its value: a multiple of its step stays
    flat = torch.full((1, 1, 8, 8), 0.5)
    torch.testing.assert_close(corruptions.rounded_cosines(flat, 0.4), flat)
    nearest = corruptions.rounded_cosines(flat, 3.0)
    torch.testing.assert_close(nearest, torch.full_like(flat, 3 / 8))


def test_pixels_are_means():
    x = torch.rand(2, 1, 8, 8)
    found = corruptions.pixelated(x, 0.5)
    torch.testing.assert_close(found[0, 0, :2, :2], x[0, 0, :2, :2].mean().expand(2, 2))
