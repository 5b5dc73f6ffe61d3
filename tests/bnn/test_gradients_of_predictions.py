"""Gradients of predictions in the inputs, as of an acquisition function."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe

X = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(6, 2)
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def convolutions():
    torch.manual_seed(0)
    first, second = nn.Conv1d(1, 3, 2, padding=1), nn.Conv1d(3, 2, 2)
    layers = first, nn.Tanh(), second, nn.Tanh(), nn.Flatten(), nn.Linear(4, 1)
    return nn.Sequential(nn.Unflatten(1, (1, 2)), *layers).double()


def gaussian():
    return tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.3)


def laplace(structure, the_net=None):
    bnn = tyxe.LaplaceBNN(the_net or net(), PRIOR, gaussian(), structure=structure)
    bnn.fit_curvature([(X, X[:, :1])])
    return bnn


class Scaled(nn.Module):
    """A site that is in no linear map, so that each point has a gradient of its own."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = net(), nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return self.net(x * self.scale)


def by_points(is_vectorized):
    bnn = laplace("full", Scaled())
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
    "full, convolutions": lambda: laplace("full", convolutions()),
    "kron, convolutions": lambda: laplace("kron", convolutions()),
    "lowrank, convolutions": lambda: laplace("lowrank", convolutions()),
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
    bnn = laplace("full")
    bnn.fit_gp([(X, X[:, :1])], 4)
    refined = bnn.refine([(X, X[:, :1])])
    total = {"gp": lambda x, grad: bnn.predict(x, predictive="gp", enable_grad=grad)}
    total["refined"] = lambda x, grad: refined.predict(x, enable_grad=grad)
    for function in total.values():
        assert_right(lambda x, grad, f=function: sum(part.sum() for part in f(x, grad)))


def same_draws(predict):
    def function(x, grad):
        torch.manual_seed(1)
        return sum(part.sum() for part in predict(x, grad))

    return function


def variational(prior=PRIOR, guide=tyxe.guides.AutoNormal):
    return tyxe.VariationalBNN(net(), prior, gaussian(), guide)


def chains():
    fixed = {"adapt_step_size": False, "adapt_mass_matrix": False}
    kernel = tyxe.samplers.HMC(1e-3, num_steps=2, **fixed)
    bnn = tyxe.MCMC_BNN(net(), PRIOR, gaussian(), kernel)
    bnn.fit([(X, X[:, :1])], 4, warmup_steps=2)
    return bnn


def fitted_swag(index=0):
    torch.manual_seed(index)
    own = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    bnn = tyxe.SWAG_BNN(own, PRIOR, gaussian(), rank=2)
    bnn.fit([(X, X[:, :1])], torch.optim.SGD(bnn.parameters(), lr=1e-3), 4, start=0.0)
    return bnn


def with_dropout():
    """Its dropout has a mask of its own for each draw, and not for each row."""
    parts = nn.Linear(2, 3), nn.Tanh(), nn.Dropout(0.3), nn.Linear(3, 1)
    return tyxe.DropoutBNN(nn.Sequential(*parts).double(), gaussian())


NOTHING = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)
# A wrapper, and options of its prediction.
CASES = {
    "plain": (variational, {}),
    "at once": (variational, {"vectorize": True}),
    "in batches": (variational, {"batch_size": 2}),
    "each draw": (variational, {"aggregate": False}),
    "linearised": (variational, {"predictive": "glm"}),
    "joint": (lambda: laplace("full"), {"aggregate": False, "joint": True}),
    "chains": (chains, {}),
    "ensemble": (
        lambda: tyxe.EnsembleBNN(lambda k: [variational(), laplace("full")][k], 2),
        {},
    ),
    "SWAG": (fitted_swag, {}),
    "Multi-SWAG": (lambda: tyxe.EnsembleBNN(fitted_swag, 2), {}),
    "dropout": (with_dropout, {}),
    "maximum likelihood": (lambda: variational(NOTHING, None), {}),
}


@pytest.mark.parametrize(("make", "options"), CASES.values(), ids=CASES.keys())
def test_of_every_wrapper(make, options):
    bnn = make()
    assert_right(
        same_draws(lambda x, grad: bnn.predict(x, num_predictions=4, enable_grad=grad, **options))
    )


def test_of_a_module_in_a_loop_of_its_own():
    """A `PytorchBNN` records gradients in its forward, and has no predictions with any."""
    bnn = tyxe.PytorchBNN(net(), PRIOR, tyxe.guides.AutoNormal)
    x = X.clone().requires_grad_()
    torch.manual_seed(0)
    (gradient,) = torch.autograd.grad(bnn(x).sum(), x)

    def again(at):
        torch.manual_seed(0)
        return bnn(at).detach().sum()

    torch.testing.assert_close(gradient, differences(again, X), rtol=1e-6, atol=1e-7)
    assert not bnn.predict(x).requires_grad


@pytest.mark.parametrize("make", [lambda: laplace("full"), fitted_swag], ids=["Laplace", "SWAG"])
def test_of_the_predictive_distribution(make):
    """Such as of the log-probability of a value, or of the mean and standard deviation."""
    bnn, y = make(), torch.ones(3, 1, dtype=torch.float64)

    def of(x, grad):
        return bnn.predictive(x, num_predictions=4, enable_grad=grad)

    assert_right(same_draws(lambda x, g: [of(x, g).log_prob(y)]))
    assert_right(same_draws(lambda x, g: [of(x, g).stddev]))


def test_an_acquisition_function_is_optimised_in_the_inputs():
    """Follow an upper confidence bound uphill, as Bayesian optimisation does."""
    bnn = laplace("full")
    x = X[:3].clone().requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.05)

    def bound(at, grad):
        found = bnn.predictive(at, enable_grad=grad)
        return (found.mean + 2 * found.stddev).sum()

    before = bound(X[:3], False)
    for _ in range(10):
        optimizer.zero_grad()
        (-bound(x, True)).backward()
        optimizer.step()
    assert bound(x.detach(), False) > before + 0.1
