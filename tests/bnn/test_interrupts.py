"""Ctrl-C at bad moments: nothing is left half done, and the user's own code stops at once."""

import signal
import threading
from pathlib import Path

import pyro
import pytest
import torch
from pyro.poutine import runtime

import tyxe
from tests.oracles.states import ADAM, assert_same_state, data, fitted, make, mcmc
from tyxe.bnn import base
from tyxe.threads import INTERRUPTS

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def then_interrupt(function):
    def wrapped(*args, **kwargs):
        found = function(*args, **kwargs)
        interrupt()
        return found

    return wrapped


def in_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(60)
    return found[0]


@pytest.mark.parametrize("name", ["_modes", "_set_modes", "set_train_mode"])
def test_a_fit_that_is_stopped_as_it_begins_or_ends_leaves_no_mark(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bnn = make()
    bnn.eval()
    with monkeypatch.context() as patched:
        patched.setattr(base, name, then_interrupt(getattr(base, name)))
        with pytest.raises(KeyboardInterrupt):
            bnn.fit([data()], ADAM, 1)
    assert not any(module.training for module in bnn.modules())
    assert len(in_thread(lambda: bnn.fit([data()], ADAM, 1)).loss) == 1


def test_a_stopped_load_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, other = fitted(epochs=1), fitted(epochs=4)
    other.save(tmp_path / "bnn.tyxe", training=True)
    load = torch.nn.Module._load_from_state_dict
    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Module, "_load_from_state_dict", then_interrupt(load))
        # A second interrupt would not wait.
        patched.setattr(INTERRUPTS, "_receive", lambda *a: setattr(INTERRUPTS, "_pending", a))
        with pytest.raises(KeyboardInterrupt):
            bnn.load(tmp_path / "bnn.tyxe")
    assert_same_state(bnn, other)
    assert bnn.checkpoint()["epoch"] == 4


def test_a_stopped_update_of_the_prior_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn, expected = fitted(), fitted()
    prior = tyxe.priors.DictPrior(bnn.net_guide.get_detached_distributions())
    expected.load_state_dict(bnn.state_dict())
    expected.update_prior(prior)
    adopt = type(bnn.net_prior).adopt
    with monkeypatch.context() as patched:
        patched.setattr(type(bnn.net_prior), "adopt", then_interrupt(adopt))
        with pytest.raises(KeyboardInterrupt):
            bnn.update_prior(prior)
    assert_same_state(bnn, expected)
    assert bnn.prior is prior


@pytest.mark.parametrize("where", ["loader", "callback"])
def test_the_users_own_code_stops_at_once(where: str) -> None:
    after = []

    def own(*_: object) -> None:
        interrupt()
        after.append(where)

    def loader():
        yield data()
        if where == "loader":
            own()

    bnn = make()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        bnn.fit(loader(), ADAM, 1, own)
    assert not after
    assert signal.getsignal(signal.SIGINT) is before
    assert not INTERRUPTS._holding
    assert len(bnn.fit([data()], ADAM, 1).loss) == 1


def test_a_fit_stops_before_the_next_batch() -> None:
    batches = []

    def loader():
        for _ in range(3):
            batches.append(1)
            yield data()

    bnn, stopped = make(), []

    def stops(*_: object) -> None:
        if not stopped:
            stopped.append(1)
            interrupt()

    bnn.net.register_forward_hook(stops)
    with pytest.raises(KeyboardInterrupt):
        bnn.fit(loader(), ADAM, 1)
    assert len(batches) == 1


def test_a_chain_that_is_stopped_leaves_no_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    bnn = mcmc()
    exit_ = pyro.poutine.messenger.Messenger.__exit__
    calls = []

    def stops(*args) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return exit_(*args)

    with monkeypatch.context() as patched:
        patched.setattr(pyro.poutine.messenger.Messenger, "__exit__", stops)
        with pytest.raises(KeyboardInterrupt):
            bnn.fit([data()], 4, warmup_steps=1, disable_progbar=True)
    assert len(runtime._PYRO_STACK) == 0
