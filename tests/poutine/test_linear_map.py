"""What is seen of linear maps and reported, and what is left to plain draws."""

import contextlib
from collections import OrderedDict

import pytest
import torch
import torch.nn as nn
from pyro.poutine.runtime import am_i_wrapped

import tyxe
from tests.oracles.events import Events
from tests.oracles.maps import MAPS
from tests.oracles.nets import NetOf, ReadLast, bnn_of
from tyxe.poutine import flipout, local_reparameterization, report
from tyxe.poutine.report import Row

SAMPLED_PLAINLY = "ignore:.* sampled plainly:tyxe.TyxeWarning"


@pytest.mark.filterwarnings("ignore:.* had no effect:tyxe.TyxeWarning")
@pytest.mark.parametrize("name", MAPS)
def test_every_map_raises_an_event_of_its_kind_and_without_an_answer_is_that_at_the_draw(name):
    layer, shape = MAPS[name]()
    bnn, x = bnn_of(layer), torch.randn(shape).double()
    with torch.no_grad():
        with report(), local_reparameterization():
            values = bnn.guide()
        with Events() as recorded:
            output = bnn._run_net(values, x)
        kind = name.split(",")[0].replace("matmul", "linear").replace("split weight", "linear")
        spatial = int(kind[-2]) if "conv" in kind else 0
        found = {(event.kind, event.spatial_dims) for event, _ in recorded.events}
        assert found == {(kind, spatial)}
        plain = {name: value.value() for name, value in values.items()}
        torch.testing.assert_close(output, bnn._run_net(plain, x), rtol=0, atol=0)


def test_reads_of_a_report_do_not_change_the_numbers():
    bnn = bnn_of(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)))
    x, found = torch.randn(3, 2, 4).double(), []
    for handler in (contextlib.nullcontext, report):
        torch.manual_seed(0)
        with handler():
            found.append(bnn.predict(x, num_predictions=3, aggregate=False))
    assert torch.equal(*found)


def embedded():
    """An embedding with a norm and a linear head."""
    return nn.Sequential(
        OrderedDict(embedding=nn.Embedding(5, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 2))
    )


FALLBACKS = {
    "lstm": (
        lambda: ReadLast(nn.LSTM, 3, 4, 2),
        (3, 5, 3),
        ["cell.weight_ih_l0", "cell.bias_hh_l0"],
    ),
    "gru": (
        lambda: ReadLast(nn.GRU, 3, 4, 2),
        (3, 5, 3),
        ["cell.weight_hh_l0", "cell.bias_ih_l0"],
    ),
    "embedding": (embedded, None, ["embedding.weight", "norm.weight", "norm.bias"]),
}


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
@pytest.mark.parametrize("name", FALLBACKS)
def test_other_layers_are_drawn_reported_and_warned_of(name, handler):
    make, shape, plain = FALLBACKS[name]
    bnn = bnn_of(make())
    x = torch.randint(0, 5, (3,)) if shape is None else torch.randn(shape).double()
    forward = handler()(bnn.guided_forward)
    with report() as rows, pytest.warns(tyxe.TyxeWarning, match="sampled plainly") as caught:
        output = forward(x)
    for site in plain:
        assert rows.treatments(site) == {"drawn"}
        assert f"net.{site}" in str(caught[0].message)
    for site in ("head.weight", "head.bias"):
        assert rows.treatments(site) == {handler().treatment}
        assert site not in str(caught[0].message)
    output.sum().backward()
    gradients = {n: p.grad for n, p in bnn.net_guide.named_parameters()}
    assert all(bool((g != 0).any()) for n, g in gradients.items() if n.endswith(tuple(plain)))


@pytest.mark.filterwarnings(SAMPLED_PLAINLY)
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_recurrent_layers_use_the_draw(name):
    bnn = bnn_of(FALLBACKS[name][0](), hide_modules=["head"])
    x = torch.randn(3, 5, 3).double()
    for handler in (contextlib.nullcontext, local_reparameterization):
        with torch.no_grad(), handler():
            values = bnn.guide()
            output = bnn._run_net(values, x)
        named = {n.removeprefix("net."): v + 0 for n, v in values.items()}
        expected = torch.func.functional_call(bnn.net, named, (x,))
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


def tied_head():
    """A language model's embedding that is its output head, too."""

    def forward(net, tokens):
        hidden = net.embedding(tokens)
        return net.head(hidden), net.embedding(tokens), hidden

    net = NetOf(forward, embedding=nn.Embedding(5, 3), head=nn.Linear(3, 5, bias=False))
    net.head.weight = net.embedding.weight
    return net


@pytest.mark.filterwarnings(SAMPLED_PLAINLY)
@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_a_weight_tied_to_an_embedding_is_one_draw_in_both_places(handler):
    bnn, tokens = bnn_of(tied_head()), torch.tensor([0, 3, 3])
    assert tyxe.util.pyro_sample_sites(bnn.net) == ["embedding.weight"]
    with report() as rows, torch.no_grad(), handler():
        values = bnn.guide()
        logits, again, hidden = bnn._run_net(values, tokens)
    weight = values["net.embedding.weight"].value()
    assert torch.equal(hidden, weight[tokens])
    assert torch.equal(again, hidden)
    torch.testing.assert_close(logits, hidden @ weight.T, rtol=1e-12, atol=1e-12)
    assert rows.treatments("embedding.weight") == {"drawn"}


def test_a_scaled_weight_is_the_scaled_draw():
    parts = {"weight": nn.Parameter(torch.ones(2, 3)), "unused": nn.Parameter(torch.ones(2))}
    bnn = bnn_of(NetOf(lambda net, x: nn.functional.linear(x, net.weight * 2), **parts))
    x = torch.randn(4, 3).double()

    @local_reparameterization()
    def forward():
        values = bnn.guide()
        return bnn._run_net(values, x), values["net.weight"].value()

    with report() as rows, pytest.warns(tyxe.TyxeWarning, match=r"net.weight \(used by mul\)"):
        output, weight = forward()
    torch.testing.assert_close(output, x @ (2 * weight).T)
    assert rows.treatments("weight") == {"drawn"}
    assert rows.treatments("unused") == {"never used"}


UNUSED = "ignore:the net's outputs do not depend on"


def mixed():
    """A net with every treatment that there is."""
    return NetOf(
        lambda net, x: net.head(net.norm(net.conv(x).mean(-1))),
        conv=nn.Conv1d(2, 3, 2),
        norm=nn.LayerNorm(3),
        head=nn.Linear(3, 1),
        unused=nn.Linear(7, 7, bias=False),
    )


IMAGES = torch.ones(4, 2, 3, dtype=torch.float64)


def rows_of(handler):
    bnn = bnn_of(mixed())
    with report() as r, pytest.warns(tyxe.TyxeWarning, match="norm"):
        handler()(bnn.predict)(IMAGES, num_predictions=3)
    return r


@pytest.mark.filterwarnings(UNUSED)
@pytest.mark.parametrize(
    ("handler", "treatment"), [(local_reparameterization, "moments"), (flipout, "flipped")]
)
def test_rows_name_site_map_and_treatment(handler, treatment):
    r = rows_of(handler)
    assert set(r) == {
        Row("net.conv.weight", "conv1d", treatment),
        Row("net.conv.bias", "conv1d", treatment),
        Row("net.norm.weight", "layer_norm", "drawn"),
        Row("net.norm.bias", "layer_norm", "drawn"),
        Row("net.head.weight", "linear", treatment),
        Row("net.head.bias", "linear", treatment),
        Row("net.unused.weight", "", "never used"),
    }
    title, *lines = str(r).splitlines()
    assert title.split() == ["site", "map", "treatment"]
    assert len(lines) == 7
    starts = {line.index(treatment) for line in lines if treatment in line}
    assert starts == {title.index("treatment")}


@pytest.mark.filterwarnings(UNUSED)
@pytest.mark.parametrize("vectorize", [True, False])
def test_without_a_handler_everything_is_drawn(vectorize):
    bnn = bnn_of(mixed())
    with report() as r:
        bnn.predict(IMAGES, num_predictions=3, vectorize=vectorize)
    assert r.treatments("conv.weight") == r.treatments("net.norm.bias") == {"drawn"}
    assert r.treatments("unused.weight") == {"never used"}
    assert r.treatments("no.such.site") == set()


def test_it_collects_training_and_covers_several_nets():
    first, second = bnn_of(nn.Linear(2, 1)), bnn_of(nn.Linear(2, 1), hide_parameters=["bias"])
    x, y = torch.randn(4, 2).double(), torch.randn(4, 1).double()
    with report() as r, local_reparameterization():
        first.fit([(x, y)], torch.optim.Adam, 2)
        second.predict(x)
    assert list(r) == [Row(f"net.{name}", "linear", "moments") for name in ("weight", "bias")]
    assert not am_i_wrapped()
