"""experiments/sbc.py: every method on both nets; ranks of seeds are pooled."""

import pytest
import sbc
import torch


# Fits and chains of a smoke test are too short to be any good.
@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_every_method_on_both_nets(smoke):
    found = smoke(sbc.experiment)
    assert len(found.cells) == len(sbc.POINTS) * len(sbc.METHODS)
    s = sbc.Settings.at("smoke")
    for cell in found.cells.values():
        assert cell["ranks"].keys() == {"first", "middle", "square", "log likelihood"}
        assert all(len(ranks) == s.simulations for ranks in cell["ranks"].values())
        assert all(0 <= rank <= s.draws for ranks in cell["ranks"].values() for rank in ranks)
    assert found.page.count("\n| ") == 2 * len(sbc.METHODS) + 2  # with a head each


def test_ranks_of_seeds_are_pooled():
    class Record:
        content = {"settings": {"draws": 9}}  # noqa: RUF012

        def of(self, *key):
            names = ("first", "middle", "square", "log likelihood")
            ranks = {name: [0, 9, 4, 5] for name in names}
            return {("0",): {"ranks": ranks}, ("1",): {"ranks": ranks}}

    found = sbc.pooled(Record(), "regression", "NUTS")
    assert torch.equal(found.ranks["first"], torch.tensor([0, 9, 4, 5] * 2))
    assert sbc.outer(found) == 0.5
