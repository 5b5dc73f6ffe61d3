"""Mean-field guides: Normal, of SWAG, and the radial one, an example of a custom guide."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import pyro.distributions as dist
import torch
import torch.distributions as td
from torch import Tensor, nn
from torch.distributions import constraints
from torch.nn.functional import logsigmoid

from tyxe import check
from tyxe.distributions import FactorizedNormal, Gaussian, ParamBlocks, PrunedNormal, known_entropy
from tyxe.distributions.joint import OneEvent
from tyxe.guides.base import Guide, Site, check_real, on_support, start_of
from tyxe.guides.init import init_to_net, layerwise_std, scale_below_net
from tyxe.linalg import Inverse, LowRank
from tyxe.util import SiteTensors, at_least_float32, elementwise, resolve_site_name, with_float32

InitScale = float | str | Mapping[str, float | Tensor] | Callable[[Any], float | Tensor]


class MeanField(Guide):
    r"""Base of guides with a mean and a scale per weight, and no other parameters.

    The scale is `exp(r)`, or under a cap `c` it is `c sigmoid(r)`: smooth, so a scale near its cap
    still has a gradient, and proportional to `exp(r)` far below it. On a constrained support (the
    scales of a hierarchical prior) mean and scale are those before `biject_to(support)`.

    Args:
        module: the program that samples the sites from their prior; a BNN passes its own.
        init_loc_fn: gives the start of a site's means: `init_to_net` (the net's own values),
            `init_to_median` (of the prior), `init_to_normal_radford`, ...
        init_scale: start of the scales: a number, numbers or tensors by site, a layer-wise method
            (`"radford"`, `"xavier"`, `"kaiming"`), or a function of the site's message. The default
            is `scale_below_net()`, or half the cap if that is less.
        train_loc: with `False` means stay where they start.
        train_scale: with `False` scales stay where they start.
        max_guide_scale: upper bound of the scales.

    Raises:
        TypeError: `init_loc_fn` is not a function.
        ValueError: the program has no sites; a scale that is not positive or not below its
            cap; a start outside of a site's support.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        init_loc_fn: Callable[[Any], Tensor] = init_to_net,
        init_scale: InitScale | None = None,
        train_loc: bool = True,
        train_scale: bool = True,
        max_guide_scale: float | None = None,
    ) -> None:
        super().__init__(module)
        if max_guide_scale is not None:
            check.number("max_guide_scale", max_guide_scale, above=0)
        self.max_guide_scale = max_guide_scale
        locs, scales = {}, {}
        for site in self.sites:
            message = self.messages[site.name]
            loc = start_of("init_loc_fn", init_loc_fn, site, message)
            scale = self._start_of_scale(init_scale, site, message)
            unconstrained = loc if site.is_real else td.biject_to(site.support).inv(loc)
            if not bool(unconstrained.isfinite().all()):
                raise ValueError(
                    f"init_loc_fn gives {site.name!r} a start that is not inside "
                    f"{elementwise(site.support)}, or not finite; use tyxe.guides.init_to_median, "
                    "or a start of its own"
                )
            locs[site.own_name] = unconstrained
            names = ("init_scale", "max_guide_scale")
            unconstrained_scale = uncapped(torch.as_tensor(scale), max_guide_scale, names)
            scales[site.own_name] = unconstrained_scale.to(loc).expand_as(unconstrained)
        self.locs = SiteTensors(locs, trainable=train_loc)
        self.unconstrained_scales = SiteTensors(scales, trainable=train_scale)
        # Masks of the weights that `prune_` has kept, by site.
        self.kept = SiteTensors({}, trainable=None)
        self.messages = {}

    @property
    def kind(self) -> str:
        return f"{type(self).__name__}(max_guide_scale={self.max_guide_scale})"

    def _start_of_scale(self, start: InitScale | None, site: Site, message: Any) -> float | Tensor:
        if start is None:
            scale = scale_below_net()(message)
            return scale if self.max_guide_scale is None else min(scale, self.max_guide_scale / 2)
        if callable(start):
            return start(message)
        if isinstance(start, Mapping):
            return start[resolve_site_name(site.own_name, start)]
        return layerwise_std(message, start) if isinstance(start, str) else start

    def _log_scale(self, name: str) -> Tensor:
        return capped_log(self.unconstrained_scales[name], self.max_guide_scale)

    def get_loc(self, site_name: str) -> Tensor:
        """Return the means of a site (before its transform, if its support is constrained)."""
        return self.locs[self._own(site_name).own_name]

    def get_scale(self, site_name: str) -> Tensor:
        """Return the standard deviations of a site (before its transform, if any)."""
        return self._log_scale(self._own(site_name).own_name).exp()

    def site_distribution(self, site: Site) -> td.Distribution:
        base = self.base_distribution(self.locs[site.own_name], self._log_scale(site.own_name))
        if isinstance(base, FactorizedNormal) and site.own_name in self.kept:
            return PrunedNormal(base, self.kept[site.own_name])
        if site.is_real:
            return base
        return on_support(base, site.support)

    @abstractmethod
    def base_distribution(self, loc: Tensor, log_scale: Tensor) -> td.Distribution:
        """Return the distribution of this mean and log-scale, with all dimensions in its event."""


class AutoNormal(MeanField):
    r"""Independent Normals, one mean and one standard deviation per weight.

    `q(w) = prod_i N(w_i; loc_i, scale_i^2)`. Arguments and errors are those of `MeanField`; [T 5]
    takes `init_scale=1e-4` about the means of a trained net, and `max_guide_scale=0.1` for ResNets.

    Reference:
        [T] 5.1.2.

    Example:
        >>> import functools, tyxe
        >>> net = torch.nn.Linear(2, 1)
        >>> bnn = tyxe.VariationalBNN(
        ...     net, tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1),
        ...     functools.partial(AutoNormal, init_scale=1e-2))
        >>> bnn.net_guide.get_scale("weight").detach()
        tensor([[0.0100, 0.0100]])
    """

    def base_distribution(self, loc: Tensor, log_scale: Tensor) -> td.Distribution:
        return FactorizedNormal(loc, log_scale)


# --------------------------------------------------------------------------- scales with a cap


def uncapped(scale: Tensor, cap: float | None, names: tuple[str, str]) -> Tensor:
    """Return `r` with `scale = exp(r)`, or `scale = c sigmoid(r)` under a cap `c`, in float64.

    `names` are those of the two arguments in the message if a scale is not in range.
    """
    scale = check.numbers(names[0], scale.double(), "positive numbers", above=0)
    if cap is None:
        return scale.log()
    check.number(names[0], scale.max(), below=cap, hint=f", which is {names[1]}")
    return torch.logit(scale / cap)


def capped_log(unconstrained: Tensor, cap: float | None) -> Tensor:
    """Return the logarithm of the scale: `r`, or under a cap `log(c sigmoid(r))`."""
    return unconstrained if cap is None else logsigmoid(unconstrained) + math.log(cap)


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


# Of a weight that has not moved.
LEAST_VARIANCE = 1e-30


class SWAGGuide(Guide):
    r"""`N(m, 1/2 (diag s^2 + D D^T / (K - 1)))` over all sites, or a delta while it `moves`.

    `m` and `s^2` are mean and variance of all snapshots; `D` has the deviations of the last `K`
    from the mean at that time. A step of training moves `locs`; `collect` takes a snapshot.

    Args:
        module: the program that samples the sites from their prior.
        rank: `K`, at least 2.

    Raises:
        ValueError: a rank below 2; a site with a constrained support.

    Reference:
        Maddox et al. 2019, algorithm 1.
    """

    def __init__(self, module: Callable[..., Any], rank: int = 20) -> None:
        super().__init__(module)
        check_real(self.sites, "SWAG's posterior")
        self.rank, self.moves = check.count("rank", rank, 2), False
        starts = {site.own_name: init_to_net(self.messages[site.name]) for site in self.sites}
        self.locs = SiteTensors(starts)
        self.blocks = ParamBlocks.of_sites({site.name: site.shape for site in self.sites})
        start = at_least_float32(torch.cat([loc.flatten() for loc in starts.values()]))
        self.count = nn.Buffer(torch.zeros((), dtype=torch.long, device=start.device))
        self.mean, self.squares = (nn.Buffer(torch.zeros_like(start)) for _ in range(2))
        self.deviations = nn.Buffer(start.new_zeros(self.rank, len(start)))
        # Whether the next snapshot is the first of others, as after an update of the prior.
        self.ended = nn.Buffer(torch.zeros((), dtype=torch.bool, device=start.device))

    @property
    def kind(self) -> str:
        return f"{type(self).__name__}(rank={self.rank})"

    @property
    def has_spread(self) -> bool:
        return not self.moves

    @torch.no_grad()
    def collect(self, values: Mapping[str, Tensor]) -> None:
        """Take a snapshot of values by joint name; one that is not finite is a ValueError."""
        for name, value in values.items():
            check.numbers(name, value, "finite numbers")
        if self.ended:
            self.reset()
        before = self.blocks.flatten(values).to(self.mean) - self.mean
        self.mean.add_(before / self.count.add_(1))
        after = before - before / self.count
        self.squares.add_(before * after)
        self.deviations[(int(self.count) - 1) % self.rank] = after

    def reset(self) -> None:
        """Remove all snapshots."""
        for buffer in (self.count, self.mean, self.squares, self.deviations, self.ended):
            buffer.zero_()

    def joints(self) -> Iterable[Gaussian]:
        if self.moves:
            return ()
        if self.count < self.rank:
            raise RuntimeError(
                f"there are {int(self.count)} snapshots for rank={self.rank}, no posterior yet: "
                "call fit or collect(net), or build the BNN with a lower rank"
            )
        variance = (self.squares / self.count).clamp_min(LEAST_VARIANCE)
        factor = self.deviations.mT / (2 * (self.rank - 1)) ** 0.5
        return (Gaussian(self.blocks, self.mean, Inverse(LowRank(variance / 2, factor))),)

    def site_distribution(self, site: Site) -> td.Distribution:
        return dist.Delta(self.locs[site.own_name], event_dim=len(site.shape))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SWAGGuide:
        own = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._buffers.update({n: with_float32(fn)(b) for n, b in own.items() if b is not None})
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "moves": False}
