"""The report: every use of every site, once."""

import pytest
import torch
import torch.nn as nn
from pyro.poutine.runtime import am_i_wrapped

import tyxe
from tests.oracles.nets import bnn_of
from tyxe.poutine import flipout, local_reparameterization, report
from tyxe.poutine.report import Row

pytestmark = pytest.mark.filterwarnings("ignore:the net's outputs do not depend on")


class Mixed(nn.Module):
    """Every treatment that there is."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 3, 2), nn.LayerNorm(3)
        self.head, self.unused = nn.Linear(3, 1), nn.Linear(7, 7, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.conv(x).mean(-1)))


X = torch.ones(4, 2, 3, dtype=torch.float64)


def rows_of(handler):
    bnn = bnn_of(Mixed())
    with report() as r:
        predict = handler()(bnn.predict)
        with pytest.warns(tyxe.TyxeWarning, match="norm"):
            predict(X, num_predictions=3)
    return r


@pytest.mark.parametrize(
    ("handler", "treatment"), [(local_reparameterization, "moments"), (flipout, "flipped")]
)
def test_rows_name_site_map_and_treatment(handler, treatment):
    r = rows_of(handler)
    assert sorted(r) == sorted(
        [
            Row("net.conv.weight", "conv1d", treatment),
            Row("net.conv.bias", "conv1d", treatment),
            Row("net.norm.weight", "layer_norm", "drawn"),
            Row("net.norm.bias", "layer_norm", "drawn"),
            Row("net.head.weight", "linear", treatment),
            Row("net.head.bias", "linear", treatment),
            Row("net.unused.weight", "", "never used"),
        ]
    )


def test_without_a_handler_everything_is_drawn():
    bnn = bnn_of(Mixed())
    with report() as r:
        bnn.predict(X)
    assert r.treatments("conv.weight") == r.treatments("net.norm.bias") == {"drawn"}
    assert r.treatments("unused.weight") == {"never used"}
    assert r.treatments("no.such.site") == set()


def test_it_prints_a_table_of_three_columns():
    lines = str(rows_of(local_reparameterization)).splitlines()
    assert lines[0].split() == ["site", "map", "treatment"]
    assert len(lines) == 8
    starts = {line.index("moments") for line in lines if "moments" in line}
    assert starts == {lines[0].index("treatment")}


def test_it_collects_training_and_covers_several_nets():
    first, second = bnn_of(nn.Linear(2, 1)), bnn_of(nn.Linear(2, 1), hide_parameters=["bias"])
    x, y = torch.randn(4, 2).double(), torch.randn(4, 1).double()
    with report() as r, local_reparameterization():
        first.fit([(x, y)], torch.optim.Adam, 2)
        second.predict(x)
    assert list(r) == [Row("net.weight", "linear", "moments"), Row("net.bias", "linear", "moments")]
    assert not am_i_wrapped()


@pytest.mark.parametrize("vectorize", [True, False])
def test_it_works_with_either_kind_of_prediction(vectorize):
    bnn = bnn_of(nn.Linear(2, 1))
    with report() as r:
        outputs = bnn.predict(torch.ones(1, 2).double(), num_predictions=3, vectorize=vectorize)
    assert outputs[0].shape == (1, 1)
    assert {row.treatment for row in r} == {"drawn"}
