"""Regression on two clusters: mean field inside and outside the handler, and HMC.

Fifty points in [-1, -0.7] and fifty in [0.5, 1] from cos(4x + 0.8) with noise of standard
deviation 0.1, a net 1-50-1 with tanh, and a N(0, 1) prior on every weight. The three panels of
the figure are (a) a mean-field posterior whose predictions are drawn inside
`local_reparameterization`, fresh noise for every point, (b) the same posterior drawn weight by
weight, one function a draw, and (c) HMC.

HMC by default is a short chain of long trajectories, minutes on a CPU: 100 warm-up and 200 kept
samples, trajectories of length 0.5 (about 250 leapfrogs), a fixed mass matrix. `--published` is
the published chain: 20,000 + 100,000 samples, trajectories of length 0.05 (50 leapfrogs of 1e-3),
step size and mass matrix adapted. It moves by a random walk and ends far from converged: the
effective sample sizes printed below the table say how many independent draws a chain is worth.
"""

import argparse
import sys
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
from pyro.infer.autoguide import init_to_uniform
from pyro.infer.mcmc import HMC
from pyro.ops.stats import effective_sample_size
from torch import nn

import tyxe

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--epochs", type=int, default=10_000, help="mean field (default: 10000)")
parser.add_argument("--hmc-warmup", type=int, default=100, help="samples to adapt (default: 100)")
parser.add_argument("--hmc-samples", type=int, default=200, help="samples kept (default: 200)")
parser.add_argument("--hmc-trajectory", type=float, default=0.5, help="its length (default: 0.5)")
parser.add_argument("--published", action="store_true", help="the published chain, see above")
parser.add_argument("--seed", type=int, default=42, help="data and inference (default: 42)")
parser.add_argument(
    "--out", type=Path, default=Path("results"), help="folder of figure and JSON (default: results)"
)
parser.add_argument(
    "--smoke-test", action="store_true", help="50 epochs, 20 + 40 short samples: no result"
)
args = parser.parse_args()
if args.published:
    args.hmc_warmup, args.hmc_samples, args.hmc_trajectory = 20_000, 100_000, 0.05
if args.smoke_test:
    args.epochs, args.hmc_warmup, args.hmc_samples, args.hmc_trajectory = 50, 20, 40, 0.01

pyro.set_rng_seed(args.seed)
x = torch.cat([torch.empty(50, 1).uniform_(-1, -0.7), torch.empty(50, 1).uniform_(0.5, 1)])
y = torch.cos(4 * x + 0.8) + 0.1 * torch.randn_like(x)
grid = torch.linspace(-2, 2, 401)[:, None]
data = [(x, y)]  # one batch

net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.1)

guide = partial(tyxe.guides.AutoNormal, init_scale=1e-4)
variational = tyxe.VariationalBNN(net, prior, likelihood, guide)
start = time.perf_counter()
with tyxe.poutine.local_reparameterization():
    history = variational.fit(data, pyro.optim.Adam({"lr": 1e-3}), args.epochs)
    mean_field_seconds = time.perf_counter() - start
    inside = variational.predict(grid, num_predictions=32)
outside = variational.predict(grid, num_predictions=32)

# The step size adapts to the acceptance rate; the length of a trajectory stays. The data hold some
# directions a thousand times tighter than others, and none of these is a single weight's, which is
# why a diagonal mass matrix does not help. From small weights the first steps need not be tiny.
kernel = partial(
    HMC,
    step_size=1e-3,
    trajectory_length=args.hmc_trajectory,
    adapt_mass_matrix=args.published,
    target_accept_prob=0.7,
    init_strategy=partial(init_to_uniform, radius=2.0 if args.published else 0.1),
)
sampled = tyxe.MCMC_BNN(net, prior, likelihood, kernel)
start = time.perf_counter()
quiet = not sys.stderr.isatty()
mcmc = sampled.fit(data, args.hmc_samples, warmup_steps=args.hmc_warmup, disable_progbar=quiet)
hmc_seconds = time.perf_counter() - start
hmc = sampled.predict(grid, num_predictions=32)

panels = {
    "(a) mean field, inside the handler": inside,
    "(b) mean field, outside": outside,
    "(c) HMC": hmc,
}
position = grid.squeeze(-1)
regions = {
    "sd at data": ((position >= -1) & (position <= -0.7)) | ((position >= 0.5) & (position <= 1)),
    "sd between": (position > -0.7) & (position < 0.5),
    "sd beyond": position.abs() > 1,
}
table = {
    title: {name: scale[region].mean().item() for name, region in regions.items()}
    for title, (_, scale) in panels.items()
}
print(f"{'mean predictive sd, noise of 0.1 included':45}" + "".join(f"{n:>12}" for n in regions))
for title, row in table.items():
    print(f"{title:45}" + "".join(f"{value:12.3f}" for value in row.values()))

# How far HMC can be trusted: the independent draws that the chain is worth, its two halves taken
# as two chains, for the function's values left of, at, between and right of the clusters.
points = [-1.5, -0.85, 0.0, 0.75, 1.5]
kept = 2 * (min(args.hmc_samples, 2_000) // 2)
functions = sampled.predict(
    torch.tensor(points)[:, None], num_predictions=kept, aggregate=False
).reshape(2, kept // 2, len(points))
ess = dict(zip(points, effective_sample_size(functions).tolist(), strict=True))
# Not mcmc.diagnostics(): its memory grows with the square of the number of samples.
chain = mcmc.get_samples()["net.2.bias"]
acceptance = (chain[1:] != chain[:-1]).float().mean().item()
print(f"mean field: {mean_field_seconds:.0f} s, KL {history.kl[-1]:.1f} nats")
print(f"HMC: {hmc_seconds:.0f} s, acceptance {acceptance:.2f}, effective sample size of f(x) at")
print("  " + ", ".join(f"x = {point:g}: {size:.0f}" for point, size in ess.items()))

figure, axes = plt.subplots(1, 3, figsize=(12, 3.8), sharey=True, layout="constrained")
for ax, (title, (mean, scale)) in zip(axes, panels.items(), strict=True):
    tyxe.plotting.predictive_band(grid, mean, scale, ax, train_data=(x, y))
    ax.plot(grid, torch.cos(4 * grid + 0.8), color="black", linestyle="dashed", label="truth")
    ax.set(title=title, xlim=(-2, 2), ylim=(-2, 2))
    ax.get_legend().remove()
figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
settings = {name: value for name, value in vars(args).items() if name not in ("out", "seed")}
content = {
    **environment(args.seed),
    "settings": settings,
    "table": table,
    "mean_field": {"seconds": mean_field_seconds, "kl": history.kl[-1]},
    "hmc": {
        "seconds": hmc_seconds,
        "acceptance": acceptance,
        "step_size": mcmc.kernel.step_size,
        "leapfrogs": mcmc.kernel.num_steps,
        "effective_sample_size": ess,
    },
}
save(args.out, "regression_published" if args.published else "regression", figure, content)
