"""experiments/sklearn_methods.py: every method on numbers and on classes."""

import math

import pytest

pytest.importorskip("sklearn", minversion="1.6", reason="the extra `sklearn`")

import sklearn_methods


# Fits of seconds on few points bring the warnings that they deserve.
@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_every_method_on_numbers_and_classes(smoke):
    found = smoke(sklearn_methods.experiment, "--data", "friedman", "wine")
    assert len(found.cells) == 2 * len(sklearn_methods.ROWS)
    assert all(math.isfinite(cell["NLL"]) for cell in found.cells.values())
    assert len(found.page.splitlines()) == 2 + len(sklearn_methods.ROWS)


def test_every_set_is_there():
    for name in [*sklearn_methods.NUMBERS, *sklearn_methods.CLASSES]:
        X, y = sklearn_methods.load(name)
        assert len(X) == len(y) > 100
