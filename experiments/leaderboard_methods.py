"""What the rows of the leaderboard fit, and about which net: a function for each of them.

Each takes a `Case` and returns a BNN, the number of draws in its predictions (0: at its centre; of
an ensemble those of each member), and, where one is needed, the number of nodes that its batches
may have.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import common
import torch
from common import mean_field, normal
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from torch import nn

import tyxe
from tyxe.poutine import flipout, local_reparameterization, variational_laplace
from tyxe.priors import LayerwiseNormalPrior


@dataclass(frozen=True)
class Problem:
    """A data set and its net.

    Attributes:
        loader: what yields mini-batches.
        parts: inputs, a tuple, and targets by "validation", "test" and perhaps "unknown".
        make_net: makes a net, of which `dropout` is the rate.
        unit: of rates of the gradient itself: the squared noise where that divides the loss.
        rules: which parameters have no prior.
        by_nodes: of a graph, the loader and the parts in batches of at most so many nodes.
    """

    loader: Any
    parts: dict[str, tuple]
    make_net: Callable[..., nn.Module]
    likelihood: tyxe.likelihoods.Likelihood
    epochs: int
    unit: float = 1.0
    rules: dict[str, Any] = field(default_factory=dict)
    by_nodes: Callable[[int], tuple[Any, dict[str, tuple]]] | None = None


@dataclass(frozen=True)
class Case:
    """A problem, settings, the trained net that the method starts at, and what is to be chosen."""

    problem: Problem
    s: Any
    start: nn.Module | None
    knob: float
    temperature: float

    @property
    def steps(self):
        return self.problem.epochs * len(self.problem.loader)

    @property
    def prior(self):
        return normal(**self.problem.rules)

    @property
    def layerwise(self):
        return LayerwiseNormalPrior("radford", **self.problem.rules)

    @property
    def head(self):
        """The rule of a prior of the last linear map's parameters."""
        modules = self.problem.make_net().named_modules()
        return {"expose": [[f"{n}.*" for n, m in modules if isinstance(m, nn.Linear)][-1]]}

    def adam(self):
        return partial(torch.optim.Adam, lr=self.knob)


class Fitted(NamedTuple):
    bnn: Any
    draws: int = 0
    nodes: int | None = None


def cosine(epochs, until=1.0, last=0.0):
    """Return a callback of `fit`: rates fall as a cosine until a share of the epochs, to a last."""

    def lower(bnn, epoch, loss):
        share = torch.tensor(min((epoch + 1) / (until * epochs), 1.0))
        for group in bnn.optimizer.param_groups:
            first = group.setdefault("initial_lr", group["lr"])
            group["lr"] = first * (last + (1 - last) * 0.5 * (1 + (torch.pi * share).cos().item()))

    return lower


NOTHING = normal(hide_all=True)


def fit(on, net, prior, guide=None, handler=nullcontext, growing=None):
    """Return a variational BNN after all epochs; the KL's weight is the temperature."""
    p, beta = on.problem, on.temperature
    bnn = tyxe.VariationalBNN(net, prior, p.likelihood, guide)
    weigh = beta if growing is None else lambda epoch: beta * growing(epoch)
    how = {"beta": weigh, "lr_multipliers": {"scale": on.s.scale_multiplier}, "progress": False}
    with handler():
        bnn.fit(p.loader, on.adam(), p.epochs, cosine(p.epochs), **how)
    return bnn


def ml(on):
    return Fitted(fit(on, on.problem.make_net(), NOTHING))


def maximum_a_posteriori(on):
    net = on.problem.make_net()
    return Fitted(fit(on, net, on.prior, common.point(net)))


class Divided(nn.Module):
    """A net whose logits are divided by a temperature."""

    def __init__(self, net, temperature):
        super().__init__()
        self.net, self.temperature = net, temperature

    def forward(self, *inputs):
        return self.net(*inputs) / self.temperature


def calibrated(on):
    """Return the net of ML with the temperature of the lowest validation NLL."""
    inputs, targets = on.problem.parts["validation"]
    with torch.no_grad():
        logits = on.start.eval()(*inputs)
    try:
        found = tyxe.calibration.TemperatureScaling().fit(logits, targets)
    except ValueError as error:  # of a net that has learned nothing
        raise RuntimeError(str(error)) from error
    net = Divided(on.start, found.temperature)
    return Fitted(tyxe.VariationalBNN(net, NOTHING, on.problem.likelihood))


def dropout(on):
    p = on.problem
    bnn = tyxe.DropoutBNN(p.make_net(dropout=on.s.dropout), p.likelihood)
    bnn.fit(p.loader, on.adam(), p.epochs, cosine(p.epochs), progress=False)
    return Fitted(bnn, on.s.draws)


def ensemble(on):
    p = on.problem

    def member(index):
        return tyxe.VariationalBNN(p.make_net(), NOTHING, p.likelihood)

    bnn = tyxe.EnsembleBNN(member, on.s.members)
    bnn.fit(p.loader, on.adam(), p.epochs, cosine(p.epochs), progress=False)
    return Fitted(bnn)


def gaussian(on, handler=nullcontext, guide=tyxe.guides.AutoNormal, scale=1.0, **how):
    """Return a mean field about the start with fixed means, or from a net's random start on."""
    net = copy.deepcopy(on.start) or on.problem.make_net()
    how |= {"guide": guide, "init_scale": scale * on.s.first_scale}
    return Fitted(fit(on, net, on.prior, mean_field(net, **how), handler), on.s.draws)


def head(on, handler=nullcontext, **how):
    """Return a posterior of the last layer on a trained body."""
    net = copy.deepcopy(on.start).requires_grad_(False)
    guide = mean_field(net, init_scale=on.s.first_scale, **how)
    return Fitted(fit(on, net, normal(**on.head), guide, handler), on.s.draws)


def inducing(on):
    p, s = on.problem, on.s
    how = {"inducing_rows": s.M, "inducing_cols": s.M, "max_lambda": 0.03, "max_scale_u": 0.1}
    guide = partial(tyxe.guides.AutoInducing, **how)
    growing = common.annealed(p.epochs // 3, p.epochs // 6)
    return Fitted(fit(on, p.make_net(), on.layerwise, guide, growing=growing), s.draws)


def by_curvature(on):
    """Return variational Laplace about the trained net, which is predicted at its centre."""
    net = copy.deepcopy(on.start)
    if any(isinstance(module, nn.ReLU) for module in net.modules()):
        tyxe.util.replace_activations_(net, nn.ReLU, partial(nn.Softplus, beta=10))
    guide = mean_field(net, init_scale=tyxe.guides.scale_below_prior())
    return Fitted(fit(on, net, on.layerwise, guide, variational_laplace))


def laplace(on, nodes=1, last=False, few=None, **how):
    """Return a Laplace approximation of all weights, of the last layer's, or of a few weights.

    Points of a graph's batch may influence each other above a layer with a curvature only: in the
    last layer they do not, else a batch is one node with what it depends on.
    """
    p, rules = on.problem, on.head if last else on.problem.rules
    net, prior = copy.deepcopy(on.start), normal(on.knob**-0.5, **rules)
    loader = [*(p.by_nodes(nodes)[0] if p.by_nodes else p.loader)]  # the same in every pass
    if few:
        count = min(few, sum(parameter.numel() for parameter in net.parameters()))
        own = {"prior": prior, "likelihood": p.likelihood}
        prior = tyxe.priors.subnetwork(net, loader, count, **own)
    bnn = tyxe.LaplaceBNN(net, prior, p.likelihood, temperature=on.temperature, **how)
    bnn.fit_curvature(loader, progress=False)
    return Fitted(bnn, on.s.draws, nodes)


def swag(on, make=lambda make_member: make_member(0)):
    p = on.problem
    rank = min(on.s.rank, p.epochs // 4)
    bnn = make(lambda index: tyxe.SWAG_BNN(p.make_net(), on.prior, p.likelihood, rank=rank))
    how = {"start": 0.75, "beta": on.temperature, "progress": False}
    bnn.fit(p.loader, on.adam(), p.epochs, cosine(p.epochs, 0.75, 0.5), **how)
    return bnn


def one_swag(on):
    return Fitted(swag(on), on.s.draws)


def swags(on):
    bnn = swag(on, lambda make_member: tyxe.EnsembleBNN(make_member, on.s.members))
    return Fitted(bnn, max(on.s.draws // on.s.members, 1))


def chain(on, kernel, thinning, **how):
    """Return samples of one chain that takes as many mini-batches as the others' training."""
    p, draws = on.problem, on.s.draws
    kernel = partial(kernel, lr=on.knob * p.unit, temperature=on.temperature, **how)
    bnn = tyxe.MCMC_BNN(p.make_net(), on.prior, p.likelihood, kernel)
    length = {"warmup_steps": on.steps - draws * thinning, "thinning": thinning, "num_chains": 1}
    bnn.fit(p.loader, draws, progress=False, **length)
    return Fitted(bnn, draws)


def sgld(on):
    thinning = max(on.steps // 4 // on.s.draws, 1)
    return chain(on, tyxe.samplers.SGLD, thinning, schedule="polynomial")


def sghmc(on):
    each = -(-on.s.draws // on.s.cycles)
    thinning = max(int(0.2 * on.steps / on.s.cycles - 1) // each, 1)
    how = {"schedule": "cyclical", "num_cycles": on.s.cycles}
    return chain(on, tyxe.samplers.SGHMC, thinning, **how)


def ivon(on):
    p, net = on.problem, on.problem.make_net()
    how = {"lr": on.knob, "betas": (0.9, 0.995), "hess_init": on.s.first_hessian / p.unit}
    guide = mean_field(net, init_scale=on.s.first_scale)
    bnn = tyxe.VariationalBNN(net, on.prior, p.likelihood, guide)
    optimizer = partial(tyxe.optim.IVON, **how)
    how = {"beta": on.temperature, "progress": False}
    bnn.fit(p.loader, optimizer, p.epochs, cosine(p.epochs), **how)
    return Fitted(bnn, on.s.draws)


def chains(on):
    """Return samples of microcanonical chains from the members of an ensemble."""
    p, s, each = on.problem, on.s, max(on.s.draws // on.s.members, 1)
    kernel = partial(tyxe.samplers.MCLMC, temperature=on.temperature)
    bnn = tyxe.MCMC_BNN(p.make_net(), on.prior, p.likelihood, kernel)
    start = {"num_epochs": p.epochs, "batch_size": s.batch, "validation": 0}
    starts = bnn.starts([*p.loader], tyxe.samplers.warm_start(on.adam(), **start), s.members)
    how = {"warmup_steps": s.warmup_steps, "thinning": s.chain_steps // each, "init": starts}
    bnn.fit([*p.loader], each, num_chains=s.members, progress=False, **how)
    return Fitted(bnn, each * s.members)


class Method(NamedTuple):
    """A row: its function, the row whose net it starts at, and what is chosen for it.

    That is a knob, of the settings' grid of that name, and a temperature, or what was chosen for a
    row that it is `like`.
    """

    fit: Callable[[Case], Fitted]
    start: str | None = None
    knob: str = "Adam's rate"
    tempered: bool = True
    like: str | None = None


PRECISION = "prior's precision"
LOW_RANK = partial(AutoLowRankMultivariateNormal, rank=10)
METHODS = {
    "ML": Method(ml, tempered=False),
    "ML, temperature": Method(calibrated, "ML", tempered=False, like="ML"),
    "MAP": Method(maximum_a_posteriori),
    "MC dropout": Method(dropout, tempered=False),
    "ensemble": Method(ensemble, like="ML"),
    "mean field": Method(gaussian),
    "mean field, local reparam.": Method(partial(gaussian, handler=local_reparameterization)),
    "mean field, flipout": Method(partial(gaussian, handler=flipout)),
    "sd only": Method(partial(gaussian, handler=local_reparameterization, train_loc=False), "ML"),
    "last layer": Method(partial(head, handler=local_reparameterization), "ML"),
    "last layer, low rank": Method(partial(head, guide=LOW_RANK), "ML"),
    "radial": Method(partial(gaussian, guide=tyxe.guides.AutoRadial, scale=10.0)),
    "inducing": Method(inducing),
    "variational Laplace": Method(by_curvature, "ML"),
    "Laplace, kron": Method(laplace, "MAP", PRECISION),
    "Laplace, last layer": Method(partial(laplace, nodes=1_000, last=True), "MAP", PRECISION),
    "Laplace, low rank": Method(partial(laplace, structure="lowrank"), "MAP", PRECISION),
    "Laplace, 500 weights": Method(partial(laplace, few=500, structure="full"), "MAP", PRECISION),
    "SWAG": Method(one_swag),
    "Multi-SWAG": Method(swags, like="SWAG"),
    "SGLD": Method(sgld, knob="SGD's rate"),
    "SGHMC, cyclical": Method(sghmc, knob="SGHMC's rate"),
    "IVON": Method(ivon, knob="IVON's rate"),
    "MCLMC ensemble": Method(chains),
}
