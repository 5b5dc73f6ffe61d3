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
plus the precision before, with Kronecker factors (kron; in `online` averaged over tasks) or a
diagonal (diag); penalties about each task's own weights (per-task kron, EWC); the curvature of all
tasks seen, anew at the newest weights (approximate); synaptic intelligence (SI), whose strength is
c on the mean loss, by Adam at 1e-3; and as bounds plain training on (ML), on all tasks seen
(joint), on all tasks from the start (at once), and of a net for each task (alone). Remedies in
`disjoint`: the curvature by labels that are of all classes alike for a share of images (kron flat
labels), and training with the outputs of the task's own classes alone (kron own classes).
`disjoint` and `vision` take Nesterov's gradient descent with a rate that falls twice; tasks after
the first start lower the stronger they are held.

`next_task`: what keeps `online` from learning the newest of many tasks. Thirty are learned as
there, by Kronecker factors averaged over tasks, lambda 3. The next task is then learned several
times from there: as the ones before (as before), and each time with one change. Counted n times,
its data weigh n times as much against the prior, which for this task is a lambda of 3/n; fresh
curvature takes that of all tasks anew at the newest weights; Nesterov's descent has the rate 0.1
divided by the task's number. The last column has the rise of the negative log-likelihoods of
earlier tasks, nats a point, summed.
"""

import copy
import math
import statistics
import sys
from functools import partial
from typing import Any, NamedTuple

import common
import runner
import sequence_data
import tables
import torch
from sequence_data import AtOnce, disjoint, permuted, vision
from torch.nn.functional import cross_entropy

import tyxe
from tyxe import continual
from tyxe.plotting import accuracy_over_tasks
from tyxe.plotting.axes import PALETTE

# Of each method the structure, and how curvatures of tasks add up.
SUM = ("kron", "sum")
LAPLACE = {"kron": SUM, "diag": ("diag", "sum")}
LAPLACE |= {"per-task kron": ("kron", "per_task"), "EWC": ("diag", "per_task")}
ONLINE = LAPLACE | {"kron": ("kron", "average"), "approximate": SUM}
FLAT = 0.1  # the share of images whose labels are of all classes alike, in that curvature
# Predictions by the mean of the weights.
MODE = {"num_predictions": 0, "predictive": "bnn", "reduction": "mean", "batch_size": 1_000}
ONLINE_RUN = "task_sequences online"


class Sequence(NamedTuple):
    """What differs between sequences.

    `problem(s, seed)` returns a net, the names of tasks, and `part(task, index)`: the data to train
    (0) and to test (1); options of Laplace; of methods what divides the strength where that divides
    the rates of later tasks; names of output layers. Strengths are in settings.json.
    """

    problem: Any
    laplace: dict[str, Any] = LAPLACE
    slower: Any = None
    head: Any = None


def optimizer(s, sequence, parameters, method, strength, number):
    """Return the optimiser of a task, and the epochs after which its rate falls."""
    third = -(-s.epochs // 3)
    if s.command == ONLINE_RUN:
        return torch.optim.Adam(parameters, lr=s.rate / (1 + s.decay * number)), third
    if sequence.problem is permuted or method == "SI":
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


def model(s, sequence, net, method, strength):
    """Return the BNN of a method, and its prior before the first task, if it has one."""
    head, likelihood = sequence.head, tyxe.likelihoods.Categorical(1)
    if method not in sequence.laplace:
        return tyxe.VariationalBNN(net, common.normal(hide_all=True), likelihood), None
    structure, accumulate = sequence.laplace[method]
    options = tyxe.LaplaceOptions(curvature_weight=strength, accumulate=accumulate)
    how = {"structure": structure, "curvature": "fisher", "options": options}
    prior = common.normal(s.prior_scale, hide_modules=head)
    return tyxe.LaplaceBNN(net, prior, likelihood, **how), prior


def curvature_anew(bnn, prior, batches):
    """Take the curvature of all these data at the newest weights, under the first prior."""
    size = bnn.likelihood.dataset_size
    bnn.update_prior(prior)
    bnn.likelihood.dataset_size = len(batches.x)
    bnn.fit_curvature(batches, progress=False)
    bnn.likelihood.dataset_size = size


def learn(s, sequence, method, strength, seed, label):
    """Learn all tasks; return the accuracies, or say that the fit diverged."""
    torch.manual_seed(seed)
    net, tasks, part = sequence.problem(s, seed)
    net = sequence_data.OwnClasses(net) if method == "kron own classes" else net
    bnn, prior = model(s, sequence, net, method, strength)
    heads = continual.Heads(bnn, sequence.head) if sequence.head else None
    parts = {}
    if method == "SI":
        parts["intelligence"] = continual.SynapticIntelligence(bnn, strength, heads=heads)
    fresh = {name: value.clone() for name, value in bnn.net.state_dict().items()}

    def loader(*names):
        pairs = zip(*(part(name, 0) for name in names), strict=True)
        return common.Batches(*map(torch.cat, pairs), s.batch)

    def fit(task):
        number = tasks.index(task)
        if method == "at once":
            if task != tasks[-1]:
                return  # until then the net is untrained
            batches = AtOnce(part, tasks, s.batch)
            size = batches.points
        else:
            batches = loader(*(tasks[: number + 1] if method == "joint" else [task]))
            size = len(batches.x)
        if method == "alone":
            bnn.net.load_state_dict(fresh)
        bnn.likelihood.dataset_size = size
        if method == "kron own classes":
            bnn.net.classes = batches.y.unique()
        descent, every = optimizer(s, sequence, bnn.parameters(), method, strength, number)
        if method == "SI":
            descent = parts["intelligence"].watch(descent)
        schedule = torch.optim.lr_scheduler.StepLR(descent, every, 0.1)
        bnn.fit(batches, descent, s.epochs, lambda *_: schedule.step(), progress=False)

    def update(task):
        if method == "SI":
            parts["intelligence"].update()
        if method == "approximate":
            curvature_anew(bnn, prior, loader(*tasks[: tasks.index(task) + 1]))
        if method == "kron flat labels":
            sequence_data.retake_curvature(bnn, loader(task), FLAT)
        if method == "kron own classes":
            bnn.net.classes = None
        continual.posterior_to_prior(bnn)

    def evaluate(task):
        return 1 - bnn.evaluate(*part(task, 1), **MODE)[0].item()

    loop = continual.TaskLoop(bnn, tasks, fit, evaluate, update, heads=heads, parts=parts)
    try:
        accuracy = finish(s, loop, s.command.split()[-1], label, seed)
    except RuntimeError as error:
        if "finite" not in str(error):
            raise
        return {"tasks": tasks, "diverged": tasks[loop.done]}
    if method == "alone":  # of its own task, whichever comes after
        accuracy = [[row[-1] for row in accuracy[: t + 1]] for t in range(len(tasks))]
    balance = (
        sequence_data.balance(bnn.to_module(), tasks, part) if sequence.problem is disjoint else {}
    )
    return {"tasks": tasks, "accuracy": accuracy} | balance


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
    if not values.numel():
        return ""
    error = f" ± {200 * values.std() / len(values) ** 0.5:.1f}" if len(values) > 1 else ""
    return f"{100 * values.mean():.1f}{error}"


def table(record):
    (cells, found), lines = by_label(record), []
    tasks = next(iter(record.cells.values()))["tasks"]
    shown = tasks if len(tasks) <= 5 else [tasks[0], tasks[-1]]
    has_own = "own classes" in str(record.cells)
    names = [*shown, "mean", "forgetting"]
    names += [*(f"{task}, own classes" for task in tasks), "mean with offset"] if has_own else []
    for label, own in cells.items():
        if label not in found:
            lines.append([label, str(len(own)), "diverged", *[""] * (len(names) - 1)])
            continue
        last = found[label][:, -1]
        columns = [last[:, tasks.index(task)] for task in shown]
        columns += [last.mean(-1), continual.forgetting(found[label])[:, -1]]
        if has_own:
            columns += torch.tensor([c["own classes"] for c in own if "accuracy" in c]).unbind(-1)
            offsets = [c["with offset"] for c in own if "with offset" in c]  # not in older cells
            columns.append(torch.tensor(offsets).view(-1, len(tasks)).mean(-1))
        lost = f" ({len(own) - len(last)} diverged)" if len(last) < len(own) else ""
        lines.append([label, f"{len(last)}{lost}", *map(with_error, columns)])
    return tables.markdown(["method", "runs", *names], lines)


def online_table(record):
    (cells, found), lines = by_label(record), []
    for label, accuracy in found.items():
        last, own = accuracy[:, -1], cells[label]
        each = accuracy.diagonal(dim1=-2, dim2=-1)
        columns = [last.mean(-1), last.amin(-1), last[:, 0], last[:, -1], each.mean(-1)]
        minutes = sum(cell["CPU seconds"] for cell in own) / len(own) / 60
        lines.append([label, str(len(last)), *map(with_error, columns), f"{minutes:.1f}"])
    names = ["mean", "lowest", "first task", "newest", "right after", "CPU minutes"]
    return tables.markdown(["method", "runs", *names], lines)


def over_tasks(record):
    drawn, ax = tables.subplots(figsize=(6.4, 4))
    curves = by_label(record)[1]
    # What is fitted after the last task alone.
    bounds = {name: curves.pop(name) for name in [*curves] if name.startswith("at once")}
    if curves:
        accuracy_over_tasks(curves, ax)
    for name, accuracy in bounds.items():
        last = 100 * continual.average_accuracy(accuracy)[:, -1].mean().item()
        ax.axhline(last, color="0.5", linestyle="dashed", label=name)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn


def over_strength(record):
    """Draw the mean accuracy after the last task, with two standard errors; bounds as lines."""
    points, (drawn, ax) = {}, tables.subplots(figsize=(7.4, 4.2))
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
    ax.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return drawn


def of(word, sequence, table=table, figure=over_tasks, **how):
    command = f"task_sequences {word}"
    strengths = runner.SETTINGS[command]["facts"]["strengths"]

    def cells(s, found):
        if without := [m for m in s.methods if m not in strengths and not s.strengths]:
            has = f"methods with strengths are {', '.join(strengths)}"
            sys.exit(f"there are no strengths for {', '.join(without)}: give --strengths; {has}")
        for seed in s.seeds:
            for method in s.methods or strengths:
                own = strengths.get(method, s.strengths)
                own = own if own == [None] else s.strengths or own[: 1 if s.smoke_test else None]
                for strength in own:
                    symbol = "lambda" if s.command == ONLINE_RUN else "strength"
                    label = method if strength is None else f"{method}, {symbol} {strength:g}"
                    label += f", decay {s.decay:g}" if getattr(s, "decay", 0) else ""
                    yield (label, seed), partial(learn, s, sequence, method, strength, seed, label)

    return runner.Experiment(command, cells, table, figure, ("method", "seed"), **how)


# Of labels that the net holds to be improbable the curvature is larger, and of convolutions, whose
# weights are in use at each position.
REMEDIES = {"kron flat labels": 1, "kron own classes": 10}
SLOWER = {"kron": 10, "diag": 100} | REMEDIES
CONVOLUTIONS = {"diag": 10, "EWC": 10}
TWO = Sequence(disjoint, LAPLACE | dict.fromkeys(REMEDIES, SUM), SLOWER)
FOUR = Sequence(vision, slower=CONVOLUTIONS, head=["head"])
MANY_TASKS = Sequence(permuted, ONLINE)
experiments = {
    "online": of("online", MANY_TASKS, online_table, name="online_laplace_{0.tasks}"),
    "permuted": of("permuted", Sequence(permuted), name="continual_permuted"),
    "disjoint": of("disjoint", TWO, figure=over_strength, name="continual_disjoint"),
    "vision": of("vision", FOUR, name="continual_vision"),
}

# --------------------------------------------------------------------------- the newest of many

CHANGES = {
    "as before": {},
    "5 times the epochs": {"longer": 5},
    "a third of the rate": {"slower": 3},
    "Nesterov's descent": {"kind": partial(torch.optim.SGD, momentum=0.9, nesterov=True)},
    "fresh curvature": {"fresh": True},
    "counted 3 times": {"count": 3},
    "counted 10 times": {"count": 10},
    "counted 30 times": {"count": 30},
}
FORMS = {"newest": ".1f", "its training": ".1f", "earlier, before": ".1f", "earlier": ".1f"}
FORMS["rise of their NLL"] = ".2f"


def fit_newest(s, bnn, pair, longer=1, slower=1, kind=None, count=1):
    batches, epochs = common.Batches(*pair, s.batch), longer * s.epochs
    bnn.likelihood.dataset_size, bnn.temperature = len(batches.x), 1 / count
    rate = s.rate / slower if kind is None else 0.1 / s.tasks
    descent = (kind or torch.optim.Adam)(bnn.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.StepLR(descent, -(-epochs // 3), 0.1)
    bnn.fit(batches, descent, epochs, lambda *_: schedule.step(), progress=False)


@torch.no_grad()
def scores(bnn, part, tasks):
    """Return the mean accuracies on test and training data, and the NLL on the latter, summed."""
    net, found = bnn.to_module(), []
    for task in tasks:
        (x, y), (x_test, y_test) = part(task, 0), part(task, 1)
        outputs, right = net(x), net(x_test).argmax(-1) == y_test
        nll = cross_entropy(outputs, y)
        found.append([right.float().mean(), (outputs.argmax(-1) == y).float().mean(), nll])
    test, train, nll = torch.tensor(found).unbind(-1)
    return 100 * test.mean().item(), 100 * train.mean().item(), nll.sum().item()


def run_newest(s, units, seed):
    net, (*earlier, newest), part = permuted(s, seed, units)
    options = tyxe.LaplaceOptions(curvature_weight=s.strength, accumulate="average")
    prior, likelihood = common.normal(), tyxe.likelihoods.Categorical(s.images)
    bnn = tyxe.LaplaceBNN(net, prior, likelihood, curvature="fisher", options=options)
    for task in earlier:
        fit_newest(s, bnn, part(task, 0))
        continual.posterior_to_prior(bnn)
    before, rows = scores(bnn, part, earlier), {}
    for name, change in CHANGES.items():
        torch.manual_seed(seed)
        changed, how = copy.deepcopy(bnn), dict(change)
        if how.pop("fresh", False):
            pairs = zip(*(part(task, 0) for task in earlier), strict=True)
            curvature_anew(changed, prior, common.Batches(*map(torch.cat, pairs), 1_000))
            continual.posterior_to_prior(changed)
        fit_newest(s, changed, part(newest, 0), **how)
        after, own = scores(changed, part, earlier), scores(changed, part, [newest])
        accuracies = own[0], own[1], before[0], after[0]
        values = [*accuracies, after[2] - before[2]]
        rows[name] = dict(zip(FORMS, values, strict=True))
    return {"rows": {f"{units} units, {name}": row for name, row in rows.items()}}


cells = runner.every(run_newest, units="units", seed="seeds")
next_task = runner.Experiment("next_task", cells, tables.of(FORMS))
