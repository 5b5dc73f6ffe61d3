"""Masks drop data points; scales weigh sites."""

import functools

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
from tests.oracles.nets import bnn_of
from tyxe.bnn.elbo import elbo_terms
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Poisson,
)
from tyxe.poutine import flipout, local_reparameterization, selective_mask, selective_scale

pytestmark = pytest.mark.filterwarnings("ignore:the weighted KL:tyxe.TyxeWarning")

EXPOSE = ["likelihood.data"]
ROWS = 6
LIKELIHOODS = {
    "Bernoulli": (lambda n: Bernoulli(n), 1, lambda: torch.ones(ROWS, 1)),
    "Categorical": (lambda n: Categorical(n), 3, lambda: torch.randint(0, 3, (ROWS,))),
    "HomoskedasticGaussian": (
        lambda n: HomoskedasticGaussian(n, scale=0.5),
        2,
        lambda: torch.randn(ROWS, 2),
    ),
    "HomoskedasticGaussian, inferred": (
        lambda n: HomoskedasticGaussian(n, scale=dist.LogNormal(0.0, 1.0)),
        1,
        lambda: torch.randn(ROWS, 1),
    ),
    "HeteroskedasticGaussian": (
        lambda n: HeteroskedasticGaussian(n),
        2,
        lambda: torch.randn(ROWS, 1),
    ),
    "Poisson": (lambda n: Poisson(n), 1, lambda: torch.arange(ROWS)[:, None]),
}


def make(name, dataset_size):
    torch.manual_seed(1)
    build, outputs, targets = LIKELIHOODS[name]
    likelihood = build(dataset_size)
    bnn = tyxe.VariationalBNN(
        nn.Linear(3, outputs).double(),
        tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        likelihood,
        functools.partial(
            tyxe.guides.AutoNormal, init_loc_fn=tyxe.guides.init_to_normal, init_scale=0.3
        ),
        tyxe.guides.AutoNormal if likelihood.latent_priors() else None,
    ).double()
    y = targets()
    return bnn, torch.randn(ROWS, 3).double(), y.double() if y.is_floating_point() else y


def masked(mask):
    return selective_mask(mask=mask, expose=EXPOSE)


def fitted(bnn, x, y, **options):
    """Loss and gradient of one step."""
    torch.manual_seed(2)
    history = bnn.fit([(x, y)], torch.optim.SGD(bnn.parameters(), lr=0.0), 1, **options)
    gradient = torch.cat([p.grad.flatten() for p in bnn.parameters() if p.grad is not None])
    numbers = [history.loss[0], history.log_likelihood[0], history.kl[0]]
    return torch.tensor(numbers, dtype=torch.float64), gradient


# --- masking is dropping --------------------------------------------------------------------------

MASKS = {
    "some": torch.tensor([True, False, True, True, False, False]),
    "one": torch.tensor([False, False, False, False, False, True]),
    "all": torch.ones(ROWS, dtype=torch.bool),
}


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


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
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
    each = bnn.likelihood.log_likelihood(bnn.run_net(values, x), y, "none")
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


# --- errors of the mask ---------------------------------------------------------------------------


def test_bad_masks_are_refused():
    with pytest.raises(TypeError, match="expected a boolean tensor"):
        masked(torch.ones(3))
    with pytest.raises(TypeError, match="mask is list"):
        masked([True, False])
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        masked(torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match="pass a list"):
        selective_mask(mask=torch.ones(3, dtype=torch.bool), expose="likelihood.data")


@pytest.mark.parametrize("method", ["fit", "evaluate", "model"])
def test_a_mask_of_another_length_is_refused(method):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    before = {name: value.detach().clone() for name, value in bnn.named_parameters()}
    calls = {
        "fit": lambda: bnn.fit([(x, y)], torch.optim.Adam, 1),
        "evaluate": lambda: bnn.evaluate(x, y),
        "model": lambda: bnn.model(x, y),
    }
    mask = masked(torch.ones(4, dtype=torch.bool))
    with pytest.raises(ValueError, match="the mask has 4 entries"), mask:
        calls[method]()
    assert not am_i_wrapped()
    for name, value in bnn.named_parameters():
        assert torch.equal(before[name], value)


def test_two_masks_around_one_site_are_refused():
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    mask = MASKS["some"]
    with pytest.raises(RuntimeError, match="combine the masks with &"), masked(mask), masked(mask):
        bnn.model(x, y)


@pytest.mark.parametrize("kind", ["mask", "scale"])
def test_an_exposed_name_that_is_never_met_is_warned_of(kind):
    bnn, x, y = make("HomoskedasticGaussian", dataset_size=12)
    handler = (
        selective_mask(mask=MASKS["all"], expose=["likelihood.dta"])
        if kind == "mask"
        else selective_scale(scale=2.0, expose=["net.wieght"])
    )
    scored = handler(elbo_terms)
    with pytest.warns(tyxe.TyxeWarning, match=r"dta|wieght"):
        scored(bnn.model, bnn.guide, x, y)


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


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_bad_scales_are_refused(scale):
    with pytest.raises(ValueError, match="expected a positive number"):
        selective_scale(scale=scale, expose=EXPOSE)


def test_a_scale_needs_a_list_of_names():
    with pytest.raises(TypeError, match="pass a list"):
        selective_scale(scale=1.0, expose="net.weight")


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
    return tyxe.VariationalBNN(
        nn.Linear(3, 2) if net is None else net,
        tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        HomoskedasticGaussian(4, scale=0.5),
        tyxe.guides.AutoNormal,
        name=name,
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
