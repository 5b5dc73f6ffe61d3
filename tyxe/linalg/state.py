"""Operators as flat dictionaries of tensors, to be saved beside a module's."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote

from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.block import BlockDiagonal
from tyxe.linalg.dense import Dense
from tyxe.linalg.diagonal import Diagonal
from tyxe.linalg.inverse import Inverse
from tyxe.linalg.kronecker import Kronecker
from tyxe.linalg.low_rank import LowRank
from tyxe.linalg.sum import Sum
from tyxe.linalg.triangular import Cholesky

__all__ = ["STRUCTURES", "operator_from_state", "operator_state"]

# What a state calls the structures whose fields are tensors. Add a class of your own under a name
# of its own.
STRUCTURES: dict[str, type[Operator]] = {
    "dense": Dense,
    "diagonal": Diagonal,
    "low_rank": LowRank,
    "kronecker": Kronecker,
    "cholesky": Cholesky,
}


# A quoted name has neither of these.
_TERM, _INVERSE = "+", "!"


def _parts(operator: Operator) -> dict[str, Operator] | None:
    """The operators that one is made of, by what stands before the slash, or None."""
    if isinstance(operator, BlockDiagonal):
        return {quote(name, safe=""): block for name, block in operator.blocks.items()}
    if isinstance(operator, Sum):
        return {_TERM + quote(name, safe=""): term for name, term in operator.terms.items()}
    return {_INVERSE: operator.operator} if isinstance(operator, Inverse) else None


def _made_of(parts: dict[str, Operator]) -> Operator:
    if _INVERSE in parts:
        return Inverse(parts[_INVERSE])
    named = {unquote(name.removeprefix(_TERM)): part for name, part in parts.items()}
    return Sum(named) if any(name.startswith(_TERM) for name in parts) else BlockDiagonal(named)


def operator_state(operator: Operator) -> dict[str, Tensor]:
    """Return an operator as tensors by name, detached; `operator_from_state` is the inverse.

    The keys are `structure.field`, and within a block `block/structure.field`, a term `+term/...`,
    an inverse `!/...`.

    Args:
        operator: any structure of the table `STRUCTURES`, or blocks of them.

    Raises:
        TypeError: its class is not in the table.

    Example:
        >>> import torch
        >>> operator_state(BlockDiagonal({"0.weight": Diagonal(torch.ones(2))}))
        {'0.weight/diagonal.entries': tensor([1., 1.])}
    """
    parts = _parts(operator)
    if parts is not None:
        return {
            f"{name}/{key}": tensor
            for name, part in parts.items()
            for key, tensor in operator_state(part).items()
        }
    names = {structure: name for name, structure in STRUCTURES.items()}
    if type(operator) not in names:
        raise TypeError(
            f"{type(operator).__name__} has no name in a state: give it one in "
            "tyxe.linalg.STRUCTURES"
        )
    prefix = names[type(operator)]
    return {f"{prefix}.{name}": value for name, value in operator.detach()._fields().items()}


def operator_from_state(state: Mapping[str, Tensor]) -> Operator:
    """Return the operator of a state.

    Args:
        state: what `operator_state` returned.

    Raises:
        ValueError: it is empty, lacks a field, or names a structure that is not in the table.

    Example:
        >>> import torch
        >>> operator_from_state({"diagonal.entries": torch.ones(2)})
        Diagonal(size=2, dtype=torch.float32, device=cpu)
    """
    if any("/" in key for key in state):
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            name, _, rest = key.partition("/")
            parts.setdefault(name, {})[rest] = tensor
        return _made_of({name: operator_from_state(part) for name, part in parts.items()})
    structures = {key.partition(".")[0] for key in state}
    if len(structures) != 1 or not structures <= set(STRUCTURES):
        raise ValueError(
            f"a state of one operator has keys such as 'dense.matrix', of one structure out of "
            f"{', '.join(STRUCTURES)}; got {sorted(state)}"
        )
    fields = {key.partition(".")[2]: tensor for key, tensor in state.items()}
    structure = STRUCTURES[structures.pop()]
    if set(fields) != set(structure.__dataclass_fields__):
        expected = ", ".join(structure.__dataclass_fields__)
        raise ValueError(f"{structure.__name__} has the fields {expected}; got {sorted(fields)}")
    return structure(**fields)
