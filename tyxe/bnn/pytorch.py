"""A Bayesian module for training loops in plain PyTorch."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tyxe import check
from tyxe.bnn.base import BNN
from tyxe.bnn.batches import batches_to_predict, copied, device_for, on_device
from tyxe.bnn.elbo import ElboTerms, check_gradients, elbo_terms
from tyxe.bnn.reading import look_at_sites
from tyxe.bnn.variational import build_guide, values_of
from tyxe.data import Output
from tyxe.poutine import Draw
from tyxe.predictive.ensemble import Ensemble
from tyxe.priors import Prior
from tyxe.priors.sites import SitePriors
from tyxe.rng import set_torch_rng, torch_rng, torch_rng_kept
from tyxe.threads import as_before, exclusive, in_backward, in_engine, unvalidated
from tyxe.util import outside_inference


class _Held(NamedTuple):
    """A draw that several forwards use, and the state of the generators before it."""

    values: dict[str, Tensor]
    has_gradients: bool
    rng: list[Tensor]


# The entries of `hold_sample` that this task or thread is inside of, by number.
_INSIDE: ContextVar[tuple[int, ...]] = ContextVar("_INSIDE", default=())
_NUMBERS = itertools.count()


class _OfThread(threading.local):
    """The KL of a thread's own latest forward, which is neither copied nor pickled."""

    kl: Tensor | None = None

    def __reduce__(self) -> tuple[type[_OfThread], tuple[()]]:
        return _OfThread, ()


class PytorchBNN(BNN):
    """A module that draws its weights in every forward, for your own loss and training loop.

    Arguments that are not listed are those of `BNN`.

    Args:
        guide_builder: makes the guide from the prior's program, such as `tyxe.guides.AutoNormal`;
            None if the prior hides everything.
        closed_form_kl: use closed forms of the KL where they exist.

    Attributes:
        cached_kl_loss: KL of the guide from the prior at this thread's latest forward, in nats. Add
            it to a loss that is summed over the data set; weigh it for a mean loss.

    Raises:
        ValueError: sites without a guide, or a guide without sites.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> bnn = PytorchBNN(
        ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)), tyxe.guides.AutoNormal)
        >>> optimizer = torch.optim.Adam(bnn.parameters())
        >>> x, y = torch.randn(8, 2), torch.randn(8, 1)
        >>> loss = nn.functional.mse_loss(bnn(x), y, reduction="sum") + bnn.cached_kl_loss
        >>> loss.backward()
        >>> optimizer.step()
    """

    _stage = "trained in your own loop"

    @outside_inference()
    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        guide_builder: Callable[[Callable[..., Any]], Any] | None = None,
        name: str = "",
        closed_form_kl: bool = True,
        *,
        output: Output | None = None,
    ) -> None:
        super().__init__(net, prior, name, output=output)
        has_sites = len(self.net_prior) > 0
        self.net_guide = build_guide("guide_builder", guide_builder, self.net_prior, has_sites)
        self.closed_form_kl = closed_form_kl
        self._kl, self._latest_kl = _OfThread(), torch.zeros((), device="cpu")
        # By entries of `hold_sample`.
        self._held: dict[int, _Held | None] = {}
        self._checked = False

    @property
    def cached_kl_loss(self) -> Tensor:
        """KL at the latest forward of this thread, or of any thread if this one had none."""
        return self._latest_kl if self._kl.kl is None else self._kl.kl

    @cached_kl_loss.setter
    def cached_kl_loss(self, kl: Tensor) -> None:
        self._kl.kl = self._latest_kl = kl

    def guide(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The posterior (a Pyro program)."""
        return {} if self.net_guide is None else self.net_guide()

    def _draw(self) -> dict[str, Tensor]:
        # A thread of autograd's engine works for one that waits in a backward.
        holders = [*self._held] if in_engine() else self._holders()
        holder = holders[-1] if holders else None
        held = None if holder is None else self._held[holder]
        if held is not None and (held.has_gradients or not torch.is_grad_enabled()):
            return held.values
        if held is None:
            self._check_is_forward()
        if holder is None:
            return self._new_terms().values
        if held is None:
            return self._hold(holder, torch_rng())
        # The first forward recorded no gradients: make the same draw again.
        with torch_rng_kept():
            set_torch_rng(held.rng)
            return self._hold(holder, held.rng)

    def _check_is_forward(self) -> None:
        """Raise if the BNN is run again in a backward, where it would draw other weights."""
        # A checkpoint around the BNN, which has hooks there, has set the generators back.
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if in_backward() and hooks is None:
            raise RuntimeError(
                f"this {type(self).__name__} is run again in the backward, as in odeint_adjoint or "
                "a reentrant checkpoint around it, where it would draw other weights: wrap its net "
                "instead, or keep forward and backward inside of `with bnn.hold_sample():`"
            )

    def _holders(self) -> list[int]:
        """Return the entries of this BNN's `hold_sample` that this task or thread is inside of."""
        return [number for number in _INSIDE.get() if number in self._held]

    def _hold(self, holder: int, rng: list[Tensor]) -> dict[str, Tensor]:
        values = self._new_terms().values
        # The values of lazy draws, which would take new noise in each forward.
        held = {n: v.value() if isinstance(v, Draw) else v for n, v in values.items()}
        check_gradients(values)
        self._held[holder] = _Held(held, torch.is_grad_enabled(), rng)
        return held

    def _new_terms(self) -> ElboTerms:
        # In the first forward only, because it reads numbers, for which the host waits.
        with unvalidated(self._checked):
            terms = elbo_terms(self.net_prior, self.guide, closed_form_kl=self.closed_form_kl)
        self._checked = True
        self.cached_kl_loss = terms.kl
        return terms

    @as_before()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the net's output for one draw, and set `cached_kl_loss`."""
        look_at_sites(self, inputs, torch.is_grad_enabled(), kwargs)
        with exclusive():  # other threads set the generators back for a while
            values = self._draw()
        output = self._stand_in(values).call(*inputs, **kwargs)
        check_gradients(values)
        return output

    @contextmanager
    def hold_sample(self) -> Iterator[PytorchBNN]:
        """Use one draw for all forwards of this task or thread, as for the chunks of one image.

        `predict` still makes new draws.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = PytorchBNN(
            ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.guides.AutoNormal)
            >>> x = torch.randn(4, 2)
            >>> with bnn.hold_sample():
            ...     torch.equal(bnn(x), bnn(x))
            True
        """
        if self._holders():
            yield self
            return
        number = next(_NUMBERS)
        token = _INSIDE.set((*_INSIDE.get(), number))
        self._held[number] = None
        try:
            yield self
        finally:
            self._held.pop(number, None)
            _INSIDE.reset(token)

    def pytorch_parameters(self, *inputs: Any) -> list[nn.Parameter]:
        """Return all trainable parameters, under TyXe's name; `parameters()` works as well."""
        return [p for p in self.parameters() if p.requires_grad]

    @as_before()
    def predict(self, *inputs: Any, num_predictions: int | None = None, **kwargs: Any) -> Any:
        """Return the outputs of several draws, `(num_predictions, ...)`.

        The net runs in eval mode and without gradients, and its arguments are moved to its device;
        `cached_kl_loss` is not changed.

        Args:
            inputs: the net's arguments, also as one tuple or mapping, or one loader, with the same
                draws for all.
            num_predictions: number of draws, by default 32, or 1 if all are equal; 0 predicts once,
                at the posterior's centre.
            kwargs: further arguments of the net, by keyword.

        Returns:
            The stacked outputs; if the net returns several tensors, in its containers.

        Raises:
            TypeError: for 0, a guide without a centre.
            ValueError: a negative number of draws, or an empty loader.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = PytorchBNN(
            ...     nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.guides.AutoNormal)
            >>> bnn.predict({"input": torch.zeros(5, 2)}, num_predictions=3).shape
            torch.Size([3, 5, 1])
        """
        num_predictions = self._num_draws(num_predictions)
        given = inputs[0] if len(inputs) == 1 else inputs
        device = device_for(self)
        kwargs = on_device(kwargs, device)
        batches = [copied(batch) for batch, _ in batches_to_predict(given, None, None)]
        if num_predictions:
            first = on_device(batches[0], device)
            look_at_sites(self, first, needs_gradients=False, keywords=kwargs)
        remedy = check.memory_remedy("predictions", "pass a loader of smaller batches")
        with self._predicting(), remedy:
            outputs = []
            net = self._stand_in(self._weights() if num_predictions else self._median())
            for index in range(max(num_predictions, 1)):
                if index:
                    net.put(self._tensors_at(self._weights()))
                parts = [net(on_device(batch, device), **kwargs) for batch in batches]
                outputs.append(_together(torch.cat, parts) if len(parts) > 1 else parts[0])
            return _together(torch.stack, outputs)

    def _median(self) -> dict[str, Tensor]:
        return {} if self.net_guide is None else self.net_guide.median()

    @outside_inference()
    def to_module(self, sample: bool = False) -> nn.Module:
        """Return a plain net at the posterior's centre, or with `sample` at one draw."""
        with torch.no_grad():
            return self._net_at(self._weights() if sample else self._median())

    @outside_inference()
    def to_ensemble(self, num_draws: int | None = None) -> Ensemble:
        """Return draws from the posterior as a plain module without Pyro, for export and servers.

        Its outputs are those of `predict` for these draws, `(num_draws, ...)`.

        Raises:
            ValueError: fewer than one draw.
        """
        num_draws = self._num_draws(num_draws, name="num_draws", least=1)
        return Ensemble(self._nets_at((self._weights(), {}) for _ in range(num_draws)))

    def _weights(self) -> dict[str, Tensor]:
        if self.net_guide is None:
            return {}
        with exclusive(), torch.no_grad():
            trace = poutine.trace(self.guide).get_trace()
        return values_of(trace)

    def _follow_prior(self, priors: SitePriors) -> None:
        """Do nothing, because only the KL depends on the prior."""

    def __getstate__(self) -> dict[str, Any]:
        # A KL with a graph can neither be copied nor pickled.
        return {**self.__dict__, "_latest_kl": self.cached_kl_loss.detach(), "_held": {}}


def _together(function: Callable[[Any], Tensor], outputs: list[Any]) -> Any:
    """Return a function of the tensors in each place of several outputs, in the same containers."""

    def joined(*leaves: Any) -> Any:
        return function(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    return tree_map(joined, *outputs)
