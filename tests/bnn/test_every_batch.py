"""Targets and sizes of every batch are checked, before the step that they would spoil."""

import pyro.distributions as dist
import pyro.infer.mcmc
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.rejections import ADAM, LABELS, PRIOR, N, X, Y, make, net
from tyxe.likelihoods import Bernoulli, Categorical, HomoskedasticGaussian, Poisson

TWO = (LABELS[:, None] > 0).float()
PROBABILITIES = Categorical(N, logit_predictions=False)
PIXELS, STEP = LABELS[:, None].expand(N, 2), torch.arange(2)
SECOND = {
    "a label": (Bernoulli(N), 1, TWO, TWO + 1, "support of Bernoulli: .* from 1.0 to 2.0"),
    "labels by point": (Bernoulli(N, event_dim=1), 1, TWO, TWO * 0.5, "support of Bernoulli"),
    "a class": (Categorical(N), 3, LABELS, LABELS + 1, "support of Categorical: .* from 1 to 3"),
    "a class of probabilities": (PROBABILITIES, 3, LABELS, LABELS + 1, "Categorical: .* 1 to 3"),
    "a negative class": (Categorical(N), 3, LABELS, LABELS - 1, "of Categorical.* from -1 to 1"),
    "pixels": (Categorical(N, event_dim=1), 6, PIXELS, PIXELS + STEP, "support of Categorical"),
    "counts": (Poisson(N), 1, TWO, TWO - 0.5, "support of Poisson"),
    "a number": (HomoskedasticGaussian(N, scale=1.0), 1, Y, Y / 0, "HomoskedasticGaussian.* inf"),
}


def body(outputs, last=()):
    layers = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs)
    return nn.Sequential(*layers, *last)


def ending(likelihood, outputs):
    """Return the layers after the last linear one."""
    if not getattr(likelihood, "logit_predictions", True):
        return [nn.Softmax(-1)]
    return [nn.Unflatten(1, (2, 3))] if outputs == 6 else []


def wrapper(kind, outputs, likelihood):
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
    last = ending(likelihood, outputs)
    if kind == "laplace":
        return tyxe.LaplaceBNN(body(outputs, last), prior, likelihood, structure="diag")
    return make(body(outputs, last), prior, likelihood)


@pytest.mark.parametrize("kind", ["variational", "laplace"])
@pytest.mark.parametrize("case", SECOND)
def test_a_later_batch_is_refused_before_its_step(case, kind):
    likelihood, outputs, good, bad, message = SECOND[case]
    bnn = wrapper(kind, outputs, likelihood)
    parameters = {n: p.detach().clone() for n, p in bnn.named_parameters()}
    seen = []

    def batches():
        yield X, good
        seen.append({n: v.clone() for n, v in bnn.state_dict().items() if torch.is_tensor(v)})
        yield X, bad

    with pytest.raises(ValueError, match=message):
        bnn.fit(batches(), ADAM, 1)
    found = dict(bnn.state_dict())
    assert any(not torch.equal(p, parameters[n]) for n, p in bnn.named_parameters())
    for name, value in seen[0].items():  # BatchNorm's statistics among them
        assert torch.equal(found[name], value), name
    assert all(p.grad is None for p in bnn.parameters())


@pytest.mark.parametrize("case", SECOND)
def test_a_later_batch_of_a_curvature_and_of_an_evaluation(case):
    likelihood, outputs, good, bad, message = SECOND[case]
    bnn = wrapper("laplace", outputs, likelihood)
    with pytest.raises(ValueError, match=message):
        bnn.fit_curvature([(X, good), (X, bad)])
    of_logits = getattr(likelihood, "logit_predictions", True)
    bnn.fit_curvature([(X, good)])
    with pytest.raises(ValueError, match=message if of_logits else "Gaussian over probabilities"):
        bnn.refine([(X, good), (X, bad)])
    for predictive in ("bnn", "glm") if of_logits else ("bnn",):
        with pytest.raises(ValueError, match=message):
            bnn.evaluate([(X, good), (X, bad)], predictive=predictive)


@pytest.mark.filterwarnings("ignore:the log-likelihood curves upwards:tyxe.TyxeWarning")
@pytest.mark.parametrize("curvature", ["fisher", "hessian", "empirical"])
@pytest.mark.parametrize("case", ["a class", "a label"])
def test_a_later_batch_under_variational_laplace(case, curvature):
    likelihood, outputs, good, bad, message = SECOND[case]
    bnn = make(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)), PRIOR, likelihood)
    with (
        pytest.raises(ValueError, match=message),
        tyxe.poutine.variational_laplace(curvature=curvature),
    ):
        bnn.fit([(X, good), (X, bad)], ADAM, 1)


def test_masked_labels_of_a_later_batch_are_not_looked_at():
    bnn = make(nn.Linear(2, 3), likelihood=Categorical(N))
    mask = torch.arange(N) < 5
    hidden, wrong = LABELS.where(mask, -1), LABELS.where(~mask, -1)
    with tyxe.poutine.selective_mask(mask=mask, expose=["likelihood.data"]):
        assert bool(torch.tensor(bnn.fit([(X, hidden)], ADAM, 2).loss).isfinite().all())
        with pytest.raises(ValueError, match="outside the support of Categorical"):
            bnn.fit([(X, hidden), (X, wrong)], ADAM, 1)


@pytest.mark.parametrize("fit", ["fit", "fit_curvature"])
def test_a_later_batch_that_is_larger_than_the_data_set(fit):
    bnn = tyxe.LaplaceBNN(net(), PRIOR, HomoskedasticGaussian(4, scale=0.5))
    batches, rest = [(X[:4], Y[:4]), (X, Y)], () if fit == "fit_curvature" else (ADAM, 1)
    with pytest.raises(ValueError, match=r"the batch has 8 points, .* dataset_size=4; pass"):
        getattr(bnn, fit)(batches, *rest)


def sampled(likelihood, outputs, batches, num_chains=1, last=(), **options):
    """Return a BNN with two samples of good batches, and one that is to fail after them."""
    layers = nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)
    net = nn.Sequential(*layers, *last)
    bnn = tyxe.MCMC_BNN(net, PRIOR, likelihood, tyxe.samplers.SGLD(1e-3))
    bnn.fit(batches[:1], 2)
    before = {name: value.clone() for name, value in bnn.samples.items()}
    return bnn, before, lambda: bnn.fit(batches, 6, num_chains=num_chains, **options)


@pytest.mark.filterwarnings("ignore:stopped:tyxe.TyxeWarning")
@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.parametrize("case", SECOND)
def test_a_later_batch_of_chains(case, num_chains, tmp_path):
    likelihood, outputs, good, bad, message = SECOND[case]
    last = ending(likelihood, outputs)
    batches, file = [(X, good), (X, bad)], tmp_path / "samples"
    bnn, before, fit = sampled(likelihood, outputs, batches, num_chains, last, file=file)
    with pytest.raises(ValueError, match=message):
        fit()
    assert all(torch.equal(bnn.samples[name], value) for name, value in before.items())
    assert not file.exists()


@pytest.mark.filterwarnings("ignore:stopped:tyxe.TyxeWarning")
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("num_chains", [1, 2])
def test_inputs_of_a_later_batch_of_chains(num_chains, bad):
    batches = [(X, Y), (X.clone(), Y)]
    batches[1][0][3, 1] = bad
    _, _, fit = sampled(HomoskedasticGaussian(N, scale=1.0), 1, batches, num_chains)
    with pytest.raises(ValueError, match=r"inputs that are not finite.*torch\.isfinite"):
        fit()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("kernel", [tyxe.samplers.NUTS, pyro.infer.mcmc.NUTS])
@pytest.mark.parametrize("saturates", [False, True])
def test_inputs_of_chains_on_all_data(saturates, kernel, bad):
    """The outputs of a net that saturates are finite, and their gradients are not."""
    infinite = X.clone()
    infinite[3, 1] = bad
    layers = nn.Linear(2, 4), nn.Tanh() if saturates else nn.Identity(), nn.Linear(4, 1)
    likelihood = HomoskedasticGaussian(N, scale=1.0)
    bnn = tyxe.MCMC_BNN(nn.Sequential(*layers), PRIOR, likelihood, kernel)
    with pytest.raises(ValueError, match="inputs that are not finite: drop points"):
        bnn.fit([(infinite, Y)], 2, warmup_steps=300, progress=False)
    assert not len(bnn.samples)


@pytest.mark.filterwarnings("ignore:stopped:tyxe.TyxeWarning")
def test_a_later_batch_of_chains_that_is_larger_than_the_data_set():
    likelihood = HomoskedasticGaussian(4, scale=0.5)
    _, _, fit = sampled(likelihood, 1, [(X[:4], Y[:4]), (X, Y)], 2)
    with pytest.raises(ValueError, match=r"the batch has 8 points, .* dataset_size=4; pass"):
        fit()
