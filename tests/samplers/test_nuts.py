"""NUTS against the recursive reference: the same trees, and the law of what is taken from them."""

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from tests.oracles.trees import Reference
from tyxe.samplers import NUTS, Randomness, Run, batched
from tyxe.samplers.hamiltonian import Settings
from tyxe.samplers.potential import Point

pytestmark = pytest.mark.usefixtures("double")

CHAINS, D = 40, 3


def curved(w):
    """Return a potential without symmetry."""
    return 0.5 * w.square().sum() + 0.3 * torch.sin(2 * w).sum() + 0.5 * w[0] ** 2 * w[1] ** 2


def walled(w):
    """Return one that is NaN beyond a wall, and falls steeply towards it."""
    return curved(w) - 1e4 * torch.relu(w[2] - 0.8) + torch.sqrt(1.5 - w[2])


def curved_in_numpy(w):
    joint = w[0] * w[1]
    value = 0.5 * w @ w + 0.3 * np.sin(2 * w).sum() + 0.5 * joint**2
    return value, w + 0.6 * np.cos(2 * w) + joint * np.array([w[1], w[0], 0.0])


def walled_in_numpy(w):
    value, gradient = curved_in_numpy(w)
    with np.errstate(invalid="ignore"):
        root = np.sqrt(1.5 - w[2])
    gradient[2] -= 1e4 * (w[2] > 0.8) + 0.5 / root
    return value - 1e4 * max(w[2] - 0.8, 0.0) + root, gradient


IN_NUMPY = {curved: curved_in_numpy, walled: walled_in_numpy}


def transition(energy, start, noise, directions, step_size, inverse_mass, max_depth):
    """Make one transition of every chain, with directions `(chains, max_depth)`.

    Returns what each brought, and the positions whose potential it took, in their order.
    """
    every = batched(energy, start)
    visited = []

    def watched(position):
        visited.append(position.clone())
        return every(position)

    chains = len(start)
    uniforms = torch.where(directions, 0.25, 0.75)
    kernel = NUTS(max_tree_depth=max_depth)
    state = kernel.begin(Point.at(every, start), noise, uniforms[:, 0], inverse_mass)
    brought, made = [None] * chains, 0
    while any(one is None for one in brought):
        made += 1
        # The doubling after leaf 2^k - 1 takes direction k.
        coin = uniforms[:, min(made.bit_length(), max_depth - 1)]
        random = Randomness(noise[None], torch.stack([*torch.rand(2, chains), coin]))
        settings = Settings(step_size, inverse_mass)
        state, result = kernel.step(watched, state, settings, random)
        for chain in result.done.nonzero()[:, 0].tolist():
            if brought[chain] is None:
                brought[chain] = tuple(entry[chain] for entry in result[1:])
    return brought, torch.stack(visited, 1)


@pytest.mark.parametrize("energy", [curved, walled])
@pytest.mark.parametrize("max_depth", [1, 3, 7])
def test_trees_are_those_of_the_recursive_reference(energy, max_depth):
    start = 0.5 * torch.randn(CHAINS, D)
    noise = torch.randn(CHAINS, D)
    inverse_mass = 0.5 + torch.rand(CHAINS, D)
    step_size = 0.02 * 50 ** torch.rand(CHAINS)
    directions = torch.rand(CHAINS, max_depth) < 0.5
    given = start, noise, directions, step_size, inverse_mass
    brought, visited = transition(energy, *given, max_depth)

    seen = set()
    gradient = IN_NUMPY[energy]
    for chain, (position, potential, told) in enumerate(brought):
        mass = inverse_mass[chain].numpy()
        reference = Reference(gradient, float(step_size[chain]), mass, max_depth)
        momentum = noise[chain].numpy() / np.sqrt(mass)
        tree = reference.transition(
            start[chain].numpy(), momentum, iter(directions[chain].tolist())
        )
        acceptance, leapfrogs, depth, diverged = told.tolist()
        assert (leapfrogs, depth, bool(diverged)) == (tree.leapfrogs, tree.depth, tree.diverged)
        assert acceptance == pytest.approx(tree.acceptance, rel=1e-9)
        path = visited[chain, : tree.leapfrogs].numpy()
        np.testing.assert_allclose(path, np.stack(tree.visited), rtol=1e-9, atol=1e-9)
        distances = [np.abs(leaf - position.numpy()).max() for leaf, _ in tree.law]
        at = int(np.argmin(distances))
        assert distances[at] < 1e-9
        assert tree.law[at][1] > 0
        assert float(potential) == pytest.approx(gradient(position.numpy())[0], rel=1e-9)
        seen.add((tree.depth, tree.diverged))
    # The cases are of many kinds, or the comparison would be worth little.
    assert len(seen) >= min(max_depth, 4)
    assert any(diverged for _, diverged in seen) == (energy is walled)


def test_trees_of_oscillators_end_by_the_checks_across_the_joint():
    """Where a doubling spans whole periods the ends alone do not show that it has turned."""
    chains, depth = 400, 6
    frequencies = torch.tensor([1.0, 1.6, 2.7])
    ball = lambda w: 0.5 * (frequencies * w).square().sum()  # noqa: E731
    start, noise = torch.randn(2, chains, D) / torch.stack([frequencies, torch.ones(D)])[:, None]
    one = torch.ones(chains, D)
    step_size, directions = torch.linspace(0.05, 0.7, chains), torch.rand(chains, depth) < 0.5
    brought, _ = transition(ball, start, noise, directions, step_size, one, depth)
    squares, mass = frequencies.square().numpy(), np.ones(D)
    gradient = lambda w: (0.5 * w @ (squares * w), squares * w)  # noqa: E731
    lengths = {parts: [] for parts in [(0, 1, 2), (0, 1), (0, 2)]}
    for chain in range(chains):
        for parts, found in lengths.items():
            reference = Reference(gradient, float(step_size[chain]), mass, depth, parts)
            given = start[chain].numpy(), noise[chain].numpy(), iter(directions[chain].tolist())
            found.append(reference.transition(*given).leapfrogs)
    assert [told[1].item() for *_, told in brought] == lengths[0, 1, 2]
    # Without one of the two checks some are longer.
    assert lengths[0, 1] != lengths[0, 1, 2]
    assert lengths[0, 2] != lengths[0, 1, 2]


@pytest.mark.parametrize("seed", range(2))
def test_transitions_have_the_multinomial_law_of_their_tree(seed):
    torch.manual_seed(seed)
    count, max_depth, step_size = 20_000, 4, 0.15
    start, noise = 0.5 * torch.randn(D), torch.randn(D)
    directions = torch.rand(max_depth) < 0.5
    brought, _ = transition(
        curved,
        start.expand(count, D).clone(),
        noise.expand(count, D).clone(),
        directions.expand(count, -1),
        torch.full((count,), step_size),
        torch.ones(count, D),
        max_depth,
    )
    reference = Reference(curved_in_numpy, step_size, np.ones(D), max_depth)
    law = reference.transition(start.numpy(), noise.numpy(), iter(directions.tolist())).law
    assert sum(p for _, p in law) == pytest.approx(1)
    leaves = torch.stack([torch.from_numpy(leaf) for leaf, _ in law])
    ends = torch.stack([position for position, *_ in brought])
    distance, which = torch.cdist(ends, leaves).min(-1)
    assert float(distance.max()) < 1e-6
    found = torch.bincount(which, minlength=len(law)).double()
    expected = count * torch.tensor([p for _, p in law])
    assert float(found[expected == 0].sum()) == 0
    # Leaves that hardly weigh are counted together: the statistic's law is that of many counts.
    rare = expected < 10
    found, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (found, expected))
    is_there = expected > 0
    statistic = ((found - expected)[is_there].square() / expected[is_there]).sum()
    assert chi2.sf(float(statistic), int(is_there.sum()) - 1) > 1e-3
    assert len(law) >= 8


def told(run):
    return dict(zip(run.kernel.statistics, run.kept.statistics.unbind(-1), strict=True))


@pytest.mark.parametrize("max_depth", [1, 3, 6])
def test_a_tree_that_never_turns_ends_at_the_full_depth(max_depth):
    flat = lambda w: (torch.zeros(len(w)), torch.zeros_like(w))  # noqa: E731
    kernel = NUTS(step_size=0.1, adapt_step_size=False, max_tree_depth=max_depth)
    run = Run(kernel, flat, torch.zeros(3, 2), num_samples=5)
    list(run.steps())
    _, leapfrogs, depth, diverged = run.kept.statistics.unbind(-1)
    assert torch.equal(leapfrogs, torch.full((3, 5), 2.0**max_depth - 1))
    assert torch.equal(depth, torch.full((3, 5), float(max_depth)))
    assert not diverged.any()
    (advice,) = kernel.advice(told(run))
    assert f"full depth of {max_depth}" in advice


def test_a_chain_stays_where_every_step_diverges():
    pit = batched(lambda w: 1e9 * w.square().sum(), torch.ones(1, 2))
    start = torch.randn(4, 2)
    kernel = NUTS(step_size=1.0, adapt_step_size=False)
    run = Run(kernel, pit, start, num_samples=3)
    list(run.steps())
    assert torch.equal(run.kept.positions, start[:, None].expand(-1, 3, -1))
    statistics = told(run)
    assert (statistics["diverged"] == 1).all()
    assert (statistics["depth"] == 0).all()
    (advice,) = kernel.advice(statistics)
    assert "100.0% of the transitions diverged" in advice
