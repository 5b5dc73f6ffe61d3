"""Run the tests of what a change touches, those that are nearest first: `make check`.

    python -m tests.touched [pytest's options]

A change is what differs from the last commit that `main` shares with this branch, files that git
does not know included; on `main` it is what is not committed. A test file belongs to it

- if it is changed itself, or imports a changed module of `tests/`, `experiments/`, `benchmarks/`;
- if it imports a changed module of `tyxe` by name, or has its name: `tests/guides/test_normal*`
  for `tyxe/guides/normal.py`;
- and then, if there is time, if it is in the folder of that module, here `tests/guides`.

Tests that have not begun when the time is over are skipped, and the summary says how many.
"""

import ast
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
UNTIL = "TYXE_CHECK_UNTIL"  # seconds since the epoch, of which `make check` counts the linters' too
SECONDS = 100  # where that is not given; the last test may run on
# Without tests of their own name or folder.
OTHERS = {
    "examples": ["tests/test_examples.py"],
    "notebooks": ["tests/test_examples.py"],
    "docs": ["tests/test_docs.py", "tests/test_site.py"],
    "README.md": ["tests/test_docs.py"],
    "experiments": ["tests/experiments/test_records.py", "tests/test_docs.py"],
    "benchmarks": ["tests/benchmarks/test_scripts.py"],
    "pyproject.toml": ["tests/test_release.py"],
    "Makefile": ["tests/test_release.py"],
}
ALWAYS = ["tests/test_architecture.py"]


def git(*arguments: str, root: Path = ROOT) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return done.stdout


def changed(root: Path = ROOT) -> list[str]:
    """Return the paths of a change, relative to the root; what was deleted is not among them."""
    base = git("merge-base", "HEAD", "main", root=root).strip() or "HEAD"
    paths = git("diff", "--name-only", base, root=root).splitlines()
    paths += git("ls-files", "--others", "--exclude-standard", root=root).splitlines()
    return [path for path in dict.fromkeys(paths) if (root / path).is_file()]


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the names of what a file imports: modules, and what it takes from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def names_of(path: str) -> set[str]:
    """Return the names by which a file can be imported."""
    parts = Path(path).with_suffix("").parts
    is_script = parts[0] in ("experiments", "benchmarks")
    return {".".join(parts), *([parts[-1]] if is_script else [])}


def importers(paths: list[str], root: Path = ROOT) -> list[str]:
    """Return the test files among some files, and those that import one, by helpers as well."""
    folders = ("tests", "experiments", "benchmarks")
    files = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    known = {str(path.relative_to(root)): imported(path) for path in files}
    reached = dict.fromkeys(path for path in paths if path.endswith(".py"))
    more = reached
    while more:
        names = {name for path in more for name in names_of(path)}
        more = {path: None for path in known.keys() - reached.keys() if known[path] & names}
        reached |= dict(sorted(more.items()))
    return [path for path in reached if Path(path).name.startswith("test_")]


def select(paths: list[str], root: Path = ROOT) -> list[str]:
    """Return the arguments of pytest for some changed files: the nearest tests come first."""
    near, far = importers(paths, root), []
    for path in paths:
        parts, stem = Path(path).parts, Path(path).stem
        far += OTHERS.get(parts[0], [])
        folder = Path("tests", *parts[1:-1])
        beside = [str(p.relative_to(root)) for p in sorted((root / folder).glob("test_*.py"))]
        if parts[0] == "tyxe" and path.endswith(".py"):
            near += [name for name in beside if Path(name).name.startswith(f"test_{stem}")]
            near.append(path)  # its docstrings
            far += beside if folder != Path("tests") else []
        elif parts[0] == "tests" and stem == "conftest":
            far += beside
    found = dict.fromkeys([*near, *ALWAYS, *far])
    return [name for name in found if (root / name).exists()]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what would begin too late; this module is a plugin of the run that it starts."""
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip("the time of `make check` is over: `make test` runs it")


def main(options: list[str]) -> int:
    paths = changed()
    tests = select(paths)
    print(f"{len(paths)} changed files; tests: {' '.join(tests)}", flush=True)
    environment = {UNTIL: str(time.time() + SECONDS), **os.environ}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.touched", *options, *tests]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
