"""Agreement, total variation and Wasserstein distances of predictives, by hand and by SciPy."""

import pytest
import torch
from scipy import stats

from tyxe.diagnostics import agreement, total_variation, wasserstein2


def test_of_classes_by_hand():
    one = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]])
    two = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.7, 0.2]])
    assert agreement(one, two) == 0.5
    assert float(total_variation(one, two)) == pytest.approx(0.5 * (0.3 + 0.1))
    assert total_variation(one, one) == 0
    assert agreement(one, one) == 1


def test_total_variation_is_symmetric_and_at_most_one():
    torch.manual_seed(0)
    one, two = torch.randn(2, 50, 4).softmax(-1)
    assert total_variation(one, two) == total_variation(two, one)
    certain = torch.eye(2)
    assert total_variation(certain, certain.flip(0)) == 1


def test_wasserstein_of_as_many_samples_pairs_them_in_order():
    torch.manual_seed(0)
    one, two = torch.randn(40, 3, 2).double(), torch.randn(40, 3, 2).double() * 2 + 1
    gaps = one.sort(0).values - two.sort(0).values
    expected = gaps.square().mean(0).sqrt().mean()
    torch.testing.assert_close(wasserstein2(one, two), expected)


@pytest.mark.parametrize(("first", "second"), [(6, 4), (5, 7), (1, 9)])
def test_wasserstein_of_other_numbers_is_that_of_repeated_samples(first, second):
    torch.manual_seed(0)
    one, two = torch.randn(first, 3).double(), torch.randn(second, 3).double()
    repeated = one.repeat_interleave(second, 0), two.repeat_interleave(first, 0)
    torch.testing.assert_close(wasserstein2(one, two), wasserstein2(*repeated))
    # Of one point, the first distance is SciPy's, and no larger than the second.
    least = stats.wasserstein_distance(one[:, 0], two[:, 0])
    assert least <= float(wasserstein2(one[:, :1], two[:, :1])) + 1e-12


def test_wasserstein_of_gaussians():
    torch.manual_seed(0)
    one, two = torch.randn(100_000, 1), 1.0 + 2.0 * torch.randn(50_000, 1)
    assert float(wasserstein2(one, two)) == pytest.approx(2**0.5, rel=0.02)


@pytest.mark.parametrize(
    ("distance", "one", "other", "message"),
    [
        (agreement, torch.full((3, 2), 0.5), torch.full((2, 2), 0.5), "reference has shape"),
        (total_variation, torch.full((3, 2), 0.5), torch.ones(3, 2), "sum to"),
        (wasserstein2, torch.zeros(4, 3), torch.zeros(4, 2), "reference has shape"),
    ],
)
def test_bad_input(distance, one, other, message):
    with pytest.raises(ValueError, match=message):
        distance(one, other)
