"""A BNN as a module for any training loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tyxe.bnn.base import set_train_mode
from tyxe.bnn.batches import batches_of, device_for
from tyxe.bnn.checks import are_finite, check_beta, check_one_batch, refuse_nonfinite
from tyxe.bnn.elbo import ElboTerms, MeanWeight, Objective
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.scoring import reduced, rows_of
from tyxe.bnn.trained import draws_to_judge
from tyxe.bnn.training import statistics_kept, statistics_of
from tyxe.check import described
from tyxe.data import Targets, Unpack
from tyxe.predictive.evaluation import mixture_scores
from tyxe.threads import exclusive, unvalidated
from tyxe.util import at_least_float32

Handler = Callable[[], AbstractContextManager[Any]]


class Scored(NamedTuple):
    """A batch of held-out data under draws from the posterior.

    Attributes:
        predictions: as returned by `predict`, for all points.
        error: as returned by `evaluate`: of points that count, or their sum; by part for a `Joint`.
        log_likelihood: likewise, of the mixture over draws, in nats.
        weights: how often each of these points counts; by part for a `Joint`.
    """

    predictions: Any
    error: Any
    log_likelihood: Any
    weights: Any


class Trainable(Objective):
    """A BNN as a module whose forward is the loss of a batch, for any loop, trainer or launcher.

    The loss is that of `fit`, `(beta KL - E_q log p(D | w)) / N` for one draw, in nats per data
    point. Train `parameters()`, as for any module. The BNN is not copied.

    Args:
        bnn: a BNN that is trained in steps: variational, dropout, or the mode of a `LaplaceBNN`.
        unpack: from a batch to `inputs, targets` or `inputs, targets, weights`.
        handler: makes the handler of each step, such as `tyxe.poutine.local_reparameterization`.
        beta: weight of the KL, an attribute that may be changed between steps. The default is 1, or
            the temperature of a `LaplaceBNN`, whose curvature a step removes.
        num_predictions: number of draws for held-out data; 0 is the posterior's centre. The default
            is 8, or 0 if nothing has a spread.

    Attributes:
        terms: the terms of the latest forward, without their graph.

    Raises:
        TypeError: the BNN is not fitted in steps.
        ValueError: `beta` is negative or not finite; in a forward, targets that do not fit the
            likelihood, or more points than `dataset_size`.
        RuntimeError: in a forward, a loss that is not finite, or infinite inputs with gradients
            that are not. Norm statistics are not changed then.

    Example:
        >>> import torch, pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.Categorical(10), tyxe.guides.AutoNormal)
        >>> module = Trainable(bnn, handler=tyxe.poutine.local_reparameterization)
        >>> optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
        >>> loss = module((torch.zeros(5, 2), torch.arange(5) % 3))
        >>> loss.backward()
        >>> optimizer.step()
    """

    terms: ElboTerms | None

    def __init__(
        self,
        bnn: SupervisedBNN,
        *,
        unpack: Unpack | None = None,
        handler: Handler = nullcontext,
        beta: float | None = None,
        num_predictions: int | None = None,
    ) -> None:
        if not isinstance(bnn, SupervisedBNN) or not hasattr(bnn, "_guide"):
            raise TypeError(
                f"bnn is {described(bnn)}; expected one that is fitted in steps, such as "
                "tyxe.VariationalBNN. A PytorchBNN is a module for your own loops, members of an "
                "EnsembleBNN are trained one by one, and MCMC_BNN has its own fit"
            )
        super().__init__(bnn, closed_form_kl=True, num_particles=1)
        self.unpack, self.handler = unpack, handler
        self.beta = check_beta(getattr(bnn, "temperature", 1.0) if beta is None else beta)
        if num_predictions is None:
            num_predictions = draws_to_judge(bnn)
        self.num_predictions = num_predictions
        self._is_checked, self._statistics = False, statistics_of(bnn.net)
        self._mean_weight = MeanWeight(bnn.likelihood)

    def train(self, mode: bool = True) -> Trainable:
        """Set the mode; parts of the net whose parameters are all frozen keep theirs."""
        super().train(False)
        self.training = mode
        if mode:
            set_train_mode(self.bnn)
        return self

    def forward(self, batch: Any) -> Tensor:  # type: ignore[override]
        """Return the loss of a batch by one draw, in nats per data point.

        Raises:
            ValueError: a batch that `fit` refuses, or a batch with only NaN targets.
        """
        loader = self.bnn._to_fit([batch], self.unpack)
        ((inputs, targets),) = batches_of(loader, device_for(self.bnn))
        if isinstance(targets, Targets) and bool(targets.values.isnan().all()):
            raise ValueError(
                "all targets of the batch are NaN, which stands for one that is missing: leave the "
                "batch out, or look for what has made them NaN"
            )
        with exclusive():
            if not self._is_checked:
                check_one_batch(self.bnn, self.bnn._mean_values, inputs, targets)
            self.bnn.likelihood.check_rows(targets)
            beta = check_beta(self.beta)
            # In the first step only, to save the time; the loss of each is checked.
            self.bnn._before_step()
            with statistics_kept(self._statistics), unvalidated(self._is_checked), self.handler():
                weights = self._mean_weight.of(targets)
                load = self._mean_weight.load(*weights)
                loss = super().forward(inputs, targets, beta, load)
                terms = self.take_terms()
                gradients = {} if are_finite(inputs) else self._gradients(loss)
                if not all(bool(t.isfinite().all()) for t in (loss.detach(), *gradients.values())):
                    refuse_nonfinite(self.bnn, terms, [(inputs, targets)], gradients)
            if self.training:
                self._mean_weight.add(*weights)
            self._is_checked, self.bnn._stage = True, "trained in your own loop"
            self.terms = terms._replace(data=terms.data.detach(), kl=terms.kl.detach(), values={})
        return loss

    def _gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """Return a loss's gradients, in which infinite inputs show where the net saturates.

        For other inputs, this would take too long. Some infinite inputs, such as masks, have a use.
        """
        found = {name: p for name, p in self.bnn.named_parameters() if p.requires_grad}
        if not loss.requires_grad or not found:
            return {}
        given = [*found.values()]
        try:
            values = torch.autograd.grad(loss, given, retain_graph=True, allow_unused=True)
        except RuntimeError as error:
            if "incompatible with .grad()" in str(error):  # a reentrant checkpoint, whose own
                return {}  # backward is the only one that it takes
            raise
        return {n: v for n, v in zip(found, values, strict=True) if v is not None}

    def score_batch(self, batch: Any, reduction: str = "none") -> Scored:
        """Predict a batch of held-out data, and score it, for each point or as a `"sum"`."""
        loader = self.bnn._to_evaluate([batch], self.unpack)
        ((inputs, targets),) = batches_of(loader, device_for(self.bnn))
        likelihood = self.bnn.likelihood
        with self.bnn._predicting():
            outputs, latents = self.bnn._stacked_outputs(inputs, self.num_predictions)
            kept, rows = likelihood.counted(targets)
            found = mixture_scores(likelihood, rows_of(outputs, rows, 1), latents, kept)
            predictions = likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)
        parts = found.error, found.log_likelihood, likelihood.score_counts(kept)
        error, log_likelihood = reduced(likelihood, parts, reduction)
        return Scored(predictions, error, log_likelihood, likelihood.named(parts[-1], -2))

    judge = score_batch  # its former name
