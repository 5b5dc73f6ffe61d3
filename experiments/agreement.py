"""How far the predictions of every method are from those of long chains, on nets of 1,000 weights.

The reference is NUTS, four chains, whose split R-hat is below 1.01 for all outputs; the row "NUTS"
is another run of it. Every method has its net, its prior N(0, 1) over all weights and the
temperature 1, whether it predicts best so or not; rates are usual ones, and not tuned.

  digits             64-13-10, tanh (985 weights), 900 of scikit-learn's digits to train
  yacht, concrete    one layer of 10 tanh units, standardised targets, a noise of 0.6: with 0.3
                     chains on concrete do not come together (R-hat 2.6), and on energy with either
                     not quite (1.012 by 6,000 samples a chain, 1.011 by 12,000)

Columns: of classes the share of held-out inputs with the same most probable class, and the total
variation of the probabilities; of numbers the 2-Wasserstein distance of the net's outputs in units
of their standard deviation in the reference.
"""

import math
import time
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product

import common
import leaderboard_methods as methods
import pyro
import runner
import tables
import torch
from leaderboard_methods import METHODS, Case, Fitted, Method, Problem
from pyro.infer.autoguide import AutoMultivariateNormal
from sklearn.datasets import load_digits
from torch import nn

import tyxe
from tyxe import diagnostics

CLASSES, NUMBERS = ["digits"], ["yacht", "concrete"]
SETS = [*CLASSES, *NUMBERS]
RATES = {"Adam's rate": 1e-2, "SGD's rate": 0.1, "SGHMC's rate": 0.03, "IVON's rate": 0.1}
# [Izmailov et al. 2021]: ResNet-20 on CIFAR-10, agreement in percent and total variation.
PAPER = runner.SETTINGS["agreement"]["paper"]


@dataclass(frozen=True)
class OnePrior(Case):
    """A case whose methods all have the reference's prior."""

    @property
    def layerwise(self):
        return self.prior


def modes(on):
    p = on.problem

    def member(index):
        net = p.make_net()
        return tyxe.VariationalBNN(net, on.prior, p.likelihood, common.point(net))

    bnn = tyxe.EnsembleBNN(member, on.s.members)
    bnn.fit(p.loader, on.adam(), p.epochs, methods.cosine(p.epochs), progress=False)
    return Fitted(bnn)


def laplace(structure, predictive, on, is_last=False):
    prior = common.normal(**on.head) if is_last else on.prior
    bnn = tyxe.LaplaceBNN(on.start, prior, on.problem.likelihood, structure=structure)
    bnn._default_predictive = predictive
    bnn.fit_curvature(on.problem.loader, progress=False)
    return Fitted(bnn, on.s.draws)


def by_curvature(on):
    return methods.by_curvature(on)._replace(draws=on.s.draws)


def nuts(on):
    p, s = on.problem, on.s
    is_of_classes = isinstance(p.likelihood, tyxe.likelihoods.Categorical)
    samples = s.samples if is_of_classes else s.samples_of_numbers
    accept = s.accept if is_of_classes else s.accept_of_numbers
    kernel = tyxe.samplers.NUTS(max_tree_depth=s.depth, target_accept_prob=accept)
    bnn = tyxe.MCMC_BNN(p.make_net(), on.prior, p.likelihood, kernel)
    how = {"warmup_steps": s.warmup, "num_chains": 4, "progress": False}
    bnn.fit([*p.loader], samples, **how)
    return Fitted(bnn, 4 * samples)


FULL = partial(methods.gaussian, guide=AutoMultivariateNormal)
OWN = {
    "variational Laplace": Method(by_curvature, "ML"),
    "Laplace, last layer": Method(partial(laplace, "kron", "glm", is_last=True), "MAP"),
    "full-covariance VI": Method(FULL),
    "ensemble of MAP": Method(modes),
    **{
        f"Laplace, {how[0]}, {how[1]}": Method(partial(laplace, *how), "MAP")
        for how in product(("full", "kron", "diag"), ("glm", "bnn"))
    },
}
ROWS = {"NUTS": Method(nuts), **METHODS, **OWN}
for other in ("ML, temperature", "Laplace, kron"):  # needs validation data; is that with "glm"
    del ROWS[other]


@cache
def problem(s, name):
    """Return a data set and its net."""
    order = torch.Generator().manual_seed(0)
    if name == "digits":
        x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
        x, count, outputs = x.float(), 900, 10
        hidden, unit = s.digits_hidden, 1.0
        likelihood = tyxe.likelihoods.Categorical(count)
    else:
        x, y = common.uci_regression(name)
        count, outputs = round(0.8 * len(y)), 1
        hidden, unit = s.hidden, s.noise**2
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(count, scale=s.noise)
    rows = torch.randperm(len(x), generator=order)
    train, test = rows[:count], rows[count:][:500]
    x = (x - x[train].mean(0)) / x[train].std(0).clamp_min(0.1)
    if name != "digits":
        y = ((y - y[train].mean(0)) / y[train].std(0)).view(-1, 1)
    make = partial(common.mlp, x.shape[1], hidden, outputs, act=nn.Tanh, dropout=0.0)
    loader = common.Batches(x[train], y[train], s.batch)
    return Problem(loader, {"test": ((x[test],), y[test])}, make, likelihood, s.epochs, unit=unit)


@lru_cache(8)
def fitted(s, name, method, seed):
    """Return what a row has fitted from a seed on."""
    row = ROWS[method]
    start = fitted(s, name, row.start, seed).bnn.to_module() if row.start else None
    pyro.set_rng_seed(seed)
    rate = RATES.get(row.knob, 1.0)
    return row.fit(OnePrior(problem(s, name), s, start, rate, 1.0))


def reference(s, name):
    """Return the reference of a set, which is kept beside the record."""
    path = s.out / f"agreement_{name}.pt"
    if not path.exists():
        inputs, _ = problem(s, name).parts["test"]
        bnn = fitted(s, name, "NUTS", 1_000).bnn
        s.out.mkdir(parents=True, exist_ok=True)
        diagnostics.reference(bnn, *inputs, largest_r_hat=s.largest_r_hat).save(path)
    return diagnostics.Reference.load(path)


def run(s, name, method, seed):
    known, start = reference(s, name), time.perf_counter()
    told = {"R-hat": known.r_hat}
    try:
        bnn, draws, _ = fitted(s, name, method, seed)
        found = known.compare(bnn, draws)
    except RuntimeError as error:  # what diverges
        return told | {"reason": str(error).splitlines()[0]}
    if "wasserstein2" in found:
        found["wasserstein2"] /= known.outputs.std(0).mean().item()
    return told | found | {"seconds": time.perf_counter() - start}


def cells(s, found):
    for name in s.data:
        for seed in s.seeds:
            for method in s.methods:
                yield (name, method, seed), partial(run, s, name, method, seed)


def table(record):
    names = [name for name in SETS if any(key[0] == name for key in record.cells)]
    columns, lines = [""], []
    for name in names:
        kinds = ["agreement %", "total variation"] if name in CLASSES else ["distance"]
        columns += [f"{name}, {kind}" for kind in kinds]
    columns.append("CIFAR-10 [Izmailov et al.]")
    for method in ROWS:
        line = []
        for name in names:
            found = [*record.of(name, method).values()]
            good = [cell for cell in found if "reason" not in cell]
            shown = {"agreement": (100, ".1f"), "total variation": (1, ".3f")}
            shown = shown if name in CLASSES else {"wasserstein2": (1, ".2f")}
            for key, (factor, form) in shown.items():
                values = [factor * cell[key] for cell in good]
                line.append(tables.over_seeds(values, form) if values else "diverges" * bool(found))
        if any(line):
            lines.append([method, *line, PAPER.get(method, "")])
    r_hats = {name: next(iter(record.of(name).values()))["R-hat"] for name in names}
    told = ", ".join(f"{name} {value:.4f}" for name, value in r_hats.items())
    return f"{tables.markdown(columns, lines)}\n\nLargest R-hat of the references' outputs: {told}."


def figure(record):
    """Draw each method's distance from the reference, a panel for each set."""
    names = [name for name in SETS if any(key[0] == name for key in record.cells)]
    drawn, axes = tables.subplots(1, len(names), figsize=(3 + 2.6 * len(names), 7), squeeze=False)
    for ax, name in zip(axes[0], names, strict=True):
        key = "total variation" if name in CLASSES else "wasserstein2"
        rows = {}
        for method in ROWS:
            cells = record.of(name, method).values()
            if values := [cell[key] for cell in cells if math.isfinite(cell.get(key, math.nan))]:
                rows[method] = values
        order = [method for method in ROWS if method in record.names(1)]
        for method, values in rows.items():
            height = -order.index(method)
            ax.plot([sum(values) / len(values)], [height], "o", color="C0", markersize=5)
            ax.plot([min(values), max(values)], [height, height], color="C0", linewidth=1)
        ticks = order if ax is axes[0][0] else []
        label = key if name in CLASSES else "2-Wasserstein distance, sd"
        ax.set(title=name, xlabel=label, xscale="log", ylim=(-len(order), 1))
        ax.set_yticks([-order.index(method) for method in ticks], ticks, fontsize=8)
        ax.grid(alpha=0.3)
    return drawn


by, choices = ("data", "method", "seed"), {"methods": ROWS}
experiment = runner.Experiment("agreement", cells, table, figure, by, choices=choices)
