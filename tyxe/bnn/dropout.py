"""Monte Carlo dropout: masks stay random, while everything else is in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from tyxe.bnn.base import DEFAULT_DRAWS
from tyxe.bnn.passes import ReplayedDraws
from tyxe.bnn.standin import in_modes, modes_of
from tyxe.bnn.variational import VariationalBNN
from tyxe.data import Output, Unpack
from tyxe.likelihoods import Likelihood
from tyxe.priors import IIDPrior
from tyxe.util import Inputs

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


class DropoutBNN(VariationalBNN):
    """A net whose dropout stays random when it predicts: Monte Carlo dropout.

    A forward draws masks for every row, and each forward is one draw. `fit` is maximum likelihood
    with dropout; the optimiser's `weight_decay` acts as the prior. Dropout modules, dropout inside
    attention and recurrent layers, and functional dropout are random; everything else is in eval
    mode. Arguments are those of `SupervisedBNN`, without prior.

    Raises:
        ValueError: at the first forward, a net without active dropout.

    Reference:
        Gal, Ghahramani 2016.

    Example:
        >>> import torch, tyxe
        >>> net = nn.Sequential(nn.Linear(2, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 3))
        >>> bnn = DropoutBNN(net, tyxe.likelihoods.Categorical(10))
        >>> bnn.predict(torch.zeros(5, 2), num_predictions=8).shape
        torch.Size([5, 3])
    """

    def __init__(
        self,
        net: nn.Module,
        likelihood: Likelihood,
        name: str = "",
        *,
        output: Output | None = None,
        unpack: Unpack | None = None,
    ) -> None:
        prior = IIDPrior(dist.Normal(0, 1), hide_all=True)
        super().__init__(net, prior, likelihood, name=name, output=output, unpack=unpack)

    _drops = False  # whether a forward of a fit has met dropout

    def model(self, inputs: Inputs, obs: Tensor | None = None) -> Any:
        with nullcontext() if self._drops else self._dropping():
            predictions = super().model(inputs, obs)
        self._drops = True
        return predictions

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._dropping():
            return super().forward(*inputs, **kwargs)

    def _stacked_outputs(
        self,
        inputs: Inputs,
        num_predictions: int,
        vectorize: bool | None = None,
        again: ReplayedDraws | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        with self._dropping() if num_predictions else nullcontext():
            return super()._stacked_outputs(inputs, num_predictions, vectorize, again)

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        modes = modes_of(self) or {part: part.training for part in self.net.modules()}
        dropping = [part for part in self.net.modules() if isinstance(part, _BY_MODE)]
        modes = {**modes, **dict.fromkeys(dropping, True)}
        with in_modes(self, modes), RandomDropout(self.net) as dropout:
            yield
        if not dropout.met:
            raise ValueError(
                f"nothing drops in this {type(self.net).__name__}, so that all draws are one: give "
                "it nn.Dropout layers with p above 0, or take tyxe.EnsembleBNN or tyxe.LaplaceBNN"
            )

    def _draws_of_weights(self) -> int:
        return DEFAULT_DRAWS  # of masks

    def to_module(self, sample: bool = False) -> nn.Module:
        """Return a plain net without dropout; a `sample` is a TypeError, see `to_ensemble`."""
        return self.to_ensemble(1) if sample else super().to_module()

    def to_ensemble(self, num_draws: int | None = None, **options: Any) -> Any:
        """Raise a TypeError: masks are drawn in each forward, so there are no draws of weights."""
        raise TypeError(
            "dropout draws masks in every forward, and there are no draws of weights to take "
            "along: call predict, or to_module() for the net without dropout"
        )


class RandomDropout(TorchFunctionMode):
    """Let functional dropout of a net drop in all modes, and count its uses in `met`.

    Dropout modules have to be in train mode too. A rate that a forward computes from its own
    `training` flag, as for `scaled_dot_product_attention`, is not changed.
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
