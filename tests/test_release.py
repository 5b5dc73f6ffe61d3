"""Versions and bounds agree wherever they are written; the wheel's check finds what is wrong."""

import importlib.util
import re
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

tomllib = pytest.importorskip("tomllib", reason="in Python since 3.11")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# What judges the code instead of running it: of the newest versions only.
TOOLS = {"build", "furo", "mypy", "myst-nb", "pre-commit", "ruff", "sphinx", "twine"}
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = {
    text: Requirement(text)
    for text in [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    if not text.startswith("tyxe-bnn[")
}


def pins(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def release(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def lowest(requirement: Requirement) -> str:
    return next(part.version for part in requirement.specifier if part.operator == ">=")


@pytest.mark.parametrize("text", REQUIREMENTS)
def test_every_range_has_a_lower_end(text: str) -> None:
    assert lowest(REQUIREMENTS[text])


@pytest.mark.parametrize("text", PROJECT["dependencies"])
def test_what_everybody_installs_has_an_upper_end(text: str) -> None:
    (upper,) = [part for part in REQUIREMENTS[text].specifier if part.operator == "<"]
    # the next major version of what constraints.txt has
    newest = {pin.name: str(pin.specifier).removeprefix("==") for pin in pins("constraints.txt")}
    assert int(upper.version) == release(newest[REQUIREMENTS[text].name])[0] + 1


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_pins_lie_in_their_ranges(name: str) -> None:
    for pin in pins(name):
        version = str(pin.specifier).removeprefix("==")
        ranges = [r.specifier for r in REQUIREMENTS.values() if r.name == pin.name]
        assert all(version in found for found in ranges), pin
    assert len(pins(name)) > 25


def test_the_oldest_pins_are_the_lower_ends() -> None:
    oldest: dict[str, list[str]] = {}
    for pin in pins("constraints-oldest.txt"):
        oldest.setdefault(pin.name, []).append(str(pin.specifier).removeprefix("=="))
    dev = {Requirement(line).name for line in EXTRAS["dev"]}
    run = {r.name for text, r in REQUIREMENTS.items() if text in PROJECT["dependencies"]}
    of_others = {
        Requirement(line).name
        for extra in Requirement(EXTRAS["dev"][0]).extras
        for line in EXTRAS[extra]
    }
    for requirement in REQUIREMENTS.values():
        name = requirement.name
        if name in TOOLS or name not in dev | run | of_others:
            continue
        # A later patch where the first has no wheel for any Python, or was withdrawn.
        first = min(map(release, oldest[name]))
        low = release(lowest(requirement))
        assert first[: len(low)] == low, (name, first, low)


def test_versions_and_pythons_agree() -> None:
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
    heading = re.search(r"^## \[([\d.]+)\] - ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None
    assert PROJECT["version"].startswith(heading[1])
    found = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if "Python :: 3." in c]
    assert PROJECT["requires-python"] == f">={found[0]}"
    listed = ", ".join(f'"{version}"' for version in found)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert f"python: [{listed}]" in workflow
    assert "constraints: [constraints.txt, constraints-oldest.txt]" in workflow


# --------------------------------------------------------------------------- the wheel's check


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return .ci/check_wheel.py, with a checkout of two files."""
    spec = importlib.util.spec_from_file_location("check_wheel", ROOT / ".ci" / "check_wheel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "tyxe").mkdir()
    for name in ("__init__.py", "py.typed"):
        (tmp_path / "tyxe" / name).touch()
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def wheel(folder: Path, *names: str) -> Path:
    path = folder / "tyxe_bnn-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def test_a_wheel_holds_the_package_and_its_licence(check: ModuleType, tmp_path: Path) -> None:
    licence = "tyxe_bnn-0.1.0.dist-info/licenses/LICENSE"
    both = "tyxe/__init__.py", "tyxe/py.typed"
    check.check_files(wheel(tmp_path, *both, licence))
    for names, message in [
        ([both[0], licence], r"missing \['tyxe/py.typed'\], unknown \[\]"),
        ([*both, "tests/test_a.py", licence], r"missing \[\], unknown \['tests/test_a.py'\]"),
        ([*both], "has no LICENSE"),
    ]:
        with pytest.raises(SystemExit, match=message):
            check.check_files(wheel(tmp_path, *names))


def test_without_a_wheel_it_says_how_to_make_one(check: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"dist/ has 0 files \*\.whl; expected one: make dist"):
        check.only("*.whl")
