"""Binary weights on permuted MNIST: the posterior of each task is the next prior [T fig. 4.5, 4.6].

Ten tasks, each MNIST with pixels permuted in its own way, one after the other by the fully
connected net of `binary.py`, which starts from one of real weights fitted to the first task. Rows:
Bernoulli posteriors, the KL weighed by tau; the same after a first task of Beta(1 + delta, 1 +
delta) regularised probabilities; signs by the straight-through estimator (STE), real weights
clipped to [-1, 1] or not. Figure and table have the accuracy, averaged over the tasks seen, on the
first and on the newest task, and the mean entropy of a weight of each layer (log 2 = 0.693).
"""

import math
import statistics
from functools import cache, partial
from operator import itemgetter

import binary
import common
import runner
import tables
import torch

import tyxe

ROWS = runner.SETTINGS["binary_continual"]["facts"]["rows"]
# From the accuracies on the tasks seen, in their order, to one number.
PANELS = {"tasks seen, mean": statistics.fmean, "first task": itemgetter(0)}
PANELS |= {"newest task": itemgetter(-1)}


@cache
def flat_images(s):
    counts = {"train": s.training_images, "test": s.test_images}
    pairs = [common.first(common.images("mnist", split), n) for split, n in counts.items()]
    return [(x.flatten(1).to(s.device), y.to(s.device)) for x, y in pairs]


def run(s, row, seed):
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(784, generator=generator) for _ in range(s.tasks)]
    (x, y), test = flat_images(s)
    loaders = [common.Batches(x[:, order], y, s.batch) for order in orders]
    torch.manual_seed(seed)
    net = binary.fully_connected(s.widths).to(s.device)
    net = binary.fit(net, loaders[0], s.epochs_of_real_weights, 1e-3)
    tau, delta = (ROWS[row].get(name) for name in ("tau", "delta"))
    accuracies, entropies, schedule = [], [], (s.epochs, s.rate, s.decays)
    if tau is None:
        net = binary.by_sign_(net)
        predict = partial(binary.probabilities, net)
    else:
        prior = tyxe.priors.BinaryPrior(delta, scale="radford")
        bnn = binary.bernoulli_bnn(net, prior, len(x))

        def predict(x):
            return bnn.predict(x, num_predictions=s.draws, batch_size=500).softmax(-1)

    for index, loader in enumerate(loaders):
        if tau is None:
            binary.fit(net, loader, *schedule, **ROWS[row])
        else:  # the term of the regulariser counts whole
            is_regularised = index == 0 and delta is not None
            beta = 1.0 if is_regularised else tau
            binary.fit_bernoulli(bnn, loader, *schedule, beta=beta)
        seen = [predict(test[0][:, order]) for order in orders[: index + 1]]
        scores = [tyxe.metrics.accuracy(probs, test[1]).item() for probs in seen]
        accuracies.append([round(100 * score, 3) for score in scores])
        if tau is not None:
            entropies.append(binary.weight_entropy(bnn)[1])
            tyxe.continual.posterior_to_prior(bnn)
    return {"accuracy %": accuracies} | ({"weight entropy": entropies} if entropies else {})


def by_row(record):
    """Return by row the values over seeds after each task: by panel, by layer; and their number."""
    rows = tables.rows(record.cells)
    for row in [row for row in ROWS if row in rows]:
        after = [*zip(*(cell["accuracy %"] for cell in rows[row]), strict=True)]
        panels = [[[*map(of, seeds)] for seeds in after] for of in PANELS.values()]
        found = [cell["weight entropy"] for cell in rows[row] if "weight entropy" in cell]
        after = [*zip(*found, strict=True)]
        sites = [[[seed[n] for seed in seeds] for seeds in after] for n in after and after[0][0]]
        yield row, panels, sites, len(rows[row])


def table(record):
    lines, layers = [], max(len(sites) for _, _, sites, _ in by_row(record))
    for row, accuracy, entropy, count in by_row(record):
        texts = [tables.over_seeds(curve[-1], ".2f") for curve in accuracy]
        texts += [tables.over_seeds(curve[-1], ".3f") for curve in entropy] or [""] * layers
        lines.append([row, str(count), *texts])
    columns = [f"{title} %" for title in PANELS]
    columns += [f"entropy, layer {index + 1}" for index in range(layers)]
    return tables.markdown(["", "seeds", *columns], lines)


def figure(record):
    drawn, axes = tables.subplots(2, 3, figsize=(12, 7), sharey="row")
    for index, (row, *both, _) in enumerate(by_row(record)):
        look = {"errors": 2, "color": f"C{index}", "label": row, "marker": "."}
        for line, curves in zip(axes, both, strict=True):
            for ax, curve in zip(line, curves, strict=False):
                tables.errorbar(ax, range(1, len(curve) + 1), curve, **look)
    for ax, title in zip(axes[0], PANELS, strict=True):
        ax.set(title=title, xlabel="tasks", ylabel="accuracy, %")
    for index, ax in enumerate(axes[1]):
        ax.set(title=f"layer {index + 1}", xlabel="tasks", ylabel="entropy of a weight, nats")
        ax.axhline(math.log(2), color="black", linestyle="dashed", linewidth=1)
    drawn.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return drawn


cells, choices = runner.every(run, row="rows", seed="seeds"), {"rows": ROWS}
experiment = runner.Experiment("binary_continual", cells, table, figure, choices=choices)
