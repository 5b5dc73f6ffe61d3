"""Where the benchmarks lie, and what imports one of their modules or runs one of their scripts."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
Helper = Callable[[str], ModuleType]
RunScript = Callable[..., None]
