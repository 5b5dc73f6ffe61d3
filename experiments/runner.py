"""What all experiments share: settings, the command line, cells that resume, JSON, tables.

A file of this folder has a dataclass of settings, each with its help and its values in the paper
and in a smoke test; a function that yields *cells*, pairs of a key (a method and a seed, say) and
of what computes it; and functions from the record, the JSON file, to a table and to a figure:

    experiment = Experiment("uci", Settings, cells, ("data", "column", "split"), table)

Its command is `python experiments/run.py uci`, which calls `main`. That runs the cells that the
record lacks and writes it after each, so that a run that was stopped goes on where it was; a record
of other settings is refused. The table (Markdown) and the figure are written next to it, by
`--table` and `--figure` from the record alone.
"""

import argparse
import dataclasses
import datetime
import importlib.util
import inspect
import io
import json
import os
import platform
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pyro
import torch

import tyxe

Key = tuple[str, ...]
Cells = dict[Key, dict[str, Any]]
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def setting(default, help, *, published=..., smoke=..., choices=None, kind="setting"):
    """Return a field of settings, which is an option of the command, too.

    Args:
        default: the value on a CPU.
        help: what it is.
        published: the paper's value, for `--published`, if it is another.
        smoke: that of `--smoke-test`, if it is another.
        choices: what the option may be.
        kind: a "setting" is recorded, and the same for all cells of a record; "which" says which
            cells are run; "how" changes no number.
    """
    facts = {"help": help, "published": published, "smoke": smoke, "choices": choices, "kind": kind}
    return dataclasses.field(default_factory=lambda: default, metadata=facts)


which, how = partial(setting, kind="which"), partial(setting, kind="how")
# The decorator of their classes: compared by identity, they can be arguments of cached functions.
settings = partial(dataclasses.dataclass, frozen=True, eq=False)


@settings
class Settings:
    """What every experiment has; `__post_init__` of a subclass may raise a ValueError."""

    out: Path = how(Path("results"), "folder of record, table, figure", smoke=Path("results/smoke"))
    published: bool = how(False, "take the paper's settings, named below")
    smoke_test: bool = how(False, "a run of seconds, without a result")
    table: bool = how(False, "only write the table of what --out has")
    figure: bool = how(False, "only draw the figure of what --out has")
    threads: int = how(1, "of torch")

    @classmethod
    def at(cls, *levels: str, **given: Any) -> "Settings":
        """Return the settings of levels, `published` or `smoke`, and what is given besides."""
        values = {}
        for field in dataclasses.fields(cls):
            known = [field.default_factory(), *(field.metadata[level] for level in levels)]
            values[field.name] = next(value for value in reversed(known) if value is not ...)
        return cls(**(values | given))

    def recorded(self) -> dict[str, Any]:
        """Return what a record holds of them, by name."""
        recorded = [f.name for f in dataclasses.fields(self) if f.metadata["kind"] == "setting"]
        return {name.replace("_", " "): getattr(self, name) for name in recorded}


def _option(field: dataclasses.Field) -> dict[str, Any]:
    default, facts = field.default_factory(), field.metadata
    told = {"default": argparse.SUPPRESS, "help": facts["help"].replace("%", "%%")}
    if default is False:
        return told | {"action": "store_true"}
    paper = facts["published"]
    said = [f"default: {words(default)}"] if default != [] else []
    said += [] if paper is ... else [f"published: {words(paper)}"]
    told["help"] += f" ({'; '.join(said)})" if said else ""
    if isinstance(default, list):
        told["nargs"] = "+"
    kind = next((k for k in get_args(field.type) if k is not type(None)), field.type)
    return told | {"type": json.loads if kind is dict else kind, "choices": facts["choices"]}


def words(value: Any) -> str:
    """Return a value as a text for people, and for keys."""
    if isinstance(value, list):
        return " ".join(map(words, value))
    return "all" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


@dataclasses.dataclass
class Record:
    """The JSON file at a path: its content, and in it the cells by the parts of their keys."""

    path: Path
    by: Key
    content: dict[str, Any] = dataclasses.field(default_factory=dict)
    cells: Cells = dataclasses.field(default_factory=dict)

    def read(self) -> "Record":
        if self.path.exists():
            self.content = json.loads(self.path.read_text())
            found = {(): self.content.pop("cells")}
            for _ in self.by:
                found = {(*k, n): cell for k, part in found.items() for n, cell in part.items()}
            self.cells.update(found)
        return self

    def of(self, *start: str) -> Cells:
        """Return the cells whose keys start so, by the rest of their keys."""
        count = len(start)
        return {key[count:]: cell for key, cell in self.cells.items() if key[:count] == start}

    def commands(self) -> str:
        """Return the commands of all runs, for a page."""
        return ", ".join(f"`{command}`" for command in self.content["commands"])

    def add(self, about: dict[str, Any], found: Cells) -> None:
        """Write cells to the file; another run may have added to it in the meantime."""
        self.read()
        commands = [*self.content.get("commands", []), about["command"]]
        self.content = about | {"commands": list(dict.fromkeys(commands)), "cells by": self.by}
        self.cells.update(found)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(f".{os.getpid()}")  # other runs may write at the same time
        new.write_text(self.text())
        new.replace(self.path)
        self.read()  # keys of dictionaries are strings there

    def text(self) -> str:
        """Return the file: lists of numbers in lines, other values one a line."""
        nested: dict[str, Any] = {}
        for (*path, name), cell in self.cells.items():
            place = nested
            for part in path:
                place = place.setdefault(part, {})
            place[name] = cell
        text = json.dumps(self.content | {"cells": nested}, indent=1)
        flat = re.sub(r"\[[-+.\deE,\s]+\]", lambda found: " ".join(found[0].split()), text)
        return flat.replace("[ ", "[").replace(" ]", "]") + "\n"


def environment(script: str, arguments: list[str]) -> dict[str, Any]:
    launcher = "python" if WORLD == 1 else f"torchrun --nproc_per_node={WORLD}"
    processor = platform.processor() or platform.machine()
    machine = {"system": platform.system(), "processor": processor, "cores": os.cpu_count()}
    versions = {module.__name__: module.__version__ for module in (tyxe, torch, pyro)}
    return {
        "command": f"{launcher} experiments/run.py {script} {shlex.join(arguments)}".strip(),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version()} | versions,
        "machine": machine | {"threads": torch.get_num_threads()},
    }


def every(run: Callable[..., dict[str, Any]], *names: str):
    """Return `cells` of an experiment: `run(s, *values)` for all values of fields of settings.

    The last name is the outermost loop: the seeds, which are set before.
    """

    def seeded(*how: Any) -> dict[str, Any]:
        pyro.set_rng_seed(how[-1])
        return run(*how)

    def cells(s: Settings, found: Cells):
        for values in product(*(getattr(s, name) for name in reversed(names))):
            yield values[::-1], partial(seeded, s, *values[::-1])

    return cells


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What `main` runs.

    Attributes:
        name: of its files, with fields of settings: `laplace_{0.data}`.
        settings: a subclass of `Settings`; the docstring of its file is what `--help` says.
        cells: `cells(s, found)` yields pairs of a key and of a function that returns the cell. A
            list in a key stands for as many cells, which the function returns by name.
        by: what the parts of a key are.
        table: from the record to Markdown, or to several pages by the ending of their names.
        figure: from the record to a figure, or likewise to several.
        facts: what the file is to hold besides, such as published numbers.
    """

    name: str
    settings: type[Settings]
    cells: Callable[[Any, Cells], Iterable[tuple[tuple, Callable[[], dict]]]]
    by: Key
    table: Callable[[Record], Any]
    figure: Callable[[Record], Any] = lambda record: {}
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def main(self, arguments: list[str] | None = None, *before: str) -> Record:
        """Do what the command line says, after the words before it; return the record."""
        for library in ("matplotlib", "sklearn"):
            if importlib.util.find_spec(library) is None:
                sys.exit(f'{library} is not installed: pip install -e ".[examples]"')
        arguments = sys.argv[1:] if arguments is None else arguments
        script = " ".join([Path(inspect.getfile(self.settings)).stem, *before])
        s, error = self.parse(script, arguments)
        torch.set_num_threads(s.threads)
        record = self.record(s).read()
        if not (s.table or s.figure):
            self.run(s, record, environment(script, arguments))
        elif not record.content:
            error(f"there is no {record.path}; run without --table and --figure first")
        if RANK == 0:
            self.report(record, s.table, s.figure)
        return record

    def parse(self, script: str, arguments: list[str]) -> tuple[Any, Callable[[str], Any]]:
        """Return the settings of a command line, and what leaves with a message."""
        how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        about = sys.modules[self.settings.__module__].__doc__
        parser = argparse.ArgumentParser(script, description=about, **how)
        for field in dataclasses.fields(self.settings):
            parser.add_argument(f"--{field.name.replace('_', '-')}", **_option(field))
        given = vars(parser.parse_args(arguments))
        for name, value in given.items():
            if type(value) is int and value < 1:
                option = f"--{name.replace('_', '-')}"
                parser.error(f"{option} is {value}; expected a positive number")
        levels = [name for name in ("published", "smoke_test") if given.get(name)]
        try:
            s = self.settings.at(*(level.removesuffix("_test") for level in levels), **given)
        except ValueError as error:
            parser.error(str(error))
        return s, parser.error

    def record(self, s: Settings) -> Record:
        name = self.name.format(s) + "_published" * s.published
        return Record(s.out / f"{name}.json", self.by)

    def run(self, s: Settings, record: Record, about: dict[str, Any]) -> None:
        """Run the cells that the record lacks, and write it after each."""
        before, now = record.content.get("settings"), json.loads(json.dumps(s.recorded()))
        if before not in (None, now):
            names = sorted(name for name in before | now if before.get(name) != now.get(name))
            sys.exit(
                f"{record.path} has results of other settings ({', '.join(names)}): give this run "
                "an --out of its own, or delete the file"
            )
        published = self.settings.at("published").recorded()
        about |= {"settings": s.recorded()} | self.facts
        if published != self.settings.at().recorded():
            about["published settings"] = published
        for key, function in self.cells(s, record.cells):
            parts = [list(map(words, p)) if isinstance(p, list) else [words(p)] for p in key]
            keys = list(product(*parts))
            if all(one in record.cells for one in keys):
                continue
            start = time.process_time()
            with warnings.catch_warnings():
                # That many weights outweigh few data is known here: caps and beta are for that.
                warnings.filterwarnings("ignore", "the weighted KL", tyxe.TyxeWarning)
                # torch-geometric 2.8 uses it, and torch 2.15 calls it deprecated.
                warnings.filterwarnings("ignore", r".*torch\.jit\.script", FutureWarning)
                found = function()
            seconds = {"CPU seconds": round((time.process_time() - start) / len(keys), 1)}
            found = found.values() if any(isinstance(part, list) for part in key) else [found]
            cells = {one: cell | seconds for one, cell in zip(keys, found, strict=True)}
            if RANK == 0:
                record.add(about, cells)
                for one, cell in cells.items():
                    print(f"{', '.join(one)}: {said(cell)}", flush=True)

    def report(self, record: Record, table: bool = False, figure: bool = False) -> None:
        """Write table and figure, or what of them is asked for."""
        try:
            drawings = self.figure(record) if figure or not table else {}
        except KeyError as error:  # what former revisions recorded was less
            sys.exit(f"{record.path} has no {error}, which a figure needs: run the experiment anew")
        for ending, drawn in by_ending(drawings):
            path = record.path.with_name(f"{record.path.stem}{ending}.png")
            save(drawn, path)
            print(f"wrote {path}")
        for ending, page in by_ending(self.table(record)):
            if table or not figure:
                record.path.with_name(f"{record.path.stem}{ending}.md").write_text(f"{page}\n")
            print(page)


def save(drawn: Any, path: Path, most: int = 60_000) -> None:
    """Write a figure of at most so many bytes: with few colours and, if need be, fewer pixels."""
    from PIL import Image

    # This method keeps rare colours, such as those of thin lines.
    how = {"method": Image.Quantize.MAXCOVERAGE, "dither": Image.Dither.NONE}
    for dpi, colours in product((120, 96, 80, 66), (256, 128)):
        buffer, written = io.BytesIO(), io.BytesIO()
        drawn.savefig(buffer, dpi=dpi)
        Image.open(buffer).convert("RGB").quantize(colours, **how).save(
            written, "PNG", optimize=True
        )
        if written.tell() <= most:
            break
    path.write_bytes(written.getvalue())


def by_ending(found: Any) -> Iterable[tuple[str, Any]]:
    """Return what is written, by the ending of the file's name."""
    return found.items() if isinstance(found, dict) else [("", found)]


def said(cell: dict[str, Any]) -> str:
    parts = [f"{name} {value:.4g}" for name, value in cell.items() if type(value) in (int, float)]
    for name, row in cell.get("rows", {}).items():
        numbers = [f"{column} {value:.4g}" for column, value in [*row.items()][:2]]
        parts.insert(-1, f"{name}: {' '.join(numbers)}")
    return ", ".join(parts)
