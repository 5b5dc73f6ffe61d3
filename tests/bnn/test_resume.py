"""Checkpoints: a resumed training is the uninterrupted one."""

import copy
import functools
import math
import pickle

import pyro
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tests.oracles import states
from tests.oracles.rejections import rejects

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    bnn = states.fitted()
    for other, message in (
        (states.make(hidden=5).checkpoint(), "does not fit this VariationalBNN"),
        (bnn.state_dict(), r"no checkpoint: it has no bnn.*load_state_dict"),
    ):
        rejects(bnn, RuntimeError, message, functools.partial(bnn.load_checkpoint, other))
    bnn.fit([states.data()], states.ADAM, 1)
    assert {state["step"].item() for state in bnn.optimizer.state.values()} == {1}


def start(guide="AutoNormal"):
    pyro.set_rng_seed(2)
    if guide == "laplace":
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(12, scale=0.5)
        return tyxe.LaplaceBNN(states.net(), states.NORMAL, likelihood, structure="diag")
    return states.make(states.GUIDES[guide])


def shuffled():
    return DataLoader(TensorDataset(*states.data()), batch_size=5, shuffle=True)


OPTIMISERS = {
    "torch class": lambda bnn: states.ADAM,
    "torch instance": lambda bnn: torch.optim.Adam(bnn.parameters(), lr=0.01),
    "pyro": lambda bnn: pyro.optim.ClippedAdam({"lr": 0.01, "lrd": 0.99}),
    "pyro, by name": lambda bnn: pyro.optim.Adam(lambda name: {"lr": 0.01}),
}


@pytest.mark.parametrize("optim", OPTIMISERS)
def test_a_resumed_run_is_the_uninterrupted_one(optim):
    options = {"beta": lambda epoch: min(1.0, (epoch + 1) / 4)}
    if optim != "torch instance":
        options["lr_multipliers"] = {"scale": 3.0}

    def fit(bnn, epochs):
        return bnn.fit(shuffled(), OPTIMISERS[optim](bnn), epochs, **options)

    straight, first = start("AutoLowRankMultivariateNormal"), start("AutoLowRankMultivariateNormal")
    pyro.set_rng_seed(3)
    whole = fit(straight, 5)
    pyro.set_rng_seed(3)
    before = fit(first, 2)
    checkpoint = states.through_a_file(first.checkpoint())

    pyro.set_rng_seed(99)  # another process
    resumed = states.make(states.GUIDES["AutoLowRankMultivariateNormal"])
    resumed.load_checkpoint(checkpoint)
    torch.rand(7)
    after = fit(resumed, 3)
    states.assert_same_state(straight, resumed)
    assert before.loss + after.loss == whole.loss
    left, right = (bnn.optimizer.state_dict() for bnn in (straight, resumed))
    assert left["param_groups"] == right["param_groups"]


OTHERS = [
    pyro.optim.Adam(lambda name: {"lr": 0.1}),
    torch.optim.AdamW,
    functools.partial(torch.optim.SGD, lr=0.1),
]


@pytest.mark.parametrize("other", OTHERS)
def test_resuming_with_another_optimiser_is_an_error(other):
    bnn, resumed = states.fitted(), states.make()
    resumed.load_checkpoint(bnn.checkpoint())
    with pytest.raises(ValueError, match=r"optimiser Adam with groups of .* go on with an optim"):
        resumed.fit([states.data()], other, 1)
    states.assert_same_state(resumed, bnn)
    resumed.fit([states.data()], states.ADAM, 1)  # the checkpoint still waits
    assert {state["step"].item() for state in resumed.optimizer.state.values()} == {4}


def test_a_loaded_checkpoint_is_what_checkpoint_returns():
    taken = states.through_a_file(states.fitted().checkpoint())
    resumed = states.make()
    resumed.load_checkpoint(taken)
    torch.rand(3)  # the generator's state is the saved one, not the present one
    is_same = tree_map(
        lambda one, other: torch.equal(one, other) if torch.is_tensor(one) else one == other,
        resumed.checkpoint(),
        taken,
    )
    assert all(tree_leaves(is_same))


def test_a_loaded_checkpoint_waits_for_a_fit_that_works():
    taken = states.through_a_file(states.fitted().checkpoint())
    whole, resumed, epochs = states.make(), states.make(), []
    whole.load_checkpoint(taken)
    whole.fit([states.data()], states.ADAM, 2)
    resumed.load_checkpoint(taken)
    with pytest.raises(ValueError, match="the loader is empty"):
        resumed.fit([], states.ADAM, 1)
    resumed.fit([states.data()], states.ADAM, 0)
    resumed.fit([states.data()], states.ADAM, 2, lambda bnn, epoch, loss: epochs.append(epoch))
    assert epochs == [3, 4]
    states.assert_same_state(resumed, whole)
    assert resumed.checkpoint()["epoch"] == 5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bnn: pickle.loads(pickle.dumps(bnn))])
def test_a_copy_starts_a_training_of_its_own(copied):
    bnn = states.fitted()
    checkpoint = copied(bnn).checkpoint()
    assert checkpoint["epoch"] == 0
    assert checkpoint["optimizer"] is checkpoint["scheduler"] is None
    assert bnn.checkpoint()["epoch"] == 3
    assert bnn.checkpoint()["optimizer"] is not None
    fresh, epochs = states.make(), []
    fresh.load_checkpoint(checkpoint)
    fresh.fit([states.data()], torch.optim.SGD, 1, lambda bnn, epoch, loss: epochs.append(epoch))
    assert epochs == [0]


def held_out():
    """Points that a fit by steep steps finds worse after some epochs, and then better again."""
    x, y = states.data()
    return [(x[:2] + 0.1, y[:2]), (x[2:4], -y[2:4])]


@pytest.mark.parametrize(
    ("guide", "restore_best", "patience"),
    [
        ("AutoNormal", True, None),
        ("AutoNormal", False, 2),
        ("AutoDelta", True, 4),
        ("laplace", True, 2),
        ("laplace", False, None),
    ],
)
def test_a_resumed_fit_knows_the_best_epoch_and_how_long_it_has_waited(
    guide, restore_best, patience
):
    def fit(bnn, epochs, callback=None):
        optim = functools.partial(torch.optim.Adam, lr=0.3)
        options = {"validation": held_out(), "patience": patience, "restore_best": restore_best}
        pyro.set_rng_seed(3)
        return bnn.fit([states.data()], optim, epochs, callback, **options)

    def resumed(checkpoint):
        bnn = start(guide)
        bnn.load_checkpoint(states.through_a_file(checkpoint))
        return bnn

    saved, whole = [], start(guide)
    history = fit(whole, 12, lambda bnn, epoch, loss: saved.append(bnn.checkpoint()))
    assert len(saved) == len(history.validation)
    for done in {4, len(saved)}:
        bnn = resumed(saved[done - 1])
        assert fit(bnn, 12 - done).validation == history.validation[done:]
        states.assert_same_state(bnn, whole)
    # A fit that has ended is no reason to train no more.
    assert len(fit(resumed(whole.checkpoint()), 1).loss) == 1


SCHEDULES = {
    "cosine": functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=6),
    "steps": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2),
    "plateau": functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0),
}


PYRO = {"optimizer": torch.optim.SGD, "optim_args": {"lr": 0.05}, "gamma": 0.5}


@pytest.mark.parametrize("name", [*SCHEDULES, "pyro"])
def test_a_scheduler_that_is_given_as_optim_goes_on_where_it_was(name):
    def fit(bnn, epochs, given="scheduler"):
        optim = torch.optim.SGD(bnn.parameters(), lr=0.05)
        schedule = pyro.optim.ExponentialLR({**PYRO}) if name == "pyro" else SCHEDULES[name](optim)
        rates = []

        def callback(bnn, epoch, loss):
            rates.append(bnn.optimizer.param_groups[0]["lr"])
            schedule.step(*[loss] * (name == "plateau"))

        pyro.set_rng_seed(3)
        bnn.fit([states.data()], schedule if given == "scheduler" else optim, epochs, callback)
        return rates

    whole, first, resumed = states.make(), states.make(), states.make()
    rates = fit(whole, 6)
    assert len(set(rates)) > 1
    found = fit(first, 3)
    resumed.load_checkpoint(states.through_a_file(first.checkpoint()))
    assert found + fit(resumed, 3) == rates
    if name not in ("plateau", "pyro"):  # which leave no trace in the optimiser
        resumed.load_checkpoint(first.checkpoint())
        with pytest.warns(tyxe.TyxeWarning, match="pass the scheduler as optim"):
            fit(resumed, 1, given="optimiser")


BY_BATCH = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=24)


@pytest.mark.parametrize("name", [*SCHEDULES, "by batch"])
def test_a_scheduler_of_the_fit_goes_on_where_it_was(name):
    schedule, by = (BY_BATCH, "batch") if name == "by batch" else (SCHEDULES[name], "epoch")
    loader = [states.data(), states.data()]

    def fit(bnn, epochs):
        optim, rates = functools.partial(torch.optim.SGD, lr=0.05), []

        def callback(bnn, epoch, loss):
            rates.append(bnn.optimizer.param_groups[0]["lr"])

        pyro.set_rng_seed(3)
        bnn.fit(loader, optim, epochs, callback, scheduler=schedule, schedule_by=by)
        return rates

    whole, killed, resumed = start(), start(), start()
    expected = fit(whole, 6)
    assert whole.epochs_done == 6
    if name != "plateau":
        assert len(set(expected)) > 1
    if name == "cosine":
        cosines = [math.cos(n * math.pi / 6) for n in range(1, 7)]
        assert expected == pytest.approx([0.025 * (1 + cosine) for cosine in cosines])
    rates = fit(killed, 3)
    resumed.load_checkpoint(states.through_a_file(killed.checkpoint()))
    assert resumed.epochs_done == 3
    assert rates + fit(resumed, 3) == expected
    assert resumed.epochs_done == 6
    states.assert_same_state(resumed, whole)


def test_schedulers_that_would_lose_rates():
    one_rate, each = {"scheduler": BY_BATCH, "schedule_by": "batch"}, {"scale": 10.0}
    plateau = {"scheduler": SCHEDULES["plateau"], "schedule_by": "batch"}
    for options, match in (
        (plateau, "compares losses of epochs"),  # and would fall with each batch
        ({**one_rate, "lr_multipliers": each}, "OneCycleLR replaces the rates of groups"),
    ):
        with pytest.raises(ValueError, match=match):
            states.make().fit([states.data()], torch.optim.Adam, 1, **options)
    rates = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.0)
    states.make().fit([states.data()], torch.optim.Adam, 1, scheduler=rates, lr_multipliers=each)


def test_what_is_no_scheduler():
    bnn = states.make()
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    of_another = torch.optim.lr_scheduler.StepLR(other, 1)
    before = [p.clone() for p in bnn.parameters()]
    for wrong, error, match in (
        (of_another, ValueError, "of another optimiser than the fit's"),
        (0.5, TypeError, r"scheduler is 0\.5; expected a class of torch\.optim\.lr_scheduler"),
        (lambda optim: None, TypeError, "what scheduler returns is None"),
    ):
        with pytest.raises(error, match=match):
            bnn.fit([states.data()], torch.optim.Adam, 1, scheduler=wrong)
    with pytest.raises(ValueError, match="schedule_by is 'step'"):
        bnn.fit([states.data()], torch.optim.Adam, 1, scheduler=BY_BATCH, schedule_by="step")
    assert all(map(torch.equal, before, bnn.parameters()))
