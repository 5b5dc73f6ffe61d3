"""The two parts of a prediction's uncertainty: noise, and uncertainty about the weights.

*Aleatoric* uncertainty is what would remain if the weights were known, on average over the
posterior; *epistemic* is the spread of the predictions of single draws. They add up to the total.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tyxe import check
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
