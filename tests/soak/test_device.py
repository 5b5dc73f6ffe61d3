"""Every part on a pretend accelerator: no tensor is elsewhere, and the host reads little."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import autoguide
from torch import Tensor, nn

import tyxe
from tests.oracles.architectures import N
from tests.soak import parts
from tests.soak.pretend import DEVICE, DeviceMismatch, Host, pretend
from tyxe import poutine, priors
from tyxe.guides import AutoInducing
from tyxe.rng import set_torch_rng, torch_rng, torch_rng_kept

pytestmark = [
    pytest.mark.device,
    pytest.mark.timeout(900),  # of all together
    pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning"),
]

ADAM = functools.partial(torch.optim.Adam, lr=1e-3)
NORMAL = priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
SIZES = {"inducing_rows": 2, "inducing_cols": 2, "everywhere": True}
INDUCING = functools.partial(AutoInducing, **SIZES)
GUIDES = parts.GUIDES | {
    "AutoInducing, matrix": functools.partial(
        INDUCING, q_inducing="matrix", max_lambda=0.5, max_scale_u=0.5
    ),
    "AutoInducing, not whitened": functools.partial(
        INDUCING, q_inducing="diagonal", whitened=False
    ),
    "AutoInducing, hierarchical": functools.partial(
        INDUCING, q_inducing="full", hierarchical=(2, 2)
    ),
}
HANDLERS = parts.HANDLERS | {
    "mask": lambda: poutine.selective_mask(
        mask=torch.arange(N // 2, device=DEVICE) > 0, expose=parts.DATA
    )
}
Pair = tuple[Tensor, Tensor]


class Flow(NamedTuple):
    """What is combined, by names."""

    wrapper: str
    guide: str
    handler: str
    likelihood: str


def _net(outputs: int) -> nn.Module:
    layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs)
    return nn.Sequential(*layers)


def _batches(likely: parts.Data) -> list[Pair]:
    x, outputs = torch.randn(N, 3, device=DEVICE), torch.Size([N, likely.width])
    y = likely.targets(outputs).to(DEVICE)
    return list(zip(x.split(N // 2), y.split(N // 2), strict=True))


class _Steps:
    """A loader that notes what is read in the step on its third batch, in the first pass."""

    def __init__(self, batches: list[Pair], host: Host) -> None:
        self.batches, self.host = batches, host
        self.reads: collections.Counter[str] = collections.Counter()
        self._passes = 0

    def __iter__(self) -> Iterator[Pair]:
        self._passes += 1
        for i, batch in enumerate(self.batches * 3):
            before = self.host.reads.copy()
            yield batch
            if (self._passes, i) == (1, 2):
                self.reads = self.host.reads - before


# --------------------------------------------------------------------------- flows


def _on_device(values: Any) -> None:
    for value in values if isinstance(values, tuple) else (values,):
        assert value.device == DEVICE, f"the result is on {value.device}"


def _predict(bnn: Any, x: Tensor, y: Tensor, lazy: bool) -> None:
    _on_device(bnn.predict(x, num_predictions=3))
    _on_device(bnn.predict(x, num_predictions=0))
    _on_device(bnn.evaluate(x, y, num_predictions=2))
    _on_device(bnn.sample_predictive(x, num_samples=2))
    if lazy:
        return
    pyro.set_rng_seed(0)
    whole = bnn.predict(x, num_predictions=3, aggregate=False)
    for options in ({"batch_size": 2}, {"vectorize": True}):
        pyro.set_rng_seed(0)
        again = bnn.predict(x, num_predictions=3, aggregate=False, **options)
        torch.testing.assert_close(again.cpu(), whole.cpu(), rtol=1e-4, atol=1e-5)


def _reload(bnn: Any, make: Callable[[], Any], x: Tensor) -> None:
    """Assert that a state goes to the host and back."""
    state = {
        name: value.cpu() if isinstance(value, Tensor) else value
        for name, value in bnn.state_dict().items()
    }
    other = make()
    other.load_state_dict(state)
    _on_device(other(x))
    bnn.to("cpu")
    bnn.to(DEVICE)
    _on_device(bnn(x))


def _variational(flow: Flow, host: Host) -> collections.Counter[str]:
    likely = parts.LIKELIHOODS[flow.likelihood]
    binary = flow.guide.startswith("AutoBernoulli")
    prior = priors.BinaryPrior(hide_module_types=[nn.BatchNorm1d]) if binary else NORMAL

    def make() -> tyxe.VariationalBNN:
        net = _net(likely.width).to(DEVICE)
        own = autoguide.AutoNormal if "inferred" in flow.likelihood else None
        return tyxe.VariationalBNN(net, prior, likely.likelihood(N), GUIDES[flow.guide], own)

    bnn, loader = make(), _Steps(_batches(likely), host)
    with HANDLERS[flow.handler]():
        bnn.fit(loader, ADAM, 1)
        bnn.fit(loader.batches, pyro.optim.Adam({"lr": 1e-3}), 1, num_particles=2, clip_norm=1.0)
    lazy = flow.handler in ("local reparameterisation", "flipout")
    x, y = loader.batches[0]
    with HANDLERS[flow.handler]() if lazy else nullcontext():
        _predict(bnn, x, y, lazy)
    if flow.guide == "AutoNormal":
        _on_device(bnn.predict(x, num_predictions=3, predictive="glm"))
        bnn.update_prior(priors.DictPrior(bnn.net_guide.get_detached_distributions()))
    other = make()
    other.load_checkpoint(bnn.checkpoint())
    with HANDLERS[flow.handler]():
        other.fit(loader.batches, pyro.optim.Adam({"lr": 1e-3}), 1)
    _on_device(bnn.to_module()(x))
    _reload(bnn, make, x)
    return loader.reads


def _laplace(flow: Flow, host: Host) -> collections.Counter[str]:
    likely = parts.LIKELIHOODS[flow.likelihood]
    structure, curvature = flow.guide.split()

    def make() -> tyxe.LaplaceBNN:
        return tyxe.LaplaceBNN(
            _net(likely.width).to(DEVICE),
            NORMAL,
            likely.likelihood(N),
            structure=structure,
            curvature=curvature,
        )

    bnn, loader = make(), _Steps(_batches(likely), host)
    bnn.fit(loader, ADAM, 1)
    bnn.fit_curvature(loader.batches)
    _on_device(bnn.log_marginal_likelihood())
    bnn.optimize_prior_precision(num_steps=3)
    bnn.optimize_prior_precision("grid", loader.batches, grid=[0.5, 2.0])
    x, y = loader.batches[0]
    for predictive in ("glm", "bnn"):
        _on_device(bnn.predict(x, num_predictions=3, predictive=predictive))
        _on_device(bnn.evaluate(x, y, num_predictions=3, predictive=predictive))
    _on_device(bnn.functional_variance(x))
    bnn.fit_gp(loader.batches)
    _on_device(bnn.predict(x, predictive="gp"))
    _reload(bnn, make, x)
    return loader.reads


def _pytorch(flow: Flow, host: Host) -> collections.Counter[str]:
    likely = parts.LIKELIHOODS[flow.likelihood]

    def make() -> tyxe.PytorchBNN:
        return tyxe.PytorchBNN(_net(likely.width).to(DEVICE), NORMAL, GUIDES[flow.guide])

    bnn, loader = make(), _Steps(_batches(likely), host)
    optimizer = ADAM([p for p in bnn.parameters() if p.requires_grad])
    for x, _ in loader:
        optimizer.zero_grad()
        with HANDLERS[flow.handler]():
            (bnn(x).square().sum() + bnn.cached_kl_loss).backward()
        optimizer.step()
    with bnn.hold_sample():
        _on_device(bnn(x))
    _on_device(bnn.predict(x, num_predictions=2))
    _reload(bnn, make, x)
    return loader.reads


def _mcmc(flow: Flow, host: Host) -> collections.Counter[str]:
    likely = parts.LIKELIHOODS[flow.likelihood]
    net = _net(likely.width).to(DEVICE)
    bnn = tyxe.MCMC_BNN(net, NORMAL, likely.likelihood(N), parts.KERNELS[flow.guide])
    batches = _batches(likely)
    bnn.fit(batches, num_samples=3, warmup_steps=2, progress=False)
    _predict(bnn, *batches[0], lazy=False)
    return collections.Counter()


WRAPPERS: dict[str, Callable[[Flow, Host], collections.Counter[str]]] = {
    "VariationalBNN": _variational,
    "LaplaceBNN": _laplace,
    "PytorchBNN": _pytorch,
    "MCMC_BNN": _mcmc,
}


# Of every part at least one.
ALONE = ["AutoNormal", "AutoNormal, capped", "AutoRadial", *(n for n in GUIDES if "Inducing" in n)]
ALONE += ["AutoBernoulli, relaxed", "pyro AutoDelta", "pyro AutoNormal", "pyro AutoDiagonalNormal"]
ALONE += ["pyro AutoMultivariateNormal", "pyro low rank"]
FLOWS = [
    *(Flow("VariationalBNN", guide, "none", "classes") for guide in ALONE),
    Flow("VariationalBNN", "AutoBernoulli", "local reparameterisation", "Gaussian"),
    Flow("VariationalBNN", "AutoNormal", "flipout", "Gaussian, inferred"),
    Flow("VariationalBNN", "AutoNormal", "mask", "counts"),
    Flow("VariationalBNN", "AutoNormal", "scale", "heteroskedastic"),
    Flow("VariationalBNN", "AutoNormal", "variational Laplace", "binary, event"),
    Flow("VariationalBNN", "AutoInducing, full", "local reparameterisation", "Gaussian, learned"),
    Flow("PytorchBNN", "pyro low rank", "none", "Gaussian"),
    Flow("LaplaceBNN", "kron ggn", "none", "classes"),
    Flow("LaplaceBNN", "full empirical", "none", "heteroskedastic"),
    Flow("LaplaceBNN", "diag fisher", "none", "counts"),
    Flow("MCMC_BNN", "HMC", "none", "Gaussian, inferred"),
    Flow("MCMC_BNN", "samplers NUTS", "none", "Gaussian, inferred"),
    Flow("MCMC_BNN", "samplers MCLMC", "none", "classes"),
]
MOST_READS = 3  # loss, gradient, and whether targets are missing that are on the device


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_no_tensor_is_elsewhere_and_a_step_waits_three_times_at_most(flow: Flow) -> None:
    with pretend() as host:
        reads = WRAPPERS[flow.wrapper](flow, host)
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
    expected = torch.rand(3)
    assert len(state) == 2
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    set_torch_rng(state)
    assert torch.equal(torch.rand(3), expected)
    assert len(torch_rng()) == 1


def test_a_device_that_is_not_in_use_is_not_started(monkeypatch):
    with pretend():
        monkeypatch.setattr(torch.pretend, "is_initialized", lambda: False)
        assert len(torch_rng()) == 1


def test_samples_go_to_a_file_of_the_host(tmp_path: Path) -> None:
    likely = parts.LIKELIHOODS["Gaussian, inferred"]
    with pretend():
        net = _net(likely.width).to(DEVICE)
        bnn = tyxe.MCMC_BNN(net, NORMAL, likely.likelihood(N), parts.KERNELS["samplers HMC"])
        (x, _), *_ = batches = _batches(likely)
        bnn.fit(batches, 5, warmup_steps=1, file=tmp_path / "samples", progress=False)
        assert bnn.samples["net.0.weight"].device.type == "cpu"
        assert bnn.predict(x, num_predictions=4)[0].device == DEVICE


def _host_batches(likely: parts.Data) -> list[Pair]:
    return [(x.cpu(), y.cpu()) for x, y in _batches(likely)]


def _bnn_there(wrapper: str, likely: parts.Data) -> Any:
    def variational(_: int = 0) -> tyxe.VariationalBNN:
        net = _net(likely.width).to(DEVICE)
        return tyxe.VariationalBNN(net, NORMAL, likely.likelihood(N), tyxe.guides.AutoNormal)

    if wrapper == "VariationalBNN":
        return variational()
    if wrapper == "EnsembleBNN":
        return tyxe.EnsembleBNN(variational, 2)
    net = _net(likely.width).to(DEVICE)
    if wrapper == "MCMC_BNN":
        return tyxe.MCMC_BNN(net, NORMAL, likely.likelihood(N), parts.KERNELS["samplers HMC"])
    return tyxe.LaplaceBNN(net, NORMAL, likely.likelihood(N), structure="kron")


@pytest.mark.parametrize("wrapper", ["VariationalBNN", "LaplaceBNN", "MCMC_BNN", "EnsembleBNN"])
def test_batches_of_the_host_go_to_the_device(wrapper: str) -> None:
    likely = parts.LIKELIHOODS["classes"]
    with pretend():
        bnn, batches = _bnn_there(wrapper, likely), _host_batches(likely)
        (x, y), *_ = batches
        if wrapper == "MCMC_BNN":
            bnn.fit(batches, 4, warmup_steps=1, progress=False)
        else:
            bnn.fit(batches, ADAM, 1, validation=batches)
        _on_device(bnn.predict(x, num_predictions=2))
        _on_device(bnn.predict(batches, num_predictions=2))
        _on_device(bnn.evaluate(x, y, num_predictions=2))
        _on_device(bnn.evaluate(batches, num_predictions=2))
        assert "error" in tyxe.diagnostics.scores(bnn, batches, num_predictions=2)
        sets = tyxe.calibration.SplitConformal(level=0.5).wrap(bnn, batches, num_predictions=2)
        _on_device(sets.predict(x))
        assert str(tyxe.diagnostics.diagnose(bnn, batches, batches, num_predictions=2))
        if wrapper == "LaplaceBNN":
            bnn.fit_curvature(batches)
            bnn.optimize_prior_precision("grid", batches, grid=[0.5, 2.0])
            _on_device(bnn.functional_variance(x))
            _on_device(bnn.predict(x, predictive="glm"))
            bnn.fit_gp(batches)
            _on_device(bnn.predict(x, predictive="gp"))
