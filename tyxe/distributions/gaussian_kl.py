"""Closed-form KL divergences from and to a Normal over several sites."""

from __future__ import annotations

import math

import torch
import torch.distributions as td
from pyro import distributions as dist
from torch import Tensor

from tyxe.distributions.gaussian import Gaussian, quadratic
from tyxe.distributions.joint import IndependentSites
from tyxe.distributions.normal import FactorizedNormal, as_gaussian
from tyxe.linalg.functions import trace_of_solve
from tyxe.util import at_least_float32

HALF_LOG_2PI_E = 0.5 * (math.log(2 * math.pi) + 1)


def normal_moments(q: td.Distribution) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return mean, variance and log-scale of independent Normals over one site, or None."""
    normal = as_gaussian(q)
    if normal is None:
        return None
    if isinstance(normal, FactorizedNormal):
        return normal.loc, normal.variance, normal.log_scale
    scale = at_least_float32(normal.scale)
    return normal.loc, scale.square(), scale.log()


@td.register_kl(IndependentSites, Gaussian)
def _kl_independent_gaussian(q: IndependentSites, p: Gaussian) -> Tensor:
    """`sum_t 1/2 [diag(A_t) . v + (mu - m_t)^T A_t (mu - m_t)]`, less entropy and normaliser."""
    if set(q.distributions) != set(p.names):
        raise NotImplementedError
    points = {name: one for name, one in q.distributions.items() if isinstance(one, dist.Delta)}
    if len(points) == len(q.distributions):
        log_density = torch.stack([one.log_density.sum() for one in points.values()]).sum()
        return log_density - p.log_prob(p.flatten({name: one.v for name, one in points.items()}))
    moments = {name: normal_moments(one) for name, one in q.distributions.items()}
    known = {name: found for name, found in moments.items() if found is not None}
    if len(known) < len(moments):
        raise NotImplementedError
    mean, variance = (p.flatten({n: found[i] for n, found in known.items()}) for i in (0, 1))
    entropy = torch.stack([at_least_float32(found[2]).sum() for found in known.values()]).sum()
    entropy = entropy + mean.numel() * HALF_LOG_2PI_E
    energies = [quadratic(a, mean - m) + a.diagonal() @ variance for m, a in p.terms]
    return torch.stack(energies).sum() / 2 - p.log_normalizer - entropy


@td.register_kl(Gaussian, Gaussian)
def _kl_gaussians(q: Gaussian, p: Gaussian) -> Tensor:
    """`sum_t 1/2 [tr(A_t Lambda^-1) + (mu - m_t)^T A_t (mu - m_t)]`, less entropy, normaliser."""
    if q.blocks != p.blocks:
        raise NotImplementedError
    energies = [quadratic(a, q.loc - m) + trace_of_solve(a, q.precision) for m, a in p.terms]
    return torch.stack(energies).sum() / 2 - p.log_normalizer - _entropy(q)


@td.register_kl(Gaussian, IndependentSites)
def _kl_gaussian_independent(q: Gaussian, p: IndependentSites) -> Tensor:
    """`sum 1/2 (v + (mu - m)^2) / s^2 + log s + 1/2 log 2 pi`, less entropy, `v` the variances."""
    moments = {name: normal_moments(one) for name, one in p.distributions.items()}
    known = {name: found for name, found in moments.items() if found is not None}
    if set(p.distributions) != set(q.names) or len(known) < len(moments):
        raise NotImplementedError
    vectors = [q.blocks.flatten({n: found[i] for n, found in known.items()}) for i in range(3)]
    mean, variance, log_scale = (vector.to(q.loc.dtype) for vector in vectors)
    energy = ((q.variance + (q.loc - mean).square()) / variance).sum() / 2 + log_scale.sum()
    return energy + q.loc.numel() * (HALF_LOG_2PI_E - 0.5) - _entropy(q)


def _entropy(q: Gaussian) -> Tensor:
    return q.loc.numel() * HALF_LOG_2PI_E - q.precision.logdet() / 2
