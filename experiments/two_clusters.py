"""Regression on two clusters of points, by a net 1-50-1 with tanh, all weights N(0, 1) before.

Fifty points in [-1, -0.7] and fifty in [0.5, 1] from cos(4x + 0.8) with noise of standard deviation
0.1.

`regression` [T fig. 5.1]: (a) a mean-field posterior whose predictions are drawn inside
`local_reparameterization`, fresh noise for every point, (b) the same drawn weight by weight, one
function a draw, and (c) NUTS; the record has R-hat and effective sample sizes of its predictions.
The paper's (c) is HMC with a trajectory of the fixed length .05: a random walk.

`variational_laplace`: where that method ends. All fits are the same line but for the handler and
`beta`. An expansion holds where the posterior is narrow. With few data for many weights some units
are switched off, no curvature is left to see there, and their weights go back to the prior: the
objective says one thing and draws of the weights another. So the table has the expected
log-likelihood of the training data as the objective has it (average of the last 100 steps) and by
200 draws, nats for all data; then that of 1,000 more points, nats a point. The figure has the
linearised predictions.
"""

import statistics
import time
import warnings
from functools import partial

import common
import pyro
import runner
import tables
import torch
from torch import nn

import tyxe
from tyxe import poutine

POINTS = [-1.5, -0.85, 0.0, 0.75, 1.5]  # left of, at, between and right of the clusters
WAYS = {"mean network": ("bnn", 0), "drawn": ("bnn", 100), "linearised": ("glm", 100)}


def truth(x):
    return torch.cos(4 * x + 0.8)


def draw(count):
    left, right = torch.empty(count, 1).uniform_(-1, -0.7), torch.empty(count, 1).uniform_(0.5, 1)
    x = torch.cat([left, right])
    return x, truth(x) + 0.1 * torch.randn_like(x)


def net_and_likelihood(points=100):
    net = common.mlp(1, 50, 1, act=nn.Tanh)
    return net, tyxe.likelihoods.HomoskedasticGaussian(points, scale=0.1)


def grid(points=401):
    return torch.linspace(-2, 2, points)[:, None]


def curves(mean, scale):
    return {"mean": tables.rounded(mean), "sd": tables.rounded(scale)}


def regions(scale):
    """Return mean standard deviations on the grid: at, between and beyond the data."""
    scale = torch.as_tensor(scale).flatten()
    x = grid(len(scale)).flatten()
    masks = {"sd at data": ((x >= -1) & (x <= -0.7)) | ((x >= 0.5) & (x <= 1))}
    masks |= {"sd between": (x > -0.7) & (x < 0.5), "sd in the middle": (x > -0.3) & (x < 0.1)}
    masks["sd beyond"] = x.abs() > 1
    return {name: scale[mask].mean().item() for name, mask in masks.items()}


def bands(panels, seed, *look):
    """Draw predictions by title, with the data of a seed and the truth."""
    pyro.set_rng_seed(int(seed))
    x = grid(len(next(iter(panels.values()))["mean"]))
    return tables.bands([*panels.items()], x, draw(50), truth(x), *look)


def figure(record):
    (seed,), cell = next(iter(record.cells.items()))
    return bands(cell["curves"], seed, [2], (12, 3.8))


def nuts(s, net, likelihood, pair):
    """Return a BNN of samples by NUTS, and what its chains tell of their predictions."""
    bnn = tyxe.MCMC_BNN(net, common.normal(), likelihood, tyxe.samplers.NUTS())
    run = bnn.fit([pair], s.nuts_samples, warmup_steps=s.nuts_warmup, num_chains=s.nuts_chains)
    facts = {name: value.mean().item() for name, value in run.statistics.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ArviZ announces its next version
        table = bnn.summary(torch.tensor(POINTS)[:, None])
    facts["step_size"] = run.run.settings.step_size.tolist()
    facts |= {name: table[name].tolist() for name in ("r_hat", "ess_bulk", "ess_tail")}
    return bnn, facts


def regression(s, seed):
    data, (net, likelihood), start = draw(50), net_and_likelihood(), time.perf_counter()
    median = tyxe.guides.init_to_median
    guide = partial(tyxe.guides.AutoNormal, init_loc_fn=median, init_scale=1e-4)
    variational = tyxe.VariationalBNN(net, common.normal(), likelihood, guide)
    with poutine.local_reparameterization():
        history = variational.fit([data], pyro.optim.Adam({"lr": 1e-3}), s.epochs)
        mean_field = {"seconds": time.perf_counter() - start, "kl": history.kl[-1]}
        inside = variational.predict(grid(), num_predictions=32)
    panels = {"(a) mean field, inside the handler": inside}
    panels["(b) mean field, outside"] = variational.predict(grid(), num_predictions=32)
    start = time.perf_counter()
    sampled, facts = nuts(s, net, likelihood, data)
    facts["seconds"] = time.perf_counter() - start
    panels["(c) NUTS"] = sampled.predict(grid(), num_predictions=s.draws)
    found = {"mean_field": mean_field, "chain": facts}
    found["curves"] = {title: curves(*panel) for title, panel in panels.items()}
    return found | {"rows": {title: regions(scale) for title, (_, scale) in panels.items()}}


def variational_laplace(s, seed):
    data, test, (net, likelihood) = draw(50), draw(500), net_and_likelihood()
    guide = common.mean_field(net, init_scale=tyxe.guides.scale_below_prior())
    adam, rows, panels = partial(torch.optim.Adam, lr=s.learning_rate), {}, {}

    def fit(handler, beta):
        bnn = tyxe.VariationalBNN(net, common.normal(), likelihood, guide)
        how = {"beta": beta, "lr_multipliers": {"scale": s.multiplier_of_scales}}
        start = time.perf_counter()
        with handler():
            history = bnn.fit([data], adam, s.epochs, progress=False, **how)
        seconds = time.perf_counter() - start
        with torch.no_grad():
            draws = [tyxe.bnn.elbo_terms(bnn.model, bnn.guide, *data).data for _ in range(200)]
        row = {"objective's": statistics.fmean(history.log_likelihood[-100:])}
        row |= {"by draws": torch.stack(draws).mean().item(), "KL": history.kl[-1]}
        for way, (predictive, count) in WAYS.items():
            how = {"predictive": predictive, "num_predictions": count, "reduction": "mean"}
            row[way] = bnn.evaluate(*test, **how)[1].item()
        return bnn, {**row, "fit s": seconds}

    for beta in (1.0, 0.1, 0.01):
        name = f"beta {beta:g}"
        bnn, rows[f"variational Laplace, {name}"] = fit(poutine.variational_laplace, beta)
        _, rows[f"variational inference, {name}"] = fit(poutine.local_reparameterization, beta)
        panels[name] = curves(*bnn.predict(grid(), predictive="glm"))
    return {"rows": rows, "curves": panels}


def sourced(record, text):
    """Return a table, and the command and the seeds that it is of."""
    seeds = ", ".join(dict.fromkeys(key[-1] for key in record.cells))
    return f"{text}\n\n`{record.content['command']}`, seed {seeds}."


def variational_laplace_table(record):
    forms = dict.fromkeys(["objective's", "by draws", "KL"], ".0f")
    forms |= dict.fromkeys(WAYS, ".2f") | {"fit s": ".0f"}
    return sourced(record, tables.of(forms)(record))


def of(run, table, name):
    cells, command = runner.every(run, seed="seeds"), f"two_clusters {run.__name__}"
    return runner.Experiment(command, cells, table, figure, name=name)


REGIONS = tables.of(dict.fromkeys(["sd at data", "sd between", "sd beyond"], ".3f"))
TOY = "variational_laplace_toy"
experiments = {
    "regression": of(regression, REGIONS, "regression"),
    "variational_laplace": of(variational_laplace, variational_laplace_table, TOY),
}
