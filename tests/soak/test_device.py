"""A slice of the flows on a pretend accelerator, and that the suite finds what it looks for."""

import pytest
import torch

import tyxe
from tests.soak.device import FLOWS, GUIDES, Flow, follow, run
from tests.soak.pretend import DEVICE, DeviceMismatch, pretend

# Of every part at least one; `run` takes them by chance.
SLICE = [
    *(
        Flow("VariationalBNN", guide, "none", "Categorical")
        for guide in GUIDES
        if guide != "AutoBernoulli"
    ),
    Flow("VariationalBNN", "AutoBernoulli", "local_reparameterization", "Gaussian"),
    Flow("VariationalBNN", "AutoNormal", "flipout", "Gaussian, inferred"),
    Flow("VariationalBNN", "AutoNormal", "selective_mask", "Poisson"),
    Flow("VariationalBNN", "AutoNormal", "selective_scale", "heteroskedastic"),
    Flow("VariationalBNN", "AutoNormal", "variational_laplace", "Bernoulli"),
    Flow("VariationalBNN", "AutoInducing, full", "local_reparameterization", "Gaussian, learned"),
    Flow("PytorchBNN", "pyro AutoLowRankMultivariateNormal", "none", "Gaussian"),
    Flow("LaplaceBNN", "kron ggn", "none", "Categorical"),
    Flow("LaplaceBNN", "full empirical", "none", "heteroskedastic"),
    Flow("LaplaceBNN", "diag fisher", "none", "Poisson"),
    Flow("MCMC_BNN", "pyro HMC", "none", "Gaussian, inferred"),
    Flow("MCMC_BNN", "samplers NUTS", "none", "Gaussian, inferred"),
    Flow("MCMC_BNN", "samplers MCLMC", "none", "Categorical"),
]
MOST_READS = 3  # loss, gradient, and whether targets are missing that are on the device


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("flow", SLICE, ids=str)
def test_no_tensor_is_elsewhere_and_a_step_waits_three_times_at_most(flow: Flow) -> None:
    assert flow in FLOWS
    seen = follow(flow)
    assert seen.mismatch is None
    assert seen.step.total() <= MOST_READS, seen.step
    if flow.wrapper == "VariationalBNN" and flow.handler == "none":
        # Loss and gradient are checked to be finite; nothing else is read.
        assert seen.step.total() == 1


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_a_run_has_figures() -> None:
    found = run(count=2, seed=3)
    assert found["flows"] == 2
    assert found["device mismatches"] == 0
    assert any(name.startswith("host reads a step, ") for name in found)


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


def test_reads_are_placed_in_the_package() -> None:
    likelihood = tyxe.likelihoods.Categorical(10)
    with pretend() as host:
        likelihood.check_predictions(torch.zeros(1, 2, device=DEVICE))
    assert host.reads
    assert all(place.startswith("likelihoods/discrete.py:") for place in host.reads)


def test_a_gradient_is_that_of_the_host() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    x = torch.randn(5, 3)
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    with pretend():
        net.to(DEVICE)
        loss = net(x.to(DEVICE)).square().sum()
        found = torch.autograd.grad(loss, list(net.parameters()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.inner, other)


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
