"""A last layer's Gaussian posterior as one plain module, without draws."""

import copy
import io
from functools import partial

import onnxruntime
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal
from torch import nn

import tyxe
from tests.oracles.bnns import mean_field, mlp
from tyxe.guides import AutoNormal
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HomoskedasticGaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)

DRAWS = torch.Generator().manual_seed(0)
X = torch.randn(30, 4, generator=DRAWS)
TARGETS = {
    "classes": (Categorical(30), 3, torch.randint(3, (30,), generator=DRAWS)),
    "labels": (Bernoulli(30, event_dim=1), 1, (X[:, :1] > 0).float()),
    "numbers": (HomoskedasticGaussian(30, scale=0.3), 2, X[:, :2].sin()),
    "heavy tails": (StudentT(30, scale=0.3), 2, X[:, :2].sin()),
    "counts": (Poisson(30), 2, X[:, :2].exp().round()),
    "overdispersed": (NegativeBinomial(30), 1, X[:, :1].exp().round()),
}


def last_layer(outputs, **rules):
    net = mlp(4, 6, outputs)
    rules = rules or {"expose_modules": [net[2]]}
    return net, tyxe.priors.IIDPrior(dist.Normal(0, 1), **rules)


def laplace(kind, structure="full", **rules):
    likelihood, outputs, y = TARGETS[kind]
    bnn = tyxe.LaplaceBNN(*last_layer(outputs, **rules), likelihood, structure=structure)
    bnn.fit_curvature([(X, y)])
    return bnn


def variational(kind, guide=AutoNormal):
    likelihood, outputs, _ = TARGETS[kind]
    return tyxe.VariationalBNN(*last_layer(outputs), likelihood, partial(guide, init_scale=0.3))


def assert_is_glm(bnn, link="probit"):
    module = bnn.to_ensemble(closed_form=True, link=link)
    expected = bnn.predict(X, predictive="glm", link=link, num_predictions=100)
    torch.testing.assert_close(module(X), expected)
    return module


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_laplace(kind, structure):
    assert_is_glm(laplace(kind, structure))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("guide", [AutoNormal, AutoMultivariateNormal])
def test_variational(kind, guide):
    assert_is_glm(variational(kind, guide))


@pytest.mark.parametrize("hidden", ["weight", "bias"])
def test_a_weight_or_a_bias_alone(hidden):
    rules = {"hide_modules": ["0"], "hide_parameters": [hidden]}
    assert_is_glm(laplace("classes", **rules), link="bridge")


def test_is_compiled_copied_and_moved():
    module = assert_is_glm(variational("numbers"))
    compiled = torch.compile(module, backend="eager")
    for other in (compiled, copy.deepcopy(module), module.double().float()):
        torch.testing.assert_close(other(X + 1), module(X + 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "structure"),
    [
        ("classes", "full"),
        ("classes", "kron"),
        ("labels", "diag"),
        ("labels", "lowrank"),
        ("numbers", "full"),
        ("numbers", "diag"),
    ],
)
def test_exports_for_any_number_of_rows(kind, structure):
    module = laplace(kind, structure).to_ensemble(closed_form=True)
    module(X)
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(module, (X,), dynamic_shapes=((rows,),)).module()
    torch.testing.assert_close(program(X[:7]), module(X[:7]), rtol=1e-4, atol=1e-5)


def test_onnx():
    module = assert_is_glm(laplace("classes", "kron"))
    program = torch.onnx.export(module, (X,), dynamo=True, verbose=False)
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), module(X), rtol=1e-4, atol=1e-5)


def test_what_is_not_last_is_refused_at_the_first_call():
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3), nn.LogSoftmax(-1))
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_modules=[net[1]])
    bnn = mean_field(net, Categorical(30), prior)
    module = bnn.to_ensemble(closed_form=True)
    with pytest.raises(RuntimeError, match="call the module once before an export"):
        torch.export.export(module, (X,))
    with pytest.raises(TypeError, match="not the last operation"):
        module(X)


def test_what_has_no_closed_form():
    bnn, whole = variational("classes"), mean_field(mlp(4, 6, 3), Categorical(30))
    net, prior = last_layer(1)
    ordered = mean_field(net, Ordinal(30, 3), prior)
    chains = tyxe.MCMC_BNN(*last_layer(3), Categorical(30), tyxe.samplers.HMC)
    for one, given, options, error, message in (
        (whole, (), {}, TypeError, "over 4 parameters of 2 modules; closed forms are for"),
        (ordered, (), {}, TypeError, "Ordinal has no prediction in closed form"),
        (bnn, (4,), {}, TypeError, "leave num_draws out"),
        (bnn, (), {"link": "mc"}, ValueError, "link is 'mc'; expected one of 'probit'"),
        (chains, (), {}, (TypeError, ValueError), r"closed form|predictive"),
    ):
        with pytest.raises(error, match=message):
            one.to_ensemble(*given, closed_form=True, **options)
