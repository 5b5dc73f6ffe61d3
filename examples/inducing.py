"""Regression on two clusters by posteriors over weights, and over inducing weights [T fig. 4.8].

Fifty points in [-1, -0.7] and fifty in [0.5, 1] from cos(4x + 0.8) with noise of standard
deviation 0.1, a net 1-50-1 with tanh, and a N(0, 16 / inputs of the layer) prior on weights and
biases. What is to be seen is how far predictions widen between the clusters, and beyond them:

  FFG-W       a mean field: every weight by itself;
  FCG-W       a Normal with a full covariance for each layer's weights and biases;
  FFG-U       a mean field of 25 x 2 inducing weights for the first layer, 1 x 25 for the second;
  FCG-U       a Normal with a full covariance of each layer's inducing weights;
  ensemble-U  eight points in place of a distribution of the inducing weights;
  NUTS        samples of the exact posterior.

Reduced for a CPU, in brackets what --published sets: 8,000 steps of Adam (20,000), its rate
decaying from 1e-2 by a cosine (1e-3, for FCG-U and ensemble-U a tenth of it after 10,000 steps).
NUTS with 150 + 150 samples (5,000 + 20,000) and trees of at most 2^8 steps (2^10); it starts at
small weights. 32 draws in a step, predictions by 200. Methods that the JSON in --out holds, for the
same settings, are not run again; the effective sample sizes printed say what the chain is worth.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from _inducing_toy import AutoFullByLayer, Elbo
from _record import environment, recorded, save
from pyro.infer.autoguide import init_to_uniform
from pyro.infer.mcmc import NUTS
from pyro.ops.stats import effective_sample_size
from torch import nn

import tyxe
from tyxe.guides import AutoInducing, AutoNormal, PretrainedInitializer

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--published", action="store_true", help="the published settings, see above")
parser.add_argument("--seed", type=int, default=42, help="data and inference (default: 42)")
parser.add_argument("--table", action="store_true", help="only print the table of what --out has")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of figure and JSON")
parser.add_argument("--smoke-test", action="store_true", help="few steps and samples: no result")
args = parser.parse_args()
settings = {"steps": 8_000, "draws": 32, "rate": 1e-2, "warmup": 150, "samples": 150, "depth": 8}
if args.published:
    settings = {"steps": 20_000, "draws": 32, "rate": 1e-3}
    settings |= {"warmup": 5_000, "samples": 20_000, "depth": 10}
if args.smoke_test:
    settings |= {"steps": 5, "warmup": 5, "samples": 10, "depth": 2}
name = "inducing_toy_published" if args.published else "inducing_toy"
torch.set_num_threads(1)


def truth(x):
    """Return the mean of the targets."""
    return torch.cos(4 * x + 0.8)


def layerwise(name, module, param):
    """The prior of a parameter."""
    return dist.Normal(0, 4 / module.in_features**0.5).expand(param.shape)


pyro.set_rng_seed(args.seed)
x = torch.cat([torch.empty(50, 1).uniform_(-1, -0.7), torch.empty(50, 1).uniform_(0.5, 1)])
y = truth(x) + 0.1 * torch.randn_like(x)
grid = torch.linspace(-2, 2, 201)[:, None]
net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
prior = tyxe.priors.LambdaPrior(layerwise)
likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.1)


inducing = partial(
    AutoInducing,
    inducing_rows={"0.weight": 25, "2.weight": 1},
    inducing_cols={"0.weight": 2, "2.weight": 25},
)
start = PretrainedInitializer.from_net(net)
GUIDES = {
    "FFG-W": partial(AutoNormal, init_loc_fn=start, init_scale=1e-2),
    "FCG-W": partial(AutoFullByLayer, init_loc_fn=start),
    "FFG-U": inducing,
    "FCG-U": partial(inducing, q_inducing="full"),
    "ensemble-U": partial(inducing, q_inducing="ensemble", ensemble_size=8),
}


def scheduled(adam, title):
    """Return what moves Adam's rate."""
    if not args.published:
        return torch.optim.lr_scheduler.CosineAnnealingLR(adam, settings["steps"], 1e-4)
    cuts = [10_000] if title in ("FCG-U", "ensemble-U") else []
    return torch.optim.lr_scheduler.MultiStepLR(adam, cuts)


def variational(title):
    """Fit a guide; return the BNN, and the mean of the last steps' terms of the ELBO.

    Not by `bnn.fit`, which runs one draw after the other: for so small a net all draws at once take
    the time of one.
    """
    bnn = tyxe.VariationalBNN(net, prior, likelihood, GUIDES[title])
    elbo = Elbo(bnn, prior.sites(net), x, y, settings["draws"])
    adam = torch.optim.Adam(elbo.parameters(), lr=settings["rate"], fused=True)
    schedule = scheduled(adam, title)
    terms = []
    for _ in range(settings["steps"]):
        adam.zero_grad()
        data, kl = elbo()
        (kl - data).backward()
        adam.step()
        schedule.step()
        terms.append([data.item(), kl.item()])
    data, kl = torch.tensor(terms[-100:]).mean(0).tolist()
    return bnn, {"log-likelihood": data, "KL": kl}


def sampled():
    """Run NUTS; return the BNN, and the effective sample size of f(x) at five points."""
    kernel = partial(
        NUTS,
        target_accept_prob=0.8,
        max_tree_depth=settings["depth"],
        init_strategy=partial(init_to_uniform, radius=0.1),
    )
    bnn = tyxe.MCMC_BNN(net, prior, likelihood, kernel)
    samples = settings["samples"]
    bnn.fit([(x, y)], samples, warmup_steps=settings["warmup"], disable_progbar=True)
    points = torch.tensor([-1.5, -0.85, 0.0, 0.75, 1.5])[:, None]
    kept = 2 * (min(samples, 2_000) // 2)
    functions = bnn.predict(points, num_predictions=kept, aggregate=False)
    sizes = effective_sample_size(functions.reshape(2, kept // 2, len(points)))
    return bnn, {"effective sample size": [round(size, 1) for size in sizes.tolist()]}


position = grid.squeeze(-1)
REGIONS = {
    "sd at data": ((position >= -1) & (position <= -0.7)) | ((position >= 0.5) & (position <= 1)),
    "sd between": (position > -0.7) & (position < 0.5),
    "sd in the middle": (position > -0.3) & (position < 0.1),
    "sd beyond": position.abs() > 1,
}


def run(title):
    """Return one method's predictions and what is known of its fit."""
    pyro.set_rng_seed(args.seed)
    clock = time.process_time()
    bnn, facts = sampled() if title == "NUTS" else variational(title)
    draws = min(settings["samples"], 1_000) if title == "NUTS" else 200
    mean, scale = bnn.predict(grid, num_predictions=draws)
    curves = {"mean": mean.squeeze(-1).tolist(), "sd": scale.squeeze(-1).tolist()}
    facts["seconds"] = round(time.process_time() - clock, 1)
    return facts | {key: [round(v, 4) for v in values] for key, values in curves.items()}


def table(cells):
    """Return the mean predictive standard deviations, noise included, as a Markdown table."""
    terms = ("log-likelihood", "KL")
    columns = [*REGIONS, *terms]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for title, cell in cells.items():
        scale = torch.tensor(cell["sd"])
        numbers = [f"{scale[region].mean().item():.3f}" for region in REGIONS.values()]
        numbers += [f"{cell[term]:.0f}" if term in cell else "" for term in terms]
        lines.append(f"| {title} | {' | '.join(numbers)} |")
    return "\n".join(lines)


def panels(cells):
    """Return the figure."""
    figure, axes = plt.subplots(2, 3, figsize=(12, 6.4), sharex=True, sharey=True)
    figure.set_layout_engine("constrained")
    for ax, (title, cell) in zip(axes.flat, cells.items(), strict=True):
        mean, scale = torch.tensor(cell["mean"]), torch.tensor(cell["sd"])
        tyxe.plotting.predictive_band(grid, mean, scale, ax, train_data=(x, y))
        ax.plot(grid, truth(grid), color="black", linestyle="dashed", label="truth")
        ax.set(title=title, xlim=(-2, 2), ylim=(-2.5, 2.5))
        ax.get_legend().remove()
    handles = axes.flat[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=3)
    return figure


path = args.out / f"{name}.json"
if args.table and not path.exists():
    parser.error(f"there is no {path}; run without --table first")
if args.table:
    content = json.loads(path.read_text())
else:
    content = recorded(path, settings, args.seed)
    about = {**environment(args.seed), "settings": settings}
    content = about | {"cells": content.get("cells", {})}
    args.out.mkdir(parents=True, exist_ok=True)
    for title in (*GUIDES, "NUTS"):
        if title in content["cells"]:
            continue
        content["cells"][title] = cell = run(title)
        facts = {key: value for key, value in cell.items() if key not in ("mean", "sd")}
        print(f"{title}: {facts}", flush=True)
        path.write_text(json.dumps(content, indent=1) + "\n")
    save(args.out, name, panels(content["cells"]), content)
print(table(content["cells"]))
print(f"\n`{content['command']}`, seed {content['seed']}.")
