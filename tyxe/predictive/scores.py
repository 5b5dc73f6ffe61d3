"""Scores of how unfamiliar an input is, from the outputs of several draws, and what to label next.

Each function takes what `bnn.predict(x, aggregate=False)` returns:

- `draws`: outputs of `S` draws. Without a likelihood they are logits of classes, `(S, n, ..., C)`.
- `weights`: weights of the draws, `(S,)`, which sum to one, such as `bnn.draw_weights(S)` of an
  ensemble; equal by default.
- `likelihood`: the likelihood of the draws, needed for probabilities, binary labels and numbers.

It returns a number for each target, `(n, ...)`, and raises a `TypeError` if the likelihood's
targets are not classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tyxe import check
from tyxe.likelihoods import Categorical, Likelihood
from tyxe.likelihoods.reductions import mean_over
from tyxe.predictive.decomposition import (
    EntropyDecomposition,
    entropy_decomposition,
    regression_decomposition,
)
from tyxe.util import at_least_float32

# What draws are of without a likelihood.
LOGITS = Categorical()


def mutual_information(
    draws: Tensor, weights: Tensor | None = None, likelihood: Likelihood | None = None
) -> Tensor:
    """Return the information that a label would bring about the weights, in nats.

    `H[E p] - E H[p]`: 0 if all draws agree, however uncertain they are. Use it to tell unfamiliar
    inputs from ambiguous ones.

    Reference:
        Houlsby et al. (2011), Bayesian active learning for classification and preference learning.

    Example:
        >>> at_odds = torch.tensor([[[50.0, 0.0]], [[0.0, 50.0]]])  # two draws, one point
        >>> mutual_information(at_odds), mutual_information(torch.zeros(2, 1, 2))
        (tensor([0.6931]), tensor([0.]))
    """
    return _entropies(draws, weights, likelihood).mutual_information


# The name that active learning has for it.
bald = mutual_information


def predictive_entropy(
    draws: Tensor, weights: Tensor | None = None, likelihood: Likelihood | None = None
) -> Tensor:
    """Return the entropy of the averaged prediction, in nats: disagreement and noise together.

    Example:
        >>> predictive_entropy(torch.zeros(2, 1, 2))
        tensor([0.6931])
    """
    return _entropies(draws, weights, likelihood).total


def max_probability(
    draws: Tensor, weights: Tensor | None = None, likelihood: Likelihood | None = None
) -> Tensor:
    """Return the probability of the most probable class: higher for more familiar inputs.

    Reference:
        Hendrycks and Gimpel (2017), A baseline for detecting misclassified and out-of-distribution
        examples.

    Example:
        >>> max_probability(torch.tensor([[[50.0, 0.0]], [[0.0, 0.0]]]))
        tensor([0.7500])
    """
    return mean_over(_class_probs(draws, likelihood), 0, weights).amax(-1)


def expected_variance(
    draws: Tensor, weights: Tensor | None = None, likelihood: Likelihood | None = None
) -> Tensor:
    """Return the variance over draws of the target's mean; of classes, its mean over them.

    The mean of a class is its probability. The variance of numbers is in their squared units.

    Reference:
        Smith and Gal (2018), Understanding measures of uncertainty for adversarial example
        detection.

    Example:
        >>> expected_variance(torch.tensor([[[50.0, 0.0]], [[0.0, 50.0]]]))
        tensor([0.2500])
        >>> from tyxe.likelihoods import HomoskedasticGaussian
        >>> noise = HomoskedasticGaussian(10, scale=0.1)
        >>> expected_variance(torch.tensor([[[1.0]], [[3.0]]]), likelihood=noise)
        tensor([[1.]])
    """
    likelihood = likelihood or LOGITS
    if likelihood.has_classes:
        return _variance(_class_probs(draws, likelihood), weights).mean(-1)
    draws = at_least_float32(draws)
    found = likelihood.predictive_distribution(draws, likelihood.prior_means())
    return _variance(found.mean, weights)


def batch(scores: Tensor, size: int, power: float = 1.0) -> Tensor:
    """Choose points to label together, at random in proportion to `score^power`.

    The points with the highest scores are often alike, so labels of all of them say little more
    than one. Points are drawn without replacement; `scores.topk(size)` is the limit of a high
    power.

    Args:
        scores: scores of the points without a label, such as by `bald`, `(n,)`, not negative.
        size: number of points.
        power: with 0 all points are equally likely.

    Returns:
        The points' indices, `(size,)`; those of score 0 come after all others.

    Raises:
        ValueError: scores that are negative or NaN; a size above the number of points.

    Reference:
        Kirsch et al. (2023), Stochastic batch acquisition, where this is PowerBALD.

    Example:
        >>> batch(torch.tensor([0.0, 0.5, 0.0, 0.1]), 2).sort().values
        tensor([1, 3])
    """
    check.shape("scores", scores, ("n",))
    check.numbers("scores", scores, "numbers of 0 or more", least=0)
    size = check.count("size", size)
    check.count("the number of scores", len(scores), size)
    power = check.number("power", power, least=0)
    # The highest of logarithms with Gumbel noise are a draw without replacement.
    noise = -torch.empty_like(scores).exponential_().log()
    logs = power * scores.log() if power else torch.zeros_like(scores)
    return (logs + noise).topk(size).indices


# By the names that `bnn.ood_score` takes.
SCORES = {
    "mutual_information": mutual_information,
    "bald": bald,
    "predictive_entropy": predictive_entropy,
    "max_probability": max_probability,
    "expected_variance": expected_variance,
}


def _class_probs(draws: Tensor, likelihood: Likelihood | None) -> Tensor:
    return (likelihood or LOGITS).class_logits(draws).softmax(-1)


def _entropies(
    draws: Tensor, weights: Tensor | None, likelihood: Likelihood | None
) -> EntropyDecomposition:
    return entropy_decomposition(_class_probs(draws, likelihood), weights)


def _variance(means: Tensor, weights: Tensor | None) -> Tensor:
    return regression_decomposition(means, 0.0, weights).epistemic
