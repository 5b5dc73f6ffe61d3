"""The tasks of `task_sequences.py`: their data, their nets, and how these tell their classes.

`permuted`, `disjoint` and `vision` return a net, the names of tasks, and `part(task, index)`: the
data to train (0) and to test (1).

Of tasks that share one output layer, the outputs of other classes than a task's get probabilities
near zero, and so does their curvature: nothing keeps the next task from raising them. One remedy
gives them a curvature, one leaves them alone.
"""

from functools import cache, partial

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


class OwnClasses(nn.Module):
    """A net whose outputs are those of `classes` alone, where that is not None."""

    def __init__(self, net):
        super().__init__()
        self.net, self.classes = net, None

    def forward(self, x):
        outputs = self.net(x)
        if self.classes is None:
            return outputs
        others = torch.ones(outputs.shape[-1], dtype=torch.bool)
        others[self.classes] = False
        return outputs.masked_fill(others, -1e4)  # probability 0, and no infinities in gradients


@torch.no_grad()
def flat_labels(net, x, share):
    """Return labels drawn from the net's probabilities, or for that share of images from all."""
    drawn = torch.distributions.Categorical(logits=net(x)).sample()
    anew = torch.rand(len(x)) < share
    return torch.where(anew, torch.randint(net(x[:1]).shape[-1], (len(x),)), drawn)


def retake_curvature(bnn, batches, share):
    """Take the curvature of a task again, by such labels in place of the net's own."""
    labels, usual = flat_labels(bnn.to_module(), batches.x, share), bnn._curvature
    bnn._curvature = "empirical"
    bnn.fit_curvature(common.Batches(batches.x, labels, batches.size), progress=False)
    bnn._curvature = usual


@torch.no_grad()
def own_classes(net, x, y):
    """Return the accuracy among the classes of these labels."""
    own = y.unique()
    return (own[net(x)[:, own].argmax(-1)] == y).double().mean().item()


@torch.no_grad()
def with_offset(net, old, new, chosen=500):
    """Return the accuracies on two tasks with one number added to the outputs of the first's.

    It is the one with the best mean accuracy on some training images of both, which no method of
    continual learning has: a measure of what is lost by that one number.

    Args:
        net: returns outputs of all classes.
        old: `part(index)` of the first task: training data (0) and test data (1).
        new: those of the second.
        chosen: number of training images of each.
    """
    classes = old(0)[1].unique()

    def accuracies(offset, pairs):
        shift = torch.zeros(net(pairs[0][0][:1]).shape[-1])
        shift[classes] = offset
        return [((net(x) + shift).argmax(-1) == y).double().mean().item() for x, y in pairs]

    known = [common.first(part(0), chosen) for part in (old, new)]
    offsets = torch.linspace(-10, 30, 161).tolist()
    best = max(offsets, key=lambda offset: sum(accuracies(offset, known)))
    return {"offset": best, "with offset": accuracies(best, [part(1) for part in (old, new)])}


def balance(net, tasks, part):
    """Return what a record holds of a net after two tasks besides its accuracies."""
    own = {"own classes": [own_classes(net, *part(task, 1)) for task in tasks]}
    return own | with_offset(net, *(partial(part, task) for task in tasks))
