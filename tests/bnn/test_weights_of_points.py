"""Weights of points count in mini-batches of any size as in one batch of all."""

import functools

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, NOTHING
from tyxe.bnn.batches import batches_of
from tyxe.bnn.potential import BatchPotential, Potential
from tyxe.samplers import SGHMC, batched

N = 400
SGD = functools.partial(torch.optim.SGD, lr=0.02)


def weighted():
    """Return labels of 0 and 1, and weights in the ratio of 1 to 19."""
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(N, 1, generator=generator) < 0.5).float()
    weights = torch.where(y[:, 0] > 0, 1.9, 0.1)
    return torch.ones(N, 1), y, weights * N / weights.sum()


def loader(size, *tensors):
    data = torch.utils.data.TensorDataset(*tensors)
    return torch.utils.data.DataLoader(data, size, shuffle=True)


def of_mean(prior=NOTHING, guide=None):
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=1.0)
    return tyxe.VariationalBNN(nn.Linear(1, 1, bias=False), prior, likelihood, guide)


def value(bnn):
    return bnn.predict(torch.ones(1, 1))[0].item()


def by_fit(bnn, data, **options):
    torch.manual_seed(1)
    bnn.fit(data, SGD, 6, **options)
    return value(bnn)


def by_ivon(bnn, data):
    torch.manual_seed(1)
    start = functools.partial(tyxe.guides.AutoNormal, init_scale=0.01)
    bnn = of_mean(tyxe.priors.IIDPrior(dist.Normal(0, 100.0)), start)
    bnn.fit(data, functools.partial(tyxe.optim.IVON, lr=0.02, betas=(0.9, 0.99)), 6)
    return bnn.predict(torch.ones(1, 1), num_predictions=0)[0].item()


def by_loop(bnn, data):
    torch.manual_seed(1)
    module = tyxe.Trainable(bnn)
    optimizer = SGD(module.parameters())
    for _ in range(6):
        for batch in data:
            optimizer.zero_grad()
            module(batch).backward()
            optimizer.step()
    return value(bnn)


WAYS = {
    "fit": by_fit,
    "compiled": functools.partial(by_fit, compile=True),
    "two batches a step": functools.partial(by_fit, accumulate_steps=2),
    "IVON": by_ivon,
    "own loop": by_loop,
}


@pytest.mark.filterwarnings("ignore:an epoch had")
@pytest.mark.parametrize("way", WAYS)
def test_a_weighted_mean_is_that_of_all_points(way):
    x, y, weights = weighted()
    expected = ((weights * y[:, 0]).sum() / weights.sum()).item()
    found = WAYS[way](of_mean(), loader(4, x, y, weights))
    assert found == pytest.approx(expected, abs=0.02)  # 0.9 by means of each batch


@pytest.mark.filterwarnings("ignore:an epoch had")
@pytest.mark.parametrize("size", [4, 16])
def test_class_weights_balance_classes(size):
    generator = torch.Generator().manual_seed(0)
    y = (torch.rand(N, generator=generator) < 0.05).long()
    weights = N / (2 * y.bincount().float())
    likelihood = tyxe.likelihoods.Categorical(N, class_weights=weights)
    bnn = tyxe.VariationalBNN(nn.Linear(1, 2, bias=False), NOTHING, likelihood)
    torch.manual_seed(1)
    bnn.fit(loader(size, torch.ones(N, 1), y), SGD, 15)
    # 0.18 and 0.36 by means of each batch
    assert bnn.predict(torch.ones(1, 1)).softmax(-1)[0, 1].item() == pytest.approx(0.5, abs=0.06)


def test_members_in_one_tensor_are_those_in_turn():
    x, y, weights = weighted()
    data = [*zip(x.split(8), y.split(8), weights.split(8), strict=True)]
    found = []
    for vectorize in (False, True):
        torch.manual_seed(0)
        ensemble = tyxe.EnsembleBNN(lambda _: of_mean(), 2)
        ensemble.fit(data, SGD, 2, vectorize=vectorize)
        found.append(ensemble.predict(torch.ones(1, 1))[0])
    torch.testing.assert_close(found[1], found[0])


def test_a_fit_goes_on_with_the_weights_of_the_first():
    x, y, weights = weighted()
    data = [*zip(x.split(8), y.split(8), weights.split(8), strict=True)]
    whole, first, second = of_mean(), of_mean(), of_mean()
    for other in (first, second):
        other.net.load_state_dict(whole.net.state_dict())
    whole.fit(data, SGD, 3)
    first.fit(data, SGD, 1)
    second.load_checkpoint(first.checkpoint())
    second.fit(data, SGD, 2)
    assert value(second) == value(whole)


def test_chains_by_mini_batches_have_the_mean_of_all_points():
    x, y, weights = weighted()
    expected = ((weights * y[:, 0]).sum() / (weights.sum() + 1)).item()
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=1.0)
    bnn = tyxe.MCMC_BNN(nn.Linear(1, 1, bias=False), NORMAL, likelihood, SGHMC(lr=0.05))
    torch.manual_seed(0)
    bnn.fit(loader(4, x, y, weights), 200, warmup_steps=100, num_chains=2, progress=False)
    assert value(bnn) == pytest.approx(expected, abs=0.03)


def test_warm_starts_have_the_mean_of_all_points():
    x, y, weights = weighted()
    expected = ((weights * y[:, 0]).sum() / weights.sum()).item()
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=1.0)
    bnn = tyxe.MCMC_BNN(nn.Linear(1, 1, bias=False), NORMAL, likelihood, SGHMC(lr=0.05))
    init = tyxe.samplers.warm_start(SGD, num_epochs=15, batch_size=4, validation=0.0)
    torch.manual_seed(0)
    starts = bnn.starts([(x, y, weights)], init, 2, progress=False)["net.weight"]
    assert starts.mean().item() == pytest.approx(expected, abs=0.02)


@pytest.mark.filterwarnings("ignore:an epoch had")
@pytest.mark.parametrize("weighted", ["all", "missing", "missing steps", "some", "mean of one"])
def test_points_of_weight_zero_and_batches_without_weights_count_as_they_are(weighted):
    """The mode of a mean of four points at 1, and of four that are absent or at 0."""
    x, one = torch.ones(1, 1), torch.ones(1)
    there, missing = (x, x), (x, torch.nan * x)
    data, expected, size = {
        "all": ([(x, x, one), (x, 0 * x, 0 * one)] * 4, 4 / 5, 4),
        "missing": ([there, missing] * 4, 4 / 5, 4),  # 2/3 by means of each batch
        "missing steps": ([there, there, missing, missing] * 2, 4 / 5, 4),
        "some": ([(x, x, 3 * one), (x, 0 * x)] * 4, 12 / 17, 16),
        "mean of one": ([(x, x, 0.5 * one), (x, 0 * x, 1.5 * one)] * 4, 2 / 9, 8),
    }[weighted]
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(size, scale=1.0)
    bnn = tyxe.VariationalBNN(nn.Linear(1, 1, bias=False), NORMAL, likelihood, AutoDelta)
    steps = 2 if weighted == "missing steps" else 1
    optim = functools.partial(torch.optim.SGD, lr=0.01)
    bnn.fit(data, optim, 80 * steps, accumulate_steps=steps)
    assert value(bnn) == pytest.approx(expected, abs=0.02)


def test_a_batch_with_weights_may_follow_one_with_missing_targets():
    x, y, weights = weighted()
    y = torch.where(torch.arange(N)[:, None] % 4 == 0, torch.nan, y)
    given = torch.cat([torch.ones(200), weights[200:]])
    some = [(x[:200], y[:200]), (x[200:], y[200:], weights[200:])]
    each = [(x[:200], y[:200], given[:200]), (x[200:], y[200:], given[200:])]
    found = []
    for data in (some, each):
        torch.manual_seed(0)
        found.append(by_fit(of_mean(), data))
    assert found[0] == pytest.approx(found[1])


def test_a_loss_that_makes_no_step_counts_no_weights():
    x, y, weights = weighted()
    module = tyxe.Trainable(of_mean())
    module((x, y, weights))
    expected = module((x[:4], y[:4], weights[:4])).item()
    module = tyxe.Trainable(module.bnn)
    module((x, y, weights))
    with pytest.raises(RuntimeError, match="finite"):
        module((x[:4] / 0, y[:4], 50 * weights[:4]))
    module.eval()
    module((x[:4], y[:4], 50 * weights[:4]))
    module.train()
    assert module((x[:4], y[:4], weights[:4])).item() == pytest.approx(expected)


ABSENT = torch.arange(40) % 8 < 5
LOGITS = tyxe.likelihoods.Categorical(15, ignore_index=-1)
NUMBERS = tyxe.likelihoods.HomoskedasticGaussian(15, scale=0.1)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("kind", ["missing", "weight of zero", "ignored"])
def test_batches_with_points_that_are_absent_tell_the_gradient_of_all(kind, size):
    """In the mean over an epoch, of the log-likelihood of those that are there."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 40, 2, generator=generator)
    columns = {
        "missing": (x, torch.where(ABSENT, torch.nan, y[:, 0])[:, None]),
        "weight of zero": (x, y[:, :1], (~ABSENT).float()),
        "ignored": (x, torch.where(ABSENT, -1, (y[:, 0] > 0).long())),
    }[kind]
    likelihood = LOGITS if kind == "ignored" else NUMBERS
    net = nn.Linear(2, 2 if kind == "ignored" else 1)
    bnn = tyxe.MCMC_BNN(net, NORMAL, likelihood, SGHMC(lr=0.1))
    whole, batches = (
        bnn._to_fit([*zip(*(part.split(each) for part in columns), strict=True)], None)
        for each in (40, size)
    )
    potential = Potential(bnn, *next(iter(batches_of(whole))))
    start = torch.linspace(-1, 1, sum(potential.blocks.sizes))[None]
    _, expected = batched(potential.at, start)(start)
    estimates = BatchPotential(potential, start, batches, None)
    estimates._weights[0].sums = [15e9, 40e9]  # as after many epochs
    found = []
    for step in range(40 // size):
        estimates.take(step)
        found.append(estimates(start)[1])
    torch.testing.assert_close(torch.stack(found).mean(0), expected)
