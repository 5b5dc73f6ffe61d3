"""For laplace.py: three toy data sets, the references they are held against, and their figures."""

import math
import sys
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pyro.distributions as dist
import torch
from _data import folders
from pyro.infer.mcmc import HMC
from torch import nn

import tyxe
from tyxe.linalg import BlockDiagonal, Dense
from tyxe.plotting import PALETTE


def normal(precision):
    """Return the prior N(0, 1 / precision) of every weight."""
    return tyxe.priors.IIDPrior(dist.Normal(0.0, precision**-0.5))


def hmc(net, likelihood, data, args):
    """Sample by HMC under N(0, 1) priors, in short trajectories for a smoke test."""
    length = 0.01 if args.smoke_test else 1.0
    kernel = partial(HMC, step_size=1e-2, trajectory_length=length, adapt_mass_matrix=False)
    bnn = tyxe.MCMC_BNN(net, normal(1.0), likelihood, kernel)
    quiet = not sys.stderr.isatty()
    bnn.fit(data, args.hmc_samples, warmup_steps=args.hmc_warmup, disable_progbar=quiet)
    return bnn


# --------------------------------------------------------------------------- cubic


def draw_cubic(count):
    """Draw points of `y = x^3 + 3 eps`, `x` uniform on (-4, 4)."""
    x = torch.empty(count, 1).uniform_(-4, 4)
    return x, x**3 + 3 * torch.randn(count, 1)


def tune(bnn, x, y, count):
    """Choose [T 3.41]'s N and tau by the likelihood of held-out points; return both.

    Args:
        bnn: a LaplaceBNN with its curvature; it keeps what was best.
        x: held-out inputs.
        y: their targets.
        count: number of draws.
    """
    size, scores = bnn.likelihood.dataset_size, {}

    def choose(n, tau):
        bnn.temperature = size / n  # N points in place of those that were seen
        bnn.update_prior(normal(tau))

    for n in (size * 4.0**k for k in range(-1, 5)):
        for tau in (4.0**k for k in range(-1, 5)):
            choose(n, tau)
            _, log_likelihood = bnn.evaluate(x, y, num_predictions=count, predictive="bnn")
            scores[n, tau] = float(log_likelihood)
    choose(*max(scores, key=scores.__getitem__))
    return dict(zip(("N", "tau"), max(scores, key=scores.__getitem__), strict=True))


def spread(grid, scale):
    """Return the mean standard deviation where there are data, and beyond."""
    inside = grid.abs() < 4
    return {
        "sd, |x| < 4": scale[inside].mean().item(),
        "sd beyond": scale[~inside].mean().item(),
    }


def plot_cubic(rows, grid, data, truth):
    """Draw a row of panels for each kind of prediction, a panel for each posterior."""
    names = list(next(iter(rows.values())))
    figure, axes = plt.subplots(
        len(rows), len(names), figsize=(12, 9), sharex=True, sharey="row", layout="constrained"
    )
    for line, (kind, predictions) in zip(axes, rows.items(), strict=True):
        for ax, name in zip(line, names, strict=True):
            mean, scale = predictions[name]
            tyxe.plotting.predictive_band(
                grid, mean, scale, ax, train_data=data, true_function=truth
            )
            ax.get_legend().remove()
            ax.set(title=f"{name}: {kind}" if name != "HMC" else name, xlabel="", ylabel="")
    for line, limit in zip(axes, (150, 400, 150), strict=True):
        line[0].set(xlim=(-6, 6), ylim=(-limit, limit), ylabel="y")
    for ax in axes[-1]:
        ax.set_xlabel("x")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


# --------------------------------------------------------------------------- step


class Step(nn.Module):
    """`f(x) = 5 tanh(w1 x + w2)`, from the side of the slope that the data have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        nn.init.ones_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x):
        return 5 * self.linear(x).tanh()


def step_log_joint(weights, x, y):
    """Return `log p(y, w)` but for a constant, of weights `(..., 2)` with N(0, 1) priors."""
    outputs = 5 * (weights[..., :1] * x[:, 0] + weights[..., 1:]).tanh()
    log_likelihood = nn.functional.logsigmoid((2 * y[:, 0] - 1) * outputs).sum(-1)
    return log_likelihood - weights.square().sum(-1) / 2


def step_truth(x, y, at):
    """Integrate the posterior on a grid: its axis and density, `P(w1 < 0)`, `p(y = 1)` at points.

    Args:
        x: inputs.
        y: targets.
        at: where to predict, `(n, 1)`.
    """
    axis = torch.linspace(-8, 8, 321, dtype=torch.float64)
    weights = torch.cartesian_prod(axis, axis)
    mass = step_log_joint(weights, x, y).softmax(0)
    below = torch.heaviside(-weights[:, 0].round(decimals=9), torch.tensor(0.5).double())
    falling = (mass @ below).item()  # the trapezoidal rule ends at zero: half of what is there
    probs = [mass @ (5 * (weights[:, 0] * v + weights[:, 1]).tanh()).sigmoid() for v in at[:, 0]]
    return axis, mass.view(len(axis), -1), falling, torch.stack(probs)


def use_hessian_(bnn, x, y):
    """Put the Hessian of the log joint in the place of a posterior's GGN: Laplace's own method."""
    values = bnn.mean_values()
    mode = torch.cat([values[f"net.linear.{name}"].flatten() for name in ("weight", "bias")])
    hessian = torch.autograd.functional.hessian(lambda w: -step_log_joint(w, x, y), mode)
    bnn.net_guide.precision = BlockDiagonal({"all": Dense((hessian + hessian.mT) / 2)})


@torch.no_grad()
def step_weights(bnn, count):
    """Return draws of the two weights, `(count, 2)`."""
    names = "net.linear.weight", "net.linear.bias"
    return torch.stack([torch.cat([w[name].flatten() for name in names]) for w in bnn.draws(count)])


def plot_step(panels, grid, truth, data):
    """Draw weights, outputs and probabilities, a column for each posterior.

    Args:
        panels: for each title the draws of weights `(S, 2)`, and for each kind of prediction the
            draws of outputs `(S, n)`.
        grid: inputs `(n, 1)`.
        truth: as `step_truth` returns it.
        data: inputs and targets.
    """
    axis, density, _, probs = truth
    size = (3 * len(panels), 8)
    figure, axes = plt.subplots(3, len(panels), figsize=size, sharey="row", layout="constrained")
    for column, (title, (weights, outputs)) in zip(axes.T, panels.items(), strict=True):
        top, middle, bottom = column
        top.contourf(axis, axis, density.mT, levels=6, cmap="Greys")
        top.plot(*weights[:400].T, ".", color=PALETTE[1], markersize=2, label="draws")
        top.axvline(0, color="0.5", linewidth=0.8)
        top.set(title=title, xlim=(-2.5, 3.5), ylim=(-3, 3), xlabel="$w_1$")
        for (kind, values), color in zip(outputs.items(), PALETTE, strict=False):
            low, high = torch.quantile(values, torch.tensor([0.025, 0.975]), dim=0)
            middle.fill_between(grid[:, 0], low, high, color=color, alpha=0.25, linewidth=0)
            middle.plot(grid[:, 0], values.mean(0), color=color, label=kind)
            bottom.plot(grid[:, 0], values.sigmoid().mean(0), color=color, label=kind)
        bottom.plot(grid[:, 0], probs, color="black", linestyle="dashed", label="true posterior")
        bottom.plot(data[0], data[1], "o", color="black", markersize=3.5, label="data")
        middle.set(xlim=(-6, 6), ylim=(-12, 12))
        bottom.set(xlim=(-6, 6), ylim=(-0.05, 1.05), xlabel="x")
    for ax, label in zip(axes[:, 0], ("$w_2$", "f(x), 95 %", "p(y = 1 | x)"), strict=True):
        ax.set_ylabel(label)
    figure.legend(*axes[2, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


# --------------------------------------------------------------------------- banana


def load_banana(seed):
    """Return 265 points for training, 265 for validation and the rest, standardised already.

    Raises:
        FileNotFoundError: the file is in no folder.
    """
    for folder in folders():
        if (path := folder / "uci" / "banana.npz").exists():
            with np.load(path) as arrays:
                x, y = torch.from_numpy(arrays["X"]), torch.from_numpy(arrays["y"])
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
            parts = order[:265], order[265:530], order[530:]
            return [(x[part], y[part, None].float()) for part in parts]
    looked = ", ".join(str(folder / "uci") for folder in folders())
    raise FileNotFoundError(
        f"no banana.npz in {looked}; set TYXE_DATA (arrays X, (n, 2), and y, n labels 0 or 1)"
    )


def scores(bnn, validation, test, how):
    """Return the NLL of validation data, and the error and NLL of test data.

    Args:
        bnn: what is evaluated.
        validation: inputs and labels.
        test: likewise.
        how: options of `evaluate`.
    """
    _, held_out = bnn.evaluate(*validation, reduction="mean", **how)
    error, log_likelihood = bnn.evaluate(*test, reduction="mean", **how)
    return {
        "validation NLL": -held_out.item(),
        "error %": 100 * error.item(),
        "NLL": -log_likelihood.item(),
    }


def square(limit, side):
    """Return the points of a grid over a square, `(side * side, 2)`."""
    axis = torch.linspace(-limit, limit, side)
    return torch.cartesian_prod(axis, axis)


def decompose(logits):
    """Return mean and standard deviation of `p(y = 1)` over draws, and the variance's two parts.

    Args:
        logits: `(S, n, 1)`.
    """
    probs = torch.cat([(-logits).sigmoid(), logits.sigmoid()], -1)
    parts = tyxe.predictive.variance_decomposition(probs)
    return {
        "mean": probs[..., 1].mean(0),
        "sd of p": probs[..., 1].std(0, correction=0),
        "aleatoric": parts.aleatoric[..., 1, 1],
        "epistemic": parts.epistemic[..., 1, 1],
    }


def plot_banana(maps, limit, data):
    """Draw maps over the input plane, a row for each predictive, a column for each quantity.

    Args:
        maps: for each predictive what `decompose` returns on a `square`.
        limit: the plane's, `(-limit, limit)` in both directions.
        data: inputs and labels.
    """
    names = list(next(iter(maps.values())))
    size = (3 * len(names), 7.1)
    figure, axes = plt.subplots(
        len(maps), len(names), figsize=size, sharex=True, sharey=True, layout="constrained"
    )
    x, y = data
    for index, name in enumerate(names):
        top = 1.0 if name == "mean" else max(float(row[name].max()) for row in maps.values())
        for ax, (kind, row) in zip(axes[:, index], maps.items(), strict=True):
            side = math.isqrt(len(row[name]))
            image = ax.imshow(
                row[name].view(side, side).mT,
                origin="lower",
                extent=(-limit, limit, -limit, limit),
                vmin=0,
                vmax=top,
                cmap="RdBu_r" if name == "mean" else "viridis",
            )
            for label, marker in ((0, "o"), (1, "^")):
                chosen = x[y[:, 0] == label]
                ax.plot(*chosen.T, marker, color="black", markersize=2, markerfacecolor="white",
                        markeredgewidth=0.4, linestyle="none")  # fmt: skip
            ax.set(title=f"{kind}: {name}", xlim=(-limit, limit), ylim=(-limit, limit))
        figure.colorbar(
            image, ax=axes[:, index], location="bottom", shrink=0.9, aspect=30, pad=0.02
        )
    return figure
