"""Handlers that mask data points and scale sites."""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import Message
from torch import Tensor

from tyxe import check
from tyxe.data import filled, trailing
from tyxe.errors import warn
from tyxe.util import site_spellings


class _Selective(Messenger):
    """Base of both handlers: the exposed names, and whether each of them was met."""

    def __init__(self, expose: Sequence[str]) -> None:
        super().__init__()
        self._expose = frozenset(check.listed("expose", expose))
        self._unmet = set(expose)

    def _exposes(self, name: str) -> bool:
        asked = self._expose.intersection(site_spellings(name))
        self._unmet -= asked
        return bool(asked)

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
        result = super().__exit__(exc_type, exc_value, traceback)
        if self._unmet and exc_type is None:
            warn(
                f"{type(self).__name__} exposed {', '.join(sorted(self._unmet))}, "
                "but no site of that name was sampled inside it",
            )
        return result


class selective_mask(_Selective):
    """Count only the data points of a mask.

    Inside, log-probabilities of the exposed sites count where the mask is true, and the plate's
    scale becomes `N / mask.sum()`, where `N` is the likelihood's `dataset_size`, the number of
    labelled points. Training and evaluation are the same as if the other rows were removed from
    the net's output and from the targets.

    Args:
        mask: boolean tensor, one entry per row of the batch, `(n,)`, or with the targets' shape,
            `(n, ...)`: then points without any true entry do not count.
        expose: names of the observed sites, usually `["likelihood.data"]`.

    Raises:
        TypeError: `expose` is a string.
        ValueError: the mask is not boolean, or its shape is neither the batch's length nor that of
            the targets.
        RuntimeError: two masks around one site of a program that is not a likelihood; combine them.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> mask = torch.tensor([True, True, False])
        >>> def model():
        ...     with pyro.plate("data", 2, subsample=torch.arange(3)):
        ...         pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.zeros(3))
        >>> with selective_mask(mask=mask, expose=["y"]):
        ...     trace = pyro.poutine.trace(model).get_trace()
        >>> trace.compute_log_prob(); round(float(trace.nodes["y"]["log_prob_sum"]), 3)
        -1.838
    """

    def __init__(self, *, mask: Tensor, expose: Sequence[str]) -> None:
        super().__init__(expose)
        check.one_of("mask", mask, Tensor, "a boolean tensor")
        check.choice("the dtype of mask", mask.dtype, [torch.bool], ": pass mask.bool()")
        self.mask = mask
        self._rows = mask.flatten(1).any(1) if mask.dim() > 1 else mask
        self._count = int(self._rows.sum())

    def _check_rows(self, name: str, rows: int) -> None:
        check.shape("the mask", self.mask, (rows, ...), f", one entry for each row of {name}")

    def _pyro_sample(self, msg: Message) -> None:
        if not self._exposes(msg["name"]):
            return
        if msg["infer"].get("is_masked"):  # a likelihood has asked for its mask
            return
        if isinstance(msg["mask"], Tensor):
            raise RuntimeError(f"{msg['name']} is masked twice: combine masks with &")
        rows = msg["fn"].batch_shape[-1] if msg["fn"].batch_shape else 1
        self._check_rows(msg["name"], rows)
        if self.mask.dim() > 1:
            msg["fn"] = masked_within(msg["fn"], self.mask)
        msg["mask"] = self._rows
        if msg["is_observed"]:
            msg["mask"] = self._rows.to(msg["value"].device)
            msg["value"] = self._without_masked(msg["value"], msg["fn"])
        # The plate scales by N / rows; without any point that counts there is no data term.
        msg["scale"] = msg["scale"] * (rows / self._count if self._count else 0.0)

    def _without_masked(self, value: Tensor, fn: Any) -> Tensor:
        """Overwrite masked rows, whose labels may be -1 or NaN, by one that counts."""
        mask = self.mask.to(value.device)
        if not self._count:
            return torch.as_tensor(fn.sample())
        if mask.dim() > 1:
            return filled(value, mask)
        rows = torch.arange(len(mask), device=value.device)
        return value.index_select(len(fn.batch_shape) - 1, rows.where(mask, mask.int().argmax()))

    def _pyro_post_targets(self, msg: Message) -> None:
        site, targets = msg["args"]
        if self._exposes(site):
            self._check_rows(site, len(targets))
            msg["value"] = msg["value"].masked(self.mask)


class _Counted(dist.MaskedDistribution):
    """A distribution whose log-densities are multiplied by numbers from 0."""

    def __init__(self, base: Any, counts: Tensor) -> None:
        super().__init__(base, counts > 0)
        self._counts = counts

    def log_prob(self, value: Tensor) -> Tensor:
        log_prob: Tensor = super().log_prob(value)
        return log_prob if self._counts.dtype == torch.bool else log_prob * self._counts

    def expand(self, batch_shape: Any, _instance: Any = None) -> _Counted:
        return _Counted(self.base_dist.expand(batch_shape), self._counts.expand(batch_shape))


@singledispatch
def masked_within(distribution: Any, mask: Tensor) -> Any:
    """Return a distribution of points in which numbers count as much as a mask says.

    A distribution that is masked in another way is registered.

    Raises:
        ValueError: the mask's shape is not that of the numbers, which are one event.
    """
    inner, dims = distribution, 0
    while isinstance(inner, td.Independent) and inner.batch_shape != mask.shape:
        inner, dims = inner.base_dist, dims + inner.reinterpreted_batch_ndims
    if mask.dim() == 1 and inner.batch_shape[:1] == mask.shape:  # of points
        mask = trailing(mask, len(inner.batch_shape)).expand(inner.batch_shape)
    hint = f", before the {len(inner.event_shape)} dimensions of one event"
    check.shape("the mask", mask, inner.batch_shape, hint)
    counted = _Counted(inner, mask)
    return dist.Independent(counted, dims, validate_args=False) if dims else counted


class selective_scale(_Selective):
    """Multiply the log-probabilities of some sites, and with them their KL, by a factor.

    Args:
        scale: the factor, positive; a number or a tensor of one element.
        expose: names of the sites in the net or in the joint model.

    Raises:
        TypeError: `expose` is a string, or the factor is not a number.
        ValueError: the factor is not positive.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> with selective_scale(scale=0.5, expose=["w"]):
        ...     trace = pyro.poutine.trace(lambda: pyro.sample("w", dist.Normal(0, 1))).get_trace()
        >>> trace.nodes["w"]["scale"]
        0.5
    """

    def __init__(self, *, scale: float | Tensor, expose: Sequence[str]) -> None:
        super().__init__(expose)
        given = scale.detach() if isinstance(scale, Tensor) else scale
        self.scale = check.number("scale", given, above=0)

    def _pyro_sample(self, msg: Message) -> None:
        if self._exposes(msg["name"]):
            msg["scale"] = msg["scale"] * self.scale
