"""Links from Gaussian logits to class probabilities, beside many samples of the logits.

  fashion     FashionMNIST: a last layer on the net of MAP, both as the leaderboard has chosen them
  digits-cnn  the same for scikit-learn's digits 0 to 7
  digits      scikit-learn's digits, some rows of them to train: all weights of
              `BayesianClassifier`, at the precision of largest evidence and before its temperature
  clusters    a last layer for many classes, at the precision of largest evidence

All links have the same means and covariances of test points, in double precision. The mode is the
softmax of the means. The total variation is the distance from the first row, mean over points.
"""

from functools import partial

import common
import leaderboard
import pyro.distributions as dist
import runner
import tables
import torch
from leaderboard_data import problem
from leaderboard_methods import METHODS, Case
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

import tyxe
from tyxe.predictive.links import CLASS_LINKS

RESULTS = runner.Path(__file__).with_name("results")
FORMS = {"NLL": ".3f", "ECE %": ".1f", "total variation": ".3f"}


def last_layer(name, s, seed):
    """Return a BNN of the leaderboard's choices, and inputs and targets to test."""
    found = runner.Record(RESULTS / "leaderboard.json", leaderboard.by).read().cells
    method = METHODS["Laplace, last layer"]
    how = leaderboard.chosen(found, name, method.start)
    start, _ = leaderboard.trained(s, name, method.start, seed, *how, 1.0)
    own = problem(s, name, seed)
    runner.pyro.set_rng_seed(seed)
    how = leaderboard.chosen(found, name, "Laplace, last layer")
    (x,), y = own.parts["test"]
    return method.fit(Case(own, s, start, *how)).bnn, x, y


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


def many_classes(s, seed):
    """Return a last layer at its precision of largest evidence, and points to test.

    The data are clusters of eight numbers, one for each class.
    """
    torch.manual_seed(seed)
    count, rows = s.clusters, s.training_rows
    centres = 3 * torch.randn(count, 8)
    y, y_test = (torch.arange(n) % count for n in (rows, s.test_rows))
    x, x_test = (centres[labels] + 2 * torch.randn(len(labels), 8) for labels in (y, y_test))
    net = common.mlp(8, 64, count, act=torch.nn.Tanh)
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_modules=[net[-1]])
    bnn = tyxe.LaplaceBNN(net, prior, tyxe.likelihoods.Categorical(rows))
    bnn.fit([(x, y)], partial(torch.optim.Adam, lr=1e-2), s.cluster_epochs, progress=False)
    bnn.optimize_prior_precision()
    return bnn, x_test, y_test


FITS = {
    "fashion": partial(last_layer, "fashion"),
    "digits-cnn": partial(last_layer, "digits"),
    "digits": all_layers,
    "clusters": many_classes,
}


def run(s, data, seed):
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


def table(record):
    parts = []
    for data in record.names():
        cells = record.of(data)
        parts += [f"**{data}**", tables.score_table(tables.rows(cells), FORMS)]
        share = tables.over_seeds([c["common to all logits"] for c in cells.values()], ".0f", 100)
        parts.append(f"{share} % of the variance is common to all logits.")
    return "\n\n".join(parts)


cells = runner.every(run, data="data", seed="seeds")
experiment = runner.Experiment("links", cells, table, choices={"data": FITS})
