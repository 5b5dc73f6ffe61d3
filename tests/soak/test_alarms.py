"""A slice of the alarms, and that what is left behind would be found."""

import gc
import signal

import pyro
import torch

from tests.soak import alarms
from tyxe.poutine import flipout
from tyxe.threads import exclusive


def test_alarms_leave_nothing_behind():
    found = alarms.run(150, seed=0)
    assert found["stopped"] > 30
    assert found["found"] == []


def test_an_alarm_in_a_callback_of_the_collector_is_dropped():
    found = []

    def callback(phase, info):
        found.append(phase)
        signal.raise_signal(signal.SIGALRM)

    with alarms.swallowed(), alarms.alarm(10, alarms.Alarm):
        gc.callbacks.append(callback)
        try:
            gc.collect()
        finally:
            gc.callbacks.remove(callback)
    assert found == ["start", "stop"]


def test_what_is_left_behind_is_found():
    settings = pyro.settings.get()
    assert alarms.left_behind(settings) == []
    with exclusive(), flipout(), torch.no_grad():
        found = alarms.left_behind({**settings, "validate_infer": None})
    expected = ["the lock is held", "a handler is active", "other settings of Pyro's"]
    assert found == [*expected, "gradients are not recorded"]
