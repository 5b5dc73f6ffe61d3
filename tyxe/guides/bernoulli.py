"""The guide of binary networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributions import constraints

from tyxe import check
from tyxe.distributions import SignedBernoulli
from tyxe.distributions.signed_bernoulli import (
    PackedSamples,
    PackedSigns,
    RelaxedSignedBernoulli,
    Signs,
)
from tyxe.guides.base import Guide, Site, start_of
from tyxe.util import SiteTensors, elementwise

# A mean of 1 has an infinite logit, and close to 1 the gradient vanishes.
LARGEST_MEAN = 0.99


class AutoBernoulli(Guide):
    r"""Independent weights of two values, one logit each.

    `q(w) = prod_i SignedBernoulli(w_i; phi_i, s)`. The two values are those of each site's prior:
    `tyxe.priors.BinaryPrior(...)`, or any prior with `SignedBernoulli` distributions; the prior
    also chooses the regulariser (the KL, or the Beta-Bernoulli one) and which parameters stay
    deterministic. A draw has no gradient: train under `tyxe.poutine.local_reparameterization()`,
    where sums of weights are Gaussian by the central limit theorem. Predictions outside of it use
    draws of the two values, or with `num_predictions=0` the more probable one.

    Args:
        module: the program that samples the sites from their prior; a BNN passes its own.
        init: weights `w` to start from: `"pretrained"`, the net's original values, or an
            initialiser such as `PretrainedInitializer.from_net(net)`.
        init_gain: None starts the means at `w`, by `phi = 2 atanh(clip(w / s))`; a number `c`
            starts the logits at `phi = c w / s`.
        relaxed: temperature of concrete draws, which have a gradient, for weights that are not
            used in linear maps, or for training without the handler. Draws are relaxed only while
            gradients are recorded.

    Raises:
        ValueError: a site whose prior has other values; an unknown `init`, or one of another
            shape than its site; a gain or temperature that is not positive.

    Reference:
        [T] 4.1.

    Example:
        >>> import functools, tyxe
        >>> _ = torch.manual_seed(0)
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(16, 2), tyxe.priors.BinaryPrior(hide_parameters=["bias"]),
        ...     tyxe.likelihoods.Categorical(8), AutoBernoulli)
        >>> x, y = torch.randn(8, 16), torch.randint(2, (8,))
        >>> with tyxe.poutine.local_reparameterization():
        ...     _ = bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=0.1), 3, beta=1e-2)
        >>> bnn.to_module(sample=True).weight.abs().unique().tolist()
        [1.0]
    """

    takes_discrete: ClassVar[bool] = True

    def __init__(
        self,
        module: Callable[..., Any],
        init: str | Callable[[Any], Tensor] = "pretrained",
        init_gain: float | None = None,
        relaxed: float | None = None,
    ) -> None:
        super().__init__(module)
        if not callable(init):
            check.choice("init", init, ["pretrained"])
        for name, value in {"init_gain": init_gain, "relaxed": relaxed}.items():
            if value is not None:
                check.number(name, value, above=0)
        self.relaxed = relaxed
        self.scales = {site.own_name: _scale_of(site) for site in self.sites}
        logits = {}
        for site in self.sites:
            message = self.messages[site.name]
            start = start_of("init", init if callable(init) else _own_value, site, message)
            logits[site.own_name] = _logits(start / self.scales[site.own_name], init_gain)
        self.logits = SiteTensors(logits)
        self.messages = {}

    @property
    def kind(self) -> str:
        values = sorted({f"{scale:.6g}" for scale in self.scales.values()})
        return f"{type(self).__name__}({', '.join(values)})"

    def site_distribution(self, site: Site) -> SignedBernoulli:
        logits, scale = self.logits[site.own_name], self.scales[site.own_name]
        if self.relaxed is not None and torch.is_grad_enabled():
            q: Any = RelaxedSignedBernoulli(logits, self.relaxed, scale, validate_args=False)
        else:
            q = SignedBernoulli(logits, scale, validate_args=False)
        return q.to_event(logits.dim())

    def get_logits(self, site_name: str) -> Tensor:
        """Return the logits of a site, by its name in the net or in the joint model."""
        return self.logits[self._own(site_name).own_name]

    @torch.no_grad()
    def pack(self, num_samples: int) -> PackedSamples:
        """Draw samples and store them with one bit per weight.

        Returns:
            The samples; iterating over them yields values by site. Without the prefix `net.` of the
            names, `torch.func.functional_call` puts them into the net.

        Raises:
            ValueError: `num_samples` is less than one.
        """
        num_samples = check.count("num_samples", num_samples)
        packed = {}
        for site in self.sites:
            values = self.site_distribution(site).sample((num_samples,))
            packed[site.name] = PackedSigns.of(values, self.scales[site.own_name])
        return PackedSamples(packed)


def _scale_of(site: Site) -> float:
    support: constraints.Constraint = elementwise(site.support)
    if not isinstance(support, Signs):
        raise ValueError(
            f"the prior of {site.name!r} has the support {support}, but a binary guide needs one "
            "of two values, -s and s: use tyxe.priors.BinaryPrior(), or tyxe.priors.IIDPrior("
            "tyxe.distributions.SignedBernoulli(0.0)); hide parameters that are to stay real, as "
            "by hide_parameters=['bias']"
        )
    return support.scale


def _own_value(message: Any) -> Tensor:
    start: Tensor | None = message["infer"].get("own_value")
    if start is None:
        raise ValueError(
            f"{message['name']!r} is no parameter of a net, so it has no value to start from; pass "
            "an initialiser, such as init=tyxe.guides.init_to_zero"
        )
    return start


def _logits(ratio: Tensor, gain: float | None) -> Tensor:
    """Return the logits of means divided by the scale, or with a gain, multiples of them."""
    if gain is not None:
        return gain * ratio
    return 2 * torch.atanh(ratio.clamp(-LARGEST_MEAN, LARGEST_MEAN))
