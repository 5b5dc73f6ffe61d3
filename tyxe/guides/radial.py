"""The radial guide, an example of a custom guide."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from tyxe.distributions import known_entropy
from tyxe.distributions.joint import OneEvent
from tyxe.guides.normal import MeanField


class Radial(OneEvent):
    """A direction uniform on the sphere times a half-normal radius, scaled and shifted.

    `w = loc + scale * (e / |e|) * |r|` with `e ~ N(0, I_P)` and `r ~ N(0, 1)`, over all `P`
    elements at once, which form one event. Each element has variance `scale^2 / P`.

    Reference:
        Farquhar, Osborne, Gal, Radial Bayesian neural networks, 2020, eq. 4.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {
        "loc": constraints.real,
        "scale": constraints.positive,
    }

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale
        super().__init__(torch.Size(), loc.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.scale.square() / self.loc.numel()

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
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
        radial = 0.5 * math.log(2 / math.pi) - squared / 2
        # With one element this term is zero, but at the centre it would be 0 times infinity.
        spread = (count - 1) / 2 * squared.log() if count > 1 else 0.0
        return radial - _log_area(count) - spread - self.scale.log().sum()

    def entropy(self) -> Tensor:
        count = self.loc.numel()
        mean_log_radius = (
            torch.digamma(torch.tensor(0.5, device="cpu")).item() + math.log(2.0)
        ) / 2
        constant = (
            0.5 * math.log(math.pi * math.e / 2) + _log_area(count) + (count - 1) * mean_log_radius
        )
        return self.scale.log().sum() + constant


def _log_area(count: int) -> float:
    """The log of the area of the unit sphere in so many dimensions."""
    return math.log(2.0) + count / 2 * math.log(math.pi) - math.lgamma(count / 2)


@known_entropy.register
def _(distribution: Radial) -> Tensor:
    return distribution.entropy()


class AutoRadial(MeanField):
    """The radial posterior, one joint direction and radius per site.

    Draws of a mean-field Normal in many dimensions are far from its mean; here their typical
    distance does not grow with the number of weights. Arguments and errors are those of
    `MeanField`; a scale is that of the radius, so that each of a site's `P` weights has the
    standard deviation `scale / sqrt(P)`.

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
