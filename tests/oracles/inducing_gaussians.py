"""The Gaussian over inducing weights and weights, written out densely."""

import math

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Size

from tyxe.distributions import InducingWeights
from tyxe.distributions.inducing import LayerPrior
from tyxe.distributions.inducing_formulas import inducing_side
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.guides.inducing_families import DiagonalU, EnsembleU, FullU, MatrixU, Turn, WhitenedU

D_R, D_C = 3, 4  # the weight is 3 x 3, the bias the last column
LAYER = LayerPrior(LinearBlock("net.weight", "net.bias", Size([D_R, D_C - 1])), (1.5, 0.5))
SCALES = torch.tensor([1.5, 1.5, 1.5, 0.5]).double().repeat(D_R)  # row by row
SIZES = [(2, 3), (1, 1), (3, 4), (5, 6), (2, 6)]
FAMILIES = ["diagonal", "full", "matrix", "ensemble"]


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def tril(size):
    return torch.linalg.cholesky(torch.eye(size).double() + 0.3 * torch.ones(size, size).double())


def make_u(family, rows, columns, spread=0.6):
    loc = randn(rows, columns)
    if family == "diagonal":
        return DiagonalU(loc, 0.3 * randn(rows, columns) + math.log(spread))
    if family == "full":
        return FullU(loc, spread * tril(rows * columns))
    if family == "matrix":
        return MatrixU(loc, spread * tril(rows), tril(columns))
    return EnsembleU(randn(3, rows, columns), Turn(0, 3))


def make_maps(m_r, m_c, d_r=D_R, d_c=D_C):
    return (randn(m_r, d_r), 0.3 * randn(m_r) + 0.5), (randn(m_c, d_c), 0.3 * randn(m_c) + 0.5)


def make(family="diagonal", sizes=(2, 3), whitened=True):
    (z_r, r), (z_c, c) = make_maps(*sizes)
    rows, columns = inducing_side(z_r, r), inducing_side(z_c, c)
    u = make_u(family, *sizes)
    u = u if whitened else WhitenedU(u, rows.tril, columns.tril)
    return InducingWeights(u, rows, columns, torch.tensor(0.7).double(), LAYER)


def psi(z, log_d):
    return z @ z.mT + torch.diag((2 * log_d).exp())


def conditional(maps):
    """Map and covariance of `vec W | vec U`, row by row, `s = 1`, from the joint Gaussian."""
    (z_r, r), (z_c, c) = maps
    cross = torch.kron(z_r.mT.contiguous(), z_c.mT.contiguous())
    gain = cross @ torch.linalg.inv(torch.kron(psi(z_r, r), psi(z_c, c)))
    return gain, torch.eye(len(cross)).double() - gain @ cross.mT


def conditioned(q, means, covariance):
    """Means and covariance of the weights of scale 1, row by row, given those of `vec U`."""
    b = torch.kron(q.row_basis, q.column_basis.contiguous())
    total = q.conditional_scale**2 * (torch.eye(len(b)).double() - b @ b.mT) + b @ covariance @ b.mT
    return means @ b.mT, total


def dense(q):
    """Components' means and covariance of `vec W`, row by row, the plain way."""
    means, total = conditioned(q, *q.u.components())
    return means * SCALES, SCALES[:, None] * total * SCALES


def mixture_log_prob(means, covariance, value):
    normal = td.MultivariateNormal(means, covariance)
    return normal.log_prob(value).logsumexp(0) - math.log(len(means))


def close(actual, expected, tolerance=1e-8):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def priors(weight=1.5, bias=0.5):
    zeros = torch.zeros((), dtype=torch.float64)
    return {
        "net.weight": dist.Normal(zeros, zeros + weight).expand([3, 3]).to_event(2),
        "net.bias": dist.Normal(zeros, zeros + bias).expand([3]).to_event(1),
    }
