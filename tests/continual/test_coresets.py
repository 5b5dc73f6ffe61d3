"""Coresets against brute force, and changes for one prediction that are undone."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tyxe
from tests.oracles.tasks import WRAPPERS, N, assert_equal, data, laplace, variational
from tyxe import continual
from tyxe.continual import Heads, posterior_to_prior, restored
from tyxe.continual.coresets import CORESETS, k_center


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_restored_undoes_a_fit_and_a_prior(make):
    bnn = make()
    heads = Heads(bnn, modules=["head"])
    heads.start("first")
    heads.start("second")
    bnn.eval()
    before = copy.deepcopy((dict(bnn.state_dict()), heads.state_dict()))
    prior, joints = bnn.prior, bnn.net_prior.joints()

    def breaks():
        with restored(bnn, heads):
            heads.use("first")
            bnn.likelihood.dataset_size = 3
            bnn.fit([[part[:3] for part in data("first")]], torch.optim.Adam, 2, progress=False)
            heads.start("third")
            if make is not WRAPPERS["maximum a posteriori"]:
                posterior_to_prior(bnn)
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert_equal(dict(bnn.state_dict()), before[0])
    assert_equal(heads.state_dict(), before[1])
    assert (bnn.prior, bnn.net_prior.joints()) == (prior, joints)
    assert (bnn.likelihood.dataset_size, heads.current) == (N, "second")
    assert not any(module.training for module in bnn.modules())


def test_restored_forgets_a_size_that_a_fit_has_set():
    bnn = variational()
    bnn.likelihood.dataset_size = None
    with restored(bnn):
        bnn.likelihood.dataset_size = 7
    with pytest.raises(ValueError, match="not known"):
        _ = bnn.likelihood.dataset_size


def test_restored_puts_what_belongs_to_the_wrapper_back():
    bnn = variational()
    adam = torch.optim.Adam(bnn.parameters(), lr=1e-2)
    bnn.fit([data("first")], adam, 3)
    epochs, described = bnn.checkpoint()["epoch"], repr(bnn)
    with restored(bnn):
        bnn.fit([data("second")], torch.optim.SGD(bnn.parameters(), lr=1e-3), 5)
    assert bnn.optimizer is adam
    assert bnn.checkpoint()["epoch"] == epochs == 3
    assert repr(bnn) == described
    bnn = laplace(curvature_weight=3.0)
    bnn.fit([data("first")], torch.optim.Adam, 2)
    before = copy.deepcopy(dict(bnn.state_dict()))
    with restored(bnn):
        bnn.options, bnn.temperature = tyxe.LaplaceOptions(curvature_weight=5.0), 0.5
        bnn.fit([data("second")], torch.optim.Adam, 2)
    assert (bnn.options.curvature_weight, bnn.temperature) == (3.0, 1.0)
    assert_equal(dict(bnn.state_dict()), before)


@pytest.mark.parametrize("method", CORESETS)
@given(n=st.integers(2, 12), size=st.integers(1, 11), seed=st.integers(0, 5))
def test_a_coreset_and_the_rest_are_all_points_once(method, n, size, seed):
    size = min(size, n - 1)
    torch.manual_seed(seed)
    x = torch.randint(3, (n, 2)).float()  # with points that coincide
    y = torch.arange(n)
    indices = continual.coreset_indices(x, size, method)
    coreset, rest = continual.split_coreset((x, y), indices)
    assert len(coreset[1]) == size
    assert sorted([*coreset[1].tolist(), *rest[1].tolist()]) == list(range(n))
    assert rest[1].tolist() == sorted(rest[1].tolist())
    for inputs, targets in (coreset, rest):
        assert torch.equal(inputs, x[targets])


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
