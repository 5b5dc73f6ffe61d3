"""Run an experiment by its name, or write the tables of all records into a folder.

    python experiments/run.py uci --data glass --out experiments/results
    python experiments/run.py tables --out docs/experiments/results

The name is that of a file of this folder, with a word behind it where a file has several
experiments; `--help` after it lists the options.
"""

import argparse
import importlib
import re
import sys
from pathlib import Path

import runner

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results"


def experiments_of(module):
    """Return the experiments of a file of this folder, by the words behind its name."""
    found = importlib.import_module(module)
    if hasattr(found, "experiment"):
        return {(): found.experiment}
    return {(word,): one for word, one in getattr(found, "experiments", {}).items()}


def catalogue():
    """Return all experiments by the words that name them."""
    modules = sorted(path.stem for path in FOLDER.glob("*.py"))
    return {
        " ".join([module, *words]): one
        for module in modules
        for words, one in experiments_of(module).items()
    }


def owner(experiments, name):
    """Return the words of the one experiment that has records of this name."""
    names = {words: e.name or words for words, e in experiments.items()}
    patterns = {
        w: re.sub(r"\{.*?\}", "[a-z0-9_]*", n) + "[a-z0-9_]*" * bool(experiments[w].ending)
        for w, n in names.items()
    }
    # `laplace_step` is no `laplace_...`: the whole name comes first.
    own = [words for words, n in names.items() if n == name.removesuffix("_published")]
    own = own or [w for w, p in patterns.items() if re.fullmatch(f"{p}(_published)?", name)]
    (words,) = own
    return words


def tables(record_paths):
    """Return all tables of records, by the names of their files."""
    experiments, found = catalogue(), {}
    for path in record_paths:
        one = experiments[owner(experiments, path.stem)]
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
        return print(__doc__, *catalogue(), sep="\n")
    known = sorted(path.stem for path in FOLDER.glob("*.py"))
    experiments = experiments_of(name) if name in known else {}
    if one := experiments.get(()):
        return one.main(rest)
    if not experiments:
        sys.exit(f"there is no experiment {name}; `--help` lists them")
    word, *options = rest or [""]
    if (word,) not in experiments:
        words = ", ".join(word for (word,) in experiments)
        sys.exit(f"expected one of {words} after {name}, and then its options, or --help")
    return experiments[word,].main(options)


if __name__ == "__main__":
    main(sys.argv[1:])
