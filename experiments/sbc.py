"""Simulation-based calibration of every kind of inference, on two nets small enough for it.

Weights are drawn from the prior and targets from the likelihood; each method fits the posterior of
these, and the truth is ranked among its draws. Uniform ranks are what an exact posterior has.

  regression   a net 1-10-1 of tanh units on 20 points in [-1, 1], noise of 0.2, all weights N(0, 1)
  classes      a net 2-8-3 of tanh units on 30 points of N(0, I), all weights N(0, 1)

Functions: the output at the first point and at the middle one (of classes the probability of class
0), the mean square of all outputs, and the log-likelihood. Columns: p-values of uniformity
[Säilynoja et al. 2022], and the least of them times their number; then the share of ranks in the
outer fifth, which ought to be .20: more is too narrow, averaged over the first two functions.
"""

from functools import partial

import common
import runner
import tables
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import nn

import tyxe
from tyxe import diagnostics, poutine, samplers

POINTS = {"regression": 20, "classes": 30}
CHAINS = ["NUTS", "MCLMC", "SGHMC"]
LAPLACE = {
    "Laplace, full, glm": ("full", "glm"),
    "Laplace, kron, glm": ("kron", "glm"),
    "Laplace, full, bnn": ("full", "bnn"),
}
METHODS = [*CHAINS, "full-covariance VI", "mean field", "variational Laplace", *LAPLACE]
NOISE = 0.2


def inputs(problem):
    if problem == "regression":
        return torch.linspace(-1, 1, POINTS[problem])[:, None]
    return torch.randn(POINTS[problem], 2, generator=torch.Generator().manual_seed(0))


def make(problem, method, s):
    """Return the BNN of a method."""
    if problem == "regression":
        net = common.mlp(1, 10, 1, act=nn.Tanh)
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(POINTS[problem], scale=NOISE)
    else:
        net = common.mlp(2, 8, 3, act=nn.Tanh)
        likelihood = tyxe.likelihoods.Categorical(POINTS[problem])
    parts = net, common.normal(), likelihood
    if method in LAPLACE:
        return tyxe.LaplaceBNN(*parts, structure=LAPLACE[method][0])
    kernels = {
        "NUTS": partial(samplers.NUTS, max_tree_depth=5),
        "MCLMC": samplers.MCLMC,
        "SGHMC": partial(samplers.SGHMC, lr=0.003),
    }
    if method in kernels:
        return tyxe.MCMC_BNN(*parts, kernels[method])
    is_full = method == "full-covariance VI"
    guide = AutoMultivariateNormal if is_full else tyxe.guides.AutoNormal
    return tyxe.VariationalBNN(*parts, partial(guide, init_scale=0.05))


def fit(method, s, bnn, data):
    if method in CHAINS:
        thin = {"SGHMC": 20, "MCLMC": 5}.get(method, 1)
        length = {"warmup_steps": s.warmup * thin, "num_chains": 4, "thinning": thin}
        bnn.fit(data, s.samples, progress=False, **length)
        return
    handlers = {
        "mean field": poutine.local_reparameterization,
        "variational Laplace": poutine.variational_laplace,
    }
    how = {"handler": handlers[method]} if method in handlers else {}
    common.fit_by_cosine(bnn, data, s.rate, s.epochs, **how)


def first(problem, row, outputs, targets):
    return outputs[row, 0] if problem == "regression" else outputs[row].softmax(-1)[0]


def square(outputs, targets):
    return outputs.square().mean()


def run(s, problem, method, seed):
    x = inputs(problem)
    functions = {
        "first": partial(first, problem, 0),
        "middle": partial(first, problem, len(x) // 2),
        "square": square,
    }
    found = diagnostics.sbc(
        partial(make, problem, method, s),
        partial(fit, method, s),
        x,
        functions,
        s.simulations,
        num_draws=s.draws,
        seed=1_000_000 * seed,
        predictive=LAPLACE.get(method, (None, None))[1],
        progress=False,
    )
    return {"ranks": {name: each.tolist() for name, each in found.ranks.items()}}


def pooled(record, problem, method):
    """Return the ranks of all seeds, or None where there are none."""
    found = [cell["ranks"] for cell in record.of(problem, method).values()]
    if not found:
        return None
    ranks = {n: torch.tensor([r for each in found for r in each[n]]) for n in found[0]}
    return diagnostics.SBC(ranks, record.content["settings"]["draws"])


def outer(found):
    """Return the share of ranks in the outer fifth of what they may be."""
    ranks = torch.stack([found.ranks[name] for name in ("first", "middle")]).double()
    share = (ranks + 0.5) / (found.num_draws + 1)
    return float(((share < 0.1) | (share > 0.9)).double().mean())


def table(record):
    blocks = []
    for problem in POINTS:
        lines = []
        for method in METHODS:
            if (found := pooled(record, problem, method)) is None:
                continue
            p = found.p_values()
            least = min(1.0, len(p) * min(p.values()))
            count = len(found.ranks["first"])
            numbers = [f"{value:.3f}" for value in (*p.values(), least)]
            lines.append([method, str(count), *numbers, f"{outer(found):.2f}"])
        names = ["first", "middle", "square", "log likelihood"]
        columns = ["", "simulations", *names, "least, corrected", "outer fifth"]
        if lines:
            blocks += [f"**{problem}**:", tables.markdown(columns, lines)]
    return "\n\n".join(blocks)


def figure(record):
    """Draw each method's ranks of all functions, four figures in a row."""
    pairs = [(problem, method) for problem in POINTS for method in METHODS]
    found = {pair: ranks for pair in pairs if (ranks := pooled(record, *pair)) is not None}
    down = -(-len(found) // 4)
    share = {"sharex": True, "sharey": True, "squeeze": False}
    drawn, axes = tables.subplots(down, 4, figsize=(11, 2.1 * down), **share)
    for ax in axes.flat:
        ax.set_visible(False)
    for ax, ((problem, method), ranks) in zip(axes.flat, found.items(), strict=False):
        ax.set_visible(True)
        ranks.plot(ax)
        ax.legend(frameon=False, fontsize=6, loc="upper right")
        ax.set_title(f"{method}, {problem}", fontsize=9)
        ax.set(xlabel="", ylabel="", ylim=(-0.4, 0.4))
    return drawn


cells = runner.every(run, problem="problems", method="methods", seed="seeds")
experiment = runner.Experiment("sbc", cells, table, figure, choices={"methods": METHODS})
