"""Rows of the leaderboard: unfamiliar images, and links of a last layer beside samples.

`unfamiliar`: by confidence and by the disagreement of draws. Each row is trained with the settings
that the leaderboard's record has chosen for it, and scores test images and unknown ones: digits 0
to 7 and 8 to 9, FashionMNIST and notMNIST. Columns are areas under the ROC curve; the mutual
information of the draws is 0 where there is one. In bold is what is within one standard error of
the best.

`links`: from Gaussian logits to class probabilities, beside many samples of the logits.

  fashion  FashionMNIST: a last layer on the net of MAP, both as the leaderboard has chosen them
  digits   scikit-learn's digits, some rows of them to train: all weights of `BayesianClassifier`,
           at the precision of largest evidence and before its temperature

All links have the same means and covariances of test points, in double precision. The mode is the
softmax of the means. The total variation is the distance from the first row, mean over points.
"""

import common
import leaderboard
import runner
import tables
import torch
from leaderboard_data import problem
from leaderboard_methods import METHODS, Case
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import tyxe
from tyxe.predictive import scores
from tyxe.predictive.links import CLASS_LINKS

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


def table(record):
    parts = []
    for name in record.names():
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


cells = runner.every(run, data="data", method="methods", seed="seeds")
experiment = runner.Experiment("unfamiliar", cells, table, choices={"methods": METHODS})

# --------------------------------------------------------------------------- links

LINK_FORMS = {"NLL": ".3f", "ECE %": ".1f", "total variation": ".3f"}


def last_layer(s, seed):
    """Return a BNN, and inputs and targets to test."""
    own, found = fitted(s, "fashion", "Laplace, last layer", seed)
    (x,), y = own.parts["test"]
    return found.bnn, x, y


def all_layers(s, seed):
    # Here, because all experiments are listed where scikit-learn is older than its extra wants.
    from tyxe.integrations.sklearn import BayesianClassifier

    x, y = (part.numpy() for part in common.all_digits())
    how = {"train_size": s.training_rows, "random_state": seed, "stratify": y}
    x, x_test, y, y_test = train_test_split(x.reshape(len(x), -1), y, **how)
    scaler, how = StandardScaler().fit(x), {"num_epochs": s.estimator_epochs}
    model = BayesianClassifier(standardize=False, random_state=seed, **how)
    bnn = model.fit(scaler.transform(x), y).bnn_
    return bnn, torch.as_tensor(scaler.transform(x_test)), torch.as_tensor(y_test)


FITS = {"fashion": last_layer, "digits": all_layers}


def run_links(s, data, seed):
    bnn, x, y = FITS[data](s, seed)
    mean = bnn.predict(x, num_predictions=0, batch_size=500).double()
    covariance = torch.cat([bnn.functional_variance(part) for part in x.split(500)]).double()
    torch.manual_seed(seed)
    kinds = [(f"mc, {count:,} samples", "mc", count) for count in (s.samples, s.draws)]
    kinds += [("probit", "probit", 0), ("bridge", "bridge", 0)]
    found = {name: CLASS_LINKS[link](mean, covariance, count) for name, link, count in kinds}
    found["the mode"] = mean.log_softmax(-1)
    probs = {name: logs.exp() for name, logs in found.items()}
    rows, many = {}, probs[kinds[0][0]]
    for name, own in probs.items():
        rows[name] = tables.scores(own, y)
        if own is not many:
            rows[name]["total variation"] = (own - many).abs().sum(1).mean().item() / 2
    # What is along (1, ..., 1) changes no probability.
    common_part = covariance.sum((1, 2)).mean() / mean.shape[1]
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1).mean()
    return {"rows": rows, "common to all logits": (common_part / trace).item()}


def table_of_links(record):
    parts = []
    for data in record.names():
        cells = record.of(data)
        parts += [f"**{data}**", tables.score_table(tables.rows(cells), LINK_FORMS)]
        share = tables.over_seeds([c["common to all logits"] for c in cells.values()], ".0f", 100)
        parts.append(f"{share} % of the variance is common to all logits.")
    return "\n\n".join(parts)


cells_of_links = runner.every(run_links, data="data", seed="seeds")
links = runner.Experiment("links", cells_of_links, table_of_links, choices={"data": FITS})
