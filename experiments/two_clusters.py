"""Regression on two clusters of points, by a net 1-50-1 with tanh, all weights N(0, 1) before.

Fifty points in [-1, -0.7] and fifty in [0.5, 1] from cos(4x + 0.8) with noise of standard deviation
0.1.

`two_clusters regression` [T fig. 5.1]: (a) a mean-field posterior whose predictions are drawn
inside `local_reparameterization`, fresh noise for every point, (b) the same drawn weight by weight,
one function a draw, and (c) NUTS; the record has R-hat and effective sample sizes of its
predictions. The paper's (c) is HMC with a trajectory of the fixed length .05: a random walk.

`two_clusters variational_laplace`: where that method ends. All fits are the same line but for the
handler and `beta`. An expansion holds where the posterior is narrow. With few data for many weights
some units are switched off, no curvature is left to see there, and their weights go back to the
prior: the objective says one thing and draws of the weights another. So the table has the expected
log-likelihood of the training data as the objective has it (average of the last 100 steps) and by
200 draws, nats for all data; then that of 1,000 more points, nats a point. The figure has the
linearised predictions.

`inducing_toy` [T fig. 4.8]: posteriors over weights, and over inducing weights, with a N(0, 16 /
inputs of the layer) prior on weights and biases. What is to be seen is how far predictions widen
between the clusters, and beyond:

  FFG-W       a mean field: every weight by itself;
  FCG-W       a Normal with a full covariance for each layer's weights and biases;
  FFG-U       a mean field of 25 x 2 inducing weights for the first layer, 1 x 25 for the second;
  FCG-U       a Normal with a full covariance of each layer's inducing weights;
  ensemble-U  eight points in place of a distribution of the inducing weights;
  ensemble    eight nets, each at a maximum of its posterior, from starts of their own;
  NUTS        samples of the exact posterior; what it is worth is in the record.

`--changes` has what the width of FFG-W hangs on: its hidden biases, held narrow. Of the mean field
there are besides the standard deviation of the function in the middle, of all draws and where only
the hidden units' biases are drawn, and how many units are in use (a mean of the last weight above
its standard deviation). The paper's rate is constant, but for FCG-U and ensemble-U.
"""

import math
import statistics
import time
import warnings
from functools import partial
from itertools import product

import common
import pyro
import pyro.distributions as dist
import runner
import tables
import torch
import torch.distributions as td
from pyro.infer.autoguide import init_to_uniform
from pyro.infer.mcmc import NUTS
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

import tyxe
from tyxe import poutine
from tyxe.distributions import Gaussian, IndependentSites, ParamBlocks
from tyxe.distributions.param_blocks import SiteBlock
from tyxe.guides import AutoInducing, init_to_median
from tyxe.linalg import Cholesky, Inverse
from tyxe.util import SiteTensors

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

# --------------------------------------------------------------------------- inducing weights

INDUCING = {"inducing_rows": {"0.weight": 25, "2.weight": 1}}
INDUCING |= {"inducing_cols": {"0.weight": 2, "2.weight": 25}}
METHODS = ["FFG-W", "FCG-W", "FFG-U", "FCG-U", "ensemble-U", "ensemble", "NUTS"]
# FFG-W, where the standard deviations of the hidden units' biases stay as at the start.
HELD = "biases held at sd 0.01"


class AutoFullByLayer(tyxe.guides.Guide):
    """A full covariance for each layer of a net (FCG-W); correlations start at zero."""

    def __init__(self, module, init_loc_fn=init_to_median, init_scale=1e-2):
        super().__init__(module)
        self.blocks, starts, scale = {}, {}, math.log(init_scale)
        for site in self.sites:
            layer = site.own_name.rpartition(".")[0]
            self.blocks.setdefault(layer, []).append(SiteBlock(site.name, site.shape))
            start = init_loc_fn(self.messages[site.name]).detach().reshape(-1)
            starts.setdefault(layer, []).append(start)
        locs = {layer: torch.cat(parts) for layer, parts in starts.items()}
        self.locs, self.messages = SiteTensors(locs), {}
        self.log_scales = SiteTensors({n: torch.full_like(x, scale) for n, x in locs.items()})
        self.scale_factors = SiteTensors({n: x.new_zeros(len(x), len(x)) for n, x in locs.items()})

    def joints(self):
        found = []
        for layer, blocks in self.blocks.items():
            scale, factor = self.log_scales[layer].exp(), self.scale_factors[layer]
            unit = factor.tril(-1) + torch.eye(len(scale)).to(factor)
            precision = Inverse(Cholesky(scale[:, None] * unit))
            found.append(Gaussian(ParamBlocks(blocks), self.locs[layer], precision))
        return found

    def site_distribution(self, site):
        raise AssertionError("every site is in a layer")


class Elbo(nn.Module):
    """The ELBO by many draws at once: nets of a few units cost calls, not arithmetic."""

    def __init__(self, bnn, priors, x, y, draws):
        super().__init__()
        self.bnn, self.x, self.y, self.draws = bnn, x, y, draws
        self.priors = {f"net.{name}": prior for name, prior in priors.items()}

    def forward(self):
        """Return the expected log-likelihood and the KL, in nats."""
        guide, priors, values, kl = self.bnn.net_guide, self.priors, {}, 0.0
        for q in guide.joints():
            values |= q.unflatten(q.rsample((self.draws,)))
            kl = kl + td.kl_divergence(q, IndependentSites({n: priors[n] for n in q.names}))
        for site in [site for site in guide.sites if site.name not in values]:
            q = guide.site_distribution(site)
            values[site.name] = q.rsample((self.draws,))
            kl = kl + td.kl_divergence(q, priors[site.name])
        outputs = torch.vmap(self.bnn._run_net, in_dims=(0, None))(values, self.x)
        targets = self.y.repeat(self.draws, 1)
        total = self.bnn.likelihood.log_likelihood(outputs.flatten(0, 1), targets, "sum")
        return total / self.draws, kl


def scheduled(s, method, parameters):
    adam = torch.optim.Adam(parameters, lr=s.rate, fused=True)
    cuts = [10_000] if method in ("FCG-U", "ensemble-U") else []
    return adam, MultiStepLR(adam, cuts) if s.published else CosineAnnealingLR(adam, s.steps, 1e-4)


def fit_elbo(s, name, bnn, prior, net, data):
    elbo, terms = Elbo(bnn, prior.sites(net), *data, s.draws), []
    if name == HELD:
        bnn.get_parameter("net_guide.unconstrained_scales.0.bias").requires_grad_(False)
    adam, schedule = scheduled(s, name, elbo.parameters())
    for _ in range(s.steps):
        adam.zero_grad()
        expected, kl = elbo()
        (kl - expected).backward()
        adam.step()
        schedule.step()
        terms.append([expected.item(), kl.item()])
    expected, kl = torch.tensor(terms[-100:]).mean(0).tolist()
    return {"log-likelihood": expected, "KL": kl}


def ensemble(s, priors, likelihood, data, members=8):
    """Return what maxima of the posterior, from starts of their own, predict on the grid."""
    nets = [common.mlp(1, 50, 1, act=nn.Tanh) for _ in range(members)]
    weights, _ = torch.func.stack_module_state(nets)
    x, y = data
    adam, schedule = scheduled(s, "ensemble", weights.values())
    of_all = torch.vmap(partial(torch.func.functional_call, nets[0]), (0, None))
    for _ in range(s.steps):
        adam.zero_grad()
        fitted = likelihood.log_likelihood(
            of_all(weights, x).flatten(0, 1), y.repeat(members, 1), "sum"
        )
        prior = sum(priors[name].log_prob(value).sum() for name, value in weights.items())
        (-fitted - prior).backward()
        adam.step()
        schedule.step()
    with torch.no_grad():
        outputs = of_all(weights, grid(201))
    return {"log-likelihood": fitted.item() / members}, likelihood.aggregate_predictions(outputs)


@torch.no_grad()
def where_it_is(bnn, draws=400):
    """Return standard deviations of a mean field's function in the middle, and units in use.

    Of all draws, and of draws of one kind of the weights with the others at their means.
    """
    qs = {site.name: bnn.net_guide.site_distribution(site) for site in bnn.net_guide.sites}
    drawn = {name: q.sample((draws,)) for name, q in qs.items()}
    means = {name: q.mean.expand_as(drawn[name]) for name, q in qs.items()}
    middle, found = torch.linspace(-0.3, 0.1, 21)[:, None], {}
    kinds = {"all weights": tuple(qs)} | {name.removeprefix("net."): (name,) for name in qs}
    for kind, names in kinds.items():
        values = means | {name: drawn[name] for name in names}
        outputs = torch.vmap(bnn._run_net, in_dims=(0, None))(values, middle)
        found[kind] = outputs.std(0).mean().item()
    last = qs["net.2.weight"]
    in_use = (last.mean.abs() > last.stddev).sum().item()
    return {"sd in the middle by what is drawn": found, "units in use": in_use}


def run_toy(s, name, seed):
    pyro.set_rng_seed(seed)
    data, (net, likelihood) = draw(50), net_and_likelihood()

    def of(name, module, param):
        return dist.Normal(0, 4 / module.in_features**0.5).expand(param.shape)

    prior = tyxe.priors.LambdaPrior(of)
    pyro.set_rng_seed(seed)
    if name == "ensemble":
        facts, predictions = ensemble(s, prior.sites(net), likelihood, data)
        return facts | curves(*predictions)
    if name == "NUTS":
        how = {"target_accept_prob": 0.8, "max_tree_depth": s.depth}
        kernel = partial(NUTS, init_strategy=partial(init_to_uniform, radius=0.1), **how)
        bnn, draws = tyxe.MCMC_BNN(net, prior, likelihood, kernel), min(s.samples, 1_000)
        bnn.fit([data], s.samples, warmup_steps=s.warmup, disable_progbar=True)
        sizes = common.chain_worth(bnn, s.samples, POINTS)
        facts = {"effective sample size": [round(size, 1) for size in sizes]}
    else:
        inducing = partial(AutoInducing, **INDUCING)
        field = common.mean_field(net, init_scale=1e-2)
        guides = {
            **{"FFG-W": field, HELD: field},
            "FCG-W": common.mean_field(net, guide=AutoFullByLayer),
            "FFG-U": inducing,
            "FCG-U": partial(inducing, q_inducing="full"),
            "ensemble-U": partial(inducing, q_inducing="ensemble", ensemble_size=8),
        }
        bnn, draws = tyxe.VariationalBNN(net, prior, likelihood, guides[name]), 200
        facts = fit_elbo(s, name, bnn, prior, net, data)
    predictions = bnn.predict(grid(201), num_predictions=draws)
    facts |= where_it_is(bnn) if name in ("FFG-W", HELD) else {}
    return facts | curves(*predictions)


def cells_of_toy(s, found):
    for seed, name in product(s.seeds, [*s.methods, *s.changes]):
        yield (name, seed), partial(run_toy, s, name, seed)


def page(record, keep, forms):
    order = sorted((k for k in record.cells if k[0] in keep), key=lambda k: keep.index(k[0]))
    cells = {k: (c := record.cells[k]) | regions(c["sd"]) for k in order}
    for cell in cells.values():
        if parts := cell.get("sd in the middle by what is drawn"):
            cell["function's sd"], cell["of biases alone"] = parts["all weights"], parts["0.bias"]
    return tables.score_table(tables.rows(cells), forms)


def table_of_toy(record):
    forms = dict.fromkeys(regions([0.0] * 5), ".3f")
    forms |= {"log-likelihood": ".0f", "KL": ".0f"}
    more = {"function's sd": ".3f", "of biases alone": ".3f", "units in use": ".0f"}
    found = {"": sourced(record, page(record, METHODS, forms))}
    if any(name == HELD for name, _ in record.cells):
        found["_changes"] = page(record, ["FFG-W", HELD], forms | more)
    return found


def figure_of_toy(record):
    first = next(iter(record.cells))[1]
    own = {method: cell for (method, seed), cell in record.cells.items() if seed == first}
    panels = {method: own[method] for method in METHODS if method in own}
    found = {"": bands(panels, first, [2.5, 2.5], (13, 6.4))}
    changes = {name: own[name] for name in ("FFG-W", HELD) if name in own}
    if len(changes) > 1:
        found["_changes"] = bands(changes, first, [2.5], (13, 3.6))
    return found


parts = cells_of_toy, table_of_toy, figure_of_toy, ("method", "seed")
choices = {"methods": METHODS, "changes": [HELD]}
inducing_toy = runner.Experiment("inducing_toy", *parts, choices=choices)
