"""Tasks one after the other: online Laplace, synaptic intelligence, and their bounds [T 3.3.5].

  online    permuted MNIST [T fig. 3.11, 3.12]: each task another order of the pixels, the first its
            own, by a net of 784-100-100-10 ReLU units; Adam's rate falls twice by a factor of 10,
            and that of task t is divided by 1 + decay (t - 1), too
  permuted  synaptic intelligence and bounds on the same tasks, by Adam at a constant 1e-3
  disjoint  MNIST's digits 0 to 4, then 5 to 9, with one output layer of ten classes, over the
            strength of what holds the weights [T fig. 3.13]
  vision    MNIST, notMNIST (its test set, a fifth to test), FashionMNIST and CIFAR-10 by a
            convolutional net with an output layer for each task [T 3.3.5.3]; without SVHN

Methods: Laplace, whose precision after a task is the strength (lambda) times the task's curvature
plus the precision before, with Kronecker factors (kron; in `online` averaged over tasks, or with a
product for each, kron sum) or a diagonal (diag); penalties about each task's own weights (per-task
kron, EWC); the curvature of all tasks seen, anew at the newest weights (approximate); synaptic
intelligence (SI), whose strength is c on the mean loss, by Adam at 1e-3; and as bounds plain
training on (ML), on all tasks seen (joint), and of a net for each task (alone). `disjoint` and
`vision` take Nesterov's gradient descent with a rate that falls twice; tasks after the first start
lower the stronger they are held. Columns: accuracy after the last task, per cent, two standard
errors over seeds: of each task (or first and newest), mean, lowest, what was forgotten, and where
only the task's own classes are in question. Reduced: images, epochs, tasks and seeds.
"""

import math
import statistics
import sys
from functools import cache, partial
from typing import Any, NamedTuple

import common
import runner
import tables
import torch
from runner import setting, settings, which
from torch import nn

import tyxe
from tyxe import continual
from tyxe.plotting import accuracy_over_tasks
from tyxe.plotting.axes import PALETTE

# Of each method the structure, and how curvatures of tasks add up.
SUM = ("kron", "sum")
LAPLACE = {"kron": SUM, "diag": ("diag", "sum")}
LAPLACE |= {"per-task kron": ("kron", "per_task"), "EWC": ("diag", "per_task")}
ONLINE = LAPLACE | {"kron": ("kron", "average"), "kron sum": SUM, "approximate": SUM}
# Predictions by the mean of the weights.
MODE = {"num_predictions": 0, "predictive": "bnn", "reduction": "mean", "batch_size": 1_000}
LAMBDAS = [1.0, 10.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5, 1e6]


@settings
class Settings(runner.Settings):
    methods: list[str] = which([], "to run (default: all that have strengths)")
    strengths: list[float] = which([], "in place of those of each method")
    seeds: list[int] = which([0], "of tasks and fits")
    batch: int = setting(250, "images in a batch")
    prior_scale: float = setting(1.0, "of all weights before the first task")


@settings
class Permuted(Settings):
    tasks: int = setting(10, "number", published=50, smoke=2)
    images: int | None = setting(10_000, "of a task, to train", published=50_000, smoke=60)
    test_images: int | None = setting(2_000, "of a task", published=None, smoke=20)
    epochs: int = setting(10, "of a task", published=20, smoke=1)


@settings
class Online(Permuted):
    decay: float = which(0.0, "by which rates of later tasks fall")
    rate: float = setting(1e-2, "of Adam")


@settings
class Disjoint(Settings):
    images: int | None = setting(None, "of a task, to train", smoke=60)
    epochs: int = setting(9, "of a task", published=24, smoke=1)


@settings
class Vision(Settings):
    batch: int = setting(50, "images in a batch")
    rate: float = setting(0.03, "of the first task")
    images: int | None = setting(2_000, "of a task, to train", published=None, smoke=60)
    test_images: int | None = setting(1_000, "of a task", published=None, smoke=60)
    epochs: int = setting(9, "of a task", published=20, smoke=1)


def mnist(s, wanted=lambda y: y >= 0):
    found = []
    for split, count in (("train", s.images), ("test", getattr(s, "test_images", None))):
        x, y = common.images("mnist", split)
        rows = wanted(y).nonzero()[:count, 0]
        found.append((x[rows].flatten(1), y[rows]))
    return found


def permuted(s, seed):
    own, sets, net = torch.Generator().manual_seed(seed), mnist(s), common.mlp(784, 100, 100, 10)
    orders = {str(1 + t): torch.randperm(784, generator=own) for t in range(s.tasks)}
    orders["1"] = torch.arange(784)
    return net, [*orders], lambda task, part: (sets[part][0][:, orders[task]], sets[part][1])


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


class Sequence(NamedTuple):
    """What differs between sequences.

    `problem(s, seed)` returns a net, the names of tasks, and `part(task, index)`: the data to train
    (0) and to test (1); of each method the strengths, and what divides the strength where that
    divides the rates of later tasks; options of Laplace; names of output layers.
    """

    problem: Any
    strengths: dict[str, list]
    laplace: dict[str, Any] = LAPLACE
    slower: Any = None
    head: Any = None


def optimizer(s, sequence, parameters, method, strength, number):
    """Return the optimiser of a task, and the epochs after which its rate falls."""
    third = -(-s.epochs // 3)
    if isinstance(s, Online):
        return torch.optim.Adam(parameters, lr=s.rate / (1 + s.decay * number)), third
    if isinstance(s, Permuted) or method == "SI":
        return torch.optim.Adam(parameters, lr=1e-3), s.epochs
    slower = max(1, number * (strength or 0) / sequence.slower.get(method, 1))
    rate = getattr(s, "rate", 0.1) / slower
    return torch.optim.SGD(parameters, rate, momentum=0.9, nesterov=True), third


def finish(s, loop, *names):
    """Run a loop of tasks, from its checkpoint if a run was stopped; return the accuracies."""
    words = "".join(c if c.isalnum() else "-" for c in "_".join(map(str, names)))
    checkpoint = s.out / "checkpoints" / f"{words}.pt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    loop.run(checkpoint, lambda task, found: print(*names, task, found.mean().item(), flush=True))
    checkpoint.unlink()
    return [row[: t + 1] for t, row in enumerate(loop.accuracy.tolist())]


def learn(s, sequence, method, strength, seed, label):
    """Learn all tasks; return the accuracies, or say that the fit diverged."""
    torch.manual_seed(seed)
    net, tasks, part = sequence.problem(s, seed)
    head, likelihood, prior = sequence.head, tyxe.likelihoods.Categorical(1), None
    if method in sequence.laplace:
        structure, accumulate = sequence.laplace[method]
        options = tyxe.LaplaceOptions(curvature_weight=strength, accumulate=accumulate)
        how = {"structure": structure, "curvature": "fisher", "options": options}
        prior = common.normal(s.prior_scale, hide_modules=head)
        bnn = tyxe.LaplaceBNN(net, prior, likelihood, **how)
    else:
        bnn = tyxe.VariationalBNN(net, common.normal(hide_all=True), likelihood)
    heads, parts = continual.Heads(bnn, head) if head else None, {}
    if method == "SI":
        parts["intelligence"] = continual.SynapticIntelligence(bnn, strength, heads=heads)
    fresh = {name: value.clone() for name, value in bnn.net.state_dict().items()}

    def loader(*names):
        pairs = zip(*(part(name, 0) for name in names), strict=True)
        return common.Batches(*map(torch.cat, pairs), s.batch)

    def fit(task):
        number = tasks.index(task)
        if method == "alone":
            bnn.net.load_state_dict(fresh)
        batches = loader(*(tasks[: number + 1] if method == "joint" else [task]))
        bnn.likelihood.dataset_size = len(batches.x)
        descent, every = optimizer(s, sequence, bnn.parameters(), method, strength, number)
        if method == "SI":
            descent = parts["intelligence"].watch(descent)
        schedule = torch.optim.lr_scheduler.StepLR(descent, every, 0.1)
        bnn.fit(batches, descent, s.epochs, lambda *_: schedule.step(), progress=False)

    def update(task):
        if method == "SI":
            parts["intelligence"].update()
        if method == "approximate":
            batches, size = loader(*tasks[: tasks.index(task) + 1]), bnn.likelihood.dataset_size
            bnn.update_prior(prior)
            bnn.likelihood.dataset_size = len(batches.x)
            bnn.fit_curvature(batches, progress=False)
            bnn.likelihood.dataset_size = size
        continual.posterior_to_prior(bnn)

    def evaluate(task):
        return 1 - bnn.evaluate(*part(task, 1), **MODE)[0].item()

    loop = continual.TaskLoop(bnn, tasks, fit, evaluate, update, heads=heads, parts=parts)
    try:
        accuracy = finish(s, loop, type(s).__name__, label, seed)
    except RuntimeError as error:
        if "finite" not in str(error):
            raise
        return {"tasks": tasks, "diverged": tasks[loop.done]}
    if method == "alone":  # of its own task, whichever comes after
        accuracy = [[row[-1] for row in accuracy[: t + 1]] for t in range(len(tasks))]
    all_tasks, net = tasks if isinstance(s, Disjoint) else [], bnn.to_module()
    own = {"own classes": [own_classes(net, *part(task, 1)) for task in all_tasks]}
    return {"tasks": tasks, "accuracy": accuracy} | (own if all_tasks else {})


@torch.no_grad()
def own_classes(net, x, y):
    own = y.unique()
    return (own[net(x)[:, own].argmax(-1)] == y).double().mean().item()


def by_label(record):
    """Return the cells of each method and strength, and the accuracies of those that ended.

    The latter are `(runs, T, T)`, with NaN above the diagonal.
    """
    cells, found = tables.rows(record.cells), {}
    for label, own in cells.items():
        ended = [cell["accuracy"] for cell in own if "accuracy" in cell]
        runs = [[row + [math.nan] * (len(rows) - len(row)) for row in rows] for rows in ended]
        found |= {label: torch.tensor(runs)} if runs else {}
    return cells, found


def with_error(values):
    error = f" ± {200 * values.std() / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{100 * values.mean():.1f}{error}"


def table(record):
    (cells, found), lines = by_label(record), []
    tasks = next(iter(record.cells.values()))["tasks"]
    shown = tasks if len(tasks) <= 5 else [tasks[0], tasks[-1]]
    has_own = "own classes" in str(record.cells)
    names = [*shown, "mean", "forgetting"]
    names += [f"{task}, own classes" for task in tasks] if has_own else []
    for label, own in cells.items():
        if label not in found:
            lines.append([label, str(len(own)), "diverged", *[""] * (len(names) - 1)])
            continue
        last = found[label][:, -1]
        columns = [last[:, tasks.index(task)] for task in shown]
        columns += [last.mean(-1), continual.forgetting(found[label])[:, -1]]
        if has_own:
            columns += torch.tensor([c["own classes"] for c in own if "accuracy" in c]).unbind(-1)
        lost = f" ({len(own) - len(last)} diverged)" if len(last) < len(own) else ""
        lines.append([label, f"{len(last)}{lost}", *map(with_error, columns)])
    return tables.markdown(["method", "runs", *names], lines)


def online_table(record):
    (cells, found), lines = by_label(record), []
    for label, accuracy in found.items():
        last, own = accuracy[:, -1], cells[label]
        columns = [last.mean(-1), last.amin(-1), last[:, 0], last[:, -1]]
        minutes = sum(cell["CPU seconds"] for cell in own) / len(own) / 60
        lines.append([label, str(len(last)), *map(with_error, columns), f"{minutes:.1f}"])
    names = ["mean", "lowest", "first task", "newest", "CPU minutes"]
    return tables.markdown(["method", "runs", *names], lines)


def over_tasks(record):
    drawn, ax = tables.subplots(figsize=(6.4, 4))
    accuracy_over_tasks(by_label(record)[1], ax)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn


def over_strength(record):
    """Draw the mean accuracy after the last task, with two standard errors; bounds as lines."""
    points, (drawn, ax) = {}, tables.subplots(figsize=(6.4, 4.2))
    for name, accuracy in by_label(record)[1].items():
        method, _, strength = name.partition(", strength ")
        last = 100 * continual.average_accuracy(accuracy)[:, -1]
        points.setdefault(method, {})[float(strength or 0)] = last.tolist()
    for (method, row), color in zip(points.items(), PALETTE, strict=False):
        look, strengths = {"color": color, "label": method}, sorted(row)
        if strengths == [0.0]:
            ax.axhline(statistics.fmean(row[0.0]), linestyle="dashed", **look)
        else:
            values = [row[strength] for strength in strengths]
            tables.errorbar(ax, strengths, values, 2, marker="o", capsize=3, **look)
    ax.spines[["top", "right"]].set_visible(False)
    ax.set(xscale="log", xlabel="strength", ylabel="mean accuracy after both tasks (%)")
    ax.legend(frameon=False)
    return drawn


def of(name, kind, sequence, table=table, figure=over_tasks):
    strengths = sequence.strengths

    def cells(s, found):
        if without := [m for m in s.methods if m not in strengths and not s.strengths]:
            has = f"methods with strengths are {', '.join(strengths)}"
            sys.exit(f"there are no strengths for {', '.join(without)}: give --strengths; {has}")
        for seed in s.seeds:
            for method in s.methods or strengths:
                for strength in s.strengths or strengths[method][: 1 if s.smoke_test else None]:
                    symbol = "lambda" if kind is Online else "strength"
                    label = method if strength is None else f"{method}, {symbol} {strength:g}"
                    label += f", decay {s.decay:g}" if getattr(s, "decay", 0) else ""
                    yield (label, seed), partial(learn, s, sequence, method, strength, seed, label)

    by, facts = ("method", "seed"), {"strengths": strengths}
    return runner.Experiment(name, kind, cells, by, table, figure, facts)


BOUNDS = {"ML": [None], "joint": [None]}
THREE = {method: [1.0, 3.0, 10.0] for method in ("kron", "diag", "EWC")}
MANY = {"kron": LAMBDAS, "diag": LAMBDAS, "SI": [0.1, 1.0, 10.0, 100.0, 1e3, 1e4, 1e5]} | BOUNDS
FEW = {"kron": [1.0, 10.0], "diag": [1.0, 10.0], "per-task kron": [1.0], "EWC": [1.0]}
FEW |= {"SI": [0.1, 1.0], "ML": [None], "alone": [None]}
# Of convolutions, whose weights are in use at each position, the curvature is larger.
SLOWER, CONVOLUTIONS = {"kron": 10, "diag": 100}, {"diag": 10, "EWC": 10}
SI = Sequence(permuted, {"SI": [0.01, 0.03, 0.1, 0.3, 1.0]} | BOUNDS)
TWO = Sequence(disjoint, MANY, slower=SLOWER)
FOUR = Sequence(vision, FEW, slower=CONVOLUTIONS, head=["head"])
MANY_TASKS = "online_laplace_{0.tasks}", Online, Sequence(permuted, THREE, ONLINE)
experiments = {
    "online": of(*MANY_TASKS, online_table),
    "permuted": of("continual_permuted", Permuted, SI),
    "disjoint": of("continual_disjoint", Disjoint, TWO, figure=over_strength),
    "vision": of("continual_vision", Vision, FOUR),
}

if __name__ == "__main__":
    runner.choose(experiments)
