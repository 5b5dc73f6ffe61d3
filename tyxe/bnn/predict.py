"""Prediction and evaluation of every wrapper that draws weights with a likelihood."""

from __future__ import annotations

import copy
import functools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tyxe.bnn.base import BNN, modes_restored
from tyxe.bnn.batches import batches_to_predict, check_has_targets, concatenated, is_loader
from tyxe.bnn.linearized import (
    PREDICTIVES,
    Outputs,
    linearized_evaluations,
    linearized_predictions,
)
from tyxe.curvature import Linearization
from tyxe.likelihoods import Likelihood
from tyxe.likelihoods.base import at_least_float32, reduce_points
from tyxe.poutine import draws_are_lazy, masked_pointwise
from tyxe.priors import Prior
from tyxe.util import call_with

__all__ = ["SupervisedBNN"]

Values = dict[str, Tensor]

# A loop over draws beats vmap on CPUs but for the smallest nets; see docs/benchmarks.md.
VMAP_CHUNK = 8


class SupervisedBNN(BNN):
    """A BNN with a likelihood: base of those that predict and evaluate.

    A subclass implements `draws`, `one_draw` and `mean_values`.

    Args:
        net: as in `BNN`.
        prior: as in `BNN`.
        likelihood: one from `tyxe.likelihoods`; a copy is kept.
        name: as in `BNN`.

    Raises:
        TypeError: as in `BNN`; or no likelihood.
        ValueError: as in `BNN`.
    """

    def __init__(
        self, net: nn.Module, prior: Prior, likelihood: Likelihood, name: str = ""
    ) -> None:
        if not isinstance(likelihood, Likelihood):
            raise TypeError(
                f"likelihood is a {type(likelihood).__name__}; expected one from "
                "tyxe.likelihoods, such as tyxe.likelihoods.Categorical(dataset_size)"
            )
        super().__init__(net, prior, name)
        self.likelihood = copy.deepcopy(likelihood).to(next(net.parameters()).device)

    @abstractmethod
    def draws(self, num_predictions: int) -> Iterator[Values]:
        """Yield draws from the posterior: a value for each site, by joint name.

        A draw's tensors may be overwritten by the next.
        """

    @abstractmethod
    def mean_values(self) -> Values:
        """Return the posterior's centre: a value for each site, by joint name."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the net's output for one draw from the posterior, in the mode the BNN is in."""
        with self.substituted(self.one_draw()):
            return self.net(*inputs, **kwargs)

    def to_module(self, sample: bool = False) -> nn.Module:
        """Return a plain net, of the class that came in, at the posterior's centre or one draw.

        Args:
            sample: one draw instead of the centre.
        """
        with torch.no_grad():
            values = self.one_draw() if sample else self.mean_values()
        return self.net_at(values)

    def model(self, inputs: Any, obs: Tensor | None = None) -> Any:
        """The joint model (a Pyro program): weights from the prior, the net, the likelihood.

        Args:
            inputs: a batch of inputs: a tensor, a tuple of arguments, a mapping of keywords.
            obs: targets; sampled where None.

        Returns:
            The net's output.
        """
        # Handlers of the observed site may differentiate the net, and run parts of it again.
        with self.substituted(self.net_prior()):
            predictions = call_with(self.net, inputs)
            self.likelihood(predictions, obs)
        return predictions

    # ------------------------------------------------------------------ draws

    @abstractmethod
    def one_draw(self) -> Values:
        """Return a single draw from the posterior."""

    def _latents(self, draws: list[Values]) -> dict[str, Tensor]:
        """The likelihood's own variables, stacked over draws."""
        names = {
            name: f"{self.likelihood.prefix}.{name}" for name in self.likelihood.latent_priors()
        }
        return {
            name: torch.stack([values[joint] for values in draws]) for name, joint in names.items()
        }

    def _only_latents(self, values: Values) -> Values:
        return {name: v for name, v in values.items() if name not in self._slots}

    def _stacked_outputs(
        self, inputs: Any, num_predictions: int, vectorize: bool | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs of all draws on one batch, `(S, n, ...)`, and the likelihood's variables."""
        draws = self.draws(num_predictions) if num_predictions else iter([self.mean_values()])
        if vectorize and self._slots:
            return self._vmapped_outputs(draws, inputs)
        outputs, kept = [], []
        for values in draws:
            outputs.append(self.run_net(values, inputs))
            kept.append(self._only_latents(values))
        return torch.stack(outputs), self._latents(kept)

    def _vmapped_outputs(
        self, draws: Iterator[Values], inputs: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        outputs, kept = [], []
        while chunk := [values for _, values in zip(range(VMAP_CHUNK), draws, strict=False)]:
            if draws_are_lazy():
                raise ValueError(
                    "vectorize=True needs drawn weights, but a handler such as "
                    "local_reparameterization samples inside the net: leave vectorize out"
                )
            stacked = {name: torch.stack([v[name] for v in chunk]) for name in self._slots}
            outputs.append(torch.vmap(lambda values: self.run_net(values, inputs))(stacked))
            kept += [self._only_latents(values) for values in chunk]
        return torch.cat(outputs), self._latents(kept)

    # ------------------------------------------------------------------ predict

    def predict(
        self,
        *inputs: Any,
        num_predictions: int = 1,
        aggregate: bool = True,
        vectorize: bool | None = None,
        batch_size: int | None = None,
        predictive: str | Outputs | None = None,
        link: str = "mc",
    ) -> Any:
        """Predict with several draws of the weights, in eval mode and without gradients.

        The draws of weights are the same for every row, and for a given seed the same whatever
        `batch_size` and `vectorize` are (unless a handler samples inside the net).

        Args:
            inputs: the net's arguments, or one loader of batches in their place.
            num_predictions: number of draws; 0 predicts once, at the posterior's centre.
            aggregate: combine the draws by the likelihood; `False` returns them all.
            vectorize: run draws in chunks under `torch.vmap`, for nets that it takes; the
                default is a loop, which was measured to be faster on CPUs.
            batch_size: rows that go through the net at a time. Samples of Gaussian outputs
                (`"glm"` with `link="mc"`, or not aggregated) are drawn for each row anew, so they
                are others for another `batch_size`, within their standard error.
            predictive: `"bnn"`, the above, or `"glm"`, the net linearised about the posterior's
                centre, for Gaussian posteriors [GLM 3]: outputs are Gaussian, and
                `num_predictions` counts samples of them (aggregated, 100 are taken at least; 0
                is the centre here too). The default is `"bnn"`, for a `LaplaceBNN` `"glm"`; it
                has `"gp"` besides, see `fit_gp`. A function from inputs to mean and covariance
                of outputs takes the place of either.
            link: from Gaussian logits to probabilities: `"mc"`, `"probit"` or `"bridge"`.

        Returns:
            Aggregated predictions in the likelihood's own parametrisation (class logits whose
            softmax is the mean of the probabilities; `(mean, scale)` for a homoskedastic
            Gaussian), or the net's raw outputs `(num_predictions, n, ...)`.

        Raises:
            TypeError: `"glm"` for a posterior that is not Gaussian.
            ValueError: a negative number of draws; `vectorize=True` within a handler that
                samples inside the net; an unknown predictive or link.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.Categorical(10), tyxe.guides.AutoNormal)
            >>> bnn.predict(torch.zeros(5, 2), num_predictions=8).softmax(-1).shape
            torch.Size([5, 3])
        """
        _check_count(num_predictions)
        batches = batches_to_predict(inputs[0] if len(inputs) == 1 else inputs, None, batch_size)
        with self._predicting():
            gaussian = self._gaussian(predictive, num_predictions)
            if gaussian is not None:
                parts = linearized_predictions(
                    self, gaussian, batches, link, num_predictions, aggregate
                )
            else:
                parts = [
                    self._aggregated(outputs, latents) if aggregate else outputs
                    for outputs, latents, _ in self._outputs(batches, num_predictions, vectorize)
                ]
        return concatenated(parts, 0 if aggregate else 1)

    def evaluate(
        self,
        input_data: Any,
        y: Tensor | None = None,
        num_predictions: int = 1,
        aggregate: bool = True,
        reduction: str = "sum",
        *,
        vectorize: bool | None = None,
        batch_size: int | None = None,
        predictive: str | Outputs | None = None,
        link: str = "mc",
    ) -> tuple[Tensor, Tensor]:
        """Return error and log-likelihood on data with targets.

        The log-likelihood is that of the mixture over draws, `log 1/S sum_s p(y|f_s)`, in nats.

        Args:
            input_data: a batch of inputs, or a loader (or list) of `(inputs, targets)`.
            y: targets; left out with a loader.
            num_predictions: number of draws; 0 evaluates at the posterior's centre.
            aggregate: combine the draws; `False` returns a row for each.
            reduction: over points: `"sum"`, `"mean"` or `"none"`.
            vectorize: as in `predict`.
            batch_size: as in `predict`.
            predictive: as in `predict`; `"glm"` evaluates the aggregated prediction.
            link: as in `predict`.

        Returns:
            `(error, log_likelihood)`; the error counts misclassifications or sums squares.

        Raises:
            ValueError: targets missing, or of another shape than the predictions.
        """
        _check_count(num_predictions)
        if y is None and isinstance(input_data, list):
            input_data = iter(input_data)  # as in fit, where a list is a loader
        if (y is None) != is_loader(input_data):
            raise ValueError(
                "evaluate needs targets, once: evaluate(inputs, y), or evaluate(loader) with a "
                "loader of pairs"
            )
        reduce_points(torch.zeros(1), reduction)
        name = self.likelihood.data_name
        errors, log_likelihoods = [], []
        batches = batches_to_predict(input_data, y, batch_size)
        gaussian = self._gaussian(predictive, num_predictions)
        if gaussian is not None:
            with self._predicting():
                error, log_likelihood = linearized_evaluations(
                    self, gaussian, batches, link, num_predictions
                )
            return reduce_points(error, reduction), reduce_points(log_likelihood, reduction)
        with self._predicting():
            for outputs, latents, targets in self._outputs(batches, num_predictions, vectorize):
                check_has_targets(targets)
                rows = masked_pointwise(name, torch.arange(len(targets), device=outputs.device))
                if len(rows) < len(targets):
                    outputs, targets = outputs[:, rows], targets[rows]
                error, log_likelihood = self._scores(outputs, latents, targets, aggregate)
                errors.append(error)
                log_likelihoods.append(log_likelihood)
        return (
            reduce_points(torch.cat(errors, -1), reduction),
            reduce_points(torch.cat(log_likelihoods, -1), reduction),
        )

    def _aggregated(self, outputs: Tensor, latents: Mapping[str, Tensor]) -> Any:
        return self.likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)

    def _scores(
        self, outputs: Tensor, latents: Mapping[str, Tensor], targets: Tensor, aggregate: bool
    ) -> tuple[Tensor, Tensor]:
        likelihood = self.likelihood
        if not len(targets):  # all of the batch is masked
            none = outputs.new_zeros(0 if aggregate else (len(outputs), 0))
            return none, none
        if aggregate:
            combined = self._aggregated(outputs, latents)
            log_likelihood = likelihood.mixture_log_likelihood(outputs, targets, latents)
            return likelihood.error(combined, targets, "none"), log_likelihood
        errors = [likelihood.error(one, targets, "none") for one in outputs]
        each = [
            likelihood.mixture_log_likelihood(
                outputs[s : s + 1], targets, {k: v[s : s + 1] for k, v in latents.items()}
            )
            for s in range(len(outputs))
        ]
        return torch.stack(errors), torch.stack(each)

    # ------------------------------------------------------------------ the linearised net

    default_predictive = "bnn"
    predictives = PREDICTIVES

    def _gaussian(self, predictive: str | Outputs | None, count: int) -> Outputs | None:
        """From inputs to Gaussian outputs, or None where the net itself is run."""
        chosen = self.default_predictive if predictive is None else predictive
        if not isinstance(chosen, str):
            return chosen
        if chosen == "bnn":
            return None
        if chosen not in self.predictives:
            expected = " or ".join(map(repr, ("bnn", *self.predictives)))
            raise ValueError(f"predictive is {chosen!r}; expected {expected}")
        # The centre needs no covariance, and so no curvature either.
        return functools.partial(self.predictives[chosen], self) if count else None

    def site_names(self) -> list[str]:
        """Return the joint names of the net's sites."""
        return list(self._slots)

    def point_latents(self) -> dict[str, Tensor]:
        """Return the centre of the likelihood's own variables, by their own names."""
        prefix = f"{self.likelihood.prefix}."
        values = self.mean_values() if self.likelihood.latent_priors() else {}
        return {
            name.removeprefix(prefix): v for name, v in values.items() if name.startswith(prefix)
        }

    def output_covariance(self, linear: Linearization) -> Tensor:
        """Return `J Sigma J^T` of the outputs' last dimension, `(n, ..., C, C)`.

        Args:
            linear: the net linearised on a batch.

        Raises:
            TypeError: the posterior is not Gaussian.
        """
        raise TypeError(
            f"{type(self).__name__} has no Gaussian posterior to linearise about: predict with "
            "predictive='bnn', or use tyxe.LaplaceBNN or a Normal guide"
        )

    @contextmanager
    def _predicting(self) -> Iterator[None]:
        with modes_restored(self), torch.no_grad():
            self.eval()
            yield

    def _outputs(
        self, batches: Iterable[tuple[Any, Any]], num_predictions: int, vectorize: bool | None
    ) -> Iterator[tuple[Tensor, dict[str, Tensor], Any]]:
        """Yield outputs of the same draws on each batch: the generator is set back in between."""
        device = next(self.parameters()).device
        draws, after = _rng_state(device), None
        for inputs, targets in batches:
            # The loader has random numbers of its own, which go on where they were.
            loader = _rng_state(device)
            # Where a handler samples inside the net, noise has to differ between data points.
            _set_rng_state(after if after is not None and draws_are_lazy() else draws, device)
            outputs, latents = self._stacked_outputs(inputs, num_predictions, vectorize)
            after = _rng_state(device)
            yield outputs, latents, targets
            _set_rng_state(loader, device)
        if after is not None:
            _set_rng_state(after, device)


def _check_count(num_predictions: int) -> None:
    if num_predictions < 0:
        raise ValueError(f"num_predictions is {num_predictions}; expected 0 or more")


def _rng_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), cuda


def _set_rng_state(state: tuple[Tensor, Tensor | None], device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)
