"""Steps of several batches are those of one, and bfloat16 is near to float32."""

import functools

import pytest
import torch
from pyro.infer.autoguide import AutoDelta

import tyxe
from tests.oracles.bnns import NORMAL, NOTHING, mean_field, mlp
from tests.oracles.rejections import rejects
from tyxe.poutine import flipout, local_reparameterization

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) + 0.1
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def net():
    torch.manual_seed(0)
    return mlp(3, 8, 1)


def likelihood(size=24):
    return tyxe.likelihoods.HomoskedasticGaussian(size, scale=0.5)


def point(size=24):
    return tyxe.VariationalBNN(net(), NORMAL, likelihood(size), AutoDelta)


# Every step draws anew, so that draws have to be told apart from batches: a guide without any.
MAKERS = {
    "MAP": point,
    "Laplace": lambda: tyxe.LaplaceBNN(net(), NORMAL, likelihood()),
    "without sites": lambda: tyxe.VariationalBNN(net(), NOTHING, likelihood()),
}


def parts(x, *sizes):
    return list(zip(x.split(sizes), Y.split(sizes), strict=True))


def assert_same_parameters(one, other, **tolerance):
    torch.testing.assert_close([*one.parameters()], [*other.parameters()], **tolerance)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (10, 12, 2)])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_step_of_several_batches_is_that_of_one(make, sizes):
    bnn, whole = make(), make()
    history = bnn.fit(parts(X, *sizes), SGD, 3, accumulate_steps=3)
    expected = whole.fit([(X, Y)], SGD, 3)
    assert history.loss == pytest.approx(expected.loss, rel=1e-5)
    assert history.kl == pytest.approx(expected.kl, rel=1e-5)
    assert_same_parameters(bnn, whole, rtol=1e-4, atol=1e-6)


def test_a_callback_sees_steps():
    class Count(tyxe.Callback):
        seen = ()

        def on_batch(self, bnn, epoch, batch, terms):
            self.seen += ((batch, int(terms.points)),)

    count = Count()
    point().fit(parts(X, 8, 8, 4, 4), SGD, 1, accumulate_steps=3, callback=count)
    assert count.seen == ((0, 20), (3, 4))


def test_a_loss_that_is_not_finite_changes_nothing():
    bnn, bad = point(), X.clone()
    bad[20] = torch.inf
    rejects(
        bnn,
        RuntimeError,
        "inputs or targets that are not finite",
        lambda: bnn.fit(parts(bad, 8, 8, 8), SGD, 1, accumulate_steps=3),
    )


@pytest.mark.parametrize("handler", [flipout, local_reparameterization])
def test_bfloat16_is_near_to_float32(handler):
    found = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        bnn = mean_field(net(), likelihood())
        with handler():
            history = bnn.fit([(X, Y)], SGD, 20, autocast=dtype)
        assert all(p.dtype == torch.float32 for p in bnn.parameters())
        found.append((history, bnn))
    (exact, one), (half, other) = found
    assert half.kl == pytest.approx(exact.kl, rel=0.02)
    assert half.loss == pytest.approx(exact.loss, rel=0.05)
    assert half.loss != exact.loss
    assert_same_parameters(one, other, atol=0.03, rtol=0.05)


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"autocast is torch\.float16; expected"):
        point().fit([(X, Y)], SGD, 1, autocast=torch.float16)
    with pytest.raises(ValueError, match="accumulate_steps"):
        point().fit([(X, Y)], SGD, 1, accumulate_steps=0)
    ivon = functools.partial(tyxe.optim.IVON, lr=0.1)
    with pytest.raises(ValueError, match="IVON takes gradients itself"):
        mean_field(net(), likelihood()).fit([(X, Y)], ivon, 1, accumulate_steps=2)
