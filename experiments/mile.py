"""Regression of UCI sets by microcanonical Langevin ensembles, MILE [S, tab. of UCI].

Two hidden layers of 16 ReLU units; outputs are a mean and the log of a scale. Splits of 70 % for
training, 10 % for validation and 20 % for testing by seed, standardised by the rows that are not
for testing. LPPD is the log density of the mean over draws of the predictive densities, higher is
better; seconds include the members' training. Rows: MAP, full batches; a deep ensemble, whose
members stop early; MILE, chains of microcanonical dynamics that start at these members; NUTS from
the same starts; mean field; Laplace with the full matrix, linearised, whose scale is a softplus,
since a linearised log scale has draws of any size. The methods that stop by no validation loss have
that part for training, too.
"""

import math
import time
from functools import lru_cache, partial
from itertools import product

import common
import runner
import tables
import torch
from torch import nn

import tyxe
from tyxe.samplers import MCLMC, NUTS, warm_start

METHODS = ["MAP", "deep ensemble", "MILE", "mean field", "Laplace", "NUTS"]


class LogScale(nn.Module):
    """The last layer's outputs, a mean and a log of a scale, as a mean and a scale."""

    def forward(self, outputs):
        mean, log_scale = outputs.chunk(2, -1)
        return torch.cat([mean, log_scale.exp()], -1)


def split(name, seed):
    """Return pairs of standardised inputs and targets, those to learn from and to test."""
    found = common.arrays(f"regression/{name}.npz")
    x, y = found["X"].float(), found["y"].float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    count = round(0.8 * len(x))
    parts = []
    for part in (x, y):
        known = part[order[:count]]
        mean, scale = known.mean(0), known.std(0)
        parts.append((part - mean) / torch.where(scale > 0, scale, 1.0))
    return [tuple(part[rows] for part in parts) for rows in (order[:count], order[count:])]


def make_net(s, inputs, *last):
    return nn.Sequential(*common.mlp(inputs, s.hidden_units, s.hidden_units, 2), *last)


def sampled(s, pair, kernel):
    net = make_net(s, pair[0].shape[1], LogScale())
    likelihood = tyxe.likelihoods.HeteroskedasticGaussian(len(pair[0]), positive_scale=True)
    return tyxe.MCMC_BNN(net, common.normal(), likelihood, kernel)


def trained(bnn, pair, count, rate, decay, **how):
    """Return values of members of an ensemble, stacked, by site, and the seconds it took."""
    start, adam = time.process_time(), partial(torch.optim.AdamW, lr=rate, weight_decay=decay)
    members = bnn.starts([pair], warm_start(adam, **how), count, progress=False)
    return members, time.process_time() - start


@lru_cache(1)
def ensemble(s, name, seed):
    torch.manual_seed(seed)
    pair = split(name, seed)[0]
    how = {"num_epochs": s.epochs, "patience": s.patience, "validation": 1 / 8}  # a tenth of all
    return trained(sampled(s, pair, MCLMC()), pair, s.members, s.rate, s.rate, **how)


def chains(s, method, starts, pair):
    """Return a BNN of draws, or of the starts, with what the chains tell."""
    kernel, how = MCLMC(), {"warmup_steps": s.warmup_steps, "thinning": s.thinning}
    count = s.steps // s.thinning
    if method == "NUTS":
        kernel = NUTS(max_tree_depth=s.nuts_depth)
        count, how = s.nuts_samples, {"warmup_steps": s.nuts_warmup_steps}
    bnn = sampled(s, pair, kernel)
    if method == "deep ensemble":
        common.keep_members(bnn, starts)
        return bnn, {}
    run = bnn.fit([pair], count, num_chains=s.members, init=starts, progress=False, **how)
    told = {"potential": run.potentials, **run.statistics}
    return bnn, {name: value.double().mean().item() for name, value in told.items()}


def descended(s, method, pair):
    """Return a BNN of a Gaussian or a point about the mode."""
    raw = method == "Laplace"
    net = make_net(s, pair[0].shape[1], *[] if raw else [LogScale()])
    kind = partial(tyxe.likelihoods.HeteroskedasticGaussian, positive_scale=not raw)
    likelihood = kind(len(pair[0]))

    def fitted(guide):
        bnn = tyxe.VariationalBNN(net, common.normal(), likelihood, guide)
        how = 1e-2, s.descent_steps, 1e-5, tyxe.poutine.local_reparameterization
        return common.fit_by_cosine(bnn, [pair], *how)

    bnn = fitted(common.point(net))
    if method == "mean field":
        net = bnn.to_module()
        return fitted(common.mean_field(net, init_scale=1e-2))
    if raw:  # in double precision: where a scale is small, the curvature spans ten decades
        net = bnn.to_module().double()
        bnn = tyxe.LaplaceBNN(net, common.normal(), likelihood, structure="full")
        bnn.fit_curvature([[part.double() for part in pair]], progress=False)
    return bnn


def run(s, name, method, seed):
    pair, (x, y) = split(name, seed)
    told, seconds = {}, 0.0
    if method in ("deep ensemble", "MILE", "NUTS"):
        starts, seconds = ensemble(s, name, seed)  # trained once for all three
    torch.manual_seed(seed)
    start = time.process_time()
    if seconds:
        bnn, told = chains(s, method, starts, pair)
        count = len(next(iter(bnn.get_samples().values())))
    else:
        bnn = descended(s, method, pair)
        count = 1 if method == "MAP" else s.draws
    x = x.to(next(bnn.parameters()))
    outputs = bnn.predict(x, num_predictions=count, aggregate=False)
    densities = bnn.likelihood.predictive_distribution(outputs).log_prob(y)
    lppd = (densities.double().logsumexp(0) - math.log(count)).mean().item()
    rmse = (outputs[..., :1].mean(0) - y).square().mean().sqrt().item()
    seconds += time.process_time() - start
    return {"LPPD": lppd, "RMSE": rmse, "seconds": seconds, "draws": count, **told}


def cells(s, found):
    """Yield what is quick first; the methods that start at members of one ensemble together."""
    for slow in (False, True):
        for name, seed, method in product(s.data, s.splits, s.methods):
            if (method == "NUTS") is slow:
                yield (name, method, seed), partial(run, s, name, method, seed)


def table(record):
    found = {}
    for name, method in product(dict.fromkeys(key[0] for key in record.cells), METHODS):
        if one := [*record.of(name, method).values()]:
            found[name, method] = one
    forms = {"LPPD": ".3f", "RMSE": ".4f", "seconds": ".0f"}
    return tables.score_table(found, forms, count=("method", "splits"))


by, choices = ("data", "method", "split"), {"methods": METHODS}
experiment = runner.Experiment("mile", cells, table, by=by, choices=choices)
