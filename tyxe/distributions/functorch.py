"""Whether PyTorch's function transforms are at work."""

from __future__ import annotations

import torch

__all__ = ["in_function_transform"]


def in_function_transform() -> bool:
    """Say whether `torch.func`'s transforms are active, under which autograd nodes of ours are not.

    Example:
        >>> in_function_transform()
        False
        >>> torch.func.vmap(lambda x: x * in_function_transform())(torch.ones(2))
        tensor([1., 1.])
    """
    # PyTorch has no public name for it.
    return torch._C._are_functorch_transforms_active()
