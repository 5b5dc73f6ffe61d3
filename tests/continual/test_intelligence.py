"""Synaptic intelligence against the published loop."""

import functools
import io

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tyxe import continual
from tyxe.continual import SynapticIntelligence
from tyxe.errors import TyxeWarning

N = 8


def regression(seed=0):
    """A net, and data of two tasks, in double precision."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    tasks = [
        (torch.randn(N, 3, dtype=torch.double), torch.randn(N, 1, dtype=torch.double))
        for _ in range(2)
    ]
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=1.0)
    return tyxe.VariationalBNN(net, prior, likelihood), net, tasks


OPTIMISERS = {
    "gradient descent": functools.partial(torch.optim.SGD, lr=0.05),
    "ascent": functools.partial(torch.optim.SGD, lr=0.01, maximize=True),  # a loss that grows
    "Nesterov": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": functools.partial(torch.optim.Adam, lr=0.05),
}


@pytest.mark.parametrize("optimiser", OPTIMISERS.values(), ids=OPTIMISERS.keys())
def test_intelligence_is_the_published_loop(optimiser):
    """Every step by hand: loss and penalty differentiated together, omega from the loss alone."""
    bnn, net, tasks = regression()
    c, xi, steps = 0.7, 0.05, 6
    intelligence = SynapticIntelligence(bnn, c, xi)
    for x, y in tasks:
        optimizer = intelligence.watch(optimiser(bnn.parameters()))
        bnn.fit([(x, y)], optimizer, steps, progress=False)
        intelligence.update()

    weights = list(net.parameters())
    importance = [torch.zeros_like(w) for w in weights]
    reference = [w.detach().clone() for w in weights]
    for x, y in tasks:
        first = [w.detach().clone() for w in weights]
        omega = [torch.zeros_like(w) for w in weights]
        optimizer = optimiser(weights)
        for _ in range(steps):
            # The mean negative log-likelihood of a Normal of unit variance.
            loss = (net(x) - y).square().sum() / 2 / N
            gradients = torch.autograd.grad(loss, weights)
            optimizer.zero_grad()
            penalty = sum(
                (i * (w - r).square()).sum()
                for i, w, r in zip(importance, weights, reference, strict=True)
            )
            ((net(x) - y).square().sum() / 2 / N + c * penalty).backward()
            before = [w.detach().clone() for w in weights]
            optimizer.step()
            for o, g, w, b in zip(omega, gradients, weights, before, strict=True):
                o -= g * (w.detach() - b)
        for i, o, w, f in zip(importance, omega, weights, first, strict=True):
            i += o.clamp(min=0) / ((w.detach() - f).square() + xi)
        reference = [w.detach().clone() for w in weights]

    found = intelligence.penalty
    for (name, mean), w, i in zip(found.means.items(), weights, importance, strict=True):
        torch.testing.assert_close(dict(bnn.named_parameters())[name], w)
        torch.testing.assert_close(mean, w.detach())
        torch.testing.assert_close(found.precisions[name], 2 * c * i)
    shifted = {name: mean + 1 for name, mean in found.means.items()}
    expected = sum(precision.sum() / 2 for precision in found.precisions.values())
    torch.testing.assert_close(found(shifted), expected)


def test_intelligence_leaves_heads_alone_and_resumes():
    bnn, _, tasks = regression()
    heads = continual.Heads(bnn, ["2"])
    intelligence = SynapticIntelligence(bnn, c=5.0, heads=heads)
    assert set(intelligence.penalty.means) == {"net.0.weight", "net.0.bias"}
    heads.start(0)
    sgd = OPTIMISERS["Nesterov"](bnn.parameters())
    bnn.fit([tasks[0]], intelligence.watch(sgd), 3, progress=False)
    intelligence.update()
    states = {"bnn": bnn.state_dict(), "intelligence": intelligence.state_dict()}
    torch.save(states, file := io.BytesIO())
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other, _, _ = regression(seed=1)
    resumed = SynapticIntelligence(other, c=5.0, heads=continual.Heads(other, ["2"]))
    # An optimiser that is watched stays so after loading.
    early = resumed.watch(OPTIMISERS["Nesterov"](other.parameters()))
    other.load_state_dict(state["bnn"])
    resumed.load_state_dict(state["intelligence"])
    late = intelligence.watch(OPTIMISERS["Nesterov"](bnn.parameters()))
    for part, net, optimizer in ((intelligence, bnn, late), (resumed, other, early)):
        net.fit([tasks[1]], optimizer, 3, progress=False)
        part.update()
    for name, value in bnn.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other.state_dict()[name])
    for name, value in intelligence.penalty.precisions.items():
        assert torch.equal(value, resumed.penalty.precisions[name])
    own = resumed.state_dict().items()
    resumed.load_state_dict({p: {n: v.float() for n, v in part.items()} for p, part in own})
    for values in resumed.state_dict().values():
        assert all(value.dtype == torch.double for value in values.values())


def test_an_update_without_steps_warns():
    bnn, _, tasks = regression()
    intelligence = SynapticIntelligence(bnn)
    bnn.fit([tasks[0]], OPTIMISERS["Adam"], 2, progress=False)  # which nobody watches
    with pytest.warns(TyxeWarning, match=r"no step of a watched optimiser.*watch\(optimizer\)"):
        intelligence.update()


def test_wrong_intelligence():
    bnn, _, _ = regression()
    for options in ({"c": 0.0}, {"xi": -1.0}):
        with pytest.raises(ValueError, match="expected a number above 0"):
            SynapticIntelligence(bnn, **options)
    intelligence = SynapticIntelligence(bnn)
    sgd = intelligence.watch(torch.optim.SGD(bnn.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="watched already"):
        intelligence.watch(sgd)
    other = SynapticIntelligence(bnn, heads=continual.Heads(bnn, ["2"]))
    with pytest.raises(ValueError, match=r"here there are net\.0\.weight"):
        other.load_state_dict(intelligence.state_dict())
    state = intelligence.state_dict()
    state["start"]["net.0.weight"] = torch.zeros(1, 1)  # would broadcast
    with pytest.raises(ValueError, match=r"the state is of .*net\.0\.weight \(1, 1\)"):
        intelligence.load_state_dict(state)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=1.0)
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
    sites = tyxe.VariationalBNN(nn.Linear(2, 1), prior, likelihood, tyxe.guides.AutoNormal)
    with pytest.raises(ValueError, match=r"'weight' is a site of the prior.*hide_all=True"):
        SynapticIntelligence(sites)
