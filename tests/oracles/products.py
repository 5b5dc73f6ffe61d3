"""Products of an input with one weight, each beside `F.linear` of the rearranged weight."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

Map = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True)
class Product:
    """A product as it is written, and the same by `F.linear`, both of `(x, weight, bias)`."""

    inputs: tuple[int, ...]
    weight: tuple[int, ...]
    bias: tuple[int, ...] | None
    written: Map
    linear: Map


class Weighted(nn.Module):
    """A net of one map, with its weight and bias."""

    def __init__(self, product: Product, function: Map):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(product.weight))
        self.bias = None if product.bias is None else nn.Parameter(torch.randn(product.bias))

    def forward(self, x):
        return self.function(x, self.weight, self.bias)


def _by_matrix(x, w, b):
    return F.linear(x, w.T, b)


def _by_rows(x, w, b):
    return F.linear(x, w, b)


def _heads(x, w, b):
    return F.linear(x, w.flatten(1).T).unflatten(-1, w.shape[1:])


def _of_heads(x, w, b):
    return F.linear(x.flatten(-2), w.flatten(0, 1).T)


H = torch.linspace(-1, 1, 8, dtype=torch.float64).view(4, 2)


def _einsum(equation):
    return lambda x, w, b: torch.einsum(equation, x, w)


def _tensordot(*dims):
    return lambda x, w, b: torch.tensordot(x, w, *dims)


def _outer(x, w, b):
    return x[:, None] * w


def _first(x, w, b):
    return F.linear(x.mT, w).mT


def _channels(x, w, b):
    return F.linear(x.movedim(1, -1), w).movedim(-1, 1)


def _heads_first(x, w, b):
    return F.linear(x, w.mT.flatten(0, 1)).unflatten(-1, (2, 2)).transpose(1, 2)


def _row(x, w, b):
    return F.linear(x, w[None])[:, 0]


# By name: shapes of input, weight and bias, the product, and the same by `F.linear`.
_PRODUCTS = {
    "addmm": ((4, 3), (3, 2), (2,), lambda x, w, b: torch.addmm(b, x, w), _by_matrix),
    "addmm, method": ((4, 3), (3, 2), (2,), lambda x, w, b: b.addmm(x, w), _by_matrix),
    "addmm, transposed": ((4, 3), (2, 3), (2,), lambda x, w, b: b.addmm(x, w.t()), _by_rows),
    "addmm, weight first": (
        *((4, 3), (2, 3), None),
        lambda x, w, b: torch.addmm(H.T, w, x.T).T,
        lambda x, w, b: x @ w.T + H,
    ),
    "addmm, scaled": (
        *((4, 3), (3, 2), None),
        lambda x, w, b: torch.addmm(H, x, w, beta=0.5, alpha=2.0),
        lambda x, w, b: 0.5 * H + 2.0 * F.linear(x, w.T),
    ),
    "addmm, without its input": (
        *((4, 3), (3, 2), None),
        lambda x, w, b: torch.addmm(H * torch.inf, x, w, beta=0),
        _by_matrix,
    ),
    "addmv": ((3,), (2, 3), (2,), lambda x, w, b: torch.addmv(b, w, x), _by_rows),
    "mv": ((3,), (2, 3), None, lambda x, w, b: torch.mv(w, x), _by_rows),
    "mv, weight last": ((4, 3), (3,), None, lambda x, w, b: x.mv(w), _row),
    "matmul, weight first": ((4, 3, 5), (2, 3), None, lambda x, w, b: w @ x, _first),
    "matmul, expanded": (
        *((4, 5, 3), (3, 2), None),
        lambda x, w, b: x @ w[None].expand(4, -1, -1),
        _by_matrix,
    ),
    "bmm": ((4, 5, 3), (3, 2), None, lambda x, w, b: torch.bmm(x, w.expand(4, 3, 2)), _by_matrix),
    "bmm, transposed after": (
        *((4, 5, 3), (2, 3), None),
        lambda x, w, b: x.bmm(w.expand(4, 2, 3).mT),
        _by_rows,
    ),
    "bmm, weight first": (
        *((4, 3, 5), (2, 3), None),
        lambda x, w, b: torch.bmm(w.expand(4, 2, 3), x),
        _first,
    ),
    "bmm, one of one": ((1, 5, 3), (3, 2), None, lambda x, w, b: x.bmm(w[None]), _by_matrix),
    "baddbmm": (
        *((4, 5, 3), (3, 2), (2,)),
        lambda x, w, b: torch.baddbmm(b, x, w.expand(4, 3, 2)),
        _by_matrix,
    ),
    "einsum": ((4, 3), (2, 3), None, _einsum("bi, oi -> bo"), _by_rows),
    "einsum, weight first": (
        *((4, 3), (3, 2), None),
        lambda x, w, b: torch.einsum("io,bi->bo", w, x),
        _by_matrix,
    ),
    "einsum, any dimensions": ((4, 5, 3), (3, 2), None, _einsum("...i,io->...o"), _by_matrix),
    "einsum, channels": ((4, 3, 2, 2), (2, 3), None, _einsum("bcxy,oc->boxy"), _channels),
    "einsum, heads": ((4, 5, 3), (3, 2, 2), None, _einsum("bti,ihk->bthk"), _heads),
    "einsum, out of order": ((4, 5, 3), (2, 3, 2), None, _einsum("bti,hik->bhtk"), _heads_first),
    "einsum, of heads": ((4, 5, 2, 3), (2, 3, 2), None, _einsum("bthk,hkd->btd"), _of_heads),
    "einsum, outer": ((4,), (2,), None, _einsum("b,o->bo"), _outer),
    "tensordot": ((4, 5, 3), (3, 2), None, _tensordot(1), _by_matrix),
    "tensordot, named": ((4, 5, 3), (2, 3), None, _tensordot(([-1], [1])), _by_rows),
    "tensordot, two": ((4, 5, 2, 3), (2, 3, 2), None, _tensordot(), _of_heads),
    "tensordot, weight first": (
        *((4, 3), (3, 2), None),
        lambda x, w, b: torch.tensordot(w, x, dims=([0], [1])).T,
        _by_matrix,
    ),
}
PRODUCTS = {name: Product(*parts) for name, parts in _PRODUCTS.items()}
