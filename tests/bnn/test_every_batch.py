"""Targets and sizes of every batch are checked, before the step that they would spoil."""

import pyro.infer.mcmc
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles import rejections
from tests.oracles.bnns import mlp
from tests.oracles.fits import HIDE_NORMS
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


def net_of(likelihood, outputs, norm=True):
    """Return a net that ends in what the likelihood takes."""
    layers = [nn.Linear(2, 4), nn.BatchNorm1d(4) if norm else nn.Tanh(), nn.Linear(4, outputs)]
    if not getattr(likelihood, "logit_predictions", True):
        layers.append(nn.Softmax(-1))
    return nn.Sequential(*layers, *([nn.Unflatten(1, (2, 3))] if outputs == 6 else []))


def laplace(module, prior, likelihood):
    return tyxe.LaplaceBNN(module, prior, likelihood, structure="diag")


@pytest.mark.parametrize("wrapper", [make, laplace])
@pytest.mark.parametrize("case", SECOND)
def test_a_later_batch_is_refused_before_its_step(case, wrapper):
    likelihood, outputs, good, bad, message = SECOND[case]
    bnn, seen = wrapper(net_of(likelihood, outputs), HIDE_NORMS, likelihood), []
    start = [p.detach().clone() for p in bnn.parameters()]

    def batches():
        yield X, good
        seen.append(rejections.snapshot(bnn))
        yield X, bad

    with pytest.raises(ValueError, match=message):
        bnn.fit(batches(), ADAM, 1)
    assert not all(map(torch.equal, bnn.parameters(), start))
    # BatchNorm's statistics are among what is unchanged.
    rejections.assert_unchanged(bnn, (*seen[0][:3], torch.get_rng_state()))
    assert all(p.grad is None for p in bnn.parameters())


@pytest.mark.parametrize("case", SECOND)
def test_a_later_batch_of_a_curvature_and_of_an_evaluation(case):
    likelihood, outputs, good, bad, message = SECOND[case]
    bnn = laplace(net_of(likelihood, outputs), HIDE_NORMS, likelihood)
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
    bnn = make(mlp(2, 4, outputs), PRIOR, likelihood)
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


def sampled(likelihood, outputs, batches):
    """Return a BNN with two samples of the first batch."""
    net = net_of(likelihood, outputs, norm=False)
    bnn = tyxe.MCMC_BNN(net, PRIOR, likelihood, tyxe.samplers.SGLD(1e-3))
    bnn.fit(batches[:1], 2)
    return bnn


FEW = HomoskedasticGaussian(4, scale=0.5)
LARGER = [(X[:4], Y[:4]), (X, Y)]


@pytest.mark.filterwarnings("ignore:stopped:tyxe.TyxeWarning")
@pytest.mark.parametrize(
    "fit",
    [
        lambda: laplace(net(), PRIOR, FEW).fit(LARGER, ADAM, 1),
        lambda: laplace(net(), PRIOR, FEW).fit_curvature(LARGER),
        lambda: sampled(FEW, 1, LARGER).fit(LARGER, 6, num_chains=2),
    ],
)
def test_a_later_batch_that_is_larger_than_the_data_set(fit):
    with pytest.raises(ValueError, match=r"the batch has 8 points, .* dataset_size=4; pass"):
        fit()


@pytest.mark.filterwarnings("ignore:stopped:tyxe.TyxeWarning")
@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.parametrize("case", SECOND)
def test_a_later_batch_of_chains(case, num_chains, tmp_path):
    likelihood, outputs, good, bad, message = SECOND[case]
    batches, file = [(X, good), (X, bad)], tmp_path / "samples"
    bnn = sampled(likelihood, outputs, batches)
    before = {name: value.clone() for name, value in bnn.samples.items()}
    with pytest.raises(ValueError, match=message):
        bnn.fit(batches, 6, num_chains=num_chains, file=file)
    assert all(torch.equal(bnn.samples[name], value) for name, value in before.items())
    assert not file.exists()


@pytest.mark.filterwarnings("ignore:stopped:tyxe.TyxeWarning")
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("num_chains", [1, 2])
def test_inputs_of_a_later_batch_of_chains(num_chains, bad):
    likelihood, batches = HomoskedasticGaussian(N, scale=1.0), [(X, Y), (X.clone(), Y)]
    likelihood, batches = HomoskedasticGaussian(N, scale=1.0), [(X, Y), (X.clone(), Y)]
    batches[1][0][3, 1] = bad
    bnn = sampled(likelihood, 1, batches)
    with pytest.raises(ValueError, match=r"inputs that are not finite.*torch\.isfinite"):
        bnn.fit(batches, 6, num_chains=num_chains)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("kernel", [tyxe.samplers.NUTS, pyro.infer.mcmc.NUTS])
@pytest.mark.parametrize("saturates", [False, True])
def test_inputs_of_chains_on_all_data(saturates, kernel, bad):
    """The outputs of a net that saturates are finite, and their gradients are not."""
    infinite = X.clone()
    infinite[3, 1] = bad
    module = mlp(2, 4, 1) if saturates else nn.Linear(2, 1)
    bnn = tyxe.MCMC_BNN(module, PRIOR, HomoskedasticGaussian(N, scale=1.0), kernel)
    with pytest.raises(ValueError, match="inputs that are not finite: drop points"):
        bnn.fit([(infinite, Y)], 2, warmup_steps=300, progress=False)
    assert not len(bnn.samples)
