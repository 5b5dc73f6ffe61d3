"""Prediction and evaluation, for all wrappers with a likelihood."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tyxe.bnn.base import BNN, modes_restored
from tyxe.bnn.batches import batches_to_predict, check_has_targets, concatenated, is_loader
from tyxe.curvature import Linearization
from tyxe.likelihoods import Likelihood
from tyxe.likelihoods.base import reduce_points
from tyxe.poutine.draw import draws_are_lazy
from tyxe.poutine.selective import masked_pointwise
from tyxe.predictive.gaussian import Outputs, check_link, predict_from_gaussian
from tyxe.predictive.links import sample_outputs
from tyxe.priors import Prior
from tyxe.rng import set_torch_rng, torch_rng
from tyxe.util import Inputs, at_least_float32, call_with

__all__ = ["SupervisedBNN"]

Values = dict[str, Tensor]

# Draws at a time under torch.vmap, which is slower than a loop on CPUs except for small nets.
VMAP_CHUNK = 8
# Smallest number of samples of Gaussian outputs, which are cheap.
FEWEST_SAMPLES = 100


class SupervisedBNN(BNN):
    """Base of BNNs with a likelihood, which predict and evaluate.

    A subclass implements `draws`, `one_draw`, `mean_values` and `gaussian_predictives`.

    Args:
        likelihood: a likelihood of `tyxe.likelihoods`, which is copied.

    Raises:
        TypeError: not a likelihood.
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

        The tensors of one draw may be overwritten by the next.
        """

    @abstractmethod
    def mean_values(self) -> Values:
        """Return the posterior's centre, such as its mean: a value for each site, by joint name."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the net's output for one draw from the posterior, in its present mode."""
        with self.substituted(self.one_draw()):
            return self.net(*inputs, **kwargs)

    def to_module(self, sample: bool = False) -> nn.Module:
        """Return a plain net of the given class at the posterior's centre.

        Args:
            sample: return the net at one draw instead.
        """
        with torch.no_grad():
            values = self.one_draw() if sample else self.mean_values()
        return self.net_at(values)

    def model(self, inputs: Inputs, obs: Tensor | None = None) -> Any:
        """The joint model (a Pyro program): weights from the prior, the net, the likelihood.

        Args:
            inputs: a batch: a tensor, a tuple of arguments, or a mapping of keyword arguments.
            obs: targets; None to sample them.

        Returns:
            The net's output.
        """
        # Also around the likelihood, as handlers of the observed site may run the net again.
        with self.substituted(self.net_prior()):
            predictions = call_with(self.net, inputs)
            self.likelihood(predictions, obs)
        return predictions

    # ------------------------------------------------------------------ draws

    @abstractmethod
    def one_draw(self) -> Values:
        """Return a single draw from the posterior."""

    def _latents(self, draws: list[Values]) -> dict[str, Tensor]:
        """Return the likelihood's own variables, stacked over draws, by their own names."""
        names = {
            name: f"{self.likelihood.prefix}.{name}" for name in self.likelihood.latent_priors()
        }
        return {
            name: torch.stack([values[joint] for values in draws]) for name, joint in names.items()
        }

    def _only_latents(self, values: Values) -> Values:
        return {name: v for name, v in values.items() if name not in self._slots}

    def _stacked_outputs(
        self, inputs: Inputs, num_predictions: int, vectorize: bool | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return outputs of all draws, `(S, n, ...)`, and the likelihood's variables."""
        draws = self.draws(num_predictions) if num_predictions else iter([self.mean_values()])
        if vectorize and self._slots:
            return self._vmapped_outputs(draws, inputs)
        outputs, kept = [], []
        for values in draws:
            outputs.append(self.run_net(values, inputs))
            kept.append(self._only_latents(values))
        return torch.stack(outputs), self._latents(kept)

    def _vmapped_outputs(
        self, draws: Iterator[Values], inputs: Inputs
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

        All rows have the same draws of weights, and a seed gives the same draws for any
        `batch_size` and `vectorize`, unless a handler samples inside the net.

        Args:
            inputs: the net's arguments, or one loader of batches.
            num_predictions: number of draws; 0 predicts once, at the posterior's centre.
            aggregate: combine the draws by the likelihood; `False` returns all of them.
            vectorize: run draws in chunks under `torch.vmap` where the net allows it; the default
                is a loop, which is faster on CPUs except for small nets.
            batch_size: number of rows that go through the net at a time. Samples of Gaussian
                outputs are drawn for each row, and so depend on it.
            predictive: `"bnn"`, by draws of weights; or `"glm"`, by the net linearised about the
                centre of a Gaussian posterior [GLM 3], where outputs are Gaussian and
                `num_predictions` counts samples of them, at least 100 if aggregated. The default
                is `"bnn"`, or `"glm"` for a `LaplaceBNN`, which has `"gp"` as well, after `fit_gp`.
                A function from inputs to mean and covariance of outputs is another choice.
            link: from Gaussian logits to probabilities: `"mc"`, `"probit"` or `"bridge"`.

        Returns:
            Aggregated predictions in the likelihood's own parametrisation (class logits whose
            softmax is the mean of the probabilities; `(mean, scale)` for a homoskedastic
            Gaussian), or the net's outputs, `(num_predictions, n, ...)`.

        Raises:
            TypeError: `"glm"` for a posterior that is not Gaussian.
            ValueError: a negative number of draws; `vectorize=True` inside of a handler that
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
        gaussian = self._gaussian(predictive, num_predictions, link)
        with self.predicting():
            if gaussian is None:
                parts = [
                    self._aggregated(outputs, latents) if aggregate else outputs
                    for outputs, latents, _ in self._outputs(batches, num_predictions, vectorize)
                ]
            elif aggregate:
                parts = [self._by_link(gaussian(x), link, num_predictions) for x, _ in batches]
            else:
                parts = [_output_samples(gaussian(x), num_predictions) for x, _ in batches]
        return concatenated(parts, 0 if aggregate else 1)

    def evaluate(
        self,
        input_data: Inputs,
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

        The log-likelihood is that of the mixture over draws, `log 1/S sum_s p(y|f_s)`, in nats; for
        Gaussian outputs it is that of the aggregated prediction. Arguments and errors that are not
        listed are those of `predict`.

        Args:
            input_data: a batch of inputs, or a loader or list of `(inputs, targets)`.
            y: targets of a batch; None with a loader.
            aggregate: combine the draws; `False` returns a row for each, and has no effect for
                Gaussian outputs.
            reduction: reduction over points: `"sum"`, `"mean"` or `"none"`.

        Returns:
            `(error, log_likelihood)`; the error counts misclassifications or sums squares.

        Raises:
            ValueError: targets are missing, or have another shape than the predictions; an unknown
                reduction.
        """
        _check_count(num_predictions)
        if y is None and isinstance(input_data, list):
            input_data = iter(input_data)  # a list is a loader, as in `fit`
        if (y is None) != is_loader(input_data):
            raise ValueError(
                "evaluate needs targets, once: evaluate(inputs, y), or evaluate(loader) with a "
                "loader of pairs"
            )
        reduce_points(torch.zeros(1), reduction)
        batches = batches_to_predict(input_data, y, batch_size)
        gaussian = self._gaussian(predictive, num_predictions, link)
        with self.predicting():
            if gaussian is None:
                found = self._outputs(batches, num_predictions, vectorize)
                each = [self._scores(*one, aggregate) for one in found]
            else:
                each = [
                    self._gaussian_scores(gaussian, x, y, link, num_predictions) for x, y in batches
                ]
        errors, log_likelihoods = zip(*each, strict=True)
        return (
            reduce_points(torch.cat(errors, -1), reduction),
            reduce_points(torch.cat(log_likelihoods, -1), reduction),
        )

    def _by_link(self, gaussian: tuple[Tensor, Tensor], link: str, count: int) -> Any:
        samples = max(count, FEWEST_SAMPLES) if count else 0
        return predict_from_gaussian(
            self.likelihood, *gaussian, link, samples, self.point_latents()
        )

    def _gaussian_scores(
        self, gaussian: Outputs, inputs: Inputs, targets: Tensor, link: str, count: int
    ) -> tuple[Tensor, Tensor]:
        rows, latents = self._rows_that_count(targets), self.point_latents()
        prediction = self._by_link(gaussian(inputs), link, count)
        if len(rows) < len(targets):
            parts = prediction if isinstance(prediction, tuple) else (prediction,)
            kept = tuple(part[rows] for part in parts)
            prediction, targets = (kept if len(kept) > 1 else kept[0]), targets[rows]
        log_likelihood = self.likelihood.log_likelihood(prediction, targets, "none", latents)
        return self.likelihood.error(prediction, targets), log_likelihood

    def _rows_that_count(self, targets: Tensor) -> Tensor:
        check_has_targets(targets)
        rows = torch.arange(len(targets), device=targets.device)
        return masked_pointwise(self.likelihood.data_name, rows)

    def _aggregated(self, outputs: Tensor, latents: Mapping[str, Tensor]) -> Any:
        return self.likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)

    def _scores(
        self, outputs: Tensor, latents: Mapping[str, Tensor], targets: Tensor, aggregate: bool
    ) -> tuple[Tensor, Tensor]:
        likelihood, rows = self.likelihood, self._rows_that_count(targets)
        if len(rows) < len(targets):
            outputs, targets = outputs[:, rows.to(outputs.device)], targets[rows]
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

    @abstractmethod
    def gaussian_predictives(self) -> Mapping[str, Outputs]:
        """Return the posterior's predictives with Gaussian outputs, such as `"glm"`, by name."""

    def linearize(self, inputs: Inputs) -> Linearization:
        """Linearise the net about the posterior's centre, on one batch."""
        values = self.mean_values()
        return Linearization(self.net, self.substituted, values, inputs, self.site_shapes())

    def _gaussian(self, predictive: str | Outputs | None, count: int, link: str) -> Outputs | None:
        """Return a function from inputs to Gaussian outputs, or None to run the net itself."""
        chosen = self.default_predictive if predictive is None else predictive
        if chosen == "bnn":
            return None
        check_link(link)
        if not isinstance(chosen, str):
            return chosen
        known = self.gaussian_predictives()
        if chosen == "glm" and not known:
            raise TypeError(
                f"{type(self).__name__} has no Gaussian posterior to linearise about: predict with "
                "predictive='bnn', or use tyxe.LaplaceBNN or a Normal guide"
            )
        if chosen not in known:
            expected = " or ".join(map(repr, ("bnn", *known)))
            raise ValueError(f"predictive is {chosen!r}; expected {expected}")
        # A prediction at the centre needs no covariance.
        return known[chosen] if count else None

    def point_latents(self) -> dict[str, Tensor]:
        """Return the centre of the likelihood's own variables, by their own names."""
        prefix = f"{self.likelihood.prefix}."
        values = self.mean_values() if self.likelihood.latent_priors() else {}
        return {
            name.removeprefix(prefix): v for name, v in values.items() if name.startswith(prefix)
        }

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Run the net in eval mode and without gradients, and restore its modes at the end."""
        with modes_restored(self), torch.no_grad():
            self.eval()
            yield

    def _outputs(
        self, batches: Iterable[tuple[Any, Any]], num_predictions: int, vectorize: bool | None
    ) -> Iterator[tuple[Tensor, dict[str, Tensor], Any]]:
        """Yield outputs of the same draws on each batch, setting the generators back in between."""
        draws, after = torch_rng(), None
        for inputs, targets in batches:
            # The loader's own random numbers must not repeat.
            loader = torch_rng()
            # Where a handler samples inside the net, its noise must differ between data points.
            set_torch_rng(after if after is not None and draws_are_lazy() else draws)
            outputs, latents = self._stacked_outputs(inputs, num_predictions, vectorize)
            after = torch_rng()
            yield outputs, latents, targets
            set_torch_rng(loader)
        if after is not None:
            set_torch_rng(after)


def _output_samples(gaussian: tuple[Tensor, Tensor], count: int) -> Tensor:
    return sample_outputs(*gaussian, count) if count else gaussian[0][None]


def _check_count(num_predictions: int) -> None:
    if num_predictions < 0:
        raise ValueError(f"num_predictions is {num_predictions}; expected 0 or more")
