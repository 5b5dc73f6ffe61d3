"""Means and standard deviations of posteriors that are known, and what each method says of them.

  linear     regression with a bias, 40 points of three features, of which two have a correlation of
             .9, noise 1, all weights N(0, 1): the posterior is Gaussian
  logistic   of one feature with a bias, 6 points, all weights N(0, 1.5): by a grid of 401 x 401

Columns: the largest error of a mean in posterior standard deviations, and the least and the
greatest ratio of a standard deviation to the posterior's. No paper has this table.
"""

from functools import partial

import common
import runner
import tables
import torch
from pyro import distributions as dist
from pyro.infer.autoguide import AutoMultivariateNormal
from runner import setting, settings, which
from torch import nn

import tyxe
from tyxe import poutine, samplers

MODELS = ["linear", "logistic"]
STRUCTURES = {f"Laplace, {name}": name for name in ("full", "kron", "diag")}
METHODS = ["NUTS", "MCLMC", "full-covariance VI", "mean field", "variational Laplace", *STRUCTURES]


@settings
class Settings(runner.Settings):
    models: list[str] = which(MODELS, "with exact posteriors", choices=MODELS)
    methods: list[str] = which(METHODS, "of inference", choices=METHODS)
    seeds: list[int] = which([0], "of fits")
    epochs: int = setting(3_000, "of a fit by Adam, whose rate falls as a cosine", smoke=5)
    rate: float = setting(3e-2, "of Adam")
    particles: int = setting(8, "draws of a step")
    samples: int = setting(2_500, "of each of four chains", smoke=8)
    warmup: int = setting(1_000, "transitions before", smoke=8)
    draws: int = setting(20_000, "of guides, for their moments", smoke=100)


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


def fitted(s, model, method):
    x, y, likelihood, scale, *_ = problem(model)
    parts = nn.Linear(x.shape[1], 1).double(), common.normal(scale), likelihood
    kernels = {"NUTS": samplers.NUTS, "MCLMC": samplers.MCLMC}
    if method in kernels:
        bnn = tyxe.MCMC_BNN(*parts, kernels[method])
        thin = 10 if method == "MCLMC" else 1
        how = {"warmup_steps": s.warmup * thin, "num_chains": 4, "thinning": thin}
        bnn.fit([(x, y)], s.samples, progress=False, **how)
        return bnn
    if method in STRUCTURES:
        bnn = tyxe.LaplaceBNN(*parts, structure=STRUCTURES[method])
    else:
        is_full = method == "full-covariance VI"
        guide = AutoMultivariateNormal if is_full else tyxe.guides.AutoNormal
        bnn = tyxe.VariationalBNN(*parts, partial(guide, init_scale=0.1))
    optimizer = torch.optim.Adam(bnn.parameters(), s.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, s.epochs)
    how = {"progress": False}
    if method in ("full-covariance VI", "mean field"):
        how["num_particles"] = s.particles

    def step(*_):
        schedule.step()

    if method == "variational Laplace":
        with poutine.variational_laplace():
            bnn.fit([(x, y)], optimizer, s.epochs, step, **how)
    else:
        bnn.fit([(x, y)], optimizer, s.epochs, step, **how)
    return bnn


def run(s, model, method, seed):
    *_, mean, scale = problem(model)
    bnn = fitted(s, model, method)
    count = len(bnn.get_samples()["net.weight"]) if isinstance(bnn, tyxe.MCMC_BNN) else s.draws
    draws = [torch.cat([d["net.weight"][0], d["net.bias"]]).clone() for d in bnn.draws(count)]
    found = torch.stack(draws).detach()
    error = (found.mean(0) - mean) / scale
    return {"error": error.tolist(), "ratio": (found.std(0) / scale).tolist()}


def table(record):
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


cells, by = runner.every(run, "models", "methods", "seeds"), ("model", "method", "seed")
experiment = runner.Experiment("moments", Settings, cells, by, table)
