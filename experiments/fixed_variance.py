"""Posteriors of one fixed standard deviation, whose means alone are trained [VL fig. 1, GR A1, A2].

Every weight has the same standard deviation, from a grid; the means are trained by variational
Laplace (VL), by variational inference with one plain draw a step (VI) or eight (VI8), and by MAP,
without one. Test images are predicted by the mean network, and by 10 draws of the weights. By [VL
30] plain SGD of the learning rate 2 S sigma^2, with batches of S images, has such a posterior: the
second axis of the figure. Rows of the figure are batch sizes. Adam takes as many steps with every
batch size, or small batches would be trained longer.
"""

import statistics
from functools import cache, partial
from itertools import product

import common
import pyro
import runner
import tables
import torch
import variational_laplace_images as images
from torch.nn.functional import adaptive_avg_pool2d

import tyxe

COLOURS = {"VL": "tab:blue", "VI": "tab:orange", "VI8": "tab:green", "MAP": "black"}
PARTICLES = {"VI8": 8}  # draws that a step averages
PANELS = {"accuracy %": ("accuracy", 100), "test log-likelihood": ("NLL", -1)}


@cache
def load(s, name):
    """Return pairs to train, to validate and to test, pooled, and images of another set."""
    (x, y), test, other = common.known_and_unknown(name)
    count, held_out = s.training_images, s.training_images + s.validation_images
    standardised = common.standardised(x[:count])
    pairs = (x[:count], y[:count]), (x[count:held_out], y[count:held_out])
    pairs = *pairs, common.first(test, s.test_images)

    def small(x):
        return adaptive_avg_pool2d(standardised(x), s.pixels)

    return *[(small(x), y) for x, y in pairs], small(other[: s.test_images])


def run(s, name, batch_size, method, sd, seed):
    train, *others = load(s, name)
    pyro.set_rng_seed(seed)
    net, points, is_map = images.cnn(s.pixels), len(train[0]), method == "MAP"
    fixed = {"init_scale": sd, "train_scale": False}
    guide = common.point(net) if is_map else common.mean_field(net, **fixed)
    prior = tyxe.priors.LayerwiseNormalPrior("radford")
    bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(points), guide)
    batches = common.Batches(*train, batch_size)
    epochs = max(s.steps // len(batches), 4)
    adam = partial(torch.optim.Adam, lr=s.learning_rate)
    cut = common.cut_at(epochs // 2, 3 * epochs // 4)
    how = {"beta": s.beta, "num_particles": PARTICLES.get(method, 1), "progress": False}
    with images.HANDLERS[method.rstrip("8")]():
        history = bnn.fit(batches, adam, epochs, cut, **how)
    found = {
        "weights": sum(parameter.numel() for parameter in net.parameters()),
        "steps": epochs * len(batches),
        "log-likelihood": round(history.log_likelihood[-1] / points, 5),
        "scores": {"mean": images.scores(bnn, *others, 0)},
    }
    if not is_map:
        found["scores"]["draws"] = images.scores(bnn, *others, images.DRAWS)
    return found


def cells(s, found):
    """Yield all methods at all standard deviations; MAP has none, which is written as 0."""
    for seed, name, size, method in product(s.seeds, s.data, s.batch_sizes, s.methods):
        for sd in [0.0] if method == "MAP" else s.sds:
            key = name, size, method, sd, seed
            yield key, partial(run, s, *key)


def by_sd(record, name, size, method, way, score, factor):
    """Return numbers of a score by seed, by standard deviation."""
    found = {}
    for (sd, seed), cell in record.of(name, size, method).items():
        if way in cell["scores"]:
            found.setdefault(float(sd), {})[seed] = factor * cell["scores"][way][score]
    return dict(sorted(found.items()))


def differences(one, other):
    """Return numbers of one less those of the other, where both have a deviation and a seed."""
    pairs = {sd: (seeds, other[sd]) for sd, seeds in one.items() if sd in other}
    return {sd: {n: a[n] - b[n] for n in a if n in b} for sd, (a, b) in pairs.items()}


def runs(record):
    """Return pairs of a set and a batch size, from small to large."""
    return sorted({key[:2] for key in record.cells}, key=lambda pair: (pair[0], int(pair[1])))


def table(record):
    """Return rows by method and standard deviation; the last ones are differences by seed."""
    parts, columns = [], ["", "sd", "seeds", "accuracy %", "LL", "by draws: accuracy %", "LL"]
    for name, size in runs(record):
        found = {}
        for method in COLOURS:
            found[method] = [
                by_sd(record, name, size, method, way, *what)
                for way in ("mean", "draws")
                for what in PANELS.values()
            ]
        found["VL less VI"] = [*map(differences, found["VL"], found["VI"])]
        lines = []
        for method, numbers in found.items():
            for sd, seeds in numbers[0].items():
                own = [[*each.get(sd, {}).values()] for each in numbers]
                texts = map(tables.over_seeds, own, (".1f", ".3f") * 2)
                lines.append([method, f"{sd:g}" if sd else "", str(len(seeds)), *texts])
        title = f"**{images.TITLES.get(name, name)}**, batches of {size}"
        parts += [title, tables.markdown(columns, lines)]
    return "\n\n".join(parts)


def figure(record):
    rows = runs(record)
    size = {"figsize": (9, 3.4 * len(rows) + 0.5), "squeeze": False, "sharex": True}
    drawn, grid = tables.subplots(len(rows), 2, sharey="col", **size)
    for axes, (name, batch) in zip(grid, rows, strict=True):
        for ax, (label, what) in zip(axes, PANELS.items(), strict=True):
            draw(ax, record, name, batch, what)
            ax.set(xscale="log", ylabel=label)
            rate = {
                "functions": (
                    (lambda sd, s=batch: 2 * int(s) * sd**2),
                    (lambda eta, s=batch: (eta / (2 * int(s))) ** 0.5),
                )
            }
            ax.secondary_xaxis("top", **rate).set_xlabel(rf"$\eta = 2 S \sigma^2$, $S$ = {batch}")
    for ax in grid[-1]:
        ax.set_xlabel("standard deviation of every weight")
    found = [zip(*ax.get_legend_handles_labels(), strict=True) for ax in grid.flat]
    handles = {label: handle for pairs in found for handle, label in pairs}
    drawn.legend(handles.values(), handles, loc="outside lower center", ncols=4)
    return drawn


def draw(ax, record, name, batch, what):
    """Draw a score against the standard deviation, with standard errors; MAP as a line."""
    for method, colour in COLOURS.items():
        for way, line in {"mean": "-", "draws": "--"}.items():
            found = by_sd(record, name, batch, method, way, *what)
            values = [[*seeds.values()] for seeds in found.values()]
            if method != "MAP" and values:
                label = f"{method}, {'mean network' if way == 'mean' else '10 draws'}"
                look = {"color": colour, "linestyle": line, "marker": "o", "markersize": 3}
                tables.errorbar(ax, [*found], values, label=label, **look)
            elif values:
                ax.axhline(statistics.fmean(values[0]), color=colour, lw=0.8, label=method)


by, name = ("set", "batch size", "method", "sd", "seed"), "fixed_variance_{0.steps}"
experiment = runner.Experiment("fixed_variance", cells, table, figure, by, name=name)
