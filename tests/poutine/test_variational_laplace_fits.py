"""What variational Laplace fits, refuses, and warns of."""

import contextlib
import functools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn
from torch.func import jacrev
from torch.utils.checkpoint import checkpoint

import tyxe
from tests.oracles.nets import NetOf, ReadLast
from tests.oracles.variational_laplace import (
    NORMAL,
    as_function,
    bnn_of,
    small,
    smooth_net,
    start_of,
    terms_of,
    with_labels,
)
from tyxe.guides import AutoNormal, AutoRadial, scale_below_prior
from tyxe.likelihoods import Bernoulli, Categorical, HomoskedasticGaussian
from tyxe.poutine import local_reparameterization, variational_laplace


def test_pyros_own_elbos_have_the_same_value():
    bnn, x, y = small()
    with with_labels(torch.randint(3, (6,))):
        terms = terms_of(bnn, x, y)
        mean_field = TraceMeanField_ELBO().loss(bnn.model, bnn.guide, x, y)
        draws = [Trace_ELBO().loss(bnn.model, bnn.guide, x, y) for _ in range(100)]
    ours, draws = (terms.kl - terms.data).item(), torch.tensor(draws)
    assert mean_field == pytest.approx(ours, rel=1e-10)
    # Without closed forms the KL is estimated at draws, though the net runs at the means.
    assert abs(draws.mean() - ours) < 4 * draws.std() / math.sqrt(len(draws))


def test_inferred_noise_is_drawn_and_fitted():
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    y, net = 3 * x + 0.2 * torch.randn_like(x), nn.Linear(1, 1).double()
    noise = dist.LogNormal(torch.zeros((), dtype=torch.float64), 1.0)
    guide = functools.partial(AutoNormal, init_scale=scale_below_prior(), init_loc_fn=start_of(net))
    of_noise = functools.partial(AutoNormal, init_scale=0.1)
    bnn = tyxe.VariationalBNN(net, NORMAL, HomoskedasticGaussian(40, scale=noise), guide, of_noise)
    with variational_laplace():
        history = bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=0.1), 120)
    assert history.loss[-1] < history.loss[0]
    assert 0.1 < bnn.likelihood_guide.median()["likelihood.scale"].item() < 0.4


def test_the_default_guide_trains():
    """Means that are all zero are a stationary point of this objective."""
    x = torch.randn(60, 2)
    y = (x.prod(-1) > 0).long()
    net = nn.Sequential(nn.Linear(2, 20), nn.Softplus(), nn.Linear(20, 2))
    bnn = tyxe.VariationalBNN(net, NORMAL, Categorical(60), AutoNormal)
    with variational_laplace():
        bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=3e-2), 80, beta=0.1)
    assert tyxe.metrics.accuracy(bnn.predict(x, num_predictions=0).softmax(-1), y) > 0.8


def test_checkpointed_nets_have_the_same_gradients():
    _, x, y = small()
    labels, inner, gradients = torch.randint(3, (6,)), smooth_net(3), []
    again = NetOf(lambda net, x: checkpoint(net.inner, x, use_reentrant=False), inner=inner)
    for net in (inner, again):
        bnn = bnn_of(net, Categorical(6))
        with with_labels(labels):
            data = terms_of(bnn, x, y).data
            gradients.append(torch.autograd.grad(data, list(bnn.net_guide.parameters())))
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


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
    bnn = of(nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 3)))
    data = [(torch.randn(6, 3, 8, dtype=torch.float64), LABELS)]
    with variational_laplace():
        history = bnn.fit(data, torch.optim.Adam, 2, beta=0.01)
    assert history.loss[1] != history.loss[0]


@pytest.mark.parametrize(
    ("net", "expected"), [(ReadLast(nn.LSTM, 2, 4, 3), False), (smooth_net(), True)]
)
def test_recurrent_layers_run_without_cudnn(net, expected):
    """Those of cuDNN have no second derivative; other layers keep it."""
    x = X if expected else torch.randn(6, 3, 2).double()
    bnn, used = of(net), []
    bnn.net.register_forward_hook(lambda *_: used.append(torch.backends.cudnn.enabled))
    with variational_laplace():
        bnn.fit([(x, LABELS)], torch.optim.Adam, 2)
    assert set(used) == {expected}
    assert torch.backends.cudnn.enabled


def test_nothing_is_left_behind_and_draws_are_draws_again():
    bnn, x, y = small()
    before = torch.backends.cuda.flash_sdp_enabled()
    with tyxe.poutine.report() as outer, variational_laplace(), tyxe.poutine.report() as inner:
        bnn.fit([(x, y)], torch.optim.Adam, 1)
        at_mean = bnn.predict(x, num_predictions=2, aggregate=False)
    assert {row.treatment for row in inner} == {row.treatment for row in outer} == {"mean"}
    drawn = bnn.predict(x, num_predictions=2, aggregate=False)
    centre = bnn.predict(x, num_predictions=0, aggregate=False)
    torch.testing.assert_close(at_mean, centre.expand_as(at_mean))
    assert not torch.equal(drawn[0], drawn[1])
    assert torch.backends.cuda.flash_sdp_enabled() == before
    assert bnn.predict(x, predictive="glm", num_predictions=100).shape == (6, 3)


def test_fixed_variance_trains_means_only():
    _, x, y = small()
    net, scale = smooth_net(), math.sqrt(0.02 / 2)
    guide = functools.partial(
        AutoNormal, init_scale=scale, train_scale=False, init_loc_fn=start_of(net)
    )
    bnn = tyxe.VariationalBNN(net, NORMAL, Categorical(6), guide)
    with variational_laplace():
        bnn.fit([(x, y)], torch.optim.Adam, 3)
    assert torch.allclose(bnn.net_guide.get_scale("0.weight"), torch.tensor(0.1).double())
    assert not torch.equal(bnn.net_guide.get_loc("0.weight"), net[0].weight)


def test_a_mask_for_all_rows_counts_them_all():
    bnn, x, y = small()
    found = []
    for handler in (contextlib.nullcontext(), pyro.poutine.mask(mask=torch.tensor(True))):
        with with_labels(LABELS), handler:
            found.append(terms_of(bnn, x, y).data.item())
    assert found[1] == pytest.approx(found[0], rel=1e-12)


def test_deterministic_sites_and_factors_of_a_net_are_no_data():
    def forward(net, x):
        hidden = net.inner(x)
        pyro.deterministic("hidden", hidden)
        pyro.factor("penalty", torch.zeros(()))
        return hidden

    with variational_laplace():
        bnn = of(NetOf(forward, inner=smooth_net()))
        history = bnn.fit([(X, LABELS)], torch.optim.Adam, 1)
    assert math.isfinite(history.loss[0])


def test_unknown_curvature():
    with pytest.raises(ValueError, match="curvature is 'exact'; expected one of 'fisher'"):
        variational_laplace("exact")


class CannotSample(Categorical):
    def predictive_distribution(self, predictions, latents=None):
        made = super().predictive_distribution(predictions, latents)

        class Unsampled(type(made)):
            def sample(self, sample_shape=()):
                raise NotImplementedError

        made.__class__ = Unsampled
        return made


def root():
    """A part whose first derivative at 0 is finite by a cut-off, and whose second is not."""
    return NetOf(lambda _, x: (x - x).abs().pow(1.5) + x)


def a_function():
    layer = nn.Linear(2, 4)
    return NetOf(lambda net, x: nn.functional.hardsigmoid(net.layer(x)), layer=layer)


def of_guide(guide):
    return tyxe.VariationalBNN(smooth_net(), NORMAL, Categorical(6), guide)


def of(net, likelihood=Categorical):
    return bnn_of(net.double(), likelihood(6))


def of_part(part):
    return of(nn.Sequential(part, nn.Linear(4, 3)))


def of_parts(*parts):
    return of_part(nn.Sequential(nn.Linear(2, 4), *parts))


LOW_RANK = pyro.infer.autoguide.AutoLowRankMultivariateNormal
X, LABELS = torch.randn(6, 2, dtype=torch.float64), torch.arange(6) % 3
TOKENS = torch.arange(12).view(6, 2) % 3
NORM = nn.BatchNorm1d(4)
WITHOUT = "PyTorch has no second derivative of %s.*: replace them before training"
REFUSED = {
    "coupled": (lambda: of_guide(LOW_RANK), TypeError, r"t \(Delta\), .*use tyxe\.guides\.AutoNor"),
    "radial": (lambda: of_guide(AutoRadial), TypeError, r"net\.0\.weight \(Radial\)"),
    "unsampled": (lambda: of(smooth_net(), CannotSample), TypeError, r"no sample\(\): implement"),
    "hardsigmoid": (lambda: of_parts(nn.Hardsigmoid()), RuntimeError, WITHOUT % r"0\.1 \(Hardsi"),
    "as a function": (lambda: of_part(a_function()), RuntimeError, WITHOUT % r"Ha.*as a func"),
    "bag": (lambda: of_part(nn.EmbeddingBag(3, 4)), RuntimeError, WITHOUT % r"0 \(EmbeddingBag"),
    "infinite": (lambda: of_parts(NORM, root()), RuntimeError, r"at net\.0\.0\.weight"),
    "large": (lambda: of(nn.Linear(2, 6667)), ValueError, r'20001; .*use curvature="fisher"'),
}


def refuses(bnn, x, outer, inner, error, message):
    before = {k: v.clone() for k, v in bnn.state_dict().items() if isinstance(v, torch.Tensor)}
    with pytest.raises(error, match=message), outer, inner:
        bnn.fit([(x, LABELS)], torch.optim.Adam, 1)
    after = bnn.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_does_not_serve_is_named_and_changes_nothing(case):
    make, error, message = REFUSED[case]
    handler = variational_laplace("hessian" if case in ("infinite", "large") else "fisher")
    x = TOKENS if case == "bag" else X
    refuses(make(), x, contextlib.nullcontext(), handler, error, message)


@pytest.mark.parametrize(
    ("outer", "inner"),
    [
        (variational_laplace, local_reparameterization),
        (local_reparameterization, variational_laplace),
        (variational_laplace, variational_laplace),
    ],
)
def test_another_sampling_handler_is_an_error(outer, inner):
    refuses(of(smooth_net()), X, outer(), inner(), RuntimeError, "use one of them")


def test_the_true_labels_need_no_draws():
    with variational_laplace("empirical"):
        assert of(smooth_net(), CannotSample).fit([(X, LABELS)], torch.optim.Adam, 1)


def test_gradients_off():
    bnn, x, y = small()
    refused = pytest.raises(RuntimeError, match="gradients are off")
    with variational_laplace(), torch.no_grad(), refused:
        terms_of(bnn, x, y)


@pytest.mark.parametrize("function", [False, True])
def test_kinks_are_named_once(function):
    linear, head = nn.Linear(2, 4), nn.Linear(4, 3)
    net, match = nn.Sequential(linear, nn.ReLU(), head), r"1 \(ReLU\)"
    if function:
        parts = {"linear": linear, "head": head}
        net = NetOf(lambda net, x: net.head(nn.functional.relu(net.linear(x))), **parts)
        match = r"Relu \(called as a function\)"
    bnn, data = of(net), [(X[:3], LABELS[:3]), (X[3:], LABELS[3:])]
    with pytest.warns(tyxe.TyxeWarning, match=match) as caught, variational_laplace():
        bnn.fit(data, torch.optim.Adam, 2)
    assert len(caught) == 1


ONES = torch.ones(4, 1, dtype=torch.float64)


def test_upward_curvature_is_said():
    # exp(-w^2 / 2) has its inflection at 1: at 3 the log-density of a wrong label curves upwards.
    net = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(net.weight, 3.0)
    bump = NetOf(lambda net, x: 20 * (-net.linear(x).square() / 2).exp(), linear=net)
    bnn = bnn_of(bump, Bernoulli(4, event_dim=1))
    message = r"curves upwards at 1 weights of 'net\.linear\.weight'"
    with pytest.warns(tyxe.TyxeWarning, match=message), variational_laplace("hessian"):
        bnn.fit([(ONES, ONES)], torch.optim.Adam, 1)


@pytest.mark.parametrize("warns", [True, False])
def test_upward_curvature_is_measured_against_beta_prior_and_scale(warns):
    first, last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    nn.init.constant_(first.weight, -1.0)
    nn.init.constant_(last.weight, 3.0)
    net = nn.Sequential(first, nn.Tanh(), last).double()
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 0.5))
    guide = functools.partial(AutoNormal, init_loc_fn=start_of(net), init_scale=0.1)
    bnn = tyxe.VariationalBNN(net, prior, Bernoulli(8, event_dim=1), guide)
    run, means = as_function(bnn, ONES)
    hessian = jacrev(jacrev(lambda w: bnn.likelihood.log_likelihood(run(w), ONES, "sum")))(means)
    diagonal = hessian[0, 0].item()
    assert diagonal > 0
    threshold = 8 / 4 * diagonal * 0.5**2  # the plate's scale, the Hessian, the prior's variance
    beta = threshold * (0.999 if warns else 1.001)
    with warnings.catch_warnings(record=True) as caught, variational_laplace("hessian"):
        warnings.simplefilter("always")
        bnn.fit([(ONES, ONES)], functools.partial(torch.optim.SGD, lr=0.0), 1, beta=beta)
    found = [w for w in caught if "at 1 weights of 'net.0.weight'" in str(w.message)]
    assert len(found) == warns


def test_prediction_inside_warns_that_it_is_at_the_mean():
    bnn, x, _ = small()
    with pytest.warns(tyxe.TyxeWarning, match="met no data"), variational_laplace():
        bnn.predict(x, num_predictions=2)
