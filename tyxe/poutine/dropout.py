"""Dropout that is random in eval mode, while all else of a net stays in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
_FUNCTIONS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
}
# Those that these call, with other names.
_OPERATORS = {
    torch.dropout,
    torch.feature_dropout,
    torch.alpha_dropout,
    torch.feature_alpha_dropout,
}


class RandomDropout(TorchFunctionMode):
    """Let functional dropout drop whatever mode its module is in, and count what drops.

    Attributes:
        met: number of calls with a positive rate.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met = 0

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


@contextmanager
def random_dropout(net: nn.Module) -> Iterator[RandomDropout]:
    """Make the dropout of a net random until the end, in modules and in functions.

    Not reached is what a forward of its own makes of its `training` flag, such as the rate that it
    gives to `scaled_dot_product_attention`.
    """
    modules = [m for m in net.modules() if isinstance(m, _BY_MODE)]
    modes = [module.training for module in modules]
    mode = RandomDropout()
    try:
        for module in modules:
            module.training = True
            # Recurrent layers drop inside of one function.
            if isinstance(module, nn.RNNBase) and module.num_layers > 1:
                mode.met += module.dropout > 0
        with mode:
            yield mode
    finally:
        for module, before in zip(modules, modes, strict=True):
            module.training = before
