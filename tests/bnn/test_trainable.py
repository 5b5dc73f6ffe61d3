"""tyxe.Trainable: the steps of `fit` in a loop of one's own."""

from contextlib import nullcontext

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tyxe
from tests.oracles.bnns import ADAM, HIDE_NORMS, NORMAL, mean_field, mlp, two_layers
from tests.oracles.nets import KindAndSize, kind_and_size
from tests.oracles.predictions import seeded
from tyxe.bnn.checks import are_finite
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

X, Y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 2


def variational(net=None, likelihood=None, **options):
    torch.manual_seed(0)
    return mean_field(net or mlp(3, 8, 2), likelihood or Categorical(20), **options)


def by_hand(module, batches, epochs=3):
    optimizer = ADAM(module.parameters())
    torch.manual_seed(1)
    losses = []
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            loss = module(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def laplace(net=None):
    torch.manual_seed(0)
    return tyxe.LaplaceBNN(net or mlp(3, 8, 2), NORMAL, Categorical(20))


def dropout(net=None):
    torch.manual_seed(0)
    return tyxe.DropoutBNN(net or two_layers(3, 8, 2, nn.Dropout(0.2)), Categorical(20))


def cooled():
    bnn = laplace()
    bnn.temperature = 0.1
    return bnn


LOCAL = tyxe.poutine.local_reparameterization


@pytest.mark.parametrize(
    ("make", "handler"),
    [(make, nullcontext) for make in (variational, laplace, cooled, dropout)]
    + [(variational, LOCAL)],
)
def test_a_loop_of_ones_own_makes_the_steps_of_fit(make, handler):
    batches = [(X[:10], Y[:10]), (X[10:], Y[10:])]
    fitted, own = make(), make()
    torch.manual_seed(1)
    with handler():
        fitted.fit(batches, ADAM, 3)
    module = tyxe.Trainable(own, handler=handler)
    assert module.beta == (0.1 if make is cooled else 1.0)
    by_hand(module, batches)
    for (name, one), two in zip(fitted.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-6, msg=name)


def test_weights_and_unpack_are_those_of_fit():
    weights = torch.arange(20) % 3
    repeated = (X.repeat_interleave(weights, 0), Y.repeat_interleave(weights))
    one, two = (variational(likelihood=Categorical(int(weights.sum()))) for _ in range(2))
    losses = by_hand(tyxe.Trainable(one), [repeated])
    unpacked = tyxe.Trainable(two, unpack=lambda batch: (batch["x"], batch["y"], batch["w"]))
    found = by_hand(unpacked, [{"x": X, "y": Y, "w": weights}])
    assert found == pytest.approx(losses, abs=1e-5)


def test_beta_weighs_the_kl():
    module = tyxe.Trainable(variational(), beta=0.0)
    without = seeded(module, (X, Y)).detach()
    module.beta = 2.0
    twice = seeded(module, (X, Y)).detach()
    assert float(twice - without) == pytest.approx(2 * float(module.terms.kl) / 20, rel=1e-4)
    assert float(without) == pytest.approx(-float(module.terms.data) / 20, rel=1e-5)
    assert not module.terms.data.requires_grad


def test_judge_is_evaluate_and_predict():
    bnn = variational(likelihood=Categorical(20, ignore_index=-1))
    module = tyxe.Trainable(bnn, num_predictions=4)
    y = Y.clone()
    y[:5] = -1
    found = seeded(module.judge, (X, y))
    error, log_likelihood = seeded(bnn.evaluate, X, y, num_predictions=4)
    assert torch.equal(found.predictions, seeded(bnn.predict, X, num_predictions=4))
    assert found.weights.sum() == 15
    torch.testing.assert_close(found.error.sum(), error)
    torch.testing.assert_close(found.log_likelihood.sum(), log_likelihood)


def test_scores_record_no_gradients_of_a_learned_noise():
    likelihood = HomoskedasticGaussian(20, scale=0.1, learn_scale=True)
    module = tyxe.Trainable(variational(mlp(3, 8, 1), likelihood))
    found = module.score_batch((X, X[:, :1]), "sum")
    assert not any(t.requires_grad for t in (*found.predictions, found.error, found.log_likelihood))


def test_parts_of_a_joint_likelihood_are_judged_by_name():
    bnn = variational(KindAndSize(3), kind_and_size(20))
    batch = (X, {"kind": Y, "size": X[:, :1]})
    found = tyxe.Trainable(bnn, num_predictions=0).judge(batch, "sum")
    error, log_likelihood = bnn.evaluate([batch], num_predictions=0)
    assert found.error == error
    assert found.log_likelihood == log_likelihood
    assert found.log_likelihood.keys() == {"kind", "size", "joint"}
    assert found.predictions.keys() == {"kind", "size"}
    assert {name: float(counts.sum()) for name, counts in found.weights.items()} == {
        "kind": 20,
        "size": 20,
        "joint": 20,
    }


def test_a_mode_is_judged_at_its_centre():
    module = tyxe.Trainable(laplace())
    assert module.num_predictions == 0
    assert module.judge((X, Y)).predictions.shape == (20, 2)


def test_a_curvature_of_other_weights_is_forgotten():
    bnn = laplace()
    bnn.fit([(X, Y)], ADAM, 3)
    by_hand(tyxe.Trainable(bnn), [(X, Y)])
    with pytest.raises(RuntimeError, match="there is no curvature yet"):
        bnn.predict(X, num_predictions=4)
    bnn.fit_curvature([(X, Y)])
    assert bnn.predict(X, num_predictions=4).shape == (20, 2)


def test_frozen_parts_keep_their_mode():
    net = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2))
    net[0].requires_grad_(False).eval()
    bnn = mean_field(net, Categorical(20), HIDE_NORMS)
    module = nn.ModuleList([tyxe.Trainable(bnn)])
    for _ in range(2):
        module.train()
        assert [part.training for part in bnn.net] == [False, True, True]
        assert module[0].training
        module.eval()
        assert not any(part.training for part in module.modules())


def test_what_is_not_fitted_in_steps():
    layer = tyxe.PytorchBNN(nn.Linear(3, 2), NORMAL, tyxe.guides.AutoNormal)
    mcmc = tyxe.MCMC_BNN(nn.Linear(3, 2), NORMAL, Categorical(20), tyxe.samplers.NUTS)
    for given in (layer, mcmc, nn.Linear(3, 2)):
        with pytest.raises(TypeError, match="expected one that is fitted in steps"):
            tyxe.Trainable(given)


NUMBERS = X[:, :1]
LIKELIHOODS = {
    "a class": (Categorical(20), 2, Y, Y + 1),
    "no number": (HomoskedasticGaussian(20, scale=0.1), 1, NUMBERS, NUMBERS * float("nan")),
}


def refuses(module, batch, error, message):
    """A batch is an error, which changes neither parameters nor statistics of norms."""
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(error, match=message):
        module(batch).backward()
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_targets_of_later_batches_are_looked_at(kind):
    likelihood, outputs, good, bad = LIKELIHOODS[kind]
    module = tyxe.Trainable(variational(two_layers(3, 4, outputs, nn.BatchNorm1d(4)), likelihood))
    for _ in range(2):
        refuses(module, (X, bad), ValueError, "outside the support|all targets of the batch are N")
        module((X, good)).backward()


def test_inputs_and_sizes_of_later_batches_are_looked_at():
    module = tyxe.Trainable(variational(two_layers(3, 4, 2, nn.BatchNorm1d(4))))
    module((X, Y)).backward()
    refuses(module, (X * float("nan"), Y), RuntimeError, "training stopped: the log-likelihood")
    refuses(module, (X.repeat(2, 1), Y.repeat(2)), ValueError, "the batch has 40 points")


class Masked(nn.Module):
    """A net that takes -inf, where attention is not to look."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4, 2)
        self.body = nn.Sequential(*layers)

    def forward(self, x, mask):
        return self.body(x) * mask.softmax(-1).sum(-1, keepdim=True)


@pytest.mark.parametrize("kind", [variational, laplace, dropout])
def test_gradients_of_inputs_that_are_not_finite_are_looked_at(kind):
    """A net that saturates has a finite loss there."""
    module = tyxe.Trainable(kind(Masked()))
    mask, infinite = torch.zeros(20, 4), X.clone()
    mask[:, 2], infinite[3, 0] = -float("inf"), float("inf")
    for _ in range(2):
        message = r"gradient is not finite at .*body\.0\.weight.*, and inputs are not: drop points"
        refuses(module, ((infinite, mask), Y), RuntimeError, message)
        assert all(p.grad is None for p in module.parameters())
    module(((X, mask), Y)).backward()  # an infinite input with a use
    found = [p.grad for p in module.parameters() if p.grad is not None]
    assert found
    assert all(bool(g.isfinite().all()) for g in found)


class Reentrant(Masked):
    """A net whose hidden part takes no other backward than its own."""

    def forward(self, x, mask):
        x = checkpoint(self.body[0], x, use_reentrant=True)
        return self.body[1:](x) * mask.softmax(-1).sum(-1, keepdim=True)


def test_infinite_inputs_beside_a_reentrant_checkpoint_and_of_frozen_parts():
    mask = torch.zeros(20, 4)
    mask[:, 2] = -float("inf")
    names = ["body.0.weight", "body.0.bias"]
    prior = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), hide=names)
    bnn = tyxe.VariationalBNN(Reentrant(), prior, Categorical(20), tyxe.guides.AutoNormal)
    x = X.clone().requires_grad_()
    assert tyxe.Trainable(bnn)(((x, mask), Y)).isfinite()
    frozen = dropout(Masked()).requires_grad_(False)
    assert tyxe.Trainable(frozen)(((X, mask), Y)).isfinite()


def test_large_numbers_in_half_precision_are_finite():
    sparse = torch.zeros(2, 3).to_sparse()
    assert are_finite((torch.full((64, 4), 1e4).half(), torch.arange(3), sparse))
    assert not are_finite(torch.tensor([1.0, float("-inf")]))


@pytest.mark.parametrize("beta", [-1.0, float("nan"), float("inf")])
def test_a_weight_of_the_kl_is_a_number_from_0(beta):
    with pytest.raises(ValueError, match=r"beta is .*; expected a number of 0 or more"):
        tyxe.Trainable(variational(), beta=beta)
    module = tyxe.Trainable(variational())
    module.beta = beta
    refuses(module, (X, Y), ValueError, "beta is")
