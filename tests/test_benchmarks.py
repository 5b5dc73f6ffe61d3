"""Benchmarks run, write what they promise, and compare like with like."""

import functools
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyro
import pytest
import torch
import torch.nn.functional as F
from pyro.infer.mcmc import HMC
from torch import nn

from tyxe.bnn import elbo_terms

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py"))
CASES = {
    "training_step": ["mlp", "resnet18"],
    "prediction": ["mlp", "resnet18"],
    "mcmc": ["regression"],
}


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a benchmark's module as its script does, from the directory of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pytest.importorskip("torchvision", reason="the benchmarks' ResNet is torchvision's")

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    before = set(sys.modules)
    yield load
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and BENCHMARKS.samefile(
            Path(str(sys.modules[name].__file__)).parent
        ):
            del sys.modules[name]


# --------------------------------------------------------------------------- scripts


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_every_script_is_tested() -> None:
    assert sorted(CASES) == SCRIPTS


def assert_summary(numbers: dict[str, float]) -> None:
    assert set(numbers) == {"median", "q1", "q3"}
    assert 0 < numbers["q1"] <= numbers["median"] <= numbers["q3"] < math.inf


@pytest.mark.parametrize("name", SCRIPTS)
def test_smoke(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision", reason="the benchmarks' ResNet is torchvision's")
    path = tmp_path / "new" / "results.json"
    done = run_script(name, "--smoke-test", "--threads", "1", "--json", str(path))
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())
    assert results["benchmark"] == name
    environment = results["environment"]
    assert set(environment["versions"]) == {"python", "torch", "pyro", "tyxe"}
    assert set(environment["machine"]) == {"cpu", "cores", "system"}
    assert environment["threads"] == 1
    assert environment["smoke_test"] is True
    assert environment["command"].startswith(f"python benchmarks/{name}.py --smoke-test")
    assert [case["name"] for case in results["cases"]] == CASES[name]
    for case in results["cases"]:
        rows = {row["name"]: row for row in case["contestants"]}
        assert {"plain", "by hand", "ours"} <= {row["who"] for row in rows.values()}
        for row in rows.values():
            assert_summary(row["seconds"])
            assert_summary(row["to_plain"])
            assert ("to_limit" in row) == ("limit" in row)
            if row["who"] == "ours":
                assert row["limit"] in rows
                assert_summary(row["to_limit"])


def test_unknown_case() -> None:
    done = run_script("mcmc", "--smoke-test", "--case", "mlp")
    assert done.returncode != 0
    assert "the cases are regression" in done.stderr


def test_page_is_what_the_results_say() -> None:
    done = run_script("_tables", "--check")
    assert done.returncode == 0, done.stderr


# --------------------------------------------------------------------------- the harness


def test_contestants_take_turns(helper: Any) -> None:
    harness = helper("_harness")
    calls: list[str] = []
    contestants = [
        harness.Contestant(name, lambda name=name: calls.append(name), "plain") for name in "ABC"
    ]
    seconds = harness.interleaved(contestants, repeats=2)
    assert "".join(calls) == "ABC" * 3
    assert [len(times) for times in seconds.values()] == [2, 2, 2]


def test_ratios_are_taken_within_rounds(helper: Any) -> None:
    seconds = {"plain": [1.0, 10.0, 2.0], "ours": [2.0, 30.0, 8.0]}
    assert helper("_harness").ratio(seconds, "ours", "plain") == {
        "median": 3.0,
        "q1": 2.5,
        "q3": 3.5,
    }


# --------------------------------------------------------------------------- like with like


def small_net(name: str, helper: Any) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    nets = helper("_nets")
    if name == "mlp":
        return nets.mlp(True).double(), *_double(nets.vectors(6, True))
    return nets.resnet18(True).double(), *_double(nets.images(4, True))


def _double(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0].double(), pair[1]


METHODS = ["plain sampling", "local reparameterisation", "flipout"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("net_name", ["mlp", "resnet18"])
def test_by_hand_is_the_same_objective(helper: Any, net_name: str, method: str) -> None:
    """KL and its gradient equal ours; without spread, so do the data term and its gradient."""
    script = helper("training_step")
    net, x, y = small_net(net_name, helper)
    num_points, scale = 50, 1e-7
    by_hand, handler = script.METHODS[method]
    bnn = script.make_bnn(net, num_points)
    with torch.no_grad():
        for raw in bnn.net_guide.unconstrained_scales.parameters():
            raw.fill_(math.log(scale))
    bnn.train()
    with handler():
        terms = elbo_terms(bnn.model, bnn.guide, x, y)
    ((terms.kl - terms.data) / num_points).backward()

    hand = by_hand(net, num_points, scale)
    nll, variances = hand.data_term(x, y)
    nll.backward()
    kl = hand._add_kl(variances)
    torch.testing.assert_close(kl.double(), terms.kl.detach(), rtol=1e-6, atol=0.0)
    # A spread of 1e-7 (and 1e-6, by hand, where a variance would be zero) moves outputs as much.
    torch.testing.assert_close(nll.detach(), -terms.data.detach() / num_points, rtol=1e-4, atol=0)
    torch.testing.assert_close(nll.detach(), F.cross_entropy(net(x), y), rtol=1e-4, atol=0)
    for name, loc in zip(hand.names, hand.locs, strict=True):
        ours = bnn.net_guide.locs[name].grad
        torch.testing.assert_close(loc.grad, ours, rtol=1e-3, atol=1e-3 * float(ours.abs().max()))


@pytest.mark.parametrize("method", METHODS)
def test_by_hand_spreads_outputs_alike(helper: Any, method: str) -> None:
    """Mean and variance of one layer's outputs, by hand, are those of the weights' Normals."""
    net = nn.Sequential(nn.Linear(4, 3)).double()
    x = torch.rand(1, 4, dtype=torch.float64)
    scale, count = 0.5, 4000
    by_hand, _ = helper("training_step").METHODS[method]
    hand = by_hand(net, 10, scale)
    outputs = []
    hooked = hand.net.register_forward_hook(lambda _, __, out: outputs.append(out.detach()))
    for _ in range(count):
        hand.data_term(x, torch.tensor([0]))
    hooked.remove()
    found = torch.cat(outputs)
    variance = scale**2 * (x.square().sum() + 1)
    # Five standard errors of a mean and of a Gaussian's variance.
    mean_error = 5 * math.sqrt(variance / count)
    torch.testing.assert_close(found.mean(0), net(x)[0].detach(), rtol=0, atol=mean_error)
    variance_error = 5 * math.sqrt(2 / count)
    torch.testing.assert_close(found.var(0), variance.expand(3), rtol=variance_error, atol=0)


def test_predictions_by_hand_are_of_the_same_posterior(helper: Any) -> None:
    net, x, _ = small_net("mlp", helper)
    predictor = helper("_by_hand").Predictor(net, 1e-9, num_predictions=11)
    expected = net(x).log_softmax(-1).detach()
    for predicted in (predictor.loop(x), predictor.vmapped(x, chunk=4)):
        torch.testing.assert_close(predicted, expected, rtol=1e-6, atol=1e-6)


def test_gradient_on_paper(helper: Any) -> None:
    x = torch.linspace(-1, 1, 7, dtype=torch.float64)[:, None]
    problem = helper("_by_hand").TanhRegression(x, x.sin(), noise=0.3, hidden=5)
    z = torch.randn(problem.size, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(problem.potential(z), z)
    torch.testing.assert_close(problem.gradient(z.detach()), expected)


def test_flat_potential_is_the_model_s(helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flat potential and our model's differ by a constant."""
    by_hand, script = helper("_by_hand"), helper("mcmc")
    monkeypatch.setattr(script, "NOISE", 0.125)  # the same number in all precisions
    x = torch.linspace(-1, 1, 7)[:, None].double()
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    problem = by_hand.TanhRegression(x, x.sin(), script.NOISE, hidden=5)
    bnn = script.make_bnn(HMC, net, len(x))
    differences = []
    for _ in range(3):
        values = {f"net.{name}": torch.randn_like(p) for name, p in net.named_parameters()}
        flat = torch.cat([value.flatten() for value in values.values()])
        trace = pyro.poutine.trace(pyro.poutine.condition(bnn.model, values)).get_trace(x, x.sin())
        differences.append((problem.potential(flat) + trace.log_prob_sum()).item())
    assert differences == pytest.approx([differences[0]] * 3, rel=1e-9)


def test_leapfrog_steps_are_counted(helper: Any) -> None:
    script = helper("mcmc")
    x = torch.linspace(-1, 1, 10)[:, None]
    net = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1))
    kernel = functools.partial(HMC, **script.FIXED, trajectory_length=4.5e-3)
    bnn = script.make_bnn(kernel, net, len(x))
    assert script.counted(lambda: script.our_chain(bnn, x, x, 5))() == 5 * 4
