"""Parts and priors that do not fit: one clear error each, and no half change."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.mcmc import HMC, NUTS
from torch import nn

import tyxe
from tests.oracles.bnns import NOTHING
from tests.oracles.rejections import ADAM, LIKELIHOOD, PRIOR, N, X, Y, make, net, rejects
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical, HomoskedasticGaussian
from tyxe.priors import BinaryPrior, DictPrior, IIDPrior, LambdaPrior
from tyxe.util import pyro_sample_sites

NORMAL = dist.Normal(0, 1)


def variational(*parts):
    return tyxe.VariationalBNN(net(), *parts)


def mcmc(kernel=HMC, prior=PRIOR, likelihood=LIKELIHOOD, module=None):
    return tyxe.MCMC_BNN(module or net(), prior, likelihood, kernel)


def statements(*args):
    return pyro.param("loc", torch.zeros(2))


BUILT = AutoDiagonalNormal(lambda: pyro.sample("w", NORMAL))
LEARNT = HomoskedasticGaussian(N, scale=0.5, learn_scale=True)
INFERRED = HomoskedasticGaussian(N, scale=dist.LogNormal(0.0, 1.0))
COUNTS = HomoskedasticGaussian(N, scale=dist.Poisson(1.0))
FEW = DictPrior({"0.weight": NORMAL.expand([4, 2])})
MISSHAPEN = DictPrior({"weight": NORMAL.expand([2, 1]), "bias": NORMAL.expand([1])})
WRONG_TYPES = [
    (lambda: make(3), "net is 3; expected a torch.nn.Module"),
    (lambda: make(nn.Identity), "net is the class Identity; expected a torch.nn.Module"),
    (lambda: make(prior=NORMAL), "prior is a Normal; expected one"),
    (lambda: make(likelihood=Categorical), r"the class Categ.* tyxe.likelihoods.Categorical\("),
    (lambda: variational(LIKELIHOOD, PRIOR), "likelihood is an IIDPrior; expected one from"),
    (lambda: make(guide=lambda _: statements), "returned is a function; expected a module"),
    (lambda: make(guide=make().net_guide), "builder is an AutoNormal; expected a class"),
    (lambda: make(guide=BUILT), "builder is an AutoDiagonalNormal; expected"),
    (lambda: make(guide=partial(HMC)), r"HMC is a kernel; use it with tyxe\.MCMC_BNN"),
    (lambda: mcmc(AutoDiagonalNormal), r"is a guide; use it with tyxe\.VariationalBNN"),
    (lambda: mcmc(partial(AutoNormal)), r"is a guide; use it with tyxe\.VariationalBNN"),
    (lambda: mcmc(3), "is 3; expected a kernel such as tyxe.samplers."),
    (lambda: mcmc(HMC(lambda: None)), "is a HMC; expected .* a class"),
]
WRONG_VALUES = [
    (lambda: make(nn.Identity()), "so nothing can be inferred"),
    (lambda: make(prior=NOTHING), "the net_guide_builder has nothing to do: leave it out"),
    (lambda: make(guide=None), "there is no net_guide_builder: pass tyxe.guides.AutoN"),
    (lambda: make(likelihood=INFERRED), "but there is no likelihood_guide_builder"),
    (lambda: variational(PRIOR, LIKELIHOOD, AutoNormal, AutoNormal), "no variables, so the likeli"),
    (lambda: tyxe.PytorchBNN(net(), NOTHING, AutoNormal), "so the guide_builder has nothing"),
    (lambda: tyxe.PytorchBNN(net(), PRIOR), "there is no guide_builder: pass tyxe.gu"),
    (lambda: mcmc(NUTS, NOTHING), "so there is nothing to sample"),
    (lambda: mcmc(likelihood=LEARNT), "the likelihood has log_noise: pass its scale"),
    (lambda: mcmc(NUTS, likelihood=COUNTS), "discrete variables, which 'scale'"),
    (lambda: mcmc(prior=BinaryPrior()), "which '0.weight' has; use tyxe.VariationalBNN"),
    (lambda: mcmc(module=net().bfloat16()), r"is torch.bfloat16; .*use net.float\(\)"),
    (lambda: Categorical(N, event_dim=-1), "event_dim is -1; expected 0"),
    (lambda: make(nn.Sequential(nn.LazyLinear(3))), "run the net on a batch before"),
    (lambda: make(nn.Linear(2, 1, device="meta")), r"no values yet: .* net.to_empty\(device=...\)"),
    (lambda: make(nn.Linear(2, 1), MISSHAPEN), r"but the parameter has shape \(1, 2\); expand"),
]


@pytest.mark.parametrize(
    ("build", "message", "error"),
    [(*row, TypeError) for row in WRONG_TYPES] + [(*row, ValueError) for row in WRONG_VALUES],
)
def test_constructors_reject(build, message, error):
    with pytest.raises(error, match=message) as caught:
        build()
    # The user's own mistake and not a chain of inner ones.
    assert caught.value.__cause__ is None
    assert len(pyro.get_param_store()) == 0


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
        make(module, DictPrior({}))
    assert sorted(vars(module)) == keys
    assert all(p.requires_grad for p in module.parameters())
    make(module)


SCALARS = LambdaPrior(lambda name, module, param: NORMAL)


@pytest.mark.parametrize(
    ("prior", "error", "message"),
    [
        (FEW, ValueError, "no entry"),
        (SCALARS, ValueError, r"has shape \(\), but the parameter has shape \(4, 2\)"),
        (LambdaPrior(lambda *_: 3), TypeError, "'0.weight' is 3"),
        (NORMAL, TypeError, "prior is a Normal; expected one from tyxe.priors"),
        (IIDPrior(dist.HalfNormal(1.0)), ValueError, "other variables or another support than"),
    ],
)
def test_update_prior_rejects(prior, error, message):
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
        for prior in (PRIOR, NOTHING):
            with pytest.raises(TypeError, match=r"0.weight' is in a scripted or traced module, .*"):
                make(module, prior, guide=None if prior is NOTHING else AutoNormal)
    frozen = net().requires_grad_(False)
    bnn = make(nn.Sequential(compiled(frozen), nn.Linear(1, 1)))
    assert pyro_sample_sites(bnn) == ["1.weight", "1.bias"]
    bnn.fit([(X, Y)], ADAM, 1)
