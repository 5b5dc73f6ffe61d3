"""Monte Carlo dropout: masks enumerated, what is random and what is not, errors."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tyxe
from tests.oracles.nets import ReadLast
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def bnn_of(net, likelihood=None):
    return tyxe.DropoutBNN(net, likelihood or Categorical(6))


def is_random(bnn, x=X):
    first, second = bnn.predict(x, num_predictions=2, aggregate=False)
    return not torch.equal(first, second)


def test_the_mean_is_that_of_all_masks():
    torch.manual_seed(0)
    head = nn.Linear(3, 2)
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.25), head)
    hidden = net[0](X).detach()
    expected, second = 0.0, 0.0
    for mask in itertools.product([0.0, 1.0], repeat=3):
        kept = torch.tensor(mask)
        share = torch.where(kept > 0, 0.75, 0.25).prod()
        probs = head(hidden * kept / 0.75).softmax(-1).detach()
        expected, second = expected + share * probs, second + share * probs.square()
    found = bnn_of(net).predict(X, num_predictions=8000, aggregate=False).softmax(-1)
    error = ((second - expected**2) / 8000).sqrt()
    assert bool(((found.mean(0) - expected).abs() < 4.5 * error).all())
    torch.testing.assert_close(found.var(0), second - expected**2, rtol=0.1, atol=1e-4)
    torch.testing.assert_close(
        bnn_of(net).predict(X, num_predictions=0).softmax(-1), net.eval()(X).softmax(-1)
    )


class Functional(nn.Module):
    def __init__(self, drop, **options):
        super().__init__()
        self.layer, self.drop, self.options = nn.Linear(4, 3), drop, options

    def forward(self, x):
        return self.layer(self.drop(x, training=self.training, **self.options))


def recurrent(cell):
    return ReadLast(cell, 1, 5, 3, num_layers=2, dropout=0.5)


class Transformer(nn.Module):
    def __init__(self, dropout=0.3):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x[:, None].expand(-1, 3, -1)).mean(1))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, dropout=0.4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0])


RANDOM = {
    "functional": functools.partial(Functional, F.dropout, p=0.2),
    "functional, default rate": functools.partial(Functional, F.dropout),
    "alpha": functools.partial(Functional, F.alpha_dropout, p=0.2),
    "operator": functools.partial(Functional, lambda x, training: torch.dropout(x, 0.3, training)),
    "operator by name": functools.partial(
        Functional, lambda x, training: torch.alpha_dropout(x, p=0.3, train=training)
    ),
    "alpha module": lambda: nn.Sequential(nn.AlphaDropout(0.3), nn.Linear(4, 3)),
    "LSTM": functools.partial(recurrent, nn.LSTM),
    "GRU": functools.partial(recurrent, nn.GRU),
    "transformer": Transformer,
    "attention": Attention,
}


@pytest.mark.parametrize("name", RANDOM)
def test_kinds_of_dropout(name):
    net = RANDOM[name]().eval()
    bnn = bnn_of(net)
    modes = [module.training for module in bnn.modules()]
    assert is_random(bnn)
    assert [module.training for module in bnn.modules()] == modes
    expected = net(X)
    torch.testing.assert_close(bnn.predict(X, num_predictions=0, aggregate=False)[0], expected)


def test_whole_channels_drop():
    net = nn.Sequential(nn.Dropout2d(0.5), nn.Conv2d(3, 3, 1, groups=3, bias=False), nn.Flatten())
    outputs = bnn_of(net).predict(torch.ones(5, 3, 2, 2), num_predictions=20, aggregate=False)
    channels = outputs.view(20, 5, 3, 4)
    dropped = (channels == 0).float().mean(-1)
    assert set(dropped.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), lambda x: F.dropout(x, 0.5, training=False)])
def test_statistics_of_norms_are_those_without_dropout(drop):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 3)
            self.drop = drop

        def forward(self, x):
            return self.layer(self.norm(self.drop(x)))

    class Counted(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    bnn, loader = bnn_of(Net()), Counted([(X, torch.zeros(6))])
    bnn.update_norm_statistics(loader)
    torch.testing.assert_close(bnn.net.norm.running_mean, X.mean(0))
    before = {name: buffer.clone() for name, buffer in bnn.net.named_buffers()}
    assert is_random(bnn)
    assert loader.passes == 1  # draws have the same weights
    assert all(torch.equal(b, before[name]) for name, b in bnn.net.named_buffers())


def test_norms_are_those_of_eval_mode():
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
    bnn = bnn_of(net)
    before = {name: buffer.clone() for name, buffer in bnn.net.named_buffers()}
    hidden = []
    bnn.net[1].register_forward_hook(lambda *args: hidden.append(args[-1].clone()))
    bnn.predict(X, num_predictions=3)
    expected = nn.Sequential(*net[:2]).eval()(X)
    for found in hidden:
        torch.testing.assert_close(found, expected)
    assert len(hidden) == 4  # of three draws, and one to compare with that of a draw
    for name, buffer in bnn.net.named_buffers():
        assert torch.equal(buffer, before[name])


def test_seeds_repeat_and_a_forward_is_a_draw():
    bnn = bnn_of(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)))
    found = []
    for _ in range(2):
        torch.manual_seed(4)
        found.append((bnn.predict(X, num_predictions=3), bnn.eval()(X), bnn(X)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(found[0][1], found[0][2])


def test_fit_is_maximum_likelihood():
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 40)[:, None]
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Dropout(0.1), nn.Linear(50, 1))
    bnn = bnn_of(net, HomoskedasticGaussian(40, scale=0.2))
    adam = functools.partial(torch.optim.Adam, lr=1e-2, weight_decay=1e-4)
    history = bnn.fit([(x, x**2)], adam, 300)
    assert history.kl[-1] == 0
    mean, scale = bnn.predict(x, num_predictions=50)
    assert (mean - x**2).abs().mean() < 0.1
    assert bool((scale > 0.2).all())
    module = bnn.to_module()
    torch.testing.assert_close(module(x), bnn.predict(x, num_predictions=0, aggregate=False)[0])


@pytest.mark.parametrize(
    "net", [nn.Linear(4, 3), nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3)), Transformer(0.0)]
)
def test_a_net_without_dropout(net):
    bnn = bnn_of(net)
    message = r"nothing drops in this (Linear|Sequential|Transformer), .*nn\.Dropout"
    with pytest.raises(ValueError, match=message):
        bnn.predict(X)
    with pytest.raises(ValueError, match=message):
        bnn.fit([(X, torch.arange(6) % 3)], torch.optim.Adam, 1)
    assert bnn.predict(X, num_predictions=0).shape == (6, 3)


def test_there_are_no_weights_to_take_along():
    bnn = bnn_of(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)))
    for call in (lambda: bnn.to_ensemble(3), lambda: bnn.to_module(sample=True)):
        with pytest.raises(TypeError, match=r"no draws of weights.*to_module\(\)"):
            call()
    with pytest.raises(TypeError, match="no Gaussian posterior"):
        bnn.predict(X, predictive="glm")
