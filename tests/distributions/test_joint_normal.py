"""Normals over several sites at once: densities, KLs and traces."""

import itertools

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td

from tests.contracts.joints import JOINTS, check_joint
from tests.contracts.operators import OPERATORS
from tests.oracles.joints import EXACT
from tyxe.distributions import Gaussian, IndependentSites, ParamBlocks
from tyxe.linalg import Diagonal
from tyxe.linalg.functions import trace_of_solve

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("make", JOINTS.values(), ids=JOINTS.keys())
def test_contract(make):
    check_joint(make)


@pytest.mark.parametrize("p", JOINTS)
@pytest.mark.parametrize("q", JOINTS)
def test_the_kl_between_two_joint_normals_is_that_of_dense_ones(q, p):
    first, second = JOINTS[q](), JOINTS[p]()
    dense = [
        td.MultivariateNormal(one.loc, precision_matrix=one.precision.to_dense())
        for one in (first, second)
    ]
    torch.testing.assert_close(td.kl_divergence(first, second), td.kl_divergence(*dense), **EXACT)
    if q == p:
        assert abs(float(td.kl_divergence(first, second))) < 1e-10


def test_a_product_of_normals_is_the_product_of_their_densities():
    factors = [JOINTS[name]() for name in ("blocks", "blocks, others", "Diagonal")]
    terms = [term for factor in factors for term in factor.terms]
    product = Gaussian.product(factors[0].blocks, terms)
    assert len(product.terms) == 1
    v, w = torch.randn(2, 17)
    expected = sum(float(f.log_prob(v) - f.log_prob(w)) for f in factors)
    for joint in (product, product.with_terms(product.blocks, terms)):
        assert float(joint.log_prob(v) - joint.log_prob(w)) == pytest.approx(expected, rel=1e-9)


def test_the_kl_to_a_penalty_differs_by_its_constant_only():
    factors = [JOINTS[name]() for name in ("blocks", "blocks, others")]
    terms = [term for factor in factors for term in factor.terms]
    normal = Gaussian.product(factors[0].blocks, terms)
    penalty = normal.with_terms(normal.blocks, terms)
    qs = [JOINTS[name]() for name in ("Dense", "covariance", "Diagonal")]
    found = [td.kl_divergence(q, penalty) - td.kl_divergence(q, normal) for q in qs]
    locs, scales = qs[0].unflatten(torch.randn(17)), qs[0].unflatten(torch.rand(17))
    sites = {n: dist.Normal(loc, scales[n]).to_event(loc.dim()) for n, loc in locs.items()}
    q = IndependentSites(sites)
    found.append(td.kl_divergence(q, penalty) - td.kl_divergence(q, normal))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], **EXACT)


SAME_SIZE = ["LowRank", "Inverse of LowRank", "Sum of structures"]
PAIRS = [*itertools.product(SAME_SIZE, SAME_SIZE), *((n, n) for n in OPERATORS)]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_traces_of_operators(first, second):
    a, b = OPERATORS[first]().to(torch.float64), OPERATORS[second]().to(torch.float64)
    expected = torch.trace(torch.linalg.solve(b.to_dense(), a.to_dense()))
    torch.testing.assert_close(trace_of_solve(a, b), expected, **EXACT)


def test_sizes_of_a_joint_normal_have_to_fit():
    blocks = ParamBlocks.of_sites({"w": torch.Size([3])})
    with pytest.raises(ValueError, match=r"loc has shape \(2,\); expected \(3,\)"):
        Gaussian(blocks, torch.zeros(2), Diagonal(torch.ones(3)))
    with pytest.raises(ValueError, match="precision has 2 rows; expected 3"):
        Gaussian(blocks, torch.zeros(3), Diagonal(torch.ones(2)))


def test_the_density_of_one_large_site_alone_is_refused(monkeypatch):
    monkeypatch.setattr("tyxe.distributions.gaussian.SMALL", 2)
    q = JOINTS["Dense"]().marginal("w")
    with pytest.raises(ValueError, match=r"ask for that of all sites, joint\.log_prob"):
        q.log_prob(q.mean)
