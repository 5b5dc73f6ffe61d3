"""The two parts of a prediction's uncertainty, and scores of how unfamiliar an input is.

*Aleatoric* uncertainty is what would remain if the weights were known, on average over the
posterior; *epistemic* is the spread of the predictions of single draws. They add up to the total.

Each score takes what `bnn.predict(x, aggregate=False)` returns:

- `draws`: outputs of `S` draws. Without a likelihood they are logits of classes, `(S, n, ..., C)`.
- `weights`: weights of the draws, `(S,)`, which sum to one, such as `bnn.draw_weights(S)` of an
  ensemble; equal by default.
- `likelihood`: the likelihood of the draws, needed for probabilities, binary labels and numbers.

It returns a number for each target, `(n, ...)`, and raises a `TypeError` if the likelihood's
targets are not classes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tyxe import check
from tyxe.likelihoods import Categorical, Likelihood
from tyxe.likelihoods.reductions import mean_over
from tyxe.util import at_least_float32


class VarianceDecomposition(NamedTuple):
    """Variance of the target, in two parts.

    Attributes:
        aleatoric: mean over draws of the variance.
        epistemic: variance over draws of the mean.
    """

    aleatoric: Tensor
    epistemic: Tensor

    @property
    def total(self) -> Tensor:
        """The variance of the target, the sum of both."""
        return self.aleatoric + self.epistemic


class EntropyDecomposition(NamedTuple):
    """Entropy of the target in nats, in two parts.

    Attributes:
        total: entropy of the averaged probabilities.
        expected: mean over draws of the entropy, the aleatoric part.
        mutual_information: between target and weights, the epistemic part.
    """

    total: Tensor
    expected: Tensor
    mutual_information: Tensor


@check.arguments
def variance_decomposition(probs: Tensor, weights: Tensor | None = None) -> VarianceDecomposition:
    r"""Split the covariance of the one-hot class.

    Aleatoric `E_q[diag(p) - p p^T]`, epistemic `E_q[p p^T] - E_q[p] E_q[p]^T`; their sum is the
    covariance `diag(E p) - E p E p^T` of the averaged prediction.

    Args:
        probs: class probabilities of `S` draws, `(S, n, ..., C)`.
        weights: weights of the draws, `(S,)`, which sum to one, such as `bnn.draw_weights(S)` of an
            ensemble; equal by default.

    Returns:
        Two matrices for each prediction, `(n, ..., C, C)`; their diagonals are variances of single
        classes.

    Raises:
        ValueError: probabilities that do not sum to one.

    References:
        [GLM] eq. B.1; Kwon et al. (2020), Uncertainty quantification using Bayesian neural
        networks in classification.

    Example:
        >>> probs = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # two draws, certain and at odds
        >>> variance_decomposition(probs)
        VarianceDecomposition(aleatoric=tensor([[[0., 0.],
                 [0., 0.]]]), epistemic=tensor([[[ 0.2500, -0.2500],
                 [-0.2500,  0.2500]]]))
    """
    probs = _check_probs(probs)
    mean = mean_over(probs, 0, weights)
    aleatoric = torch.diag_embed(mean) - _mean_outer(probs, weights)
    # Centred first, because the difference of two nearly equal matrices loses digits.
    return VarianceDecomposition(aleatoric, _mean_outer(probs - mean, weights))


@check.arguments
def entropy_decomposition(probs: Tensor, weights: Tensor | None = None) -> EntropyDecomposition:
    r"""Split the entropy of the predicted class: `H[E p] = E H[p] + I(y; w)`.

    Args and errors are those of `variance_decomposition`.

    Returns:
        Three numbers for each prediction, `(n, ...)`, non-negative.

    References:
        [GLM] section 4; Depeweg et al. (2018), Decomposition of uncertainty in Bayesian deep
        learning for efficient and risk-sensitive learning.

    Example:
        >>> probs = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
        >>> entropy_decomposition(probs).mutual_information
        tensor([0.6931])
    """
    probs = _check_probs(probs)
    total = torch.special.entr(mean_over(probs, 0, weights)).sum(-1)
    expected = mean_over(torch.special.entr(probs).sum(-1), 0, weights)
    # By Jensen's inequality only rounding can make the difference negative.
    return EntropyDecomposition(total, expected, (total - expected).clamp_min(0))


@check.arguments
def regression_decomposition(
    means: Tensor, noise_variance: Tensor | float, weights: Tensor | None = None
) -> VarianceDecomposition:
    r"""Split the variance of a real target: `E_q[sigma^2] + Var_q[mu]`.

    Args:
        means: predicted means of `S` draws, `(S, n, ...)`.
        noise_variance: the noise's variance `sigma^2`; a number, or a tensor that broadcasts
            against the means: `(S, n, ...)` for one that the net predicts, `(S, 1, ...)` for draws
            of one noise.
        weights: weights of the draws, as in `variance_decomposition`.

    Returns:
        Two variances for each target, `(n, ...)`; the total is the mixture's variance.

    Raises:
        ValueError: a negative noise variance.
        RuntimeError: shapes that do not fit.

    References:
        Depeweg et al. (2018), Decomposition of uncertainty in Bayesian deep learning for efficient
        and risk-sensitive learning, eq. 10.

    Example:
        >>> regression_decomposition(torch.tensor([[1.0], [3.0]]), 0.25).total
        tensor([1.2500])
    """
    means = at_least_float32(means)
    noise = check.tensor("noise_variance", noise_variance, dtype=means.dtype, device=means.device)
    check.numbers("noise_variance", noise, "variances", least=0)
    spread = (means - mean_over(means, 0, weights)).square()
    noises = noise.expand_as(means)
    return VarianceDecomposition(mean_over(noises, 0, weights), mean_over(spread, 0, weights))


def _mean_outer(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return `sum_s w_s v_s v_s^T` at each position, without the outer product of every draw."""
    columns = values.movedim(0, -1)
    shares = 1 / len(values) if weights is None else weights.to(values)
    return columns * shares @ columns.mT


def _check_probs(probs: Tensor) -> Tensor:
    # Rounding to half precision alone moves a sum by up to eps / 2.
    tolerance = max(1e-3, 4 * torch.finfo(probs.dtype).eps)
    probs = at_least_float32(probs)
    sums = probs.sum(-1) if probs.dim() > 1 else probs
    if probs.dim() < 2 or not bool(((sums - 1).abs() <= tolerance).all() & (probs >= 0).all()):
        raise ValueError(
            f"probs of shape {tuple(probs.shape)} are no class probabilities (S, n, ..., C): pass "
            "logits.softmax(-1), or torch.stack([1 - p, p], -1) for those of one class"
        )
    return probs


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
