"""`bnn.predictive` is the distribution that `evaluate` scores and `predict` has the moments of."""

import functools
import math

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from torch import nn

import tyxe
from tests.oracles import bnns
from tests.oracles.bnns import NORMAL
from tests.oracles.predictions import seeded
from tyxe import likelihoods
from tyxe.likelihoods import HomoskedasticGaussian as Gaussian
from tyxe.predictive.distributions import PredictiveMixture, mixture
from tyxe.predictive.evaluation import gaussian_log_likelihood
from tyxe.predictive.gaussian import GaussianOutputs, LinkOptions

N = 6
X = torch.linspace(-2, 2, 2 * N, dtype=torch.float64).view(N, 2)
LABELS = torch.arange(N) % 3
NUMBERS = torch.stack([X.sum(-1).sin(), X[:, 0]], -1)
SCALES = torch.tensor([0.3, 1.0], dtype=torch.float64)
PAIRS = torch.stack([LABELS, LABELS.flip(0)], -1)
BITS = torch.stack([LABELS % 2, LABELS // 2], -1).double()

CASES = {
    "Categorical": (likelihoods.Categorical(N), 3, (3,), LABELS),
    "probabilities": (likelihoods.Categorical(N, logit_predictions=False), 3, None, LABELS),
    "Categorical of positions": (likelihoods.Categorical(N), 6, (2, 3), PAIRS),
    "Bernoulli": (likelihoods.Bernoulli(N), 1, (), (LABELS % 2).double()),
    "Bernoulli of two": (likelihoods.Bernoulli(N), 2, (2,), BITS),
    "Poisson": (likelihoods.Poisson(N), 2, (2,), PAIRS),
    "one noise": (Gaussian(N, scale=0.3), 2, (2,), NUMBERS),
    "a noise for each": (Gaussian(N, scale=SCALES), 2, (2,), NUMBERS),
    "noise of one number": (Gaussian(N, scale=0.3, event_dim=0), 1, (), NUMBERS[:, 0]),
    "Ordinal": (likelihoods.Ordinal(N, 3).requires_grad_(False), 1, (1,), LABELS),
    "StudentT": (likelihoods.StudentT(N, scale=0.3), 2, (2,), NUMBERS),
    "NegativeBinomial": (likelihoods.NegativeBinomial(N, total_count=2.0), 2, (2,), PAIRS),
    "predicted noise": (likelihoods.HeteroskedasticGaussian(N), 4, (4,), NUMBERS),
}


class Shaped(nn.Module):
    """A small net whose outputs have a shape, or are probabilities."""

    def __init__(self, outputs, shape, index=0):
        super().__init__()
        torch.manual_seed(index)
        self.body = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.2))
        self.head, self.shape = nn.Linear(4, outputs), shape
        self.double()

    def forward(self, x):
        found = self.head(self.body(x))
        return found.softmax(-1) if self.shape is None else found.reshape(len(x), *self.shape)


guide = functools.partial(tyxe.guides.AutoNormal, init_scale=0.5)


def variational(likelihood, outputs, shape, index=0):
    return tyxe.VariationalBNN(Shaped(outputs, shape, index), NORMAL, likelihood, guide)


def laplace(likelihood, outputs, shape, targets):
    return bnns.laplace(Shaped(outputs, shape), likelihood, [(X, targets)])


def scored(bnn, targets, **options):
    """Return the predictive distribution, whose log-density is what `evaluate` says."""
    found = seeded(bnn.predictive, X, num_predictions=8, **options)
    how = {"num_predictions": 8, "reduction": "none", **options}
    expected = seeded(bnn.evaluate, X, targets, **how)[1]
    torch.testing.assert_close(found.log_prob(targets), expected, rtol=1e-5, atol=1e-6)
    assert found.batch_shape == (N,)
    assert found.sample((2, 3)).shape == (2, 3, *targets.shape)
    return found


@pytest.mark.parametrize("name", CASES)
def test_of_draws_it_is_the_mixture_that_evaluate_scores(name):
    *parts, targets = CASES[name]
    scored(variational(*parts), targets)


@pytest.mark.parametrize("link", ["mc", "probit"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "probabilities"])
def test_of_gaussian_outputs_it_is_what_evaluate_scores(name, link):
    likelihood, *_, targets = CASES[name]
    bnn = laplace(*CASES[name])
    sampled = ["Poisson", "Ordinal", "StudentT", "NegativeBinomial"]
    sampled += ["Bernoulli of two"] * (link == "mc")
    if name not in sampled:
        scored(bnn, targets, link=link)
        return
    # By samples of the outputs, of which `evaluate` takes the first for the prediction.
    found = seeded(lambda: bnn.predictive(X, link=link))
    with bnn._predicting():
        moments = GaussianOutputs(*bnn._glm(X), LinkOptions(link, 100, {}))
    expected = seeded(lambda: gaussian_log_likelihood(likelihood, moments, targets, None))
    torch.testing.assert_close(found.log_prob(targets), expected)


@pytest.mark.parametrize("name", ["Categorical", "probabilities", "Categorical of positions"])
def test_class_probabilities_have_the_density_of_labels_on_average(name):
    *parts, targets = CASES[name]
    soft = nn.functional.one_hot(targets, 3).double()
    found = seeded(variational(*parts).predictive, X, num_predictions=1)
    torch.testing.assert_close(found.log_prob(soft), found.log_prob(targets))
    mixed = found.log_prob(0.75 * soft + 0.25 * soft.flip(0))
    expected = 0.75 * found.log_prob(targets) + 0.25 * found.log_prob(targets.flip(0))
    torch.testing.assert_close(mixed, expected)
    evaluated = variational(*parts).evaluate
    of_one = seeded(evaluated, X, soft, num_predictions=1, reduction="none")[1]
    torch.testing.assert_close(found.log_prob(soft), of_one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Categorical", "probabilities"])
def test_evaluations_by_class_probabilities_are_of_the_mixture(name):
    *parts, targets = CASES[name]
    shares = 0.75 * nn.functional.one_hot(targets, 3) + 0.25 / 3
    ensemble = tyxe.EnsembleBNN(lambda k: variational(*parts, k), 2, weights=[3.0, 1.0])
    for bnn in (variational(*parts), ensemble):
        found = seeded(lambda bnn=bnn: bnn.predictive(X, num_predictions=4))
        _, log_likelihood = seeded(bnn.evaluate, X, shares, num_predictions=4, reduction="none")
        torch.testing.assert_close(found.log_prob(shares), log_likelihood, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["Categorical", "one noise"])
def test_of_an_ensemble_it_is_the_members_mixture(name):
    *parts, targets = CASES[name]
    members = [variational(*parts, 0), variational(*parts, 1), laplace(*parts, targets)]
    bnn = tyxe.EnsembleBNN(lambda k: members[k], 3, weights=[1.0, 2.0, 3.0])
    scored(bnn, targets)


def test_of_other_wrappers():
    likelihood, outputs, shape, targets = CASES["one noise"]
    parts = Shaped(outputs, shape), NORMAL, likelihood
    swag = bnns.swag(parts[0], likelihood)
    swag.fit([(X, targets)], functools.partial(torch.optim.SGD, lr=1e-4), 4, start=0.0)
    chain = tyxe.MCMC_BNN(*parts, tyxe.samplers.SGLD(1e-4))
    chain.fit([(X, targets)], 8)
    for bnn in (tyxe.DropoutBNN(parts[0], likelihood), swag, chain):
        scored(bnn, targets)


def inferred():
    likelihood = Gaussian(N, scale=dist.LogNormal(-1.0, 0.5))
    net = Shaped(2, (2,))
    return tyxe.VariationalBNN(net, NORMAL, likelihood, guide, tyxe.guides.AutoNormal)


def test_an_inferred_noise_is_drawn():
    bnn = inferred()
    found = scored(bnn, NUMBERS)
    moments = seeded(bnn.predict, X, num_predictions=8)
    torch.testing.assert_close((found.mean, found.stddev), moments)
    assert len({float(part.base_dist.scale[0, 0]) for part in found.parts}) == 8
    scored(bnn, NUMBERS, predictive="glm")


@pytest.mark.parametrize("make", [variational, laplace])
@pytest.mark.parametrize("name", ["one noise", "a noise for each", "noise of one number"])
def test_moments_are_those_of_predict(make, name):
    bnn = make(*CASES[name]) if make is laplace else make(*CASES[name][:3])
    found = seeded(bnn.predictive, X, num_predictions=8)
    mean, scale = seeded(bnn.predict, X, num_predictions=8)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.stddev, scale.expand_as(mean), rtol=1e-5, atol=1e-7)


def test_a_predicted_noise_has_a_mean_of_the_targets_width():
    bnn = variational(*CASES["predicted noise"][:3])
    found = seeded(bnn.predictive, X, num_predictions=8)
    mean, raw = seeded(bnn.predict, X, num_predictions=8).chunk(2, -1)
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.stddev, nn.functional.softplus(raw))


def test_of_censored_numbers_it_is_that_of_the_numbers():
    base = Gaussian(N, scale=0.3)
    bnns = (variational(one, 2, (2,)) for one in (base, likelihoods.Censored(base)))
    one, other = (seeded(bnn.predictive, X, num_predictions=4) for bnn in bnns)
    torch.testing.assert_close(other.mean, one.mean)
    torch.testing.assert_close(other.log_prob(NUMBERS), one.log_prob(NUMBERS))


@pytest.mark.parametrize("name", ["Categorical", "probabilities", "Bernoulli"])
def test_one_label_has_a_distribution_of_its_kind(name):
    *parts, _ = CASES[name]
    for bnn in (variational(*parts), tyxe.EnsembleBNN(lambda k: variational(*parts, k), 2)):
        found = seeded(bnn.predictive, X, num_predictions=8)
        logits = seeded(bnn.predict, X, num_predictions=8)
        probs = parts[0].class_logits(logits).softmax(-1)
        kind = td.Bernoulli if name == "Bernoulli" else td.Categorical
        assert isinstance(found, kind)
        torch.testing.assert_close(found.probs, probs[..., 1] if name == "Bernoulli" else probs)


@pytest.mark.parametrize("level", [0.01, 0.5, 0.95])
@pytest.mark.parametrize("name", ["one noise", "predicted noise"])
@pytest.mark.parametrize("make", [variational, laplace])
def test_quantiles_have_their_share_of_samples_below(make, name, level):
    bnn = make(*CASES[name]) if make is laplace else make(*CASES[name][:3])
    found, count = seeded(bnn.predictive, X, num_predictions=8), 20_000
    ends = tyxe.predictive.quantile(found, level)
    assert ends.shape == NUMBERS.shape
    below = (found.sample((count,)) < ends).double().mean(0)
    assert bool(((below - level).abs() < 5 * math.sqrt(level * (1 - level) / count)).all())


def test_the_quantile_of_a_normal_is_its_inverse_cdf():
    normal = td.Normal(X, SCALES)
    found = tyxe.predictive.quantile(td.Independent(normal, 1), 0.9)
    torch.testing.assert_close(found, normal.icdf(torch.tensor(0.9, dtype=X.dtype)))
    with pytest.raises(ValueError, match="level is 1; expected a number above 0 and below 1"):
        tyxe.predictive.quantile(normal, 1)
    heavy = likelihoods.StudentT(N, scale=0.3, df=4.0).predictive_distribution(torch.zeros(N, 2))
    with pytest.raises(NotImplementedError, match="no cdf of a StudentT: take quantiles of sampl"):
        tyxe.predictive.quantile(heavy, 0.5)


def test_samples_have_the_mixtures_law():
    parts = [
        td.Independent(td.Normal(torch.tensor([[0.0, 5.0]] * 3), 1.0), 1),
        td.Independent(td.Normal(torch.tensor([[4.0, -5.0]] * 3), 2.0), 1),
    ]
    weights = torch.tensor([0.25, 0.75])
    found = PredictiveMixture(parts, weights)
    torch.manual_seed(0)
    count = 20_000
    drawn = found.sample((count,))
    assert drawn.shape == (count, 3, 2)
    error = found.stddev / math.sqrt(count)
    assert ((drawn.mean(0) - found.mean).abs() < 4.5 * error).all()
    # Both numbers of a point are of one part, and points have parts of their own.
    first = drawn[..., 1] > 0
    share = first.double().mean(0)
    assert ((share - 0.25).abs() < 4.5 * math.sqrt(0.25 * 0.75 / count)).all()
    assert ((drawn[..., 0] - 2.0)[first].mean() + 2.0).abs() < 0.1
    both = (first[:, 0] & first[:, 1]).double().mean()
    assert abs(both - 0.0625) < 4.5 * math.sqrt(0.0625 * 0.9375 / count)
    # The second moment by quadrature over the density of one number.
    grid = torch.linspace(-25, 25, 20_001, dtype=torch.float64)
    one = [td.Normal(torch.tensor([0.0]), 1.0), td.Normal(torch.tensor([4.0]), 2.0)]
    marginal = mixture(one, weights)
    density = marginal.log_prob(grid[:, None]).exp()[:, 0].double()
    moment = torch.trapezoid(density * (grid - marginal.mean.double()) ** 2, grid)
    torch.testing.assert_close(moment, marginal.variance[0].double(), rtol=1e-5, atol=0)


def test_tied_outputs_of_a_linearised_net_have_their_covariance():
    *_, targets = CASES["a noise for each"]
    bnn = laplace(*CASES["a noise for each"])
    found = bnn.predictive(X)
    covariance = bnn.functional_variance(X) + torch.diag(SCALES.square())
    expected = td.MultivariateNormal(found.mean, covariance)
    torch.testing.assert_close(found.covariance_matrix, covariance, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.log_prob(targets), expected.log_prob(targets))


def test_batches_and_loaders_are_one_prediction():
    *parts, targets = CASES["one noise"]
    several = tyxe.EnsembleBNN(lambda k: variational(*parts, k), 2)
    for bnn in (variational(*parts), several, inferred(), laplace(*parts, targets)):
        whole = seeded(bnn.predictive, X).log_prob(targets)
        cut = seeded(bnn.predictive, X, batch_size=4).log_prob(targets)
        loaded = seeded(bnn.predictive, (batch for batch in (X[:2], X[2:]))).log_prob(targets)
        torch.testing.assert_close((cut, loaded), (whole, whole))
    pairs = [{"x": X[:3]}, {"x": X[3:]}]
    found = seeded(several.predictive, pairs, unpack=lambda batch: (batch["x"], None))
    torch.testing.assert_close(found.mean, seeded(several.predictive, X).mean)


@pytest.mark.parametrize("make", [tyxe.VariationalBNN, tyxe.LaplaceBNN])
def test_several_outputs_have_a_distribution_each(make):
    parts = {"kind": likelihoods.Categorical(N), "size": Gaussian(N, scale=0.3)}

    class Two(Shaped):
        def forward(self, x):
            found = super().forward(x)
            return found[:, :3], found[:, 3:]

    how = {"num_predictions": 8}
    given = [guide] if make is tyxe.VariationalBNN else []
    bnn = make(Two(5, (5,)), NORMAL, likelihoods.Joint(**parts), *given)
    if make is tyxe.LaplaceBNN:
        bnn.fit_curvature([(X, {"kind": LABELS, "size": NUMBERS})])
        how["link"] = "probit"
    found, moments = seeded(bnn.predictive, X, **how), seeded(bnn.predict, X, **how)
    torch.testing.assert_close(found["kind"].probs, moments["kind"].softmax(-1))
    torch.testing.assert_close((found["size"].mean, found["size"].stddev), moments["size"])
    both = tyxe.EnsembleBNN(lambda k: bnn, 1).predictive(X, **how)
    assert both.keys() == {"kind", "size"}


def test_the_centre_is_one_distribution():
    bnn = variational(*CASES["one noise"][:3])
    found = bnn.predictive(X, num_predictions=0)
    torch.testing.assert_close(found.mean, bnn.predict(X, num_predictions=0)[0])
    with pytest.raises(ValueError, match="num_predictions"):
        bnn.predictive(X, num_predictions=-1)
