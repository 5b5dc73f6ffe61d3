"""experiments/augmentation.py: what is chosen, and of which images a curvature is."""

import augmentation
import common
import pytest
import resnet_ood
import torch

import tyxe


def test_augmentation(smoke, every_set):
    found = smoke(augmentation.experiment)
    names = [f"{s}, {kind}" for s in ("kron", "diag") for kind in augmentation.CHANGES]
    assert list(found.cells) == [(name, "0") for name in ("net", *names)]
    chosen = found.content["settings"]
    for name in names:
        cell = found.cells[name, "0"]
        assert (cell["tuned"]["N"], cell["tuned"]["tau"]) == (*chosen["N"], *chosen["tau"])
        assert f"| {name}, untuned | 1 | {cell['untuned']['accuracy %']:.1f}" in found.page
    # A run of some cells has its table and figure.
    for name in names[1:]:
        del found.record.cells[name, "0"]
    augmentation.experiment.report(found.record)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_the_two_curvatures_are_of_other_images(structure, every_set, monkeypatch):
    settings = augmentation.experiment.at("smoke", passes=2)
    seen, made, own = [], [], tyxe.LaplaceBNN
    monkeypatch.setitem(augmentation.CHANGES, "changed", lambda x: seen.append(x) or 0 * x)
    monkeypatch.setattr(
        tyxe, "LaplaceBNN", lambda *a, **how: made.append(own(*a, **how)) or made[-1]
    )
    kinds = augmentation.CHANGES
    plain, changed = (augmentation.run(settings, structure, kind, 0) for kind in kinds)
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
    settings = augmentation.experiment.at("smoke", N=[40, 160, 640], tau=[1, 16])
    x, y = augmentation.validation(settings)
    assert len(y) == settings.validation_images
    for seen, _ in resnet_ood.prepared(settings, "ten classes"):
        assert not (x[:, None] == seen).flatten(2).all(-1).any()
    draws = []

    class Fixed:
        """Predicts the right class by a margin that is largest at N = 160 and tau = 16."""

        def predict(self, x, num_predictions, predictive):
            assert (num_predictions, predictive) == (settings.validation_draws, "bnn")
            draws.append(torch.rand(1).item())
            return torch.nn.functional.one_hot(y, 10) * float(self.pair == (160, 16))

    monkeypatch.setattr(common, "widen", lambda bnn, *pair: setattr(bnn, "pair", pair))
    bnn = Fixed()
    assert augmentation.choose(settings, 0, bnn) == {"N": 160, "tau": 16}
    assert bnn.pair == (160, 16)
    assert len(draws) == 6
    assert len({*draws}) == 1  # the same random numbers for all


def test_no_image_is_left_to_choose_by(every_set):
    with pytest.raises(SystemExit, match="no image is left after 80: fewer --training-images"):
        augmentation.validation(augmentation.experiment.at("smoke", training_images=80))
