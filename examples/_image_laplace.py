"""For image_laplace.py: images, nets, scores, and the tables of what was found."""

import json
import math
import statistics
import time
from itertools import pairwise

import torch
from _data import images
from sklearn.datasets import load_digits
from torch import nn

from tyxe import metrics

OTHER = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}
TITLES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "digits": "digits 0 to 7"}
FORMATS = {"accuracy %": ".2f", "NLL": ".3f", "ECE %": ".2f", "OOD AUROC": ".3f"}

PUBLISHED = {
    "training images": 50_000,
    "validation images": 10_000,
    "test images": 10_000,
    "epochs": 500,
    "batch": 512,
    "prior precisions": [10 ** (-2 + i / 3) for i in range(16)],
    "seeds": 5,
    "draws": 100,
    "widths": {"mlp": [1024, 512, 256, 128], "cnn": [64, 96, 128, 512, 256]},
    "gp points": {"mlp": 3_200, "cnn": 3_200},
    "gp factors": [0.1, 1.0, 10.0, 100.0, 1_000.0],
    "gp validation images": 10_000,
    "tuning factors": [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0],
}
REDUCED = {
    "training images": 5_000,
    "validation images": 1_000,
    "test images": 2_000,
    "epochs": 20,
    "batch": 64,
    "prior precisions": [0.1, 1.0, 10.0, 100.0],
    "seeds": 2,
    "draws": 30,
    "widths": {"mlp": [512, 256, 128, 64], "cnn": [16, 24, 32, 128, 64]},
    "gp points": {"mlp": 300, "cnn": 100},
    "gp factors": [0.1, 1.0, 10.0, 100.0],
    "gp validation images": 300,
    "tuning factors": [1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1_000.0],
}
SMOKE = {
    "training images": 60,
    "validation images": 40,
    "test images": 50,
    "epochs": 2,
    "batch": 32,
    "prior precisions": [1.0, 10.0],
    "seeds": 1,
    "draws": 3,
    "widths": {"mlp": [6, 5], "cnn": [3, 4, 5, 6, 5]},
    "gp points": {"mlp": 8, "cnn": 8},
    "gp factors": [1.0, 10.0],
    "gp validation images": 20,
    "tuning factors": [1.0, 10.0],
}


def load(name, settings, seed):
    """Return pairs for training, validation and testing, and images of another set alone.

    The seed draws training and validation images from the training set; test images are evenly
    spaced in theirs.
    """
    (x, y), test, unknown = digits() if name == "digits" else mnist(name)
    sizes = [settings["training images"], settings["validation images"]]
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train, validation = ((x[part], y[part]) for part in order[: sum(sizes)].split(sizes))
    test, unknown = ([thinned(t, settings["test images"]) for t in p] for p in (test, [unknown]))
    return train, validation, test, unknown


def mnist(name):
    """Return training and test pairs of a set, and the test images of the other one."""
    return images(name, "train"), images(name, "test"), images(OTHER[name], "test")[0]


def digits():
    """Return scikit-learn's digits 0 to 7, half of them for testing, and the digits 8 and 9."""
    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float)[:, None] / 16
    x = nn.functional.pad(nn.functional.interpolate(x, scale_factor=3.0), [2, 2, 2, 2])
    y = torch.tensor(bunch.target)
    known = y <= 7
    pairs = (x[known], y[known])
    return tuple(p[::2] for p in pairs), tuple(p[1::2] for p in pairs), x[~known]


def thinned(tensor, count):
    """Return so many of the rows, evenly spaced, or all."""
    return tensor[:: max(len(tensor) // count, 1)][:count]


def mlp(sizes):
    """Return a net of tanh layers for 28x28 images."""
    layers = [
        module
        for columns, rows in pairwise([784, *sizes])
        for module in (nn.Linear(columns, rows), nn.Tanh())
    ]
    return xavier_(nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], 10)))


def cnn(sizes):
    """Return three convolutions (ReLU) and three linear maps (tanh): "3c3d" for 28x28 images."""
    a, b, c, d, e = sizes
    return xavier_(
        nn.Sequential(
            *(nn.Conv2d(1, a, 5), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
            *(nn.Conv2d(a, b, 3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
            *(nn.Conv2d(b, c, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
            *(nn.Flatten(), nn.Linear(9 * c, d), nn.Tanh(), nn.Linear(d, e), nn.Tanh()),
            nn.Linear(e, 10),
        )
    )


def xavier_(net):
    """Draw weights by Xavier's uniform distribution, and set biases to zero."""
    for module in net:
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return net


NETS = {"mlp": mlp, "cnn": cnn}


class Laps:
    """Seconds from one call to the next, by name."""

    def __init__(self):
        self.seconds, self.last = {}, time.perf_counter()

    def __call__(self, name):
        """Take the time of what ended here."""
        now = time.perf_counter()
        self.seconds[name], self.last = now - self.last, now


def scores(known, targets, unknown):
    """Return the columns of the table from class probabilities of test and other images."""
    entropies = metrics.predictive_entropy(known), metrics.predictive_entropy(unknown)
    return {
        "accuracy %": 100 * metrics.accuracy(known, targets).item(),
        "NLL": metrics.nll(known, targets).item(),
        "ECE %": 100 * metrics.expected_calibration_error(known, targets, num_bins=10).item(),
        "OOD AUROC": metrics.ood_auroc(*(-entropy for entropy in entropies)).item(),
    }


def summary(seeds):
    """Return mean and standard error over seeds, for each row and column."""
    return {
        row: {
            column: _mean_and_error([seed["rows"][row][column] for seed in seeds.values()])
            for column in columns
        }
        for row, columns in next(iter(seeds.values()))["rows"].items()
    }


def _mean_and_error(values):
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard error": error}


def table(folder):
    """Return what the JSON files of a folder hold, as Markdown tables."""
    blocks = []
    for path in (folder / f"image_laplace_{data}_{net}.json" for data in TITLES for net in NETS):
        if path.exists():
            content = json.loads(path.read_text())
            blocks.append("\n".join(_lines(content)))
    return "\n\n".join(blocks)


def _lines(content):
    seeds = content["seeds"]
    chosen = ", ".join(f"{seed['prior precision']:g}" for seed in seeds.values())
    factors = ", ".join(f"{seed['gp factor']:g}" for seed in seeds.values())
    tuned = {
        name: ", ".join(f"{seed['tuned precision'][name]:g}" for seed in seeds.values())
        for name in ("glm kron tuned", "glm diag tuned")
    }
    title = f"{TITLES[content['data']]}, {content['net'].upper()}"
    yield (
        f"**{title}**, one number for each seed: prior precision {chosen}; tuned "
        f"{tuned['glm kron tuned']} (kron) and {tuned['glm diag tuned']} (diag); factor of gp "
        f"{factors}."
    )
    yield ""
    yield f"| | {' | '.join(FORMATS)} |"
    yield "|---" * (len(FORMATS) + 1) + "|"
    for name, row in content["summary"].items():
        cells = (_cell(row[column], form) for column, form in FORMATS.items())
        yield f"| {name} | {' | '.join(cells)} |"


def _cell(found, form):
    mean, error = found.values()
    return format(mean, form) + ("" if error is None else f" ± {error:{form}}")
