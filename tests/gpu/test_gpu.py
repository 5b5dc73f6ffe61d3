"""What runs on a processor, on a GPU: every flow, the numbers, memory, files and captures.

`TYXE_GPU=cpu` runs them without one, which shows that the tests are right.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import tyxe
from tests.soak.flows import (
    FLOWS,
    OF_THE_HOST,
    Device,
    Flow,
    batches_of_the_host,
)
from tyxe import program
from tyxe.bnn import captured
from tyxe.poutine import flipout, local_reparameterization
from tyxe.predictive.forwards import MOST_DRAWN
from tyxe.program import Capture

DEVICE = torch.device(os.environ.get("TYXE_GPU", "cuda:0"))
IS_GPU = DEVICE.type == "cuda"
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
ADAM = partial(torch.optim.Adam, lr=1e-2)

pytestmark = [
    pytest.mark.skipif(IS_GPU and not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning"),
    # PyTorch says it in the first backward of a process, if that begins with a product.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]


@pytest.fixture
def full_precision() -> Iterator[None]:
    """Let products in float32 be of float32, and not of TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return torch.randn(24, 3, dtype=dtype), torch.randn(24, 2, dtype=dtype)


def laplace(net: nn.Module, structure: str, num_points: int = 24) -> tyxe.LaplaceBNN:
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(num_points, scale=0.5)
    return tyxe.LaplaceBNN(net, NORMAL, likelihood, structure=structure)


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_flows(flow: Flow) -> None:
    flow(Device(DEVICE))


@pytest.mark.parametrize("wrapper", ["VariationalBNN", "LaplaceBNN", "MCMC_BNN", "EnsembleBNN"])
def test_batches_of_the_host(wrapper: str) -> None:
    batches_of_the_host(wrapper, Device(DEVICE))


@pytest.mark.parametrize("use", OF_THE_HOST, ids=lambda use: use.__name__)
def test_what_is_of_the_host_goes_to_the_device(use: Callable[[Device], None]) -> None:
    use(Device(DEVICE))


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_laplace_has_the_numbers_of_the_processor(structure: str) -> None:
    x, y = data()
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    found = []
    for device in ("cpu", DEVICE):
        bnn = laplace(copy.deepcopy(net).to(device), structure)
        bnn.fit_curvature([(x, y)])
        prediction = bnn.predict(x, predictive="glm")
        evidence = bnn.log_marginal_likelihood()
        found.append([evidence, bnn.functional_variance(x), *prediction])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-9, atol=1e-12)


def test_elbo_terms_have_the_numbers_of_the_processor() -> None:
    x, y = data()
    net, found = nn.Linear(3, 2).double(), []
    for device in ("cpu", DEVICE):
        guide = partial(tyxe.guides.AutoNormal, init_scale=1e-12)
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(24, scale=0.5)
        own = copy.deepcopy(net).to(device)
        bnn = tyxe.VariationalBNN(own, NORMAL, likelihood, guide)
        found.append(bnn.fit([(x, y)], ADAM, 3).loss)
    assert found[1] == pytest.approx(found[0], rel=1e-7)


def test_convolutions_that_round_keep_their_factors() -> None:
    """By default they round to TF32, and two passes differ by more than float32 does."""
    body = [part for _ in range(8) for part in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())]
    net = nn.Sequential(nn.Conv2d(3, 16, 3), *body, nn.Flatten(), nn.Linear(16 * 36, 5))
    x, y, found = torch.randn(32, 3, 8, 8), torch.arange(32) % 5, []
    for device in ("cpu", DEVICE):
        likelihood = tyxe.likelihoods.Categorical(32)
        bnn = tyxe.LaplaceBNN(copy.deepcopy(net).to(device), NORMAL, likelihood, structure="kron")
        bnn.fit_curvature([(x, y)])
        found.append(bnn.functional_variance(x).cpu())
        known = bnn._runtime.linearized
        assert not known.exact
        assert known.takes_several
        assert known.several_compared
    torch.testing.assert_close(found[1], found[0], rtol=0.03, atol=0.03 * float(found[0].mean()))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap on a processor
def test_recurrent_nets_have_a_curvature(full_precision: None) -> None:
    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.lstm(x)[0][:, -1])

    x, y, found = torch.randn(6, 5, 3), torch.randn(6, 2), []
    net = Last()
    for device in ("cpu", DEVICE):
        bnn = laplace(copy.deepcopy(net).to(device), "full", 6)
        bnn.fit_curvature([(x, y)])
        found.append(bnn.functional_variance(x).cpu())
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.5)
    bnn = tyxe.VariationalBNN(net.to(DEVICE), NORMAL, likelihood, tyxe.guides.AutoNormal)
    with tyxe.poutine.variational_laplace():
        assert bnn.fit([(x, y)], ADAM, 2).loss[-1] < torch.inf


def test_vectorized_ensembles() -> None:
    x, y = data(torch.float32)

    def member(_: int) -> tyxe.VariationalBNN:
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(24, scale=0.5)
        own = nn.Linear(3, 2).to(DEVICE)
        return tyxe.VariationalBNN(own, NORMAL, likelihood, tyxe.guides.AutoNormal)

    ensemble = tyxe.EnsembleBNN(member, 3)
    histories = ensemble.fit([(x, y)], ADAM, 5, vectorize=True, validation=[(x, y)])
    assert all(history.loss[-1] < history.loss[0] for history in histories)
    assert ensemble.predict(x)[0].device == DEVICE


def test_files_of_one_device_load_on_the_other(tmp_path: Path) -> None:
    x, y = data(torch.float32)
    for one, other in (("cpu", DEVICE), (DEVICE, "cpu")):
        bnn = laplace(nn.Linear(3, 2).to(one), "kron")
        bnn.fit_curvature([(x, y)])
        bnn.save(tmp_path / "bnn.tyxe")
        loaded = laplace(nn.Linear(3, 2).to(other), "kron")
        loaded.load(tmp_path / "bnn.tyxe")
        for here, there in zip(bnn.predict(x), loaded.predict(x), strict=True):
            torch.testing.assert_close(there.cpu(), here.cpu(), rtol=1e-4, atol=1e-5)


FRONTS = {
    "linear": lambda: nn.Linear(8, 16),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 4, 1)),
}


@pytest.mark.parametrize("front", FRONTS)
def test_draws_at_once_give_the_outputs_of_draws_one_by_one(front: str) -> None:
    first = FRONTS[front]()
    net = nn.Sequential(first, nn.Flatten(), nn.Tanh(), nn.Linear(16, 2)).to(DEVICE)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(24, scale=0.5)
    bnn = tyxe.VariationalBNN(net, NORMAL, likelihood, tyxe.guides.AutoNormal)
    x, found = torch.randn(24, 8), []
    for how in (False, None, None):
        torch.manual_seed(0)
        found.append(bnn.predict(x, num_predictions=9, aggregate=False, vectorize=how))
        torch.testing.assert_close(found[-1], found[0], rtol=1e-3, atol=1e-3)
    assert bnn._runtime.one_pass.is_right
    torch.manual_seed(0)
    ensemble = bnn.to_ensemble(9)
    ensemble.likelihood = None
    torch.testing.assert_close(ensemble(x.to(DEVICE)), found[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("front", FRONTS)
def test_captured_predictions_have_the_numbers_of_eager_ones(
    monkeypatch: pytest.MonkeyPatch, full_precision: None, front: str
) -> None:
    made = []

    def keep(*arguments: Any) -> Capture:
        made.append(Capture(*arguments))
        return made[-1]

    monkeypatch.setattr(program, "Capture", keep)
    net = nn.Sequential(FRONTS[front](), nn.Flatten(), nn.Tanh(), nn.Linear(16, 2)).to(DEVICE)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(24, scale=0.5)
    bnn = tyxe.VariationalBNN(net, NORMAL, likelihood, tyxe.guides.AutoNormal)
    for x in torch.randn(3, 24, 8):
        with torch.no_grad():
            bnn.net_guide.locs["3.bias"].add_(1)
        found = []
        for compile in (False, True):
            torch.manual_seed(0)
            found.append(bnn.predict(x, num_predictions=9, aggregate=False, compile=compile))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    assert len(made) == IS_GPU


@pytest.mark.parametrize("vectorize", [False, None])
def test_draws_that_are_parts_of_a_vector_run_in_fused_layers(vectorize: bool | None) -> None:
    """These kernels want weights that start at multiples of 16 bytes."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    front = nn.Linear(2, 5), nn.Linear(5, 8)  # of which the first has 15 numbers
    net = nn.Sequential(*front, body, nn.Flatten(), nn.Linear(40, 3)).to(DEVICE)
    likelihood = tyxe.likelihoods.Categorical(6)
    bnn = tyxe.VariationalBNN(net, NORMAL, likelihood, AutoLowRankMultivariateNormal)
    x = torch.randn(6, 5, 2, device=DEVICE)
    assert bnn.predict(x, num_predictions=3, vectorize=vectorize).isfinite().all()
    assert bnn.to_ensemble(3)(x).isfinite().all()


@pytest.mark.skipif(not IS_GPU, reason="the memory of a processor is not counted")
def test_predictions_take_the_memory_of_a_stack_of_draws() -> None:
    net = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512)).to(DEVICE)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(24, scale=0.5)
    bnn = tyxe.VariationalBNN(net, NORMAL, likelihood, tyxe.guides.AutoNormal)
    x, peaks = torch.randn(64, 512, device=DEVICE), []
    for count in (2, 512):
        torch.cuda.reset_peak_memory_stats(DEVICE)
        bnn.predict(x, num_predictions=count)
        peaks.append(torch.cuda.max_memory_allocated(DEVICE))
    # Noise, draws and half as much again of one stack; all draws take 4.3 GB.
    stack, outputs = 2.5 * MOST_DRAWN[False] * 4, 512 * 64 * 512 * 4
    assert peaks[1] < peaks[0] + stack + 4 * outputs


def fitted(data: Any, compile: bool, size: int = 24, **options: Any) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).to(DEVICE)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(size, scale=0.5)
    bnn = tyxe.VariationalBNN(net, NORMAL, likelihood, tyxe.guides.AutoNormal)
    return bnn, bnn.fit(data, ADAM, 4, compile=compile, **options)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Capture]:
    """Return what is captured: traces, because to compile each would take seconds."""
    monkeypatch.setattr(program, "has_compiler", lambda device: False)
    made = []

    def keep(*arguments: Any) -> Capture:
        made.append(Capture(*arguments))
        return made[-1]

    monkeypatch.setattr(captured, "Capture", keep)
    return made


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_norm": 0.1},
        {"scheduler": partial(ExponentialLR, gamma=0.5)},
        {"beta": lambda epoch: 0.1 + epoch},
        {"nan_check": "epoch"},
    ],
    ids=["plain", "clip_norm", "scheduler", "beta", "nan_check"],
)
def test_captured_steps_have_the_numbers_of_eager_ones(
    full_precision: None, captures: list[Capture], options: Any
) -> None:
    x, y = data(torch.float32)
    batches = [(x[:10], y[:10]), (x[10:20], y[10:20]), (x[20:], y[20:])]
    bnn, history = fitted(batches, True, **options)
    assert len(captures) == (2 if IS_GPU else 0)
    expected, other = fitted(batches, False, **options)
    assert history.loss == pytest.approx(other.loss, rel=1e-3)
    assert history.kl == pytest.approx(other.kl, rel=1e-3)
    torch.testing.assert_close(bnn.state_dict(), expected.state_dict(), rtol=1e-2, atol=1e-4)


def test_compiled_and_captured_steps_have_the_numbers_of_eager_ones(full_precision: None) -> None:
    x, y = data(torch.float32)
    (bnn, history), (expected, other) = (fitted([(x, y)], each) for each in (True, False))
    assert history.loss == pytest.approx(other.loss, rel=1e-3)
    torch.testing.assert_close(bnn.state_dict(), expected.state_dict(), rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_captured_steps_draw_anew(captures: list[Capture], handler: Any) -> None:
    x, y = data(torch.float32)
    with handler():
        _, history = fitted([(x, y)], True)
    assert len(captures) == IS_GPU
    assert len({*history.log_likelihood}) == 4


@pytest.mark.parametrize("bad", [5, 30])
def test_a_captured_step_that_is_not_finite_changes_nothing(
    captures: list[Capture], bad: int
) -> None:
    x, y = data(torch.float32)
    batches = [(x, y)] * 40
    batches[bad] = (x / 0, y)
    torch.manual_seed(0)
    with pytest.raises(RuntimeError, match="before this step"):
        fitted(batches, True, 24 * 40)
    assert len(captures) == IS_GPU


def test_labels_that_are_no_class_are_named(captures: list[Capture]) -> None:
    """And not by an assertion of the device, after which nothing runs there."""
    x, y = torch.randn(24, 3), torch.arange(24) % 2
    net = nn.Linear(3, 2).to(DEVICE)
    likelihood = tyxe.likelihoods.Categorical(96)
    for compile in (False, True):
        bnn = tyxe.VariationalBNN(net, NORMAL, likelihood, tyxe.guides.AutoNormal)
        batches = [(x, y), (x, y), (x, y), (x, y + 5)]
        with pytest.raises(ValueError, match="range from 5 to 6"):
            bnn.fit(batches, ADAM, 1, compile=compile)
    assert bnn.predict(x).isfinite().all()
