"""The contract of kernels, for the package's own and some that break it; and bad options."""

import functools
from dataclasses import dataclass

import pytest

from tests.contracts.kernels import KERNELS, check_kernel
from tyxe.samplers import HMC, MCLMC, NUTS, SGHMC, SGLD, WarmStart


@pytest.mark.parametrize("name", KERNELS)
def test_the_packages_own(name: str) -> None:
    check_kernel(KERNELS[name])


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
        (InPlace, "changes what it is given"),
        (Mixes, "a chain depends on the others"),
    ],
)
def test_kernels_that_break_it(kind, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_kernel(functools.partial(kind, num_steps=1, step_size=0.5, adapt_step_size=False))


BAD_OPTIONS = [
    (HMC, {"step_size": 0.0, "temperature": -1.0, "num_steps": 2.5, "adapt_mass_matrix": 0}),
    (NUTS, {"step_size": 0.0, "adapt_step_size": "no", "max_tree_depth": 0}),
    (NUTS, {"target_accept_prob": 1}),
    (NUTS, {"target_accept_prob": "high"}),
    (MCLMC, {"step_size": 0.0, "temperature": -1.0, "momentum_length": 0.0, "memory": 1}),
    (MCLMC, {"energy_variance": (0.5, 0.0)}),
    (MCLMC, {"energy_variance": [0.5, 0.1]}),
    (SGLD, {"lr": "0.1"}),
    (functools.partial(SGLD, 0.1), {"temperature": -1.0}),
    (functools.partial(SGHMC, 0.1), {"schedule": "cosine", "friction": 1.0, "exploration": 1.0}),
    (functools.partial(SGHMC, 0.1), {"num_cycles": 0, "clip_norm": 0.0, "power": 0.0}),
    (functools.partial(SGHMC, 0.1), {"offset": -1.0, "points": 0.0}),
    (WarmStart, {"optim": "adam", "num_epochs": 0, "patience": 1.5, "batch_size": "all"}),
    (WarmStart, {"validation": 1}),
]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(kind, name, value) for kind, options in BAD_OPTIONS for name, value in options.items()],
)
def test_options_that_cannot_be_meant_are_named(kind, name, value) -> None:
    with pytest.raises((TypeError, ValueError), match=f"{name} is "):
        kind(**{name: value})


def test_a_short_warm_up_is_spoken_of_where_something_adapts() -> None:
    assert NUTS().check(150) is None
    assert NUTS(adapt_step_size=False, adapt_mass_matrix=False).check(0) is None
    assert "warmup_steps=149 is too short to adapt step sizes and mass" in NUTS().check(149)
    assert "adapt step sizes:" in HMC(adapt_mass_matrix=False).check(10)
    assert "adapt mass matrices:" in HMC(adapt_step_size=False).check(10)
    assert "warmup_steps=999 is too short for MCLMC" in MCLMC().check(999)
    assert MCLMC().check(1000) is None
