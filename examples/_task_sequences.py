"""For task_sequences.py: tasks, nets, settings, and what the runs gave."""

import matplotlib.pyplot as plt
import torch
from _continual import matrices, with_error
from _data import colour, images
from torch import nn

from tyxe import continual
from tyxe.plotting import PALETTE, accuracy_over_tasks

LAPLACE = {
    "kron": {"structure": "kron", "curvature": "fisher"},
    "diag": {"structure": "diag", "curvature": "fisher"},
    "per-task kron": {"structure": "kron", "curvature": "fisher", "accumulate": "modes"},
    "EWC": {"structure": "diag", "curvature": "fisher", "accumulate": "modes"},
}
METHODS = [*LAPLACE, "SI", "ML", "joint", "alone"]
# The rate of later tasks is divided by their number times the strength over this; of convolutions,
# whose weights are in use at each position, the curvature is larger.
SLOWER = {
    "disjoint": {"kron": 10, "diag": 100},
    "vision": {"kron": 1, "per-task kron": 1, "diag": 10, "EWC": 10},
}
LAMBDAS = [1.0, 10.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5, 1e6]
SETTINGS = {
    "disjoint": {
        "images": None,
        "epochs": 9,
        "SI epochs": 9,
        "strengths": {
            "kron": LAMBDAS,
            "diag": LAMBDAS,
            "SI": [0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5],
            "ML": [None],
            "joint": [None],
        },
    },
    "permuted": {
        "images": 10_000,
        "test images": 2_000,
        "tasks": 10,
        "epochs": 10,
        "SI epochs": 10,
        "strengths": {"SI": [0.01, 0.03, 0.1, 0.3, 1.0], "ML": [None], "joint": [None]},
    },
    "vision": {
        "images": 2_000,
        "test images": 1_000,
        "rate": 0.03,
        "batch": 50,
        "epochs": 9,
        "SI epochs": 9,
        "strengths": {
            "kron": [1.0, 10.0],
            "diag": [1.0, 10.0],
            "per-task kron": [1.0],
            "EWC": [1.0],
            "SI": [0.1, 1.0],
            "ML": [None],
            "alone": [None],
        },
    },
}
PUBLISHED = {
    "disjoint": {"epochs": 24, "SI epochs": 24},
    "permuted": {
        "images": 50_000,
        "test images": None,
        "tasks": 50,
        "epochs": 20,
        "SI epochs": 20,
    },
    "vision": {"images": None, "test images": None, "epochs": 20, "SI epochs": 20},
}
SMOKE = {"images": 60, "test images": 60, "epochs": 1, "SI epochs": 1, "tasks": 2}


def settings(data, published, smoke):
    """Return the settings of a sequence, as the JSON file has them."""
    chosen = {"batch": 250, "prior scale": 1.0, **SETTINGS[data]}
    chosen |= PUBLISHED[data] if published else {}
    if smoke:
        chosen |= {key: value for key, value in SMOKE.items() if key in chosen}
        chosen["strengths"] = {m: strengths[:1] for m, strengths in chosen["strengths"].items()}
    return chosen


class LeNet(nn.Module):
    """Two convolutions and a layer of 500, for images of 32x32x3; the output layer is `head`."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 20, 5),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.Tanh(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(1250, 500),
            nn.Tanh(),
        )
        self.head = nn.Linear(500, 10)

    def forward(self, x):
        return self.head(self.body(x))


def build(data, settings, seed):
    """Return the tasks, by name pairs of training and test data, the net, and its heads' names."""
    torch.manual_seed(seed)  # the net's start
    if data == "vision":
        return vision(settings), LeNet(), ["head"]
    net = nn.Sequential(
        nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)
    )
    mnist = [images("mnist", split) for split in ("train", "test")]
    mnist = [(x.flatten(1), y) for x, y in mnist]
    return TASKS[data](*mnist, settings, seed), net, None


def disjoint(train, test, settings, seed):
    """Split MNIST by classes."""
    rows = {"0 to 4": lambda y: y < 5, "5 to 9": lambda y: y >= 5}
    return {
        name: (first(train, settings["images"], wanted), first(test, None, wanted))
        for name, wanted in rows.items()
    }


def permuted(train, test, settings, seed):
    """Give each task an order of pixels, the first its own, as online_laplace.py has them."""
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(784, generator=generator) for _ in range(settings["tasks"])]
    orders[0] = torch.arange(784)
    train, test = first(train, settings["images"]), first(test, settings["test images"])
    return {
        str(number): tuple((x[:, order], y) for x, y in (train, test))
        for number, order in enumerate(orders, 1)
    }


TASKS = {"disjoint": disjoint, "permuted": permuted}


def vision(settings):
    """Return the sets at hand, as 32x32x3; of notMNIST, whose test set is all, a fifth tests."""
    letters = images("notmnist", "test")
    kept = torch.arange(len(letters[1])) % 5 > 0
    found = {
        "MNIST": (images("mnist", "train"), images("mnist", "test")),
        "notMNIST": tuple((letters[0][part], letters[1][part]) for part in (kept, ~kept)),
        "FashionMNIST": (images("fashion_mnist", "train"), images("fashion_mnist", "test")),
        "CIFAR-10": tuple(colour("cifar10_subset", "CIFAR10", s) for s in ("train", "test")),
    }
    return {
        name: tuple(
            (padded(x), y)
            for x, y in (first(train, settings["images"]), first(test, settings["test images"]))
        )
        for name, (train, test) in found.items()
    }


def padded(x):
    """Fill images up to 32x32x3 with zeros."""
    missing = 32 - x.shape[-1]
    channels = 3 - x.shape[1]
    return nn.functional.pad(x, (missing // 2,) * 4 + (0, channels))


def first(data, count, wanted=None):
    """Return the first points, of those wanted."""
    x, y = data
    rows = torch.arange(len(y)) if wanted is None else wanted(y).nonzero()[:, 0]
    return x[rows[:count]], y[rows[:count]]


def together(tasks, names):
    """Return the training data of several tasks as one."""
    parts = [tasks[name][0] for name in names]
    if len(parts) == 1:
        return parts[0]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def label(method, strength, seed=None):
    """Name a group of runs, or one of them."""
    name = method if strength is None else f"{method}, strength {strength:g}"
    return name if seed is None else f"{name}, seed {seed}"


def rows(accuracy, alone):
    """Return the accuracies of the tasks seen, after each; of nets alone, those of their own."""
    accuracy = accuracy.diagonal().expand_as(accuracy) if alone else accuracy
    return [row[: t + 1] for t, row in enumerate(accuracy.tolist())]


def among_own_classes(net, tasks):
    """Return a net's accuracy on each task where only the task's own classes are in question."""
    found = []
    for _, (x, y) in tasks.values():
        own = y.unique()
        with torch.no_grad():
            choice = net(x)[:, own].argmax(-1)
        found.append((own[choice] == y).double().mean().item())
    return found


def finished(runs):
    """Return the accuracies of each group of runs that came to the end, `(runs, T, T)`."""
    kept = {
        name: {seed: run for seed, run in group.items() if "accuracy" in run}
        for name, group in runs.items()
    }
    return {name: matrices(group) for name, group in kept.items() if group}


def figure(data, runs):
    """Draw accuracy after the last task over strengths, or over tasks."""
    found = finished(runs)
    drawn, ax = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    if data == "disjoint":
        over_strength(found, ax)
    else:
        accuracy_over_tasks(found, ax)
        ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn


def over_strength(found, ax):
    """Draw the mean accuracy after the last task, with two standard errors; bounds as lines."""
    points = {}
    for name, accuracy in found.items():
        method, _, strength = name.partition(", strength ")
        last = 100 * continual.average_accuracy(accuracy)[:, -1]
        error = 2 * last.std().item() / len(last) ** 0.5 if len(last) > 1 else 0.0
        points.setdefault(method, []).append((float(strength or 0), last.mean().item(), error))
    for (method, row), color in zip(points.items(), PALETTE, strict=False):
        strengths, means, errors = zip(*sorted(row), strict=True)
        if strengths == (0.0,):
            ax.axhline(means[0], color=color, linestyle="dashed", label=method)
        else:
            ax.errorbar(strengths, means, errors, color=color, marker="o", capsize=3, label=method)
    ax.set(xscale="log", xlabel="strength", ylabel="mean accuracy after both tasks (%)")
    ax.legend(frameon=False)


def table(runs):
    """Return a Markdown table: accuracy on each task after the last, and on average, in percent."""
    every = [run for group in runs.values() for run in group.values()]
    tasks, found = every[0]["tasks"], finished(runs)
    has_own = any("own classes" in run for run in every)
    shown = tasks if len(tasks) <= 5 else [tasks[0], tasks[-1]]
    names = [*shown, "mean", "forgetting"]
    if has_own:
        names += [f"{task}, own classes" for task in tasks]
    lines = [f"| method | runs | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for name, group in runs.items():
        diverged = [run["diverged"] for run in group.values() if "diverged" in run]
        if name not in found:
            cells = ["diverged"] + [""] * (len(names) - 1)
            lines.append(f"| {name} | {len(group)} | {' | '.join(cells)} |")
            continue
        last = found[name][:, -1]
        columns = [last[:, tasks.index(task)] for task in shown]
        columns += [last.mean(-1), continual.forgetting(found[name])[:, -1]]
        if has_own:
            own = [run["own classes"] for run in group.values() if "accuracy" in run]
            columns += torch.tensor(own).unbind(-1)
        count = f"{len(last)}" + (f" ({len(diverged)} diverged)" if diverged else "")
        lines.append(f"| {name} | {count} | {' | '.join(map(with_error, columns))} |")
    return "\n".join(lines)
