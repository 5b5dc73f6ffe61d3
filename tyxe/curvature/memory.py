"""Checks of the memory that an object needs, before it is allocated."""

from __future__ import annotations

import os

import torch

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


def check_device_memory(what: str, needed: int, device: torch.device, instead: str) -> None:
    """Raise a ValueError that advises `instead` if `what` takes more than a device has."""
    limit = _device_memory(device)
    if limit is not None and needed > limit:
        raise ValueError(
            f"{what} would take {needed / 2**30:,.1f} GiB, and {device} has {limit / 2**30:,.1f} "
            f"GiB: {instead}"
        )


def _device_memory(device: torch.device) -> int | None:
    """Return the bytes of a device, or None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    known = getattr(os, "sysconf_names", {})
    if device.type != "cpu" or not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= known.keys():
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_size(structure: str, size: int) -> None:
    """Raise a ValueError for the structure `"full"` over too many weights, `size`."""
    if structure == "full":
        check_memory(
            f'structure "full" over {size:,} weights',
            dense_bytes(size),
            'use "kron" or "diag", or fewer weights (a prior with expose_modules=[net.last_layer])',
        )
