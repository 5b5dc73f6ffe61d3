"""A mask drops data points; scales weigh sites, in every spelling of their names."""

import functools
import itertools
from collections import OrderedDict

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
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
from tests.oracles.nets import NetOf, bnn_of
from tyxe.bnn.elbo import elbo_terms
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.poutine import flipout, local_reparameterization, selective_mask, selective_scale

pytestmark = pytest.mark.filterwarnings("ignore:the weighted KL:tyxe.TyxeWarning")
close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)

STEPS = [(name, mask, {}) for name in LIKELIHOODS for mask in MASKS]
ESTIMATORS = itertools.product((1, 3), (True, False))
OPTIONS = [{"num_particles": n, "closed_form_kl": c, "beta": 0.3} for n, c in ESTIMATORS]
STEPS += [("HomoskedasticGaussian", "some", options) for options in OPTIONS]


@pytest.mark.parametrize(("name", "mask", "options"), STEPS)
def test_masking_is_dropping_rows_in_training(name, mask, options):
    # dataset_size counts labelled points: the same number, masked or dropped.
    bnn, x, y = make(name, dataset_size=12)
    mask = MASKS[mask]
    expected = fitted(bnn, x[mask], y[mask], **options)
    with masked(mask):
        close(fitted(bnn, x, y, **options), expected)


@pytest.mark.parametrize(
    ("reduction", "aggregate", "mask"),
    [
        *((r, a, MASKS["some"]) for r in ("sum", "mean", "none") for a in (True, False)),
        ("mean", True, MASKS["one"]),
        ("mean", True, MASKS["all"]),
    ],
)
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_masking_is_dropping_rows_in_evaluation(name, reduction, aggregate, mask):
    bnn, x, y = make(name, dataset_size=12)
    options = {"num_predictions": 3, "reduction": reduction, "aggregate": aggregate}
    expected = seeded(bnn.evaluate, x[mask], y[mask], **options)
    with masked(mask):
        close(seeded(bnn.evaluate, x, y, **options), expected)


@given(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
def test_any_mask_is_dropping_rows(flags):
    mask = torch.tensor(flags)
    bnn, x, y = make("Categorical", dataset_size=20)
    values = {name: value.detach() for name, value in bnn.guide().items()}
    conditioned = poutine.condition(bnn.model, data=values)
    with masked(mask):
        trace = poutine.trace(conditioned).get_trace(x, y)
    data = trace.log_prob_sum(lambda name, site: name == EXPOSE[0])
    each = bnn.likelihood.log_likelihood(bnn._run_net(values, x), y, "none")
    count = int(mask.sum())
    expected = 20 / count * each[mask].sum() if count else torch.zeros(()).double()
    close(torch.as_tensor(data).double(), expected)


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_masks_and_reparameterisation_nest_either_way(handler):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    mask = MASKS["some"]
    with handler(), masked(mask):
        first = fitted(bnn, x, y)
    with masked(mask), handler():
        second = fitted(bnn, x, y)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "unlabelled"),
    [
        ("HomoskedasticGaussian", float("nan")),
        ("HomoskedasticGaussian, inferred", float("inf")),
        ("HeteroskedasticGaussian", float("nan")),
        ("Categorical", -1),
        ("Categorical", -100),
        ("Bernoulli", float("nan")),
        ("Poisson", -1),
    ],
)
def test_labels_that_do_not_count_are_not_looked_at(name, unlabelled):
    bnn, x, y = make(name, dataset_size=12)
    mask = MASKS["some"]
    expected = fitted(bnn, x[mask], y[mask])
    scores = seeded(bnn.evaluate, x[mask], y[mask], num_predictions=2)
    marked = y.clone()
    marked[~mask] = unlabelled
    with masked(mask):
        close(fitted(bnn, x, marked), expected)
        close(seeded(bnn.evaluate, x, marked, num_predictions=2), scores)


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
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=4)
    mask = torch.tensor([True, False, False, True, True, True])

    class Masks:
        def __iter__(self):
            for rows in (slice(0, 3), slice(3, 6)):
                with masked(mask[rows]):
                    yield x[rows], y[rows]

    history = bnn.fit(Masks(), torch.optim.SGD(bnn.parameters(), lr=0.0), 1)
    assert history.kl[0] == pytest.approx(sum(kl_by_site(bnn).values()).item(), rel=1e-10)


BAD = [
    (selective_mask, {"mask": torch.ones(3)}, TypeError, r"pass mask.bool\(\)"),
    (selective_mask, {"mask": [True, False]}, TypeError, "mask is list"),
    (selective_mask, {"mask": MASKS["all"], "expose": EXPOSE[0]}, TypeError, "pass a list"),
    (selective_scale, {"scale": 0.0}, ValueError, "scale is 0.0; expected a number above 0"),
    (selective_scale, {"scale": torch.ones(2)}, TypeError, "a Tensor; expected a number above 0"),
    (selective_scale, {"scale": 1.0, "expose": "net.weight"}, TypeError, "pass a list"),
]


@pytest.mark.parametrize(("handler", "options", "error", "message"), BAD)
def test_bad_masks_and_scales_are_refused(handler, options, error, message):
    with pytest.raises(error, match=message):
        handler(**{"expose": EXPOSE, **options})


@pytest.mark.parametrize("method", ["evaluate", "model"])
def test_a_mask_of_another_length_is_refused(method):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    mask = masked(torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="the mask has 4 entries"), mask:
        getattr(bnn, method)(x, y)
    assert not am_i_wrapped()


def test_two_masks_are_their_intersection_and_of_a_plain_program_refused():
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    one, other = MASKS["some"], torch.arange(ROWS) > 1
    expected = fitted(bnn, x[one & other], y[one & other])
    with masked(one), masked(other):
        close(fitted(bnn, x, y), expected)

    def model():
        with pyro.plate("data", ROWS, subsample=torch.arange(ROWS)):
            pyro.sample("likelihood.data", dist.Normal(0.0, 1.0), obs=torch.zeros(ROWS))

    with pytest.raises(RuntimeError, match="combine masks with &"), masked(one), masked(other):
        model()


@pytest.mark.parametrize(
    ("handler", "name"),
    [
        (selective_mask(mask=MASKS["all"], expose=["likelihood.dta"]), "dta"),
        (selective_scale(scale=2.0, expose=["net.wieght"]), "wieght"),
    ],
)
def test_an_exposed_name_that_is_never_met_is_warned_of(handler, name):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    with pytest.warns(tyxe.TyxeWarning, match=name):
        handler(elbo_terms)(bnn.model, bnn.guide, x, y)


def test_a_mask_works_in_any_pyro_program():
    mask = torch.tensor([True, False, True])
    targets = torch.tensor([1.0, float("nan"), 3.0])

    def model():
        with pyro.plate("data", 2, subsample=torch.arange(3)):
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=targets)

    with selective_mask(mask=mask, expose=["y"]):
        trace = poutine.trace(model).get_trace()
    expected = td.Normal(0.0, 1.0).log_prob(targets[mask]).sum()
    torch.testing.assert_close(trace.log_prob_sum(), expected)


# --- scaling -------------------------------------------------------------------------


@pytest.mark.parametrize("closed_form_kl", [True, False])
@pytest.mark.parametrize("spelled", [["net.weight"], ["weight"]])
def test_scaling_a_site_scales_its_kl(spelled, closed_form_kl):
    bnn = bnn_of(nn.Linear(3, 2))
    x, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()

    options = {"closed_form_kl": closed_form_kl}
    plain = seeded(elbo_terms, bnn.model, bnn.guide, x, y, **options)
    with selective_scale(scale=0.25, expose=spelled):
        scaled = seeded(elbo_terms, bnn.model, bnn.guide, x, y, **options)
    torch.manual_seed(2)
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
    plain = seeded(elbo_terms, bnn.model, bnn.guide, x, y)
    with selective_scale(scale=3.0, expose=EXPOSE):
        scaled = seeded(elbo_terms, bnn.model, bnn.guide, x, y)
    torch.testing.assert_close(scaled.data, 3 * plain.data, rtol=1e-12, atol=0)
    torch.testing.assert_close(scaled.kl, plain.kl, rtol=0, atol=0)


def test_scales_multiply_and_go_with_masks():
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    mask = MASKS["some"]
    plain = seeded(elbo_terms, bnn.model, bnn.guide, x[mask], y[mask])
    two, five = (selective_scale(scale=s, expose=EXPOSE) for s in (2.0, 5.0))
    with two, masked(mask), five:
        scaled = seeded(elbo_terms, bnn.model, bnn.guide, x, y)
    torch.testing.assert_close(scaled.data, 10 * plain.data, rtol=1e-12, atol=0)


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.tensor([0.25], requires_grad=True)])
def test_a_tensor_scales_as_its_number_does(scale):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    found = []
    for factor in (0.25, scale):
        with selective_scale(scale=factor, expose=["net.weight"]):
            found.append(seeded(elbo_terms, bnn.model, bnn.guide, x, y))
    torch.testing.assert_close(found[1].kl, found[0].kl, rtol=0, atol=0)


@pytest.mark.parametrize(
    "make_handler",
    [lambda: masked(MASKS["some"]), lambda: selective_scale(scale=2.0, expose=EXPOSE)],
    ids=["mask", "scale"],
)
def test_they_are_decorators_and_leave_no_trace(make_handler):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    with make_handler():
        expected = seeded(elbo_terms, bnn.model, bnn.guide, x, y).data
    assert seeded(make_handler()(elbo_terms), bnn.model, bnn.guide, x, y).data == expected
    with pytest.raises(ZeroDivisionError), make_handler():
        raise ZeroDivisionError
    assert not am_i_wrapped()


# --- names ---------------------------------------------------------------------------


def named(name, net=None):
    return mean_field(
        nn.Linear(3, 2) if net is None else net, HomoskedasticGaussian(4, scale=0.5), name=name
    ).double()


def kl_with(bnn, expose):
    x, y = torch.ones(4, 3).double(), torch.ones(4, 2).double()
    with selective_scale(scale=0.25, expose=expose):
        return elbo_terms(bnn.model, bnn.guide, x, y).kl


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
    with masked(mask):
        masked_terms = seeded(elbo_terms, bnn.model, bnn.guide, x, y)
    dropped = seeded(elbo_terms, bnn.model, bnn.guide, x[mask], y[mask])
    torch.testing.assert_close(masked_terms.data, dropped.data)
    assert masked_terms.points == 2


def inner():
    """Two layers of one name, one of them in a part that is called `net`."""
    part = nn.Sequential(OrderedDict(head=nn.Linear(3, 2)))
    return NetOf(lambda net, x: net.head(net.net(x)), head=nn.Linear(2, 2), net=part)


@pytest.mark.parametrize(
    ("spelled", "own"), [("head.weight", "head.weight"), ("net.net.head.weight", "net.head.weight")]
)
@pytest.mark.parametrize("name", ["", "a"])
def test_a_part_called_net_is_no_prefix(name, spelled, own):
    bnn = named(name, inner())
    kls = kl_by_site(bnn)
    expected = sum(kls.values()) - 0.75 * kls[own]
    torch.testing.assert_close(kl_with(bnn, [spelled]), expected)
