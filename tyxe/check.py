"""The vocabulary of checks: each returns what it was given, or says what was expected instead.

Options declare theirs with their fields: `rank: int = check.field(8, check.count)`, and call
`check.fields(self)` in `__post_init__`. Functions whose annotations say what they take are
decorated with `check.arguments`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

# Largest number of bytes for one object: a matrix, a layer's factors, the Jacobians of all data.
MEMORY_LIMIT = 8 * 2**30

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def described(value: Any) -> str:
    """Say briefly what an argument is."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, int | float | torch.dtype | None):
        return str(value)
    name = type(value).__name__
    return f"{_article(name)} {name}"


def _refuse(
    name: str, value: Any, expected: str, error: type[Exception] = ValueError
) -> typing.NoReturn:
    raise error(f"{name} is {described(value)}; expected {expected}")


def count(
    name: str, value: Any, least: float = 1, hint: str = "", *, most: float = math.inf
) -> int:
    """Return a count, an integer of any library, as a plain one.

    Raises:
        TypeError: no integer, with a hint of what mends it.
        ValueError: less than `least`, or more than `most`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        _refuse(name, value, f"an integer{hint}", TypeError)
    if not least <= number <= most:
        within = f"{least} or more" if most == math.inf else f"{least} to {most}"
        _refuse(name, number, within + hint)
    return number


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float = math.inf,
    most: float | None = None,
    hint: str = "",
) -> float:
    """Return a number of any library as a plain one.

    Args:
        name: what the message calls it.
        value: the number, which is never NaN.
        above: what it has to exceed.
        least: what it has to reach.
        below: what it stays below: by default it is finite.
        most: what it does not exceed.
        hint: the end of a message, such as a call that mends the mistake.

    Raises:
        TypeError: no number.
        ValueError: out of range, or NaN.
    """
    bounds = [
        *([] if above is None else [f"above {above:g}"]),
        *([] if least is None else [f"of {least:g} or more"]),
        *([] if below == math.inf else [f"below {below:g}"]),
        *([] if most is None else [f"at most {most:g}"]),
    ]
    expected = " ".join(["a number", " and ".join(bounds)]).rstrip() + hint
    try:
        found = None if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, RuntimeError):  # several numbers, or a complex one
        found = None
    if found is None:
        _refuse(name, value, expected, TypeError)
    within = (above is None or found > above) and (least is None or found >= least)
    if not (within and -math.inf < found < below and (most is None or found <= most)):
        _refuse(name, value if isinstance(value, int | float) else found, expected)
    return found


def numbers(
    name: str,
    values: Tensor,
    expected: str,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> Tensor:
    """Return a tensor whose numbers are finite and within bounds; `expected` says so to the reader.

    Raises:
        ValueError: a number that is not.
    """
    if values.numel():
        lowest, highest = (number.item() for number in values.detach().aminmax())
        within = lowest > above and least <= lowest <= highest <= most
        if not (within and -math.inf < lowest <= highest < math.inf):
            low, high = (str(n) if isinstance(n, int) else f"{n:.4g}" for n in (lowest, highest))
            given = f"ranges from {low} to {high}" if values.numel() > 1 else f"is {low}"
            raise ValueError(f"{name} {given}; expected {expected}")
    return values


def points(count: float) -> float:
    """Return the number of points that count; a ValueError if there is none."""
    if not count:
        raise ValueError("no point counts: look for NaN in targets, at masks, and at weights of 0")
    return count


def choice(name: str, value: Any, known: Iterable[Any], hint: str = "") -> Any:
    """Return one of the known values.

    Raises:
        ValueError: another one, with a hint of what else there is.
    """
    known = list(known)
    if not any(isinstance(value, type(each)) and value == each for each in known):
        _refuse(name, value, f"one of {', '.join(map(repr, known))}{hint}")
    return value


def one_of(name: str, value: T, kinds: Any, expected: str) -> T:
    """Return an instance of one of some classes; `expected` is their name for the reader.

    Raises:
        TypeError: an instance of another class.
    """
    if not isinstance(value, kinds):
        _refuse(name, value, expected, TypeError)
    return value


def function(name: str, value: T, expected: str) -> T:
    """Return a function or a class; a module in its place, which can be called too, is none.

    Raises:
        TypeError: something else.
    """
    kinds: Any = () if isinstance(value, nn.Module) else Callable
    return one_of(name, value, kinds, expected)


def listed(name: str, value: Any) -> Any:
    """Return several things; a string, whose letters are not meant, is none of them.

    Raises:
        TypeError: something else.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        one = repr(value) if isinstance(value, str) else "..."
        _refuse(name, value, f"a list: {name}=[{one}]", TypeError)
    return value


def known(value: T | None, hint: str) -> T:
    """Return what there is by now, or raise a RuntimeError with a hint of what makes it."""
    if value is None:
        raise RuntimeError(hint)
    return value


def installed(module: str, extra: str) -> Any:
    """Return a module of an optional extra, or raise an ImportError that says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f'{error}: pip install -e ".[{extra}]"') from error


def flag(name: str, value: Any) -> bool:
    """Return True or False; anything else is a TypeError."""
    return bool(one_of(name, value, bool | np.bool_, "True or False"))


def flags(**values: Any) -> None:
    """Raise a TypeError for an argument that is not True, False or None, the default."""
    for name, value in values.items():
        one_of(name, value, bool | np.bool_ | None, "True or False")


def tensor(name: str, value: Any, **how: Any) -> Tensor:
    """Return a tensor, or what `torch.as_tensor` makes of a number, a list or an array.

    Raises:
        TypeError: it makes nothing of it.
    """
    try:
        return torch.as_tensor(value, **how)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} is {described(value)}; expected a tensor or numbers") from None


def shape(name: str, tensor: Tensor, expected: Iterable[Any], hint: str = "") -> Tensor:
    """Return a tensor of the expected shape.

    There a word stands for any size, and `...` for any dimensions, also none.

    Raises:
        TypeError: no tensor.
        ValueError: another shape, with a hint of what mends it.
    """
    one_of(name, tensor, Tensor, "a tensor")
    sizes: list[Any] = list(expected)
    given: list[Any] = list(tensor.shape)
    if ... in sizes and len(given) >= len(sizes) - 1:
        place = sizes.index(...)
        given[place : place + len(given) - len(sizes) + 1] = [...]
    fits = len(sizes) == len(given) and all(
        isinstance(size, str) or size == own for size, own in zip(sizes, given, strict=True)
    )
    if not fits:
        words = ["..." if size is ... else str(size) for size in sizes]
        wanted = ", ".join(words) + ("," if len(words) == 1 else "")
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected ({wanted}){hint}")
    return tensor


def memory(what: str, needed: int, instead: str, device: torch.device | None = None) -> None:
    """Refuse what takes more bytes than `MEMORY_LIMIT`, or than a device has where one is given.

    Raises:
        ValueError: too much, with what to use instead.
    """
    limit = MEMORY_LIMIT if device is None else _memory_of(device)
    if limit is not None and needed > limit:
        of = "" if device is None else f" of {device}"
        raise ValueError(
            f"{what} would take {needed / 2**30:,.1f} GiB, and the limit{of} is "
            f"{limit / 2**30:,.3g} GiB: {instead}"
        )


@contextmanager
def memory_remedy(what: str, remedy: str) -> Iterator[None]:
    """Say what to do where a device runs out of memory inside.

    Raises:
        torch.OutOfMemoryError: it does, with the remedy.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition("\n")[0]
        raise torch.OutOfMemoryError(f"no memory for {what}: {remedy} ({reason})") from error


def _memory_of(device: torch.device) -> int | None:
    """Return the bytes of a device, or None where nobody says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    known = getattr(os, "sysconf_names", {})
    if device.type != "cpu" or not {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= known.keys():
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def field(default: Any, rule: Callable[..., Any], **limits: Any) -> Any:
    """Return a dataclass's field with a check, which None passes where it is the default."""
    checked = functools.partial(rule, **limits)
    return dataclasses.field(default=default, metadata={"check": checked})


def fields(options: Any) -> None:
    """Check the fields of a dataclass, also a frozen one, that declare how."""
    for each in dataclasses.fields(options):
        value, rule = getattr(options, each.name), each.metadata.get("check")
        if rule is not None and not (value is None and each.default is None):
            object.__setattr__(options, each.name, rule(each.name, value))


def arguments(function: F) -> F:
    """Check the kinds of a function's arguments by its annotations, before it runs.

    These say whether an argument is a tensor, a module, a function, True or False, one number, a
    sequence of words. Its range or shape is for the function to check. A class is decorated for its
    constructor.

    Example:
        >>> @arguments
        ... def norm(values: Tensor, squared: bool = False) -> Tensor:
        ...     return values.square().sum() if squared else values.norm()
        >>> norm([3.0, 4.0])
        Traceback (most recent call last):
        TypeError: values is a list; expected a tensor
    """
    if isinstance(function, type):
        function.__init__ = arguments(function.__init__)  # type: ignore[misc]
        return function
    parameters = inspect.signature(function).parameters.values()
    # Only these: what is after them goes to `*args`.
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which cannot follow what follows, nor needs it
            return function(*args, **kwargs)
        known = _kinds_of(function)
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            kinds = known.get(name, ())
            if kinds and not any(_is_of(value, kind) for kind in kinds):
                expected = " or ".join(dict.fromkeys(map(_with_article, kinds)))
                _refuse(name, value, expected, TypeError)
        return function(*args, **kwargs)

    return typing.cast(F, checked)


# What messages call classes, where that is not their name.
_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    types.NoneType: "None",
    Tensor: "a tensor",
    nn.Module: "a torch.nn.Module",
    os.PathLike: "a path",
    Callable: "a function",
    type: "a class",
    Mapping: "a mapping",
    Iterable: "an iterable",
    Sequence: "a sequence",
}
# A list may stand for a tuple, and the other way round.
_INSTEAD: dict[Any, Any] = {dict: Mapping, tuple: Sequence, list: Sequence, torch.Size: Sequence}


def _is_of(value: Any, kind: Any) -> bool:
    """Whether a value is what an annotation means: numbers are those of any library."""
    if kind in (int, float):
        has_one = not isinstance(value, Tensor) or value.numel() == 1
        return has_one and hasattr(value, "__index__" if kind is int else "__float__")
    if kind in (Iterable, Sequence) and isinstance(value, str):
        return False  # letters are not meant
    return isinstance(value, kind)


@functools.cache
def _kinds_of(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """Return the classes of each argument, at the first call: then all of them exist."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    single = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return {name: _kinds(hints.get(name, Any)) for name in single}


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the classes that an annotation allows; none where it allows all."""
    kind = typing.get_origin(hint) or hint
    if kind in (typing.Union, types.UnionType):
        parts = [_kinds(part) for part in typing.get_args(hint)]
        return sum(parts, ()) if all(parts) else ()
    if kind in (Any, object) or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return ()
    return (_INSTEAD.get(kind, kind),)


def _with_article(kind: Any) -> str:
    return _WORDS.get(kind) or f"{_article(kind.__name__)} {kind.__name__}"


def _article(name: str) -> str:
    return "an" if name[0] in "AEIOUaeiou" else "a"
