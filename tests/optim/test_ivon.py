"""IVON: its update, the posterior it finds, and what a fit does with it."""

import copy
import functools

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from torch import nn

import tyxe
from tests.oracles.nets import NetOf
from tests.oracles.states import assert_same_state
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical, HomoskedasticGaussian, Poisson
from tyxe.optim import IVON

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")

NOISE = 0.5
PRIORS = {
    "weight": dist.Normal(0.25, 0.5).expand((1, 3)),
    "bias": dist.Normal(torch.tensor([-0.75]), torch.tensor([2.0])),
}
MEANS = {"weight": 0.25, "bias": -0.75}
WITHOUT_BIAS = tyxe.priors.DictPrior({"weight": PRIORS["weight"]}, hide=["bias"])
PRECISIONS = {"weight": 4.0, "bias": 0.25}


def points(count=12):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 3, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 0.1


def linear(prior=None, net=None):
    pyro.set_rng_seed(0)
    net = net or nn.Linear(3, 1).double()
    prior = prior or tyxe.priors.DictPrior(PRIORS)
    return tyxe.VariationalBNN(net, prior, HomoskedasticGaussian(12, scale=NOISE), AutoNormal)


@pytest.fixture
def noise(monkeypatch):
    """The standard normal numbers of all draws, in order."""
    numbers, original = [], torch.randn_like

    def recording(like):
        numbers.append(original(like))
        return numbers[-1].clone()

    monkeypatch.setattr(torch, "randn_like", recording)
    return numbers


def transcription(start, batches, numbers, beta, particles, hidden=()):
    """METHODS' equations, one after the other, for a linear regression."""
    lr, b1, b2, h0, total = 0.1, 0.8, 0.95, 0.4, 12
    m = {n: v.numpy().copy() for n, v in start.items()}
    h = {n: np.full_like(v, h0) for n, v in m.items()}
    gm = {n: np.zeros_like(v) for n, v in m.items()}
    numbers = iter(numbers)
    for t, (x, y) in enumerate(batches, start=1):
        lam = total / beta(t - 1)
        delta = {n: PRECISIONS[n] / lam for n in m}
        g = {n: np.zeros_like(v) for n, v in m.items()}
        hhat = {n: np.zeros_like(v) for n, v in m.items()}
        for _ in range(particles):
            w = dict(m)
            for n in m:
                if n not in hidden:
                    z = next(numbers).numpy()
                    w[n] = m[n] + z / np.sqrt(lam * (h[n] + delta[n]))
            residual = x.numpy() @ w["weight"].T + w["bias"] - y.numpy()
            scaled = residual / (NOISE**2 * len(x) * particles)
            for n, one in {"weight": scaled.T @ x.numpy(), "bias": scaled.sum(0)}.items():
                g[n] += one
                hhat[n] += one * (w[n] - m[n]) * lam * (h[n] + delta[n])
        for n in m:
            gm[n] = b1 * gm[n] + (1 - b1) * g[n]
            if n in hidden:
                m[n] = m[n] - lr * gm[n] / (1 - b1**t)
                continue
            correction = 0.5 * (1 - b2) ** 2 * (h[n] - hhat[n]) ** 2 / (h[n] + delta[n])
            h[n] = b2 * h[n] + (1 - b2) * hhat[n] + correction
            pull = gm[n] / (1 - b1**t) + delta[n] * (m[n] - MEANS[n])
            m[n] = m[n] - lr * pull / (h[n] + delta[n])
    return m, {n: 1 / np.sqrt(lam * (h[n] + delta[n])) for n in m}


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("beta", [lambda epoch: 1.0, lambda epoch: 0.3, lambda epoch: 0.5 + epoch])
def test_the_update_is_that_of_the_equations(noise, beta, particles):
    bnn, (x, y) = linear(), points()
    start = {n: bnn.net_guide.get_loc(n).detach().clone() for n in PRIORS}
    optim = functools.partial(IVON, lr=0.1, betas=(0.8, 0.95), hess_init=0.4)
    bnn.fit([(x, y)], optim, 5, beta=beta, num_particles=particles)
    m, scale = transcription(start, [(x, y)] * 5, noise, beta, particles)
    for n in PRIORS:
        np.testing.assert_allclose(bnn.net_guide.get_loc(n).detach(), m[n], rtol=1e-10)
        np.testing.assert_allclose(bnn.net_guide.get_scale(n).detach(), scale[n], rtol=1e-10)


def test_parameters_without_a_posterior_take_steps_with_momentum(noise):
    bnn, (x, y) = linear(WITHOUT_BIAS), points()
    start = {"weight": bnn.net_guide.get_loc("weight"), "bias": bnn.net.bias}
    start = {n: p.detach().clone() for n, p in start.items()}
    batches = [(x[:8], y[:8]), (x[8:], y[8:])]
    bnn.fit(batches, functools.partial(IVON, lr=0.1, betas=(0.8, 0.95), hess_init=0.4), 3)
    m, _ = transcription(start, batches * 3, noise, lambda _: 1.0, 1, hidden=["bias"])
    np.testing.assert_allclose(bnn.net.bias.detach(), m["bias"], rtol=1e-10)
    np.testing.assert_allclose(bnn.net_guide.get_loc("weight").detach(), m["weight"], rtol=1e-10)


def test_strided_weights_are_updated_as_others():
    conv = nn.Conv2d(60, 100, 3, bias=False).double()
    state = {n: torch.rand_like(conv.weight) for n in ("momentum", "hessian")}
    x, y = torch.randn(2, 60, 3, 3).double(), torch.randn(2, 100).double()

    def one_step(net, state, x, y):
        prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
        bnn = tyxe.VariationalBNN(net, prior, HomoskedasticGaussian(2, scale=1.0), AutoNormal)
        optimizer = IVON(bnn.parameters(), lr=0.1)
        loc = next(bnn.net_guide.locs.parameters())
        optimizer.state[loc].update({"step": 3, **copy.deepcopy(state)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn_like", torch.ones_like)
            bnn.fit([(x, y)], optimizer, 1)
        return [p.detach() for p in bnn.net_guide.parameters()]

    strided = copy.deepcopy(conv).to(memory_format=torch.channels_last)
    whole = one_step(nn.Sequential(strided, nn.Flatten()), state, x, y)
    for channel in (0, 57, 99):
        linear = nn.Linear(540, 1, bias=False).double()
        linear.weight.data = conv.weight.data[channel].reshape(1, -1)
        own = {n: v[channel].reshape(1, -1) for n, v in state.items()}
        alone = one_step(linear, own, x.flatten(1), y[:, channel : channel + 1])
        for one, other in zip(whole, alone, strict=True):
            torch.testing.assert_close(one[channel].reshape(1, -1), other, rtol=1e-9, atol=1e-12)


def test_conjugate_regression_has_its_precision_and_its_mode():
    """Many outputs are as many regressions on the same inputs, over which errors average."""
    outputs, noise, prior = 200, 0.5, 0.7
    mixing = [[1.0, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 2, 0], [0, 0, 0, 0.2]]
    x = torch.randn(60, 4) @ torch.tensor(mixing)
    y = x @ torch.randn(4, outputs) + noise * torch.randn(60, outputs)
    bnn = tyxe.VariationalBNN(
        nn.Linear(4, outputs, bias=False),
        tyxe.priors.IIDPrior(dist.Normal(0, prior)),
        HomoskedasticGaussian(60, scale=noise),
        AutoNormal,
    )

    def slower(bnn, epoch, loss):
        for group in bnn.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + epoch / 20)

    bnn.fit([(x, y)], functools.partial(IVON, lr=0.1, betas=(0.9, 0.995)), 1400, slower)
    precision = x.T @ x / noise**2 + torch.eye(4) / prior**2
    found = bnn.net_guide.get_scale("weight").detach() ** -2
    torch.testing.assert_close(found.mean(0), precision.diagonal(), rtol=0.05, atol=0)
    mode = torch.linalg.solve(precision, x.T @ y / noise**2).T
    error = (bnn.net_guide.get_loc("weight").detach() - mode) * precision.diagonal().sqrt()
    # In units of the posterior's deviations, whose noise falls with the rate.
    assert error.std() < 0.1
    assert (error.mean(0).abs() < 4 * error.std(0) / outputs**0.5).all()


def test_history_has_the_closed_form_of_guide_and_prior():
    bnn, (x, y) = linear(), points()
    guide = bnn.net_guide
    expected = sum(
        td.kl_divergence(
            td.Normal(guide.get_loc(n), (12 * 0.4 + PRECISIONS[n]) ** -0.5), PRIORS[n]
        ).sum()
        for n in PRIORS
    )
    history = bnn.fit([(x, y)], functools.partial(IVON, lr=0.1, hess_init=0.4), 1)
    assert history.kl == pytest.approx([expected.item()], rel=1e-6)
    assert history.loss == pytest.approx([history.kl[0] - history.log_likelihood[0]])


def test_weights_that_the_net_does_not_use_go_to_their_prior():
    net = NetOf(lambda net, x: net.used(x), used=nn.Linear(3, 1), other=nn.Linear(3, 1))
    bnn = linear(tyxe.priors.IIDPrior(dist.Normal(0.5, 2)), net.double())
    bnn.fit([points()], functools.partial(IVON, lr=0.1, betas=(0.9, 0.95), hess_init=0.1), 200)
    guide = bnn.net_guide
    assert guide.get_loc("other.weight").detach().numpy() == pytest.approx(0.5, abs=1e-4)
    assert guide.get_scale("other.weight").detach().numpy() == pytest.approx(2.0, rel=1e-3)
    assert (guide.get_scale("used.weight") < 0.5).all()


def test_norms_go_on_keeping_their_statistics():
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
    bnn = tyxe.VariationalBNN(net, prior, Categorical(12), AutoNormal)
    x, y = points()
    data = [(x.float(), (y > 0).long()[:, 0])]
    losses = bnn.fit(data, functools.partial(IVON, lr=0.1, betas=(0.9, 0.9)), 60).loss
    assert sum(losses[-20:]) / 20 < 0.7 * losses[0]
    assert bnn.net[1].num_batches_tracked == 60
    assert not torch.equal(bnn.net[1].weight, torch.ones(5))


OPTIMISERS = {
    "partial": lambda bnn: functools.partial(IVON, lr=0.05, betas=(0.9, 0.9)),
    "instance": lambda bnn: IVON(bnn.parameters(), lr=0.05, betas=(0.9, 0.9)),
    "pyro": lambda bnn: pyro.optim.PyroOptim(IVON, {"lr": 0.05, "betas": (0.9, 0.9)}),
}


@pytest.mark.parametrize("optim", OPTIMISERS)
def test_a_resumed_run_is_the_uninterrupted_one(optim, tmp_path):
    x, y = points()
    data = [(x[:8], y[:8]), (x[8:], y[8:])]
    options = {"beta": lambda epoch: 1.0 if epoch < 3 else 0.5, "num_particles": 2}

    def fit(bnn, epochs):
        return bnn.fit(data, OPTIMISERS[optim](bnn), epochs, **options)

    straight, first, second = (linear(WITHOUT_BIAS) for _ in range(3))
    pyro.set_rng_seed(1)
    whole = fit(straight, 5)
    pyro.set_rng_seed(1)
    before = fit(first, 2)
    first.save(tmp_path / "bnn.tyxe", training=True)
    second.load(tmp_path / "bnn.tyxe")
    assert before.loss + fit(second, 3).loss == whole.loss
    assert_same_state(second, straight)


@pytest.mark.parametrize("bad_step", [0, 1])
def test_a_loss_that_is_not_finite_changes_nothing(bad_step):
    x, y = points()
    bnn = linear()
    states = []

    class Recording:
        def __iter__(self):
            for step in range(2):
                states.append(copy.deepcopy(bnn.state_dict()))
                yield (x * 1e200 if step == bad_step else x), y

    with pytest.raises(RuntimeError, match="training stopped"):
        bnn.fit(Recording(), functools.partial(IVON, lr=0.1), 1)
    for name, value in bnn.state_dict().items():
        assert torch.equal(value, states[-1][name]), name


def test_targets_outside_of_the_support_are_found_in_any_batch():
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
    bnn = tyxe.VariationalBNN(nn.Linear(3, 1), prior, Poisson(8, event_dim=1), AutoNormal)
    x, y = torch.ones(4, 3), torch.ones(4, 1)
    with pytest.raises(ValueError, match="outside the support"):
        bnn.fit([(x, y), (x, -y)], functools.partial(IVON, lr=0.1), 1)
