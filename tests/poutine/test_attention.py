"""Attention and transformers under the handlers: moments, noise by sequence, drawn weights."""

import math

import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.events import Events
from tests.oracles.maps import jacobian_moments
from tests.oracles.nets import NetOf, bnn_of, draws
from tyxe.poutine import Draw, flipout, local_reparameterization, report


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


# --- attention ----------------------------------------------------------------------------------


def attend(**options):
    """Attention of a first input to a second one."""

    def forward(net, x, memory=None):
        memory = x if memory is None else memory
        return net.attention(x, memory, memory, need_weights=False)[0]

    return NetOf(forward, attention=nn.MultiheadAttention(4, 2, **options))


def attend_three(**options):
    """Attention with queries, keys and values of their own sizes."""
    return NetOf(
        lambda net, *inputs: net.attention(*inputs)[0],
        attention=nn.MultiheadAttention(4, 2, **options),
    )


def inputs(*shapes):
    return tuple(torch.randn(shape).double() for shape in shapes)


ATTENTION = {
    "self": (attend, [(3, 2, 4)], 2),
    "self, batch first": (lambda: attend(batch_first=True), [(2, 3, 4)], 2),
    "self, no batch": (attend, [(3, 4)], 4),
    "self, no bias": (lambda: attend(bias=False), [(3, 2, 4)], 2),
    "cross": (attend, [(3, 2, 4), (5, 2, 4)], 3),
    "cross, batch first": (lambda: attend(batch_first=True), [(2, 3, 4), (2, 5, 4)], 3),
    "three": (attend_three, [(3, 2, 4), (5, 2, 4), (5, 2, 4)], 4),
    "own sizes": (lambda: attend_three(kdim=3, vdim=5), [(3, 2, 4), (5, 2, 3), (5, 2, 5)], 4),
    "own sizes, batch first": (
        lambda: attend_three(kdim=3, vdim=5, batch_first=True),
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


def test_attention_noise_is_drawn_for_each_sequence():
    bnn = bnn_of(attend(batch_first=True))
    x = torch.randn(1, 3, 4).double().expand(6, 3, 4)
    for handler in (local_reparameterization, flipout):
        (outputs,) = draws(bnn, x, 1, handler())
        distances = torch.cdist(outputs.flatten(1), outputs.flatten(1))
        assert bool((distances[~torch.eye(6, dtype=torch.bool)] > 0).all())
    (plain,) = draws(bnn, x, 1)
    torch.testing.assert_close(plain, plain[:1].expand_as(plain))


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
        output = bnn._run_net(values, x)
        named = {name.removeprefix("net."): value for name, value in values.items()}
        expected = by_hand(bnn.net, named, x)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(output, bnn.net(x))


# PyTorch says so of its own fast path.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_fast_path_sees_the_drawn_weights_also_under_a_report():
    bnn = bnn_of(encoder())
    x = torch.randn(3, 5, 4).double()
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    bnn.eval()
    batch = {"src": x, "src_key_padding_mask": mask}
    with torch.no_grad():
        values = bnn.guide()
        named = {name.removeprefix("net."): value for name, value in values.items()}
        outputs = [bnn._run_net(values, batch)]
        with report():
            outputs.append(bnn._run_net(values, batch))
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


# --- flipout after attention ---------------------------------------------------------------------


def test_flipout_of_the_last_projection_differs_between_points():
    # Attention flattens (sequence, batch) before it.
    count = 500
    bnn = bnn_of(attend(bias=False), expose=["attention.out_proj.weight"])
    x = torch.randn(3, 1, 4).double().expand(3, 2, 4)  # two equal sequences
    with torch.no_grad(), flipout():
        outputs = torch.stack([bnn.guided_forward(x) for _ in range(count)])
    noise = outputs - outputs.mean(0)
    first, second = noise.unbind(2)
    assert not torch.equal(first, second)
    correlation = (first * second).mean(0) / (first.square() * second.square()).mean(0).sqrt()
    # Products of signs are independent: a sum of them, over the root of their squares, is N(0, 1).
    assert bool((correlation.abs() * math.sqrt(count) < 4.5).all())


# --- flipout's signs belong to data points, whatever rows a map sees -----------------

POINTS, POSITIONS = 5, 7
FLIPPED = {
    "attention, batch first": (lambda: attend(batch_first=True), 0),
    "attention, sequence first": (attend, 1),
    "a whole layer, batch first": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        0,
    ),
    "a whole layer, sequence first": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0), 1),
    "linear, sequence first": (lambda: nn.Linear(4, 3), 1),
    "linear, batch first": (lambda: nn.Linear(4, 3), 0),
}


def flipped(net, x, batch_dim):
    """One draw of a net without norms, which are no linear maps."""
    bnn = bnn_of(net, hide_module_types=[nn.LayerNorm])
    with flipout(batch_dim):
        return bnn.predict(x, num_predictions=1, aggregate=False)[0]


@pytest.mark.parametrize("name", FLIPPED)
def test_positions_of_a_point_meet_one_draw(name):
    make, batch_dim = FLIPPED[name]
    # Points that have the same features at each of their positions.
    x = torch.randn(POINTS, 1, 4).double().expand(-1, POSITIONS, -1)
    found = flipped(make(), x if batch_dim == 0 else x.transpose(0, 1), batch_dim)
    found = found if batch_dim == 0 else found.transpose(0, 1)
    torch.testing.assert_close(found, found[:, :1].expand_as(found))


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_points_have_signs_of_their_own(batch_dim):
    x = torch.ones(POINTS, POSITIONS, 4).double()
    found = flipped(nn.Linear(4, 6), x if batch_dim == 0 else x.transpose(0, 1), batch_dim)
    assert len(found.select(1 - batch_dim, 0).unique(dim=0)) == POINTS


def test_a_sequence_without_a_batch_is_one_point():
    x = torch.randn(1, 4).double().expand(POSITIONS, -1)
    found = flipped(attend(batch_first=True), x, 0)
    torch.testing.assert_close(found, found[:1].expand_as(found))


@pytest.mark.parametrize("given", [-1, "first"])
def test_a_batch_dim_that_is_none(given):
    with pytest.raises((TypeError, ValueError), match=r"batch_dim is .*; expected"):
        flipout(given)
