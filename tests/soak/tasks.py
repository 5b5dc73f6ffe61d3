"""Tasks of one event loop, each inside of a handler or a held draw over awaits, which is its own.

`run(count, seed)` runs `count` loops of sixteen tasks.
"""

from __future__ import annotations

import asyncio
import random
import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

import tyxe
from tests.soak.subjects import X, fitted
from tyxe.threads import handlers

TASKS, LOOKS = 16, 3


class _Loop:
    """The tasks of one event loop, on one BNN for handlers and one that holds draws."""

    def __init__(self, chance: random.Random, bnn: Any, module: Any) -> None:
        self._chance, self._bnn, self._module = chance, bnn, module
        self._ways = {
            "nothing": nullcontext,
            "local reparameterisation": tyxe.poutine.local_reparameterization,
            "flipout": tyxe.poutine.flipout,
            "a held draw": module.hold_sample,
        }
        self.found: list[str] = []

    def _look(self) -> tuple[set[Any], Tensor | None]:
        """Return how weights are treated, and the module's output if two calls agree in it."""
        with tyxe.poutine.report() as report:
            self._bnn.predict(X, num_predictions=1)
        first, second = self._module(X).detach(), self._module(X).detach()
        return {row.treatment for row in report}, first if torch.equal(first, second) else None

    async def _task(self, way: str, alone: dict[str, set[Any]]) -> None:
        held = []
        with self._ways[way]():
            for _ in range(LOOKS):
                for _ in range(self._chance.randrange(4)):
                    await asyncio.sleep(0)
                treatments, output = self._look()
                held.append(output)
                if treatments != alone[way]:
                    self.found.append(f"{way}: {treatments}")
        is_held = all(one is not None and torch.equal(one, held[0]) for one in held)
        if is_held != (way == "a held draw"):
            self.found.append(f"{way}: draws {'agree' if is_held else 'differ'}")

    async def _together(self, ways: list[str], alone: dict[str, set[Any]]) -> None:
        await asyncio.gather(*(self._task(way, alone) for way in ways))
        if handlers() or self._module._held:
            self.found.append("left behind")

    def run(self) -> None:
        """Run the tasks, and find what in them is not as it is in a task alone."""
        alone = {}
        for way, enter in self._ways.items():
            with enter():
                alone[way] = self._look()[0]
        asyncio.run(self._together(self._chance.choices([*self._ways], k=TASKS), alone))


def run(count: int, seed: int = 0) -> dict[str, Any]:
    """Run `count` loops, and return the numbers of tasks and of looks, and the faults."""
    chance, found = random.Random(seed), list[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bnns = [fitted(name).eval() for name in ("VariationalBNN", "PytorchBNN")]
        for _ in range(count):
            loop = _Loop(chance, *bnns)
            loop.run()
            found += loop.found
    told = {"seed": seed, "tasks": TASKS * count, "looks": LOOKS * TASKS * count}
    return {**told, "faults": len(found), "found": found}
