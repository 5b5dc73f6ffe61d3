"""Predictions as programs: those of the net itself, for as long as the net is what it was."""

import functools
import threading
import warnings

import numpy as np
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import HIDE_NORMS, NORMAL, chains, laplace, mean_field, mlp, swag
from tests.oracles.nets import NetOf, ReadLast, kind_and_size
from tests.oracles.predictions import seeded
from tests.oracles.recorded import Recorded
from tyxe import program
from tyxe.bnn import traced

N, DRAWS = 6, 5
X, Y = torch.randn(N, 4), torch.randint(3, (N,))
CLASSES = tyxe.likelihoods.Categorical(N)
WIDE = functools.partial(tyxe.guides.AutoNormal, init_scale=0.3)


def bnn_of(net, likelihood=CLASSES, prior=NORMAL):
    return tyxe.VariationalBNN(net.eval(), prior, likelihood, WIDE)


@pytest.fixture
def made(monkeypatch):
    """The programs that predictions have made."""
    found = []

    class Kept(program.Program):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            found.append(self)

    monkeypatch.setattr(traced, "Program", Kept)
    return found


def check_same(bnn, *inputs, method="predict", **options):
    """Compare a prediction by programs, at first and later, with that by the net itself."""
    run = functools.partial(getattr(bnn, method), *inputs, num_predictions=DRAWS, **options)
    expected = seeded(run)
    for _ in range(2):
        found = seeded(functools.partial(run, compile=True))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.layer(x[:, None].expand(-1, 3, -1)).mean(1))


class Listed(nn.Module):
    """Its parts are in a list as well, and it keeps its latest features."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layers = [self.one, self.two]

    def forward(self, x):
        self.latest = self.layers[0](x).tanh()
        return self.layers[1](self.latest)


NETS = {
    "linear": lambda: mlp(4, 8, 3),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 3)
    ),
    "norm": lambda: nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)
    ),
    "attention": Attends,
    "tied": lambda: NetOf(lambda self, x: self.one(x) @ self.one.weight, one=nn.Linear(4, 3)),
    "listed": Listed,
}


@pytest.mark.parametrize("vectorize", [None, False])
@pytest.mark.parametrize("net", NETS)
def test_programs_predict_what_the_net_does(made, net, vectorize):
    torch.manual_seed(0)
    check_same(bnn_of(NETS[net](), prior=HIDE_NORMS), X, vectorize=vectorize)
    assert len(made) == 1


@pytest.mark.parametrize("kind", [mean_field, chains, swag, laplace])
@pytest.mark.parametrize("method", ["predict", "sample_predictive", "evaluate"])
def test_of_every_posterior(made, kind, method):
    torch.manual_seed(0)
    bnn, data = kind(mlp(4, 8, 3), CLASSES), [(X, Y)]
    if kind is laplace:
        bnn.fit_curvature(data)
    elif kind is chains:
        bnn.fit(data, num_samples=DRAWS, warmup_steps=2, progress=False)
    else:
        bnn.fit(data, functools.partial(torch.optim.Adam, lr=0.01), 20, progress=False)
    if method == "sample_predictive":
        run = functools.partial(bnn.sample_predictive, X, num_samples=DRAWS, predictive="bnn")
        assert torch.equal(seeded(run), seeded(functools.partial(run, compile=True)))
    else:
        given = (X, Y) if method == "evaluate" else (X,)
        check_same(bnn, *given, method=method, predictive="bnn")
    assert len(made) == 1


def test_with_a_variable_of_the_likelihood_and_named_outputs(made):
    noise = tyxe.likelihoods.HomoskedasticGaussian(N, scale=dist.LogNormal(0.0, 1.0))
    guides = WIDE, tyxe.guides.AutoNormal
    check_same(tyxe.VariationalBNN(mlp(4, 8, 1).eval(), NORMAL, noise, *guides), X)
    parts = NetOf(
        lambda self, x: {"kind": self.one(x)[:, :2], "size": self.one(x)[:, 2:]},
        one=nn.Linear(4, 3),
    )
    check_same(bnn_of(parts, kind_and_size(N)), X)
    assert len(made) == 2


def test_part_of_a_parameter_follows_the_rest(made):
    net = mlp(4, 8, 3).eval()
    prior = tyxe.priors.SubnetworkPrior(NORMAL, 9, by="magnitude")
    bnn = tyxe.VariationalBNN(net, prior, CLASSES, WIDE)
    check_same(bnn, X)
    for own in bnn.net.parameters():
        own.data = 2 * own.data
    check_same(bnn, X)
    assert len(made) == 1


def test_a_distribution_and_batches_of_two_sizes(made):
    bnn = bnn_of(mlp(4, 8, 3))
    expected = seeded(lambda: bnn.predictive(X, num_predictions=DRAWS)).probs
    found = seeded(lambda: bnn.predictive(X, num_predictions=DRAWS, compile=True, batch_size=4))
    torch.testing.assert_close(found.probs, expected)
    check_same(bnn, [X[:4], X[4:]])
    assert len(made) == 2


def test_programs_of_the_first_shapes_are_kept(made, monkeypatch):
    monkeypatch.setattr(traced, "MOST_SHAPES", 2)
    bnn = bnn_of(mlp(4, 8, 3))
    for rows in (1, 2):
        check_same(bnn, X[:rows])
    with pytest.warns(tyxe.TyxeWarning, match="shapes than the first 2"):
        check_same(bnn, X[:3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in (4, 1, 2, 3):
            check_same(bnn, X[:rows])
    assert len(made) == 2


CALLS = []


def noted(net, x):
    CALLS.append(1)
    return net.one(x)


def test_the_net_itself_runs_no_more(made):
    bnn = bnn_of(NetOf(noted, one=nn.Linear(4, 3)))
    bnn.predict(X, num_predictions=DRAWS, compile=True)
    CALLS.clear()
    bnn.predict(X + 1, num_predictions=DRAWS, compile=True)
    assert not CALLS


CHANGES = {
    "a fit": lambda bnn: bnn.fit([(X, Y)], functools.partial(torch.optim.SGD, lr=1.0), 9),
    "numbers": lambda bnn: bnn.net.one.bias.data.fill_(3.0),
    "an attribute": lambda bnn: setattr(bnn.net, "factor", 7.0),
    "a buffer": lambda bnn: bnn.net.shift.fill_(5.0),
    "another buffer": lambda bnn: setattr(bnn.net, "shift", torch.full((3,), 4.0)),
    "another part": lambda bnn: setattr(bnn.net, "last", nn.Tanh()),
    "parts in another order": lambda bnn: exchange(bnn.net, "last", "other"),
    "a number in a dictionary": lambda bnn: bnn.net.table.update(factor=5.0),
    "a number of NumPy": lambda bnn: bnn.net.array.fill(3.0),
    "a tensor without a place": lambda bnn: bnn.net.kept.fill_(3.0),
    "an attribute of the class": lambda bnn: setattr(Changing, "of_class", 4.0),
    "a part in a list": lambda bnn: setattr(bnn.net.hidden[0], "negative_slope", 0.7),
    "what is tied": lambda bnn: setattr(bnn.net, "shift", bnn.net.other_shift),
    "a dtype": lambda bnn: bnn.double(),
    "a setting of a part": lambda bnn: setattr(bnn.net.last, "negative_slope", 0.9),
}


def exchange(net, *names):
    for name, part in zip(names, [getattr(net, name) for name in reversed(names)], strict=True):
        setattr(net, name, part)


class Changing(nn.Module):
    of_class = 1.0

    def __init__(self):
        super().__init__()
        self.one, self.last, self.other = nn.Linear(4, 3), nn.LeakyReLU(), nn.Sigmoid()
        self.factor, self.table, self.array = 2.0, {"factor": 1.0}, np.ones(3)
        self.kept, self.hidden = torch.ones(()), [nn.LeakyReLU()]
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("other_shift", torch.full((3,), 2.0))
        self.register_buffer("third_shift", self.shift)

    def forward(self, x):
        y = self.factor * self.last(self.one(x) + self.shift) + self.other(x[:, :1])
        y = y * self.table["factor"] * float(self.array[0]) * float(self.kept) * self.of_class
        return self.hidden[0](y - 4) + self.other_shift + self.third_shift


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_later_is_noticed(change, monkeypatch):
    monkeypatch.setattr(Changing, "of_class", 1.0)
    torch.manual_seed(0)
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_parameters=["bias"])
    bnn = bnn_of(Changing(), prior=prior)
    check_same(bnn, X)
    before = seeded(lambda: bnn.predict(X, num_predictions=DRAWS))
    CHANGES[change](bnn)
    x = X.double() if change == "a dtype" else X
    check_same(bnn, x)
    after = seeded(lambda: bnn.predict(x, num_predictions=DRAWS))
    assert change == "a dtype" or not torch.allclose(before, after, atol=1e-3)


class ReadsWhatItKeeps(nn.Linear):
    reads, kept = False, None

    def forward(self, x):
        found = super().forward(x)
        if self.reads:
            return found * float(self.kept[0])
        self.kept = np.zeros(1)
        return found


def test_what_forwards_have_made_anew_may_be_read_by_later_ones():
    bnn = bnn_of(ReadsWhatItKeeps(4, 3))
    check_same(bnn, X)
    bnn.net.reads, bnn.net.kept = True, np.ones(1)
    check_same(bnn, X)
    bnn.net.kept[0] = 9.0
    check_same(bnn, X)


def test_a_program_of_other_numbers_is_not_used(monkeypatch):
    class Other(program.Program):
        def __call__(self, *arguments):
            return super().__call__(*arguments) + 0.5

    monkeypatch.setattr(traced, "Program", Other)
    with pytest.warns(tyxe.TyxeWarning, match="it gives other numbers"):
        check_same(bnn_of(mlp(4, 8, 3)), X)


def test_another_way_may_be_a_program(made):
    bnn = bnn_of(ReadLast(nn.LSTM, 1, 3, 3))
    with pytest.warns(tyxe.TyxeWarning, match="are no program"):
        bnn.predict(X, num_predictions=DRAWS, compile=True, vectorize=True)
    check_same(bnn, X)
    assert len(made) == 1
    bnn.net.head = nn.Sequential(bnn.net.head, nn.Tanh())
    check_same(bnn, X)
    bnn.net.table = {"factor": 1.0}
    check_same(bnn, X)
    bnn.net.table["factor"] = 2.0
    check_same(bnn, X)
    assert len(made) == 4


def test_autocast_has_programs_of_its_own(made):
    bnn = bnn_of(mlp(4, 8, 3))
    check_same(bnn, X, vectorize=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_same(bnn, X, vectorize=False)
    assert len(made) == 2


def branches(net, x):
    return net.one(x) if x.sum() > 0 else -net.one(x)


def counts(net, x):
    net.calls = getattr(net, "calls", 0) + 1
    return net.one(x) * net.calls


def writes(net, x):
    net.total += 1
    return net.one(x) + net.total


def drops(net, x):
    return nn.functional.dropout(net.one(x))


def through_numpy(net, x):
    return net.one(x) * torch.from_numpy(np.exp(x.numpy()[:, :1]))


def through_lists(net, x):
    return net.one(x) * torch.tensor(x[:, :1].tolist())


REFUSED = {
    branches: "control flow depends on numbers",
    counts: "an earlier one has left",
    writes: "writes into",
    drops: "random numbers",
    through_numpy: "takes numbers out",
    through_lists: "takes numbers out",
}


@pytest.mark.parametrize("forward", REFUSED, ids=lambda forward: forward.__name__)
def test_nets_that_are_no_program_run_as_they_are(forward):
    def make():
        net = NetOf(forward, one=nn.Linear(4, 3))
        net.register_buffer("total", torch.zeros(()))
        return bnn_of(net)

    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    bnn = make()
    with pytest.warns(tyxe.TyxeWarning, match=REFUSED[forward]) as caught:
        found = seeded(lambda: bnn.predict(X, num_predictions=DRAWS, compile=True))
    assert len(caught) == 1
    expected = seeded(lambda: plain.predict(X, num_predictions=DRAWS))
    if forward not in (counts, writes):  # which keep count of the look at them
        torch.testing.assert_close(found, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bnn.predict(X, num_predictions=DRAWS, compile=True)


def hook_of_all(part, hook):
    return nn.modules.module.register_module_forward_hook(hook)


def test_hooks_run_where_they_come_later_and_are_removed(made):
    bnn, seen = bnn_of(mlp(4, 3)), []
    check_same(bnn, X)
    for register in (nn.Module.register_forward_hook, hook_of_all):
        handle = register(bnn.net[0], lambda *_: seen.append(1))
        with pytest.warns(tyxe.TyxeWarning, match="hooks would not run"):
            check_same(bnn, X)
        assert len(seen) == 3 * DRAWS * (1 if register is not hook_of_all else 2)
        handle.remove()
        check_same(bnn, X)
        seen.clear()
    assert len(made) == 3


def packed(x, lengths):
    return nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("given", [lambda *batch: batch, lambda *batch: (packed(*batch),)])
def test_packed_sequences_run_as_they_are(cell, given):
    """A trace would keep the lengths of the first."""

    def last(net, x, *lengths):
        state = torch.zeros(1, N, 4)
        found = net.cell(
            packed(x, *lengths) if lengths else x, (state, state) if is_lstm else state
        )
        return net.head(found[1][0].reshape(N, 4))

    is_lstm, x = cell is nn.LSTM, torch.randn(N, 3, 4)
    bnn = bnn_of(NetOf(last, cell=cell(4, 4, batch_first=True), head=nn.Linear(4, 3)))
    with pytest.warns(tyxe.TyxeWarning, match="lengths of packed sequences|depends on numbers"):
        check_same(bnn, *given(x, torch.tensor([3, 2, 2, 2, 1, 1])))
    check_same(bnn, *given(x, torch.tensor([3, 1, 2, 1, 2, 2])))


def test_other_inputs_have_no_programs():
    named = bnn_of(NetOf(lambda self, x, sign: sign * self.one(x), one=nn.Linear(4, 3)))
    with pytest.warns(tyxe.TyxeWarning, match="not all of its inputs are tensors"):
        check_same(named, X, -1.0)


def test_what_programs_cannot_do():
    bnn = bnn_of(mlp(4, 3))
    for options in ({"enable_grad": True}, {"predictive": "glm"}):
        with pytest.raises(ValueError, match="leave compile out"):
            bnn.predict(X, compile=True, **options)
    with (
        poutine.trace(),
        pytest.raises(ValueError, match="a handler is active"),
    ):
        bnn.predict(X, compile=True)
    with pytest.raises(TypeError, match="compile"):
        bnn.predict(X, compile="yes")


def test_threads_share_programs(made):
    bnn = bnn_of(mlp(4, 8, 3))
    bnn.predict(X, num_predictions=0, compile=True)
    expected = [bnn.predict(X + shift, num_predictions=0) for shift in range(4)]
    found = [None] * 4

    def run(shift):
        for _ in range(20):
            found[shift] = bnn.predict(X + shift, num_predictions=0, compile=True)

    threads = [threading.Thread(target=run, args=(shift,)) for shift in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, expected)
    assert len(made) == 1


@pytest.fixture
def recorded(monkeypatch):
    """Let programs of a processor be captured."""
    monkeypatch.setattr(program, "Capture", Recorded)
    monkeypatch.setattr(traced, "has_graphs", lambda device: True)
    monkeypatch.setattr(Recorded, "made", 0)
    return Recorded


def test_programs_are_captured_where_there_are_graphs(recorded, made):
    bnn = bnn_of(mlp(4, 8, 3))
    check_same(bnn, X)
    check_same(bnn, X + 1)
    with torch.no_grad():
        bnn.net_guide.locs["0.weight"].add_(1)
    check_same(bnn, X)
    assert (recorded.made, len(made)) == (1, 1)


def test_what_cannot_be_captured_is_traced(recorded, monkeypatch):
    def refuse(function, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(program, "Capture", refuse)
    with pytest.warns(tyxe.TyxeWarning, match="not permitted") as caught:
        check_same(bnn_of(mlp(4, 8, 3)), X)
    assert len(caught) == 1


def test_members_of_an_ensemble_have_programs(made):
    bnn = tyxe.EnsembleBNN(lambda index: bnn_of(mlp(4, 8, 3)), 2)
    check_same(bnn, X)
    assert len(made) == 2


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrent_nets(cell):
    bnn = bnn_of(ReadLast(cell, 1, 3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same(bnn, X)
