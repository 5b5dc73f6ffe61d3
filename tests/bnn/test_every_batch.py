"""Targets and sizes of every batch, and losses and gradients of every step, are checked."""

from functools import partial

import pyro
import pyro.infer.mcmc
import pytest
import torch
from pyro.infer import autoguide
from torch import nn

import tyxe
from tests.oracles import rejections
from tests.oracles.bnns import HIDE_NORMS, mlp
from tests.oracles.nets import NetOf
from tests.oracles.rejections import ADAM, LABELS, PRIOR, N, X, Y, make, net, rejects
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


# --- numbers that are not finite ------------------------------------------------------------------


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
@pytest.mark.parametrize("check", ["step", "epoch"])
def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_parameters(value, check):
    bnn, reference = (make(Explodes(value), HIDE_NORMS) for _ in range(2))
    reference.load_state_dict(bnn.state_dict())
    optims, seen = [pyro.optim.Adam({"lr": 1e-2}) for _ in range(2)], []
    pyro.set_rng_seed(1)
    expected = reference.fit([(X, Y)], optims[0], 3, beta=0.0)
    pyro.set_rng_seed(1)
    message = {
        "step": r"site 'likelihood.data' is -?(nan|inf)(?s:.)*parameters are those before this",
        "epoch": "in epoch 4 .* before this epoch",
    }
    options = {"beta": 0.0, "nan_check": check, "callback": lambda *at: seen.append(at[-1])}
    with pytest.raises(RuntimeError, match=message[check]) as error:
        bnn.fit([(X, Y)], optims[1], 10, **options)
    if check == "step":
        assert "look for inputs or targets that are not finite" in str(error.value)
    assert seen == expected.loss
    for name, value in reference.state_dict().items():  # BatchNorm's statistics among them
        torch.testing.assert_close(bnn.state_dict()[name], value, rtol=0, atol=0, msg=name)
    assert all(module.training for module in bnn.modules())
    states = [next(iter(optim.optim_objs.values())).state_dict() for optim in optims]
    for own, other in zip(*(state["state"].values() for state in states), strict=True):
        assert all(torch.equal(own[key], other[key]) for key in own)


def test_a_gradient_that_is_not_finite_is_found_at_the_end_of_the_epoch():
    bnn = make(nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
    loc = bnn.net_guide.get_loc("2.bias")
    loc.register_hook(lambda gradient: gradient * float("nan"))
    fit = partial(bnn.fit, [(X, Y)], ADAM, 1, nan_check="epoch")
    rejects(bnn, RuntimeError, "in epoch 1 ", fit, draws=True)


def root_of_zero():
    """Return a net whose outputs are finite, and its gradient not."""

    def forward(net, x):
        return net.layer(x) + (net.offset(x) * 0).sqrt()

    return NetOf(forward, layer=nn.Linear(2, 1), offset=nn.Linear(2, 1))


PLACES = {
    "draws": (None, "2.weight", float("nan"), r"non-finite draws of net\.2\.weight"),
    # Behind a tanh: the outputs are finite.
    "KL": (None, "0.bias", 1e25, r"KL is not finite at net\.0\.bias\."),
    "gradient": (root_of_zero, None, 0.0, r"not finite at net_guide\.locs\.offset\.weight"),
}


@pytest.mark.parametrize("what", PLACES)
def test_what_is_not_finite_is_named(what):
    module, site, value, message = PLACES[what]
    bnn = make(module and module())
    with torch.no_grad():
        if site is not None:
            bnn.net_guide.locs[site].fill_(value)
    rejects(bnn, RuntimeError, message, lambda: bnn.fit([(X, Y)], ADAM, 1), draws=True)


GUIDES = [
    autoguide.AutoMultivariateNormal,
    partial(autoguide.AutoLowRankMultivariateNormal, rank=1),
    partial(tyxe.guides.AutoInducing, inducing_rows=2, inducing_cols=2, everywhere=True),
]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("guide", GUIDES, ids=["full", "low rank", "inducing"])
def test_a_covariance_that_breaks_in_a_later_step_stops_the_fit(guide, value):
    """The numbers of its factors are checked in the first step only."""
    bnn = make(guide=guide)

    def spoil(*_) -> None:
        with torch.no_grad():
            list(bnn.net_guide.parameters())[-1].fill_(value)

    with pytest.raises(RuntimeError, match="training stopped"):
        bnn.fit([(X, Y)], ADAM, 2, spoil)


def test_an_error_in_an_epoch_leaves_no_parameter_that_is_not_finite():
    class Refuses(nn.Linear):
        def forward(self, x):
            found = super().forward(x)
            if not bool(found.isfinite().all()):
                raise ArithmeticError("not finite")
            return found

    bnn = make(Refuses(2, 1))
    loc, calls = bnn.net_guide.get_loc("bias"), []

    def spoil(gradient):
        calls.append(gradient)
        return gradient * (float("nan") if len(calls) > 2 else 1.0)

    loc.register_hook(spoil)
    fit = partial(bnn.fit, [(X[:2], Y[:2])] * 5, ADAM, 1, nan_check="epoch")
    rejects(bnn, ArithmeticError, "not finite", fit, draws=True)
    assert len(calls) == 3
