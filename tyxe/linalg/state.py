"""Operators as flat dictionaries of tensors, to be saved with a module's."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote, unquote

from torch import Tensor

from tyxe import check
from tyxe.files import FORMS
from tyxe.linalg.base import Operator
from tyxe.linalg.composite import BlockDiagonal, Inverse, Sum
from tyxe.linalg.dense import Cholesky, Dense
from tyxe.linalg.diagonal import Diagonal, LowRank
from tyxe.linalg.kronecker import Kronecker

# Names of structures in states. Add a class of your own, whose fields are tensors, under a new one.
STATE_NAMES: dict[str, type[Operator]] = {
    "dense": Dense,
    "diagonal": Diagonal,
    "low_rank": LowRank,
    "kronecker": Kronecker,
    "cholesky": Cholesky,
}


# Quoted names have neither of these characters.
_TERM, _INVERSE = "+", "!"


def _parts(operator: Operator) -> dict[str, Operator] | None:
    """Return the operators inside one by the part of their key before the slash, or None."""
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

    The keys are `structure.field`, and for a block `block/structure.field`, for a term
    `+term/...` and for an inverse `!/...`. A class that is not in `STATE_NAMES` is a TypeError.
    """
    parts = _parts(operator)
    if parts is not None:
        return {
            f"{name}/{key}": tensor
            for name, part in parts.items()
            for key, tensor in operator_state(part).items()
        }
    names = {structure: name for name, structure in STATE_NAMES.items()}
    if type(operator) not in names:
        kind = type(operator).__name__
        raise TypeError(
            f"{kind} has no name in a state: give it one in each program that saves or loads it, "
            f'tyxe.linalg.state.STATE_NAMES["{kind.lower()}"] = {kind}'
        )
    prefix = names[type(operator)]
    return {f"{prefix}.{name}": value for name, value in operator.detach()._fields().items()}


def operator_from_state(state: Mapping[str, Tensor]) -> Operator:
    """Return the operator whose `operator_state` this is."""
    if any("/" in key for key in state):
        parts: dict[str, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            name, _, rest = key.partition("/")
            parts.setdefault(name, {})[rest] = tensor
        return _made_of({name: operator_from_state(part) for name, part in parts.items()})
    (name,) = {key.partition(".")[0] for key in state}
    structure = STATE_NAMES[check.choice("structure", name, STATE_NAMES)]
    return structure(**{key.partition(".")[2]: tensor for key, tensor in state.items()})


FORMS[Operator] = operator_state, operator_from_state
