"""SIGKILL of trainings that save, and disks that are full: what is in the file then."""

from __future__ import annotations

import collections
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import torch

from tests.soak.subjects import ADAM, BATCHES, SUBJECTS, centre_of, digest
from tyxe import files

HOW = ("time", "call", "time", "bytes")
WRAPPERS = ("VariationalBNN", "LaplaceBNN")


class Trial(NamedTuple):
    """A training that is killed: `how` in HOW, and after `saves` whole saves and a bit."""

    wrapper: str
    hidden: int
    how: str
    saves: int
    position: float
    seed: int


# --------------------------------------------------------------------------- the child


class _KillsItself:
    """Kills its process at a call inside of the write of a file, given as a part of all calls."""

    def __init__(self, at: int = -1) -> None:
        self.count, self.at = 0, at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def _save(bnn: Any, path: Path, trial: Trial, last: bool, length: list[int]) -> None:
    """Save a training, and in the last one be killed; the first is measured for it."""
    watch = _KillsItself(max(1, int(trial.position * length[0])) if last and length else -1)
    if last and trial.how == "bytes":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which ends the process
        limit = int(trial.position * path.stat().st_size)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if trial.how == "call":
        sys.setprofile(watch)
    bnn.save(path, training=True)
    sys.setprofile(None)
    length[:] = [watch.count]


def _train(trial: Trial, path: Path, reports: Connection) -> None:
    """Train and save without end; report a digest before and after each save."""
    torch.set_num_threads(1)
    pyro.set_rng_seed(trial.seed)
    bnn, length = SUBJECTS[trial.wrapper](trial.hidden), []
    for number in itertools.count():
        bnn.fit(BATCHES, ADAM, 1, progress=False)
        reports.send_bytes(json.dumps(["begins", digest(bnn.checkpoint())]).encode())
        _save(bnn, path, trial, number == trial.saves, length)
        reports.send_bytes(json.dumps(["ends", number]).encode())


# --------------------------------------------------------------------------- the parent


def _reports(reports: Connection) -> list[tuple[str, Any]]:
    found = []
    try:
        while True:
            found.append(tuple(json.loads(reports.recv_bytes())))
    except EOFError:
        return found


def _killed(trial: Trial, path: Path) -> list[tuple[str, Any]]:
    """Run a training until it is killed; return what it has reported."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_train, args=(trial, path, theirs), daemon=True)
    child.start()
    theirs.close()
    first = []
    if trial.how == "time":
        while len(first) < 2 * trial.saves:
            first.append(tuple(json.loads(ours.recv_bytes())))
        time.sleep(trial.position * 0.05)
        child.kill()
    found = first + _reports(ours)
    child.join()
    assert child.exitcode in (-signal.SIGKILL, -signal.SIGXFSZ), child.exitcode
    return found


def fate_of(trial: Trial) -> tuple[str, str]:
    """Kill a training; return where it was, `saving` or not, and what its file is then.

    That is `newest`, the `one before`, whose successor was not whole yet, or `lost`, with why.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bnn.tyxe"
        reports = _killed(trial, path)
        begun = [value for what, value in reports if what == "begins"]
        saving = len(begun) > sum(what == "ends" for what, _ in reports)
        where = "saving" if saving else "elsewhere"
        if not path.exists():
            return where, "none yet" if saving and len(begun) == 1 else "lost: there is no file"
        bnn = SUBJECTS[trial.wrapper](trial.hidden)
        try:
            bnn.load(path)
        except (ValueError, RuntimeError) as error:
            return where, f"lost: {error}"
        found = digest(files.read(path)["content"])
        if found == begun[-1]:
            fate = "newest"
        elif saving and found == begun[-2]:
            fate = "one before"
        else:
            return where, "lost: the file is none of the last two"
        bnn.fit(BATCHES, ADAM, 1, progress=False)
        if bnn.checkpoint()["epoch"] != 2 or not centre_of(bnn).isfinite().all():
            return where, "lost: the training does not go on"
        return where, fate


def _limited(path: Path, limit: int, reports: Connection) -> None:
    """Save, save again where there is no room, and once more where there is."""
    torch.set_num_threads(1)
    bnn, said = SUBJECTS["VariationalBNN"](), []
    for room in (resource.RLIM_INFINITY, limit, resource.RLIM_INFINITY):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        bnn.fit(BATCHES, ADAM, 1, progress=False)
        taken, error = digest(bnn.checkpoint()), ""
        try:
            bnn.save(path, training=True)
        except OSError as found:
            error = type(found).__name__
        in_file = digest(files.read(path)["content"])
        said.append([error, taken, in_file, len(list(path.parent.iterdir()))])
    reports.send_bytes(json.dumps(said).encode())


def full_disk(limit: int) -> list[str]:
    """Save where files have room for so many bytes; return what went wrong."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bnn.tyxe"
        child = context.Process(target=_limited, args=(path, limit, theirs), daemon=True)
        child.start()
        theirs.close()
        said = json.loads(ours.recv_bytes())
        child.join()
    first, full, again = said
    wrong = {
        "no error": full[0] != "OSError",
        "the last good file is gone": full[2] != first[1],
        "a part of a file is left": {one[3] for one in said} != {1},
        "no file can be written afterwards": again[0] != "" or again[2] != again[1],
    }
    return [what for what, is_so in wrong.items() if is_so]


def run(count: int, seed: int) -> dict[str, int]:
    """Kill so many trainings, half of them in writes, and fill the disk a tenth as often."""
    chance, found = random.Random(seed), collections.Counter[str](lost=0)
    for number in range(count):
        how, saves, position = HOW[number % 4], chance.randint(1, 3), chance.random()
        size = chance.choice((3, 30, 300))
        trial = Trial(WRAPPERS[number % 8 // 4], size, how, saves, position, number)
        where, fate = fate_of(trial)
        found["kills"] += 1
        found["aimed at writes"] += how != "time"
        found["killed while saving"] += where == "saving"
        found["lost" if fate.startswith("lost") else fate] += 1
    for _ in range(-(-count // 10)):
        wrong = full_disk(chance.randint(0, 5000))
        found["full disks"] += 1
        found["lost"] += bool(wrong)
    return dict(found)
