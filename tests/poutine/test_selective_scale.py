"""Scales weigh sites, in every spelling of their names."""

import pyro.poutine as poutine
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from pyro.poutine.runtime import am_i_wrapped

from tests.oracles.bnns import mean_field
from tests.oracles.masks import EXPOSE, MASKS, make, masked
from tests.oracles.nets import bnn_of
from tyxe.bnn.elbo import elbo_terms
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.poutine import selective_mask, selective_scale

pytestmark = pytest.mark.filterwarnings("ignore:the weighted KL:tyxe.TyxeWarning")


# --- scaling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed_form_kl", [True, False])
@pytest.mark.parametrize("spelled", [["net.weight"], ["weight"]])
def test_scaling_a_site_scales_its_kl(spelled, closed_form_kl):
    bnn = bnn_of(nn.Linear(3, 2))
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()

    def terms(handler=None):
        torch.manual_seed(0)
        program = elbo_terms if handler is None else handler(elbo_terms)
        return program(bnn.model, bnn.guide, x, y, closed_form_kl=closed_form_kl)

    plain, scaled = terms(), terms(selective_scale(scale=0.25, expose=spelled))
    torch.manual_seed(0)
    q = poutine.trace(bnn.guide).get_trace()
    p = poutine.trace(poutine.replay(bnn.net_prior, q)).get_trace()
    if closed_form_kl:
        of_weight = td.kl_divergence(q.nodes["net.weight"]["fn"], p.nodes["net.weight"]["fn"])
    else:
        q.compute_log_prob()
        p.compute_log_prob()
        of_weight = q.nodes["net.weight"]["log_prob"] - p.nodes["net.weight"]["log_prob"]
    torch.testing.assert_close(scaled.kl, plain.kl - 0.75 * of_weight, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(scaled.data, plain.data, rtol=0, atol=0)


def test_scaling_the_data_scales_the_data_term():
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    torch.manual_seed(0)
    plain = elbo_terms(bnn.model, bnn.guide, x, y)
    torch.manual_seed(0)
    with selective_scale(scale=3.0, expose=EXPOSE):
        scaled = elbo_terms(bnn.model, bnn.guide, x, y)
    torch.testing.assert_close(scaled.data, 3 * plain.data, rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled.kl, plain.kl, rtol=0, atol=0)


def test_scales_multiply_and_go_with_masks():
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    mask = MASKS["some"]
    torch.manual_seed(0)
    plain = elbo_terms(bnn.model, bnn.guide, x[mask], y[mask])
    torch.manual_seed(0)
    two, five = (selective_scale(scale=s, expose=EXPOSE) for s in (2.0, 5.0))
    with two, masked(mask), five:
        scaled = elbo_terms(bnn.model, bnn.guide, x, y)
    torch.testing.assert_close(scaled.data, 10 * plain.data, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"scale": 0.0}, ValueError, "scale is 0.0; expected a number above 0"),
        ({"scale": torch.ones(2)}, TypeError, "scale is a Tensor; expected a number above 0"),
        ({"scale": 1.0, "expose": "net.weight"}, TypeError, "pass a list"),
    ],
)
def test_bad_scales_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        selective_scale(**{"expose": EXPOSE, **options})


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.tensor([0.25], requires_grad=True)])
def test_a_tensor_scales_as_its_number_does(scale):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    found = []
    for factor in (0.25, scale):
        torch.manual_seed(0)
        with selective_scale(scale=factor, expose=["net.weight"]):
            found.append(elbo_terms(bnn.model, bnn.guide, x, y))
    torch.testing.assert_close(found[1].kl, found[0].kl, rtol=0, atol=0)


@pytest.mark.parametrize(
    "make_handler",
    [lambda: masked(MASKS["some"]), lambda: selective_scale(scale=2.0, expose=EXPOSE)],
    ids=["mask", "scale"],
)
def test_they_are_decorators_and_leave_no_trace(make_handler):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    torch.manual_seed(0)
    with make_handler():
        expected = elbo_terms(bnn.model, bnn.guide, x, y).data
    torch.manual_seed(0)
    assert make_handler()(elbo_terms)(bnn.model, bnn.guide, x, y).data == expected
    with pytest.raises(ZeroDivisionError), make_handler():
        raise ZeroDivisionError
    assert not am_i_wrapped()


# --- names ----------------------------------------------------------------------------------------


def named(name, net=None):
    return mean_field(
        nn.Linear(3, 2) if net is None else net, HomoskedasticGaussian(4, scale=0.5), name=name
    ).double()


def kl_with(bnn, expose):
    x, y = torch.ones(4, 3).double(), torch.ones(4, 2).double()
    with selective_scale(scale=0.25, expose=expose):
        return elbo_terms(bnn.model, bnn.guide, x, y).kl


def kl_by_site(bnn):
    priors = dict(bnn.net_prior.priors())
    prefix = bnn.net_prior.prefix
    posterior = bnn.net_guide.posterior()
    return {name: td.kl_divergence(posterior[prefix + name], priors[name]) for name in priors}


@pytest.mark.parametrize("spelled", ["weight", "net.weight", "a.net.weight"])
def test_sites_of_a_named_bnn_are_scaled_in_every_spelling(spelled):
    bnn = named("a")
    expected = kl_by_site(bnn)
    torch.testing.assert_close(
        kl_with(bnn, [spelled]), 0.25 * expected["weight"] + expected["bias"]
    )


@pytest.mark.parametrize("name", ["", "a"])
def test_masks_of_a_named_bnn(name):
    bnn, mask = named(name), torch.tensor([True, False, True, False])
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    torch.manual_seed(0)
    with selective_mask(mask=mask, expose=EXPOSE):
        masked_terms = elbo_terms(bnn.model, bnn.guide, x, y)
    torch.manual_seed(0)
    dropped = elbo_terms(bnn.model, bnn.guide, x[mask], y[mask])
    torch.testing.assert_close(masked_terms.data, dropped.data)
    assert masked_terms.points == 2


class Inner(nn.Module):
    """Two layers of one name, one of them in a part that is called `net`."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.net = nn.Sequential()
        self.net.add_module("head", nn.Linear(3, 2))

    def forward(self, x):
        return self.head(self.net(x))


@pytest.mark.parametrize(
    ("spelled", "own"), [("head.weight", "head.weight"), ("net.net.head.weight", "net.head.weight")]
)
@pytest.mark.parametrize("name", ["", "a"])
def test_a_part_called_net_is_no_prefix(name, spelled, own):
    bnn = named(name, Inner())
    kls = kl_by_site(bnn)
    expected = sum(kls.values()) - 0.75 * kls[own]
    torch.testing.assert_close(kl_with(bnn, [spelled]), expected)
