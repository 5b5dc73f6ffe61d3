"""experiments/image_laplace.py and laplace_toys.py."""

import image_laplace
import laplace_toys
import numpy as np
import pytest
import torch


def test_image_laplace(smoke):
    found = smoke(image_laplace.experiment)
    assert list(found.cells) == [("digits", net, "0") for net in ("mlp", "cnn")]
    chosen, published = found.content["settings"], found.content["published settings"]
    assert chosen.keys() == published.keys()
    assert published["epochs"] == 500
    for cell in found.cells.values():
        assert cell["prior precision"] in chosen["prior precisions"]
        assert cell["gp factor"] in chosen["gp factors"]
        factors = [p / cell["prior precision"] for p in cell["tuned precision"].values()]
        assert all(factor in chosen["tuning factors"] for factor in factors)
        assert list(cell["rows"]) == list(image_laplace.ROWS)


def test_nets_and_grid_are_the_papers():
    s = image_laplace.experiment.at("published")
    assert (len(s.prior_precisions), s.prior_precisions[0]) == (16, 0.01)
    assert s.prior_precisions[-1] == pytest.approx(1_000)
    for kind, weights in {"mlp": 1_494_154, "cnn": 892_010}.items():
        net = image_laplace.make_net(kind, s.widths[kind])
        assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
        assert sum(parameter.numel() for parameter in net.parameters()) == weights


def test_training_and_validation_images_do_not_overlap_and_depend_on_the_seed():
    s = image_laplace.experiment.at("smoke")
    parts = [image_laplace.load(s, "digits", seed) for seed in (0, 0, 1)]
    train, validation, test, unknown = parts[0]
    assert [len(part[0]) for part in (train, validation, test)] == [60, 40, 50]
    assert len(unknown) == 50
    assert train[0].shape[1:] == (1, 28, 28)
    assert not (train[0].flatten(1)[:, None] == validation[0].flatten(1)).all(-1).any()
    assert torch.equal(train[0], parts[1][0][0])
    assert not torch.equal(train[0], parts[2][0][0])
    assert torch.equal(test[0], parts[2][2][0])


def test_hmc_is_run_beside_the_first_data_of_a_cubic(smoke):
    own = laplace_toys.experiments["cubic"]
    found = smoke(own, "--seeds", "1", "0")
    names = [f"{name}, {kind}" for name in ("kron", "diag", "full") for kind in KINDS]
    assert list(found.cells[("0",)]["rows"]) == [*names, "net"]
    hmc = {seed: "HMC, untuned, bnn" in cell["rows"] for (seed,), cell in found.cells.items()}
    assert hmc == {"1": True, "0": False}
    s = own.at("smoke", seeds=[0], without_hmc=True)
    assert "HMC, untuned, bnn" not in laplace_toys.cubic(s, 0)["rows"]


KINDS = ["untuned, glm", "untuned, bnn", "tuned, bnn"]


@pytest.fixture
def banana(tmp_path, monkeypatch):
    """Stand in for the data, so that a run does not depend on what the machine has."""
    rng = np.random.default_rng(0)
    labels = np.arange(600, dtype=np.int64) % 2
    centres = np.stack([labels, 1 - labels], 1)
    (tmp_path / "uci").mkdir()
    x = (centres + rng.normal(size=(600, 2))).astype(np.float32)
    np.savez(tmp_path / "uci" / "banana.npz", X=x, y=labels)
    monkeypatch.setenv("TYXE_DATA", str(tmp_path))


def test_banana_by_other_numbers_of_layers(smoke, banana, monkeypatch):
    sizes, mlp = [], laplace_toys.common.mlp
    spy = lambda *n, **how: sizes.append(n) or mlp(*n, **how)  # noqa: E731
    monkeypatch.setattr(laplace_toys.common, "mlp", spy)
    own = laplace_toys.experiments["banana"]
    found = smoke(own, "--hidden-layers", "1")
    assert {*sizes} == {(2, 50, 1)}
    assert found.record.path.stem == "laplace_banana_1_layers"
    assert own.ending(own.at()) == ""
    (cell,) = found.cells.values()
    assert {name.split(",")[0] for name in cell["rows"]} == {"MAP", "bnn", "glm"}
    assert len(cell["by prior precision"]) == 2
    for part in cell["maps"].values():
        mean, sd = (torch.tensor(values) for values in part.values())
        # Var[p] is at most E[p] (1 - E[p]), but for rounding.
        assert bool((sd.square() <= mean * (1 - mean) + 1e-3).all())
