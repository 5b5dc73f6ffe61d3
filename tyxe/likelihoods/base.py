"""The base class of likelihoods: a Pyro program on predictions and targets."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributions as td
from torch import Tensor, nn

from tyxe import check
from tyxe.data import Targets, masked_targets, read_targets, trailing
from tyxe.likelihoods import checks
from tyxe.likelihoods.reductions import log_mean_exp, mean_of, reduce_points
from tyxe.poutine.selective import masked_within
from tyxe.rng import torch_rng_kept
from tyxe.threads import exclusive
from tyxe.util import at_least_float32, in_function_transform, is_real, precise

Predictions = Any  # a tensor, or a tuple of tensors such as an aggregated (mean, scale)
Latents = Mapping[str, Tensor] | None  # values of a likelihood's own variables by name


class Likelihood(nn.Module, ABC):
    """Base of all likelihoods.

    The first dimension of predictions and targets counts data points; all further ones belong
    to a point, whose log-likelihood is their sum. Calling a likelihood is a Pyro program with
    one observed site, `likelihood.data`, in a plate that scales a batch to the data set.

    A subclass implements `predictive_distribution`, `point_error` and `aggregate_predictions`,
    and may override `prepare_targets` and `latent_priors`.

    Args:
        dataset_size: number `N` of data points in an epoch, or the sum of their weights; None or -1
            if not yet known: then set `bnn.likelihood.dataset_size = N` before a fit.
        event_dim: number of trailing dimensions that are one event of the predictive distribution.
        name: prefix of the sites.

    Raises:
        TypeError: `dataset_size` is not a number, or `event_dim` not an integer.
        ValueError: `dataset_size` is not positive, or `event_dim` negative.
    """

    def __init__(
        self, dataset_size: float | None = None, event_dim: int = 0, name: str = "likelihood"
    ) -> None:
        super().__init__()
        self.dataset_size = dataset_size
        self.event_dim = check.count("event_dim", event_dim, 0)
        self.prefix = name

    def extra_repr(self) -> str:
        """Return the line of `repr` about its numbers."""
        return f"dataset_size={self._dataset_size}"

    @property
    def dataset_size(self) -> float:
        """The number `N` of data points in an epoch; a ValueError if it is not yet known."""
        if self._dataset_size is None:
            raise ValueError(
                f"the dataset_size of this {type(self).__name__} is not known: set it to the "
                "number of training points, bnn.likelihood.dataset_size = len(dataset)"
            )
        return self._dataset_size

    @dataset_size.setter
    def dataset_size(self, size: float | None) -> None:
        self._dataset_size = checks.dataset_size(type(self).__name__, size)

    has_classes = False  # whether targets are classes, of which `class_logits` are the logits
    has_order = True  # whether some targets are larger than others, so that they have intervals
    has_squared_errors = False  # whether errors are squares, and the root of their mean the RMSE
    is_zero_outside = False  # whether densities of targets outside of the support come out as 0
    takes_infinity = False  # whether targets may be infinite
    has_target_hessian = False  # whether output Hessians depend on targets, see `hessian_counts`
    prepares_outputs = False  # whether what a net returns goes through `from_net`
    shape_hint = "they have to be the same"  # where targets have another shape than predictions
    # Whether a loader's targets go through `from_loader` and `with_fit_weights`.
    prepares_targets = False

    @property
    def bounded_outputs(self) -> str:
        """What the net's outputs are where they have bounds; empty where any number is possible."""
        return "" if getattr(self, "logit_predictions", True) else "probabilities"

    @property
    def data_name(self) -> str:
        """Name of the observed site."""
        return f"{self.prefix}.data"

    # ------------------------------------------------------------------ what a subclass gives

    @abstractmethod
    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> td.Distribution:
        """Return the distribution of the targets.

        Args:
            predictions: the net's output `(n, ...)`, or what `aggregate_predictions` returned.
            latents: values of the likelihood's own variables, if it has any.

        Raises:
            ValueError: a variable of the likelihood has no value.
        """

    @abstractmethod
    def point_error(self, predictions: Predictions, targets: Tensor) -> Tensor:
        """Return an elementwise error, of the targets' shape (not yet summed over a point)."""

    @abstractmethod
    def aggregate_predictions(
        self, predictions: Any, dim: int = 0, latents: Latents = None, weights: Tensor | None = None
    ) -> Predictions:
        """Combine predictions of several draws into one, in the likelihood's parametrisation.

        Args:
            predictions: net outputs stacked along `dim`.
            dim: the dimension of the draws.
            latents: the draws of the likelihood's own variables, stacked along dimension 0.
            weights: weights of the draws, which sum to one; equal by default. Your own likelihood
                needs them only for ensembles with weights.
        """

    def prepare_targets(self, predictions: Predictions, targets: Tensor) -> Tensor:
        """Bring targets to the dtype that the distribution needs."""
        like = predictions[0] if isinstance(predictions, tuple) else predictions
        return targets.to(like.dtype)

    def distribution_of(self, distribution: Any, targets: Tensor) -> Any:
        """Return the distribution for a kind of targets, such as class probabilities."""
        return distribution

    def mean_and_scale(
        self, predictions: Predictions, latents: Latents = None
    ) -> tuple[Tensor, Tensor]:
        """Return means and standard deviations of numbers, `(n, ...)`, for aggregated predictions.

        Aggregated predictions of counts are means alone, so that the spread of draws is not in
        their standard deviations. It is in `bnn.predictive(x).stddev`.

        Args:
            predictions: as `aggregate_predictions` returns them.
            latents: values of the likelihood's own variables.

        Raises:
            TypeError: the targets are classes, or those of a `Joint`.
            ValueError: a variable that the standard deviation depends on has no value.

        Example:
            >>> from tyxe.likelihoods import Poisson
            >>> Poisson(10).mean_and_scale(torch.tensor([4.0]).log())
            (tensor([4.]), tensor([2.]))
        """
        if isinstance(predictions, tuple | list):  # a list after JSON
            mean, scale = predictions
            return mean, scale
        if self.has_classes:
            name = type(self).__name__
            raise TypeError(f"the targets of {name} are classes: they have sets, and no intervals")
        found = self.predictive_distribution(predictions, latents)
        return found.mean, found.variance.sqrt()

    def class_logits(self, predictions: Predictions) -> Tensor:
        """Return predictions `(n, ...)` as logits of classes, `(n, ..., C)`.

        Raises:
            TypeError: the targets are not classes.
        """
        raise TypeError(f"the targets of {type(self).__name__} are not classes")

    def from_class_logits(self, logits: Tensor) -> Tensor:
        """Return the predictions whose `class_logits` are those given, up to a constant."""
        return logits

    def latent_priors(self) -> dict[str, td.Distribution]:
        """Return priors of the likelihood's own variables by name, such as a noise scale."""
        return {}

    def prior_means(self) -> dict[str, Tensor]:
        """Return the prior means of the likelihood's own variables, where only shapes matter.

        Where PyTorch has no mean, it is that of samples, the same in each call.
        """
        return {name: _mean_of_prior(prior) for name, prior in self.latent_priors().items()}

    def with_gradients(self, enabled: bool) -> Likelihood:
        """Return itself, or a copy whose parameters, such as a noise, record no gradients."""
        if enabled or not any(parameter.requires_grad for parameter in self.parameters()):
            return self
        return copy.deepcopy(self).requires_grad_(False)

    # ------------------------------------------------------------------ what comes, and counts

    def from_net(self, outputs: Any) -> Any:
        """Return predictions from the net's output, after `output` has picked them."""
        return outputs

    def from_loader(self, targets: Any) -> Any:
        """Return targets from those of a loader."""
        return targets

    def outputs_of(self, predictions: Any) -> Any:
        """Return predictions as users see them."""
        return predictions

    def targets_of(self, targets: Tensor) -> Any:
        """Return targets as users see them."""
        return targets

    def named(self, scores: Tensor, dim: int) -> Any:
        """Return scores as users see them; `dim` is the dimension of several outputs."""
        return scores

    def with_fit_weights(self, targets: Tensor | Targets) -> Tensor | Targets:
        """Return the targets with weights that count in fits alone."""
        return targets

    def known(self, targets: Targets) -> Targets:
        """Return targets with a mask of those that they mark as missing."""
        return targets

    def observed(self, targets: Tensor | Targets) -> Targets:
        """Return targets with weights, and with masks that include missing targets.

        Numbers that do not count are replaced by some that do. Scores, calibrators, comparisons and
        curvatures get their targets from here. Override `known`, not this.
        """
        found = Targets.of(targets)
        if found.is_observed:
            return found
        found = masked_targets(self.data_name, self.known(found))
        return replace(self._filled(found), is_observed=True)

    def _filled(self, targets: Targets) -> Targets:
        return targets.filled()

    def count(self, targets: Tensor | Targets) -> Any:
        """Return the number of points of a batch that count, or the sum of their weights."""
        counts = self.observed(targets).counts()
        return len(targets) if counts is None else counts.sum()

    def counted(self, targets: Tensor | Targets) -> tuple[Targets, Tensor | None]:
        """Return the targets of points that count, and their rows; None for all."""
        found = self.observed(targets)
        counts = found.counts()
        if found.has_whole_points:  # as the rows have
            found = replace(found, mask=None)
        if counts is None or bool(counts.all()):
            return found, None
        rows = counts.nonzero()[:, 0]
        return found[rows], rows

    def score_counts(self, kept: Targets) -> Tensor:
        """Return how often points that `counted` keeps do; for a `Joint`, `(parts + 1, n)`."""
        return torch.ones(len(kept), device=kept.device) if kept.weights is None else kept.weights

    def output_counts(self, targets: Tensor | Targets, outputs: Tensor) -> Tensor | None:
        """Return how often each output of the net counts, of its shape; None for once each."""
        return self.observed(targets).counts_within(outputs.shape)

    def hessian_counts(self, targets: Tensor | Targets, outputs: Tensor) -> Tensor | None:
        """Return how often the output Hessian of each output counts; None for once each."""
        return self.output_counts(targets, outputs)

    # ------------------------------------------------------------------ checks

    def check_targets(self, predictions: Tensor, targets: Tensor | Targets) -> None:
        """Raise an error if targets do not fit the predictions or lie outside the support."""
        self.check_predictions(predictions)
        found = self.observed(targets)
        distribution, prepared = self._distribution_for(predictions, found, self.prior_means())
        assert prepared is not None
        checks.within_support(self, distribution.support, prepared, found.values)

    def check_rows(self, targets: Any) -> None:
        """Check the size of a batch that has more rows than the data set has points."""
        if len(targets) > self.dataset_size:
            checks.within_size(self, targets)

    def check_predictions(self, predictions: Tensor) -> None:
        """Raise or warn if the net's output cannot parametrise this likelihood."""

    @staticmethod
    def expected_range(support: Any) -> str:
        """Say which targets an elementwise support holds."""
        return f"expected values in {support}"

    # ------------------------------------------------------------------ the Pyro program

    def sample_latents(self) -> dict[str, Tensor]:
        """Sample the likelihood's own variables; its guide is built from this program."""
        return {
            name: pyro.sample(f"{self.prefix}.{name}", prior)
            for name, prior in self.latent_priors().items()
        }

    def forward(self, predictions: Predictions, obs: Tensor | Targets | None = None) -> Tensor:
        """Sample the observed site for predictions `(n, ...)`, given targets or none.

        With weights, the plate's scale is `N` by their sum, as if points were repeated.
        """
        site = self._site(predictions, obs, self.sample_latents())
        distribution, values, mask, factor, infer = site
        # The plate only uses the length of `subsample`, which is the number of rows.
        rows = range(distribution.batch_shape[0])
        with ExitStack() as stack:
            plate = pyro.plate(f"{self.prefix}.plate", self.dataset_size, subsample=rows, dim=-1)
            stack.enter_context(plate)
            if mask is not None:
                stack.enter_context(poutine.mask(mask=mask))
                stack.enter_context(poutine.scale(scale=factor))
            value: Tensor = pyro.sample(self.data_name, distribution, obs=values, infer=infer)
        return value

    def _site(
        self, predictions: Predictions, obs: Tensor | Targets | None, latents: Mapping[str, Tensor]
    ) -> tuple[Any, Tensor | None, Tensor | None, Any, dict[str, Any]]:
        """Return distribution, targets, the points that count, their scale, and `infer`."""
        targets = None if obs is None else self.observed(obs)
        distribution, values = self._distribution_for(predictions, targets, latents)
        infer: dict[str, Any] = {
            "is_bounded": not (self.is_zero_outside or is_real(distribution.support)),
            "is_masked": targets is not None,  # a handler has been asked for its mask
            "has_weights": targets is not None and targets.has_weights,
            "has_target_hessian": self.has_target_hessian,
        }
        counts = None if targets is None else targets.counts()
        if targets is None or counts is None:
            return distribution, values, None, 1.0, infer
        kept, rows = counts > 0, distribution.batch_shape[0]
        if targets.weights is None:
            return distribution, values, kept, rows / precise(kept.sum()).clamp(min=1), infer
        infer["points"] = points = counts.sum()
        factor = counts.where(kept, torch.ones_like(counts)) * rows
        factor = factor / points.where(points > 0, torch.ones_like(points))
        return distribution, values, kept, factor, infer

    def _distribution_for(
        self,
        predictions: Predictions,
        targets: Tensor | Targets | None,
        latents: Latents = None,
    ) -> tuple[Any, Tensor | None]:
        """Return the distribution with points as its only batch dimension, and its targets."""
        predictions = at_least_float32(predictions)
        distribution, values = self.predictive_distribution(predictions, latents), None
        if targets is not None:
            targets = self.observed(targets)
            values = self.prepare_targets(predictions, targets.values)
            distribution = self.distribution_of(distribution, values)
            expected = distribution.batch_shape + distribution.event_shape
            if values.shape != expected:
                given = mean_of(predictions).shape
                raise ValueError(checks.shape_message(self, expected, values.shape, given))
            if targets.mask is not None:
                distribution = masked_within(distribution, targets.mask)
        extra = len(distribution.batch_shape) - 1
        if extra > 0:
            distribution = dist.Independent(distribution, extra, validate_args=False)
        elif extra < 0:
            raise ValueError(
                f"{type(self).__name__} got predictions in which no dimension counts data points; "
                "the net's output needs one row per point (or a smaller event_dim)"
            )
        return distribution, values

    # ------------------------------------------------------------------ evaluation

    def _read(self, targets: Tensor | Targets) -> Targets:
        """Return the targets of a direct call, in which NaN is missing as in those of loaders."""
        check.one_of("targets", targets, Tensor | Targets | Mapping, "a tensor")
        as_given = isinstance(targets, Targets) or in_function_transform()
        return self.observed(targets if as_given else read_targets(targets))

    def log_likelihood(
        self,
        predictions: Predictions,
        targets: Tensor | Targets,
        reduction: str = "none",
        latents: Latents = None,
    ) -> Tensor:
        """Return the log-likelihood of targets, in nats, each point's dimensions summed.

        Args:
            predictions: `(n, ...)`.
            targets: in their natural shape and dtype.
            reduction: over points by their weights: `"sum"`, `"mean"` or `"none"`.
            latents: values of the likelihood's own variables.

        Raises:
            ValueError: the targets' shape is not that of the predictive distribution; a variable of
                the likelihood has no value.
        """
        check.one_of("predictions", predictions, Tensor | tuple, "a tensor, or a tuple of them")
        targets = self._read(targets)
        distribution, values = self._distribution_for(predictions, targets, latents)
        return reduce_points(distribution.log_prob(values), reduction, targets.counts())

    def mixture_log_likelihood(
        self,
        predictions: Tensor,
        targets: Tensor | Targets,
        latents: Latents = None,
    ) -> Tensor:
        """Return `log 1/S sum_s p(y_n | f_s(x_n))` for each point, in nats.

        `predictions` are `(S, n, ...)`, the net's outputs for S draws, and values of the
        likelihood's own variables are stacked alike.
        """
        targets, each = self._read(targets), []
        for s, one in enumerate(predictions):
            own = latents and {name: values[s] for name, values in latents.items()}
            each.append(self.log_likelihood(one, targets, "none", own))
        return log_mean_exp(torch.stack(each), 0)

    def _of_mixture(
        self, logs: Tensor, prediction: Predictions, targets: Targets, weights: Tensor | None
    ) -> Tensor:
        """Return `(n,)` of a mixture from those of its components, `(K, n)`, and its prediction."""
        return log_mean_exp(logs, 0, weights)

    def error(
        self, predictions: Predictions, targets: Tensor | Targets, reduction: str = "none"
    ) -> Tensor:
        """Return the number of misclassifications, or the squared error, summed within points."""
        targets = self._read(targets)
        self._distribution_for(predictions, targets, self.prior_means())
        predictions = at_least_float32(predictions)
        errors = self.point_error(predictions, self.prepare_targets(predictions, targets.values))
        if targets.mask is not None:
            errors = errors * trailing(targets.mask, errors.dim())
        per_point = errors.sum(tuple(range(1, errors.dim()))) if errors.dim() > 1 else errors
        return reduce_points(per_point, reduction, targets.counts())

    def errors(self, predictions: Predictions, targets: Tensor | Targets) -> Tensor:
        """Return the errors of points, as `evaluate` does: for several outputs, of each."""
        return self.error(predictions, targets)

    def sample(
        self,
        predictions: Predictions,
        sample_shape: torch.Size | tuple[int, ...] = (),
        latents: Latents = None,
    ) -> Tensor:
        """Draw targets from the predictive distribution, `sample_shape + (n, ...)`."""
        distribution = self.predictive_distribution(predictions, latents)
        with exclusive():  # other threads set the generators back for a while
            drawn: Tensor = distribution.sample(torch.Size(sample_shape))
        return drawn


def _mean_of_prior(prior: td.Distribution) -> Tensor:
    try:
        return prior.mean
    except NotImplementedError:
        with torch_rng_kept(0):
            return prior.sample(torch.Size([1000])).mean(0)
