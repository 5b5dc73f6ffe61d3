"""The tasks of `task_sequences.py`: their data and nets.

`permuted`, `disjoint` and `vision` return a net, the names of tasks, and `part(task, index)`: the
data to train (0) and to test (1).
"""

from functools import cache

import common
import torch
from torch import nn


def mnist(s, wanted=lambda y: y >= 0):
    found = []
    for split, count in (("train", s.images), ("test", getattr(s, "test_images", None))):
        x, y = common.images("mnist", split)
        rows = wanted(y).nonzero()[:count, 0]
        found.append((x[rows].flatten(1), y[rows]))
    return found


def permuted(s, seed, units=100):
    own, sets = torch.Generator().manual_seed(seed), mnist(s)
    orders = {str(1 + t): torch.randperm(784, generator=own) for t in range(s.tasks)}
    orders["1"] = torch.arange(784)

    def part(task, index, rows=slice(None)):
        x, y = sets[index]
        return x[rows][:, orders[task]], y[rows]

    return common.mlp(784, units, units, 10), [*orders], part


class AtOnce:
    """Batches of all tasks together: a fifth of each of one task, both drawn with replacement."""

    def __init__(self, part, tasks, size):
        self.part, self.tasks, self.each = part, tasks, -(-size // 5)
        self.images = len(part(tasks[0], 0)[1])
        self.count = -(-self.images * len(tasks) // (5 * self.each))
        self.points = 5 * self.each * self.count  # of an epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        for _ in range(len(self)):
            drawn = [self.tasks[t] for t in torch.randint(len(self.tasks), (5,)).tolist()]
            rows = torch.randint(self.images, (5, self.each))
            pairs = [self.part(task, 0, own) for task, own in zip(drawn, rows, strict=True)]
            yield tuple(map(torch.cat, zip(*pairs, strict=True)))


def disjoint(s, seed):
    sets = {"0 to 4": mnist(s, lambda y: y < 5), "5 to 9": mnist(s, lambda y: y >= 5)}
    return common.mlp(784, 100, 100, 10), [*sets], lambda task, part: sets[task][part]


class LeNet(nn.Module):
    """Two convolutions and a layer of 500, for images of 32x32x3; the output layer is `head`."""

    def __init__(self, a=20, b=50, c=500):
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(3, a, 5), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Conv2d(a, b, 5), nn.Tanh(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(25 * b, c), nn.Tanh()),
        )
        self.head = nn.Linear(c, 10)

    def forward(self, x):
        return self.head(self.body(x))


def vision(s, seed):
    x, y = common.images("notmnist", "test")
    kept = torch.arange(len(y)) % 5 > 0
    files = {"MNIST": "mnist", "FashionMNIST": "fashion_mnist", "CIFAR-10": "cifar10_subset"}

    @cache
    def part(task, index):
        if task == "notMNIST":
            found = (x[~kept], y[~kept]) if index else (x[kept], y[kept])
        else:
            found = common.images(files[task], ("train", "test")[index])
        images, labels = common.first(found, (s.images, s.test_images)[index])
        around = ((32 - images.shape[-1]) // 2,) * 4
        return nn.functional.pad(images, (*around, 0, 3 - images.shape[1])), labels

    return LeNet(), ["MNIST", "notMNIST", "FashionMNIST", "CIFAR-10"], part
