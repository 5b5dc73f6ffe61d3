"""Variational Laplace with other handlers, guides, nets and precisions."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn
from torch.utils.checkpoint import checkpoint

import tyxe
from tests.oracles.variational_laplace import (
    NORMAL,
    bnn_of,
    likelihoods,
    small,
    smooth_net,
    start_of,
    terms_of,
    with_labels,
)
from tyxe.guides import AutoNormal, scale_below_prior, stationary_scale
from tyxe.likelihoods import Categorical, HomoskedasticGaussian
from tyxe.poutine import variational_laplace


def test_pyros_own_elbos_have_the_same_value():
    bnn, x, y = small()
    labels = torch.randint(3, (6,))
    with with_labels(labels):
        terms = terms_of(bnn, x, y)
        mean_field = TraceMeanField_ELBO().loss(bnn.model, bnn.guide, x, y)
        draws = torch.tensor(
            [Trace_ELBO().loss(bnn.model, bnn.guide, x, y) for _ in range(200)],
            dtype=torch.float64,
        )
    ours = (terms.kl - terms.data).item()
    assert mean_field == pytest.approx(ours, rel=1e-10)
    # Without closed forms the KL is estimated at draws, though the net runs at the means.
    assert abs(draws.mean() - ours) < 4 * draws.std() / math.sqrt(len(draws))


def test_inferred_noise_is_drawn_and_fitted():
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    y = torch.sin(3 * x) + 0.2 * torch.randn_like(x)
    net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1)).double()
    noise = dist.LogNormal(torch.zeros((), dtype=torch.float64), 1.0)
    likelihood = HomoskedasticGaussian(40, scale=noise)
    bnn = tyxe.VariationalBNN(
        net,
        NORMAL,
        likelihood,
        functools.partial(AutoNormal, init_scale=scale_below_prior(), init_loc_fn=start_of(net)),
        functools.partial(AutoNormal, init_scale=0.1),
    )
    with variational_laplace():
        history = bnn.fit(
            [(x, y)], functools.partial(torch.optim.Adam, lr=2e-2), 400, progress=False
        )
    assert history.loss[-1] < history.loss[0]
    assert 0.1 < bnn.likelihood_guide.median()["likelihood.scale"].item() < 0.4


def test_the_default_guide_trains():
    """Means that are all zero are a stationary point of this objective."""
    x = torch.randn(60, 2)
    y = (x.prod(-1) > 0).long()
    net = nn.Sequential(nn.Linear(2, 20), nn.Softplus(), nn.Linear(20, 2))
    bnn = tyxe.VariationalBNN(net, NORMAL, Categorical(60), AutoNormal)
    with variational_laplace():
        bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=1e-2), 200, beta=0.1)
    assert tyxe.metrics.accuracy(bnn.predict(x, num_predictions=0).softmax(-1), y) > 0.8


def test_checkpointed_nets_have_the_same_gradients():
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    likelihood, y, _ = likelihoods(6)["categorical"]
    x, labels, inner = torch.randn(6, 2, dtype=torch.float64), torch.randint(3, (6,)), smooth_net(3)
    gradients = []
    for net in (inner, Checkpointed(inner)):
        bnn = bnn_of(net, likelihood)
        with with_labels(labels):
            terms = terms_of(bnn, x, y)
            gradients.append(torch.autograd.grad(terms.data, list(bnn.net_guide.parameters())))
    for plain, again in zip(*gradients, strict=True):
        assert torch.allclose(plain, again, rtol=1e-10)


@pytest.mark.parametrize("autocast", [False, True])
def test_float32_and_autocast_stay_finite(autocast):
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Softplus(), nn.Flatten(), nn.Linear(144, 10)
    )
    x, y = torch.randn(16, 1, 8, 8), torch.randint(10, (16,))
    bnn = tyxe.VariationalBNN(
        net,
        tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide_module_types=[nn.BatchNorm2d]),
        Categorical(16),
        functools.partial(AutoNormal, init_scale=scale_below_prior()),
    )
    with variational_laplace(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        history = bnn.fit([(x, y)], torch.optim.Adam, 3, lr_multipliers={"scale": 10})
    assert all(map(math.isfinite, history.loss))
    assert all(bool(p.isfinite().all()) for p in bnn.parameters())


def test_transformers_run_their_attention_unfused():
    # Without dropout the fused kernel would be taken, which has no second derivative.
    options = {"activation": nn.functional.gelu, "batch_first": True, "dropout": 0.0}
    layer = nn.TransformerEncoderLayer(8, 2, 16, **options)
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)).double()
    likelihood, y, _ = likelihoods(5)["categorical"]
    bnn, x = bnn_of(net, likelihood), torch.randn(5, 3, 8, dtype=torch.float64)
    with variational_laplace():
        history = bnn.fit([(x, y)], torch.optim.Adam, 2, beta=0.01)
    assert history.loss[1] != history.loss[0]


def test_nothing_is_left_behind_and_draws_are_draws_again():
    bnn, x, y = small()
    before = torch.backends.cuda.flash_sdp_enabled()
    with variational_laplace():
        bnn.fit([(x, y)], torch.optim.Adam, 1)
        at_mean = bnn.predict(x, num_predictions=2, aggregate=False)
    drawn = bnn.predict(x, num_predictions=2, aggregate=False)
    assert torch.equal(at_mean[0], at_mean[1])
    assert torch.allclose(at_mean[0], bnn.predict(x, num_predictions=0, aggregate=False)[0])
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.backends.cuda.flash_sdp_enabled() == before
    assert bnn.predict(x, predictive="glm", num_predictions=100).shape == (6, 3)


def test_report_lists_means():
    bnn, x, y = small()
    with tyxe.poutine.report() as outer, variational_laplace(), tyxe.poutine.report() as inner:
        bnn.fit([(x, y)], torch.optim.Adam, 1)
    assert {row.treatment for row in inner} == {row.treatment for row in outer} == {"mean"}


def test_fixed_variance_trains_means_only():
    likelihood, y, outputs = likelihoods(6)["categorical"]
    net, x = smooth_net(outputs), torch.randn(6, 2, dtype=torch.float64)
    guide = functools.partial(
        AutoNormal,
        init_scale=stationary_scale(0.02, 1),
        train_scale=False,
        init_loc_fn=start_of(net),
    )
    bnn = tyxe.VariationalBNN(net, NORMAL, likelihood, guide)
    with variational_laplace():
        bnn.fit([(x, y)], torch.optim.Adam, 3)
    assert torch.allclose(bnn.net_guide.get_scale("0.weight"), torch.tensor(0.1).double())
    assert not torch.equal(bnn.net_guide.get_loc("0.weight"), net[0].weight)


def test_a_mask_for_all_rows_counts_them_all():
    bnn, x, y = small()
    labels = torch.randint(3, (6,))
    with with_labels(labels):
        plain = terms_of(bnn, x, y).data
    with with_labels(labels), pyro.poutine.mask(mask=torch.tensor(True)):
        masked = terms_of(bnn, x, y).data
    assert masked.item() == pytest.approx(plain.item(), rel=1e-12)


def test_deterministic_sites_and_factors_of_a_net_are_no_data():
    class Recorded(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = smooth_net()

        def forward(self, x):
            hidden = self.inner(x)
            pyro.deterministic("hidden", hidden)
            pyro.factor("penalty", torch.zeros(()))
            return hidden

    _, x, y = small()
    with variational_laplace():
        history = bnn_of(Recorded(), Categorical(6)).fit([(x, y)], torch.optim.Adam, 1)
    assert math.isfinite(history.loss[0])


def test_scales_start_below_the_prior():
    bnn = tyxe.VariationalBNN(
        nn.Linear(2, 1),
        tyxe.priors.IIDPrior(dist.Normal(0.0, 2.0)),
        HomoskedasticGaussian(3, scale=1.0),
        functools.partial(AutoNormal, init_scale=scale_below_prior()),
    )
    assert torch.allclose(bnn.net_guide.get_scale("weight"), torch.tensor(2 * math.exp(-3)))
