"""`fit`: its objective, callbacks, modes and progress."""

import contextlib
import functools
import io
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import mean_field
from tests.oracles.fits import ADAM, PRIOR, X, Y, assert_equal, make, trainable
from tests.oracles.nets import Rounded
from tyxe.bnn import elbo_terms
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


def step_gradient(**options):
    """The gradient that one step of SGD follows."""
    bnn = make()
    start = trainable(bnn)
    pyro.set_rng_seed(7)
    bnn.fit([(X, Y)], functools.partial(torch.optim.SGD, lr=1.0), 1, **options)
    return {n: start[n] - v for n, v in trainable(bnn).items()}


def gradient_by_hand(beta=1.0, closed_form_kl=True, particles=1):
    bnn = make()
    pyro.set_rng_seed(7)
    loss = 0.0
    for _ in range(particles):
        terms = elbo_terms(bnn.model, bnn.guide, X, Y, closed_form_kl=closed_form_kl)
        loss = loss + (beta * terms.kl - terms.data) / 10 / particles
    loss.backward()
    return {n: p.grad for n, p in bnn.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("clip", [{"clip_norm": 1e-2}, {"clip_value": 1e-3}])
def test_pyro_clip_args_clip_each_parameter(clip):
    bnn = make()
    start = trainable(bnn)
    pyro.set_rng_seed(7)
    bnn.fit([(X, Y)], pyro.optim.SGD({"lr": 1.0}, clip), 1)
    moved = {name: start[name] - value for name, value in trainable(bnn).items()}
    expected = gradient_by_hand()
    for name, gradient in expected.items():
        if "clip_norm" in clip:
            expected[name] = gradient * min(1.0, 1e-2 / gradient.norm().item())
        else:
            expected[name] = gradient.clamp(-1e-3, 1e-3)
    # A difference of parameters of size 1 in float32.
    assert_equal(moved, expected, rtol=1e-3, atol=1e-6)


def test_pyro_clip_args_are_the_same_for_all_parameters():
    optim = pyro.optim.Adam({"lr": 0.1}, lambda name: {"clip_norm": 1.0})
    with pytest.raises(TypeError, match=r"clip_args is .*; expected a dictionary"):
        make().fit([(X, Y)], optim, 1)


@pytest.mark.parametrize(
    ("options", "by_hand"),
    [
        ({}, {}),
        ({"beta": 0.25}, {"beta": 0.25}),
        ({"beta": 0}, {"beta": 0.0}),
        ({"beta": lambda epoch: 0.5 + epoch}, {"beta": 0.5}),
        ({"closed_form_kl": False}, {"closed_form_kl": False}),
        ({"num_particles": 5}, {"particles": 5}),
        (
            {"num_particles": 3, "closed_form_kl": False, "beta": 2.0},
            {"particles": 3, "closed_form_kl": False, "beta": 2.0},
        ),
    ],
)
def test_a_step_follows_the_gradient_per_point(options, by_hand):
    assert_equal(step_gradient(**options), gradient_by_hand(**by_hand), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("answer", "epochs"), [(True, 2), (None, 5), (False, 5)])
def test_callback_stops_on_true(answer, epochs):
    bnn, seen = make(), []

    def callback(self, epoch, loss):
        assert self is bnn
        assert self.training
        seen.append((epoch, loss))
        return answer if epoch == 1 else None

    history = bnn.fit([(X, Y)], ADAM, 5, callback)
    assert [epoch for epoch, _ in seen] == list(range(epochs))
    assert [loss for _, loss in seen] == history.loss


def modes_of(bnn):
    return {name: module.training for name, module in bnn.named_modules()}


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("modes", ["train", "eval", "mixed"])
def test_modes_come_back_whatever_the_end(modes, error):
    bnn, seen = make(), []
    bnn.train(modes != "eval")
    if modes == "mixed":
        bnn.net[1].eval()  # a BatchNorm with frozen statistics
    before = modes_of(bnn)

    def callback(bnn, epoch, loss):
        seen.append(modes_of(bnn))
        if error is not None:
            raise error
        bnn.eval()  # a callback that evaluates

    with contextlib.nullcontext() if error is None else pytest.raises(error):
        bnn.fit([(X, Y)], ADAM, 1, callback)
    assert modes_of(bnn) == before
    assert seen[0] == before  # only what runs is in train mode
    assert bool(bnn.net[1].running_mean.any()) == (modes != "mixed")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("terminal", "progress", "shown"),
    [(False, None, False), (True, None, True), (True, False, False), (False, True, True)],
)
def test_bar_is_for_terminals(monkeypatch, terminal, progress, shown):
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    make().fit([(X[:6], Y[:6]), (X[6:], Y[6:])], ADAM, 2, progress=progress)
    assert ("fit" in stream.getvalue()) == shown
    if shown:
        assert "loss=" in stream.getvalue()
        assert "4/4" in stream.getvalue()
        assert "batch" in stream.getvalue()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("likelihood", [Categorical, HomoskedasticGaussian])
def test_data_term_of_half_predictions_is_summed_in_single_precision(likelihood, dtype):
    x, labels = torch.randn(128, 2), torch.randint(0, 3, (128,))
    if likelihood is Categorical:
        given, y = Categorical(60_000), labels
    else:
        given, y = HomoskedasticGaussian(60_000, scale=0.3), nn.functional.one_hot(labels).float()

    def history(module):
        bnn = make(module, PRIOR, likelihood=given)
        pyro.set_rng_seed(7)
        return bnn.fit([(x, y)], ADAM, 2)

    seed = torch.get_rng_state()
    found = history(Rounded(3, dtype))
    torch.set_rng_state(seed)
    assert found == history(Rounded(3, dtype, torch.float32))
    # More nats than a half can hold; a NaN or infinity would have stopped the fit.
    assert all(value < -50_000 for value in found.log_likelihood)


def normed(last=None):
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), last or nn.Linear(4, 3))


@pytest.mark.parametrize("mode_before", ["train", "eval"])
def test_a_net_that_keeps_its_norms_in_eval_mode_keeps_them(mode_before):
    class KeepsNorms(nn.Sequential):
        """The usual recipe for fine-tuning: statistics of the norms stay."""

        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    bnn = make(KeepsNorms(*normed()))
    assert [part.training for part in bnn.net] == [True, False, True]
    getattr(bnn, mode_before)()
    bnn.fit([(X, Y)], ADAM, 2)
    assert bnn.net[1].num_batches_tracked == 0
    assert not bnn.net[1].running_mean.any()


@pytest.mark.parametrize("training", [True, False])
def test_frozen_parts_keep_their_modes(training):
    frozen = normed(nn.Dropout()).requires_grad_(False)
    net = nn.Sequential(frozen, nn.Dropout(), nn.Linear(4, 3)).eval()
    frozen.train(training)
    bnn = make(net, PRIOR)
    assert [part.training for part in bnn.net[0].modules()] == [training] * 4
    assert [part.training for part in (bnn.net, bnn.net[1], bnn.net[2])] == [True] * 3
    bnn.fit([(X, Y)], ADAM, 2)
    assert (bnn.net[0][1].num_batches_tracked == 0) == (not training)


def test_a_part_whose_parameters_are_sites_is_not_frozen():
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose=["*"])
    bnn = make(normed().eval().requires_grad_(False), prior)
    assert all(part.training for part in bnn.modules())


def test_a_net_in_eval_mode_is_trained_in_train_mode_and_exported_in_eval_mode():
    bnn = make(normed().eval())
    assert all(part.training for part in bnn.modules())
    bnn.fit([(X, Y)], ADAM, 2)
    assert bnn.net[1].num_batches_tracked == 2
    for sample in (False, True):
        assert not any(part.training for part in bnn.to_module(sample).modules())
    assert all(part.training for part in bnn.modules())


class Counting(nn.Module):
    """Counts its forwards in a buffer, and in a parameter."""

    def __init__(self):
        super().__init__()
        self.layer, self.free = nn.Linear(2, 3), nn.Parameter(torch.zeros(()))
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        with torch.no_grad():
            self.free.add_(1)
        return self.layer(x) + self.free


class Filled(nn.Linear):
    """Fills its table in the first forward."""

    def __init__(self):
        super().__init__(2, 3)
        self.table, self.is_filled = nn.Buffer(torch.zeros(3)), False
        self.missing = nn.Buffer(torch.tensor(torch.nan).expand(3))

    def forward(self, x):
        if not self.is_filled:
            self.table.copy_(torch.arange(3.0))
            self.is_filled = True
        return super().forward(x) + self.table


def test_the_look_at_the_first_batch_leaves_a_first_forward_to_the_fit():
    bnn = mean_field(Filled(), Categorical(10))
    bnn.fit([(X, Y)], ADAM, 1)
    assert bnn.net.table.tolist() == [0, 1, 2]


def test_the_look_at_the_first_batch_changes_nothing_in_place():
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_modules=["layer"], expose_all=False)
    bnn = tyxe.VariationalBNN(Counting(), prior, Categorical(10), tyxe.guides.AutoNormal)
    bnn.fit([(X, Y)], functools.partial(torch.optim.SGD, lr=0.0), 3)
    assert bnn.net.calls == bnn.net.free == 3
    with pytest.raises(ValueError, match="shape"):
        bnn.fit([(X, Y[:-1])], ADAM, 1)
    assert bnn.net.calls == bnn.net.free == 3
