"""A joint likelihood is the product of its parts, under every kind of inference."""

import contextlib
import copy
import functools
import math
import pickle

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, mean_field
from tests.oracles.nets import NetOf
from tyxe.bnn.elbo import elbo_terms
from tyxe.curvature import collect_curvature
from tyxe.likelihoods import Categorical, HomoskedasticGaussian, Joint, Poisson
from tyxe.poutine import selective_mask
from tyxe.priors import IIDPrior

# A joint likelihood of some of the outputs leaves the heads of the others without data.
pytestmark = pytest.mark.filterwarnings("ignore:the net's outputs do not depend on")

X = torch.linspace(-2, 2, 12).view(6, 2).double()
KINDS = torch.tensor([0, 1, 2, 0, 1, 2])
SIZES = torch.linspace(-1, 1, 12).view(6, 2).double()
COUNTS = torch.arange(6)
TARGETS = {"kind": KINDS, "size": SIZES, "count": COUNTS}
LOADER = [(X, TARGETS)]


class Net(nn.Module):
    """Three outputs, as a mapping, a tuple, or one of them."""

    def __init__(self, returns="mapping", seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(2, 4), nn.Tanh()).double()
        self.kind, self.size, self.count = (nn.Linear(4, n).double() for n in (3, 2, 1))
        self.returns = returns

    def forward(self, x):
        hidden = self.body(x)
        found = {"kind": self.kind(hidden), "size": self.size(hidden)}
        found["count"] = self.count(hidden)[:, 0]
        if self.returns == "mapping":
            return found
        return tuple(found.values()) if self.returns == "tuple" else found[self.returns]


PARTS = {
    "kind": Categorical,
    "size": functools.partial(HomoskedasticGaussian, scale=0.5),
    "count": Poisson,
}


def part(name, size=6):
    return PARTS[name](size)


def joint(size=6):
    return Joint(**{name: part(name, size) for name in TARGETS})


def variational(likelihood=None, returns="mapping", **options):
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=0.1)
    return tyxe.VariationalBNN(Net(returns), NORMAL, likelihood or joint(), guide, **options)


@pytest.mark.parametrize("returns", ["mapping", "tuple"])
def test_the_elbo_is_that_of_the_product(returns):
    bnn = variational(returns=returns)
    draw = {name: value.detach() for name, value in bnn.guide().items()}
    given = TARGETS if returns == "mapping" else tuple(TARGETS.values())
    ((inputs, targets),) = bnn._to_fit([(X, given)])
    conditioned = functools.partial(bnn.likelihood, bnn._run_net(draw, inputs), targets)
    terms = elbo_terms(conditioned, lambda: None)
    expected = 0.0
    for name, target in TARGETS.items():
        one = variational(part(name), name)
        expected += one.likelihood.log_likelihood(one._run_net(draw, X), target, "sum")
    torch.testing.assert_close(terms.data, expected)
    assert terms.points == 6


def seeded(call, *arguments, **options):
    torch.manual_seed(1)
    return call(*arguments, num_predictions=5, **options)


def test_predictions_and_scores_are_those_of_each_part_at_equal_draws():
    bnn = variational()
    found = seeded(bnn.predict, X)
    errors, log_likelihoods = scores = seeded(bnn.evaluate, X, TARGETS)
    torch.testing.assert_close(scores, seeded(bnn.evaluate, LOADER))
    assert set(errors) == set(TARGETS)
    for name, target in TARGETS.items():
        one = variational(part(name), name)
        torch.testing.assert_close(found[name], seeded(one.predict, X))
        expected = seeded(one.evaluate, X, target)
        torch.testing.assert_close((errors[name], log_likelihoods[name]), expected)
    outputs = seeded(bnn.predict, X, aggregate=False)
    each = sum(
        torch.stack([part(n).log_likelihood(f, TARGETS[n]) for f in outputs[n]]) for n in TARGETS
    )
    mixture = each.logsumexp(0) - torch.tensor(5.0).log()
    torch.testing.assert_close(log_likelihoods["joint"], mixture.sum())


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("aggregate", [True, False])
def test_reductions(reduction, aggregate):
    errors, logs = variational().evaluate(
        X, TARGETS, num_predictions=3, reduction=reduction, aggregate=aggregate
    )
    shape = (() if aggregate else (3,)) + ((6,) if reduction == "none" else ())
    assert {found.shape for found in (*errors.values(), *logs.values())} == {torch.Size(shape)}


def test_the_curvature_is_the_sum_of_those_of_the_parts():
    shared = IIDPrior(dist.Normal(0.0, 1.0), expose_modules=["body.0"])

    def curvature(net, likelihood, targets):
        bnn = tyxe.LaplaceBNN(net, shared, likelihood)
        batches = [*bnn._to_fit([(X, targets)])]
        found = collect_curvature(bnn._linearize, likelihood, batches, "full")
        return found.operator.to_dense()

    of_parts = [curvature(Net(name), part(name), target) for name, target in TARGETS.items()]
    torch.testing.assert_close(curvature(Net(), joint(), TARGETS), sum(of_parts))


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
def test_every_structure_takes_it(structure):
    bnn = tyxe.LaplaceBNN(Net(), NORMAL, joint(), structure=structure)
    bnn.fit_curvature(LOADER)
    assert bnn.predict(X)["size"][1].shape == (6, 2)
    assert set(bnn.evaluate(X, TARGETS)[1]) == {*TARGETS, "joint"}


def test_linearised_predictions_are_those_of_each_part():
    bnn = variational()
    found = bnn.predict(X, num_predictions=50, predictive="glm", link="probit")
    for name in ("kind", "size"):
        one = variational(part(name), name)
        expected = one.predict(X, num_predictions=50, predictive="glm", link="probit")
        torch.testing.assert_close(found[name], expected)


ADAM = functools.partial(torch.optim.Adam, lr=1e-2)
DROPPED = nn.Sequential(nn.Dropout(0.2), Net())


def of_chains():
    sgld = functools.partial(tyxe.samplers.SGLD, lr=1e-3)
    return tyxe.MCMC_BNN(Net(), NORMAL, joint(), sgld)


def of_members():
    return tyxe.EnsembleBNN(lambda i: mean_field(Net(seed=i), joint()), 2)


@pytest.mark.parametrize(
    ("make", "arguments", "handler"),
    [
        (variational, (ADAM, 3), tyxe.poutine.local_reparameterization),
        (variational, (ADAM, 3), tyxe.poutine.variational_laplace),
        (lambda: tyxe.LaplaceBNN(Net(), NORMAL, joint()), (ADAM, 3), contextlib.nullcontext),
        (lambda: tyxe.SWAG_BNN(Net(), NORMAL, joint(), rank=2), (ADAM, 8), contextlib.nullcontext),
        (lambda: tyxe.DropoutBNN(DROPPED, joint()), (ADAM, 2), contextlib.nullcontext),
        (of_chains, (3,), contextlib.nullcontext),
        (of_members, (ADAM, 2), contextlib.nullcontext),
    ],
)
def test_every_wrapper_takes_it(make, arguments, handler):
    bnn = make()
    with handler():
        bnn.fit(LOADER, *arguments)
    found = bnn.predict(X, num_predictions=3)
    assert found["kind"].shape == (6, 3)
    assert found["size"][0].shape == (6, 2)
    assert found["count"].shape == (6,)
    errors, logs = bnn.evaluate(LOADER, num_predictions=3)
    assert set(errors) == set(TARGETS)
    assert bool(torch.stack([*logs.values()]).isfinite().all())
    samples = bnn.sample_predictive(X, num_samples=4)
    assert samples["kind"].dtype == torch.long
    assert samples["size"].shape == (4, 6, 2)
    outputs = bnn.predict(X, num_predictions=2, aggregate=False)
    assert outputs["kind"].shape[-2:] == (6, 3)


def test_potentials_are_those_of_the_product():
    draws, one = [], PARTS["size"](6)
    kernel = tyxe.samplers.HMC(adapt_step_size=False, adapt_mass_matrix=False, step_size=0.01)
    as_mapping = NetOf(lambda net, x: {"size": net.inner(x)}, inner=Net("size"))
    for net, likelihood, target, site in (
        (Net("size"), one, SIZES, "net.body.0.weight"),
        (as_mapping, Joint(size=one), {"size": SIZES}, "net.inner.body.0.weight"),
    ):
        torch.manual_seed(1)
        bnn = tyxe.MCMC_BNN(net, NORMAL, likelihood, kernel)
        run = bnn.fit([(X, target)], 3, warmup_steps=2, num_chains=1, compile=False)
        draws.append(run.get_samples()[site])
    torch.testing.assert_close(*draws)


def test_labels_that_are_ignored_count_in_the_other_parts():
    bnn = variational(Joint(kind=Categorical(6, ignore_index=-100), size=part("size")))
    kinds = KINDS.clone()
    kinds[2] = -100
    ((_, packed),) = bnn._to_fit([(X, {"kind": kinds, "size": SIZES})])
    outputs = bnn.to_module()(X)
    expected = part("size").log_likelihood(outputs["size"], SIZES)
    expected += part("kind").log_likelihood(outputs["kind"], KINDS) * (kinds >= 0)
    found = bnn.likelihood.log_likelihood(bnn.likelihood.from_net(outputs), packed)
    torch.testing.assert_close(found, expected)


WEIGHTS = torch.tensor([1.0, 2.0, 0.0, 1.0, 0.5, 3.0]).double()
POINTS = torch.tensor([True, True, True, False, True, True])
IGNORED = torch.tensor([-100, 1, 2, 0, -100, 2])
GAPS = SIZES.clone()
GAPS[:2] = math.nan
GAPS[3, 1] = math.nan
HAVE_GAPS = {"kind": IGNORED, "size": GAPS}


def with_gaps():
    return Joint(kind=Categorical(6, ignore_index=-100), size=part("size"))


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("weights", [(), (WEIGHTS,)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_means_of_a_part_are_over_the_points_that_have_its_target(aggregate, weights, is_masked):
    bnn = variational(with_gaps())
    how = {"reduction": "mean", "aggregate": aggregate}
    mask = POINTS if is_masked else torch.ones_like(POINTS)
    with selective_mask(mask=mask, expose=["likelihood.data"]):
        errors, log_likelihoods = seeded(bnn.evaluate, [(X, HAVE_GAPS, *weights)], **how)
        for name, targets in HAVE_GAPS.items():
            one = variational(with_gaps().parts[name], name)
            expected = seeded(one.evaluate, [(X, targets, *weights)], **how)
            torch.testing.assert_close((errors[name], log_likelihoods[name]), expected)


def test_means_of_batches_are_those_of_all_points():
    bnn = variational(with_gaps())
    whole = seeded(bnn.evaluate, X, HAVE_GAPS, reduction="mean")
    pieces = [{name: y[i : i + 2] for name, y in HAVE_GAPS.items()} for i in range(0, 6, 2)]
    batches = [*zip(X.split(2), pieces, strict=True)]
    torch.testing.assert_close(seeded(bnn.evaluate, batches, reduction="mean"), whole)
    table = seeded(tyxe.diagnostics.scores, bnn, batches)
    assert table["error, kind"] == pytest.approx(float(whole[0]["kind"]))
    assert table["log-likelihood, size"] == pytest.approx(float(whole[1]["size"]))


def test_a_part_without_any_target_has_no_mean():
    targets = {"kind": torch.full((6,), -100), "size": SIZES}
    errors, log_likelihoods = variational(with_gaps()).evaluate(X, targets, reduction="mean")
    assert errors["kind"].isnan()
    assert log_likelihoods["kind"].isnan()
    assert log_likelihoods["joint"] == log_likelihoods["size"]


def test_a_batch_of_which_nothing_counts_has_scores_of_each_part():
    batches, bnn = [(X, HAVE_GAPS, torch.zeros(6))], variational(with_gaps())
    errors, log_likelihoods = bnn.evaluate(batches)
    assert errors == {"kind": 0.0, "size": 0.0}
    assert log_likelihoods == {"kind": 0.0, "size": 0.0, "joint": 0.0}
    errors, _ = bnn.evaluate(batches, num_predictions=3, aggregate=False, reduction="none")
    assert {name: found.shape for name, found in errors.items()} == {"kind": (3, 0), "size": (3, 0)}


def test_variables_of_parts_are_sites_and_copies_keep_their_shapes():
    noisy = HomoskedasticGaussian(6, scale=dist.LogNormal(0.0, 1.0))
    likelihood = Joint(kind=part("kind"), size=noisy)
    bnn = variational(likelihood, likelihood_guide_builder=tyxe.guides.AutoNormal)
    data = [(X, {"kind": KINDS, "size": SIZES})]
    history = bnn.fit(data, ADAM, 3, validation=data)
    assert len(history.validation) == 3
    assert list(bnn.likelihood_guide.median()) == ["likelihood.size.scale"]
    expected = bnn.predict(X, num_predictions=0)
    for copied in (copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        torch.testing.assert_close(copied.predict(X, num_predictions=0), expected)
    assert bnn.to_ensemble(3)(X)["size"][1].shape == (6, 2)
    assert set(bnn.to_module()(X)) == set(TARGETS)


BAD_OUTPUTS = [
    (Joint(other=Poisson(6)), "mapping", r"outputs are .*of kind, size, count; expected .*other"),
    (Joint(kind=part("kind")), "tuple", r"outputs are a tuple of 3; expected"),
    (joint(), "kind", r"outputs are a Tensor"),
]
BAD_TARGETS = [
    ({"kind": KINDS}, ValueError, r"targets are .*of kind; expected"),
    ((KINDS, SIZES, 3), TypeError, "count of the targets is 3; expected a tensor"),
    ((KINDS, SIZES, -COUNTS - 1), ValueError, "targets lie outside the support of Poisson"),
]


@pytest.mark.parametrize(("likelihood", "returns", "message"), BAD_OUTPUTS)
def test_bad_outputs(likelihood, returns, message):
    with pytest.raises(ValueError, match=message):
        variational(likelihood, returns).predict(X)


@pytest.mark.parametrize(("targets", "error", "message"), BAD_TARGETS)
def test_bad_targets(targets, error, message):
    with pytest.raises(error, match=message):
        variational().fit([(X, targets)], ADAM, 1)


def test_what_several_targets_have_not():
    bnn = variational()
    with pytest.raises(TypeError, match=r"several outputs: .* sample_predictive\(x\)\[name\]"):
        bnn.interval(X)
    with pytest.raises(TypeError, match="a Joint has several targets"):
        bnn.likelihood.mean_and_scale(bnn.predict(X))
