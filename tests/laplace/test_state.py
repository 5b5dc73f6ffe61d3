"""`LaplaceState` alone: precision, evidence, hand-over, and that nothing of it changes."""

import copy
import dataclasses
import pickle

import pyro.distributions as dist
import pytest
import torch

import tyxe
from tyxe.curvature import Curvature
from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.laplace import LaplaceState
from tyxe.laplace.precision import gaussian_prior
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Kronecker

pytestmark = pytest.mark.usefixtures("double")

SHAPES = {"net.weight": torch.Size([1, 3]), "net.bias": torch.Size([1])}


def blocks_of():
    return ParamBlocks.of_sites(SHAPES)


def normal():
    """A prior of all four weights, of a Normal for each site."""
    entries = torch.full((4,), 2.0)
    parts = BlockDiagonal({"net.weight": Diagonal(entries[:3]), "net.bias": Diagonal(entries[3:])})
    return Gaussian(blocks_of(), torch.full((4,), 0.3), parts)


def kronecker_state(prior=None, key=7, **settings):
    """A state of one block, whose curvature is a Kronecker product."""
    torch.manual_seed(key)
    factors = [torch.randn(5, n) for n in (1, 4)]
    product = Kronecker.from_factors(*(factor.mT @ factor for factor in factors))
    blocks = blocks_of()
    operator = BlockDiagonal({"all": product})
    curvature = Curvature(operator, blocks, -3.0, 1.0, 5.0, key=key)
    return LaplaceState(torch.randn(4), curvature, prior or one_block(), **settings)


def one_block():
    return Gaussian(blocks_of(), torch.zeros(4), BlockDiagonal({"all": Diagonal(torch.ones(4))}))


@pytest.fixture
def sums_have_no_inverse(monkeypatch):
    """As those of more weights have none."""
    monkeypatch.setattr("tyxe.linalg.checks.SMALL", 3)


# ------------------------------------------------------------------ nothing changes


def test_a_replaced_state_is_another():
    state = kronecker_state()
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.temperature = 0.5
    before = state.precision().to_dense()
    assert state.precision() is state.precision()
    other = state.replace(temperature=0.5)
    assert (state.temperature, other.temperature) == (1.0, 0.5)
    assert torch.equal(state.precision().to_dense(), before)
    with pytest.raises(ValueError, match="curvature_weight is -1"):
        state.replace(curvature_weight=-1)
    expected = 2 * state.curvature.operator.to_dense() + torch.eye(4)
    torch.testing.assert_close(other.precision().to_dense(), expected)


# ------------------------------------------------------------------ handed over


def of_one_gaussian():
    return kronecker_state(), lambda state: state.next_prior()


def of_normals():
    """Independent weights: a Normal for each site."""
    prior = normal()
    operator = BlockDiagonal(
        {name: Diagonal(torch.rand(shape.numel())) for name, shape in SHAPES.items()}
    )
    state = LaplaceState(
        torch.randn(4), Curvature(operator, prior.blocks, -3.0, 1.0, 5.0, key=7), prior
    )
    return state, lambda state: state.next_prior().by_site()


def of_penalties():
    """More than one product: a penalty about each mode."""
    earlier = kronecker_state(key=8, accumulate="per_task")
    state = kronecker_state(earlier.next_prior(), accumulate="per_task")
    return state, lambda state: state.next_prior()


HAND_OVERS = {"one Gaussian": of_one_gaussian, "Normals": of_normals, "penalties": of_penalties}
COPIES = {
    "itself": lambda prior: prior,
    "deepcopy": copy.deepcopy,
    "pickle": lambda prior: pickle.loads(pickle.dumps(prior)),
}


@pytest.mark.usefixtures("sums_have_no_inverse")
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("case", HAND_OVERS.values(), ids=HAND_OVERS.keys())
def test_the_curvature_that_a_prior_holds_is_not_added_again(case, copied):
    state, hand_over = case()
    prior = copied(hand_over(state))
    if isinstance(prior, dict):
        assert all(each.absorbed == state.key for each in prior.values())
        prior = gaussian_prior(prior, state.blocks, state.loc)
    assert prior.absorbed == state.key
    after = state.under(prior)
    assert after.curvature.num_targets == 0
    torch.testing.assert_close(after.precision().to_dense(), state.precision().to_dense())
    assert state.curvature.num_targets == 5  # which is as it was
    # Nor the third time, when there is no curvature any more.
    torch.testing.assert_close(
        after.under(after.next_prior()).precision().to_dense(), state.precision().to_dense()
    )


def test_normals_of_several_posteriors_hold_no_curvature():
    """A site's own tag says nothing where the others have another, or none."""
    state, hand_over = of_normals()
    normals = hand_over(state)
    plain = dist.Normal(torch.zeros(1), torch.ones(1)).to_event(1)
    other = copy.copy(plain)
    other.absorbed = 8
    for bias in (plain, other):
        with pytest.warns(tyxe.TyxeWarning, match="data are counted twice"):
            prior = gaussian_prior({**normals, "net.bias": bias}, state.blocks, state.loc)
        assert prior.absorbed is None
        assert state.under(prior).curvature is state.curvature


def test_a_prior_in_another_order_is_the_same_prior():
    state = kronecker_state()
    turned = ParamBlocks.of_sites(dict(reversed(SHAPES.items())))
    order = torch.tensor([3, 0, 1, 2])
    posterior = state.next_prior()
    dense = Dense(posterior.precision.to_dense()[order][:, order])
    after = state.under(Gaussian(turned, posterior.loc[order], dense, posterior.absorbed))
    assert after.prior.blocks == state.blocks
    assert after.curvature.num_targets == 0
    torch.testing.assert_close(after.prior.loc, posterior.loc)
    torch.testing.assert_close(after.precision().to_dense(), state.precision().to_dense())


def test_independent_weights_in_another_order_stay_independent():
    state, _ = of_normals()
    posterior = state.next_prior()
    turned = ParamBlocks.of_sites(dict(reversed(SHAPES.items())))
    prior = posterior.reordered(turned)
    assert prior.is_factorized
    assert prior.absorbed == posterior.absorbed
    for name, value in posterior.unflatten(posterior.loc).items():
        assert torch.equal(prior.unflatten(prior.loc)[name], value)
    variances = (each.unflatten(each.variance) for each in (prior, posterior))
    found, expected = variances
    assert all(torch.equal(found[name], expected[name]) for name in SHAPES)
