"""Regression on two clusters by posteriors over weights, and over inducing weights [T fig. 4.8].

Data and net of `two_clusters.py`, and a N(0, 16 / inputs of the layer) prior on weights and biases.
What is to be seen is how far predictions widen between the clusters, and beyond:

  FFG-W       a mean field: every weight by itself;
  FCG-W       a Normal with a full covariance for each layer's weights and biases;
  FFG-U       a mean field of 25 x 2 inducing weights for the first layer, 1 x 25 for the second;
  FCG-U       a Normal with a full covariance of each layer's inducing weights;
  ensemble-U  eight points in place of a distribution of the inducing weights;
  NUTS        samples of the exact posterior; what it is worth is in the record.

Columns: mean predictive standard deviations, the noise included; the expected log-likelihood of all
data and the KL, in nats. Predictions average 200 draws. Reduced: fewer steps, their rate decaying
by a cosine (the paper: constant, but for FCG-U and ensemble-U a tenth after 10,000 steps), and a
short chain of NUTS, which starts at small weights.
"""

import math
from functools import partial

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
from runner import setting, settings, which
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

import tyxe
from tyxe.distributions import IndependentSites, JointNormal, ParamBlocks
from tyxe.distributions.param_blocks import SiteBlock
from tyxe.guides import AutoInducing, init_to_median
from tyxe.linalg import Cholesky, Inverse
from tyxe.util import SiteTensors

INDUCING = {"inducing_rows": {"0.weight": 25, "2.weight": 1}}
INDUCING |= {"inducing_cols": {"0.weight": 2, "2.weight": 25}}
METHODS = ["FFG-W", "FCG-W", "FFG-U", "FCG-U", "ensemble-U", "NUTS"]


@settings
class Settings(runner.Settings):
    methods: list[str] = which(METHODS, "the posteriors", choices=METHODS)
    seeds: list[int] = which([42], "of data and inference")
    steps: int = setting(8_000, "of Adam", published=20_000, smoke=5)
    draws: int = setting(32, "in a step")
    rate: float = setting(1e-2, "of Adam", published=1e-3)
    warmup: int = setting(150, "of NUTS", published=5_000, smoke=5)
    samples: int = setting(150, "of NUTS", published=20_000, smoke=10)
    depth: int = setting(8, "of its trees, at most", published=10, smoke=2)


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
            found.append(JointNormal(ParamBlocks(blocks), self.locs[layer], precision))
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
        outputs = torch.vmap(self.bnn.run_net, in_dims=(0, None))(values, self.x)
        targets = self.y.repeat(self.draws, 1)
        total = self.bnn.likelihood.log_likelihood(outputs.flatten(0, 1), targets, "sum")
        return total / self.draws, kl


def fit(s, method, bnn, prior, net, data):
    elbo, terms = Elbo(bnn, prior.sites(net), *data, s.draws), []
    adam = torch.optim.Adam(elbo.parameters(), lr=s.rate, fused=True)
    cuts = [10_000] if method in ("FCG-U", "ensemble-U") else []
    schedule = MultiStepLR(adam, cuts) if s.published else CosineAnnealingLR(adam, s.steps, 1e-4)
    for _ in range(s.steps):
        adam.zero_grad()
        expected, kl = elbo()
        (kl - expected).backward()
        adam.step()
        schedule.step()
        terms.append([expected.item(), kl.item()])
    expected, kl = torch.tensor(terms[-100:]).mean(0).tolist()
    return {"log-likelihood": expected, "KL": kl}


def run(s, method, seed):
    data, (net, likelihood) = two_clusters.draw(50), two_clusters.net_and_likelihood()
    prior = tyxe.priors.LambdaPrior(
        lambda name, module, param: dist.Normal(0, 4 / module.in_features**0.5).expand(param.shape)
    )
    pyro.set_rng_seed(seed)
    if method == "NUTS":
        how = {"target_accept_prob": 0.8, "max_tree_depth": s.depth}
        kernel = partial(NUTS, init_strategy=partial(init_to_uniform, radius=0.1), **how)
        bnn, draws = tyxe.MCMC_BNN(net, prior, likelihood, kernel), min(s.samples, 1_000)
        bnn.fit([data], s.samples, warmup_steps=s.warmup, disable_progbar=True)
        sizes = common.chain_worth(bnn, s.samples, two_clusters.POINTS)
        facts = {"effective sample size": [round(size, 1) for size in sizes]}
    else:
        inducing = partial(AutoInducing, **INDUCING)
        guides = {
            "FFG-W": common.mean_field(net, init_scale=1e-2),
            "FCG-W": common.mean_field(net, guide=AutoFullByLayer),
            "FFG-U": inducing,
            "FCG-U": partial(inducing, q_inducing="full"),
            "ensemble-U": partial(inducing, q_inducing="ensemble", ensemble_size=8),
        }
        bnn, draws = tyxe.VariationalBNN(net, prior, likelihood, guides[method]), 200
        facts = fit(s, method, bnn, prior, net, data)
    predictions = bnn.predict(two_clusters.grid(201), num_predictions=draws)
    return facts | two_clusters.curves(*predictions)


def table(record):
    cells = {k: cell | two_clusters.regions(cell["sd"]) for k, cell in record.cells.items()}
    forms = dict.fromkeys(two_clusters.regions([0.0] * 5), ".3f")
    forms |= {"log-likelihood": ".0f", "KL": ".0f"}
    return two_clusters.sourced(record, tables.score_table(tables.rows(cells), forms))


def figure(record):
    first = next(iter(record.cells))[1]
    panels = {method: cell for (method, seed), cell in record.cells.items() if seed == first}
    return two_clusters.bands(panels, first, [2.5, 2.5], (12, 6.4))


cells, by = runner.every(run, "methods", "seeds"), ("method", "seed")
experiment = runner.Experiment("inducing_toy", Settings, cells, by, table, figure)

if __name__ == "__main__":
    experiment.main()
