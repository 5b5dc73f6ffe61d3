"""Imports run downward, as `LEVELS` says, and a step passes the files that a page names.

Every import counts, those for type checking too: a name that is only written down is known all the
same.
"""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from docs.floors import PICTURE, Import, package_of, picture, read_imports

# What all others may import.
COMMON = "threads processes autocast data files program rng util check errors"
LEVELS = (
    ("linalg", "distributions", *COMMON.split()),
    ("poutine", "priors", "likelihoods", "guides", "samplers"),
    ("curvature", "optim"),
    ("predictive", "laplace"),
    ("bnn",),
    ("calibration", "continual", "diagnostics"),
    ("integrations",),
)
LEVEL = {package: level for level, packages in enumerate(LEVELS) for package in packages}
# A leaf, and which others of tyxe it may import.
LEAVES: dict[str, tuple[str, ...]] = {"metrics": ("check",), "plotting": ("check", "metrics")}
# What scores and draws predictions by them.
READS_LEAVES = ("calibration", "diagnostics", "integrations")
# Behind extras: not imported with the package.
BY_NAME = "integrations"
# Outside: imports anything, is imported by nothing.
OUTSIDE = "testing"
PACKAGE = Path(__file__).parents[1] / "tyxe"
# The package's own __init__, which gathers the rest.
ROOT = ""
# Not installed everywhere, hence allowed to be imported late.
OPTIONAL = ("arviz", "matplotlib", "sklearn", "torchvision")


IMPORTS = functools.cache(lambda: read_imports(PACKAGE))


def test_tyxe_imports_run_downward() -> None:
    assert IMPORTS()
    assert violations(IMPORTS()) == []


def test_every_module_is_imported_with_the_package() -> None:
    """A module that nothing imports would leave its registrations out without a word."""
    modules = {m for m in IMPORTS() if package_of(m) not in (OUTSIDE, BY_NAME)}
    code = "import sys, tyxe; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert modules - imported == set()
    assert {m for m in imported if m.startswith("tyxe.") and package_of(m) == BY_NAME} == set()


def test_the_picture_of_the_floors_is_that_of_the_imports() -> None:
    assert PICTURE.read_text() == picture(), "run python docs/floors.py"


# --- devices ------------------------------------------------------------------------------------

FACTORIES = {"arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint"}
FACTORIES |= {"empty_strided", "normal", "randn", "randperm", "scalar_tensor"}
FACTORIES |= {"sparse_coo_tensor", "tensor", "tril_indices", "triu_indices", "zeros"}


def without_device(source: str) -> list[int]:
    """Return the lines on which a function of torch makes a tensor on no device that is named."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and call.func.attr in FACTORIES
        and not {keyword.arg for keyword in call.keywords} & {"device", None}
    ]


def tensors_without_device(folder: Path) -> list[str]:
    """Return file and line of each such call in a folder's files, of which some share a name."""
    return [f"{p}:{n}" for p in folder.rglob("*.py") for n in without_device(p.read_text())]


def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    assert tensors_without_device(PACKAGE) == []


def test_a_tensor_without_a_device_is_found(tmp_path: Path) -> None:
    named = 'torch.zeros(2, device="cpu")\ntorch.ones(2, **like)\nx.new_zeros(2)'
    assert without_device(f"{named}\ntorch.zeros(2)") == [4]
    for name, source in (("a", "torch.triu_indices(2, 2)"), ("b", named)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "base.py").write_text(source)
    assert tensors_without_device(tmp_path) == [f"{tmp_path / 'a' / 'base.py'}:1"]


# --- a step's walk ------------------------------------------------------------------------------

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"


def walk_of_a_step() -> set[str]:
    """Return the files of tyxe whose functions run in the third step of a fit."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(path.relative_to(PACKAGE).as_posix())

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = torch.randn(10, 4), torch.arange(10) % 3
        for step in range(4):
            sys.setprofile(note if step == 2 else None)
            yield x, y

    net = nn.Sequential(nn.Linear(4, 20), nn.ReLU(), nn.Linear(20, 3))
    normal, categorical = tyxe.priors.IIDPrior(dist.Normal(0, 1)), tyxe.likelihoods.Categorical(40)
    bnn = tyxe.VariationalBNN(net, normal, categorical, tyxe.guides.AutoNormal)
    try:
        bnn.fit(batches(), torch.optim.Adam, 1)
    finally:
        sys.setprofile(None)
    return files


def test_a_training_step_passes_the_files_that_the_page_says() -> None:
    table = PAGE.read_text().split("<!-- begin of the walk")[1].split("<!-- end of the walk")[0]
    named = {name for name in re.findall(r"`([\w/]+\.py)`", table) if not name.startswith("tests/")}
    assert walk_of_a_step() == named
    assert len(named) <= 20


# --- judging ------------------------------------------------------------------------------------


def violations(imports: dict[str, list[Import]]) -> list[str]:
    """Return one line for everything that is not as the module docstring says."""
    every = [item for items in imports.values() for item in items]
    inside = [item for item in every if item.target.split(".")[0] == "tyxe"]
    return [
        *unplaced(imports),
        *(f"{item}: {wrong}" for item in inside if (wrong := wrong_direction(item))),
        *(f"{item} in a function" for item in every if late(item)),
        *cycles("modules", graph_of((item.source, item.target) for item in inside)),
        *cycles(
            "packages",
            graph_of((package_of(item.source), package_of(item.target)) for item in inside),
        ),
        *(f"linalg reaches Pyro: {item}" for item in linalg_pyro(every)),
    ]


def unplaced(modules: dict[str, list[Import]]) -> Iterator[str]:
    known = {ROOT, OUTSIDE, *LEVEL, *LEAVES}
    for package in sorted({package_of(module) for module in modules} - known):
        yield f"tyxe.{package} has no place: add it to LEVELS or LEAVES"


def wrong_direction(item: Import) -> str | None:
    source, target = package_of(item.source), package_of(item.target)
    if source in (OUTSIDE, target):
        return None
    if target == OUTSIDE:
        return "nothing imports tyxe.testing"
    if source == ROOT:
        return None
    if target == ROOT:
        return "import from the module that defines the name"
    if source in LEAVES:
        return None if target in LEAVES[source] else f"{source} is a leaf"
    if target in LEAVES and source not in READS_LEAVES:
        return f"{target} is a leaf"
    if source in LEVEL and target in LEVEL and LEVEL[target] > LEVEL[source]:
        return f"{target} is above {source}"
    return None


def late(item: Import) -> bool:
    return item.in_function and item.target.split(".")[0] not in OPTIONAL


def graph_of(edges: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    graph = defaultdict(set)
    for source, target in edges:
        # The modules of a package import one another: that is no edge between packages.
        if source != target:
            graph[source].add(target)
    return graph


def cycles(kind: str, graph: dict[str, set[str]]) -> Iterator[str]:
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        # graphlib lists each node before the one that depends on it.
        yield f"cycle of {kind}: " + " -> ".join(name or "tyxe" for name in reversed(error.args[1]))


def linalg_pyro(imports: list[Import]) -> Iterator[Import]:
    """Yield imports of Pyro in linalg and in all that linalg imports."""
    graph = graph_of((item.source, item.target) for item in imports)
    reached: set[str] = set()
    queue = [module for module in graph if package_of(module) == "linalg"]
    while queue:
        module = queue.pop()
        if module not in reached:
            reached.add(module)
            queue.extend(graph.get(module, ()))
    for item in imports:
        if item.source in reached and item.target.split(".")[0] == "pyro":
            yield item


# --- the check itself -----------------------------------------------------------------------------

SOUND = {
    "__init__.py": "from tyxe import plotting, priors\nfrom tyxe.bnn.base import BNN",
    "errors.py": "",
    "util.py": "import pyro\nfrom tyxe.errors import TyxeWarning",
    "metrics.py": "import torch",
    "plotting.py": "from . import metrics\ndef plot():\n    import matplotlib.pyplot as plt",
    "linalg/__init__.py": "from tyxe.linalg.matrices import Dense",
    "linalg/dense.py": "import torch\nfrom tyxe.errors import TyxeWarning",
    "priors/__init__.py": "from .iid import IIDPrior\nfrom . import base",
    "priors/base.py": "from .. import util",
    "priors/iid.py": "from .base import Prior\nfrom ..util import fan_in_fan_out",
    "guides/__init__.py": "from tyxe.priors import IIDPrior",
    "bnn/__init__.py": "",
    "bnn/base.py": "from tyxe import guides, priors",
    "testing/__init__.py": "import tyxe\nfrom tyxe import bnn, metrics",
}

FAULTS = {
    "upward": ({"priors/base.py": "import tyxe.bnn.base"}, "bnn is above priors"),
    "upward, relative": ({"util.py": "from .priors import base"}, "priors is above util"),
    "upward, for types": (
        {"errors.py": "if TYPE_CHECKING:\n    from tyxe.guides import x"},
        "guides is above errors",
    ),
    "the root": ({"util.py": "from tyxe import TyxeWarning"}, "the module that defines the name"),
    "imports a leaf": ({"bnn/base.py": "from tyxe import metrics"}, "metrics is a leaf"),
    "a leaf imports": ({"plotting.py": "from tyxe import bnn"}, "plotting is a leaf"),
    "testing": ({"bnn/base.py": "from tyxe.testing import x"}, "nothing imports tyxe.testing"),
    "cycle through __init__": (
        {"priors/base.py": "from tyxe.priors import IIDPrior"},
        "cycle of modules",
    ),
    # No module of this one is in a cycle: the packages are.
    "cycle of packages": (
        {"priors/mapping.py": "import tyxe.guides.init", "guides/init.py": ""},
        "cycle of packages",
    ),
    "in a method": (
        {"util.py": "class A:\n    async def f(self):\n        if 1:\n            import copy"},
        "in a function",
    ),
    "linalg, Pyro through util": ({"linalg/dense.py": "from tyxe import util"}, "reaches Pyro"),
    "unplaced": ({"extra/__init__.py": ""}, "tyxe.extra has no place"),
}


def judge(files: dict[str, str], directory: Path) -> list[str]:
    for name, source in files.items():
        path = directory / "tyxe" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return violations(read_imports(directory / "tyxe"))


def test_a_sound_tree_passes(tmp_path: Path) -> None:
    assert judge(SOUND, tmp_path) == []


@pytest.mark.parametrize(("files", "expected"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_found(files: dict[str, str], expected: str, tmp_path: Path) -> None:
    assert any(expected in line for line in judge(SOUND | files, tmp_path))
