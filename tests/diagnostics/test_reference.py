"""Distances of predictives, and references: recorded from converged chains, kept in files."""

import functools

import pyro.distributions as dist
import pytest
import torch
from scipy import stats
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL
from tyxe import files
from tyxe.diagnostics import Reference, agreement, reference, total_variation, wasserstein2

X = torch.linspace(-1, 1, 20)[:, None]
Y = 2 * X + 0.3


def likelihood():
    return tyxe.likelihoods.HomoskedasticGaussian(20, scale=0.5)


@pytest.fixture(scope="module")
def chains():
    torch.manual_seed(0)
    bnn = tyxe.MCMC_BNN(nn.Linear(1, 1), NORMAL, likelihood(), tyxe.samplers.HMC(num_steps=3))
    bnn.fit([(X, Y)], 500, warmup_steps=200, num_chains=4, progress=False)
    return bnn


def laplace(structure="full", hidden=None):
    torch.manual_seed(0)
    net = nn.Linear(1, 1)
    if hidden is not None:
        net = nn.Sequential(nn.Linear(1, hidden), nn.Linear(hidden, 1))
    bnn = tyxe.LaplaceBNN(net, NORMAL, likelihood(), structure=structure)
    bnn.fit([(X, Y)], functools.partial(torch.optim.Rprop, lr=0.1), 100, progress=False)
    return bnn


def test_an_exact_method_is_near_and_another_is_not(chains, tmp_path):
    found = reference(chains, X)
    assert found.outputs.shape == (2_000, 20, 1)
    assert found.r_hat <= 1.01
    found.save(tmp_path / "reference")
    again = Reference.load(tmp_path / "reference")
    assert torch.equal(again.outputs, found.outputs)
    exact = laplace()
    near = again.compare(exact, 2_000)["wasserstein2"]
    exact.temperature = 4.0
    far = again.compare(exact, 2_000)["wasserstein2"]
    assert near < 0.02 < far


def test_of_classes():
    x, y = torch.randn(30, 2), torch.arange(30) % 3
    bnn = tyxe.MCMC_BNN(
        nn.Linear(2, 3), NORMAL, tyxe.likelihoods.Categorical(30), tyxe.samplers.HMC(num_steps=4)
    )
    bnn.fit([(x, y)], 300, warmup_steps=150, num_chains=4, progress=False)
    found = reference(bnn, x, largest_r_hat=1.1)
    same = found.compare(bnn, 1_200)
    assert same == pytest.approx({"agreement": 1.0, "total variation": 0.0}, abs=1e-5)
    mode = tyxe.LaplaceBNN(
        nn.Linear(2, 3), NORMAL, tyxe.likelihoods.Categorical(30), structure="full"
    )
    mode.fit([(x, y)], torch.optim.Rprop, 50, progress=False)
    apart = found.compare(mode)
    assert 0 < apart["total variation"] < 0.2
    assert apart["agreement"] > 0.8


def test_of_nets_without_sites(chains):
    """An ensemble of plain nets has no sites, and is of the same net."""
    nothing = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)

    def member(index):
        start = tyxe.util.reset_parameters_(nn.Linear(1, 1))
        return tyxe.VariationalBNN(start, nothing, likelihood())

    bnn = tyxe.EnsembleBNN(member, 3)
    bnn.fit([(X, Y)], functools.partial(torch.optim.Rprop, lr=0.1), 100, progress=False)
    assert reference(chains, X).compare(bnn, 0)["wasserstein2"] > 0.05


def test_another_net_is_refused(chains):
    found = reference(chains, X)
    with pytest.raises(ValueError, match="the reference is of another net"):
        found.compare(laplace(hidden=3))


def test_chains_that_have_not_converged_are_refused():
    torch.manual_seed(0)
    bnn = tyxe.MCMC_BNN(nn.Linear(1, 1), NORMAL, likelihood(), tyxe.samplers.NUTS)
    with pytest.warns(tyxe.TyxeWarning):
        bnn.fit([(X, Y)], 5, warmup_steps=2, num_chains=4, progress=False)
    with pytest.raises(ValueError, match=r"R-hat of the outputs .* no reference yet"):
        reference(bnn, X)
    with pytest.raises(TypeError, match="bnn is a LaplaceBNN; expected a MCMC_BNN"):
        reference(laplace(), X)


@pytest.mark.parametrize(
    "found",
    [3, torch.ones(1), {"state": {}}, {"reference": 3}, {"reference": {"inputs": torch.ones(1)}}],
)
def test_a_file_without_a_reference_says_so(found, tmp_path):
    files.write(tmp_path / "file", found)
    with pytest.raises(ValueError, match=r"has no reference: give the path that Reference\.save"):
        Reference.load(tmp_path / "file")


# --- distances ---------------------------------------------------------------------------------


def test_distances_of_classes_by_hand():
    one = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]])
    two = torch.tensor([[0.2, 0.6, 0.2], [0.1, 0.7, 0.2]])
    assert agreement(one, two) == 0.5
    assert float(total_variation(one, two)) == pytest.approx(0.5 * (0.3 + 0.1))
    assert total_variation(one, one) == 0
    assert agreement(one, one) == 1


def test_wasserstein_of_as_many_samples_pairs_them_in_order():
    torch.manual_seed(0)
    one, two = torch.randn(40, 3, 2).double(), torch.randn(40, 3, 2).double() * 2 + 1
    gaps = one.sort(0).values - two.sort(0).values
    expected = gaps.square().mean(0).sqrt().mean()
    torch.testing.assert_close(wasserstein2(one, two), expected)


@pytest.mark.parametrize(("first", "second"), [(6, 4), (5, 7), (1, 9)])
def test_wasserstein_of_other_numbers_is_that_of_repeated_samples(first, second):
    torch.manual_seed(0)
    one, two = torch.randn(first, 3).double(), torch.randn(second, 3).double()
    repeated = one.repeat_interleave(second, 0), two.repeat_interleave(first, 0)
    torch.testing.assert_close(wasserstein2(one, two), wasserstein2(*repeated))
    # Of one point, the first distance is SciPy's, and no larger than the second.
    least = stats.wasserstein_distance(one[:, 0], two[:, 0])
    assert least <= float(wasserstein2(one[:, :1], two[:, :1])) + 1e-12


@pytest.mark.parametrize(
    ("distance", "one", "other", "message"),
    [
        (agreement, torch.full((3, 2), 0.5), torch.full((2, 2), 0.5), "reference has shape"),
        (total_variation, torch.full((3, 2), 0.5), torch.ones(3, 2), "sum to"),
        (wasserstein2, torch.zeros(4, 3), torch.zeros(4, 2), "reference has shape"),
    ],
)
def test_predictives_of_other_shapes(distance, one, other, message):
    with pytest.raises(ValueError, match=message):
        distance(one, other)
