"""What keeps online Laplace from learning the newest of many tasks [T fig. 3.11]: one change each.

Thirty tasks of permuted MNIST are learned as in `task_sequences.py online`, by Kronecker factors
averaged over tasks, lambda 3. The next task is then learned several times from there: as the ones
before (as before), and each time with one change. Counted n times, its data weigh n times as much
against the prior, which for this task is a lambda of 3/n; fresh curvature takes that of all tasks
anew at the newest weights; Nesterov's descent has the rate 0.1 divided by the task's number. The
last column has the rise of the negative log-likelihoods of earlier tasks, nats a point, summed.
"""

from functools import partial

import common
import runner
import sequence_data
import tables
import torch
from torch.nn.functional import cross_entropy

import tyxe
from tyxe import continual

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


def fit(s, bnn, pair, longer=1, slower=1, kind=None, count=1):
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


def freshen(bnn, prior, part, tasks):
    """Make the prior of the next task that of curvatures of all tasks at the newest weights."""
    x, y = map(torch.cat, zip(*(part(task, 0) for task in tasks), strict=True))
    bnn.update_prior(prior)
    bnn.likelihood.dataset_size = len(x)
    bnn.fit_curvature(common.Batches(x, y, 1_000), progress=False)
    continual.posterior_to_prior(bnn)


def run(s, units, seed):
    net, (*earlier, newest), part = sequence_data.permuted(s, seed, units)
    options = tyxe.LaplaceOptions(curvature_weight=s.strength, accumulate="average")
    prior, likelihood = common.normal(), tyxe.likelihoods.Categorical(s.images)
    bnn = tyxe.LaplaceBNN(net, prior, likelihood, curvature="fisher", options=options)
    for task in earlier:
        fit(s, bnn, part(task, 0))
        continual.posterior_to_prior(bnn)
    before, rows = scores(bnn, part, earlier), {}
    for name, change in CHANGES.items():
        torch.manual_seed(seed)
        with continual.restored(bnn):
            how = dict(change)
            if how.pop("fresh", False):
                freshen(bnn, prior, part, earlier)
            fit(s, bnn, part(newest, 0), **how)
            after, own = scores(bnn, part, earlier), scores(bnn, part, [newest])
        accuracies = own[0], own[1], before[0], after[0]
        values = [*accuracies, after[2] - before[2]]
        rows[name] = dict(zip(FORMS, values, strict=True))
    return {"rows": {f"{units} units, {name}": row for name, row in rows.items()}}


cells = runner.every(run, units="units", seed="seeds")
experiment = runner.Experiment("next_task", cells, tables.of(FORMS))
