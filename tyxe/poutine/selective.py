"""Let some of the data, or some of the sites, count less."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import effectful
from torch import Tensor

from tyxe.errors import TyxeWarning

__all__ = ["masked_pointwise", "selective_mask", "selective_scale"]


@effectful(type="pointwise")
def masked_pointwise(site: str, values: Tensor) -> Tensor:
    """Return numbers per data point of an observed site, less the points that a mask leaves out.

    Args:
        site: name of the observed site, such as `likelihood.data`.
        values: `(..., n)`, one number per data point in the last dimension.

    Example:
        >>> with selective_mask(mask=torch.tensor([True, False]), expose=["likelihood.data"]):
        ...     masked_pointwise("likelihood.data", torch.tensor([1.0, 2.0]))
        tensor([1.])
    """
    return values


class _Selective(Messenger):
    """What both share: the exposed names, in either spelling, and whether they were met."""

    def __init__(self, expose: Sequence[str]) -> None:
        super().__init__()
        if isinstance(expose, str):
            raise TypeError(f"expose is the string {expose!r}; pass a list: expose=[{expose!r}]")
        self._unmet = set(expose)
        self._names = {name: name for name in expose} | {f"net.{name}": name for name in expose}

    def _exposes(self, name: str) -> bool:
        # What comes before `net.` is the name of a BNN; what comes after it may be called so too.
        own = name if name.startswith("net.") else name[name.find(".net.") + 1 :]
        spelled = self._names.get(name, self._names.get(own))
        self._unmet.discard(spelled or "")
        return spelled is not None

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
        result = super().__exit__(exc_type, exc_value, traceback)
        if self._unmet and exc_type is None:
            warnings.warn(
                f"{type(self).__name__} exposed {', '.join(sorted(self._unmet))}, "
                "but no site of that name was sampled inside it",
                TyxeWarning,
                stacklevel=2,
            )
        return result


class selective_mask(_Selective):
    """Let only some data points count.

    Inside, log-probabilities of the exposed sites count where the mask is true, and the plate's
    scale becomes `N / mask.sum()`, `N` being the likelihood's `dataset_size`, the number of
    labelled points. Training and evaluating so equals dropping the other rows after the net.

    Args:
        mask: boolean tensor `(n,)`, one entry per row of the batch.
        expose: names of the observed sites, usually `["likelihood.data"]`.

    Raises:
        TypeError: the mask is not boolean, or `expose` is a string.
        ValueError: the mask's length is not the batch's.
        RuntimeError: two masks around one site; combine them with `&`.

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
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            given = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask is {given}; expected a boolean tensor: pass mask.bool()")
        if mask.dim() != 1:
            raise ValueError(f"mask has shape {tuple(mask.shape)}; expected (n,)")
        self.mask = mask
        self._count = int(mask.sum())

    def _check_rows(self, name: str, rows: int) -> None:
        if rows != len(self.mask):
            raise ValueError(
                f"the mask has {len(self.mask)} entries, but {name} has {rows} rows; "
                "give one entry for each row of the batch"
            )

    def _pyro_sample(self, msg: Any) -> None:
        if not self._exposes(msg["name"]):
            return
        if isinstance(msg["mask"], Tensor):
            raise RuntimeError(f"{msg['name']} is masked twice; combine the masks with &")
        rows = msg["fn"].batch_shape[-1] if msg["fn"].batch_shape else 1
        self._check_rows(msg["name"], rows)
        if msg["is_observed"]:
            msg["mask"] = self.mask.to(msg["value"].device)
            msg["value"] = self._without_masked(msg["value"], msg["fn"])
        else:
            msg["mask"] = self.mask
        # The plate scales by N / rows; a batch in which nothing counts has no data term.
        msg["scale"] = msg["scale"] * (rows / self._count if self._count else 0.0)

    def _without_masked(self, value: Tensor, fn: Any) -> Tensor:
        """Overwrite rows that do not count, whose labels may be -1 or NaN, by one that does."""
        if not self._count:
            return torch.as_tensor(fn.sample())
        mask = self.mask.to(value.device)
        rows = torch.arange(len(mask), device=value.device)
        return value.index_select(len(fn.batch_shape) - 1, rows.where(mask, mask.int().argmax()))

    def _pyro_post_pointwise(self, msg: Any) -> None:
        site, values = msg["args"]
        if self._exposes(site):
            self._check_rows(site, values.shape[-1])
            msg["value"] = msg["value"][..., self.mask.to(values.device)]


class selective_scale(_Selective):
    """Multiply the log-probabilities of some sites, and with them their KL, by a factor.

    Args:
        scale: the factor, positive.
        expose: names of the sites, in the net's own spelling or the joint model's.

    Raises:
        TypeError: `expose` is a string.
        ValueError: the factor is not positive.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> with selective_scale(scale=0.5, expose=["w"]):
        ...     trace = pyro.poutine.trace(lambda: pyro.sample("w", dist.Normal(0, 1))).get_trace()
        >>> trace.nodes["w"]["scale"]
        0.5
    """

    def __init__(self, *, scale: float, expose: Sequence[str]) -> None:
        super().__init__(expose)
        if not scale > 0:
            raise ValueError(f"scale is {scale}; expected a positive number")
        self.scale = scale

    def _pyro_sample(self, msg: Any) -> None:
        if self._exposes(msg["name"]):
            msg["scale"] = msg["scale"] * self.scale
