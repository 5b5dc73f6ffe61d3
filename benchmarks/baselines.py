"""Costs of the baselines, each beside what it is measured by."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import torch
from _harness import Case, Contestant, run
from _nets import images, mlp, resnet18, vectors
from prediction import plain_forwards
from torch import Tensor, nn
from training_step import make_bnn

import tyxe
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
            trainer.step(*data, 1.0)

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
        {"ivon-mlp": ivon_mlp, "ivon-resnet18": ivon_resnet, "stored-samples": stored},
    )
