"""What became of a combination: `works`, `clear`, `obscure` or `silent`."""

import ast
import functools
import traceback
from dataclasses import dataclass
from pathlib import Path

import tyxe

KINDS = ("works", "clear", "obscure", "silent")
PACKAGE = Path(tyxe.__file__).parent
ERRORS = (TypeError, ValueError, RuntimeError, NotImplementedError)
# A sentence has a subject, what is wrong with it, and why.
FEWEST_WORDS = 5
DUMPS = ("Trace Shapes:", "Sample Sites:")


@dataclass(frozen=True)
class Trial:
    """What was seen of a combination: the error that ended it, and what checks found."""

    error: BaseException | None = None
    wrong: tuple[str, ...] = ()


def classify(trial: Trial) -> tuple[str, str]:
    """Return the kind of outcome, and a line that says why.

    `works`: no error, and no check found anything. `clear`: the package raised an error that helps.
    `obscure`: another error. `silent`: a check found something wrong, whether there was an error
    or not.
    """
    error = trial.error
    if trial.wrong:
        after = "" if error is None else f" (after {_line(error)})"
        return "silent", "; ".join(trial.wrong) + after
    if error is None:
        return "works", ""
    return "clear" if is_clear(error) else "obscure", _line(error)


def is_clear(error: BaseException) -> bool:
    """Whether the package itself raised an error, of a usual type and with a message."""
    message = str(error)
    return (
        isinstance(error, ERRORS)
        and len(message.split()) >= FEWEST_WORDS
        and not any(dump in message for dump in DUMPS)
        and _raised_in_package(error)
    )


def _raised_in_package(error: BaseException) -> bool:
    """Whether the frame that raised is at a `raise` of the package.

    An error of compiled code has the frame of its caller, which is at no `raise`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not Path(frames[-1].filename).is_relative_to(PACKAGE):
        return False
    return frames[-1].lineno in _raising_lines(frames[-1].filename)


@functools.cache
def _raising_lines(filename: str) -> frozenset[int]:
    tree = ast.parse(Path(filename).read_text())
    raises = (node for node in ast.walk(tree) if isinstance(node, ast.Raise))
    return frozenset(n for node in raises for n in range(node.lineno, node.end_lineno + 1))


def _line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]" if frames else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{where}"
