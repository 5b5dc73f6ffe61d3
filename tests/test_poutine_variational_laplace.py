"""Variational Laplace against exact ELBOs, dense Hessians, the GGN and enumeration."""

import functools
import itertools
import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceMeanField_ELBO
from torch import nn
from torch.func import functional_call, jacrev
from torch.utils.checkpoint import checkpoint

import tyxe
from tyxe.bnn.elbo import elbo_terms
from tyxe.guides import AutoNormal, scale_below_prior, stationary_scale
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Poisson,
)
from tyxe.likelihoods.output_hessian import output_hessian
from tyxe.poutine import local_reparameterization, selective_mask, variational_laplace
from tyxe.poutine.data_curvature import Fisher

NORMAL = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))


def smooth_net(outputs=3):
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def bnn_of(net, likelihood, init_scale=0.3, **options):
    guide = functools.partial(AutoNormal, init_scale=init_scale, init_loc_fn=start_of(net))
    return tyxe.VariationalBNN(net, NORMAL, likelihood, guide, **options)


def start_of(net):
    return tyxe.guides.PretrainedInitializer.from_net(net)


def terms_of(bnn, x, y):
    return elbo_terms(bnn.model, bnn.guide, x, y)


def moments_of(bnn):
    guide = bnn.net_guide
    names = [site.own_name for site in guide.sites]
    return {n: (guide.get_loc(n).detach(), guide.get_scale(n).detach() ** 2) for n in names}


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def as_function(bnn, x):
    """The net's outputs as a function of all weights in one vector, and the guide's means."""
    moments = moments_of(bnn)
    shapes = {name: loc.shape for name, (loc, _) in moments.items()}

    def outputs(vector):
        parts = vector.split([shape.numel() for shape in shapes.values()])
        weights = {n: p.view(s) for (n, s), p in zip(shapes.items(), parts, strict=True)}
        return functional_call(bnn.net, weights, (x,))

    return outputs, flat([loc for loc, _ in moments.values()])


def variances_of(bnn):
    return flat([variance for _, variance in moments_of(bnn).values()])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def linear_gaussian(points=7):
    x = torch.randn(points, 2, dtype=torch.float64)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64) + 0.5
    bnn = bnn_of(nn.Linear(2, 1).double(), HomoskedasticGaussian(points, scale=0.7))
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return bnn, x, y


# --------------------------------------------------------------------------- exact cases


def exact_elbo_data_term(bnn, x, y, scale=0.7):
    """`E_q log p(y | w)` of a linear model, in closed form."""
    (weight, weight_var), (bias, bias_var) = moments_of(bnn).values()
    mean = x @ weight.T + bias
    variance = x.square() @ weight_var.T + bias_var
    log_prob = dist.Normal(mean, scale).log_prob(y) - variance / (2 * scale**2)
    return log_prob.sum()


def test_hessian_form_is_the_exact_elbo_of_a_linear_gaussian_model():
    bnn, x, y = linear_gaussian()
    with variational_laplace("hessian"):
        terms = terms_of(bnn, x, y)
    assert terms.data.item() == pytest.approx(exact_elbo_data_term(bnn, x, y).item(), rel=1e-12)
    assert terms.points == len(x)


def test_fisher_form_has_the_exact_elbo_of_a_linear_gaussian_model_as_its_mean():
    bnn, x, y = linear_gaussian()
    with variational_laplace():
        draws = torch.stack([terms_of(bnn, x, y).data.detach() for _ in range(2_000)])
    error = draws.std() / math.sqrt(len(draws))
    assert abs(draws.mean() - exact_elbo_data_term(bnn, x, y)) < 4 * error


def test_the_optimum_of_a_linear_gaussian_model_is_the_mean_field_posterior():
    bnn, x, y = linear_gaussian()
    inputs = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    precision = inputs.T @ inputs / 0.7**2 + torch.eye(3, dtype=torch.float64)
    mean = torch.linalg.solve(precision, inputs.T @ y / 0.7**2)[:, 0]
    guide = bnn.net_guide
    with torch.no_grad():
        guide.get_loc("weight").copy_(mean[None, :2])
        guide.get_loc("bias").copy_(mean[2:])
        scales = precision.diagonal().rsqrt()
        guide.unconstrained_scales["weight"].copy_(scales[None, :2].log())
        guide.unconstrained_scales["bias"].copy_(scales[2:].log())
    with variational_laplace("hessian"):
        terms = terms_of(bnn, x, y)
    gradients = torch.autograd.grad(terms.data - terms.kl, list(guide.parameters()))
    assert flat(gradients).abs().max() < 1e-10


@pytest.mark.parametrize("curvature", ["fisher", "hessian"])
def test_fit_finds_the_mean_field_posterior_of_a_linear_gaussian_model(curvature):
    bnn, x, y = linear_gaussian()
    precision = x.square().sum(0) / 0.7**2 + 1.0
    rates = torch.optim.lr_scheduler.ExponentialLR
    scheduler = pyro.optim.PyroLRScheduler(
        rates, {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.05}, "gamma": 0.995}
    )
    with variational_laplace(curvature):
        bnn.fit([(x, y)], scheduler, 1_500, callback=lambda *_: scheduler.step(), progress=False)
    found = bnn.net_guide.get_scale("weight").detach()[0]
    # Fisher: the last steps average over some hundred draws of labels.
    tolerance = 1e-3 if curvature == "hessian" else 0.05
    assert torch.allclose(found, precision.rsqrt(), rtol=tolerance)


# --------------------------------------------------------------------------- curvature


def likelihoods(points):
    return {
        "categorical": (Categorical(points), torch.randint(3, (points,)), 3),
        "bernoulli": (
            Bernoulli(points, event_dim=1),
            torch.randint(2, (points, 3)).double(),
            3,
        ),
        "poisson": (Poisson(points, event_dim=1), torch.randint(5, (points, 2)).double(), 2),
        "heteroskedastic": (
            HeteroskedasticGaussian(points),
            torch.randn(points, 2, dtype=torch.float64),
            4,
        ),
        "homoskedastic": (
            HomoskedasticGaussian(points, scale=0.5),
            torch.randn(points, 2, dtype=torch.float64),
            2,
        ),
    }


@pytest.mark.filterwarnings("ignore:the log-likelihood curves upwards")
@pytest.mark.parametrize("name", likelihoods(2))
def test_hessian_form_has_the_diagonal_of_the_dense_hessian(name):
    likelihood, y, outputs = likelihoods(6)[name]
    bnn, x = bnn_of(smooth_net(outputs), likelihood), torch.randn(6, 2, dtype=torch.float64)
    with variational_laplace("hessian"):
        terms = terms_of(bnn, x, y)
    net, mean = as_function(bnn, x)

    def log_likelihood(vector):
        return bnn.likelihood.log_likelihood(net(vector), y, "sum")

    diagonal = jacrev(jacrev(log_likelihood))(mean).diagonal()
    expected = log_likelihood(mean) + 0.5 * (variances_of(bnn) * diagonal).sum()
    assert terms.data.item() == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize("name", likelihoods(2))
def test_fisher_form_has_the_diagonal_of_the_ggn_as_its_mean(name):
    points = 6
    likelihood, y, outputs = likelihoods(points)[name]
    bnn, x = bnn_of(smooth_net(outputs), likelihood), torch.randn(points, 2, dtype=torch.float64)
    net, mean = as_function(bnn, x)
    jacobian = jacrev(net)(mean)  # (n, outputs, P)
    blocks = output_hessian(likelihood, net(mean))  # (n, R, C, C)
    grouped = jacobian.view(*blocks.shape[:3], -1)
    ggn = torch.einsum("nrcp,nrcd,nrdp->p", grouped, blocks, grouped)
    at_mean = bnn.likelihood.log_likelihood(net(mean), y, "sum")
    with variational_laplace():
        draws = torch.stack([terms_of(bnn, x, y).data.detach() for _ in range(2_000)])
    error = draws.std() / math.sqrt(len(draws))
    assert abs(draws.mean() - (at_mean - 0.5 * (variances_of(bnn) * ggn).sum())) < 4 * error


def test_empirical_form_squares_the_gradient_of_the_batch():
    likelihood, y, outputs = likelihoods(6)["categorical"]
    net, x = smooth_net(outputs), torch.randn(6, 2, dtype=torch.float64)
    bnn = bnn_of(net, likelihood)
    at_mean = likelihood.log_likelihood(net(x), y, "sum")
    gradients = torch.autograd.grad(at_mean, list(net.parameters()))
    with variational_laplace("empirical"):
        data = terms_of(bnn, x, y).data
    expected = at_mean - 0.5 * (variances_of(bnn) * flat(gradients).square()).sum()
    assert data.item() == pytest.approx(expected.item(), rel=1e-10)


class GivenLabels(Fisher):
    """Pseudo-labels that a test has chosen."""

    labels = None

    def pseudo_labels(self, fn):
        return self.labels


def with_labels(labels):
    handler = variational_laplace()
    handler.curvature = GivenLabels()
    handler.curvature.labels = labels
    return handler


@pytest.mark.parametrize("name", likelihoods(2))
def test_gradient_of_the_objective_is_that_of_finite_differences(name):
    likelihood, y, outputs = likelihoods(4)[name]
    bnn, x = bnn_of(smooth_net(outputs), likelihood), torch.randn(4, 2, dtype=torch.float64)
    labels = bnn.likelihood.sample(bnn.to_module()(x).detach())

    def objective():
        with with_labels(labels):
            terms = terms_of(bnn, x, y)
        return terms.data - 0.1 * terms.kl

    parameters = [p for p in bnn.net_guide.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(objective(), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction = torch.randn_like(parameter)
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                parameter.add_(step * direction)
            values.append(objective().item())
            with torch.no_grad():
                parameter.sub_(step * direction)
        slope = (values[0] - values[1]) / 2e-5
        assert slope == pytest.approx((gradient * direction).sum().item(), rel=1e-6, abs=1e-7)


# --------------------------------------------------------------------------- batches


def expected_data_term(bnn, x, y):
    """Average over all labels that a Bernoulli model may draw."""
    probs = torch.sigmoid(bnn.to_module()(x).detach()).squeeze(-1)
    total = 0.0
    for labels in itertools.product([0.0, 1.0], repeat=len(x)):
        drawn = torch.tensor(labels, dtype=torch.float64)
        weight = torch.where(drawn > 0, probs, 1 - probs).prod()
        with with_labels(drawn[:, None]):
            total = total + weight * terms_of(bnn, x, y).data.detach()
    return total


def test_batches_average_to_the_full_batch():
    x = torch.randn(6, 2, dtype=torch.float64)
    y = torch.randint(2, (6, 1)).double()
    bnn = bnn_of(smooth_net(1), Bernoulli(6, event_dim=1))
    full = expected_data_term(bnn, x, y)
    parts = [expected_data_term(bnn, x[i : i + 2], y[i : i + 2]) for i in (0, 2, 4)]
    assert torch.stack(parts).mean().item() == pytest.approx(full.item(), rel=1e-10)


def test_mask_is_the_same_as_leaving_rows_out():
    _, y, outputs = likelihoods(6)["categorical"]
    x, mask = torch.randn(6, 2, dtype=torch.float64), torch.tensor([1, 1, 0, 1, 0, 0]).bool()
    net, three = smooth_net(outputs), Categorical(3)
    labels = torch.randint(3, (6,))
    with with_labels(labels[mask]):
        kept = terms_of(bnn_of(net, three), x[mask], y[mask])
    with with_labels(labels), selective_mask(mask=mask, expose=["likelihood.data"]):
        masked = terms_of(bnn_of(net, three), x, y)
    with selective_mask(mask=mask, expose=["likelihood.data"]), with_labels(labels):
        outside = terms_of(bnn_of(net, three), x, y)
    assert masked.data.item() == pytest.approx(kept.data.item(), rel=1e-12)
    assert outside.data.item() == pytest.approx(kept.data.item(), rel=1e-12)
    assert masked.points == kept.points == 3


def test_particles_average_over_labels_and_beta_weighs_the_kl():
    likelihood, y, outputs = likelihoods(6)["categorical"]
    x = torch.randn(6, 2, dtype=torch.float64)
    bnn = bnn_of(smooth_net(outputs), likelihood)
    frozen = functools.partial(torch.optim.SGD, lr=0.0)
    with variational_laplace():
        one = [bnn.fit([(x, y)], frozen, 1).log_likelihood[0] for _ in range(200)]
        many = bnn.fit([(x, y)], frozen, 1, num_particles=200)
        weighted = bnn.fit([(x, y)], frozen, 1, beta=lambda epoch: 0.25)
    one = torch.tensor(one)
    assert abs(one.mean() - many.log_likelihood[0]) < 4 * one.std() * math.sqrt(2 / 200)
    assert weighted.loss[0] == pytest.approx(0.25 * weighted.kl[0] - weighted.log_likelihood[0])


# --------------------------------------------------------------------------- composition


def test_pyros_own_elbos_have_the_same_value():
    likelihood, y, outputs = likelihoods(6)["categorical"]
    bnn, x = bnn_of(smooth_net(outputs), likelihood), torch.randn(6, 2, dtype=torch.float64)
    labels = torch.randint(3, (6,))
    with with_labels(labels):
        terms = terms_of(bnn, x, y)
        mean_field = TraceMeanField_ELBO().loss(bnn.model, bnn.guide, x, y)
        draws = torch.tensor(
            [Trace_ELBO().loss(bnn.model, bnn.guide, x, y) for _ in range(500)],
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
            with bnn.substituted(terms.values):
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
    likelihood, y, outputs = likelihoods(6)["categorical"]
    bnn, x = bnn_of(smooth_net(outputs), likelihood), torch.randn(6, 2, dtype=torch.float64)
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
    likelihood, y, outputs = likelihoods(6)["categorical"]
    bnn, x = bnn_of(smooth_net(outputs), likelihood), torch.randn(6, 2, dtype=torch.float64)
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


def test_scales_start_below_the_prior():
    bnn = tyxe.VariationalBNN(
        nn.Linear(2, 1),
        tyxe.priors.IIDPrior(dist.Normal(0.0, 2.0)),
        HomoskedasticGaussian(3, scale=1.0),
        functools.partial(AutoNormal, init_scale=scale_below_prior()),
    )
    assert torch.allclose(bnn.net_guide.get_scale("weight"), torch.tensor(2 * math.exp(-3)))


# --------------------------------------------------------------------------- bad input


def small():
    likelihood, y, outputs = likelihoods(6)["categorical"]
    return bnn_of(smooth_net(outputs), likelihood), torch.randn(6, 2, dtype=torch.float64), y


def test_unknown_curvature():
    with pytest.raises(ValueError, match="curvature is 'exact'; expected one of 'fisher'"):
        variational_laplace("exact")


@pytest.mark.parametrize("first", ["vl", "lrt", "twice"])
def test_another_sampling_handler_is_an_error(first):
    bnn, x, y = small()
    handlers = {
        "vl": (variational_laplace, local_reparameterization),
        "lrt": (local_reparameterization, variational_laplace),
        "twice": (variational_laplace, variational_laplace),
    }[first]
    before = {k: v.clone() for k, v in bnn.state_dict().items() if isinstance(v, torch.Tensor)}
    outer, inner = (make() for make in handlers)
    with pytest.raises(RuntimeError, match="use one of them"), outer, inner:
        bnn.fit([(x, y)], torch.optim.Adam, 1)
    after = bnn.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_guides_that_are_not_mean_field_are_named():
    _, x, y = small()
    guide = pyro.infer.autoguide.AutoLowRankMultivariateNormal
    bnn = tyxe.VariationalBNN(smooth_net(), NORMAL, Categorical(6), guide)
    message = r"not: net\.0\.weight \(Delta\), .*use tyxe\.guides\.AutoNormal"
    with variational_laplace(), pytest.raises(TypeError, match=message):
        bnn.fit([(x, y)], torch.optim.Adam, 1)
    radial = tyxe.VariationalBNN(smooth_net(), NORMAL, Categorical(6), tyxe.guides.AutoRadial)
    with variational_laplace(), pytest.raises(TypeError, match=r"net\.0\.weight \(Radial\)"):
        radial.fit([(x, y)], torch.optim.Adam, 1)


class CannotSample(Categorical):
    def predictive_distribution(self, predictions, latents=None):
        made = super().predictive_distribution(predictions, latents)

        class Unsampled(type(made)):
            def sample(self, sample_shape=()):
                raise NotImplementedError

        made.__class__ = Unsampled
        return made


def test_likelihood_that_cannot_sample():
    bnn, x, y = small()
    bnn.likelihood.__class__ = CannotSample
    with variational_laplace(), pytest.raises(TypeError, match=r"has no sample\(\): implement it"):
        bnn.fit([(x, y)], torch.optim.Adam, 1)
    with variational_laplace("empirical"):
        assert bnn.fit([(x, y)], torch.optim.Adam, 1).loss


class Root(nn.Module):
    """Its first derivative at 0 is finite by a cut-off, its second is not."""

    def forward(self, x):
        return (x - x).abs().pow(1.5) + x


def test_curvature_that_is_not_finite_names_sites_and_changes_nothing():
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), Root(), nn.Linear(4, 3)).double()
    likelihood, y, _ = likelihoods(6)["categorical"]
    bnn, x = bnn_of(net, likelihood), torch.randn(6, 2, dtype=torch.float64)
    before = {k: v.clone() for k, v in bnn.state_dict().items() if isinstance(v, torch.Tensor)}
    with (
        variational_laplace("hessian"),
        pytest.raises(RuntimeError, match=r"curvature .* not finite at net\.0\.weight"),
    ):
        bnn.fit([(x, y)], torch.optim.Adam, 1)
    after = bnn.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_gradients_off():
    bnn, x, y = small()
    with (
        variational_laplace(),
        torch.no_grad(),
        pytest.raises(RuntimeError, match="gradients are off"),
    ):
        terms_of(bnn, x, y)


def test_hessian_of_a_large_net():
    net = nn.Sequential(nn.Linear(200, 100), nn.Tanh(), nn.Linear(100, 3))
    bnn = bnn_of(net, Categorical(6))
    with (
        variational_laplace("hessian"),
        pytest.raises(ValueError, match=r'each of 20,403 weights.*curvature="fisher"'),
    ):
        bnn.fit([(torch.randn(6, 200), torch.randint(3, (6,)))], torch.optim.Adam, 1)


@pytest.mark.parametrize("function", [False, True])
def test_kinks_are_named_once(function):
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(nn.functional.relu(self.linear(x)))

    net = Functional() if function else nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    bnn = bnn_of(net, Categorical(6))
    data = [(torch.randn(3, 2), torch.randint(3, (3,))) for _ in range(2)]
    match = r"Relu \(called as a function\)" if function else r"1 \(ReLU\)"
    with pytest.warns(tyxe.TyxeWarning, match=match) as caught, variational_laplace():
        bnn.fit(data, torch.optim.Adam, 2)
    assert len(caught) == 1


def test_smooth_nets_do_not_warn_after_replacement():
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    tyxe.util.replace_activations_(net, nn.ReLU, nn.Softplus)
    bnn = bnn_of(net, Categorical(3))
    with variational_laplace():
        history = bnn.fit([(torch.randn(3, 2), torch.randint(3, (3,)))], torch.optim.Adam, 1)
    assert math.isfinite(history.loss[0])


def test_upward_curvature_is_said():
    # exp(-w^2 / 2) has its inflection at 1: at 3 the log-density of a wrong label curves upwards.
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        net.weight.fill_(3.0)

    class Bump(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = net

        def forward(self, x):
            return 20 * (-self.linear(x).square() / 2).exp()

    bnn = bnn_of(Bump(), Bernoulli(4, event_dim=1))
    data = [(torch.ones(4, 1, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64))]
    with (
        pytest.warns(
            tyxe.TyxeWarning, match=r"curves upwards at 1 weights of 'net\.linear\.weight'"
        ),
        variational_laplace("hessian"),
    ):
        bnn.fit(data, torch.optim.Adam, 1)


@pytest.mark.parametrize("warns", [True, False])
def test_upward_curvature_is_measured_against_beta_prior_and_scale(warns):
    net = nn.Sequential(
        nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False)
    ).double()
    with torch.no_grad():
        net[0].weight.fill_(-1.0)
        net[2].weight.fill_(3.0)
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 0.5))
    guide = functools.partial(AutoNormal, init_loc_fn=start_of(net), init_scale=0.1)
    bnn = tyxe.VariationalBNN(net, prior, Bernoulli(8, event_dim=1), guide)
    data = (torch.ones(4, 1, dtype=torch.float64), torch.ones(4, 1, dtype=torch.float64))
    handler = variational_laplace("hessian")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with handler:
            terms_of(bnn, *data)
    diagonal = handler.curvature.diagonals["net.0.weight"].item()
    assert diagonal > 0
    threshold = 8 / 4 * diagonal * 0.5**2  # the plate's scale, the Hessian, the prior's variance
    beta = threshold * (0.999 if warns else 1.001)
    with warnings.catch_warnings(record=True) as caught, variational_laplace("hessian"):
        warnings.simplefilter("always")
        bnn.fit([data], functools.partial(torch.optim.SGD, lr=0.0), 1, beta=beta)
    found = [w for w in caught if "at 1 weights of 'net.0.weight'" in str(w.message)]
    assert len(found) == warns


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


def test_prediction_inside_warns_that_it_is_at_the_mean():
    bnn, x, _ = small()
    with pytest.warns(tyxe.TyxeWarning, match="met no data"), variational_laplace():
        bnn.predict(x, num_predictions=2)


def test_bad_starts():
    with pytest.raises(ValueError, match=r"learning_rate is 0\.0 and batch_size 10"):
        stationary_scale(0.0, 10)
    message = {"name": "w", "fn": dist.Cauchy(torch.zeros(2), 1.0)}
    without_moments = dist.TransformedDistribution(
        dist.Normal(torch.zeros(2), 1.0), [dist.transforms.SigmoidTransform()]
    )
    for prior in (message["fn"], without_moments):
        with pytest.raises(ValueError, match="'w' has no finite standard deviation"):
            scale_below_prior()({"name": "w", "fn": prior})
