"""Variational continual learning of CIFAR-10 and five tasks after it, Split-CIFAR [T fig. 5.4].

A net of four convolutions and a dense layer, shared under a N(0, 1) prior, with a head of each
task's own outside it, and the methods of `split_mnist.py`. In the paper the later tasks are ten
classes of CIFAR-100 each; here task t, from 2 to 6, has classes 2t - 4 and 2t - 3 of FashionMNIST
and of notMNIST, both scaled to 32 x 32 and in two random colours an image, and of SVHN; a fifth of
all is tested. VCL 0.1 weighs the KL by a tenth, as ten times as many images would: that is the
paper's number of CIFAR-10's, and twice that of its later tasks.
"""

from functools import cache
from itertools import pairwise

import common
import runner
import split_mnist
import tables
import torch
from resnet_ood import coloured
from task_sequences import by_label, finish, over_tasks, with_error
from torch import nn

import tyxe
from tyxe import continual


def later_sets():
    """Return images `(n, 3, 32, 32)` and labels of the sets that later tasks have classes of."""
    grey = [common.images(name, "test") for name in ("fashion_mnist", "notmnist")]
    svhn = [common.images("svhn_subset", split) for split in ("train", "test")]
    with torch.random.fork_rng(devices=[]):  # a seed set before is that of the fit
        torch.manual_seed(0)
        found = [(coloured(x, 32), y) for x, y in grey]
    return *found, tuple(map(torch.cat, zip(*svhn, strict=True)))


@cache
def tasks(s):
    """Return training and test pairs by task, the images normalised, the labels from 0."""
    train, test = (common.images("cifar10_subset", split) for split in ("train", "test"))
    normalise, later = common.standardised(train[0]), later_sets()
    found = {"CIFAR-10": (common.first(train, s.images), common.first(test, s.test_images))}
    for t in range(5):
        parts = []
        for number, (x, y) in enumerate(later):
            for label in (2 * t, 2 * t + 1):
                own = x[y == label][: s.later_images]
                parts.append((own, torch.full((len(own),), 2 * number + label % 2)))
        x, y = map(torch.cat, zip(*parts, strict=True))
        tested = torch.arange(len(y)) % 5 == 0
        found[f"task {t + 2}"] = (x[~tested], y[~tested]), (x[tested], y[tested])
    return {task: [(normalise(x), y) for x, y in pairs] for task, pairs in found.items()}


class Net(nn.Module):
    """Four convolutions and a dense layer, for images of 32x32x3; the output layer is `head`."""

    def __init__(self, a, units):
        super().__init__()
        sizes, layers = (3, a, a, 2 * a, 2 * a), []
        for number, pair in enumerate(pairwise(sizes)):
            layers += [nn.Conv2d(*pair, 3, padding=1), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] * (number % 2)
        layers += [nn.Flatten(), nn.Linear(128 * a, units), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(units, 10)

    def forward(self, x):
        return self.head(self.body(x))


def run(s, method, seed):
    sets = tasks(s)
    torch.manual_seed(seed)
    likelihood = tyxe.likelihoods.Categorical(1)
    bnn, heads = split_mnist.model(s, Net(s.channels, s.units), method, "head", likelihood)
    how = {"lr_multipliers": {"scale": s.scale_multiplier}} if method != "ML" else {}
    how |= {"beta": 0.1} if method == "VCL 0.1" else {}

    def fit(task):
        split_mnist.learn(s, bnn, sets[task][0], s.epochs, **how)

    def evaluate(task):
        drawn = {"num_predictions": s.draws, "reduction": "mean", "batch_size": 500}
        return 1 - bnn.evaluate(*sets[task][1], **drawn)[0].item()

    loop = continual.TaskLoop(bnn, [*sets], fit, evaluate, heads=heads)
    return {"tasks": [*sets], "accuracy": finish(s, loop, "split-CIFAR", method, seed)}


def table(record):
    lines = []
    for label, accuracy in by_label(record)[1].items():
        each, last = accuracy.diagonal(dim1=-2, dim2=-1), accuracy[:, -1]
        for when, rows in (("right after", each), ("in the end", last)):
            lost = continual.forgetting(accuracy)[:, -1] if rows is last else torch.tensor([])
            columns = [*rows.unbind(-1), rows.mean(-1), lost]
            lines.append([label, when, str(len(rows)), *map(with_error, columns)])
    names = next(iter(record.cells.values()))["tasks"]
    return tables.markdown(["method", "", "runs", *names, "mean", "forgetting"], lines)


cells = runner.every(run, method="methods", seed="seeds")
experiment = runner.Experiment("split_cifar", cells, table, over_tasks)
