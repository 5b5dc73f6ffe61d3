"""Costs of the baselines, each beside what it is measured by."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from _harness import Case, Contestant, Numbers, run
from _nets import images, mlp, one_block, resnet18, vectors
from prediction import plain_forwards
from torch import Tensor, nn
from training_step import make_bnn

import tyxe
from tyxe.bnn.base import set_train_mode
from tyxe.bnn.chains import RunOptions, make_run
from tyxe.bnn.potential import BatchPotential, Potential
from tyxe.bnn.starts import starts_of
from tyxe.bnn.training import FitOptions, Trainer

ADAM = functools.partial(torch.optim.Adam, lr=1e-3)
IVON = functools.partial(tyxe.optim.IVON, lr=1e-2)
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1))
NONE = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)

Data = tuple[Tensor, Tensor]


def by_likelihood(net: nn.Module, num_points: int) -> tyxe.VariationalBNN:
    """Return the net to be trained by maximum likelihood."""
    return tyxe.VariationalBNN(net, NONE, tyxe.likelihoods.Categorical(num_points))


def target(text: str) -> Callable[[object], dict[str, str]]:
    """Return the finding that says what the case is to reach."""
    return lambda _: {"target": text}


# --------------------------------------------------------------------------- IVON


def steps_of(bnn: tyxe.VariationalBNN, optim: object, data: Data) -> Callable[[], None]:
    """Return the step that `bnn.fit` makes for each batch after the first."""
    bnn.train()
    trainer = Trainer(bnn, optim, FitOptions())

    def step() -> None:
        with pyro.validation_enabled(False):
            trainer.step([data], 1.0)

    return step


def ivon(make_net: Callable[[], nn.Module], data: Data, name: str, title: str, rounds: int) -> Case:
    """Return a step of IVON, and one of Adam without and with a posterior."""
    size = 50_000
    found = [
        Contestant(
            "Adam, no posterior", steps_of(by_likelihood(make_net(), size), ADAM, data), "plain"
        ),
        Contestant("Adam, AutoNormal", steps_of(make_bnn(make_net(), size), ADAM, data), "ours"),
        Contestant("IVON, AutoNormal", steps_of(make_bnn(make_net(), size), IVON, data), "ours"),
    ]
    findings = target("IVON at most 1.15 of Adam without a posterior")
    return Case(name, title, "step", rounds, found, findings=findings)


def ivon_mlp(smoke_test: bool) -> Case:
    """Return the MLP's case."""
    data = vectors(8 if smoke_test else 128, smoke_test)
    title = "IVON, MLP 784-400-400-10, batch 128"
    return ivon(lambda: mlp(smoke_test), data, "ivon-mlp", title, 60)


def ivon_resnet(smoke_test: bool) -> Case:
    """Return the ResNet's case."""
    data = images(2 if smoke_test else 32, smoke_test)
    title = "IVON, ResNet-18 on 32 x 32 images, batch 32"
    return ivon(lambda: resnet18(smoke_test), data, "ivon-resnet18", title, 9)


# --------------------------------------------------------------------------- stochastic gradients


def steps_of_chain(net: nn.Module, size: int, data: Data) -> Callable[[], None]:
    """Return the step that `bnn.fit` makes for each batch, of a chain that keeps no sample."""
    bnn = tyxe.MCMC_BNN(net, PRIOR, tyxe.likelihoods.Categorical(size), tyxe.samplers.SGHMC(1e-3))
    set_train_mode(bnn)
    potential = Potential(bnn, *data, 1.0)
    starts = starts_of(potential, "net", 1, progress=False)
    estimates = BatchPotential(potential, starts, [data], None)
    kernel = bnn.kernel.for_points(size)
    run = make_run(kernel, potential, starts, 1, 1_000_000, RunOptions(), estimates)
    steps = run.steps()

    def step() -> None:
        next(steps)

    return step


def sghmc(net: nn.Module, data: Data, name: str, title: str, rounds: int) -> Case:
    """Return a step of SGHMC, and one of SGD with momentum."""
    size = 50_000
    sgd = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    found = [
        Contestant("SGD", steps_of(by_likelihood(net, size), sgd, data), "plain"),
        Contestant("SGHMC", steps_of_chain(net, size, data), "ours"),
    ]
    findings = target("SGHMC at most 1.2 of SGD with momentum")
    return Case(name, title, "step", rounds, found, findings=findings)


def sghmc_mlp(smoke_test: bool) -> Case:
    """Return the MLP's case."""
    data = vectors(8 if smoke_test else 128, smoke_test)
    return sghmc(mlp(smoke_test), data, "sghmc-mlp", "SGHMC, MLP 784-400-400-10, batch 128", 60)


def sghmc_resnet(smoke_test: bool) -> Case:
    """Return the ResNet's case."""
    data = images(2 if smoke_test else 32, smoke_test)
    title = "SGHMC, ResNet-18 on 32 x 32 images, batch 32"
    return sghmc(resnet18(smoke_test), data, "sghmc-resnet18", title, 15)


# --------------------------------------------------------------------------- averages, ensembles


def swag(smoke_test: bool) -> Case:
    """Return a snapshot of SWAG, and an epoch of the training that it is taken from."""
    width, rows = (2, 2) if smoke_test else (16, 64)
    batches = [images(rows, smoke_test) for _ in range(2 if smoke_test else 20)]
    net, size = one_block(width), rows * len(batches)
    plain = by_likelihood(net, size)
    bnn = tyxe.SWAG_BNN(net, PRIOR, tyxe.likelihoods.Categorical(size), rank=20)
    sgd = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)

    def epoch() -> None:
        plain.fit(batches, sgd, 1)

    def snapshot() -> None:
        bnn.collect(net)

    found = [Contestant("epoch of SGD", epoch, "plain"), Contestant("snapshot", snapshot, "ours")]
    title = "SWAG of rank 20, a residual block on 32 x 32 images, 20 batches of 64"
    findings = target("a snapshot at most 0.1 of an epoch")
    return Case("swag", title, "epoch or snapshot", 9, found, findings=findings)


def ensemble(smoke_test: bool) -> Case:
    """Return a training of five small MLPs in one tensor, and of one in the loop."""
    rows, hidden, epochs = (8, 3, 1) if smoke_test else (1024, 50, 50)
    x = torch.randn(rows, 8)
    y = torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(rows, 1)
    batches = list(zip(x.split(rows // 8), y.split(rows // 8), strict=True))

    def member(_: int) -> tyxe.VariationalBNN:
        layers = (nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        net = nn.Sequential(*layers, nn.Linear(hidden, 1))
        return tyxe.VariationalBNN(net, NONE, tyxe.likelihoods.HomoskedasticGaussian(rows, 0.1))

    one, five = member(0), tyxe.EnsembleBNN(member, 5)
    names = ["one", "five, one after the other", "five, vectorised", "five, vectorised, one epoch"]

    def training(model: Any, num_epochs: int = epochs, **options: bool) -> Callable[[], None]:
        def work() -> None:
            model.fit(batches, ADAM, num_epochs, **options)

        return work

    def pays_from(seconds: Numbers) -> dict[str, Any]:
        """Return the number of epochs at which the loop over members takes as long."""
        _, loop, stacked, first = (statistics.median(seconds[name]) for name in names)
        epoch = (stacked - first) / max(epochs - 1, 1)
        return {
            "epochs from which vectorize=True takes less time": (first - epoch)
            / (loop / epochs - epoch),
            "target": "five, vectorised, at most 2.5 of one",
        }

    works = [
        training(one),
        training(five),
        training(five, vectorize=True),
        training(five, num_epochs=1, vectorize=True),
    ]
    whose = ["plain", "ours", "ours", "ours"]
    found = [Contestant(*each) for each in zip(names, works, whose, strict=True)]
    title = "Ensemble of 5 MLPs 8-50-50-1, 1,024 rows in batches of 128, 50 epochs"
    return Case("ensemble", title, "training", 9, found, findings=pays_from)


# --------------------------------------------------------------------------- stored samples


def stored(smoke_test: bool) -> Case:
    """Return a prediction from stored samples, in batches, and as many forwards of the net."""
    (x, y), count = vectors(8 if smoke_test else 2000, smoke_test), 3 if smoke_test else 32
    rows, net = len(x) // 4, mlp(smoke_test)
    kernel = functools.partial(
        tyxe.samplers.HMC, step_size=1e-6, num_steps=1, adapt_step_size=False
    )
    bnn = tyxe.MCMC_BNN(net, PRIOR, tyxe.likelihoods.Categorical(len(x)), kernel)
    bnn.fit([(x, y)], count, warmup_steps=0, num_chains=1, init="net", progress=False)
    forwards = [plain_forwards(net, part, count) for part in x.split(rows)]

    def plain() -> None:
        for forward in forwards:
            forward()

    def ours() -> None:
        bnn.predict(x, num_predictions=count, batch_size=rows)

    found = [Contestant("plain PyTorch", plain, "plain"), Contestant("ours", ours, "ours")]
    title = "Predictions of 32 stored samples, MLP 784-400-400-10, 2,000 rows in batches of 500"
    findings = target("at most 1.05 of as many plain forwards")
    return Case("stored-samples", title, "prediction", 15, found, findings=findings)


if __name__ == "__main__":
    run(
        "Seconds of the baselines' work, and ratios to what each is measured by.",
        {
            "ivon-mlp": ivon_mlp,
            "ivon-resnet18": ivon_resnet,
            "sghmc-mlp": sghmc_mlp,
            "sghmc-resnet18": sghmc_resnet,
            "swag": swag,
            "ensemble": ensemble,
            "stored-samples": stored,
        },
    )
