"""Laplace approximations of three toy nets: which posterior, and which prediction from it.

`cubic` [T fig. 3.2, 3.3]: x^3 from 20 points, noise of 3, a net 1-7-7-1 (ReLU). One fitted net, and
about its weights a Gaussian by Kronecker factors, by a diagonal and in full, against HMC: drawn
weights with two hyperparameters, N and tau of [T 3.41], tuned on 20 held-out points; drawn weights
as they come; and the linearised net as it comes. HMC is of the first seed alone, if of any.

`step` [GLM fig. 3]: two weights and ten points, where the Gaussian puts mass on slopes that the
true posterior, found by quadrature, rules out: drawn weights predict far from certain, the
linearised net does not. That mass, and p(y = 1 | x = 4) by drawn weights and linearised.

`banana` [GLM fig. 4]: two classes from 265 points, two layers of 50 tanh units, or as many as
`--hidden-layers` says; drawn weights underfit, the linearised net does not. Each with the prior
precision that is best for it on 265 validation points; error and NLL of the rest.
"""

import math
from dataclasses import replace
from functools import partial

import common
import pyro
import runner
import tables
import torch
from common import normal
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

import tyxe
from tyxe.linalg import BlockDiagonal, Dense
from tyxe.plotting.axes import PALETTE

GRID = torch.linspace(-6, 6, 241)[:, None]
PLANE = 5.0  # of the banana, `(-PLANE, PLANE)` in both directions
DAMPED = {"structure": "kron", "options": tyxe.LaplaceOptions(damping=True)}
HMC = {"step_size": 1e-2, "adapt_mass_matrix": False}
PREDICTIVES = ["untuned, glm", "untuned, bnn", "tuned, bnn"]


def recorded(**parts):
    return {name: tables.rounded(values) for name, values in parts.items()}


def drawn_cubic(count):
    x = torch.empty(count, 1).uniform_(-4, 4)
    return x, x**3 + 3 * torch.randn(count, 1)


def cubic(s, seed):
    sets = [drawn_cubic(count) for count in (20, 20, 1_000)]
    unit, height = (column.std() for column in sets[0])  # the net sees variances of one
    pair, held_out, test = ((x / unit, y / height) for x, y in sets)
    net = common.mlp(1, 7, 7, 1)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(pair[0]), scale=float(3 / height))
    fitted = tyxe.LaplaceBNN(net, normal(), likelihood)
    fitted.fit([pair], partial(torch.optim.Adam, lr=1e-2), s.epochs)
    rows, curves, chosen, inside = {}, {kind: {} for kind in PREDICTIVES}, {}, GRID.abs() < 4

    def look(bnn, name, kind, of=torch.Tensor.double):
        how = {"num_predictions": s.draws, "predictive": kind[-3:]}
        mean, scale = (part * height for part in bnn.predict(of(GRID / unit), **how))
        curves[kind][name] = recorded(mean=mean, sd=scale)
        nll = (height.log() - bnn.evaluate(*map(of, test), reduction="mean", **how)[1]).item()
        spread = {"sd, |x| < 4": scale[inside], "sd beyond": scale[~inside]}
        row = {column: values.mean().item() for column, values in spread.items()}
        rows[f"{name}, {kind}"] = row | {"NLL": nll}

    # In double precision, for N that is many times the number of points.
    mode, (x, y) = fitted.to_module().double(), map(torch.Tensor.double, held_out)
    error = ((mode(x) - y) * height).square().mean().sqrt().item()
    factors = [4.0**k for k in range(-1, 5)]

    def of_held_out(bnn):
        how = {"num_predictions": s.draws // 5, "predictive": "bnn"}
        return -bnn.evaluate(x, y, **how)[1].item()

    for structure in ("kron", "diag", "full"):
        # A net that is fitted already: only the curvature is missing.
        how = DAMPED if structure == "kron" else {"structure": structure, "curvature": "fisher"}
        bnn = tyxe.LaplaceBNN(mode, normal(), likelihood, **how)
        bnn.fit_curvature([[part.double() for part in pair]])
        look(bnn, structure, "untuned, glm")
        look(bnn, structure, "untuned, bnn")
        # [T 3.41]'s N and tau, by the likelihood of held-out points.
        sizes = [len(pair[0]) * factor for factor in factors]
        chosen[structure] = common.choose_width(bnn, sizes, factors, of_held_out)
        look(bnn, structure, "tuned, bnn")
    facts = {"chosen": chosen}
    if seed == s.seeds[0] and not s.without_hmc:
        bnn, _ = common.hmc(s, net, likelihood, pair, **HMC)
        look(bnn, "HMC", "untuned, bnn", torch.Tensor.float)
        # How far HMC can be trusted: its independent draws at -5, 0 and 5.
        ess = common.chain_worth(bnn, s.hmc_samples, GRID[20::100] / unit)
        facts["hmc effective sample size"] = ess
    return {"rows": rows | {"net": {"held-out error": error}}, **facts, "curves": curves}


def cubic_figure(cell, seed):
    panels = []
    for kind in reversed(PREDICTIVES):
        found = cell["curves"][kind]
        panels += [(f"{name}: {kind}", found[name]) for name in ("kron", "diag", "full")]
        hmc = cell["curves"]["untuned, bnn"].get("HMC")
        panels += [("HMC", hmc)] if hmc else []
    return tables.bands(panels, GRID, drawn_cubic(20), GRID**3, [150, 400, 150], (12, 9))


class Step(nn.Module):
    """`f(x) = 5 tanh(w1 x + w2)`, from the side of the slope that the data have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.load_state_dict({"linear.weight": torch.ones(1, 1), "linear.bias": torch.zeros(1)})

    def forward(self, x):
        return 5 * self.linear(x).tanh()


def step_data():
    x = torch.tensor([-1.0, 1.0]).outer(torch.linspace(1, 3, 5)).view(-1, 1)
    return x, (x > 0).float()


def step_log_joint(weights, x, y):
    """Return `log p(y, w)` but for a constant, of weights `(..., 2)` with N(0, 1) priors."""
    outputs = 5 * (weights[..., :1] * x[:, 0] + weights[..., 1:]).tanh()
    log_likelihood = nn.functional.logsigmoid((2 * y[:, 0] - 1) * outputs).sum(-1)
    return log_likelihood - weights.square().sum(-1) / 2


def step_truth(x, y, at):
    """Integrate the posterior: its grid's axis, its density, `P(w1 < 0)`, `p(y = 1)` at points."""
    axis = torch.linspace(-8, 8, 321, dtype=torch.float64)
    weights = torch.cartesian_prod(axis, axis)
    mass = step_log_joint(weights, x, y).softmax(0)
    below = torch.heaviside(-weights[:, 0].round(decimals=9), torch.tensor(0.5).double())
    falling = (mass @ below).item()  # the trapezoidal rule ends at zero: half of what is there
    probs = [mass @ (5 * (weights[:, 0] * v + weights[:, 1]).tanh()).sigmoid() for v in at[:, 0]]
    return axis, mass.view(len(axis), -1), falling, torch.stack(probs)


def use_hessian_(bnn, x, y):
    """Put the Hessian of the log joint in the place of a posterior's GGN: Laplace's own method."""
    values = bnn._mean_values()
    mode = torch.cat([values[f"net.linear.{name}"].flatten() for name in ("weight", "bias")])
    hessian = torch.autograd.functional.hessian(lambda w: -step_log_joint(w, x, y), mode)
    of_data = Dense((hessian + hessian.mT) / 2 - torch.eye(2))  # the prior is N(0, 1)
    curvature = replace(bnn.state.curvature, operator=BlockDiagonal({"all": of_data}))
    bnn.net_guide.state = bnn.state.replace(curvature=curvature)


def step(s, seed):
    pair = step_data()
    likelihood, net = tyxe.likelihoods.Bernoulli(len(pair[0]), event_dim=1), Step()
    fitted = tyxe.LaplaceBNN(net, normal(), likelihood)
    fitted.fit([pair], partial(torch.optim.Adam, lr=1e-2), s.epochs)
    fitted, posteriors = fitted.to_module(), {}
    for name in ("Laplace, Hessian", "Laplace, GGN", "Laplace, GGN damped"):
        how = DAMPED if name.endswith("damped") else {"structure": "full"}
        posteriors[name] = tyxe.LaplaceBNN(fitted, normal(), likelihood, **how)
        posteriors[name].fit_curvature([pair])
    use_hessian_(posteriors["Laplace, Hessian"], *pair)
    posteriors["HMC"], _ = common.hmc(s, net, likelihood, pair, **HMC)
    _, _, falling, probs = step_truth(*pair, GRID)
    rows = {"true posterior": {"P(w1 < 0)": falling, "p at x = 4": probs[200].item()}}
    names, curves = ("net.linear.weight", "net.linear.bias"), {}
    for title, bnn in posteriors.items():
        with torch.no_grad():
            draws = [*bnn._draws(s.hmc_samples if title == "HMC" else 10 * s.draws)]
        weights = torch.stack([torch.cat([w[name].flatten() for name in names]) for w in draws])
        rows[title] = {"P(w1 < 0)": (weights[:, 0] < 0).float().mean().item()}
        curves[title] = {"weights": [*map(tables.rounded, weights[:400].T)]}
        for kind in ("bnn",) if title == "HMC" else ("bnn", "glm"):
            how = {"num_predictions": s.draws, "predictive": kind, "aggregate": False}
            outputs = bnn.predict(GRID, **how)[..., 0]
            rows[title][f"{kind} at x = 4"] = outputs[:, 200].sigmoid().mean().item()
            low, high = torch.quantile(outputs, torch.tensor([0.025, 0.975]), dim=0)
            parts = {"mean": outputs.mean(0), "probability": outputs.sigmoid().mean(0)}
            curves[title][kind] = recorded(low=low, high=high, **parts)
    return {"rows": rows, "w1 of the MAP": fitted.linear.weight.item(), "curves": curves}


def step_figure(cell, seed):
    pair, x, curves = step_data(), GRID[:, 0], cell["curves"]
    axis, density, _, probs = step_truth(*pair, GRID)
    figure, axes = tables.subplots(3, len(curves), figsize=(3 * len(curves), 8), sharey="row")
    for (top, middle, bottom), (title, found) in zip(axes.T, curves.items(), strict=True):
        top.contourf(axis, axis, density.mT, levels=6, cmap="Greys")
        top.plot(*found["weights"], ".", color=PALETTE[1], markersize=2, label="draws")
        top.axvline(0, color="0.5", linewidth=0.8)
        top.set(title=title, xlim=(-2.5, 3.5), ylim=(-3, 3), xlabel="$w_1$")
        for kind, color in zip(("bnn", "glm"), PALETTE, strict=False):
            if kind in found:
                parts, look = found[kind], {"color": color, "label": kind}
                band = {"color": color, "alpha": 0.25, "linewidth": 0}
                middle.fill_between(x, parts["low"], parts["high"], **band)
                middle.plot(x, parts["mean"], **look)
                bottom.plot(x, parts["probability"], **look)
        bottom.plot(x, probs, color="black", linestyle="dashed", label="true posterior")
        bottom.plot(*pair, "o", color="black", markersize=3.5, label="data")
        middle.set(xlim=(-6, 6), ylim=(-12, 12))
        bottom.set(xlim=(-6, 6), ylim=(-0.05, 1.05), xlabel="x")
    for ax, label in zip(axes[:, 0], ("$w_2$", "f(x), 95 %", "p(y = 1 | x)"), strict=True):
        ax.set_ylabel(label)
    figure.legend(*axes[2, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def banana_data(seed):
    """Return 265 points for training, 265 for validation and the rest, standardised already."""
    found = common.arrays("uci/banana.npz")
    x, y = found["X"], found["y"][:, None].float()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return [(x[part], y[part]) for part in order.tensor_split([265, 530])]


def banana(s, seed):
    train, validation, test = banana_data(seed)
    likelihood = tyxe.likelihoods.Bernoulli(len(train[0]), event_dim=1)
    kinds = {k: {"num_predictions": s.draws, "predictive": k} for k in ("bnn", "glm")}
    kinds = {"MAP": {"num_predictions": 0, "predictive": "bnn"}} | kinds
    found, posteriors = {}, {}
    for precision in s.prior_precisions:
        net = common.mlp(2, *[50] * s.hidden_layers, 1, act=nn.Tanh)
        bnn = tyxe.LaplaceBNN(net, normal(precision**-0.5), likelihood, structure="full")
        decays = [s.epochs * 24 // 30, s.epochs * 28 // 30]
        adam, step = common.scheduled(bnn, 1e-2, MultiStepLR, decays)
        bnn.fit([train], adam, s.epochs, step)
        posteriors[precision], found[precision] = bnn, {}
        for kind, how in kinds.items():
            _, held_out = bnn.evaluate(*validation, reduction="mean", **how)
            error, log_likelihood = bnn.evaluate(*test, reduction="mean", **how)
            row = {"validation NLL": -held_out.item(), "error %": 100 * error.item()}
            found[precision][kind] = row | {"NLL": -log_likelihood.item()}
    best = {k: min(found, key=lambda p: found[p][k]["validation NLL"]) for k in kinds}
    rows = {f"{kind}, precision {best[kind]}": found[best[kind]][kind] for kind in kinds}
    # Its own choice apart, bnn on the posterior that glm chose: the predictive alone differs.
    rows[f"bnn, precision {best['glm']}"] = found[best["glm"]]["bnn"]
    axis, maps = torch.linspace(-PLANE, PLANE, s.side), {}
    plane = torch.cartesian_prod(axis, axis)
    for kind in ("bnn", "glm"):
        probs = posteriors[best["glm"]].predict(plane, aggregate=False, **kinds[kind]).sigmoid()
        sd = {"sd of p": probs.std(0, correction=0)}
        maps[kind] = recorded(mean=probs.mean(0), **sd)
    return {"rows": rows, "by prior precision": found, "maps": maps}


def banana_figure(cell, seed):
    """Draw maps over the plane, a row for each predictive: mean, sd, and the variance's parts."""
    maps, (x, y) = {}, banana_data(seed)[0]
    for kind, row in cell["maps"].items():
        mean, sd = (torch.tensor(values) for values in row.values())
        epistemic = sd.square()  # of y, 0 or 1: E[p (1 - p)] and Var[p]
        parts = {"aleatoric": mean * (1 - mean) - epistemic, "epistemic": epistemic}
        maps[kind] = {"mean": mean, "sd of p": sd} | parts
    figure, axes = tables.subplots(2, 4, figsize=(12, 7.1), sharex=True, sharey=True)
    for column, name in zip(axes.T, maps["bnn"], strict=True):
        top = 1.0 if name == "mean" else max(float(row[name].max()) for row in maps.values())
        look = {"origin": "lower", "extent": (-PLANE, PLANE) * 2, "vmin": 0, "vmax": top}
        look["cmap"] = "RdBu_r" if name == "mean" else "viridis"
        for ax, (kind, row) in zip(column, maps.items(), strict=True):
            side = math.isqrt(len(row[name]))
            image = ax.imshow(row[name].view(side, side).mT.numpy(), **look)
            marks = {"color": "black", "markersize": 2, "markerfacecolor": "white"}
            for label, marker in ((0, "o"), (1, "^")):
                ax.plot(*x[y[:, 0] == label].T, marker, **marks, markeredgewidth=0.4)
            ax.set(title=f"{kind}: {name}", xlim=(-PLANE, PLANE), ylim=(-PLANE, PLANE))
        figure.colorbar(image, ax=column, location="bottom", shrink=0.9, aspect=30, pad=0.02)
    return figure


def table(record):
    rows = tables.rows(record.cells)
    columns = dict.fromkeys(column for found in rows.values() for column in found[0])
    return tables.score_table(rows, dict.fromkeys(columns, ".3f"))


def of(run, draw, **how):
    def figure(record):
        (seed,), cell = next(iter(record.cells.items()))  # the first run's
        pyro.set_rng_seed(int(seed))
        return draw(cell, int(seed))

    name, cells = run.__name__, runner.every(run, seed="seeds")
    how |= {"name": f"laplace_{name}"}
    return runner.Experiment(f"laplace_toys {name}", cells, table, figure, **how)


def layers(s):
    return "" if s.hidden_layers == 2 else f"_{s.hidden_layers}_layers"


experiments = {
    "cubic": of(cubic, cubic_figure),
    "step": of(step, step_figure),
    "banana": of(banana, banana_figure, ending=layers),
}
