"""A mask drops data points; scales weigh sites, in every spelling of their names."""

import functools
from collections import OrderedDict

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from pyro.poutine.runtime import am_i_wrapped

import tyxe
from tests.oracles.bnns import mean_field
from tests.oracles.masks import (
    EXPOSE,
    LIKELIHOODS,
    MASKS,
    ROWS,
    fitted,
    kl_by_site,
    make,
    masked,
    seeded,
)
from tests.oracles.nets import NetOf
from tyxe.bnn.elbo import elbo_terms
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.poutine import flipout, local_reparameterization, selective_mask, selective_scale

pytestmark = pytest.mark.filterwarnings("ignore:the weighted KL:tyxe.TyxeWarning")
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)
exactly = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
gaussian = functools.partial(make, "HomoskedasticGaussian", dataset_size=12)
SOME = MASKS["some"]

NAN = float("nan")
# Labels that are none, at which nothing may look where they do not count.
UNLABELLED = {
    "Bernoulli": NAN,
    "Categorical": -1,
    "HomoskedasticGaussian": NAN,
    "HomoskedasticGaussian, inferred": float("inf"),
    "HeteroskedasticGaussian": NAN,
    "Poisson": -1,
}
OPTIONS = [
    {"num_particles": n, "closed_form_kl": c, "beta": 0.3} for n in (1, 3) for c in (True, False)
]
STEPS = [
    *((name, mask, {}) for name in LIKELIHOODS for mask in MASKS),
    *(("HomoskedasticGaussian", "some", options) for options in OPTIONS),
]


@pytest.mark.parametrize(("name", "mask", "options"), STEPS)
def test_masking_is_dropping_rows_in_training(name, mask, options):
    # dataset_size counts labelled points: the same number, masked or dropped.
    bnn, x, y = make(name, dataset_size=12)
    mask = MASKS[mask]
    expected = fitted(bnn, x[mask], y[mask], **options)
    y[~mask] = UNLABELLED[name]
    with masked(mask):
        close(fitted(bnn, x, y, **options), expected)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_masking_is_dropping_rows_in_evaluation(name, reduction, mask):
    bnn, x, y = make(name, dataset_size=12)
    mask = MASKS[mask]
    for aggregate in (True, False):
        options = {"num_predictions": 3, "reduction": reduction, "aggregate": aggregate}
        expected = seeded(bnn.evaluate, x[mask], y[mask], **options)
        y[~mask] = UNLABELLED[name]
        with masked(mask):
            close(seeded(bnn.evaluate, x, y, **options), expected)


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_masks_and_reparameterisation_nest_either_way(handler):
    bnn, x, y = gaussian()
    found = []
    for outer, inner in ((handler(), masked(SOME)), (masked(SOME), handler())):
        with outer, inner:
            found.append(fitted(bnn, x, y))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_an_empty_mask_leaves_no_data_term(name):
    bnn, x, y = make(name, dataset_size=12)
    with masked(torch.zeros(ROWS, dtype=torch.bool)):
        terms = elbo_terms(bnn.model, bnn.guide, x, y)
        (terms.kl - terms.data).backward()
        error, log_likelihood = bnn.evaluate(x, y, num_predictions=2)
        with pytest.warns(tyxe.TyxeWarning, match="no point of an epoch counts"):
            bnn.fit([(x, y)], torch.optim.SGD(bnn.parameters(), lr=0.0), 1)
    assert terms.data == 0
    assert terms.points == 0
    assert terms.kl > 0
    for parameter in bnn.parameters():
        assert parameter.grad is None or bool(parameter.grad.isfinite().all())
    assert error == log_likelihood == 0


def test_batches_are_weighted_by_the_points_that_count():
    # One batch of 1 counted point and one of 3: by hand, each weighs as many points.
    bnn, x, y = gaussian(dataset_size=4)
    mask = torch.tensor([True, False, False, True, True, True])

    class Masks:
        def __iter__(self):
            for rows in (slice(0, 3), slice(3, 6)):
                with masked(mask[rows]):
                    yield x[rows], y[rows]

    history = bnn.fit(Masks(), torch.optim.SGD(bnn.parameters(), lr=0.0), 1)
    assert history.kl[0] == pytest.approx(sum(kl_by_site(bnn).values()).item(), rel=1e-10)


BAD = [
    (selective_mask, {"mask": torch.ones(3)}, ValueError, r"pass mask.bool\(\)"),
    (selective_mask, {"mask": [True, False]}, TypeError, "mask is a list"),
    (selective_mask, {"mask": MASKS["all"], "expose": EXPOSE[0]}, TypeError, "expected a list"),
    (selective_scale, {"scale": 0.0}, ValueError, "scale is 0.0; expected a number above 0"),
    (selective_scale, {"scale": torch.ones(2)}, TypeError, "a Tensor; expected a number above 0"),
    (selective_scale, {"scale": 1.0, "expose": "net.weight"}, TypeError, "expected a list"),
]


@pytest.mark.parametrize(("handler", "options", "error", "message"), BAD)
def test_bad_masks_and_scales_are_refused(handler, options, error, message):
    with pytest.raises(error, match=message):
        handler(**{"expose": EXPOSE, **options})


@pytest.mark.parametrize("method", ["evaluate", "model"])
def test_a_mask_of_another_length_is_refused(method):
    bnn, x, y = gaussian()
    mask = masked(torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask has shape \(4,\); expected \(6, "), mask:
        getattr(bnn, method)(x, y)
    assert not am_i_wrapped()


def plain_program(targets):
    with pyro.plate("data", len(targets), subsample=torch.arange(len(targets))):
        pyro.sample("likelihood.data", dist.Normal(0.0, 1.0), obs=targets)


def test_two_masks_are_their_intersection_and_of_a_plain_program_refused():
    bnn, x, y = gaussian()
    other = torch.arange(ROWS) > 1
    expected = fitted(bnn, x[SOME & other], y[SOME & other])
    with masked(SOME), masked(other):
        close(fitted(bnn, x, y), expected)
    with pytest.raises(RuntimeError, match="combine masks with &"), masked(SOME), masked(other):
        plain_program(torch.zeros(ROWS))


@pytest.mark.parametrize(
    "handler",
    [
        selective_mask(mask=MASKS["all"], expose=["no.such"]),
        selective_scale(scale=2.0, expose=["no.such"]),
    ],
)
def test_an_exposed_name_that_is_never_met_is_warned_of(handler):
    bnn, x, y = gaussian()
    with pytest.warns(tyxe.TyxeWarning, match=r"no\.such"):
        handler(elbo_terms)(bnn.model, bnn.guide, x, y)


def test_a_mask_works_in_any_pyro_program():
    targets = torch.tensor([1.0, float("nan"), 3.0])
    mask = targets.isfinite()
    with masked(mask):
        trace = poutine.trace(plain_program).get_trace(targets)
    scale = 3 / 2  # the plate's size, over the points that count
    expected = scale * td.Normal(0.0, 1.0).log_prob(targets[mask]).sum()
    torch.testing.assert_close(trace.log_prob_sum(), expected)


def terms_of(bnn, x, y, **options):
    return seeded(elbo_terms, bnn.model, bnn.guide, x, y, **options)


@pytest.mark.parametrize("closed_form_kl", [True, False])
def test_scaling_a_site_scales_its_kl(closed_form_kl):
    bnn, x, y = gaussian()
    plain = terms_of(bnn, x, y, closed_form_kl=closed_form_kl)
    with selective_scale(scale=0.25, expose=["net.weight"]):
        scaled = terms_of(bnn, x, y, closed_form_kl=closed_form_kl)
    of_weight = kl_by_site(bnn)["weight"]
    if not closed_form_kl:
        torch.manual_seed(2)
        q = poutine.trace(bnn.guide).get_trace()
        p = poutine.trace(poutine.replay(bnn.net_prior, q)).get_trace()
        q.compute_log_prob()
        p.compute_log_prob()
        of_weight = q.nodes["net.weight"]["log_prob"] - p.nodes["net.weight"]["log_prob"]
    close(scaled.kl, plain.kl - 0.75 * of_weight)
    exactly(scaled.data, plain.data)


def test_scales_multiply_and_go_with_masks():
    bnn, x, y = gaussian()
    plain = terms_of(bnn, x[SOME], y[SOME])
    two, five = (selective_scale(scale=s, expose=EXPOSE) for s in (2.0, 5.0))
    with two, masked(SOME), five:
        scaled = terms_of(bnn, x, y)
    torch.testing.assert_close(scaled.data, 10 * plain.data, rtol=1e-12, atol=0)
    exactly(scaled.kl, plain.kl)


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.tensor([0.25], requires_grad=True)])
def test_a_tensor_scales_as_its_number_does(scale):
    bnn, x, y = gaussian()
    found = []
    for factor in (0.25, scale):
        with selective_scale(scale=factor, expose=["net.weight"]):
            found.append(terms_of(bnn, x, y).kl)
    exactly(*found)


@pytest.mark.parametrize(
    "make_handler",
    [lambda: masked(SOME), lambda: selective_scale(scale=2.0, expose=EXPOSE)],
    ids=["mask", "scale"],
)
def test_they_are_decorators_and_leave_no_trace(make_handler):
    bnn, x, y = gaussian()
    with make_handler():
        expected = terms_of(bnn, x, y).data
    assert make_handler()(terms_of)(bnn, x, y).data == expected
    with pytest.raises(ZeroDivisionError), make_handler():
        raise ZeroDivisionError
    assert not am_i_wrapped()


def inner():
    """Two layers of one name, one of them in a part that is called `net`."""
    part = nn.Sequential(OrderedDict(head=nn.Linear(3, 2)))
    return NetOf(lambda net, x: net.head(net.net(x)), head=nn.Linear(2, 2), net=part)


@pytest.mark.parametrize(
    ("name", "net", "spelled", "own"),
    [
        *(("a", lambda: nn.Linear(3, 2), f"{p}weight", "weight") for p in ("", "net.", "a.net.")),
        *((name, inner, "head.weight", "head.weight") for name in ("", "a")),
        *((name, inner, "net.net.head.weight", "net.head.weight") for name in ("", "a")),
    ],
)
def test_sites_are_scaled_and_masked_in_every_spelling(name, net, spelled, own):
    bnn = mean_field(net(), HomoskedasticGaussian(6, scale=0.5), name=name).double()
    x, y = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    with selective_scale(scale=0.25, expose=[spelled]), masked(SOME):
        found = terms_of(bnn, x, y)
    kls = kl_by_site(bnn)
    torch.testing.assert_close(found.kl, sum(kls.values()) - 0.75 * kls[own])
    torch.testing.assert_close(found.data, terms_of(bnn, x[SOME], y[SOME]).data)
    assert found.points == 3
