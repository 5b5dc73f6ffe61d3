"""Checks of the arguments and fields of operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tyxe import check
from tyxe.errors import UNREAD

DTYPES = (torch.float32, torch.float64)
# Rows up to which a dense matrix is factorised for an operator without an inverse of its own.
SMALL = 4096


class NotPositiveDefiniteError(ValueError):
    """A matrix that is used as a precision has an eigenvalue that is not positive.

    Example:
        >>> import tyxe
        >>> try:
        ...     tyxe.linalg.Dense(-torch.eye(2)).logdet()
        ... except NotPositiveDefiniteError:
        ...     print("add more to its diagonal")
        add more to its diagonal
    """


def check_dtype(dtype: torch.dtype, what: str) -> None:
    """Raise unless matrices of this type can be factorised."""
    if dtype not in DTYPES:
        raise TypeError(
            f"{what} is in {dtype}, where matrices cannot be factorised; "
            "use .to(torch.float32) or .to(torch.float64)"
        )


def check_field(tensor: Tensor, what: str, *shape: int | str) -> Tensor:
    """Return a tensor if it is real, finite and of a shape, in which a word stands for any size."""
    check_dtype(check.shape(what, tensor, shape).dtype, what)
    return check_finite(tensor, what)


def check_finite(tensor: Tensor, what: str) -> Tensor:
    """Return a tensor without infinities and NaN."""
    if UNREAD.get():
        return tensor
    lowest, highest = _range(tensor)
    if not -math.inf < lowest <= highest < math.inf:
        count = int((~tensor.isfinite()).sum())
        raise ValueError(f"{what} has {count} elements that are not finite; expected none")
    return tensor


def check_non_negative(tensor: Tensor, what: str) -> Tensor:
    """Return a finite tensor without negative elements."""
    if UNREAD.get():
        return tensor
    lowest, highest = _range(tensor)
    if not 0 <= lowest <= highest < math.inf:
        check_finite(tensor, what)
        raise ValueError(f"{what} goes down to {lowest:.3g}; expected 0 or more")
    return tensor


def _range(tensor: Tensor) -> tuple[float, float]:
    """Return the least and the greatest element, NaN if there is one, in one pass."""
    if tensor.numel() == 0:
        return 0.0, 0.0
    if tensor.numel() == 1:
        return (value := tensor.item()), value
    lowest, highest = tensor.detach().aminmax()
    return lowest.item(), highest.item()


def check_square(matrix: Tensor, what: str) -> Tensor:
    """Return a matrix that is square and finite."""
    size = matrix.shape[-1] if isinstance(matrix, Tensor) and matrix.dim() else "P"
    return check_field(matrix, what, size, size)


def check_symmetric(matrix: Tensor, what: str) -> Tensor:
    """Return a matrix that is square, finite, and symmetric up to rounding."""
    check_square(matrix, what)
    if matrix.numel() == 0 or UNREAD.get():
        return matrix
    with torch.no_grad():
        difference = (matrix - matrix.mT).abs().max()
        # Rounding in a sum of outer products is far below this.
        if difference > torch.finfo(matrix.dtype).eps ** 0.5 * matrix.abs().max():
            raise ValueError(
                f"{what} is not symmetric: elements (i, j) and (j, i) differ by up to "
                f"{difference.item():.3g}; symmetrise it with (A + A.mT) / 2 if that is rounding"
            )
    return matrix


def check_positive_definite(eigenvalues: Tensor, what: str) -> Tensor:
    """Return eigenvalues, or numbers in their place, if all are positive."""
    if UNREAD.get():
        return eigenvalues
    least, _ = _range(eigenvalues)
    # Not `least <= 0`, which is false for NaN.
    if eigenvalues.numel() and not least > 0:
        raise NotPositiveDefiniteError(
            f"{what} is not positive definite: its smallest eigenvalue is {least:.3g}; "
            "add a prior precision with add_diagonal, or a larger one"
        )
    return eigenvalues


def cholesky(matrix: Tensor, what: str) -> Tensor:
    """Return the lower Cholesky factor, or raise with the smallest eigenvalue in the message."""
    lower, info = torch.linalg.cholesky_ex(matrix)
    if UNREAD.get():
        return torch.where((info != 0)[..., None, None], math.nan, lower)
    if not info.any():
        return lower
    least = torch.linalg.eigvalsh(matrix.detach()).min()
    if least > 0:
        raise NotPositiveDefiniteError(
            f"{what} is positive definite (its smallest eigenvalue is {least.item():.3g}) but not "
            f"to the accuracy of {matrix.dtype}; add a larger prior precision with add_diagonal"
            + (", or use .to(torch.float64)" if matrix.dtype == torch.float32 else "")
        )
    check_positive_definite(least, what)
    return lower


def is_small(size: int) -> bool:
    """Whether a dense matrix of so many rows is factorised where a structure has no inverse."""
    return size <= SMALL


def check_small(what: str, size: int, instead: str) -> None:
    """Raise if an operator has too many rows for a dense matrix, with advice in `instead`."""
    if not is_small(size):
        raise ValueError(
            f"{what} takes a dense matrix, and {size:,} rows are more than {SMALL:,}: {instead}"
        )
