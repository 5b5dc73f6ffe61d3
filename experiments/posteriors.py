"""What each method says of posteriors that are known, or whose truth was drawn.

`sbc`: simulation-based calibration. Weights are drawn from the prior and targets from the
likelihood; each method fits the posterior of these, and the truth is ranked among its draws.
Uniform ranks are what an exact posterior has.

  regression   a net 1-10-1 of tanh units on 20 points in [-1, 1], noise of 0.2, all weights N(0, 1)
  classes      a net 2-8-3 of tanh units on 30 points of N(0, I), all weights N(0, 1)

Functions: the output at the first point and at the middle one (of classes the probability of class
0), the mean square of all outputs, and the log-likelihood. Columns: p-values of uniformity
[Säilynoja et al. 2022], and the least of them times their number; then the share of ranks in the
outer fifth, which ought to be .20: more is too narrow, averaged over the first two functions.

`moments`: the largest error of a mean in posterior standard deviations, and the least and the
greatest ratio of a standard deviation to the posterior's.

  linear       regression with a bias, 40 points of three features, of which two have a correlation
               of .9, noise 1, all weights N(0, 1): the posterior is Gaussian
  logistic     of one feature with a bias, 6 points, all weights N(0, 1.5): by a grid of 401 x 401
"""

from functools import partial

import common
import runner
import tables
import torch
from pyro import distributions as dist
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import nn

import tyxe
from tyxe import diagnostics, poutine, samplers

POINTS = {"regression": 20, "classes": 30}
MODELS = ["linear", "logistic"]
NOISE = 0.2
KERNELS = {"NUTS": samplers.NUTS, "MCLMC": samplers.MCLMC}
SBC_KERNELS = {
    "NUTS": partial(samplers.NUTS, max_tree_depth=5),
    "MCLMC": samplers.MCLMC,
    "SGHMC": partial(samplers.SGHMC, lr=0.003),
}
FITTED = ["full-covariance VI", "mean field", "variational Laplace"]
# Structures, and of `sbc` predictions.
LAPLACE = {f"Laplace, {name}": (name, None) for name in ("full", "kron", "diag")}
SBC_LAPLACE = {
    f"Laplace, {structure}, {kind}": (structure, kind)
    for structure, kind in (("full", "glm"), ("kron", "glm"), ("full", "bnn"))
}
METHODS = [*KERNELS, *FITTED, *LAPLACE]
SBC_METHODS = [*SBC_KERNELS, *FITTED, *SBC_LAPLACE]


def bnn_of(method, parts, kernels, first_scale):
    """Return the BNN of a method, of a net, a prior and a likelihood."""
    if found := (LAPLACE | SBC_LAPLACE).get(method):
        return tyxe.LaplaceBNN(*parts, structure=found[0])
    if method in kernels:
        return tyxe.MCMC_BNN(*parts, kernels[method])
    is_full = method == "full-covariance VI"
    guide = AutoMultivariateNormal if is_full else tyxe.guides.AutoNormal
    return tyxe.VariationalBNN(*parts, partial(guide, init_scale=first_scale))


def fit(s, method, bnn, data, thinning, **how):
    """Fit a BNN: by four chains, with that thinning of some, or by Adam."""
    if isinstance(bnn, tyxe.MCMC_BNN):
        thin = thinning.get(method, 1)
        length = {"warmup_steps": s.warmup * thin, "num_chains": 4, "thinning": thin}
        bnn.fit(data, s.samples, progress=False, **length)
        return
    if method == "variational Laplace":
        how = {"handler": poutine.variational_laplace}
    common.fit_by_cosine(bnn, data, s.rate, s.epochs, **how)


# --------------------------------------------------------------------------- ranks


def inputs(problem):
    if problem == "regression":
        return torch.linspace(-1, 1, POINTS[problem])[:, None]
    return torch.randn(POINTS[problem], 2, generator=torch.Generator().manual_seed(0))


def make(problem, method):
    if problem == "regression":
        net = common.mlp(1, 10, 1, act=nn.Tanh)
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(POINTS[problem], scale=NOISE)
    else:
        net = common.mlp(2, 8, 3, act=nn.Tanh)
        likelihood = tyxe.likelihoods.Categorical(POINTS[problem])
    return bnn_of(method, (net, common.normal(), likelihood), SBC_KERNELS, 0.05)


def first(problem, row, outputs, targets):
    return outputs[row, 0] if problem == "regression" else outputs[row].softmax(-1)[0]


def square(outputs, targets):
    return outputs.square().mean()


def ranked(s, problem, method, seed):
    x = inputs(problem)
    functions = {
        "first": partial(first, problem, 0),
        "middle": partial(first, problem, len(x) // 2),
        "square": square,
    }
    is_local = method == "mean field"
    how = {"handler": poutine.local_reparameterization} if is_local else {}
    found = diagnostics.sbc(
        partial(make, problem, method),
        partial(fit, s, method, thinning={"SGHMC": 20, "MCLMC": 5}, **how),
        x,
        functions,
        s.simulations,
        num_draws=s.draws,
        seed=1_000_000 * seed,
        predictive=SBC_LAPLACE.get(method, (None, None))[1],
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


def table_of_ranks(record):
    blocks = []
    for problem in POINTS:
        lines = []
        for method in SBC_METHODS:
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


def figure_of_ranks(record):
    """Draw each method's ranks of all functions, four figures in a row."""
    pairs = [(problem, method) for problem in POINTS for method in SBC_METHODS]
    found = {pair: ranks for pair in pairs if (ranks := pooled(record, *pair)) is not None}
    down = -(-len(found) // 4)
    share = {"sharex": True, "sharey": True, "squeeze": False}
    drawn, axes = tables.subplots(down, 4, figsize=(11, 2.1 * down), **share)
    for ax in axes.flat[len(found) :]:
        ax.set_visible(False)
    for ax, ((problem, method), ranks) in zip(axes.flat, found.items(), strict=False):
        ranks.plot(ax)
        ax.legend(frameon=False, fontsize=6, loc="upper right")
        ax.set_title(f"{method}, {problem}", fontsize=9)
        ax.set(xlabel="", ylabel="", ylim=(-0.4, 0.4))
    return drawn


cells = runner.every(ranked, problem="problems", method="methods", seed="seeds")
choices = {"methods": SBC_METHODS}
sbc = runner.Experiment("sbc", cells, table_of_ranks, figure_of_ranks, choices=choices)

# --------------------------------------------------------------------------- moments


def problem(model):
    """Return data, the likelihood, the prior's scale, and exact means and standard deviations."""
    if model == "linear":
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(40, 3, generator=generator).double()
        x[:, 1] = 0.9 * x[:, 0] + 0.19**0.5 * x[:, 1]
        y = x.sum(1, keepdim=True) + torch.randn(40, 1, generator=generator)
        whole = torch.cat([x, torch.ones(40, 1)], 1)
        covariance = (whole.T @ whole + torch.eye(4)).inverse()
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(40, scale=1.0)
        return x, y, likelihood, 1.0, (covariance @ whole.T @ y)[:, 0], covariance.diagonal().sqrt()
    x = torch.tensor([-1.0, -0.5, 0.2, 0.6, 1.0, 1.5]).double()[:, None]
    y = torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]).double()[:, None]
    axis = torch.linspace(-9, 9, 401).double()
    points = torch.cartesian_prod(axis, axis)
    logits = points @ torch.cat([x, torch.ones(6, 1)], 1).T
    log_joint = dist.Bernoulli(logits=logits).log_prob(y[:, 0]).sum(-1)
    log_joint = log_joint + dist.Normal(0.0, 1.5).log_prob(points).sum(-1)
    weights = log_joint.softmax(0)
    mean = weights @ points
    scale = (weights @ (points - mean).square()).sqrt()
    return x, y, tyxe.likelihoods.Bernoulli(6, event_dim=1), 1.5, mean, scale


def moments_of(s, model, method, seed):
    x, y, likelihood, prior_scale, mean, scale = problem(model)
    net, prior = nn.Linear(x.shape[1], 1).double(), common.normal(prior_scale)
    bnn = bnn_of(method, (net, prior, likelihood), KERNELS, 0.1)
    how = {"num_particles": s.particles} if method in FITTED else {}
    fit(s, method, bnn, [(x, y)], {"MCLMC": 10}, **how)
    count = len(bnn.get_samples()["net.weight"]) if isinstance(bnn, tyxe.MCMC_BNN) else s.draws
    draws = [torch.cat([d["net.weight"][0], d["net.bias"]]).clone() for d in bnn._draws(count)]
    found = torch.stack(draws).detach()
    error = (found.mean(0) - mean) / scale
    return {"error": error.tolist(), "ratio": (found.std(0) / scale).tolist()}


def table_of_moments(record):
    lines = []
    for method in METHODS:
        line = []
        for model in MODELS:
            if not (found := [*record.of(model, method).values()]):
                line += ["", ""]
                continue
            errors = [abs(value) for cell in found for value in cell["error"]]
            ratios = [value for cell in found for value in cell["ratio"]]
            line += [f"{max(errors):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
        lines.append([method, *line])
    columns = [f"{model}, {what}" for model in MODELS for what in ("mean", "sd")]
    return tables.markdown(["", *columns], lines)


cells = runner.every(moments_of, model="models", method="methods", seed="seeds")
moments = runner.Experiment("moments", cells, table_of_moments, choices={"methods": METHODS})
