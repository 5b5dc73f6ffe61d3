"""What batches hold, and what a net returns: inputs, targets, weights and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

from tyxe.errors import described

# From a batch to `inputs, targets`, `inputs, targets, weights`, or inputs alone to predict.
Unpack = Callable[[Any], Any]
# The predictions in what a net returns: a name, an index, or a function.
Output = str | int | Callable[[Any], Any]


@dataclass(frozen=True)
class Targets:
    """Targets of which some count more often than others, or not at all.

    Attributes:
        values: `(n, ...)`.
        weights: how often each point counts, `(n,)`, from 0; None for once each.
        mask: which numbers within points count, or how much, of the values' shape; None for all.
    """

    values: Tensor
    weights: Tensor | None = None
    mask: Tensor | None = None

    @staticmethod
    def of(targets: Tensor | Targets) -> Targets:
        """Return targets with weights, which plain ones have not."""
        return targets if isinstance(targets, Targets) else Targets(targets)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.values.device

    def map(self, function: Callable[[Tensor], Tensor]) -> Targets:
        """Apply a function to each tensor."""
        parts = (self.values, self.weights, self.mask)
        return Targets(*(part if part is None else function(part) for part in parts))  # type: ignore[arg-type]

    def to(self, device: Any) -> Targets:
        """Return the targets on a device."""
        return self.map(lambda part: part.to(device))

    def __getitem__(self, rows: Any) -> Targets:
        return self.map(lambda part: part[rows])

    def split(self, size: int) -> list[Targets]:
        """Cut into pieces of at most `size` points."""
        return [self[start : start + size] for start in range(0, len(self), size)]

    def masked(self, mask: Tensor) -> Targets:
        """Return the targets with points `(n,)`, or numbers within them `(n, ...)`, left out.

        Raises:
            ValueError: a mask of another shape.
        """
        mask = mask.to(self.device)
        if mask.dim() > 1 and mask.shape != self.values.shape:
            raise ValueError(
                f"the mask has shape {tuple(mask.shape)}, and the targets have "
                f"{tuple(self.values.shape)}"
            )
        if mask.dim() > 1:
            return replace(self, mask=mask if self.mask is None else self.mask * mask)
        kept = mask.to(torch.get_default_dtype())
        return replace(self, weights=kept if self.weights is None else self.weights * kept)

    def counts(self) -> Tensor | None:
        """Return how often each point counts, `(n,)`: not at all where all of it is left out."""
        if self.mask is None:
            return self.weights
        kept = self.mask > 0 if self.mask.dim() == 1 else (self.mask > 0).flatten(1).any(1)
        return kept.to(torch.get_default_dtype()) if self.weights is None else self.weights * kept


def _flatten(targets: Targets) -> tuple[list[Tensor], list[str]]:
    given = {name: part for name, part in vars(targets).items() if part is not None}
    return [*given.values()], [*given]


def _unflatten(parts: Iterable[Any], names: list[str]) -> Targets:
    return Targets(**dict(zip(names, parts, strict=True)))


register_pytree_node(Targets, _flatten, _unflatten)


def concatenate_targets(pieces: list[Any]) -> Any:
    """Concatenate the targets of batches, weighted or not."""
    if not any(isinstance(piece, Targets) for piece in pieces):
        return torch.cat(pieces)
    parts = [Targets.of(piece) for piece in pieces]
    weights = [_or_ones(part.weights, part.values.reshape(len(part), -1)[:, 0]) for part in parts]
    masks = [_or_ones(part.mask, part.values) for part in parts]
    has_mask = any(part.mask is not None for part in parts)
    return Targets(
        torch.cat([part.values for part in parts]),
        torch.cat(weights),
        torch.cat(masks) if has_mask else None,
    )


def _or_ones(given: Tensor | None, like: Tensor) -> Tensor:
    return torch.ones_like(like, dtype=torch.float32) if given is None else given


def weighted(targets: Any, weights: Any) -> Targets:
    """Return the targets of a batch with a weight for each point.

    Raises:
        ValueError: weights that are not one number from 0 for each point.
    """
    weights = torch.as_tensor(weights)
    if weights.shape != targets.shape[:1]:
        raise ValueError(
            f"the loader yields weights of shape {tuple(weights.shape)} for {len(targets)} points; "
            "expected one for each, (n,); several arguments of the net go in a tuple, ((x1, x2), y)"
        )
    weights = weights.to(torch.promote_types(weights.dtype, torch.get_default_dtype()))
    if not bool((weights >= 0).all() & weights.isfinite().all()):
        raise ValueError("the loader yields weights that are negative or not finite")
    return Targets(targets, weights)


class Unpacked:
    """A loader whose batches go through a function first.

    Args:
        loader: any iterable of batches.
        unpack: from a batch to `inputs, targets` or `inputs, targets, weights`.

    Raises:
        TypeError: not a function.

    Example:
        >>> batches = [{"pixels": torch.zeros(2, 3), "labels": torch.tensor([0, 1])}]
        >>> loader = Unpacked(batches, lambda batch: (batch["pixels"], batch["labels"]))
        >>> next(iter(loader))[1]
        tensor([0, 1])
    """

    def __init__(self, loader: Iterable[Any], unpack: Unpack) -> None:
        if not callable(unpack):
            raise TypeError(
                f"unpack is {described(unpack)}; expected a function from a batch to inputs and "
                "targets"
            )
        self.loader, self.unpack = loader, unpack

    def __iter__(self) -> Iterator[Any]:
        return map(self.unpack, self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def sampler(self) -> Any:
        """The loader's sampler, if it has one."""
        return getattr(self.loader, "sampler", None)


def unpacked(loader: Any, unpack: Unpack | None) -> Any:
    """Return a loader whose batches go through `unpack`, or itself where there is none.

    Raises:
        TypeError: no loader.
    """
    if unpack is None or loader is None:
        return loader
    if isinstance(loader, Tensor | Mapping | tuple) or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"unpack goes with a loader or a list of batches, not with {described(loader)}"
        )
    found = Unpacked(loader, unpack)
    return list(found) if isinstance(loader, list) else found


class Picking:
    """A forward hook by which a net returns its predictions alone.

    Args:
        output: their name, their index, or a function from what the net returns.

    Raises:
        TypeError: something else.
    """

    def __init__(self, output: Output) -> None:
        if not isinstance(output, str | int) and not callable(output):
            raise TypeError(
                f"output is {described(output)}; expected the name or index of the predictions in "
                "what the net returns, or a function"
            )
        self.output = output

    def __call__(self, net: nn.Module, inputs: Any, found: Any) -> Any:
        """Return the predictions.

        Raises:
            ValueError: the net returns none of that name or index.
        """
        if callable(self.output):
            return self.output(found)
        try:
            if isinstance(self.output, str) and not isinstance(found, Mapping):
                return getattr(found, self.output)
            return found[self.output]
        except (AttributeError, KeyError, IndexError, TypeError):
            names = getattr(found, "_fields", None) or (found if isinstance(found, Mapping) else ())
            has = f" of {', '.join(map(str, names))}" if names else ""
            raise ValueError(
                f"output={self.output!r}, but {type(net).__name__} returns a "
                f"{type(found).__name__}{has}"
            ) from None


def pick(net: nn.Module, output: Output | None, keep: bool = False) -> None:
    """Let a net return its predictions alone, or all that it did where `output` is None.

    With `keep`, `output` picks from what has been picked.
    """
    for key, hook in list(net._forward_hooks.items()):
        if isinstance(hook, Picking) and not keep:
            del net._forward_hooks[key]
    if output is not None:
        net.register_forward_hook(Picking(output))
