"""experiments/variational_laplace_images.py and fixed_variance.py: cells, choices, nets, steps."""

import fixed_variance
import pytest
import torch
import variational_laplace_images as images


def test_best_beta_is_that_of_the_first_seed_s_validation():
    cells = {}
    for beta, first, second in ((1.0, 0.5, 0.1), (0.1, 0.4, 0.3), (0.01, 0.6, 0.2)):
        for seed, value in ((3, first), (4, second)):
            row = {"scores": {"mean": {"validation NLL": value}}}
            cells["digits", "VL", f"{beta:g}", "10", str(seed)] = row
        other = {"scores": {"mean": {"validation NLL": 0.0}}}
        cells["digits", "VL", f"{beta:g}", "30", "3"] = other
        cells["mnist", "VL", f"{beta:g}", "10", "3"] = other
    found = images.jobs(cells, "digits")
    assert ("VL", 0.01, 30.0, 3) in found
    assert images.best_beta(found, "VL", "mean") == 0.1


# --- one fixed variance -------------------------------------------------------------------------


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


def test_no_image_is_of_two_parts():
    s = fixed_variance.experiment.at("smoke")
    (train, _), (validation, _), (test, _), other = fixed_variance.load(s, "digits")
    assert [len(part) for part in (train, validation, test, other)] == [64, 32, 32, 32]
    assert not (train.flatten(1)[:, None] == validation.flatten(1)).all(-1).any()
