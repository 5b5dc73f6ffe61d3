"""Benchmarks run and write what they promise."""

import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.helpers import BENCHMARKS, ROOT, Helper, RunScript

PAGE = ROOT / "docs" / "benchmarks.md"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py"))
OWN = {"plain", "by hand", "ours"}
RESULTS = {path.stem: json.loads(path.read_text()) for path in BENCHMARKS.glob("results/*.json")}
CASES = {name: [case["name"] for case in one["cases"]] for name, one in RESULTS.items()}
# Without a record, or of which some cases are left out here: compiling the ResNet takes the library
# through the same code for longer; processes that take a curvature start like those that make
# steps, and their work is tried below. What `gpu` has of other scripts is tried there.
CASES |= {
    "compile": ["mlp"],
    "processes": ["step"],
    "gpu": ["mlp_step", "resnet18_step", "second_fit"],
    "gpu_laplace": ["laplace_curvature", "laplace_predictions"],
    "gpu_predict": ["mlp_predict", "resnet18_predict", "last_layer", "samplers"],
}


def assert_summary(numbers: dict[str, float]) -> None:
    assert set(numbers) == {"median", "q1", "q3"}
    assert 0 < numbers["q1"] <= numbers["median"] <= numbers["q3"] < math.inf


# What the compiler says of code that it leaves as it is.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not:UserWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_smoke_test_runs_every_case_and_writes_its_results(
    name: str, run_script: RunScript, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "results.json"
    some = ["--case", *CASES[name]] if name in ("compile", "processes", "gpu") else []
    run_script(name, "--smoke-test", "--threads", "1", "--json", str(path), *some)
    results = json.loads(path.read_text())
    assert results["benchmark"] == name
    environment = results["environment"]
    assert set(environment["versions"]) == {"python", "torch", "pyro", "tyxe"}
    assert set(environment["machine"]) - {"gpu"} == {"cpu", "cores", "system"}
    assert environment["threads"] == 1
    assert environment["smoke_test"] is True
    assert environment["command"].startswith(f"python benchmarks/{name}.py --smoke-test")
    assert [case["name"] for case in results["cases"]] == CASES[name]
    recorded = {case["name"]: case for case in RESULTS.get(name, {"cases": []})["cases"]}
    for case in results["cases"]:
        rows = {row["name"]: row for row in case["contestants"]}
        expected = {row["who"] for row in recorded.get(case["name"], case)["contestants"]}
        # Without other libraries, which need not be installed.
        own, expected = (OWN & found for found in ({row["who"] for row in rows.values()}, expected))
        assert own == expected >= {"ours"}
        assert "fails" not in str(case.get("findings"))
        for row in rows.values():
            assert_summary(row[case["quantity"]["name"]])
            assert_summary(row["to_plain"])
            assert row.get("plain", case["contestants"][0]["name"]) in rows
            assert ("to_limit" in row) == ("limit" in row)
            if "limit" in row:
                assert row["limit"] in rows
                assert_summary(row["to_limit"])


def test_the_gpu_script_finds_the_tests_of_gpus(run_script: RunScript, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    run_script("gpu", "--all", "--case", "checks", "--smoke-test", "--json", str(path))
    (case,) = json.loads(path.read_text())["cases"]
    assert case["name"] == "checks"
    assert re.match(r"\d+ tests collected", case["findings"]["outcome"])


def test_the_page_is_what_the_results_say(run_script: RunScript) -> None:
    before = PAGE.read_text()
    run_script("_tables", "--check")
    assert PAGE.read_text() == before


def test_a_script_is_a_command(tmp_path: Path) -> None:
    """In a process of its own, which imports no more than the script itself."""
    path = tmp_path / "results.json"
    command = [sys.executable, BENCHMARKS / "binary_step.py", "--smoke-test", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(path.read_text())["benchmark"] == "binary_step"
    assert "Bernoulli, ours" in done.stdout


def test_the_work_of_a_process_is_one_of_a_group(helper: Helper) -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        work = helper("processes").curvature_of(8, 2)
        work()
        curvature = inspect.getclosurevars(work).nonlocals["bnn"].state.curvature
        assert len(curvature.operator.blocks) == 5  # of four convolutions and a linear map
    finally:
        torch.distributed.destroy_process_group()
