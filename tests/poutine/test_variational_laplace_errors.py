"""What variational Laplace refuses, and what it warns of."""

import functools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.func import jacrev

import tyxe
from tests.oracles.variational_laplace import (
    NORMAL,
    as_function,
    bnn_of,
    likelihoods,
    small,
    smooth_net,
    start_of,
    terms_of,
)
from tyxe.guides import AutoNormal, scale_below_prior, stationary_scale
from tyxe.likelihoods import Bernoulli, Categorical
from tyxe.poutine import local_reparameterization, variational_laplace


def test_unknown_curvature():
    with pytest.raises(ValueError, match="curvature is 'exact'; expected one of 'fisher'"):
        variational_laplace("exact")


@pytest.mark.parametrize("first", ["vl", "lrt", "twice"])
def test_another_sampling_handler_is_an_error(first):
    bnn, x, y = small()
    handlers = {
        "vl": (variational_laplace, local_reparameterization),
        "lrt": (local_reparameterization, variational_laplace),
        "twice": (variational_laplace, variational_laplace),
    }[first]
    before = {k: v.clone() for k, v in bnn.state_dict().items() if isinstance(v, torch.Tensor)}
    outer, inner = (make() for make in handlers)
    with pytest.raises(RuntimeError, match="use one of them"), outer, inner:
        bnn.fit([(x, y)], torch.optim.Adam, 1)
    after = bnn.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_guides_that_are_not_mean_field_are_named():
    _, x, y = small()
    guide = pyro.infer.autoguide.AutoLowRankMultivariateNormal
    bnn = tyxe.VariationalBNN(smooth_net(), NORMAL, Categorical(6), guide)
    message = r"not: net\.0\.weight \(Delta\), .*use tyxe\.guides\.AutoNormal"
    with variational_laplace(), pytest.raises(TypeError, match=message):
        bnn.fit([(x, y)], torch.optim.Adam, 1)
    radial = tyxe.VariationalBNN(smooth_net(), NORMAL, Categorical(6), tyxe.guides.AutoRadial)
    with variational_laplace(), pytest.raises(TypeError, match=r"net\.0\.weight \(Radial\)"):
        radial.fit([(x, y)], torch.optim.Adam, 1)


class CannotSample(Categorical):
    def predictive_distribution(self, predictions, latents=None):
        made = super().predictive_distribution(predictions, latents)

        class Unsampled(type(made)):
            def sample(self, sample_shape=()):
                raise NotImplementedError

        made.__class__ = Unsampled
        return made


def test_likelihood_that_cannot_sample():
    bnn, x, y = small()
    bnn.likelihood.__class__ = CannotSample
    with variational_laplace(), pytest.raises(TypeError, match=r"has no sample\(\): implement it"):
        bnn.fit([(x, y)], torch.optim.Adam, 1)
    with variational_laplace("empirical"):
        assert bnn.fit([(x, y)], torch.optim.Adam, 1).loss


class Root(nn.Module):
    """Its first derivative at 0 is finite by a cut-off, its second is not."""

    def forward(self, x):
        return (x - x).abs().pow(1.5) + x


def test_curvature_that_is_not_finite_names_sites_and_changes_nothing():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), Root(), nn.Linear(4, 3)).double()
    likelihood, y, _ = likelihoods(6)["categorical"]
    bnn, x = bnn_of(net, likelihood), torch.randn(6, 2, dtype=torch.float64)
    before = {k: v.clone() for k, v in bnn.state_dict().items() if isinstance(v, torch.Tensor)}
    with (
        variational_laplace("hessian"),
        pytest.raises(RuntimeError, match=r"curvature .* not finite at net\.0\.weight"),
    ):
        bnn.fit([(x, y)], torch.optim.Adam, 1)
    after = bnn.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_gradients_off():
    bnn, x, y = small()
    with (
        variational_laplace(),
        torch.no_grad(),
        pytest.raises(RuntimeError, match="gradients are off"),
    ):
        terms_of(bnn, x, y)


def test_hessian_of_a_large_net():
    net = nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 3))
    bnn = bnn_of(net, Categorical(6))
    with (
        variational_laplace("hessian"),
        pytest.raises(ValueError, match=r'each of 20,403 weights.*curvature="fisher"'),
    ):
        bnn.fit([(torch.randn(6, 200), torch.randint(3, (6,)))], torch.optim.Adam, 1)


@pytest.mark.parametrize("function", [False, True])
def test_kinks_are_named_once(function):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(nn.functional.relu(self.linear(x)))

    net = Functional() if function else nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    bnn = bnn_of(net, Categorical(6))
    data = [(torch.randn(3, 2), torch.randint(3, (3,))) for _ in range(2)]
    match = r"Relu \(called as a function\)" if function else r"1 \(ReLU\)"
    with pytest.warns(tyxe.TyxeWarning, match=match) as caught, variational_laplace():
        bnn.fit(data, torch.optim.Adam, 2)
    assert len(caught) == 1


def test_smooth_nets_do_not_warn_after_replacement():
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    tyxe.util.replace_activations_(net, nn.ReLU, nn.Softplus)
    bnn = bnn_of(net, Categorical(3))
    with variational_laplace():
        history = bnn.fit([(torch.randn(3, 2), torch.randint(3, (3,)))], torch.optim.Adam, 1)
    assert math.isfinite(history.loss[0])


def test_upward_curvature_is_said():
    # exp(-w^2 / 2) has its inflection at 1: at 3 the log-density of a wrong label curves upwards.
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        net.weight.fill_(3.0)

    class Bump(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = net

        def forward(self, x):
            return 20 * (-self.linear(x).square() / 2).exp()

    bnn = bnn_of(Bump(), Bernoulli(4, event_dim=1))
    data = [(torch.ones(4, 1, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64))]
    with (
        pytest.warns(
            tyxe.TyxeWarning, match=r"curves upwards at 1 weights of 'net\.linear\.weight'"
        ),
        variational_laplace("hessian"),
    ):
        bnn.fit(data, torch.optim.Adam, 1)


@pytest.mark.parametrize("warns", [True, False])
def test_upward_curvature_is_measured_against_beta_prior_and_scale(warns):
    net = nn.Sequential(
        nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False)
    ).double()
    with torch.no_grad():
        net[0].weight.fill_(-1.0)
        net[2].weight.fill_(3.0)
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 0.5))
    guide = functools.partial(AutoNormal, init_loc_fn=start_of(net), init_scale=0.1)
    bnn = tyxe.VariationalBNN(net, prior, Bernoulli(8, event_dim=1), guide)
    data = (torch.ones(4, 1, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64))
    run, means = as_function(bnn, data[0])
    hessian = jacrev(jacrev(lambda w: bnn.likelihood.log_likelihood(run(w), data[1], "sum")))(means)
    diagonal = hessian[0, 0].item()
    assert diagonal > 0
    threshold = 8 / 4 * diagonal * 0.5**2  # the plate's scale, the Hessian, the prior's variance
    beta = threshold * (0.999 if warns else 1.001)
    with warnings.catch_warnings(record=True) as caught, variational_laplace("hessian"):
        warnings.simplefilter("always")
        bnn.fit([data], functools.partial(torch.optim.SGD, lr=0.0), 1, beta=beta)
    found = [w for w in caught if "at 1 weights of 'net.0.weight'" in str(w.message)]
    assert len(found) == warns


def test_prediction_inside_warns_that_it_is_at_the_mean():
    bnn, x, _ = small()
    with pytest.warns(tyxe.TyxeWarning, match="met no data"), variational_laplace():
        bnn.predict(x, num_predictions=2)


def test_bad_starts():
    with pytest.raises(ValueError, match=r"learning_rate is 0\.0 and batch_size 10"):
        stationary_scale(0.0, 10)
    message = {"name": "w", "fn": dist.Cauchy(torch.zeros(2), 1.0)}
    without_moments = dist.TransformedDistribution(
        dist.Normal(torch.zeros(2), 1.0), [dist.transforms.SigmoidTransform()]
    )
    for prior in (message["fn"], without_moments):
        with pytest.raises(ValueError, match="'w' has no finite standard deviation"):
            scale_below_prior()({"name": "w", "fn": prior})


class CalledAsAFunction(nn.Linear):
    def forward(self, x):
        return nn.functional.hardsigmoid(super().forward(x))


@pytest.mark.parametrize("curvature", ["fisher", "hessian", "empirical"])
@pytest.mark.parametrize(
    ("part", "named"),
    [
        (nn.Sequential(nn.Linear(2, 4), nn.Hardsigmoid()), r"0\.1 \(Hardsigmoid\)"),
        (CalledAsAFunction(2, 4), r"Hardsigmoid \(called as a function\)"),
        (nn.Sequential(nn.EmbeddingBag(3, 4)), r"0\.0 \(EmbeddingBag\)"),
    ],
)
def test_functions_without_a_second_derivative_are_named_before_the_backward(
    part, named, curvature
):
    is_bag = isinstance(part[0] if isinstance(part, nn.Sequential) else part, nn.EmbeddingBag)
    x = torch.arange(12).view(6, 2) % 3 if is_bag else torch.randn(6, 2)
    bnn = bnn_of(nn.Sequential(part, nn.Linear(4, 3)), Categorical(6))
    message = f"PyTorch has no second derivative of {named}: replace them before training"
    with variational_laplace(curvature), pytest.raises(RuntimeError, match=message):
        bnn.fit([(x, torch.arange(6) % 3)], torch.optim.Adam, 1)
