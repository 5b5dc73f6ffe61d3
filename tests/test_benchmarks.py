"""Benchmarks run, write what they promise, and compare like with like."""

import copy
import functools
import importlib
import json
import math
import subprocess
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pyro
import pytest
import torch
import torch.nn.functional as F
from pyro.infer.mcmc import HMC
from torch import nn

import tyxe
from tyxe.bnn import elbo_terms

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("[a-z]*.py"))
CASES = {
    "training_step": ["mlp", "resnet18"],
    "binary_step": ["mlp"],
    "stages": ["plain-sampling", "local-reparameterisation", "flipout"],
    "prediction": ["mlp", "resnet18"],
    "mcmc": ["regression"],
    "ess": ["regression"],
    "memory": ["mlp", "resnet18", "growth"],
    "startup": ["import", "resnet50"],
    "particles": ["mlp", "tiny"],
    "compile": ["mlp", "resnet18"],
    "laplace": ["curvature", "evidence", "predictive"],
    "continual_penalty": ["kron-sum", "kron-modes", "kron-average", "diag"],
    "variational_laplace_step": ["mlp", "resnet18"],
    "inducing": ["step", "predict"],
    "gpu": ["resnet18_step", "resnet18_predict", "resnet50_step", "resnet50_predict"],
}
# Those in which nothing is written by hand: the plain net is the only yardstick.
WITHOUT_LIMITS = {"startup", "gpu"}


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
    assert set(environment["machine"]) - {"gpu"} == {"cpu", "cores", "system"}
    assert environment["threads"] == 1
    assert environment["smoke_test"] is True
    assert environment["command"].startswith(f"python benchmarks/{name}.py --smoke-test")
    assert [case["name"] for case in results["cases"]] == CASES[name]
    for case in results["cases"]:
        rows = {row["name"]: row for row in case["contestants"]}
        assert {"plain", "ours"} <= {row["who"] for row in rows.values()}
        for row in rows.values():
            assert_summary(row[case["quantity"]["name"]])
            assert_summary(row["to_plain"])
            assert row.get("plain", case["contestants"][0]["name"]) in rows
            assert ("to_limit" in row) == ("limit" in row)
            if "limit" in row:
                assert row["limit"] in rows
                assert_summary(row["to_limit"])
    everybody = [row for case in results["cases"] for row in case["contestants"]]
    assert (name in WITHOUT_LIMITS) == all(row["who"] != "by hand" for row in everybody)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to be measured")
def test_gpu_script_says_that_there_is_none(tmp_path: Path) -> None:
    done = run_script("gpu", "--json", str(tmp_path / "results.json"))
    assert done.returncode == 0
    assert done.stdout == "benchmarks/gpu.py: no CUDA device here, so nothing was measured\n"
    assert not list(tmp_path.iterdir())


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


def test_differences_are_taken_within_rounds(helper: Any) -> None:
    seconds = {"plain": [1.0, 10.0, 2.0], "ours": [2.0, 30.0, 8.0]}
    found = helper("_harness").difference(seconds, "ours", "plain")
    assert found == {"median": 6.0, "q1": 3.5, "q3": 13.0}


def test_processor_time_counts_children(helper: Any) -> None:
    clock = helper("_harness").processor_time
    start, own = clock(), time.process_time()
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", burn], check=True)
    assert clock() - start - (time.process_time() - own) >= 0.25


def test_a_case_has_its_own_quantity_references_and_findings(helper: Any) -> None:
    harness = helper("_harness")
    values = {"small": 2.0, "large": 6.0}
    apples = harness.Quantity("apples", "kA", 1e-3, lambda contestant, _: values[contestant.name])
    contestants = [
        harness.Contestant("small", lambda: None, "plain", facts={"trees": 3.0}),
        harness.Contestant("large", lambda: None, "ours", plain="large"),
    ]
    case = harness.Case(
        "case",
        "Title",
        "day",
        2,
        contestants,
        quantity=apples,
        findings=lambda numbers: {"sum": sum(map(sum, numbers.values()))},
    )
    results = harness.measured(case, 2, time.perf_counter)
    small, large = results["contestants"]
    assert small["apples"]["median"] == 2.0
    assert small["facts"] == {"trees": 3.0}
    assert large["to_plain"]["median"] == 1.0
    assert results["findings"] == {"sum": 16.0}
    lines = helper("_tables").table(results).splitlines()
    assert lines[2] == "| contestant | kA per day | ratio to its reference | trees |"
    assert lines[4] == "| small | 0.00200 (0.00200 to 0.00200) |  | 3.00 |"
    assert lines[-1] == "- sum: 16.0"


def test_what_cannot_be_built_is_reported(helper: Any) -> None:
    harness = helper("_harness")
    good = harness.Contestant("good", lambda: None, "ours")

    def bad() -> None:
        raise ValueError("no such thing\nas this")

    found, errors = harness.buildable({"good": lambda: good, "bad": bad})
    assert found == [good]
    assert errors == {"bad": "fails, ValueError: no such thing as this"}


@pytest.mark.parametrize(("value", "text"), [(0.0, "0"), (-0.01234, "-0.0123"), (1234.0, "1230")])
def test_numbers_in_tables(helper: Any, value: float, text: str) -> None:
    assert helper("_tables").number(value) == text


# --------------------------------------------------------------------------- memory


def test_memory_is_counted_to_the_byte(helper: Any) -> None:
    kept = []

    def work() -> None:
        first = torch.ones(1000)
        second = first + 1
        del first
        kept.append(second.double())

    assert helper("memory").recorded(work) == (4000 + 8000, 8000)


def test_a_step_that_leaves_memory_behind_is_no_step(helper: Any) -> None:
    memory, harness = helper("memory"), helper("_harness")
    kept: list[torch.Tensor] = []
    leaking = harness.Contestant("leaking", lambda: kept.append(torch.ones(10)), "ours")
    with pytest.raises(RuntimeError, match="leaking left 40 bytes"):
        memory.transient(leaking, time.perf_counter)


def test_kept_between_steps(helper: Any) -> None:
    """Plain: parameters and two moments. Ours: means and scales likewise, and the net's values."""
    script, vectors = helper("memory"), helper("_nets").vectors(8, True)
    rows = {c.name: c for c in script.contestants(lambda: helper("_nets").mlp(True), *vectors)}
    parameters = 16 * 8 + 8 + 8 * 8 + 8 + 8 * 4 + 4
    plain, ours = rows["plain PyTorch"].facts, rows["plain sampling, ours"].facts
    assert plain[script.PARAMETERS] == pytest.approx(4e-6 * parameters)
    # Besides, Adam keeps one number for each of the tensors.
    assert plain[script.KEPT] == pytest.approx(4e-6 * (3 * parameters + 6))
    assert ours[script.KEPT] == pytest.approx(4e-6 * (7 * parameters + 12), abs=2e-4)


def test_exponent_of_growth(helper: Any) -> None:
    sizes = [1.0, 2.0, 5.0]
    assert helper("memory").exponent(sizes, [3 * s**1.5 for s in sizes]) == pytest.approx(1.5)


# --------------------------------------------------------------------------- host reads


def test_reads_of_tensors_by_the_host_are_placed(helper: Any) -> None:
    def step() -> None:
        flag = torch.ones(3).sum()
        for _ in range(2):
            bool(flag)
        torch.zeros(3).nonzero()

    found = helper("gpu").host_reads(step, "cpu")
    line = step.__code__.co_firstlineno
    assert found == {f"test_benchmarks.py:{line + 3}": 2, f"test_benchmarks.py:{line + 4}": 1}
    assert helper("gpu").host_reads(step, "cuda") == {}


def test_reads_within_the_library_are_placed_there(helper: Any) -> None:
    likelihood, logits = tyxe.likelihoods.Categorical(10), torch.tensor([[-2.0, 1.0]])
    found = helper("gpu").host_reads(lambda: likelihood.check_predictions(logits), "cpu")
    assert found
    assert all(name.startswith("tyxe/likelihoods/discrete.py:") for name in found)


def test_warnings_of_waits_are_counted(helper: Any) -> None:
    def step() -> None:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", UserWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)

    assert list(helper("gpu").waits(step).values()) == [2]


def test_a_step_waits_once(helper: Any) -> None:
    """Loss and gradient are checked to be finite; nothing else of a step is read by the host."""
    net, x, y = small_net("mlp", helper)
    script = helper("gpu")
    step = script.ours(nullcontext, lambda: net, x, y)
    step()  # the first reads the prior's numbers
    assert list(script.host_reads(step, "cpu").values()) == [1]


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


def test_binary_by_hand_is_the_same_objective(helper: Any) -> None:
    """Without spread, data term and gradient equal ours; KL and gradient do at any logits."""
    script = helper("binary_step")
    net, (x, y) = script.tanh_mlp(True).double(), _double(helper("_nets").vectors(6, True))
    for factor in (60.0, 2.0):
        bnn = script.make_bnn(net, 50)
        hand = script.BinaryByHand(copy.deepcopy(net), 50)
        with torch.no_grad():
            for name, phi in zip(hand.names, hand.logits, strict=True):
                torch.testing.assert_close(phi, bnn.net_guide.get_logits(name), rtol=1e-12, atol=0)
                # Nowhere close to 0, so that a large factor leaves no spread.
                phi.copy_(factor * (phi + phi.sign()))
                bnn.net_guide.get_logits(name).copy_(phi)
        bnn.train()
        with tyxe.poutine.local_reparameterization():
            terms = elbo_terms(bnn.model, bnn.guide, x, y)
        (terms.kl / 50).backward()
        nll, variances = hand.data_term(x, y)
        for phi in hand.logits:
            phi.grad = torch.zeros_like(phi)
        torch.testing.assert_close(hand.add_kl(variances), terms.kl.detach(), rtol=1e-9, atol=0)
        for name, phi in zip(hand.names, hand.logits, strict=True):
            ours = bnn.net_guide.get_logits(name).grad
            torch.testing.assert_close(phi.grad, ours, rtol=1e-10, atol=1e-14)
        if factor == 60:
            expected = -terms.data.detach() / 50
            torch.testing.assert_close(nll.detach(), expected, rtol=1e-4, atol=0)


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


def test_batched_particles_by_hand_are_the_same_objective(helper: Any) -> None:
    """Without spread, eight draws give the plain loss; the KL is that of `Sampled`."""
    script = helper("particles")
    net, x, y = small_net("mlp", helper)
    batched = script.Batched(net, 50, F.cross_entropy)
    with torch.no_grad():
        for rho in batched.rhos:
            rho.fill_(math.log(1e-9))
    nll, variances = batched.data_term(x, y)
    torch.testing.assert_close(nll, F.cross_entropy(net(x), y), rtol=1e-6, atol=0)
    assert [v.shape for v in variances] == [p.shape for p in net.parameters()]


def test_batched_particles_by_hand_are_independent(helper: Any) -> None:
    script = helper("particles")
    outputs = []
    batched = script.Batched(
        nn.Linear(1, 1), 50, lambda out, _: outputs.append(out.detach()) or out.sum()
    )
    batched.data_term(torch.ones(1, 1), torch.ones(1, 1))
    assert len(outputs[0].unique()) == script.PARTICLES


def test_gaussian_nll(helper: Any) -> None:
    script = helper("particles")
    x, y = torch.randn(5, 1).double(), torch.randn(5, 1).double()
    expected = -torch.distributions.Normal(x, script.NOISE).log_prob(y).mean()
    torch.testing.assert_close(script.gaussian_nll(x, y), expected)


@pytest.mark.parametrize("method", ["plain sampling", "local reparameterisation"])
@pytest.mark.parametrize("net_name", ["mlp", "resnet18"])
def test_traced_gradients_are_those_of_the_objective(
    helper: Any, net_name: str, method: str
) -> None:
    """The graph gives, for one seed, loss, gradients and statistics of the eager program."""
    traced, script = helper("_traced"), helper("training_step")
    net, x, y = small_net(net_name, helper)
    handler = script.METHODS[method][1]
    graph_bnn, bnn = script.make_bnn(net, 50), script.make_bnn(net, 50)
    graph = traced.Traced(traced.Objective(graph_bnn, handler), x, y)
    pyro.set_rng_seed(1)
    found_loss, *found = graph.graph([p.detach() for p in graph.parameters], graph.buffers, x, y)
    pyro.set_rng_seed(1)
    loss = traced.Objective(bnn, handler)(x, y)
    loss.backward()
    torch.testing.assert_close(found_loss, loss.detach(), rtol=1e-12, atol=0)
    expected = [p.grad for p in bnn.parameters() if p.requires_grad]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(graph_bnn.net.state_dict(), bnn.net.state_dict())


def test_a_traced_step_is_one_of_adam(helper: Any) -> None:
    traced, script = helper("_traced"), helper("training_step")
    net, x, y = small_net("mlp", helper)
    bnn = script.make_bnn(net, 50)
    graph = traced.Traced(traced.Objective(bnn, nullcontext), x, y)
    before = [p.detach().clone() for p in graph.parameters]
    graph.step(graph.graph, x, y)()
    moved = torch.cat([(p - b).flatten() for p, b in zip(graph.parameters, before, strict=True)])
    # Adam's first step is the learning rate, wherever the gradient is not tiny.
    assert moved.abs().max().item() == pytest.approx(1e-3, rel=1e-3)


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


# --------------------------------------------------------------------------- Laplace


def laplace_pair(helper: Any, structure: str, last: bool = False) -> tuple[Any, Any, Any]:
    """Return Laplace by hand and ours on the small CNN, and its data, in float64."""
    script, by_hand = helper("laplace"), helper("_laplace_by_hand")
    net = script.cnn(True).double()
    batches = [(x.double(), y) for x, y in script.data(True)]
    batches = [(x[half], y[half]) for x, y in batches for half in (slice(5), slice(5, None))]
    bnn = script.make_bnn(net, script.points_in(batches), structure, last=last)
    bnn.fit_curvature(batches, progress=False)
    return by_hand.HandLaplace(net), bnn, batches


def blocks_of(bnn: Any) -> list[torch.Tensor]:
    return [block.to_dense() for block in bnn.net_guide.curvature.operator.blocks.values()]


def by_eigen(eigen: Any) -> torch.Tensor:
    basis = torch.kron(eigen.gradient_basis, eigen.input_basis)
    return (basis * eigen.values.flatten()) @ basis.mT


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_kron_by_hand_is_ours(helper: Any) -> None:
    hand, bnn, batches = laplace_pair(helper, "kron")
    hand.kron(batches, helper("_laplace_by_hand").softmax_roots)
    for eigen, block in zip(hand.eigen.values(), blocks_of(bnn), strict=True):
        torch.testing.assert_close(by_eigen(eigen), block, rtol=1e-8, atol=1e-10)
    x = batches[0][0]
    predicted = bnn.predict(x, link="probit").exp()
    torch.testing.assert_close(hand.predict(x).detach(), predicted, rtol=1e-8, atol=1e-10)
    hand.ascend(1_000)
    assert hand.precision == pytest.approx(float(bnn.optimize_prior_precision()), rel=1e-4)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_diag_by_hand_is_ours(helper: Any) -> None:
    hand, bnn, batches = laplace_pair(helper, "diag")
    hand.diag(batches, helper("_laplace_by_hand").softmax_roots)
    for diagonal, block in zip(hand.diagonal.values(), blocks_of(bnn), strict=True):
        torch.testing.assert_close(diagonal.flatten(), block.diagonal(), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("structure", ["kron", "full"])
def test_last_layer_by_hand_is_ours(helper: Any, structure: str) -> None:
    hand, bnn, batches = laplace_pair(helper, structure, last=True)
    x = batches[0][0]
    (block,) = blocks_of(bnn)
    if structure == "kron":
        hand.head_kron(batches)
        torch.testing.assert_close(by_eigen(hand.head_eigen), block, rtol=1e-8, atol=1e-10)
        predicted = hand.head_predict_kron(x)
    else:
        hand.head_full(batches)
        torch.testing.assert_close(hand.head_matrix, block, rtol=1e-8, atol=1e-10)
        hand.head_factorize()
        predicted = hand.head_predict_full(x)
    torch.testing.assert_close(
        predicted, bnn.predict(x, link="probit").exp(), rtol=1e-8, atol=1e-10
    )


def test_sampled_residuals_by_hand_have_the_fisher_as_their_second_moment(helper: Any) -> None:
    by_hand = helper("_laplace_by_hand")
    torch.manual_seed(0)
    count = 20_000
    logits = torch.tensor([[0.3, -1.0, 2.0]]).double().expand(count, 3)
    (residuals,) = by_hand.sampled_residuals(logits)
    each = residuals.unsqueeze(2) * residuals.unsqueeze(1)
    roots = torch.stack([column[0] for column in by_hand.softmax_roots(logits)], 1)
    error = each.std(0) / math.sqrt(count)
    assert bool(((each.mean(0) - roots @ roots.mT).abs() <= 5 * error).all())


def test_conventions_were_compared_with_the_peers() -> None:
    """What is recorded covers every structure and agrees; peers are not part of this project."""
    path = BENCHMARKS / "results" / "conventions" / "laplace_torch.json"
    found = json.loads(path.read_text())
    assert {"laplace-torch", "curvlinops-for-pytorch", "torch", "tyxe"} <= set(found["versions"])
    assert all(row["difference"] < found["tolerance"] for row in found["rows"])
    what = {(row["net"], row["what"]) for row in found["rows"]}
    for net in ("mlp", "cnn"):
        for name in ("full GGN", "diag GGN", "kron GGN, expand", "kron GGN, reduce"):
            assert (net, name) in what
        for structure in ("full GGN", "diag GGN", "kron GGN, expand, without biases"):
            assert (net, f"evidence, {structure}") in what
            assert (net, f"functional variance, {structure}") in what


# --------------------------------------------------------------------------- inducing weights


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_inducing_by_hand_is_ours(helper: Any) -> None:
    """With the same parameters and random numbers, loss, gradients and predictions are equal."""
    script, m = helper("inducing"), 3
    net, x, y = small_net("resnet18", helper)
    torch.manual_seed(0)
    hand, bnn = script.by_hand(net, m), script.inducing(net, m)
    guide, layers = bnn.net_guide, bnn.net_guide.layers
    assert [layer.name for layer in layers] == [f"{name}.weight" for name in hand.layers]
    ours = [*guide.row_maps.parameters(), *guide.column_maps.parameters()]
    for own, other in zip(hand.maps, ours, strict=True):
        own.data = other.detach().clone()
    hand.loc.data = torch.stack([guide.u.locs[layer.name].detach() for layer in layers])
    for name in ("log_d", "raw_lambda", "raw_scale"):
        setattr(hand, name, getattr(hand, name).detach().double().requires_grad_())
    bnn.train()
    torch.manual_seed(1)
    terms = elbo_terms(bnn.model, bnn.guide, x, y)
    with bnn.substituted(terms.values):
        loss = (terms.kl - terms.data) / script.POINTS
        loss.backward()
    torch.manual_seed(1)
    own = hand.loss(x, y)
    own.backward()
    # Ours starts at numbers that were read from float32.
    torch.testing.assert_close(own, loss, rtol=1e-6, atol=0)
    for own, other in zip(hand.maps, ours, strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-9)
    grads = torch.stack([guide.u.locs[layer.name].grad for layer in layers])
    torch.testing.assert_close(hand.loc.grad, grads, rtol=1e-4, atol=1e-9)
    raws = torch.stack([guide.conditional_scales[layer.name].grad for layer in layers])
    torch.testing.assert_close(hand.raw_lambda.grad, raws, rtol=1e-4, atol=1e-9)
    torch.manual_seed(2)
    found = hand.predict(x, 3)
    torch.manual_seed(2)
    expected = bnn.predict(x, num_predictions=3).log_softmax(-1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_sizes_of_inducing_weights_are_the_paper_s(helper: Any) -> None:
    """A mean field has twice the net's weights, its norms once."""
    script = helper("inducing")
    net = helper("_nets").resnet18()
    plain = sum(p.numel() for p in net.parameters())
    norms = sum(
        p.numel() for n in net.modules() if isinstance(n, nn.BatchNorm2d) for p in n.parameters()
    )
    size = script.size(script.ffg_w(net), net)["parameters, to plain"]
    assert size == pytest.approx((2 * plain - norms) / plain, rel=1e-12)
    assert script.size(script.inducing(net, 64), net)["parameters, to plain"] < 0.3


# --------------------------------------------------------------------------- variational Laplace


def smooth_net(name: str, helper: Any) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    net, x, y = small_net(name, helper)
    return tyxe.util.replace_activations_(net, nn.ReLU, nn.Softplus), x, y


@pytest.mark.parametrize("net_name", ["mlp", "resnet18"])
def test_variational_laplace_by_hand_is_ours(
    helper: Any, net_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same pseudo-labels, objective and gradients are equal."""
    script = helper("variational_laplace_step")
    net, x, y = smooth_net(net_name, helper)
    labels = torch.randint(int(net(x).shape[-1]), (len(x),))
    monkeypatch.setattr("tyxe.poutine.data_curvature.Fisher.pseudo_labels", lambda self, fn: labels)
    num_points, bnn = 50, script.make_bnn(net, 50)
    hand = script.VariationalLaplace(net, num_points, script.SCALE)
    # Ours starts at the same scale, read from a float32 number.
    for name, rho in zip(hand.names, hand.rhos, strict=True):
        rho.data.copy_(bnn.net_guide.get_scale(name).log())
    bnn.train()
    with tyxe.poutine.variational_laplace():
        terms = elbo_terms(bnn.model, bnn.guide, x, y)
        with bnn.substituted(terms.values):
            ((terms.kl - terms.data) / num_points).backward()
    hand.pseudo_labels = lambda log_probs: labels
    nll, variances = hand.data_term(x, y)
    nll.backward()
    hand._add_kl(variances)
    assert nll.item() == pytest.approx(-terms.data.item() / num_points, rel=1e-10)
    for name, loc, rho in zip(hand.names, hand.locs, hand.rhos, strict=True):
        guide = bnn.net_guide
        scale_grad = guide.unconstrained_scales[name].grad
        torch.testing.assert_close(loc.grad, guide.locs[name].grad, rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(rho.grad, scale_grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("net_name", ["mlp", "resnet18"])
def test_map_by_hand_is_ours(helper: Any, net_name: str) -> None:
    script = helper("variational_laplace_step")
    net, x, y = smooth_net(net_name, helper)
    bnn = script.map_bnn(net, 50)
    script.our_step(bnn, nullcontext, x, y)()
    script.map_by_hand(net, x, y, 50)()
    own = {n.removesuffix("_unconstrained"): p.grad for n, p in bnn.named_parameters()}
    for name, parameter in net.named_parameters():
        # A point mass where the prior is; the net's own parameter elsewhere.
        grad = own.get(f"net_guide.guide.net.{name}", own[f"net.{name}"])
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-9, atol=1e-12)
