"""The task loop: posteriors become priors, and a resumed run is the uninterrupted one."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from pyro.infer.autoguide import AutoLowRankMultivariateNormal
from pyro.infer.mcmc import NUTS
from torch import nn

import tyxe
from tests.oracles.tasks import (
    TASKS,
    WRAPPERS,
    N,
    assert_equal,
    data,
    loop_of,
    normal,
    variational,
)
from tyxe import files
from tyxe.continual import Heads, TaskLoop, posterior_to_prior


@pytest.mark.parametrize(("stop", "name"), [(1 + i % 2, name) for i, name in enumerate(WRAPPERS)])
def test_resumed_is_uninterrupted(stop, name, tmp_path):
    make = WRAPPERS[name]
    torch.manual_seed(1)
    whole = loop_of(make)
    expected = whole.run()
    path = tmp_path / "new" / "run.pt"
    torch.manual_seed(1)
    first = loop_of(make)
    first.run(path, callback=lambda task, scores: len(scores) == stop)
    assert first.done == stop
    assert bool(first.accuracy[stop:].isnan().all())
    second = loop_of(make)
    torch.manual_seed(99)
    learned = []
    actual = second.run(path, callback=lambda task, scores: learned.append(task))
    assert learned == TASKS[stop:]
    assert torch.equal(actual.nan_to_num(-1), expected.nan_to_num(-1))
    assert_equal(dict(second.bnn.state_dict()), dict(whole.bnn.state_dict()))
    assert_equal(second.heads.state_dict(), whole.heads.state_dict())
    # A finished run is read, not run again.
    third = loop_of(make)
    assert torch.equal(third.run(path).nan_to_num(-1), expected.nan_to_num(-1))


def test_a_checkpoint_says_that_draws_had_statistics_of_norms_from_a_loader(tmp_path):
    loop = loop_of(variational)
    loop.bnn.update_norm_statistics([data("first")])
    loop.run(tmp_path / "run.pt")
    with pytest.warns(tyxe.TyxeWarning, match="update_norm_statistics"):
        loop_of(variational).run(tmp_path / "run.pt")


def test_the_random_generators_are_resumed(tmp_path):
    def draws():
        return torch.rand(3).tolist(), np.random.randn(3).tolist(), random.gauss(0, 1)

    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(3)
    np.random.randn()  # which keeps a second draw for later
    random.gauss(0, 1)
    loop_of(variational).run(tmp_path / "run.pt", callback=lambda task, scores: True)
    expected = draws()
    draws()
    loop_of(variational).load_state_dict(files.read(tmp_path / "run.pt"))
    assert draws() == expected


def test_the_posterior_becomes_the_prior():
    loop = loop_of(variational)
    for _ in TASKS:
        loop.run(callback=lambda task, scores: True)
        priors = dict(loop.bnn.net_prior.priors())
        posteriors = loop.bnn.net_guide.get_detached_distributions()
        assert priors.keys() == posteriors.keys() == {"body.0.weight", "body.0.bias"}
        for name, posterior in posteriors.items():
            assert torch.equal(priors[name].mean, posterior.mean)
            assert torch.equal(priors[name].variance, posterior.variance)
        kl = tyxe.bnn.elbo_terms(loop.bnn.net_prior, loop.bnn.net_guide).kl
        assert abs(kl.item()) < 1e-5  # rounding of a sum over 20 weights in float32
    assert loop.done == 3


def test_draws_do_not_become_a_prior():
    likelihood = tyxe.likelihoods.Bernoulli(N, event_dim=1)
    bnn = tyxe.MCMC_BNN(nn.Linear(3, 1), normal(), likelihood, NUTS)
    with pytest.raises(TypeError, match=r"MCMC_BNN has draws, and no guide.*update= to the Task"):
        posterior_to_prior(bnn)


def test_the_matrix_holds_what_evaluate_returned_with_each_tasks_own_head():
    bnn, asked = variational(), []
    heads = Heads(bnn, modules=["head"])

    def fit(task):
        bnn.net.head[1].bias.data.fill_(TASKS.index(task))

    def evaluate(task):
        asked.append((task, bnn.net.head[1].bias.item()))
        return len(asked) / 100

    loop = TaskLoop(bnn, TASKS, fit, evaluate, lambda task: None, heads=heads)
    accuracy = loop.run()
    assert asked == [(task, i) for t in range(3) for i, task in enumerate(TASKS[: t + 1])]
    assert heads.current == "third"
    nan = math.nan
    expected = [[0.01, nan, nan], [0.02, 0.03, nan], [0.04, 0.05, 0.06]]
    torch.testing.assert_close(accuracy, torch.tensor(expected), equal_nan=True)
    accuracy.zero_()
    assert loop.accuracy[0, 0] != 0, "what is returned is a copy"
    asked.clear()
    TaskLoop(bnn, TASKS, fit, evaluate, lambda task: None, ahead=True).run()
    ahead = ["first", "second", "first", "second", "third", "first", "second", "third"]
    assert [task for task, _ in asked] == ahead


def test_an_interrupted_fit_can_be_run_again():
    loop, fits = loop_of(variational), []
    fit = loop.fit

    def breaks_once(task):
        fits.append(task)
        if fits == ["first", "second"]:
            raise KeyboardInterrupt
        return fit(task)

    loop.fit = breaks_once
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert loop.done == 1
    assert not bool(loop.run()[2].isnan().any())
    assert fits == ["first", "second", "second", "third"]


@pytest.mark.parametrize("name", ["variational", "Laplace, Kronecker"])
@pytest.mark.parametrize(("call", "task"), [("update", TASKS[0]), ("evaluate", TASKS[1])])
def test_what_is_done_of_a_task_is_not_done_again(name, call, task):
    torch.manual_seed(1)
    whole = loop_of(WRAPPERS[name], ahead=True)
    expected = whole.run()
    torch.manual_seed(1)
    loop, fits = loop_of(WRAPPERS[name], ahead=True), []
    fit, right = loop.fit, getattr(loop, call)

    def counted(task):
        fits.append(task)
        fit(task)

    def wrong(asked):
        if task not in fits:
            return right(asked)
        raise TypeError

    loop.fit = counted
    setattr(loop, call, wrong)
    with pytest.raises(TypeError):
        loop.run()
    assert loop.done == TASKS.index(task)
    setattr(loop, call, right)
    assert torch.equal(loop.run().nan_to_num(-1), expected.nan_to_num(-1))
    assert fits == TASKS
    assert_equal(dict(loop.bnn.state_dict()), dict(whole.bnn.state_dict()))


def test_a_state_knows_how_far_a_task_has_come():
    """What was fitted before it was saved is not fitted again under its own posterior."""
    loop, start, fits = loop_of(variational), loop_of(variational).state_dict(), []
    evaluate, loop.evaluate = loop.evaluate, lambda task: (1.0, 2.0)
    with pytest.raises(TypeError):
        loop.run()
    other = loop_of(variational)
    other.load_state_dict(loop.state_dict())
    other.fit = fits.append
    other.run()
    assert fits == TASKS[1:]
    loop.load_state_dict(start)
    fits.clear()
    loop.evaluate, loop.fit = evaluate, fits.append
    loop.run()
    assert fits == TASKS


def test_an_optimiser_of_all_tasks_is_resumed_as_a_part():
    def make():
        bnn = variational()
        adam = torch.optim.Adam(bnn.parameters(), lr=1e-2)

        def fit(task):
            bnn.fit([data(task)], adam, 3)

        return TaskLoop(bnn, TASKS, fit, lambda task: 0.0, parts={"adam": adam})

    torch.manual_seed(1)
    first = make()
    first.run(callback=lambda task, scores: True)
    state = first.state_dict()
    first.run()
    for _ in range(2):  # neither the first loop nor one that goes on changes the state
        second = make()
        second.load_state_dict(state)
        second.run()
        assert_equal(dict(second.bnn.state_dict()), dict(first.bnn.state_dict()))
    with pytest.raises(ValueError, match=r"has the parts \['adam'\], this loop"):
        loop_of(variational).load_state_dict(state)


def test_more_tasks_may_follow(tmp_path):
    torch.manual_seed(1)
    expected = (whole := loop_of(variational)).run()
    torch.manual_seed(1)
    path = tmp_path / "run.pt"
    two = loop_of(variational, TASKS[:2]).run(path)
    three = loop_of(variational)
    actual = three.run(path)
    assert torch.equal(actual[:2, :2].nan_to_num(-1), two.nan_to_num(-1))
    assert torch.equal(actual.nan_to_num(-1), expected.nan_to_num(-1))
    assert_equal(dict(three.bnn.state_dict()), dict(whole.bnn.state_dict()))
    for tasks in (TASKS[:2], [*TASKS[1:], "first"]):
        other = loop_of(variational, tasks)
        before = copy.deepcopy(dict(other.bnn.state_dict()))
        with pytest.raises(ValueError, match="resume in the same order"):
            other.run(path)
        assert other.done == 0
        assert_equal(dict(other.bnn.state_dict()), before)


def test_a_run_that_is_stopped_in_its_first_task_goes_on_bit_for_bit(tmp_path):
    start = tyxe.rng.random_state()

    def seeded():
        tyxe.rng.set_random_state(start)
        return loop_of(variational)

    whole, path = seeded(), tmp_path / "run.pt"
    expected = whole.run(tmp_path / "whole.pt")
    stopped = seeded()
    fit = stopped.fit

    def stops(task):
        fit(task)
        raise KeyboardInterrupt

    stopped.fit = stops
    with pytest.raises(KeyboardInterrupt):
        stopped.run(path)
    resumed = loop_of(variational)
    torch.rand(7)
    assert torch.equal(resumed.run(path).nan_to_num(-1), expected.nan_to_num(-1))
    assert_equal(dict(resumed.bnn.state_dict()), dict(whole.bnn.state_dict()))


@pytest.mark.parametrize("written", ["empty", "text", "zip", "another state"])
def test_a_file_that_is_no_checkpoint(written, tmp_path):
    path = tmp_path / "run.pt"
    if written == "another state":
        variational().save(path)
    else:
        path.write_bytes({"empty": b"", "text": b"accuracy: 0.9", "zip": b"PK\x03\x04"}[written])
    before = path.read_bytes()
    with pytest.raises(
        ValueError, match=r"run\.pt is (not a checkpoint of a TaskLoop|no file of tyxe, or damaged)"
    ):
        loop_of(variational).run(path)
    assert path.read_bytes() == before


def test_a_state_that_fits_the_bnn_and_not_the_heads_changes_nothing():
    saved = loop_of(lambda: variational(AutoLowRankMultivariateNormal))
    saved.run(callback=lambda task, scores: True)
    other = loop_of(lambda: variational(AutoLowRankMultivariateNormal))
    other.heads = Heads(other.bnn, modules=["head.0"])
    before = other.state_dict()
    with pytest.raises(ValueError, match="the state is of heads with"):
        other.load_state_dict(saved.state_dict())
    after = other.state_dict()
    assert torch.equal(before.pop("accuracy").isnan(), after.pop("accuracy").isnan())
    assert torch.equal(before.pop("rng")[0], after.pop("rng")[0])
    assert_equal(after, {**before, "bnn": dict(before["bnn"])})
    assert not other.bnn.net_prior.joints()


@pytest.mark.parametrize(
    ("tasks", "kind", "message"),
    [
        ("01", TypeError, "tasks is '01'; expected an iterable"),
        ([], ValueError, "tasks is"),
        (["a", "a"], ValueError, "tasks is"),
        (np.arange(2), TypeError, r"tasks has .*0.*, a int64; expected .* str or int"),
        ([1, True], TypeError, "tasks has True, a bool"),
        ([["a"]], TypeError, r"tasks has \['a'\], a list"),
    ],
)
def test_wrong_tasks(tasks, kind, message):
    with pytest.raises(kind, match=message):
        TaskLoop(variational(), tasks, lambda task: None, lambda task: 0.0)
