"""Densities of Gaussian targets under Gaussian outputs, where their noise is small."""

import pytest
import torch
import torch.distributions as td

import tyxe
from tyxe.predictive.distributions import gaussian_distribution
from tyxe.predictive.evaluation import gaussian_scores
from tyxe.predictive.gaussian import GaussianOutputs, LinkOptions

OPTIONS = LinkOptions("mc", 100, {})


@pytest.mark.parametrize("noise", [1e-4, 1e-2, 1.0])
def test_a_density_is_exact_where_the_covariance_has_no_full_rank(noise):
    torch.manual_seed(0)
    factor, mean, y = torch.randn(30, 10, 5), torch.randn(30, 10), torch.randn(30, 10)
    covariance = 0.1 * factor @ factor.mT
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(30, scale=noise)
    values, vectors = torch.linalg.eigh(covariance.double())
    exact = (vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT
    exact = exact + likelihood.scale.double().square() * torch.eye(10, dtype=torch.float64)
    expected = td.MultivariateNormal(mean.double(), exact).log_prob(y.double())
    found = gaussian_scores(likelihood, mean, covariance, tyxe.data.Targets.of(y), OPTIONS)
    torch.testing.assert_close(found.log_likelihood.double(), expected, rtol=1e-5, atol=1e-3)
    law = gaussian_distribution(likelihood, GaussianOutputs(mean, covariance, OPTIONS))
    assert law.log_prob(y).isfinite().all()
