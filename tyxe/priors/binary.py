"""Weights of two values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributions as td
from torch import nn

from tyxe.distributions import SignedBernoulli, SignedBetaBernoulli
from tyxe.priors.base import Prior
from tyxe.util import calculate_prior_std, layer_weight


class BinaryPrior(Prior):
    r"""Weights of two values, each as likely as the other, for `tyxe.guides.AutoBernoulli`.

    Args:
        delta: None for the plain prior, whose KL is `log 2` less the posterior's entropy; a number
            for the Beta-Bernoulli regulariser, `-delta log pi (1 - pi)`, see
            `SignedBetaBernoulli`: a MAP objective in the probabilities, and not a bound.
        scale: the values are `-scale` and `scale`: a number, or a layer-wise method of
            `LayerwiseNormalPrior`; `"radford"` is `1 / sqrt(fan_in)`, which has the same effect
            as multiplying every layer's output by it.
        rules: those of `Prior`. `expose_parameters=["weight"],
            hide_module_types=[nn.BatchNorm2d]` keeps biases and norms deterministic.

    Raises:
        ValueError: a negative delta, a scale that is not positive or an unknown method.

    Reference:
        [T] 4.1.

    Example:
        >>> prior = BinaryPrior(scale="radford", expose_parameters=["weight"])
        >>> prior.sites(nn.Linear(25, 10))["weight"].support.base_constraint
        Signs(0.2)
    """

    def __init__(
        self,
        delta: float | None = None,
        scale: float | str = 1.0,
        expose_all: bool = True,
        hide_all: bool = False,
        **rules: Any,
    ) -> None:
        super().__init__(expose_all, hide_all, **rules)
        self.delta, self.scale = delta, scale
        self._of_scale(self._scale_of("weight", nn.Linear(1, 1)))

    def _of_scale(self, scale: float) -> SignedBernoulli:
        if self.delta is None:
            return SignedBernoulli(torch.zeros(()), scale)
        return SignedBetaBernoulli(self.delta, scale)

    def _scale_of(self, name: str, module: nn.Module) -> float:
        if not isinstance(self.scale, str):
            return self.scale
        weight = layer_weight(module, name.rpartition(".")[2])
        return calculate_prior_std(self.scale, weight, module)

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> td.Distribution:
        return self._of_scale(self._scale_of(name, module)).expand(param.shape)
