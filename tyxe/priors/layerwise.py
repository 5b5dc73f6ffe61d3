"""Normal priors whose scale follows from each layer's fans."""

from __future__ import annotations

from typing import Any

import pyro.distributions as dist
import torch.distributions as td
from torch import nn

from tyxe.priors.base import Prior
from tyxe.util import calculate_prior_std, layer_weight


class LayerwiseNormalPrior(Prior):
    r"""Zero-mean Normals with the standard deviations of initialisation schemes.

    `radford`: `1 / sqrt(fan_in)`; `xavier`: `sqrt(2 / (fan_in + fan_out))`; `kaiming`:
    `gain / sqrt(fan_in)`. A bias takes its layer's fans. Selection rules are those of `Prior`.

    Args:
        method: `"radford"`, `"xavier"` or `"kaiming"`.
        nonlinearity: whose gain `kaiming` takes, by its name in `torch.nn.init.calculate_gain`.

    Raises:
        ValueError: an unknown method.

    Reference:
        [T] 5.1.1.2; Neal, Bayesian learning for neural networks, 1996.

    Example:
        >>> prior = LayerwiseNormalPrior("radford")
        >>> prior.sites(nn.Linear(25, 10))["bias"].base_dist.scale[0].item()
        0.20000000298023224
    """

    def __init__(
        self,
        method: str = "radford",
        nonlinearity: str = "relu",
        expose_all: bool = True,
        hide_all: bool = False,
        **rules: Any,
    ) -> None:
        super().__init__(expose_all, hide_all, **rules)
        calculate_prior_std(method, nn.Linear(1, 1).weight, nonlinearity=nonlinearity)
        self.method = method
        self.nonlinearity = nonlinearity

    def prior_dist(self, name: str, module: nn.Module, param: nn.Parameter) -> td.Distribution:
        weight = layer_weight(module, name.rpartition(".")[2])
        std = calculate_prior_std(self.method, weight, module, self.nonlinearity)
        return dist.Normal(0.0, std).expand(param.shape)
