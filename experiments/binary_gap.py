"""Why posteriors of binary weights are behind the straight-through estimator [T tab. 4.2].

In [T] their negative log-likelihood (NLL) on MNIST is .005 above the estimator's (STE), in the
reduced runs of `binary.py` more. One thing is changed at a time, of the nets, the fits and the
predictions of that file; the posterior is Bernoulli with tau 0.001. All of a seed start from one
net of real weights. `concrete draws` are of weights, by two temperatures, in place of sums that are
Gaussian by the central limit theorem; `start x 4` has logits that are a multiple of the weights.

Columns: scores by draws of nets as in `binary.py`, NLL also of half as many training images; by the
likelier value of each weight (`mode`); by eight times as many draws (`many draws`), and by draws of
sums, as in training (`sums`); entropy of a weight (log 2 = 0.693).
"""

import copy
from contextlib import nullcontext
from functools import partial

import binary
import common
import runner
import tables
import torch

import tyxe
from tyxe.poutine import local_reparameterization

BASE = {"rate": 0.1, "tau": 0.001, "more steps": 1, "draws a step": 1, "guide": {}}
ROWS = {
    "STE": {"STE": True},
    "STE, 4 x steps": {"STE": True, "more steps": 4},
    "STE, rate 0.3": {"STE": True, "rate": 0.3},
    "base": {},
    "4 x steps": {"more steps": 4},
    "rate 0.01": {"rate": 0.01},
    "rate 0.03": {"rate": 0.03},
    "rate 0.3": {"rate": 0.3},
    "4 draws a step": {"draws a step": 4},
    "tau 0": {"tau": 0.0},
    "concrete draws, 0.5": {"guide": {"relaxed": 0.5}},
    "concrete draws, 0.1": {"guide": {"relaxed": 0.1}},
    "start x 4": {"guide": {"init_gain": 8.0}},  # logits are 2 w / s where w is small
}
FORMATS = {"accuracy %": ".2f", "NLL": ".3f", "ECE %": ".2f", "training NLL": ".3f"}
FORMATS |= {"mode: NLL": ".3f", "mode: ECE %": ".2f", "many draws: NLL": ".3f", "sums: NLL": ".3f"}
FORMATS |= {"weight entropy": ".3f"}
TITLES = {"cnn": "Convolutional", "mlp": "Fully connected"}


def judged(s, predict):
    (seen, labels), (x, y), _ = binary.sets(s)
    row, half = tables.scores(predict(x), y), len(x) // 2
    return row | {"training NLL": tyxe.metrics.nll(predict(seen[:half]), labels[:half]).item()}


def fit_posterior(s, net, loader, chosen):
    prior = tyxe.priors.BinaryPrior(scale="radford")
    guide = partial(tyxe.guides.AutoBernoulli, **chosen["guide"])
    likelihood = tyxe.likelihoods.Categorical(s.training_images)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, guide)
    epochs, handler = s.epochs * chosen["more steps"], local_reparameterization
    adam, step = common.scheduled(bnn, chosen["rate"], binary.stepwise, epochs, s.decays)
    how = {"num_particles": chosen["draws a step"], "beta": chosen["tau"], "progress": False}
    with (nullcontext if "relaxed" in chosen["guide"] else handler)():
        bnn.fit(loader, adam, epochs, step, **how)
    return bnn


def run(s, kind, row, seed):
    chosen, (net, loader) = BASE | ROWS[row], binary.real_net(s, kind, seed)
    torch.manual_seed(seed)
    if "STE" in chosen:
        epochs, start = s.epochs * chosen["more steps"], binary.by_sign_(copy.deepcopy(net))
        net = binary.fit(start, loader, epochs, chosen["rate"], s.decays, clip=True)
        return judged(s, partial(binary.probabilities, net))
    bnn = fit_posterior(s, net, loader, chosen)

    def predict(x, draws=s.draws):
        return bnn.predict(x, num_predictions=draws, batch_size=500).softmax(-1)

    found = judged(s, predict) | {"weight entropy": binary.weight_entropy(bnn)[0]}
    ways = {"mode": (0, nullcontext), "many draws": (8 * s.draws, nullcontext)}
    x, y = binary.sets(s)[1]
    for way, (draws, handler) in (ways | {"sums": (s.draws, local_reparameterization)}).items():
        with handler():
            own = tables.scores(predict(x, draws), y)
        found |= {f"{way}: {name}": value for name, value in own.items()}
    return found


def table(record):
    blocks = []
    for kind, title in TITLES.items():
        if found := tables.rows(record.of(kind)):
            rows = {row: found[row] for row in ROWS if row in found}
            blocks += [f"**{title}**", tables.score_table(rows, FORMATS, count=["seeds"])]
    return "\n\n".join(blocks)


cells = runner.every(run, net="net", row="rows", seed="seeds")
experiment = runner.Experiment("binary_gap", cells, table, choices={"rows": ROWS})
