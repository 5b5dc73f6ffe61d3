"""Compiled predictions are the uncompiled ones, or say why they are none."""

import functools
import warnings
from contextlib import nullcontext

import pyro.distributions as dist
import pyro.infer
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import nn

import tyxe
from tyxe.samplers.program import has_compiler

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(20) % 3
LOADER = list(zip(X.split(8), Y.split(8), strict=True))  # of 8, 8 and 4


class Net(nn.Module):
    """Has a norm, a buffer, and a parameter that is no site."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        return self.head(self.body(x)) + self.shift


def make(kind):
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.Categorical(20)
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
    if kind == "laplace":
        bnn = tyxe.LaplaceBNN(Net(), prior, likelihood, structure="diag")
        bnn.fit_curvature(LOADER)
        return bnn
    if kind == "mcmc":
        bnn = tyxe.MCMC_BNN(nn.Linear(3, 3), NORMAL, likelihood, pyro.infer.HMC)
        bnn.fit(LOADER, 4, warmup_steps=1, disable_progbar=True)
        return bnn
    guides = {"normal": tyxe.guides.AutoNormal, "joint": AutoMultivariateNormal}
    return tyxe.VariationalBNN(Net(), prior, likelihood, guides[kind])


@pytest.mark.parametrize("kind", ["normal", "joint", "laplace", "mcmc"])
def test_predictions_are_those_of_uncompiled_passes(kind, traced):
    bnn = make(kind)
    options = {"num_predictions": 4, "predictive": "bnn"}
    found = []
    for compiles in (True, False):
        torch.manual_seed(1)
        predictions = bnn.predict(LOADER, compile=compiles, **options)
        found.append((predictions, *bnn.evaluate(LOADER, compile=compiles, **options)))
    assert len(traced) == 4  # of two shapes in two calls, for all draws
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_a_program_has_the_statistics_of_each_draw(traced):
    bnn = make("normal")
    bnn.update_norm_statistics(LOADER)
    torch.manual_seed(1)
    found = bnn.predict(X, num_predictions=3, compile=True, aggregate=False)
    torch.manual_seed(1)
    torch.testing.assert_close(found, bnn.predict(X, num_predictions=3, aggregate=False))
    assert len(traced) == 1


class Keywords(nn.Module):
    """Takes arguments by name, one of them or another."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, a, b=None, c=None):
        return self.layer(a - 2 * b if c is None else a + 3 * c)


def test_inputs_are_told_apart_by_name_and_order(traced):
    likelihood = tyxe.likelihoods.Categorical(20)
    bnn = tyxe.VariationalBNN(Keywords(), NORMAL, likelihood, tyxe.guides.AutoNormal)
    x, y = X, X.flip(0) ** 2
    batches = [{"a": x, "b": y}, {"b": y, "a": x}, {"a": x, "c": y}]
    found = []
    for compiles in (True, False):
        torch.manual_seed(1)
        found.append(bnn.predict(batches, num_predictions=2, compile=compiles))
    torch.testing.assert_close(*found)
    assert len(traced) >= 2


class Counting(nn.Linear):
    """Replaces a buffer."""

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, x):
        self.forwards = self.forwards + 1
        return super().forward(x) * self.forwards


def test_a_net_that_replaces_its_buffers_is_no_program(traced):
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        likelihood = tyxe.likelihoods.Categorical(20)
        bnn = tyxe.VariationalBNN(Counting(), NORMAL, likelihood, tyxe.guides.AutoNormal)
        expected = pytest.warns(tyxe.TyxeWarning, match=r"replaces forwards, .* in place")
        with expected if compiles else nullcontext():
            found.append(bnn.predict(LOADER, num_predictions=2, compile=compiles))
    torch.testing.assert_close(*found)
    assert not traced


def test_a_program_takes_the_net_alone(traced):
    bnn = make("mcmc")
    bnn.predict(X, num_predictions=2, compile=True)
    (program,) = traced
    given = [node for node in program.graph.nodes if node.op == "placeholder"]
    assert len(given) == 3  # weight, bias and inputs


def test_a_net_that_is_no_program_predicts_after_one_warning(traced):
    class Depends(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(2 * x)

    likelihood = tyxe.likelihoods.Categorical(20)
    bnn = tyxe.VariationalBNN(Depends(3, 3), NORMAL, likelihood, tyxe.guides.AutoNormal)
    torch.manual_seed(1)
    with pytest.warns(tyxe.TyxeWarning, match=r"passes of the net are no program") as caught:
        found = bnn.predict(LOADER, num_predictions=2, compile=True)
    assert len(caught) == 1
    torch.manual_seed(1)
    torch.testing.assert_close(found, bnn.predict(LOADER, num_predictions=2))


def test_draws_inside_of_the_net_are_not_compiled(traced):
    bnn = make("normal")
    drops = tyxe.DropoutBNN(Net(), tyxe.likelihoods.Categorical(20))
    with pytest.warns(tyxe.TyxeWarning, match=r"draws are made inside the net"):
        drops.predict(X, num_predictions=2, compile=True)
    with (
        tyxe.poutine.local_reparameterization(),
        pytest.warns(tyxe.TyxeWarning, match=r"draws are made inside the net"),
    ):
        bnn.predict(X, num_predictions=2, compile=True)
    laplace = make("laplace")
    with pytest.warns(tyxe.TyxeWarning, match=r"the linearised net run uncompiled"):
        laplace.predict(X, compile=True)
    with pytest.raises(ValueError, match=r"leave vectorize out"):
        bnn.predict(X, num_predictions=2, compile=True, vectorize=True)
    assert not traced


class Shifted(nn.Module):
    """Begins elementwise, by a buffer that is a column of a larger tensor."""

    def __init__(self, dense):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        table = torch.arange(12.0).view(3, 4)
        self.register_buffer("shift", table[:, 1].clone() if dense else table[:, 1])

    def forward(self, x):
        return self.layer((x + self.shift).tanh())


@pytest.mark.skipif(not has_compiler(torch.device("cpu")), reason="programs need a C++ compiler")
@pytest.mark.parametrize("dense", [True, False])
def test_memory_with_gaps_is_read_as_it_is(dense):
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.Categorical(20)
    bnn = tyxe.VariationalBNN(Shifted(dense), NORMAL, likelihood, tyxe.guides.AutoNormal)
    x = torch.randn(8, 6)[:, ::2]
    expected = pytest.warns(tyxe.TyxeWarning, match=r"shape \(3,\) and strides \(4,\)")
    found = []
    for compiles in (True, False):
        torch.manual_seed(1)
        with nullcontext() if dense or not compiles else expected:
            found.append(bnn.predict(x, num_predictions=2, compile=compiles))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    if dense:
        fits = []
        # whatever numbers a compiler draws
        narrow = functools.partial(tyxe.guides.AutoNormal, init_scale=1e-6)
        for compiles in (True, False):
            torch.manual_seed(2)
            one = tyxe.VariationalBNN(Shifted(True), NORMAL, likelihood, narrow)
            batches = [(x, Y[:8]), (x, Y[8:16])]
            history = one.fit(batches, torch.optim.SGD(one.parameters(), 1e-3), 3, compile=compiles)
            fits.append(torch.tensor(history.loss))
        torch.testing.assert_close(*fits, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not has_compiler(torch.device("cpu")), reason="programs need a C++ compiler")
def test_a_compiled_program_predicts():
    bnn = make("normal")
    predict = functools.partial(bnn.predict, X, num_predictions=2)
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", tyxe.TyxeWarning)
        found = predict(compile=True)
    torch.manual_seed(1)
    torch.testing.assert_close(found, predict(), rtol=1e-4, atol=1e-5)
