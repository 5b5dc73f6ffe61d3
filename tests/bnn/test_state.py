"""Saving, copying and moving: a BNN is a module like any other."""

import copy
import functools
import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL as PLAIN
from tests.oracles.rejections import rejects
from tests.oracles.states import (
    ADAM,
    GUIDES,
    NORMAL,
    N,
    assert_same_predictions,
    assert_same_state,
    data,
    fitted,
    make,
    mcmc,
    net,
    sampled,
    through_a_file,
)
from tyxe.guides import AutoNormal, AutoRadial
from tyxe.likelihoods import HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bnn: pickle.loads(pickle.dumps(bnn))])
def test_copies_are_equal_and_apart(copied):
    bnn = fitted()
    twin = copied(bnn)
    assert_same_state(bnn, twin)
    assert_same_predictions(bnn, twin)
    before = copy.deepcopy(bnn)
    twin.fit([data()], ADAM, 2)  # the copy trains on, the original stays
    assert_same_state(bnn, before)
    changed = [
        name
        for name, value in twin.named_parameters()
        if value.requires_grad and not torch.equal(value, dict(bnn.named_parameters())[name])
    ]
    # A bias before BatchNorm has no gradient but the prior's.
    assert len(changed) >= sum(p.requires_grad for p in bnn.parameters()) - 1
    assert_same_predictions(twin, copy.deepcopy(twin))


@pytest.mark.parametrize("guide", ["AutoNormal", "AutoLowRankMultivariateNormal"])
def test_double_moves_every_part(guide):
    bnn = fitted(GUIDES[guide]).double()
    for name, value in bnn.state_dict().items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            assert value.dtype == torch.float64, name
    trace = pyro.poutine.trace(bnn.model).get_trace(data()[0].double())
    for name in [*trace.stochastic_nodes, "likelihood.data"]:
        node = trace.nodes[name]
        if node["type"] == "sample" and "plate" not in name:
            assert node["value"].dtype == torch.float64, name
    x, y = (value.double() for value in data())
    history = bnn.fit([(x, y)], ADAM, 2)
    assert all(torch.isfinite(torch.tensor(history.loss)))
    assert bnn.predict(x, num_predictions=2)[0].dtype == torch.float64


def test_to_another_device_moves_every_part():
    bnn = fitted().to("meta")
    assert all(
        value.is_meta for name, value in bnn.state_dict().items() if "_extra_state" not in name
    )
    assert all(prior.mean.is_meta for _, prior in bnn.net_prior.priors())
    assert bnn.likelihood.latent_priors()["scale"].mean.is_meta
    assert all(posterior.mean.is_meta for posterior in bnn.net_guide.posterior().values())


def test_two_bnns_of_one_net_never_meet():
    shared, likelihood = net(), HomoskedasticGaussian(N, scale=0.5)
    left, right = (
        tyxe.VariationalBNN(shared, NORMAL, likelihood, AutoDiagonalNormal) for _ in range(2)
    )
    before = copy.deepcopy(right)
    left.fit([data()], pyro.optim.Adam({"lr": 0.1}), 3)
    assert_same_state(right, before)
    pointers = [{p.data_ptr() for p in bnn.parameters()} for bnn in (left, right)]
    assert not pointers[0] & pointers[1]
    assert not pointers[0] & {p.data_ptr() for p in shared.parameters()}
    assert len(pyro.get_param_store()) == 0


def test_a_prior_that_became_a_posterior_loads_into_a_fresh_object():
    bnn = fitted()
    bnn.update_prior(tyxe.priors.DictPrior(bnn.net_guide.get_detached_distributions()))
    bnn.fit([data()], ADAM, 2)
    fresh = make()  # one number for all weights of a layer
    fresh.load_state_dict(through_a_file(bnn.state_dict()))
    assert_same_state(bnn, fresh)
    new = dict(fresh.net_prior.priors())
    for name, prior in bnn.net_prior.priors():
        assert torch.equal(new[name].mean, prior.mean)
        assert torch.equal(new[name].variance, prior.variance)
        assert prior.mean.unique().numel() > 1 or prior.mean.numel() == 1
    kl = tyxe.bnn.elbo_terms(bnn.net_prior, bnn.net_guide).kl
    assert tyxe.bnn.elbo_terms(fresh.net_prior, fresh.net_guide).kl == kl
    # And back: a scalar prior into an object whose prior has a number for each weight.
    fresh.load_state_dict(make().state_dict())
    assert dict(fresh.net_prior.priors())["0.weight"].variance.unique().tolist() == [1.0]


FIXED = HomoskedasticGaussian(N, scale=0.1)
NOISE = HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5))
ONE_LAYER = nn.Linear(2, 1), PLAIN, NOISE
LAPLACE = tyxe.priors.IIDPrior(dist.Laplace(0, 1), hide_module_types=[nn.BatchNorm1d])


class Model(nn.Module):
    """A module that has a BNN among its parts."""

    def __init__(self):
        super().__init__()
        self.bnn = tyxe.PytorchBNN(nn.Linear(2, 3), PLAIN, AutoNormal)
        self.head = nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.bnn(x))


@pytest.mark.parametrize("options", [{}, {"assign": True}])
def test_a_bnn_is_loaded_as_a_part_of_a_larger_module(options):
    model, fresh = Model(), Model()
    fresh.load_state_dict(through_a_file(model.state_dict()), **options)
    assert_same_state(model, fresh)
    pyro.set_rng_seed(1)
    output = model(data()[0])
    pyro.set_rng_seed(1)
    assert torch.equal(output, fresh(data()[0]))
    state = model.state_dict()
    with pytest.raises(RuntimeError):
        fresh.load_state_dict({**state, "bnn.net.weight": torch.zeros(5, 2)})
    bad = {n: torch.full_like(v, torch.nan) if "locs" in n else v for n, v in state.items()}
    with pytest.raises(RuntimeError, match=r"bnn\.net_guide\.locs\.weight .* has NaN"):
        fresh.load_state_dict(bad)
    assert_same_state(model, fresh)


def with_entry(key, value):
    return lambda bnn: {**bnn.state_dict(), key: value}


def with_value(key, value=math.nan):
    def spoil(bnn):
        broken = bnn.state_dict()[key].clone()
        broken.view(-1)[0] = value
        return {**bnn.state_dict(), key: broken}

    return spoil


def laplace_state(bnn):
    bnn = tyxe.LaplaceBNN(net(), NORMAL, FIXED)
    bnn.fit([data()], ADAM, 1)
    return bnn.state_dict()


MEAN, SCALE = "net_guide.locs.0.weight", "net_guide.unconstrained_scales.0.weight"
PRIOR = "net_prior._entries.0.base_dist__loc"
CAPPED = functools.partial(AutoNormal, max_guide_scale=0.3)
OTHER = r"(?s)does not fit this VariationalBNN.*left as it was.*same net, prior, likelihood and g"
MISFITS = {
    "other sizes": (lambda bnn: make(hidden=5).state_dict(), OTHER),
    "another guide's": (lambda bnn: make(AutoDelta).state_dict(), OTHER),
    "another prior": (
        lambda bnn: make(prior=LAPLACE).state_dict(),
        r"Independent\(Normal\).*Independent\(Laplace\)",
    ),
    "another selection": (lambda bnn: make(prior=PLAIN).state_dict(), OTHER),
    "no inferred noise": (
        lambda bnn: tyxe.VariationalBNN(net(), NORMAL, FIXED, AutoNormal).state_dict(),
        OTHER,
    ),
    "another net": (
        lambda bnn: tyxe.VariationalBNN(*ONE_LAYER, AutoNormal, AutoNormal).state_dict(),
        OTHER,
    ),
    "a string for a weight": (with_entry("net.1.weight", "a string"), "does not fit this Variat"),
    "a string for a mean": (with_entry(MEAN, "a string"), "does not fit this Variational"),
    "a string for the prior": (with_entry(PRIOR, "a string"), "does not fit"),
    "NaN in a mean": (with_value(MEAN), f"{MEAN} of the state dict has NaN; the BNN is as it was"),
    "an infinite mean": (with_value(MEAN, math.inf), "locs.0.weight of .* has infinities; the BNN"),
    "an infinite scale": (with_value(SCALE, -math.inf), "has infinities; "),
    "an infinite noise": (with_value("likelihood_guide.locs.scale", math.inf), "has infinities; "),
    "an infinite weight": (with_value("net.1.weight", math.inf), "net.1.weight .* has infinities"),
    "NaN in a prior": (with_value(PRIOR), "has NaN; "),
    "a plain net": (lambda bnn: net().state_dict(), "goes into the net, before the BNN is built"),
    "an ensemble": (lambda bnn: bnn.to_ensemble(2).state_dict(), "or what to_ensemble returns"),
    "a file's content": (lambda bnn: {"training": False, "content": {}}, r"call load\(path\)"),
    "a checkpoint": (lambda bnn: fitted().checkpoint(), "a checkpoint; pass it to load_checkpoint"),
    "another cap": (lambda bnn: fitted(CAPPED).state_dict(), r"None\) here and .*_scale=0\.3\)"),
    "a Laplace approximation": (laplace_state, r"\) here and that of another kind of BNN"),
    "another guide": (lambda bnn: fitted(AutoRadial).state_dict(), r"\) here and AutoRadial\("),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_state_that_does_not_fit_changes_nothing(misfit):
    make_state, message = MISFITS[misfit]
    bnn = fitted()
    state = make_state(bnn)
    error = rejects(bnn, RuntimeError, message, lambda: bnn.load_state_dict(state))
    assert error.__cause__ is None
    bnn.fit([data()], ADAM, 1)


def test_a_guide_is_no_curvature():
    bnn, other = tyxe.LaplaceBNN(net(), NORMAL, FIXED), fitted()
    with pytest.raises(RuntimeError, match=r"that of a LaplaceBNN here and AutoNormal\("):
        bnn.load_state_dict(other.state_dict())


def test_a_nets_own_buffers_may_hold_nan():
    class Marked(nn.Linear):
        def __init__(self):
            super().__init__(2, 1)
            self.register_buffer("seen", torch.tensor([math.nan]))

    one, other = (tyxe.PytorchBNN(Marked(), PLAIN, AutoNormal) for _ in range(2))
    one.load_state_dict(other.state_dict())
    assert torch.equal(one.net_guide.get_loc("weight"), other.net_guide.get_loc("weight"))


def test_what_is_given_may_be_infinite():
    """Masks, whether buffers or frozen, and priors with a part of weight 0, or that are flat."""

    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(2, 1)
            self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
            self.frozen = nn.Parameter(torch.tensor([0.0, -math.inf]), requires_grad=False)

    parts = dist.Categorical(logits=torch.tensor([0.0, -math.inf]))
    mixture = dist.MixtureSameFamily(parts, dist.Normal(torch.zeros(2), torch.ones(2)))
    for distribution in (mixture, dist.Normal(0.0, math.inf)):
        prior = tyxe.priors.IIDPrior(distribution, hide_parameters=["frozen"])
        one, other = (tyxe.MCMC_BNN(Masked(), prior, FIXED, tyxe.samplers.HMC) for _ in range(2))
        state = one.state_dict()
        assert sum(not bool(value.isfinite().all()) for value in state.values()) >= 3
        other.load_state_dict(state)
        assert_same_state(one, other)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_samples_and_modes_are_numbers(value):
    state, bnn = sampled().state_dict(), sampled()
    state["samples.net.bias"][0, 1] = value
    message = "samples.net.bias of the state dict has (NaN|infi)"
    rejects(bnn, RuntimeError, message, functools.partial(bnn.load_state_dict, state))
    state = laplace_state(None)
    state[MEAN][0, 0] = value
    with pytest.raises(RuntimeError, match=f"{MEAN} of the state dict has"):
        tyxe.LaplaceBNN(net(), NORMAL, FIXED).load_state_dict(state)


def with_samples(change, sites=("net.weight", "net.bias", "likelihood.scale")):
    def spoil():
        state = sampled().state_dict()
        return state | {f"samples.{site}": change(state[f"samples.{site}"]) for site in sites}

    return spoil


def without(*names):
    state = sampled().state_dict()
    return {n: value for n, value in state.items() if n.removeprefix("samples.") not in names}


OTHER_SAMPLES = {
    "of a wider net": with_samples(lambda value: value.repeat(1, 1, 1, 2), ["net.weight"]),
    "of more outputs": with_samples(
        lambda value: value.repeat_interleave(3, 2), ["net.weight", "net.bias"]
    ),
    "of a noise for each output": with_samples(lambda v: v[..., None], ["likelihood.scale"]),
    "without chains": with_samples(lambda value: value[0]),
    "as many numbers, not stacked": with_samples(lambda value: value[0, 0]),
    "of fewer for one site": with_samples(lambda value: value[:, :2], ["net.bias"]),
    "none in each chain": with_samples(lambda value: value[:, :0]),
    "no chains": with_samples(lambda value: value[:0]),
    "a string": lambda: {**without(), "samples.net.bias": "a string"},
    "a site is missing": lambda: without("net.bias"),
    "the noise is missing": lambda: without("likelihood.scale"),
    "all are missing": lambda: without("net.weight", "net.bias", "likelihood.scale"),
    "a site too many": lambda: {**without(), "samples.net.9.bias": torch.randn(1, 4, 3)},
    "never fitted": lambda: mcmc().state_dict(),
}


@pytest.mark.parametrize("case", OTHER_SAMPLES)
def test_samples_of_another_bnn_change_nothing(case, tmp_path):
    state, bnn = OTHER_SAMPLES[case](), sampled(num_samples=6)
    before, chains = copy.deepcopy(bnn), bnn._chains
    with pytest.raises(RuntimeError, match="does not fit this MCMC_BNN, which was left as it was"):
        bnn.load_state_dict(state)
    if case != "a site too many":  # which PyTorch sees after it has loaded the others
        with pytest.raises(RuntimeError):
            nn.ModuleDict({"bnn": bnn}).load_state_dict({f"bnn.{n}": v for n, v in state.items()})
    assert_same_state(bnn, before)
    assert_same_predictions(bnn, before)
    assert bnn._chains is chains
    saved = sampled()
    saved.save(tmp_path / "file")
    content = tyxe.files.read(tmp_path / "file")
    tyxe.files.write(tmp_path / "file", {**content, "content": state})
    with pytest.raises(RuntimeError, match="does not fit this MCMC_BNN"):
        bnn.load(tmp_path / "file")
    assert_same_state(bnn, before)
    if case not in ("never fitted", "all are missing"):
        fresh = mcmc()
        with pytest.raises(RuntimeError):
            fresh.load_state_dict(state)
        assert not len(fresh.samples)


def test_another_error_leaves_a_bnn_without_samples():
    fresh, state = mcmc(), sampled().state_dict()
    with pytest.raises(RuntimeError, match="does not fit"):
        fresh.load_state_dict({**state, "likelihood.more": torch.zeros(1)})
    assert not len(fresh.samples)


def test_a_state_without_samples_takes_them_away_if_asked_for():
    bnn, fresh = sampled(), mcmc()
    bnn.load_state_dict(fresh.state_dict(), strict=False)
    assert not len(bnn.samples)
    fresh.load_state_dict(bnn.state_dict())


def test_a_run_that_can_be_gone_on_with_survives_a_failed_load():
    bnn = tyxe.MCMC_BNN(nn.Linear(2, 1), NORMAL, FIXED, tyxe.samplers.HMC)
    with pytest.warns(tyxe.TyxeWarning):
        bnn.fit([data()], 4, warmup_steps=2, num_chains=1)
    with pytest.raises(RuntimeError):
        bnn.load_state_dict({})
    bnn.fit([data()], 4, warmup_steps=2, num_chains=1, resume=True)
