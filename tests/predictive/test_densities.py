"""Predictions and densities under Gaussian outputs, without samples."""

import math

import pytest
import torch
import torch.distributions as td
from torch.nn.functional import softplus

import tyxe
from tests.oracles.links import expected_sigmoid
from tyxe.predictive import predict_from_gaussian
from tyxe.predictive.distributions import distribution_at_draws, gaussian_distribution
from tyxe.predictive.evaluation import gaussian_log_likelihood, gaussian_scores
from tyxe.predictive.gaussian import GaussianOutputs, LinkOptions
from tyxe.predictive.links import sample_outputs

OPTIONS = LinkOptions("mc", 100, {})


def assert_is_mean_of_samples(found, first, second, num_samples):
    """Check the log of a mean of densities, whose first two moments are given."""
    error = (second - first.square()).sqrt() / first / num_samples**0.5
    assert bool(((found - first.log()).abs() < 4 * error).all())


def normal_moments(y, mean, covariance, noise):
    """The mean of `N(y; f, noise^2)` over Gaussian `f`, and that of its square."""
    extra = noise**2 * torch.eye(y.shape[-1])
    first = td.MultivariateNormal(mean, covariance + extra).log_prob(y).exp()
    second = td.MultivariateNormal(mean, covariance + extra / 2).log_prob(y).exp()
    return first, second / (2 * noise * math.pi**0.5) ** y.shape[-1]


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


@pytest.mark.parametrize("num_samples", [0, 100])
def test_tied_numbers_of_a_joint_have_their_exact_density(num_samples):
    torch.manual_seed(0)
    both = {name: tyxe.likelihoods.HomoskedasticGaussian(5, scale=0.02) for name in ("a", "b")}
    joint = tyxe.likelihoods.Joint(**both)
    mean = joint.from_net({name: torch.zeros(5, 1) for name in both})
    tied = torch.tensor([[1.0, 0.5], [0.5, 1.0]]).expand(5, 2, 2)
    y = torch.randn(5, 2).double()
    y[4, 0] = math.nan
    targets = joint.from_loader(dict(zip(both, y.split(1, -1), strict=True)))
    state = torch.get_rng_state()
    found = gaussian_scores(joint, mean, tied, targets, LinkOptions("mc", num_samples, {}))
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn
    exact = bool(num_samples) * tied.double() + 0.02**2 * torch.eye(2).double()
    alone = td.Normal(0.0, exact.diagonal(dim1=1, dim2=2).sqrt(), validate_args=False).log_prob(y)
    together = td.MultivariateNormal(torch.zeros(2).double(), exact[:4]).log_prob(y[:4])
    expected = torch.stack([*alone.mT.nan_to_num(0.0), torch.cat([together, alone[4:, 1]])])
    torch.testing.assert_close(found.log_likelihood.double(), expected, rtol=1e-4, atol=1e-4)


def test_labels_of_a_joint_are_averaged_given_its_numbers():
    likelihoods, num_samples, noise = tyxe.likelihoods, 2_000, 0.02
    parts = {"a": likelihoods.HomoskedasticGaussian(2, scale=noise), "b": likelihoods.Bernoulli(2)}
    joint = likelihoods.Joint(**parts)
    mean = joint.from_net({"a": torch.zeros(2, 1), "b": torch.tensor([[0.5], [-0.5]])})
    tied = torch.tensor([[1.0, -1.2], [-1.2, 2.0]]).expand(2, 2, 2)
    y = torch.tensor([[1.5], [-0.3]])
    targets = joint.from_loader({"a": y, "b": torch.ones(2, 1)})
    found = gaussian_scores(joint, mean, tied, targets, LinkOptions("mc", num_samples, {}))
    total = 1 + noise**2
    # The label's logit given the number.
    given = mean[:, 1] - 1.2 * y[:, 0] / total, torch.full((2,), 2.0 - 1.2**2 / total)
    first, second = (expected_sigmoid(*given, power) for power in (1, 2))
    alone = td.Normal(0.0, total**0.5).log_prob(y[:, 0])
    assert_is_mean_of_samples(found.log_likelihood[-1] - alone, first, second, num_samples)


def test_a_censored_number_has_its_exact_density():
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.Censored(tyxe.likelihoods.HomoskedasticGaussian(30, scale=0.02))
    y, is_bound = torch.randn(30, 1), torch.arange(30)[:, None] < 10
    targets = tyxe.data.Targets.of(tyxe.likelihoods.censored_targets(y, right=is_bound))
    mean, variance = torch.zeros(30, 1), torch.ones(30, 1, 1)
    found = gaussian_scores(likelihood, mean, variance, targets, OPTIONS)
    law = td.Normal(0.0, (1 + 0.02**2) ** 0.5)
    expected = law.log_prob(y).where(~is_bound, (1 - law.cdf(y)).log())[:, 0]
    torch.testing.assert_close(found.log_likelihood, expected)


@pytest.mark.parametrize(
    ("likelihood", "law", "targets"),
    [
        (
            tyxe.likelihoods.StudentT(4, scale=0.1),
            lambda f: td.StudentT(4.0, f, 0.1),
            [-2, 0, 1, 3],
        ),
        (tyxe.likelihoods.Poisson(4), lambda f: td.Poisson(f.exp()), [0, 5, 20, 100]),
    ],
)
def test_a_density_of_one_number_is_its_integral(likelihood, law, targets):
    y = torch.tensor(targets).double()[:, None]
    mean, variance = torch.full((4, 1), 0.5).double(), torch.full((4, 1, 1), 1.5).double()
    z = torch.linspace(-9, 9, 20_001, dtype=torch.float64)
    logs = law(0.5 + 1.5**0.5 * z).log_prob(y) + td.Normal(0.0, 1.0).log_prob(z)
    expected = torch.trapezoid(logs.exp(), z).log()
    given = tyxe.data.Targets.of(y)
    found = gaussian_scores(likelihood, mean, variance, given, OPTIONS).log_likelihood
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    distribution = gaussian_distribution(likelihood, GaussianOutputs(mean, variance, OPTIONS))
    torch.testing.assert_close(distribution.log_prob(y), found)
    assert distribution.sample((2,)).shape == (2, 4, 1)


@pytest.mark.parametrize(
    ("likelihood", "law", "targets"),
    [
        # The last two are further than eight deviations from the mean.
        (tyxe.likelihoods.Poisson(5), lambda f: td.Poisson(f.exp()), [0, 1_000, 30_000, 10**7]),
        (
            tyxe.likelihoods.NegativeBinomial(4, total_count=1e5),
            lambda f: td.NegativeBinomial(1e5, logits=f - math.log(1e5)),
            [0, 1_000, 30_000, 10**5],
        ),
        (
            tyxe.likelihoods.StudentT(4, df=4.0, scale=1e-3),
            lambda f: td.StudentT(4.0, f, 1e-3),
            [0.5, 0.51, 3.0, 5.5],
        ),
    ],
)
def test_a_density_much_narrower_than_the_outputs_is_its_integral(likelihood, law, targets):
    y = torch.tensor(targets).double()[:, None]
    mean, variance = torch.full((4, 1), 0.5).double(), torch.full((4, 1, 1), 1.0).double()
    z = torch.linspace(-20, 20, 1_000_001, dtype=torch.float64)
    logs = law(0.5 + z).log_prob(y) + td.Normal(0.0, 1.0).log_prob(z)
    expected = logs.logsumexp(1) + (z[1] - z[0]).log()
    given = tyxe.data.Targets.of(y)
    found = gaussian_scores(likelihood, mean, variance, given, OPTIONS).log_likelihood
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    distribution = gaussian_distribution(likelihood, GaussianOutputs(mean, variance, OPTIONS))
    torch.testing.assert_close(distribution.log_prob(y), found)
    torch.testing.assert_close(distribution.log_prob(y.expand(3, 4, 1)), found.expand(3, 4))
    table = distribution.log_prob(y.view(4, 1, 1))
    torch.testing.assert_close(table.diagonal(), found)
    torch.testing.assert_close(distribution.log_prob(y[1, 0]), table[1])


@pytest.mark.parametrize(("scale", "count"), [(0.1, 1_000), (1e-2, 10)])
def test_a_count_very_many_deviations_away_has_its_density(scale, count):
    z = torch.linspace(-50, 300, 2_000_001, dtype=torch.float64)
    y = torch.tensor([[count]]).double()
    logs = td.Poisson((scale * z).exp()).log_prob(y) + td.Normal(0.0, 1.0).log_prob(z)
    expected = logs.logsumexp(1) + (z[1] - z[0]).log()
    outputs = torch.zeros(1, 1).double(), torch.full((1, 1, 1), scale**2).double()
    given = tyxe.data.Targets.of(y), OPTIONS
    found = gaussian_scores(tyxe.likelihoods.Poisson(1), *outputs, *given).log_likelihood
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.0)


def test_a_density_far_away_is_found_in_single_precision_too():
    y, mean, variance = torch.tensor([[12.0]]), torch.zeros(1, 1), torch.ones(1, 1, 1)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(1, scale=1e-4)
    by_grid = gaussian_log_likelihood.dispatch(tyxe.likelihoods.Likelihood)
    outputs, targets = GaussianOutputs(mean, variance, OPTIONS), tyxe.data.Targets.of(y)
    found = by_grid(likelihood, outputs, targets, None)
    torch.testing.assert_close(found, td.Normal(0.0, 1.0).log_prob(y[0]), rtol=1e-3, atol=0.0)


def test_a_density_that_overflows_far_from_the_mean_is_its_integral():
    likelihood, y = tyxe.likelihoods.Poisson(3), torch.tensor([[0.0], [5.0], [200.0]])
    mean, variance = torch.zeros(3, 1), torch.full((3, 1, 1), 2.5**2)  # exp(40 * 2.5) is infinite
    given = tyxe.data.Targets.of(y)
    found = gaussian_scores(likelihood, mean, variance, given, OPTIONS).log_likelihood
    exact = gaussian_scores(likelihood, mean.double(), variance.double(), given, OPTIONS)
    torch.testing.assert_close(found, exact.log_likelihood.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("event_dim", [0, 2])
def test_positions_are_independent_of_each_other(event_dim):
    likelihood = tyxe.likelihoods.Poisson(2, event_dim=event_dim)
    y = torch.tensor([[0, 3], [20, 1]])
    mean, variance = torch.randn(2, 2, 1).double(), torch.full((2, 2, 1, 1), 1.5).double()
    given = tyxe.data.Targets.of(y[..., None])
    found = gaussian_scores(likelihood, mean, variance, given, OPTIONS).log_likelihood
    each = tyxe.data.Targets.of(y.view(4, 1))
    of_one = tyxe.likelihoods.Poisson(4), mean.view(4, 1), variance.view(4, 1, 1)
    expected = gaussian_scores(*of_one, each, OPTIONS).log_likelihood.view(2, 2).sum(1)
    torch.testing.assert_close(found, expected)
    mask = torch.tensor([False, True])
    kept = gaussian_scores(likelihood, mean, variance, given.masked(mask), OPTIONS).log_likelihood
    torch.testing.assert_close(kept, expected * mask)
    # Of several positions the distribution is that of samples.
    many = GaussianOutputs(mean, 0.01 * variance, LinkOptions("mc", 2_000, {}))
    log_prob = gaussian_distribution(likelihood, many).log_prob(given.values)
    of_samples = gaussian_scores(likelihood, *many[:2], given, OPTIONS).log_likelihood
    torch.testing.assert_close(log_prob, of_samples, rtol=0.02, atol=0.0)


def test_positions_may_have_a_scale_each():
    scales, y = torch.tensor([[0.3], [2.0]]).double(), torch.randn(5, 2, 1).double()
    mean, variance = torch.zeros(5, 2, 1).double(), torch.ones(5, 2, 1, 1).double()
    parts = [(tyxe.likelihoods.StudentT(5, scale=scales), slice(None))]
    parts += [(tyxe.likelihoods.StudentT(5, scale=scales[r]), slice(r, r + 1)) for r in range(2)]
    found, *each = (
        gaussian_scores(
            one, mean[:, rows], variance[:, rows], tyxe.data.Targets.of(y[:, rows]), OPTIONS
        ).log_likelihood
        for one, rows in parts
    )
    torch.testing.assert_close(found, sum(each))


def test_tied_censored_numbers_are_averaged_together():
    torch.manual_seed(0)
    numbers, num_samples = tyxe.likelihoods.HomoskedasticGaussian(3, scale=0.5), 2_000
    likelihood = tyxe.likelihoods.Censored(numbers)
    y, mean = torch.tensor([[0.5, 0.5], [1.0, 0.3], [-1.0, 0.2]]), torch.zeros(3, 2)
    tied = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).expand(3, 2, 2)
    targets = tyxe.data.Targets.of(tyxe.likelihoods.censored_targets(y))
    options = LinkOptions("mc", num_samples, {})
    found = gaussian_scores(likelihood, mean, tied, targets, options).log_likelihood
    assert_is_mean_of_samples(found, *normal_moments(y, mean, tied, 0.5), num_samples)


def test_numbers_of_a_joint_with_inferred_noise_are_averaged_given_the_others():
    torch.manual_seed(0)
    normal, noise, num_samples = tyxe.likelihoods.HomoskedasticGaussian, 0.02, 2_000
    joint = tyxe.likelihoods.Joint(a=normal(2, scale=noise), b=normal(2, scale=td.Gamma(2.0, 2.0)))
    mean = joint.from_net({"a": torch.zeros(2, 1), "b": torch.zeros(2, 1)})
    tied = torch.tensor([[1.0, 0.8], [0.8, 1.0]]).expand(2, 2, 2)
    y = {"a": torch.tensor([[1.5], [-0.3]]), "b": torch.tensor([[0.5], [0.2]])}
    (own,) = joint.latent_priors()
    options = LinkOptions("mc", num_samples, {own: torch.full((num_samples,), 0.5)})
    found = gaussian_scores(joint, mean, tied, joint.from_loader(y), options).log_likelihood[-1]
    total = 1 + noise**2
    given = 0.8 * y["a"] / total, torch.full((2, 1, 1), 1 - 0.8**2 / total)
    first, second = normal_moments(y["b"], *given, 0.5)
    alone = td.Normal(0.0, total**0.5).log_prob(y["a"][:, 0])
    assert_is_mean_of_samples(found - alone, first, second, num_samples)


def test_a_number_whose_noise_is_inferred_has_samples():
    torch.manual_seed(0)
    likelihood, num_samples = tyxe.likelihoods.StudentT(2, scale=td.Gamma(2.0, 2.0)), 2_000
    y, mean, variance = torch.tensor([[0.3], [1.5]]), torch.zeros(2, 1), torch.ones(2, 1, 1)
    (own,) = likelihood.latent_priors()
    # Of nodes in order, those below the mean would have the first scale, and the others the second.
    scales = torch.tensor([0.1, 3.0]).repeat_interleave(num_samples // 2)
    options = LinkOptions("mc", num_samples, {own: scales})
    z = torch.linspace(-9, 9, 20_001)
    density = td.StudentT(4.0, z, scales.unique()[:, None, None]).log_prob(y).exp()
    weight = td.Normal(0.0, 1.0).log_prob(z).exp()
    first, second = (torch.trapezoid(density**p * weight, z).mean(0) for p in (1, 2))
    targets = tyxe.data.Targets.of(y)
    found = gaussian_scores(likelihood, mean, variance, targets, options).log_likelihood
    law = gaussian_distribution(likelihood, GaussianOutputs(mean, variance, options))
    assert_is_mean_of_samples(found, first, second, num_samples)
    assert_is_mean_of_samples(law.log_prob(y), first, second, num_samples)


class SoftplusPoisson(tyxe.likelihoods.Poisson):
    def predictive_distribution(self, predictions, latents=None):
        return super().predictive_distribution(softplus(predictions).log(), latents)


def test_moments_of_counts_with_another_link_are_those_of_the_nodes():
    mean, variance = torch.zeros(1, 1).double(), torch.full((1, 1, 1), 4.0).double()
    found = gaussian_distribution(SoftplusPoisson(1), GaussianOutputs(mean, variance, OPTIONS))
    rates = softplus(2 * torch.randn(200_000, generator=torch.Generator().manual_seed(0)).double())
    assert float(found.mean) == pytest.approx(float(rates.mean()), rel=0.02)
    assert float(found.variance) == pytest.approx(float(rates.mean() + rates.var()), rel=0.03)


def test_moments_that_overflow_are_infinite():
    mean, variance = torch.zeros(1, 1).double(), torch.full((1, 1, 1), 800.0).double()
    found = gaussian_distribution(
        tyxe.likelihoods.Poisson(1), GaussianOutputs(mean, variance, OPTIONS)
    )
    assert found.stddev == math.inf


@pytest.mark.parametrize("scale", [0.5, 4.0, 6.0, 10.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_of_counts_whose_rate_is_log_normal(scale, dtype):
    mean, variance = torch.tensor([[-1.0], [2.0]], dtype=dtype), scale**2
    outputs = GaussianOutputs(mean, torch.full((2, 1, 1), variance, dtype=dtype), OPTIONS)
    first = (mean.double() + variance / 2).exp()
    square = (2 * mean.double() + 2 * variance).exp()
    for likelihood, share in (
        (tyxe.likelihoods.Poisson(2), 0.0),
        (tyxe.likelihoods.NegativeBinomial(2, total_count=4.0), 0.25),
    ):
        found = gaussian_distribution(likelihood, outputs)
        spread = (first + square * (1 + share) - first.square()).sqrt()
        near = {"rtol": 1e-4, "atol": 0.0} if dtype == torch.float32 else {}
        torch.testing.assert_close(found.mean, first.to(dtype), **near)
        expected = spread.to(dtype).where(spread < 1e19, spread.new_tensor(math.inf).to(dtype))
        torch.testing.assert_close(found.stddev, expected if near else spread, **near)


def test_moments_of_a_mixture_of_counts_that_overflow_are_infinite():
    draws = torch.tensor([[[0.0], [0.0]], [[0.0], [200.0]]])
    found = distribution_at_draws(tyxe.likelihoods.Poisson(2), draws, {})
    assert found.mean.tolist() == [[1.0], [math.inf]]
    assert found.stddev.tolist() == [[1.0], [math.inf]]
    unknown = distribution_at_draws(tyxe.likelihoods.Poisson(2), draws * math.nan, {})
    assert bool(unknown.stddev.isnan().all())
