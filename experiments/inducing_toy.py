"""Regression on two clusters by posteriors over weights, and over inducing weights [T fig. 4.8].

Data and net of `two_clusters.py`, and a N(0, 16 / inputs of the layer) prior on weights and biases.
What is to be seen is how far predictions widen between the clusters, and beyond:

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
from functools import partial
from itertools import product

import common
import pyro
import pyro.distributions as dist
import runner
import tables
import torch
import torch.distributions as td
import two_clusters
from pyro.infer.autoguide import init_to_uniform
from pyro.infer.mcmc import NUTS
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

import tyxe
from tyxe.distributions import Gaussian, IndependentSites, ParamBlocks
from tyxe.distributions.param_blocks import SiteBlock
from tyxe.guides import AutoInducing, init_to_median
from tyxe.linalg import Cholesky, Inverse
from tyxe.util import SiteTensors

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


def fit(s, name, bnn, prior, net, data):
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
        outputs = of_all(weights, two_clusters.grid(201))
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


def run(s, name, seed):
    pyro.set_rng_seed(seed)
    data, (net, likelihood) = two_clusters.draw(50), two_clusters.net_and_likelihood()

    def of(name, module, param):
        return dist.Normal(0, 4 / module.in_features**0.5).expand(param.shape)

    prior = tyxe.priors.LambdaPrior(of)
    pyro.set_rng_seed(seed)
    if name == "ensemble":
        facts, predictions = ensemble(s, prior.sites(net), likelihood, data)
        return facts | two_clusters.curves(*predictions)
    if name == "NUTS":
        how = {"target_accept_prob": 0.8, "max_tree_depth": s.depth}
        kernel = partial(NUTS, init_strategy=partial(init_to_uniform, radius=0.1), **how)
        bnn, draws = tyxe.MCMC_BNN(net, prior, likelihood, kernel), min(s.samples, 1_000)
        bnn.fit([data], s.samples, warmup_steps=s.warmup, disable_progbar=True)
        sizes = common.chain_worth(bnn, s.samples, two_clusters.POINTS)
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
        facts = fit(s, name, bnn, prior, net, data)
    predictions = bnn.predict(two_clusters.grid(201), num_predictions=draws)
    facts |= where_it_is(bnn) if name in ("FFG-W", HELD) else {}
    return facts | two_clusters.curves(*predictions)


def cells(s, found):
    for seed, name in product(s.seeds, [*s.methods, *s.changes]):
        yield (name, seed), partial(run, s, name, seed)


def page(record, keep, forms):
    order = sorted((k for k in record.cells if k[0] in keep), key=lambda k: keep.index(k[0]))
    cells = {k: (c := record.cells[k]) | two_clusters.regions(c["sd"]) for k in order}
    for cell in cells.values():
        if parts := cell.get("sd in the middle by what is drawn"):
            cell["function's sd"], cell["of biases alone"] = parts["all weights"], parts["0.bias"]
    return tables.score_table(tables.rows(cells), forms)


def table(record):
    forms = dict.fromkeys(two_clusters.regions([0.0] * 5), ".3f")
    forms |= {"log-likelihood": ".0f", "KL": ".0f"}
    more = {"function's sd": ".3f", "of biases alone": ".3f", "units in use": ".0f"}
    found = {"": two_clusters.sourced(record, page(record, METHODS, forms))}
    if any(name == HELD for name, _ in record.cells):
        found["_changes"] = page(record, ["FFG-W", HELD], forms | more)
    return found


def figure(record):
    first = next(iter(record.cells))[1]
    own = {method: cell for (method, seed), cell in record.cells.items() if seed == first}
    panels = {method: own[method] for method in METHODS if method in own}
    found = {"": two_clusters.bands(panels, first, [2.5, 2.5], (13, 6.4))}
    changes = {name: own[name] for name in ("FFG-W", HELD) if name in own}
    if len(changes) > 1:
        found["_changes"] = two_clusters.bands(changes, first, [2.5], (13, 3.6))
    return found


by, choices = ("method", "seed"), {"methods": METHODS, "changes": [HELD]}
experiment = runner.Experiment("inducing_toy", cells, table, figure, by, choices=choices)
