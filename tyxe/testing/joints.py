"""The contract of Gaussians over several sites."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Size, Tensor

from tyxe.distributions import (
    JointNormal,
    LinearGroup,
    PlainGroup,
    SiteProduct,
    StoredDistribution,
    detached,
)
from tyxe.linalg import BlockDiagonal, Cholesky, Dense, Diagonal, Inverse, Kronecker, LowRank, Sum
from tyxe.testing.asserts import assert_close

__all__ = ["JOINTS", "check_joint"]

# A transposed convolution in groups, and a vector: twelve weights and two biases, and three.
GROUPS = (LinearGroup("w", "b", Size([2, 1, 3, 2]), 2, True), PlainGroup("s", Size([3])))
SIZE = 17


def _tensor(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gram(size: int, seed: int = 0) -> Tensor:
    rows = _tensor(2 * size, size, seed=seed)
    return rows.mT @ rows / size


def _blocks(seed: int = 0) -> BlockDiagonal:
    product = Kronecker.from_factors(_gram(2, seed), _gram(7, seed + 1)).add_diagonal(0.5)
    return BlockDiagonal({"w": product, "s": Diagonal(0.1 + _tensor(3, seed=seed).square())})


def _with_sum() -> BlockDiagonal:
    first, second = _blocks(), _blocks(5)
    both = Sum({"0": first.blocks["w"], "1": second.blocks["w"]})
    return BlockDiagonal({"w": both, "s": first.blocks["s"]})


def _joint(precision: object, seed: int = 3) -> JointNormal:
    return JointNormal(GROUPS, _tensor(SIZE, seed=seed), precision)  # type: ignore[arg-type]


# Each makes a Gaussian over the sites of `GROUPS`.
JOINTS: dict[str, Callable[[], JointNormal]] = {
    "Dense": lambda: _joint(Dense(_gram(SIZE))),
    "blocks": lambda: _joint(_blocks(), 4),
    "blocks, others": lambda: _joint(_blocks(7), 5),
    "Sum": lambda: _joint(_with_sum(), 6),
    "Diagonal": lambda: _joint(Diagonal(0.1 + _tensor(SIZE).square())),
    "covariance": lambda: _joint(
        Inverse(Cholesky(_tensor(SIZE, SIZE).tril() + 4 * torch.eye(SIZE, dtype=torch.float64))), 8
    ),
    "covariance of low rank": lambda: _joint(
        Inverse(LowRank(0.1 + _tensor(SIZE).square(), _tensor(SIZE, 3))), 9
    ),
}


def check_joint(make: Callable[[], JointNormal]) -> None:
    """Assert that a Normal over several sites agrees with a dense one, to 1e-9.

    Args:
        make: makes the Gaussian, over any sites, in float64.

    Raises:
        AssertionError: with the rule that is broken.

    Example:
        >>> check_joint(JOINTS["blocks"])
    """
    joint = make()
    dense = _dense(joint)
    value = dense.sample((2,))
    _check_density(joint, dense, value)
    _check_sites(joint, dense, value)
    _check_copies(joint, value)
    _check_kl_with_sites(joint, dense)


def _dense(joint: JointNormal) -> td.MultivariateNormal:
    matrix = joint.precision.to_dense()
    return td.MultivariateNormal(joint.loc, precision_matrix=(matrix + matrix.mT) / 2)


def _check_density(joint: JointNormal, dense: td.MultivariateNormal, value: Tensor) -> None:
    assert_close(joint.log_prob(value), dense.log_prob(value), "log_prob", 1e-9)
    assert_close(joint.mean, dense.mean, "mean", 1e-9)
    assert_close(joint.variance, dense.variance, "variance", 1e-9)
    start = value[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(joint.log_prob(start), start, create_graph=True)
    expected = -joint.precision.to_dense() @ (start - joint.loc)
    assert_close(gradient, expected, "the gradient of log_prob", 1e-9)
    (curvature,) = torch.autograd.grad(gradient.sum(), start)
    expected = -joint.precision.to_dense().sum(0)
    assert_close(curvature, expected, "the second derivative of log_prob", 1e-9)
    assert joint.rsample((2, 3)).shape == (2, 3, *joint.event_shape), "shape of draws"


def _check_sites(joint: JointNormal, dense: td.MultivariateNormal, value: Tensor) -> None:
    parts = joint.separate(value)
    assert tuple(parts) == joint.names, f"the sites are {tuple(parts)}, not {joint.names}"
    one = joint.join({name: part[0] for name, part in parts.items()})
    assert torch.equal(one, value[0]), "join does not undo separate"
    positions = joint.separate(torch.arange(joint.event_shape.numel()))
    for name, part in parts.items():
        which = positions[name].flatten()
        covariance = dense.covariance_matrix[which][:, which]
        marginal = td.MultivariateNormal(joint.loc[which], covariance)
        found = joint.marginal(name)
        assert found.event_shape == part.shape[1:], f"{name!r} has shape {found.event_shape}"
        assert_close(found.log_prob(part), marginal.log_prob(part.flatten(1)), name, 1e-7)
        assert_close(found.variance.flatten(), marginal.variance, f"variance of {name!r}", 1e-9)
        half = joint.marginal_icdf(name, torch.full_like(part[0], 0.5))
        assert_close(half, found.mean, f"the median of {name!r}", 1e-9)


def _check_copies(joint: JointNormal, value: Tensor) -> None:
    expected = joint.log_prob(value)
    stored = StoredDistribution(joint)
    again = StoredDistribution(joint)
    with torch.no_grad():
        for buffer in again.buffers():
            buffer.mul_(1.5)
    again.load_state_dict(stored.state_dict())
    copies = {
        "detached": detached(joint),
        "stored": stored.distribution,
        "a loaded state": again.distribution,
        "deepcopy": copy.deepcopy(stored).distribution,
        "pickle": pickle.loads(pickle.dumps(stored)).distribution,
    }
    for what, other in copies.items():
        assert torch.equal(other.log_prob(value), expected), f"{what} changed the density"
    single = stored.to(torch.float32).distribution
    assert single.log_prob(value.float()).dtype == torch.float32, ".to(float32) left float64"


def _check_kl_with_sites(joint: JointNormal, dense: td.MultivariateNormal) -> None:
    """Against independent Normals of the sites, on either side."""
    loc, scale = _tensor(SIZE, seed=11), 0.3 + _tensor(SIZE, seed=12).square()
    locs, scales = joint.separate(loc), joint.separate(scale)
    product = SiteProduct(
        {n: dist.Normal(locs[n], scales[n]).to_event(locs[n].dim()) for n in joint.names}
    )
    other = td.MultivariateNormal(loc, scale_tril=scale.diag())
    expected = td.kl_divergence(other, dense)
    assert_close(td.kl_divergence(product, joint), expected, "KL from Normals per site", 1e-8)
    expected = td.kl_divergence(dense, other)
    assert_close(td.kl_divergence(joint, product), expected, "KL to Normals per site", 1e-8)
