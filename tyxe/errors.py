"""The package's warnings, and errors for arguments of a wrong kind."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

# Whether the numbers of tensors are left unread, for which the host would wait: see
# `tyxe.threads.unvalidated`.
UNREAD: ContextVar[bool] = ContextVar("UNREAD", default=False)

# Packages whose frames are skipped between a warning and the line that it is about.
_INTERNAL = ("tyxe", "pyro", "torch", "contextlib", "functools", "tqdm")


class TyxeWarning(UserWarning):
    """A result is silently wrong, or most likely not what the caller meant.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", TyxeWarning)  # raise them as errors
        >>> warnings.simplefilter("default", TyxeWarning)
    """


def warn(message: str) -> None:
    """Give a `TyxeWarning` at the line outside of the package that called into it.

    Args:
        message: what is wrong, and which call mends it.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("the scales have collapsed")
        >>> caught[0].category.__name__, str(caught[0].message)
        ('TyxeWarning', 'the scales have collapsed')
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and _package(frame.f_globals) in _INTERNAL:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, TyxeWarning, stacklevel=level)


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]


def check_known(name: str, given: str, known: Iterable[str]) -> None:
    """Raise a ValueError for an unknown name."""
    if given not in known:
        raise ValueError(f"{name} is {given!r}; expected one of {', '.join(map(repr, known))}")


def described(value: Any) -> str:
    """Say briefly what an argument is."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    is_short = isinstance(value, str | int | float | None)
    return repr(value) if is_short else f"a {type(value).__name__}"


def check_count(name: str, count: Any, least: float = 1, hint: str = "") -> int:
    """Return a count, an integer of any library, as a plain one.

    Raises:
        TypeError: no integer, with a hint of what mends it.
        ValueError: less than `least`.
    """
    try:
        number = None if isinstance(count, bool) else operator.index(count)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} is {described(count)}; expected an integer{hint}")
    if number < least:
        raise ValueError(f"{name} is {number}; expected {least} or more")
    return number
