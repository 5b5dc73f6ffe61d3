"""Monte Carlo dropout: masks enumerated, what is random and what is not, errors."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tyxe
from tests.oracles.nets import NetOf, ReadLast
from tyxe.likelihoods import Categorical

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
    found = bnn_of(net).predict(X, num_predictions=4000, aggregate=False).softmax(-1)
    error = ((second - expected**2) / 4000).sqrt()
    assert bool(((found.mean(0) - expected).abs() < 4.5 * error).all())
    torch.testing.assert_close(found.var(0), second - expected**2, rtol=0.1, atol=1e-4)
    torch.testing.assert_close(
        bnn_of(net).predict(X, num_predictions=0).softmax(-1), net.eval()(X).softmax(-1)
    )


def functional(drop, **options):
    def forward(self, x):
        return self.layer(drop(x, training=self.training, **options))

    return NetOf(forward, layer=nn.Linear(4, 3))


def recurrent(cell):
    return ReadLast(cell, 1, 5, 3, num_layers=2, dropout=0.5)


def transformer(dropout=0.3):
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout, batch_first=True)
    return NetOf(
        lambda self, x: self.head(self.body(x[:, None].expand(-1, 3, -1)).mean(1)),
        body=nn.TransformerEncoder(layer, 2),
        head=nn.Linear(4, 3),
    )


def attention():
    parts = {"attention": nn.MultiheadAttention(4, 2, dropout=0.4), "head": nn.Linear(4, 3)}
    return NetOf(lambda self, x: self.head(self.attention(x, x, x)[0]), **parts)


RANDOM = {
    "functional": lambda: functional(F.dropout, p=0.2),
    "functional, default rate": lambda: functional(F.dropout),
    "alpha": lambda: functional(F.alpha_dropout, p=0.2),
    "operator": lambda: functional(lambda x, training: torch.dropout(x, 0.3, training)),
    "operator by name": lambda: functional(
        lambda x, training: torch.alpha_dropout(x, p=0.3, train=training)
    ),
    "alpha module": lambda: nn.Sequential(nn.AlphaDropout(0.3), nn.Linear(4, 3)),
    "LSTM": lambda: recurrent(nn.LSTM),
    "GRU": lambda: recurrent(nn.GRU),
    "transformer": transformer,
    "attention": attention,
}


@pytest.mark.parametrize("make", RANDOM.values(), ids=RANDOM.keys())
def test_kinds_of_dropout(make):
    net = make().eval()
    bnn = bnn_of(net)
    modes = [module.training for module in bnn.modules()]
    assert is_random(bnn)
    assert [module.training for module in bnn.modules()] == modes
    expected = net(X)
    torch.testing.assert_close(bnn.predict(X, num_predictions=0, aggregate=False)[0], expected)


@pytest.mark.parametrize("drop", [nn.Dropout(0.5), lambda x: F.dropout(x, 0.5, training=False)])
def test_statistics_of_norms_are_those_without_dropout(drop):
    net = NetOf(
        lambda self, x: self.layer(self.norm(self.drop(x))),
        norm=nn.BatchNorm1d(4),
        layer=nn.Linear(4, 3),
        drop=drop,
    )

    class Counted(list):
        passes = 0

        def __iter__(self):
            self.passes += 1
            return super().__iter__()

    bnn, loader = bnn_of(net), Counted([(X, torch.zeros(6))])
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


@pytest.mark.parametrize(
    "net", [nn.Linear(4, 3), nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3)), transformer(0.0)]
)
def test_a_net_without_dropout(net):
    bnn = bnn_of(net)
    message = r"nothing drops in this (Linear|Sequential|NetOf), .*nn\.Dropout"
    with pytest.raises(ValueError, match=message):
        bnn.predict(X)
    with pytest.raises(ValueError, match=message):
        bnn.fit([(X, torch.arange(6) % 3)], torch.optim.Adam, 1)
    assert bnn.predict(X, num_predictions=0).shape == (6, 3)


BODIES = {
    "module": lambda: nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)),
    "functional": lambda: NetOf(
        lambda self, x: F.dropout(self.layer(x), 0.5, self.training), layer=nn.Linear(4, 5)
    ),
    "LSTM": lambda: ReadLast(nn.LSTM, 1, 5, 5, num_layers=2, dropout=0.5),
    "attention": lambda: NetOf(
        lambda self, x: self.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2, 0.4)
    ),
    "functional, other flag": lambda: NetOf(
        lambda self, x: F.dropout(self.layer(x), 0.5, self.training is True), layer=nn.Linear(4, 5)
    ),
    "functional norm": lambda: NetOf(
        lambda self, x: F.dropout(
            F.batch_norm(self.layer(x), *self.moments, training=self.training), 0.5, self.training
        ),
        layer=nn.Linear(4, 5),
        moments=(torch.zeros(5), torch.ones(5)),
    ),
    "part in its own mode": lambda: NetOf(
        lambda self, x: nn.Dropout(0.5).train(self.training)(self.layer(x)), layer=nn.Linear(4, 5)
    ),
    "RReLU": lambda: nn.Sequential(nn.Linear(4, 5), nn.RReLU(), nn.BatchNorm1d(5), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("make", BODIES.values(), ids=BODIES.keys())
def test_a_frozen_body_in_eval_mode_drops_what_it_drops_in_fits(make):
    body = make().requires_grad_(False).eval()
    net = nn.Sequential(body, nn.Dropout(0.3), nn.LazyLinear(3))
    net(X)
    bnn, hidden = bnn_of(net), []
    bnn.net[0].register_forward_hook(lambda *args: hidden.append(args[-1].clone()))
    bnn.fit([(X, torch.arange(6) % 3)], torch.optim.Adam, 2, progress=False)
    for _ in range(2):
        assert is_random(bnn)
        bnn.eval()
    for found in hidden:
        torch.testing.assert_close(found, body(X))
    bnn.net[0].train()
    bnn.predict(X, num_predictions=2)
    assert not torch.equal(hidden[-1], body(X))


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_a_traced_body_stays_as_it_is():
    body = torch.jit.trace(nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5)).eval(), X)
    body.requires_grad_(False)
    assert is_random(bnn_of(nn.Sequential(body, nn.Dropout(0.3), nn.Linear(5, 3))))


def test_dropout_of_frozen_nets():
    net = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).eval()
    assert is_random(bnn_of(net.requires_grad_(False)))  # there is nothing to fit
    net[2].requires_grad_(True)
    assert is_random(bnn_of(net))  # the dropout is not in a part that is frozen
    bodies = nn.Sequential(nn.Sequential(*net[:2]), net[2])
    with pytest.raises(ValueError, match="nothing drops"):
        bnn_of(bodies).predict(X)


def test_a_forward_is_a_draw_in_train_and_eval_mode():
    bnn = bnn_of(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)))
    assert not torch.equal(bnn.eval()(X), bnn(X))
    assert not torch.equal(bnn.train()(X), bnn(X))


def test_there_are_no_weights_to_take_along():
    bnn = bnn_of(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)))
    for call in (lambda: bnn.to_ensemble(3), lambda: bnn.to_module(sample=True)):
        with pytest.raises(TypeError, match=r"no draws of weights.*to_module\(\)"):
            call()
    with pytest.raises(TypeError, match="no Gaussian posterior"):
        bnn.predict(X, predictive="glm")
