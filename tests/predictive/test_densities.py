"""Predictions and densities under Gaussian outputs, without samples."""

import pytest
import torch
import torch.distributions as td

import tyxe
from tyxe.predictive import predict_from_gaussian
from tyxe.predictive.distributions import gaussian_distribution
from tyxe.predictive.evaluation import gaussian_scores
from tyxe.predictive.gaussian import GaussianOutputs, LinkOptions
from tyxe.predictive.links import sample_outputs

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


@pytest.mark.parametrize("name", ["StudentT", "Poisson", "NegativeBinomial"])
def test_predictions_of_numbers_and_counts_are_those_of_infinitely_many_samples(name):
    torch.manual_seed(0)
    likelihood, num_samples = getattr(tyxe.likelihoods, name)(3), 100_000
    mean, root = torch.randn(3, 2), 0.5 * torch.randn(3, 2, 2)
    covariance = root @ root.mT
    found = predict_from_gaussian(likelihood, mean, covariance)
    again = predict_from_gaussian(likelihood, mean, covariance)
    torch.testing.assert_close(found, again, rtol=0, atol=0)
    samples = sample_outputs(mean, covariance, num_samples)
    distribution = likelihood.predictive_distribution
    center = distribution(found).mean
    draws, error = distribution(samples).mean, distribution(samples).mean.std(0)
    assert bool(((draws.mean(0) - center).abs() < 4 * error / num_samples**0.5).all())
    if name == "StudentT":
        squares = (samples - center).square() + likelihood.predictive_distribution(mean).variance
        error = squares.std(0) / num_samples**0.5
        assert bool(((squares.mean(0) - found[1].square()).abs() < 4 * error).all())
