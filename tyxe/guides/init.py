"""Starts of a guide's means and scales.

An initialiser is a function of a site's Pyro message: `site["name"]`, `site["fn"]` (its prior) and,
for sites of a net, `site["infer"]["fans"]` and `site["infer"]["own_value"]` (the net's original
value). Pyro's autoguides take the same functions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor, nn

from tyxe import check
from tyxe.distributions import Gaussian, JointMarginal
from tyxe.util import elementwise, part_of, site_spellings, std_from_fans, without_events

Message = Mapping[str, Any]


def _outline(site: Message) -> Tensor:
    """Return a tensor of the site's shape and dtype; Pyro's autoguides have no value yet."""
    value = site.get("value")
    drawn: Tensor = site["fn"].sample() if value is None else value
    return drawn.detach()


@check.arguments
def init_to_constant(site: Message | None = None, constant: float = 0.0) -> Any:
    """Start every element at one number; `init_to_constant(constant=1.0)` makes an initialiser.

    Example:
        >>> init_to_constant(constant=2.0)({"value": torch.zeros(2)})
        tensor([2., 2.])
    """
    if site is None:
        return functools.partial(init_to_constant, constant=constant)
    return torch.full_like(_outline(site), constant)


@check.arguments
def init_to_zero(site: Message | None = None) -> Any:
    """Start every element at zero."""
    return init_to_zero if site is None else torch.zeros_like(_outline(site))


@check.arguments
def init_to_sample(site: Message | None = None) -> Any:
    """Start at a draw from the prior."""
    return init_to_sample if site is None else site["fn"].sample().detach()


@check.arguments
def init_to_median(site: Message | None = None, num_samples: int = 1000) -> Any:
    """Start at the prior's median, or at that of `num_samples` samples without a closed form.

    Example:
        >>> prior = td.Independent(td.Laplace(torch.ones(2), torch.ones(2)), 1)
        >>> init_to_median({"fn": prior})
        tensor([1., 1.])
    """
    if site is None:
        return functools.partial(init_to_median, num_samples=num_samples)
    prior = without_events(site["fn"])
    if isinstance(prior, td.StudentT):
        return prior.loc.clone()
    if isinstance(prior, JointMarginal) and isinstance(prior.joint, Gaussian):
        return prior.mean.detach().clone()
    try:
        half = torch.full_like(_outline(site), 0.5)
        return prior.icdf(half).detach().clone()
    except NotImplementedError:
        return site["fn"].sample((num_samples,)).median(0).values


@check.arguments
def init_to_net(site: Message | None = None) -> Any:
    """Start at the net's original values: the default of guides.

    Sites outside the net, such as the scale of a noise, start at the prior's median. So do values
    outside the prior's support, or at its bound, where no guide can start.

    Raises:
        ValueError: a value of the net is not finite.

    Example:
        >>> import pyro.distributions as dist
        >>> site = {"fn": dist.Normal(0, 1), "infer": {"own_value": torch.tensor(0.5)}}
        >>> init_to_net(site)
        tensor(0.5000)
    """
    if site is None:
        return init_to_net
    own = site.get("infer", {}).get("own_value")
    if own is None:
        return init_to_median(site)
    own = own.detach()
    expected = "finite numbers: fix the net, or pass init_loc_fn=tyxe.guides.init_to_median"
    check.numbers(f"the net's {site.get('name')}", own, expected)
    support = elementwise(site["fn"].support)
    allowed = support.check(own)
    if not (support.is_discrete or support.event_dim):
        allowed = allowed & td.biject_to(support).inv(own).isfinite()
    if bool(allowed.all()):
        return own.clone()
    return torch.where(allowed, own, init_to_median(site).to(own))


def layerwise_std(site: Message, method: str, nonlinearity: str = "relu") -> float:
    """Return the standard deviation that a method of `calculate_prior_std` gives to a site."""
    fans = site["infer"].get("fans")
    if fans is None:
        raise ValueError(
            f"site {site['name']!r} belongs to no layer, so it has no fan-in; give a number"
        )
    fan_in, fan_out = fans
    return std_from_fans(method, fan_in, fan_out, nonlinearity)


@check.arguments
def init_to_normal(site: Message | None = None, mean: float = 0.0, std: float | str = 1.0) -> Any:
    """Start at draws from a Normal; `init_to_normal(std=0.1)` makes an initialiser.

    Args:
        site: the site's message.
        mean: of the Normal.
        std: its standard deviation, or the layer-wise method that gives it.
    """
    if site is None:
        return functools.partial(init_to_normal, mean=mean, std=std)
    scale = layerwise_std(site, std) if isinstance(std, str) else std
    return torch.randn_like(_outline(site)) * scale + mean


def init_to_normal_radford(site: Message | None = None) -> Any:
    """Start at draws of standard deviation `1 / sqrt(fan_in)` [T 5.1.1.2]."""
    return init_to_normal(site, std="radford")


def init_to_normal_xavier(site: Message | None = None) -> Any:
    """Start at draws of standard deviation `sqrt(2 / (fan_in + fan_out))`."""
    return init_to_normal(site, std="xavier")


def init_to_normal_kaiming(site: Message | None = None, nonlinearity: str = "relu") -> Any:
    """Start at draws of standard deviation `gain / sqrt(fan_in)`, with PyTorch's gain."""
    if site is None:
        return functools.partial(init_to_normal_kaiming, nonlinearity=nonlinearity)
    return init_to_normal(site, std=layerwise_std(site, "kaiming", nonlinearity))


class PretrainedInitializer:
    """Start at given values, such as those of a trained net.

    A site of single weights, as of a `SubnetworkPrior`, takes its own of the whole tensor.

    Args:
        values: tensors by the site's name, with or without the prefix of the joint model.

    Raises:
        TypeError: a net instead of values.
        ValueError: when called: a site without value.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> start = PretrainedInitializer.from_net(net)
        >>> torch.equal(start({"name": "net.bias", "value": torch.zeros(1)}), net.bias)
        True
    """

    @check.arguments
    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = {name: value.detach().clone() for name, value in values.items()}

    @classmethod
    def from_net(cls, net: nn.Module, prefix: str = "net") -> PretrainedInitializer:
        """Take the values of a net's parameters, by their names after `prefix` and a dot."""
        before = f"{prefix}." if prefix else ""
        # All names of a tied parameter: its site has one of them.
        named = net.named_parameters(remove_duplicate=False)
        return cls({before + name: value for name, value in named})

    def __call__(self, site: Message) -> Tensor:
        """Return the value of a site."""
        name = site["name"]
        known = [s for s in (*site_spellings(name), f"net.{name}") if s in self.values]
        if not known:
            raise ValueError(
                f"there is no pre-trained value for {name!r}; there are {', '.join(self.values)}"
            )
        outline, value = _outline(site), self.values[known[0]]
        if value.shape != outline.shape:
            value = part_of(value, site.get("infer", {}).get("elements"))
        return value.to(outline, copy=True)


def scale_below_prior(log_ratio: float = -3.0) -> Callable[[Message], Tensor]:
    r"""Start standard deviations at `log sigma = log s + log_ratio`, where `s` is the prior's.

    The result is an `init_scale` for `AutoNormal`. Variational Laplace starts at -3 [GR 5].

    Raises:
        ValueError: when called: the prior has no finite standard deviation.

    Example:
        >>> import pyro.distributions as dist
        >>> start = scale_below_prior(0.0)
        >>> start({"name": "w", "fn": dist.Normal(torch.zeros(2), 3.0)})
        tensor([3., 3.])
    """

    def start(site: Message) -> Tensor:
        try:
            variance: Tensor = site["fn"].variance
        except NotImplementedError:
            variance = torch.tensor(math.nan, device="cpu")
        expected = "finite numbers to start below: pass numbers as init_scale"
        check.numbers(f"the prior's variance of {site.get('name')!r}", variance, expected, above=0)
        return variance.sqrt() * math.exp(log_ratio)

    return start


def scale_below_net(ratio: float = 0.05) -> Callable[[Message], float]:
    r"""Start standard deviations well below the net's weights: the default of guides.

    They are `ratio / sqrt(fan_in)` for each layer, or, if less, `ratio` times the root mean square
    of the site's values in the net. So the noise is a small part of a layer's outputs, for any
    width. Sites outside the net, such as the scale of a noise, start at 0.1.

    Example:
        >>> infer = {"fans": (25.0, 4.0), "own_value": torch.full((4, 25), 0.1)}
        >>> round(scale_below_net()({"name": "w", "infer": infer}), 6)
        0.005
    """

    def start(site: Message) -> float:
        infer = site.get("infer", {})
        own = infer.get("own_value")
        if own is None:
            return 0.1
        fan_in, _ = infer.get("fans") or (1.0, 1.0)
        largest = ratio / math.sqrt(fan_in)
        size = float(own.detach().float().square().mean().sqrt()) if own.numel() else 0.0
        # Weights that start at zero, as biases do, say nothing of their size.
        return min(largest, max(ratio * size, 0.01 * largest)) if size else largest

    return start
