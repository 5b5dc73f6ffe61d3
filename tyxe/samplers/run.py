"""Runs of a kernel: warm-up, thinning, kept samples, and resuming."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from tyxe import check
from tyxe.errors import warn
from tyxe.program import Program, captured, check_repeatable, has_compiler, has_graphs, reason_of
from tyxe.samplers.kernel import Chains, Kernel, Length, Randomness, Transition
from tyxe.samplers.potential import Potential

# A program is compiled where at least so many steps are left, after as many have been made.
_WORTH_COMPILING = 3000
# Steps of one launch at most, and numbers that their positions have, which bounds the memory.
_MOST_STEPS, _MOST_NUMBERS = 32, 2**22


class Kept(NamedTuple):
    """What a run keeps of its chains.

    Attributes:
        positions: `(chains, num_samples, d)`.
        potentials: `(chains, num_samples)`, in nats; infinity of samples that there are not yet.
        statistics: `(chains, num_samples, len(kernel.statistics))`.
    """

    positions: Tensor
    potentials: Tensor
    statistics: Tensor


@check.arguments
@dataclass(repr=False)
class Run:
    """Chains of a kernel, from their starts to a number of samples; it may stop between steps.

    Args:
        kernel: the sampler.
        potential: of the target, see `batched`.
        starts: `(chains, d)`.
        num_samples: number kept of each chain.
        num_warmup: earlier transitions, which adapt the kernel's settings and are not kept.
        thinning: number of transitions for each kept sample.
        seed: of the random numbers of all chains.
        compile: whether steps run as a compiled program; by default from the step at which this
            pays, if there is a compiler. A net that cannot be compiled then gives a warning.
        positions: where samples go, `(chains, num_samples, d)`; by default a new tensor.
        inside: makes a context for every step, such as a lock.
        before: called before every try of a step, outside that context, with its number, from 0 for
            the start.
        programs: compiled programs of another run with the same kernel, potential and shapes.

    Attributes:
        settings: the kernel's settings as they are now; None before the first step.

    Example:
        >>> from tyxe.samplers import NUTS
        >>> normal = lambda w: (0.5 * w.square().sum(-1), w)
        >>> run = Run(NUTS(), normal, torch.zeros(4, 2), num_samples=100, num_warmup=150)
        >>> for chains in run.steps():
        ...     pass
        >>> run.kept.positions.shape
        torch.Size([4, 100, 2])
    """

    kernel: Kernel
    potential: Potential
    starts: Tensor
    num_samples: int
    num_warmup: int = 0
    thinning: int = 1
    seed: int = 0
    compile: bool | None = None
    positions: Tensor | None = None
    inside: Callable[[], AbstractContextManager[Any]] = nullcontext
    before: Callable[[int], Any] | None = None
    programs: tuple[Program, Program] | None = None
    _random: Randomness | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check.shape("starts", self.starts, ("chains", "d"))
        check.count("num_samples", self.num_samples, 0)
        check.count("num_warmup", self.num_warmup, 0)
        check.count("thinning", self.thinning)
        self.starts = like = self.starts.contiguous()
        chains, d = like.shape
        self.generator = torch.Generator(like.device).manual_seed(self.seed)
        # How many transitions each chain has made.
        self.transitions = torch.zeros(chains, dtype=torch.long, device=like.device)
        if self.positions is None:
            self.positions = like.new_zeros(chains, self.num_samples, d)
        self.kept = Kept(
            self.positions,
            like.new_full((chains, self.num_samples), torch.inf),
            like.new_zeros(chains, self.num_samples, len(self.kernel.statistics)),
        )
        length = Length(self.num_warmup, self.num_samples, self.thinning)
        self._plan = self.kernel.plan(length).to(like.device)
        # The place of each transition's sample, by their counts, and -1 for none.
        self.num_transitions = length.total
        self._place_of = torch.full([self.num_transitions + 2], -1, device=like.device)
        self._kept_at = self.kernel.kept(length)
        self._place_of[self._kept_at] = torch.arange(self.num_samples, device=like.device)
        # The leaves of the state, which is taken apart where chains adapt only.
        self._state: list[Tensor] = []
        self.settings: Any = None
        self._adaptation: Any = None
        self._made = 0
        # Whether programs make several steps at once, of which nothing is to be seen in between:
        # on request only, since that was hardly run on a GPU.
        is_free = self.before is None and type(self.kernel).stops is Kernel.stops
        self._takes_several = is_free and self.compile is True and has_graphs(like.device)
        # What makes them, and whether chains adapt in them.
        self._launched: tuple[Callable[..., Sequence[Tensor]], bool] | None = None

    def __repr__(self) -> str:
        chains, d = self.starts.shape
        return f"Run({self.kernel}, {chains} chains in {d} dimensions, {self.num_kept} samples)"

    @property
    def num_kept(self) -> int:
        """How many samples there are of every chain."""
        return int((self._kept_at <= self.transitions.min().cpu()).sum())

    @property
    def is_compiled(self) -> bool:
        """Whether steps run as a compiled program now."""
        return self.programs is not None and self.programs[0].is_compiled

    def steps(self) -> Iterator[Transition]:
        """Make steps until every chain has its samples, and yield each `Transition`.

        Raises:
            RuntimeError: `compile` is True, and the potential cannot be compiled; a chain of a
                kernel without accept step diverges; its last samples are left out.
        """
        if not self._state:
            self._prepare(0)
            with torch.no_grad(), self.inside():
                self._start()
        self._prepare(self._made + 1)
        with torch.no_grad(), self.inside():
            self.programs = self.programs or self._built(compile=bool(self.compile))
        while (least := int(self.transitions.min())) < self.num_transitions:
            if self.compile is None and self._made == _WORTH_COMPILING and self._is_long():
                try:
                    with torch.no_grad(), self.inside():
                        self.programs = self._built(compile=True)
                except RuntimeError as error:
                    warn(f"steps continue uncompiled: {error}")
            self._prepare(self._made + 1)
            # A program needs no parameters in any places.
            inside = nullcontext if self.is_compiled else self.inside
            with torch.no_grad(), inside():
                launches = self._takes_several and self.is_compiled
                made = self._advance_several(least) if launches else []
                made = made or [self._advance()]
            self._made += len(made)
            yield from made

    def _prepare(self, step: int) -> None:
        if self.before is not None:
            self.before(step)

    def _is_long(self) -> bool:
        """Whether more steps are left than a program takes to pay, by those made so far."""
        made = max(int(self.transitions.min()), 1)
        left = self._made * (self.num_transitions / made - 1)
        return left >= _WORTH_COMPILING and has_compiler(self.starts.device)

    def _start(self) -> None:
        chains = self.kernel.start(self.potential, self.starts, self._drawn())
        state, self.settings, self._adaptation = chains
        self._place = pytree.tree_structure(state)
        self._state = [leaf.contiguous() for leaf in pytree.tree_leaves(state)]
        self._random = None

    def _drawn(self, settings: Any = None) -> Randomness:
        """Return random numbers; those that an interrupt has left unused are of the next try."""
        if self._random is None:
            self._random = self.kernel.randomness(self.starts, self.generator, settings)
        return self._random

    def _built(self, compile: bool) -> tuple[Program, Program]:
        """Return the programs of a step, and of the adaptation after it."""
        if compile:
            check_repeatable(self.potential, self.starts)
        step = partial(self.kernel.step, self.potential)
        chains, random = self._chains(), self._drawn()
        transition = step(chains.state, self.settings, random)[1]
        rows = self._plan.new_zeros(len(self.starts), self._plan.shape[-1])
        after = (chains, chains.state, transition, transition.done, rows, random)
        adapts = int(self.transitions.min()) < len(self._plan)
        how = "compiled" if compile else "eager"
        return (
            Program(step, chains.state, self.settings, random, how=how),
            Program(self.kernel.adapt, *after, how=how if adapts else "eager"),
        )

    def _chains(self) -> Chains:
        state = pytree.tree_unflatten(self._state, self._place)
        return Chains(state, self.settings, self._adaptation)

    def _advance_several(self, least: int) -> list[Transition]:
        """Make several steps, and return what each has brought; none where no graph takes them.

        Every chain has made `least` transitions or more. The host waits for the steps at the end,
        to keep what is to be kept.
        """
        assert self.programs is not None
        adapts = least < len(self._plan)
        count, like = steps_at_once(self.starts), self.starts
        if self._random is None or self._random.noise.dim() == 3:  # of one step
            self._random = self.kernel.numbers(like, self.generator, count)
        given, place = pytree.tree_flatten((self._chains(), self.transitions))
        given = [leaf.contiguous() for leaf in given]
        leaves = [*given, *self._random]
        if self._launched is None or self._launched[1] != adapts:
            step, adapt = self.programs
            steps = several(step, adapt if adapts else None, self._plan, place)
            try:
                self._launched = captured(steps, leaves), adapts
            except RuntimeError as error:
                reason = reason_of(error)
                warn(
                    f"compiled steps are launched one by one, and not captured in a graph: {reason}"
                )
                self._takes_several, self._random = False, None
                return []
        found = self._launched[0](*leaves)
        (state, settings, adaptation), transitions = pytree.tree_unflatten(
            found[: len(given)], place
        )
        transition = Transition(*found[len(given) :])
        self._kept_of(transition)
        self._move(pytree.tree_leaves(state), settings, adaptation, transitions)
        rows = zip(*(part.unbind() for part in transition), strict=True)
        return [*map(Transition._make, rows)]

    def _advance(self) -> Transition:
        assert self.programs is not None
        step, adapt = self.programs
        random = self._drawn(self.settings)
        leaves = step.at_leaves(*self._state, *self.settings, *random)
        state, transition = leaves[: len(self._state)], Transition(*leaves[len(self._state) :])
        settings, adaptation = self.settings, self._adaptation
        stopped = self.kernel.stops(transition, settings, self.kept.potentials)
        if stopped is not None:
            self._kept_at = self._kept_at[: stopped[1]]
            raise RuntimeError(stopped[0])
        transitions = self.transitions
        if bool(transition.done.any()):
            warm = transition.done & (transitions < len(self._plan))
            if bool(warm.any()):
                rows = self._plan[transitions.clamp(max=len(self._plan) - 1)]
                before, after = (
                    pytree.tree_unflatten(one, self._place) for one in (self._state, state)
                )
                chains = Chains(before, settings, adaptation)
                found, settings, adaptation = adapt(chains, after, transition, warm, rows, random)
                state = pytree.tree_leaves(found)
            transitions = self._kept_of(transition)
        self._move(state, settings, adaptation, transitions)
        return transition

    def _move(self, state: Any, settings: Any, adaptation: Any, transitions: Tensor) -> None:
        """Be after a step, at once: an interrupt finds the run before the step or after it."""
        new = {"_state": state, "settings": settings, "_adaptation": adaptation}
        self.__dict__.update(new, transitions=transitions, _random=None)

    def _kept_of(self, transition: Transition) -> Tensor:
        """Keep what is to be kept of transitions that ended, and return the counts after them.

        Those of several steps have a first dimension.
        """
        done = transition.done
        transitions = self.transitions + (done if done.dim() == 1 else done.cumsum(0))
        places = self._place_of[transitions.clamp(max=self.num_transitions + 1)]
        ended = (done & (places >= 0)).nonzero(as_tuple=True)
        if len(chains := ended[-1]):
            at = places[ended]
            for kept, new in zip(self.kept, transition[1:], strict=True):
                # Positions may be in a file, and so not where the chains are.
                kept[chains.to(kept.device), at.to(kept.device)] = new[ended].to(kept)
        return transitions


def steps_at_once(starts: Tensor) -> int:
    """Return how many steps of chains `(chains, d)` one launch makes."""
    return max(1, min(_MOST_STEPS, _MOST_NUMBERS // starts.numel()))


def several(
    step: Callable[..., tuple[Any, Transition]],
    adapt: Callable[..., Chains] | None,
    plan: Tensor,
    place: pytree.TreeSpec,
) -> Callable[..., list[Tensor]]:
    """Return several steps of a kernel, and its adaptation, as one function that reads no number.

    It takes the leaves of chains and of the counts of their transitions, whose structure is
    `place`, and of `Randomness` with a first dimension of steps. It returns the former, and those
    of a `Transition` with such a dimension.
    """

    def steps(*leaves: Tensor) -> list[Tensor]:
        *carried, noise, uniforms = leaves
        chains, transitions = pytree.tree_unflatten(carried, place)
        brought = []
        for random in map(Randomness, noise.unbind(), uniforms.unbind()):
            state, transition = step(chains.state, chains.settings, random)
            after = chains._replace(state=state)
            if adapt is not None:
                warm = transition.done & (transitions < len(plan))
                rows = plan.index_select(0, transitions.clamp(max=len(plan) - 1))
                after = adapt(chains, state, transition, warm, rows, random)
            chains, transitions = after, transitions + transition.done
            brought.append(transition)
        together = map(torch.stack, zip(*brought, strict=True))
        return [*pytree.tree_leaves((chains, transitions)), *together]

    return steps
