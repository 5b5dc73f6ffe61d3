"""Mistakes: one clear error each, with what was given and what mends it, and no half change."""

import copy
import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.mcmc import HMC, NUTS
from torch import nn
from torch.utils.data import DataLoader

import tyxe
from tyxe.guides import AutoNormal
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Poisson,
)

N = 8
X, Y = torch.randn(N, 2), torch.randn(N, 1)
LABELS = torch.arange(N) % 3
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1))
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def net():
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def make(module=None, prior=PRIOR, likelihood=None, guide=AutoNormal):
    likelihood = likelihood or HomoskedasticGaussian(N, scale=0.5)
    return tyxe.VariationalBNN(module or net(), prior, likelihood, guide)


def snapshot(bnn):
    tensors = {n: v.clone() for n, v in bnn.state_dict().items() if isinstance(v, torch.Tensor)}
    modes = [module.training for module in bnn.modules()]
    places = {n: id(p) for n, p in bnn.net.named_parameters()}
    return tensors, modes, places, torch.get_rng_state()


def assert_unchanged(bnn, before):
    tensors, modes, places, rng = before
    state = {n: v for n, v in bnn.state_dict().items() if isinstance(v, torch.Tensor)}
    assert state.keys() == tensors.keys()
    for name, value in tensors.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=0, equal_nan=True, msg=name)
    assert [module.training for module in bnn.modules()] == modes
    assert {n: id(p) for n, p in bnn.net.named_parameters()} == places
    assert torch.equal(torch.get_rng_state(), rng)
    assert len(pyro.get_param_store()) == 0


def rejects(bnn, error, message, call):
    before = snapshot(bnn)
    with pytest.raises(error, match=message):
        call()
    assert_unchanged(bnn, before)


# --------------------------------------------------------------------------- arguments of fit


ARGUMENTS = {
    "swapped": (
        ([(X, Y)], 10, ADAM),
        {},
        TypeError,
        r"num_epochs is a partial.*fit\(data_loader, optim, num_",
    ),
    "swapped, an instance": (
        ([(X, Y)], 10, torch.optim.Adam([torch.zeros(1, requires_grad=True)])),
        {},
        TypeError,
        r"num_epochs is a Adam; expected an integer; the order is fit",
    ),
    "num_epochs no integer": (
        ([(X, Y)], ADAM, 2.5),
        {},
        TypeError,
        "num_epochs is 2.5; expected an",
    ),
    "num_epochs negative": (([(X, Y)], ADAM, -1), {}, ValueError, "num_epochs is -1"),
    "no particles": (
        ([(X, Y)], ADAM, 1),
        {"num_particles": 0},
        ValueError,
        "num_particles 0; expected at least",
    ),
    "optim a string": (
        ([(X, Y)], "adam", 1),
        {},
        TypeError,
        r"optim is a str; expected a Pyro optimiser such as",
    ),
    "optim makes no optimiser": (
        ([(X, Y)], lambda parameters: 3, 1),
        {},
        TypeError,
        "optim made a int; expected a torch opt",
    ),
    "optimiser of another net": (
        ([(X, Y)], torch.optim.Adam(nn.Linear(2, 1).parameters()), 1),
        {},
        ValueError,
        r"holds none of this BNN's parameters; build it on bnn.parameters\(\)",
    ),
    "unknown kind": (
        ([(X, Y)], ADAM, 1),
        {"lr_multipliers": {"mean": 2.0}},
        ValueError,
        r"lr_multipliers names 'mean'; the kinds are loc, scale, deterministic",
    ),
    "a loader that cannot be iterated over": (
        (3, ADAM, 1),
        {},
        TypeError,
        r"data_loader is a int; expected an iterable of \(inputs, tar",
    ),
    "an empty loader": (([], ADAM, 1), {}, ValueError, "loader is empty: it yields no batch"),
    "a tensor": ((X, ADAM, 1), {}, ValueError, r"the loader yields a Tensor; expected pairs"),
    "one batch instead of a loader": (
        ((X, Y), ADAM, 1),
        {},
        ValueError,
        r"the loader yields a Tensor; expected pairs \(inputs, t",
    ),
    "inputs without targets": (
        ([(X,)], ADAM, 1),
        {},
        ValueError,
        r"yields a tuple of 1 elements; expected pairs",
    ),
    "arguments not grouped": (
        ([(X, X, Y)], ADAM, 1),
        {},
        ValueError,
        r"a tuple of 3 elements; .* \(\(x1, x2\), y\)",
    ),
    "a mapping": (
        ([{"x": X, "y": Y}], ADAM, 1),
        {},
        ValueError,
        r"yields a mapping with keys x, y; expected",
    ),
    "targets that are no tensor": (
        ([(X, Y.tolist())], ADAM, 1),
        {},
        ValueError,
        r"targets of type list; expected pairs",
    ),
    "a larger batch than the data set": (
        ([(torch.randn(9, 2), torch.randn(9, 1))], ADAM, 1),
        {},
        ValueError,
        r"batch has 9 points, but the likelihood was built with dataset_size=8; pass the number",
    ),
    "targets that would broadcast": (
        ([(X, Y.squeeze(-1))], ADAM, 1),
        {},
        ValueError,
        r"targets of shape \(8,\) for predictions of shape \(8, 1\); pass targets.unsqueeze\(-1\)",
    ),
    "fewer targets than inputs": (
        ([(X, Y[:5])], ADAM, 1),
        {},
        ValueError,
        r"targets of shape \(5, 1\).*shape \(8, 1\)",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_fit_rejects(case):
    args, options, error, message = ARGUMENTS[case]
    bnn = make()
    rejects(bnn, error, message, lambda: bnn.fit(*args, **options))
    with tyxe.poutine.local_reparameterization():
        bnn.fit([(X, Y)], ADAM, 1, beta=0.0)  # nothing is left broken


def test_multipliers_next_to_an_instance():
    bnn = make()
    optimizer = torch.optim.Adam(bnn.parameters())
    rejects(
        bnn,
        ValueError,
        r"lr_multipliers needs an optimiser that fit sets up; pass the class",
        lambda: bnn.fit([(X, Y)], optimizer, 1, lr_multipliers={"scale": 10}),
    )


def test_nothing_to_fit():
    frozen = functools.partial(AutoNormal, train_loc=False, train_scale=False)
    bnn = make(guide=frozen)
    rejects(
        bnn,
        ValueError,
        "nothing to fit: no parameter of the BNN requires a gradient",
        lambda: bnn.fit([(X, Y)], ADAM, 1),
    )


@pytest.mark.parametrize(
    "optim",
    [
        torch.optim.LBFGS,
        functools.partial(torch.optim.LBFGS, lr=0.1),
        "instance",
    ],
)
def test_an_optimiser_that_needs_a_closure(optim):
    bnn = make()
    if optim == "instance":
        optim = torch.optim.LBFGS(bnn.parameters())
    rejects(bnn, TypeError, r"LBFGS.*closure", lambda: bnn.fit([(X, Y)], optim, 1))


TARGETS = {
    "a class too many": (
        Categorical(N),
        3,
        LABELS + 1,
        ValueError,
        r"outside the support of Categorical.* 1 to 3",
    ),
    "labels of floats": (
        Categorical(N),
        3,
        LABELS.float(),
        TypeError,
        r"targets of torch.float32; pass targets.long",
    ),
    "one-hot labels": (
        Categorical(N),
        3,
        torch.eye(3)[LABELS].long(),
        ValueError,
        r"targets of shape \(8, 3\)",
    ),
    "binary labels of minus one": (
        Bernoulli(N),
        1,
        2 * (LABELS[:, None] > 0).long() - 1,
        ValueError,
        "outside the support",
    ),
    "negative counts": (
        Poisson(N),
        1,
        LABELS[:, None] - 1,
        ValueError,
        "outside the support of Poisson",
    ),
    "an odd number of outputs": (
        HeteroskedasticGaussian(N),
        3,
        Y,
        ValueError,
        r"shape \(8, 3\); expected \(n, ..., 2 d\)",
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_fit_rejects_targets(case):
    likelihood, outputs, targets, error, message = TARGETS[case]
    bnn = make(nn.Linear(2, outputs), likelihood=likelihood)
    rejects(bnn, error, message, lambda: bnn.fit([(X, targets)], ADAM, 1))


# --------------------------------------------------------------------------- constructors


class NoParameters(nn.Module):
    def forward(self, x):
        return x


LIKELIHOOD = HomoskedasticGaussian(N, scale=0.5)
HIDE_ALL = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)

CONSTRUCTORS = {
    "no module": (
        lambda: tyxe.VariationalBNN(3, PRIOR, LIKELIHOOD, AutoNormal),
        TypeError,
        "net is a int; expected a torch.nn.Module",
    ),
    "no prior": (
        lambda: tyxe.VariationalBNN(net(), dist.Normal(0, 1), LIKELIHOOD, AutoNormal),
        TypeError,
        r"prior is a Normal; expected one from tyxe.priors, such as",
    ),
    "no likelihood": (
        lambda: tyxe.VariationalBNN(net(), PRIOR, AutoNormal),
        TypeError,
        r"likelihood is a (ABCMeta|type); expected one from tyxe.likelihoods",
    ),
    "prior and likelihood swapped": (
        lambda: tyxe.VariationalBNN(net(), LIKELIHOOD, PRIOR, AutoNormal),
        TypeError,
        "likelihood is a IIDPrior; expected one from tyxe.likelihoods",
    ),
    "a net without parameters": (
        lambda: tyxe.VariationalBNN(NoParameters(), PRIOR, LIKELIHOOD, AutoNormal),
        ValueError,
        "NoParameters has no parameters, so nothing can be inferred",
    ),
    "all hidden, with a guide": (
        lambda: make(prior=HIDE_ALL),
        ValueError,
        r"the prior exposes no variables, so the net_guide_builder has nothing to do: leave it out",
    ),
    "some exposed, without a guide": (
        lambda: make(guide=None),
        ValueError,
        r"the prior exposes variables, but there is no net_guide_builder: pass tyxe.guides.AutoN",
    ),
    "inferred noise without a guide": (
        lambda: make(likelihood=HomoskedasticGaussian(N, scale=dist.LogNormal(0.0, 1.0))),
        ValueError,
        "the likelihood has variables, but there is no likelihood_guide_builder",
    ),
    "a likelihood's guide without variables": (
        lambda: tyxe.VariationalBNN(net(), PRIOR, LIKELIHOOD, AutoNormal, AutoNormal),
        ValueError,
        "the likelihood has no variables, so the likelihood_guide_builder has nothing to do",
    ),
    "a guide's builder that builds none": (
        lambda: make(guide=lambda module: 3),
        TypeError,
        r"the guide's builder returned a int; expected a module that holds its parameters",
    ),
    "a builder of a plain function": (
        lambda: make(guide=lambda module: lambda *args: pyro.param("loc", torch.zeros(2))),
        TypeError,
        r"the guide's builder returned a function; expected a module that holds its parameters",
    ),
    "a guide that is built already": (
        lambda: make(guide=make().net_guide),
        TypeError,
        "builder is a AutoNormal already built; pass its class, or a functools.partial of it",
    ),
    "a Pyro guide that is built already": (
        lambda: make(guide=AutoDiagonalNormal(lambda: pyro.sample("w", dist.Normal(0, 1)))),
        TypeError,
        "builder is a AutoDiagonalNormal already built",
    ),
    "a kernel for a guide": (
        lambda: make(guide=NUTS),
        TypeError,
        r"NUTS is a kernel; use it with tyxe\.MCMC_BNN",
    ),
    "a kernel for a guide, for PyTorch": (
        lambda: tyxe.PytorchBNN(net(), PRIOR, HMC),
        TypeError,
        r"HMC is a kernel; use it with tyxe\.MCMC_BNN",
    ),
    "a guide for a kernel": (
        lambda: tyxe.MCMC_BNN(net(), PRIOR, LIKELIHOOD, AutoNormal),
        TypeError,
        r"AutoNormal is a guide; use it with tyxe\.VariationalBNN",
    ),
    "a Pyro guide for a kernel": (
        lambda: tyxe.MCMC_BNN(net(), PRIOR, LIKELIHOOD, AutoDiagonalNormal),
        TypeError,
        r"AutoDiagonalNormal is a guide; use it with tyxe\.VariationalBNN",
    ),
    "a partial of a guide for a kernel": (
        lambda: tyxe.MCMC_BNN(
            net(), PRIOR, LIKELIHOOD, functools.partial(AutoNormal, init_scale=0.1)
        ),
        TypeError,
        r"AutoNormal is a guide; use it with tyxe\.VariationalBNN",
    ),
    "a partial of a kernel for a guide": (
        lambda: make(guide=functools.partial(HMC, step_size=0.1)),
        TypeError,
        r"HMC is a kernel; use it with tyxe\.MCMC_BNN",
    ),
    "a net in place of pre-trained values": (
        lambda: tyxe.guides.PretrainedInitializer(net()),
        TypeError,
        r"values is a net; use PretrainedInitializer\.from_net\(net\)",
    ),
    "all hidden, with a guide, for PyTorch": (
        lambda: tyxe.PytorchBNN(net(), HIDE_ALL, AutoNormal),
        ValueError,
        "the prior exposes no parameters, so the guide has nothing to do",
    ),
    "no guide for PyTorch": (
        lambda: tyxe.PytorchBNN(net(), PRIOR),
        ValueError,
        "there is no guide_builder: pass tyxe.gu",
    ),
    "all hidden for MCMC": (
        lambda: tyxe.MCMC_BNN(net(), HIDE_ALL, LIKELIHOOD, NUTS),
        ValueError,
        "the prior exposes no parameters, so there is nothing to sample",
    ),
    "no kernel": (
        lambda: tyxe.MCMC_BNN(net(), PRIOR, LIKELIHOOD, 3),
        TypeError,
        "kernel_builder is a int; expected a kernel class such as pyro.infer.mcmc.NUTS",
    ),
    "no dataset_size": (
        lambda: Categorical(),
        TypeError,
        r"dataset_size is None; Categorical needs the number of training points: Categorical\(",
    ),
    "a likelihood's scale in dataset_size's place": (
        lambda: HomoskedasticGaussian(0.1),
        TypeError,
        "dataset_size is 0.1; HomoskedasticGaussian",
    ),
    "dataset_size of zero": (
        lambda: Categorical(0),
        ValueError,
        "dataset_size is 0; expected a positive number",
    ),
    "hide_all and expose": (
        lambda: tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True, expose=["0.weight"]),
        ValueError,
        "hide_all=True contradicts expose",
    ),
    "hidden and exposed": (
        lambda: make(
            prior=tyxe.priors.IIDPrior(dist.Normal(0, 1), hide=["0.weight"], expose=["0.*"])
        ),
        ValueError,
        "hide and expose both name '0.weight'",
    ),
    "a rule that is unknown": (
        lambda: tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_layers=["0"]),
        TypeError,
        "unknown rule 'hide_layers'; the rules are hide, hide_modules",
    ),
    "a name that the net does not have": (
        lambda: make(prior=tyxe.priors.IIDPrior(dist.Normal(0, 1), expose=["7.weight"])),
        ValueError,
        r"expose names '7.weight', which the net does not have; it has 0.weight, 0.b",
    ),
    "a module of another net": (
        lambda: make(prior=tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_modules=[nn.Linear(2, 4)])),
        ValueError,
        "hide_modules names a Linear module, which the net does not have",
    ),
    "a mapping with missing names": (
        lambda: make(prior=tyxe.priors.DictPrior({"0.weight": dist.Normal(0, 1).expand([4, 2])})),
        ValueError,
        r"no entry for '0.bias'; it has 0.weight. Add one, or hide the parameter",
    ),
    "a mapping with misshapen entries": (
        lambda: make(
            nn.Linear(2, 1),
            tyxe.priors.DictPrior(
                {"weight": dist.Normal(0, 1).expand([2, 1]), "bias": dist.Normal(0, 1).expand([1])}
            ),
        ),
        ValueError,
        r"'weight' has shape \(2, 1\), but the parameter has shape \(1, 2\); expand",
    ),
}


@pytest.mark.parametrize("case", CONSTRUCTORS)
def test_constructors_reject(case):
    build, error, message = CONSTRUCTORS[case]
    rng = torch.get_rng_state()
    with pytest.raises(error, match=message) as caught:
        build()
    # The user's own mistake and not a chain of inner ones.
    assert caught.value.__cause__ is None
    assert len(pyro.get_param_store()) == 0
    assert isinstance(rng, torch.Tensor)


def test_a_failed_constructor_leaves_net_and_prior_usable():
    module = net()
    keys = sorted(vars(module))
    with pytest.raises(ValueError, match="no entry for"):
        make(module, tyxe.priors.DictPrior({}))
    assert sorted(vars(module)) == keys
    assert all(p.requires_grad for p in module.parameters())
    make(module)


# --------------------------------------------------------------------------- update_prior


@pytest.mark.parametrize(
    ("prior", "error", "message"),
    [
        (
            tyxe.priors.DictPrior({"0.weight": dist.Normal(0, 1).expand([4, 2])}),
            ValueError,
            "no entry",
        ),
        (
            tyxe.priors.LambdaPrior(lambda name, module, param: dist.Normal(0, 1)),
            ValueError,
            r"'0.weight' has shape \(\), but the parameter has shape \(4, 2\)",
        ),
        (tyxe.priors.LambdaPrior(lambda name, module, param: 3), TypeError, "'0.weight' is a int"),
        (dist.Normal(0, 1), TypeError, r"prior is a Normal; expected one from tyxe.priors"),
    ],
)
def test_update_prior_rejects(prior, error, message):
    bnn = make()
    old, priors = bnn.prior, list(bnn.net_prior.priors())
    rejects(bnn, error, message, lambda: bnn.update_prior(prior))
    assert bnn.prior is old
    assert [(n, p) for n, p in bnn.net_prior.priors()] == priors


# --------------------------------------------------------------------------- not finite


class Explodes(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)
        self.value, self.calls = value, 0

    def forward(self, x):
        self.calls += self.training
        output = self.head(self.norm(self.layer(x)))
        return output * self.value if self.training and self.calls > 3 else output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_parameters(value):
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
    bnn, reference = (make(Explodes(value), prior) for _ in range(2))
    reference.load_state_dict(bnn.state_dict())
    pyro.set_rng_seed(1)
    reference.fit([(X, Y)], ADAM, 3, beta=0.0)
    pyro.set_rng_seed(1)
    with pytest.raises(RuntimeError, match=r"site 'likelihood.data' is -?(nan|inf)") as error:
        bnn.fit([(X, Y)], ADAM, 10, beta=0.0)
    assert "parameters are those before this step" in str(error.value)
    for name, expected in reference.state_dict().items():
        if isinstance(expected, torch.Tensor):  # BatchNorm's statistics among them
            torch.testing.assert_close(bnn.state_dict()[name], expected, rtol=0, atol=0, msg=name)
    assert all(module.training for module in bnn.modules())


def test_statistics_are_those_before_a_batch_that_is_not_finite():
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
    bnn = make(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), prior)
    broken = X.clone()
    broken[0, 0] = float("nan")
    with pytest.raises(RuntimeError, match="look for inputs or targets that are not finite"):
        bnn.fit([(X, Y), (broken, Y)], ADAM, 1)
    assert bnn.net[1].num_batches_tracked == 1
    assert bool(bnn.net[1].running_mean.isfinite().all())
    assert bool(bnn.predict(X)[0].isfinite().all())


def test_non_finite_draws_are_named():
    bnn = make()
    with torch.no_grad():
        bnn.net_guide.locs["2.weight"].fill_(float("nan"))
    with pytest.raises(RuntimeError, match=r"non-finite draws of net\.2\.weight"):
        bnn.fit([(X, Y)], ADAM, 1)


def test_non_finite_kl_is_named():
    bnn = make()
    with torch.no_grad():
        bnn.net_guide.locs["0.bias"].fill_(1e25)  # behind a tanh: the outputs are finite
    before = {n: v.clone() for n, v in bnn.named_parameters()}
    with pytest.raises(RuntimeError, match=r"KL is not finite at net\.0\.bias\."):
        bnn.fit([(X, Y)], ADAM, 1)
    assert all(torch.equal(v, before[n]) for n, v in bnn.named_parameters())


class RootOfZero(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.offset = nn.Linear(2, 1)

    def forward(self, x):
        return self.layer(x) + (self.offset(x) * 0).sqrt()  # finite, but its gradient is not


def test_a_gradient_that_is_not_finite_is_named():
    bnn = make(RootOfZero())
    before = {n: v.clone() for n, v in bnn.named_parameters()}
    with pytest.raises(
        RuntimeError, match=r"gradient is not finite at net_guide\.locs\.offset\.weight"
    ):
        bnn.fit([(X, Y)], ADAM, 1)
    assert all(torch.equal(v, before[n]) for n, v in bnn.named_parameters())


# --------------------------------------------------------------------------- MCMC


def mcmc():
    return tyxe.MCMC_BNN(
        net(), PRIOR, LIKELIHOOD, functools.partial(HMC, step_size=0.01, num_steps=2)
    )


@pytest.mark.parametrize(
    "call",
    [
        lambda bnn: bnn.predict(X),
        lambda bnn: bnn.predict(X, num_predictions=0),
        lambda bnn: bnn.evaluate(X, Y),
        lambda bnn: bnn.to_module(),
        lambda bnn: bnn.get_samples(),
        lambda bnn: bnn.to_arviz(),
    ],
)
def test_mcmc_before_fitting(call):
    if call.__code__.co_names == ("to_arviz",):
        pytest.importorskip("arviz", reason="needs the extra `mcmc`")
    bnn = mcmc()
    rejects(
        bnn,
        RuntimeError,
        r"no samples yet; call fit\(data_loader, num_samples\)",
        lambda: call(bnn),
    )


MCMC_FITS = {
    "an optimiser in num_samples' place": (([(X, Y)], ADAM), TypeError, "num_samples is a partial"),
    "an empty loader": (([], 2), ValueError, "loader is empty"),
    "no pairs": (([X], 2), ValueError, "the loader yields a Tensor; expected pairs"),
    "targets that would broadcast": (([(X, Y[:, 0])], 2), ValueError, "targets.unsqueeze"),
    "too many points": (([(X, Y), (X, Y)], 2), ValueError, "has 16 points.*dataset_size=8"),
}


@pytest.mark.parametrize("case", MCMC_FITS)
def test_mcmc_fit_rejects(case):
    args, error, message = MCMC_FITS[case]
    bnn = mcmc()
    rejects(bnn, error, message, lambda: bnn.fit(*args, disable_progbar=True))
    bnn.fit([(X, Y)], 2, warmup_steps=1, disable_progbar=True)
    samples = copy.deepcopy(bnn.get_samples())
    rejects(bnn, error, message, lambda: bnn.fit(*args, disable_progbar=True))
    assert all(torch.equal(bnn.get_samples()[n], v) for n, v in samples.items())


# --------------------------------------------------------------------------- handlers


def test_masks_of_wrong_kind():
    with pytest.raises(TypeError, match=r"expected a boolean tensor: pass mask.bool\(\)"):
        tyxe.poutine.selective_mask(mask=torch.ones(N), expose=["likelihood.data"])
    with pytest.raises(TypeError, match=r"expose is the string 'likelihood.data'; pass a list"):
        tyxe.poutine.selective_mask(mask=torch.ones(N).bool(), expose="likelihood.data")
    bnn = make()
    short = tyxe.poutine.selective_mask(mask=torch.ones(3).bool(), expose=["likelihood.data"])

    def fit():
        with short:
            bnn.fit([(X, Y)], ADAM, 1)

    rejects(bnn, ValueError, r"the mask has 3 entries, but likelihood.data has 8 rows", fit)


# --------------------------------------------------------------------------- options


OPTIONS = {
    "beta": ({"beta": -1}, "beta is -1; expected 0 or more, or a function of the epoch"),
    "beta, not a number": ({"beta": float("nan")}, "beta is nan; expected 0 or more"),
    "clip_norm": ({"clip_norm": -1}, "clip_norm is -1; expected a positive number"),
    "clip_norm of zero": ({"clip_norm": 0.0}, "clip_norm is 0.0; expected a positive number"),
    "lr_multipliers": (
        {"lr_multipliers": {"scale": -2.0}},
        r"lr_multipliers\['scale'\] is -2.0; expected 0 or more",
    ),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_fit_rejects_options(case):
    options, message = OPTIONS[case]
    bnn = make()
    rejects(bnn, ValueError, message, lambda: bnn.fit([(X, Y)], ADAM, 1, **options))
    assert bnn.optimizer is None


EVALUATIONS = {
    "inputs alone": (
        (X,),
        {},
        r"needs targets, once: evaluate\(inputs, y\), or evaluate\(loader\)",
    ),
    "a loader and targets": ((DataLoader(X, batch_size=4), Y), {}, "needs targets, once"),
    "a loader of inputs": (
        (DataLoader(X, batch_size=4),),
        {},
        r"the loader yields no targets; evaluate needs \(inputs, y\)",
    ),
    "no rows at a time": ((X, Y), {"batch_size": 0}, "batch_size is 0; expected a positive number"),
}


@pytest.mark.parametrize("case", EVALUATIONS)
def test_evaluate_rejects(case):
    args, options, message = EVALUATIONS[case]
    bnn = make()
    before = snapshot(bnn)
    with pytest.raises(ValueError, match=message) as caught:
        bnn.evaluate(*args, **options)
    assert caught.value.__cause__ is caught.value.__context__ is None
    # A DataLoader draws a seed when it is iterated over, so the generator may have gone on.
    assert_unchanged(bnn, (*before[:3], torch.get_rng_state()))


def test_predict_rejects_no_rows_at_a_time():
    bnn = make()
    message = "batch_size is 0; expected a positive number of rows"
    rejects(bnn, ValueError, message, lambda: bnn.predict(X, batch_size=0))


def test_a_prior_of_another_support_is_refused():
    bnn = make()
    old, priors = bnn.prior, list(bnn.net_prior.priors())
    positive = tyxe.priors.IIDPrior(dist.HalfNormal(1.0))
    message = "new prior of '0.weight' has other variables or another support than the old one"
    rejects(bnn, ValueError, message, lambda: bnn.update_prior(positive))
    assert bnn.prior is old
    assert list(bnn.net_prior.priors()) == priors
    bnn.fit([(X, Y)], ADAM, 1)


# --------------------------------------------------------------------------- logits


def logits_or_probabilities(likelihood, outputs, softmax):
    module = nn.Sequential(nn.Linear(2, outputs), *softmax)
    with torch.no_grad():
        module[0].weight.mul_(5.0)
    centre = tyxe.guides.PretrainedInitializer.from_net(module)
    return make(
        module, likelihood=likelihood, guide=functools.partial(AutoNormal, init_loc_fn=centre)
    )


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [(Categorical, 3, LABELS), (Bernoulli, 1, (LABELS > 0).float()[:, None])],
)
def test_logits_for_probabilities_are_refused(likelihood, outputs, targets):
    bnn = logits_or_probabilities(likelihood(N, logit_predictions=False), outputs, [])
    message = "it looks like logits: use logit_predictions=True"
    rejects(bnn, ValueError, message, lambda: bnn.fit([(X, targets)], ADAM, 1))


def test_probabilities_for_logits_are_warned_of():
    bnn = logits_or_probabilities(Categorical(N), 3, [nn.Softmax(-1)])
    with pytest.warns(tyxe.TyxeWarning, match="drop the net's softmax, or use logit_pr") as caught:
        bnn.fit([(X, LABELS)], ADAM, 2)
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.filterwarnings("error")
def test_each_kind_of_prediction_where_it_belongs_is_silent():
    probabilities = Categorical(N, logit_predictions=False)
    logits_or_probabilities(probabilities, 3, [nn.Softmax(-1)]).fit([(X, LABELS)], ADAM, 1)
    logits_or_probabilities(Categorical(N), 3, []).fit([(X, LABELS)], ADAM, 1)


def test_a_net_that_sums_over_the_batch_is_told_of():
    class Summed(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x).sum()

    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
    likelihood = tyxe.likelihoods.Categorical(4)
    bnn = tyxe.VariationalBNN(Summed(2, 3), prior, likelihood, tyxe.guides.AutoNormal)
    with pytest.raises(ValueError, match=r"one number from the net; expected .* sum or average"):
        bnn.fit([(torch.randn(4, 2), torch.zeros(4).long())], torch.optim.Adam, 1)


@pytest.mark.parametrize("dtype", [torch.long, torch.float32])
def test_one_hot_labels_are_told_of_argmax(dtype):
    bnn = make(nn.Linear(2, 3), likelihood=Categorical(N))
    one_hot = nn.functional.one_hot(LABELS, 3).to(dtype)
    error = TypeError if dtype.is_floating_point else ValueError
    rejects(bnn, error, r"targets\.argmax\(-1\)", lambda: bnn.fit([(X, one_hot)], ADAM, 1))
