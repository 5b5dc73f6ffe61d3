"""Tests as suites: their comparisons in full, and how many pass."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import warnings
from itertools import islice
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.soak import test_modes

FOLDER = Path(__file__).resolve().parents[1] / "bnn"
OF_PROCESSES = [FOLDER / f"test_{name}.py" for name in ("parallel", "sharded")]


def modes(count: int, seed: int = 0) -> dict[str, Any]:
    """Compare the first `count` wrappers and their uses in every mode with those outside."""
    found, ways = list[str](), len(test_modes.WAYS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, case in islice(test_modes.CASES.items(), count):
            found += [f"{name}: {way}" for way in test_modes.differing(case)]
    return {"uses": count, "comparisons": count * ways, "different": len(found), "found": found}


def processes(count: int, seed: int = 0) -> dict[str, Any]:
    """Run the tests of the first `count` files in which fits run in several processes."""
    files = map(str, OF_PROCESSES[:count])
    with tempfile.TemporaryDirectory() as folder:
        told = f"{folder}/told.xml"
        # In an interpreter of its own, as pytest rewrites modules when it imports them.
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={told}"]
        subprocess.run([*command, *files], check=False, stdout=subprocess.DEVNULL)
        cases = [*ElementTree.parse(told).iter("testcase")]
    kinds = "failure", "error", "skipped"
    found = [str(c.get("name")) for c in cases if any(c.find(kind) is not None for kind in kinds)]
    return {"passed": len(cases) - len(found), "not passed": len(found), "found": found}
