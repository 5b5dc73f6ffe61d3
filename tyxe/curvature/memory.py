"""Checks of the memory that an object needs, before it is allocated."""

from __future__ import annotations

from tyxe.linalg.checks import dense_bytes

# Largest number of bytes for one object: a matrix, a layer's factors, the Jacobians of all data.
MEMORY_LIMIT = 8 * 2**30


def check_memory(what: str, needed: int, instead: str) -> None:
    """Raise a ValueError that advises `instead` if `what` takes more than `MEMORY_LIMIT` bytes."""
    if needed > MEMORY_LIMIT:
        raise ValueError(
            f"{what} would take {needed / 2**30:,.1f} GiB, and the limit is "
            f"{MEMORY_LIMIT / 2**30:g} GiB: {instead}"
        )


def check_size(structure: str, size: int) -> None:
    """Raise a ValueError for the structure `"full"` over too many weights, `size`."""
    if structure == "full":
        check_memory(
            f'structure "full" over {size:,} weights',
            dense_bytes(size),
            'use "kron" or "diag", or fewer weights (a prior with expose_modules=[net.last_layer])',
        )
