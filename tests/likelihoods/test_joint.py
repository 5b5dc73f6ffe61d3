"""A joint likelihood is the product of its parts, under every kind of inference."""

import copy
import functools
import pickle

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tyxe.bnn.elbo import elbo_terms
from tyxe.curvature import collect_curvature
from tyxe.likelihoods import Categorical, HomoskedasticGaussian, Joint, Poisson

# A joint likelihood of some of the outputs leaves the heads of the others without data.
pytestmark = pytest.mark.filterwarnings("ignore:the net's outputs do not depend on")

X = torch.linspace(-2, 2, 12).view(6, 2).double()
KINDS = torch.tensor([0, 1, 2, 0, 1, 2])
SIZES = torch.linspace(-1, 1, 12).view(6, 2).double()
COUNTS = torch.arange(6)
TARGETS = {"kind": KINDS, "size": SIZES, "count": COUNTS}


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


def part(name, size=6):
    return {
        "kind": Categorical(size),
        "size": HomoskedasticGaussian(size, scale=0.5),
        "count": Poisson(size),
    }[name]


def joint(size=6):
    return Joint(**{name: part(name, size) for name in TARGETS})


def prior():
    return tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))


def variational(likelihood=None, returns="mapping", **options):
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=0.1)
    return tyxe.VariationalBNN(Net(returns), prior(), likelihood or joint(), guide, **options)


def loader(targets=TARGETS):
    return [(X, targets)]


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


def test_predictions_and_scores_are_those_of_each_part_at_equal_draws():
    bnn = variational()
    torch.manual_seed(1)
    found = bnn.predict(X, num_predictions=5)
    torch.manual_seed(1)
    errors, log_likelihoods = bnn.evaluate(X, TARGETS, num_predictions=5)
    torch.manual_seed(1)
    by_loader = bnn.evaluate(loader(), num_predictions=5)
    torch.testing.assert_close((errors, log_likelihoods), by_loader)
    assert set(errors) == set(TARGETS)
    for name, target in TARGETS.items():
        one = variational(part(name), name)
        torch.manual_seed(1)
        torch.testing.assert_close(found[name], one.predict(X, num_predictions=5))
        torch.manual_seed(1)
        expected = one.evaluate(X, target, num_predictions=5)
        torch.testing.assert_close((errors[name], log_likelihoods[name]), expected)
    torch.manual_seed(1)
    outputs = bnn.predict(X, num_predictions=5, aggregate=False)
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


@pytest.mark.parametrize("structure", ["full", "diag", "kron", "lowrank"])
def test_the_curvature_is_the_sum_of_those_of_the_parts(structure):
    make = functools.partial(tyxe.LaplaceBNN, structure=structure)
    rules = {"expose_all": False, "expose_modules": ["body.0"]}
    shared = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), **rules)
    bnn = make(Net(), shared, joint())
    batches = [*bnn._to_fit(loader())]
    found = collect_curvature(bnn._linearize, bnn.likelihood, batches, "full").operator.to_dense()
    expected = 0.0
    for name, target in TARGETS.items():
        one = make(Net(name), shared, part(name))
        each = collect_curvature(one._linearize, one.likelihood, [(X, target)], "full")
        expected += each.operator.to_dense()
    torch.testing.assert_close(found, expected)
    bnn.fit_curvature(loader())
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


def dropped():
    return nn.Sequential(nn.Dropout(0.2), Net())


@pytest.mark.parametrize(
    ("make", "arguments", "handler"),
    [
        (variational, (ADAM, 3), tyxe.poutine.local_reparameterization),
        (variational, (ADAM, 3), tyxe.poutine.variational_laplace),
        (lambda: tyxe.LaplaceBNN(Net(), prior(), joint()), (ADAM, 3), None),
        (lambda: tyxe.SWAG_BNN(Net(), prior(), joint(), rank=2), (ADAM, 8), None),
        (lambda: tyxe.DropoutBNN(dropped(), joint()), (ADAM, 2), None),
        (
            lambda: tyxe.MCMC_BNN(
                Net(), prior(), joint(), functools.partial(tyxe.samplers.SGLD, lr=1e-3)
            ),
            (3,),
            None,
        ),
        (
            lambda: tyxe.EnsembleBNN(
                lambda i: tyxe.VariationalBNN(
                    Net(seed=i), prior(), joint(), tyxe.guides.AutoNormal
                ),
                2,
            ),
            (ADAM, 2),
            None,
        ),
    ],
)
def test_every_wrapper_takes_it(make, arguments, handler):
    torch.manual_seed(0)
    bnn = make()
    if handler is None:
        bnn.fit(loader(), *arguments)
    else:
        with handler():
            bnn.fit(loader(), *arguments)
    found = bnn.predict(X, num_predictions=3)
    assert found["kind"].shape == (6, 3)
    assert found["size"][0].shape == (6, 2)
    assert found["count"].shape == (6,)
    errors, logs = bnn.evaluate(loader(), num_predictions=3)
    assert set(errors) == set(TARGETS)
    assert bool(torch.stack([*logs.values()]).isfinite().all())
    samples = bnn.sample_predictive(X, num_samples=4)
    assert samples["kind"].dtype == torch.long
    assert samples["size"].shape == (4, 6, 2)
    outputs = bnn.predict(X, num_predictions=2, aggregate=False)
    assert outputs["kind"].shape[-2:] == (6, 3)


def test_potentials_are_those_of_the_product():
    draws = []
    kernel = tyxe.samplers.HMC(adapt_step_size=False, adapt_mass_matrix=False, step_size=0.01)
    one = HomoskedasticGaussian(6, scale=0.5)
    for net, likelihood, target in (
        (Net("size"), one, SIZES),
        (nn.Sequential(Net("size")), Joint(size=one), {"size": SIZES}),
    ):
        if isinstance(net, nn.Sequential):
            net = OnlySize()
        torch.manual_seed(1)
        bnn = tyxe.MCMC_BNN(net, prior(), likelihood, kernel)
        run = bnn.fit([(X, target)], 3, warmup_steps=2, num_chains=1, compile=False)
        draws.append(run.get_samples()["net.body.0.weight"])
    torch.testing.assert_close(draws[0], draws[1])


class OnlySize(Net):
    """One output, as a mapping."""

    def forward(self, x):
        return {"size": super().forward(x)["size"]}


def test_labels_that_are_ignored_count_in_the_other_parts():
    likelihood = Joint(kind=Categorical(6, ignore_index=-100), size=part("size"))
    kinds = KINDS.clone()
    kinds[2] = -100
    bnn = variational(likelihood)
    targets = {"kind": kinds, "size": SIZES}
    ((_, packed),) = bnn._to_fit([(X, targets)])
    net = bnn.to_module()(X)
    expected = part("size").log_likelihood(net["size"], SIZES)
    each = part("kind").log_likelihood(net["kind"], KINDS)
    expected = expected + each * (kinds >= 0)
    found = bnn.likelihood.log_likelihood(bnn.likelihood.from_net(net), packed)
    torch.testing.assert_close(found, expected)


def test_variables_of_parts_are_sites_and_copies_keep_their_shapes():
    likelihood = Joint(
        kind=part("kind"), size=HomoskedasticGaussian(6, scale=dist.LogNormal(0.0, 1.0))
    )
    bnn = variational(likelihood, likelihood_guide_builder=tyxe.guides.AutoNormal)
    bnn.fit([(X, {"kind": KINDS, "size": SIZES})], ADAM, 3)
    assert list(bnn.likelihood_guide.median()) == ["likelihood.size.scale"]
    expected = bnn.predict(X, num_predictions=0)
    for copied in (copy.deepcopy(bnn), pickle.loads(pickle.dumps(bnn))):
        torch.testing.assert_close(copied.predict(X, num_predictions=0), expected)
    ensemble = bnn.to_ensemble(3)
    assert ensemble(X)["size"][1].shape == (6, 2)
    assert set(bnn.to_module()(X)) == set(TARGETS)


def test_held_out_data_within_a_fit():
    history = variational().fit(loader(), ADAM, 3, validation=loader())
    assert len(history.validation) == 3


def test_bad_outputs_and_targets():
    with pytest.raises(ValueError, match=r"outputs are .*of kind, size, count; expected .*other"):
        variational(Joint(other=Poisson(6))).predict(X)
    with pytest.raises(ValueError, match=r"outputs are a tuple of 3; expected"):
        variational(Joint(kind=part("kind")), "tuple").predict(X)
    with pytest.raises(ValueError, match=r"outputs are a Tensor"):
        variational(joint(), "kind").predict(X)
    bnn = variational()
    with pytest.raises(ValueError, match=r"targets are .*of kind; expected"):
        bnn.fit([(X, {"kind": KINDS})], ADAM, 1)
    with pytest.raises(TypeError, match="count of the targets is 3; expected a tensor"):
        bnn.fit([(X, (KINDS, SIZES, 3))], ADAM, 1)
    with pytest.raises(ValueError, match="targets lie outside the support of Poisson"):
        bnn.fit([(X, (KINDS, SIZES, -COUNTS - 1))], ADAM, 1)
    with pytest.raises(TypeError, match="no order and so no interval"):
        bnn.interval(X)
    with pytest.raises(TypeError, match="a Joint has several targets"):
        bnn.likelihood.mean_and_scale(bnn.predict(X))
