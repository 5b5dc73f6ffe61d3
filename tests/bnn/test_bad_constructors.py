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


CONSTRUCTORS = {
    "no module": (
        lambda: tyxe.VariationalBNN(3, PRIOR, LIKELIHOOD, AutoNormal),
        TypeError,
        "net is 3; expected a torch.nn.Module",
    ),
    "no prior": (
        lambda: tyxe.VariationalBNN(net(), dist.Normal(0, 1), LIKELIHOOD, AutoNormal),
        TypeError,
        r"prior is a Normal; expected one from tyxe.priors, such as",
    ),
    "no likelihood": (
        lambda: tyxe.VariationalBNN(net(), PRIOR, AutoNormal),
        TypeError,
        "likelihood is the class AutoNormal; expected one from tyxe.likelihoods",
    ),
    "a likelihood's class": (
        lambda: make(likelihood=Categorical),
        TypeError,
        r"likelihood is the class Categorical; expected .* tyxe.likelihoods.Categorical\(",
    ),
    "a prior's class": (
        lambda: make(prior=tyxe.priors.IIDPrior),
        TypeError,
        r"prior is the class IIDPrior; expected one from tyxe.priors, such as tyxe",
    ),
    "a net's class": (
        lambda: make(NoParameters),
        TypeError,
        "net is the class NoParameters; expected a torch.nn.Module",
    ),
    "noise that MCMC would not train": (
        lambda: tyxe.MCMC_BNN(
            net(), PRIOR, HomoskedasticGaussian(N, scale=0.5, learn_scale=True), HMC
        ),
        ValueError,
        "MCMC trains no parameters, and the likelihood has log_noise: pass its scale",
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
        "kernel_builder is a int; expected a kernel such as tyxe.samplers.NUTS",
    ),
    "a likelihood's scale in dataset_size's place": (
        lambda: HomoskedasticGaussian(0.1),
        TypeError,
        r"dataset_size is 0.1; expected an integer, .*: HomoskedasticGaussian\(len",
    ),
    "dataset_size of zero": (
        lambda: Categorical(0),
        ValueError,
        "dataset_size is 0; expected 1 or more",
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
    "a net whose parameters have no shape yet": (
        lambda: make(nn.Sequential(nn.LazyLinear(3))),
        ValueError,
        "'0.weight' has no values yet: run the net on a batch before",
    ),
    "a net without values": (
        lambda: make(nn.Linear(2, 1, device="meta")),
        ValueError,
        r"'weight' has no values yet: .* net.to_empty\(device=...\)",
    ),
    "a kernel that is built already": (
        lambda: tyxe.MCMC_BNN(net(), PRIOR, LIKELIHOOD, HMC(lambda: None)),
        TypeError,
        "kernel_builder is a HMC already built; pass its class, or a functools.partial",
    ),
    "weights in half precision for HMC": (
        lambda: tyxe.MCMC_BNN(net().bfloat16(), PRIOR, LIKELIHOOD, HMC),
        ValueError,
        r"HMC needs float32 or float64, and '0.weight' is in torch.bfloat16; use net.float\(\)",
    ),
    "discrete weights for HMC": (
        lambda: tyxe.MCMC_BNN(net(), tyxe.priors.BinaryPrior(), LIKELIHOOD, HMC),
        ValueError,
        "HMC samples no discrete weights, which '0.weight' has; use tyxe.VariationalBNN with",
    ),
    "a function of other arguments": (
        lambda: tyxe.priors.LambdaPrior(lambda name, module: dist.Normal(0, 1)),
        TypeError,
        r"fn takes \(name, module\); expected a function of \(name, module, param\)",
    ),
    "negative dimensions of events": (
        lambda: Categorical(N, event_dim=-1),
        ValueError,
        "event_dim is -1; expected 0 or more",
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


def test_a_prior_of_another_support_is_refused():
    bnn = make()
    old, priors = bnn.prior, list(bnn.net_prior.priors())
    positive = tyxe.priors.IIDPrior(dist.HalfNormal(1.0))
    message = "new prior of '0.weight' has other variables or another support than the old one"
    rejects(bnn, ValueError, message, lambda: bnn.update_prior(positive))
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
