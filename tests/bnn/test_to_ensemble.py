"""Ensembles of draws: plain modules that predict what the BNN does, exported or not."""

import copy
import io
from functools import partial

import onnxruntime
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import HMC
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal, AutoMultivariateNormal
from torch import nn

import tyxe
from tests.oracles.bnns import HIDE_NORMS, NORMAL, laplace, mean_field, mlp, plain, two_layers
from tests.oracles.front_nets import Counted
from tests.oracles.nets import NetOf
from tests.oracles.predictions import seeded
from tyxe.guides import AutoInducing, AutoNormal
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HomoskedasticGaussian,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from tyxe.likelihoods import HeteroskedasticGaussian as Heteroskedastic
from tyxe.priors import IIDPrior

DRAWS = torch.Generator().manual_seed(0)
X, Y = torch.randn(30, 4, generator=DRAWS), torch.randint(3, (30,), generator=DRAWS)


def net(outputs: int = 3) -> nn.Module:
    norm = nn.BatchNorm1d(8)
    norm.running_mean.normal_()
    return two_layers(4, 8, outputs, norm, nn.Tanh()).eval()


def variational(guide=AutoNormal, likelihood=None, outputs: int = 3, **guides):
    likelihood = likelihood or Categorical(30)
    return tyxe.VariationalBNN(net(outputs), HIDE_NORMS, likelihood, guide, **guides)


def mcmc():
    kernel = partial(HMC, step_size=0.01, num_steps=2)
    bnn = tyxe.MCMC_BNN(nn.Linear(4, 3), NORMAL, Categorical(30), kernel)
    bnn.fit([(X, Y)], num_samples=10, warmup_steps=1, disable_progbar=True)
    return bnn


def inferred_noise():
    likelihood = HomoskedasticGaussian(30, scale=dist.LogNormal(0.0, 1.0))
    return variational(likelihood=likelihood, outputs=2, likelihood_guide_builder=AutoNormal)


BNNS = {
    "AutoNormal": variational,
    "AutoInducing": lambda: variational(partial(AutoInducing, inducing_rows=3, inducing_cols=3)),
    "AutoDelta": lambda: variational(AutoDelta),
    "low rank": lambda: variational(partial(AutoLowRankMultivariateNormal, rank=2)),
    "maximum likelihood": lambda: plain(net(), Categorical(30)),
    "Laplace": lambda: laplace(net(), Categorical(30), [(X, Y)], HIDE_NORMS),
    "MCMC": mcmc,
    "Bernoulli": lambda: variational(likelihood=Bernoulli(30), outputs=1),
    "Gaussian": lambda: variational(likelihood=HomoskedasticGaussian(30, scale=0.3), outputs=1),
    "learnt noise": lambda: variational(
        likelihood=HomoskedasticGaussian(30, scale=0.3, learn_scale=True), outputs=1
    ),
    "inferred noise": inferred_noise,
    "heteroskedastic": lambda: variational(likelihood=Heteroskedastic(30), outputs=2),
    "Poisson": lambda: variational(likelihood=Poisson(30), outputs=1),
}


def parts(found) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("make", BNNS.values(), ids=BNNS.keys())
def test_an_ensemble_predicts_what_the_bnn_does_for_its_draws(make):
    bnn = make()
    ensemble = seeded(bnn.to_ensemble, 5)
    expected = seeded(bnn.predict, X, num_predictions=5, predictive="bnn")
    for _ in range(2):
        for found, one in zip(parts(ensemble(X)), parts(expected), strict=True):
            assert torch.equal(found, one)
            assert not found.requires_grad


def test_outputs_of_a_pytorch_bnn_are_stacked():
    bnn = tyxe.PytorchBNN(net(), HIDE_NORMS, AutoNormal)
    ensemble = seeded(bnn.to_ensemble, 5)
    assert torch.equal(ensemble(X), seeded(bnn.predict, X, num_predictions=5))


def test_what_has_no_posterior_is_there_once():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    last = IIDPrior(dist.Normal(0, 1), expose_modules=[net[2]], hide_parameters=["bias"])
    bnn = tyxe.VariationalBNN(net, last, Categorical(30), AutoNormal)
    ensemble = bnn.to_ensemble(4)
    own = sum(p.numel() for p in net.parameters())
    assert sum(p.numel() for p in ensemble.parameters()) == own + 3 * net[2].weight.numel()
    buffers = [b.data_ptr() for b in ensemble.buffers()]
    assert len(set(buffers)) == len(list(net.buffers()))


def twice():
    """Return a net that asks for a number, which torch.vmap does not take."""

    def forward(net, x):
        out = net.head(net.body(x))
        return out if float(out.sum()) < 1e9 else -out

    return NetOf(forward, body=Counted(4, 40), head=nn.Linear(40, 3))


def recurrent():
    """Return a net of which a part holds its weights a second time, beside its parameters."""

    def forward(net, x):
        return net.head(net.wide(net.body(x).tanh())[:, None])[0][:, 0]

    head = nn.LSTM(90, 3, batch_first=True)
    return NetOf(forward, body=nn.Linear(4, 90), head=head, wide=nn.Linear(90, 90))


def last_layer(net, head):
    prior = IIDPrior(dist.Normal(0, 1), expose_modules=[head])
    bnn = tyxe.VariationalBNN(net, prior, Categorical(30), partial(AutoNormal, init_scale=0.3))
    return seeded(bnn.to_ensemble, 6), seeded(bnn.predict, X, num_predictions=6)


def test_a_shared_body_runs_once_for_all_draws():
    net = nn.Sequential(Counted(4, 40), nn.Linear(40, 3))
    ensemble, expected = last_layer(net, net[1])
    torch.testing.assert_close(ensemble(X), expected)
    for member in ensemble.members:
        member[0].calls = 0
    first = ensemble(X)
    assert sum(member[0].calls for member in ensemble.members) == 1
    assert torch.equal(ensemble(X), first)
    program = torch.export.export(ensemble, (X,)).module()
    torch.testing.assert_close(program(X), expected)
    assert torch.equal(copy.deepcopy(ensemble)(X), first)


@pytest.mark.parametrize("kind", [twice, recurrent])
def test_what_one_pass_would_get_wrong_runs_draw_by_draw(kind):
    net = kind()
    ensemble, expected = last_layer(net, net.head)
    assert torch.equal(ensemble(X), expected)
    assert kind is recurrent or not ensemble._one_pass.is_right
    assert torch.equal(ensemble(X), expected)


def test_an_export_before_the_first_call_runs_draw_by_draw():
    net = nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 3))
    ensemble, expected = last_layer(net, net[2])
    program = torch.export.export(ensemble, (X,)).module()
    assert not ensemble._one_pass.knows(None)
    torch.testing.assert_close(program(X), expected)


def test_an_ensemble_is_independent_of_the_bnn():
    bnn = variational()
    ensemble = bnn.to_ensemble(3)
    before = ensemble(X)
    bnn.fit([(X, Y)], torch.optim.Adam, 3)
    assert torch.equal(ensemble(X), before)
    assert not ensemble.training
    assert not any(p.requires_grad for p in ensemble.parameters())


@pytest.mark.parametrize("make", [variational, lambda: tyxe.PytorchBNN(net(), NORMAL, AutoNormal)])
def test_no_draws_are_an_error(make):
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"num_draws is {count}; expected 1 or more"):
            make().to_ensemble(count)
    with pytest.raises(TypeError, match=r"num_draws is 1\.5; expected an integer"):
        make().to_ensemble(1.5)


# --- where it goes --------------------------------------------------------------------------------


def test_exported_for_any_number_of_rows_and_compiled():
    ensemble, rows = inferred_noise().to_ensemble(3), {0: torch.export.Dim("rows", min=2)}
    exported = torch.export.export(ensemble, (X,), dynamic_shapes=((rows,),)).module()
    compiled = torch.compile(ensemble, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(exported(X[:7]), ensemble(X[:7]))
    torch.testing.assert_close(compiled(X), ensemble(X))


def by_onnx(module):
    """Return what a module's export returns."""
    file = io.BytesIO()
    torch.onnx.export(module, (X,), dynamo=True, verbose=False).save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    (found,) = session.run(None, {session.get_inputs()[0].name: X.numpy()})
    return torch.from_numpy(found)


@pytest.mark.filterwarnings("ignore")
def test_onnx():
    ensemble = variational().to_ensemble(3)
    torch.testing.assert_close(by_onnx(ensemble), ensemble(X), rtol=1e-4, atol=1e-5)


def test_a_state_dict_goes_into_another_ensemble():
    first, second = inferred_noise().to_ensemble(3), inferred_noise().to_ensemble(3)
    assert not torch.equal(first(X)[0], second(X)[0])
    second.load_state_dict(first.state_dict())
    for other in (second, copy.deepcopy(first)):
        assert all(map(torch.equal, other(X), first(X)))


# --- closed forms ---------------------------------------------------------------------------------


TARGETS = {
    "classes": (Categorical(30), 3, torch.randint(3, (30,), generator=DRAWS)),
    "labels": (Bernoulli(30, event_dim=1), 1, (X[:, :1] > 0).float()),
    "numbers": (HomoskedasticGaussian(30, scale=0.3), 2, X[:, :2].sin()),
    "heavy tails": (StudentT(30, scale=0.3), 2, X[:, :2].sin()),
    "counts": (Poisson(30), 2, X[:, :2].exp().round()),
    "overdispersed": (NegativeBinomial(30), 1, X[:, :1].exp().round()),
}


def net_and_prior(outputs, **rules):
    net = mlp(4, 6, outputs)
    rules = rules or {"expose_modules": [net[2]]}
    return net, tyxe.priors.IIDPrior(dist.Normal(0, 1), **rules)


def laplace_of(kind, structure="full", **rules):
    likelihood, outputs, y = TARGETS[kind]
    bnn = tyxe.LaplaceBNN(*net_and_prior(outputs, **rules), likelihood, structure=structure)
    bnn.fit_curvature([(X, y)])
    return bnn


def variational_of(kind, guide=AutoNormal):
    likelihood, outputs, _ = TARGETS[kind]
    return tyxe.VariationalBNN(*net_and_prior(outputs), likelihood, partial(guide, init_scale=0.3))


def assert_is_glm(bnn, link="probit"):
    module = bnn.to_ensemble(closed_form=True, link=link)
    expected = bnn.predict(X, predictive="glm", link=link, num_predictions=100)
    torch.testing.assert_close(module(X), expected)
    return module


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_closed_forms_of_laplace(kind, structure):
    assert_is_glm(laplace_of(kind, structure))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("guide", [AutoNormal, AutoMultivariateNormal])
def test_closed_forms_of_guides(kind, guide):
    assert_is_glm(variational_of(kind, guide))


@pytest.mark.parametrize("hidden", ["weight", "bias"])
def test_a_closed_form_of_weights_or_biases_alone(hidden):
    rules = {"hide_modules": ["0"], "hide_parameters": [hidden]}
    assert_is_glm(laplace_of("classes", **rules), link="bridge")


def test_a_closed_form_is_compiled_copied_and_moved():
    module = assert_is_glm(variational_of("numbers"))
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
def test_a_closed_form_exports_for_any_number_of_rows(kind, structure):
    module = laplace_of(kind, structure).to_ensemble(closed_form=True)
    module(X)
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(module, (X,), dynamic_shapes=((rows,),)).module()
    torch.testing.assert_close(program(X[:7]), module(X[:7]), rtol=1e-4, atol=1e-5)


def test_a_closed_form_by_onnx():
    module = assert_is_glm(laplace_of("classes", "kron"))
    torch.testing.assert_close(by_onnx(module), module(X), rtol=1e-4, atol=1e-5)


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
    bnn, whole = variational_of("classes"), mean_field(mlp(4, 6, 3), Categorical(30))
    net, prior = net_and_prior(1)
    ordered = mean_field(net, Ordinal(30, 3), prior)
    chains = tyxe.MCMC_BNN(*net_and_prior(3), Categorical(30), tyxe.samplers.HMC)
    for one, given, options, error, message in (
        (whole, (), {}, TypeError, "over 4 parameters of 2 modules; closed forms are for"),
        (ordered, (), {}, TypeError, "Ordinal has no prediction in closed form"),
        (bnn, (4,), {}, TypeError, "leave num_draws out"),
        (bnn, (), {"link": "mc"}, ValueError, "link is 'mc'; expected one of 'probit'"),
        (chains, (), {}, (TypeError, ValueError), r"closed form|predictive"),
    ):
        with pytest.raises(error, match=message):
            one.to_ensemble(*given, closed_form=True, **options)
