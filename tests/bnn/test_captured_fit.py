"""Steps that are captured whole, by a recorder in the place of a CUDA graph."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import tyxe
from tests.oracles.bnns import mean_field
from tests.oracles.recorded import Recorded
from tyxe.bnn import captured

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
DATA = [*zip(X.split(16), Y.split(16), strict=True)]  # the last batch has 8 points
ADAM = functools.partial(torch.optim.Adam, lr=0.05, fused=True)
SGD = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=True)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> type[Recorded]:
    """Let steps on a processor be captured."""
    monkeypatch.setattr(captured, "Capture", Recorded)
    monkeypatch.setattr(captured, "has_graphs", lambda device: True)
    monkeypatch.setattr(Recorded, "made", 0)
    return Recorded


def make(size: int = 40) -> tyxe.VariationalBNN:
    torch.manual_seed(0)
    parts = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
    return mean_field(nn.Sequential(*parts), tyxe.likelihoods.Categorical(size))


def fitted(data: Any = DATA, optim: Any = ADAM, epochs: int = 4, **options: Any) -> Any:
    bnn = make()
    torch.manual_seed(1)
    history = bnn.fit(data, optim, epochs, compile=True, **options)
    return bnn, history


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optim": SGD},
        {"optim": functools.partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1, fused=True)},
        {"clip_norm": 0.05},
        {"beta": lambda epoch: 0.1 * epoch},
        {"scheduler": functools.partial(ExponentialLR, gamma=0.5)},
        {"lr_multipliers": {"scale": 3.0}},
        {"nan_check": "epoch"},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_captured_steps_are_the_uncaptured_ones(
    recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    bnn, history = fitted(**options)
    assert recorded.made == 2  # one for each shape of a batch
    monkeypatch.setattr(captured, "has_graphs", lambda device: False)
    expected, other = fitted(**options)
    assert recorded.made == 2
    assert history.loss == pytest.approx(other.loss, rel=1e-5)
    assert history.kl == pytest.approx(other.kl, rel=1e-5)
    torch.testing.assert_close(bnn.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"optim": functools.partial(torch.optim.Adam, lr=0.05, foreach=True)},
        {"num_particles": 2},
        {"accumulate_steps": 2, "data": DATA[:2]},
    ],
    ids=lambda options: next(iter(options), "plain"),
)
def test_what_is_compiled_and_not_captured(recorded: type[Recorded], options: Any) -> None:
    fitted(**options)
    assert recorded.made == 0


def test_a_schedule_of_other_options_ends_capturing(recorded: type[Recorded]) -> None:
    schedule = functools.partial(OneCycleLR, max_lr=0.1, total_steps=20)
    _, history = fitted(scheduler=schedule, schedule_by="batch")
    assert recorded.made <= 2
    assert history.loss[-1] < history.loss[0]


def at(bad: int, what: str) -> list[tuple[Tensor, Tensor]]:
    data = [(x.clone(), y.clone()) for x, y in DATA[:2] * 20]
    if what == "targets":
        data[bad][1][0] = 7
    else:
        data[bad][0][0, 0] = torch.nan
    return data


@pytest.mark.parametrize("what", ["targets", "inputs"])
@pytest.mark.parametrize("bad", [5, 18, 39])
def test_a_step_that_is_not_finite_changes_nothing(
    recorded: type[Recorded], what: str, bad: int
) -> None:
    """Nor does any after it, until the host looks."""
    bnn, data = make(640), at(bad, what)
    told = {"inputs": "before this step", "targets": "support of Categorical"}[what]
    torch.manual_seed(1)
    with pytest.raises(RuntimeError if what == "inputs" else ValueError, match=told):
        bnn.fit(data, ADAM, 1, compile=True)
    assert recorded.made == 1
    expected = make(640)
    torch.manual_seed(1)
    expected.fit(data[:bad], ADAM, 1, compile=True)
    torch.testing.assert_close(bnn.state_dict(), expected.state_dict(), rtol=0, atol=0)
    assert all(p.grad is None for p in bnn.parameters())


def test_a_callback_may_replace_what_a_graph_has(recorded: type[Recorded]) -> None:
    class Moves(tyxe.bnn.Callback):
        def on_batch(self, bnn: Any, epoch: int, batch: int, terms: Any) -> None:
            if (epoch, batch) == (2, 0):
                for parameter in bnn.parameters():
                    parameter.data = parameter.data.clone()

    bnn, history = fitted(callback=Moves())
    assert recorded.made == 4
    expected, other = fitted()
    assert history.loss == other.loss
    torch.testing.assert_close(bnn.state_dict(), expected.state_dict(), rtol=0, atol=0)


class Two(nn.Module):
    """A net of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.one(a) - self.two(b)


def test_each_program_has_its_own_graph_and_gradients(
    recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of equal leaves differ in structure; a callback sees the gradients of its step."""
    data = [((X, 2 * X), Y), ({"b": X, "a": 2 * X}, Y)]
    found = {}
    for how in ("captured", "compiled"):
        monkeypatch.setattr(captured, "has_graphs", lambda device, how=how: how == "captured")
        torch.manual_seed(0)
        bnn, norms = mean_field(Two(), tyxe.likelihoods.Categorical(80)), []

        class Norms(tyxe.bnn.Callback):
            def on_batch(self, bnn: Any, epoch: int, batch: int, terms: Any, norms=norms) -> None:
                norms.append(sum(float(p.grad.square().sum()) for p in bnn.net_guide.parameters()))

        torch.manual_seed(1)
        history = bnn.fit(data, ADAM, 4, compile=True, callback=Norms())
        found[how] = history.loss, norms
    assert recorded.made == 2
    assert found["captured"][0] == pytest.approx(found["compiled"][0], rel=1e-5)
    assert found["captured"][1] == pytest.approx(found["compiled"][1], rel=1e-4)


def test_a_loader_that_fills_its_memory_again_is_told_of_the_right_batch(
    recorded: type[Recorded],
) -> None:
    def batches() -> Any:
        x, y = X[:16].clone(), Y[:16].clone()
        for number in range(30):
            y[0] = 7 if number == 5 else 0
            yield x, y

    with pytest.raises(ValueError, match="support of Categorical"):
        make(480).fit(batches(), ADAM, 1, compile=True)
    assert recorded.made == 1


def test_a_hook_of_the_optimizer_ends_capturing(recorded: type[Recorded]) -> None:
    bnn, seen = make(), []
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.05, fused=True)

    def register(bnn: Any, epoch: int, loss: float) -> None:
        if epoch == 1:
            optimizer.register_step_post_hook(lambda *_: seen.append(1))

    bnn.fit(DATA, optimizer, 4, compile=True, callback=register)
    assert recorded.made == 2
    assert len(seen) == 6  # of two epochs


def test_what_cannot_be_captured_is_said_once(
    recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(function: Any, device: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(captured, "Capture", refuse)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", tyxe.TyxeWarning)
        _, history = fitted()
    found = [str(one.message) for one in caught if "captured" in str(one.message)]
    assert len(found) == 1
    assert "operation not permitted" in found[0]
    assert history.loss[-1] < history.loss[0]


@pytest.mark.parametrize("what", ["loss", "update"])
def test_a_graph_of_other_numbers_is_not_used(
    recorded: type[Recorded], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    class Other(Recorded):
        def __call__(self) -> Any:
            found = super().__call__()
            return found._replace(data=found.data + 1) if what == "loss" else super().__call__()

    monkeypatch.setattr(captured, "Capture", Other)
    with pytest.warns(tyxe.TyxeWarning, match="a graph of them gives other numbers"):
        bnn, history = fitted()
    monkeypatch.setattr(captured, "has_graphs", lambda device: False)
    expected, other = fitted()
    assert history.loss == pytest.approx(other.loss, rel=1e-6)
    torch.testing.assert_close(bnn.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-7)


def test_the_optimizer_is_as_it_was(recorded: type[Recorded]) -> None:
    bnn = make()
    optimizer = torch.optim.Adam(bnn.parameters(), lr=0.05, fused=True)
    bnn.fit(DATA, optimizer, 2, compile=True)
    assert recorded.made == 2
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.05
    assert group["capturable"] is False
    assert {int(state["step"]) for state in optimizer.state.values()} == {6}
