"""All experiments: their options, their records, and the commands on pages."""

import importlib
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import run
import runner

from tests.experiments.conftest import check_page

ROOT = Path(__file__).resolve().parents[2]
RESULTS = run.RESULTS
INDEX = ROOT / "experiments" / "README.md"
EXPERIMENTS = run.catalogue()
RECORDS = [path.stem for path in run.records()]


def owner(name: str) -> runner.Experiment:
    return run.owner(RESULTS / f"{name}.json")


@pytest.mark.parametrize("command", EXPERIMENTS)
def test_help_explains_every_option(command: str, capsys):
    one = EXPERIMENTS[command]
    with pytest.raises(SystemExit) as left:
        one.main(["--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {command} [-h]")
    assert sys.modules[runner.file_of(command)].__doc__.splitlines()[0] in printed
    for name in one.settings():
        option = name.replace(" ", "-")
        # in the list of options, with an explanation, and not in the usage line alone
        assert re.search(rf"^  --{option}( [^\n]*)?\s+\S", printed, re.MULTILINE), option


@pytest.mark.parametrize("name", RECORDS)
def test_commands_of_records_are_those_of_today(name: str):
    one = owner(name)
    record = runner.Record(RESULTS / f"{name}.json", one.by).read()
    assert record.text() == record.path.read_text()
    for known in (record.content["command"], *record.content["commands"]):
        assert f"experiments/run.py {one.command} " in f"{known} "
        s, _ = one.parse(shlex.split(known.partition(f"experiments/run.py {one.command}")[2]))
        assert one.record(s).path.stem == name


@pytest.mark.parametrize("name", RECORDS)
def test_settings_of_records_are_those_of_the_experiment(name: str):
    """A run of the same command would go on with the record."""
    one = owner(name)
    content = json.loads((RESULTS / f"{name}.json").read_text())
    given = content["settings"]
    levels = ["published"] if name.endswith("_published") else []
    s = one.at(*levels, **{key.replace(" ", "_"): value for key, value in given.items()})
    assert json.loads(json.dumps(one.recorded(s))) == given
    assert set(content) >= {"command", "commands", "versions", "machine", "settings", "cells"}


def test_the_file_of_settings_has_every_experiment():
    for path in (ROOT / "experiments").glob("*.py"):
        importlib.import_module(path.stem)
    assert runner.EXPERIMENTS.keys() - {"small"} == {*runner.COMMANDS}
    used = {n for own in runner.SETTINGS.values() for n in own.get("as in shared", [])}
    assert used == {*runner.SETTINGS["shared"]}


def test_tables_have_the_numbers_of_their_records():
    count = 0
    for name in RECORDS:
        one = owner(name)
        record = runner.Record(RESULTS / f"{name}.json", one.by).read()
        for _, page in runner.by_ending(one.table(record)):
            count += check_page(page, record)
    assert count > 1_500


def test_pictures_are_small():
    """The package is cloned with its pages."""
    assert [p.name for p in RESULTS.glob("*.png") if p.stat().st_size > 60_000] == []
    # A run also writes a table in Markdown, which git ignores.
    kinds = {".json", ".png", ".pt", ".md"}
    assert {p.suffix for p in RESULTS.iterdir() if p.is_file()} <= kinds


def test_the_index_has_every_experiment():
    index = INDEX.read_text()
    for command in EXPERIMENTS:
        assert f"python experiments/run.py {command}" in index
    links = re.findall(r"\]\((?!https?://)([^)#\s]+)", index)
    assert [link for link in links if not (INDEX.parent / link).exists()] == []


# In a line of text, where they may go on in the next, or on a line of their own.
COMMANDS = re.compile(
    r"`(?:python|torchrun \S+) experiments/([^`]+)`|(?:python|torchrun \S+) experiments/([^`\n]+)"
)
# What they read, and no experiments themselves.
DATA = {"planetoid.py"}
# Pages have their numbers in tables of their own, by the columns that they speak of.
UNSHOWN = {"adversarial.md", "ddp.md", "laplace_step.md", "regression.md", "uci_scores.md"}
UNSHOWN |= {f"laplace_banana{end}.md" for end in ("", "_1_layers", "_3_layers")}
UNSHOWN |= {f"online_laplace_{end}.md" for end in ("10", "50", "50_published")}
PAGES = [INDEX, ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((INDEX.parent / "pages").glob("*.md"))


def test_commands_on_pages_are_options_of_today():
    pairs = [pair for page in PAGES for pair in COMMANDS.findall(page.read_text())]
    found = [inline.replace("\n", " ") or alone for inline, alone in pairs]
    assert len(found) > 40
    for command in found:
        script, *words = shlex.split(command)
        if script in DATA:
            assert (INDEX.parent / script).exists()
            continue
        assert script == "run.py"
        if words[0] in ("NAME", "tables"):
            continue
        name = next(c for c in (" ".join(words[:2]), words[0]) if c in EXPERIMENTS)
        if not {"--help", "cuda"} & {*words}:
            EXPERIMENTS[name].parse(words[len(name.split()) :])


def test_pages_include_every_table_and_no_other():
    made = set(run.tables(run.records()))
    found = {
        name
        for page in PAGES
        for name in re.findall(
            r"^```{include} \S*results/(\w+\.md)$", page.read_text(), re.MULTILINE
        )
    }
    # Those of the demo, of benchmarks and of other libraries are no experiments'.
    others = {"quickstart_digits.md", "works_with.md", "methods.md", "gpu.md"}
    assert found - others == made - UNSHOWN
