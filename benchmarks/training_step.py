"""Time of a training step: the plain net, each method by hand, and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from _by_hand import Flipout, Joint, LocalReparameterization, MeanField, Sampled
from _harness import Case, Contestant, run
from _nets import images, mlp, resnet18, vectors
from pyro.infer.autoguide import AutoLowRankMultivariateNormal, AutoMultivariateNormal
from torch import Tensor, nn

import tyxe
from tyxe.bnn.training import FitOptions, Trainer

SCALE = 1e-2
METHODS: dict[str, tuple[type[MeanField], Callable[[], AbstractContextManager]]] = {
    "plain sampling": (Sampled, nullcontext),
    "local reparameterisation": (LocalReparameterization, tyxe.poutine.local_reparameterization),
    "flipout": (Flipout, tyxe.poutine.flipout),
}
HANDLERS = {name: handler for name, (_, handler) in METHODS.items()}


def plain_step(net: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return the step that everybody writes."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    return step


def hand_step(method: MeanField, x: Tensor, y: Tensor) -> Callable[[], None]:
    """Return the step of one method written by hand."""

    def step() -> None:
        method.step(x, y)

    return step


def make_bnn(net: nn.Module, num_points: int, **rules: Any) -> tyxe.VariationalBNN:
    """Return the net with a mean-field posterior about its values; BatchNorm stays as it is.

    `rules` of the prior say of which other parts.
    """
    guide = functools.partial(
        tyxe.guides.AutoNormal,
        init_scale=SCALE,
    )
    rules = rules or {"hide_module_types": [nn.BatchNorm2d]}
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), **rules)
    return tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(num_points), guide)


def our_step(
    bnn: tyxe.VariationalBNN,
    handler: Callable[[], AbstractContextManager],
    x: Tensor,
    y: Tensor,
    options: FitOptions | None = None,
) -> Callable[[], None]:
    """Return the step that `bnn.fit` makes for each batch after the first."""
    bnn.train()
    trainer = Trainer(bnn, pyro.optim.Adam({"lr": 1e-3}), options or FitOptions())

    def step() -> None:
        with handler(), pyro.validation_enabled(False):
            trainer.step([(x, y)], 1.0)

    return step


def contestants(
    make_net: Callable[[], nn.Module], x: Tensor, y: Tensor, num_points: int
) -> list[Contestant]:
    """Return the plain step, and both ways of every method."""
    found = [Contestant("plain PyTorch", plain_step(make_net(), x, y), "plain")]
    for name, (by_hand, handler) in METHODS.items():
        hand = hand_step(by_hand(make_net(), num_points, SCALE), x, y)
        ours = our_step(make_bnn(make_net(), num_points), handler, x, y)
        limit = f"{name}, by hand"
        found.append(Contestant(limit, hand, "by hand"))
        found.append(Contestant(f"{name}, ours", ours, "ours", limit))
    return found


def mlp_case(smoke_test: bool) -> Case:
    """Return the MLP's case."""
    x, y = vectors(8 if smoke_test else 128, smoke_test)
    found = contestants(lambda: mlp(smoke_test), x, y, num_points=60_000)
    return Case("mlp", "MLP 784-400-400-10, batch 128", "step", 60, found)


def resnet_case(smoke_test: bool) -> Case:
    """Return the ResNet's case."""
    x, y = images(2 if smoke_test else 32, smoke_test)
    found = contestants(lambda: resnet18(smoke_test), x, y, num_points=50_000)
    return Case("resnet18", "ResNet-18 on 32 x 32 images, batch 32", "step", 5, found)


def joint_case(smoke_test: bool) -> Case:
    """Return the case of posteriors of all weights together, on a net small enough for them."""
    x, points = torch.rand(8 if smoke_test else 128, 64), 60_000
    y = torch.randint(10, (len(x),))
    width, rank = (4, 2) if smoke_test else (20, 10)
    net = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 10))
    guides = {
        "full covariance": (None, AutoMultivariateNormal),
        f"rank {rank}": (rank, functools.partial(AutoLowRankMultivariateNormal, rank=rank)),
    }
    found = [Contestant("plain PyTorch", plain_step(net, x, y), "plain")]
    for name, (own, guide) in guides.items():
        hand, limit = Joint(net, points, SCALE, own), f"{name}, by hand"
        bnn = tyxe.VariationalBNN(
            net,
            tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            tyxe.likelihoods.Categorical(points),
            functools.partial(guide, init_scale=SCALE),
        )
        ours = our_step(bnn, nullcontext, x, y)
        found.append(Contestant(limit, functools.partial(hand.step, x, y), "by hand"))
        found.append(Contestant(f"{name}, ours", ours, "ours", limit))
    return Case("joint", f"MLP 64-{width}-10, batch {len(x)}", "step", 60, found)


if __name__ == "__main__":
    run(
        "Seconds of one training step with Adam, and ratios to the plain step and to the same "
        "method by hand.",
        {"mlp": mlp_case, "resnet18": resnet_case, "joint": joint_case},
    )
