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
    pair = JOINTS[q](), JOINTS[p]()
    dense = [td.MultivariateNormal(one.loc, one.precision.to_dense().inverse()) for one in pair]
    torch.testing.assert_close(td.kl_divergence(*pair), td.kl_divergence(*dense), **EXACT)


def product_of(*names):
    """Return the Normal that is the product of some, the same as a penalty, and the factors."""
    factors = [JOINTS[name]() for name in names]
    terms = [term for factor in factors for term in factor.terms]
    normal = Gaussian.product(factors[0].blocks, terms)
    return normal, normal.with_terms(normal.blocks, terms), factors


def test_a_product_of_normals_is_the_product_of_their_densities():
    normal, penalty, factors = product_of("blocks", "blocks, others", "Diagonal")
    assert len(normal.terms) == 1
    v, w = torch.randn(2, 17)
    expected = sum(float(f.log_prob(v) - f.log_prob(w)) for f in factors)
    for joint in (normal, penalty):
        assert float(joint.log_prob(v) - joint.log_prob(w)) == pytest.approx(expected, rel=1e-9)


def test_the_kl_to_a_penalty_differs_by_its_constant_only():
    normal, penalty, _ = product_of("blocks", "blocks, others")
    qs = [JOINTS[name]() for name in ("Dense", "covariance", "Diagonal")]
    locs, scales = qs[0].unflatten(torch.randn(17)), qs[0].unflatten(torch.rand(17))
    sites = {n: dist.Normal(loc, scales[n]).to_event(loc.dim()) for n, loc in locs.items()}
    first, *others = (
        td.kl_divergence(q, penalty) - td.kl_divergence(q, normal)
        for q in (*qs, IndependentSites(sites))
    )
    for one in others:
        torch.testing.assert_close(one, first, **EXACT)


SAME_SIZE = ["LowRank", "Inverse of LowRank", "Sum of structures"]
PAIRS = [*itertools.product(SAME_SIZE, SAME_SIZE), *((n, n) for n in OPERATORS)]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_traces_of_operators(first, second):
    a, b = OPERATORS[first](), OPERATORS[second]()
    expected = torch.trace(torch.linalg.solve(b.to_dense(), a.to_dense()))
    torch.testing.assert_close(trace_of_solve(a, b), expected, **EXACT)


def test_sizes_of_a_joint_normal_have_to_fit():
    blocks = ParamBlocks.of_sites({"w": torch.Size([3])})
    with pytest.raises(ValueError, match=r"loc has shape \(2,\); expected \(3,\)"):
        Gaussian(blocks, torch.zeros(2), Diagonal(torch.ones(3)))


def test_the_density_of_one_large_site_alone_is_refused(monkeypatch):
    monkeypatch.setattr("tyxe.distributions.gaussian.SMALL", 2)
    q = JOINTS["Dense"]().marginal("w")
    with pytest.raises(ValueError, match=r"ask for that of all sites, joint\.log_prob"):
        q.log_prob(q.mean)
