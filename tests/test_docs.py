"""README.md runs as pasted, says what the front page says, and links to what is there.

No text installs the wrong package.
"""

import codeop
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
INDEX = (ROOT / "docs" / "index.md").read_text()
DIAGNOSE = (ROOT / "docs" / "diagnose.md").read_text()
CAME_OUT = (ROOT / "experiments" / "pages" / "what_came_out.md").read_text()
EXPERIMENTS = (ROOT / "experiments" / "README.md").read_text()
WHOLE = re.DOTALL | re.MULTILINE
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, WHOLE)
RECIPES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
TEXTS = sorted(
    path
    for pattern in (
        *("*.md", "*.toml", "Makefile", ".ci/*", "docs/*.md", "docs/*.py", "notebooks/*.py"),
        *("docs/recipes/*.md", "experiments/README.md", "experiments/pages/*.md"),
        *(f"{folder}/**/*.py" for folder in ("tyxe", "examples", "experiments", "benchmarks")),
    )
    for path in ROOT.glob(pattern)
)
# The distribution is `tyxe-bnn`; the plain name belongs to somebody else's fork.
WRONG_INSTALL = re.compile(r"pip3?\s+install\s+(?:-\S+\s+)*[\"']?tyxe(?!-bnn)\b", re.IGNORECASE)


def python(folder: Path, *arguments: str) -> str:
    """Return what an interpreter of its own prints, which must not fail."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    how = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([sys.executable, *arguments], **how, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_front_page_has_the_lines_of_the_readme() -> None:
    assert len(BLOCKS) >= 2
    (code,) = re.findall(r"^```{testcode}\n(.*?)^```$", INDEX, WHOLE)
    assert code == BLOCKS[0]


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block_runs_in_a_fresh_interpreter(code: str, tmp_path: Path) -> None:
    if "torchvision" in code:
        pytest.importorskip("torchvision", reason="the block uses the extra `vision`")
    python(tmp_path, "-c", code)


def test_page_shows_the_report_that_its_block_prints(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", DIAGNOSE, WHOLE)
    printed = python(tmp_path, "-W", "ignore", "-c", code)
    shown = DIAGNOSE.split("begin of the report")[1].split("```")[1]
    # Digits, and so the widths of columns, are those of a machine.
    assert _verdicts(printed) == _verdicts(shown)


def _verdicts(report: str) -> list[str]:
    return re.findall(r"^(?:ok|warn|fail) +.*?(?=  )", report, re.MULTILINE)


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block_may_be_pasted_at_a_prompt(code: str) -> None:
    """A prompt reads line by line, where an empty line ends what is indented."""
    pending: list[str] = []
    for line in [*code.splitlines(), ""]:
        pending.append(line)
        if codeop.compile_command("\n".join(pending)) is not None:
            pending.clear()
    assert not any(pending)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_begins_with_its_code(recipe: Path) -> None:
    begin = re.match(r"# .*\n\n```{testcode}\n(.*?)^```$(.*)", recipe.read_text(), WHOLE)
    assert begin is not None
    code, rest = begin.groups()
    assert 15 <= sum(bool(line) for line in code.splitlines()) <= 30
    assert "](../" in rest, "where there is more on the job"


def test_readme_lists_every_page() -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    # pages that hold another file, and the lists themselves
    others = {"index", "changelog", "contributing"}
    assert {page for page in pages - others if f"(docs/{page}.md)" not in README} == set()
    recipes = {path.name for path in RECIPES}
    assert recipes == set(re.findall(r"\(docs/recipes/(\w+\.md)\)", README))
    assert recipes == set(re.findall(r"\(recipes/(\w+\.md)\)", INDEX))
    links = set(re.findall(r"\]\(pages/(\w+)\.md", EXPERIMENTS))
    assert {path.stem for path in (ROOT / "experiments/pages").glob("*.md")} == links


def test_what_came_out_has_a_status_in_each_row() -> None:
    rows = [line.split(" | ") for line in CAME_OUT.splitlines() if line.startswith("| ")]
    rows = [row for row in rows if len(row) == 4 and "what it shows" not in row[1]]
    assert len(rows) > 40
    known = re.findall(r"^\| (\*\*.*?\*\*) \|", CAME_OUT, re.MULTILINE)
    assert len(known) == 4
    assert [row for row in rows if not row[2].startswith(tuple(known))] == []
    # What was run is on a page, and what was not leads nowhere.
    assert [row for row in rows if ("](" in row[0]) == ("**not done**" in row[2])] == []


def test_what_came_out_has_what_the_experiments_reproduce() -> None:
    _, *parts = re.split(r"^## \[(\w+)\]", CAME_OUT, flags=re.MULTILINE)
    papers = dict(zip(parts[::2], parts[1::2], strict=True))
    named = re.findall(r"\[(\w+)\] (fig|tab)\. ([\d.]*\d)(?:, (\d\.\d+))?", EXPERIMENTS)
    assert len(named) > 15
    for paper, kind, *numbers in named:
        listed = re.findall(rf"^\| (\[?{kind}\. .*?) \|", papers[paper], re.MULTILINE)
        for number in filter(None, numbers):
            whole = re.compile(rf"(?<![\d.]){re.escape(number)}(?!\d)")
            assert any(map(whole.search, listed)), f"[{paper}] {kind}. {number}"


def test_the_table_of_the_readme_is_what_the_results_say() -> None:
    python(ROOT, "docs/front.py", "--check")


def test_readme_links_lead_somewhere() -> None:
    links = re.findall(r"""(?:\]\(|(?:href|src)=")(?!https?://)([^)"#\s]+)""", README)
    assert any(link.startswith("experiments/results/") for link in links), "the row of pictures"
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install tyxe", True),
        ("pip install --upgrade 'tyxe[plot]'", True),
        ("python -m pip install -U tyxe", True),
        ("pip install tyxe-bnn", False),
        ('pip install -e ".[vision,plot]"', False),
    ],
)
def test_wrong_install_is_recognised(text: str, wrong: bool) -> None:
    assert bool(WRONG_INSTALL.search(text)) == wrong


def test_no_text_installs_the_fork() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {match.group()}"
        for path in TEXTS
        for match in WRONG_INSTALL.finditer(path.read_text())
    }
    assert len(TEXTS) > 20
    assert found == set()
