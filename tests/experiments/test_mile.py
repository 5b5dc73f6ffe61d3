"""experiments/mile.py, mile_beside_bde.py and mile_digits.py: splits, and the rows."""

import math

import mile
import mile_beside_bde
import mile_digits
import numpy as np
import pytest
import torch


@pytest.fixture
def airfoil(tmp_path, monkeypatch):
    """Let a small set stand in for the real one."""
    rng = np.random.default_rng(0)
    x = 3 + 2 * rng.normal(size=(100, 4)).astype(np.float32)
    x[:, 3] = 1.0  # a constant column stays finite
    (tmp_path / "regression").mkdir()
    np.savez(tmp_path / "regression" / "airfoil.npz", X=x, y=100 * x.sum(1, keepdims=True))
    monkeypatch.setenv("TYXE_DATA", str(tmp_path))


# Runs of seconds are too short for what they adapt.
@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_mile(smoke, airfoil):
    found = smoke(mile.experiment, "--data", "airfoil")
    # What takes longest is run last.
    assert list(found.cells) == [("airfoil", method, "1") for method in mile.METHODS]
    for cell in found.cells.values():
        assert math.isfinite(cell["LPPD"])
        assert cell["RMSE"] > 0
        assert cell["seconds"] > 0
    draws = [cell["draws"] for cell in found.cells.values()]
    assert draws == [1, 2, 2 * 4, 4, 4, 2 * 4]
    lines = found.page.splitlines()[2:]
    for line, (key, cell) in zip(lines, found.cells.items(), strict=True):
        name, method, splits, lppd, *_ = line.strip("| ").split(" | ")
        assert (name, method, splits, lppd) == (*key[:2], "1", f"{cell['LPPD']:.3f}")


def test_splits_are_standardised(airfoil):
    (x, y), (test, _) = mile.split("airfoil", 1)
    assert len(x) == 80
    assert len(test) == 20
    torch.testing.assert_close(x.mean(0), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(y.std(0), torch.ones(1))
    assert bool((mile.split("airfoil", 1)[1][0] == test).all())
    assert not bool((mile.split("airfoil", 2)[1][0] == test).all())


def test_the_net_gives_a_positive_scale():
    outputs = mile.LogScale()(torch.tensor([[1.0, 0.0], [-2.0, math.log(3)]]))
    torch.testing.assert_close(outputs, torch.tensor([[1.0, 1.0], [-2.0, 3.0]]))


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_mile_beside_bde(smoke, airfoil):
    found = smoke(mile_beside_bde.experiment, "--methods", "deep ensemble", "MILE")
    assert list(found.cells) == [("deep ensemble", "1"), ("MILE", "1")]
    assert [cell["draws"] for cell in found.cells.values()] == [2, 2 * 4]
    assert all(math.isfinite(cell["NLL"]) for cell in found.cells.values())
    assert "| MILE | 1 | " in found.page
    assert "(-0.913)" in found.page


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_mile_on_digits(smoke):
    found = smoke(mile_digits.experiment)
    ((seed,),), (cell,) = found.cells, found.cells.values()
    assert seed == "0"
    assert list(cell["rows"]) == mile_digits.ROWS
    assert [row["draws"] for row in cell["rows"].values()] == [1, 2, 2 * 2, 4, 4]
    assert all(0 <= row["OOD AUROC"] <= 1 for row in cell["rows"].values())
    assert sum(p.numel() for p in mile_digits.make_net().parameters()) == 4_824
