"""SWAG_BNN: snapshots of a training or of a loop of one's own, and what follows from them."""

import copy
import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import HIDE_NORMS, NORMAL, NOTHING, mlp, two_layers
from tests.oracles.predictions import seeded
from tests.oracles.rejections import rejects
from tests.oracles.states import assert_same_state
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

SGD = functools.partial(torch.optim.SGD, lr=0.05)
N = 24


def data(n=N):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, generator=generator)
    return x, x @ torch.tensor([[1.0], [-2.0]]) + 0.5 * torch.randn(n, 1, generator=generator)


def loader(size=6):
    return list(zip(*(part.split(size) for part in data()), strict=True))


def make(rank=4, module=None, prior=NORMAL, scale=0.5):
    torch.manual_seed(0)
    likelihood = HomoskedasticGaussian(N, scale=scale)
    return tyxe.SWAG_BNN(module or mlp(2, 3, 1), prior, likelihood, rank=rank)


def fitted(rank=4, epochs=8, start=0.5, **options):
    bnn = make(rank)
    bnn.fit(loader(), SGD, epochs, start=start, **options)
    return bnn


def points(bnn):
    """Return the weights of now, in one vector."""
    locs = {site.name: bnn.net_guide.locs[site.own_name] for site in bnn.net_guide.sites}
    return bnn.net_guide.blocks.flatten(locs).detach().clone()


# --------------------------------------------------------------------------- snapshots


def test_patience_begins_once_there_is_a_posterior():
    x, y = data()  # the better the fit, the worse for other signs
    options = {"validation": [(x, -y)], "patience": 3}
    bnn = make()
    history = bnn.fit(loader(), SGD, 40, start=0.5, **options)
    assert max(history.validation) == history.validation[0]
    assert len(history.loss) == 20 + 4 + 3
    assert bnn.net_guide.count == 4 + 3
    assert bnn.predict(x)[0].shape == (N, 1)
    # It is there already for a fit that adds to the snapshots.
    again = bnn.fit(loader(), SGD, 40, start=0.9, **options).validation
    assert len(again) == again.index(max(again)) + 1 + 3 < 36
    bnn.update_prior(NORMAL)
    assert len(bnn.fit(loader(), SGD, 40, start=0.9, **options).loss) >= 36 + 4


@pytest.mark.parametrize(
    ("epochs", "start", "every", "taken"),
    [
        (8, 0.5, 1, [5, 6, 7, 8]),
        (10, 0.3, 2, [5, 7, 9]),
        (10, 0.7, 1, [8, 9, 10]),  # where 0.7 * 10 is not 7
        (6, 0.0, 3, [3, 6]),
        (5, 0.5, 1, [4, 5]),  # from 2.5 on
    ],
)
def test_snapshots_are_of_the_later_epochs(epochs, start, every, taken):
    bnn, seen = make(rank=2), []
    bnn.fit(loader(), SGD, epochs, lambda b, *_: seen.append(points(b)), start=start, every=every)
    weights = torch.stack([seen[epoch - 1] for epoch in taken])
    assert int(bnn.net_guide.count) == len(taken)
    torch.testing.assert_close(bnn.net_guide.mean, weights.mean(0))
    spread = bnn.net_guide.squares / len(taken)
    torch.testing.assert_close(spread, weights.var(0, correction=0), rtol=1e-3, atol=1e-8)


def test_training_is_map():
    torch.manual_seed(0)
    delta, likelihood = pyro.infer.autoguide.AutoDelta, HomoskedasticGaussian(N, scale=0.5)
    other = tyxe.VariationalBNN(mlp(2, 3, 1), NORMAL, likelihood, delta)
    history = other.fit(loader(), SGD, 8)
    bnn = make(rank=2)
    assert bnn.fit(loader(), SGD, 8).loss == pytest.approx(history.loss, rel=1e-5)
    torch.testing.assert_close(points(bnn), bnn.net_guide.blocks.flatten(other._mean_values()))


def test_a_second_fit_goes_on_collecting_and_reset_forgets():
    bnn, other = fitted(), make()
    bnn.fit(loader(), SGD, 3, start=0)
    assert int(bnn.net_guide.count) == 7
    weights = points(bnn)
    bnn.reset()
    assert int(bnn.net_guide.count) == 0
    assert torch.equal(points(bnn), weights)
    for name, loc in other.net_guide.locs.items():
        loc.data.copy_(bnn.net_guide.locs[name])
    for each in (bnn, other):
        each.fit(loader(), SGD, 4, start=0)
    assert_same_state(bnn, other)


def test_snapshots_of_a_task_are_not_those_of_the_next(tmp_path):
    bnn = fitted()
    before = bnn.predict(data()[0], num_predictions=0)[0]
    bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0, 2)))
    assert torch.equal(bnn.predict(data()[0], num_predictions=0)[0], before)
    with pytest.raises(ValueError, match=r"number of snapshots is 3; .* make 3, so"):
        bnn.fit(loader(), SGD, 3, start=0)
    bnn.save(tmp_path / "bnn")
    bnn.load(tmp_path / "bnn")
    bnn.fit(loader(), SGD, 4, start=0)
    assert int(bnn.net_guide.count) == 4
    bnn.update_prior(NORMAL)
    bnn.collect(bnn.to_module())
    assert int(bnn.net_guide.count) == 1


def test_snapshots_of_a_loop_of_ones_own():
    bnn, torch_net, states = make(rank=3), mlp(2, 3, 1), []
    optimizer = torch.optim.SGD(torch_net.parameters(), lr=0.05)
    for x, y in loader() * 2:
        optimizer.zero_grad()
        (torch_net(x) - y).square().mean().backward()
        optimizer.step()
        bnn.collect(torch_net)
        states.append(copy.deepcopy(torch_net.state_dict()))
    for name, value in bnn._mean_values().items():
        expected = torch.stack([state[name.removeprefix("net.")] for state in states]).mean(0)
        torch.testing.assert_close(value, expected)
    assert bnn.predict(data()[0], num_predictions=3, aggregate=False).shape == (3, N, 1)


def test_collect_takes_what_the_prior_hides_and_buffers():
    bnn = make(2, two_layers(2, 3, 1, nn.BatchNorm1d(3)), HIDE_NORMS)
    other = two_layers(2, 3, 1, nn.BatchNorm1d(3))
    nn.init.normal_(other[1].weight)
    other(data()[0])
    for _ in range(2):
        bnn.collect(other)
    torch.testing.assert_close(bnn.net[1].weight, other[1].weight)
    torch.testing.assert_close(bnn.to_module()(data()[0]), other.eval()(data()[0]))


def test_collect_takes_the_other_weights_of_a_subnetwork():
    few = tyxe.priors.SubnetworkPrior(NORMAL, 2, "last")
    bnn, other = make(2, two_layers(2, 3, 1), few), two_layers(2, 3, 1)
    for _ in range(2):
        bnn.collect(other)
    torch.testing.assert_close(bnn.to_module()(data()[0]), other(data()[0]))


# --------------------------------------------------------------------------- posterior


def test_glm_of_a_linear_net_is_that_of_the_dense_covariance():
    bnn = make(3, nn.Linear(2, 1))
    bnn.fit(loader(), SGD, 8, start=0.5)
    x = data()[0]
    mean, scale = bnn.predict(x, num_predictions=1, predictive="glm")
    (joint,) = bnn.net_guide.joints()
    dense = joint.precision.operator.to_dense()
    order = joint.unflatten(torch.arange(3))
    rows = torch.zeros(N, 3)
    rows[:, order["net.weight"].flatten()], rows[:, order["net.bias"]] = x, 1.0
    torch.testing.assert_close(mean[:, 0], rows @ joint.mean)
    expected = torch.einsum("ni,ij,nj->n", rows, dense, rows) + 0.25
    torch.testing.assert_close(scale[:, 0].square(), expected)


def test_draws_are_of_one_normal_over_all_sites():
    bnn = fitted()
    ensemble = bnn.to_ensemble(3)
    assert ensemble(data()[0])[0].shape == (N, 1)
    posterior = bnn.net_guide.get_detached_distributions()
    bnn.update_prior(tyxe.priors.DictPrior(posterior))
    terms = tyxe.bnn.elbo_terms(bnn.model, bnn.guide, *loader()[0])
    assert abs(terms.kl.item()) < 1e-2  # in closed form, of the posterior from itself
    bnn.reset()
    history = bnn.fit(loader(), functools.partial(torch.optim.SGD, lr=1e-9), 4, start=0)
    (joint,) = fitted().net_guide.joints()
    expected = -joint.log_prob(points(bnn)).item()
    assert history.kl[-1] == pytest.approx(expected, rel=1e-3)


def test_inferred_noise_is_a_point():
    bnn = make(scale=dist.LogNormal(-1.0, 0.5))
    bnn.fit(loader(), SGD, 8, start=0.5)
    first, second = bnn._draws(2)
    assert first["likelihood.scale"] == second["likelihood.scale"]
    assert not torch.equal(first["net.0.weight"], second["net.0.weight"])


# --------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("epochs", "options", "match"),
    [
        (8, {}, "8 epochs with start=0.75 and every=1 make 2, so take"),
        (8, {"start": 0, "every": 3}, "expected 4 or more, .*lower rank, more epochs or an"),
        (0, {}, "make 0, so"),
        (8, {"start": 1.0}, "start is 1.0; .* and below 1, a part of the epochs"),
        (8, {"start": -0.5}, "start is -0.5"),
        (8, {"every": 0}, "every is 0"),
    ],
)
def test_fits_with_too_few_snapshots(epochs, options, match):
    bnn = make()
    rejects(bnn, ValueError, match, lambda: bnn.fit(loader(), SGD, epochs, **options))
    assert not bnn.net_guide.moves


def test_predictions_inside_a_fit_are_those_of_the_weights():
    found = []

    def callback(bnn, epoch, loss):
        found.append(bnn.predict(data()[0], num_predictions=2, aggregate=False))
        assert len(bnn.predict(data()[0], aggregate=False)) == 1  # where nothing has a spread
        return epoch == 2

    bnn = make()
    bnn.fit(loader(), SGD, 8, callback, start=0.5)  # stopped before it has a posterior
    torch.testing.assert_close(found[-1][0], found[-1][1])
    with pytest.raises(RuntimeError, match="there are 0 snapshots"):
        bnn.predict(data()[0])


@pytest.mark.parametrize("other", [nn.Linear(2, 3), mlp(2, 5, 1)], ids=["names", "shapes"])
def test_collect_of_another_net(other):
    message = r"is not the same in this \w+ and in the BNN's"
    bnn = fitted()
    rejects(bnn, ValueError, message, lambda: bnn.collect(other))


def test_a_rate_that_diverges_is_an_error():
    bnn = make()
    with pytest.raises((RuntimeError, ValueError), match=r"not finite|is nan|is -inf"):
        bnn.fit(loader(), functools.partial(torch.optim.SGD, lr=1e4), 40)
    assert not bnn.net_guide.moves


@pytest.mark.parametrize(
    ("prior", "match"),
    [
        (NOTHING, "exposes no variables"),
        (tyxe.priors.IIDPrior(dist.Gamma(2.0, 2.0)), "SWAG's posterior is a Gaussian"),
    ],
    ids=["hidden", "positive"],
)
def test_priors_that_it_cannot_serve(prior, match):
    with pytest.raises(ValueError, match=match):
        make(prior=prior)


# --------------------------------------------------------------------------- norms


def test_fit_recomputes_norms():
    torch.manual_seed(0)
    module = two_layers(2, 8, 3, nn.BatchNorm1d(8), nn.ReLU())
    bnn = tyxe.SWAG_BNN(module, NORMAL, Categorical(N), rank=3)
    x, _ = data()
    batches = [(a, (b[:, 0] > 0).long()) for a, b in loader()]
    bnn.fit(batches, SGD, 6, start=0.5)
    own = copy.deepcopy(bnn.net[1].running_mean)
    with torch.no_grad():
        hidden = [bnn.to_module()[0](a).mean(0) for a, _ in batches]
    torch.testing.assert_close(own, torch.stack(hidden).mean(0))
    with_loader = seeded(bnn.predict, x, num_predictions=3, aggregate=False)
    bnn.update_norm_statistics(None)
    again = seeded(bnn.predict, x, num_predictions=3, aggregate=False)
    assert not torch.equal(with_loader, again)
