"""A lazy draw is its value to every operation, and never its mean."""

import contextlib
import copy
import operator
import pickle

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_map

from tests.oracles.nets import bnn_of
from tyxe.poutine import Draw, flipout, local_reparameterization

ROWS, COLUMNS = 4, 6


def make_draw(shape=(ROWS, COLUMNS), requires_grad=False):
    loc = torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)
    scale = torch.rand(shape, dtype=torch.float64).add(0.5).requires_grad_(requires_grad)
    return Draw("net.weight", dist.Normal(loc, scale).to_event(len(shape))), loc, scale


def materialised(result):
    """The result of an operation, with values in the places of draws."""
    return tree_map(lambda part: part.value() if isinstance(part, Draw) else part, result)


def assert_same(actual, expected, rtol=0.0):
    for one, other in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)
        else:
            assert one == other


X = torch.linspace(-1, 1, 3 * COLUMNS, dtype=torch.float64).reshape(3, COLUMNS)
Y = torch.linspace(-1, 2, 3 * ROWS, dtype=torch.float64).reshape(3, ROWS)
VECTOR = torch.linspace(0, 1, COLUMNS, dtype=torch.float64)
INDEX = torch.tensor([1, 1, 0])

# All that has no rule of its own gets the value, in the way of `F.embedding` or `torch.cat`. Each
# takes a matrix of ROWS x COLUMNS.
OPERATIONS = {
    "add": lambda w: w + 1,
    "radd": lambda w: 1 + w,
    "mul by itself": lambda w: w * w,
    "sum": lambda w: w.sum(),
    "layer norm": lambda w: F.layer_norm(X, (COLUMNS,), weight=w[0], bias=w[1]),
    "batch norm": lambda w: F.batch_norm(X, VECTOR, VECTOR + 1, w[0], w[1]),
    "embedding": lambda w: F.embedding(INDEX, w),
    "index by tensor": lambda w: w[INDEX],
    "index by list": lambda w: w[[0, 0, 1]],
    "cat": lambda w: torch.cat([w, w]),
    "cat with others": lambda w: torch.cat((X, w)),
    "expand": lambda w: w[None].expand(2, ROWS, COLUMNS),
    "clone": lambda w: w.clone(),
    "detach": lambda w: w.detach(),
    "data": lambda w: w.data,
    "to float": lambda w: w.float(),
    "where": lambda w: torch.where(w > 0, w, -w),
    "einsum": lambda w: torch.einsum("nc,rc->nr", X, w),
    "tensordot": lambda w: torch.tensordot(X, w, dims=([1], [1])),
    "linear": lambda w: F.linear(X, w),
    "linear by keyword": lambda w: F.linear(input=X, weight=w, bias=None),
    "linear of itself": lambda w: F.linear(w, w),
    "linear with its own bias": lambda w: F.linear(X, w, w[:, 0]),
    "matmul": lambda w: Y @ w,
    "matmul, transposed": lambda w: X @ w.T,
    "matmul from the left": lambda w: w @ X.T,
    "matmul with itself": lambda w: w @ w.T,
    "matmul by keyword": lambda w: torch.matmul(Y, other=w),
    "matmul, out": lambda w: torch.matmul(Y, w, out=torch.empty(3, COLUMNS).double()),
    "mm by keyword": lambda w: torch.mm(Y, mat2=w),
    "mv": lambda w: torch.mv(w, VECTOR),
    "vector matmul": lambda w: Y[0] @ w,
    "batched matmul": lambda w: Y[None] @ w,
    "bmm": lambda w: torch.bmm(Y[None], w[None]),
    "addmm by keyword": lambda w: torch.addmm(input=X[:, :1], mat1=X, mat2=w.T),
    "addmm": lambda w: torch.addmm(torch.zeros(3, COLUMNS).double(), Y, w),
    "baddbmm": lambda w: torch.baddbmm(torch.zeros(1, 3, COLUMNS).double(), Y[None], w[None]),
    "bilinear": lambda w: F.bilinear(Y, X, w[None]),
    "conv1d": lambda w: F.conv1d(torch.ones(1, 3, 5).double(), w.reshape(ROWS, 3, 2)),
    "conv1d, torch": lambda w: torch.conv1d(torch.ones(1, 3, 5).double(), w.reshape(ROWS, 3, 2)),
    "convolution": lambda w: torch.convolution(
        torch.ones(1, 3, 5).double(), w.reshape(ROWS, 3, 2), None, [1], [0], [1], False, [0], 1
    ),
    "item": lambda w: w[0, 0].item(),
    "list": lambda w: w.tolist(),
    "numpy": lambda w: w.numpy().tolist(),
    "float": lambda w: float(w[1, 2]),
    "iterate": lambda w: [row.sum() for row in w],
    "unpack": lambda w: (lambda first, *rest: first)(*w),
    "transposed by keyword": lambda w: torch.transpose(input=w, dim0=0, dim1=1),
    "shape": lambda w: (w.shape, w.dtype, w.dim(), len(w), w.numel(), w.device, w.size(1)),
    "stride": lambda w: (w.stride(), w.is_contiguous()),
    "requires_grad": lambda w: w.requires_grad,
    "new": lambda w: w.new_ones(2),
    "isinstance": lambda w: isinstance(w, torch.Tensor),
}

# The same sums in another order, as one linear map of points in rows.
RTOL = dict.fromkeys(["einsum", "tensordot", "matmul from the left", "mv"], 1e-12)


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_on_a_draw_is_that_on_its_value(name):
    draw, loc, _ = make_draw()
    actual = materialised(OPERATIONS[name](draw))
    value = draw.value()
    assert not torch.equal(value, loc)
    # The value is drawn once: a second time gives the same.
    for again, rtol in ((value, RTOL.get(name, 0.0)), (draw, 0.0)):
        assert_same(actual, materialised(OPERATIONS[name](again)), rtol)


# --- views --------------------------------------------------------------------------------------

VIEWS = {
    "t": lambda w: w.t() if w.dim() <= 2 else w,
    "T": lambda w: w.T if w.dim() == 2 else w,
    "mT": lambda w: w.mT if w.dim() >= 2 else w,
    "transpose": lambda w: w.transpose(0, -1),
    "torch.transpose": lambda w: torch.transpose(w, 0, -1),
    "swapaxes": lambda w: torch.swapaxes(w, 0, -1),
    "permute": lambda w: w.permute(*reversed(range(w.dim()))),
    "movedim": lambda w: w.movedim(0, -1),
    "reshape": lambda w: w.reshape(-1, 2) if w.numel() % 2 == 0 else w,
    "reshape by keyword": lambda w: w.reshape(shape=(-1,)),
    "view": lambda w: w.contiguous().view(-1),
    "flatten": lambda w: w.flatten(),
    "unflatten": lambda w: w.unflatten(0, (1, -1)),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "squeeze": lambda w: w.squeeze(),
    "chunk": lambda w: w.chunk(2)[-1],
    "split": lambda w: torch.split(w, 2)[0],
    "split by sizes": lambda w: w.split([1, w.shape[0] - 1])[0],
    "unbind": lambda w: w.unbind()[0],
    "narrow": lambda w: w.narrow(0, 0, 1),
    "select": lambda w: w.select(0, 0),
    "slice": lambda w: w[::2],
    "index": lambda w: w[-1],
    "newaxis": lambda w: w[None, ..., :1],
}


def viewed(tensor, names):
    for name in names:
        tensor = tensor if tensor.dim() == 0 else VIEWS[name](tensor)
    return tensor


@given(st.lists(st.sampled_from(sorted(VIEWS)), max_size=5))
@settings(max_examples=60)
def test_views_rearrange_moments_as_they_rearrange_values(names):
    draw, loc, scale = make_draw((4, 6, 2))
    found, mean, variance = (viewed(t, names) for t in (draw, loc, scale.square()))
    assert isinstance(found, Draw)
    assert found.shape == mean.shape
    assert not draw.was_drawn
    for one, other in (
        (found.moments(), (mean, variance)),
        (found.center(), mean),
        (found.value(), viewed(draw.value(), names)),
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


REPEATING = {
    "tensor": lambda w: w[torch.tensor([0, 0])],
    "list": lambda w: w[[0, 0]],
    "mask": lambda w: w[torch.tensor([True, True, False, False])],
    "mixed": lambda w: w[0, [1, 1]],
    "expand": lambda w: w[:1].expand(3, -1),
    "broadcast_to": lambda w: w[:1].broadcast_to(3, COLUMNS),
    "repeat": lambda w: w.repeat(2, 1),
    "repeat_interleave": lambda w: w.repeat_interleave(2, 0),
    "unfold": lambda w: w.unfold(1, 2, 1),
    "as_strided": lambda w: w.as_strided((2, 2), (0, 1)),
    "diagonal": lambda w: w.diagonal(),
    "view of another dtype": lambda w: w.view(torch.int64),
}


@pytest.mark.parametrize("name", REPEATING)
def test_what_may_repeat_elements_is_no_view(name):
    # Two copies of one element are not independent, so they have no elementwise moments.
    draw, _, _ = make_draw()
    result = REPEATING[name](draw)
    assert not isinstance(result, Draw)
    assert draw.was_drawn
    assert torch.equal(result, REPEATING[name](draw.value()))


# --- values that were read, or written ------------------------------------------------------------

TOUCHES = {
    "read": lambda w: w.norm(),
    "in place": lambda w: w.mul_(0.5),
    "in place on a view": lambda w: w[0].zero_(),
    "set an item": lambda w: operator.setitem(w, 0, 1.0),
    "augmented": lambda w: operator.iadd(w, 1.0),
    "data, in place": lambda w: w.data.clamp_(-0.1, 0.1),
    "data, set": lambda w: setattr(w, "data", torch.ones(ROWS, COLUMNS, dtype=torch.float64)),
    "detached, in place": lambda w: w.detach().fill_(3.0),
    "copy_": lambda w: w.copy_(torch.ones(ROWS, COLUMNS)),
    "out": lambda w: torch.add(w, 1.0, out=w),
    "initialisation": lambda w: nn.init.ones_(w),
}


@pytest.mark.filterwarnings("ignore:.* sampled plainly:tyxe.TyxeWarning")
@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
@pytest.mark.parametrize("name", TOUCHES)
def test_a_linear_map_uses_a_value_that_something_has_touched(name, handler):
    draw, _, _ = make_draw()
    with torch.no_grad(), handler():
        TOUCHES[name](draw)
        output = F.linear(X, draw)
    torch.testing.assert_close(output, F.linear(X, draw.value()), rtol=0, atol=0)
    assert draw.moments() is None
    assert draw.center() is None


@pytest.mark.filterwarnings("ignore:.* sampled plainly:tyxe.TyxeWarning")
def test_a_map_of_a_weight_by_itself_is_no_map_of_two():
    draw, _, _ = make_draw()
    with local_reparameterization():
        gram = F.linear(draw, draw)
    torch.testing.assert_close(gram, draw.value() @ draw.value().T)


# --- as an object -------------------------------------------------------------------------------


def test_metadata_does_not_draw():
    draw, loc, _ = make_draw()
    for name in ("shape", "dtype", "device", "ndim"):
        assert getattr(draw, name) == getattr(loc, name)
    assert (draw.dim(), len(draw), draw.numel()) == (2, ROWS, ROWS * COLUMNS)
    assert draw.is_floating_point()
    assert "drawn=False" in repr(draw)
    assert not draw.was_drawn


def test_copies_and_pickles_are_plain_values():
    draw, _, _ = make_draw()
    for copied in (copy.deepcopy(draw), copy.copy(draw), pickle.loads(pickle.dumps(draw))):
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, draw.value())


def test_gradients_reach_the_posterior_also_from_a_first_use_under_no_grad():
    draw, loc, scale = make_draw(requires_grad=True)
    with torch.no_grad():
        F.normalize(draw)
    found = torch.autograd.grad(F.linear(X, draw).sum(), (loc, scale))
    noise = ((draw.value() - loc) / scale).detach()
    expected = X.sum(0).expand(ROWS, COLUMNS)
    torch.testing.assert_close(found, (expected, expected * noise))
    other, loc, scale = make_draw(requires_grad=True)
    with torch.no_grad():
        other.moments()
    mean, variance = other.moments()
    found = torch.autograd.grad(mean.sum() + variance.sum(), (loc, scale))
    torch.testing.assert_close(found, (torch.ones_like(loc), 2 * scale.detach()))


def test_draws_follow_the_seed_and_leave_the_generator_alone():
    torch.manual_seed(3)
    first, _, _ = make_draw()
    before = torch.get_rng_state()
    value = first.value()
    assert torch.equal(torch.get_rng_state(), before)
    other, loc, scale = make_draw()
    torch.manual_seed(3)
    assert torch.equal(make_draw()[0].value(), value)
    noise = (value - first.moments()[0]) / first.moments()[1].sqrt()
    assert not torch.allclose((other.value() - loc) / scale, noise)


def test_draws_have_the_law_of_the_posterior():
    q = dist.Normal(torch.ones(6), torch.full((6,), 2.0)).to_event(1)
    z = torch.stack([(Draw("w", q).value() - 1) / 2 for _ in range(1500)])
    # Seeds follow from one generator: neighbours must not be correlated.
    for mean, error in ((z, 1), (z.square() - 1, 2**0.5), (z[1:] * z[:-1], 1)):
        assert bool((mean.mean(0).abs() < 6 * error / len(mean) ** 0.5).all())


def test_a_deviation_and_a_value_are_of_one_draw():
    draw, loc, _ = make_draw()
    deviation = draw.deviation()
    torch.testing.assert_close(draw.value(), loc + deviation)


def test_moments_only_where_elements_are_independent():
    value = torch.ones(2)
    draw = Draw("w", None, value)  # of a posterior that couples sites
    assert (draw.moments(), draw.center()) == (None, None)
    assert draw.value() is value
    laplace = Draw("w", td.Independent(td.Laplace(torch.ones(2), torch.ones(2)), 1))
    assert laplace.moments() is None
    assert torch.equal(laplace.center(), torch.ones(2))


def test_a_draw_below_autograd_is_refused():
    draw, _, _ = make_draw()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="lazily drawn"):
        torch.add(draw, 1)


@pytest.mark.filterwarnings("ignore:.* sampled plainly:tyxe.TyxeWarning")
@pytest.mark.parametrize("handler", [contextlib.nullcontext, flipout])
def test_functional_transforms_meet_draws(handler):
    bnn = bnn_of(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))
    x = torch.randn(3).double()
    with torch.no_grad(), handler():
        values = bnn.guide()
        jacobian = torch.func.jacrev(lambda x: bnn._run_net(values, x))(x)
    assert jacobian.shape == (2, 3)
    assert bool(jacobian.isfinite().all())


def test_functional_transforms_of_predictions():
    bnn = bnn_of(nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)))

    def predicted(x):
        torch.manual_seed(0)
        return bnn.predict(x, num_predictions=2, enable_grad=True)[0].sum()

    x = torch.randn(3).double().requires_grad_()
    (expected,) = torch.autograd.grad(predicted(x), x)
    torch.testing.assert_close(torch.func.grad(predicted)(x.detach()), expected)
