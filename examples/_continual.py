"""For the examples of continual learning: batches, what moves, and results filled in run by run.

They are vcl.py, online_laplace.py and task_sequences.py.
"""

import json
import math
import time

import matplotlib.pyplot as plt
import torch
from _data import images
from _record import environment, recorded
from torch import nn

from tyxe import continual
from tyxe.plotting import accuracy_over_tasks


def split_mnist(count=None):
    """Return training and test data of five tasks: which of two digits.

    Args:
        count: so many images of each task, the first; None for all.

    Returns:
        Two dictionaries: for a task such as `2/3`, pixels in [0, 1], `(n, 784)`, and labels
        `(n, 1)`, 1 for the odd digit.
    """
    parts = []
    for name in ("train", "test"):
        x, y = images("mnist", name)
        rows = {d: ((y == d) | (y == d + 1)).nonzero()[:count, 0] for d in range(0, 10, 2)}
        parts.append(
            {
                f"{d}/{d + 1}": (x[r].flatten(1), (y[r] % 2).float()[:, None])
                for d, r in rows.items()
            }
        )
    return parts


class Shuffled:
    """Batches that are views of one permutation, drawn anew for each epoch.

    Args:
        x: inputs, `(n, ...)`.
        y: targets, `(n, ...)`.
        batch_size: points in a batch.
    """

    def __init__(self, x, y, batch_size):
        self.x, self.y, self.batch_size = x, y, batch_size

    def __len__(self):
        return math.ceil(len(self.x) / self.batch_size)

    def __iter__(self):
        order = torch.randperm(len(self.x))
        x, y = self.x[order], self.y[order]
        return zip(x.split(self.batch_size), y.split(self.batch_size), strict=True)


def accuracy(bnn, x, y, draws):
    """Return the fraction of points that averaged predictions get right."""
    error, _ = bnn.evaluate(x, y, num_predictions=draws, reduction="mean")
    return 1 - error.item()


class Moves:
    """How far the hidden layer has moved in each task, by the posterior's means and scales.

    Args:
        bnn: its first layer is looked at: means, or plain weights, and their scales where there
            are any.
    """

    def __init__(self, bnn):
        self.bnn, self.rows = bnn, {}
        self.before = self._taken()

    def _taken(self):
        guide = self.bnn.net_guide
        if guide is None:
            weight = self.bnn.net[0].weight.detach().clone()
            return {"loc": weight, "scale": torch.zeros_like(weight)}
        posterior = guide.get_detached_distributions(["0.weight"])["0.weight"]
        return {"loc": posterior.mean, "scale": posterior.variance.sqrt()}

    def look(self, task, updates):
        """Compare with what was there after the task before."""
        now, before = self._taken(), self.before
        step = now["loc"] - before["loc"]
        relative = step.norm() / before["loc"].norm()
        self.rows[task] = {
            "updates": updates,
            "means moved": step.norm().item(),
            "of their norm": relative.item(),
            "median scale": now["scale"].median().item(),
            "scales below 0.1 %": 100 * (now["scale"] < 0.1).float().mean().item(),
        }
        if before["scale"].any():
            # The scales before a task are those of its prior, from the second task on.
            moved = (step / before["scale"]).abs()
            self.rows[task]["moved over 3 prior scales %"] = 100 * (moved > 3).float().mean().item()
        self.before = now

    def state_dict(self):
        return {"rows": self.rows, **self.before}

    def load_state_dict(self, state):
        self.rows, self.before = state["rows"], {k: state[k] for k in ("loc", "scale")}


def refitted(bnn, train, test, steps=200):
    """Return the test accuracy of a new output layer on the hidden units at the means."""
    net = bnn.to_module()
    with torch.no_grad():
        hidden, hidden_test = (net[:-1](x) for x, _ in (train, test))
    layer = nn.Linear(hidden.shape[1], 1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(layer(hidden), train[1]).backward()
        optimizer.step()
    with torch.no_grad():
        return ((layer(hidden_test) > 0) == test[1].bool()).float().mean().item()


def say(name):
    """Return a callback that prints what each task gave, and the seconds it took."""
    start = [time.perf_counter()]

    def callback(task, scores):
        seconds, start[0] = time.perf_counter() - start[0], time.perf_counter()
        each = " ".join(f"{100 * score:.1f}" for score in scores.tolist())
        print(f"{name}, after {task}: {each} ({seconds:.0f} s)", flush=True)

    return callback


class Results:
    """A JSON file of runs, by method, epochs and seed, to which runs are added.

    Args:
        folder: where the file is, and the checkpoints of unfinished runs.
        name: of file and figure.
        settings: those of all runs; a file with others is an error.
    """

    def __init__(self, folder, name, settings):
        self.folder, self.name, self.settings = folder, name, settings
        self.path = folder / f"{name}.json"
        self.content = self._read()

    def _read(self):
        if found := recorded(self.path, self.settings):
            return found
        return {**environment(None, ()), "settings": self.settings, "runs": {}}

    def fill(self, group, seed, run):
        """Make a run that is not there yet, and add it to the file.

        Args:
            group: runs that differ by the seed alone.
            seed: of the run.
            run: takes the path of a checkpoint; returns what is to be recorded.
        """
        if str(seed) in self.content["runs"].get(group, {}):
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        words = "".join(c if c.isalnum() else "-" for c in group)
        checkpoint = self.folder / f"{self.name}_{words}_{seed}.pt"
        start = time.process_time()
        found = run(checkpoint)
        found["cpu seconds"] = time.process_time() - start
        # Others may have written in the meantime.
        self.content = self._read()
        self.content["runs"].setdefault(group, {})[str(seed)] = found
        self.content["commands"] = environment(None, self.content["commands"])["commands"]
        self.path.write_text(json.dumps(self.content, indent=2) + "\n")
        checkpoint.unlink(missing_ok=True)

    def draw(self, figure):
        """Save the figure that a function draws of the runs."""
        figure(self.content["runs"]).savefig(self.folder / f"{self.name}.png", dpi=120)
        print(f"wrote {self.folder / self.name}.png and {self.path}")


def matrices(runs):
    """Return the accuracies of runs, `(runs, T, T)`, NaN above the diagonal."""
    rows = [run["accuracy"] for run in runs.values()]
    size = len(rows[0])
    return torch.tensor([[row + [math.nan] * (size - len(row)) for row in one] for one in rows])


def curves(runs):
    """Draw the runs of a file, a panel for each number of epochs."""
    lengths = sorted({int(name.split(", ")[1].split()[0]) for name in runs})
    size = (4.4 * len(lengths), 3.6)
    figure, panels = plt.subplots(
        1, len(lengths), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    for epochs, ax in zip(lengths, panels[0], strict=True):
        ending = f", {epochs} epochs"
        found = {
            name.removesuffix(ending): matrices(group)
            for name, group in runs.items()
            if name.endswith(ending)
        }
        accuracy_over_tasks(found, ax)
        ax.set_title(f"{epochs} epochs a task")
        ax.spines[["top", "right"]].set_visible(False)
    return figure


def table(runs):
    """Return two Markdown tables: accuracies in percent, and what moved in each task."""
    return "\n".join([*_accuracies(runs), "", *_moves(runs)])


def _accuracies(runs):
    """Yield the mean over tasks seen, two standard errors over runs, and where it was lost."""
    tasks = len(next(iter(next(iter(runs.values())).values()))["accuracy"])
    counts = [f"{t + 1} task{'s' if t else ''}" for t in range(tasks)]
    heads = ["method", "runs", *counts, "forgetting", "worst task"]
    yield from _header(heads)
    for name, group in runs.items():
        accuracy = matrices(group)
        columns = [
            *continual.average_accuracy(accuracy).unbind(-1),
            continual.forgetting(accuracy)[:, -1],
            accuracy[:, -1].amin(-1),
        ]
        yield f"| {name} | {len(group)} | {' | '.join(map(with_error, columns))} |"


def _moves(runs):
    """Yield, for each task, how far the hidden layer moved and what that did, mean over runs."""
    heads = ["method", "task", "updates", "means moved", "of their norm", "median scale"]
    yield from _header([*heads, "right after", "in the end", "head refitted"])
    for name, group in runs.items():
        accuracy = 100 * matrices(group).mean(0)
        for number, task in enumerate(next(iter(group.values()))["moves"]):
            rows = [run["moves"][task] for run in group.values()]
            moved = [sum(row[key] for row in rows) / len(rows) for key in heads[2:]]
            refitted = sum(100 * run["head refitted"][task] for run in group.values()) / len(rows)
            scores = [accuracy[number, number].item(), accuracy[-1, number].item(), refitted]
            cells = [f"{moved[0]:.0f}", *(f"{value:.2f}" for value in moved[1:3])]
            cells += [f"{moved[3]:.3f}", *(f"{score:.1f}" for score in scores)]
            yield f"| {name} | {task} | {' | '.join(cells)} |"


def _header(columns):
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]


def with_error(values):
    """Write the mean over runs and two standard errors of it, in percent."""
    mean = f"{100 * values.mean():.1f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {200 * values.std() / len(values) ** 0.5:.1f}"
