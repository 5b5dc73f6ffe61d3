"""Every part on a pretend accelerator: no tensor is elsewhere, and the host reads little."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tyxe
from tests.soak.flows import (
    ADAM,
    FLOWS,
    OF_THE_HOST,
    Device,
    Flow,
    assert_there,
    batches_of_the_host,
    make_batches,
)
from tests.soak.pretend import DEVICE, DeviceMismatch, DeviceTensor, Host, pretend
from tyxe.bnn import members
from tyxe.integrations.sklearn import BayesianClassifier, BayesianRegressor
from tyxe.program import Program
from tyxe.rng import set_torch_rng, torch_rng, torch_rng_kept

pytestmark = [
    pytest.mark.device,
    pytest.mark.timeout(900),  # of all together
    pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning"),
]

MOST_READS = 3  # loss, gradient, and whether targets are missing that are on the device


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_no_tensor_is_elsewhere_and_a_step_waits_three_times_at_most(flow: Flow) -> None:
    with pretend() as host:
        reads = flow(host)
    assert reads.total() <= MOST_READS, reads
    if flow.wrapper == "VariationalBNN" and flow.handler == "none":
        # Loss and gradient are checked to be finite; nothing else is read.
        assert reads.total() == 1


def test_operations_of_two_devices_are_found() -> None:
    with pretend():
        there, here = torch.ones(2, device=DEVICE), torch.ones(2)
        mismatches = [
            lambda: there + here,
            lambda: torch.stack([there, here]),
            lambda: torch.nn.functional.linear(there[None], here[None]),
            lambda: there.index_select(0, here.long()),
        ]
        for mismatch in mismatches:
            with pytest.raises(DeviceMismatch):
                mismatch()
        assert ((there * 2).cpu() == 2).all()
        assert (there * torch.tensor(2.0)).device == DEVICE


def test_what_the_host_reads_is_counted() -> None:
    with pretend() as host:
        x = torch.ones(3, device=DEVICE)
        reads = [
            x.sum().item,
            lambda: bool(x.any()),
            x.nonzero,
            lambda: x[x > 0],
            lambda: torch.linalg.cholesky(x.diag()),
            x.cpu,
        ]
        for i, read in enumerate(reads):
            read()
            assert host.reads.total() == i + 1
        x.add_(1).sum()
    assert list(host.reads) == ["elsewhere"]


def test_the_device_has_numbers_of_its_own() -> None:
    with pretend():
        torch.manual_seed(0)
        first = torch.rand(4, device=DEVICE).cpu()
        before = torch.get_rng_state()
        second = torch.rand(4, device=DEVICE).cpu()
        assert torch.equal(torch.get_rng_state(), before)
        assert not torch.equal(first, second)
        torch.manual_seed(0)
        assert torch.equal(torch.rand(4, device=DEVICE).cpu(), first)
    assert not torch.accelerator.is_available()


def test_an_accelerators_generator_is_saved_and_put_back():
    with pretend():
        torch.rand(3, device=DEVICE)
        state, host = torch_rng(), torch.rand(3)
        expected = torch.rand(3, device=DEVICE).cpu()
        torch.rand(3, device=DEVICE)
        set_torch_rng(state)
        assert torch.equal(torch.rand(3, device=DEVICE).cpu(), expected)
        assert torch.equal(torch.rand(3), host)
        with torch_rng_kept():
            following = torch.rand(3, device=DEVICE).cpu()
        assert torch.equal(torch.rand(3, device=DEVICE).cpu(), following)


def test_a_state_of_an_accelerator_is_no_use_to_the_cpu_alone(monkeypatch):
    with pretend():
        state = torch_rng()
        with monkeypatch.context() as patch:  # a device that is not in use is not started
            patch.setattr(torch.pretend, "is_initialized", lambda: False)
            assert len(torch_rng()) == 1
    expected = torch.rand(3)
    assert len(state) == 2
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    set_torch_rng(state)
    assert torch.equal(torch.rand(3), expected)
    assert len(torch_rng()) == 1


def test_samples_go_to_a_file_of_the_host(tmp_path: Path) -> None:
    flow = Flow("MCMC_BNN", "samplers HMC", "none", "Gaussian, inferred")
    with pretend() as host:
        bnn = flow.make(host)
        (x, _), *_ = batches = make_batches(flow.data, host)
        bnn.fit(batches, 5, warmup_steps=1, file=tmp_path / "samples", progress=False)
        assert bnn.samples["net.0.weight"].device.type == "cpu"
        assert bnn.predict(x, num_predictions=4)[0].device == DEVICE


@pytest.mark.parametrize("wrapper", ["VariationalBNN", "LaplaceBNN", "MCMC_BNN", "EnsembleBNN"])
def test_batches_of_the_host_go_to_the_device(wrapper: str) -> None:
    with pretend() as host:
        batches_of_the_host(wrapper, host)


@pytest.mark.parametrize("use", OF_THE_HOST, ids=lambda use: use.__name__)
def test_what_is_of_the_host_goes_to_the_device(use: Callable[[Host], None]) -> None:
    with pretend() as host:
        use(host)


def test_batches_that_are_scored_are_on_the_device_one_by_one() -> None:
    """All of them together may not have room there."""
    alive = []

    def count(*_: Any) -> None:
        found = [o for o in gc.get_objects() if type(o) is DeviceTensor and o.shape == (7, 3)]
        alive.append(len(found))

    flow = Flow("VariationalBNN", "AutoNormal", "none", "Gaussian")
    with pretend() as host:
        bnn = flow.make(host)
        bnn.net.register_forward_pre_hook(count)
        batches = [(torch.randn(7, 3), torch.randn(7, flow.data.width)) for _ in range(5)]
        tyxe.calibration.ScaleFactor().wrap(bnn, batches, num_predictions=2)
        tyxe.diagnostics.scores(bnn, batches, num_predictions=2)
    assert alive
    assert max(alive) < 3


def test_members_are_trained_together_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def untraced(function: Any, *arguments: Any, **how: Any) -> Program:
        return Program(function, *arguments)

    # The tracer knows nothing of a device that is written in Python.
    monkeypatch.setattr(members, "Program", untraced)
    flow = Flow("VariationalBNN", "AutoNormal", "none", "classes")
    with pretend() as host:
        ensemble = tyxe.EnsembleBNN(lambda _: flow.make(host), 2)
        batches = make_batches(flow.data, Device(torch.device("cpu")))
        histories = ensemble.fit(
            batches, ADAM, 2, vectorize=True, validation=batches, patience=1, clip_norm=1.0
        )
        assert all(len(history.loss) == 2 for history in histories)
        assert_there(ensemble.predict(batches[0][0]), host)


@pytest.mark.parametrize("method", ["last_layer_laplace", "ensemble"])
def test_estimators_fit_and_predict_on_the_device(method: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    options = {"hidden": (4,), "method": method, "num_epochs": 2, "random_state": 0}
    with pretend():
        numbers = BayesianRegressor(**options, device=str(DEVICE)).fit(x, x[:, 0])
        classes = BayesianClassifier(**options, device=str(DEVICE)).fit(x, x[:, 0] > 0)
        for model in (numbers, classes):
            assert {p.device for p in model.bnn_.parameters()} == {DEVICE}
            assert model.sample_y(x[:5], 2).shape == (5, 2)
        assert [end.shape for end in numbers.predict_interval(x[:5])] == [(5,), (5,)]
        assert classes.predict_proba(x[:5]).shape == (5, 2)
