"""experiments/agreement.py: every method beside a reference, with its prior."""

import agreement
import pytest

import tyxe


# Fits and chains of a smoke test are too short to be any good.
@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_every_method_beside_the_reference(smoke, every_set):
    found = smoke(agreement.experiment)
    assert len(found.cells) == 2 * len(agreement.ROWS)
    for (name, method, _), cell in found.cells.items():
        assert "reason" not in cell, method
        if name == "digits":
            assert 0 <= cell["agreement"] <= 1
            assert 0 <= cell["total variation"] <= 1
        else:
            assert cell["wasserstein2"] > 0
    assert found.page.count("\n| ") == len(agreement.ROWS)
    assert "Largest R-hat" in found.page


def test_all_have_one_prior():
    s = agreement.Settings.at("smoke")
    case = agreement.OnePrior(agreement.problem(s, "digits"), s, None, 1.0, 1.0)
    assert isinstance(case.layerwise, tyxe.priors.IIDPrior)
