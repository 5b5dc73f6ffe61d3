"""`make check` runs what a change touches: by imports, by names, and by folders."""

import subprocess
from pathlib import Path

import pytest

from tests import touched

FILES = {
    "tyxe/guides/normal.py": "",
    "tests/guides/test_normal.py": "import tyxe",
    "tests/guides/test_radial.py": "from tyxe import guides",
    "tests/bnn/test_fit.py": "from tyxe.guides.normal import AutoNormal",
    "tests/oracles/nets.py": "import torch",
    "tests/oracles/two.py": "from tests.oracles import nets",
    "tests/priors/test_layers.py": "from tests.oracles.two import net",
    "tests/priors/conftest.py": "import pytest",
    "experiments/common.py": "import torch",
    "experiments/uci.py": "import common",
    "tests/experiments/test_uci.py": "import uci",
    "tests/experiments/test_records.py": "import run",
    "tests/test_architecture.py": "import ast",
    "tests/test_docs.py": "import re",
    "tests/test_site.py": "import re",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "near", "far"),
    [
        (
            "tyxe/guides/normal.py",
            ["tests/bnn/test_fit.py", "tests/guides/test_normal.py", "tyxe/guides/normal.py"],
            ["tests/guides/test_radial.py"],
        ),
        ("tests/bnn/test_fit.py", ["tests/bnn/test_fit.py"], []),
        ("tests/oracles/nets.py", ["tests/priors/test_layers.py"], []),
        ("tests/priors/conftest.py", [], ["tests/priors/test_layers.py"]),
        (
            "experiments/common.py",
            ["tests/experiments/test_uci.py"],
            ["tests/experiments/test_records.py", "tests/test_docs.py"],
        ),
        ("docs/api.md", [], ["tests/test_docs.py", "tests/test_site.py"]),
        ("README.md", [], ["tests/test_docs.py"]),
    ],
)
def test_the_nearest_tests_come_first(
    changed: str, near: list[str], far: list[str], tree: Path
) -> None:
    assert touched.select([changed], tree) == [*near, *touched.ALWAYS, *far]


def test_a_change_is_what_main_lacks(tree: Path) -> None:
    def git(*arguments: str) -> None:
        user = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *user, *arguments], cwd=tree, check=True, capture_output=True)

    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "first")
    assert touched.changed(tree) == []
    (tree / "experiments/uci.py").write_text("import torch")
    (tree / "new.py").touch()
    assert touched.changed(tree) == ["experiments/uci.py", "new.py"]
    git("switch", "-c", "branch")
    git("commit", "-am", "second")
    (tree / "tests/test_site.py").unlink()
    assert touched.changed(tree) == ["experiments/uci.py", "new.py"]


def test_what_begins_too_late_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(touched.UNTIL, "1")
    with pytest.raises(pytest.skip.Exception, match="`make test` runs it"):
        touched.pytest_runtest_setup(None)
    monkeypatch.delenv(touched.UNTIL)
    touched.pytest_runtest_setup(None)


def test_the_command_passes_the_time_on(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    started = []

    def run(command: list[str], env: dict[str, str], **how: object) -> subprocess.CompletedProcess:
        started.append((command, env))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(touched, "changed", lambda: ["tests/test_docs.py"])
    monkeypatch.setattr(touched.subprocess, "run", run)
    assert touched.main(["-n", "2"]) == 1
    ((command, env),) = started
    assert command[-4:] == ["-n", "2", "tests/test_docs.py", "tests/test_architecture.py"]
    assert touched.UNTIL in env
    assert capsys.readouterr().out.startswith("1 changed files; tests: tests/test_docs.py ")
