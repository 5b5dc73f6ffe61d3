"""The contract of Gaussians over several sites."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Size, Tensor

from tests.contracts.operators import random_gram, random_tensor
from tyxe.distributions import Gaussian, IndependentSites, ParamBlocks
from tyxe.distributions.buffered import BufferedDistribution, detached
from tyxe.distributions.param_blocks import LinearBlock, SiteBlock
from tyxe.linalg import BlockDiagonal, Cholesky, Dense, Diagonal, Inverse, Kronecker, LowRank, Sum
from tyxe.testing.asserts import assert_close

# A grouped transposed convolution (twelve weights and two biases) and a vector of three.
BLOCKS = ParamBlocks(
    (LinearBlock("w", "b", Size([2, 1, 3, 2]), 2, True), SiteBlock("s", Size([3])))
)
SIZE = 17


def _blocks(seed: int = 0) -> BlockDiagonal:
    product = Kronecker.from_factors(
        random_gram(2, 4, seed), random_gram(7, 14, seed + 1)
    ).add_diagonal(0.5)
    return BlockDiagonal({"w": product, "s": Diagonal(0.1 + random_tensor(3, seed=seed).square())})


def _with_sum() -> BlockDiagonal:
    first, second = _blocks(), _blocks(5)
    both = Sum({"0": first.blocks["w"], "1": second.blocks["w"]})
    return BlockDiagonal({"w": both, "s": first.blocks["s"]})


def _joint(precision: object, seed: int = 3) -> Gaussian:
    return Gaussian(BLOCKS, random_tensor(SIZE, seed=seed), precision)  # type: ignore[arg-type]


# Each function makes a Gaussian over the sites of `BLOCKS`.
JOINTS: dict[str, Callable[[], Gaussian]] = {
    "Dense": lambda: _joint(Dense(random_gram(SIZE, 2 * SIZE))),
    "blocks": lambda: _joint(_blocks(), 4),
    "blocks, others": lambda: _joint(_blocks(7), 5),
    "Sum": lambda: _joint(_with_sum(), 6),
    "Diagonal": lambda: _joint(Diagonal(0.1 + random_tensor(SIZE).square())),
    "covariance": lambda: _joint(
        Inverse(
            Cholesky(random_tensor(SIZE, SIZE).tril() + 4 * torch.eye(SIZE, dtype=torch.float64))
        ),
        8,
    ),
    "covariance of low rank": lambda: _joint(
        Inverse(LowRank(0.1 + random_tensor(SIZE).square(), random_tensor(SIZE, 3))), 9
    ),
}


def check_joint(make: Callable[[], Gaussian]) -> None:
    """Assert that a Normal over several sites agrees with a dense one, in float64, to 1e-9."""
    joint = make()
    dense = _dense(joint)
    value = dense.sample((2,))
    _check_density(joint, dense, value)
    _check_sites(joint, dense, value)
    _check_copies(joint, value)
    _check_kl_with_sites(joint, dense)


def _dense(joint: Gaussian) -> td.MultivariateNormal:
    matrix = joint.precision.to_dense()
    return td.MultivariateNormal(joint.loc, precision_matrix=(matrix + matrix.mT) / 2)


def _check_density(joint: Gaussian, dense: td.MultivariateNormal, value: Tensor) -> None:
    assert_close(joint.log_prob(value), dense.log_prob(value), "log_prob")
    assert_close(joint.mean, dense.mean, "mean")
    assert_close(joint.variance, dense.variance, "variance")
    start = value[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(joint.log_prob(start), start, create_graph=True)
    expected = -joint.precision.to_dense() @ (start - joint.loc)
    assert_close(gradient, expected, "the gradient of log_prob")
    (curvature,) = torch.autograd.grad(gradient.sum(), start)
    expected = -joint.precision.to_dense().sum(0)
    assert_close(curvature, expected, "the second derivative of log_prob")
    assert joint.rsample((2, 3)).shape == (2, 3, *joint.event_shape), "shape of draws"


def _check_sites(joint: Gaussian, dense: td.MultivariateNormal, value: Tensor) -> None:
    parts = joint.unflatten(value)
    assert tuple(parts) == joint.names, f"the sites are {tuple(parts)}, not {joint.names}"
    one = joint.flatten({name: part[0] for name, part in parts.items()})
    assert torch.equal(one, value[0]), "flatten does not undo unflatten"
    positions = joint.unflatten(torch.arange(joint.event_shape.numel()))
    for name, part in parts.items():
        which = positions[name].flatten()
        covariance = dense.covariance_matrix[which][:, which]
        marginal = td.MultivariateNormal(joint.loc[which], covariance)
        found = joint.marginal(name)
        assert found.event_shape == part.shape[1:], f"{name!r} has shape {found.event_shape}"
        assert_close(found.log_prob(part), marginal.log_prob(part.flatten(1)), name, 1e-7)
        assert_close(found.variance.flatten(), marginal.variance, f"variance of {name!r}")


def _check_copies(joint: Gaussian, value: Tensor) -> None:
    expected = joint.log_prob(value)
    stored = BufferedDistribution(joint)
    again = BufferedDistribution(joint)
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


def _check_kl_with_sites(joint: Gaussian, dense: td.MultivariateNormal) -> None:
    """Compare the KL from and to independent Normals of the sites."""
    loc, scale = random_tensor(SIZE, seed=11), 0.3 + random_tensor(SIZE, seed=12).square()
    locs, scales = joint.unflatten(loc), joint.unflatten(scale)
    product = IndependentSites(
        {n: dist.Normal(locs[n], scales[n]).to_event(locs[n].dim()) for n in joint.names}
    )
    other = td.MultivariateNormal(loc, scale_tril=scale.diag())
    expected = td.kl_divergence(other, dense)
    assert_close(td.kl_divergence(product, joint), expected, "KL from Normals per site", 1e-8)
    expected = td.kl_divergence(dense, other)
    assert_close(td.kl_divergence(joint, product), expected, "KL to Normals per site", 1e-8)
