"""MILE of `tyxe.samplers` beside bde's, on the benchmark that bde reports [S; bde 1.0.2].

Airfoil; four hidden layers of 16 ReLU units; outputs are a mean and a scale by softplus; ten
members, by full batches of Adam, that stop early by 15 % of the data; ten chains from them. Seconds
are of one thread, compilation included; in brackets what bde reports, there in 240 seconds on ten
cores. Rows: ours, our members alone, and bde, where it is installed.
"""

import importlib.util
import math
import os
from functools import partial
from itertools import product

import common
import mile
import runner
import tables
import torch
from torch import nn

import tyxe

PUBLISHED = {"TabPFN v2": (-0.934, 0.136), "bde": (-0.913, 0.1215)}
PUBLISHED |= {"gradient-boosted trees": (-0.18, 0.20), "deep ensemble": (0.18, 0.37)}
METHODS = ["deep ensemble", "MILE", "bde"]


def ours(s, method, seed, pair, x):
    """Return draws of means and scales, `(draws, n, 2)`."""
    net = nn.Sequential(*common.mlp(pair[0].shape[1], *[s.hidden_units] * 4, 2))
    likelihood = tyxe.likelihoods.HeteroskedasticGaussian(len(pair[0]))
    bnn = tyxe.MCMC_BNN(net, common.normal(), likelihood, tyxe.samplers.MCLMC())
    # Batch, rate and decay are bde's.
    how = {"num_epochs": s.epochs, "patience": s.patience, "validation": 0.15}
    members, _ = mile.trained(bnn, pair, s.members, 1e-3, 1e-4, batch_size=len(pair[0]), **how)
    if method == "MILE":
        how = {"warmup_steps": s.warmup_steps, "thinning": s.thinning, "progress": False}
        bnn.fit([pair], s.steps // s.thinning, num_chains=s.members, init=members, **how)
    else:
        common.keep_members(bnn, members)
    count = len(next(iter(bnn.get_samples().values())))
    outputs = bnn.predict(x, num_predictions=count, aggregate=False)
    return torch.cat([outputs[..., :1], nn.functional.softplus(outputs[..., 1:])], -1)


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
    raw = torch.tensor(found.predict(x.numpy(), raw=True)).flatten(0, 1)
    return torch.cat([raw[..., :1], nn.functional.softplus(raw[..., 1:])], -1)


def run(s, method, seed):
    pair, (x, y) = mile.split("airfoil", seed)
    torch.manual_seed(seed)
    # With the children that compile.
    start = sum(os.times()[:4])
    draws = of_bde(s, seed, pair, x) if method == "bde" else ours(s, method, seed, pair, x)
    seconds = sum(os.times()[:4]) - start
    density = torch.distributions.Normal(draws[..., 0], draws[..., 1].clamp(min=1e-6))
    logs = density.log_prob(y[:, 0]).double()
    nll = (math.log(len(draws)) - logs.logsumexp(0)).mean().item()
    rmse = (draws[..., :1].mean(0) - y).square().mean().sqrt().item()
    return {"NLL": nll, "RMSE": rmse, "seconds": seconds, "draws": len(draws)}


def cells(s, found):
    for seed, method in product(s.splits, s.methods):
        if method != "bde" or importlib.util.find_spec("bde") is not None:
            yield (method, seed), partial(run, s, method, seed)


def table(record):
    found = {m: [*record.of(m).values()] for m in METHODS if record.of(m)}
    paper = {name: [f"{number:g}" for number in row] for name, row in PUBLISHED.items()}
    forms = {"NLL": ".3f", "RMSE": ".4f", "seconds": ".0f"}
    page = tables.score_table(found, forms, paper | {"MILE": paper["bde"]}, count=["splits"])
    others = ", ".join(f"{name} {' and '.join(paper[name])}" for name in PUBLISHED)
    return f"{page}\n\nReported by bde (NLL and RMSE): {others}."


facts = {"reported by bde": PUBLISHED}
by = ("method", "split")
experiment = runner.Experiment("mile_beside_bde", cells, table, by=by, facts=facts)
