"""Variational Laplace, variational inference and MAP on image classifiers [GR tab. 1, VL fig. 2].

Softplus nets, Adam, the prior N(0, 1 / fan_in), standard deviations that start at `log s - 3` and
have ten times the learning rate. Methods: variational Laplace (VL), predicted by the mean network
and by 10 draws; variational inference by one plain draw a step (VI), likewise; MAP, whose
log-prior is weighted by beta as the KL is for the others. For each row of the table beta is the
one of 1, 0.3, 0.1, 0.03 and 0.01 with the lowest negative log-likelihood (NLL) of 2,000 validation
images with the first seed; the other seeds run at that beta only, unless --every-beta. NLL in nats
an image, expected calibration error (ECE) in 15 bins, AUROC of the maximal probability against
another set.

`fashion_mnist` and `mnist` (the default) are sized for a processor. In brackets the paper's: 4,000
training images (60,000), 5,000 test images (10,000), a net of two strided convolutions and two
linear layers, 27,338 weights (PreactResNet-18, 11 million), 48 epochs of batches of 128, 1,536
steps (200 epochs, 93,800), a learning rate of 5e-3 (1e-4) that is cut by ten at half and at three
quarters (at 100 and 150 of 200 epochs), so that the rates of all steps add up to 4.1 (5.0); the
other set is MNIST or FashionMNIST (ImageNet). Chosen, since stated nowhere: the prior, means that
start at the net's own values, no augmentation, that beta weights MAP's prior, bins of the ECE.

`cifar10` is the paper's own, for a GPU (`--device cuda`): PreactResNet-18, batches of 128, learning
rate 1e-4 cut at 100 and 150 of 200 epochs, random crops and flips, SVHN as the other set; a local
subset of the images if there is one, else torchvision's.

Early stopping [VL fig. 2]: the first configuration, first seed, beta 1 and 0.1, with the
scales' learning rate multiplied by 1, 3, 10 and 30.

Finished cells in the file of --json are not run again; --report writes tables and figure from it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from _harness import environment
from _variational_laplace import ROOT, Data, cell, load
from _variational_laplace_report import MULTIPLIER, Job, best_beta, key, write

SMALL = {
    "training images": 4_000,
    "validation images": 2_000,
    "test images": 5_000,
    "epochs": 48,
    "batch size": 128,
    "learning rate": 5e-3,
    "augmentation": False,
    "width": None,
}
PAPER = {
    "training images": None,
    "validation images": 2_000,
    "test images": None,
    "epochs": 200,
    "batch size": 128,
    "learning rate": 1e-4,
    "augmentation": True,
    "width": 64,
}
CONFIGURATIONS = {"fashion_mnist": SMALL, "mnist": SMALL, "cifar10": PAPER}
TINY = {"training images": 64, "validation images": 32, "test images": 32, "epochs": 4}
METHODS = ("VL", "VI", "MAP")
RESULTS = ROOT / "benchmarks" / "results" / "variational_laplace.json"


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [*CONFIGURATIONS, "digits"]
    add("--configurations", nargs="+", choices=names, default=["fashion_mnist", "mnist"])
    add("--betas", nargs="+", type=float, default=[1.0, 0.3, 0.1, 0.03, 0.01])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--every-beta", action="store_true", help="with every seed, not with the first only")
    add("--multipliers", nargs="+", type=float, default=[1.0, 3.0, 10.0, 30.0])
    add("--stopping-betas", nargs="+", type=float, default=[1.0, 0.1])
    add("--device", default="cpu", help="cuda for cifar10 (default: cpu)")
    add("--threads", type=int, default=1, help="of torch (default: 1)")
    add("--json", type=Path, default=RESULTS, help="read and written (default: in results)")
    add("--out", type=Path, help="folder of tables and figure (default: the JSON's)")
    add("--report", action="store_true", help="run nothing: tables and figure from the JSON")
    add("--smoke-test", action="store_true", help="digits, or what is asked for, in tiny: seconds")
    parser.set_defaults(clock="cpu", keep_memory=False)
    parsed = parser.parse_args()
    parsed.seeds = sorted(set(parsed.seeds))
    parsed.seed = parsed.seeds[0]
    if parsed.smoke_test:
        given = [name for name in parsed.configurations if name == "cifar10"]
        parsed.configurations = given or ["digits"]
        parsed.betas, parsed.seeds, parsed.multipliers = [1.0, 0.1], [0, 1], [1.0, 10.0]
    torch.set_num_threads(parsed.threads)
    return parsed


def settings_of(name: str, smoke_test: bool) -> dict[str, Any]:
    """Return a configuration's settings."""
    found = dict(CONFIGURATIONS.get(name, SMALL))
    if smoke_test:
        found |= TINY
        found["width"] = 4 if found["width"] else None
    return found


class Record:
    """The JSON file: cells by configuration, of runs with the same settings.

    Args:
        parsed: the command line.

    Raises:
        ValueError: the file holds cells of other settings.
    """

    def __init__(self, parsed: argparse.Namespace) -> None:
        self.path = parsed.json
        old = json.loads(self.path.read_text()) if self.path.exists() else {}
        about = environment(parsed)
        commands = [*old.get("commands", []), about["command"]]
        names = parsed.configurations
        settings = {name: settings_of(name, parsed.smoke_test) for name in names}
        for name in names:
            if old.get("settings", {}).get(name, settings[name]) != settings[name]:
                raise ValueError(
                    f"{self.path} holds cells of {name} with other settings: name another file"
                )
        self.content: dict[str, Any] = {
            "benchmark": "variational_laplace",
            "description": "NLL, accuracy, ECE and AUROC of VL, VI and MAP; early stopping.",
            "environment": about,
            "commands": list(dict.fromkeys(commands)),
            "settings": old.get("settings", {}) | settings,
            "cells": old.get("cells", {}),
        }

    def settings(self, name: str) -> dict[str, Any]:
        """Return those of a configuration."""
        return self.content["settings"][name]

    def cells(self, name: str) -> dict[str, Any]:
        """Return those of a configuration."""
        return self.content["cells"].setdefault(name, {})

    def add(self, name: str, job: Job, found: dict[str, Any]) -> None:
        """Write a finished cell."""
        self.cells(name)[key(*job)] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")


def sweep(parsed: argparse.Namespace, seeds: list[int]) -> Iterator[Job]:
    """Yield the cells of all methods and betas."""
    for beta in parsed.betas:
        for seed in seeds:
            for method in METHODS:
                yield method, beta, MULTIPLIER, seed


def stopping(parsed: argparse.Namespace) -> Iterator[Job]:
    """Yield the cells of VL and VI with other multipliers."""
    for beta in parsed.stopping_betas:
        for multiplier in parsed.multipliers:
            for method in ("VL", "VI"):
                yield method, beta, multiplier, parsed.seeds[0]


def at_the_best(parsed: argparse.Namespace, cells: dict[str, Any]) -> Iterator[Job]:
    """Yield the other seeds' cells, at the beta that is best for one of the method's rows."""
    for seed in parsed.seeds[1:]:
        for method in METHODS:
            ways = ("mean",) if method == "MAP" else ("mean", "draws")
            for beta in dict.fromkeys(best_beta(cells, method, way) for way in ways):
                yield method, beta, MULTIPLIER, seed


def run(record: Record, name: str, data: Data, jobs: Iterator[Job]) -> None:
    """Run the cells that the record lacks."""
    for job in jobs:
        if key(*job) in record.cells(name):
            continue
        found = cell(data, record.settings(name), *job)
        record.add(name, job, found)
        best = "  ".join(
            f"{way}: " + " ".join(f"{k} {v:.4f}" for k, v in row.items())
            for way, row in found["scores"].items()
        )
        print(f"{name}, {key(*job)}: {best} ({found['seconds']:.0f} s)", flush=True)


def stages(parsed: argparse.Namespace, record: Record) -> Iterator[tuple[str, Iterator[Job]]]:
    """Yield configurations with their cells: sweep, the other seeds, early stopping."""
    first = parsed.seeds if parsed.every_beta else parsed.seeds[:1]
    for name in parsed.configurations:
        yield name, sweep(parsed, first)
        yield name, at_the_best(parsed, record.cells(name))
        if name == parsed.configurations[0]:
            yield name, stopping(parsed)


def main() -> None:
    """Run what is missing, and write tables and figure."""
    parsed = options()
    folder = parsed.out or parsed.json.parent
    if parsed.report:
        write(json.loads(parsed.json.read_text()), folder)
        return
    record = Record(parsed)
    sets: dict[str, Data] = {}
    for name, jobs in stages(parsed, record):
        if name not in sets:
            sets[name] = load(name, record.settings(name)).to(parsed.device)
        run(record, name, sets[name], jobs)
    write(record.content, folder)


if __name__ == "__main__":
    main()
