"""Priors of independent weights: one distribution, Normals by layer, or two values."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import nn

from tyxe import check
from tyxe.distributions import SignedBernoulli, SignedBetaBernoulli
from tyxe.priors.base import Prior
from tyxe.util import calculate_prior_std, layer_weight


class IIDPrior(Prior):
    """The same scalar distribution, independently for every weight.

    Args:
        distribution: a distribution over scalars, such as `dist.Normal(0, 1)`.
        rules: those of `Prior`, which choose the sites.

    Raises:
        TypeError: not a distribution.
        ValueError: not over scalars.

    Example:
        >>> import pyro.distributions as dist
        >>> prior = IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d])
        >>> sites = prior.sites(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
        >>> {name: tuple(site.event_shape) for name, site in sites.items()}
        {'0.weight': (8, 3, 3, 3), '0.bias': (8,)}
    """

    def __init__(self, distribution: td.Distribution, **rules: Any) -> None:
        super().__init__(**rules)
        check.one_of("distribution", distribution, td.Distribution, "one such as dist.Normal(0, 1)")
        shape = tuple(distribution.batch_shape + distribution.event_shape)
        if shape:
            raise ValueError(
                f"distribution has shape {shape}; IIDPrior takes one over scalars. For a "
                "distribution per parameter use DictPrior or LambdaPrior"
            )
        self.distribution = distribution

    def _arguments(self) -> str:
        return str(self.distribution)

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> td.Distribution:
        return self.distribution.expand(param.shape)


class LayerwiseNormalPrior(Prior):
    r"""Zero-mean Normals with the standard deviations of initialisation schemes.

    `radford`: `1 / sqrt(fan_in)`; `xavier`: `sqrt(2 / (fan_in + fan_out))`; `kaiming`:
    `gain / sqrt(fan_in)`. A bias has the fans of its layer.

    Args:
        method: `"radford"`, `"xavier"` or `"kaiming"`.
        nonlinearity: its gain is for `kaiming`; a name in `torch.nn.init.calculate_gain`.
        rules: those of `Prior`, which choose the sites.

    Raises:
        ValueError: an unknown method.

    Reference:
        [T] 5.1.1.2; Neal, Bayesian learning for neural networks, 1996.

    Example:
        >>> prior = LayerwiseNormalPrior("radford")
        >>> prior.sites(nn.Linear(25, 10))["bias"].base_dist.scale[0].item()
        0.20000000298023224
    """

    def __init__(self, method: str = "radford", nonlinearity: str = "relu", **rules: Any) -> None:
        super().__init__(**rules)
        calculate_prior_std(method, nn.Linear(1, 1).weight, nonlinearity=nonlinearity)
        self.method, self.nonlinearity = method, nonlinearity

    def _arguments(self) -> str:
        return repr(self.method)

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> td.Distribution:
        weight = layer_weight(module, name.rpartition(".")[2])
        std = calculate_prior_std(self.method, weight, module, self.nonlinearity)
        return dist.Normal(0.0, std).expand(param.shape)


class BinaryPrior(Prior):
    r"""Weights of two equally likely values, for `tyxe.guides.AutoBernoulli`.

    Args:
        delta: None for the plain prior, whose KL is `log 2` minus the posterior's entropy; a number
            for the Beta-Bernoulli regulariser, `-delta log pi (1 - pi)`, see `SignedBetaBernoulli`:
            a MAP objective in the probabilities, not a bound.
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

    def __init__(self, delta: float | None = None, scale: float | str = 1.0, **rules: Any) -> None:
        super().__init__(**rules)
        self.delta, self.scale = delta, scale
        self._of_weight("weight", nn.Linear(1, 1))

    def _arguments(self) -> str:
        return f"delta={self.delta}, scale={self.scale!r}"

    def _of_weight(self, name: str, module: nn.Module) -> SignedBernoulli:
        scale = self.scale
        if isinstance(scale, str):
            weight = layer_weight(module, name.rpartition(".")[2])
            scale = calculate_prior_std(scale, weight, module)
        if self.delta is None:
            return SignedBernoulli(torch.zeros((), device="cpu"), scale)
        return SignedBetaBernoulli(self.delta, scale)

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> td.Distribution:
        return self._of_weight(name, module).expand(param.shape)
