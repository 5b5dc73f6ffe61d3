"""What is computed of predictions: scores of points, and intervals.

All that compares predictions with their targets gets them from `predicted`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tyxe import check
from tyxe.bnn.batches import check_has_targets, is_loader, on_device
from tyxe.bnn.passes import ReplayedDraws, map_batches
from tyxe.data import Targets, Unpack, concatenate_targets
from tyxe.likelihoods import Bernoulli, HeteroskedasticGaussian, Likelihood, Ordinal
from tyxe.likelihoods.joint import check_is_one
from tyxe.likelihoods.reductions import reduce_points
from tyxe.predictive.scores import LOGITS, SCORES
from tyxe.processes import all_or_none, check_group, total
from tyxe.util import Inputs


def check_evaluation(
    bnn: Any, input_data: Inputs, y: Tensor | None, reduction: str, group: Any
) -> Tensor | None:
    """Return targets as a BNN takes them; raise where `evaluate` has none, or has them twice."""
    if check_group(group) is not None and reduction == "none":
        raise ValueError("reduction='none' is of one process: leave process_group out")
    if (y is None) != is_loader(input_data):
        raise ValueError(
            "evaluate expected targets, once: evaluate(inputs, y), or evaluate(loader) with a "
            "loader or list of pairs; several arguments of the net are a tuple"
        )
    if y is not None:
        y = bnn.likelihood.from_loader(y)
        check_has_targets(y)
    reduce_points(torch.zeros(1, device="cpu"), reduction)
    return y


def evaluated(
    bnn: Any,
    score: Callable[[Inputs, Any, ReplayedDraws], Sequence[Any]],
    input_data: Inputs,
    y: Tensor | None,
    reduction: str,
    batch_size: int | None,
    unpack: Unpack | None,
    group: Any,
) -> Any:
    """Return error and log-likelihood, the first two scores of each batch, reduced over points."""

    def one(inputs: Inputs, targets: Any, again: ReplayedDraws) -> tuple[Any, ...]:
        scores = score(inputs, targets, again)[:2]
        kept, _ = bnn.likelihood.counted(targets)
        return *scores, bnn.likelihood.score_counts(kept)

    loader = bnn._to_evaluate(input_data, unpack)
    with all_or_none(group):
        found = map_batches(bnn, (loader,), batch_size, one, -1, y)
    return reduced(bnn.likelihood, found, reduction, group)


def rows_of(values: Tensor, rows: Tensor | None, dim: int) -> Tensor:
    """Return some rows of a tensor along a dimension, or all."""
    return values if rows is None else values.index_select(dim, rows.to(values.device))


def together(scores: Any) -> Tensor:
    """Return the scores of all parts of a `Joint` together, or those of another likelihood."""
    found: Tensor = scores["joint"] if isinstance(scores, Mapping) else scores
    return found


class Predicted(NamedTuple):
    """Predictions, as of `predict`, of the points that count, beside their targets."""

    likelihood: Likelihood
    predictions: Any
    targets: Targets

    @property
    def kind(self) -> str:
        """`"classes"`, one for each point, `"numbers"` with a mean and a scale, or `"others"`."""
        values = self.targets.values
        if self.likelihood.has_classes:
            is_one = values.numel() == len(values) and not values.is_floating_point()
            return "classes" if is_one else "others"
        is_pair = isinstance(self.predictions, tuple)
        return "numbers" if is_pair and values.shape == self.predictions[0].shape else "others"

    def classes(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return probabilities `(m, C)` of all labels that count, these, and their counts."""
        probs = self.likelihood.class_logits(self.predictions).softmax(-1)
        return flattened(probs, self.targets)

    def numbers(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return mean and scale of all numbers that count, `(m,)`, these, and their counts."""
        mean, scale = self.predictions
        pairs = torch.stack([mean, scale.expand_as(mean)], -1)
        pairs, y, counts = flattened(pairs, self.targets)
        return pairs[:, 0], pairs[:, 1], y.to(mean), counts


def predicted(bnn: Any, batches: list[Any], **options: Any) -> Predicted:
    """Return a BNN's predictions of batches beside their targets."""
    likelihood = bnn.likelihood.with_gradients(False)
    found = bnn.predict(batches, **options)
    labels = on_device([targets for _, targets in batches], tree_leaves(found)[0].device)
    # Masks are of batches.
    targets = concatenate_targets([likelihood.observed(each) for each in labels])
    kept, rows = likelihood.counted(targets)
    if isinstance(likelihood, Bernoulli | Ordinal):
        kept = replace(kept, values=kept.values.long())
    elif isinstance(likelihood, HeteroskedasticGaussian):
        found = likelihood.mean_and_scale(found)
    return Predicted(likelihood, tree_map(lambda part: rows_of(part, rows, 0), found), kept)


def flattened(predictions: Tensor, targets: Targets) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows of predictions `(n, ..., C)` and numbers `(n, ...)` that count, and how often.

    Counts are None for once each.
    """
    counts, values = targets.counts_within(), targets.values.flatten()
    predictions = predictions.flatten(0, -2)
    if counts is None:
        return predictions, values, None
    counts = counts.flatten()
    kept = counts > 0
    return predictions[kept.to(predictions.device)], values[kept], counts[kept]


def weights_of(likelihood: Likelihood, targets: Any) -> Tensor:
    """Return how often each point of a batch counts, of those that do."""
    kept, _ = likelihood.counted(targets)
    counts = likelihood.score_counts(kept)
    return counts if counts.dim() == 1 else counts[-1]


def reduced(
    likelihood: Likelihood,
    parts: tuple[Tensor, Tensor, Tensor],
    reduction: str,
    group: Any = None,
) -> Any:
    """Return errors and log-likelihoods reduced over points, and processes.

    The third of the parts is how often each point counts, in the scores of each part of a `Joint`.
    """
    *scores, counts = parts
    found = []
    for score in scores:
        # The errors of a `Joint` have no row for all of its parts.
        own = counts if counts.dim() == 1 else counts[: score.shape[-2]]
        if group is not None:
            each = total((score * own).double().sum(-1), group)
            each = each / total(own.double().sum(-1), group) if reduction == "mean" else each
        else:
            each = reduce_points(score, reduction, None if bool((own == 1).all()) else own)
        found.append(likelihood.named(each, -2 if reduction == "none" else -1))
    return tuple(found)


class Derived:
    """What follows from predictions and samples of any wrapper with a likelihood."""

    likelihood: Likelihood
    predict: Callable[..., Any]
    sample_predictive: Callable[..., Tensor]
    _weights_of: Callable[[int], Tensor | None]  # of so many draws, None for equal ones
    _bnns: list[Any]  # itself, or the members of an ensemble, of as many draws each

    def interval(
        self, *inputs: Any, level: float = 0.9, num_samples: int = 1000, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the ends of intervals that hold targets with a probability, `(n, ...)` each.

        As many samples lie below as above, and each number of a target has its own interval. A new
        sample lies between two of `S` sorted ones with probability `(rank difference) / (S + 1)`.

        Args:
            level: the probability, between 0 and 1.
            num_samples: number of samples of `sample_predictive`, which takes the other options. It
                is raised to the smallest number that allows the level, 19 for 0.9.

        Raises:
            TypeError: the targets are classes, which have no order, or those of a `Joint`.
            ValueError: a level that is not a probability.

        Example:
            >>> import torch, pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
            >>> lower, upper = bnn.interval(torch.zeros(5, 2), level=0.5)
            >>> bool((lower < upper).all())
            True
        """
        level = check.number("level", level, above=0, below=1)
        instead = (
            "take quantiles of the samples of each with numbers, such as "
            "sample_predictive(x)[name].quantile(0.05, 0)"
        )
        check_is_one(self.likelihood, instead)
        if not self.likelihood.has_order:
            raise TypeError(
                f"the targets of {type(self.likelihood).__name__} are classes, which have no order "
                "and so no interval: use predict(...).softmax(-1), or sample_predictive"
            )
        tail = (1 - level) / 2
        fewest = math.ceil(1 / tail - 1e-9) - 1
        num_samples = max(check.count("num_samples", num_samples), fewest)
        samples = self.sample_predictive(*inputs, num_samples=num_samples, **options).sort(0)[0]
        # A product such as 0.05 * 100 is rounded.
        rank = math.floor(tail * (num_samples + 1) + 1e-9)
        return samples[rank - 1], samples[-rank]

    def ood_score(
        self, inputs: Inputs, score: str = "mutual_information", **options: Any
    ) -> Tensor:
        """Return how unfamiliar inputs are, `(n, ...)`: the higher, the more unfamiliar.

        `tyxe.metrics.ood_auroc` takes scores that are higher for familiar inputs: negate these.

        Args:
            inputs: a batch (several arguments of the net as a tuple), or a loader.
            score: the name of a function of `tyxe.predictive.scores`. For classes:
                `"mutual_information"`, whether draws disagree, `"predictive_entropy"`, or
                `"max_probability"`, which is subtracted from one. For classes or numbers:
                `"expected_variance"`, the variance of draws.
            options: of `predict`, such as `num_predictions`.

        Raises:
            TypeError: a score for classes with other targets; a likelihood of several outputs.
            ValueError: an unknown score.

        Example:
            >>> import torch, pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     torch.nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.Categorical(10), tyxe.guides.AutoNormal)
            >>> known, unknown = bnn.ood_score(torch.zeros(5, 2)), bnn.ood_score(torch.ones(9, 2))
            >>> tyxe.metrics.ood_auroc(-known, -unknown).shape  # there higher is more familiar
            torch.Size([])
        """
        check.choice("score", score, SCORES)
        instead = (
            "score the draws of each, which predict(..., aggregate=False) returns by name, by a "
            "function of tyxe.predictive.scores"
        )
        check_is_one(self.likelihood, instead)
        draws = self.predict(inputs, **{**options, "aggregate": False})
        records = bool(options.get("enable_grad"))
        each = [bnn.likelihood.with_gradients(records) for bnn in self._bnns]
        weights, likelihood = self._weights_of(len(draws)), each[0]
        if likelihood.has_classes:  # members have cut points of their own
            parts = zip(each, draws.chunk(len(each)), strict=True)
            draws, likelihood = torch.cat([own.class_logits(part) for own, part in parts]), LOGITS
        found = SCORES[score](draws, weights, likelihood)
        return 1 - found if score == "max_probability" else found
