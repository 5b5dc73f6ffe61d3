"""The estimate of a Pareto shape: known tails, ArviZ's own, and guides with known ratios."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from tyxe.diagnostics import pareto_k
from tyxe.diagnostics.convergence import _shape


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.9, 1.5])
def test_a_known_tail_is_found(shape):
    found = []
    for seed in range(20):
        draws = stats.genpareto.rvs(shape, size=4_000, random_state=seed)
        found.append(pareto_k(torch.as_tensor(np.log(draws))))
    # The weak prior on 1/2 moves it by a tenth of the distance, at 190 ratios of the tail.
    assert np.mean(found) == pytest.approx(shape, abs=0.1)


def test_it_is_that_of_arviz():
    arviz = pytest.importorskip("arviz", reason="it is of the extra 'mcmc'")
    for seed, shape in enumerate((0.1, 0.4, 0.8, 1.2)):
        ratios = np.log(stats.genpareto.rvs(shape, size=2_000, random_state=seed))
        _, expected = arviz.psislw(ratios)
        assert pareto_k(torch.as_tensor(ratios)) == pytest.approx(float(expected), abs=0.02)


def test_constants_do_not_matter_and_equal_ratios_have_no_tail():
    ratios = torch.randn(500, dtype=torch.float64)
    assert pareto_k(ratios + 1e4) == pytest.approx(pareto_k(ratios), abs=1e-6)
    assert pareto_k(torch.zeros(100)) == -math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.0, -3.7, 1e5])
def test_ratios_that_differ_by_rounding_are_equal(constant, dtype):
    """As those of an exact posterior, whose log joint and density are rounded apart."""
    unit = torch.finfo(dtype).eps * max(1.0, abs(constant))
    for seed in range(50):
        draw = torch.Generator().manual_seed(seed)
        noise = torch.randint(-2, 3, (100,), generator=draw).to(dtype)
        assert pareto_k(constant + unit * noise) == -math.inf


@pytest.mark.parametrize("count", [25, 50, 1000])
@pytest.mark.parametrize("spread", [10.0**power for power in range(-18, 9, 2)])
def test_it_is_a_number_at_every_spread(spread, count):
    """Gaussian logarithms have a light tail where they differ little, and a heavy one else."""
    found = []
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        ratios = torch.randn(count, generator=draw, dtype=torch.float64)
        found += [pareto_k(spread * ratios), pareto_k((4 * ratios).round() * spread)]
    assert not any(map(math.isnan, found))
    if spread < 0.1:
        assert np.median(found) < 0.5
    if spread > 5:
        assert sorted(found)[2] > 0.7


def test_a_rate_of_nothing_on_the_grid_of_the_estimate():
    """The 9th of 34 points is 0 where the quartile is a third of the largest."""
    excess = torch.tensor([1 / 3] * 5 + [1.0] * 15, dtype=torch.float64)
    beside = torch.tensor([1 / 3 + 1e-9] * 5 + [1.0] * 15, dtype=torch.float64)
    assert _shape(excess) == pytest.approx(_shape(beside), rel=1e-6)


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        (torch.randn(20), "expected 25 or more"),
        (torch.tensor([0.0, math.inf] * 50), "expected finite numbers"),
        (torch.randn(50, 2), r"expected \(S,\)"),
    ],
)
def test_bad_input(ratios, message):
    with pytest.raises(ValueError, match=message):
        pareto_k(ratios)
