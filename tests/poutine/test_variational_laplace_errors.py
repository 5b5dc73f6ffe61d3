"""What variational Laplace refuses, and what it warns of."""

import contextlib
import functools
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
    small,
    smooth_net,
    start_of,
    terms_of,
)
from tyxe.guides import AutoNormal, AutoRadial
from tyxe.likelihoods import Bernoulli, Categorical
from tyxe.poutine import local_reparameterization, variational_laplace


def test_unknown_curvature():
    with pytest.raises(ValueError, match="curvature is 'exact'; expected one of 'fisher'"):
        variational_laplace("exact")


class CannotSample(Categorical):
    def predictive_distribution(self, predictions, latents=None):
        made = super().predictive_distribution(predictions, latents)

        class Unsampled(type(made)):
            def sample(self, sample_shape=()):
                raise NotImplementedError

        made.__class__ = Unsampled
        return made


class Root(nn.Module):
    """Its first derivative at 0 is finite by a cut-off, its second is not."""

    def forward(self, x):
        return (x - x).abs().pow(1.5) + x


class AFunction(nn.Linear):
    def forward(self, x):
        return nn.functional.hardsigmoid(super().forward(x))


def of_guide(guide):
    return tyxe.VariationalBNN(smooth_net(), NORMAL, Categorical(6), guide)


def of(net, likelihood=Categorical):
    return bnn_of(net.double(), likelihood(6))


def of_part(part):
    return of(nn.Sequential(part, nn.Linear(4, 3)))


def of_parts(*parts):
    return of_part(nn.Sequential(nn.Linear(2, 4), *parts))


LOW_RANK = pyro.infer.autoguide.AutoLowRankMultivariateNormal
X, TOKENS = torch.randn(6, 2, dtype=torch.float64), torch.arange(12).view(6, 2) % 3
WITHOUT = "PyTorch has no second derivative of %s.*: replace them before training"
REFUSED = {
    "coupled": (lambda: of_guide(LOW_RANK), TypeError, r"t \(Delta\), .*use tyxe\.guides\.AutoNor"),
    "radial": (lambda: of_guide(AutoRadial), TypeError, r"net\.0\.weight \(Radial\)"),
    "unsampled": (
        lambda: of(smooth_net(), CannotSample),
        TypeError,
        r"no sample\(\): implement it",
    ),
    "hardsigmoid": (
        lambda: of_parts(nn.Hardsigmoid()),
        RuntimeError,
        WITHOUT % r"0\.1 \(Hardsigmo",
    ),
    "as a function": (lambda: of_part(AFunction(2, 4)), RuntimeError, WITHOUT % r"Ha.*as a func"),
    "bag": (lambda: of_part(nn.EmbeddingBag(3, 4)), RuntimeError, WITHOUT % r"0 \(EmbeddingBag"),
    "infinite": (
        lambda: of_parts(nn.BatchNorm1d(4), Root()),
        RuntimeError,
        r"at net\.0\.0\.weight",
    ),
    "large": (lambda: of(nn.Linear(2, 6667)), ValueError, r'20,001 weights.*curvature="fisher"'),
}


def refuses(bnn, x, outer, inner, error, message):
    before = {k: v.clone() for k, v in bnn.state_dict().items() if isinstance(v, torch.Tensor)}
    with pytest.raises(error, match=message), outer, inner:
        bnn.fit([(x, torch.arange(6) % 3)], torch.optim.Adam, 1)
    after = bnn.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_serve_is_named_and_changes_nothing(case):
    make, error, message = REFUSED[case]
    handler = variational_laplace("hessian" if case in ("infinite", "large") else "fisher")
    x = TOKENS if case == "bag" else X
    refuses(make(), x, contextlib.nullcontext(), handler, error, message)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (variational_laplace, local_reparameterization),
        (local_reparameterization, variational_laplace),
        (variational_laplace, variational_laplace),
    ],
)
def test_another_sampling_handler_is_an_error(outer, inner):
    bnn = bnn_of(smooth_net(), Categorical(6))
    refuses(bnn, X, outer(), inner(), RuntimeError, "use one of them")


def test_the_true_labels_need_no_draws():
    with variational_laplace("empirical"):
        data = [(X, torch.arange(6) % 3)]
        assert of(smooth_net(), CannotSample).fit(data, torch.optim.Adam, 1)


def test_gradients_off():
    bnn, x, y = small()
    refused = pytest.raises(RuntimeError, match="gradients are off")
    with variational_laplace(), torch.no_grad(), refused:
        terms_of(bnn, x, y)


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
    message = r"curves upwards at 1 weights of 'net\.linear\.weight'"
    with pytest.warns(tyxe.TyxeWarning, match=message), variational_laplace("hessian"):
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
