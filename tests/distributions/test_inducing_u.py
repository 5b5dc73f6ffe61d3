"""Families of q(U): their KL, and variances through maps."""

import pytest
import torch
import torch.distributions as td

from tests.oracles.inducing_gaussians import (
    D_C,
    D_R,
    FAMILIES,
    LAYER,
    SIZES,
    close,
    dense,
    make,
    priors,
    randn,
)
from tyxe.distributions import IndependentSites, InducingWeights
from tyxe.distributions.inducing_formulas import conditional_divergence
from tyxe.distributions.inducing_u import EnsembleU, FullU, Turn


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
    close(q.u.kl(None, None), expected)
    divergence = conditional_divergence(q.conditional_scale, D_R * D_C)
    prior = IndependentSites(priors())
    close(td.kl_divergence(q, prior), divergence + expected)


def test_whitened_and_unwhitened_are_one_posterior():
    plain = make("full", whitened=False)
    size = plain.u.event_shape.numel()
    rows, columns = plain.row_tril, plain.column_tril
    # The same distribution over U, in the coordinates U_w = C_r^-1 U C_c^-T.
    inverse = torch.linalg.inv(torch.kron(rows, columns))
    base = plain.u.base
    white = FullU((inverse @ base.loc.reshape(-1)).view(base.loc.shape), inverse @ base.scale_tril)
    q = InducingWeights(white, plain.rows, plain.columns, plain.conditional_scale, LAYER)
    assert white.scale_tril.shape == (size, size)
    close(q.kl_from_prior(), plain.kl_from_prior())
    for left, right in zip(dense(q), dense(plain), strict=True):
        close(left, right)
    value = q.sample()
    close(q.log_prob(value), plain.log_prob(value))
    torch.manual_seed(1)
    left = q.rsample()
    torch.manual_seed(1)
    close(plain.rsample(), left)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("whitened", [True, False])
def test_variances_through_maps(family, whitened):
    u = make(family, (2, 3), whitened=whitened).u
    rows, columns = randn(4, 2), randn(5, 3)
    for left, right in ((rows, columns), (None, columns), (rows, None), (None, None)):
        a = torch.eye(2).double() if left is None else left
        b = torch.eye(3).double() if right is None else right
        means, covariance = u.components()
        joint = torch.kron(a, b)
        spread = torch.cov(means.mT, correction=0).reshape(6, 6) if len(means) > 1 else 0.0
        expected = (joint @ (covariance + spread) @ joint.mT).diagonal().view(len(a), len(b))
        close(u.variance_through(left, right), expected)


def test_ensembles_go_through_their_members():
    members = randn(3, 2, 2)
    u = EnsembleU(members, Turn(1, 3))
    assert torch.equal(u.rsample((2, 2)).flatten(0, 1), members[[1, 2, 0, 1]])
    assert torch.equal(u.rsample(), members[2])
    assert u.kl(None, None) == 0.0
    torch.manual_seed(3)
    turn = Turn(None, 3)
    both = [EnsembleU(members, turn).rsample(), EnsembleU(2 * members, turn).rsample()]
    assert torch.equal(2 * both[0], both[1]), "layers take the same member"
    firsts = {Turn(None, 3).first for _ in range(50)}
    assert firsts == {0, 1, 2}
