r"""Curvature of a likelihood in the net's outputs, by registration.

`H_n = -d^2 log p(y_n | f_n) / df_n^2` for exponential families in natural parameters, for which it
does not depend on `y_n`. For other parametrisations it is the Fisher information
`E_{y ~ p(y|f)} r r^T` with `r = d log p(y|f) / df`, which is the same if both exist [T 3.1, GLM 2].

The outputs of a point fall into `R` *positions* of `C` coupled outputs each (the classes of one
pixel, say), and `H_n` is block-diagonal over positions. Blocks follow the order of the outputs in
memory, `predictions.reshape(n, R, C)`, so that a matrix over all outputs is never formed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import singledispatch
from typing import TypeGuard

import torch
from torch import Tensor

from tyxe import check
from tyxe.likelihoods.base import Latents, Likelihood
from tyxe.likelihoods.counts import NegativeBinomial, Ordinal, Poisson
from tyxe.likelihoods.discrete import Bernoulli, Categorical
from tyxe.likelihoods.gaussian import HeteroskedasticGaussian, HomoskedasticGaussian, StudentT
from tyxe.util import at_least_float32


@singledispatch
def output_hessian(likelihood: Likelihood, predictions: Tensor, latents: Latents = None) -> Tensor:
    """Return the blocks of each point's output Hessian `H_n`.

    Categorical logits `diag(p) - p p^T`; Bernoulli logits `p (1 - p)`; Gaussian `1 / sigma^2`;
    Poisson log-rates `exp(f)`. Fisher information: class probabilities `diag(1/p) - 1 1^T` and
    binary ones `1 / (p (1 - p))`, with `p` clamped to `[eps, 1 - eps]` of its dtype as in
    `log_likelihood`; a predicted `(mean, scale)` has `1 / sigma^2` and
    `2 (dsigma/df)^2 / sigma^2`, and no coupling between the two; Student t
    `(df + 1) / ((df + 3) scale^2)`; negative binomial with the log of the mean
    `1 / (1 / mean + 1 / total_count)`; ordinal, with `s_k = sigmoid(c_k - f)`,
    `sum_k p_k (s_k (1 - s_k) + s_(k-1) (1 - s_(k-1)))`.

    Register your own likelihood by its type. A subclass inherits the Hessian of its base. If it
    changes the density, it needs its own.

    Args:
        likelihood: chooses the formula.
        predictions: the net's outputs `(n, ...)`; half precision is promoted.
        latents: values of the likelihood's own variables; point values where missing.

    Returns:
        Positive semi-definite blocks `(n, R, C, C)` in float32 at least, for the outputs
        `predictions.reshape(n, R, C)`.

    Raises:
        TypeError: nothing is registered for this likelihood.

    References:
        [T] section 3.1; [GLM] section 2.

    Example:
        >>> output_hessian(Categorical(100), torch.tensor([[2.0, 0.0, 0.0]]))
        tensor([[[[ 0.1676, -0.0838, -0.0838],
                  [-0.0838,  0.0952, -0.0113],
                  [-0.0838, -0.0113,  0.0952]]]])
        >>> output_hessian(Poisson(100), torch.zeros(8, 5)).shape
        torch.Size([8, 5, 1, 1])
    """
    name = type(likelihood).__name__
    raise TypeError(
        f"no output Hessian is registered for {name}: decorate a function (likelihood, "
        "predictions, latents=None) that returns the blocks (n, R, C, C) with "
        f"@tyxe.likelihoods.output_hessian.register({name}); the Fisher information by sampling "
        "and the empirical one need none"
    )


def hessian_blocks(likelihood: Likelihood, predictions: Tensor, latents: Latents = None) -> Tensor:
    """Return `output_hessian`; blocks of a registered function that do not fit are a ValueError."""
    blocks = output_hessian(likelihood, predictions, latents)
    shape, (count, *outputs) = tuple(blocks.shape), predictions.shape
    size = math.prod(outputs)
    fits = len(shape) == 4 and (count, shape[2]) == (shape[0], shape[3])
    if not fits or shape[1] * shape[2] != size:
        function = output_hessian.dispatch(type(likelihood))
        raise ValueError(
            f"{function.__module__}.{function.__name__}, the output Hessian registered for "
            f"{type(likelihood).__name__}, returned shape {shape}; expected blocks (n, R, C, C): "
            f"({count}, {size}, 1, 1) if the outputs of a point are not coupled, "
            f"({count}, 1, {size}, {size}) if all are"
        )
    return blocks


@output_hessian.register
def _categorical(likelihood: Categorical, predictions: Tensor, latents: Latents = None) -> Tensor:
    probs = _class_probs(likelihood, predictions)
    if likelihood.logit_predictions:
        return torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)
    return torch.diag_embed(probs.reciprocal()) - 1


@output_hessian.register
def _(likelihood: Bernoulli, predictions: Tensor, latents: Latents = None) -> Tensor:
    predictions = at_least_float32(predictions)
    if likelihood.logit_predictions:
        # p (1 - p) without the cancellation near p = 1.
        return _uncoupled(predictions.sigmoid() * (-predictions).sigmoid())
    probs = _inside(predictions)
    return _uncoupled(1 / (probs * (1 - probs)))


@output_hessian.register
def _(likelihood: Poisson, predictions: Tensor, latents: Latents = None) -> Tensor:
    return _uncoupled(at_least_float32(predictions).exp())


@output_hessian.register
def _(likelihood: HomoskedasticGaussian, predictions: Tensor, latents: Latents = None) -> Tensor:
    predictions = at_least_float32(predictions)
    scale = likelihood.scale_of(latents, predictions).to(predictions.dtype)
    return _uncoupled(scale.square().reciprocal().expand_as(predictions))


@output_hessian.register
def _(likelihood: HeteroskedasticGaussian, predictions: Tensor, latents: Latents = None) -> Tensor:
    predictions = at_least_float32(predictions)
    given = predictions.chunk(2, dim=-1)[1]
    scale = likelihood.predictive_distribution(predictions).stddev
    slope = torch.ones_like(scale) if likelihood.positive_scale else given.sigmoid()
    return _uncoupled(torch.cat([scale.square().reciprocal(), 2 * (slope / scale).square()], -1))


@output_hessian.register
def _(likelihood: StudentT, predictions: Tensor, latents: Latents = None) -> Tensor:
    predictions, df = at_least_float32(predictions), likelihood.df
    scale = likelihood.own_value_for(predictions, latents)
    return _uncoupled((df + 1) / ((df + 3) * scale.square()))


@output_hessian.register
def _(likelihood: NegativeBinomial, predictions: Tensor, latents: Latents = None) -> Tensor:
    predictions = at_least_float32(predictions)
    count = likelihood.own_value_for(predictions, latents)
    return _uncoupled(1 / ((-predictions).exp() + 1 / count))


@output_hessian.register
def _(likelihood: Ordinal, predictions: Tensor, latents: Latents = None) -> Tensor:
    predictions = at_least_float32(predictions)
    probs = likelihood.class_logits(predictions).exp()
    logits = likelihood.cut_points_as(predictions.dtype) - predictions
    # Each cut point is the end of two classes.
    slopes = logits.sigmoid() * (-logits).sigmoid()
    return _uncoupled((slopes * (probs[..., :-1] + probs[..., 1:])).sum(-1, keepdim=True))


@dataclass(frozen=True)
class SqrtColumns:
    """The columns `s` of a square root of output Hessians, `H_n = sum_s s_n s_n^T`.

    Each has the predictions' shape, and is a cotangent for autograd. The `R` positions have
    `rank` columns each, zero elsewhere; `block_column(k)` is column `k` of all blocks.
    """

    shape: torch.Size
    num_positions: int
    rank: int
    block_column: Callable[[int], Tensor]

    def __len__(self) -> int:
        return self.num_positions * self.rank

    def __iter__(self) -> Iterator[Tensor]:
        for k in range(self.rank):
            values = self.block_column(k)
            for r in range(self.num_positions):
                column = torch.zeros_like(values)
                column[:, r] = values[:, r]
                yield column.reshape(self.shape)


@check.arguments
def output_hessian_sqrt(
    likelihood: Likelihood, predictions: Tensor, latents: Latents = None
) -> SqrtColumns:
    r"""Return the columns of a square root of each point's output Hessian.

    Class logits have the Cholesky factor in closed form, of `C - 1` columns because `H 1 = 0`:
    with `q_k = sum_{i > k} p_i`, column `k` is `sqrt(p_k q_k / q_{k-1})` times
    `e_k - sum_{i > k} (p_i / q_k) e_i`; in class probabilities, the same divided by `p`. Neither
    the blocks nor a difference `1 - p` is formed. Other blocks are square-rooted through their
    eigenvectors, as they may be singular. Arguments and errors are those of `output_hessian`.

    Returns:
        The columns, each of the predictions' shape, in float32 at least.

    References:
        Tanabe & Sagae (1992), An exact Cholesky decomposition of the variance-covariance matrix
        of the multinomial distribution.

    Example:
        >>> columns = output_hessian_sqrt(Categorical(100), torch.zeros(1, 2))
        >>> torch.stack(list(columns))
        tensor([[[ 0.5000, -0.5000]]])
    """
    if _is_plain(likelihood):
        return _categorical_sqrt(likelihood, predictions)
    roots = _psd_sqrt(hessian_blocks(likelihood, predictions, latents))
    _, num_positions, _, rank = roots.shape
    return SqrtColumns(predictions.shape, num_positions, rank, lambda k: roots[..., k])


def output_hessian_product(likelihood: Likelihood, predictions: Tensor, vectors: Tensor) -> Tensor:
    """Return `H_n v_n` for a vector of each point, of the predictions' shape.

    Class logits, `p (v - p . v)`, need no matrix. Errors are those of `output_hessian`.
    """
    if not (_is_plain(likelihood) and likelihood.logit_predictions):
        blocks = hessian_blocks(likelihood, predictions)
        return (blocks @ vectors.reshape(*blocks.shape[:3], 1)).reshape(vectors.shape)
    probs = _class_probs(likelihood, predictions)
    v = vectors.reshape(probs.shape)
    # Constants have no product: without that of the likeliest class, no `1 - p` is needed.
    v = v - v.gather(-1, probs.argmax(-1, keepdim=True))
    return (probs * (v - (probs * v).sum(-1, keepdim=True))).reshape(vectors.shape)


@dataclass(frozen=True)
class OutputHessians:
    """The output Hessians of points with one position, for sums without a matrix of each point.

    Predictions are `(n, C)`, and `counts`, `(n,)`, how often each point counts.
    """

    likelihood: Likelihood
    predictions: Tensor
    counts: Tensor | None = None

    def total(self) -> Tensor:
        """Return `sum_n c_n H_n`, `(C, C)`."""
        if (probs := self._probs()) is None:
            blocks = hessian_blocks(self.likelihood, self.predictions)
            return torch.block_diag(*self._weighted(blocks).sum(0))
        # Its rows sum to zero, so that no `1 - p` is needed: off the diagonal `-sum_n p_i p_j`.
        products = self._weighted(probs).mT @ probs
        products.fill_diagonal_(0.0)
        rows = products.sum(1)
        return products.neg_().diagonal_scatter(rows)

    def diagonals(self) -> Tensor:
        """Return `c_n diag(H_n)`, `(n, C)`."""
        if self._probs() is None:
            blocks = hessian_blocks(self.likelihood, self.predictions)
            return self._weighted(blocks.diagonal(dim1=-2, dim2=-1).flatten(1))
        # In double precision, because of `1 - p`.
        probs = self.predictions.double().softmax(-1)
        return self._weighted((probs * (1 - probs)).to(at_least_float32(self.predictions)))

    def _probs(self) -> Tensor | None:
        """Return class probabilities of logits, and None for other predictions."""
        if _is_plain(self.likelihood) and self.likelihood.logit_predictions:
            return at_least_float32(self.predictions).softmax(-1)
        return None

    def _weighted(self, values: Tensor) -> Tensor:
        if self.counts is None:
            return values
        return values * self.counts.to(values).view(-1, *[1] * (values.dim() - 1))


def sampled_gradient(
    likelihood: Likelihood, predictions: Tensor, latents: Latents = None
) -> Tensor:
    """Draw `y ~ p(y|f)` for every point and return the `true_gradient` there.

    `E r r^T` is the Fisher information: one draw replaces the sum over the columns of
    `output_hessian_sqrt`, for every likelihood, registered or not.
    """
    targets = likelihood.sample(at_least_float32(predictions.detach()), latents=latents)
    return true_gradient(likelihood, predictions, targets, latents)


def true_gradient(
    likelihood: Likelihood, predictions: Tensor, targets: Tensor, latents: Latents = None
) -> Tensor:
    """Return `r_n = d log p(y_n|f_n) / df_n`, of the predictions' shape, in float32 at least.

    This is the residual of MAP training, and the `r` of the empirical Fisher `sum_n J^T r r^T J`.
    """
    with torch.enable_grad():
        outputs = at_least_float32(predictions.detach()).requires_grad_()
        log_likelihood = likelihood.log_likelihood(outputs, targets, "sum", latents)
        (gradient,) = torch.autograd.grad(log_likelihood, outputs)
    return gradient


# --------------------------------------------------------------------------- pieces


def _is_plain(likelihood: Likelihood) -> TypeGuard[Categorical]:
    """Whether a likelihood is categorical, without a registered Hessian of its own."""
    return output_hessian.dispatch(type(likelihood)) is _categorical


def _uncoupled(values: Tensor) -> Tensor:
    """Return blocks of one output each, `(n, R, 1, 1)`, from one number for every output."""
    return values.reshape(len(values), math.prod(values.shape[1:]), 1, 1)


def _inside(probs: Tensor) -> Tensor:
    eps = torch.finfo(probs.dtype).eps
    return probs.clamp(eps, 1 - eps)


def _class_probs(likelihood: Categorical, predictions: Tensor) -> Tensor:
    """Return class probabilities at each position, `(n, R, C)`."""
    outputs = at_least_float32(predictions)
    probs = outputs.softmax(-1) if likelihood.logit_predictions else _inside(outputs)
    return probs.reshape(len(probs), math.prod(probs.shape[1:-1]), probs.shape[-1])


def _categorical_sqrt(likelihood: Categorical, predictions: Tensor) -> SqrtColumns:
    """Return columns of the Cholesky factor, whose formula `output_hessian_sqrt` has."""
    probs = _class_probs(likelihood, predictions)
    tails = probs.flip(-1).cumsum(-1).flip(-1)  # sum_{i >= k} p_i
    # Where a tail underflows to zero, its probabilities are zero too: 0 / tiny, not 0 / 0.
    tails = tails.clamp_min(torch.finfo(tails.dtype).tiny)

    def column(k: int) -> Tensor:
        p, q, before = probs[..., k, None], tails[..., k + 1, None], tails[..., k, None]
        scale = (p * (q / before)).sqrt()
        later = -scale * (probs[..., k + 1 :] / q)
        values = torch.cat([torch.zeros_like(probs[..., :k]), scale, later], -1)
        return values if likelihood.logit_predictions else values / probs

    return SqrtColumns(predictions.shape, probs.shape[1], probs.shape[-1] - 1, column)


def _psd_sqrt(blocks: Tensor) -> Tensor:
    """Return `S` with `S S^T = blocks`; eigenvalues that rounding made negative count as zero."""
    if blocks.shape[-1] == 1:
        return blocks.sqrt()
    eigenvalues, vectors = torch.linalg.eigh(blocks)
    root: Tensor = vectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
    return root
