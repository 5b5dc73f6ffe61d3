"""experiments/fixed_variance.py: cells, what is kept fixed, and steps."""

import fixed_variance
import pytest
import torch


def test_fixed_variance(smoke):
    found = smoke(fixed_variance.experiment)
    # Two methods at two standard deviations and MAP, for each batch size.
    assert len(found.cells) == 2 * (2 * 2 + 1)
    assert {cell["steps"] for cell in found.cells.values()} == {16}
    for (name, _, method, sd, _), cell in found.cells.items():
        assert name == "digits"
        assert (sd == "0") == (method == "MAP")
        assert set(cell["scores"]) == ({"mean"} if method == "MAP" else {"mean", "draws"})
    assert found.page.count("**digits**, batches of") == 2


@pytest.mark.parametrize("method", ["VL", "VI"])
def test_every_weight_keeps_the_standard_deviation(method, monkeypatch):
    s, seen = fixed_variance.experiment.at("smoke"), []
    scores = fixed_variance.images.scores

    def look(bnn, *how):
        seen.extend(d.base_dist.scale for d in bnn.net_guide.get_detached_distributions().values())
        return scores(bnn, *how)

    monkeypatch.setattr(fixed_variance.images, "scores", look)
    fixed_variance.run(s, "digits", 32, method, 0.1, 0)
    assert len(seen) == 2 * 8
    for scale in seen:
        torch.testing.assert_close(scale, torch.full_like(scale, 0.1))


def test_all_batch_sizes_have_as_many_steps():
    s = fixed_variance.experiment.at()
    for size in (25, 100, 200):
        batches = -(-s.training_images // size)
        assert s.steps % batches == 0


def test_no_image_is_of_two_parts():
    s = fixed_variance.experiment.at("smoke")
    (train, _), (validation, _), (test, _), other = fixed_variance.load(s, "digits")
    assert [len(part) for part in (train, validation, test, other)] == [64, 32, 32, 32]
    assert not (train.flatten(1)[:, None] == validation.flatten(1)).all(-1).any()


def test_a_step_may_average_several_draws(monkeypatch):
    seen, fit = [], fixed_variance.tyxe.VariationalBNN.fit

    def look(self, *how, **options):
        seen.append(options["num_particles"])
        return fit(self, *how, **options)

    monkeypatch.setattr(fixed_variance.tyxe.VariationalBNN, "fit", look)
    for method in ("VI", "VI8", "VL"):
        fixed_variance.run(fixed_variance.experiment.at("smoke"), "digits", 32, method, 0.1, 0)
    assert seen == [1, 8, 1]
