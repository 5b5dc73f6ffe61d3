"""Factorised and pruned Normals; moments and centres by registration; KLs and their gradients."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
from torch import Size

from tests.oracles.inducing_gaussians import close, randn
from tyxe.distributions import (
    FactorizedNormal,
    PrunedNormal,
    center,
    deviation,
    independent_moments,
)
from tyxe.distributions.buffered import detached
from tyxe.distributions.normal_kl import factorized_normal_kl, fusable, fused_kl, log_density
from tyxe.poutine.second_order import Expansion, minus_half_of_squares

SHAPE = (3, 2)


def normal(shape=SHAPE):
    """Return a Normal whose parameters all differ."""
    return td.Normal(torch.randn(shape).double(), torch.rand(shape).double() + 0.5)


def factorized():
    q = normal()
    return FactorizedNormal(q.loc, q.scale.log())


def test_a_factorized_normal_is_an_independent_normal():
    q = factorized()
    plain = td.Independent(td.Normal(q.base_dist.loc, q.base_dist.scale), 2)
    value = q.sample()
    assert not value.requires_grad
    close(q.log_prob(value), plain.log_prob(value), 1e-12)
    close(q.entropy(), plain.entropy(), 1e-12)
    assert (q.event_shape, q.batch_shape) == (SHAPE, ())
    assert q.expand((5,)).sample().shape == (5, *SHAPE)
    z = (q.rsample((4000,)) - q.mean) / q.base_dist.scale
    assert bool((z.mean(0).abs() < 6 / math.sqrt(4000)).all())
    assert bool(((z.var(0) - 1).abs() < 6 * math.sqrt(2 / 4000)).all())


def test_what_is_made_without_gradients_forms_its_scale_once():
    loc, log_scale = (torch.zeros(3, requires_grad=True) for _ in range(2))
    with torch.no_grad():
        q = FactorizedNormal(loc, log_scale)
        assert q.scale is q.scale
        assert q.variance is q.variance
    assert not q.rsample().requires_grad
    assert FactorizedNormal(loc, log_scale).scale.requires_grad


def test_pruned_normals_count_what_is_kept():
    loc, log_scale = randn(2, 3), randn(2, 3)
    kept = torch.tensor([[True, False, True], [False, False, True]])
    q = PrunedNormal(FactorizedNormal(loc, log_scale), kept)
    small = FactorizedNormal(loc[kept], log_scale[kept])
    torch.manual_seed(0)
    draws = q.sample((4,))
    assert bool((draws[:, ~kept] == 0).all())
    assert bool((draws[:, kept] != 0).all())
    close(q.log_prob(draws), small.base_dist.log_prob(draws[:, kept]).sum(-1))
    zeros = torch.zeros(2, 3).double()
    prior = dist.Normal(zeros + 0.1, zeros + 2.0).to_event(2)
    smaller = dist.Normal(zeros[kept] + 0.1, zeros[kept] + 2.0).to_event(1)
    close(td.kl_divergence(q, prior), td.kl_divergence(small, smaller))
    mean, variance = independent_moments(q)
    assert torch.equal(mean, loc * kept)
    close(variance, (2 * log_scale).exp() * kept)
    assert torch.equal(center(q), mean)
    close(detached(q).log_prob(draws), q.log_prob(draws))
    with pytest.raises(NotImplementedError):
        td.kl_divergence(q, dist.Laplace(zeros, zeros + 1.0).to_event(2))
    with pytest.raises(NotImplementedError, match="one joint event"):
        q.expand(Size([2]))


# --- moments --------------------------------------------------------------------------------------


@pytest.mark.parametrize("q", [normal(), td.Independent(normal(), 1), factorized()])
def test_normals_have_moments_however_wrapped(q):
    mean, variance = independent_moments(q)
    torch.testing.assert_close(mean, q.mean)
    torch.testing.assert_close(variance, q.variance)
    assert torch.equal(center(q), q.mean)


ZERO, ONE = torch.zeros(2), torch.ones(2)
SYMMETRIC = {
    "Laplace": td.Laplace(ONE, ONE),
    "StudentT": td.StudentT(3.0, ONE, ONE),
    "Cauchy": td.Cauchy(ONE, ONE),
    "Uniform": td.Uniform(ZERO, 2 * ONE),
    "Normal": td.Normal(ONE, ONE),
}


@pytest.mark.parametrize("q", SYMMETRIC.values(), ids=SYMMETRIC.keys())
def test_centres_are_centres_of_symmetry(q):
    middle = center(q)
    offset = torch.rand(2)
    torch.testing.assert_close(q.log_prob(middle + offset), q.log_prob(middle - offset))
    if not isinstance(q, td.Normal):
        assert independent_moments(q) is None


@pytest.mark.parametrize(
    "q",
    [
        td.MultivariateNormal(ZERO, torch.eye(2)),
        td.LogNormal(ZERO, ONE),
        dist.Delta(ZERO),
        td.TransformedDistribution(td.Normal(ZERO, ONE), [td.ExpTransform()]),
    ],
    ids=lambda q: type(q).__name__,
)
def test_others_are_never_treated(q):
    assert independent_moments(q) is None
    assert center(q) is None


COUNT = 20_000
MANY = {
    **{name: q.expand((COUNT, 2)) for name, q in SYMMETRIC.items()},
    "Factorized": FactorizedNormal(torch.ones(COUNT, 2), torch.zeros(COUNT, 2)),
}


@pytest.mark.parametrize("q", MANY.values(), ids=MANY)
def test_deviations_are_draws_about_the_centre(q):
    direct, drawn = deviation(q), q.sample() - center(q)
    # Cauchy has no moments: compare quartiles, of standard error below 1.4 / sqrt(n) each for a
    # density of at least 0.1 there.
    for p in (0.25, 0.5, 0.75):
        difference = direct.quantile(p, 0) - drawn.quantile(p, 0)
        assert bool((difference.abs() < 6 * math.sqrt(2 * p * (1 - p) / COUNT) / 0.1).all())


# --- the KL ---------------------------------------------------------------------------------------

PRIORS = {
    "standard": lambda: dist.Normal(0.0, 1.0).expand(SHAPE).to_event(2),
    "one scale": lambda: dist.Normal(torch.randn(SHAPE).double(), 0.7).to_event(2),
    "one mean": lambda: dist.Normal(0.3, torch.rand(SHAPE).double() + 0.2).to_event(2),
    "all differ": lambda: dist.Normal(normal().loc, normal().scale).to_event(2),
    "expanded row": lambda: dist.Normal(ZERO, torch.tensor([0.5, 2.0])).expand(SHAPE).to_event(2),
    "expanded column": lambda: dist.Normal(
        torch.zeros(3, 1).expand(SHAPE), torch.tensor([[0.5], [2.0], [3.0]]).expand(SHAPE)
    ).to_event(2),
    "another factorized": factorized,
}


@pytest.mark.parametrize("make", PRIORS.values(), ids=PRIORS.keys())
def test_the_kl_is_the_textbook_one(make):
    mu, sigma = normal().loc.requires_grad_(), normal().scale.requires_grad_()
    q, p = FactorizedNormal(mu, sigma.log()), make()
    m, s = p.base_dist.loc.double(), p.base_dist.scale.double()
    # METHODS 1 [VL 11].
    expected = 0.5 * ((sigma**2 + (mu - m) ** 2) / s**2 - 1 + (s**2 / sigma**2).log()).sum()
    found = td.kl_divergence(q, p)
    close(found, expected, 1e-6)
    slopes = [torch.autograd.grad(kl, [mu, sigma], retain_graph=True) for kl in (found, expected)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)


def test_the_kl_to_others_is_torchs_or_none():
    q = factorized()
    laplace = td.Independent(td.Laplace(torch.zeros(SHAPE).double(), 1.0), 2)
    plain = td.Independent(td.Normal(q.base_dist.loc, q.base_dist.scale), 2)
    torch.testing.assert_close(td.kl_divergence(q, laplace), td.kl_divergence(plain, laplace))
    student = td.Independent(td.StudentT(3.0, torch.zeros(SHAPE).double(), 1.0), 2)
    with pytest.raises(NotImplementedError):
        td.kl_divergence(q, student)


@pytest.mark.parametrize("asked", [True, False])
def test_a_variance_asked_for_without_gradients_costs_the_kl_none(asked):
    reference, p = normal(), normal()
    loc, scale = reference.loc.requires_grad_(), reference.scale.requires_grad_()
    expected = torch.autograd.grad(td.kl_divergence(reference, p).sum(), [loc, scale])
    q = FactorizedNormal(loc, scale.log())
    if asked:
        with torch.no_grad():
            torch.testing.assert_close(q.variance, scale.square())
            assert not q.variance.requires_grad
    kl = factorized_normal_kl(q, p.loc, p.scale)
    torch.testing.assert_close(torch.autograd.grad(kl, [loc, scale]), expected)
    assert q.variance.requires_grad


# --- the joint KL ---------------------------------------------------------------------------------


def leaves_and_pairs(with_variances):
    """Two sites under two priors, with the leaves that gradients go to."""
    leaves = [torch.randn(shape).double().requires_grad_() for shape in 2 * [(3, 2), (4,)]]
    pairs = []
    for mean, log, prior in zip(leaves[:2], leaves[2:], [(0.0, 1.0), (0.7, 0.3)], strict=True):
        q = FactorizedNormal(mean, log)
        p = dist.Normal(*torch.tensor(prior).double()).expand(mean.shape).to_event(mean.dim())
        if with_variances:
            assert q.variance.requires_grad
        pairs.append((q, p))
    return leaves, pairs


def separate(leaves, pairs):
    return sum(
        td.kl_divergence(td.Normal(loc, log.exp()), p.base_dist).sum()
        for loc, log, (_, p) in zip(leaves[:2], leaves[2:], pairs, strict=True)
    )


@pytest.mark.parametrize("with_variances", [True, False])
def test_the_joint_kl_is_the_sum_twice_differentiable(with_variances):
    leaves, pairs = leaves_and_pairs(with_variances)
    weights = [torch.randn_like(leaf) for leaf in leaves]
    found = []
    together = fused_kl([(q, fusable(q, p)) for q, p in pairs])
    for kl in (together, separate(leaves, pairs)):
        first = torch.autograd.grad(kl, leaves, create_graph=True)
        slope = sum((w * g).sum() for w, g in zip(weights, first, strict=True))
        found.append((kl, first, torch.autograd.grad(slope, leaves)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


def test_the_joint_kl_leaves_alone_what_needs_no_gradient():
    loc, log_scale = torch.zeros(3), torch.zeros(3, requires_grad=True)
    p = dist.Normal(0.0, 1.0).expand([3]).to_event(1)
    td.kl_divergence(FactorizedNormal(loc, log_scale), p).backward()
    assert loc.grad is None
    torch.testing.assert_close(log_scale.grad, torch.zeros(3))


def test_a_prior_changed_in_place_is_noticed():
    scale = torch.ones(())
    p = dist.Normal(torch.zeros(()), scale).expand([3]).to_event(1)
    q = FactorizedNormal(torch.zeros(3), torch.zeros(3))
    assert td.kl_divergence(q, p) == 0
    scale.fill_(2.0)
    expected = 3 * (math.log(2) + 1 / 8 - 0.5)
    assert td.kl_divergence(q, p).item() == pytest.approx(expected, rel=1e-6)


def test_a_prior_has_its_gradient():
    scale = torch.ones((), dtype=torch.double, requires_grad=True)
    q, p = factorized(), dist.Normal(0 * scale.detach(), scale).expand(SHAPE).to_event(2)
    (slope,) = torch.autograd.grad(td.kl_divergence(q, p), scale)
    close(slope, (1 - q.variance - q.mean.square()).sum(), 1e-12)


def test_functional_transforms_take_the_kl():
    q, p = normal(), PRIORS["all differ"]()

    def kl(loc):
        return td.kl_divergence(FactorizedNormal(loc, q.scale.log()), p)

    torch.testing.assert_close(torch.func.grad(kl)(q.loc), (q.loc - p.mean) / p.variance)


@pytest.mark.parametrize("scale", [1e-20, 1e25])
def test_a_prior_scale_at_the_end_of_the_range(scale):
    q = FactorizedNormal(torch.ones(3), torch.zeros(3))
    p = dist.Normal(0.0, torch.tensor(scale)).expand([3]).to_event(1)
    found = td.kl_divergence(q, p)
    assert found == math.inf if scale < 1 else found > 0


# --- sums over millions of weights in float32 -----------------------------------------------------

RELATIVE = 1e-6  # of the terms that the sum is made of


def normals(size):
    loc = 1 + 0.1 * torch.randn(size)
    q = FactorizedNormal(loc, torch.full((size,), -1.0))
    return q, dist.Normal(torch.zeros(()), torch.ones(())).expand((size,)).to_event(1)


@pytest.mark.parametrize("size", [0, 1, 4_000_000])
def test_the_kl_of_many_weights_is_that_of_double_precision(size):
    q, p = normals(size)
    exact = 0.5 * (q.loc.double().square() + q.log_scale.double().mul(2).exp() - 1) + 1.0
    terms = 0.5 * (q.loc.double().square() + 1).sum() + size
    error = abs(float(td.kl_divergence(q, p)) - float(exact.sum()))
    assert error <= RELATIVE * float(terms)


def test_the_density_at_a_draw_of_many_weights():
    q, p = normals(4_000_000)
    exact = p.log_prob(q.loc.double())
    assert float(log_density(p, q.loc)) == pytest.approx(float(exact), rel=RELATIVE)


def test_weighted_squares_of_many_gradients():
    weights, values = torch.rand(4_000_000), 1 + torch.rand(4_000_000)
    exact = (weights.double() * values.double().square()).sum()
    (found,) = minus_half_of_squares([values], [Expansion("weight", values, weights)])
    assert float(found) == pytest.approx(-0.5 * float(exact), rel=RELATIVE)
