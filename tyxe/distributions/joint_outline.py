"""What a Gaussian over several sites is made of, less its numbers, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tyxe.distributions.groups import group_from_state, group_state
from tyxe.distributions.joint_normal import GaussianJoint, JointNormal
from tyxe.distributions.normal_product import NormalProduct
from tyxe.linalg import operator_from_state, operator_state

__all__ = ["joint_from_outline", "joint_outline"]


def joint_outline(joint: GaussianJoint) -> dict[str, Any]:
    """Return groups and structures, of which `joint_from_outline` makes a Gaussian of zeros.

    Args:
        joint: the Gaussian.
    """
    return {
        "groups": [group_state(group) for group in joint.groups],
        "terms": [
            {key: list(tensor.shape) for key, tensor in operator_state(operator).items()}
            for _, operator in joint.terms
        ],
        "is_product": isinstance(joint, NormalProduct),
    }


def joint_from_outline(outline: Mapping[str, Any]) -> GaussianJoint:
    """Return the Gaussian of an outline, to be filled by a state dict.

    Args:
        outline: what `joint_outline` returned.

    Example:
        >>> from tyxe.distributions import PlainGroup
        >>> from tyxe.linalg import Diagonal
        >>> group = PlainGroup("net.bias", torch.Size([2]))
        >>> q = JointNormal([group], torch.ones(2), Diagonal(torch.ones(2)))
        >>> joint_from_outline(joint_outline(q)).loc
        tensor([0., 0.])
    """
    groups = [group_from_state(state) for state in outline["groups"]]
    factors = []
    for shapes in outline["terms"]:
        zeros = {key: torch.zeros(()).expand(shape) for key, shape in shapes.items()}
        operator = operator_from_state(zeros)
        factors.append(JointNormal(groups, torch.zeros(operator.size), operator))
    return NormalProduct(factors) if outline["is_product"] else factors[0]
