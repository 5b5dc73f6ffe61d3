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


# --- attention ----------------------------------------------------------------------------------


def attend(**options):
    """Attention of a first input to a second one."""

    def forward(net, x, memory=None):
        memory = x if memory is None else memory
        return net.attention(x, memory, memory, need_weights=False)[0]

    return NetOf(forward, attention=nn.MultiheadAttention(4, 2, **options))


def attend_three(**options):
    """Attention with queries, keys and values of their own sizes."""
    attention = nn.MultiheadAttention(4, 2, **options)
    return NetOf(lambda net, *inputs: net.attention(*inputs)[0], attention=attention)


OWN = {"kdim": 3, "vdim": 5}
FIRST = {"batch_first": True}
# A net, the shapes of its inputs, and how many maps it has.
ATTENTION = {
    "self": (attend, [(3, 2, 4)], 2),
    "self, batch first": (lambda: attend(**FIRST), [(2, 3, 4)], 2),
    "self, no batch": (attend, [(3, 4)], 4),
    "self, no bias": (lambda: attend(bias=False), [(3, 2, 4)], 2),
    "cross": (attend, [(3, 2, 4), (5, 2, 4)], 3),
    "cross, batch first": (lambda: attend(**FIRST), [(2, 3, 4), (2, 5, 4)], 3),
    "three": (attend_three, [(3, 2, 4), (5, 2, 4), (5, 2, 4)], 4),
    "own sizes": (lambda: attend_three(**OWN), [(3, 2, 4), (5, 2, 3), (5, 2, 5)], 4),
    "own sizes, batch first": (
        lambda: attend_three(**OWN, **FIRST),
        [(2, 3, 4), (2, 5, 3), (2, 5, 5)],
        4,
    ),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_projections_have_exact_moments(name):
    make, shapes, count = ATTENTION[name]
    bnn, x = bnn_of(make()), tuple(torch.randn(shape).double() for shape in shapes)
    with Events() as recorded:
        draws(bnn, x, 25, local_reparameterization())
    assert len(recorded.events) == 25 * count
    pooled = []
    for event, output in recorded.events:
        assert not event.weight.was_drawn
        parts = moments_of(event.weight), moments_of(event.bias)
        mean, variance = jacobian_moments(event.function, event.input, *parts)
        pooled.append(((output - mean) / variance.sqrt()).flatten())
    z = torch.cat(pooled)
    n = len(z)
    # Independent standard normals: mean 0, variance 1, no correlation of neighbours.
    assert abs(z.mean()) < 6 / math.sqrt(n)
    assert abs(z.square().mean() - 1) < 6 * math.sqrt(2 / n)
    assert abs((z[1:] * z[:-1]).mean()) < 6 / math.sqrt(n)


# --- transformer, in train and in eval ------------------------------------------------------------


def encoder(norm_first=False):
    layer = nn.TransformerEncoderLayer(
        4, 2, dim_feedforward=6, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


def run_and_by_hand(bnn, x, mask=None):
    """Outputs at a draw, plain and under a report, and those of PyTorch's composite path at it."""
    batch = x if mask is None else {"src": x, "src_key_padding_mask": mask}
    with torch.no_grad():
        values = bnn.guide()
        outputs = [bnn._run_net(values, batch)]
        with report():
            outputs.append(bnn._run_net(values, batch))
        named = {name.removeprefix("net."): value for name, value in values.items()}
        options = {"src_key_padding_mask": mask}
        return outputs, torch.func.functional_call(bnn.net.train(), named, (x,), options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_the_transformer_sees_the_drawn_weights(training, norm_first):
    bnn = bnn_of(encoder(norm_first)).train(training)
    x = torch.randn(3, 5, 4).double()
    outputs, expected = run_and_by_hand(bnn, x)
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(output, bnn.net(x))


# PyTorch says so of its own fast path.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_the_fast_path_sees_the_drawn_weights_also_under_a_report():
    mask = torch.zeros(3, 5, dtype=torch.bool)
    mask[0, 3:] = True
    outputs, expected = run_and_by_hand(
        bnn_of(encoder()).eval(), torch.randn(3, 5, 4).double(), mask
    )
    for output in outputs:
        torch.testing.assert_close(output[~mask], expected[~mask], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_the_transformer_is_treated_in_eval_as_in_train(handler):
    bnn, x = bnn_of(encoder()), torch.randn(3, 5, 4).double()
    outputs, rows = [], []
    for training in (True, False):
        bnn.train(training)
        torch.manual_seed(0)
        forward = handler()(bnn.guided_forward)
        with report() as r, torch.no_grad(), pytest.warns(tyxe.TyxeWarning, match="norm1"):
            outputs.append(forward(x))
        rows.append(r)
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
    assert list(rows[0]) == list(rows[1])
    for layer in ("layers.0", "layers.1"):
        for weight in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight"):
            assert r.treatments(f"{layer}.{weight}") == {handler().treatment}
        assert r.treatments(f"{layer}.norm1.weight") == {"drawn"}


# --- flipout's signs belong to data points, whatever rows a map sees -----------------

POINTS, POSITIONS = 5, 7
FLIPPED = {
    "attention": attend,
    "a whole layer": lambda **options: nn.TransformerEncoderLayer(4, 2, 8, 0.0, **options),
    "linear": lambda **_: nn.Linear(4, 12),
}


def flipped(name, x, batch_dim):
    """One draw of a net without norms, which are no linear maps; points first."""
    bnn = bnn_of(FLIPPED[name](batch_first=batch_dim == 0), hide_module_types=[nn.LayerNorm])
    with flipout(batch_dim):
        given = x if batch_dim == 0 else x.transpose(0, 1)
        found = bnn.predict(given, num_predictions=1, aggregate=False)[0]
    return found if batch_dim == 0 else found.transpose(0, 1)


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("name", FLIPPED)
def test_positions_of_a_point_meet_one_draw(name, batch_dim):
    # Points that have the same features at each of their positions.
    x = torch.randn(POINTS, 1, 4).double().expand(-1, POSITIONS, -1)
    found = flipped(name, x, batch_dim)
    torch.testing.assert_close(found, found[:, :1].expand_as(found))
    if name == "attention" and batch_dim == 0:  # a sequence without a batch is one point
        found = flipped(name, x[0], batch_dim)
        torch.testing.assert_close(found, found[:1].expand_as(found))


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("name", FLIPPED)
def test_points_have_signs_of_their_own(name, batch_dim):
    x = torch.randn(1, 1, 4).double().expand(POINTS, POSITIONS, -1)
    found = flipped(name, x, batch_dim)
    assert len(found[:, 0].unique(dim=0)) == POINTS


@pytest.mark.parametrize("given", [-1, "first"])
def test_a_batch_dim_that_is_none(given):
    with pytest.raises((TypeError, ValueError), match=r"batch_dim is .*; expected"):
        flipout(given)
