"""The contents of batches and outputs of nets: inputs, targets, weights and predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from pyro.poutine.runtime import effectful
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_structure, tree_unflatten

from tyxe import check
from tyxe.check import described
from tyxe.errors import warn

# From a batch to `inputs, targets`, `inputs, targets, weights`, or inputs alone to predict.
Unpack = Callable[[Any], Any]
# The predictions in what a net returns: a name, an index, or a function.
Output = str | int | Callable[[Any], Any]


@dataclass(frozen=True)
class Targets:
    """Targets of which some count more often than others, or not at all.

    A weight of 2 counts the point twice; a weight of 0 or a mask leaves it out.

    Attributes:
        values: `(n, ...)`.
        weights: how often each point counts, `(n,)`, from 0; None for once each.
        mask: which numbers within points count, or how much, with the shape of the values or of
            their first dimensions; None for all.
        is_observed: whether the mask is complete and excluded values replaced:
            `Likelihood.observed`.
    """

    values: Tensor
    weights: Tensor | None = None
    mask: Tensor | None = None
    is_observed: bool = False

    @staticmethod
    def of(targets: Tensor | Targets) -> Targets:
        """Return targets as `Targets`; plain ones have no weights."""
        return targets if isinstance(targets, Targets) else Targets(targets)

    def __len__(self) -> int:
        return len(self.values)

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.values.device

    def map(self, function: Callable[[Tensor], Tensor]) -> Targets:
        """Apply a function to each tensor."""
        weights, mask = (p if p is None else function(p) for p in (self.weights, self.mask))
        return Targets(function(self.values), weights, mask, self.is_observed)

    def to(self, device: Any) -> Targets:
        """Return the targets on a device."""
        return self.map(lambda part: part.to(device))

    def clone(self) -> Targets:
        """Return a copy."""
        return self.map(torch.clone)

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
        check.shape("the mask", mask, self.values.shape[: mask.dim()], ", as the targets")
        if self.mask is not None:
            dims = max(mask.dim(), self.mask.dim())
            mask = trailing(self.mask, dims) * trailing(mask, dims)
        return replace(self, mask=mask)

    def weighted(self, each: Tensor) -> Targets:
        """Return the targets with weights of points `(n,)`, or of numbers within them."""
        if each.dim() > 1:
            return self.masked(each)
        return replace(self, weights=each if self.weights is None else each * self.weights)

    def masked_by_vectors(self) -> Targets:
        """Return targets of vectors along the last dimension, which count as a whole or not."""
        if self.mask is None or not 1 < self.mask.dim() == self.values.dim():
            return self
        return replace(self, mask=self.mask.amin(-1))

    @property
    def has_whole_points(self) -> bool:
        """Whether each point counts as a whole or not at all, apart from its weight."""
        return self.mask is None or (self.mask.dim() == 1 and self.mask.dtype == torch.bool)

    @property
    def has_weights(self) -> bool:
        """Whether something counts other than once or not at all."""
        is_graded = self.mask is not None and self.mask.dtype != torch.bool
        return self.weights is not None or is_graded

    def counts(self) -> Tensor | None:
        """Return how often each point counts, `(n,)`: not at all if all of it is left out."""
        if self.mask is None:
            return self.weights
        kept = self.mask > 0 if self.mask.dim() == 1 else (self.mask > 0).flatten(1).any(1)
        return kept.to(torch.get_default_dtype()) if self.weights is None else self.weights * kept

    def counts_within(self, shape: torch.Size | None = None) -> Tensor | None:
        """Return how often each number counts, of a shape that begins as the values' do.

        By default it is the values' own; None where each counts once.
        """
        shape = self.values.shape if shape is None else shape
        found = self.mask
        if found is not None:
            check.shape("the mask", found, shape[: found.dim()], ": mask whole points")
            found = trailing(found, len(shape)).expand(shape).to(torch.get_default_dtype())
        if self.weights is None:
            return found
        weights = trailing(self.weights, len(shape)).expand(shape)
        return weights if found is None else weights * found

    def filled(self) -> Targets:
        """Return the targets with values that count in the place of those that do not.

        The latter may be labels of -1 or NaN.
        """
        mask, weights = self.mask, self.weights
        if (mask is None and weights is None) or not len(self):
            return self
        kept = torch.ones_like(weights, dtype=torch.bool) if mask is None else mask > 0  # type: ignore[arg-type]
        if weights is not None:
            kept = kept & trailing(weights > 0, kept.dim())
        return replace(self, values=filled(self.values, kept))


@effectful(type="targets")
def masked_targets(site: str, targets: Targets) -> Targets:
    """Return the targets of an observed site, of which handlers leave some out."""
    return targets


def trailing(values: Tensor, dims: int) -> Tensor:
    """Return a view with dimensions of size 1 at the end, so that there are so many."""
    return values.reshape(*values.shape, *[1] * (dims - values.dim()))


def filled(values: Tensor, kept: Tensor) -> Tensor:
    """Overwrite what is not kept by values that are, of the same place in a point if there are any.

    `kept` has the shape of the values' first dimensions.
    """
    rows = kept.flatten(1) if kept.dim() > 1 else kept[:, None]
    parts = values.reshape(*rows.shape, -1)
    first = rows.to(torch.uint8).argmax(0)  # of each place
    known = parts.gather(0, first[None, :, None].expand(1, *parts.shape[1:]))[0]
    has = rows.any(0)
    other = known.index_select(0, has.to(torch.uint8).argmax().view(1))
    other = other.where(has.any(), torch.zeros_like(other))
    known = known.where(has[:, None], other)
    return parts.where(rows[..., None], known).view_as(values)


def _flatten(targets: Targets) -> tuple[list[Tensor], tuple[list[str], bool]]:
    parts = {"values": targets.values, "weights": targets.weights, "mask": targets.mask}
    given = {name: part for name, part in parts.items() if part is not None}
    return [*given.values()], ([*given], targets.is_observed)


def _unflatten(parts: Iterable[Any], context: tuple[list[str], bool]) -> Targets:
    names, is_observed = context
    return Targets(**dict(zip(names, parts, strict=True)), is_observed=is_observed)


register_pytree_node(Targets, _flatten, _unflatten)


def alike(pieces: Sequence[Any]) -> list[Any]:
    """Return targets of batches with weights for all where some have them, and masks likewise."""
    if not any(isinstance(piece, Targets) for piece in pieces):
        return list(pieces)
    parts = [Targets.of(piece) for piece in pieces]
    for name in ("weights", "mask"):
        known = [p for p in parts if getattr(p, name) is not None]
        if len(known) not in (0, len(parts)):
            like = max((getattr(p, name) for p in known), key=lambda part: part.dim())
            parts = [_with_ones(part, name, like) for part in parts]
    return parts


def alike_batches(batches: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return batches with weights and masks for all where some have them."""
    inputs, targets = zip(*batches, strict=True)
    return list(zip(inputs, alike(targets), strict=True))


def _with_ones(targets: Targets, name: str, like: Tensor) -> Targets:
    given = getattr(targets, name)
    shape = targets.values.shape[: like.dim()]
    if given is None:
        given = torch.ones(shape, dtype=like.dtype, device=targets.device)
    given = trailing(given, like.dim()).expand(shape)
    return replace(targets, weights=given) if name == "weights" else replace(targets, mask=given)


def concatenated(parts: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate tensors, or containers of them such as predictions of batches, along `dim`."""
    if len(parts) == 1:
        return parts[0]
    columns = zip(*map(tree_leaves, parts), strict=True)
    return tree_unflatten([torch.cat(column, dim) for column in columns], tree_structure(parts[0]))


def concatenate_targets(pieces: Sequence[Any]) -> Any:
    """Concatenate the targets of batches, weighted or not."""
    return concatenated(alike(pieces))


def read_targets(targets: Any, *weights: Any) -> Any:
    """Return the targets of a batch with what is known of them: weights, and what is missing.

    A number that is NaN is missing, and masked.
    """
    found = weighted(targets, *weights) if weights else targets
    values = Targets.of(found).values
    if values.is_floating_point() and values.dim() and bool((gaps := values.isnan()).any()):
        # A mask for all of a point leaves it out, of whatever likelihood.
        return Targets.of(found).masked(~gaps)
    return found


def weighted(targets: Any, weights: Any) -> Targets:
    """Return the targets of a batch with a weight for each point, a number from 0."""
    weights, found = torch.as_tensor(weights), Targets.of(targets)
    hint = ", one for each point; several arguments of the net go in a tuple, ((x1, x2), y)"
    name = "the third element of a batch, weights,"
    check.shape(name, weights, found.values.shape[:1], hint)
    if not weights.is_floating_point() and weights.dtype != torch.bool:
        warn(
            f"the loader yields integers, {weights.dtype}, as a third element, which are taken as "
            "weights: how often each point counts. If they are that, yield weights.float(); else, "
            "such as numbers of groups, leave them out: unpack=lambda batch: batch[:2]"
        )
    weights = weights.to(torch.promote_types(weights.dtype, torch.get_default_dtype()))
    check.numbers(name, weights, "finite counts from 0", least=0)
    return replace(found, weights=weights)


def check_unpack(unpack: Any) -> Unpack:
    """Return a function, or raise a TypeError."""
    expected = "a function from a batch to inputs and targets"
    found: Unpack = check.one_of("unpack", unpack, Callable, expected)
    return found


class Batch(NamedTuple):
    """Inputs and targets as they are used, which are not unpacked again."""

    inputs: Any
    targets: Any


class Unpacked:
    """A loader whose batches go through a function first.

    Args:
        loader: any iterable of batches.
        unpack: a function from a batch to `inputs, targets` or `inputs, targets, weights`.

    Raises:
        TypeError: not a function.

    Example:
        >>> batches = [{"pixels": torch.zeros(2, 3), "labels": torch.tensor([0, 1])}]
        >>> loader = Unpacked(batches, lambda batch: (batch["pixels"], batch["labels"]))
        >>> next(iter(loader))[1]
        tensor([0, 1])
    """

    def __init__(self, loader: Iterable[Any], unpack: Unpack) -> None:
        self.loader, self.unpack = loader, check_unpack(unpack)

    def __iter__(self) -> Iterator[Any]:
        return map(self._one, self.loader)

    def _one(self, batch: Any) -> Any:
        if isinstance(batch, Batch):
            return batch
        found = self.unpack(batch)
        if isinstance(found, tuple | list) and len(found) == 3 and isinstance(found[2], Tensor):
            # A third element that is named is a weight, whatever its dtype.
            weights = found[2]
            dtype = torch.promote_types(weights.dtype, torch.get_default_dtype())
            return found[0], found[1], weights.to(dtype)
        return found

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    @property
    def sampler(self) -> Any:
        """The loader's sampler, if it has one."""
        return getattr(self.loader, "sampler", None)


class KnownUnpack:
    """How a BNN unpacks batches, once that was given, for later loaders.

    Batches of other kinds than those that it has met, such as pairs after mappings, are left as
    they are.
    """

    def __init__(self, unpack: Unpack) -> None:
        self.given = check_unpack(unpack)
        self._met: set[Any] = set()

    def first(self, batch: Any) -> Any:
        """Unpack a batch of a loader for which the function was given."""
        found = self.given(batch)
        self._met.add(_kind_of(batch))
        return found

    def again(self, batch: Any) -> Any:
        """Unpack a batch of another loader, if it is the first, or of a kind that was met."""
        if self._met and _kind_of(batch) not in self._met:
            return batch
        try:
            return self.first(batch)
        except Exception as error:
            raise ValueError(
                f"unpack was given to the BNN or to its fit, so that it holds for all loaders, and "
                f"fails on {described(batch)} of this one: {type(error).__name__}: {error}; where "
                "batches need none, pass unpack=lambda batch: batch"
            ) from error


def _kind_of(batch: Any) -> Any:
    # Loaders make lists of tuples.
    return len(batch) if isinstance(batch, tuple | list) else type(batch)


class UnpackedList(list[Any]):
    """A list of batches that are unpacked, as those of a loader that is `Unpacked`."""


def unpacked(loader: Any, unpack: Unpack | None) -> Any:
    """Return a loader whose batches go through `unpack`, or the loader itself without one."""
    if unpack is None or loader is None:
        return loader
    if isinstance(loader, Tensor | Mapping | tuple) or not hasattr(loader, "__iter__"):
        raise TypeError(
            f"unpack goes with a loader or a list of batches, not with {described(loader)}"
        )
    found = Unpacked(loader, unpack)
    return UnpackedList(found) if isinstance(loader, list) else found


class Picking:
    """A forward hook by which a net returns its predictions alone."""

    def __init__(self, output: Output) -> None:
        expected = "the name or index of the predictions in what the net returns, or a function"
        self.output = check.one_of("output", output, (str, int, Callable), expected)

    def __call__(self, net: nn.Module, inputs: Any, found: Any) -> Any:
        """Return the predictions in the net's output."""
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
