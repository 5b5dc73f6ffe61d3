"""A mask drops data points."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.distributions as td
from hypothesis import given
from hypothesis import strategies as st
from pyro.poutine.runtime import am_i_wrapped

import tyxe
from tests.oracles.masks import EXPOSE, LIKELIHOODS, MASKS, ROWS, fitted, make, masked
from tyxe.bnn.elbo import elbo_terms
from tyxe.poutine import flipout, local_reparameterization, selective_mask, selective_scale

pytestmark = pytest.mark.filterwarnings("ignore:the weighted KL:tyxe.TyxeWarning")


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_masking_is_dropping_rows_in_training(name, mask):
    # dataset_size counts labelled points: the same number, masked or dropped.
    bnn, x, y = make(name, dataset_size=12)
    expected = fitted(bnn, x[mask], y[mask])
    with masked(mask):
        actual = fitted(bnn, x, y)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


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
    torch.manual_seed(2)
    expected = bnn.evaluate(x[mask], y[mask], **options)
    torch.manual_seed(2)
    with masked(mask):
        actual = bnn.evaluate(x, y, **options)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


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
    torch.testing.assert_close(torch.as_tensor(data).double(), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_masks_and_reparameterisation_nest_either_way(handler):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    mask = MASKS["some"]
    with handler(), masked(mask):
        first = fitted(bnn, x, y)
    with masked(mask), handler():
        second = fitted(bnn, x, y)
    torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_particles", [1, 3])
@pytest.mark.parametrize("closed_form_kl", [True, False])
def test_masking_is_dropping_rows_whatever_the_estimator(num_particles, closed_form_kl):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    options = {"num_particles": num_particles, "closed_form_kl": closed_form_kl, "beta": 0.3}
    mask = MASKS["some"]
    expected = fitted(bnn, x[mask], y[mask], **options)
    with masked(mask):
        actual = fitted(bnn, x, y, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


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
    torch.manual_seed(2)
    scores = bnn.evaluate(x[mask], y[mask], num_predictions=2)
    marked = y.clone()
    marked[~mask] = unlabelled
    with masked(mask):
        torch.testing.assert_close(fitted(bnn, x, marked), expected, rtol=1e-10, atol=1e-10)
        torch.manual_seed(2)
        torch.testing.assert_close(bnn.evaluate(x, marked, num_predictions=2), scores)


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
    assert history.kl[0] == pytest.approx(sum_kl(bnn).item(), rel=1e-10)


def sum_kl(bnn):
    priors = {f"net.{name}": prior for name, prior in tyxe.util.named_pyro_samples(bnn.net)}
    return sum(td.kl_divergence(q, priors[n]).sum() for n, q in bnn.net_guide.posterior().items())


def test_bad_masks_are_refused():
    with pytest.raises(TypeError, match=r"expected a boolean tensor: pass mask.bool\(\)"):
        masked(torch.ones(3))
    with pytest.raises(TypeError, match="mask is list"):
        masked([True, False])
    with pytest.raises(TypeError, match="pass a list"):
        selective_mask(mask=torch.ones(3, dtype=torch.bool), expose="likelihood.data")


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
        torch.testing.assert_close(fitted(bnn, x, y), expected, rtol=1e-10, atol=1e-10)

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
