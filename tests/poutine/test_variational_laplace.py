"""Variational Laplace against exact ELBOs, dense Hessians, the GGN and enumeration."""

import functools
import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from torch.func import jacrev

from tests.oracles.variational_laplace import (
    as_function,
    bnn_of,
    flat,
    likelihoods,
    linear_gaussian,
    moments_of,
    small,
    smooth_net,
    terms_of,
    variances_of,
    with_labels,
)
from tyxe.likelihoods import Bernoulli, Categorical
from tyxe.likelihoods.output_hessian import output_hessian
from tyxe.poutine import selective_mask, variational_laplace

# --------------------------------------------------------------------------- exact cases


def test_hessian_form_is_the_exact_elbo_of_a_linear_gaussian_model():
    bnn, x, y = linear_gaussian()
    with variational_laplace("hessian"):
        terms = terms_of(bnn, x, y)
    # `E_q log p(y | w)` in closed form.
    (weight, weight_var), (bias, bias_var) = moments_of(bnn).values()
    variance = x.square() @ weight_var.T + bias_var
    log_prob = dist.Normal(x @ weight.T + bias, 0.7).log_prob(y) - variance / (2 * 0.7**2)
    assert terms.data.item() == pytest.approx(log_prob.sum().item(), rel=1e-12)
    assert terms.points == len(x)


# --------------------------------------------------------------------------- curvature


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
        draws = torch.stack([terms_of(bnn, x, y).data.detach() for _ in range(150)])
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


@pytest.mark.parametrize("name", likelihoods(2))
def test_gradient_of_the_objective_is_that_of_finite_differences(name):
    likelihood, y, outputs = likelihoods(4)[name]
    bnn, x = bnn_of(smooth_net(outputs), likelihood), torch.randn(4, 2, dtype=torch.float64)
    labels = bnn.likelihood.sample(bnn.to_module()(x).detach())
    parameters = [p for p in bnn.net_guide.parameters() if p.requires_grad]

    def objective(*moved):  # the guide's own parameters, in place
        with with_labels(labels):
            terms = terms_of(bnn, x, y)
        return terms.data - 0.1 * terms.kl + 0 * flat(moved).sum()

    tolerances = {"eps": 1e-5, "rtol": 1e-6, "atol": 1e-6}
    assert torch.autograd.gradcheck(objective, parameters, fast_mode=True, **tolerances)


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
    x, mask = torch.randn(6, 2, dtype=torch.float64), torch.tensor([1, 1, 0, 1, 0, 0]).bool()
    y, labels = torch.randint(3, (2, 6))
    bnn = bnn_of(smooth_net(3), Categorical(3))
    with with_labels(labels[mask]):
        kept = terms_of(bnn, x[mask], y[mask])
    masked = functools.partial(selective_mask, mask=mask, expose=["likelihood.data"])
    for outer, inner in ((with_labels(labels), masked()), (masked(), with_labels(labels))):
        with outer, inner:
            terms = terms_of(bnn, x, y)
        assert terms.data.item() == pytest.approx(kept.data.item(), rel=1e-12)
        assert terms.points == kept.points == 3


def test_particles_average_over_labels_and_beta_weighs_the_kl():
    bnn, x, y = small()
    frozen = functools.partial(torch.optim.SGD, lr=0.0)
    with variational_laplace():
        one = torch.tensor([bnn.fit([(x, y)], frozen, 1).log_likelihood[0] for _ in range(40)])
        many = bnn.fit([(x, y)], frozen, 1, num_particles=40)
        weighted = bnn.fit([(x, y)], frozen, 1, beta=lambda epoch: 0.25)
    assert abs(one.mean() - many.log_likelihood[0]) < 4 * one.std() * math.sqrt(2 / 40)
    assert weighted.loss[0] == pytest.approx(0.25 * weighted.kl[0] - weighted.log_likelihood[0])
