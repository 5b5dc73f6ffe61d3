"""The KL between factorised Normals, its gradients, and that of many sites at once."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td

from tests.oracles.normals import SHAPE, factorized, normal
from tyxe.distributions import FactorizedNormal
from tyxe.distributions.normal_kl import factorized_normal_kl, fusable, fused_kl

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


def test_the_kl_to_others_is_torchs_or_none():
    q = factorized()
    laplace = td.Independent(td.Laplace(torch.zeros(SHAPE).double(), 1.0), 2)
    plain = td.Independent(td.Normal(q.base_dist.loc, q.base_dist.scale), 2)
    torch.testing.assert_close(td.kl_divergence(q, laplace), td.kl_divergence(plain, laplace))
    student = td.Independent(td.StudentT(3.0, torch.zeros(SHAPE).double(), 1.0), 2)
    with pytest.raises(NotImplementedError):
        td.kl_divergence(q, student)


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
        assert fusable(q, p.to_event(mean.dim()))
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
    assert not fusable(make_q(), make_p())


def test_a_prior_with_gradients_does_not_join():
    scale = torch.ones((), dtype=torch.double, requires_grad=True)
    p = dist.Normal(torch.zeros(()).double(), scale).expand(SHAPE).to_event(2)
    q = factorized()
    assert not fusable(q, p)
    (slope,) = torch.autograd.grad(td.kl_divergence(q, p), scale)
    expected = (1 - q.variance - q.mean.square()).sum()
    torch.testing.assert_close(slope, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-20, 1e25])
def test_a_prior_scale_at_the_end_of_the_range(scale):
    q = FactorizedNormal(torch.ones(3), torch.zeros(3))
    p = dist.Normal(0.0, torch.tensor(scale)).expand([3]).to_event(1)
    found = td.kl_divergence(q, p)
    assert found == math.inf if scale < 1 else found > 0
