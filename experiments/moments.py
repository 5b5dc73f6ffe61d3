"""Means and standard deviations of posteriors that are known, and what each method says of them.

  linear     regression with a bias, 40 points of three features, of which two have a correlation of
             .9, noise 1, all weights N(0, 1): the posterior is Gaussian
  logistic   of one feature with a bias, 6 points, all weights N(0, 1.5): by a grid of 401 x 401

Columns: the largest error of a mean in posterior standard deviations, and the least and the
greatest ratio of a standard deviation to the posterior's.
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
from tyxe import poutine, samplers

MODELS = ["linear", "logistic"]
STRUCTURES = {f"Laplace, {name}": name for name in ("full", "kron", "diag")}
METHODS = ["NUTS", "MCLMC", "full-covariance VI", "mean field", "variational Laplace", *STRUCTURES]


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
    how = {}
    if method in ("full-covariance VI", "mean field"):
        how["num_particles"] = s.particles
    if method == "variational Laplace":
        how["handler"] = poutine.variational_laplace
    return common.fit_by_cosine(bnn, [(x, y)], s.rate, s.epochs, **how)


def run(s, model, method, seed):
    *_, mean, scale = problem(model)
    bnn = fitted(s, model, method)
    count = len(bnn.get_samples()["net.weight"]) if isinstance(bnn, tyxe.MCMC_BNN) else s.draws
    draws = [torch.cat([d["net.weight"][0], d["net.bias"]]).clone() for d in bnn._draws(count)]
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


cells = runner.every(run, model="models", method="methods", seed="seeds")
experiment = runner.Experiment("moments", cells, table, choices={"methods": METHODS})
