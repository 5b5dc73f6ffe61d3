"""experiments/moments.py: every method on both models, whose exact moments are right."""

import moments
import pytest
import torch


# Fits and chains of a smoke test are too short to be any good.
@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_every_method_on_both_models(smoke):
    found = smoke(moments.experiment)
    assert len(found.cells) == 2 * len(moments.METHODS)
    for (model, *_), cell in found.cells.items():
        assert len(cell["error"]) == len(cell["ratio"]) == {"linear": 4, "logistic": 2}[model]
        assert all(ratio > 0 for ratio in cell["ratio"])


def test_the_grid_is_wide_and_fine_enough():
    """Its moments are those of importance sampling from a wide t-distribution."""
    x, y, _, scale, mean, sd = moments.problem("logistic")
    torch.manual_seed(0)
    wide = torch.distributions.StudentT(5.0, mean, 1.5 * sd)
    w = wide.sample((400_000,))
    logits = w[:, :1] * x[:, 0] + w[:, 1:]
    joint = torch.distributions.Bernoulli(logits=logits).log_prob(y[:, 0]).sum(1)
    joint = joint + torch.distributions.Normal(0.0, scale).log_prob(w).sum(1)
    weights = (joint - wide.log_prob(w).sum(1)).softmax(0)
    found = weights @ w
    torch.testing.assert_close(found, mean, atol=0.01, rtol=0)
    spread = (weights @ (w - found).square()).sqrt()
    torch.testing.assert_close(spread, sd, atol=0.01, rtol=0)
