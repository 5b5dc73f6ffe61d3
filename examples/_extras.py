"""Imported first by every example: a missing library is one line, naming the extra to install."""

import sys

LIBRARIES = ["matplotlib", "PIL", "sklearn", "torchvision"]


def say(kind, error, trace):
    """Print an uncaught exception: in one line if `[examples]` would have prevented it."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if issubclass(kind, ModuleNotFoundError) and name in LIBRARIES:
        print(f'{name} is not installed: pip install -e ".[examples]"', file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = say
