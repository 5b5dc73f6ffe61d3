"""The kernel of the linearised net, `k(x, x') = J P0^-1 J'^T`, from gradients [GLM 15]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tyxe.autocast import full_precision
from tyxe.curvature import Linearization
from tyxe.curvature.gradients import OuterProductGradients, PointGradients
from tyxe.curvature.output_covariance import one_hot


@dataclass(frozen=True, eq=False)
class Part:
    """The features of one block of weights: `g`, `(n, K, p)`, or outer products `g_nk a_n^T`.

    The products have `g`, `(n, K, o)`, of a linear map's outputs and `a`, `(n, i)`, of its inputs.
    """

    g: Tensor
    a: Tensor | None = None

    def kernel(self, other: Part) -> Tensor:
        """Return the inner products `(n, K, m, L)` with the same block's features at other points.

        They are summed in float64, because the predictive is a small difference of them.
        """
        products = torch.einsum("nkp,mlp->nkml", self.g.double(), other.g.double())
        if self.a is None or other.a is None:
            return products
        return products.mul_((self.a.double() @ other.a.double().mT)[:, None, :, None])

    def blocks(self) -> Tensor:
        """Return the inner products within each point, `(n, K, K)`."""
        g = self.g.double()
        products = g @ g.mT
        return products if self.a is None else products * _squares(self.a)[:, None, None]


@dataclass(frozen=True, eq=False)
class Features:
    """Gradients of outputs times the prior's standard deviations, `J P0^-1/2`, `(n, K, P)`."""

    parts: tuple[Part, ...]

    @classmethod
    def from_jacobian(cls, jacobian: Tensor, prior_precision: Tensor) -> Features:
        """Return the features of a Jacobian, `(n, K, P)`, for the diagonal of `P0`, `(P,)`."""
        return cls((Part(jacobian * prior_precision.rsqrt()),))

    @classmethod
    def cat(cls, pieces: Sequence[Features]) -> Features:
        """Return the features of all points of some batches."""
        return cls(
            tuple(_concatenated(parts) for parts in zip(*(p.parts for p in pieces), strict=True))
        )

    def __len__(self) -> int:
        return len(self.parts[0].g)

    @property
    def outputs(self) -> int:
        """The number `K` of rows of a point."""
        return self.parts[0].g.shape[1]

    def mixed(self, root: Tensor) -> Features:
        """Return `S^T J P0^-1/2`, `(n, s, P)`, for a root `S` of each point, `(n, K, s)`."""
        return Features(tuple(Part(root.to(p.g).mT @ p.g, p.a) for p in self.parts))

    def kernel(self, other: Features) -> Tensor:
        """Return `J P0^-1 J'^T` of every pair of points, `(n, K, m, L)` in float64."""
        total = self.parts[0].kernel(other.parts[0])
        for mine, theirs in zip(self.parts[1:], other.parts[1:], strict=True):
            total += mine.kernel(theirs)
        return total

    def blocks(self) -> Tensor:
        """Return `J P0^-1 J^T` of every point with itself, `(n, K, K)` in float64."""
        return torch.stack([part.blocks() for part in self.parts]).sum(0)


def output_features(linear: Linearization, prior_precision: Tensor) -> Features:
    """Return the features of a linearised net; those of linear maps stay outer products.

    `prior_precision` is the diagonal of `P0`, `(P,)`, in the order of the net's blocks.
    """
    indices = range(linear.outputs.shape[1:].numel())
    with full_precision(linear.outputs):
        rows = [linear.gradients(one) for one in one_hot(linear.outputs, indices)]
    sds = prior_precision.rsqrt().split(linear.blocks.sizes)
    parts = zip(linear.blocks.names, sds, strict=True)
    return Features(tuple(_part([row[name] for row in rows], sd) for name, sd in parts))


def _part(rows: list[PointGradients], sd: Tensor) -> Part:
    first = rows[0]
    if isinstance(first, OuterProductGradients) and first.is_single:
        by_input = sd.view(-1, first.a.shape[-1])
        if bool((by_input == by_input[0]).all()):
            g = [row.g[:, 0, 0] for row in rows if isinstance(row, OuterProductGradients)]
            return Part(torch.stack(g, 1), first.a[:, 0, 0] * by_input[0])
    return Part(torch.stack([row.dense() for row in rows], 1) * sd)


def _squares(a: Tensor) -> Tensor:
    return a.double().square().sum(-1)


def _concatenated(parts: tuple[Part, ...]) -> Part:
    inputs = [part.a for part in parts if part.a is not None]
    return Part(torch.cat([p.g for p in parts]), torch.cat(inputs) if inputs else None)
