"""experiments/adversarial.py: what is chosen and scored, and attacks against their formulas."""

import math

import adversarial
import common
import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def data(image_folder, tmp_path, monkeypatch):
    # as many as there are, for the split into training and validation
    for name in ("mnist", "notmnist"):
        with np.load(image_folder / f"{name}.npz") as arrays:
            found = dict(arrays)
        if name == "mnist":
            found["x_train"] = np.resize(found["x_test"][:200], (60_000, 28, 28))
            found["y_train"] = np.arange(60_000, dtype=np.uint8) % 10
        np.savez(tmp_path / f"{name}.npz", **found)
    monkeypatch.setenv("TYXE_DATA", str(tmp_path))


def test_adversarial(smoke, monkeypatch):
    widths, widen = [], common.widen
    monkeypatch.setattr(common, "widen", lambda *how: widths.append(how[1:]) or widen(*how))
    found = smoke(adversarial.experiment, "--within", "5e-4", "100")
    (cell,), chosen = found.cells.values(), found.content["settings"]
    methods = ["deterministic", "MC dropout", "mean field", "mean field, sd 0.01", "Laplace, diag"]
    methods += [f"Laplace, kron{ending}" for ending in ("", ", widest", ", within 100")]
    assert list(cell["rows"]) == list(cell["curves"]) == methods
    for structure in ("diag", "kron"):
        tuned = cell["chosen"][structure]
        assert len(tuned["all"]) == len(chosen["N"]) * len(chosen["tau"])
        scores = [row["cross-entropy"] for row in tuned["all"]]
        assert tuned["best"]["cross-entropy"] == min(scores)
        good = [row for row in tuned["all"] if row["cross-entropy"] < min(scores) + 5e-4]
        assert tuned["widest"]["entropy"] == max(row["entropy"] for row in good)
        assert tuned["as good"] == len(good)
    # By 100 nats all pairs are as good.
    assert adversarial.within(tuned["all"], 100) == tuned["all"]
    wide = [adversarial.widest(adversarial.within(tuned["all"], nats)) for nats in (5e-4, 100)]
    assert widths[-2:] == [(row["N"], row["tau"]) for row in wide]


def test_attacks_follow_their_formulas():
    """On a linear net, whose gradient is `W^T (onehot - p)`."""
    net = torch.nn.Linear(5, 3).double()
    x, span = torch.rand(7, 5).double(), torch.tensor([1.0, 0.0, 2.0, 1.0, 1.0]).double()
    weight, probs = net.weight.detach(), net(x).detach().softmax(-1)
    torch.testing.assert_close(adversarial.averaged(net, x, 4).exp(), net(x).softmax(-1))

    def towards(classes, probs):
        return span * ((torch.eye(3).double()[classes] - probs) @ weight).sign()

    etas = [0, 0.5, 3]
    expected = [net(x - eta * towards(probs.argmax(-1), probs)).log_softmax(-1) for eta in etas]
    moved = adversarial.untargeted(net, x, span, etas, 2)
    torch.testing.assert_close(moved, torch.stack(expected).detach())
    path = adversarial.targeted(net, x, span, 0.1, 2, 2)
    assert path.shape == (3, 7, 3)
    for log_probs in path:
        torch.testing.assert_close(log_probs, net(x).detach().log_softmax(-1))
        x = x + 0.1 * towards(torch.zeros(7, dtype=torch.long), log_probs.exp())


def test_pixels_are_drawn_anew_in_every_pass():
    intensities = torch.tensor([0.0, 0.3, 1.0]).expand(20_000, 3)
    loader = common.Batches(intensities, torch.zeros(20_000), 8_000, torch.bernoulli)
    assert len(loader) == 3
    first, second = (torch.cat([batch for batch, _ in loader]) for _ in range(2))
    assert bool(((first == 0) | (first == 1)).all())
    assert bool((first[:, ::2] == torch.tensor([0.0, 1.0])).all())
    assert not bool((first == second).all())
    # six standard errors of 20,000 draws of a variance of 0.21
    assert abs(first[:, 1].mean().item() - 0.3) < 6 * math.sqrt(0.21 / 20_000)
