"""The evidence of nets that are certain of their training data, and held-out data instead."""

import functools
import warnings

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tyxe.laplace.search import MANY
from tyxe.linalg.kronecker import clipped_eigh

ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))


def clusters(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of five classes, which overlap little."""
    y = torch.arange(count) % 5
    return torch.randn(count, 2) + 6.0 * torch.randn(5, 2)[y], y


def fitted(likelihood: tyxe.likelihoods.Likelihood, x, y, outputs: int) -> tyxe.LaplaceBNN:
    net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, outputs))
    bnn = tyxe.LaplaceBNN(net, PRIOR, likelihood, structure="kron")
    bnn.fit([(x, y)], ADAM, 100)
    return bnn


def determined(bnn: tyxe.LaplaceBNN) -> float:
    """Return `gamma = P - d tr Lambda^-1` by the dense posterior precision."""
    state = bnn.state
    prior = torch.linalg.inv(state.prior.precision.to_dense()).diagonal()
    posterior = torch.linalg.inv(state.precision().to_dense()).diagonal()
    return float((1 - posterior / prior).sum())


def test_evidence_of_certain_classes_warns_with_the_weights_determined():
    torch.manual_seed(0)
    x, y = clusters(60)
    bnn = fitted(tyxe.likelihoods.Categorical(60), x, y, 5)
    with pytest.warns(tyxe.TyxeWarning, match=r"(0\.\d+) weights are determined") as caught:
        bnn.optimize_prior_precision()
    said = float(str(caught[0].message).partition("evidence, ")[2].split()[0])
    assert said == pytest.approx(determined(bnn) / 60, abs=0.006)
    assert said > MANY
    assert "optimize_prior_precision(loader=held_out)" in str(caught[0].message)


@pytest.mark.parametrize("case", ["many points", "not certain", "numbers"])
def test_other_evidence_does_not_warn(case):
    torch.manual_seed(0)
    count = 2_000 if case == "many points" else 30
    x, y = clusters(count)
    y = y[torch.randperm(count)] if case == "not certain" else y
    likelihood, outputs = tyxe.likelihoods.Categorical(count), 5
    if case == "numbers":
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(count, scale=0.1)
        outputs, y = 1, x[:, :1].sin()
    bnn = fitted(likelihood, x, y, outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bnn.optimize_prior_precision() > 0
    assert (determined(bnn) / count > MANY) == (case != "many points")


def test_a_loader_is_enough_for_the_grid():
    torch.manual_seed(0)
    x, y = clusters(60)
    bnn = fitted(tyxe.likelihoods.Categorical(30), x[:30], y[:30], 5)
    held_out = [(x[30:], y[30:])]
    # The clusters are apart, so that the less doubt, the better.
    with pytest.warns(
        tyxe.TyxeWarning, match=r"10000, is the largest of the grid.*trained on them"
    ):
        found = bnn.optimize_prior_precision(loader=held_out)
    with pytest.warns(tyxe.TyxeWarning, match=r"of the grid"):
        assert found == bnn.optimize_prior_precision("grid", held_out)
    few = torch.logspace(-4, 4, 21).tolist()
    assert found == bnn.optimize_prior_precision("grid", held_out, grid=few)


def test_factors_that_sum_over_many_points_are_semi_definite_to_rounding():
    """One direction, summed over 2,000 points in float32, in a factor of side 3."""
    torch.manual_seed(6)  # where that rounding is four times the precision of a number
    points = torch.randn(2_000, 1) * torch.randn(3)
    factor = torch.zeros(3, 3)
    for point in points:
        factor = factor + torch.outer(point, point)
    values, _ = clipped_eigh(factor, "the factor")
    assert values.min() == 0
    with pytest.raises(ValueError, match="the factor is not positive semi-definite"):
        clipped_eigh(factor - 1e-4 * factor.diagonal().sum() * torch.eye(3), "the factor")


def test_a_factor_below_the_smallest_normal_number_is_rounded_in_its_steps():
    """The output factor of a net that a strong prior had turned off was refused."""
    values, _ = clipped_eigh(torch.tensor([6.5e-40, -2.6e-44]).diag(), "the factor")
    assert values.min() == 0
    assert values.max() > 0
    with pytest.raises(ValueError, match="the factor is not positive semi-definite"):
        clipped_eigh(torch.tensor([6.5e-40, -1e-40]).diag(), "the factor")
