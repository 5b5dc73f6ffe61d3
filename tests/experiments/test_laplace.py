"""experiments/image_laplace.py, laplace_toys.py, and curvatures of changed images."""

import common
import image_laplace
import laplace_toys
import numpy as np
import pytest
import resnet_ood
import torch

import tyxe


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


# --- curvatures of changed images ---------------------------------------------------------------


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_the_two_curvatures_are_of_other_images(structure, every_set, monkeypatch):
    settings = resnet_ood.augmentation.at("smoke", passes=2)
    seen, made, own = [], [], tyxe.LaplaceBNN
    monkeypatch.setitem(resnet_ood.CHANGES, "changed", lambda x: seen.append(x) or 0 * x)
    monkeypatch.setattr(
        tyxe, "LaplaceBNN", lambda *a, **how: made.append(own(*a, **how)) or made[-1]
    )
    kinds = resnet_ood.CHANGES
    plain, changed = (resnet_ood.run_curvature(settings, structure, kind, 0) for kind in kinds)
    assert [(bnn.options.num_passes, bnn.options.damping) for bnn in made] == [
        (2, structure == "kron")
    ] * 2
    images = resnet_ood.prepared(settings, "ten classes")[0][0]
    rows = torch.cat(seen).flatten(1).sum(-1).sort().values
    expected = torch.cat([images] * 2).flatten(1).sum(-1).sort().values  # in each pass
    torch.testing.assert_close(rows, expected)
    sizes = [cell["untuned"]["diagonal's sum"] for cell in (plain, changed)]
    assert sizes[0] != pytest.approx(sizes[1], rel=1e-3)


def test_the_width_of_the_lowest_cross_entropy_is_chosen(every_set, monkeypatch):
    settings = resnet_ood.augmentation.at("smoke", N=[40, 160, 640], tau=[1, 16])
    rows = slice(settings.training_images, settings.training_images + settings.validation_images)
    y, draws = common.images("cifar10_subset", "train")[1][rows], []

    class Fixed:
        """Predicts the right class by a margin that is largest at N = 160 and tau = 16."""

        def predict(self, x, num_predictions, predictive):
            assert (num_predictions, predictive) == (settings.validation_draws, "bnn")
            assert len(x) == settings.validation_images
            for seen, _ in resnet_ood.prepared(settings, "ten classes"):
                assert not (x[:, None] == seen).flatten(2).all(-1).any()
            draws.append(torch.rand(1).item())
            return torch.nn.functional.one_hot(y, 10) * float(self.pair == (160, 16))

    monkeypatch.setattr(common, "widen", lambda bnn, *pair: setattr(bnn, "pair", pair))
    bnn = Fixed()
    assert resnet_ood.choose(settings, 0, bnn) == {"N": 160, "tau": 16}
    assert bnn.pair == (160, 16)
    assert len(draws) == 6
    assert len({*draws}) == 1  # the same random numbers for all
