"""A slice of the suites of threads, damage and alarms, and that each finds faults."""

import io

import pyro
import pytest
import torch
from torch._functorch.vmap import vmap_increment_nesting
from torch.autograd import forward_ad

import tyxe
from tests.soak import alarms, corruption, threads
from tests.soak.corruption import SEAL
from tyxe.poutine import flipout
from tyxe.threads import exclusive


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
