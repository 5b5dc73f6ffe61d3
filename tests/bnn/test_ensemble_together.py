"""Members in one tensor: as in the loop, nets that this takes and that it does not, errors."""

import functools
import math
from contextlib import contextmanager

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

N = 24
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(N) % 3
HIDDEN = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)
NORMAL = tyxe.priors.IIDPrior(dist.Normal(0, 1))


def mlp():
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch_norm():
    return nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def ensemble_of(kind="ml", net=mlp, likelihood=None, count=3):
    likelihood = likelihood or Categorical(N)
    torch.manual_seed(0)

    def member(_):
        if kind == "ml":
            return tyxe.VariationalBNN(net(), HIDDEN, likelihood)
        guide = AutoDelta if kind == "map" else tyxe.guides.AutoNormal
        return tyxe.VariationalBNN(net(), NORMAL, likelihood, guide)

    return tyxe.EnsembleBNN(member, count)


def loader(y=Y):
    return DataLoader(TensorDataset(X, y), 7, shuffle=True)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 0.1, "beta": lambda e: 1 / (e + 1)}])
@pytest.mark.parametrize(
    "optim",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2),
        functools.partial(torch.optim.Adam, lr=1e-2),
    ],
    ids=["SGD", "Adam"],
)
@pytest.mark.parametrize("kind", ["ml", "map"])
def test_members_together_are_as_in_the_loop(kind, optim, options):
    _, histories, after = in_both_ways(lambda: ensemble_of(kind), loader(), optim, **options)
    assert after[0] == after[1]
    for one, other in zip(*histories, strict=True):
        torch.testing.assert_close(torch.tensor(one.loss), torch.tensor(other.loss))
        torch.testing.assert_close(torch.tensor(one.kl), torch.tensor(other.kl))


def in_both_ways(make, data, optim, num_epochs=4, **options):
    """Fit in a loop and together, compare the members, and return them, and both's histories."""
    states, histories, after = [], [], []
    for vectorize in (False, True):
        torch.manual_seed(0)
        ensemble = make()
        torch.manual_seed(1)
        histories.append(ensemble.fit(data, optim, num_epochs, vectorize=vectorize, **options))
        states.append(ensemble.state_dict())
        after.append(torch.rand(()))
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, msg=name)
    return ensemble, histories, after


@pytest.mark.parametrize("net", [batch_norm, mlp])
def test_statistics_and_learnt_noise_are_each_members_own(net):
    likelihood = HomoskedasticGaussian(N, scale=0.5, learn_scale=True)
    sgd = functools.partial(torch.optim.SGD, lr=1e-2)
    data = loader(X.tile(1, 2)[:, :3])
    ensemble, *_ = in_both_ways(lambda: ensemble_of("ml", net, likelihood), data, sgd)
    noises = [member.likelihood.log_noise.item() for member in ensemble.members]
    assert len(set(noises)) == 3


def test_draws_of_mean_fields_differ_between_members_and_steps():
    ensemble = ensemble_of("mean field")
    for member in ensemble.members:
        member.load_state_dict(ensemble.members[0].state_dict())
    histories = ensemble.fit(
        [(X, Y)], functools.partial(torch.optim.SGD, lr=1e-12), 3, vectorize=True
    )
    losses = {loss for history in histories for loss in history.log_likelihood}
    assert len(losses) == 9
    ensemble = ensemble_of("mean field")
    fit = functools.partial(ensemble.fit, loader(), functools.partial(torch.optim.Adam, lr=1e-2))
    before = fit(1, vectorize=True)
    after = fit(60, vectorize=True)
    assert all(b.loss[-1] < a.loss[0] for a, b in zip(before, after, strict=True))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3).double()

    def forward(self, x):
        outputs = self.layer(x)
        return outputs if bool(outputs.sum() < 1e9) else -outputs


@contextmanager
def refused(ensemble, error, message=None):
    """Expect an error that leaves all members as they were."""
    before = {n: v.clone() for n, v in ensemble.state_dict().items()}
    with pytest.raises(error, match=message):
        yield
    for name, value in ensemble.state_dict().items():
        assert torch.equal(value, before[name])


class Replaces(nn.Module):
    """Keeps a mean of its outputs in a new tensor each time."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 3).double()
        self.register_buffer("mean", torch.zeros(3).double())

    def forward(self, x):
        outputs = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
        return outputs - self.mean


def test_nets_that_would_do_otherwise():
    ensemble = ensemble_of(net=Branches)
    with refused(ensemble, ValueError, r"nets that torch\.vmap takes.*leave vectorize out"):
        ensemble.fit([(X, Y)], torch.optim.Adam, 1, vectorize=True)
    with pytest.raises(RuntimeError, match=r"replaces mean, .* change buffers in place"):
        ensemble_of(net=Replaces).fit([(X, Y)], torch.optim.Adam, 1, vectorize=True)


def test_a_loss_that_is_not_finite_leaves_all_members_as_they_were():
    ensemble, bad = ensemble_of(), X.clone()
    bad[3] = torch.inf
    with refused(ensemble, RuntimeError, r"of members \[0, 1, 2\] is not finite"):
        ensemble.fit([(X, Y), (bad, Y)], torch.optim.Adam, 1, vectorize=True)
    ensemble.fit([(X, Y)], torch.optim.Adam, 1, resume=True, vectorize=True)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_stop_after_held_out_data_were_scored_leaves_all_members_as_they_were(error):
    ensemble, calls = ensemble_of(), []

    class Loader:
        def __iter__(self):
            calls.append(1)
            if len(calls) > 3 * len(ensemble.members):
                raise error
            return iter([(X, Y)])

    with refused(ensemble, error):
        ensemble.fit(Loader(), torch.optim.Adam, 8, vectorize=True, validation=[(X, Y)])


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_held_out_scores_that_are_no_numbers_keep_what_was_trained(monkeypatch):
    ensemble, start = ensemble_of(), ensemble_of()
    start.load_state_dict(ensemble.state_dict())
    monkeypatch.setattr("tyxe.bnn.stacked.held_out_sums", lambda *_: (math.nan, 1.0))
    ensemble.fit([(X, Y)], torch.optim.Adam, 2, vectorize=True, validation=[(X, Y)])
    pairs = zip(ensemble.parameters(), start.parameters(), strict=True)
    assert not any(torch.equal(own, other) for own, other in pairs if own.requires_grad)


def of_net(net):
    return tyxe.VariationalBNN(net, HIDDEN, Categorical(N))


GROUP = torch.distributed.ProcessGroup(0, 1)
BAD = [
    (lambda i: tyxe.LaplaceBNN(mlp(), NORMAL, Categorical(N)), {}, TypeError, "LaplaceBNN"),
    (lambda i: tyxe.SWAG_BNN(mlp(), NORMAL, Categorical(N)), {}, TypeError, "not a SWAG_BNN"),
    (lambda i: of_net((mlp, batch_norm)[i]()), {}, ValueError, "another than that of member 0"),
    (lambda i: of_net(mlp()), {"num_particles": 2}, TypeError, "num_particles"),
    (lambda i: of_net(mlp()), {"process_group": GROUP}, TypeError, "fits in one process"),
]


@pytest.mark.parametrize(("make", "options", "error", "message"), BAD)
def test_bad_input(make, options, error, message):
    ensemble = tyxe.EnsembleBNN(make, 2)
    with pytest.raises(error, match=message):
        ensemble.fit([(X, Y)], torch.optim.Adam, 1, vectorize=True, **options)


def test_members_have_priors_and_held_out_data_of_their_own():
    """They stop each at its own time, and go back each to its own best epoch."""
    x, y = torch.randn(40, 2).double(), torch.randint(3, (40,))

    def member(index):
        prior = tyxe.priors.IIDPrior(dist.Normal(0, 1.0 + index))
        return tyxe.VariationalBNN(mlp(), prior, Categorical(N), AutoDelta)

    adam, options = functools.partial(torch.optim.Adam, lr=0.3), {"patience": 3}
    of = lambda: tyxe.EnsembleBNN(member, 3)  # noqa: E731
    _, (first, second), _ = in_both_ways(of, loader(), adam, 40, validation=[(x, y)], **options)
    lengths = [len(history.validation) for history in first]
    assert max(lengths) < 40
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(other.validation[: len(one.validation)], one.validation)


def frozen():
    net = mlp()
    net[0].requires_grad_(False)
    return net


@pytest.mark.parametrize(
    "other",
    [
        lambda net: tyxe.VariationalBNN(net, NORMAL, Categorical(2 * N), AutoDelta),
        lambda net: tyxe.VariationalBNN(
            nn.Sequential(net[0], nn.ReLU(), net[2]), NORMAL, Categorical(N), AutoDelta
        ),
        lambda net: tyxe.VariationalBNN(frozen(), NORMAL, Categorical(N), AutoDelta),
        lambda net: tyxe.VariationalBNN(net, NORMAL, Categorical(N), tyxe.guides.AutoNormal),
        lambda net: tyxe.VariationalBNN(net.float(), NORMAL, Categorical(N), AutoDelta),
    ],
    ids=["dataset_size", "activation", "frozen", "guide", "dtype"],
)
def test_members_that_differ_in_more_than_values(other):
    def member(index):
        if index == 1:
            return other(mlp())
        return tyxe.VariationalBNN(mlp(), NORMAL, Categorical(N), AutoDelta)

    ensemble = tyxe.EnsembleBNN(member, 3)
    with pytest.raises((ValueError, RuntimeError), match=r"member 1|same dtype"):
        ensemble.fit([(X, Y)], torch.optim.Adam, 1, vectorize=True)
    with pytest.raises(RuntimeError, match="no fit to resume"):
        ensemble.fit([(X, Y)], torch.optim.Adam, 1, resume=True)


class WithSpare(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.spare = nn.Linear(2, 3).double(), nn.Linear(2, 3).double()

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("net", [frozen, WithSpare])
def test_what_has_no_gradient_stays(net):
    sgd = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    in_both_ways(lambda: ensemble_of("ml", net), loader(), sgd)


CLIPPED = pyro.optim.SGD({"lr": 0.1}, {"clip_norm": 0.01})
OTHERWISE = [
    ((X, Y + 1), torch.optim.Adam, ValueError, r"expected value to be within|3"),
    ((X.tile(2, 1), Y.tile(2)), torch.optim.Adam, ValueError, f"dataset_size={N}"),
    (((X, 2.0), Y), torch.optim.Adam, ValueError, "batches of tensors alone"),
    ((X, Y), functools.partial(tyxe.optim.IVON, lr=0.1), TypeError, "IVON takes its own"),
    ((X, Y), CLIPPED, TypeError, "pass clip_norm"),
]


@pytest.mark.parametrize(("batch", "optim", "error", "message"), OTHERWISE)
def test_what_the_loop_would_refuse_or_do_otherwise(batch, optim, error, message):
    class Scaled(nn.Sequential):
        def forward(self, x, factor=1.0):
            return factor * super().forward(x)

    ensemble = ensemble_of(net=lambda: Scaled(nn.Linear(2, 3).double()))
    first = batch if isinstance(batch[0], tuple) else (X, Y)
    with refused(ensemble, error, message):
        ensemble.fit([first, batch], optim, 1, vectorize=True)


def test_an_epoch_of_another_size_is_warned_of():
    ensemble = ensemble_of(likelihood=Categorical(1000 * N))
    with pytest.warns(tyxe.TyxeWarning, match="an epoch had 24 points"):
        ensemble.fit([(X, Y)], torch.optim.Adam, 1, vectorize=True)


def test_a_positional_callback_is_refused():
    with pytest.raises(TypeError, match="4 positional arguments but 5 were given"):
        ensemble_of().fit([(X, Y)], torch.optim.Adam, 1, lambda *_: None, vectorize=True)
