"""Inference inside the linearised net, a generalised linear model [GLM 3.3].

With `f_lin(x, w) = f(x, w0) + J(x) (w - w0)` the log joint is concave for the usual likelihoods,
and the Gaussian of the curvature at `w0` is only a start: `refine_laplace` finds the model's own
mode, `refine_variational` a Gaussian near its best one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tyxe import check
from tyxe.errors import warn
from tyxe.linalg import Operator
from tyxe.predictive.linear_model import STRUCTURES, LinearModel
from tyxe.predictive.natural_gradient import Iterate, Posterior, started

# From a model, a mean, a precision and a number of draws to outputs.
Draws = Callable[[LinearModel, Tensor, Operator, int], Iterator[Tensor]]

EXPECTATIONS: dict[str, Callable[[Iterate, int], Iterator[Tensor]]] = {
    "weights": Iterate.joint_draws,
    "outputs": Iterate.pointwise_draws,
}


@torch.no_grad()
def refine_laplace(
    model: LinearModel, structure: str = "full", *, num_steps: int = 100, tolerance: float = 1e-8
) -> Posterior:
    r"""Return the Laplace approximation of the linearised model.

    The mode `w*` of `sum_n log p(y_n | f_lin(x_n, w)) + log p(w)` by Newton's method, with steps
    from conjugate gradients; then `sum_n J_n^T H_n J_n + P0` with `H_n` at `f_lin(x_n, w*)`.

    Args:
        model: the linearised model.
        structure: of the precision, `"full"` or `"diag"`; the mode is the same.
        num_steps: largest number of Newton's steps.
        tolerance: stop where a step would gain less than half of this, in nats, or less than the
            log joint's rounding.

    Returns:
        `w*`, `(P,)`, and the precision.

    Raises:
        ValueError: an unknown structure.

    References:
        [GLM] section 3.3.

    Example:
        >>> import tyxe
        >>> x = torch.tensor([[-1.0], [1.0], [2.0]])
        >>> model = LinearModel(
        ...     x[:, None], torch.zeros(3, 1), torch.zeros(1), torch.zeros(1), torch.ones(1),
        ...     tyxe.likelihoods.Bernoulli(3), torch.tensor([[0.0], [1.0], [1.0]]))
        >>> mode, precision = refine_laplace(model)
        >>> residuals, _ = model.local(model.predict(mode))
        >>> bool(model.gradient(mode, residuals).abs() < 1e-4)
        True
    """
    _check_structure(structure)
    w = model.loc
    for _ in range(num_steps):
        residuals, blocks = model.local(model.predict(w))
        gradient = model.gradient(w, residuals)
        step = _newton_step(model, blocks, gradient)
        moved = _along(model, w, step, float(step @ gradient))
        if moved is None:
            break
        w = moved
        if float(step @ gradient) < max(tolerance, _rounding(model, w)):
            break
    else:
        warn(
            f"refine: Newton's method has not converged in num_steps={num_steps}",
        )
    _, blocks = model.local(model.predict(w))
    return w, STRUCTURES[structure](model.curvature(blocks, structure))


def _newton_step(model: LinearModel, blocks: Tensor, gradient: Tensor) -> Tensor:
    """Solve `(G + P0) d = gradient` by conjugate gradients, more exactly closer to the mode."""
    inverse = model.curvature(blocks, "diag").reciprocal()
    decrement = float(gradient @ (inverse * gradient))
    tolerance = max(min(0.1, decrement**0.5), 10 * torch.finfo(gradient.dtype).eps)
    step, residual = torch.zeros_like(gradient), gradient
    direction = inverse * residual
    left = decrement
    # In exact arithmetic P iterations are enough; rounding takes some more.
    for _ in range(2 * len(gradient)):
        if left <= tolerance**2 * decrement:
            break
        product = model.curvature_matmul(blocks, direction)
        length = left / float(direction @ product)
        step, residual = step + length * direction, residual - length * product
        before, left = left, float(residual @ (inverse * residual))
        direction = inverse * residual + left / before * direction
    return step


def _along(model: LinearModel, w: Tensor, step: Tensor, slope: float) -> Tensor | None:
    """Return `w` after the longest of the halved steps for which the log joint rises, or None."""
    before, rounding = float(model.log_joint(w)), 8 * _rounding(model, w)
    length = 1.0
    while length > 1e-6:
        moved = w + length * step
        if float(model.log_joint(moved)) >= before + 1e-4 * length * slope - rounding:
            return moved
        length /= 2
    return None


def _rounding(model: LinearModel, w: Tensor) -> float:
    """Return the rounding error of the log joint, in nats."""
    return torch.finfo(w.dtype).eps * abs(float(model.log_joint(w)))


@torch.no_grad()
def refine_variational(
    model: LinearModel,
    structure: str = "full",
    *,
    rate: float = 1e-2,
    num_steps: int = 250,
    num_draws: int = 2,
    expectation: str | Draws = "weights",
) -> Posterior:
    r"""Return a Gaussian near the best one for the linearised model, by natural gradients.

    `Lambda <- (1 - rho) Lambda + rho (sum_n J_n^T E_q[H_n] J_n + P0)`,
    `mu <- mu + rho Lambda^-1 (sum_n J_n^T E_q[r_n] - P0 (mu - m0))`, from the Laplace approximation
    about `w0`. A diagonal `Lambda` takes the diagonal of the bracket, and needs a small rate: with
    1 it can diverge where inputs are correlated.

    Where all points together have fewer outputs than there are weights, a full `Lambda` is not
    formed, and a step takes time cubic in the number of outputs instead of weights. The Gaussian is
    the same, but not the random numbers for a given seed.

    Args:
        model: the linearised model.
        structure: of `Lambda`, `"full"` or `"diag"`.
        rate: `rho`, above 0 and at most 1.
        num_steps: number of updates.
        num_draws: for each expectation, from torch's generator, in pairs of a draw and its mirror
            image (expectations of functions that are linear in the draw are then exact).
        expectation: what is drawn: `"weights"`, the same for all points; `"outputs"`, for each
            point separately, which is less noisy but needs their covariance in each step; or a
            function of model, mean, precision and `num_draws` that yields outputs `(N, ...)`.

    Returns:
        `mu`, `(P,)`, and `Lambda`; a full one is `LowRank` where outputs are fewer, else `Dense`.

    Raises:
        ValueError: an unknown structure or expectation; a rate out of range; no draws.
        RuntimeError: the steps diverge.

    References:
        [GLM] section 3.3; Khan & Rue (2023), The Bayesian learning rule.

    Example:
        A straight line through the origin with unit noise, where one step of rate 1 is exact:

        >>> import tyxe
        >>> x = torch.tensor([[-1.0], [1.0], [2.0]])
        >>> model = LinearModel(
        ...     x[:, None], torch.zeros(3, 1), torch.zeros(1), torch.zeros(1), torch.ones(1),
        ...     tyxe.likelihoods.HomoskedasticGaussian(3, scale=1.0), 2 * x)
        >>> mean, precision = refine_variational(model, rate=1.0, num_steps=1)
        >>> mean, precision.diagonal()  # 12 / 7, and 1 + 6
        (tensor([1.7143]), tensor([7.]))
    """
    _check_structure(structure)
    draws = _check_expectation(expectation, rate, num_draws)
    iterate = started(model, structure)
    for count in range(1, num_steps + 1):
        found = [model.local(outputs) for outputs in draws(iterate, num_draws)]
        residuals, blocks = (torch.stack(parts).mean(0) for parts in zip(*found, strict=True))
        moved = iterate.moved(residuals, blocks, rate)
        if moved is None:
            raise RuntimeError(
                f"refine: diverged at step {count} of {num_steps} with rate={rate}: use a smaller "
                "rate, or more draws"
            )
        iterate = moved
    return iterate.posterior()


def _check_structure(structure: str) -> None:
    if structure not in STRUCTURES:
        raise ValueError(f"structure is {structure!r}; expected 'full' or 'diag'")


def _check_expectation(
    expectation: str | Draws, rate: float, num_draws: int
) -> Callable[[Iterate, int], Iterator[Tensor]]:
    if not 0 < rate <= 1:
        raise ValueError(f"rate is {rate}; expected a number above 0 and at most 1")
    if num_draws < 1:
        raise ValueError(f"num_draws is {num_draws}; expected at least 1")
    if not isinstance(expectation, str):
        return lambda iterate, num: expectation(iterate.model, *iterate.posterior(), num)
    check.choice("expectation", expectation, EXPECTATIONS)
    return EXPECTATIONS[expectation]
