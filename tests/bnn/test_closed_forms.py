"""Inference against what can be computed by hand: conjugate regression, MAP, maximum likelihood."""

import copy
import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn

import tyxe
from tests.oracles import conjugate
from tests.oracles.bnns import NORMAL, NOTHING, mlp
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical

WEIGHTS = ("weight", "bias")


def assert_is_the_mean_field_optimum(bnn, precision, mean, tolerance):
    guide = bnn.net_guide
    loc = torch.cat([guide.get_loc("weight").flatten(), guide.get_loc("bias")]).detach()
    scale = torch.cat([guide.get_scale("weight").flatten(), guide.get_scale("bias")]).detach()
    torch.testing.assert_close(loc, mean, rtol=0, atol=tolerance)
    torch.testing.assert_close(scale**-2, precision.diagonal(), rtol=tolerance, atol=0)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_fit_finds_the_mean_field_optimum():
    # Through `fit` itself: its num_particles average over exactly one round of the points, so
    # that it descends on the exact objective. Momentum 0.85 contracts by sqrt(0.85) a step.
    x, y = conjugate.regression()
    precision, mean = conjugate.precision_and_mean(x, y)
    bnn = conjugate.linear_bnn(AutoNormal)
    optim = pyro.optim.SGD({"lr": 0.3, "momentum": 0.85})
    points = conjugate.SigmaPoints(conjugate.MEAN_FIELD_SITES)
    with points:
        history = bnn.fit([(x, y)], optim, 220, num_particles=2 * points.total)
        elbo = conjugate.exact_elbo(bnn, points, x, y).item()
    assert_is_the_mean_field_optimum(bnn, precision, mean, 1e-5)
    assert history.loss[-1] == pytest.approx(-elbo, rel=1e-6)


def test_mini_batches_have_the_full_optimum():
    # The average gradient over the batches, weighted by S / N, vanishes at the full optimum.
    x, y = conjugate.regression()
    precision, mean = conjugate.precision_and_mean(x, y)
    bnn = conjugate.linear_bnn(AutoNormal)
    guide, logs = bnn.net_guide, precision.diagonal().log() / -2
    for table, vector in ((guide.locs, mean), (guide.unconstrained_scales, logs)):
        torch.nn.utils.vector_to_parameters(vector, [table[name] for name in WEIGHTS])
    points = conjugate.SigmaPoints(conjugate.MEAN_FIELD_SITES)
    with points:
        for rows in (slice(0, 7), slice(7, 12)):
            weight = len(x[rows]) / conjugate.N
            (-weight * conjugate.exact_elbo(bnn, points, x[rows], y[rows])).backward()
            if rows.start == 0:
                assert max(p.grad.abs().max() for p in bnn.parameters() if p.requires_grad) > 1e-3
    for name, parameter in bnn.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(
                parameter.grad, torch.zeros_like(parameter), rtol=0, atol=1e-9, msg=name
            )


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        functools.partial(torch.optim.Adam, lr=0.05),
    ],
)
def test_map_is_ascent_on_the_log_joint(optimizer):
    x, y = torch.randn(9, 2).double(), torch.randint(0, 3, (9,))
    net = mlp(2, 4, 3).double()
    start = tyxe.guides.PretrainedInitializer.from_net(net)
    guide = functools.partial(AutoDelta, init_loc_fn=start)
    bnn = tyxe.VariationalBNN(net, NORMAL, Categorical(18), guide)
    loader = [(x[:5], y[:5]), (x[5:], y[5:])]
    bnn.fit(loader, optimizer, 10)

    by_hand = optimizer(net.parameters())
    for _ in range(10):
        for inputs, targets in loader:
            log_prior = sum(dist.Normal(0.0, 1.0).log_prob(p).sum() for p in net.parameters())
            mean_loss = nn.functional.cross_entropy(net(inputs), targets)
            by_hand.zero_grad()
            (mean_loss - log_prior / 18).backward()
            by_hand.step()
    values = bnn.net_guide.median()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(values[f"net.{name}"], parameter.detach(), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-3),
        functools.partial(torch.optim.Adam, lr=0.01),
    ],
)
def test_maximum_likelihood_is_plain_training_step_for_step(optimizer):
    # No bias before BatchNorm: its gradient is pure rounding, which Adam would amplify.
    convolution = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU()
    net = nn.Sequential(*convolution, nn.Dropout(0.3), nn.Flatten(), nn.Linear(16, 3)).double()
    plain = copy.deepcopy(net)
    x, y = torch.randn(10, 1, 4, 4).double(), torch.randint(0, 3, (10,))
    loader = [(x[:6], y[:6]), (x[6:], y[6:])]
    bnn = tyxe.VariationalBNN(net, NOTHING, Categorical(10))
    pyro.set_rng_seed(1)
    history = bnn.fit(loader, optimizer, 5)

    pyro.set_rng_seed(1)
    by_hand, losses = optimizer(plain.parameters()), []
    for _ in range(5):
        total = 0.0
        for inputs, targets in loader:
            by_hand.zero_grad()
            loss = nn.functional.cross_entropy(plain(inputs), targets)
            loss.backward()
            by_hand.step()
            total += loss.item() * len(targets)
        losses.append(total)
    # BatchNorm's statistics are among them.
    torch.testing.assert_close(bnn.net.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-11)
    assert history.loss == pytest.approx(losses, rel=1e-9)
    assert history.kl == [0.0] * 5
