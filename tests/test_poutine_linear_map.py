"""What is seen of a net's linear maps, and what the handlers leave to plain draws."""

import contextlib
import math

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from pyro.poutine.messenger import Messenger

import tyxe
from tests.oracles.maps import MAPS, jacobian_moments
from tests.oracles.nets import bnn_of, draws, posterior_moments
from tyxe.poutine import Draw, flipout, local_reparameterization, report

SAMPLED_PLAINLY = "ignore:.* sampled plainly:tyxe.TyxeWarning"


class Events(Messenger):
    """Keep every linear map with its output."""

    def __init__(self):
        super().__init__()
        self.events = []

    def _pyro_post_linear_map(self, msg):
        self.events.append((msg["args"][0], msg["value"]))


def moments_of(part):
    if part is None:
        return None
    moments = part.moments() if isinstance(part, Draw) else None
    return (part.detach(), torch.zeros_like(part)) if moments is None else moments


def standardized(event, output):
    """An output less its mean over its standard deviation, by the Jacobian."""
    mean, variance = jacobian_moments(
        event.function, event.input, moments_of(event.weight), moments_of(event.bias)
    )
    return (output - mean) / variance.sqrt()


# --- kinds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPS)
def test_every_map_raises_an_event_of_its_kind(name):
    case = MAPS[name]()
    bnn = bnn_of(case.layer)
    with Events() as recorded, local_reparameterization(), torch.no_grad():
        bnn.guided_forward(torch.randn(case.shape).double())
    kind = name.split(",")[0].replace("matmul", "linear").replace("split weight", "linear")
    assert {event.kind for event, _ in recorded.events} == {kind}
    spatial = int(kind[-2]) if "conv" in kind else 0
    assert {event.spatial_dims for event, _ in recorded.events} == {spatial}


@pytest.mark.filterwarnings("ignore:.* had no effect:tyxe.TyxeWarning")
@pytest.mark.parametrize("name", MAPS)
def test_without_an_answer_the_map_is_computed_at_the_draw(name):
    case = MAPS[name]()
    bnn = bnn_of(case.layer)
    x = torch.randn(case.shape).double()
    with torch.no_grad():
        with report(), local_reparameterization():
            values = bnn.guide()
        output = bnn.run_net(values, x)
        plain = {name: value.value() for name, value in values.items()}
        torch.testing.assert_close(output, bnn.run_net(plain, x), rtol=0, atol=0)


def test_plain_nets_raise_no_events():
    bnn = bnn_of(nn.Linear(3, 2), hide_parameters=["bias"])
    with Events() as recorded:
        bnn.guided_forward(torch.randn(4, 3).double())
    assert recorded.events == []


def test_reads_of_a_report_do_not_change_the_numbers():
    bnn = bnn_of(nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)))
    x = torch.randn(3, 2, 4).double()
    torch.manual_seed(0)
    expected = bnn.predict(x, num_predictions=3, aggregate=False)
    torch.manual_seed(0)
    with report():
        reported = bnn.predict(x, num_predictions=3, aggregate=False)
    assert torch.equal(expected, reported)


# --- attention ----------------------------------------------------------------------------------


class Attend(nn.Module):
    """Attention of a first input to a second one."""

    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, **options)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        return self.attention(x, memory, memory, need_weights=False)[0]


class AttendThree(Attend):
    """Attention with queries, keys and values of their own sizes."""

    def forward(self, x, keys, values):
        return self.attention(x, keys, values)[0]


def inputs(*shapes):
    return tuple(torch.randn(shape).double() for shape in shapes)


ATTENTION = {
    "self": (lambda: Attend(), [(3, 2, 4)], 2),
    "self, batch first": (lambda: Attend(batch_first=True), [(2, 3, 4)], 2),
    "self, no batch": (lambda: Attend(), [(3, 4)], 4),
    "self, no bias": (lambda: Attend(bias=False), [(3, 2, 4)], 2),
    "cross": (lambda: Attend(), [(3, 2, 4), (5, 2, 4)], 3),
    "cross, batch first": (lambda: Attend(batch_first=True), [(2, 3, 4), (2, 5, 4)], 3),
    "three": (lambda: AttendThree(), [(3, 2, 4), (5, 2, 4), (5, 2, 4)], 4),
    "own sizes": (lambda: AttendThree(kdim=3, vdim=5), [(3, 2, 4), (5, 2, 3), (5, 2, 5)], 4),
    "own sizes, batch first": (
        lambda: AttendThree(kdim=3, vdim=5, batch_first=True),
        [(2, 3, 4), (2, 5, 3), (2, 5, 5)],
        4,
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_projections_have_exact_moments(name):
    make, shapes, count = ATTENTION[name]
    bnn = bnn_of(make())
    x = inputs(*shapes)
    pooled = []
    with torch.no_grad(), Events() as recorded, local_reparameterization():
        for _ in range(25):
            bnn.guided_forward(*x)
    assert len(recorded.events) == 25 * count
    for event, output in recorded.events:
        pooled.append(standardized(event, output).flatten())
        assert not event.weight.was_drawn
    z = torch.cat(pooled)
    n = len(z)
    # Independent standard normals: mean 0, variance 1, no correlation of neighbours.
    assert abs(z.mean()) < 6 / math.sqrt(n)
    assert abs(z.square().mean() - 1) < 6 * math.sqrt(2 / n)
    assert abs((z[1:] * z[:-1]).mean()) < 6 / math.sqrt(n)


@pytest.mark.parametrize("name", ["self", "cross", "own sizes", "self, batch first"])
def test_flipout_of_attention_has_exact_projection_moments(name):
    make, shapes, count = ATTENTION[name]
    bnn = bnn_of(make())
    x = inputs(*shapes)
    times = 250
    with torch.no_grad(), Events() as recorded, flipout():
        for _ in range(times):
            bnn.guided_forward(*x)
    # All but the output's projection meet the same input each time.
    for index in range(count - 1):
        group = recorded.events[index::count]
        z = torch.stack([output for _, output in group])
        event = group[0][0]
        mean, variance = jacobian_moments(
            event.function, event.input, moments_of(event.weight), moments_of(event.bias)
        )
        z = (z - mean) / variance.sqrt()
        assert bool((z.mean(0).abs() < 6 / math.sqrt(times)).all())
        squares = z.square()
        error = squares.std(0) / math.sqrt(times)
        assert bool(((squares.mean(0) - 1).abs() < 6 * error).all())


def test_attention_noise_is_drawn_for_each_sequence():
    bnn = bnn_of(Attend(batch_first=True))
    x = torch.randn(1, 3, 4).double().expand(6, 3, 4)
    for handler in (local_reparameterization, flipout):
        (outputs,) = draws(bnn, x, 1, handler())
        distances = torch.cdist(outputs.flatten(1), outputs.flatten(1))
        assert bool((distances[~torch.eye(6, dtype=torch.bool)] > 0).all())
    (plain,) = draws(bnn, x, 1)
    torch.testing.assert_close(plain, plain[:1].expand_as(plain))


def test_flipout_of_attention_flips_by_sequence_and_not_by_position():
    # Batch second inside attention: signs belong to dimension 1.
    bnn = bnn_of(Attend(batch_first=True, bias=False))
    x = torch.zeros(16, 3, 4).double()
    x[..., 0] = 1.0
    with torch.no_grad(), Events() as recorded, flipout():
        bnn.guided_forward(x)
    event, output = recorded.events[0]
    deviation = output - event.function(event.input, event.weight.moments()[0], None)
    size = deviation.abs()
    torch.testing.assert_close(size, size[:1, :1].expand_as(size), rtol=1e-10, atol=0)
    torch.testing.assert_close(deviation, deviation[:1].expand_as(deviation), rtol=1e-10, atol=0)
    signs = deviation[0].sign()
    assert bool((signs != signs[:1]).any(0).all())


# --- transformer, in train and in eval ------------------------------------------------------------


def encoder(norm_first=False):
    layer = nn.TransformerEncoderLayer(
        4, 2, dim_feedforward=6, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


def by_hand(net, values, x, mask=None):
    """The encoder at given parameters, in train mode: PyTorch's composite path."""
    return torch.func.functional_call(net.train(), values, (x,), {"src_key_padding_mask": mask})


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_transformer_sees_the_drawn_weights(training, norm_first):
    bnn = bnn_of(encoder(norm_first))
    bnn.train(training)
    x = torch.randn(3, 5, 4).double()
    with torch.no_grad():
        values = bnn.guide()
        output = bnn.run_net(values, x)
        named = {name.removeprefix("net."): value for name, value in values.items()}
        expected = by_hand(bnn.net, named, x)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(output, bnn.net(x))


# PyTorch says so of its own fast path.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("masked", [True, False])
def test_the_fast_path_sees_the_drawn_weights_also_under_a_report(masked):
    bnn = bnn_of(encoder())
    x = torch.randn(3, 5, 4).double()
    mask = torch.zeros(3, 5, dtype=torch.bool)
    if masked:
        mask[0, 3:] = True
    bnn.eval()
    batch = {"src": x, "src_key_padding_mask": mask}
    with torch.no_grad():
        values = bnn.guide()
        named = {name.removeprefix("net."): value for name, value in values.items()}
        outputs = [bnn.run_net(values, batch)]
        with report():
            outputs.append(bnn.run_net(values, batch))
        expected = by_hand(bnn.net, named, x, mask)
    for output in outputs:
        torch.testing.assert_close(output[~mask], expected[~mask], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_the_transformer_is_treated_in_eval_as_in_train(handler):
    bnn = bnn_of(encoder())
    x = torch.randn(3, 5, 4).double()
    rows = []
    for training in (True, False):
        bnn.train(training)
        torch.manual_seed(0)
        forward = handler()(bnn.guided_forward)
        with report() as r, torch.no_grad(), pytest.warns(tyxe.TyxeWarning, match="norm1"):
            output = forward(x)
        rows.append((output, list(r), r))
    torch.testing.assert_close(rows[0][0], rows[1][0], rtol=1e-10, atol=1e-10)
    assert rows[0][1] == rows[1][1]
    treated = rows[0][2]
    for layer in ("layers.0", "layers.1"):
        for weight in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight"):
            assert treated.treatments(f"{layer}.{weight}") == {handler().treatment}
        assert treated.treatments(f"{layer}.norm1.weight") == {"drawn"}


# --- what falls back ----------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer with a linear head."""

    def __init__(self, kind):
        super().__init__()
        self.cell, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.cell(x)[0][:, -1])


class Embedded(nn.Module):
    """An embedding with a norm and a linear head."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.norm(self.embedding(tokens)))


FALLBACKS = {
    "lstm": (lambda: Recurrent(nn.LSTM), (3, 5, 3), ["cell.weight_ih_l0", "cell.bias_hh_l0"]),
    "gru": (lambda: Recurrent(nn.GRU), (3, 5, 3), ["cell.weight_hh_l0", "cell.bias_ih_l0"]),
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
            output = bnn.run_net(values, x)
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
        logits, again, hidden = bnn.run_net(values, tokens)
    weight = values["net.embedding.weight"].value()
    assert torch.equal(hidden, weight[tokens])
    assert torch.equal(again, hidden)
    torch.testing.assert_close(logits, hidden @ weight.T, rtol=1e-12, atol=1e-12)
    assert rows.treatments("embedding.weight") == {"drawn"}


@pytest.mark.filterwarnings(SAMPLED_PLAINLY)
def test_the_tied_head_has_the_moments_of_the_tied_draw():
    bnn = bnn_of(TiedHead())
    mean, variance = posterior_moments(bnn, "embedding.weight")
    token = torch.tensor([2])
    # E |w|^2 = |m|^2 + sum v for the token's own logit: a fresh draw for the head has no sum v.
    expected = mean[2].square().sum() + variance[2].sum()
    with torch.no_grad(), local_reparameterization():
        logits = torch.stack([bnn.guided_forward(token)[0][0, 2] for _ in range(800)])
    assert abs(logits.mean() - expected) < 6 * logits.std() / math.sqrt(800)


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
        return bnn.run_net(values, x), values["net.weight"].value()

    with report() as rows, pytest.warns(tyxe.TyxeWarning, match=r"net.weight \(used by mul\)"):
        output, weight = forward()
    torch.testing.assert_close(output, x @ (2 * weight).T)
    assert rows.treatments("weight") == {"drawn"}
    assert rows.treatments("unused") == {"never used"}


# --- flipout after attention ---------------------------------------------------------------------


def test_flipout_of_the_last_projection_differs_between_rows():
    # Attention flattens (sequence, batch) before it, so each of its rows has signs of its own.
    count = 500
    bnn = bnn_of(Attend(bias=False), expose=["attention.out_proj.weight"])
    x = torch.randn(3, 1, 4).double().expand(3, 2, 4)  # two equal sequences
    with torch.no_grad(), flipout():
        outputs = torch.stack([bnn.guided_forward(x) for _ in range(count)])
    noise = outputs - outputs.mean(0)
    first, second = noise.unbind(2)
    assert not torch.equal(first, second)
    correlation = (first * second).mean(0) / (first.square() * second.square()).mean(0).sqrt()
    # Products of signs are independent: a sum of them, over the root of their squares, is N(0, 1).
    assert bool((correlation.abs() * math.sqrt(count) < 4.5).all())
    positions = noise[:, 0] * noise[:, 1]
    scale = positions.square().mean(0).sqrt()
    assert bool((positions.mean(0).abs() / scale * math.sqrt(count) < 4.5).all())


def test_flipout_of_the_last_projection_is_reported():
    bnn = bnn_of(Attend(bias=False))
    with report() as table, flipout():
        bnn.guided_forward(*inputs((3, 2, 4)))
    assert table.treatments("attention.out_proj.weight") == {"flipped"}
    assert table.treatments("attention.in_proj_weight") == {"flipped"}
