"""Moments by registration; distributions held by modules."""

import io
import math
import pickle

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from tyxe.distributions import (
    FactorizedNormal,
    StoredDistribution,
    center,
    detached,
    deviation,
    factorized_normal_kl,
    independent_moments,
    is_factorized,
    joins,
    joint_kl,
)

SHAPE = (3, 2)


def normal(shape=SHAPE):
    return td.Normal(torch.randn(shape).double(), torch.rand(shape).double() + 0.5)


def factorized(requires_grad=False):
    q = normal()
    loc, scale = q.loc.requires_grad_(requires_grad), q.scale.requires_grad_(requires_grad)
    return FactorizedNormal(loc, scale.log())


# --- moments ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda q: q,
        lambda q: td.Independent(q, 1),
        lambda q: td.Independent(td.Independent(q, 1), 1),
    ],
)
def test_normals_have_moments_however_wrapped(wrap):
    q = normal()
    mean, variance = independent_moments(wrap(q))
    assert torch.equal(mean, q.loc)
    torch.testing.assert_close(variance, q.scale.square())
    assert torch.equal(center(wrap(q)), q.loc)
    assert is_factorized(wrap(q))


def test_factorized_normals_have_the_moments_of_normals():
    q = factorized()
    mean, variance = independent_moments(q)
    torch.testing.assert_close(mean, q.mean)
    torch.testing.assert_close(variance, q.base_dist.variance)
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
    assert is_factorized(td.Independent(q, 1))
    if not isinstance(q, td.Normal):
        assert independent_moments(q) is None


@pytest.mark.parametrize(
    "q",
    [
        td.MultivariateNormal(ZERO, torch.eye(2)),
        td.Gamma(ONE, ONE),
        td.LogNormal(ZERO, ONE),
        dist.Delta(ZERO),
        td.TransformedDistribution(td.Normal(ZERO, ONE), [td.ExpTransform()]),
    ],
    ids=lambda q: type(q).__name__,
)
def test_others_are_never_treated(q):
    assert independent_moments(q) is None
    assert center(q) is None
    assert not is_factorized(q)


@pytest.mark.parametrize("q", [*SYMMETRIC.values(), factorized()], ids=[*SYMMETRIC, "Factorized"])
def test_deviations_are_draws_about_the_centre(q):
    torch.manual_seed(1)
    direct = torch.stack([deviation(q) for _ in range(4000)]).flatten(1)
    torch.manual_seed(2)
    drawn = torch.stack([q.sample() - center(q) for _ in range(4000)]).flatten(1)
    # Cauchy has no moments: compare quartiles, of standard error below 1.4 / sqrt(n) each for a
    # density of at least 0.1 there.
    for p in (0.25, 0.5, 0.75):
        difference = direct.quantile(p, 0) - drawn.quantile(p, 0)
        assert bool((difference.abs() < 6 * math.sqrt(2 * p * (1 - p) / 4000) / 0.1).all())


# --- FactorizedNormal -----------------------------------------------------------------------------


def test_a_factorized_normal_is_an_independent_normal():
    q = factorized()
    plain = td.Independent(td.Normal(q.base_dist.loc, q.base_dist.scale), 2)
    value = q.sample()
    torch.testing.assert_close(q.log_prob(value), plain.log_prob(value), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(q.entropy(), plain.entropy(), rtol=1e-12, atol=1e-12)
    assert q.event_shape == SHAPE
    assert q.batch_shape == ()
    assert not q.sample().requires_grad
    samples = q.rsample((4000,))
    assert samples.shape == (4000, *SHAPE)
    z = (samples - q.mean) / q.base_dist.scale
    assert bool((z.mean(0).abs() < 6 / math.sqrt(4000)).all())
    assert bool(((z.var(0) - 1).abs() < 6 * math.sqrt(2 / 4000)).all())
    assert q.expand((5,)).sample().shape == (5, *SHAPE)


PRIORS = {
    "standard": lambda: dist.Normal(0.0, 1.0).expand(SHAPE).to_event(2),
    "one scale": lambda: dist.Normal(torch.randn(SHAPE).double(), 0.7).to_event(2),
    "one mean": lambda: dist.Normal(0.3, torch.rand(SHAPE).double() + 0.2).to_event(2),
    "all differ": lambda: dist.Normal(
        torch.randn(SHAPE).double(), torch.rand(SHAPE).double() + 0.2
    ).to_event(2),
    "expanded row": lambda: (
        dist.Normal(torch.zeros(2), torch.tensor([0.5, 2.0])).expand(SHAPE).to_event(2)
    ),
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
    expected = 0.5 * ((sigma**2 + (mu - m) ** 2) / s**2 - 1 + (s**2 / sigma**2).log())
    actual = td.kl_divergence(q, p)
    torch.testing.assert_close(actual, expected.sum(), rtol=1e-6, atol=1e-6)
    for one, other in zip(
        torch.autograd.grad(actual, [mu, sigma], retain_graph=True),
        torch.autograd.grad(expected.sum(), [mu, sigma]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_kl_in_double_precision():
    q, p = factorized(), normal()
    expected = td.kl_divergence(td.Normal(q.base_dist.loc, q.base_dist.scale), p).sum()
    torch.testing.assert_close(
        factorized_normal_kl(q, p.loc, p.scale), expected, rtol=1e-12, atol=0
    )
    assert abs(factorized_normal_kl(q, q.base_dist.loc, q.base_dist.scale)) < 1e-12


def test_the_kl_to_others_is_torchs_or_none():
    q = factorized()
    laplace = td.Independent(td.Laplace(torch.zeros(SHAPE).double(), 1.0), 2)
    plain = td.Independent(td.Normal(q.base_dist.loc, q.base_dist.scale), 2)
    torch.testing.assert_close(td.kl_divergence(q, laplace), td.kl_divergence(plain, laplace))
    student = td.Independent(td.StudentT(3.0, torch.zeros(SHAPE).double(), 1.0), 2)
    with pytest.raises(NotImplementedError):
        td.kl_divergence(q, student)


# --- StoredDistribution -------------------------------------------------------------------------


def transformed():
    q = dist.TransformedDistribution(
        dist.Normal(torch.zeros(2), torch.ones(2)).to_event(1),
        [td.AffineTransform(torch.ones(2), torch.full((2,), 2.0)), td.ExpTransform()],
    )
    # Evaluated once, its transforms know their inverses, which know their transforms.
    q.log_prob(q.sample())
    return q


STORED = {
    "normal": lambda: td.Normal(torch.randn(2), torch.rand(2) + 0.5),
    "expanded": lambda: dist.Normal(0.0, 2.0).expand((4, 3)).to_event(2),
    "independent": lambda: dist.Laplace(torch.randn(3), 1.0).to_event(1),
    "student": lambda: dist.StudentT(torch.tensor(3.0), torch.zeros(2), torch.ones(2)),
    "multivariate": lambda: dist.MultivariateNormal(torch.zeros(2), 2 * torch.eye(2)),
    "low rank": lambda: dist.LowRankMultivariateNormal(
        torch.zeros(3), torch.randn(3, 1), torch.ones(3)
    ),
    "gamma": lambda: dist.Gamma(torch.tensor(2.0), torch.tensor(3.0)),
    "half cauchy": lambda: dist.HalfCauchy(torch.ones(2)),
    "log normal": lambda: dist.LogNormal(torch.zeros(2), 1.0),
    "transformed": transformed,
    "mixture": lambda: dist.MixtureSameFamily(
        dist.Categorical(torch.tensor([0.3, 0.7])), dist.Normal(torch.zeros(2), torch.ones(2))
    ),
    "factorized": lambda: FactorizedNormal(torch.zeros(2), torch.zeros(2)),
}


def same(p, q):
    value = p.sample()
    torch.testing.assert_close(
        p.log_prob(value).double(),
        q.log_prob(value.to(q.sample().dtype)).double(),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("make", STORED.values(), ids=STORED.keys())
def test_what_is_stored_is_the_distribution(make):
    original = make()
    stored = StoredDistribution(original)
    same(original, stored.distribution)
    assert stored.distribution.batch_shape == original.batch_shape
    assert stored.distribution.event_shape == original.event_shape


@pytest.mark.parametrize("make", STORED.values(), ids=STORED.keys())
def test_it_moves_copies_and_pickles(make):
    original = make()
    stored = StoredDistribution(original)
    double = StoredDistribution(original, like=torch.zeros(1).double())
    assert double.distribution.sample().dtype == torch.float64
    same(original, double.distribution)
    same(original, pickle.loads(pickle.dumps(stored)).distribution)
    assert stored.double().distribution.sample().dtype == torch.float64
    same(original, stored.float().distribution)


@pytest.mark.parametrize("make", STORED.values(), ids=STORED.keys())
def test_it_saves_and_loads(make):
    stored, other = StoredDistribution(make()), StoredDistribution(make())
    torch.save(stored.state_dict(), file := io.BytesIO())
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    same(stored.distribution, other.distribution)


def test_expanded_tensors_take_no_room():
    stored = StoredDistribution(dist.Normal(0.0, 1.0).expand((100, 100)).to_event(2))
    assert sum(buffer.numel() for buffer in stored.buffers()) == 2


def test_a_posterior_loads_where_one_number_stood():
    numbers = StoredDistribution(dist.Normal(0.0, 1.0).expand((4, 3)).to_event(2))
    posterior = StoredDistribution(
        dist.Normal(torch.randn(4, 3), torch.rand(4, 3) + 0.1).to_event(2)
    )
    numbers.load_state_dict(posterior.state_dict())
    same(posterior.distribution, numbers.distribution)


def test_another_kind_or_shape_is_refused():
    stored = StoredDistribution(dist.Normal(0.0, 1.0).expand((4,)).to_event(1))
    laplace = StoredDistribution(dist.Laplace(0.0, 1.0).expand((4,)).to_event(1))
    with pytest.raises(
        RuntimeError, match=r"Independent\(Normal\) here and Independent\(Laplace\)"
    ):
        stored.load_state_dict(laplace.state_dict())
    with pytest.raises(RuntimeError, match="size mismatch"):
        stored.load_state_dict(
            StoredDistribution(dist.Normal(torch.zeros(5), 1.0).to_event(1)).state_dict()
        )
    assert stored.distribution.mean.unique() == 0.0


def test_a_stored_distribution_does_not_follow_the_original():
    loc = torch.zeros(2)
    stored = StoredDistribution(td.Normal(loc, torch.ones(2)))
    loc.add_(1.0)
    assert stored.distribution.mean.unique() == 0.0


# --- detached -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", STORED.values(), ids=STORED.keys())
def test_detached_is_the_same_distribution(make):
    original = make()
    same(original, detached(original))


@given(st.sampled_from([td.Normal, td.Laplace, td.Cauchy, td.LogNormal]))
def test_detached_has_neither_gradient_nor_shared_storage(family):
    loc = nn.Parameter(torch.zeros(3))
    copied = detached(td.Independent(family(loc, torch.ones(3)), 1))
    before = copied.log_prob(torch.full((3,), 0.5))
    assert not before.requires_grad
    with torch.no_grad():
        loc.add_(1.0)
    assert torch.equal(copied.log_prob(torch.full((3,), 0.5)), before)


# --- gradients ------------------------------------------------------------------------------------


PRIORS = {
    "one number": lambda loc, scale: dist.Normal(0.2, 1.3).expand(loc.shape),
    "a number each": lambda loc, scale: dist.Normal(0.1 * scale, 1.0 + scale),
}


def of(loc, scale):
    return FactorizedNormal(loc, scale.log())


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("prior", PRIORS)
def test_a_variance_asked_for_without_gradients_costs_the_kl_none(prior, asked):
    reference = normal()
    loc, scale = reference.loc.requires_grad_(), reference.scale.requires_grad_()
    p = PRIORS[prior](loc.detach(), scale.detach())
    expected = torch.autograd.grad(td.kl_divergence(reference, p).sum(), [loc, scale])
    q = of(loc, scale)
    if asked:
        with torch.no_grad():
            torch.testing.assert_close(q.variance, scale.square())
            assert not q.variance.requires_grad
    kl = factorized_normal_kl(q, p.loc, p.scale)
    torch.testing.assert_close(torch.autograd.grad(kl, [loc, scale]), expected)
    assert q.variance.requires_grad


@pytest.mark.parametrize("prior", PRIORS)
def test_functional_transforms_of_the_kl(prior):
    locs, scales = torch.randn(4, 3).double(), torch.rand(4, 3).double() + 0.5
    p = PRIORS[prior](locs[0], scales[0])

    def kl(loc, scale):
        return factorized_normal_kl(of(loc, scale), p.loc, p.scale)

    def reference(loc, scale):
        return td.kl_divergence(td.Normal(loc, scale), td.Normal(p.loc, p.scale)).sum()

    def each(function):
        return [function(*pair) for pair in zip(locs, scales, strict=True)]

    torch.testing.assert_close(torch.vmap(kl)(locs, scales), torch.stack(each(reference)))
    gradient, by_hand = (torch.func.grad(f, argnums=(0, 1)) for f in (kl, reference))
    torch.testing.assert_close(each(gradient), each(by_hand))
    expected = tuple(torch.stack(items) for items in zip(*each(by_hand), strict=True))
    torch.testing.assert_close(torch.vmap(gradient)(locs, scales), expected)
    twice, twice_by_hand = (torch.func.jacrev(torch.func.grad(f, 1), 1) for f in (kl, reference))
    torch.testing.assert_close(twice(locs[0], scales[0]), twice_by_hand(locs[0], scales[0]))


def test_gradients_of_the_kl_in_the_prior():
    q = factorized()
    scales = torch.tensor([0.5, 2.0]).double()

    def kl(scale):
        p = td.Normal(torch.zeros(()).double(), scale).expand(SHAPE)
        return factorized_normal_kl(q, p.loc, p.scale)

    def reference(scale):
        return td.kl_divergence(q.base_dist, td.Normal(torch.zeros(()).double(), scale)).sum()

    torch.testing.assert_close(torch.vmap(kl)(scales), torch.stack([reference(s) for s in scales]))
    torch.testing.assert_close(
        torch.vmap(torch.func.grad(kl))(scales),
        torch.stack([torch.func.grad(reference)(s) for s in scales]),
    )


# --- the joint KL ---------------------------------------------------------------------------------


def leaves_and_pairs(with_variances):
    """Two sites under two priors, with the leaves that gradients go to."""
    locs = [torch.randn(3, 2).double().requires_grad_(), torch.randn(4).double().requires_grad_()]
    logs = [torch.randn(3, 2).double().requires_grad_(), torch.randn(4).double().requires_grad_()]
    loc, scale = torch.tensor([0.0, 0.7]).double(), torch.tensor([1.0, 0.3]).double()
    pairs = []
    for i, (mean, log) in enumerate(zip(locs, logs, strict=True)):
        q, p = FactorizedNormal(mean, log), dist.Normal(loc[i], scale[i]).expand(mean.shape)
        assert joins(q, p.to_event(mean.dim()))
        if with_variances:
            assert q.variance.requires_grad
        pairs.append((q, p.to_event(mean.dim())))
    return [*locs, *logs], pairs


def separate(leaves, pairs):
    total = 0.0
    for i, (_, p) in enumerate(pairs):
        q = td.Normal(leaves[i], leaves[2 + i].exp())
        total = total + td.kl_divergence(q, p.base_dist).sum()
    return total


@pytest.mark.parametrize("with_variances", [True, False])
def test_the_joint_kl_is_the_sum_twice_differentiable(with_variances):
    leaves, pairs = leaves_and_pairs(with_variances)
    weights = [torch.randn_like(leaf) for leaf in leaves]
    found = []
    together = joint_kl([(q, joins(q, p)) for q, p in pairs])
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
    torch.testing.assert_close(
        td.kl_divergence(q, p), torch.tensor(3 * (math.log(2) + 1 / 8 - 0.5))
    )


@pytest.mark.parametrize(
    ("make_q", "make_p"),
    [
        (factorized, lambda: dist.Normal(0.0, 1.0).expand(SHAPE).to_event(2)),  # another dtype
        (factorized, lambda: dist.Normal(normal().loc, normal().scale).to_event(2)),
        (factorized, lambda: dist.Laplace(0.0, 1.0).expand(SHAPE).to_event(2)),
        (normal, normal),
    ],
)
def test_other_pairs_do_not_join(make_q, make_p):
    assert not joins(make_q(), make_p())


def test_a_prior_with_gradients_does_not_join():
    scale = torch.ones((), dtype=torch.double, requires_grad=True)
    p = dist.Normal(torch.zeros(()).double(), scale).expand(SHAPE).to_event(2)
    q = factorized()
    assert not joins(q, p)
    (slope,) = torch.autograd.grad(td.kl_divergence(q, p), scale)
    expected = (1 - q.variance - q.mean.square()).sum()
    torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-20, 1e25])
def test_a_prior_scale_at_the_end_of_the_range(scale):
    q = FactorizedNormal(torch.ones(3), torch.zeros(3))
    p = dist.Normal(0.0, torch.tensor(scale)).expand([3]).to_event(1)
    found = td.kl_divergence(q, p)
    assert found == math.inf if scale < 1 else found > 0
