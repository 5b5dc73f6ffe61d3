"""`import dgl` on a torch that is newer than DGL's last wheel: use `from _dgl import dgl`.

DGL 2.1.0, the last release on the package index, was built for torch 2.2. Two of its imports fail
today, and neither matters to message passing:

- `dgl.graphbolt`, its data loading, loads a library for exactly its torch: an empty module takes
  its place, always (`dgl.dataloading` imports, and nothing of graphbolt works);
- `setuptools.extern.packaging`, a vendored copy that setuptools has dropped: `packaging` itself
  takes its place, where it is missing.

Where DGL is loaded already nothing is put into `sys.modules`.
"""

import importlib.util
import os
import sys
from types import ModuleType


def _stand_in(name, **attributes):
    module = ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module


def _prepare():
    import packaging.version

    # Else DGL writes a file of settings into the home folder.
    os.environ.setdefault("DGLBACKEND", "pytorch")
    try:
        import setuptools.extern.packaging  # noqa: F401
    except ImportError:
        _stand_in("setuptools.extern.packaging", version=packaging.version)
    _stand_in("dgl.graphbolt")


if "dgl" not in sys.modules and importlib.util.find_spec("dgl") is not None:
    _prepare()

import dgl  # noqa: E402

__all__ = ["dgl"]
