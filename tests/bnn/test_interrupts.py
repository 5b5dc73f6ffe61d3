"""Ctrl-C at chosen moments: a BNN is as it was, and nothing stays; the soak has random ones."""

import contextlib
import itertools
import signal
from pathlib import Path

import pyro
import pytest
import torch

from tests.oracles.states import ADAM, assert_same_state, data, fitted, make, mcmc
from tests.soak import alarms
from tests.soak.subjects import SUBJECTS
from tests.soak.verdict import PACKAGE
from tyxe import threads
from tyxe.errors import UNREAD
from tyxe.poutine import variational_laplace
from tyxe.threads import handlers

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


def interrupt():
    signal.raise_signal(signal.SIGINT)


class _StopsOnce:
    """`UNREAD`, with a Ctrl-C right after it is set, before anything could set it back."""

    get, reset, stopped = UNREAD.get, UNREAD.reset, False

    def set(self, value):
        token = UNREAD.set(value)
        if value and not self.stopped:
            self.stopped = True
            interrupt()
        return token


def test_numbers_are_checked_after_a_stop(monkeypatch):
    monkeypatch.setattr("tyxe.threads.UNREAD", _StopsOnce())
    with pytest.raises(KeyboardInterrupt):
        make().fit([data()], ADAM, 4)
    assert not UNREAD.get()


def test_a_stopped_load_leaves_what_was_there(tmp_path, monkeypatch):
    bnn, other, before = fitted(epochs=1), fitted(epochs=4), fitted(epochs=1)
    before.load_state_dict(bnn.state_dict())
    other.save(tmp_path / "bnn.tyxe", training=True)
    load, calls = torch.nn.Module._load_from_state_dict, []

    def stops_once(*args):
        load(*args)
        calls.append(1)
        if len(calls) == 3:
            interrupt()

    with monkeypatch.context() as patched:
        patched.setattr(torch.nn.Module, "_load_from_state_dict", stops_once)
        with pytest.raises(KeyboardInterrupt):
            bnn.load(tmp_path / "bnn.tyxe")
    assert_same_state(bnn, before)


@pytest.mark.parametrize("where", ["loader", "callback", "net"])
def test_the_users_own_code_stops_at_once(where):
    after = []

    def own(*_):
        interrupt()
        after.append(where)

    def loader():
        yield data()
        if where == "loader":
            own()

    bnn = make()
    if where == "net":
        bnn.net.register_forward_hook(own)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        bnn.fit(loader(), ADAM, 1, own if where == "callback" else None)
    assert not after
    assert signal.getsignal(signal.SIGINT) is before
    bnn.net._forward_hooks.clear()
    assert len(bnn.fit([data()], ADAM, 1).loss) == 1


def test_an_error_inside_leaves_the_kernels_of_attention():
    before = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(KeyboardInterrupt), variational_laplace():
        interrupt()
    assert not handlers()
    now = torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()
    assert now == before


def test_a_chain_that_is_stopped_leaves_no_handler(monkeypatch):
    bnn, calls = mcmc(), []
    exit_ = pyro.poutine.messenger.Messenger.__exit__

    def stops(*args):
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return exit_(*args)

    with monkeypatch.context() as patched:
        patched.setattr(pyro.poutine.messenger.Messenger, "__exit__", stops)
        with pytest.raises(KeyboardInterrupt):
            bnn.fit([data()], 4, warmup_steps=1, disable_progbar=True)
    assert not handlers()


def _stopping(method, own, stops):
    """Return a method of contexts that calls a function before or after it does its work."""

    def enter(self):
        value = method(self)
        if own(self):
            stops()
        return value

    def leave(self, *error):
        if own(self):
            stops()
        return method(self, *error)

    return leave if method.__name__ == "__exit__" else enter


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
@pytest.mark.parametrize("kind", [contextlib._GeneratorContextManager, torch.inference_mode])
def test_contexts_that_an_error_leaves_open(kind, method, monkeypatch):
    """Their `with` has not begun, or is ending: what ends them is the end of the traceback."""
    count = [0, 0]

    def stops():
        count[0] += 1
        if count[0] == count[1]:
            raise KeyboardInterrupt

    def own(context):
        if kind is torch.inference_mode:
            return True
        return Path(context.gen.gi_code.co_filename).is_relative_to(PACKAGE)

    bnns = {name: built().eval() for name, built in SUBJECTS.items() if name != "MCMC_BNN"}
    works, settings = alarms._works(bnns), pyro.settings.get()
    replaced = _stopping(getattr(kind, method), own, stops)
    ends = "GENERATORS" if kind is contextlib._GeneratorContextManager else "INFERENCE_MODE"
    with monkeypatch.context() as patched:
        patched.setattr(kind, method, replaced)
        patched.setattr(threads, f"_ENDS_OF_{ends}", {replaced.__code__})
        for name, work in works.items():
            for place in itertools.count(1):
                count[:] = 0, place
                try:
                    work()
                except KeyboardInterrupt:
                    assert not alarms.left_behind(settings), (name, place)
                else:
                    break
                # The traceback is gone.
                assert not alarms.left_behind(settings), (name, place)
            assert place > 1
