"""What does not fit into memory, refused before it is allocated."""

from __future__ import annotations

from tyxe.linalg import dense_bytes

__all__ = ["check_memory", "check_size"]

# Bytes that one thing may take: a matrix, a layer's factors, the Jacobians of all data.
MEMORY_LIMIT = 8 * 2**30


def check_memory(what: str, needed: int, instead: str) -> None:
    """Raise for what takes too much memory.

    Args:
        what: is to be allocated.
        needed: bytes that it takes.
        instead: what else to do.

    Raises:
        ValueError: they are more than `MEMORY_LIMIT`.

    Example:
        >>> check_memory("a matrix", 2**34, "keep its diagonal")
        Traceback (most recent call last):
        ValueError: a matrix would take 16.0 GiB, and the limit is 8 GiB: keep its diagonal
    """
    if needed > MEMORY_LIMIT:
        raise ValueError(
            f"{what} would take {needed / 2**30:,.1f} GiB, and the limit is "
            f"{MEMORY_LIMIT / 2**30:g} GiB: {instead}"
        )


def check_size(structure: str, size: int) -> None:
    """Raise for a structure over too many weights.

    Args:
        structure: of a curvature.
        size: number of weights.

    Raises:
        ValueError: it is the whole matrix, and does not fit.
    """
    if structure == "full":
        check_memory(
            f'structure "full" over {size:,} weights',
            dense_bytes(size),
            'use "kron" or "diag", or fewer weights (a prior with expose_modules=[net.last_layer])',
        )
