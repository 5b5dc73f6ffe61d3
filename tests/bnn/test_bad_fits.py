"""Mistakes in `fit`: one clear error each, with what was given and what mends it."""

import functools

import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.rejections import ADAM, LABELS, N, X, Y, make, rejects
from tyxe.guides import AutoNormal
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Poisson,
)

ARGUMENTS = {
    "swapped": (
        ([(X, Y)], 10, ADAM),
        {},
        TypeError,
        r"num_epochs is a partial.*fit\(data_loader, optim, num_",
    ),
    "swapped, an instance": (
        ([(X, Y)], 10, torch.optim.Adam([torch.zeros(1, requires_grad=True)])),
        {},
        TypeError,
        r"num_epochs is a Adam; expected an integer; the order is fit",
    ),
    "num_epochs no integer": (
        ([(X, Y)], ADAM, 2.5),
        {},
        TypeError,
        "num_epochs is 2.5; expected an",
    ),
    "num_epochs negative": (([(X, Y)], ADAM, -1), {}, ValueError, "num_epochs is -1"),
    "no particles": (
        ([(X, Y)], ADAM, 1),
        {"num_particles": 0},
        ValueError,
        "num_particles is 0; expected 1 or more",
    ),
    "optim a string": (
        ([(X, Y)], "adam", 1),
        {},
        TypeError,
        r"optim is a str; expected a Pyro optimiser such as",
    ),
    "optim makes no optimiser": (
        ([(X, Y)], lambda parameters: 3, 1),
        {},
        TypeError,
        "optim made a int; expected a torch opt",
    ),
    "optimiser of another net": (
        ([(X, Y)], torch.optim.Adam(nn.Linear(2, 1).parameters()), 1),
        {},
        ValueError,
        r"holds none of this BNN's parameters; build it on bnn.parameters\(\)",
    ),
    "a norm that is no number": (
        ([(X, Y)], ADAM, 1),
        {"clip_norm": "1"},
        TypeError,
        "clip_norm is '1'; expected a positive number",
    ),
    "unknown kind": (
        ([(X, Y)], ADAM, 1),
        {"lr_multipliers": {"mean": 2.0}},
        ValueError,
        r"kind of lr_multipliers is 'mean'; expected one of 'loc', 'scale', 'deterministic'",
    ),
    "a loader that cannot be iterated over": (
        (3, ADAM, 1),
        {},
        TypeError,
        r"data_loader is a int; expected an iterable of \(inputs, tar",
    ),
    "an empty loader": (([], ADAM, 1), {}, ValueError, "loader is empty: it yields no batch"),
    "a tensor": ((X, ADAM, 1), {}, ValueError, r"the loader yields a Tensor; expected "),
    "one batch instead of a loader": (
        ((X, Y), ADAM, 1),
        {},
        ValueError,
        r"the loader yields a Tensor; expected \(inputs, t",
    ),
    "inputs without targets": (
        ([(X,)], ADAM, 1),
        {},
        ValueError,
        r"yields a tuple of 1 elements; expected ",
    ),
    "arguments not grouped": (
        ([(X, X, Y)], ADAM, 1),
        {},
        ValueError,
        r"weights of shape .* \(\(x1, x2\), y\)",
    ),
    "a mapping": (
        ([{"x": X, "y": Y}], ADAM, 1),
        {},
        ValueError,
        r"yields a mapping with keys x, y; expected",
    ),
    "targets that are no tensor": (
        ([(X, Y.tolist())], ADAM, 1),
        {},
        ValueError,
        r"targets of type list; expected ",
    ),
    "a larger batch than the data set": (
        ([(torch.randn(9, 2), torch.randn(9, 1))], ADAM, 1),
        {},
        ValueError,
        r"batch has 9 points, but the likelihood was built with dataset_size=8; pass the number",
    ),
    "targets that would broadcast": (
        ([(X, Y.squeeze(-1))], ADAM, 1),
        {},
        ValueError,
        r"targets of shape \(8,\) for predictions of shape \(8, 1\); pass targets.unsqueeze\(-1\)",
    ),
    "a batch without points": (
        ([(X[:0], Y[:0])], ADAM, 1),
        {},
        ValueError,
        r"yields a batch without points, of targets \(0, 1\); leave it out",
    ),
    "fewer targets than inputs": (
        ([(X, Y[:5])], ADAM, 1),
        {},
        ValueError,
        r"targets of shape \(5, 1\).*shape \(8, 1\)",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_fit_rejects(case):
    args, options, error, message = ARGUMENTS[case]
    bnn = make()
    rejects(bnn, error, message, lambda: bnn.fit(*args, **options))
    with tyxe.poutine.local_reparameterization():
        bnn.fit([(X, Y)], ADAM, 1, beta=0.0)  # nothing is left broken


def test_multipliers_next_to_an_instance():
    bnn = make()
    optimizer = torch.optim.Adam(bnn.parameters())
    rejects(
        bnn,
        ValueError,
        r"lr_multipliers needs an optimiser that fit sets up; pass the class",
        lambda: bnn.fit([(X, Y)], optimizer, 1, lr_multipliers={"scale": 10}),
    )


def test_nothing_to_fit():
    frozen = functools.partial(AutoNormal, train_loc=False, train_scale=False)
    bnn = make(guide=frozen)
    rejects(
        bnn,
        ValueError,
        "nothing to fit: no parameter of the BNN requires a gradient",
        lambda: bnn.fit([(X, Y)], ADAM, 1),
    )


@pytest.mark.parametrize(
    "optim",
    [
        torch.optim.LBFGS,
        functools.partial(torch.optim.LBFGS, lr=0.1),
        "instance",
    ],
)
def test_an_optimiser_that_needs_a_closure(optim):
    bnn = make()
    if optim == "instance":
        optim = torch.optim.LBFGS(bnn.parameters())
    rejects(bnn, TypeError, r"LBFGS.*closure", lambda: bnn.fit([(X, Y)], optim, 1))


TARGETS = {
    "more dimensions in an event than there are": (
        Categorical(N, event_dim=2),
        3,
        LABELS,
        ValueError,
        r"predictions of shape \(8, 3\); expected \(n, ..., C\) with event_dim=2 dimensions",
    ),
    "a class too many": (
        Categorical(N),
        3,
        LABELS + 1,
        ValueError,
        r"outside the support of Categorical.* 1 to 3",
    ),
    "labels of floats": (
        Categorical(N),
        3,
        LABELS.float(),
        TypeError,
        r"targets of torch.float32; pass targets.long",
    ),
    "one-hot labels": (
        Categorical(N),
        3,
        torch.eye(3)[LABELS].long(),
        ValueError,
        r"targets of shape \(8, 3\)",
    ),
    "binary labels of minus one": (
        Bernoulli(N),
        1,
        2 * (LABELS[:, None] > 0).long() - 1,
        ValueError,
        "outside the support",
    ),
    "a number": (
        Poisson(N),
        1,
        torch.tensor(3.0),
        ValueError,
        r"targets are one number; expected one row for each point, \(n, ...\)",
    ),
    "complex numbers": (
        HomoskedasticGaussian(N, 1.0),
        1,
        Y.cfloat(),
        TypeError,
        r"targets are of torch.complex64; pass targets.real",
    ),
    "a noise of another width": (
        HomoskedasticGaussian(N, scale=torch.ones(3)),
        2,
        Y.expand(N, 2),
        ValueError,
        r"the noise has shape \(3,\) and predictions have shape \(8, 2\); give one number",
    ),
    "negative counts": (
        Poisson(N),
        1,
        LABELS[:, None] - 1,
        ValueError,
        "outside the support of Poisson",
    ),
    "an odd number of outputs": (
        HeteroskedasticGaussian(N),
        3,
        Y,
        ValueError,
        r"shape \(8, 3\); expected \(n, ..., 2 d\)",
    ),
}


def test_a_net_that_returns_integers_is_told_of():
    class Classes(nn.Linear):
        def forward(self, x):
            return super().forward(x).argmax(-1, keepdim=True)

    bnn = make(Classes(2, 3))
    message = "the net returns torch.int64; the likelihood needs real numbers that depend smoothly"
    rejects(bnn, TypeError, message, lambda: bnn.fit([(X, Y)], ADAM, 1))


@pytest.mark.parametrize("case", TARGETS)
def test_fit_rejects_targets(case):
    likelihood, outputs, targets, error, message = TARGETS[case]
    bnn = make(nn.Linear(2, outputs), likelihood=likelihood)
    rejects(bnn, error, message, lambda: bnn.fit([(X, targets)], ADAM, 1))


def test_masks_of_wrong_kind():
    with pytest.raises(TypeError, match=r"expected a boolean tensor: pass mask.bool\(\)"):
        tyxe.poutine.selective_mask(mask=torch.ones(N), expose=["likelihood.data"])
    with pytest.raises(TypeError, match=r"expose is the string 'likelihood.data'; pass a list"):
        tyxe.poutine.selective_mask(mask=torch.ones(N).bool(), expose="likelihood.data")
    bnn = make()
    short = tyxe.poutine.selective_mask(mask=torch.ones(3).bool(), expose=["likelihood.data"])

    def fit():
        with short:
            bnn.fit([(X, Y)], ADAM, 1)

    rejects(bnn, ValueError, r"the mask has 3 entries, but likelihood.data has 8 rows", fit)


OPTIONS = {
    "beta": ({"beta": -1}, "beta is -1; expected 0 or more, or a function of the epoch"),
    "beta, not a number": ({"beta": float("nan")}, "beta is nan; expected 0 or more"),
    "clip_norm": ({"clip_norm": -1}, "clip_norm is -1; expected a positive number"),
    "clip_norm of zero": ({"clip_norm": 0.0}, "clip_norm is 0.0; expected a positive number"),
    "lr_multipliers": (
        {"lr_multipliers": {"scale": -2.0}},
        r"lr_multipliers\['scale'\] is -2.0; expected 0 or more",
    ),
}


@pytest.mark.parametrize(
    ("beta", "error", "message"),
    [
        (-1.0, ValueError, r"beta\(2\) is -1.0; expected 0 or more"),
        (float("inf"), ValueError, r"beta\(2\) is inf; expected 0 or more"),
        (None, TypeError, r"beta\(2\) is None; expected a number"),
    ],
)
def test_a_weight_of_the_kl_is_looked_at_in_every_epoch(beta, error, message):
    bnn, seen = make(), []

    def weight(epoch):
        return beta if epoch == 2 else torch.tensor(0.5)

    with pytest.raises(error, match=message):
        bnn.fit([(X, Y)], ADAM, 3, lambda bnn, epoch, loss: seen.append(epoch), beta=weight)
    assert seen == [0, 1]
    bnn = make()
    message = "beta is 'a'; expected a number, or a function of the epoch"
    rejects(bnn, TypeError, message, lambda: bnn.fit([(X, Y)], ADAM, 1, beta="a"))


@pytest.mark.parametrize("case", OPTIONS)
def test_fit_rejects_options(case):
    options, message = OPTIONS[case]
    bnn = make()
    rejects(bnn, ValueError, message, lambda: bnn.fit([(X, Y)], ADAM, 1, **options))
    assert bnn.optimizer is None


class Refused(ValueError):
    """An error of a user's own, with two arguments."""

    def __init__(self, what, why):
        super().__init__(what, why)


class Picky(nn.Linear):
    """Raises such an error for small batches, and PyTorch's for misshapen ones."""

    def forward(self, x):
        if len(x) < 4:
            raise Refused("too few", len(x))
        return super().forward(x)


def test_a_nets_own_errors_come_as_they_are():
    """Without a table of the traced shapes, which also made another error of Refused."""
    bnn = make(Picky(2, 1))
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
