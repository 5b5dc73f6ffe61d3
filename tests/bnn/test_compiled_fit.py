"""Compiled steps are the uncompiled ones, or say why they are none."""

import contextlib
import functools
import random
import warnings

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import autoguide
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, NOTHING, mean_field, mlp
from tests.oracles.nets import NetOf
from tests.oracles.rejections import rejects
from tyxe import program as programs
from tyxe.likelihoods import Categorical
from tyxe.poutine import (
    flipout,
    local_reparameterization,
    report,
    selective_mask,
    selective_scale,
    variational_laplace,
)
from tyxe.program import has_compiler

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3
HALVES = list(zip(X.split(12), Y.split(12), strict=True))
SGD = functools.partial(torch.optim.SGD, lr=0.05)
UNCHANGED = lambda bnn, epoch, loss: None  # noqa: E731
UNIT = dist.Normal(0.0, 1.0)
SIZES = {"inducing_rows": 3, "inducing_cols": 2, "everywhere": True}
GUIDES = {
    "AutoNormal": tyxe.guides.AutoNormal,
    "capped": functools.partial(tyxe.guides.AutoNormal, max_guide_scale=0.1),
    "AutoRadial": tyxe.guides.AutoRadial,
    **{
        f"AutoInducing, {q}": functools.partial(tyxe.guides.AutoInducing, q_inducing=q, **SIZES)
        for q in ("diagonal", "full", "matrix")
    },
    "AutoBernoulli": functools.partial(tyxe.guides.AutoBernoulli, relaxed=0.5),
    "AutoDelta": autoguide.AutoDelta,
    "AutoDiagonalNormal": autoguide.AutoDiagonalNormal,
    "AutoIAFNormal": autoguide.AutoIAFNormal,
    "AutoMultivariateNormal": autoguide.AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": autoguide.AutoLowRankMultivariateNormal,
}


def net():
    torch.manual_seed(0)
    parts = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)
    return nn.Sequential(*parts)


def variational(guide, size=24):
    is_binary = getattr(guide, "func", guide) is tyxe.guides.AutoBernoulli
    prior = tyxe.priors.BinaryPrior(hide_parameters=["bias"]) if is_binary else NORMAL
    return tyxe.VariationalBNN(net(), prior, Categorical(size), guide)


def pruned():
    bnn = NORMALS()
    tyxe.guides.prune_(bnn.net_guide, keep=0.5)
    return bnn


def smooth():
    torch.manual_seed(0)
    return mean_field(mlp(3, 8, 3), Categorical(24))


def fitted(make, data=HALVES, **options):
    bnn = make()
    torch.manual_seed(1)
    history = bnn.fit(data, SGD, 3, **options)
    return history, {n: t for n, t in bnn.state_dict().items() if t.is_floating_point()}


def assert_same(make, data=HALVES, **options):
    history, state = fitted(make, data, compile=True, **options)
    expected, other = fitted(make, data, **options)
    assert history.loss == pytest.approx(expected.loss, rel=1e-5)
    assert history.kl == pytest.approx(expected.kl, rel=1e-5)
    torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-5)


NORMALS = functools.partial(variational, tyxe.guides.AutoNormal)
# What makes a BNN, and options of its fit.
CASES = {
    **{name: (functools.partial(variational, guide), {}) for name, guide in GUIDES.items()},
    "Laplace": (lambda: tyxe.LaplaceBNN(net(), NORMAL, Categorical(24), structure="diag"), {}),
    "pruned": (pruned, {}),
    "no posterior": (lambda: tyxe.VariationalBNN(net(), NOTHING, Categorical(24)), {}),
    "particles": (NORMALS, {"num_particles": 3}),
    "accumulated": (NORMALS, {"accumulate_steps": 2}),
    "clipped": (NORMALS, {"clip_norm": 0.1}),
    "tempered": (NORMALS, {"beta": lambda epoch: 0.1 * epoch}),
}


@pytest.mark.parametrize(("make", "options"), CASES.values(), ids=CASES.keys())
def test_a_seed_gives_the_same_numbers(make, options, traced):
    assert_same(make, **options)
    assert len(traced) == 1


def test_the_weight_of_the_kl_is_as_precise_as_the_net(traced):
    def make():
        torch.manual_seed(0)
        return mean_field(mlp(3, 8, 3).double(), Categorical(24)).double()

    data = [(x.double(), y, torch.rand(12).double()) for x, y in HALVES]
    (history, state), (expected, other) = (
        fitted(make, data, compile=how, beta=0.1) for how in (True, False)
    )
    assert history.loss == pytest.approx(expected.loss, rel=1e-13)
    torch.testing.assert_close(state, other, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("handler", [local_reparameterization, variational_laplace])
def test_annealing_inside_of_a_handler_is_one_program(handler, traced):
    with handler():
        assert_same(smooth, beta=lambda epoch: 0.1 + 0.1 * epoch, callback=UNCHANGED)
    assert len(traced) == 1


def test_further_shapes_run_uncompiled(traced, monkeypatch):
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 2)
    data = list(zip(X.split([4, 5, 6, 9]), Y.split([4, 5, 6, 9]), strict=True))
    with pytest.warns(tyxe.TyxeWarning, match="further shapes than the first 2"):
        assert_same(NORMALS, data)
    assert len(traced) == 2


OTHERS = {
    "report": report,
    "mask": lambda: selective_mask(mask=torch.arange(12) % 3 > 0, expose=["likelihood.data"]),
    "scale": lambda: selective_scale(scale=0.3, expose=["0.weight"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_handlers_that_draw_nothing_give_the_same_numbers(name, traced):
    with OTHERS[name]():
        assert_same(NORMALS)
    assert len(traced) == 1


@pytest.mark.parametrize("handler", [local_reparameterization, flipout])
def test_handlers_draw_from_the_same_law(handler, traced):
    """Weights that a handler does not spare are drawn from another stream."""
    found = []
    for compiles in (True, False):
        bnn = variational(functools.partial(tyxe.guides.AutoNormal, init_scale=0.3))
        still = functools.partial(torch.optim.SGD, lr=0.0)
        with warnings.catch_warnings(), handler():
            warnings.simplefilter("ignore")  # of BatchNorm's weights
            bnn.fit([(X, Y)], still, 1)  # statistics
            torch.manual_seed(1)
            history = bnn.fit([(X, Y)], still, 150, compile=compiles)
        found.append(torch.tensor(history.log_likelihood))
    assert len(traced) == 1
    errors = sum(part.var() / len(part) for part in found).sqrt()
    assert abs(found[0].mean() - found[1].mean()) < 4 * errors
    assert float(found[0].std() / found[1].std()) == pytest.approx(1, abs=0.25)


def branches(self, x):
    found = self.layer(x)
    return found if bool(found.sum() > 0) else 2 * found


def through_numpy(self, x):
    return self.layer(x) * torch.from_numpy(np.exp(x.numpy()[:, :1]))


@pytest.mark.parametrize(
    ("forward", "why"),
    [(branches, "its control flow depends on numbers"), (through_numpy, "its forward takes num")],
)
def test_what_is_no_program_runs_as_it_is(traced, forward, why):
    def make():
        torch.manual_seed(0)
        return mean_field(NetOf(forward, layer=nn.Linear(3, 3)), Categorical(24))

    with pytest.warns(tyxe.TyxeWarning) as caught:
        history, _ = fitted(make, compile=True)
    (said,) = [str(w.message) for w in caught if "compile=True" in str(w.message)]
    assert "steps are no program, and run uncompiled: " + why in said
    assert history.loss == fitted(make)[0].loss


def test_steps_of_other_inputs_run_as_they_are(traced):
    def make():
        torch.manual_seed(0)
        return mean_field(NetOf(lambda self, x, k: k * self.one(x), one=mlp(3, 3)), Categorical(24))

    data = [((x, 2.0), y) for x, y in HALVES]
    with pytest.warns(tyxe.TyxeWarning, match="not all of its inputs are tensors") as caught:
        history, _ = fitted(make, data, compile=True)
    assert len(caught) == 1
    assert history.loss == fitted(make, data)[0].loss
    assert not traced


def test_a_sparse_buffer_is_part_of_a_program(traced):
    def make():
        torch.manual_seed(0)
        net = NetOf(lambda self, x: self.adjacency @ self.one(x), one=mlp(3, 3))
        net.register_buffer("adjacency", torch.eye(24).roll(1, 0).to_sparse())
        return mean_field(net, Categorical(24))

    history, expected = (fitted(make, [(X, Y)], compile=how)[0] for how in (True, False))
    assert history.loss == pytest.approx(expected.loss, rel=1e-5)
    assert len(traced) == 1


def test_members_that_take_turns_run_as_they_are(traced):
    """A program would always train the one that it was traced with."""
    guide = functools.partial(tyxe.guides.AutoInducing, q_inducing="ensemble", **SIZES)
    make = functools.partial(variational, guide)
    with pytest.warns(tyxe.TyxeWarning, match="hooks of the gradients .* would not run"):
        history, _ = fitted(make, compile=True)
    assert history.loss == fitted(make)[0].loss


class Counts(nn.Linear):
    """Its outputs grow from forward to forward."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Remembers(nn.Linear):
    """Adds a tensor that the forward before has left."""

    before = 0.0

    def forward(self, x):
        found = super().forward(x) + self.before
        self.before = found.detach()
        return found


class Anneals(nn.Linear):
    """Has larger outputs after many forwards, which it counts in a dictionary."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.state = {"calls": 0}

    def forward(self, x):
        self.state["calls"] += 1
        return super().forward(x) * (1 if self.state["calls"] <= 100 else 5)


class CountsInTensor(nn.Linear):
    """As before, by a tensor that is no buffer."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.calls = torch.zeros(())

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 4 * (self.calls > 100))


class OtherRandomNumbers(nn.Linear):
    """Draws from a generator that is not PyTorch's."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.numbers = random.Random(0)

    def forward(self, x):
        return super().forward(x) * self.numbers.random()


NO_STEPS = {
    Counts: "depends on what an earlier one has left",
    Remembers: "depends on what an earlier one has left",
    Anneals: "changes what the net holds",
    CountsInTensor: "changes what the net holds",
    OtherRandomNumbers: "or on random numbers that are not PyTorch's",
}


@pytest.mark.parametrize("kind", NO_STEPS)
def test_steps_that_depend_on_earlier_ones_run_as_they_are(kind, traced):
    def make():
        torch.manual_seed(0)
        return mean_field(kind(3, 3), Categorical(24))

    with pytest.warns(tyxe.TyxeWarning, match=f"uncompiled: its forward .*{NO_STEPS[kind]}"):
        history, _ = fitted(make, compile=True)
    if kind is not OtherRandomNumbers:
        assert history.loss == fitted(make)[0].loss
    assert not traced


class Keeps(nn.Linear):
    """Keeps its latest features, fills a cache once, and halves a parameter in place."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.cache, self.factor = {}, nn.Parameter(torch.ones(3))

    def forward(self, x):
        self.features = super().forward(x)
        with torch.no_grad():
            self.factor.mul_(0.5)
        return self.cache.setdefault(x.shape, torch.ones(3)) + self.factor * self.features


class Scaled(nn.Sequential):
    """Its outputs times a factor."""

    factor = 1.0

    def forward(self, x):
        return self.factor * super().forward(x)


def with_hook(hook):
    torch.manual_seed(0)
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide=["factor"])
    bnn = tyxe.VariationalBNN(Keeps(3, 3), prior, Categorical(24), tyxe.guides.AutoNormal)
    bnn.net.register_forward_hook(hook)
    return bnn


CALLS = []


def test_what_a_forward_keeps_is_no_reason_to_run_uncompiled(traced):
    """Nor do the looks at forwards change a parameter, and they are few."""
    losses, calls, factors = [], [], []
    for compiles in (False, True):
        bnn = with_hook(lambda *_: CALLS.append(1))
        CALLS.clear()
        torch.manual_seed(1)
        losses.append(bnn.fit([(X, Y)], SGD, 3, compile=compiles).loss)
        calls.append(len(CALLS))
        bnn.predict(X)
        losses[-1] += bnn.fit([(X, Y)], SGD, 3, compile=compiles).loss
        factors.append(bnn.net.factor)
    assert len(traced) == 1
    # Two steps run as programs. Two forwards are compared, and one without what they have kept. One
    # is traced, and one is the program's.
    assert calls[1] == calls[0] - 2 + 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    torch.testing.assert_close(factors[1], factors[0])


def test_hooks_that_record_see_all_steps(traced):
    seen = []
    with pytest.warns(tyxe.TyxeWarning, match="changes what the net holds"):
        with_hook(lambda *_: seen.append(1)).fit([(X, Y)], SGD, 3, compile=True)
    assert (len(traced), len(seen)) == (0, 5 + 2)  # two are compared


def test_hooks_of_gradients_that_record_see_all_steps(traced):
    bnn, seen = smooth(), []
    bnn.net[2].register_full_backward_hook(lambda *_: seen.append(1))
    with pytest.warns(tyxe.TyxeWarning, match="changes what the net holds"):
        bnn.fit([(X, Y)], SGD, 3, compile=True)
    assert (len(traced), len(seen)) == (0, 3 + 2)  # two are compared


def test_a_program_outlives_fits_with_held_out_data_and_other_numbers_of_the_prior(traced):
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        bnn, losses = smooth(), []
        for scale in (0.1, 3.0):
            bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0.0, scale)))
            options = {"validation": HALVES, "patience": 9, "compile": compiles}
            losses += bnn.fit([(X, Y)], SGD, 3, **options).loss
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert len(traced) == 1


class Own(tyxe.VariationalBNN):
    """A class of a user's."""


@pytest.mark.parametrize("kind", [tyxe.VariationalBNN, Own])
def test_a_callback_that_changes_nothing_lets_a_program_go_on(kind, traced):
    bnn = kind(mlp(3, 3), NORMAL, Categorical(24), tyxe.guides.AutoNormal)
    for _ in range(2):
        bnn.fit(HALVES, SGD, 4, UNCHANGED, compile=True, validation=HALVES)
    assert len(traced) == 1


class ReadsWhatItKeeps(nn.Linear):
    """It keeps its latest mean, and adds what is kept once it is told to."""

    reads, kept = False, None

    def forward(self, x):
        found = super().forward(x)
        if self.reads:
            return found + self.kept
        self.kept = found.mean(0).detach()
        return found


def test_what_forwards_have_made_anew_may_be_read_by_later_ones(traced):
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        bnn = mean_field(ReadsWhatItKeeps(3, 3), Categorical(24))
        losses = bnn.fit([(X, Y)], SGD, 3, compile=compiles).loss
        bnn.net.reads = True
        for number in (1.0, 9.0):
            bnn.net.kept = torch.tensor([number, 0.0, 0.0])
            losses += bnn.fit([(X, Y)], SGD, 3, compile=compiles).loss
        found.append(losses)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert len(traced) == 3


def test_a_refused_net_is_refused_once(traced):
    def counts(module, given):
        module.calls = getattr(module, "calls", 0) + 1

    bnn = mean_field(mlp(3, 3), Categorical(24))
    bnn.net.register_forward_pre_hook(counts)
    with pytest.warns(tyxe.TyxeWarning, match="changes what the net holds") as caught:
        bnn.fit(HALVES, SGD, 6, UNCHANGED, compile=True)
    assert (len(caught), len(traced)) == (1, 0)


def test_a_change_within_an_epoch_is_noticed_after_it_whatever_is_compiled_meanwhile(traced):
    class Changes(tyxe.Callback):
        def on_batch(self, bnn, epoch, batch, terms):
            if (epoch, batch) == (1, 0):
                bnn.net.factor = 3.0

    class Grows(list):
        """Batches of which the first epoch has the first only."""

        epochs = 0

        def __iter__(self):
            self.epochs += 1
            return iter([*super().__iter__()][: self.epochs])

    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        bnn = mean_field(Scaled(nn.Linear(3, 3)), Categorical(24))
        data = Grows(zip(X.split(16), Y.split(16), strict=True))
        found.append(bnn.fit(data, SGD, 5, Changes(), compile=compiles).loss[2:])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


CHANGES = {
    "an attribute": lambda net: setattr(net, "factor", 3.0),
    "a mode": lambda net: net[1].eval(),
    "what is trained": lambda net: net[0].requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_callback_changes_is_noticed(change, traced):
    def callback(bnn, epoch, loss):
        if epoch == 1:
            CHANGES[change](bnn.net)

    def make():
        torch.manual_seed(0)
        layers = nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        net = Scaled(*layers)
        return mean_field(net, Categorical(24), tyxe.priors.IIDPrior(UNIT, hide_modules=["0"]))

    assert_same(make, [(X, Y)], callback=callback)
    assert len(traced) == 2


def test_what_a_callback_changes_all_the_time_is_compiled_no_more(traced):
    def callback(bnn, epoch, loss):
        bnn.net.factor *= 2

    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        bnn = mean_field(Scaled(nn.Linear(3, 3)), Categorical(24))
        with contextlib.ExitStack() as stack:
            if compiles:
                stack.enter_context(pytest.warns(tyxe.TyxeWarning, match="after 4 epochs"))
            found.append(bnn.fit([(X, Y)], SGD, 8, callback, compile=compiles).loss)
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert len(traced) == 4


@pytest.mark.filterwarnings("ignore:the log-likelihood curves upwards:tyxe.TyxeWarning")
@pytest.mark.parametrize("curvature", ["fisher", "hessian", "empirical"])
def test_variational_laplace_is_the_same(curvature, traced):
    with variational_laplace(curvature=curvature):
        assert_same(smooth)
    assert len(traced) == 1


def test_ivon_runs_as_it_is():
    ivon = functools.partial(tyxe.optim.IVON, lr=0.1)
    with pytest.warns(tyxe.TyxeWarning, match="IVON takes gradients itself"):
        smooth().fit(HALVES, ivon, 2, compile=True)


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(programs, "has_compiler", lambda device: False)
    with pytest.warns(tyxe.TyxeWarning, match=r"needs a C\+\+ compiler"):
        history, _ = fitted(NORMALS, compile=True)
    assert history.loss == fitted(NORMALS)[0].loss
    with pytest.warns(tyxe.TyxeWarning, match=r"needs a C\+\+ compiler") as caught:
        mean_field(Keeps(3, 3), Categorical(24)).fit(HALVES, SGD, 6, UNCHANGED, compile=True)
    assert len(caught) == 1


def test_a_loss_that_is_not_finite_changes_nothing(traced):
    bnn, bad = (
        tyxe.VariationalBNN(mlp(3, 8, 3), NORMAL, Categorical(24), autoguide.AutoDelta),
        X / 0,
    )
    data = [HALVES[0], HALVES[0], (bad[:12], Y[:12])]
    still = functools.partial(torch.optim.SGD, lr=0.0)
    message = "inputs or targets that are not finite"
    rejects(bnn, RuntimeError, message, lambda: bnn.fit(data, still, 1, compile=True))


def test_several_processes_are_refused():
    with pytest.raises(ValueError, match="compile=True takes one process"):
        NORMALS().fit(HALVES, SGD, 1, compile=True, parallel=nn.parallel.DistributedDataParallel)


@pytest.mark.skipif(
    not has_compiler(torch.device("cpu")), reason="there is no C++ compiler on this machine"
)
@pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="the compiler of torch 2.8 draws in another order"
)
def test_compiled():
    bnn, wrong = NORMALS(), Y.clone()
    made = iter([bnn, NORMALS()])
    assert_same(lambda: next(made))
    wrong[20] = 7
    data = [HALVES[0], *zip(X.split(12), wrong.split(12), strict=True)]
    with pytest.raises(ValueError, match="support of Categorical"):
        bnn.fit(data, SGD, 1, compile=True)


def test_batches_are_told_apart_by_name_and_order(traced):
    def forward(self, a, b=None, c=None):
        return self.layer(a - 2 * b if c is None else a + 3 * c)

    def make():
        torch.manual_seed(0)
        return mean_field(NetOf(forward, layer=nn.Linear(3, 3)), Categorical(72))

    parts = [{"a": X, "b": X**2}, {"b": X**2, "a": X}, {"a": X, "c": X**2}]
    assert_same(make, [(part, Y) for part in parts])


def test_members_of_an_ensemble_are_those_of_a_plain_fit():
    """Their random numbers come from a stream, which a compiled program does not reach itself."""
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        ensemble = tyxe.EnsembleBNN(lambda _: NORMALS(), 1)
        torch.manual_seed(1)
        histories = ensemble.fit([(X, Y)], torch.optim.Adam, 4, compile=compiles)
        found.append(torch.tensor([history.loss for history in histories]))
    torch.testing.assert_close(*found)
