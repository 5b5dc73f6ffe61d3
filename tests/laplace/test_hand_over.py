"""What a posterior says of the curvature that it contains, through priors, files and later fits."""

import warnings

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL
from tyxe.priors import DictPrior

X = torch.linspace(-1, 1, 40)[:, None]
Y = X.sin() + 0.1 * torch.cos(7 * X)


def made(structure: str, **options) -> tyxe.LaplaceBNN:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1))
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(40, scale=0.1)
    return tyxe.LaplaceBNN(net, NORMAL, likelihood, structure=structure, **options)


def fitted(structure: str = "diag") -> tyxe.LaplaceBNN:
    bnn = made(structure)
    bnn.fit_curvature([(X, Y)])
    return bnn


def precision_of(bnn: tyxe.LaplaceBNN) -> torch.Tensor:
    return bnn.state.precision().diagonal()


def posterior_of(bnn: tyxe.LaplaceBNN) -> DictPrior:
    return DictPrior(bnn.net_guide.get_detached_distributions())


STRUCTURES = ("diag", "kron", "full", "lowrank")


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("how", ["parent", "guide"])
def test_a_state_that_is_loaded_in_another_way_is_used(structure: str, how: str):
    bnn = fitted(structure)
    other = fitted(structure)
    other.net_guide.state = None
    if how == "parent":
        nn.ModuleDict({"a": other}).load_state_dict(nn.ModuleDict({"a": bnn}).state_dict())
    else:
        other.net_guide.load_state_dict(bnn.net_guide.state_dict())
    torch.testing.assert_close(precision_of(other), precision_of(bnn))
    fresh = fitted(structure)
    other.likelihood.dataset_size = fresh.likelihood.dataset_size = 80
    fresh.fit_curvature([(X, Y)])
    other.fit_curvature([(X, Y)])
    for one in (fresh, other):
        one.update_prior(NORMAL)
    torch.testing.assert_close(precision_of(other), precision_of(fresh))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_a_prior_has_absorbed_is_saved_with_it(structure: str):
    bnn = fitted(structure)
    before = bnn.state_dict()
    expected = precision_of(bnn)
    posterior = posterior_of(bnn)
    bnn.update_prior(posterior)
    after = bnn.state_dict()
    torch.testing.assert_close(precision_of(bnn), expected)
    if structure == "diag":  # of the same kind as the prior before it
        bnn.load_state_dict(before)
        priors = dict(bnn.net_prior.priors())
        bnn.update_prior(DictPrior(priors))
        torch.testing.assert_close(precision_of(bnn), expected)
    resumed = fitted(structure)
    resumed.load_state_dict(before, strict=False)
    resumed.load_state_dict(after)
    torch.testing.assert_close(precision_of(resumed), expected)
    absorbed = {
        getattr(prior, "absorbed", None) or prior.joint.absorbed
        for _, prior in resumed.net_prior.priors()
    }
    assert None not in absorbed
    assert len(absorbed) == 1


@pytest.mark.parametrize("other", ["data", "temperature"])
def test_another_posterior_of_the_same_sums_is_not_absorbed(other):
    bnn = fitted()
    posterior, old = posterior_of(bnn), precision_of(bnn)
    if other == "temperature":
        bnn.temperature = 0.5
    else:  # the same batch stands for a hundred times as many points
        bnn.likelihood.dataset_size = 4_000
        bnn.fit_curvature([(X, Y)])
    new = precision_of(bnn)
    bnn.update_prior(posterior)
    torch.testing.assert_close(precision_of(bnn), new + old - 1)


def test_the_evidence_has_its_gradient_after_a_draw():
    state = fitted().state
    scale = torch.tensor(1.0, requires_grad=True)
    gradients = []
    for draw_first in (False, True):
        prior = tyxe.laplace.precision.with_precision(state.prior, scale, "net.")
        found = state.replace(prior=prior)
        if draw_first:
            found.sample()
        gradients.append(torch.autograd.grad(found.evidence(), scale)[0])
    torch.testing.assert_close(*gradients)


def test_values_that_are_loaded_alone_are_the_mode():
    bnn = fitted("kron")
    values = {n: v + 0.5 for n, v in bnn.state_dict().items() if n.startswith("net_guide.locs")}
    before = bnn.log_marginal_likelihood()
    bnn.load_state_dict(values, strict=False)
    flat = bnn.state.blocks.flatten(bnn._mean_values())
    torch.testing.assert_close(bnn.state.loc, flat)
    assert bnn.log_marginal_likelihood() != before


def test_data_that_count_twice_are_told():
    bnn = fitted()
    found = bnn.net_guide.get_detached_distributions()
    by_hand = {n: dist.Normal(q.mean, q.stddev).to_event() for n, q in found.items()}
    with pytest.warns(tyxe.TyxeWarning, match="get_detached_distributions"):
        bnn.update_prior(DictPrior(by_hand))
    bnn = fitted()
    bnn.update_prior(posterior_of(bnn))
    with pytest.warns(tyxe.TyxeWarning, match="already"):
        bnn.fit_curvature([(X, Y)])


def test_data_leave_with_the_prior_that_held_them():
    bnn = fitted()
    expected = precision_of(bnn)
    bnn.update_prior(posterior_of(bnn))
    bnn.update_prior(NORMAL)
    with pytest.raises(RuntimeError, match="no curvature yet"):
        bnn.predict(X)
    bnn.fit_curvature([(X, Y)])
    torch.testing.assert_close(precision_of(bnn), expected)


@pytest.mark.parametrize("ask", ["fit_gp", "refine"])
def test_inference_in_function_space_needs_data_outside_of_the_prior(ask: str):
    bnn = fitted()
    bnn.fit_gp([(X, Y)])
    bnn.update_prior(posterior_of(bnn))
    asked = {
        "fit_gp": lambda: bnn.predict(X, predictive="gp", num_predictions=10),
        "refine": lambda: bnn.refine([(X, Y)]),
    }
    with pytest.raises(ValueError, match="before update_prior"):
        asked[ask]()


@pytest.mark.parametrize("structure", STRUCTURES[:3])
def test_half_precision_goes_on(structure: str):
    bnn = fitted(structure)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wide = bnn.predict(X, num_predictions=10)[1]
        bnn.double().bfloat16()
        narrow = bnn.predict(X.bfloat16(), num_predictions=10)[1]
        torch.testing.assert_close(narrow.float(), wide, rtol=0.1, atol=0.01)
        bnn.update_prior(posterior_of(bnn))
        bnn.fit_curvature([(2 * X.bfloat16(), Y.bfloat16())])
    assert precision_of(bnn).dtype == torch.float32
    assert precision_of(bnn).isfinite().all()


def test_a_fit_that_makes_no_step_keeps_the_posterior():
    bnn = fitted()
    before = precision_of(bnn)
    adam = torch.optim.Adam
    for loader, options in (
        ([], {}),
        ([(X, Y[:, 0])], {}),
        ([(X, Y)], {"lr_multipliers": {"unknown": 2.0}}),
        ([(X * torch.nan, Y)], {}),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            bnn.fit(loader, adam, 1, **options)
        torch.testing.assert_close(precision_of(bnn), before)


def test_a_process_follows_the_data_set_size():
    bnn = fitted()
    bnn.fit_gp([(X, Y)])
    sd = bnn.predict(X, predictive="gp", num_predictions=10)[1]
    bnn.likelihood.dataset_size = 4_000
    changed = bnn.predict(X, predictive="gp", num_predictions=10)[1]
    assert (changed < sd - 1e-4).all()


def test_a_state_dict_of_another_name_names_both():
    bnn, other = fitted(), made("diag", name="other")
    with pytest.raises(RuntimeError, match=r"'net\.0\.bias'.*'other\.net\.0\.bias'"):
        other.load_state_dict(bnn.state_dict())
    assert other.net_guide.state is None
