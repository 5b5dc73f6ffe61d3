"""docs/works_with.json says what works with what: each cell is tried anew."""

import importlib.util
import json
import os

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.bnn.test_standin import assert_is_the_net_at_its_draws
from tests.integrations.works_with import COLUMNS, DOCS, ROWS, row, table

os.environ.setdefault("HF_HUB_OFFLINE", "1")
RECORD = json.loads((DOCS / "works_with.json").read_text())


def skip_without_packages(name):
    missing = [package for package in ROWS[name][1] if importlib.util.find_spec(package) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed: it is of an extra")


def test_the_record_has_every_cell():
    assert [*RECORD] == [*ROWS]
    assert all([*cells] == [*COLUMNS] for cells in RECORD.values())
    assert table(RECORD).count("\n| ") == len(ROWS) + 1


def test_the_table_says_what_ran_on_a_gpu():
    record = {"LSTM": dict.fromkeys(COLUMNS, "yes")}
    there = dict.fromkeys(COLUMNS, "yes") | {"SWAG": "no: out of memory"}
    found = table(record, {"device": "card", "rows": {"LSTM": there}})
    assert found.count("yes, GPU") == len(COLUMNS) - 1
    assert "| yes; GPU: no (1) |" in found
    assert "1. out of memory.\n\nThe GPU: card." in found


@pytest.mark.parametrize("name", ROWS)
def test_every_cell_is_as_recorded(name):
    skip_without_packages(name)
    assert row(name) == RECORD[name]


class Picked(nn.Module):
    """The first tensor of what a net of another library returns."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, *inputs, **named):
        found = self.net(*inputs, **named)
        return next(leaf for leaf in tree_leaves(dict(found) if hasattr(found, "keys") else found))


# Of transformers 5, in a property that peft reads.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
@pytest.mark.parametrize("name", ROWS)
def test_a_net_on_a_stand_in_is_the_net_at_its_draws(name):
    skip_without_packages(name)
    torch.manual_seed(0)
    model = ROWS[name][0]()
    inputs = (model.unpack or (lambda batch: batch))(model.loader[0])[0]
    net = Picked(model.net).eval().double()
    for parameter in net.parameters():  # heads and factors that start at 0
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)

    def double(leaf):
        return leaf.double() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf

    assert_is_the_net_at_its_draws(net, tree_map(double, inputs))
