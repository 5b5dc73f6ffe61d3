"""Steps of several batches are those of one, and bfloat16 is near to float32."""

import functools

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn

import tyxe

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))
X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True) + 0.1
SGD = functools.partial(torch.optim.SGD, lr=0.1)
# Every step draws anew, so that draws have to be told apart from batches: a guide without any.
MAKERS = {
    "MAP": lambda likelihood: tyxe.VariationalBNN(net(), NORMAL, likelihood, AutoDelta),
    "Laplace": lambda likelihood: tyxe.LaplaceBNN(net(), NORMAL, likelihood),
    "without sites": lambda likelihood: tyxe.VariationalBNN(net(), HIDDEN, likelihood),
}
HIDDEN = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def likelihood(size=24):
    return tyxe.likelihoods.HomoskedasticGaussian(size, scale=0.5)


def parts(*sizes):
    return list(zip(X.split(sizes), Y.split(sizes), strict=True))


def fitted(maker, data, **options):
    bnn = maker(likelihood())
    history = bnn.fit(data, SGD, 3, **options)
    return bnn, history


@pytest.mark.parametrize("sizes", [(8, 8, 8), (10, 12, 2)])
@pytest.mark.parametrize("name", MAKERS)
def test_a_step_of_several_batches_is_that_of_one(name, sizes):
    bnn, history = fitted(MAKERS[name], parts(*sizes), accumulate_steps=3)
    whole, expected = fitted(MAKERS[name], [(X, Y)])
    assert history.loss == pytest.approx(expected.loss, rel=1e-5)
    assert history.kl == pytest.approx(expected.kl, rel=1e-5)
    for one, other in zip(bnn.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_weights_count_points_in_steps():
    """A batch of points that do not count adds nothing."""
    weights = torch.cat([torch.ones(16), torch.zeros(8)])
    halves = [(X[:12], Y[:12], weights[:12]), (X[12:], Y[12:], weights[12:])]
    one = tyxe.VariationalBNN(net(), NORMAL, likelihood(16), AutoDelta)
    one.fit(halves, SGD, 3, accumulate_steps=2)
    other = tyxe.VariationalBNN(net(), NORMAL, likelihood(16), AutoDelta)
    other.fit([(X[:16], Y[:16])], SGD, 3)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_draws_of_a_step_add_up():
    """With draws the gradient has the mean of one batch's, and less variance."""
    bnn = tyxe.VariationalBNN(net(), NORMAL, likelihood(), tyxe.guides.AutoNormal)
    torch.manual_seed(0)
    history = bnn.fit(parts(8, 8, 8), SGD, 1, accumulate_steps=3, num_particles=200)
    torch.manual_seed(1)
    other = tyxe.VariationalBNN(net(), NORMAL, likelihood(), tyxe.guides.AutoNormal)
    expected = other.fit([(X, Y)], SGD, 1, num_particles=600)
    assert history.loss == pytest.approx(expected.loss, rel=0.05)
    for one, two in zip(bnn.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, atol=0.05, rtol=0.1)


def test_a_callback_sees_steps():
    class Count(tyxe.Callback):
        seen = ()

        def on_batch(self, bnn, epoch, batch, terms):
            self.seen += ((batch, int(terms.points)),)

    count = Count()
    fitted(MAKERS["MAP"], parts(8, 8, 4, 4), accumulate_steps=3, callback=count)
    assert count.seen[:2] == ((0, 20), (3, 4))


def test_a_loss_that_is_not_finite_changes_nothing():
    bnn, bad = MAKERS["MAP"](likelihood()), X.clone()
    bad[20] = torch.inf
    before = [p.clone() for p in bnn.parameters()]
    with pytest.raises(RuntimeError, match="inputs or targets that are not finite"):
        bnn.fit(list(zip(bad.split(8), Y.split(8), strict=True)), SGD, 1, accumulate_steps=3)
    assert all(map(torch.equal, before, bnn.parameters()))


@pytest.mark.parametrize("handler", [None, tyxe.poutine.local_reparameterization])
def test_bfloat16_is_near_to_float32(handler):
    found = []
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        bnn = tyxe.VariationalBNN(net(), NORMAL, likelihood(), tyxe.guides.AutoNormal)
        context = tyxe.poutine.flipout() if handler is None else handler()
        with context:
            history = bnn.fit([(X, Y)], SGD, 20, autocast=dtype)
        assert all(p.dtype == torch.float32 for p in bnn.parameters())
        found.append((history, [p.detach() for p in bnn.parameters()]))
    (exact, one), (half, other) = found
    assert half.kl == pytest.approx(exact.kl, rel=0.02)
    assert half.loss == pytest.approx(exact.loss, rel=0.05)
    assert half.loss != exact.loss
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=0.03, rtol=0.05)


def test_what_is_refused():
    bnn = MAKERS["MAP"](likelihood())
    with pytest.raises(ValueError, match=r"autocast is torch.float16; expected torch.bfloat16"):
        bnn.fit([(X, Y)], SGD, 1, autocast=torch.float16)
    with pytest.raises(ValueError, match="accumulate_steps"):
        bnn.fit([(X, Y)], SGD, 1, accumulate_steps=0)
    ivon = tyxe.VariationalBNN(net(), NORMAL, likelihood(), tyxe.guides.AutoNormal)
    with pytest.raises(ValueError, match="IVON takes gradients itself"):
        ivon.fit([(X, Y)], functools.partial(tyxe.optim.IVON, lr=0.1), 1, accumulate_steps=2)
