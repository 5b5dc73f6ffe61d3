"""A BNN's scores on held-out data, and distances to other predictives, such as of long chains."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor

from tyxe import check, files, metrics
from tyxe.bnn import MCMC_BNN, EnsembleBNN
from tyxe.bnn.batches import all_batches
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.scoring import Predicted, predicted
from tyxe.data import Unpack
from tyxe.diagnostics.report import integral_transform
from tyxe.likelihoods import Categorical
from tyxe.likelihoods.reductions import mean_over
from tyxe.metrics.checks import average, check_probs, check_real, check_weights
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
    batches = all_batches(bnn._to_evaluate(loader, unpack))
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


def agreement(probs: Tensor, reference: Tensor) -> Tensor:
    """Return the share of points whose most probable class is the same, for `(n, C)` each.

    Reference:
        Izmailov et al. 2021, What are Bayesian neural network posteriors really like?

    Example:
        >>> one = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
        >>> agreement(one, torch.tensor([[0.8, 0.2], [0.3, 0.7]]))
        tensor(0.5000)
    """
    one, two = _probs(probs, reference)
    return (one.argmax(-1) == two.argmax(-1)).to(one.dtype).mean()


def total_variation(probs: Tensor, reference: Tensor) -> Tensor:
    """Return `1/2 sum_c |p_c - q_c|`, averaged over points, for `(n, C)` each.

    Reference:
        Izmailov et al. 2021.

    Example:
        >>> total_variation(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.6, 0.4]]))
        tensor(0.3000)
    """
    one, two = _probs(probs, reference)
    return 0.5 * (one - two).abs().sum(-1).mean()


def wasserstein2(samples: Tensor, reference: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the distance of two predictives' samples at each point, averaged, in their units.

    For each number of a point it is `sqrt(int (F^-1(u) - G^-1(u))^2 du)` of the two empirical
    distributions, exactly, for any numbers of samples.

    Args:
        samples: shape `(S, n, ...)`, such as of `sample_predictive`.
        reference: shape `(R, n, ...)`.
        weights: of the samples, `(S,)`, as of an ensemble's draws; equal by default.

    Reference:
        Wilson et al. 2022, Evaluating approximate inference in Bayesian deep learning.

    Example:
        >>> wasserstein2(torch.tensor([[0.0], [2.0]]), torch.tensor([[1.0]]))
        tensor(1.)
    """
    one, two = check_real("samples", samples), check_real("reference", reference)
    check.shape("reference", two, ("R", *one.shape[1:]), ", as the samples (S, n, ...)")
    each = (
        torch.ones(len(one), device=one.device) if weights is None else check_weights(weights, one)
    )
    one, one_ends = _quantiles(one, each)
    two, two_ends = _quantiles(two, torch.ones(len(two), device=one.device))
    # Between these levels both quantile functions are constant.
    levels = torch.cat([one_ends, two_ends], 1).sort(1).values
    widths = levels.diff(dim=1, prepend=torch.zeros_like(levels[:, :1]))
    middles = levels - widths / 2
    one, two = (
        values.gather(1, torch.searchsorted(ends, middles).clamp_max(ends.shape[1] - 1))
        for values, ends in ((one, one_ends), (two, two_ends))
    )
    return ((one - two).square() * widths.to(one)).sum(1).sqrt().mean()


def _quantiles(samples: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of each number, `(m, S)`, and the levels up to which they are quantiles."""
    values, order = samples.flatten(1).mT.contiguous().sort(1)
    shares = (weights.double() / weights.double().sum()).to(samples.device)
    return values, shares[order].cumsum(1)


def _probs(probs: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    one, two = check_probs(probs), check_probs(reference)
    return one, check.shape("reference", two, one.shape).to(one)


@dataclass(frozen=True)
class Reference:
    """Outputs of a net at inputs, under draws from chains.

    Attributes:
        inputs: a batch, as of `predict`.
        outputs: `(S, n, ...)`.
        parameters: shapes of the net's parameters, by name.
        r_hat: the largest R-hat of the outputs.
    """

    inputs: Any
    outputs: Tensor
    parameters: dict[str, list[int]]
    r_hat: float

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file; an OSError leaves an earlier file."""
        files.write(path, {"reference": dict(vars(self))})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Reference:
        """Read what `save` has written, or raise a ValueError."""
        saved = files.read(path)
        try:
            return cls(**saved["reference"])
        except (IndexError, KeyError, TypeError):  # of another file
            reason = f"{path} has no reference: give the path that Reference.save wrote"
            raise ValueError(reason) from None

    def compare(self, bnn: Any, num_predictions: int = 100, **options: Any) -> dict[str, float]:
        """Return the distance of a BNN's predictions at the inputs from the reference.

        Args:
            bnn: a BNN of the same net, under any inference, or an ensemble.
            num_predictions: number of draws.
            options: of `predict`.

        Returns:
            `"agreement"` and `"total variation"` for classes; else `"wasserstein2"` of the net's
            outputs, in their units.

        Raises:
            ValueError: a BNN of another net.
        """
        if (found := _parameters(bnn)) != self.parameters:
            raise ValueError(
                f"the reference is of another net: its parameters are {_listed(self.parameters)}, "
                f"and those of the BNN {_listed(found)}"
            )
        arguments = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
        draws = bnn.predict(*arguments, num_predictions=num_predictions, aggregate=False, **options)
        own = bnn._weights_of(len(draws))
        theirs = self.outputs.to(draws)
        if not isinstance(bnn.likelihood, Categorical):
            return {"wasserstein2": float(wasserstein2(draws, theirs, own))}
        mine, theirs = (
            mean_over(bnn.likelihood.class_logits(part).softmax(-1), 0, weights).flatten(0, -2)
            for part, weights in ((draws, own), (theirs, None))
        )
        return {
            "agreement": float(agreement(mine, theirs)),
            "total variation": float(total_variation(mine, theirs)),
        }


@check.arguments
def reference(bnn: MCMC_BNN, *inputs: Any, largest_r_hat: float = 1.01) -> Reference:
    """Return the predictions of converged chains for inputs, to compare other methods with.

    Args:
        bnn: an `MCMC_BNN` that was fitted with several chains, or one long chain.
        inputs: a batch, as the net's arguments.
        largest_r_hat: limit for the outputs' split R-hat over chains [Vehtari et al. 2021].

    Raises:
        TypeError: another wrapper.
        ValueError: chains that have not converged.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> bnn = tyxe.MCMC_BNN(
        ...     torch.nn.Linear(1, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(20, scale=0.5),
        ...     tyxe.samplers.HMC(num_steps=3))
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> _ = bnn.fit([(x, 2 * x)], 300, warmup_steps=150, num_chains=4)
        >>> reference(bnn, x, largest_r_hat=1.05).outputs.shape
        torch.Size([1200, 20, 1])
    """
    check.one_of("bnn", bnn, MCMC_BNN, "a tyxe.MCMC_BNN, of long chains")
    bnn.get_samples()  # raises before a fit
    chains, count = next(iter(bnn.samples.items()))[1].shape[:2]
    outputs = bnn.predict(*inputs, num_predictions=chains * count, aggregate=False)
    apart = outputs.unflatten(0, (chains, count)).double()
    found = float(split_gelman_rubin(apart, chain_dim=0, sample_dim=1).max())
    most = check.number("largest_r_hat", largest_r_hat, least=1)
    hint = ": these chains are no reference yet, so fit with more samples, or resume=True"
    check.number("the largest R-hat of the outputs", found, most=most, hint=hint)
    batch = inputs[0] if len(inputs) == 1 else inputs
    return Reference(batch, outputs, _parameters(bnn), found)


def _parameters(bnn: Any) -> dict[str, list[int]]:
    return {name: list(p.shape) for name, p in bnn._bnns[0].net.named_parameters()}


def _listed(parameters: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in parameters.items())
