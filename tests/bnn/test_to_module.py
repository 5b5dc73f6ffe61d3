"""The user's net is never changed, and what of it is handed out is plain."""

import copy
import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.predictions import NORMAL, N, Tracked, inputs, make, net, seeded
from tyxe.guides import AutoNormal


def describe(module):
    return {
        "class": [type(m) for m in module.modules()],
        "training": [m.training for m in module.modules()],
        "grad": [(n, p.requires_grad, p.grad) for n, p in module.named_parameters()],
        "ids": [id(p) for p in module.parameters()],
        "hooks": [list(m._forward_hooks) + list(m._forward_pre_hooks) for m in module.modules()],
        "dict": [sorted(vars(m)) for m in module.modules()],
        "state": {n: v.clone() for n, v in module.state_dict().items()},
    }


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_the_users_net_is_never_changed():
    module = Tracked(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    module[1].eval()
    module[0].bias.requires_grad_(False)
    module.register_forward_hook(lambda *_: None)
    before = describe(module)
    bnn = make(module)
    y = torch.arange(N) % 3
    bnn.fit([(inputs(), y)], functools.partial(torch.optim.Adam, lr=0.1), 2)
    bnn.predict(inputs(), num_predictions=2, vectorize=True)
    bnn.evaluate(inputs(), y)
    bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0, 2)))
    bnn.to_module().train()
    tyxe.PytorchBNN(module, NORMAL, AutoNormal)(inputs())
    after = describe(module)
    for key in before.keys() - {"state"}:
        assert after[key] == before[key], key
    for name, value in before["state"].items():
        assert torch.equal(after["state"][name], value), name
    # The copy is one in class and hooks, too.
    assert type(bnn.net) is Tracked
    assert len(bnn.net._forward_hooks) == 1


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_to_module_is_a_plain_net_of_the_class_that_came_in():
    module = Tracked(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double()
    hide = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
    bnn, x = make(module, prior=hide), inputs()
    bnn.fit([(x, torch.arange(N) % 3)], functools.partial(torch.optim.Adam, lr=0.1), 3)

    exported = bnn.to_module()
    assert type(exported) is Tracked
    assert exported.state_dict().keys() == module.state_dict().keys()
    assert all(type(p) is nn.Parameter and p.requires_grad for p in exported.parameters())
    assert tyxe.util.pyro_sample_sites(exported) == []
    assert set(vars(exported)) == set(vars(module))
    raw = bnn.predict(x, num_predictions=0, aggregate=False)[0]
    torch.testing.assert_close(exported.eval()(x), raw)

    # It shares nothing with the BNN: training it on leaves the BNN as it is.
    state = copy.deepcopy(bnn.state_dict())
    with torch.no_grad():
        for parameter in exported.parameters():
            parameter.add_(1.0)
    for name, value in bnn.state_dict().items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, state[name]), name


def test_to_module_and_a_forward_are_at_a_draw():
    bnn, x = make(), inputs()
    sample = seeded(bnn.to_module, sample=True)
    output = seeded(lambda: bnn._run_net(bnn._one_draw(), x))
    torch.testing.assert_close((sample(x), seeded(bnn, x)), (output, output))
    assert bnn(x).requires_grad
    assert not torch.equal(sample[0].weight, bnn.to_module(sample=True)[0].weight)


def test_to_module_of_a_frozen_backbone_keeps_it_frozen():
    module = net()
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    bnn = make(module)
    grads = {n: p.requires_grad for n, p in bnn.to_module().named_parameters()}
    assert grads == {"0.weight": False, "0.bias": False, "2.weight": True, "2.bias": True}


def test_guided_forward_replays_a_trace():
    bnn, x = make(), inputs()
    trace = pyro.poutine.trace(bnn.guide).get_trace()
    first, second = (bnn.guided_forward(x, guide_tr=trace) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, bnn.guided_forward(x))


class WithScale(nn.Linear):
    def forward(self, x, scale=1.0):
        return scale * super().forward(x)


def test_forward_takes_positions_and_keywords_together():
    bnn, x = make(WithScale(2, 3).double()), inputs()
    torch.testing.assert_close(seeded(bnn, x, scale=2.0), 2 * seeded(bnn, x))
    torch.testing.assert_close(seeded(bnn, x=x, scale=2.0), 2 * seeded(bnn, x))
