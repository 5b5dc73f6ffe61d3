"""Quadratic penalties against the log density of a normal."""

import pyro.distributions as dist
import pytest
import torch

from tyxe.continual.penalties import GaussianPenalty


def test_the_penalty_is_a_normals_log_density():
    torch.manual_seed(0)
    means, values = ({n: torch.randn(s) for n, s in (("a", (2, 3)), ("b", (3,)))} for _ in "12")
    precisions = {name: mean.exp() for name, mean in means.items()}
    penalty = GaussianPenalty(means, precisions)
    normals = {n: dist.Normal(m, precisions[n].rsqrt()) for n, m in means.items()}
    gap = [normals[n].log_prob(m) - normals[n].log_prob(values[n]) for n, m in means.items()]
    torch.testing.assert_close(penalty(values), sum(g.sum() for g in gap))
    leaves = {name: value.requires_grad_() for name, value in values.items()}
    gradients = torch.autograd.grad(penalty(leaves), list(leaves.values()))
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        torch.testing.assert_close(penalty.gradient(name, leaf), gradient)


@pytest.mark.parametrize(
    ("precisions", "message"),
    [
        ({"a": torch.ones(2), "b": torch.ones(1)}, "expected equal"),
        ({"a": torch.ones(1)}, "expected equal"),
        ({"a": torch.tensor([1.0, -1.0])}, "precision of 'a' is negative"),
    ],
)
def test_wrong_penalties(precisions, message):
    with pytest.raises(ValueError, match=message):
        GaussianPenalty({"a": torch.zeros(2)}, precisions)
