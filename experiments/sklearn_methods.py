"""The methods of `tyxe.integrations.sklearn` by cross-validation on data that scikit-learn has.

A number is the negative log-likelihood of held-out folds, in nats a point; of numbers (diabetes,
friedman) in standard deviations of the targets. Everything that is not a setting is the estimators'
default.
"""

import math

import runner
import tables
import torch
from sklearn import datasets
from sklearn.model_selection import KFold, StratifiedKFold

import tyxe

NUMBERS, CLASSES = ["diabetes", "friedman"], ["moons", "wine", "cancer", "digits"]
ROWS = {  # the method and the scale of its priors
    "laplace": ("laplace", 1.0),
    "last_layer_laplace": ("last_layer_laplace", 1.0),
    **{
        f"{method}, {scale}": (method, float(scale))
        for method in ("mean_field", "map", "ensemble", "swag")
        for scale in (1, 2)
    },
}


def load(name):
    """Return inputs and targets."""
    if name == "friedman":
        return datasets.make_friedman1(200, noise=1.0, random_state=0)
    if name == "moons":
        return datasets.make_moons(200, noise=0.2, random_state=0)
    names = {"cancer": "breast_cancer"}
    return getattr(datasets, f"load_{names.get(name, name)}")(return_X_y=True)


def run(s, name, row, seed):
    # Here, because all experiments are listed where scikit-learn is older than its extra wants.
    from tyxe.integrations.sklearn import BayesianClassifier, BayesianRegressor

    (X, y), (method, scale), total = load(name), ROWS[row], 0.0
    options = {"method": method, "prior_scale": scale, "num_epochs": s.epochs}
    make, folds = (
        (BayesianRegressor, KFold) if name in NUMBERS else (BayesianClassifier, StratifiedKFold)
    )
    for train, test in folds(s.folds, shuffle=True, random_state=seed).split(X, y):
        model = make(random_state=seed, **options).fit(X[train], y[train])
        if name in NUMBERS:
            mean, std = map(torch.as_tensor, model.predict(X[test], return_std=True))
            each = torch.distributions.Normal(mean, std).log_prob(torch.as_tensor(y[test]))
            total += float((-each - math.log(y.std())).sum())
        else:
            probs = torch.as_tensor(model.predict_proba(X[test]))
            total += len(test) * float(tyxe.metrics.nll(probs, torch.as_tensor(y[test])))
    return {"NLL": total / len(y)}


def table(record):
    rows = {}
    for name in [*NUMBERS, *CLASSES]:
        for row in ROWS:
            found = [{name: cell["NLL"]} for cell in record.of(name, row).values()]
            rows.setdefault(row, []).extend(found)
    return tables.score_table(rows, dict.fromkeys([*NUMBERS, *CLASSES], ".2f"))


cells = runner.every(run, data="data", row="rows", seed="seeds")
choices = {"data": [*NUMBERS, *CLASSES], "rows": ROWS}
experiment = runner.Experiment("sklearn_methods", cells, table, choices=choices)
