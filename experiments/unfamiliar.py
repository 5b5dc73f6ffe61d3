"""Unfamiliar images by confidence and by the disagreement of draws, for rows of the leaderboard.

Each row is trained with the settings that the leaderboard's record has chosen for it, and scores
test images and unknown ones: digits 0 to 7 and 8 to 9, FashionMNIST and notMNIST. Columns are areas
under the ROC curve; the mutual information of the draws is 0 where there is one. In bold is what is
within one standard error of the best.
"""

from functools import partial
from itertools import product

import leaderboard
import runner
import tables
from leaderboard_data import problem
from leaderboard_methods import METHODS, Case

import tyxe
from tyxe.predictive import scores

RESULTS = runner.Path(__file__).with_name("results")
COLUMNS = {
    "largest probability": scores.max_probability,
    "entropy": scores.predictive_entropy,
    "mutual information": scores.mutual_information,
}


def fitted(s, name, method, seed):
    """Return a row's problem, and what is fitted to it with the settings that were chosen."""
    found = runner.Record(RESULTS / "leaderboard.json", leaderboard.by).read().cells
    start, begins = None, METHODS[method].start
    if begins:
        how = leaderboard.chosen(found, name, begins)
        start, _ = leaderboard.trained(s, name, begins, seed, *how, 1.0)
    own = problem(s, name, seed)
    runner.pyro.set_rng_seed(seed)
    return own, METHODS[method].fit(Case(own, s, start, *leaderboard.chosen(found, name, method)))


def run(s, name, method, seed):
    own, (bnn, draws, _) = fitted(s, name, method, seed)
    how = {"num_predictions": draws, "aggregate": False, "batch_size": 500}
    known, unknown = (bnn.predict(*own.parts[p][0], **how) for p in ("test", "unknown"))
    row = {}
    for column, score in COLUMNS.items():
        if column != "mutual information" or len(known) > 1:
            sign = 1 if column == "largest probability" else -1
            # In double precision, where certain images differ.
            pair = (sign * score(each.double()) for each in (known, unknown))
            row[column] = tyxe.metrics.ood_auroc(*pair).item()
    return row


def cells(s, found):
    for name, seed, method in product(s.data, s.seeds, s.methods):
        yield (name, method, seed), partial(run, s, name, method, seed)


def table(record):
    parts = []
    for name in dict.fromkeys(key[0] for key in record.cells):
        columns = []
        for title in COLUMNS:
            values = {
                method: [c[title] for c in record.of(name, method).values() if title in c]
                for method in METHODS
                if record.of(name, method)
            }
            columns.append((title, leaderboard.bold(values, ".3f", highest=True)))
        rows = [method for method in METHODS if record.of(name, method)]
        lines = [[row, *(texts[row] for _, texts in columns)] for row in rows]
        parts += [f"**{name}**", tables.markdown(["", *COLUMNS], lines)]
    return "\n\n".join(parts)


by, choices = ("data", "method", "seed"), {"methods": METHODS}
experiment = runner.Experiment("unfamiliar", cells, table, by=by, choices=choices)
