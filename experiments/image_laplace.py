"""Laplace approximations of image classifiers: six predictions, by the prior's precision.

`image_laplace` [GLM tab. 2]: MNIST and FashionMNIST, each out-of-distribution for the other, by an
MLP (tanh) and by the CNN "3c3d". A MAP for each of some prior precisions; the one with the lowest
negative log-likelihood on validation images is the centre of all posteriors, and its prior theirs.
Rows: that MAP; a Kronecker-factored Laplace approximation, its draws run through the net (bnn), the
same with damping (bnn damped), or its linearised net (glm kron); the latter with the diagonal of
the curvature (glm diag); the linearised net's Gaussian process on part of the data (gp), its prior
precision times N / M and a factor chosen by validation. The paper has these; with few data the
MAP's prior is too wide for glm, so there are besides, with the precision times such a factor, glm
kron tuned and glm diag tuned. OOD AUROC is by predictive entropy.

`prior_precision` [GLM fig. 5, 6]: a MAP for each prior precision, and of a Kronecker-factored
approximation about it the same predictions. The second figure has histograms of the entropy of
predictions for test images, and for those of another set, at the precision that validation images
choose for MAP (first row), and at the one that they choose for each prediction (second row). The
notes on the paper do not say for which set and net its are.
"""

import copy
import dataclasses
import math
from itertools import product

import common
import runner
import tables
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import tyxe

TITLES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "digits": "digits 0 to 7"}
FORMATS = {"accuracy %": ".2f", "NLL": ".3f", "ECE %": ".2f", "OOD AUROC": ".3f"}
# All at the same weights; and which of them each row takes, and how.
DAMPED = {"structure": "kron", "options": tyxe.LaplaceOptions(damping=True)}
POSTERIORS = {name: {"structure": name} for name in ("kron", "diag")} | {"kron damped": DAMPED}
ROWS = {"MAP": ("kron", "bnn"), "bnn": ("kron", "bnn"), "bnn damped": ("kron damped", "bnn")}
ROWS |= {"glm kron": ("kron", "glm"), "glm diag": ("diag", "glm"), "gp": ("diag", "gp")}
ROWS |= {f"glm {name} tuned": (f"{name} tuned", "glm") for name in ("kron", "diag")}


def load(s, name, seed):
    """Return pairs for training, validation and testing, and images of another set.

    The seed draws training and validation images; test images are evenly spaced in theirs.
    """
    (x, y), (x_test, y_test), unknown = common.known_and_unknown(name)
    # Digits are smaller, others of that size already.
    x, x_test, unknown = (nn.functional.interpolate(images, 28) for images in (x, x_test, unknown))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train, held_out = order[: s.training_images], order[s.training_images :][: s.validation_images]
    pairs = [(x[part], y[part]) for part in (train, held_out)]
    pairs.append([common.thinned(part, s.test_images) for part in (x_test, y_test, unknown)])
    train, held_out, (*test, unknown) = ([part.to(s.device) for part in pair] for pair in pairs)
    return train, held_out, test, unknown


def make_net(kind, sizes):
    """Return the MLP, or three convolutions (ReLU) and three linear maps (tanh): "3c3d"."""
    if kind == "mlp":
        net = nn.Sequential(nn.Flatten(), *common.mlp(784, *sizes, 10, act=nn.Tanh))
    else:
        a, b, c, d, e = sizes
        net = nn.Sequential(
            *(nn.Conv2d(1, a, 5), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
            *(nn.Conv2d(a, b, 3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
            *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
            *(nn.Flatten(), *common.mlp(9 * c, d, e, 10, act=nn.Tanh)),
        )
    for module in net:
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return net


def probabilities(bnn, x, predictive="bnn", draws=0):
    # A Gaussian process holds the gradients of a batch.
    how = {"predictive": predictive, "batch_size": 100 if predictive == "gp" else 500}
    return bnn.predict(x, num_predictions=draws, **how).softmax(-1)


def nll(bnn, pair, *how):
    return tyxe.metrics.nll(probabilities(bnn, pair[0], *how), pair[1]).item()


def fit_map(s, net, likelihood, loader, precision, seed):
    """Return a MAP that starts at a net."""
    torch.manual_seed(seed)
    # Of it only the weights are used: the curvature that takes the least time.
    how = {"structure": "diag", "curvature": "fisher"}
    bnn = tyxe.LaplaceBNN(net, common.normal(precision**-0.5), likelihood, **how)
    adam, step = common.scheduled(bnn, 1e-3, LambdaLR, lambda epoch: 1 / (1 + epoch // 10))
    bnn.fit(loader, adam, s.epochs, step, progress=False)
    return bnn


def run(s, name, kind, seed):
    train, validation, test, unknown = load(s, name, seed)
    loader = common.Batches(*train, s.batch)
    likelihood = tyxe.likelihoods.Categorical(len(loader.x))
    torch.manual_seed(seed)
    net = make_net(kind, s.widths[kind]).to(s.device)
    maps, posteriors, tuned, rows = {}, {}, {}, {}
    for precision in s.prior_precisions:
        maps[precision] = fit_map(s, net, likelihood, loader, precision, seed)
    parts = {"training NLL": train, "validation NLL": validation}
    at_map = {p: {part: nll(bnn, pair) for part, pair in parts.items()} for p, bnn in maps.items()}
    best = min(at_map, key=lambda precision: at_map[precision]["validation NLL"])
    net, prior = maps[best].to_module(), maps[best].prior
    for posterior, structure in POSTERIORS.items():
        posteriors[posterior] = tyxe.LaplaceBNN(net, prior, likelihood, **structure)
        posteriors[posterior].fit_curvature(loader, progress=False)
    for structure in ("kron", "diag"):
        bnn = posteriors[f"{structure} tuned"] = copy.deepcopy(posteriors[structure])
        grid = [best * factor for factor in s.tuning_factors]
        pieces = list(zip(*(part.split(500) for part in validation), strict=True))
        precision = bnn.optimize_prior_precision("grid", pieces, grid=grid)
        tuned[f"glm {structure} tuned"] = precision.item()
    pair, factors = common.first(validation, s.gp_validation_images), {}

    def fit_gp(factor):
        torch.manual_seed(seed)  # the same points for each factor
        posteriors["diag"].fit_gp(loader, s.gp_points[kind], factor)
        return nll(posteriors["diag"], pair, "gp", s.draws)

    for factor in s.gp_factors:
        factors[factor] = fit_gp(factor)
    fit_gp(min(factors, key=factors.get))
    for row, (posterior, predictive) in ROWS.items():
        torch.manual_seed(seed)
        how = posteriors[posterior], predictive, 0 if row == "MAP" else s.draws
        known, other = (probabilities(how[0], x, *how[1:]) for x in (test[0], unknown))
        rows[row] = tables.scores(known, test[1], 10)
        rows[row]["OOD AUROC"] = tables.by_entropy(known, other)[-1]
    return {
        "rows": rows,
        "prior precision": best,
        "MAP by prior precision": at_map,
        "tuned precision": tuned,
        "gp factor": min(factors, key=factors.get),
        "validation NLL of gp by factor": factors,
    }


def table(record):
    blocks = []
    for (name, title), kind in product(TITLES.items(), ("mlp", "cnn")):
        if own := record.of(name, kind):
            chosen = [
                (cell["prior precision"], *cell["tuned precision"].values(), cell["gp factor"])
                for cell in own.values()
            ]
            texts = [", ".join(map(runner.words, each)) for each in zip(*chosen, strict=True)]
            precision, kron, diag, gp = texts
            blocks.append(
                f"**{title}, {kind.upper()}**, one number for each seed: prior precision "
                f"{precision}; tuned {kron} (kron) and {diag} (diag); factor of gp {gp}."
            )
            blocks.append(tables.score_table(tables.rows(own), FORMATS))
    return "\n\n".join(blocks)


cells = runner.every(run, data="data", net="net", seed="seeds")
experiment = runner.Experiment("image_laplace", cells, table)

# --------------------------------------------------------------------------- by prior precision

BY_PRECISION = {name: ROWS[name] for name in ("MAP", "bnn", "bnn damped", "glm kron")}
COLOURS = ["black", "tab:red", "tab:orange", "tab:blue"]
BINS = 30


def run_precision(s, name, kind, precision, seed):
    train, validation, test, unknown = load(s, name, seed)
    torch.manual_seed(seed)
    net = make_net(kind, s.widths[kind]).to(s.device)
    likelihood = tyxe.likelihoods.Categorical(len(train[0]))
    loader = common.Batches(*train, s.batch)
    at_map = fit_map(s, net, likelihood, loader, precision, seed)
    kron = tyxe.LaplaceBNN(at_map.to_module(), at_map.prior, likelihood, structure="kron")
    kron.fit_curvature(loader, progress=False)
    damped = copy.deepcopy(kron)  # of the same curvature
    damped.options = dataclasses.replace(damped.options, damping=True)
    posteriors = {"kron": kron, "kron damped": damped}
    rows, entropies = {}, {}
    for row, (posterior, predictive) in BY_PRECISION.items():
        torch.manual_seed(seed)
        how = predictive, 0 if row == "MAP" else s.draws
        seen, known, other = (
            probabilities(posteriors[posterior], x, *how) for x in (validation[0], test[0], unknown)
        )
        *both, auroc = tables.by_entropy(known, other)
        rows[row] = {"validation NLL": tyxe.metrics.nll(seen, validation[1]).item()}
        rows[row] |= tables.scores(known, test[1], 10) | {"OOD AUROC": auroc}
        entropies[row] = [of_bins(part).tolist() for part in both]
    return {"rows": rows, "entropies, known and unknown": entropies}


def of_bins(entropies):
    """Return how many entropies of ten classes each bin has."""
    top = math.log(10)
    return torch.histc(entropies.cpu().clamp(0.0, top - 1e-6), BINS, 0.0, top).int()


def by_precision(record, name, kind):
    """Return the cells of a set and net, in lists over seeds, by precision."""
    found = {}
    for (precision, _), cell in record.of(name, kind).items():
        found.setdefault(float(precision), []).append(cell)
    return dict(sorted(found.items()))


def mean(cells, row, column):
    return sum(cell["rows"][row][column] for cell in cells) / len(cells)


def chosen(found, row):
    """Return the precision of the lowest validation NLL of a prediction, mean over seeds."""
    return min(found, key=lambda precision: mean(found[precision], row, "validation NLL"))


def sets(record):
    return list(dict.fromkeys(key[:2] for key in record.cells))


def table_of_precisions(record):
    parts, forms = [], FORMATS | {"accuracy %": ".1f", "ECE %": ".1f"}
    for name, kind in sets(record):
        found, lines = by_precision(record, name, kind), []
        for row in BY_PRECISION:
            texts = [
                tables.over_seeds([cell["rows"][row]["NLL"] for cell in cells], ".3f")
                for cells in found.values()
            ]
            lines.append([row, *texts])
        parts.append(f"**{TITLES[name]}, {kind.upper()}**, NLL by prior precision:")
        parts.append(tables.markdown(["", *(f"{precision:g}" for precision in found)], lines))
        at = {f"{row} at MAP's": (row, chosen(found, "MAP")) for row in BY_PRECISION}
        at |= {f"{row} at its own": (row, chosen(found, row)) for row in [*BY_PRECISION][1:]}
        lines = []
        for title, (row, precision) in at.items():
            own = [cell["rows"][row] for cell in found[precision]]
            texts = [tables.over_seeds([r[c] for r in own], form) for c, form in forms.items()]
            lines.append([title, f"{precision:g}", *texts])
        parts.append("At the precision that validation images choose for MAP, and for each:")
        parts.append(tables.markdown(["", "precision", *forms], lines))
    return "\n\n".join(parts)


def figure_of_precisions(record):
    names = sets(record)
    drawn, grid = tables.subplots(1, len(names), figsize=(5.5 * len(names), 4), squeeze=False)
    for ax, (name, kind) in zip(grid[0], names, strict=True):
        found = by_precision(record, name, kind)
        for row, colour in zip(BY_PRECISION, COLOURS, strict=True):
            values = [[cell["rows"][row]["NLL"] for cell in cells] for cells in found.values()]
            look = {"color": colour, "marker": "o", "markersize": 4, "label": row}
            tables.errorbar(ax, [*found], values, **look)
        ax.axhline(math.log(10), color="0.6", linestyle=":", label="uniform")
        ax.set(xscale="log", xlabel="prior precision", ylabel="test NLL")
        ax.set_title(f"{TITLES[name]}, {kind.upper()}")
    grid[0, 0].legend(fontsize="small")
    return {"": drawn} | {f"_{n}_{kind}": histograms(record, n, kind) for n, kind in names}


def histograms(record, name, kind):
    """Draw densities of the entropies of test images and of others, for the first seed."""
    found, edges = by_precision(record, name, kind), torch.linspace(0, math.log(10), BINS + 1)
    size = {"figsize": (11, 5.2), "sharex": True, "sharey": "row"}
    drawn, grid = tables.subplots(2, len(BY_PRECISION), **size)
    for line, axes in enumerate(grid):
        for ax, row in zip(axes, BY_PRECISION, strict=True):
            precision = chosen(found, row if line else "MAP")
            parts = found[precision][0]["entropies, known and unknown"][row]
            for label, counts in zip(("known", "unknown"), parts, strict=True):
                share = [count / sum(counts) for count in counts]
                ax.stairs(share, edges, fill=True, alpha=0.5, label=label)
            ax.set_title(f"{row}, precision {precision:g}")
        axes[0].set_ylabel("share of images")
    for ax in grid[1]:
        ax.set_xlabel("entropy, nats")
    drawn.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return drawn


names = {"data": "data", "net": "net", "prior_precision": "prior_precisions", "seed": "seeds"}
cells_of_precisions = runner.every(run_precision, **names)
parts = cells_of_precisions, table_of_precisions, figure_of_precisions
by_precisions = runner.Experiment("prior_precision", *parts)
