"""Run an experiment by its name, or write the tables of all records into a folder.

    python experiments/run.py uci --data glass --out experiments/results
    python experiments/run.py tables --out docs/experiments/results

`--help` lists the names, and after a name its options. A name is that of a file of this folder, or
`settings.json` says which file it is in.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import runner

RESULTS = Path(__file__).resolve().parent / "results"


def experiment(words):
    """Return the experiment whose command the first of the words are, or None."""
    for count in (1, 2):
        if (command := " ".join(words[:count])) in runner.COMMANDS:
            importlib.import_module(runner.file_of(command))
            return runner.EXPERIMENTS[command]
    return None


def catalogue():
    """Return all experiments by their commands."""
    return {command: experiment(command.split()) for command in runner.COMMANDS}


def owner(path):
    """Return the experiment that has written a record."""
    command = json.loads(path.read_text())["command"]
    return experiment(command.partition("experiments/run.py ")[2].split())


def tables(record_paths):
    """Return all tables of records, by the names of their files."""
    found = {}
    for path in record_paths:
        one = owner(path)
        made = one.table(runner.Record(path, one.by).read())
        found |= {f"{path.stem}{end}.md": f"{page}\n" for end, page in runner.by_ending(made)}
    return found


def records():
    """List the records, but that of the demo, which is no experiment."""
    return sorted(path for path in RESULTS.glob("*.json") if path.stem != "quickstart_digits")


def write_tables(arguments):
    parser = argparse.ArgumentParser("tables", description="Write the tables of all records.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the tables")
    folder = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in tables(records()).items():
        (folder / name).write_text(page)


def main(arguments):
    name, *rest = arguments or ["--help"]
    if name == "tables":
        return write_tables(rest)
    if name in ("-h", "--help"):
        return print(__doc__, *runner.COMMANDS, sep="\n")
    if one := experiment(arguments):
        return one.main(arguments[len(one.command.split()) :])
    if words := [c.partition(" ")[2] for c in runner.COMMANDS if c.startswith(f"{name} ")]:
        sys.exit(
            f"expected one of {', '.join(words)} after {name}, and then its options, or --help"
        )
    sys.exit(f"there is no experiment {name}; `--help` lists them")


if __name__ == "__main__":
    main(sys.argv[1:])
