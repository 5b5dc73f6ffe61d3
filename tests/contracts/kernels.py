"""The contract of samplers' kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from tyxe.samplers import HMC, MCLMC, NUTS, SGHMC, SGLD, Chains, Kernel, Randomness, Run
from tyxe.testing.asserts import assert_close, assert_within

# Each function makes a kernel under which a standard Gaussian comes out to within its errors.
KERNELS: dict[str, Callable[[], Kernel]] = {
    "HMC": lambda: HMC(num_steps=4),
    "HMC, as given": lambda: HMC(
        step_size=0.5, num_steps=3, adapt_step_size=False, adapt_mass_matrix=False
    ),
    "NUTS": NUTS,
    "NUTS, shallow": lambda: NUTS(max_tree_depth=2),
    "MCLMC": lambda: MCLMC(energy_variance=1e-6, step_size=0.1),
    "SGLD": lambda: SGLD(lr=0.04),
    "SGHMC": lambda: SGHMC(lr=0.02, friction=0.3),
}


def check_kernel(make: Callable[[], Kernel]) -> None:
    """Assert that a kernel is a pure step of all chains, and that it keeps a Gaussian."""
    kernel = make()
    _check_step(kernel)
    _check_chains_are_alone(kernel)
    first, second = _samples(kernel, 4, 20, 60), _samples(kernel, 4, 20, 60)
    assert torch.equal(first, second), "a run from the same seed gives other samples"
    samples = _samples(kernel, 256, 32, 200)
    for values, expected in ((samples, 0.0), (samples.square(), 1.0)):
        of_chains = values.mean(1)
        error = of_chains.std(0) / len(of_chains) ** 0.5
        wanted = torch.full_like(error, expected)
        assert_within(of_chains.mean(0), wanted, error, "a Gaussian's moments")


def _normal(position: Tensor) -> tuple[Tensor, Tensor]:
    return 0.5 * position.square().sum(-1), position


def _started(kernel: Kernel) -> tuple[Chains, Any]:
    generator = torch.Generator().manual_seed(0)
    position = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    chains = kernel.start(_normal, position, kernel.randomness(position, generator))
    return chains, kernel.randomness(position, generator)


def _check_step(kernel: Kernel) -> None:
    chains, random = _started(kernel)
    before = pytree.tree_map(torch.clone, (chains, random))
    found = kernel.step(_normal, chains.state, chains.settings, random)
    again = kernel.step(_normal, chains.state, chains.settings, random)
    for one, other, what in (
        ((chains, random), before, "a step changes what it is given"),
        (found, again, "a step with the same random numbers differs"),
    ):
        leaves = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
        assert all(torch.equal(a, b) for a, b in leaves), what
    state, transition = found
    shapes = pytree.tree_map(lambda x: (x.shape, x.dtype), (chains.state, state))
    assert shapes[0] == shapes[1], "a step changes the shapes or types of the state"
    assert transition.done.dtype == torch.bool, "`done` is no mask"
    expected = (3, len(kernel.statistics))
    assert transition.statistics.shape == expected, "the statistics are not those that are named"
    assert_close(
        transition.potential, _normal(transition.position)[0], "the potential of a position"
    )


def _check_chains_are_alone(kernel: Kernel) -> None:
    chains, random = _started(kernel)
    state, settings = pytree.tree_map(lambda leaf: leaf[1:2], (chains.state, chains.settings))
    own = Randomness(random.noise[:, 1:2], random.uniforms[:, 1:2])
    alone = kernel.step(_normal, state, settings, own)
    together = kernel.step(_normal, chains.state, chains.settings, random)
    for one, other in zip(pytree.tree_leaves(alone), pytree.tree_leaves(together), strict=True):
        assert_close(one.double(), other[1:2].double(), "a chain depends on the others")


def _samples(kernel: Kernel, chains: int, count: int, num_warmup: int) -> Tensor:
    starts = torch.zeros(chains, 3, dtype=torch.float64)
    run = Run(kernel, _normal, starts, count, num_warmup, seed=1)
    for _ in run.steps():
        pass
    return run.kept.positions
