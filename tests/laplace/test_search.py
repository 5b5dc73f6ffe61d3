"""Prior precisions from the evidence, from held-out data and while training."""

import copy
import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.bnns import NORMAL
from tests.oracles.curvature import laplace
from tests.oracles.laplace import ADAM, classifier, fitted
from tyxe.laplace.search import best_of_grid

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize(("per_site", "temperature"), [(False, 1.0), (True, 0.5)])
@pytest.mark.parametrize(
    ("structure", "damping"), [("kron", False), ("kron", True), ("diag", False), ("full", False)]
)
def test_from_anywhere_the_search_ends_where_the_evidence_is_flat(
    structure, damping, temperature, per_site
):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.Flatten(), nn.Linear(16, 3), nn.LayerNorm(3)
    )
    x, y = torch.randn(6, 2, 3, 3).double(), torch.arange(6) % 3
    options = {"temperature": temperature, "damping": damping}
    torch.nn.init.normal_(net[3].bias)
    bnn = laplace(net, structure, points=6, **options)
    bnn.fit_curvature([(x, y)], progress=False)
    blocks = bnn.state.curvature.blocks
    owner = {site: g.name if per_site else "" for g in blocks for site in g.sites}
    ends = []
    for start in (1e-4, 1.0, 1e4):
        bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0.0, start**-0.5)))
        found = bnn.optimize_prior_precision(per_site=per_site)
        numbers = {f"net.{key}": v for key, v in found.items()} if per_site else {"": found}
        logs = {name: value.log().requires_grad_() for name, value in numbers.items()}
        given = {site: logs[name].exp() for site, name in owner.items()}
        evidence = bnn.log_marginal_likelihood(given)
        slopes = torch.autograd.grad(evidence, list(logs.values()))
        assert all(abs(slope) < 1e-6 for slope in slopes)
        # The posterior and the model have followed.
        torch.testing.assert_close(bnn.log_marginal_likelihood(), evidence, rtol=1e-6, atol=1e-6)
        ends.append(numbers)
    assert all(number > 0 for number in ends[0].values())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=1e-6, atol=0)


def test_a_search_that_cannot_end_says_so():
    bnn = laplace(nn.Linear(3, 2))
    data = [(torch.randn(5, 3).double(), torch.zeros(5).long())]
    bnn.fit_curvature(data, progress=False)
    with pytest.warns(tyxe.TyxeWarning, match=r"not converged in num_steps=2: its logarithm"):
        before = bnn.optimize_prior_precision(num_steps=2)
    with torch.no_grad():
        for loc in bnn.net_guide.parameters():
            loc.zero_()
    bnn.fit_curvature(data, progress=False)
    with pytest.warns(tyxe.TyxeWarning, match=r"the weights of the net are at the prior's mean"):
        found = bnn.optimize_prior_precision()
    torch.testing.assert_close(float(found), float(before))


@pytest.mark.parametrize("options", [{}, {"predictive": "bnn"}])
def test_the_prior_precision_by_held_out_data(options, monkeypatch):
    """By draws too: with many classes the covariances of outputs do not fit into memory."""
    bnn, x, y = classifier("diag")
    bnn.fit([(x, y)], ADAM, 20)
    grid = [1e-2, 1.0, 100.0]
    if options:
        monkeypatch.setattr("tyxe.check.MEMORY_LIMIT", 500)
        with pytest.raises(ValueError, match=r"covariances of 15 points.*predictive='bnn'"):
            bnn.optimize_prior_precision("grid", [(x, y)], grid=grid)
    best = bnn.optimize_prior_precision("grid", [(x, y)], grid=grid, **options)
    scores = []
    for precision in grid:
        bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0.0, precision**-0.5)))
        scores.append(float(bnn.evaluate(x, y, 400, **options)[1]))
    assert float(best) == pytest.approx(grid[scores.index(max(scores))])


def test_precisions_below_the_rounding_of_the_curvature_are_passed_over():
    """A last layer of many points in float32: the GGN has eigenvalues of zero less the rounding."""
    torch.manual_seed(0)
    net, count = nn.Linear(64, 10).float(), 1_200_000
    x, y = torch.randn(100, 64).float().relu(), torch.arange(100) % 10
    bnn = tyxe.LaplaceBNN(net, NORMAL, tyxe.likelihoods.Categorical(count), structure="full")
    bnn.fit_curvature([(x, y)])
    bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0.0, 1e2)))
    with pytest.raises(tyxe.linalg.NotPositiveDefiniteError):
        bnn.evaluate(x, y)
    assert bnn.optimize_prior_precision("grid", [(x, y)]) > 1e-4


def test_a_search_over_a_grid_that_fails_leaves_the_prior_in_force():
    bnn, x, y = fitted("diag")
    saved = copy.deepcopy(bnn.state_dict())
    bnn.optimize_prior_precision("grid", [(x, y)], grid=[3.0])
    bnn.load_state_dict(saved)  # its prior is not the object that update_prior was given
    for grid, message in (([-1.0, 1.0], "of the grid is -1.0"), ([], "no precision of the grid")):
        with pytest.raises(ValueError, match=message):
            bnn.optimize_prior_precision("grid", [(x, y)], grid=grid)
    with pytest.raises(ValueError, match=r"one precision for all weights"):
        bnn.optimize_prior_precision("grid", [(x, y)], per_site=True)
    before = bnn.net_guide.precision.to_dense()
    with pytest.raises(ValueError, match="targets of shape"):
        bnn.optimize_prior_precision("grid", [(x, y[:, None])], grid=[1.0, 10.0])
    scales = [prior.base_dist.scale for _, prior in bnn.net_prior.priors()]
    assert all(bool((scale == 1).all()) for scale in scales)
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), before)


def test_online_evidence_changes_the_prior_while_training():
    bnn, x, y = classifier("kron")
    history = bnn.fit([(x, y)], ADAM, 6, evidence_every=3)
    assert len(history.loss) == 6
    scale = dict(bnn.net_prior.priors())["0.weight"].base_dist.scale
    assert float(scale.mean()) != 1.0
    assert bnn.net_guide.precision is not None
    stops = lambda bnn, epoch, loss: epoch == 2  # noqa: E731
    history = bnn.fit([(x, y)], ADAM, 6, evidence_every=2, callback=stops)
    assert len(history.loss) == 3
    assert bnn.net_guide.state is not None


def test_weights_at_the_priors_mean_keep_their_precision():
    bnn, x, y = classifier("diag")
    with torch.no_grad():
        for name, parameter in bnn.net_guide.named_parameters():
            if "2" in name:
                parameter.zero_()
    bnn.fit_curvature([(x, y)])
    with pytest.warns(tyxe.TyxeWarning, match="the weights of net.2.weight are at the"):
        found = bnn.optimize_prior_precision(per_site=True)
    assert [name for name, value in found.items() if value == 1.0] == ["2.weight"]


def test_a_grid_without_a_finite_score_is_refused():
    with pytest.raises(ValueError, match="no precision of the grid gives a finite"):
        best_of_grid([1.0, 10.0], lambda precision: math.nan)
    assert best_of_grid(None, lambda precision: -abs(math.log(precision))) == 1.0
