"""Bad arguments of every public call: each example of a docstring, with one argument that is wrong.

The examples of all docstrings run once, and the first call of each public function, class and
method is kept. It is made again with values in the place of an argument that cannot be meant.
"""

from __future__ import annotations

import contextlib
import copy
import doctest
import importlib
import inspect
import io
import pkgutil
import random
import re
import signal
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pyro
import torch

import tyxe
from tests.soak.verdict import is_clear

# Values that no argument means, each made anew.
BAD: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a string": lambda: "nonsense",
    "-1": lambda: -1,
    "NaN": lambda: float("nan"),
    "no numbers": lambda: torch.empty(0),
    "another shape": lambda: torch.ones(2, 3, 5, 7),
    "an object": object,
    "an empty list": list,
}
SECONDS = 10  # for a call
_SKIPPED = ("tyxe.testing", "tyxe.plotting", "tyxe.integrations")  # extras, and suites for tests
_WRAPPERS = ("contextlib", "functools", "tyxe.check")  # whose frames are between call and callee


class Call(NamedTuple):
    """A call that works: what is called, with which object and arguments."""

    name: str
    function: Callable[..., Any]
    given: dict[str, Any]
    defaults: dict[str, Any]

    def again(self, argument: str, value: Any) -> Any:
        """Make the call with another value of an argument."""
        given = {n: v if n == argument else _copy(v) for n, v in self.given.items()}
        signature = inspect.signature(self.function)
        bound = signature.bind_partial()
        bound.arguments.update(given | {argument: value})
        return self.function(*bound.args, **bound.kwargs)


def _copy(value: Any) -> Any:
    try:
        copied = copy.deepcopy(value)
    except Exception:
        return value
    # Some copies are of a simpler class, which has not the method that is called.
    return copied if type(copied) is type(value) else value


def _modules() -> list[types.ModuleType]:
    names = [m.name for m in pkgutil.walk_packages(tyxe.__path__, "tyxe.")]
    return [tyxe, *(importlib.import_module(n) for n in names if not n.startswith(_SKIPPED))]


def _public() -> dict[types.CodeType, tuple[str, Callable[..., Any]]]:
    """Return what is public by the code that runs for it."""
    found: dict[types.CodeType, tuple[str, Callable[..., Any]]] = {}
    for module in _modules():
        for name in getattr(module, "__all__", ()):
            one = getattr(module, name)
            parts = {name: one}
            if inspect.isclass(one):
                methods = dict(inspect.getmembers(one, inspect.isfunction))
                own = {n: f for n, f in methods.items() if f.__module__.startswith("tyxe")}
                parts = {f"{name}.{n}": f for n, f in own.items() if not n.startswith("_")}
                parts[name] = one
            for title, part in parts.items():
                code = getattr(inspect.unwrap(_code_of(part)), "__code__", None)
                if code is not None and not inspect.isabstract(part):
                    found.setdefault(code, (title, part))
    return found


def _code_of(part: Any) -> Any:
    return part.__init__ if inspect.isclass(part) else part


def calls() -> list[Call]:
    """Return the first call of everything public in the examples of docstrings."""
    public, found = _public(), dict[str, Call]()

    def look(frame: types.FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code not in public:
            return
        outer = frame.f_back
        while outer is not None and outer.f_globals.get("__name__") in _WRAPPERS:
            outer = outer.f_back
        name, function = public[frame.f_code]
        if name in found or outer is None or "<doctest" not in outer.f_code.co_filename:
            return
        signature = inspect.signature(function)
        given = {n: frame.f_locals[n] for n in signature.parameters if n in frame.f_locals}
        if len(given) < len(signature.parameters):
            return
        kept = {n: _copy(v) for n, v in given.items()}
        defaults = {n: p.default for n, p in signature.parameters.items()}
        found[name] = Call(name, function, kept, defaults)

    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    finder = doctest.DocTestFinder(exclude_empty=True)
    with _quietly():
        for module in _modules():
            for test in finder.find(module):
                if test.examples:
                    test.globs.update(torch=torch, nn=torch.nn, tyxe=tyxe)
                    before = sys.gettrace()
                    sys.settrace(look)
                    try:
                        runner.run(test, out=lambda _: None, clear_globs=False)
                    finally:
                        sys.settrace(before)
    return [found[name] for name in sorted(found)]


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def is_obscure(error: BaseException, argument: str) -> bool:
    """Whether a message neither names the argument nor is the package's word on what it expected.

    A part of the name, or its plural, is not the name. What PyTorch expected is not what we do.
    """
    names_it = re.search(rf"\b{re.escape(argument)}\b", str(error)) is not None
    return not names_it and not (is_clear(error) and "expected" in str(error))


class _TooLong(BaseException):
    """A call that takes too long."""


def _raise(*_: Any) -> None:
    raise _TooLong


def attempt(call: Call, argument: str, bad: str) -> tuple[str, str]:
    """Make a call with a bad argument: `works`, `clear`, `obscure` or `long`, and the message."""
    before = signal.signal(signal.SIGALRM, _raise)
    signal.alarm(SECONDS)
    try:
        pyro.set_rng_seed(0)
        with _quietly():
            result = call.again(argument, BAD[bad]())
            if hasattr(result, "__next__"):
                next(result, None)
        return "works", ""
    except _TooLong:
        return "long", ""
    except Exception as error:
        kind = "obscure" if is_obscure(error, argument) else "clear"
        return kind, f"{type(error).__name__}: {str(error)[:160]}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def trials() -> list[tuple[Call, str, str]]:
    """Return every call with every argument and every bad value, unless that is its default."""
    found = []
    for call in calls():
        parameters = inspect.signature(call.function).parameters
        for name, parameter in parameters.items():
            if name in ("self", "cls") or parameter.kind in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            ):
                continue
            for bad in BAD:
                if not (bad == "None" and parameter.default is None):
                    found.append((call, name, bad))
    return found


def run(count: int, seed: int = 0) -> dict[str, Any]:
    """Try bad arguments, at most so many, and return how many errors help and how many do not."""
    every = trials()
    random.Random(seed).shuffle(every)
    outcomes: Counter[str] = Counter(dict.fromkeys(("works", "clear", "obscure", "long"), 0))
    found = []
    # A path may be among the arguments.
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for call, argument, bad in every[:count]:
            kind, why = attempt(call, argument, bad)
            outcomes[kind] += 1
            if kind == "obscure":
                found.append(f"{call.name}({argument}={bad}): {why}")
    return {"seed": seed, "callables": len({c.name for c, *_ in every}), **outcomes, "found": found}
