"""Mistakes in constructors and predictions: one clear error each, and no half change."""

import functools
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.infer.mcmc import HMC, NUTS
from torch import nn
from torch.utils.data import DataLoader

import tyxe
from tests.oracles.bnns import NOTHING
from tests.oracles.nets import ReadLast
from tests.oracles.rejections import ADAM, LABELS, LIKELIHOOD, PRIOR, N, X, Y, make, net, rejects
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Bernoulli, Categorical, HomoskedasticGaussian
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


# --- predictions ----------------------------------------------------------------------------------


EVALUATIONS = [
    ((X,), {}, r"expected targets, once: evaluate\(inputs, y\), or evaluate\(loader\)"),
    ((DataLoader(X, batch_size=4), Y), {}, "expected targets, once"),
    ((DataLoader(X, batch_size=4),), {}, r"yields no targets; evaluate needs \(inputs, y\)"),
    ((X[:0], Y[:0]), {"reduction": "mean"}, "there are no points, and so"),
]


@pytest.mark.parametrize(("arguments", "options", "message"), EVALUATIONS)
def test_evaluate_rejects(arguments, options, message):
    bnn = make()
    # A DataLoader draws a seed when it is iterated over.
    error = rejects(
        bnn, ValueError, message, lambda: bnn.evaluate(*arguments, **options), draws=True
    )
    assert error.__cause__ is error.__context__ is None


def logits_or_probabilities(likelihood, outputs, softmax):
    module = nn.Sequential(nn.Linear(2, outputs), *softmax)
    nn.init.normal_(module[0].weight, std=3.0)
    centre = tyxe.guides.PretrainedInitializer.from_net(module)
    guide = functools.partial(AutoNormal, init_loc_fn=centre)
    return make(module, likelihood=likelihood, guide=guide)


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


def of_numpy(tensor):
    return pytest.importorskip("numpy").asarray(tensor)


def pytorch():
    return tyxe.PytorchBNN(net(), PRIOR, AutoNormal)


NAMES = "options go by name, such as num_predictions=32, and targets to evaluate"
INPUTS = "inputs are a ndarray; pass a tensor"
TARGETS = r"targets is a ndarray; expected a tensor: torch.as_tensor\(targets\)"
POSTERIOR = "no Gaussian posterior to linearise about: predict with predictive='bnn'"
CALLS = [
    (lambda bnn: bnn.predict(X, 32), NAMES),
    (lambda bnn: bnn.predict(X, Y), NAMES),
    (lambda bnn: bnn.interval(X, 0.9), NAMES),
    (lambda bnn: bnn.sample_predictive(X, 100), NAMES),
    (lambda bnn: bnn.predict(of_numpy(X)), INPUTS),
    (lambda bnn: bnn.evaluate(of_numpy(X), Y), INPUTS),
    (lambda bnn: bnn.sample_predictive(of_numpy(X)), INPUTS),
    (lambda bnn: pytorch().predict(of_numpy(X)), INPUTS),
    (lambda bnn: bnn.evaluate(X, of_numpy(Y)), TARGETS),
    (lambda bnn: bnn.evaluate(X, of_numpy(Y), batch_size=3), TARGETS),
    (lambda bnn: bnn.evaluate([(X, of_numpy(Y))]), TARGETS),
    (lambda bnn: make(prior=NOTHING, guide=None).predict(X, predictive="glm"), POSTERIOR),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_arguments_of_another_kind_are_told_what_they_have_to_be(call, message):
    bnn = make()
    rejects(bnn, TypeError, message, lambda: call(bnn), draws=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"link": "logit"}, ValueError, "link is 'logit'; expected one of"),
        ({"num_predictions": 1.5}, TypeError, "num_predictions is 1.5; expected an integer"),
        ({"batch_size": 0}, ValueError, "batch_size is 0; expected 1 or more"),
        ({"aggregate": X}, TypeError, "aggregate is a Tensor; expected True or False"),
        ({"predictive": []}, ValueError, "predictive is a list; expected one of 'bnn'"),
        ({"predictive": 3}, ValueError, "is 3; expected one of 'bnn', 'glm', or a function"),
    ],
)
def test_predict_rejects(options, error, message):
    bnn = make()
    rejects(bnn, error, message, lambda: bnn.predict(X, **options))
    rejects(bnn, error, message, lambda: bnn.evaluate(X, Y, **options))


def test_a_net_that_does_not_run_under_vmap():
    message = "vectorize=True needs a net that runs under torch.vmap, .*; leave vectorize out"
    with pytest.raises(ValueError, match=message):
        make(ReadLast(nn.LSTM, 1, 1, 1)).predict(X, vectorize=True)


def test_an_error_of_the_net_itself_is_the_nets_under_vmap_too():
    bnn = make()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        bnn.predict(X[:, :1], num_predictions=2, vectorize=True)
