"""Mistakes with a Laplace approximation: one clear error each, before memory is taken."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.bnns import mlp
from tests.oracles.laplace import STRUCTURES, classifier, fitted
from tests.oracles.nets import NetOf
from tests.oracles.programs import NORMAL

PRIOR = tyxe.priors.IIDPrior(NORMAL)

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize(
    "call",
    [
        lambda bnn, x: bnn.predict(x),
        lambda bnn, x: bnn.predict(x, predictive="bnn"),
        lambda bnn, x: bnn.log_marginal_likelihood(),
        lambda bnn, x: bnn.optimize_prior_precision(),
        lambda bnn, x: bnn.functional_variance(x),
        lambda bnn, x: bnn.net_guide.get_detached_distributions(),
    ],
)
def test_curvature_before_use(call):
    bnn, x, _ = classifier()
    with pytest.raises(RuntimeError, match=r"no curvature yet: call fit.*fit_curvature|no poster"):
        call(bnn, x)


POSITIVE = "expected a number above 0"
SETTINGS = [
    ({"structure": "kfac"}, r"structure is 'kfac'; expected one of 'full', 'diag', 'kron'"),
    ({"structure": "kron", "curvature": "hessian"}, "'hessian'; expected one of 'ggn'"),
    ({"structure": "full", "curvature": "hessian"}, "'hessian'; expected one of 'ggn'"),
    ({"temperature": 0.0}, POSITIVE),
    ({"temperature": math.inf}, POSITIVE),
    ({"curvature_weight": math.nan}, POSITIVE),
    ({"accumulate": "max"}, "accumulate is 'max'; expected one of 'sum', 'average'"),
    ({"num_passes": 0}, "num_passes is 0"),
    ({"num_passes": 2.5}, r"num_passes is 2\.5"),
    ({"damping": "yes"}, "damping is 'yes'"),
    ({"rank": 0}, "rank is 0"),
    ({"rank": 10}, "option rank is 10, .* not used by structure='kron': .* structure='lowrank'"),
    ({"structure": "full", "tolerance": 0.1}, "option tolerance is 0.1, and is not used"),
    ({"structure": "diag", "reduce": True}, "not used by structure='diag'.* structure='kron'"),
    ({"structure": "full", "damping": True}, "option damping is True, and is not used"),
    ({"structure": "lowrank", "num_passes": 2}, "take structure='kron' or 'diag' or 'full'"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_settings_that_cannot_be_meant(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        classifier(**settings)


def test_settings_that_are_refused_after_the_fit_leave_the_posterior():
    bnn, *_ = fitted()
    before = bnn.state
    for value, message in ((-1.0, POSITIVE), (5e-324, "not finite")):
        with pytest.raises(ValueError, match=message):
            bnn.temperature = value
    with pytest.raises(TypeError, match=r"expected tyxe\.LaplaceOptions"):
        bnn.options = {"damping": True}
    with pytest.raises(ValueError, match="option rank is 7, and is not used by structure="):
        bnn.options = tyxe.LaplaceOptions(rank=7)
    for name in ("damping", "num_passes", "curvature_weight", "accumulate", "reduce"):
        with pytest.raises(AttributeError, match=rf"set bnn\.options = .*, {name}=\.\.\."):
            setattr(bnn, name, getattr(bnn.options, name))
    assert (bnn.temperature, bnn.options) == (1.0, tyxe.LaplaceOptions())
    assert bnn.state is before
    with pytest.raises(TypeError, match=r"expected tyxe\.LaplaceOptions"):
        tyxe.LaplaceBNN(nn.Linear(1, 1), PRIOR, bnn.likelihood, options={"damping": True})


def test_a_curvature_that_is_not_finite_names_the_site():
    bnn, x, y = classifier("diag")
    x[3, 1] = math.inf
    with pytest.raises(ValueError, match=r"'net.0.weight' is .*look at the inputs"):
        bnn.fit_curvature([(x, y)])


def numbers(net, structure="kron", prior=PRIOR):
    """Return a BNN of a net of 3 inputs and an output, and a batch."""
    rows, likelihood = torch.ones(5, 3), tyxe.likelihoods.HomoskedasticGaussian(5, scale=1.0)
    return tyxe.LaplaceBNN(net, prior, likelihood, structure=structure), (rows, rows[:, :1])


@pytest.mark.parametrize("site", ["net.0.weight", "net.2.bias"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_weight_that_is_not_finite_has_no_curvature(structure, site):
    """The last bias enters no curvature of a Gaussian likelihood."""
    bnn, batch = numbers(mlp(3, 4, 1), structure)
    bnn.fit_curvature([batch])
    before = bnn.state
    with torch.no_grad():
        dict(bnn.net_guide.values())[site].view(-1)[0] = math.nan
    with pytest.raises(ValueError, match=f"{site} .*; expected finite"):
        bnn.fit_curvature([batch])
    assert bnn.state is before


def test_a_likelihood_that_is_not_finite_has_no_evidence():
    """The prior hides the last bias, which is NaN, and enters no curvature."""
    net = nn.Linear(3, 1)
    nn.init.constant_(net.bias, math.nan)
    bnn, batch = numbers(net, prior=tyxe.priors.IIDPrior(NORMAL, hide=["bias"]))
    with pytest.raises(ValueError, match=r"error of these data .*; expected finite"):
        bnn.fit_curvature([batch])


ROWS = torch.arange(15).repeat(2)
REFUSED = [
    (lambda bnn, x, y: bnn.fit_curvature([(x, y + 3)]), "targets lie outside"),
    (lambda bnn, x, y: bnn.fit_curvature((x, y)), r"is a tuple; expected a loader.* \[\(x, y\)\]"),
    (lambda bnn, x, y: bnn.fit_curvature([(x[ROWS], y[ROWS])]), "30 points.*dataset_size=15"),
    (lambda bnn, x, y: bnn.log_marginal_likelihood(noise=1.0), "expected a HomoskedasticGaussian"),
    (lambda bnn, x, y: bnn.optimize_prior_precision([(x, y)]), "'grid'; held-out data are loader="),
    (lambda bnn, x, y: bnn.fit_curvature(x, y), r"device is a tensor; pass data as \[\(x, y\)\]"),
    (lambda bnn, x, y: bnn.optimize_prior_precision("grid"), r"data: .*\('grid', loader\)"),
    (lambda bnn, x, y: bnn.functional_variance([x, x]), "functional_variance takes one batch"),
    (lambda bnn, x, y: bnn.predict(x, predictive="gpp"), "expected one of 'bnn', 'glm', 'gp', or"),
    (lambda bnn, x, y: bnn.evaluate(iter([x])), "yields no targets; evaluate needs"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_a_fitted_one_refuses(call, message):
    bnn, x, y = fitted()
    state = bnn.state
    with pytest.raises((TypeError, ValueError), match=message):
        call(bnn, x, y)
    assert bnn.state is state


def test_a_likelihood_with_variables_or_without_a_hessian():
    net = nn.Linear(3, 1)
    inferred = tyxe.likelihoods.HomoskedasticGaussian(4, scale=dist.LogNormal(0.0, 1.0))
    with pytest.raises(ValueError, match=r"without variables of its own"):
        tyxe.LaplaceBNN(net, PRIOR, inferred)

    class Cauchy(tyxe.likelihoods.Likelihood):
        def predictive_distribution(self, predictions, latents=None):
            return dist.Cauchy(predictions, torch.ones_like(predictions))

        def point_error(self, predictions, targets):
            return (predictions - targets).abs()

        def aggregate_predictions(self, predictions, dim=0, latents=None):
            return predictions.median(dim).values

    bnn = tyxe.LaplaceBNN(net, PRIOR, Cauchy(4))
    with pytest.raises(TypeError, match=r"no output Hessian is registered for Cauchy"):
        bnn.fit_curvature([(torch.randn(4, 3), torch.randn(4, 1))])


MISFITS = [
    (torch.flatten, ValueError, "targets of shape"),
    (lambda outputs: outputs[:3], ValueError, "targets of shape"),
    (lambda outputs: (outputs, 1), TypeError, "the net returns a tuple; the likelihood needs"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISFITS)
def test_outputs_that_do_not_fit(change, error, message):
    net = NetOf(lambda self, x: change(self.layer(x)), layer=nn.Linear(3, 2))
    bnn = tyxe.LaplaceBNN(net, PRIOR, tyxe.likelihoods.Categorical(4))
    with pytest.raises(error, match=message):
        bnn.fit_curvature([(torch.randn(4, 3), torch.zeros(4).long())])
    assert bnn.net_guide.state is None


def test_a_warning_about_the_outputs_points_at_the_call():
    net = nn.Sequential(nn.Linear(3, 2), nn.Softmax(-1))
    bnn = tyxe.LaplaceBNN(net, PRIOR, tyxe.likelihoods.Categorical(8))
    with pytest.warns(tyxe.TyxeWarning, match="drop the net's softmax") as caught:
        bnn.fit_curvature([(torch.randn(8, 3), torch.zeros(8).long())])
    assert [w.filename for w in caught] == [__file__]


def test_a_loader_of_more_points_than_the_data_set_gives_a_warning():
    bnn, x, y = classifier()
    bnn.likelihood.dataset_size = len(x)
    loader = list(zip(x.split(5), y.split(5), strict=True))
    bnn.fit_curvature(loader)
    bnn.options = tyxe.LaplaceOptions(num_passes=2)
    bnn.fit_curvature(loader)
    bnn.fit_curvature(loader[:1])  # part of the data is scaled
    with pytest.warns(tyxe.TyxeWarning, match=r"had \d+ points.*dataset_size.*too little"):
        bnn.fit_curvature([*loader, *loader])


def switches(self, x):
    """Use the layer as a linear map for some batches, and by hand for others."""
    return self.layer(x) if len(x) == 6 else x @ self.layer.weight.T + self.layer.bias


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_a_net_that_uses_its_sites_differently_is_refused(structure):
    x, y = torch.randn(12, 3), torch.randint(3, (12,))
    net, likelihood = NetOf(switches, layer=nn.Linear(3, 3)), tyxe.likelihoods.Categorical(12)
    bnn = tyxe.LaplaceBNN(net, PRIOR, likelihood, structure=structure)
    alike, otherwise = ([(x[:6], y[:6]), (x[6:last], y[6:last])] for last in (12, 11))
    with pytest.raises(ValueError, match=r"in other ways than for another batch"):
        bnn.fit_curvature(otherwise)
    bnn.fit_curvature(alike)
    for call in (
        lambda: bnn.predict(x[:5]),
        lambda: bnn.functional_variance(x[:5], joint=True),
        lambda: bnn.refine(otherwise),
    ):
        with pytest.raises(ValueError, match=r"in other ways than for another batch"):
            call()


def test_matrices_too_large_are_refused_before_they_are_made():
    net, likelihood = nn.Linear(10_000, 10), tyxe.likelihoods.Categorical(5)
    with pytest.raises(ValueError, match=r"take 37.3 GiB, and the limit is 8 GiB: use \"kron\""):
        tyxe.LaplaceBNN(net, PRIOR, likelihood, structure="full")
    bnn = tyxe.LaplaceBNN(nn.Linear(100_000, 2), PRIOR, tyxe.likelihoods.Categorical(2))
    with pytest.raises(ValueError, match="with a side of 100,001, would take 37"):
        bnn.fit_curvature([(torch.zeros(2, 100_000), torch.zeros(2).long())])


def test_gradients_too_large_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr("tyxe.check.MEMORY_LIMIT", 1_000)
    net = nn.Sequential(nn.Embedding(100, 3), nn.Flatten(), nn.Linear(6, 2))
    bnn = tyxe.LaplaceBNN(net, PRIOR, tyxe.likelihoods.Categorical(8))
    batch = torch.randint(100, (8, 2)), torch.arange(8) % 2
    with pytest.raises(ValueError, match=r"gradients of 8 points in net.0.weight .*smaller batch"):
        bnn.fit_curvature([batch])


def test_a_batch_that_is_refused_leaves_others_as_they_were():
    x, y = torch.randn(40, 8), torch.arange(40) % 3
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
    bnn = tyxe.LaplaceBNN(net, prior, tyxe.likelihoods.Categorical(40))
    bnn.fit_curvature([(x, y)])
    before = bnn.functional_variance(x[:5])
    with pytest.raises(ValueError, match="points"):
        bnn.functional_variance(x[0])  # without the dimension of points
    torch.testing.assert_close(bnn.functional_variance(x[:5]), before)
