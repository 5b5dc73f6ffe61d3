"""The contract of kernels, for the package's own, and kernels that break it."""

import functools
from dataclasses import dataclass

import pytest
import torch

from tests.contracts.kernels import KERNELS, check_kernel
from tyxe.samplers import HMC, Randomness


@pytest.mark.parametrize("name", KERNELS)
def test_the_packages_own(name: str) -> None:
    check_kernel(KERNELS[name])


@dataclass(frozen=True)
class Wide(HMC):
    def randomness(self, position, generator=None, settings=None):
        random = super().randomness(position, generator, settings)
        return Randomness(1.3 * random.noise, random.uniforms)


@dataclass(frozen=True)
class Draws(HMC):
    def step(self, potential, state, settings, random):
        drawn = random._replace(noise=torch.randn_like(random.noise))
        return super().step(potential, state, settings, drawn)


@dataclass(frozen=True)
class InPlace(HMC):
    def step(self, potential, state, settings, random):
        found = super().step(potential, state, settings, random)
        random.uniforms.zero_()
        return found


@dataclass(frozen=True)
class Mixes(HMC):
    def step(self, potential, state, settings, random):
        mean = random.noise.mean(1, keepdim=True).expand_as(random.noise)
        return super().step(potential, state, settings, random._replace(noise=mean.contiguous()))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Wide, "a Gaussian's moments"),
        (Draws, "same random numbers differs"),
        (InPlace, "changes what it is given"),
        (Mixes, "a chain depends on the others"),
    ],
)
def test_kernels_that_break_it(kind, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_kernel(functools.partial(kind, num_steps=1, step_size=0.5, adapt_step_size=False))
