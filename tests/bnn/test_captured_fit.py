"""Steps that are captured whole, by a recorder in the place of a CUDA graph."""

import functools

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import tyxe
from tests.oracles.bnns import mean_field
from tests.oracles.nets import NetOf
from tests.oracles.recorded import Recorded
from tyxe.bnn import captured

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
DATA = [*zip(X.split(16), Y.split(16), strict=True)]  # the last batch has 8 points
EQUAL = DATA[:2]
ADAM = functools.partial(torch.optim.Adam, lr=0.05, fused=True)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, fused=True)


@pytest.fixture
def recorded(monkeypatch, traced):
    """Let steps on a processor be captured."""
    monkeypatch.setattr(captured, "Capture", Recorded)
    monkeypatch.setattr(captured, "has_graphs", lambda device: True)
    monkeypatch.setattr(Recorded, "made", 0)
    return Recorded


def make(size=32, seed=0):
    torch.manual_seed(seed)
    parts = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
    return mean_field(nn.Sequential(*parts), tyxe.likelihoods.Categorical(size))


def fitted(data=EQUAL, optim=ADAM, epochs=4, size=32, compile=True, **options):
    bnn = make(size)
    torch.manual_seed(1)
    history = bnn.fit(data, optim, epochs, compile=compile, **options)
    return bnn, history


@pytest.mark.parametrize(
    "options",
    [
        {"data": DATA, "size": 40},
        {"optim": SGD},
        {"optim": ADAMW},
        {"clip_norm": 0.05},
        {"beta": lambda epoch: 0.1 * epoch},
        {"scheduler": functools.partial(ExponentialLR, gamma=0.5)},
        {"lr_multipliers": {"scale": 3.0}},
        {"nan_check": "epoch"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_captured_steps_are_the_plain_ones(recorded, options):
    bnn, history = fitted(**options)
    assert recorded.made == (2 if "data" in options else 1)  # one for each shape of a batch
    expected, other = fitted(**options, compile=False)
    assert history.loss == pytest.approx(other.loss, rel=1e-5)
    assert history.kl == pytest.approx(other.kl, rel=1e-5)
    torch.testing.assert_close(bnn.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"optim": functools.partial(torch.optim.Adam, lr=0.05, foreach=True)},
        {"num_particles": 2},
        {"accumulate_steps": 2},
    ],
)
def test_what_is_compiled_and_not_captured(recorded, options):
    fitted(**options)
    assert recorded.made == 0


def test_a_schedule_of_other_options_ends_capturing(recorded):
    schedule = functools.partial(OneCycleLR, max_lr=0.1, total_steps=20)
    _, history = fitted(scheduler=schedule, schedule_by="batch")
    assert recorded.made <= 1
    assert history.loss[-1] < history.loss[0]


@pytest.mark.parametrize(("what", "bad"), [("inputs", 5), ("targets", 18), ("inputs", 39)])
def test_a_step_that_is_not_finite_changes_nothing(recorded, what, bad):
    """Nor does any after it, until the host looks."""
    data = [(x.clone(), y.clone()) for x, y in EQUAL * 20]
    if what == "targets":
        data[bad][1][0] = 7
        error, message = ValueError, "support of Categorical"
    else:
        data[bad][0][0, 0] = torch.nan
        error, message = RuntimeError, "before this step"
    bnn = make(640)
    torch.manual_seed(1)
    with pytest.raises(error, match=message):
        bnn.fit(data, ADAM, 1, compile=True)
    assert recorded.made == 1
    expected, _ = fitted(data[:bad], epochs=1, size=640)
    torch.testing.assert_close(bnn.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert all(p.grad is None for p in bnn.parameters())


@pytest.mark.parametrize(("room", "waits"), [(2**26, [16, 16, 6]), (1300, [4] * 9 + [2])])
def test_the_host_waits_once_for_so_many_steps(recorded, monkeypatch, room, waits):
    """Of batches of 320 bytes, some of which have room."""
    monkeypatch.setattr(captured, "READ_BYTES", room)
    read, found = captured.CapturedSteps.read, []

    def noted(steps):
        found.append(len(steps._unread))
        return read(steps)

    monkeypatch.setattr(captured.CapturedSteps, "read", noted)
    fitted(EQUAL * 20, epochs=1, size=640)
    assert [count for count in found if count] == waits  # without the first two


def test_a_bad_step_ends_the_fit_when_the_host_looks(recorded):
    class Count(tyxe.bnn.Callback):
        steps = 0

        def on_batch(self, bnn, epoch, batch, terms):
            self.steps += 1

    data, count = [(x.clone(), y) for x, y in EQUAL * 20], Count()
    data[5][0][0, 0] = torch.nan
    with pytest.raises(RuntimeError, match="before this step"):
        make(640).fit(data, ADAM, 1, count, compile=True)
    assert count.steps <= 5 + captured.READ_EVERY


def test_gradients_of_an_epoch_are_not_those_of_the_next(recorded):
    kept = []

    def keep(bnn, epoch, loss):
        gradients = [p.grad for p in bnn.parameters() if p.grad is not None]
        kept.append([(gradient, gradient.clone()) for gradient in gradients])

    fitted(callback=keep)
    assert recorded.made == 1
    assert all(torch.equal(now, then) for gradients in kept for now, then in gradients)
    assert all(kept)


def test_members_with_random_numbers_of_their_own_are_captured(recorded):
    found = []
    for compile in (True, False):
        torch.manual_seed(0)
        ensemble = tyxe.EnsembleBNN(lambda index: make(seed=index), 2)
        ensemble.fit(EQUAL, ADAM, 2, compile=compile)
        found.append(ensemble.state_dict())
    assert recorded.made == 2
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_a_callback_may_replace_what_a_graph_has(recorded):
    class Moves(tyxe.bnn.Callback):
        def on_batch(self, bnn, epoch, batch, terms):
            if (epoch, batch) == (2, 0):
                for parameter in bnn.parameters():
                    parameter.data = parameter.data.clone()

    bnn, history = fitted(callback=Moves())
    assert recorded.made == 2
    expected, other = fitted()
    assert history.loss == other.loss
    torch.testing.assert_close(bnn.state_dict(), expected.state_dict(), rtol=0, atol=0)


def test_each_program_has_its_own_graph_and_gradients(recorded, monkeypatch):
    """Batches of equal leaves differ in structure; a callback sees the gradients of its step."""
    data = [((X, 2 * X), Y), ({"b": X, "a": 2 * X}, Y)]
    found = {}
    for captures in (True, False):
        monkeypatch.setattr(captured, "has_graphs", lambda device, captures=captures: captures)
        torch.manual_seed(0)
        parts = {"one": nn.Linear(3, 3), "two": nn.Linear(3, 3)}
        net = NetOf(lambda self, a, b: self.one(a) - self.two(b), **parts)
        bnn, norms = mean_field(net, tyxe.likelihoods.Categorical(80)), []

        class Norms(tyxe.bnn.Callback):
            def on_batch(self, bnn, epoch, batch, terms, norms=norms):
                norms.append(sum(float(p.grad.square().sum()) for p in bnn.net_guide.parameters()))

        torch.manual_seed(1)
        history = bnn.fit(data, ADAM, 4, compile=True, callback=Norms())
        found[captures] = history.loss, norms
    assert recorded.made == 2
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-5)
    assert found[True][1] == pytest.approx(found[False][1], rel=1e-4)


def test_a_loader_that_fills_its_memory_again_is_told_of_the_right_batch(recorded):
    def batches():
        x, y = X[:16].clone(), Y[:16].clone()
        for number in range(30):
            y[0] = 7 if number == 5 else 0
            yield x, y

    with pytest.raises(ValueError, match="support of Categorical"):
        make(480).fit(batches(), ADAM, 1, compile=True)
    assert recorded.made == 1


def test_a_hook_of_the_optimizer_ends_capturing(recorded):
    bnn, seen = make(), []
    optimizer = ADAM(bnn.parameters())

    def register(bnn, epoch, loss):
        if epoch == 1:
            optimizer.register_step_post_hook(lambda *_: seen.append(1))

    bnn.fit(EQUAL, optimizer, 4, compile=True, callback=register)
    assert recorded.made == 1
    assert len(seen) == 4  # of two epochs


def test_what_cannot_be_captured_is_said_once(recorded, monkeypatch):
    def refuse(function, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured, "Capture", refuse)
    with pytest.warns(tyxe.TyxeWarning, match="operation not permitted") as caught:
        _, history = fitted(DATA, size=40)
    assert len([one for one in caught if "captured" in str(one.message)]) == 1
    assert history.loss[-1] < history.loss[0]


@pytest.mark.parametrize("what", ["loss", "update"])
def test_a_graph_of_other_numbers_is_not_used(recorded, monkeypatch, what):
    class Other(Recorded):
        def __call__(self):
            found = super().__call__()
            return found._replace(data=found.data + 1) if what == "loss" else super().__call__()

    monkeypatch.setattr(captured, "Capture", Other)
    with pytest.warns(tyxe.TyxeWarning, match="a graph of them gives other numbers"):
        bnn, history = fitted()
    expected, other = fitted(compile=False)
    assert history.loss == pytest.approx(other.loss, rel=1e-6)
    torch.testing.assert_close(bnn.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-7)


def test_the_optimizer_is_as_it_was(recorded):
    bnn = make()
    optimizer = ADAM(bnn.parameters())
    bnn.fit(EQUAL, optimizer, 2, compile=True)
    assert recorded.made == 1
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.05
    assert group["capturable"] is False
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
