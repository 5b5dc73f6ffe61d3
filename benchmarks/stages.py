"""Where a training step's time goes: the stages of ours and of the method by hand, on the MLP."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pyro
from _by_hand import MeanField
from _harness import Case, Contestant, run
from _nets import mlp, vectors
from torch import Tensor
from training_step import METHODS, SCALE, make_bnn, plain_step

from tyxe.bnn.training import FitOptions, Trainer, gradient_norm


class Stages:
    """One step after the other, stage by stage: each call goes on where the last one stopped."""

    def __init__(self, steps: Iterator[str]) -> None:
        self.steps = steps

    def run(self, expected: str) -> None:
        """Run the next stage."""
        if next(self.steps) != expected:
            raise RuntimeError("stages were run out of order")


def our_stages(
    handler: Callable[[], AbstractContextManager], x: Tensor, y: Tensor, smoke_test: bool
) -> Iterator[str]:
    """Make steps as `Trainer.step` does, with a stop after each stage."""
    bnn = make_bnn(mlp(smoke_test), num_points=60_000).train()
    trainer = Trainer(bnn, pyro.optim.Adam({"lr": 1e-3}), FitOptions())
    parameters = list(trainer.parameters.values())
    while True:
        with handler(), pyro.validation_enabled(False):
            for parameter in parameters:
                parameter.grad = None
            loss = trainer.objective(x, y, 1.0)
            terms = trainer.objective.take_terms()
        yield "forward, KL"
        loss.backward()
        yield "backward"
        bool((terms.data.detach() + terms.kl.detach() + gradient_norm(parameters)).isfinite())
        del loss, terms
        yield "check"
        trainer.optimizer.step()
        yield "Adam"


def hand_stages(method: MeanField, x: Tensor, y: Tensor) -> Iterator[str]:
    """Make steps as `MeanField.step` does, with a stop after each stage."""
    while True:
        method.optimizer.zero_grad()
        nll, variances = method.data_term(x, y)
        yield "forward"
        nll.backward()
        yield "backward"
        method._add_kl(variances)
        del nll, variances
        yield "KL and its gradient"
        method.optimizer.step()
        yield "Adam"


OURS = ("forward, KL", "backward", "check", "Adam")
BY_HAND = ("forward", "backward", "KL and its gradient", "Adam")


def case(method: str, smoke_test: bool) -> Case:
    """Return one method's stages, ours and by hand, after the whole plain step."""
    x, y = vectors(8 if smoke_test else 128, smoke_test)
    by_hand, handler = METHODS[method]
    found = [
        Contestant("plain PyTorch, the whole step", plain_step(mlp(smoke_test), x, y), "plain")
    ]
    hand = Stages(hand_stages(by_hand(mlp(smoke_test), 60_000, SCALE), x, y))
    ours = Stages(our_stages(handler, x, y, smoke_test))
    for stages, who, names in ((hand, "by hand", BY_HAND), (ours, "ours", OURS)):
        found += [
            Contestant(f"{who}: {name}", functools.partial(stages.run, name), who) for name in names
        ]
    return Case(method.replace(" ", "-"), f"{method}, MLP 784-400-400-10", "step", 60, found)


def cases() -> dict[str, Any]:
    """Return a case for each method."""
    return {method.replace(" ", "-"): functools.partial(case, method) for method in METHODS}


if __name__ == "__main__":
    run("Seconds of each stage of a training step of the MLP, ours and by hand.", cases())
