"""The no-U-turn sampler, all chains in one tensor and one leapfrog step at a time.

Each chain is at its own place in its own tree; one that has finished a transition starts the next
while others still extend theirs. There is no branch that depends on numbers, so a step is one
program for the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from tyxe import check
from tyxe.samplers.hamiltonian import MAX_ENERGY_ERROR, Hamiltonian, Settings
from tyxe.samplers.kernel import Randomness, Transition, choose
from tyxe.samplers.potential import Point, Potential, kinetic_energy, leapfrog


class Blocks(NamedTuple):
    """Of every aligned block of 1, 2, 4, ... leaves that the newest leaf is in: its beginning.

    That is what the U-turn criterion needs of the subtrees of a subtree. All are `(chains, levels,
    d)`: the first momentum, the sum of momenta before it, and the last momentum of the block
    before, where both together are a block of the next level.
    """

    first: Tensor
    before: Tensor
    previous: Tensor


class NUTSState(NamedTuple):
    """A transition under way, for each chain.

    Attributes:
        left, right: the ends of the trajectory, with their momenta.
        energy: of the trajectory's start, `(chains,)`.
        proposal: the point drawn from the trajectory so far.
        log_weight: log of the trajectory's summed weights, relative to its start.
        total: the sum of its momenta.
        forward: whether the subtree extends it to the right.
        depth: of the subtree, which has `2^depth` leaves.
        leaf: number of leaves that the subtree has.
        new_proposal, new_log_weight, new_total: the same of the subtree.
        junction: the momentum at the end to which the subtree is joined.
        blocks: of the subtree.
        acceptance: summed acceptance probabilities of the leaves of this transition.
        leapfrogs: their number.
    """

    left: tuple[Point, Tensor]
    right: tuple[Point, Tensor]
    energy: Tensor
    proposal: Point
    log_weight: Tensor
    total: Tensor
    forward: Tensor
    depth: Tensor
    leaf: Tensor
    new_proposal: Point
    new_log_weight: Tensor
    new_total: Tensor
    junction: Tensor
    blocks: Blocks
    acceptance: Tensor
    leapfrogs: Tensor


@dataclass(frozen=True)
class NUTS(Hamiltonian):
    """The no-U-turn sampler with multinomial weights, a kernel of `MCMC_BNN`.

    Options that are not listed are those of `Hamiltonian`.

    Args:
        max_tree_depth: largest number of doublings of a trajectory.

    Reference:
        Hoffman, Gelman 2014; Betancourt 2017, A.3-A.4; Phan, Pradhan, Jankowiak 2019, 2.2.
    """

    statistics: ClassVar[tuple[str, ...]] = ("acceptance", "leapfrogs", "depth", "diverged")

    max_tree_depth: int = check.field(10, check.count)

    def begin(self, point: Point, noise: Tensor, coin: Tensor, inverse_mass: Tensor) -> NUTSState:
        momentum = noise * inverse_mass.rsqrt()
        zero = torch.zeros_like(point.potential)
        count = torch.zeros_like(zero, dtype=torch.long)
        level = momentum[:, None].expand(-1, self.max_tree_depth, -1)
        return NUTSState(
            left=(point, momentum),
            right=(point, momentum),
            energy=point.potential + kinetic_energy(momentum, inverse_mass),
            proposal=point,
            log_weight=zero,
            total=momentum,
            forward=coin < 0.5,
            depth=count,
            leaf=count,
            new_proposal=point,
            new_log_weight=torch.full_like(zero, -torch.inf),
            new_total=torch.zeros_like(momentum),
            junction=momentum,
            blocks=Blocks(level, torch.zeros_like(level), level),
            acceptance=zero,
            leapfrogs=count,
        )

    def step(
        self, potential: Potential, state: NUTSState, settings: Settings, random: Randomness
    ) -> tuple[NUTSState, Transition]:
        step_size, inverse_mass = settings
        noise, uniforms = random.noise[0], random.uniforms
        end, momentum = choose(state.forward, state.right, state.left)
        time = torch.where(state.forward, step_size, -step_size)[:, None]
        point, momentum = leapfrog(potential, end, momentum, time, inverse_mass)
        gain = state.energy - point.potential - kinetic_energy(momentum, inverse_mass)
        gain = gain.nan_to_num(nan=-torch.inf)
        diverged = gain < -MAX_ENERGY_ERROR

        new_log_weight = torch.logaddexp(state.new_log_weight, gain)
        taken = uniforms[0].log() < gain - new_log_weight
        new_proposal = choose(taken, point, state.new_proposal)
        new_total = state.new_total + momentum
        blocks, turned = _extended(state, momentum, new_total, inverse_mass)
        stopped = diverged | turned
        whole = (state.leaf + 1 == (1 << state.depth)) & ~stopped

        accepted = whole & (uniforms[1].log() < new_log_weight - state.log_weight)
        proposal = choose(accepted, new_proposal, state.proposal)
        far = choose(state.forward, state.left[1], state.right[1])
        total = state.total + new_total
        turned_whole = _turns(total, far, momentum, inverse_mass)
        first = blocks.first[:, -1]
        turned_whole |= _turns(state.total + first, far, first, inverse_mass)
        turned_whole |= _turns(new_total + state.junction, state.junction, momentum, inverse_mass)
        done = stopped | (whole & (turned_whole | (state.depth + 1 == self.max_tree_depth)))

        acceptance = state.acceptance + gain.clamp(max=0).exp()
        leapfrogs = state.leapfrogs + 1
        # A doubling that stopped halfway adds nothing to the trajectory.
        found = [acceptance / leapfrogs, leapfrogs, state.depth + whole, diverged]
        statistics = torch.stack([one.to(gain.dtype) for one in found], -1)
        transition = Transition(done, proposal.position, proposal.potential, statistics)
        same = state._replace(
            left=choose(state.forward, state.left, (point, momentum)),
            right=choose(state.forward, (point, momentum), state.right),
            proposal=proposal,
            leaf=state.leaf + 1,
            new_proposal=new_proposal,
            new_log_weight=new_log_weight,
            new_total=new_total,
            blocks=blocks,
            acceptance=acceptance,
            leapfrogs=leapfrogs,
        )
        forward = uniforms[2] < 0.5
        doubled = same._replace(
            log_weight=torch.logaddexp(state.log_weight, new_log_weight),
            total=total,
            forward=forward,
            depth=state.depth + 1,
            leaf=torch.zeros_like(state.leaf),
            new_log_weight=torch.full_like(gain, -torch.inf),
            new_total=torch.zeros_like(new_total),
            junction=choose(forward, same.right[1], same.left[1]),
        )
        anew = self.begin(proposal, noise, uniforms[2], inverse_mass)
        return choose(done, anew, choose(whole, doubled, same)), transition

    def advice(self, statistics: dict[str, Tensor]) -> list[str]:
        """Return advice on transitions that diverged, or whose trees are at their full depth."""
        found = super().advice(statistics)
        share = float((statistics["depth"] >= self.max_tree_depth).double().mean())
        if share > 0.05:
            found.append(
                f"{share:.1%} of the trees have the full depth of {self.max_tree_depth}, and their "
                "transitions are shorter than they should be: raise max_tree_depth, or warm up "
                "longer, so that step size and mass matrix fit"
            )
        return found


def _turns(total: Tensor, first: Tensor, last: Tensor, inverse_mass: Tensor) -> Tensor:
    """Whether a trajectory with this sum of momenta has turned, by those of its two ends."""
    along = total * inverse_mass
    return ((along * first).sum(-1) <= 0) | ((along * last).sum(-1) <= 0)


def _extended(
    state: NUTSState, momentum: Tensor, total: Tensor, inverse_mass: Tensor
) -> tuple[Blocks, Tensor]:
    """Return the blocks with one more leaf, and whether one that it completes has turned."""
    levels = state.blocks.first.shape[1]
    sizes = 1 << torch.arange(levels, device=momentum.device)
    leaf, newest, sum_ = state.leaf[:, None], momentum[:, None], total[:, None]
    begins = (leaf & (sizes - 1) == 0)[..., None]
    first = torch.where(begins, newest, state.blocks.first)
    before = torch.where(begins, state.new_total[:, None], state.blocks.before)
    ends = (leaf + 1) & (sizes - 1) == 0

    # The two halves of each block above a leaf: blocks of the level below.
    inverse = inverse_mass[:, None]
    left_total, right_total = before[:, :-1] - before[:, 1:], sum_ - before[:, :-1]
    joint, previous = first[:, :-1], state.blocks.previous[:, :-1]
    turned = _turns(left_total + right_total, first[:, 1:], newest, inverse)
    turned |= _turns(left_total + joint, first[:, 1:], joint, inverse)
    turned |= _turns(right_total + previous, previous, newest, inverse)
    previous = torch.where(ends[..., None], newest, state.blocks.previous)
    return Blocks(first, before, previous), (turned & ends[:, 1:]).any(-1)
