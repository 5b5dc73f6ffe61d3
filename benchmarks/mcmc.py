"""Time of a leapfrog step of HMC and NUTS: one plain gradient, by hand, Pyro alone, and ours."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pyro.distributions as dist
import pyro.ops.integrator
import torch
from _by_hand import TanhRegression
from _harness import Case, Contestant, run
from pyro.infer.autoguide.initialization import init_to_median
from pyro.infer.mcmc import HMC, MCMC, NUTS
from torch import Tensor, nn

import tyxe

NOISE = 0.1
STEP_SIZE = 1e-3
LONGER = 20
FIXED = {"step_size": STEP_SIZE, "adapt_step_size": False, "adapt_mass_matrix": False}


@contextmanager
def counted_gradients() -> Iterator[list[int]]:
    """Count the gradients that Pyro's integrator asks for: one for each leapfrog step."""
    original = pyro.ops.integrator.potential_grad
    count = [0]

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return original(*args, **kwargs)

    with mock.patch.object(pyro.ops.integrator, "potential_grad", counting):
        yield count


def counted(run_chain: Callable[[], Any]) -> Callable[[], int]:
    """Return a run of a chain that says how many leapfrog steps it made."""

    def run_counted() -> int:
        with counted_gradients() as count:
            run_chain()
        if not count[0]:
            raise RuntimeError("Pyro's integrator was not used, so its steps cannot be counted")
        return count[0]

    return run_counted


def plain_gradients(net: nn.Module, x: Tensor, y: Tensor, count: int) -> Callable[[], int]:
    """Return gradients of the same potential for the plain net."""
    parameters = list(net.parameters())

    def gradients() -> int:
        for _ in range(count):
            net.zero_grad()
            data = (net(x) - y).square().sum() / (2 * NOISE**2)
            prior = sum(p.square().sum() for p in parameters) / 2
            (data + prior).backward()
        return count

    return gradients


def flat_chain(kernel: Callable[..., Any], problem: TanhRegression, samples: int) -> Any:
    """Run Pyro's own kernel on the flat potential in plain PyTorch."""
    start = {"z": torch.zeros(problem.size)}
    chain = MCMC(
        kernel(potential_fn=lambda params: problem.potential(params["z"])),
        num_samples=samples,
        warmup_steps=0,
        initial_params=start,
        disable_progbar=True,
    )
    chain.run()


def make_bnn(kernel: Callable[..., Any], net: nn.Module, num_points: int) -> tyxe.MCMC_BNN:
    """Return the net with a standard normal prior and known noise."""
    return tyxe.MCMC_BNN(
        net,
        tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        tyxe.likelihoods.HomoskedasticGaussian(num_points, scale=NOISE),
        functools.partial(kernel, init_strategy=init_to_median),
    )


def our_chain(bnn: tyxe.MCMC_BNN, x: Tensor, y: Tensor, samples: int, **options: Any) -> Any:
    """Run `MCMC_BNN.fit`."""
    bnn.fit([(x, y)], samples, warmup_steps=0, disable_progbar=True, **options)


def case(smoke_test: bool) -> Case:
    """Return the regression with 50 hidden units and 100 points."""
    steps, depth, samples, hidden = (3, 2, 2, 5) if smoke_test else (63, 6, 10, 50)
    x = torch.linspace(-1, 1, 100)[:, None]
    y = torch.sin(4 * x) + NOISE * torch.randn_like(x)
    net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))
    problem = TanhRegression(x, y, NOISE, hidden)
    start = 0.1 * torch.randn(problem.size)

    def leapfrog_by_hand() -> int:
        for _ in range(samples):
            problem.leapfrog(start, STEP_SIZE, steps)
        return samples * steps

    found = [
        Contestant("plain gradient", plain_gradients(net, x, y, samples * steps), "plain"),
        Contestant("leapfrog, by hand", leapfrog_by_hand, "by hand"),
    ]
    # The trajectory is a little longer than the steps, which Pyro counts by rounding down.
    kernels = {
        "HMC": functools.partial(HMC, **FIXED, trajectory_length=(steps + 0.5) * STEP_SIZE),
        "NUTS": functools.partial(NUTS, **FIXED, max_tree_depth=depth),
    }
    for name, kernel in kernels.items():
        alone = counted(functools.partial(flat_chain, kernel, problem, samples))
        ours = counted(functools.partial(our_chain, make_bnn(kernel, net, len(x)), x, y, samples))
        flat = f"{name}, Pyro on a flat potential"
        found.append(Contestant(flat, alone, "Pyro", "leapfrog, by hand"))
        found.append(Contestant(f"{name}, ours", ours, "ours", flat))
        # Each fit compiles anew: a share of a second, of which a longer chain shows less.
        compiled = counted(
            functools.partial(
                our_chain, make_bnn(kernel, net, len(x)), x, y, LONGER * samples, compile=True
            )
        )
        found.append(Contestant(f"{name}, ours, compiled", compiled, "ours", flat))
    title = "HMC and NUTS, 1-50-1 tanh regression, 100 points"
    return Case("regression", title, "leapfrog step", 15, found)


if __name__ == "__main__":
    run(
        "Seconds of one leapfrog step, and ratios to one gradient of the plain net and to the "
        "flat potential in plain PyTorch.",
        {"regression": case},
    )
