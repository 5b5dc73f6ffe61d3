"""Mistakes in `fit`: one clear error each, with what was given and what mends it."""

import copy
import functools

import pytest
import torch
from pyro.infer.mcmc import HMC
from torch import nn

import tyxe
from tests.oracles.nets import NetOf
from tests.oracles.rejections import ADAM, LABELS, LIKELIHOOD, PRIOR, N, X, Y, make, net, rejects
from tyxe.guides import AutoNormal
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Poisson,
)

NINE = [(torch.randn(9, 2), torch.randn(9, 1))]
OF_ANOTHER_NET = torch.optim.Adam(nn.Linear(2, 1).parameters())
ARGUMENTS = {
    "swapped": (([(X, Y)], 10, ADAM), TypeError, r"num_epochs is a partial.*fit\(data_loader, op"),
    "swapped, an instance": (([(X, Y)], 10, OF_ANOTHER_NET), TypeError, "num_epochs is an Adam"),
    "num_epochs": (([(X, Y)], ADAM, -1), ValueError, "num_epochs is -1"),
    "a string": (([(X, Y)], "adam", 1), TypeError, "optim is 'adam'; expected a Pyro optimiser"),
    "no optimiser": (([(X, Y)], lambda _: 3, 1), TypeError, "what optim makes is 3; expected"),
    "another net": (([(X, Y)], OF_ANOTHER_NET, 1), ValueError, r"it on bnn.parameters\(\)"),
    "no loader": ((3, ADAM, 1), TypeError, r"data_loader is 3; expected a loader"),
    "empty": (([], ADAM, 1), ValueError, "loader is empty; expected a batch or more"),
    "a tensor": (
        (X, ADAM, 1),
        TypeError,
        r"is a Tensor; expected a loader.* \[\(x, y\)\]",
    ),
    "an array": ((X.numpy(), ADAM, 1), TypeError, "is a ndarray; expected a loader"),
    "a batch": (
        ((X, Y), ADAM, 1),
        TypeError,
        r"data_loader is a tuple; expected a loader.* \[\(x, y\)\]",
    ),
    "a mapping": (({"x": X, "y": Y}, ADAM, 1), TypeError, "is a dict; expected a loader"),
    "inputs alone": (([X, X], ADAM, 1), ValueError, "the loader yields a Tensor; expected "),
    "no targets": (([(X,)], ADAM, 1), ValueError, "yields a tuple of 1 elements; expected "),
    "not grouped": (([(X, X, Y)], ADAM, 1), ValueError, r"weights, has shape .* \(\(x1, x2\), y\)"),
    "a list": (([(X, Y.tolist())], ADAM, 1), ValueError, "targets of type list; expected "),
    "large": ((NINE, ADAM, 1), ValueError, "9 points, but .* dataset_size=8; pass the number"),
    "flat": (([(X, Y[:, 0])], ADAM, 1), ValueError, r"\(8, 1\), .*pass targets.unsqueeze"),
    "no points": (([(X[:0], Y[:0])], ADAM, 1), ValueError, r"batch without points.*leave it out"),
    "fewer": (([(X, Y[:5])], ADAM, 1), ValueError, r"shape \(5, 1\) and expected \(8, 1\)"),
    "closure": (([(X, Y)], torch.optim.LBFGS, 1), TypeError, "LBFGS.*closure"),
}
OPTIONS = {
    "particles": ({"num_particles": 0}, ValueError, "num_particles is 0; expected 1 or more"),
    "beta": ({"beta": -1}, ValueError, "beta is -1; expected a number of 0 or more, or a functi"),
    "beta, NaN": ({"beta": float("nan")}, ValueError, "beta is nan; expected a number"),
    "norm": ({"clip_norm": 0.0}, ValueError, "clip_norm is 0.0; expected a number above 0"),
    "a flag": ({"compile": 1.0}, TypeError, "compile is 1.0; expected True or False"),
    "kind": ({"lr_multipliers": {"mean": 2.0}}, ValueError, "is 'mean'; expected one of 'loc', 's"),
    "rate": ({"lr_multipliers": {"scale": -2.0}}, ValueError, r"\['scale'\] is -2.0; expected"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_fit_rejects(case):
    args, error, message = ARGUMENTS[case]
    bnn = make()
    rejects(bnn, error, message, lambda: bnn.fit(*args))
    with tyxe.poutine.local_reparameterization():
        bnn.fit([(X, Y)], ADAM, 1, beta=0.0)  # nothing is left broken


@pytest.mark.parametrize("case", OPTIONS)
def test_fit_rejects_options(case):
    options, error, message = OPTIONS[case]
    bnn = make()
    rejects(bnn, error, message, lambda: bnn.fit([(X, Y)], ADAM, 1, **options))
    assert bnn.optimizer is None


def test_optimisers_of_this_bnn_that_do_not_fit():
    bnn = make()
    own, lbfgs = torch.optim.Adam(bnn.parameters()), torch.optim.LBFGS(bnn.parameters())
    message = r"lr_multipliers needs an optimiser that fit sets up; pass the class"
    fit = functools.partial(bnn.fit, [(X, Y)], own, 1, lr_multipliers={"scale": 10})
    rejects(bnn, ValueError, message, fit)
    rejects(bnn, TypeError, r"LBFGS.*closure", lambda: bnn.fit([(X, Y)], lbfgs, 1))
    bnn = make(guide=functools.partial(AutoNormal, train_loc=False, train_scale=False))
    message = "nothing to fit: no parameter of the BNN requires a gradient"
    rejects(bnn, ValueError, message, lambda: bnn.fit([(X, Y)], ADAM, 1))


THREE_SCALES = HomoskedasticGaussian(N, scale=torch.ones(3))
TARGETS = {
    "dimensions": (Categorical(N, event_dim=2), 3, LABELS, r"expected \(n, ..., C\) with event_d"),
    "a class": (Categorical(N), 3, LABELS + 1, "support of Categorical.* 1 to 3"),
    "one-hot": (Categorical(N), 3, torch.eye(3)[LABELS].long(), r"shape \(8, 3\)"),
    "minus one": (Bernoulli(N), 1, 2.0 * (Y > 0) - 1, "outside the support"),
    "a number": (Poisson(N), 1, torch.tensor(3.0), "targets are one number; expected"),
    "complex": (HomoskedasticGaussian(N, 1.0), 1, Y.cfloat(), "pass targets.real"),
    "another width": (THREE_SCALES, 2, Y.expand(N, 2), r"\(3,\) and .* \(8, 2\); give one number"),
    "an odd number": (HeteroskedasticGaussian(N), 3, Y, r"\(8, 3\); expected \(n, ..., 2 d\)"),
}


@pytest.mark.parametrize("case", TARGETS)
def test_fit_rejects_targets(case):
    likelihood, outputs, targets, message = TARGETS[case]
    error = TypeError if case == "complex" else ValueError
    bnn = make(nn.Linear(2, outputs), likelihood=likelihood)
    rejects(bnn, error, message, lambda: bnn.fit([(X, targets)], ADAM, 1))


def test_a_net_that_returns_integers_is_told_of():
    bnn = make(NetOf(lambda self, x: self.layer(x).round().long(), layer=nn.Linear(2, 1)))
    message = "the net returns torch.int64; the likelihood needs real numbers that depend smoothly"
    rejects(bnn, TypeError, message, lambda: bnn.fit([(X, Y)], ADAM, 1))


def test_a_weight_of_the_kl_is_looked_at_in_every_epoch():
    bnn, seen = make(), []

    def weight(epoch):
        return -1.0 if epoch == 2 else torch.tensor(0.5)

    with pytest.raises(ValueError, match=r"beta\(2\) is -1.0; expected"):
        bnn.fit([(X, Y)], ADAM, 3, lambda bnn, epoch, loss: seen.append(epoch), beta=weight)
    assert seen == [0, 1]


class Refused(ValueError):
    """An error of a user's own, with two arguments."""

    def __init__(self, what, why):
        super().__init__(what, why)


def picky(self, x):
    """Raise such an error for small batches, and PyTorch's for misshapen ones."""
    if len(x) < 4:
        raise Refused("too few", len(x))
    return self.layer(x)


def test_a_nets_own_errors_come_as_they_are():
    """Without a table of the traced shapes, which also made another error of Refused."""
    bnn = make(NetOf(picky, layer=nn.Linear(2, 1)))
    with pytest.raises(Refused) as caught:
        bnn.fit([(X, Y), (X[:2], Y[:2])], ADAM, 1)
    assert caught.value.args == ("too few", 2)
    with pytest.raises(RuntimeError) as caught:
        bnn.fit([(X, Y), (torch.randn(N, 3), Y)], ADAM, 1)
    assert "Trace Shapes" not in str(caught.value)
    assert caught.value.__cause__ is None

    def prior():
        raise Refused("no", "prior")

    with pytest.raises(Refused):
        make(prior=tyxe.priors.LambdaPrior(lambda *parameter: prior))


def mcmc():
    kernel = functools.partial(HMC, step_size=0.01, num_steps=2)
    return tyxe.MCMC_BNN(net(), PRIOR, LIKELIHOOD, kernel)


def test_chains_that_have_not_run():
    bnn, message = mcmc(), r"no samples yet; call fit\(data_loader, num_samples\)"
    for call in (lambda: bnn.predict(X), lambda: bnn.evaluate(X, Y), bnn.get_samples):
        rejects(bnn, RuntimeError, message, call)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([(X, Y)], ADAM), {}, TypeError, r"num_samples is a partial.*: fit\(data_loader, num_sam"),
        (([(X, Y)], 2), {"warmup_steps": 1.5}, TypeError, "warmup_steps is 1.5; expected an int"),
        (([], 2), {}, ValueError, "loader is empty"),
        (([(X, Y), (X, Y)], 2), {}, ValueError, "has 16 points.*dataset_size=8"),
    ],
)
def test_fits_by_chains_reject(arguments, options, error, message):
    bnn = mcmc()
    rejects(bnn, error, message, lambda: bnn.fit(*arguments, progress=False, **options))
    bnn.fit([(X, Y)], 2, warmup_steps=1, progress=False)
    samples = copy.deepcopy(bnn.get_samples())
    rejects(bnn, error, message, lambda: bnn.fit(*arguments, progress=False, **options))
    assert all(torch.equal(bnn.get_samples()[n], v) for n, v in samples.items())


def laplace(epochs, **options):
    bnn = tyxe.LaplaceBNN(net(), PRIOR, LIKELIHOOD)
    bnn.fit([(X, Y)], ADAM, epochs, **options)
    return bnn


def chain(samples):
    bnn = mcmc()
    bnn.fit([(X, Y)], samples, warmup_steps=1, progress=False)
    return len(bnn.get_samples()["net.0.bias"])


COUNTS = {
    "num_epochs": lambda n: len(make().fit([(X, Y)], ADAM, n).loss),
    "num_particles": lambda n: make().fit([(X, Y)], ADAM, 2, num_particles=n) and 2,
    "num_predictions": lambda n: len(make().predict(X, num_predictions=n, aggregate=False)),
    "batch_size": lambda n: len(make().predict(X, batch_size=n)) and 2,
    "num_samples": lambda n: len(make().sample_predictive(X, num_samples=n)),
    "num_samples of a chain": chain,
    "num_passes": lambda n: tyxe.LaplaceOptions(num_passes=n).num_passes,
    "num_points": lambda n: laplace(1).fit_gp([(X, Y)], num_points=n) or 2,
    "evidence_every": lambda n: laplace(2, evidence_every=n) and 2,
}


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_an_integer_of_any_library(name):
    assert COUNTS[name](torch.tensor(2)) == 2
    for bad in (2.0, True, torch.ones(2).int()):
        with pytest.raises(TypeError, match=f"^{name.split()[0]} is .*; expected an integer"):
            COUNTS[name](bad)
