"""Ensembles of draws: plain modules that predict what the BNN does, exported or not."""

import copy
import io
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import onnxruntime
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import HMC
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal
from torch import nn

import tyxe
from tyxe.guides import AutoInducing, AutoNormal
from tyxe.likelihoods import Bernoulli, Categorical, HomoskedasticGaussian, Poisson
from tyxe.likelihoods import HeteroskedasticGaussian as Heteroskedastic
from tyxe.priors import IIDPrior

PRIOR = IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
X, Y = torch.randn(30, 4), torch.randint(3, (30,))


def net(outputs: int = 3) -> nn.Module:
    norm = nn.BatchNorm1d(8)
    norm.running_mean.normal_()
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, outputs)).eval()


def variational(guide=AutoNormal, likelihood=None, outputs: int = 3, **guides):
    likelihood = likelihood or Categorical(30)
    return tyxe.VariationalBNN(net(outputs), PRIOR, likelihood, guide, **guides)


def laplace():
    bnn = tyxe.LaplaceBNN(net(), PRIOR, Categorical(30))
    bnn.fit_curvature([(X, Y)])
    return bnn


def mcmc():
    kernel = partial(HMC, step_size=0.01, num_steps=2)
    bnn = tyxe.MCMC_BNN(nn.Linear(4, 3), IIDPrior(dist.Normal(0, 1)), Categorical(30), kernel)
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
    "maximum likelihood": lambda: tyxe.VariationalBNN(
        net(), IIDPrior(dist.Normal(0, 1), hide_all=True), Categorical(30)
    ),
    "Laplace": laplace,
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
    pyro.set_rng_seed(3)
    ensemble = bnn.to_ensemble(5)
    pyro.set_rng_seed(3)
    expected = bnn.predict(X, num_predictions=5, predictive="bnn")
    for found, one in zip(parts(ensemble(X)), parts(expected), strict=True):
        assert torch.equal(found, one)
    for found, again in zip(parts(ensemble(X)), parts(ensemble(X)), strict=True):
        assert torch.equal(found, again)
        assert not found.requires_grad


def test_outputs_of_a_pytorch_bnn_are_stacked():
    bnn = tyxe.PytorchBNN(net(), PRIOR, AutoNormal)
    pyro.set_rng_seed(3)
    ensemble = bnn.to_ensemble(5)
    pyro.set_rng_seed(3)
    assert torch.equal(ensemble(X), bnn.predict(X, num_predictions=5))


def test_what_has_no_posterior_is_there_once():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    last = IIDPrior(dist.Normal(0, 1), expose_modules=[net[2]], hide_parameters=["bias"])
    bnn = tyxe.VariationalBNN(net, last, Categorical(30), AutoNormal)
    ensemble = bnn.to_ensemble(4)
    own = sum(p.numel() for p in net.parameters())
    assert sum(p.numel() for p in ensemble.parameters()) == own + 3 * net[2].weight.numel()
    buffers = [b.data_ptr() for b in ensemble.buffers()]
    assert len(set(buffers)) == len(list(net.buffers()))


class Counted(nn.Linear):
    """A body that counts its forwards."""

    count = 0

    def forward(self, x):
        self.count += 1
        return super().forward(x).tanh()


class Twice(nn.Module):
    """A net whose head takes one row at a time in Python, which torch.vmap does not take."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Counted(4, 40), nn.Linear(40, 3)

    def forward(self, x):
        out = self.head(self.body(x))
        return out if float(out.sum()) < 1e9 else -out


class Recurrent(nn.Module):
    """A net of which a part holds its weights a second time, beside its parameters."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 90), nn.LSTM(90, 3, batch_first=True)
        self.wide = nn.Linear(90, 90)

    def forward(self, x):
        return self.head(self.wide(self.body(x).tanh())[:, None])[0][:, 0]


def last_layer(net, head):
    prior = IIDPrior(dist.Normal(0, 1), expose_modules=[head])
    bnn = tyxe.VariationalBNN(net, prior, Categorical(30), partial(AutoNormal, init_scale=0.3))
    pyro.set_rng_seed(3)
    ensemble = bnn.to_ensemble(6)
    pyro.set_rng_seed(3)
    return ensemble, bnn.predict(X, num_predictions=6)


def test_a_shared_body_runs_once_for_all_draws():
    net = nn.Sequential(Counted(4, 40), nn.Linear(40, 3))
    ensemble, expected = last_layer(net, net[1])
    torch.testing.assert_close(ensemble(X), expected)
    for member in ensemble.members:
        member[0].count = 0
    first = ensemble(X)
    assert sum(member[0].count for member in ensemble.members) == 1
    assert torch.equal(ensemble(X), first)
    program = torch.export.export(ensemble, (X,)).module()
    torch.testing.assert_close(program(X), expected)
    assert torch.equal(copy.deepcopy(ensemble)(X), first)


@pytest.mark.parametrize("kind", [Twice, Recurrent])
def test_what_one_pass_would_get_wrong_runs_draw_by_draw(kind):
    net = kind()
    ensemble, expected = last_layer(net, net.head)
    assert torch.equal(ensemble(X), expected)
    assert kind is Recurrent or not ensemble._one_pass.is_right
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


def test_no_draws_are_an_error():
    net = nn.Linear(2, 1)
    plain = tyxe.PytorchBNN(net, tyxe.priors.IIDPrior(dist.Normal(0, 1)), tyxe.guides.AutoNormal)
    for bnn in (variational(), plain):
        for count in (0, -1):
            with pytest.raises(ValueError, match=f"num_draws is {count}; expected 1 or more"):
                bnn.to_ensemble(count)
        with pytest.raises(TypeError, match=r"num_draws is 1\.5; expected an integer"):
            bnn.to_ensemble(1.5)


# --- where it goes --------------------------------------------------------------------------------


def test_exported_for_any_number_of_rows():
    ensemble = variational().to_ensemble(3)
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.export.export(ensemble, (X,), dynamic_shapes=((rows,),))
    torch.testing.assert_close(program.module()(X[:7]), ensemble(X[:7]))


@pytest.mark.parametrize("make", [variational, inferred_noise])
def test_exported_and_compiled(make):
    ensemble = make().to_ensemble(3)
    exported = torch.export.export(ensemble, (X,)).module()
    compiled = torch.compile(ensemble, backend="aot_eager", fullgraph=True)
    for other in (exported, compiled):
        torch.testing.assert_close(other(X), ensemble(X))


@pytest.mark.filterwarnings("ignore")
def test_onnx():
    ensemble, file = variational().to_ensemble(3), io.BytesIO()
    torch.onnx.export(ensemble, (X,), dynamo=True, verbose=False).save(file)
    session = onnxruntime.InferenceSession(file.getvalue())
    (name,) = [one.name for one in session.get_inputs()]
    (found,) = session.run(None, {name: X.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), ensemble(X), rtol=1e-4, atol=1e-5)


def test_a_state_dict_goes_into_another_ensemble():
    first, second = inferred_noise().to_ensemble(3), inferred_noise().to_ensemble(3)
    assert not torch.equal(first(X)[0], second(X)[0])
    second.load_state_dict(first.state_dict())
    for found, expected in zip(second(X), first(X), strict=True):
        assert torch.equal(found, expected)
    assert torch.equal(copy.deepcopy(first)(X)[0], first(X)[0])


def test_threads_run_at_once():
    """No lock is taken: a thread inside of the net does not keep another out."""
    meeting = threading.Barrier(2, timeout=30)

    class Meets(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            meeting.wait()
            return self.linear(x)

    bnn = tyxe.VariationalBNN(Meets(), PRIOR, Categorical(30), AutoNormal)
    ensemble = bnn.to_ensemble(2)
    with ThreadPoolExecutor(2) as pool:
        one, two = (pool.submit(ensemble, X) for _ in range(2))
        assert torch.equal(one.result(), two.result())
