"""Random tensors in float64, the same for a seed, for the contract suites."""

import torch
from torch import Tensor


def random_tensor(*shape: int, seed: int = 0) -> Tensor:
    """Return independent standard normals."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_gram(size: int, rank: int, seed: int = 0) -> Tensor:
    """Return a positive semidefinite matrix of a rank, `(size, size)`."""
    rows = random_tensor(rank, size, seed=seed)
    return rows.mT @ rows / rank
