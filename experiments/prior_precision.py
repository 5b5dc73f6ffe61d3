"""One prior precision after the other: the mode, drawn and linearised nets [GLM fig. 5, 6].

A MAP for each prior precision, and about it a Kronecker-factored Laplace approximation with that
precision: its draws run through the net (bnn), with damping besides (bnn damped), or through the
linearised net (glm). Data and nets are those of `image_laplace.py`. The second figure has
histograms of the entropy of predictions for test images, and for those of another set, at the
precision that validation images choose for MAP (first row), and at the one that they choose for
each prediction (second row). The notes on the paper do not say for which set and net its are.
"""

import copy
import dataclasses
import math

import common
import image_laplace
import runner
import tables
import torch

import tyxe

# Which posterior and which predictive, as in `image_laplace.py`.
ROWS = {name: image_laplace.ROWS[name] for name in ("MAP", "bnn", "bnn damped", "glm kron")}
COLOURS = ["black", "tab:red", "tab:orange", "tab:blue"]
TITLES = image_laplace.TITLES
BINS = 30


def run(s, name, kind, precision, seed):
    train, validation, test, unknown = image_laplace.load(s, name, seed)
    torch.manual_seed(seed)
    net = image_laplace.make_net(kind, s.widths[kind]).to(s.device)
    likelihood = tyxe.likelihoods.Categorical(len(train[0]))
    loader = common.Batches(*train, s.batch)
    at_map = image_laplace.fit_map(s, net, likelihood, loader, precision, seed)
    kron = tyxe.LaplaceBNN(at_map.to_module(), at_map.prior, likelihood, structure="kron")
    kron.fit_curvature(loader, progress=False)
    damped = copy.deepcopy(kron)  # of the same curvature
    damped.options = dataclasses.replace(damped.options, damping=True)
    posteriors = {"kron": kron, "kron damped": damped}
    rows, entropies = {}, {}
    for row, (posterior, predictive) in ROWS.items():
        torch.manual_seed(seed)
        how = predictive, 0 if row == "MAP" else s.draws
        seen, known, other = (
            image_laplace.probabilities(posteriors[posterior], x, *how)
            for x in (validation[0], test[0], unknown)
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


def table(record):
    parts, forms = [], {"accuracy %": ".1f", "NLL": ".3f", "ECE %": ".1f", "OOD AUROC": ".3f"}
    for name, kind in sets(record):
        found, lines = by_precision(record, name, kind), []
        for row in ROWS:
            texts = [
                tables.over_seeds([cell["rows"][row]["NLL"] for cell in cells], ".3f")
                for cells in found.values()
            ]
            lines.append([row, *texts])
        parts.append(f"**{TITLES[name]}, {kind.upper()}**, NLL by prior precision:")
        parts.append(tables.markdown(["", *(f"{precision:g}" for precision in found)], lines))
        at = {f"{row} at MAP's": (row, chosen(found, "MAP")) for row in ROWS}
        at |= {f"{row} at its own": (row, chosen(found, row)) for row in [*ROWS][1:]}
        lines = []
        for title, (row, precision) in at.items():
            own = [cell["rows"][row] for cell in found[precision]]
            texts = [tables.over_seeds([r[c] for r in own], form) for c, form in forms.items()]
            lines.append([title, f"{precision:g}", *texts])
        parts.append("At the precision that validation images choose for MAP, and for each:")
        parts.append(tables.markdown(["", "precision", *forms], lines))
    return "\n\n".join(parts)


def figure(record):
    names = sets(record)
    drawn, grid = tables.subplots(1, len(names), figsize=(5.5 * len(names), 4), squeeze=False)
    for ax, (name, kind) in zip(grid[0], names, strict=True):
        found = by_precision(record, name, kind)
        for row, colour in zip(ROWS, COLOURS, strict=True):
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
    drawn, grid = tables.subplots(2, len(ROWS), **size)
    for line, axes in enumerate(grid):
        for ax, row in zip(axes, ROWS, strict=True):
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
cells = runner.every(run, **names)
experiment = runner.Experiment("prior_precision", cells, table, figure)
