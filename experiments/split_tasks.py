"""Variational continual learning [T fig. 5.4]: the posterior of a task is the next one's prior.

`split_mnist`: five tasks, 0 or 1, 2 or 3, .., 8 or 9, one after the other, by a net of 784-200-1
ReLU units. Its hidden layer is shared and has a N(0, 1) prior before the first task; the output
layer is a head of each task's own, outside the prior, and starts at the same values for each. VCL
makes the posterior the prior of the next task, ML goes on training the same weights without one.
Fast scales have five times the rate of the means: as far in a fifth of the updates.

The second table has, for each task, how far the hidden layer moved (its means, relative to their
norm, and the median scale), the accuracy right after the task and in the end, and that of a new
output layer on the hidden units as they are in the end (head refitted).

`split_cifar`: a net of four convolutions and a dense layer, shared under a N(0, 1) prior, with a
head of each task's own outside it. In the paper the later tasks are ten classes of CIFAR-100 each;
here task t, from 2 to 6, has classes 2t - 4 and 2t - 3 of FashionMNIST and of notMNIST, both scaled
to 32 x 32 and in two random colours an image, and of SVHN; a fifth of all is tested. VCL 0.1 weighs
the KL by a tenth, as ten times as many images would: that is the paper's number of CIFAR-10's, and
twice that of its later tasks.
"""

from functools import cache, partial
from itertools import pairwise, product

import common
import runner
import tables
import torch
from resnet_ood import coloured
from task_sequences import by_label, finish, over_tasks, with_error
from torch import nn

import tyxe
from tyxe import continual

MOVES = {"updates": ".0f", "means moved": ".2f", "of their norm": ".2f", "median scale": ".3f"}


def tasks(count=None):
    """Return training and test data by task, such as `2/3`: `(n, 784)`, and 1 for the odd digit."""
    parts = {}, {}
    for part, split in zip(parts, ("train", "test"), strict=True):
        x, y = common.images("mnist", split)
        for d in range(0, 10, 2):
            rows = (y // 2 == d // 2).nonzero()[:count, 0]
            part[f"{d}/{d + 1}"] = x[rows].flatten(1), (y[rows] % 2).float()[:, None]
    return parts


class Moves:
    """How far the hidden layer has moved in each task: its means, or weights, and scales."""

    def __init__(self, bnn):
        self.bnn, self.rows = bnn, {}
        self.before = self._taken()

    def _taken(self):
        if (guide := self.bnn.net_guide) is None:
            weight = self.bnn.net[0].weight.detach().clone()
            return {"loc": weight, "scale": torch.zeros_like(weight)}
        posterior = guide.get_detached_distributions(["0.weight"])["0.weight"]
        return {"loc": posterior.mean, "scale": posterior.stddev}

    def look(self, task, updates):
        now, before = self._taken(), self.before
        step = now["loc"] - before["loc"]
        self.rows[task] = row = {
            "updates": updates,
            "means moved": step.norm().item(),
            "of their norm": (step.norm() / before["loc"].norm()).item(),
            "median scale": now["scale"].median().item(),
            "scales below 0.1 %": 100 * (now["scale"] < 0.1).float().mean().item(),
        }
        if before["scale"].any():
            # The scales before a task are those of its prior, from the second task on.
            far = (step / before["scale"]).abs() > 3
            row["moved over 3 prior scales %"] = 100 * far.float().mean().item()
        self.before = now

    def state_dict(self):
        return {"rows": self.rows, **self.before}

    def load_state_dict(self, state):
        self.rows, self.before = state["rows"], {k: state[k] for k in ("loc", "scale")}


def refitted(net, train, test):
    """Return the accuracy of a new output layer on the hidden units of a net."""
    hidden, hidden_test = (net[:-1](x).detach() for x, _ in (train, test))
    layer = nn.Linear(hidden.shape[1], 1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(layer(hidden), train[1]).backward()
        optimizer.step()
    return ((layer(hidden_test) > 0) == test[1].bool()).float().mean().item()


def model(s, net, method, head, likelihood):
    """Return the BNN of a method, whose head is not in its prior, and the heads of the tasks."""
    prior, guide = common.normal(hide_all=True), None
    if method != "ML":
        prior = common.normal(hide_modules=[head])
        guide = common.mean_field(net, init_scale=s.first_scale)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, guide)
    return bnn, continual.Heads(bnn, modules=[head])


def learn(s, bnn, pair, epochs, **how):
    batches = common.Batches(*pair, s.batch)
    bnn.likelihood.dataset_size = len(batches.x)
    adam = partial(torch.optim.Adam, lr=s.rate)
    with tyxe.poutine.local_reparameterization():
        bnn.fit(batches, adam, epochs, progress=False, **how)


def run(s, method, seed, label):
    train, test = tasks(s.images)
    torch.manual_seed(seed)
    net = common.mlp(784, s.hidden_units, 1)
    likelihood = tyxe.likelihoods.Bernoulli(len(train["0/1"][0]), event_dim=1)
    bnn, heads = model(s, net, method, "2", likelihood)
    multipliers, moves = {"scale": 5} if method == "VCL fast scales" else None, Moves(bnn)

    def fit(task):
        learn(s, bnn, train[task], s.epochs, lr_multipliers=multipliers)

    def update(task):
        moves.look(task, updates=s.epochs * -(-len(train[task][0]) // s.batch))
        continual.posterior_to_prior(bnn)

    def evaluate(task):
        how = {"num_predictions": s.draws, "reduction": "mean"}
        return 1 - bnn.evaluate(*test[task], **how)[0].item()

    parts = {"heads": heads, "parts": {"moves": moves}}
    loop = continual.TaskLoop(bnn, [*train], fit, evaluate, update, **parts)
    accuracy, net = finish(s, loop, "split-MNIST", label, seed), bnn.to_module()
    heads_refitted = {task: refitted(net, train[task], test[task]) for task in train}
    return {"accuracy": accuracy, "moves": moves.rows, "head refitted": heads_refitted}


def cells(s, found):
    for seed, method in product(s.seeds, s.methods):
        label = f"{method}, {s.epochs} epochs"
        yield (label, seed), partial(run, s, method, seed, label)


def table(record):
    (cells, found), first, second = by_label(record), [], []
    for label, accuracy in found.items():
        columns = [*continual.average_accuracy(accuracy).unbind(-1)]
        columns += [continual.forgetting(accuracy)[:, -1], accuracy[:, -1].amin(-1)]
        first.append([label, str(len(accuracy)), *map(with_error, columns)])
        mean = 100 * accuracy.mean(0)
        for number, task in enumerate(cells[label][0]["moves"]):
            rows = [cell["moves"][task] for cell in cells[label]]
            texts = [format(sum(r[c] for r in rows) / len(rows), f) for c, f in MOVES.items()]
            new = sum(100 * cell["head refitted"][task] for cell in cells[label]) / len(rows)
            scores = [mean[number, number].item(), mean[-1, number].item(), new]
            second.append([label, task, *texts, *(f"{score:.1f}" for score in scores)])
    counts = [f"{t + 1} task{'s' if t else ''}" for t in range(accuracy.shape[-1])]
    heads = ["method", "runs", *counts, "forgetting", "worst task"]
    others = ["method", "task", *MOVES, "right after", "in the end", "head refitted"]
    return f"{tables.markdown(heads, first)}\n\n{tables.markdown(others, second)}"


def figure(record):
    found = by_label(record)[1]
    lengths = sorted({int(label.split(", ")[1].split()[0]) for label in found})
    how = {"figsize": (4.4 * len(lengths), 3.6), "sharey": True, "squeeze": False}
    drawn, axes = tables.subplots(1, len(lengths), **how)
    for epochs, ax in zip(lengths, axes[0], strict=True):
        ending = f", {epochs} epochs"
        own = {n.removesuffix(ending): a for n, a in found.items() if n.endswith(ending)}
        tyxe.plotting.accuracy_over_tasks(own, ax)
        ax.set_title(f"{epochs} epochs a task")
        ax.spines[["top", "right"]].set_visible(False)
    return drawn


experiment = runner.Experiment("split_mnist", cells, table, figure, ("method", "seed"))

# --------------------------------------------------------------------------- split-CIFAR


def later_sets():
    """Return images `(n, 3, 32, 32)` and labels of the sets that later tasks have classes of."""
    grey = [common.images(name, "test") for name in ("fashion_mnist", "notmnist")]
    svhn = [common.images("svhn_subset", split) for split in ("train", "test")]
    with torch.random.fork_rng(devices=[]):  # a seed set before is that of the fit
        torch.manual_seed(0)
        found = [(coloured(x, 32), y) for x, y in grey]
    return *found, tuple(map(torch.cat, zip(*svhn, strict=True)))


@cache
def tasks_of_cifar(s):
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


class FourConvolutions(nn.Module):
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


def run_cifar(s, method, seed):
    sets = tasks_of_cifar(s)
    torch.manual_seed(seed)
    likelihood = tyxe.likelihoods.Categorical(1)
    bnn, heads = model(s, FourConvolutions(s.channels, s.units), method, "head", likelihood)
    how = {"lr_multipliers": {"scale": s.scale_multiplier}} if method != "ML" else {}
    how |= {"beta": 0.1} if method == "VCL 0.1" else {}

    def fit(task):
        learn(s, bnn, sets[task][0], s.epochs, **how)

    def evaluate(task):
        drawn = {"num_predictions": s.draws, "reduction": "mean", "batch_size": 500}
        return 1 - bnn.evaluate(*sets[task][1], **drawn)[0].item()

    loop = continual.TaskLoop(bnn, [*sets], fit, evaluate, heads=heads)
    return {"tasks": [*sets], "accuracy": finish(s, loop, "split-CIFAR", method, seed)}


def table_of_cifar(record):
    lines = []
    for label, accuracy in by_label(record)[1].items():
        each, last = accuracy.diagonal(dim1=-2, dim2=-1), accuracy[:, -1]
        for when, rows in (("right after", each), ("in the end", last)):
            lost = continual.forgetting(accuracy)[:, -1] if rows is last else torch.tensor([])
            columns = [*rows.unbind(-1), rows.mean(-1), lost]
            lines.append([label, when, str(len(rows)), *map(with_error, columns)])
    names = next(iter(record.cells.values()))["tasks"]
    return tables.markdown(["method", "", "runs", *names, "mean", "forgetting"], lines)


cells_of_cifar = runner.every(run_cifar, method="methods", seed="seeds")
split_cifar = runner.Experiment("split_cifar", cells_of_cifar, table_of_cifar, over_tasks)
