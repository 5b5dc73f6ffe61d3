"""Coresets: a few points of each task, kept out of its training for use before a prediction."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from tyxe import check
from tyxe.bnn import BNN
from tyxe.bnn.predict import SupervisedBNN
from tyxe.continual.heads import Heads
from tyxe.util import at_least_float32

Pair = tuple[Tensor, Tensor]


def k_center(inputs: Tensor, size: int) -> Tensor:
    """Return indices, `(size,)`, of points that cover the others, starting from a random one.

    Each is the point farthest from those before it, in Euclidean distance. The largest distance of
    any point to the nearest of them is at most twice the smallest possible. It takes `n * size`
    distances.

    Reference:
        Gonzalez (1985), Clustering to minimize the maximum intercluster distance; Nguyen et al.
        (2018), Variational continual learning, 3.
    """
    # Differences of unsigned bytes would wrap around, and squares overflow in half precision.
    points = at_least_float32(inputs.reshape(len(inputs), -1))
    chosen = [int(torch.randint(len(points), (), device="cpu"))]
    nearest = points.new_full((len(points),), torch.inf)
    while len(chosen) < size:
        nearest = nearest.minimum((points - points[chosen[-1]]).square().sum(-1))
        # Below zero, the distance of points that coincide with a chosen one: none is chosen twice.
        nearest[chosen[-1]] = -1.0
        chosen.append(int(nearest.argmax()))
    return torch.tensor(chosen, device=inputs.device)


CORESETS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "random": lambda inputs, size: torch.randperm(len(inputs), device=inputs.device)[:size],
    "k-center": k_center,
}


@check.arguments
def coreset_indices(inputs: Tensor, size: int, method: str = "random") -> Tensor:
    """Choose a coreset.

    Args:
        inputs: the inputs of a task, `(n, ...)`.
        size: number of points.
        method: `"random"`, or `"k-center"`: each point is the one farthest from those before it.

    Returns:
        Indices, `(size,)`.

    Raises:
        ValueError: an unknown method; a size below 1, or not below that of the task.

    Example:
        >>> len(coreset_indices(torch.randn(20, 3), 4, "k-center").unique())
        4
    """
    check.choice("method", method, CORESETS)
    hint = ": a coreset has at least one point of the task, and leaves some for training"
    check.number("size", check.count("size", size, 0), above=0, below=len(inputs), hint=hint)
    return CORESETS[method](inputs, size)


@check.arguments
def split_coreset(data: Pair, indices: Tensor) -> tuple[Pair, Pair]:
    """Take a coreset out of a task's data.

    Args:
        data: inputs `(n, ...)` and targets `(n, ...)`.
        indices: of the coreset, from `coreset_indices`.

    Returns:
        The coreset, and the other points in their order.

    Example:
        >>> x, y = torch.arange(4.0)[:, None], torch.arange(4)
        >>> coreset, rest = split_coreset((x, y), torch.tensor([3, 1]))
        >>> coreset[1].tolist(), rest[1].tolist()
        ([3, 1], [0, 2])
    """
    inputs, targets = data
    left = torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
    left[indices] = False
    return (inputs[indices], targets[indices]), (inputs[left], targets[left])


@contextmanager
def restored(bnn: BNN, heads: Heads | None = None) -> Iterator[None]:
    """Restore the state of a BNN, and of its heads, at the end.

    Use it for changes that serve only one prediction, such as a fit to coresets.

    Args:
        bnn: any wrapper. Its parameters, buffers and prior are restored, and its own settings, such
            as the options of a `LaplaceBNN` or the number of epochs of a `VariationalBNN`. An
            optimiser is not: fit with a new one inside.
        heads: heads of the same BNN.

    Raises:
        ValueError: the heads are of another BNN.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(3, scale=0.1), tyxe.guides.AutoNormal)
        >>> before = bnn.net_guide.get_loc("bias").item()
        >>> with restored(bnn):
        ...     _ = bnn.fit([(torch.eye(3, 2), torch.ones(3, 1))], torch.optim.Adam, 2)
        >>> bnn.net_guide.get_loc("bias").item() == before
        True
    """
    with ExitStack() as last_first:
        last_first.callback(setattr, bnn, "_stage", bnn._stage)
        if heads is not None:
            heads.check_of(bnn)
        if isinstance(bnn, SupervisedBNN):
            size = bnn.likelihood._dataset_size
            last_first.callback(setattr, bnn.likelihood, "dataset_size", size)
        if heads is not None:
            last_first.callback(heads.load_state_dict, heads.state_dict())
        # What comes before it, because loading builds a posterior from attributes and priors.
        last_first.callback(bnn.load_state_dict, copy.deepcopy(bnn.state_dict()))
        last_first.callback(bnn.net_prior.restore, bnn.net_prior.snapshot())
        last_first.callback(vars(bnn).update, dict(vars(bnn)))
        yield
