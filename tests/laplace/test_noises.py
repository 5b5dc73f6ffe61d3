"""The evidence as a function of a noise for each output, against dense matrices in float64."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.laplace import SUMMED, laplace_bnn

pytestmark = pytest.mark.usefixtures("double")

POINTS, OWN = 9, torch.tensor([0.3, 0.8, 1.5], dtype=torch.float64)
ASKED = torch.tensor([0.9, 0.4, 0.7], dtype=torch.float64)


def data():
    torch.manual_seed(0)
    x = torch.randn(POINTS, 2)
    return x, torch.randn(POINTS, 3) + x[:, :1]


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3))


def make(scale=OWN, structure="full", batch=None, net=None, **settings):
    """Return a Laplace approximation about a net that is taken as trained."""
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(POINTS, scale=scale)
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 0.8))
    net = mlp() if net is None else net
    bnn = laplace_bnn(net, prior, likelihood, structure=structure, **settings)
    bnn.fit_curvature([data() if batch is None else batch])
    return bnn


def dense(net, x, y, noise, structure, counts=None):
    """Return the evidence by the whole Jacobian; `counts` say how often each target counts."""
    values = {name: value.detach() for name, value in net.named_parameters()}

    def outputs(values):
        return torch.func.functional_call(net, values, (x,))

    found = torch.func.jacrev(outputs)(values)
    jacobian = torch.cat([part.flatten(2) for part in found.values()], 2)  # (n, C, P)
    weights = torch.cat([value.flatten() for value in values.values()])
    counts = torch.ones_like(y) if counts is None else counts
    curvature = torch.einsum("ncp,nc,ncq->pq", jacobian, counts / noise.square(), jacobian)
    if structure == "diag":
        curvature = curvature.diagonal().diag()
    residual = torch.where(counts > 0, y, 0.0) - outputs(values)
    each = -0.5 * (residual / noise).square() - noise.log() - 0.5 * math.log(2 * math.pi)
    precision = curvature + torch.eye(len(weights)) / 0.8**2
    prior = -0.5 * weights.square().sum() / 0.8**2 - len(weights) * math.log(0.8)
    return (counts * each).sum() + prior - 0.5 * torch.logdet(precision)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_evidence_of_a_noise_for_each_output_is_that_of_the_dense_matrix(structure):
    (x, y), net = data(), mlp()
    bnn = make(structure=structure)
    for noise in (OWN, ASKED, 10 * ASKED):
        found = bnn.log_marginal_likelihood(noise=noise)
        expected = dense(net, x, y, noise, structure)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    expected = dense(net, x, y, torch.full((3,), 0.5), structure)
    found = bnn.log_marginal_likelihood(noise=0.5)  # one number is that of each output
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_weights_and_missing_targets_count_by_output(structure):
    (x, y), net = data(), mlp()
    y[:4, 1] = math.nan
    weights = torch.linspace(0.5, 1.5, POINTS)
    counts = weights[:, None] * ~y.isnan()
    bnn = make(structure=structure, batch=(x, y, weights))
    found = bnn.log_marginal_likelihood(noise=ASKED)
    expected = dense(net, x, y, ASKED, structure, counts)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def pixels():
    """Return a convolution with three channels as outputs of each pixel, and data for it."""
    torch.manual_seed(2)
    x, y = torch.randn(POINTS, 2, 3, 3), torch.randn(POINTS, 3, 3, 3)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.Tanh(), nn.Conv2d(4, 3, 1))
    return (x, y), net


CURVATURES = ({"curvature": "empirical"}, {"curvature": "empirical", "structure": "kron"})
SETTINGS = [
    *({"structure": structure} for structure in SUMMED),
    {"structure": "kron", "damping": True},
    {"structure": "kron", "temperature": 0.5, "curvature_weight": 2.0},
]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["rows", "missing", "last", "pixels"])
def test_the_evidence_at_other_noises_is_that_of_a_net_with_these(settings, kind):
    batch, net, own, asked = data(), mlp(), OWN, ASKED
    if kind == "missing":
        batch[1][:4, 1] = math.nan
        batch = (*batch, torch.linspace(0.5, 1.5, POINTS))
    elif kind == "last":
        net = nn.Linear(2, 3)
    elif kind == "pixels":
        batch, net = pixels()
        own, asked = OWN.view(3, 1, 1), ASKED.view(3, 1, 1)
    bnn = make(own, batch=batch, net=net, **settings)
    built = make(asked, batch=batch, net=net, **settings)
    found = bnn.log_marginal_likelihood(noise=asked)
    torch.testing.assert_close(found, built.log_marginal_likelihood(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        bnn.log_marginal_likelihood(noise=own), bnn.log_marginal_likelihood(), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("settings", [*SETTINGS, *CURVATURES])
def test_one_noise_is_that_of_a_net_with_it(settings):
    found = make(1.0, **settings).log_marginal_likelihood(noise=0.4)
    expected = make(0.4, **settings).log_marginal_likelihood()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("settings", SETTINGS)
def test_gradients_in_all_noises_and_the_precision_are_finite_differences(settings):
    bnn = make(**settings)
    given = ASKED.clone().requires_grad_(), torch.tensor(1.3, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda noise, precision: bnn.log_marginal_likelihood(precision, noise), given
    )


@pytest.mark.parametrize("structure", SUMMED)
def test_a_state_and_another_device_or_type_keep_what_belongs_to_outputs(structure):
    bnn, other = make(structure=structure), make(structure=structure, net=mlp().apply(_zeroed))
    expected = bnn.log_marginal_likelihood(noise=ASKED)
    other.load_state_dict(bnn.state_dict())
    torch.testing.assert_close(other.log_marginal_likelihood(noise=ASKED), expected)
    single = other.float().log_marginal_likelihood(noise=ASKED.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-5, atol=1e-4)


def _zeroed(module):
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def test_noises_that_do_not_fit_are_refused():
    bnn = make()
    with pytest.raises(ValueError, match=r"noise has shape \(2,\); expected \(3,\), as the"):
        bnn.log_marginal_likelihood(noise=torch.ones(2))
    for noise in (-0.3, torch.tensor([0.5, -0.3, 0.5])):
        with pytest.raises(ValueError, match=r"noise is -0.3; expected a number above 0"):
            bnn.log_marginal_likelihood(noise=noise)
    with pytest.raises(ValueError, match=r"noise has shape \(3,\).*scale=torch.full\(\(3,\)"):
        make(0.5).log_marginal_likelihood(noise=ASKED)
    for curvature in ("fisher", "empirical"):  # gradients of labels couple the outputs
        with pytest.raises(ValueError, match=r"curvature='ggn'"):
            make(curvature=curvature).log_marginal_likelihood(noise=ASKED)


def test_matrices_that_do_not_fit_into_memory_are_kept_together(monkeypatch):
    expected = make().log_marginal_likelihood()
    monkeypatch.setattr("tyxe.check.MEMORY_LIMIT", 27**2 * 8 * 3)
    bnn = make()
    torch.testing.assert_close(bnn.log_marginal_likelihood(), expected)
    with pytest.raises(ValueError, match=r"structure='kron' or 'diag'"):
        bnn.log_marginal_likelihood(noise=ASKED)
