"""Every product of an input with one draw is `F.linear` of the rearranged draw."""

import pytest
import torch
from torch import addmm, einsum
from torch.nn.functional import conv1d, linear

import tyxe
from tests.oracles.events import Events
from tests.oracles.layers import COUNT, assert_moments, layer_moments
from tests.oracles.nets import NetOf, bnn_of, draws, posterior_moments
from tests.oracles.products import PRODUCTS, Weighted
from tyxe.poutine import flipout, local_reparameterization, report


def both(name, **rules):
    """A BNN of the product as it is written, one by `F.linear` with its posterior, and an input."""
    product = PRODUCTS[name]
    written = bnn_of(Weighted(product, product.written), **rules)
    linear = bnn_of(Weighted(product, product.linear), **rules)
    linear.load_state_dict(written.state_dict())
    linear.net.load_state_dict(written.net.state_dict())
    return written, linear, torch.randn(product.inputs).double()


def seeded_draw(bnn, x, handler):
    torch.manual_seed(1)
    (output,) = draws(bnn, x, 1, handler())
    return output


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_has_the_value_of_its_draws(name):
    written, linear, x = both(name)
    with torch.no_grad():
        with report(), pytest.warns(tyxe.TyxeWarning, match="no effect"):
            values = local_reparameterization()(written.guide)()
        lazy = written._run_net(values, x)
        plain = {site: value.value() for site, value in values.items()}
        torch.testing.assert_close(lazy, linear._run_net(plain, x), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lazy, written._run_net(plain, x), rtol=1e-12, atol=1e-12)


# Maps of more rows than points, which have noise of their own.
OTHERWISE = ["addmm, weight first", "einsum, outer"]


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
@pytest.mark.parametrize("name", OTHERWISE)
def test_draws_have_the_exact_moments(name, handler):
    written, linear, x = both(name)
    _, variance = layer_moments(linear, x)
    means = {n: posterior_moments(linear, n)[0] for n, _ in linear.net.named_parameters()}
    mean = torch.func.functional_call(linear.net, means, x)
    assert_moments(draws(written, x, COUNT, handler()), mean, variance)


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_treated_as_linear_is(name, handler):
    written, linear, x = both(name)
    with report() as rows, Events() as seen:
        found = seeded_draw(written, x, handler)
    ((event, _),) = seen.events
    assert event.kind == "linear"
    assert {draw.was_drawn for draw in event.draws} == {handler is flipout}
    assert {row.treatment for row in rows} == {handler().treatment}
    assert {row.site for row in rows} == {f"net.{n}" for n, _ in written.net.named_parameters()}
    if name not in OTHERWISE:
        expected = seeded_draw(linear, x, handler)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hidden", ["weight", "bias"])
@pytest.mark.parametrize("name", ["addmm", "addmm, method", "addmm, transposed"])
def test_either_of_weight_and_bias_may_be_plain(name, hidden):
    *bnns, x = both(name, hide_parameters=[hidden])
    found = [seeded_draw(bnn, x, local_reparameterization) for bnn in bnns]
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


H = torch.ones(4, 2).double()


def _einsum(equation):
    return lambda x, w: einsum(equation, x, w)


def copies(w):
    return w.expand(5, 2, 3)


OTHERS = {
    "a matrix for each": ((4, 5, 3), (4, 3, 2), torch.bmm, "bmm"),
    "a matrix for each head": ((4, 2, 3), (2, 3, 2), _einsum("bhd,hdk->bhk"), "einsum"),
    "a scale": ((4, 3), (3,), _einsum("bi,i->bi"), "einsum"),
    "a sum over outputs": ((4, 3), (3, 2), _einsum("bi,io->b"), "einsum"),
    "a trace": ((4, 2), (2, 2), _einsum("bi,oo->bi"), "einsum"),
    "three operands": ((4, 3), (3, 2), lambda x, w: einsum("bi,io,i->bo", x, w, x[0]), "einsum"),
    "broadcast": ((4, 1), (3, 2), _einsum("bi,io->bo"), "einsum"),
    "twice the draw": ((4, 3), (3, 2), lambda x, w: einsum("oi,pi->op", w.T, w.T), "einsum"),
    "copies as outputs": ((4, 3), (3, 2), lambda x, w: x @ w.expand(5, 3, 2), "reshape"),
    "rows of copies": ((4, 3), (2, 3), lambda x, w: linear(x, copies(w).flatten(0, 1)), "flatten"),
    "copies as channels": ((4, 2, 6), (1, 2, 3), lambda x, w: conv1d(x, copies(w)), "conv1d"),
    "copies of points": ((1, 5, 3), (3, 2), lambda x, w: x @ w.expand(4, 3, 2), "matmul"),
    "an output given": ((4, 3), (3, 2), lambda x, w: addmm(H, x, w, out=0 * H), "addmm"),
}


def run(bnn, x):
    values = bnn.guide()
    return values, bnn._run_net(values, x)


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
@pytest.mark.parametrize("name", OTHERS)
def test_other_products_use_the_draw_and_say_so(name, handler):
    shape, weight, function, used_by = OTHERS[name]
    parameter = torch.nn.Parameter(torch.randn(weight))
    bnn = bnn_of(NetOf(lambda net, x: function(x, net.weight), weight=parameter))
    x = torch.randn(shape).double()
    with report() as rows, torch.no_grad(), pytest.warns(tyxe.TyxeWarning) as caught:
        values, output = handler()(run)(bnn, x)
    assert f"net.weight (used by {used_by})" in str(caught[0].message)
    expected = function(x, values["net.weight"].value())
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    assert rows.treatments("weight") == {"drawn"}


@pytest.mark.parametrize(
    ("shape", "message"), [((2, 5, 7), "does not broadcast"), ((5, 3), "number of subscripts")]
)
def test_shapes_that_do_not_fit_are_refused_as_of_tensors(shape, message):
    bnn = bnn_of(Weighted(PRODUCTS["bmm"], lambda x, w, b: einsum("bti,io->bto", x, w)))
    with pytest.raises(RuntimeError, match=message), local_reparameterization():
        bnn.guided_forward(torch.randn(shape).double())
