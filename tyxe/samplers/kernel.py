"""The interface of samplers: a start, a pure step, and a pure adaptation during warm-up.

States are named tuples of tensors whose first dimension counts chains. An update changes only the
chains of a mask, so chains may be at different transitions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from tyxe import check
from tyxe.samplers.potential import Potential

T = TypeVar("T")


def choose(mask: Tensor, new: T, old: T) -> T:
    """Return nested tuples of tensors with `new` where a mask `(chains,)` holds, else `old`."""
    chosen: Any
    if isinstance(new, Tensor):
        assert isinstance(old, Tensor)
        shaped = mask.reshape(mask.shape + (1,) * (new.dim() - mask.dim()))
        chosen = torch.where(shaped, new, old)
    else:
        parts = [choose(mask, n, o) for n, o in zip(new, old, strict=True)]  # type: ignore[call-overload]
        chosen = tuple(parts) if type(new) is tuple else type(new)(*parts)
    return chosen


class DualAveraging(NamedTuple):
    """Step sizes that reach a wanted acceptance probability (Hoffman, Gelman 2014, eq. 6).

    `log_step` is used while adapting, `log_average` after it; all are `(chains,)`.
    """

    log_step: Tensor
    log_average: Tensor
    error: Tensor
    number: Tensor
    center: Tensor

    @classmethod
    def start(cls, step_size: Tensor) -> DualAveraging:
        """Return the state before the first update, which pulls towards ten times the step size."""
        zero, log_step = torch.zeros_like(step_size), step_size.log()
        return cls(log_step, log_step, zero, zero, (10 * step_size).log())

    def updated(self, acceptance: Tensor, target: float) -> DualAveraging:
        """Return the state after a transition's acceptance probability, `(chains,)`."""
        number = self.number + 1
        weight = 1 / (number + 10)
        error = (1 - weight) * self.error + weight * (target - acceptance)
        log_step = self.center - error * number.sqrt() / 0.05
        decay = number**-0.75
        average = decay * log_step + (1 - decay) * self.log_average
        return DualAveraging(log_step, average, error, number, self.center)


class Moments(NamedTuple):
    """Running mean and sum of squared deviations of positions, by Welford's recursion."""

    number: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def start(cls, position: Tensor) -> Moments:
        """Return the state of no positions yet, for positions `(chains, d)`."""
        zero = torch.zeros_like(position)
        return cls(torch.zeros_like(position[:, 0]), zero, zero)

    def updated(self, position: Tensor) -> Moments:
        """Return the state with one more position of each chain."""
        number = self.number + 1
        before = position - self.mean
        mean = self.mean + before / number[:, None]
        return Moments(number, mean, self.squares + before * (position - mean))

    def variance(self) -> Tensor:
        """Return the variances, shrunk to 1e-3 with the weight of five observations, as in Stan."""
        number = self.number[:, None]
        plain = self.squares / (number - 1).clamp(min=1)
        return number / (number + 5) * plain + 1e-3 * 5 / (number + 5)


def windows(num_steps: int) -> tuple[Tensor, Tensor]:
    """Return which transitions of a warm-up add to the mass matrix, and after which it changes.

    An initial part, windows of 25, 50, 100, ... transitions of which the last is stretched, and a
    last part, as Stan's. Both are masks `(num_steps,)`.
    """
    first, window, last = 75, 25, 50
    if num_steps < first + window + last:
        first, last = int(0.15 * num_steps), int(0.1 * num_steps)
        window = num_steps - first - last
    collects = torch.zeros(num_steps, dtype=torch.bool, device="cpu")
    ends = torch.zeros(num_steps, dtype=torch.bool, device="cpu")
    # Of fewer than 50 the last part is too short to find a step size for another mass.
    if num_steps >= 50:
        stop = num_steps - last
        collects[first:stop] = True
        while first < stop:
            # The last window is stretched where the next would not fit.
            first = first + window if first + 3 * window <= stop else stop
            window *= 2
            ends[first - 1] = True
    return collects, ends


class Randomness(NamedTuple):
    """The random numbers of one step of all chains.

    Attributes:
        noise: standard normal, `(kernel.noises, chains, d)`.
        uniforms: uniform on [0, 1), `(kernel.uniforms, chains)`.
    """

    noise: Tensor
    uniforms: Tensor


class Transition(NamedTuple):
    """The result of a step, for each chain.

    Attributes:
        done: whether a transition ended, `(chains,)`; the other entries count only if it did.
        position: the new position, `(chains, d)`.
        potential: its potential, `(chains,)`, in nats.
        statistics: `(chains, len(kernel.statistics))`.
    """

    done: Tensor
    position: Tensor
    potential: Tensor
    statistics: Tensor


class Length(NamedTuple):
    """The numbers of transitions of each chain in a run.

    Attributes:
        num_warmup: number of transitions before the samples.
        num_samples: number of samples that are kept.
        thinning: number of transitions for each of them.
    """

    num_warmup: int
    num_samples: int = 0
    thinning: int = 1

    @property
    def total(self) -> int:
        """Number of all transitions."""
        return self.num_warmup + self.num_samples * self.thinning


class Chains(NamedTuple):
    """Chains under way: tuples of tensors whose first dimension counts chains.

    Attributes:
        state: their positions and more.
        settings: numbers that the warm-up sets, such as step sizes.
        adaptation: the state of the warm-up.
    """

    state: Any
    settings: Any
    adaptation: Any


class Kernel(ABC):
    """Base of the samplers: options in, and functions of tensors.

    A kernel is a frozen dataclass whose fields `tyxe.check.field` declares. A step takes and
    returns tuples of tensors, has no branch that depends on their numbers, and draws nothing
    itself, so that a run can be compiled, continued and repeated.

    Attributes:
        statistics: the names of a transition's statistics.
        noises, uniforms: numbers of normal vectors and uniform numbers for a step of a chain.
        default_chains, default_init: number and starts of the chains of an `MCMC_BNN`.
        takes_batches: whether each step takes the potential as one mini-batch estimates it.
        temperature: `MCMC_BNN` divides the data term by it.
    """

    statistics: ClassVar[tuple[str, ...]]
    noises: ClassVar[int]
    uniforms: ClassVar[int]
    takes_batches: ClassVar[bool] = False
    default_chains: ClassVar[int] = 4
    default_init: ClassVar[str] = "prior"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check.fields(self)

    @abstractmethod
    def start(self, potential: Potential, position: Tensor, random: Randomness) -> Chains:
        """Return chains at their starts, `(chains, d)`."""

    @abstractmethod
    def step(
        self, potential: Potential, state: Any, settings: Any, random: Randomness
    ) -> tuple[Any, Transition]:
        """Return the state after one step of every chain, and the `Transition`."""

    def for_points(self, count: float) -> Kernel:
        """Return the kernel for a potential of so many data points."""
        return self

    def default_warmup(self, num_samples: int, thinning: int) -> int:
        """Return the default warm-up: as many transitions as after it."""
        return num_samples * thinning

    @abstractmethod
    def plan(self, length: Length) -> Tensor:
        """Return the plan for `adapt`: a row for each transition in which it is called.

        Most kernels adapt in the warm-up only, which comes first.
        """

    def kept(self, length: Length) -> Tensor:
        """Return the counts of the transitions whose positions are samples, `(num_samples,)`."""
        return length.num_warmup + length.thinning * torch.arange(
            1, length.num_samples + 1, device="cpu"
        )

    @abstractmethod
    def adapt(
        self,
        before: Chains,
        state: Any,
        transition: Transition,
        warm: Tensor,
        rows: Tensor,
        random: Randomness,
    ) -> Chains:
        """Return chains that have adapted to a step for which there is a plan.

        Args:
            before: the chains before it.
            state: after it, from `step`.
            transition: from `step`.
            warm: which chains ended a transition of the plan, `(chains,)`.
            rows: those of the plan for these, `(chains, entries)`.
            random: what the step took.
        """

    def check(self, num_warmup: int) -> str | None:
        """Return a warning for a warm-up that is too short, or None."""
        return None

    def stops(self, transition: Transition, settings: Any, kept: Tensor) -> tuple[str, int] | None:
        """Return an error for a step that stops a run, and how many samples are good.

        `kept` are the samples' potentials, `(chains, num_samples)`. By default None, to go on.
        """
        return None

    def advice(self, statistics: dict[str, Tensor]) -> list[str]:
        """Return warnings about the kept transitions' statistics `(chains, samples)`."""
        return []

    def progress(self, statistics: dict[str, Tensor]) -> dict[str, float]:
        """Return numbers for a progress bar from statistics `(transitions,)`."""
        return {name: float(values.mean()) for name, values in statistics.items()}

    def randomness(
        self, position: Tensor, generator: torch.Generator | None = None, settings: Any = None
    ) -> Randomness:
        """Draw the numbers for a step, or a start, of chains at positions `(chains, d)`."""
        return self.numbers(position, generator)

    def numbers(
        self, position: Tensor, generator: torch.Generator | None, *steps: int
    ) -> Randomness:
        """Draw the numbers for a step, or for several, with a first dimension of these."""
        chains, d = position.shape
        like = {"dtype": position.dtype, "device": position.device, "generator": generator}
        noise = torch.randn((*steps, self.noises, chains, d), **like)  # type: ignore[call-overload]
        uniforms = torch.rand((*steps, self.uniforms, chains), **like)  # type: ignore[call-overload]
        return Randomness(noise, uniforms)
