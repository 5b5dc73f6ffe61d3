"""Members in one tensor: as in the loop, nets that this takes and that it does not, errors."""

import copy
import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tests.oracles import bnns
from tests.oracles.bnns import NORMAL, mean_field, mlp
from tests.oracles.nets import NetOf
from tyxe.bnn.members import StackedObjectives
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

N = 24
X = torch.randn(N, 2, generator=torch.Generator().manual_seed(0)).double()
Y = torch.arange(N) % 3
BATCH = [(X, Y)]
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-2)
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


def net():
    return mlp(2, 5, 3).double()


def normed():
    return nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def frozen():
    part = net()
    part[0].requires_grad_(False)
    return part


def of_layer(function, **parts):
    return lambda: NetOf(function, layer=nn.Linear(2, 3).double(), **parts)


def plain(make=net, likelihood=None):
    return bnns.plain(make(), likelihood or Categorical(N))


def point(make=net, likelihood=None):
    return tyxe.VariationalBNN(make(), NORMAL, likelihood or Categorical(N), AutoDelta)


def ensemble_of(member=plain, *given):
    torch.manual_seed(0)
    return tyxe.EnsembleBNN(lambda _: member(*given), 3)


def loader(y=Y):
    return DataLoader(TensorDataset(X, y), 7, shuffle=True)


def in_both_ways(make, data, optim, num_epochs=2, **options):
    """Fit in a loop and together, compare the members, and return them, and both's histories."""
    states, histories, after, epochs = [], [], [], []
    for vectorize in (False, True):
        torch.manual_seed(0)
        ensemble = make()
        torch.manual_seed(1)
        histories.append(ensemble.fit(data, optim, num_epochs, vectorize=vectorize, **options))
        states.append(ensemble.state_dict())
        after.append(torch.rand(()))
        epochs.append([member.epochs_done for member in ensemble.members])
    torch.testing.assert_close(states[1], states[0])
    assert after[0] == after[1]
    assert epochs[0] == epochs[1]
    return ensemble, *histories


LESS = {"clip_norm": 0.1, "beta": lambda epoch: 1 / (epoch + 1)}


@pytest.mark.parametrize(
    ("member", "optim", "options"),
    [(plain, SGD, {}), (plain, ADAM, LESS), (point, SGD, LESS), (point, ADAM, {})],
)
def test_members_together_are_as_in_the_loop(member, optim, options):
    _, *histories = in_both_ways(lambda: ensemble_of(member), loader(), optim, **options)
    for one, other in zip(*histories, strict=True):
        assert one.loss == pytest.approx(other.loss)
        assert one.kl == pytest.approx(other.kl)


@pytest.mark.parametrize("make", [normed, net])
def test_statistics_and_learnt_noise_are_each_members_own(make):
    likelihood = HomoskedasticGaussian(N, scale=0.5, learn_scale=True)
    sgd = functools.partial(torch.optim.SGD, lr=1e-2)
    data = loader(X.tile(1, 2)[:, :3])
    ensemble, *_ = in_both_ways(lambda: ensemble_of(plain, make, likelihood), data, sgd)
    assert len({member.likelihood.log_noise.item() for member in ensemble.members}) == 3


def test_draws_of_mean_fields_differ_between_members_and_steps():
    ensemble = ensemble_of(lambda: mean_field(net(), Categorical(N)))
    for member in ensemble.members:
        member.load_state_dict(ensemble.members[0].state_dict())
    still = functools.partial(torch.optim.SGD, lr=1e-12)
    histories = ensemble.fit(BATCH, still, 3, vectorize=True)
    assert len({loss for history in histories for loss in history.log_likelihood}) == 9
    adam = functools.partial(torch.optim.Adam, lr=0.05)
    before = ensemble.fit(loader(), adam, 1, vectorize=True)
    after = ensemble.fit(loader(), adam, 15, vectorize=True)
    assert all(b.loss[-1] < a.loss[0] for a, b in zip(before, after, strict=True))


@pytest.mark.filterwarnings("ignore:no point of an epoch counts")
def test_histories_of_an_epoch_without_points_are_those_of_the_loop():
    likelihood, missing = HomoskedasticGaussian(N, scale=1.0), [(X, torch.nan * X[:, [0, 0, 0]])]
    for vectorize in (False, True):
        ensemble = ensemble_of(plain, net, likelihood)
        histories = ensemble.fit(missing, torch.optim.Adam, 1, vectorize=vectorize)
        assert [history.loss for history in histories] == [[0.0]] * 3


def test_members_have_priors_and_held_out_data_of_their_own():
    """They stop each at its own time, and go back each to its own best epoch."""
    held_out = [(torch.randn(40, 2).double(), torch.randint(3, (40,)))]

    def member(index):
        prior = tyxe.priors.IIDPrior(dist.Normal(0, 1.0 + index))
        return tyxe.VariationalBNN(net(), prior, Categorical(N), AutoDelta)

    adam, options = functools.partial(torch.optim.Adam, lr=0.3), {"patience": 3}
    _, first, second = in_both_ways(
        lambda: tyxe.EnsembleBNN(member, 3), loader(), adam, 40, validation=held_out, **options
    )
    assert max(len(history.validation) for history in first) < 40
    for one, other in zip(first, second, strict=True):
        assert other.loss == pytest.approx(one.loss)
        assert other.validation == pytest.approx(one.validation)


SPARE = of_layer(lambda self, x: self.layer(x), spare=nn.Linear(2, 3).double())


@pytest.mark.parametrize("make", [frozen, SPARE])
def test_what_has_no_gradient_stays(make):
    in_both_ways(lambda: ensemble_of(plain, make), loader(), SGD)


# --- what is refused, or is another fit ---------------------------------------------------------


def refuses(ensemble, error, message=None, data=BATCH, optim=torch.optim.Adam, **options):
    """Expect an error that leaves all members as they were."""
    before = {n: v.clone() for n, v in ensemble.state_dict().items()}
    with pytest.raises(error, match=message):
        ensemble.fit(data, optim, 8, vectorize=True, **options)
    torch.testing.assert_close(ensemble.state_dict(), before, rtol=0, atol=0)


def replaces(self, x):
    """Keep a mean of outputs in a new tensor each time."""
    outputs = self.layer(x)
    self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)
    return outputs - self.mean


def counts(self, x):
    """Depend on the number of calls."""
    self.calls += 1
    return self.calls * self.layer(x)


def anneals(self, x):
    """Depend on the number of calls only later."""
    self.calls += 1
    return self.layer(x) * (1 if self.calls < 100 else 5)


def halves(self, x):
    """Change a parameter in place."""
    with torch.no_grad():
        self.layer.bias.mul_(0.5)
    return self.layer(x)


def other(member):
    """Return a maker of members whose second one is another."""
    return lambda index: member() if index == 1 else point()


def of_relu():
    part = net()
    return nn.Sequential(part[0], nn.ReLU(), part[2])


BRANCHES = of_layer(lambda self, x: self.layer(x) if bool(x.sum() < 1e9) else -self.layer(x))
SCALED = of_layer(lambda self, x, factor=1.0: factor * self.layer(x))
IN_TRAINING = of_layer(lambda self, x: self.layer(x) * (torch.nan if self.training else 1.0))
REPLACES = of_layer(replaces, mean=nn.Buffer(torch.zeros(3).double()))
COUNTS, ANNEALS = of_layer(counts, calls=0), of_layer(anneals, calls=0)
CLIPPED = pyro.optim.SGD({"lr": 0.1}, {"clip_norm": 0.01})
IVON = functools.partial(tyxe.optim.IVON, lr=0.1)
GROUP = torch.distributed.ProcessGroup(0, 1)
INFINITE, TWICE = [(X, Y), (X / 0, Y)], (X.tile(2, 1), Y.tile(2))
# A maker of members, what else the fit is given, and the error.
REFUSED = {
    "branches": (
        lambda _: plain(BRANCHES),
        {},
        r"nets that torch\.vmap takes.*leave vectorize out",
    ),
    "counts": (lambda _: plain(COUNTS), {}, "depends on what an earlier one"),
    "anneals": (lambda _: plain(ANNEALS), {}, "changes what the net holds"),
    "replaces": (lambda _: plain(REPLACES), {}, "replaces mean, .* change buffers in place"),
    "Laplace": (lambda _: tyxe.LaplaceBNN(net(), NORMAL, Categorical(N)), {}, "LaplaceBNN"),
    "SWAG": (lambda _: tyxe.SWAG_BNN(net(), NORMAL, Categorical(N)), {}, "not a SWAG_BNN"),
    "norms": (lambda i: plain([net, normed][i]), {}, "another than that of member 0"),
    "dataset_size": (other(lambda: point(net, Categorical(2 * N))), {}, "member 1"),
    "activation": (other(lambda: point(of_relu)), {}, "member 1"),
    "frozen": (other(lambda: point(frozen)), {}, "member 1"),
    "guide": (other(lambda: mean_field(net(), Categorical(N))), {}, "member 1"),
    "dtype": (other(lambda: point(lambda: net().float())), {}, "member 1|same dtype"),
    "num_particles": (lambda _: plain(), {"num_particles": 2}, "num_particles"),
    "processes": (lambda _: plain(), {"process_group": GROUP}, "fits in one process"),
    "not finite": (lambda _: plain(), {"data": INFINITE}, r"of members \[0, 1\] is not finite"),
    "NaN in training": (lambda _: plain(IN_TRAINING), {}, r"of members \[0, 1\] is not finite"),
    "targets": (lambda _: plain(), {"data": [(X, Y), (X, Y + 1)]}, "to be within|3"),
    "points": (lambda _: plain(), {"data": [(X, Y), TWICE]}, f"dataset_size={N}"),
    "numbers": (lambda _: plain(SCALED), {"data": [((X, 2.0), Y)]}, "batches of tensors alone"),
    "IVON": (lambda _: plain(), {"optim": IVON}, "IVON takes its own"),
    "Pyro's clipping": (lambda _: plain(), {"optim": CLIPPED}, "but clip_norm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_loop_would_refuse_or_do_otherwise(case):
    make, given, message = REFUSED[case]
    ensemble = tyxe.EnsembleBNN(make, 2)
    if case == "replaces":  # which is found in the first step
        with pytest.raises(RuntimeError, match=message):
            ensemble.fit(BATCH, torch.optim.Adam, 1, vectorize=True)
    else:
        refuses(ensemble, (TypeError, ValueError, RuntimeError), message, **given)
    if case == "not finite":
        ensemble.fit(BATCH, torch.optim.Adam, 1, resume=True, vectorize=True)
    elif case == "guide":
        with pytest.raises(RuntimeError, match="no fit to resume"):
            ensemble.fit(BATCH, torch.optim.Adam, 1, resume=True)


def test_a_look_at_members_changes_no_parameter():
    members = ensemble_of(plain, of_layer(halves)).members
    before = [copy.deepcopy(member.state_dict()) for member in members]
    StackedObjectives(members, BATCH[0])
    for member, state in zip(members, before, strict=True):
        torch.testing.assert_close(member.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_stop_after_held_out_data_were_scored_leaves_all_members_as_they_were(error):
    ensemble, calls = ensemble_of(), []

    class Loader:
        def __iter__(self):
            calls.append(1)
            if len(calls) > 3 * len(ensemble.members):
                raise error
            return iter(BATCH)

    refuses(ensemble, error, data=Loader(), validation=BATCH)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_held_out_scores_that_are_no_numbers_keep_what_was_trained(monkeypatch):
    ensemble, start = ensemble_of(), ensemble_of()
    monkeypatch.setattr("tyxe.bnn.members.held_out_sums", lambda *_: (math.nan, 1.0))
    ensemble.fit(BATCH, torch.optim.Adam, 2, vectorize=True, validation=BATCH)
    pairs = zip(ensemble.parameters(), start.parameters(), strict=True)
    assert not any(torch.equal(own, other) for own, other in pairs if own.requires_grad)


def test_an_epoch_of_another_size_is_warned_of():
    ensemble = ensemble_of(plain, net, Categorical(1000 * N))
    with pytest.warns(tyxe.TyxeWarning, match="an epoch had 24 points"):
        ensemble.fit(BATCH, torch.optim.Adam, 1, vectorize=True)
