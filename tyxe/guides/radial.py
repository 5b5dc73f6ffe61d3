"""The radial guide: a custom guide in few lines."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from tyxe.distributions import known_entropy
from tyxe.guides.normal import MeanField

__all__ = ["AutoRadial", "Radial"]


class Radial(dist.TorchDistribution):
    r"""A direction uniform on the sphere times a half-normal radius, scaled and shifted.

    `w = loc + scale * (e / |e|) * |r|` with `e ~ N(0, I_P)` and `r ~ N(0, 1)`, over all `P`
    elements at once. Each element has variance `scale^2 / P`.

    Args:
        loc: any shape; all its dimensions form one event.
        scale: of the same shape, positive.

    Reference:
        Farquhar, Osborne, Gal, Radial Bayesian neural networks, 2020, eq. 4.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> Radial(torch.zeros(400), torch.ones(400)).rsample().norm() < 4
        tensor(True)
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "loc": constraints.real,
        "scale": constraints.positive,
    }
    support = constraints.real
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale
        super().__init__(torch.Size(), loc.shape, validate_args=False)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> Radial:
        """Return the distribution itself; it has no batch dimensions to expand."""
        if tuple(batch_shape):
            raise NotImplementedError("a radial distribution is one joint event")
        return self

    @property
    def mean(self) -> Tensor:
        """The centre."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Elementwise variance, `scale^2 / P`."""
        return self.scale.square() / self.loc.numel()

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        """Draw with gradients."""
        shape = torch.Size(sample_shape) + self._event_shape
        direction = self.loc.new_empty(shape).normal_()
        flat = direction.flatten(len(sample_shape)) if self._event_shape else direction[..., None]
        norm = flat.norm(dim=-1).reshape((*sample_shape, *[1] * len(self._event_shape)))
        radius = torch.randn_like(norm).abs()
        return self.loc + self.scale * direction / norm * radius

    def log_prob(self, value: Tensor) -> Tensor:
        r"""Return the density, `log p(|u|) - log A(|u|) - sum log scale`, `u = (w - loc)/scale`.

        `p` is the half-normal density of the radius and `A` the area of the sphere in `P`
        dimensions through the point.
        """
        count = self.loc.numel()
        dims = tuple(range(value.dim() - len(self._event_shape), value.dim()))
        scaled = (value - self.loc) / self.scale
        squared = scaled.square().sum(dims) if dims else scaled.square()
        area = math.log(2.0) + count / 2 * math.log(math.pi) - math.lgamma(count / 2)
        radial = 0.5 * math.log(2 / math.pi) - squared / 2
        # One element has no direction to spread over; at its centre the log would be infinite.
        spread = (count - 1) / 2 * squared.log() if count > 1 else 0.0
        return radial - area - spread - self.scale.log().sum()

    def entropy(self) -> Tensor:
        r"""Return `sum log scale` plus a constant of the number of elements."""
        count = self.loc.numel()
        area = math.log(2.0) + count / 2 * math.log(math.pi) - math.lgamma(count / 2)
        mean_log_radius = (torch.digamma(torch.tensor(0.5)).item() + math.log(2.0)) / 2
        constant = 0.5 * math.log(math.pi * math.e / 2) + area + (count - 1) * mean_log_radius
        return self.scale.log().sum() + constant


@known_entropy.register
def _(distribution: Radial) -> Tensor:
    return distribution.entropy()


class AutoRadial(MeanField):
    """The radial posterior, one joint direction and radius per site.

    Mean-field Normals in many dimensions keep away from their mean; here the typical distance
    from it does not grow with the number of weights.

    Args:
        module: the program that samples the sites from their prior; a BNN passes its own.
        init_loc_fn: as in `AutoNormal`, like all that follow.
        init_scale: the radius in units of each weight.
        train_loc: fit means too.
        train_scale: fit scales too.
        max_guide_scale: cap on scales.

    Reference:
        Farquhar, Osborne, Gal, Radial Bayesian neural networks, 2020.

    Example:
        >>> import tyxe, pyro.distributions as dist
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), AutoRadial)
        >>> bnn.predict(torch.zeros(3, 2), num_predictions=2, aggregate=False).shape
        torch.Size([2, 3, 1])
    """

    def base_distribution(self, loc: Tensor, log_scale: Tensor) -> dist.TorchDistribution:
        return Radial(loc, log_scale.exp())
