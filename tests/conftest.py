"""What every test gets: a seed, one thread, and a check of Pyro's global parameter store."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import hypothesis
import pyro
import pytest
import torch

from tyxe.errors import UNREAD

# Of tests that run in an interpreter of their own: why, by marker.
APART = ("forks", "device")
REASON = os.environ.get("TYXE_APART")
TOGETHER = pytest.StashKey[list[str]]()

if REASON == "device":
    # Before autograd first runs, which knows the devices of that moment for good.
    from tests.soak import pretend

    pretend.register()

# Figures are drawn, never shown: set here so that examples run as subprocesses inherit it.
os.environ.setdefault("MPLBACKEND", "Agg")

# The contract suites and oracles assert too: without this their failures would not show the values.
pytest.register_assert_rewrite("tyxe.testing", "tests.contracts", "tests.oracles")

# The same examples on every machine; a first call that compiles or imports is not a failure.
hypothesis.settings.register_profile("tyxe", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tyxe")

torch.set_num_threads(1)

# A shell starts what runs in its background deaf to Ctrl-C, for which some tests wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _reason(item: pytest.Item) -> str | None:
    """Return why a test runs in an interpreter of its own, unless this is one."""
    found = [name for name in APART if item.get_closest_marker(name) is not None]
    return found[0] if found and REASON is None else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the first such test of a module stand for all of them, which share an interpreter."""
    first: dict[tuple[object, str], pytest.Item] = {}
    for item in list(items):
        if (reason := _reason(item)) is not None:
            leader = first.setdefault((item.path, reason), item)
            leader.stash.setdefault(TOGETHER, []).append(item.nodeid)
            if leader is not item:
                items.remove(item)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests that fork, or that pretend to have a device, in an interpreter of their own.

    Of the threads that other tests have started, such as the compiler's, a forked process has the
    locks and not the threads, and may wait for them for ever. A process that has registered another
    device can neither fork after a backward nor differentiate on a GPU.
    """
    reason = _reason(pyfuncitem)
    if reason is None:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
    root, environment = pyfuncitem.config.rootpath, {**os.environ, "TYXE_APART": reason}
    done = subprocess.run(
        [*command, *pyfuncitem.stash[TOGETHER]],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seed Python, NumPy and torch: the same numbers alone and in the suite."""
    pyro.set_rng_seed(0)


@pytest.fixture(autouse=True)
def empty_param_store() -> Iterator[None]:
    """Fail a test that leaves anything in Pyro's global parameter store: two BNNs never meet."""
    yield
    names = sorted(pyro.get_param_store().keys())
    # Cleared before the assertion, or one offender would fail every test after it.
    pyro.clear_param_store()
    assert names == [], f"left in Pyro's global parameter store: {names}"


@pytest.fixture(autouse=True)
def checked_numbers() -> Iterator[None]:
    """Fail a test after which numbers are no longer checked, on which later tests rely."""
    yield
    unread = UNREAD.get()
    UNREAD.set(False)
    assert not unread


@pytest.fixture
def double() -> Iterator[None]:
    """Make float64 the default: `pytestmark = pytest.mark.usefixtures("double")` for a module."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
