"""Dropout that is random in eval mode, while all else of a net stays in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

# Modules whose mode says nothing but whether they drop: a transformer's layer has a fast path in
# eval mode that drops nothing.
_BY_MODE = (
    _DropoutNd,
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_NAMES = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout"
_FUNCTIONS = {getattr(F, name) for name in _NAMES.split()}
# Those that these call.
_NAMES_BELOW = "dropout feature_dropout alpha_dropout feature_alpha_dropout"
_OPERATORS = {getattr(torch, name) for name in _NAMES_BELOW.split()}


class RandomDropout(TorchFunctionMode):
    """Let functional dropout drop whatever mode its module is in, and count what drops.

    `dropping_parts` are to be in train mode besides. Not reached is what a forward of its own makes
    of its `training` flag, such as the rate that it gives to `scaled_dot_product_attention`.

    Args:
        net: the net that runs.

    Attributes:
        met: number of calls with a positive rate.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        # Recurrent layers drop inside of one function.
        recurrent = (part for part in net.modules() if isinstance(part, nn.RNNBase))
        self.met = sum(part.dropout > 0 for part in recurrent if part.num_layers > 1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FUNCTIONS:
            rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
            self.met += rate > 0
            args, kwargs = args[:2], {**kwargs, "training": True}
        elif func in _OPERATORS:
            x, rate = args[0] if args else kwargs["input"], args[1] if args[1:] else kwargs["p"]
            self.met += rate > 0
            args, kwargs = (x, rate, True), {}
        elif func is F.multi_head_attention_forward:
            # As `nn.MultiheadAttention` calls it, with the rate by position.
            self.met += args[10] > 0
            kwargs["training"] = True
        return func(*args, **kwargs)


def dropping_parts(net: nn.Module) -> list[nn.Module]:
    """Return the parts of a net that drop in train mode, whose mode says nothing else."""
    return [part for part in net.modules() if isinstance(part, _BY_MODE)]
