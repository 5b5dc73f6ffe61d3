"""Weights given inducing weights: the conditional, densities, moments, priors and sites."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from torch import Size

from tests.oracles.inducing_gaussians import (
    D_C,
    D_R,
    FAMILIES,
    LAYER,
    SCALES,
    SIZES,
    close,
    conditional,
    conditioned,
    dense,
    make,
    make_maps,
    make_u,
    mixture_log_prob,
    priors,
    randn,
)
from tyxe.distributions import FactorizedNormal, IndependentSites, InducingWeights
from tyxe.distributions.buffered import BufferedDistribution, detached
from tyxe.distributions.inducing import (
    HierarchicalInducing,
    LayerPrior,
    StackedU,
    isotropic_scale,
)
from tyxe.distributions.inducing_formulas import conditional_divergence, inducing_side, matheron
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.guides.inducing_families import DiagonalU, EnsembleU, Turn, WhitenedU
from tyxe.testing.asserts import assert_within

# --- the conditional ----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
def test_matherons_rule_has_the_conditional_mean_and_covariance(sizes):
    maps = make_maps(*sizes)
    rows, columns = (inducing_side(*side) for side in maps)
    gain, covariance = conditional(maps)
    u = randn(*sizes)
    shapes = (D_R, D_C), (D_R, sizes[1]), sizes

    def draw(noise, u):
        parts = noise.split([math.prod(s) for s in shapes])
        e1, e2, e3 = (part.view(s) for part, s in zip(parts, shapes, strict=True))
        return (e1 + matheron(rows, columns, u, (e1, e2, e3)) @ columns.basis.mT).reshape(-1)

    noise = randn(sum(math.prod(s) for s in shapes))
    # A draw is linear in its noise and in U: all of its law is in two Jacobians.
    root = torch.autograd.functional.jacobian(lambda n: draw(n, u), noise)
    close(root @ root.mT, covariance)
    whitened = torch.linalg.solve(rows.tril, u) @ torch.linalg.inv(columns.tril).mT
    close(draw(torch.zeros_like(noise), whitened), gain @ u.reshape(-1))


@pytest.mark.parametrize("scale", [0.05, 1.0, 1.7])
def test_divergence_of_the_conditional(scale):
    gain, covariance = conditional(make_maps(2, 3))
    mean = gain @ randn(gain.shape[1])
    q = td.MultivariateNormal(mean, scale**2 * covariance)
    expected = td.kl_divergence(q, td.MultivariateNormal(mean, covariance))
    found = conditional_divergence(torch.tensor(scale, dtype=torch.float64), len(mean))
    close(found, expected)
    assert found >= 0


# --- the weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("whitened", [True, False])
def test_densities_and_moments_against_the_dense_gaussian(family, sizes, whitened):
    q = make(family, sizes, whitened=whitened)
    means, covariance = dense(q)
    value = q.sample()
    close(q.log_prob(value), mixture_log_prob(means, covariance, value.reshape(-1)))
    close(q.mean.reshape(-1), means.mean(0))
    variance = covariance.diagonal() + means.var(0, correction=0)
    close(q.variance.reshape(-1), variance)
    index = torch.arange(D_R * D_C).view(D_R, D_C)
    for name, part in q.unflatten(value).items():
        marginal, own = q.marginal(name), index[:, q.layer.block.columns_of(name)].reshape(-1)
        expected = mixture_log_prob(means[:, own], covariance[own][:, own], part.reshape(-1))
        close(marginal.log_prob(part), expected)
        close(marginal.mean.reshape(-1), means.mean(0)[own])
        close(marginal.variance.reshape(-1), variance[own])
        assert marginal.event_shape == part.shape == marginal.sample().shape
        assert marginal.sample((2,)).shape == (2, *part.shape)


def assert_moments(samples, mean, covariance):
    centred, count = samples - mean, len(samples)
    products = centred[:, :, None] * centred[:, None, :]
    errors = (covariance.diagonal() / count).sqrt(), products.std(0) / math.sqrt(count)
    assert_within(samples.mean(0), mean, errors[0], "mean")
    assert_within(products.mean(0), covariance, errors[1], "covariance")


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_of_samples(family):
    q = make(family, whitened=False)
    samples = q.sample((12_000,)).flatten(1)  # a multiple of the members: each as often
    means, covariance = dense(q)
    spread = torch.cov(means.mT, correction=0).reshape(covariance.shape)
    assert_moments(samples, means.mean(0), covariance + spread)


def test_gradients_of_draws_and_divergences():
    (z_r, r), (z_c, c) = make_maps(2, 3)
    inputs = [z_r, r, z_c, c, randn(2, 3), randn(2, 3), torch.tensor(0.4).double()]
    inputs = [tensor.requires_grad_() for tensor in inputs]

    def build(z_r, r, z_c, c, loc, log_scale, scale):
        rows, columns = inducing_side(z_r, r), inducing_side(z_c, c)
        u = WhitenedU(DiagonalU(loc, log_scale), rows.tril, columns.tril)
        return InducingWeights(u, rows, columns, scale, LAYER)

    def draw(*tensors):
        torch.manual_seed(0)
        return build(*tensors).rsample()

    value = randn(D_R, D_C)
    assert torch.autograd.gradcheck(draw, inputs)
    assert torch.autograd.gradcheck(lambda *t: build(*t).kl_from_prior(), inputs)
    assert torch.autograd.gradcheck(lambda *t: build(*t).log_prob(value), inputs)


@pytest.mark.parametrize("m", [3, 9, 27, 40])
def test_single_precision_stands_small_residuals(m):
    # Psi is singular but for D^2 = 1e-6 where M reaches d: what single precision cannot factorise.
    z, log_d = torch.randn(m, 9) / math.sqrt(m), torch.full((m,), math.log(1e-3))
    exact, found = inducing_side(z.double(), log_d.double()), inducing_side(z, log_d)
    for expected, actual in zip(exact, found, strict=True):
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


def test_weights_that_are_a_function_of_their_inducing_weights():
    q = make()
    fixed = InducingWeights(q.u, q.rows, q.columns, None, LAYER)
    means, _ = dense(q)
    torch.manual_seed(0)
    u = q.u.rsample()
    torch.manual_seed(0)
    scale = SCALES.view(D_R, D_C)
    close(fixed.rsample(), q.row_basis @ u @ q.column_basis.mT * scale)
    close(fixed.mean.reshape(-1), means[0])
    close(fixed.kl_from_prior(), q.u.kl())
    close(fixed.variance, q.u.variance_through(q.row_basis, q.column_basis) * scale**2)
    with pytest.raises(ValueError, match="with max_lambda=0 weights are a function"):
        fixed.log_prob(fixed.rsample())


# --- inducing weights ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES[:3])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("whitened", [True, False])
def test_kl_of_inducing_weights(family, sizes, whitened):
    q = make(family, sizes, whitened=whitened)
    base = q.u if whitened else q.u.base
    (mean,), covariance = base.components()
    prior = torch.eye(len(mean)).double()
    if not whitened:
        tril = torch.kron(q.row_tril, q.column_tril)
        prior = tril @ tril.mT
    expected = td.kl_divergence(
        td.MultivariateNormal(mean, covariance),
        td.MultivariateNormal(torch.zeros_like(mean), prior),
    )
    close(q.u.kl(), expected)
    divergence = conditional_divergence(q.conditional_scale, D_R * D_C)
    prior = IndependentSites(priors())
    close(td.kl_divergence(q, prior), divergence + expected)


def test_ensembles_go_through_their_members():
    members = randn(3, 2, 2)
    u = EnsembleU(members, Turn(1, 3))
    assert torch.equal(u.rsample((2, 2)).flatten(0, 1), members[[1, 2, 0, 1]])
    assert torch.equal(u.rsample(), members[2])
    assert u.kl() == WhitenedU(u, *torch.eye(2).double().expand(2, 2, 2)).kl() == 0.0
    torch.manual_seed(3)
    turn = Turn(None, 3)
    both = [EnsembleU(members, turn).rsample(), EnsembleU(2 * members, turn).rsample()]
    assert torch.equal(2 * both[0], both[1]), "layers take the same member"
    firsts = {Turn(None, 3).first for _ in range(50)}
    assert firsts == {0, 1, 2}


# --- priors and sites -----------------------------------------------------------------------------


def test_another_prior_has_no_closed_form():
    for other in ({"weight": 1.4}, {"bias": 1.5}):
        with pytest.raises(NotImplementedError):
            td.kl_divergence(make(), IndependentSites(priors(**other)))


def test_isotropic_priors():
    zeros, ones = torch.zeros(2, 2), torch.ones(2, 2)
    assert isotropic_scale(dist.Normal(0.0, 0.5)) == 0.5
    assert isotropic_scale(dist.Normal(zeros, 2 * ones).to_event(2)) == 2.0
    assert isotropic_scale(FactorizedNormal(zeros, zeros)) == 1.0
    for prior in (
        dist.Normal(ones, ones).to_event(2),
        dist.Normal(zeros, ones + torch.eye(2)).to_event(2),
        dist.Normal(zeros, ones.clone().requires_grad_()).to_event(2),
        dist.Laplace(zeros, ones).to_event(2),
        dist.Normal(1.0, 1.0).expand([2]).to_event(1),
        None,
    ):
        assert isotropic_scale(prior) is None


def test_sites_of_a_joint_posterior():
    q = make()
    marginal = q.marginal("net.bias")
    assert marginal.expand(Size([])) is marginal
    with pytest.raises(NotImplementedError, match="InducingWeights is one joint event"):
        q.expand(Size([2]))


@pytest.mark.parametrize("family", FAMILIES)
def test_marginals_are_kept_by_modules(family):
    q = make(family, whitened=False).marginal("net.weight")
    value = q.sample()
    expected = q.log_prob(value)
    stored = BufferedDistribution(detached(q))
    close(stored.distribution.log_prob(value), expected)
    single = stored.float().distribution.log_prob(value.float())
    torch.testing.assert_close(single.double(), expected, rtol=1e-3, atol=1e-3)
    fresh = BufferedDistribution(make(family, whitened=False).marginal("net.weight"))
    fresh.load_state_dict(stored.double().state_dict())
    torch.testing.assert_close(fresh.distribution.log_prob(value), expected, rtol=1e-4, atol=1e-4)


# --- hierarchies ----------------------------------------------------------------------------------


def make_hierarchy(family="diagonal"):
    """Two layers, 3 x 4 with U 2 x 2 and 2 x 3 with U 1 x 2, under one 2 x 1 matrix."""
    rows, columns = (inducing_side(*side) for side in make_maps(2, 1, 3, 2))
    scale = torch.tensor(0.8).double()
    top = LayerPrior(LinearBlock("stack", None, Size([3, 2])), (1.0,))
    stack = InducingWeights(make_u(family, 2, 1), rows, columns, scale, top)
    layers = []
    second = LayerPrior(LinearBlock("net.last", None, Size([2, 3])), (1.0,))
    for layer, first, last in ((LAYER, 0, 2), (second, 2, 3)):
        rows, columns = (inducing_side(*s) for s in make_maps(last - first, 2, *layer.shape))
        u = StackedU(stack, first, last)
        layers.append(InducingWeights(u, rows, columns, torch.tensor(0.6).double(), layer))
    return HierarchicalInducing(layers, stack)


def dense_hierarchy(q):
    means, total = conditioned(q.stack, *q.stack.u.components())
    maps = [torch.kron(p.row_basis, p.column_basis.contiguous()) for p in q.layers]
    gains, scales = torch.block_diag(*maps), torch.cat([SCALES, torch.ones(6).double()])
    conditionals = torch.block_diag(
        *(
            p.conditional_scale**2 * (torch.eye(len(m)).double() - m @ m.mT)
            for p, m in zip(q.layers, maps, strict=True)
        )
    )
    total = conditionals + gains @ total @ gains.mT
    return means @ gains.mT * scales, scales[:, None] * total * scales


@pytest.mark.parametrize("family", FAMILIES)
def test_the_hierarchy_against_the_dense_gaussian(family):
    q = make_hierarchy(family)
    means, covariance = dense_hierarchy(q)
    value = q.sample()
    close(q.log_prob(value), mixture_log_prob(means, covariance, value))
    close(q.mean, means.mean(0))
    variance = covariance.diagonal() + means.var(0, correction=0)
    close(q.variance, variance)
    assert q.names == ("net.weight", "net.bias", "net.last")
    close(q.flatten(q.unflatten(value)), value)
    assert q.layers[1].sample((5,)).shape == (5, 2, 3)
    places = q.unflatten(torch.arange(18))
    for name, part in q.unflatten(value).items():
        own = places[name].reshape(-1)
        expected = mixture_log_prob(means[:, own], covariance[own][:, own], part.reshape(-1))
        close(q.marginal(name).log_prob(part), expected)
        close(q.marginal(name).variance.reshape(-1), variance[own])


def test_samples_and_divergence_of_the_hierarchy():
    q = make_hierarchy()
    (mean,), covariance = dense_hierarchy(q)
    assert_moments(q.sample((12_000,)), mean, covariance)
    (loc,), spread = q.stack.u.components()
    standard = td.MultivariateNormal(torch.zeros_like(loc), torch.eye(2).double())
    expected = td.kl_divergence(td.MultivariateNormal(loc, spread), standard)
    for part, size in ((q.stack, 6), (q.layers[0], 12), (q.layers[1], 6)):
        expected = expected + conditional_divergence(part.conditional_scale, size)
    one = torch.ones((), dtype=torch.float64)
    last = {"net.last": dist.Normal(0 * one, one).expand([2, 3]).to_event(2)}
    close(td.kl_divergence(q, IndependentSites(priors() | last)), expected)
    with pytest.raises(NotImplementedError):
        td.kl_divergence(q, IndependentSites(priors(bias=3.0) | last))
    with pytest.raises(NotImplementedError, match="one KL together"):
        td.kl_divergence(q.layers[0], IndependentSites(priors()))
