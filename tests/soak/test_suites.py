"""A slice of the suites of arguments, threads, tasks, damage and alarms, and what each finds."""

import io
from contextlib import nullcontext

import pyro
import pytest
import torch
from torch._functorch.vmap import vmap_increment_nesting
from torch.autograd import forward_ad

import tyxe
from tests.soak import alarms, corruption, tasks, threads
from tests.soak.arguments import BAD, Call, attempt, is_obscure
from tests.soak.corruption import SEAL
from tyxe.metrics import nll
from tyxe.poutine import flipout
from tyxe.threads import exclusive


def test_a_call_is_made_again_with_each_bad_value():
    given = {"probs": torch.tensor([[0.5, 0.5]]), "targets": torch.tensor([0])}
    call = Call("nll", nll, given, {})
    assert float(call.again("targets", torch.tensor([1]))) == pytest.approx(0.6931, abs=1e-3)
    assert {attempt(call, "targets", bad)[0] for bad in BAD} <= {"clear", "obscure"}
    assert attempt(call, "targets", "another shape")[0] == "clear"
    with pytest.raises(TypeError) as found:
        torch.nn.functional.linear("a", "b")
    assert is_obscure(found.value, "x")


def test_tasks_get_what_is_their_own(monkeypatch):
    assert tasks.run(2, seed=0) == {"seed": 0, "tasks": 32, "looks": 96, "faults": 0, "found": []}
    monkeypatch.setattr(tyxe.PytorchBNN, "hold_sample", nullcontext)
    assert "a held draw: draws differ" in tasks.run(1, seed=0)["found"]


def test_sixteen_threads_get_the_numbers_of_one():
    found = threads.run(3, seed=0)
    assert found["calls"] == 3 * 16 * 4
    assert found["found"] == []


def test_a_wrong_number_and_what_threads_have_left_behind_are_found():
    subject = threads.Subject("LaplaceBNN")
    subject.expected["centre"] = tuple(part + 1e-6 for part in subject.expected["centre"])
    subject.expected["forward"] = subject.expected["forward"][:-1]
    assert subject.call("centre") == "differs from that of one thread"
    assert "has shapes" in subject.call("forward")
    assert subject.call("module") is None
    assert subject.left_behind() == []
    with torch.no_grad():
        subject.bnn.net[1].running_mean.add_(1)
    subject.bnn.net.train()
    assert subject.left_behind() == [
        "LaplaceBNN: changed net.1.running_mean",
        "LaplaceBNN: changed places or modes",
    ]


def test_damaged_files_are_refused_and_change_nothing() -> None:
    found = corruption.run(count=44, seed=1)
    assert found == {"accepted": 0, "damaged files": 44}


def test_a_load_without_a_check_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchecked(path):
        return torch.load(io.BytesIO(path.read_bytes()[:-SEAL]), weights_only=True)

    monkeypatch.setattr(tyxe.files, "read", unchecked)
    assert corruption.run(count=22, seed=1)["accepted"] > 0


def test_alarms_leave_nothing_behind():
    found = alarms.run(150, seed=0)
    assert found["stopped"] > 30
    assert found["found"] == []


def test_what_a_signal_has_left_behind_is_found():
    settings = pyro.settings.get()
    assert alarms.left_behind(settings) == []
    rows = vmap_increment_nesting(2, "error")
    with exclusive(), flipout(), torch.no_grad(), forward_ad.dual_level(), rows:
        found = alarms.left_behind({**settings, "validate_infer": None})
    expected = ["the lock is held", "a handler is active", "other settings of Pyro's"]
    expected += ["gradients are not recorded", "forward-mode derivatives", "a function transform"]
    assert found == expected
