"""Chains by mini-batches: rates, tempering, resuming, batches of their own, storage, errors."""

import contextlib
import copy
import functools
import os
import shutil
import types
import warnings
import weakref
from dataclasses import dataclass, field
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tests.oracles.chains import NOISE, PRIOR, N, assert_samples, data, posterior
from tyxe.bnn.batches import OwnBatches
from tyxe.bnn.chains import MCMCRun
from tyxe.bnn.potential import BatchPotential, Potential
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.samplers import (
    HMC,
    MCLMC,
    NUTS,
    SGHMC,
    SGLD,
    Chains,
    Kernel,
    Transition,
    warm_start,
)

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
X, Y = data()


def make(kernel, net=None, likelihood=None):
    likelihood = likelihood or HomoskedasticGaussian(N, scale=NOISE)
    return tyxe.MCMC_BNN(net or nn.Linear(1, 1).double(), PRIOR, likelihood, kernel)


def loader(batch_size=4, shuffle=True):
    return DataLoader(TensorDataset(X, Y), batch_size, shuffle=shuffle)


class Sizes(NamedTuple):
    step_size: torch.Tensor


class Walk(Kernel):
    """A kernel of a user's, who has not thought of temperatures."""

    statistics, noises, uniforms = ("accepted",), 1, 1

    def start(self, potential, position, random):
        step_size = torch.full_like(position[:, 0], 0.3)
        return Chains((position, potential(position)[0]), Sizes(step_size), ())

    def step(self, potential, state, settings, random):
        position, energy = state
        proposal = position + settings.step_size[:, None] * random.noise[0]
        after = potential(proposal)[0]
        accepted = random.uniforms[0].log() < energy - after
        position = torch.where(accepted[:, None], proposal, position)
        energy = torch.where(accepted, after, energy)
        told = accepted.to(energy)[:, None]
        return (position, energy), Transition(accepted | True, position, energy, told)

    def plan(self, length):
        return torch.zeros(0, 1)

    def adapt(self, before, state, transition, warm, rows, random):
        raise AssertionError("there is no plan")


LONG = {"num_samples": 150, "warmup_steps": 300, "thinning": 4}
SHORT = {"num_samples": 60, "warmup_steps": 120}


@pytest.mark.parametrize(
    ("kernel", "temperature", "length"),
    [
        (SGLD(0.01, temperature=0.3), 0.3, LONG),
        (SGHMC(0.01, friction=0.3, temperature=0.3), 0.3, LONG),
        (NUTS(temperature=0.3), 0.3, SHORT),
        (HMC(num_steps=5, temperature=0.3), 0.3, SHORT),
        (MCLMC(energy_variance=1e-4, step_size=0.1, temperature=0.3), 0.3, LONG),
        (Walk(), 1.0, {**LONG, "thinning": 10}),
    ],
    ids=["SGLD", "SGHMC", "NUTS", "HMC", "MCLMC", "one's own"],
)
def test_a_temperature_divides_the_data_term_alone(kernel, temperature, length):
    bnn = make(kernel)
    bnn.fit([(X, Y)], num_chains=16, compile=False, **length)
    assert_samples(bnn.get_samples(), *posterior(temperature))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_step_without_noise_is_one_of_sgd_at_the_same_rate(temperature):
    net = nn.Linear(1, 1).double()
    kernel = SGHMC(0.05, friction=0.1, temperature=temperature, schedule="cyclical").for_points(N)
    bnn, batches = make(kernel, net), list(loader(shuffle=False))
    potential = Potential(bnn, *batches[0], temperature)
    start = potential.flatten({f"net.{n}": p.detach() for n, p in net.named_parameters()})[None]
    estimates = BatchPotential(potential, start, batches, None)
    random = kernel.randomness(start)
    state, settings, _ = kernel.start(estimates, start, random)
    sgd = torch.optim.SGD(net.parameters(), 0.05, 0.9, weight_decay=temperature / N / 1.5**2)
    for step, (x, y) in enumerate(batches + batches, 1):
        estimates.take(step)
        state, _ = kernel.step(estimates, state, settings, random)
        sgd.zero_grad()
        (-bnn.likelihood.log_likelihood(net(x), y, "mean")).backward()
        sgd.step()
    after = {f"net.{n}": p.detach() for n, p in net.named_parameters()}
    torch.testing.assert_close(state.point.position[0], potential.flatten(after))


@contextlib.contextmanager
def stopped(after):
    """Interrupt the sampling after some transitions."""

    def go(chains, progress):
        for _, _ in zip(range(after), chains.run.steps(), strict=False):
            pass
        raise KeyboardInterrupt

    with mock.patch.object(MCMCRun, "go", go), pytest.raises(KeyboardInterrupt):
        yield


def test_an_interrupted_run_goes_on_as_if_it_had_not_been():
    kernel = SGHMC(0.02, schedule="cyclical", num_cycles=2)

    def fitted(stop_at):
        torch.manual_seed(5)
        bnn = make(kernel)
        fit = functools.partial(bnn.fit, loader(5), 8, thinning=2)
        if stop_at:
            with stopped(stop_at):
                fit()
            assert 0 < bnn.samples["net.weight"].shape[1] < 8
            torch.randn(3)  # other uses of the generator do not matter
            fit = functools.partial(bnn.fit, bnn._chains.data, 8, thinning=2, resume=True)
        return fit().get_samples()["net.weight"]

    torch.testing.assert_close(fitted(None), fitted(75), rtol=0, atol=0)


def test_chains_meet_the_batches_in_orders_of_their_own_and_move_as_alone():
    net = nn.Linear(1, 1).double()
    found = []
    for given in (net, Looped(net)):
        bnn = make(SGLD(0.01), given)
        torch.manual_seed(1)
        run = bnn.fit(loader(5), 10, warmup_steps=0, num_chains=3)
        found += [v for n, v in run.get_samples(True).items() if n.endswith("weight")]
    assert len({float(chain[0]) for chain in found[0]}) == 3
    torch.testing.assert_close(found[1], found[0])


class Looped(nn.Module):
    """A net that `torch.vmap` refuses, as its forward depends on values."""

    def __init__(self, net):
        super().__init__()
        self.inner = nn.Linear(1, 1).double()
        self.inner.load_state_dict(net.state_dict())

    def forward(self, x):
        return self.inner(x) if bool(self.inner.weight.abs().sum() < 1e9) else x


def test_norms_use_the_batch_and_learn_their_statistics():
    net = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    bnn = make(SGHMC(0.01), net)
    bnn.fit(loader(shuffle=False), 4, warmup_steps=10)
    found = bnn.predict(X, num_predictions=4, aggregate=False)
    samples = bnn.get_samples()
    for index in range(4):  # each with the statistics of its own weights
        values = {n.removeprefix("net."): v[index] for n, v in samples.items()}
        alone = copy.deepcopy(net)
        alone.load_state_dict({**alone.state_dict(), **values})
        torch.optim.swa_utils.update_bn(loader(shuffle=False), alone)
        torch.testing.assert_close(found[index], alone.eval()(X))


@dataclass(frozen=True)
class Watched(SGLD):
    """Counts the positions that are alive."""

    seen: list = field(default_factory=list)
    counts: list = field(default_factory=list)

    def stops(self, transition, settings, kept):
        self.seen.append(weakref.ref(transition.position))
        self.counts.append(sum(ref() is not None for ref in self.seen))
        return super().stops(transition, settings, kept)


def test_positions_of_large_nets_are_let_go(tmp_path):
    bnn = make(Watched(0.01))
    bnn.fit(loader(), 40, file=tmp_path / "samples")
    assert len(bnn.kernel.counts) == 80
    assert max(bnn.kernel.counts) <= 2


def test_a_file_that_does_not_fit_is_an_error_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=399))
    bnn = make(SGLD(0.01))
    with pytest.raises(ValueError, match=r"take 400 bytes of file, and 399 are free.*float16"):
        bnn.fit(loader(), 25, file=tmp_path / "samples")
    assert not os.listdir(tmp_path)
    assert not len(bnn.samples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compile": True}, "mini-batches is not compiled"),
        ({"init": warm_start()}, r"a warm start takes all data at once.*bnn\.starts"),
        ({"warmup_steps": 3}, "number of steps is 13; .* for 4 cycles"),
    ],
)
def test_bad_options_leave_no_file(options, message, tmp_path):
    bnn = make(SGLD(0.01, schedule="cyclical"))
    with pytest.raises(ValueError, match=message):
        bnn.fit(loader(), 10, file=tmp_path / "samples", **options)
    assert not os.listdir(tmp_path)


def test_an_epoch_has_the_points_that_count():
    # A warning would be an error.
    x, y = torch.randn(40, 2), torch.randn(40, 1)
    weights = torch.full((40,), 0.5)
    likelihood = HomoskedasticGaussian(20, scale=NOISE)
    bnn = tyxe.MCMC_BNN(nn.Linear(2, 1), PRIOR, likelihood, SGLD(1e-4))
    batches = [*zip(x.split(20), y.split(20), weights.split(20), strict=True)]
    bnn.fit(batches, 5, progress=False)
    assert bnn.predict(x)[0].shape == (40, 1)


def test_an_epoch_of_another_size_is_told():
    bnn = make(SGLD(0.01), likelihood=HomoskedasticGaussian(6 * N, scale=NOISE))
    bnn.likelihood.dataset_size = 500
    with pytest.warns(tyxe.TyxeWarning, match="an epoch had 12 points"):
        bnn.fit(loader(), 10)


class Growing:
    """A loader whose inputs grow a hundredfold, so that a rate is too large from there on."""

    def __init__(self, after):
        self.left = after

    def __iter__(self):
        self.left -= 1
        return iter([(X if self.left > 0 else 100 * X, Y)])


def test_a_divergence_leaves_what_was_good(tmp_path):
    bnn, file = make(SGHMC(0.01)), tmp_path / "samples"
    bnn.fit([(X, Y)], 10)
    before = bnn.samples["net.weight"].clone()
    bnn.kernel = SGLD(1e9)
    with pytest.raises(RuntimeError, match="diverged"), pytest.warns(match="keeps no new samples"):
        bnn.fit(loader(), 50, file=file)
    assert torch.equal(bnn.samples["net.weight"], before)
    bnn.kernel = SGHMC(0.01)  # for which the file is not in the way
    with pytest.raises(RuntimeError, match="diverged"), pytest.warns(match=r"keeps \d+ samples of"):
        bnn.fit(Growing(100), 2000, warmup_steps=50, file=file)
    weights = bnn.samples["net.weight"]
    assert 40 <= weights.shape[1] <= 50
    assert weights.abs().max() < 10
    assert file.exists()
    with pytest.raises(RuntimeError, match="no run to resume"):
        bnn.fit([(X, Y)], 2000, warmup_steps=50, resume=True)


def test_an_interrupt_before_the_first_sample_leaves_the_file(tmp_path):
    bnn, file = make(SGLD(0.01)), tmp_path / "samples"
    with stopped(3):
        bnn.fit(loader(), 50, file=file)
    found = bnn.fit(bnn._chains.data, 50, resume=True).get_samples()["net.bias"]
    parts = torch.from_file(str(file), False, 100, dtype=torch.double).view(50, 2)
    assert torch.equal(parts[:, :1], found)


def test_gross_outliers_stop_no_chain():
    """A batch in a hundred has a target that is a thousand scales away."""
    x, y = torch.randn(400, 1).double(), torch.randn(400, 1).double() * NOISE
    y[7] = 1000 * NOISE
    likelihood = HomoskedasticGaussian(400, scale=NOISE)
    bnn = make(SGHMC(1e-4, friction=0.3), likelihood=likelihood)
    data = DataLoader(TensorDataset(x, y), 4, shuffle=True)
    assert bnn.fit(data, 300, warmup_steps=0).run.num_kept == 300


def test_chains_of_persistent_workers_have_batches_of_their_own():
    def of(seeds):
        workers = {"num_workers": 1, "persistent_workers": True}
        data = DataLoader(TensorDataset(X, Y), 4, shuffle=True, **workers)
        chains = [OwnBatches(data, None, seed) for seed in seeds]
        # Of three batches in an epoch.
        taken = [[chain.take()[0] for chain in chains] for _ in range(7)]
        assert {chain.in_epoch for chain in chains} == {N}
        return [torch.cat(batches) for batches in zip(*taken, strict=True)]

    first, second = of((3, 4))
    assert not torch.equal(first, second)
    assert torch.equal(first, *of((3,)))
    assert torch.equal(second, *of((4,)))


def test_noise_of_batches_is_not_taken_for_agreement(recwarn):
    """R-hat of the log joint is for potentials of all data."""
    starts = {
        "net.weight": torch.tensor([[[0.0]], [[3.0]]]).double(),
        "net.bias": torch.zeros(2, 1).double(),
    }
    warnings.simplefilter("always")
    found = []
    for kernel in (SGLD(1e-9), HMC(1e-9, num_steps=1, adapt_step_size=False)):
        make(kernel).fit([(X, Y)], 50, warmup_steps=0, init=starts)
        told = [str(recwarn.pop().message) for _ in range(len(recwarn))]
        found.append(any("the chains disagree" in one for one in told))
    assert found == [False, True]
