"""All methods beside each other: which one to take.

The methods train the same net of a data set (`leaderboard_data.py`) for the same epochs of the same
batches, by Adam, its rate falling as a cosine; those that start at the net of ML or MAP have as
many epochs again, ensembles and Multi-SWAG five times as many, SGLD and SGHMC as many mini-batches,
and MCLMC takes steps by all data after the members' training. Chosen by the NLL on validation data,
on one seed for all: a knob of three values (a rate; of Laplace the prior's precision), then a
temperature of as many; ensembles take what their member has. Regression trains with the noise that
ML has on validation data, and every method's predictions have the one noise of the lowest
validation NLL.

In bold is what is within one standard error of the best. "Interval error" is the mean difference of
the coverage of central intervals from their levels, 10 to 90 %; OOD AUROC is by predictive entropy,
and AUROC by MI by the mutual information of the draws, where there are several;
costs are multiples of ML's: seconds to train, what a method starts from included, and to predict
the test set, and the file that `save` writes.

`which_laplace`: rows of Laplace approximations alone, by structure and weights. Besides Kronecker
products and the last layer there are the 100 largest eigenpairs, and the full covariance of the 500
weights with the largest variances under the diagonal.
"""

import math
import statistics
import tempfile
from functools import cache, lru_cache, partial
from itertools import product
from pathlib import Path

import pyro
import runner
import tables
import torch
from leaderboard_data import UCI, problem, scores, validated
from leaderboard_methods import METHODS, Case
from matplotlib.ticker import LogLocator, NullLocator
from resnet import now
from runner import words

FORMS = {"NLL": ".3f", "error %": ".1f", "RMSE": ".3f", "ECE %": ".1f", "interval error %": ".1f"}
FORMS |= {"OOD AUROC": ".3f", "AUROC by MI": ".3f"}
COSTS = {"training": "train s", "prediction": "predict s", "memory": "bytes"}
LEADING = ["ML", "ML, temperature", "MAP", "MC dropout", "ensemble", "last layer", "SWAG", "IVON"]
LEADING += ["mean field, local reparam.", "Laplace, last layer", "Multi-SWAG"]
# What is not run, by data set: the rows, and why.
WHOLE = "not run, since each step of a chain takes two gradients of all data"
NOT_RUN = {name: {"MCLMC ensemble": WHOLE} for name in ("fashion", "bikesharing", "protein")}
PAIRS = "not run, since its eigenpairs take hundreds of gradients of all data"
NOT_RUN |= {
    name: NOT_RUN.get(name, {}) | {"Laplace, low rank": PAIRS} for name in ("fashion", "cora")
}
CHOSEN = "in regression, every row chooses its noise on validation data, as a temperature would"
NOT_RUN |= {name: NOT_RUN.get(name, {}) | {"ML, temperature": CHOSEN} for name in UCI}
NOT_RUN["cifar10"] = dict.fromkeys({*METHODS} - {*LEADING}, "not among the leading rows")


def chosen(found, name, method):
    """Return the knob and the temperature that were chosen for a row."""
    cell = found[name, method, "choice"]
    if "reason" in cell:
        raise RuntimeError(f"{method}: {cell['reason']}")
    return cell["knob"], cell["temperature"]


@lru_cache(8)
def trained(s, name, method, seed, knob, temperature, noise):
    """Return the net of a row that others start at, and the seconds that it took."""
    case = Case(problem(s, name, seed, noise), s, None, knob, temperature)
    pyro.set_rng_seed(seed)
    start = now(s)
    return METHODS[method].fit(case).bnn.to_module(), now(s) - start


@cache
def warmed_up(s, name):
    """Fit a net before anything is timed, because what is done for the first time is slow."""
    case = Case(problem(s, name, s.chosen_on), s, None, 1e-3, 1.0)
    return METHODS["ML"].fit(case)


def noise_of(s, found, name, method, seed):
    """Return the noise of training, in regression the error of ML's net on validation targets."""
    if name not in UCI or method == "ML":
        return 1.0
    net, _ = trained(s, name, "ML", seed, *chosen(found, name, "ML"), 1.0)
    inputs, targets = problem(s, name, seed).parts["validation"]
    with torch.no_grad():
        return (net.eval()(*inputs) - targets).square().mean().sqrt().item()


def attempt(s, found, name, method, seed, knob, temperature):
    """Return the validation NLL of a row at values of its settings, and what returns its cell."""
    begins, start, seconds = METHODS[method].start, None, 0.0
    warmed_up(s, name)
    try:
        noise = noise_of(s, found, name, method, seed)
        if begins:
            how = *chosen(found, name, begins), noise
            start, seconds = trained(s, name, begins, seed, *how)
        own = problem(s, name, seed, noise)
        pyro.set_rng_seed(seed)
        first = now(s)
        fitted = METHODS[method].fit(Case(own, s, start, knob, temperature))
        seconds += now(s) - first
        parts, how = own.parts, {"batch_size": 500}
        if own.by_nodes and fitted.nodes:
            parts, how = own.by_nodes(fitted.nodes)[1], {}
        how |= {"num_predictions": fitted.draws, "aggregate": False}
        inputs, targets = parts["validation"]
        validation = validated(fitted.bnn.predict(*inputs, **how), targets)
        if not math.isfinite(validation["validation NLL"]):
            raise RuntimeError("predictions are not finite")
    except RuntimeError as error:  # what diverges
        return math.inf, partial(dict, reason=str(error).splitlines()[0])
    told = validation | {"train s": seconds}
    return validation["validation NLL"], partial(tested, s, fitted.bnn, parts, how, told)


def tested(s, bnn, parts, how, told):
    """Return scores, the seconds of predicting the test set, and the size of what is saved."""
    outputs, seconds = {}, []
    while sum(seconds) < 0.2 and len(seconds) < 5:  # the first is slower
        start = now(s)
        outputs["test"] = bnn.predict(*parts["test"][0], **how)
        seconds.append(now(s) - start)
    if "unknown" in parts:
        outputs["unknown"] = bnn.predict(*parts["unknown"][0], **how)
    row = scores(outputs, parts["test"][1], told.get("noise")) | told
    with tempfile.TemporaryDirectory() as folder:
        bnn.save(f"{folder}/bnn")
        return row | {"predict s": min(seconds), "bytes": Path(folder, "bnn").stat().st_size}


def choose(s, found, name, method):
    """Return what was chosen and tried, and the cell that it leaves."""
    row, tried = METHODS[method], {}
    knobs, temperatures = s.grids[row.knob], s.temperatures if row.tempered else [1.0]
    if row.like:
        like = found[name, row.like, "choice"]
        if "reason" in like:
            return {"choice": like, str(s.chosen_on): like}
        knobs, temperatures = [like["knob"]], [like["temperature"]]

    def look(*pair):
        tried[pair] = attempt(s, found, name, method, s.chosen_on, *pair)

    def best():
        return min(tried, key=lambda pair: tried[pair][0])

    for knob in knobs:
        look(knob, temperatures[0])
    knob = best()[0]
    for temperature in temperatures[1:]:
        look(knob, temperature)
    cell = tried[best()][1]()
    nlls = {words([*pair]): nll if nll < math.inf else None for pair, (nll, _) in tried.items()}
    choice = dict(zip(("knob", "temperature"), best(), strict=True), **{"validation NLL": nlls})
    reason = {"reason": cell["reason"]} if "reason" in cell else {}
    return {"choice": choice | reason, str(s.chosen_on): cell}


def cells(s, found):
    """Yield for each set what chooses a row's settings, then other seeds."""
    needed = {"ML"} | {
        n for method in s.methods for n in (METHODS[method].start, METHODS[method].like)
    }
    rows = [method for method in METHODS if method in {*needed, *s.methods}]
    seeds = dict.fromkeys([s.chosen_on, *s.seeds])
    for name, seed, method in product(s.data, seeds, rows):
        if reason := NOT_RUN.get(name, {}).get(method):
            yield (name, method, "none"), partial(dict, reason=reason)
        elif seed == s.chosen_on and (name, method, "choice") not in found:
            yield (name, method, ["choice", seed]), partial(choose, s, found, name, method)
        else:
            yield (name, method, seed), partial(run, s, found, name, method, seed)


def run(s, found, name, method, seed):
    try:
        pair = chosen(found, name, method)
    except RuntimeError as error:
        return {"reason": str(error)}
    return attempt(s, found, name, method, seed, *pair)[1]()


def rows_of(record, name):
    """Return the cells of a data set by row, costs in units of ML's of that seed, and reasons."""
    found, reasons = {}, {}
    for method in METHODS:
        for (seed,), cell in record.of(name, method).items():
            if "reason" in cell:
                reasons[method] = cell["reason"]
            elif seed != "choice":
                ml = record.cells[name, "ML", seed]
                costs = {cost: cell[key] / ml[key] for cost, key in COSTS.items()}
                found.setdefault(method, {})[seed] = cell | costs
    return found, reasons


def bold(column, form, highest=False):
    """Return texts of a column, lists of numbers by row, the best of them in bold."""
    means = {row: statistics.fmean(values) for row, values in column.items() if values}
    errors = {row: tables.error_of(v) if len(v) > 1 else 0.0 for row, v in column.items()}
    best = (max if highest else min)(means, key=means.get) if means else None
    texts = {}
    for row, values in column.items():
        text = tables.over_seeds(values, form)
        near = row in means and abs(means[row] - means[best]) <= max(errors[row], errors[best])
        texts[row] = f"**{text}**" if near else text
    return texts


def page(columns, reasons, rows):
    """Return a table of columns, pairs of a title and texts by row, and why cells are empty."""
    shown = [row for row in rows if row in reasons or any(texts.get(row) for _, texts in columns)]
    lines = [[row, *(texts.get(row, "") for _, texts in columns)] for row in shown]
    alike = {}
    for row, reason in reasons.items():
        alike.setdefault(reason, []).append(row)
    empty = [f"- {'; '.join(those)}: {reason}" for reason, those in alike.items()]
    return "\n".join([tables.markdown(["", *(title for title, _ in columns)], lines), "", *empty])


def as_multiple(number):
    return f"{number:.2g}" if number < 99.5 else f"{number:,.0f}"


def of_set(record, name):
    found, reasons = rows_of(record, name)
    columns = []
    for title, form in FORMS.items():
        column = {row: [c[title] for c in own.values() if title in c] for row, own in found.items()}
        if any(column.values()):
            columns.append((title, bold(column, form, "AUROC" in title)))
    for title in COSTS:
        means = {
            row: statistics.fmean(c[title] for c in own.values()) for row, own in found.items()
        }
        columns.append((title, {row: as_multiple(mean) for row, mean in means.items()}))
    return page(columns, reasons, METHODS)


def ranks(record, names, title):
    """Return the ranks of rows among all that have a score, one for each set and seed."""
    found = {}
    for name in names:
        rows = rows_of(record, name)[0]
        for seed in rows["ML"]:
            own = {row: cells[seed][title] for row, cells in rows.items() if seed in cells}
            for rank, row in enumerate(sorted(own, key=own.get), 1):
                found.setdefault(row, []).append(rank)
    return found


def of_sets(record, names):
    """Return the tables of regression: mean ranks and costs, then each score by set."""
    rows, reasons = zip(*(rows_of(record, name) for name in names), strict=True)
    columns = [("mean rank, NLL", bold(ranks(record, names, "NLL"), ".1f"))]
    columns += [("mean rank, RMSE", bold(ranks(record, names, "RMSE"), ".1f"))]
    for title in COSTS:
        texts = {}
        for row in METHODS:
            if values := [c[title] for own in rows for c in own.get(row, {}).values()]:
                texts[row] = as_multiple(statistics.geometric_mean(values))
        columns.append((title, texts))
    pages = [page(columns, {}, METHODS)]
    for title in ("NLL", "RMSE", "interval error %"):
        columns = []
        for name, own in zip(names, rows, strict=True):
            values = {row: [c[title] for c in own.get(row, {}).values()] for row in METHODS}
            columns.append((name, bold(values, FORMS[title])))
        told = {row: why for each in reasons for row, why in each.items()} if title == "NLL" else {}
        pages.append(f"**{title}**\n\n{page(columns, told, METHODS)}")
    return "\n".join(pages)


def families(record):
    """Return the sets of which there are cells, those of regression together."""
    names = {key[0] for key in record.cells}
    found = {name: [name] for name in ("digits", "fashion", "cora", "cifar10") if name in names}
    regression = [name for name in UCI if name in names]
    return found | ({"uci": regression} if regression else {})


def table(record):
    return {
        f"_{family}": of_sets(record, names) if family == "uci" else of_set(record, family)
        for family, names in families(record).items()
    }


def front(points):
    """Return the names of those that no other beats in both numbers, by the first."""
    found, least = [], math.inf
    for name, (_, score) in sorted(points.items(), key=lambda item: item[1]):
        if score < least:
            found, least = [*found, name], score
    return found


def against(record, names, cost):
    """Return a cost and the NLL of each row that has both on all sets, as means over seeds.

    Of costs it is the geometric mean; of NLLs on several sets that of the differences from ML's.
    """
    tables_of = [rows_of(record, name)[0] for name in names]
    points = {}
    for row in tables_of[0]:
        if all(row in rows for rows in tables_of):
            cells = [(rows["ML"][seed], c) for rows in tables_of for seed, c in rows[row].items()]
            less = [c["NLL"] - (ml["NLL"] if len(names) > 1 else 0.0) for ml, c in cells]
            costs = statistics.geometric_mean(c[cost] for _, c in cells)
            points[row] = costs, statistics.fmean(less)
    return points


def draw(ax, points, numbers):
    """Draw rows as their numbers, the Pareto front in red; what is far above is at the top."""
    best, scores = front(points), sorted(score for _, score in points.values())
    low, middle = scores[0], statistics.median(scores)
    top = min(middle + 1.5 * (middle - low), scores[-1]) if middle > low else low + 1.0
    ends = [*(points[row] for row in best), (1.3 * max(x for x, _ in points.values()), low)]
    ax.step(*zip(*ends, strict=True), where="post", color="C3", alpha=0.4)
    for row, (x, y) in points.items():
        text = f"{numbers[row]}{'↑' * (y > top)}"
        look = {"color": "C3", "weight": "bold"} if row in best else {"color": "0.3"}
        ax.annotate(text, (x, min(y, top)), ha="center", va="center", fontsize=9, **look)
    ax.set(xscale="log", ylim=(low - 0.1 * (top - low), top + 0.1 * (top - low)))
    ax.set_xlim(0.75 * min(x for x, _ in points.values()), ends[-1][0])
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if ends[-1][0] < 200 else (1,)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_locator(NullLocator())


def drawn(record, cost):
    """Draw the NLL against a cost, a panel for each family of sets, and the rows' numbers."""
    panels, known = families(record), record.names(1)
    numbers = {row: n for n, row in enumerate((row for row in METHODS if row in known), 1)}
    across = min(len(panels) + 1, 3)
    down = -(-(len(panels) + 1) // across)
    figure, axes = tables.subplots(down, across, figsize=(4.2 * across, 3.6 * down), squeeze=False)
    for ax, (family, names) in zip(axes.flat, panels.items(), strict=False):
        draw(ax, against(record, names, cost), numbers)
        ax.set(title=family, xlabel=f"{cost} time in units of ML's")
        ax.set_ylabel("test NLL" if len(names) == 1 else "test NLL less ML's, mean of sets")
    for ax in axes.flat[len(panels) :]:
        ax.set_axis_off()
    text = "\n".join(f"{number}  {row}" for row, number in numbers.items())
    axes.flat[len(panels)].text(0.05, 1.0, text, va="top", fontsize=8)
    return figure


def figure(record):
    return {f"_{cost}": drawn(record, cost) for cost in ("training", "prediction")}


by, choices = ("data", "method", "seed"), {"methods": METHODS}
experiment = runner.Experiment("leaderboard", cells, table, figure, by, choices=choices)
which_laplace = runner.Experiment("which_laplace", cells, table, by=by, choices=choices)
