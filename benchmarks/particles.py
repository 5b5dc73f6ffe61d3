"""Time of a step with eight particles: next to eight steps with one, and to one batched by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from _by_hand import Sampled
from _harness import Case, Contestant, run
from _nets import dense, mlp, vectors
from torch import Tensor, nn
from torch.func import functional_call
from training_step import SCALE, make_bnn

import tyxe
from tyxe.bnn.training import FitOptions, Trainer

PARTICLES = 8
NOISE = 0.1
Loss = Callable[[Tensor, Tensor], Tensor]


def gaussian_nll(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the mean negative log-likelihood under the known noise."""
    constant = math.log(NOISE * math.sqrt(2 * math.pi))
    return F.mse_loss(predictions, targets) / (2 * NOISE**2) + constant


class Batched(Sampled):
    """All particles' draws go through the net in one vmapped forward."""

    def __init__(self, net: nn.Module, num_points: int, loss: Loss) -> None:
        super().__init__(net, num_points, SCALE)
        self.loss = loss

    def data_term(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Average the loss over particles."""
        scales = torch._foreach_exp(self.rhos)
        drawn = {
            name: torch.addcmul(loc, scale, torch.randn(PARTICLES, *loc.shape))
            for name, loc, scale in zip(self.names, self.locs, scales, strict=True)
        }
        outputs = torch.vmap(lambda weights: functional_call(self.net, weights, (x,)))(drawn)
        with torch.no_grad():
            variances = torch._foreach_mul(scales, scales)
        targets = y.repeat(PARTICLES, *[1] * (y.dim() - 1))
        return self.loss(outputs.flatten(0, 1), targets), list(variances)


def our_steps(
    bnn: tyxe.VariationalBNN,
    handler: Callable[[], AbstractContextManager],
    x: Tensor,
    y: Tensor,
    particles: int,
    count: int,
) -> Callable[[], None]:
    """Return several of the steps that `bnn.fit` makes with a number of particles."""
    bnn.train()
    trainer = Trainer(bnn, pyro.optim.Adam({"lr": 1e-3}), FitOptions(num_particles=particles))

    def steps() -> None:
        with handler(), pyro.validation_enabled(False):
            for _ in range(count):
                trainer.step([(x, y)], 1.0)

    return steps


def contestants(
    make: Callable[[], tyxe.VariationalBNN], batched: Batched, x: Tensor, y: Tensor
) -> list[Contestant]:
    """Return eight steps and one of eight particles by each method, and the step by hand."""
    handlers = {
        "plain sampling": nullcontext,
        "local reparameterisation": tyxe.poutine.local_reparameterization,
    }
    found = []
    for name, handler in handlers.items():
        single = f"{name}, {PARTICLES} steps of 1 particle"
        steps = our_steps(make(), handler, x, y, particles=1, count=PARTICLES)
        found.append(Contestant(single, steps, "plain", plain=single))
        step = our_steps(make(), handler, x, y, particles=PARTICLES, count=1)
        found.append(Contestant(f"{name}, 1 step of {PARTICLES}", step, "ours", plain=single))

    def by_hand() -> None:
        batched.step(x, y)

    name = f"plain sampling, 1 step of {PARTICLES} batched, by hand"
    return [*found, Contestant(name, by_hand, "by hand", plain=found[0].name)]


def mlp_case(smoke_test: bool) -> Case:
    """Return the MLP's case."""
    x, y = vectors(8 if smoke_test else 128, smoke_test)
    num_points = 60_000
    batched = Batched(mlp(smoke_test), num_points, F.cross_entropy)
    found = contestants(lambda: make_bnn(mlp(smoke_test), num_points), batched, x, y)
    return Case("mlp", "MLP 784-400-400-10, batch 128", "8 particles", 20, found)


def tiny_net() -> nn.Sequential:
    """Return the net 1-50-1."""
    return dense(1, 50, 1, act=nn.Tanh)


def make_regression(num_points: int) -> tyxe.VariationalBNN:
    """Return the tiny net with a mean-field posterior and known noise."""
    return tyxe.VariationalBNN(
        tiny_net(),
        tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        tyxe.likelihoods.HomoskedasticGaussian(num_points, scale=NOISE),
        tyxe.guides.AutoNormal,
    )


def tiny_case(smoke_test: bool) -> Case:
    """Return the regression on 100 points, where calls cost more than arithmetic."""
    x = torch.linspace(-1, 1, 5 if smoke_test else 100)[:, None]
    y = torch.sin(4 * x) + NOISE * torch.randn_like(x)
    batched = Batched(tiny_net(), len(x), gaussian_nll)
    found = contestants(lambda: make_regression(len(x)), batched, x, y)
    return Case("tiny", "1-50-1 tanh regression, 100 points", "8 particles", 40, found)


if __name__ == "__main__":
    run(
        "Seconds of a step with eight particles, and ratios to eight steps with one.",
        {"mlp": mlp_case, "tiny": tiny_case},
    )
