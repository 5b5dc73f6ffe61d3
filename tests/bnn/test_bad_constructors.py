"""Parts and priors that do not fit: one clear error each, and no half change."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.mcmc import HMC, NUTS
from torch import nn

import tyxe
from tests.oracles.rejections import ADAM, LIKELIHOOD, PRIOR, N, X, Y, make, net, rejects
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical, HomoskedasticGaussian
from tyxe.util import pyro_sample_sites


class NoParameters(nn.Module):
    def forward(self, x):
        return x


HIDE_ALL = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)


def iid(**rules):
    return tyxe.priors.IIDPrior(dist.Normal(0, 1), **rules)


def mcmc(kernel, prior=PRIOR, likelihood=LIKELIHOOD, module=None):
    return tyxe.MCMC_BNN(module or net(), prior, likelihood, kernel)


LEARNT = HomoskedasticGaussian(N, scale=0.5, learn_scale=True)
INFERRED = HomoskedasticGaussian(N, scale=dist.LogNormal(0.0, 1.0))
FEW = tyxe.priors.DictPrior({"0.weight": dist.Normal(0, 1).expand([4, 2])})
MISSHAPEN = tyxe.priors.DictPrior(
    {"weight": dist.Normal(0, 1).expand([2, 1]), "bias": dist.Normal(0, 1).expand([1])}
)
CONSTRUCTORS = {
    "net": (lambda: make(3), TypeError, "net is 3; expected a torch.nn.Module"),
    "class": (lambda: make(NoParameters), TypeError, "net is the class NoParameters; expected a t"),
    "prior": (lambda: make(prior=dist.Normal(0, 1)), TypeError, "prior is a Normal; expected one"),
    "likelihood": (
        lambda: make(likelihood=Categorical),
        TypeError,
        r"likelihood is the class Categorical; expected .* tyxe.likelihoods.Categorical\(",
    ),
    "swapped": (
        lambda: tyxe.VariationalBNN(net(), LIKELIHOOD, PRIOR, AutoNormal),
        TypeError,
        "likelihood is a IIDPrior; expected one from tyxe.likelihoods",
    ),
    "no parameters": (lambda: make(NoParameters()), ValueError, "so nothing can be inferred"),
    "all hidden, with a guide": (
        lambda: make(prior=HIDE_ALL),
        ValueError,
        "the prior exposes no variables, so the net_guide_builder has nothing to do: leave it out",
    ),
    "some exposed, without a guide": (
        lambda: make(guide=None),
        ValueError,
        "the prior exposes variables, but there is no net_guide_builder: pass tyxe.guides.AutoN",
    ),
    "inferred noise without a guide": (
        lambda: make(likelihood=INFERRED),
        ValueError,
        "the likelihood has variables, but there is no likelihood_guide_builder",
    ),
    "a likelihood's guide without variables": (
        lambda: tyxe.VariationalBNN(net(), PRIOR, LIKELIHOOD, AutoNormal, AutoNormal),
        ValueError,
        "the likelihood has no variables, so the likelihood_guide_builder has nothing to do",
    ),
    "a builder that builds none": (
        lambda: make(guide=lambda _: lambda *args: pyro.param("loc", torch.zeros(2))),
        TypeError,
        "the guide's builder returned a function; expected a module that holds its parameters",
    ),
    "built": (lambda: make(guide=make().net_guide), TypeError, "is a AutoNormal already built; pa"),
    "Pyro's, built": (
        lambda: make(guide=AutoDiagonalNormal(lambda: pyro.sample("w", dist.Normal(0, 1)))),
        TypeError,
        "builder is a AutoDiagonalNormal already built",
    ),
    "a kernel for a guide": (
        lambda: make(guide=functools.partial(HMC, step_size=0.1)),
        TypeError,
        r"HMC is a kernel; use it with tyxe\.MCMC_BNN",
    ),
    "a guide for a kernel": (
        lambda: mcmc(AutoDiagonalNormal),
        TypeError,
        r"AutoDiagonalNormal is a guide; use it with tyxe\.VariationalBNN",
    ),
    "a partial of a guide for a kernel": (
        lambda: mcmc(functools.partial(AutoNormal, init_scale=0.1)),
        TypeError,
        r"AutoNormal is a guide; use it with tyxe\.VariationalBNN",
    ),
    "values": (
        lambda: tyxe.guides.PretrainedInitializer(net()),
        TypeError,
        r"values is a net; use PretrainedInitializer\.from_net\(net\)",
    ),
    "all hidden, with a guide, for PyTorch": (
        lambda: tyxe.PytorchBNN(net(), HIDE_ALL, AutoNormal),
        ValueError,
        "the prior exposes no variables, so the guide_builder has nothing to do",
    ),
    "no guide for PyTorch": (
        lambda: tyxe.PytorchBNN(net(), PRIOR),
        ValueError,
        "there is no guide_builder: pass tyxe.gu",
    ),
    "all hidden for MCMC": (
        lambda: mcmc(NUTS, HIDE_ALL),
        ValueError,
        "the prior exposes no parameters, so there is nothing to sample",
    ),
    "noise that MCMC would not train": (
        lambda: mcmc(HMC, likelihood=LEARNT),
        ValueError,
        "MCMC trains no parameters, and the likelihood has log_noise: pass its scale",
    ),
    "discrete noise": (
        lambda: mcmc(NUTS, likelihood=HomoskedasticGaussian(N, scale=dist.Poisson(1.0))),
        ValueError,
        "no discrete variables, which the likelihood's 'scale'",
    ),
    "discrete weights": (
        lambda: mcmc(HMC, tyxe.priors.BinaryPrior()),
        ValueError,
        "HMC samples no discrete weights, which '0.weight' has; use tyxe.VariationalBNN with",
    ),
    "half precision": (
        lambda: mcmc(HMC, module=net().bfloat16()),
        ValueError,
        r"HMC needs float32 or float64, and '0.weight' is in torch.bfloat16; use net.float\(\)",
    ),
    "kernel": (
        lambda: mcmc(3),
        TypeError,
        "is 3; expected a kernel such as tyxe.samplers.",
    ),
    "kernel, built": (lambda: mcmc(HMC(lambda: None)), TypeError, "is a HMC; expected .* a class"),
    "event_dim": (lambda: Categorical(N, event_dim=-1), ValueError, "event_dim is -1; expected 0"),
    "rules": (lambda: iid(hide_all=True, expose=["0.*"]), ValueError, "=True contradicts expose"),
    "rule": (lambda: iid(hide_layers=["0"]), TypeError, "unknown rule 'hide_layers'; the rules ar"),
    "hidden and exposed": (
        lambda: make(prior=iid(hide=["0.weight"], expose=["0.*"])),
        ValueError,
        "hide and expose both name '0.weight'",
    ),
    "a name that the net does not have": (
        lambda: make(prior=iid(expose=["7.weight"])),
        ValueError,
        "expose names '7.weight', which the net does not have; it has 0.weight, 0.b",
    ),
    "a module of another net": (
        lambda: make(prior=iid(hide_modules=[nn.Linear(2, 4)])),
        ValueError,
        "hide_modules names a Linear module, which the net does not have",
    ),
    "no shape": (
        lambda: make(nn.Sequential(nn.LazyLinear(3))),
        ValueError,
        "'0.weight' has no values yet: run the net on a batch before",
    ),
    "no values": (
        lambda: make(nn.Linear(2, 1, device="meta")),
        ValueError,
        r"'weight' has no values yet: .* net.to_empty\(device=...\)",
    ),
    "a function of other arguments": (
        lambda: tyxe.priors.LambdaPrior(lambda name, module: dist.Normal(0, 1)),
        TypeError,
        r"fn takes \(name, module\); expected a function of \(name, module, param\)",
    ),
    "missing names": (
        lambda: make(prior=FEW),
        ValueError,
        "no entry for '0.bias'; it has 0.weight. Add one, or hide the parameter",
    ),
    "misshapen": (
        lambda: make(nn.Linear(2, 1), MISSHAPEN),
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


def test_a_parameter_without_elements_is_no_site():
    module = net()
    module.nothing = nn.Parameter(torch.empty(0))
    bnn = make(module)
    assert "net.nothing" not in bnn.guide()
    assert bnn.predict(X, num_predictions=2)[0].shape == (N, 1)


def test_a_failed_constructor_leaves_net_and_prior_usable():
    module = net()
    keys = sorted(vars(module))
    with pytest.raises(ValueError, match="no entry for"):
        make(module, tyxe.priors.DictPrior({}))
    assert sorted(vars(module)) == keys
    assert all(p.requires_grad for p in module.parameters())
    make(module)


SCALARS = tyxe.priors.LambdaPrior(lambda name, module, param: dist.Normal(0, 1))
UPDATES = {
    "missing": (FEW, ValueError, "no entry"),
    "shapes": (SCALARS, ValueError, r"has shape \(\), but the parameter has shape \(4, 2\)"),
    "a number": (tyxe.priors.LambdaPrior(lambda *_: 3), TypeError, "'0.weight' is 3"),
    "no prior": (dist.Normal(0, 1), TypeError, "prior is a Normal; expected one from tyxe.priors"),
    "support": (
        tyxe.priors.IIDPrior(dist.HalfNormal(1.0)),
        ValueError,
        "new prior of '0.weight' has other variables or another support than the old one",
    ),
}


@pytest.mark.parametrize("case", UPDATES)
def test_update_prior_rejects(case):
    prior, error, message = UPDATES[case]
    bnn = make()
    old, priors = bnn.prior, list(bnn.net_prior.priors())
    rejects(bnn, error, message, lambda: bnn.update_prior(prior))
    assert bnn.prior is old
    assert list(bnn.net_prior.priors()) == priors
    bnn.fit([(X, Y)], ADAM, 1)


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, X)])
def test_scripted_and_traced_nets(compiled):
    for module in (compiled(net()), nn.Sequential(compiled(net()), nn.Linear(1, 1))):
        for prior in (PRIOR, HIDE_ALL):
            with pytest.raises(TypeError, match=r"0.weight' is in a scripted or traced module, .*"):
                make(module, prior, guide=None if prior is HIDE_ALL else AutoNormal)
    frozen = net().requires_grad_(False)
    bnn = make(nn.Sequential(compiled(frozen), nn.Linear(1, 1)))
    assert pyro_sample_sites(bnn) == ["1.weight", "1.bias"]
    bnn.fit([(X, Y)], ADAM, 1)
