"""Normals whose parameters all differ."""

import torch
import torch.distributions as td

from tyxe.distributions import FactorizedNormal

SHAPE = (3, 2)


def normal(shape=SHAPE):
    return td.Normal(torch.randn(shape).double(), torch.rand(shape).double() + 0.5)


def factorized(requires_grad=False):
    q = normal()
    loc, scale = q.loc.requires_grad_(requires_grad), q.scale.requires_grad_(requires_grad)
    return FactorizedNormal(loc, scale.log())
