"""Warnings point at the line outside of the package, however deep the call into it."""

import functools
import inspect
import warnings

import pytest

import tyxe
from tyxe.errors import warn


def line():
    """The number of the line that calls this."""
    return inspect.currentframe().f_back.f_lineno


def as_module(name):
    """A function that calls another, as if both of its frames were of a module."""
    source = "def inner(call):\n    return call()\n\ndef outer(call):\n    return inner(call)\n"
    exec(source, names := {"__name__": name})
    return names["outer"]


def caught(call):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    (warning,) = found
    return warning


def test_a_warning_is_of_the_packages_category_and_of_this_line():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn("the scales have collapsed")
        expected = line() - 1
    (warning,) = found
    assert warning.category is tyxe.TyxeWarning
    assert str(warning.message) == "the scales have collapsed"
    assert (warning.filename, warning.lineno) == (__file__, expected)


@pytest.mark.parametrize("module", ["tyxe.bnn.training", "pyro.infer", "torch.nn", "functools"])
def test_frames_of_the_package_and_of_what_it_calls_are_skipped(module):
    warning = caught(lambda: as_module(module)(functools.partial(warn, "deep")))
    assert warning.filename == __file__


def test_a_package_whose_name_only_starts_the_same_is_not_skipped():
    warning = caught(lambda: as_module("tyxedo.nets")(functools.partial(warn, "deep")))
    assert warning.filename == "<string>"
