"""The package's warnings, and whether numbers are read to check them."""

from __future__ import annotations

import sys
import warnings
from contextvars import ContextVar

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
