"""All scores of a BNN on held-out data, in one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from tyxe import check, metrics
from tyxe.bnn import EnsembleBNN
from tyxe.bnn.batches import all_batches, device_for
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.scoring import Predicted, predicted
from tyxe.data import Unpack
from tyxe.diagnostics.case import integral_transform
from tyxe.metrics.checks import average
from tyxe.rng import set_torch_rng, torch_rng


class Scores(dict[str, float]):
    """Scores by name, which print as a table."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:{width}}  {value:10.4g}" for name, value in self.items())


@check.arguments
def scores(
    bnn: SupervisedBNN | EnsembleBNN,
    loader: Iterable[Any],
    num_predictions: int | None = None,
    *,
    unpack: Unpack | None = None,
    **options: Any,
) -> Scores:
    """Return the scores of a BNN's predictions of held-out data.

    For any likelihood: `"log-likelihood"`, nats per point, and `"error"` per point, as in
    `evaluate`. For classes also the calibration errors, Brier score and AURC; for numbers
    `(mean, scale)` RMSE, CRPS, coverage and score of 90 % intervals and the quantile calibration
    error. CRPS and the score of intervals are of a Normal with this mean and scale. Points count by
    their weights, and missing numbers are left out.

    Args:
        bnn: any BNN with a likelihood, or an `EnsembleBNN`.
        loader: yields held-out `(inputs, targets)`, or with weights.
        num_predictions: number of draws, by default as in `predict`.
        unpack: a function from a batch of the loader to these.
        options: options of `predict` and `evaluate`.

    Example:
        >>> import pyro.distributions as dist, torch, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.Categorical(50), tyxe.guides.AutoNormal)
        >>> list(scores(bnn, [(torch.randn(50, 2), torch.arange(50) % 3)]))[:3]
        ['log-likelihood', 'error', 'Brier score']
    """
    batches = all_batches(bnn._to_evaluate(loader, unpack), device_for(bnn))
    options = {"num_predictions": num_predictions, **options}
    state = torch_rng()
    error, log_likelihood = bnn.evaluate(batches, reduction="mean", **options)
    if isinstance(error, dict):
        named = {f"log-likelihood, {n}": float(v) for n, v in log_likelihood.items()}
        return Scores(named | {f"error, {n}": float(v) for n, v in error.items()})
    found = Scores({"log-likelihood": float(log_likelihood), "error": float(error)})
    set_torch_rng(state)  # on a CPU the same draws again
    judged = predicted(bnn, batches, **options)
    if judged.kind == "classes":
        found |= _of_classes(*judged.classes())
    elif judged.kind == "numbers":
        found |= _of_numbers(judged)
    return found


def _of_classes(probs: Tensor, y: Tensor, weights: Tensor | None) -> dict[str, float]:
    each: dict[str, Callable[..., Tensor]] = {
        "Brier score": metrics.brier_score,
        "expected calibration error": metrics.expected_calibration_error,
        "adaptive calibration error": metrics.adaptive_calibration_error,
        "AURC": metrics.aurc,
    }
    return {name: float(metric(probs, y, weights=weights)) for name, metric in each.items()}


def _of_numbers(judged: Predicted) -> dict[str, float]:
    mean, scale, y, weights = judged.numbers()
    half = 1.6448536 * scale  # of a normal's 90 %
    pit, _ = integral_transform(judged)
    found = {
        "RMSE": metrics.rmse(mean, y, weights),
        "CRPS": metrics.crps_gaussian(mean, scale, y, weights),
        "coverage of 90 %": average(((pit - 0.5).abs() <= 0.45).to(pit), weights),
        "interval score, 90 %": metrics.interval_score(mean - half, mean + half, y, 0.9, weights),
        "quantile calibration error": metrics.quantile_calibration_error(pit, weights=weights),
    }
    return {name: float(value) for name, value in found.items()}
