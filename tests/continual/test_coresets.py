"""Coresets against brute force."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tyxe import continual
from tyxe.continual.memory import CORESETS, k_center


@pytest.mark.parametrize("method", CORESETS)
@given(n=st.integers(2, 12), size=st.integers(1, 11), seed=st.integers(0, 5))
def test_a_coreset_has_points_of_the_task_once(method, n, size, seed):
    size = min(size, n - 1)
    torch.manual_seed(seed)
    x = torch.randint(3, (n, 2)).float()  # with points that coincide
    indices = continual.coreset_indices(x, size, method).tolist()
    assert len(indices) == len({*indices}) == size
    assert {*indices} <= {*range(n)}


def covering_radius(x, indices):
    return torch.cdist(x, x[list(indices)]).amin(-1).max().item()


@pytest.mark.parametrize("seed", range(5))
def test_k_center_is_greedy_and_within_twice_the_best(seed):
    torch.manual_seed(seed)
    x = torch.randn(9, 2, dtype=torch.double)
    chosen = k_center(x, 3).tolist()
    for count in (1, 2):
        distances = torch.cdist(x, x[chosen[:count]]).amin(-1)
        assert chosen[count] == int(distances.argmax())
    best = min(covering_radius(x, some) for some in itertools.combinations(range(9), 3))
    assert best <= covering_radius(x, chosen) <= 2 * best


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool, torch.half])
def test_k_center_takes_images_of_bytes_and_numbers(dtype):
    images = torch.randint(0, 256, (10, 1, 4, 4), dtype=torch.uint8).to(dtype)
    numbers = torch.randint(0, 256, (10,), dtype=torch.uint8).to(dtype)
    for points in (images, numbers):
        torch.manual_seed(0)
        expected = k_center(points.double().reshape(10, -1), 4)
        torch.manual_seed(0)
        assert torch.equal(k_center(points, 4), expected)


def test_a_coreset_follows_the_seed():
    x = torch.randn(30, 2)
    for method in CORESETS:
        picks = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            picks.append(continual.coreset_indices(x, 5, method).tolist())
        assert picks[0] == picks[1] != picks[2]


@pytest.mark.parametrize(
    ("size", "method", "message"),
    [
        (6, "random", "size is 6; expected a number above 0 and below 6: a coreset"),
        (0, "random", "size is 0"),
        (2, "k-means", "method is 'k-means'; expected one of 'random', 'k-center'"),
    ],
)
def test_wrong_coresets(size, method, message):
    with pytest.raises(ValueError, match=message):
        continual.coreset_indices(torch.randn(6, 2), size, method)
