"""All experiments: their options, their records, and the commands on pages."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import runner

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
INDEX = ROOT / "experiments" / "README.md"
EXPERIMENTS: dict[str, runner.Experiment] = {}
for path in sorted((ROOT / "experiments").glob("*.py")):
    module = importlib.import_module(path.stem)
    if hasattr(module, "experiment"):
        EXPERIMENTS[path.name] = module.experiment
    for word, one in getattr(module, "experiments", {}).items():
        EXPERIMENTS[f"{path.name} {word}"] = one
# Not of an experiment.
RECORDS = sorted(p.stem for p in RESULTS.glob("*.json") if not p.stem.startswith("quickstart"))


def owner(name: str) -> tuple[str, runner.Experiment]:
    """Return the one experiment that has records of this name."""
    patterns = {c: re.sub(r"\{.*?\}", "[a-z0-9_]*", e.name) for c, e in EXPERIMENTS.items()}
    # `laplace_step` is no `laplace_{...}`: the whole name comes first.
    own = [c for c, e in EXPERIMENTS.items() if e.name == name.removesuffix("_published")]
    own = own or [c for c, p in patterns.items() if re.fullmatch(f"{p}(_published)?", name)]
    (command,) = own
    return command, EXPERIMENTS[command]


@pytest.mark.parametrize("command", EXPERIMENTS)
def test_help_explains_every_option(command: str, capsys):
    one = EXPERIMENTS[command]
    with pytest.raises(SystemExit) as left:
        one.main(["--help"], *command.split()[1:])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {command} [-h]")
    assert one.settings.__module__ != "__main__"
    first = sys.modules[one.settings.__module__].__doc__.splitlines()[0]
    assert first in printed
    for field in one.settings.__dataclass_fields__:
        option = field.replace("_", "-")
        # in the list of options, with an explanation, and not in the usage line alone
        assert re.search(rf"^  --{option}( [^\n]*)?\s+\S", printed, re.MULTILINE), option


@pytest.mark.parametrize("name", RECORDS)
def test_pages_are_what_the_records_say(name: str):
    command, one = owner(name)
    record = runner.Record(RESULTS / f"{name}.json", one.by).read()
    assert record.text() == record.path.read_text()
    for known in (record.content["command"], *record.content["commands"]):
        assert f"experiments/{command} " in f"{known} "
        s, _ = one.parse("", shlex.split(known.partition(f"experiments/{command}")[2]))
        assert one.record(s).path.stem == name
    for ending, page in runner.by_ending(one.table(record)):
        assert (RESULTS / f"{name}{ending}.md").read_text() == f"{page}\n"


@pytest.mark.parametrize("name", RECORDS)
def test_settings_of_records_are_those_of_the_experiment(name: str):
    """A run of the same command would go on with the record."""
    _, one = owner(name)
    content = json.loads((RESULTS / f"{name}.json").read_text())
    given = content["settings"]
    fields = {field.replace("_", " "): field for field in one.settings.__dataclass_fields__}
    levels = ["published"] if name.endswith("_published") else []
    s = one.settings.at(*levels, **{fields[key]: value for key, value in given.items()})
    assert json.loads(json.dumps(s.recorded())) == given
    assert set(content) >= {"command", "commands", "versions", "machine", "settings", "cells"}


def test_pictures_are_small():
    """The package is cloned with its pages."""
    assert [p.name for p in RESULTS.glob("*.png") if p.stat().st_size > 60_000] == []
    assert {p.suffix for p in RESULTS.iterdir()} <= {".json", ".md", ".png", ".pt"}


def test_the_index_has_every_experiment():
    index = INDEX.read_text()
    for command in EXPERIMENTS:
        assert f"python experiments/{command}" in index
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", index)
    assert [link for link in links if not (INDEX.parent / link).exists()] == []


COMMANDS = re.compile(r"(?:python|torchrun \S+) experiments/([^`\n]+)")
# What they read, and no experiments themselves.
DATA = {"cow_views.py", "planetoid.py"}
PAGES = [INDEX, ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((INDEX.parent / "pages").glob("*.md"))


def test_commands_on_pages_are_options_of_today():
    found = [command for page in PAGES for command in COMMANDS.findall(page.read_text())]
    assert len(found) > 40
    for command in found:
        words = shlex.split(command)
        if words[0] in DATA:
            assert (INDEX.parent / words[0]).exists()
            continue
        name = next(c for c in (" ".join(words[:2]), words[0]) if c in EXPERIMENTS)
        if not {"--help", "cuda"} & {*words}:
            EXPERIMENTS[name].parse(name, words[len(name.split()) :])


def test_a_record_without_what_a_figure_needs_says_so(tmp_path: Path):
    """It was written before records held curves."""
    _, one = owner("variational_laplace_toy")
    with pytest.raises(SystemExit, match=r"variational_laplace_toy.json has no 'curves', which"):
        one.main(["--figure", "--out", str(RESULTS)], "variational_laplace")
