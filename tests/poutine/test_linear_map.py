"""What is seen of a net's linear maps, and what the handlers leave to plain draws."""

import contextlib

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import tyxe
from tests.oracles.events import Events
from tests.oracles.maps import MAPS
from tests.oracles.nets import ReadLast, bnn_of
from tyxe.poutine import flipout, local_reparameterization, report

SAMPLED_PLAINLY = "ignore:.* sampled plainly:tyxe.TyxeWarning"


# --- kinds --------------------------------------------------------------------------------------


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
    x = torch.randn(3, 2, 4).double()
    torch.manual_seed(0)
    expected = bnn.predict(x, num_predictions=3, aggregate=False)
    torch.manual_seed(0)
    with report():
        reported = bnn.predict(x, num_predictions=3, aggregate=False)
    assert torch.equal(expected, reported)


# --- what falls back ----------------------------------------------------------------------------


class Embedded(nn.Module):
    """An embedding with a norm and a linear head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


def recurrent(kind):
    return ReadLast(kind, 3, 4, 2)


FALLBACKS = {
    "lstm": (lambda: recurrent(nn.LSTM), (3, 5, 3), ["cell.weight_ih_l0", "cell.bias_hh_l0"]),
    "gru": (lambda: recurrent(nn.GRU), (3, 5, 3), ["cell.weight_hh_l0", "cell.bias_ih_l0"]),
    "embedding": (Embedded, None, ["embedding.weight", "norm.weight", "norm.bias"]),
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


class TiedHead(nn.Module):
    """A language model's embedding that is its output head, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        return self.head(hidden), self.embedding(tokens), hidden


@pytest.mark.filterwarnings(SAMPLED_PLAINLY)
@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_a_weight_tied_to_an_embedding_is_one_draw_in_both_places(handler):
    bnn = bnn_of(TiedHead())
    assert tyxe.util.pyro_sample_sites(bnn.net) == ["embedding.weight"]
    tokens = torch.tensor([0, 3, 3])
    with report() as rows, torch.no_grad(), handler():
        values = bnn.guide()
        logits, again, hidden = bnn._run_net(values, tokens)
    weight = values["net.embedding.weight"].value()
    assert torch.equal(hidden, weight[tokens])
    assert torch.equal(again, hidden)
    torch.testing.assert_close(logits, hidden @ weight.T, rtol=1e-12, atol=1e-12)
    assert rows.treatments("embedding.weight") == {"drawn"}


class Fresh(nn.Module):
    """A parameter that takes part in the forward by an operation that is no linear map."""

    def __init__(self):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return F.linear(x, self.weight * 2)


def test_a_scaled_weight_is_the_scaled_draw():
    bnn = bnn_of(Fresh())
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
