"""Files of every wrapper with random damage: each is refused, and changes nothing."""

from __future__ import annotations

import collections
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch

import tyxe
from tests.soak.subjects import SUBJECTS, centre_of, digest, fit, fitted, loop_of
from tyxe import files

SEAL = files._SEAL


# --------------------------------------------------------------------------- damages


def _flip(data: bytearray, chance: random.Random) -> None:
    """Flip some bits, as often in the seal, which is short, as elsewhere."""
    for _ in range(chance.choice((1, 1, 2, 20))):
        length = chance.choice((SEAL, len(data)))
        data[-1 - chance.randrange(length)] ^= 1 << chance.randrange(8)


def _cut(data: bytearray, chance: random.Random) -> None:
    del data[chance.randrange(len(data)) :]


def _insert(data: bytearray, chance: random.Random) -> None:
    at = chance.choice((0, len(data), chance.randrange(len(data))))
    data[at:at] = chance.randbytes(chance.choice((1, 8, 512)))


def _drop(data: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(data))
    del data[at : at + chance.choice((1, 8, 512))]


def _swap(data: bytearray, chance: random.Random) -> None:
    """Exchange two blocks of a disk, or of half its size until they differ."""
    size = 512
    while size:
        places = range(0, len(data) - size + 1, size)
        if len(places) > 1:
            a, b = (slice(at, at + size) for at in chance.sample(places, 2))
            if data[a] != data[b]:
                data[a], data[b] = data[b], data[a]
                return
        size //= 2


def _zero(data: bytearray, chance: random.Random) -> None:
    """Zero a block, as a disk does that has the length of a file and not its content."""
    size = chance.choice((64, 512, len(data)))
    at = chance.randrange(0, len(data), size)
    data[at : at + size] = bytes(len(data[at : at + size]))


DAMAGES: dict[str, Callable[[bytearray, random.Random], None]] = {
    "flipped bits": _flip,
    "a cut": _cut,
    "inserted bytes": _insert,
    "dropped bytes": _drop,
    "swapped blocks": _swap,
    "zeros": _zero,
}


def damaged(data: bytes, name: str, chance: random.Random) -> bytes:
    """Return a file's bytes with some damage, which changes them."""
    found = bytearray(data)
    while found == data:
        DAMAGES[name](found, chance)
    return bytes(found)


# --------------------------------------------------------------------------- what a load does


class _File:
    """A file of a subject, how it is loaded, and all that a load could change."""

    def __init__(self, bnn: Any, path: Path, load: Callable[[], Any], loop: Any) -> None:
        self.bnn, self.path, self.load, self.loop = bnn, path, load, loop
        self.content = path.read_bytes()

    def state(self) -> list[Any]:
        """Return the state, the prediction, the checkpoint that waits for a fit, and the loop's."""
        bnn = self.bnn
        pending = bnn.checkpoint() if hasattr(bnn, "checkpoint") else None
        parts = (bnn.state_dict(), centre_of(bnn), pending, self.loop.state_dict())
        return [digest(part) for part in (*parts, torch.get_rng_state())]


def _files(name: str, folder: Path) -> list[_File]:
    """Return a file of a BNN, one of its training if it has one, and one of its loop."""
    bnn, found = fitted(name), []
    kinds = (False, True) if hasattr(bnn, "checkpoint") else (False,)
    for training in kinds:
        path = folder / f"{name}-{training}.tyxe"
        bnn.save(path, training)
        found.append(_File(bnn, path, lambda path=path: bnn.load(path), loop_of(bnn)))
    path, loop = folder / f"{name}.loop", loop_of(bnn)
    loop_of(bnn).run(path)
    found.append(_File(bnn, path, lambda: loop.run(path), loop))
    # What was in the files is now another state, so that a load would be seen.
    fit(bnn)
    if True in kinds:
        # A checkpoint waits for the next fit: a refused file must leave it.
        bnn.load_checkpoint(bnn.checkpoint())
    return found


def accepted(file: _File, name: str, chance: random.Random) -> str | None:
    """Load a damaged file; return what went wrong."""
    before = file.state()
    file.path.write_bytes(damaged(file.content, name, chance))
    try:
        file.load()
    except ValueError:
        return None if file.state() == before else "the state has changed"
    except Exception as error:
        return f"another error: {type(error).__name__}"
    return "it was accepted"


def run(count: int, seed: int) -> dict[str, int]:
    """Damage so many files, by turns of each wrapper; return the figures."""
    pyro.set_rng_seed(seed)
    chance, found = random.Random(seed), collections.Counter[str](accepted=0)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", tyxe.TyxeWarning)
        all_files = [file for name in SUBJECTS for file in _files(name, Path(folder))]
        for number in range(count):
            problem = accepted(
                all_files[number % len(all_files)], chance.choice([*DAMAGES]), chance
            )
            found["damaged files"] += 1
            found["accepted"] += problem is not None
            if problem is not None:
                found[problem] += 1
    return dict(found)
