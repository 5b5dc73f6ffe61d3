"""Microcanonical Langevin ensembles, MILE: chains that start at the members of a deep ensemble [S].

`mile` [S, tab. of UCI]: regression by two hidden layers of 16 ReLU units; outputs are a mean and
the log of a scale. Splits of 70 % for training, 10 % for validation and 20 % for testing by seed,
standardised by the rows that are not for testing. LPPD is the log density of the mean over draws of
the predictive densities, higher is better. Rows: MAP, full batches; a deep ensemble, whose members
stop early; MILE; NUTS from the same starts; mean field; Laplace with the full matrix, linearised,
whose scale is a softplus, since a linearised log scale has draws of any size. The methods that stop
by no validation loss have that part for training, too.

`mile_beside_bde`: the benchmark of bde 1.0.2, the authors' library: airfoil; four hidden layers of
16 ReLU units; outputs are a mean and a scale by softplus; ten members, by full batches of Adam,
that stop early by 15 % of the data; ten chains from them. Seconds are of one thread, compilation
included; in brackets what bde reports, there in 240 seconds on ten cores. Rows: ours, our members
alone, and bde, where it is installed.

`mile_digits`: scikit-learn's digits 0 to 7, half of them to test; 8 and 9 are unknown. A net of two
convolutions and two linear maps, 4,824 weights; rows as above, mean field and Laplace, by Kronecker
factors, from the MAP. OOD AUROC is by the entropy of predictions.

All weights are N(0, 1) before; seconds include the members' or the MAP's training.
"""

import importlib.util
import math
import os
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
REGRESSION = {"LPPD": ".3f", "RMSE": ".4f", "seconds": ".0f"}
BDE = {"NLL": ".3f", "RMSE": ".4f", "seconds": ".0f"}
DIGITS = {"accuracy %": ".1f", "NLL": ".3f", "ECE %": ".1f", "OOD AUROC": ".3f", "seconds": ".0f"}
PUBLISHED = runner.SETTINGS["mile_beside_bde"]["facts"]["reported by bde"]


def trained(bnn, pair, count, rate, decay, **how):
    """Return values of members of an ensemble, stacked, by site, and the seconds it took."""
    start, adam = time.process_time(), partial(torch.optim.AdamW, lr=rate, weight_decay=decay)
    members = bnn.starts([pair], warm_start(adam, **how), count, progress=False)
    return members, time.process_time() - start


def chained(s, bnn, pair, members):
    """Give a BNN samples of chains from members; return what the chains tell."""
    how = {"warmup_steps": s.warmup_steps, "thinning": s.thinning, "progress": False}
    return bnn.fit([pair], s.steps // s.thinning, num_chains=s.members, init=members, **how)


def descended(s, net, likelihood, pair, guide):
    bnn = tyxe.VariationalBNN(net, common.normal(), likelihood, guide)
    how = 1e-2, s.descent_steps, 1e-5, tyxe.poutine.local_reparameterization
    return common.fit_by_cosine(bnn, [pair], *how)


# --------------------------------------------------------------------------- regression


class LogScale(nn.Module):
    """The last layer's outputs, a mean and a log of a scale, as a mean and a scale."""

    def forward(self, outputs):
        mean, log_scale = outputs.chunk(2, -1)
        return torch.cat([mean, log_scale.exp()], -1)


def split(name, seed):
    """Return pairs of standardised inputs and targets, those to learn from and to test."""
    x, y = common.uci_regression(name)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    known, test = order.tensor_split([round(0.8 * len(x))])
    x, y = (common.standardised_columns(part, known) for part in (x, y))
    return [(x[rows], y[rows]) for rows in (known, test)]


def make_net(s, inputs, *last):
    return nn.Sequential(*common.mlp(inputs, s.hidden_units, s.hidden_units, 2), *last)


def sampled(s, pair, kernel):
    net = make_net(s, pair[0].shape[1], LogScale())
    likelihood = tyxe.likelihoods.HeteroskedasticGaussian(len(pair[0]), positive_scale=True)
    return tyxe.MCMC_BNN(net, common.normal(), likelihood, kernel)


@lru_cache(1)
def ensemble(s, name, seed):
    torch.manual_seed(seed)
    pair = split(name, seed)[0]
    how = {"num_epochs": s.epochs, "patience": s.patience, "validation": 1 / 8}  # a tenth of all
    return trained(sampled(s, pair, MCLMC()), pair, s.members, s.rate, s.rate, **how)


def chains(s, method, starts, pair):
    """Return a BNN of draws, or of the starts, with what the chains tell."""
    bnn = sampled(s, pair, NUTS(max_tree_depth=s.nuts_depth) if method == "NUTS" else MCLMC())
    if method == "deep ensemble":
        common.keep_members(bnn, starts)
        return bnn, {}
    if method == "MILE":
        run = chained(s, bnn, pair, starts)
    else:
        how = {"num_chains": s.members, "init": starts, "progress": False}
        run = bnn.fit([pair], s.nuts_samples, warmup_steps=s.nuts_warmup_steps, **how)
    told = {"potential": run.potentials, **run.statistics}
    return bnn, {name: value.double().mean().item() for name, value in told.items()}


def about_a_mode(s, method, pair):
    """Return a BNN of a Gaussian or a point about the mode."""
    raw = method == "Laplace"
    net = make_net(s, pair[0].shape[1], *[] if raw else [LogScale()])
    kind = tyxe.likelihoods.HeteroskedasticGaussian
    likelihood = kind(len(pair[0]), positive_scale=not raw)
    bnn = descended(s, net, likelihood, pair, common.point(net))
    if method == "mean field":
        net = bnn.to_module()
        guide = common.mean_field(net, init_scale=1e-2)
        return descended(s, net, likelihood, pair, guide)
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
        bnn = about_a_mode(s, method, pair)
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
    for name, method in product(record.names(), METHODS):
        if one := [*record.of(name, method).values()]:
            found[name, method] = one
    return tables.score_table(found, REGRESSION, count=("method", "splits"))


by, choices = ("data", "method", "split"), {"methods": METHODS}
experiment = runner.Experiment("mile", cells, table, by=by, choices=choices)

# --------------------------------------------------------------------------- beside bde


def ours(s, method, seed, pair, x):
    """Return draws of means and scales, `(draws, n, 2)`."""
    net = nn.Sequential(*common.mlp(pair[0].shape[1], *[s.hidden_units] * 4, 2))
    likelihood = tyxe.likelihoods.HeteroskedasticGaussian(len(pair[0]))
    bnn = tyxe.MCMC_BNN(net, common.normal(), likelihood, MCLMC())
    # Batch, rate and decay are bde's.
    how = {"num_epochs": s.epochs, "patience": s.patience, "validation": 0.15}
    members, _ = trained(bnn, pair, s.members, 1e-3, 1e-4, batch_size=len(pair[0]), **how)
    if method == "MILE":
        chained(s, bnn, pair, members)
    else:
        common.keep_members(bnn, members)
    count = len(next(iter(bnn.get_samples().values())))
    return bnn.predict(x, num_predictions=count, aggregate=False)


def of_bde(s, seed, pair, x):
    """Return draws as `ours` does."""
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    os.environ.setdefault("XLA_FLAGS", flags)
    from bde import BdeRegressor

    found = BdeRegressor(
        n_members=s.members,
        hidden_layers=[s.hidden_units] * 4,
        seed=seed,
        epochs=s.epochs,
        patience=s.patience,
        validation_split=0.15,
        n_samples=s.steps,
        n_thinning=s.thinning,
        warmup_steps=s.warmup_steps,
        lr=1e-3,
    ).fit(pair[0].numpy(), pair[1][:, 0].numpy())
    return torch.tensor(found.predict(x.numpy(), raw=True)).flatten(0, 1)


def run_beside_bde(s, method, seed):
    pair, (x, y) = split("airfoil", seed)
    torch.manual_seed(seed)
    # With the children that compile.
    start = sum(os.times()[:4])
    draws = of_bde(s, seed, pair, x) if method == "bde" else ours(s, method, seed, pair, x)
    seconds = sum(os.times()[:4]) - start
    mean, scale = draws[..., 0], nn.functional.softplus(draws[..., 1])
    density = torch.distributions.Normal(mean, scale.clamp(min=1e-6))
    logs = density.log_prob(y[:, 0]).double()
    nll = (math.log(len(draws)) - logs.logsumexp(0)).mean().item()
    rmse = (mean.mean(0) - y[:, 0]).square().mean().sqrt().item()
    return {"NLL": nll, "RMSE": rmse, "seconds": seconds, "draws": len(draws)}


def is_at_hand(s, method, seed):
    return method != "bde" or importlib.util.find_spec("bde") is not None


def table_beside_bde(record):
    found = {m: [*record.of(m).values()] for m in ("deep ensemble", "MILE", "bde") if record.of(m)}
    paper = {name: [f"{number:g}" for number in row] for name, row in PUBLISHED.items()}
    page = tables.score_table(found, BDE, paper | {"MILE": paper["bde"]}, count=["splits"])
    others = ", ".join(f"{name} {' and '.join(paper[name])}" for name in PUBLISHED)
    return f"{page}\n\nReported by bde (NLL and RMSE): {others}."


beside_bde = runner.Experiment(
    "mile_beside_bde",
    runner.every(run_beside_bde, is_at_hand, method="methods", split="splits"),
    table_beside_bde,
)

# --------------------------------------------------------------------------- digits


def small_cnn():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten()),
        *common.mlp(64, 32, 8),
    )


def digits(s, seed):
    """Return pairs to train and to test, and images of other digits."""
    known, test, unknown = common.known_and_unknown("digits")
    order = torch.randperm(len(known[0]), generator=torch.Generator().manual_seed(seed))
    return tuple(part[order[: s.images]] for part in known), test, unknown


def gaussians(s, pair, likelihood):
    """Yield the MAP, mean field and Laplace: a name, a BNN and its draws."""
    net = small_cnn()
    bnn = descended(s, net, likelihood, pair, common.point(net))
    yield "MAP", bnn, 1
    net = bnn.to_module()
    guide = common.mean_field(net, init_scale=1e-2)
    yield "mean field", descended(s, net, likelihood, pair, guide), s.draws
    bnn = tyxe.LaplaceBNN(net, common.normal(), likelihood, structure="kron")
    bnn.fit_curvature([pair], progress=False)
    yield "Laplace", bnn, s.draws


def ensembles(s, pair, likelihood):
    """Yield the members and the chains from them likewise."""
    bnn = tyxe.MCMC_BNN(small_cnn(), common.normal(), likelihood, MCLMC())
    how = {"num_epochs": s.epochs, "patience": s.patience}
    members, _ = trained(bnn, pair, s.members, s.rate, s.rate, **how)
    common.keep_members(bnn, members)
    yield "deep ensemble", bnn, s.members
    chained(s, bnn, pair, members)
    yield "MILE", bnn, s.members * (s.steps // s.thinning)


def run_digits(s, seed):
    pair, test, unknown = digits(s, seed)
    likelihood, found = tyxe.likelihoods.Categorical(len(pair[0])), {}
    for kind in (gaussians, ensembles):
        torch.manual_seed(seed)
        seconds, start = 0.0, time.process_time()
        for name, bnn, draws in kind(s, pair, likelihood):
            taken = seconds + time.process_time() - start
            # All of a kind begin with the first one's training.
            seconds = seconds or taken
            probs = [bnn.predict(x, num_predictions=draws).softmax(-1) for x in (test[0], unknown)]
            row = tables.scores(probs[0], test[1])
            row["OOD AUROC"] = tables.by_entropy(*probs)[2]
            found[name] = row | {"seconds": taken, "draws": draws}
            start = time.process_time()
    return {"rows": {name: found[name] for name in METHODS if name in found}}


on_digits = runner.Experiment(
    "mile_digits", runner.every(run_digits, seed="seeds"), tables.of(DIGITS)
)
