"""What all experiments share: settings, the command line, cells that resume, JSON, tables.

`settings.json` has the settings of every experiment: of each one its value, the paper's and that of
a smoke test where they are others, and its help. A file of this folder has what is its own: a
function that yields *cells*, pairs of a key (a method and a seed, say) and of what computes it; and
functions from the record, the JSON file, to a table and to a figure:

    experiment = Experiment("uci", cells, table, by=("data", "column", "split"))

Its command is `python experiments/run.py uci`, which calls `main`. That runs the cells that the
record lacks and writes it after each, so that a run that was stopped goes on where it was; a record
of other settings is refused. The table (Markdown) and the figure are written next to it, by
`--table` and `--figure` from the record alone.
"""

import argparse
import copy
import dataclasses
import datetime
import importlib.util
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
from types import SimpleNamespace
from typing import Any

import pyro
import torch

import tyxe

Key = tuple[str, ...]
Cells = dict[Key, dict[str, Any]]
# The kinds of settings: recorded, and the same for all cells of a record; which cells are run; and
# what changes no number.
KINDS = ("is", "which", "how")
# Where a value does not tell its type: null, whole numbers, and an empty list.
TYPES = {"str": str, "int": int, "float": float, "path": Path}
SETTINGS = json.loads(Path(__file__).with_name("settings.json").read_text())
COMMANDS = [command for command in SETTINGS if command not in ("all", "shared")]
EXPERIMENTS: dict[str, "Experiment"] = {}  # those of the files that are imported, by command
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Settings(SimpleNamespace):
    """The settings of a run, attributes by name, and its command.

    Compared by identity, so that they can be arguments of cached functions.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def file_of(command: str) -> str:
    """Return the name of an experiment's file: the first word of its command, or `file`."""
    return SETTINGS[command].get("file", command.split()[0])


def facts_of(command: str) -> dict[str, dict[str, Any]]:
    """Return what settings.json says of each setting of an experiment, by name."""
    found = {} if command == "all" else dict(SETTINGS["all"])
    for name, facts in SETTINGS[command].items():
        if (other := name.removeprefix("as in ")) != name:
            found |= {name: facts_of(other)[name] for name in facts}
        elif name not in ("file", "facts", "paper", "table"):
            found[name] = facts
    return found


def default_of(facts: dict[str, Any]) -> Any:
    return next(facts[kind] for kind in KINDS if kind in facts)


def value_at(facts: dict[str, Any], levels: Iterable[str]) -> Any:
    """Return the value of a setting at levels; of dictionaries a level may name some keys alone."""
    value = copy.deepcopy(default_of(facts))
    for level in levels:
        if level in facts:
            other = copy.deepcopy(facts[level])
            value = value | other if isinstance(value, dict) else other
    return Path(value) if facts.get("type") == "path" and value is not None else value


def option(facts: dict[str, Any]) -> dict[str, Any]:
    default = default_of(facts)
    told = {"default": argparse.SUPPRESS, "help": facts["help"].replace("%", "%%")}
    if default is False:
        return told | {"action": "store_true"}
    said = [f"default: {words(default)}"] if default != [] else []
    said += [f"published: {words(facts['published'])}"] if "published" in facts else []
    told["help"] += f" ({'; '.join(said)})" if said else ""
    if isinstance(default, list):
        told["nargs"] = "+"
    first = default[0] if isinstance(default, list) and default else default
    kind = TYPES.get(facts.get("type"), json.loads if isinstance(first, dict) else type(first))
    return told | {"type": kind, "choices": facts.get("choices")}


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

    def names(self, place: int = 0) -> list[str]:
        """Return what there is in one place of keys: the data sets, say."""
        return list(dict.fromkeys(key[place] for key in self.cells))

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


def every(run: Callable[..., dict[str, Any]], wanted=lambda s, *values: True, **names: str):
    """Return `cells` of an experiment: `run(s, *values)` for all values of some settings.

    Names of settings are given by what they are called in keys: `every(run, seed="seeds")`. The
    last one is the outermost loop: the seeds, which are set before. `wanted(s, *values)` says which
    of them are cells, if not all.
    """

    def seeded(*how: Any) -> dict[str, Any]:
        pyro.set_rng_seed(how[-1])
        return run(*how)

    def cells(s: Any, found: Cells):
        for values in product(*(getattr(s, name) for name in reversed(names.values()))):
            if wanted(s, *values[::-1]):
                yield values[::-1], partial(seeded, s, *values[::-1])

    cells.by = tuple(name.replace("_", " ") for name in names)
    return cells


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What `main` runs.

    Attributes:
        command: its command, by which settings.json has its settings, and its file where that has
            another name: the docstring of the file is what `--help` says.
        cells: `cells(s, found)` yields pairs of a key and of a function that returns the cell. A
            list in a key stands for as many cells, which the function returns by name.
        table: from the record to Markdown, or to several pages by the ending of their names.
        figure: from the record to a figure, or likewise to several.
        by: what the parts of a key are, which `every` knows of its own cells.
        facts: what the file is to hold besides `facts` of settings.json, such as published numbers.
        name: of its files, if not the command's, with fields of settings: `laplace_{0.data}`.
        ending: from settings to what the name has besides.
        choices: what options may be, by their names; "all" in settings.json are all of them.
        check: raises a ValueError for settings that do not go together.
    """

    command: str
    cells: Callable[[Any, Cells], Iterable[tuple[tuple, Callable[[], dict]]]]
    table: Callable[[Record], Any]
    figure: Callable[[Record], Any] = lambda record: {}
    by: Key = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    name: str = ""
    ending: Callable[[Any], str] | None = None
    choices: dict[str, Iterable[str]] = dataclasses.field(default_factory=dict)
    check: Callable[[Any], None] = lambda s: None

    def __post_init__(self) -> None:
        object.__setattr__(self, "by", self.by or self.cells.by)
        EXPERIMENTS[self.command] = self

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each setting, by name, with what it may be."""
        found = {}
        for name, facts in facts_of(self.command).items():
            if name in self.choices:
                all_of_them = [*self.choices[name]]
                facts = {k: all_of_them if v == "all" else v for k, v in facts.items()}
                facts["choices"] = all_of_them
            elif isinstance(own := default_of(facts), list) and own and type(own[0]) is str:
                facts = {"choices": own} | facts
            found[name] = facts
        return found

    def at(self, *levels: str, **given: Any) -> Settings:
        """Return the settings of levels, `published` or `smoke`, and what is given besides."""
        known = {n.replace(" ", "_"): value_at(f, levels) for n, f in self.settings().items()}
        s = Settings(command=self.command, **(known | given))
        self.check(s)
        return s

    def recorded(self, s: Settings) -> dict[str, Any]:
        """Return what a record holds of settings, by name."""
        names = [name for name, facts in self.settings().items() if "is" in facts]
        return {name: getattr(s, name.replace(" ", "_")) for name in names}

    def main(self, arguments: list[str]) -> Record:
        """Do what the command line says; return the record."""
        for library in ("matplotlib", "sklearn"):
            if importlib.util.find_spec(library) is None:
                sys.exit(f'{library} is not installed: pip install -e ".[examples]"')
        s, error = self.parse(arguments)
        torch.set_num_threads(s.threads)
        record = self.record(s).read()
        if not (s.table or s.figure):
            self.run(s, record, environment(self.command, arguments))
        elif not record.content:
            error(f"there is no {record.path}; run without --table and --figure first")
        if RANK == 0:
            self.report(record, s.table, s.figure)
        return record

    def parse(self, arguments: list[str]) -> tuple[Settings, Callable[[str], Any]]:
        """Return the settings of a command line, and what leaves with a message."""
        how = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        about = getattr(sys.modules.get(file_of(self.command)), "__doc__", None)
        parser = argparse.ArgumentParser(self.command, description=about, **how)
        for name, facts in self.settings().items():
            parser.add_argument(f"--{name.replace(' ', '-')}", **option(facts))
        given = vars(parser.parse_args(arguments))
        for name, value in given.items():
            if type(value) is int and value < 1:
                option_of = f"--{name.replace('_', '-')}"
                parser.error(f"{option_of} is {value}; expected a positive number")
        levels = [name for name in ("published", "smoke_test") if given.get(name)]
        try:
            s = self.at(*(level.removesuffix("_test") for level in levels), **given)
        except ValueError as error:
            parser.error(str(error))
        return s, parser.error

    def record(self, s: Settings) -> Record:
        ending = self.ending(s) if self.ending else ""
        name = (self.name or self.command).format(s) + ending + "_published" * s.published
        return Record(s.out / f"{name}.json", self.by)

    def run(self, s: Settings, record: Record, about: dict[str, Any]) -> None:
        """Run the cells that the record lacks, and write it after each."""
        before, now = record.content.get("settings"), json.loads(json.dumps(self.recorded(s)))
        if before not in (None, now):
            names = sorted(name for name in before | now if before.get(name) != now.get(name))
            sys.exit(
                f"{record.path} has results of other settings ({', '.join(names)}): give this run "
                "an --out of its own, or delete the file"
            )
        published = self.recorded(self.at("published"))
        about |= {"settings": self.recorded(s)} | SETTINGS[self.command].get("facts", {})
        about |= self.facts
        if published != self.recorded(self.at()):
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
