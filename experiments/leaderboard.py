"""All methods beside each other: which one to take.

Data sets: scikit-learn's digits 0 to 7 (8 and 9 are what is not known) and FashionMNIST (notMNIST)
by a small CNN, Cora by a graph net of two layers, UCI regression by two layers of 50 tanh units
(all within 5,000 rows), CIFAR-10 (SVHN) by a narrow ResNet-18. The methods train the same net for
the same epochs of the same batches, by Adam, its rate falling as a cosine; those that start at the
net of ML or MAP have as many epochs again, ensembles and Multi-SWAG five times as many, SGLD and
SGHMC as many mini-batches, and MCLMC takes steps by all data after the members' training. Chosen by
the NLL on validation data, on one seed for all: a knob of three values (a rate; of Laplace the
prior's precision), then a temperature of as many. Regression trains with the noise that ML has on
validation data, and every method's predictions have the one noise of the lowest validation NLL.

Columns, mean and standard error over seeds, in bold what is within one standard error of the best:
NLL, nats a point; error, or RMSE of standardised targets; ECE (15 bins), or the mean difference of
the coverage of central intervals from their levels, 10 to 90 %; area under the ROC curve of known
and unknown inputs by predictive entropy; seconds to train, what a method starts from included, and
to predict the test set, as multiples of ML's; memory, the file that `save` writes, likewise.
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
from leaderboard_data import IMAGES, UCI, problem, scores
from leaderboard_methods import METHODS, Case
from resnet import now
from runner import how, setting, settings, which, words

FORMS = {"NLL": ".3f", "error %": ".1f", "RMSE": ".3f", "ECE %": ".1f", "interval error %": ".1f"}
FORMS |= {"OOD AUROC": ".3f"}
COSTS = {"training": "train s", "prediction": "predict s", "memory": "bytes"}
GRIDS = {
    "Adam's rate": [1e-3, 3e-3, 1e-2],
    "SGD's rate": [0.03, 0.1, 0.3],
    "SGHMC's rate": [0.01, 0.03, 0.1],
    "IVON's rate": [0.03, 0.1, 0.3],
    "prior's precision": [1.0, 10.0, 100.0],
}
EPOCHS = {"digits": 100, "fashion": 20, "cifar10": 24, "cora": 200, "uci": 100}
LEADING = ["ML", "MAP", "MC dropout", "ensemble", "mean field, local reparam.", "last layer"]
LEADING += ["Laplace, last layer", "SWAG", "Multi-SWAG", "IVON"]
# What is not run, by data set: the rows, and why.
WHOLE = "each step of a chain takes two gradients of all data"
NOT_RUN = {name: {"MCLMC ensemble": WHOLE} for name in ("fashion", "bikesharing", "protein")}
NOT_RUN["cifar10"] = {name: "not among the ten leading rows" for name in {*METHODS} - {*LEADING}}


@settings
class Settings(runner.Settings):
    data: list[str] = which(
        ["digits", "fashion", "cora", *UCI], "the sets", choices=[*IMAGES, "cora", *UCI]
    )
    methods: list[str] = which([*METHODS], "the rows, and ML and MAP", choices=[*METHODS])
    seeds: list[int] = which([0, 1, 2], "of data and fits", smoke=[0])
    device: str = how("cpu", "where to compute")
    chosen_on: int = setting(0, "the seed by which settings are chosen")
    grids: dict = setting(GRIDS, "of knobs", smoke={k: v[:1] for k, v in GRIDS.items()})
    temperatures: list[float] = setting([0.1, 1.0, 0.01], "knobs by the first", smoke=[0.1])
    training_images: int = setting(5_000, "at most", smoke=60)
    validation_images: int = setting(1_000, "at most", smoke=40)
    test_images: int = setting(5_000, "of either set, at most", smoke=40)
    regression_rows: int = setting(5_000, "at most", smoke=60)
    epochs: dict = setting(EPOCHS, "of a net", smoke=dict.fromkeys(EPOCHS, 8) | {"cora": 16})
    batch: int = setting(100, "points in a batch", smoke=20)
    width: int = setting(16, "channels of the CNN's first layer", smoke=2)
    resnet_width: int = setting(16, "channels of ResNet-18's first stage", published=64, smoke=2)
    hidden_units: int = setting(50, "of each layer, in regression", smoke=4)
    graph_units: int = setting(16, "of the graph net", smoke=3)
    dropout: float = setting(0.1, "rate")
    members: int = setting(5, "of ensembles, and chains", smoke=2)
    draws: int = setting(20, "in predictions, samples of all chains", smoke=2)
    cycles: int = setting(4, "of SGHMC", smoke=1)
    first_scale: float = setting(1e-3, "of guides")
    first_hessian: float = setting(0.5, "of IVON")
    scale_multiplier: int = setting(10, "of the learning rate of scales")
    rank: int = setting(20, "of SWAG, at most a quarter of the epochs")
    M: int = setting(16, "rows and columns of inducing weights", smoke=2)
    warmup_steps: int = setting(1_000, "of MCLMC", smoke=20)
    chain_steps: int = setting(200, "of MCLMC after it", smoke=20)


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
    """Return the cell of a row at values of its settings, or the reason why there is none."""
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
        return {**predicted(s, own, fitted), "train s": seconds}
    except RuntimeError as error:  # what is not finite, in training or in the scores
        return {"reason": str(error).splitlines()[0]}


def predicted(s, own, fitted):
    """Return scores, the seconds of predicting the test set, and the size of what is saved."""
    parts, how = own.parts, {"aggregate": False, "batch_size": 500}
    if own.by_nodes and fitted.nodes:
        parts, how["batch_size"] = own.by_nodes(fitted.nodes)[1], None
    predict = partial(fitted.bnn.predict, num_predictions=fitted.draws, **how)
    seconds = []
    while sum(seconds) < 0.2 and len(seconds) < 5:  # the first is slower
        start = now(s)
        predict(*parts["test"][0])
        seconds.append(now(s) - start)
    row = scores(parts, {part: predict(*inputs) for part, (inputs, _) in parts.items()})
    if not all(map(math.isfinite, row.values())):
        raise RuntimeError("predictions are not finite")
    with tempfile.TemporaryDirectory() as folder:
        fitted.bnn.save(f"{folder}/bnn")
        return row | {"predict s": min(seconds), "bytes": Path(folder, "bnn").stat().st_size}


def choose(s, found, name, method):
    """Return what was chosen and tried, and the cell that it leaves."""
    temperatures = s.temperatures if METHODS[method].tempered else [1.0]
    tried = {}

    def best():
        return min(tried, key=lambda pair: tried[pair].get("validation NLL", math.inf))

    def look(*pair):
        tried[pair] = attempt(s, found, name, method, s.chosen_on, *pair)

    for knob in s.grids[METHODS[method].knob]:
        look(knob, temperatures[0])
    for temperature in temperatures[1:]:
        look(best()[0], temperature)
    knob, temperature = best()
    cell = tried[best()]
    told = {
        words([*pair]): one.get("validation NLL", one.get("reason")) for pair, one in tried.items()
    }
    reason = {"reason": cell["reason"]} if "reason" in cell else {}
    choice = {"knob": knob, "temperature": temperature, "validation NLL by both": told}
    return {"choice": choice | reason, str(s.chosen_on): cell}


def cells(s, found):
    """Yield for each set what chooses a row's settings, ML and MAP first, then other seeds."""
    rows = [method for method in METHODS if method in {"ML", "MAP", *s.methods}]
    for name, seed, method in product(s.data, [s.chosen_on, *s.seeds], rows):
        if reason := NOT_RUN.get(name, {}).get(method):
            yield (name, method, "none"), partial(dict, reason=reason)
        elif seed == s.chosen_on:
            yield (name, method, ["choice", seed]), partial(choose, s, found, name, method)
        else:
            yield (name, method, seed), partial(run, s, found, name, method, seed)


def run(s, found, name, method, seed):
    try:
        pair = chosen(found, name, method)
    except RuntimeError as error:
        return {"reason": str(error)}
    return attempt(s, found, name, method, seed, *pair)


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
    empty = [f"- {row}: {reason}" for row, reason in reasons.items()]
    return "\n".join([tables.markdown(["", *(title for title, _ in columns)], lines), "", *empty])


def of_set(record, name):
    found, reasons = rows_of(record, name)
    columns = []
    for title, form in FORMS.items():
        column = {row: [c[title] for c in own.values() if title in c] for row, own in found.items()}
        if any(column.values()):
            columns.append((title, bold(column, form, title == "OOD AUROC")))
    for title in COSTS:
        means = {
            row: statistics.fmean(c[title] for c in own.values()) for row, own in found.items()
        }
        columns.append((title, {row: f"{mean:.2g}" for row, mean in means.items()}))
    return page(columns, reasons, METHODS)


def table(record):
    names = dict.fromkeys(key[0] for key in record.cells)
    return {f"_{name}": of_set(record, name) for name in names}


experiment = runner.Experiment("leaderboard", Settings, cells, ("data", "method", "seed"), table)

if __name__ == "__main__":
    experiment.main()
