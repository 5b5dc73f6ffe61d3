"""The structure of a Gaussian over several sites, without its numbers, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tyxe.distributions.joint_normal import GaussianJoint, JointNormal, NormalProduct
from tyxe.distributions.param_blocks import ParamBlocks
from tyxe.linalg.state import operator_from_state, operator_state


def joint_state(joint: GaussianJoint) -> dict[str, Any]:
    """Return the blocks and structures from which `joint_from_state` builds a Gaussian."""
    return {
        "blocks": joint.blocks.state(),
        "terms": [
            {key: list(tensor.shape) for key, tensor in operator_state(operator).items()}
            for _, operator in joint.terms
        ],
        "is_product": isinstance(joint, NormalProduct),
    }


def joint_from_state(state: Mapping[str, Any]) -> GaussianJoint:
    """Return a Gaussian of zeros with a structure from `joint_state`, to load a state dict into."""
    blocks = ParamBlocks.from_state(state["blocks"])
    factors = []
    for shapes in state["terms"]:
        zeros = {key: torch.zeros(()).expand(shape) for key, shape in shapes.items()}
        operator = operator_from_state(zeros)
        factors.append(JointNormal(blocks, torch.zeros(operator.size), operator))
    return NormalProduct(factors) if state["is_product"] else factors[0]
