"""Variational Laplace at three weights of the KL, beside variational inference.

Fifty points in [-1, -0.7] and fifty in [0.5, 1] from cos(4x + 0.8) with noise of standard
deviation 0.1, a net 1-50-1 with tanh, and a N(0, 1) prior on every weight. All fits are the same
line but for the handler and `beta`: variational Laplace runs the net at the guide's means and adds
the curvature there, variational inference draws (by local reparameterisation).

An expansion holds where the posterior is narrow. With few data for many weights some units are
switched off, no curvature is left to see there, and their weights go back to the prior: the
objective says one thing and draws of the weights another. So the table has the expected
log-likelihood of the training data as the objective has it (average of the last 100 steps) and by
200 draws, nats for all data; look at the two before you believe a fit. Then the log-likelihood of
1,000 more points of the same clusters, nats a point, predicted by the mean network, by 100 draws,
and by the linearised net; and seconds of the fit. The figure has the linearised predictions of
variational Laplace.
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
from _record import environment, save
from torch import nn

import tyxe

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--epochs", type=int, default=5_000, help="full-batch steps (default: 5000)")
parser.add_argument("--seed", type=int, default=42, help="data and inference (default: 42)")
parser.add_argument(
    "--out", type=Path, default=Path("results"), help="folder of figure and JSON (default: results)"
)
parser.add_argument("--smoke-test", action="store_true", help="50 epochs: no result")
parser.add_argument("--table", action="store_true", help="only the table, of the JSON in --out")
args = parser.parse_args()
NATS = {"objective's", "by draws", "KL", "fit s"}
if args.smoke_test:
    args.epochs = 50


def table(path):
    """Return what a JSON file holds as a Markdown table, with its command."""
    content = json.loads(path.read_text())
    rows = content["table"]
    columns = list(next(iter(rows.values())))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for title, row in rows.items():
        cells = [format(row[c], ".0f" if c in NATS else ".2f") for c in columns]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"`{content['command']}`, seed {content['seed']}."])


if args.table:
    print(table(args.out / "variational_laplace.json"))
    raise SystemExit


def clusters(n):
    """Return points of both clusters."""
    x = torch.cat([torch.empty(n, 1).uniform_(-1, -0.7), torch.empty(n, 1).uniform_(0.5, 1)])
    return x, torch.cos(4 * x + 0.8) + 0.1 * torch.randn_like(x)


pyro.set_rng_seed(args.seed)
(x, y), (x_test, y_test) = clusters(50), clusters(500)
net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.1)
guide = partial(
    tyxe.guides.AutoNormal,
    init_loc_fn=tyxe.guides.PretrainedInitializer.from_net(net),
    init_scale=tyxe.guides.scale_below_prior(),
)
adam = partial(torch.optim.Adam, lr=1e-2)
ways = {"mean network": ("bnn", 0), "drawn": ("bnn", 100), "linearised": ("glm", 100)}


def fit(handler, beta):
    """Fit a posterior inside a handler; return it with a row of the table."""
    bnn = tyxe.VariationalBNN(net, prior, likelihood, guide)
    start = time.perf_counter()
    with handler:
        history = bnn.fit(
            [(x, y)], adam, args.epochs, beta=beta, lr_multipliers={"scale": 10}, progress=False
        )
    seconds = time.perf_counter() - start
    with torch.no_grad():
        draws = [tyxe.bnn.elbo_terms(bnn.model, bnn.guide, x, y).data for _ in range(200)]
    last = history.log_likelihood[-100:]
    row = {
        "objective's": sum(last) / len(last),
        "by draws": torch.stack(draws).mean().item(),
        "KL": history.kl[-1],
    }
    for way, (predictive, count) in ways.items():
        how = {"predictive": predictive, "num_predictions": count}
        row[way] = bnn.evaluate(x_test, y_test, reduction="mean", **how)[1].item()
    return bnn, {**row, "fit s": seconds}


grid = torch.linspace(-2, 2, 401)[:, None]
figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), sharey=True, layout="constrained")
rows = {}
for ax, beta in zip(axes, (1.0, 0.1, 0.01), strict=True):
    bnn, rows[f"variational Laplace, beta {beta:g}"] = fit(tyxe.poutine.variational_laplace(), beta)
    _, rows[f"variational inference, beta {beta:g}"] = fit(
        tyxe.poutine.local_reparameterization(), beta
    )
    mean, scale = bnn.predict(grid, predictive="glm")
    tyxe.plotting.predictive_band(grid, mean, scale, ax, train_data=(x, y))
    ax.plot(grid, torch.cos(4 * grid + 0.8), color="black", linestyle="dashed", label="truth")
    ax.set(title=f"beta {beta:g}", xlim=(-2, 2), ylim=(-2, 2))
    ax.get_legend().remove()
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)

columns = next(iter(rows.values()))
print(f"{'':32}" + "".join(f"{name:>14}" for name in columns))
for title, row in rows.items():
    print(f"{title:32}" + "".join(f"{value:14.3f}" for value in row.values()))
settings = {"epochs": args.epochs, "learning rate": 1e-2, "multiplier of scales": 10}
content = {**environment(args.seed), "settings": settings, "table": rows}
save(args.out, "variational_laplace", figure, content)
