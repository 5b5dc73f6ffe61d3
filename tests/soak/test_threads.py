"""A slice of the threads' suite, and that it would find a fault."""

import torch

from tests.soak import threads


def test_sixteen_threads_get_the_numbers_of_one():
    found = threads.run(3, seed=0)
    assert found["calls"] == 3 * 16 * 4
    assert found["found"] == []


def test_a_wrong_number_is_found():
    subject = threads.Subject("VariationalBNN")
    subject.expected["centre"] = tuple(part + 1e-6 for part in subject.expected["centre"])
    subject.expected["forward"] = subject.expected["forward"][:-1]
    assert subject.call("centre") == "differs from that of one thread"
    assert "has shapes" in subject.call("forward")
    assert subject.call("module") is None
    assert subject.left_behind() == []


def test_what_is_left_behind_is_found():
    subject = threads.Subject("LaplaceBNN")
    with torch.no_grad():
        subject.bnn.net[1].running_mean.add_(1)
    subject.bnn.net.train()
    assert subject.left_behind() == [
        "LaplaceBNN: changed net.1.running_mean",
        "LaplaceBNN: changed places or modes",
    ]
