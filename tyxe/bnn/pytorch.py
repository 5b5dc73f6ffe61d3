"""A Bayesian module for training loops in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from tyxe.bnn.base import BNN, modes_restored
from tyxe.bnn.batches import batches_to_predict
from tyxe.bnn.elbo import ElboTerms, check_gradients, elbo_terms
from tyxe.bnn.rerun import draws_of_backward, remember
from tyxe.errors import check_count
from tyxe.guides import PyroGuide
from tyxe.linalg.checks import numbers_unchecked
from tyxe.poutine import Draw
from tyxe.predictive.ensemble import Ensemble
from tyxe.priors import Prior
from tyxe.priors.sites import SitePriors
from tyxe.rng import set_torch_rng, torch_rng, torch_rng_kept
from tyxe.threads import exclusive
from tyxe.util import call_with

__all__ = ["PytorchBNN"]


class _Held(NamedTuple):
    """A draw that several forwards use, and the state of the generators before it."""

    values: dict[str, Tensor]
    has_gradients: bool
    rng: list[Tensor]


class PytorchBNN(BNN):
    """A module that draws its weights in every forward, for a loss and training loop of your own.

    Arguments that are not listed are those of `BNN`.

    Args:
        guide_builder: makes the guide from the prior's program, such as `tyxe.guides.AutoNormal`;
            None where the prior hides everything.
        closed_form_kl: use closed forms of the KL where they exist.

    Attributes:
        cached_kl_loss: KL of the guide from the prior at the latest forward, in nats; add it to a
            loss summed over the data set, or a fraction of it to that of a mini-batch.

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

    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        guide_builder: Callable[[Callable[..., Any]], Any] | None = None,
        name: str = "",
        closed_form_kl: bool = True,
    ) -> None:
        super().__init__(net, prior, name)
        if (guide_builder is None) != (len(self.net_prior) == 0):
            raise ValueError(
                "the prior exposes parameters, but there is no guide_builder: pass "
                "tyxe.guides.AutoNormal"
                if guide_builder is None
                else "the prior exposes no parameters, so the guide has nothing to do: leave it out"
            )
        self.net_guide = (
            None if guide_builder is None else PyroGuide.build(guide_builder, self.net_prior)
        )
        self.closed_form_kl = closed_form_kl
        self.cached_kl_loss: Tensor = torch.zeros(())
        self._held: _Held | None = None
        self._holding = self._checked = False

    def guide(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The posterior (a Pyro program)."""
        return {} if self.net_guide is None else self.net_guide()

    def _draw(self) -> dict[str, Tensor]:
        held = self._held if self._holding else None
        if held is not None and (held.has_gradients or not torch.is_grad_enabled()):
            return held.values
        again = None if held is not None else draws_of_backward(self)
        if again is not None:
            return dict(again)
        if not self._holding:
            return self._new_terms().values
        if held is None:
            return self._hold(torch_rng())
        # The first forward recorded no gradients: make the same draw again.
        with torch_rng_kept():
            set_torch_rng(held.rng)
            return self._hold(held.rng)

    def _hold(self, rng: list[Tensor]) -> dict[str, Tensor]:
        values = self._new_terms().values
        # The values of lazy draws, which would take new noise in each forward.
        held = {n: v.value() if isinstance(v, Draw) else v for n, v in values.items()}
        check_gradients(values)
        self._held = _Held(held, torch.is_grad_enabled(), rng)
        return held

    def _new_terms(self) -> ElboTerms:
        # In the first forward only, because it reads numbers, for which the host waits.
        checked = nullcontext() if not self._checked else pyro.validation_enabled(False)
        with exclusive(), checked, numbers_unchecked(self._checked):
            terms = elbo_terms(self.net_prior, self.guide, closed_form_kl=self.closed_form_kl)
        self._checked = True
        self.cached_kl_loss = terms.kl
        return terms

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the net's output for one draw, and set `cached_kl_loss`."""
        values = self._draw()
        with self.substituted(values):
            output = self.net(*inputs, **kwargs)
        check_gradients(values)
        return remember(self, values, output)

    @contextmanager
    def hold_sample(self) -> Iterator[PytorchBNN]:
        """Use one draw for all forwards inside, such as for the chunks of one image.

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
        before, held = self._holding, self._held
        self._holding, self._held = True, held if before else None
        try:
            yield self
        finally:
            self._holding = before
            if not before:
                self._held = None

    def pytorch_parameters(self, *inputs: Any) -> list[nn.Parameter]:
        """Return all trainable parameters, under TyXe's name; `parameters()` works as well."""
        return [p for p in self.parameters() if p.requires_grad]

    def predict(self, *inputs: Any, num_predictions: int = 1, **kwargs: Any) -> Any:
        """Return the outputs of several draws, `(num_predictions, ...)`.

        The net runs in eval mode and without gradients; `cached_kl_loss` is not changed.

        Args:
            inputs: the net's arguments, also as one tuple or mapping, or one loader of batches,
                which meet the same draws.
            num_predictions: number of draws; 0 predicts once, at the posterior's centre.
            kwargs: further arguments of the net, by keyword.

        Returns:
            The outputs, stacked; where the net returns several tensors, in its containers.

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
        num_predictions = check_count("num_predictions", num_predictions, 0)
        given = inputs[0] if len(inputs) == 1 else inputs
        batches = [batch for batch, _ in batches_to_predict(given, None, None)]
        net, kl = functools.partial(self.net, **kwargs), self.cached_kl_loss
        try:
            with exclusive(), modes_restored(self), torch.no_grad():
                self.eval()
                outputs = []
                for _ in range(max(num_predictions, 1)):
                    with self.substituted(self._draw() if num_predictions else self._median()):
                        parts = [call_with(net, batch) for batch in batches]
                    outputs.append(_together(torch.cat, parts) if len(parts) > 1 else parts[0])
                return _together(torch.stack, outputs)
        finally:
            self.cached_kl_loss = kl

    def _median(self) -> dict[str, Tensor]:
        return {} if self.net_guide is None else self.net_guide.median()

    def to_module(self, sample: bool = False) -> nn.Module:
        """Return a plain net at the posterior's centre, or with `sample` at one draw."""
        if sample or self.net_guide is None:
            return self.net_at(self._weights())
        with torch.no_grad():
            return self.net_at(self._median())

    def to_ensemble(self, num_draws: int) -> Ensemble:
        """Return draws from the posterior as a plain module without Pyro, for export and servers.

        Its outputs are those of `predict` for these draws, `(num_draws, ...)`.

        Raises:
            ValueError: fewer than one draw.
        """
        return Ensemble(self.nets_at(self._weights() for _ in range(num_draws)))

    def _weights(self) -> dict[str, Tensor]:
        if self.net_guide is None:
            return {}
        with exclusive(), torch.no_grad():
            trace = poutine.trace(self.guide).get_trace()
        return {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}

    def _follow_prior(self, priors: SitePriors) -> None:
        """Do nothing, because only the KL depends on the prior."""

    def __getstate__(self) -> dict[str, Any]:
        # A KL with a graph can neither be copied nor pickled.
        return {**self.__dict__, "cached_kl_loss": self.cached_kl_loss.detach(), "_held": None}


def _together(function: Callable[[Any], Tensor], outputs: list[Any]) -> Any:
    """Return a function of the tensors in each place of several outputs, in the same containers."""

    def joined(*leaves: Any) -> Any:
        return function(leaves) if isinstance(leaves[0], Tensor) else leaves[0]

    return tree_map(joined, *outputs)
