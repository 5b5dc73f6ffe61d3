"""Gradients of predictions in the inputs, as of an acquisition function."""

import functools

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import tyxe
from tests.oracles import bnns
from tests.oracles.bnns import NORMAL, mean_field
from tests.oracles.nets import NetOf

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)


GAUSSIAN = tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.3)
DATA = [(X, X[:, :1])]


def net(*more):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), *more, nn.Linear(3, 1)).double()


def convolutions():
    torch.manual_seed(0)
    first, second = nn.Conv1d(1, 3, 2, padding=1), nn.Conv1d(3, 2, 2)
    layers = first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(4, 1)
    return nn.Sequential(nn.Unflatten(1, (1, 2)), *layers).double()


def laplace(structure="full", make=net):
    return bnns.laplace(make(), GAUSSIAN, DATA, structure=structure)


def scaled():
    """A net with a site in no linear map, so that each point has a gradient of its own."""
    scale = nn.Parameter(torch.ones(1, dtype=torch.float64))
    return NetOf(lambda self, x: self.net(x * self.scale), net=net(), scale=scale)


def by_points(is_vectorized):
    bnn = laplace("full", scaled)
    bnn._runtime.linearized.is_vectorized = is_vectorized
    return bnn


def differences(function, x, step=1e-5):
    """Return the gradient of a function by central differences."""
    found = torch.zeros_like(x)
    for index in range(x.numel()):
        moved = torch.zeros_like(x).flatten()
        moved[index] = step
        up, down = function(x + moved.view_as(x)), function(x - moved.view_as(x))
        found.view(-1)[index] = (up - down) / (2 * step)
    return found


def assert_right(function):
    """Compare a function's gradient in the inputs with differences of the function."""
    x = X[:3].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x, True), x)
    torch.testing.assert_close(
        gradient, differences(lambda at: function(at, False), X[:3]), rtol=1e-6, atol=1e-7
    )
    assert not function(x, False).requires_grad


LAPLACE = {
    "full": lambda: laplace("full"),
    "kron": lambda: laplace("kron"),
    "diag": lambda: laplace("diag"),
    "lowrank": lambda: laplace("lowrank"),
    "full, convolutions": lambda: laplace("full", convolutions),
    "kron, convolutions": lambda: laplace("kron", convolutions),
    "lowrank, convolutions": lambda: laplace("lowrank", convolutions),
    "points by vmap": lambda: by_points(True),
    "points by a loop": lambda: by_points(False),
}


@pytest.mark.parametrize("make", LAPLACE.values(), ids=LAPLACE.keys())
def test_of_a_linearised_net(make):
    bnn = make()
    assert_right(lambda x, grad: sum(p.sum() for p in bnn.predict(x, enable_grad=grad)))
    assert_right(lambda x, grad: bnn.functional_variance(x, enable_grad=grad).sum())
    assert_right(lambda x, grad: bnn.functional_variance(x, joint=True, enable_grad=grad).sum())


def test_of_a_gaussian_process_and_a_refined_posterior():
    bnn = laplace()
    bnn.fit_gp(DATA, 4)
    refined = bnn.refine(DATA)
    for one, options in ((bnn, {"predictive": "gp"}), (refined, {})):
        predict = functools.partial(one.predict, **options)
        assert_right(lambda x, grad, f=predict: sum(p.sum() for p in f(x, enable_grad=grad)))


def same_draws(predict):
    def function(x, grad):
        torch.manual_seed(1)
        return sum(part.sum() for part in predict(x, grad))

    return function


def variational():
    return mean_field(net(), GAUSSIAN)


def chains():
    bnn = bnns.chains(net(), GAUSSIAN)
    bnn.fit(DATA, 4, warmup_steps=2)
    return bnn


def swag(index=0):
    own = net()
    nn.init.constant_(own[0].bias, 0.1 * index)
    bnn = bnns.swag(own, GAUSSIAN)
    bnn.fit(DATA, torch.optim.SGD(bnn.parameters(), lr=1e-3), 4, start=0.0)
    return bnn


def ensemble():
    return tyxe.EnsembleBNN(lambda index: [variational, laplace][index](), 2)


# A wrapper, and options of its prediction.
CASES = {
    "plain": (variational, {}),
    "at once": (variational, {"vectorize": True}),
    "in batches": (variational, {"batch_size": 2}),
    "each draw": (variational, {"aggregate": False}),
    "linearised": (variational, {"predictive": "glm"}),
    "joint": (laplace, {"aggregate": False, "joint": True}),
    "chains": (chains, {}),
    "ensemble": (ensemble, {}),
    "SWAG": (swag, {}),
    "Multi-SWAG": (lambda: tyxe.EnsembleBNN(swag, 2), {}),
    # With a mask of its own for each draw, and not for each row.
    "dropout": (lambda: tyxe.DropoutBNN(net(nn.Dropout(0.3)), GAUSSIAN), {}),
    "maximum likelihood": (lambda: bnns.plain(net(), GAUSSIAN), {}),
}


@pytest.mark.parametrize(("make", "options"), CASES.values(), ids=CASES.keys())
def test_of_every_wrapper(make, options):
    bnn = make()
    assert_right(
        same_draws(lambda x, grad: bnn.predict(x, num_predictions=4, enable_grad=grad, **options))
    )


def test_a_pytorch_bnn_has_gradients_in_its_forward_alone():
    bnn = tyxe.PytorchBNN(net(), NORMAL, tyxe.guides.AutoNormal)
    assert_right(same_draws(lambda x, grad: [bnn(x) if grad else bnn(x).detach()]))
    assert not bnn.predict(X.clone().requires_grad_()).requires_grad


LEARNED = {
    "noise": (tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.3, learn_scale=True), X[:, :1]),
    "StudentT": (tyxe.likelihoods.StudentT(6, scale=0.3, learn_scale=True), X[:, :1]),
    "count": (
        tyxe.likelihoods.NegativeBinomial(6, total_count=2.0, learn_total_count=True),
        torch.arange(6, dtype=torch.float64)[:, None],
    ),
    "cuts": (tyxe.likelihoods.Ordinal(6, 3), torch.arange(6) % 3),
}


def calibrated(bnn, y):
    if bnn.likelihood.has_classes:
        return tyxe.calibration.SplitConformal(level=0.5).wrap(bnn, [(X, y)])
    return tyxe.calibration.ScaleFactor().wrap(bnn, [(X, y)])


@pytest.mark.parametrize("name", LEARNED)
def test_parameters_of_the_likelihood_have_none(name):
    likelihood, y = LEARNED[name]
    bnn = mean_field(net(), likelihood)
    law, wrapped = bnn.predictive(X), calibrated(bnn, y)
    assert bnn.predictive(X, enable_grad=True).log_prob(y).requires_grad
    found = [law.log_prob(y), law.mean, law.stddev, law.variance, wrapped.predict(X)]
    found += [bnn.ood_score(X, "expected_variance"), wrapped.to_ensemble(2)(X)]
    if not likelihood.has_classes:
        found.append(wrapped.evaluate(X, y))
    assert not any(leaf.requires_grad for leaf in tree_leaves(found))
    tyxe.diagnostics.scores(bnn, [(X, y)])
    assert all(parameter.requires_grad for parameter in bnn.likelihood.parameters())


@pytest.mark.parametrize("make", [laplace, swag])
def test_of_the_predictive_distribution(make):
    """Such as of the log-probability of a value, or of the mean and standard deviation."""
    bnn, y = make(), torch.ones(3, 1, dtype=torch.float64)

    def of(x, grad):
        return bnn.predictive(x, num_predictions=4, enable_grad=grad)

    assert_right(same_draws(lambda x, g: [of(x, g).log_prob(y)]))
    assert_right(same_draws(lambda x, g: [of(x, g).stddev]))
