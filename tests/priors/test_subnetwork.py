"""Posteriors over single weights of a net are those of the whole net, at the other weights."""

import copy
import functools

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import nn

import tyxe
from tyxe.likelihoods import Categorical, HomoskedasticGaussian
from tyxe.priors import IIDPrior, LayerwiseNormalPrior, SubnetworkPrior, subnetwork

N = 20
NORMAL = IIDPrior(dist.Normal(0.0, 0.5))
FEW = SubnetworkPrior(NORMAL, 5, "last")
SEED = torch.Generator().manual_seed(0)
X = torch.randn(N, 1, 4, 4, generator=SEED, dtype=torch.float64)
Y = torch.randint(3, (N,), generator=SEED)
BATCHES = list(zip(X.split(8), Y.split(8), strict=True))
ADAM = functools.partial(torch.optim.Adam, lr=0.05)


class Tied(nn.Module):
    """A net that uses one matrix twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(self.second(self.first(x.flatten(1)).tanh()).tanh())


def cnn():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))


def made(build=cnn, seed=0):
    torch.manual_seed(seed)
    return build().double().eval()


def laplace(prior, build=cnn, structure="full"):
    bnn = tyxe.LaplaceBNN(made(build), prior, Categorical(N), structure=structure)
    bnn.fit_curvature(BATCHES)
    return bnn


def variances(build=cnn):
    return laplace(NORMAL, build, "diag").net_guide.get_detached_distributions()


def rows_of(sub, full):
    """Return where the weights of a subnetwork are in the vector of all weights."""
    blocks = full.state.blocks
    places = blocks.unflatten(torch.arange(blocks.size))
    own = {name: sub.net_prior.part_of(name[4:], places[name]) for name in sub._slots}
    return sub.state.blocks.flatten(own)


@pytest.mark.parametrize("build", [cnn, Tied])
@pytest.mark.parametrize("by", ["magnitude", "last", "random", "variance"])
def test_a_posterior_is_that_of_the_whole_net_at_the_other_weights(build, by):
    """The precision is the sub-block of the GGN and the prior, and all else follows from it."""
    full = laplace(NORMAL, build)
    sub = laplace(SubnetworkPrior(NORMAL, 13, variances(build) if by == "variance" else by), build)
    rows = rows_of(sub, full)
    assert len(rows) == 13
    precision = full.state.precision().to_dense()[rows][:, rows]
    torch.testing.assert_close(sub.state.precision().to_dense(), precision, rtol=1e-10, atol=1e-12)

    mode = full.state.loc[rows]
    evidence = full.state.curvature.log_likelihood - 2 * mode.square().sum()
    evidence = evidence + 13 * torch.tensor(2.0).log() - precision.logdet() / 2
    torch.testing.assert_close(sub.log_marginal_likelihood(), evidence)

    values = full.state.blocks.unflatten(full.state.loc)
    jacobian = torch.func.jacrev(lambda w: full._run_frozen(full.state.blocks.unflatten(w), X))
    rows_of_j = jacobian(full.state.blocks.flatten(values))[..., rows]
    variance = rows_of_j @ precision.inverse() @ rows_of_j.mT
    torch.testing.assert_close(sub.functional_variance(X), variance)


def test_which_weights_are_chosen():
    net, posterior = made(), variances()
    named = dict(net.named_parameters())
    scores = {
        "variance": torch.cat([posterior[name].variance.flatten() for name in named]),
        "magnitude": torch.cat([p.detach().abs().flatten() for p in named.values()]),
        "last": torch.arange(sum(p.numel() for p in named.values())),
    }
    for by, score in scores.items():
        prior = SubnetworkPrior(NORMAL, 9, posterior if by == "variance" else by)
        elements, chosen = prior.elements(net), torch.zeros(len(score), dtype=torch.bool)
        parts = dict(zip(named, chosen.split([p.numel() for p in named.values()]), strict=True))
        for name, part in parts.items():
            part[elements.get(name, slice(None))] = True
        assert chosen.sum() == 9
        assert score[chosen].min() >= score[~chosen].max(), by
    assert SubnetworkPrior(NORMAL, len(score), "last").elements(net) == {}, "whole parameters"
    first, second = (SubnetworkPrior(NORMAL, 9, "random") for _ in range(2))
    assert str(first.elements(net)) == str(first.elements(net)) != str(second.elements(net))


@pytest.mark.parametrize("build", [cnn, Tied])
def test_one_call_chooses_by_the_variances_of_a_diagonal_posterior(build):
    net = made(build).train()
    before = copy.deepcopy(net.state_dict())
    found = subnetwork(net, BATCHES, 13, prior=NORMAL, likelihood=Categorical(N))
    expected = SubnetworkPrior(NORMAL, 13, variances(build)).elements(net)
    assert str(found.elements(net)) == str(expected) != "{}"
    assert found.prior is NORMAL
    assert net.training
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_one_call_for_all_weights_gives_the_whole_posterior():
    count = sum(p.numel() for p in made().parameters())
    prior = subnetwork(made(), BATCHES, count, prior=NORMAL, likelihood=Categorical(N))
    found, full = laplace(prior).state, laplace(NORMAL).state
    torch.testing.assert_close(found.precision().to_dense(), full.precision().to_dense())
    torch.testing.assert_close(found.evidence(), full.evidence())


@pytest.mark.parametrize("by", ["magnitude", "last", "random"])
def test_one_call_needs_no_data_for_other_choices(by):
    net = made()
    torch.manual_seed(0)
    found = subnetwork(net, None, 9, by, prior=NORMAL)
    torch.manual_seed(0)
    assert str(found.elements(net)) == str(SubnetworkPrior(NORMAL, 9, by).elements(net))


def test_one_call_takes_standard_normals_of_all_but_norms():
    norms = nn.BatchNorm2d(2), nn.GroupNorm(1, 2), nn.LayerNorm((2, 2)), nn.RMSNorm(2)
    net = nn.Sequential(nn.Conv2d(1, 2, 3), *norms, nn.Flatten(), nn.Linear(8, 3))
    prior = subnetwork(net, None, 20 + 27, "last")
    sites = prior.sites(net)
    assert list(sites) == ["0.weight", "0.bias", "6.weight", "6.bias"]
    assert all(bool((site.variance == 1).all()) for site in sites.values())
    assert all(bool((site.mean == 0).all()) for site in sites.values())


def test_all_elements_of_a_vector_may_be_in_another_order():
    class Reversed(IIDPrior):
        def elements(self, net: nn.Module) -> dict[str, torch.Tensor]:
            return {name: torch.arange(p.numel()).flip(0) for name, p in net.named_parameters()}

    net, found = nn.Linear(16, 3).double(), []
    x = X.flatten(1)
    for prior in (NORMAL, Reversed(dist.Normal(0.0, 0.5))):
        bnn = tyxe.LaplaceBNN(net, prior, Categorical(N), structure="full")
        bnn.fit_curvature([(x, Y)])
        mean = bnn.predict(x, predictive="bnn", num_predictions=0)
        found.append((mean, bnn.predict(x, link="probit"), bnn.log_marginal_likelihood()))
    torch.testing.assert_close(*found)


def test_scales_are_those_of_the_layer():
    prior = SubnetworkPrior(LayerwiseNormalPrior("radford"), 2, "magnitude")
    (site,) = prior.sites(nn.Linear(25, 1, bias=False)).values()
    torch.testing.assert_close(site.base_dist.scale, torch.full((2,), 0.2))


def variational(guide, net, prior):
    return tyxe.VariationalBNN(net, prior, Categorical(N), guide)


def fit_in(handler, bnn):
    with handler():
        bnn.fit(BATCHES, ADAM, 2)


def compiled(bnn):
    """Train by the traced program, as it is: to compile it takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._inductor, "compile", lambda program, *_, **__: program)
        patch.setattr(tyxe.program, "has_compiler", lambda device: True)
        bnn.fit(BATCHES, ADAM, 2, compile=True)


MEAN_FIELD = functools.partial(variational, tyxe.guides.AutoNormal)
FITS = {
    "mean field": (MEAN_FIELD, None),
    "local reparameterisation": (
        MEAN_FIELD,
        functools.partial(fit_in, tyxe.poutine.local_reparameterization),
    ),
    "flipout": (MEAN_FIELD, functools.partial(fit_in, tyxe.poutine.flipout)),
    "compiled": (MEAN_FIELD, compiled),
    "full rank": (functools.partial(variational, AutoMultivariateNormal), None),
    "Laplace": (lambda net, prior: tyxe.LaplaceBNN(net, prior, Categorical(N)), None),
    "SWAG": (
        lambda net, prior: tyxe.SWAG_BNN(net, prior, Categorical(N), rank=2),
        lambda bnn: bnn.fit(BATCHES, functools.partial(torch.optim.SGD, lr=0.1), 12),
    ),
    "NUTS": (
        lambda net, prior: tyxe.MCMC_BNN(net, prior, Categorical(N), tyxe.samplers.NUTS()),
        lambda bnn: bnn.fit(BATCHES, 3, warmup_steps=3, num_chains=2, compile=False),
    ),
    "members trained together": (
        lambda net, prior: tyxe.EnsembleBNN(lambda _: MEAN_FIELD(net, prior), 2),
        lambda bnn: bnn.fit(BATCHES, ADAM, 2, vectorize=True),
    ),
}


def seeded_predictions(bnn, x=X):
    torch.manual_seed(3)
    return bnn.predict(x, num_predictions=2)


@pytest.mark.filterwarnings("ignore")  # of short runs, and members that start at the same weights
@pytest.mark.parametrize("name", FITS)
def test_a_fit_leaves_all_other_weights(name):
    make, fit = FITS[name]
    # All of a bias, some of a matrix, and nothing of the convolution.
    prior, net = SubnetworkPrior(NORMAL, 7, "last"), made()
    bnn = make(net, prior)
    (fit or (lambda one: one.fit(BATCHES, ADAM, 2)))(bnn)
    elements, before = prior.elements(net), dict(net.named_parameters())
    torch.testing.assert_close(*map(seeded_predictions, (bnn, copy.deepcopy(bnn))))
    members = [part for part in bnn.to_ensemble(2).modules() if isinstance(part, nn.Sequential)]
    moved = 0
    for member in members:
        for parameter, after in member.named_parameters():
            fixed = torch.ones(after.numel(), dtype=torch.bool)
            fixed[elements.get(parameter, slice(None))] = False
            same = (after == before[parameter]).flatten()
            assert bool(same[fixed].all()), parameter
            moved += int((~same).sum())
    assert moved == 7 * len(members)


def test_a_state_has_the_chosen_weights_and_all_others(tmp_path):
    inner = IIDPrior(dist.Normal(0.0, 1.0), expose=["weight"])
    saved, loaded = (
        variational(
            tyxe.guides.AutoNormal,
            made(lambda: nn.Linear(16, 3), seed),
            SubnetworkPrior(inner, 5, "random"),
        )
        for seed in (0, 1)
    )
    assert not torch.equal(saved.net_prior.elements["weight"], loaded.net_prior.elements["weight"])
    saved.fit([(x.flatten(1), y) for x, y in BATCHES], ADAM, 2)
    saved.save(tmp_path / "saved.tyxe")
    loaded.load(tmp_path / "saved.tyxe")
    assert torch.equal(*(seeded_predictions(one, X.flatten(1)) for one in (saved, loaded)))


@pytest.mark.parametrize("other", [SubnetworkPrior(NORMAL, 8, "last"), NORMAL])
def test_a_state_with_other_numbers_of_chosen_weights_is_an_error(other, tmp_path):
    bnns = [variational(tyxe.guides.AutoNormal, made(), each) for each in (FEW, other)]
    for one, two in (bnns, bnns[::-1]):
        one.save(tmp_path / "saved.tyxe")
        before = copy.deepcopy(two.state_dict())
        with pytest.raises(RuntimeError, match="other chosen weights: build the BNN with the same"):
            two.load(tmp_path / "saved.tyxe")
        assert all(torch.equal(before[name], value) for name, value in two.state_dict().items())


def test_chains_find_the_conditional_posterior_of_a_linear_model():
    x = torch.randn(30, 4, generator=SEED, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.5 * torch.randn(30, 1, generator=SEED, dtype=torch.float64)
    net = made(lambda: nn.Linear(4, 1, bias=False))
    prior = SubnetworkPrior(NORMAL, 2, "random")
    chosen = prior.elements(net)["weight"]
    rest = [i for i in range(4) if i not in chosen.tolist()]
    left = y[:, 0] - x[:, rest] @ net.weight[0, rest].detach()
    covariance = (x[:, chosen].T @ x[:, chosen] / 0.25 + 4 * torch.eye(2)).inverse()
    mean = covariance @ x[:, chosen].T @ left / 0.25
    kernel = tyxe.samplers.NUTS(step_size=0.1, adapt_step_size=False, adapt_mass_matrix=False)
    bnn = tyxe.MCMC_BNN(net, prior, HomoskedasticGaussian(30, scale=0.5), kernel)
    bnn.fit([(x, y)], 40, warmup_steps=20, num_chains=32, compile=False)
    draws = bnn.samples["net.weight"].flatten(0, 1)
    # A quarter of the draws counts, at the least.
    count, scale = len(draws) / 4, covariance.diagonal().sqrt()
    assert bool(((draws.mean(0) - mean).abs() < 4 * scale / count**0.5).all())
    assert bool((draws.std(0) / scale - 1).abs().max() < 4 / (2 * count) ** 0.5)


def test_a_posterior_becomes_the_prior():
    bnn = laplace(SubnetworkPrior(NORMAL, 7, "magnitude"))
    before = bnn.functional_variance(X)
    bnn.update_prior(tyxe.priors.DictPrior(bnn.net_guide.get_detached_distributions()))
    torch.testing.assert_close(bnn.functional_variance(X), before)
    bnn.update_prior(NORMAL)
    bnn.fit_curvature(BATCHES)
    torch.testing.assert_close(bnn.functional_variance(X), before)


REFUSED = [
    (lambda: SubnetworkPrior(1.0, 3, "last"), TypeError, "prior is 1.0; expected one such as"),
    (lambda: SubnetworkPrior(FEW, 3, "last"), TypeError, "whose choice would be lost; expected a"),
    (lambda: SubnetworkPrior(NORMAL, 0, "last"), ValueError, "num_weights is 0; expected 1 or"),
    (lambda: SubnetworkPrior(NORMAL, 3, "size"), ValueError, "by is 'size'; expected one of 'mag"),
    (lambda: SubnetworkPrior(NORMAL, 3, "variance"), ValueError, "or a posterior, whose variances"),
    (lambda: sites(4, "last"), ValueError, "num_weights is 4; expected 1 to 3, the weights that"),
    (lambda: sites(2, {"weight": dist.Normal(0.0, 1.0)}), ValueError, "variance of 'weight' has"),
    (lambda: sites(2, {}), ValueError, "there is no site 'weight'"),
    (lambda: one_call(0), ValueError, "num_weights is 0; expected 1 or"),
    (lambda: one_call(48), ValueError, "num_weights is 48; expected 1 to 47, the weights that"),
    (lambda: one_call(by="size"), ValueError, "by is 'size'; expected one of 'variance', 'magn"),
    (lambda: one_call(likelihood=None), TypeError, 'likelihood is None; by="variance" needs'),
    (lambda: one_call(likelihood=Categorical), TypeError, "likelihood is the class Categorical"),
    (lambda: one_call(prior=FEW), TypeError, "whose choice would be lost; expected a"),
    (lambda: one_call(prior=1.0), TypeError, "prior is 1.0; expected a Prior or None"),
]


def sites(num_weights, by):
    return SubnetworkPrior(NORMAL, num_weights, by).sites(nn.Linear(2, 1))


def one_call(num_weights=3, **options):
    options = {"likelihood": Categorical(N), **options}
    return subnetwork(made(), BATCHES, num_weights, **options)


@pytest.mark.parametrize(("call", "error", "match"), REFUSED)
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_closed_forms_are_of_whole_layers():
    prior = SubnetworkPrior(IIDPrior(dist.Normal(0.0, 1.0), expose=["3.weight"]), 5, "last")
    bnn = laplace(prior, structure="full")
    with pytest.raises(TypeError, match="closed forms are for one over the last linear layer"):
        bnn.to_ensemble(closed_form=True)
