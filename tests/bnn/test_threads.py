"""Threads and tasks: the numbers of one thread, handlers that act where they were entered."""

import asyncio
import copy
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import pyro
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles import bnns
from tests.oracles.bnns import ADAM, HIDE_NORMS, mean_field, two_layers
from tyxe.bnn.passes import GROUPED, ReplayedDraws
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical
from tyxe.threads import exclusive, handlers, module_local_params, unvalidated

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
X, Y = torch.randn(30, 4), torch.randint(3, (30,))


def net() -> nn.Module:
    return two_layers(4, 8, 3, nn.BatchNorm1d(8), nn.Tanh())


def variational() -> tyxe.VariationalBNN:
    bnn = mean_field(net(), Categorical(30), HIDE_NORMS)
    bnn.fit([(X, Y)], ADAM, 2)
    return bnn


def laplace() -> tyxe.LaplaceBNN:
    return bnns.laplace(net().eval(), Categorical(30), [(X, Y)], HIDE_NORMS)


def pytorch() -> tyxe.PytorchBNN:
    return tyxe.PytorchBNN(net().eval(), HIDE_NORMS, AutoNormal)


def in_threads(work: Callable[[int], object], threads: int, calls: int) -> list:
    """Return what calls of a function return in several threads, switched as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(work, range(threads * calls)))
    finally:
        sys.setswitchinterval(before)


def test_fits_and_predictions_of_several_bnns():
    bnns = [variational() for _ in range(4)]
    still, alone = variational(), []
    centre = still.predict(X, num_predictions=0)
    for bnn in bnns:
        pyro.set_rng_seed(1)
        alone.append(bnn.predict(X, num_predictions=0))

    def work(i: int) -> object:
        if i < 4:
            return bnns[i].fit([(X, Y)] * 4, ADAM, 5).loss[-1]
        return still.predict(X, num_predictions=0)

    found = in_threads(work, threads=8, calls=10)
    assert all(torch.isfinite(torch.tensor(loss)) for loss in found[:4])
    assert all(torch.equal(one, centre) for one in found[4:])
    for bnn, before in zip(bnns, alone, strict=True):
        assert not torch.equal(bnn.predict(X, num_predictions=0), before)


FITS = {
    "VariationalBNN": (variational, lambda bnn, data: bnn.fit(data, ADAM, 1)),
    "LaplaceBNN": (laplace, lambda bnn, data: bnn.fit_curvature(data)),
}


@pytest.mark.parametrize("name", FITS)
def test_two_fits_of_one_bnn_are_an_error(name):
    make, fit = FITS[name]
    bnn, inside, leave = make(), threading.Event(), threading.Event()
    modes = [part.training for part in bnn.modules()]

    def slow():
        yield X, Y
        inside.set()
        assert leave.wait(60)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(fit, bnn, slow())
        assert inside.wait(60)
        with pytest.raises(RuntimeError, match=f"another thread is fitting this {name}"):
            fit(bnn, [(X, Y)])
        assert bnn.predict(X, num_predictions=2).shape == (30, 3)
        leave.set()
        first.result()
    assert [part.training for part in bnn.modules()] == modes
    fit(bnn, [(X, Y)])


def test_curvatures_of_several_bnns_are_those_of_one_thread():
    bnns = [laplace() for _ in range(4)]
    for bnn in bnns:
        bnn.fit_curvature([(X, Y)] * 2)
    expected = [bnn.state.precision().diagonal() for bnn in bnns]

    def work(i: int) -> None:
        for _ in range(5):
            bnns[i].fit_curvature([(X, Y)] * 2)
            bnns[i - 1].predict(X)

    in_threads(work, threads=4, calls=1)
    for bnn, diagonal in zip(bnns, expected, strict=True):
        assert torch.equal(bnn.state.precision().diagonal(), diagonal)


def test_a_handler_acts_in_its_own_thread():
    bnn, started, leave = variational(), threading.Event(), threading.Event()

    def other() -> list[object]:
        with tyxe.poutine.report() as found:
            started.set()
            assert leave.wait(60)
        return [*found]

    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(other)
        assert started.wait(60)
        with tyxe.poutine.report() as mine, tyxe.poutine.local_reparameterization():
            bnn.predict(X)
        leave.set()
        assert theirs.result() == []
    assert len(list(mine))


def test_a_handler_belongs_to_its_task():
    """Held over an `await`, it acts in no other task, and tasks may leave in any order."""
    bnn, depths = variational().eval(), []

    async def used(handler: Callable[[], object], before: float, after: float) -> set[object]:
        with handler():
            await asyncio.sleep(before)
            with tyxe.poutine.report() as report:
                bnn.predict(X)
            await asyncio.sleep(after)
        return {row.treatment for row in report}

    async def every() -> list[set[object]]:
        local = used(tyxe.poutine.local_reparameterization, 0.02, 0.02)
        flipped = used(tyxe.poutine.flipout, 0.01, 0.01)
        found = await asyncio.gather(local, flipped, used(nullcontext, 0.015, 0.0))
        depths.append(len(handlers()))
        return found

    assert asyncio.run(every()) == [{"moments"}, {"flipped"}, {"drawn"}]
    assert depths == [0]


USES = {
    "predict": lambda bnn: bnn.predict(X, num_predictions=1),
    "forward": lambda bnn: bnn(X),
    "guided_forward": lambda bnn: bnn.guided_forward(X),
    "to_module": lambda bnn: bnn.to_module(sample=True)(X),
    "to_ensemble": lambda bnn: bnn.to_ensemble(1)(X),
}


@pytest.mark.parametrize("meanwhile", ["predict", "forward", "to_module", "to_ensemble"])
def test_forwards_run_side_by_side(meanwhile):
    """Each of two threads waits inside of the net until the other is there, too."""
    bnn, both = variational().eval(), threading.Barrier(2)
    bnn.predict(X)  # what is looked at in the first forward is known

    def meet(*_: object) -> None:
        both.wait(60)

    bnn.net[0].register_forward_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(USES["predict"], bnn)
        second = pool.submit(USES[meanwhile], bnn)
        assert first.result().shape == second.result().shape == (30, 3)


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("numbers", [GROUPED // 3, GROUPED, GROUPED + 1])
def test_large_draws_are_made_side_by_side(numbers, is_replayed):
    """Small ones are made in groups, while no other thread draws; the numbers are the same."""
    is_locked: list[bool] = []

    def draws(count: int) -> Iterator[torch.Tensor]:
        for _ in range(count):
            is_locked.append(exclusive()._is_owned())
            yield torch.randn(numbers)

    torch.manual_seed(0)
    again = ReplayedDraws(is_replayed)
    found = [list(again.over(draws(7), numbers)) for _ in range(2 if is_replayed else 1)]
    torch.manual_seed(0)
    expected = [torch.randn(numbers) for _ in range(7)]
    for each in found:
        assert all(map(torch.equal, each, expected))
        assert len(each) == 7
    assert is_locked == [numbers <= GROUPED and not is_replayed] * 7 * len(found)


def test_a_group_is_made_before_its_first_draw_is_used():
    made: list[int] = []
    draws = (made.append(index) or index for index in range(7))
    for index, draw in enumerate(ReplayedDraws().over(draws, GROUPED // 3)):
        assert draw == index
        assert len(made) == min(7, 3 * (index // 3 + 1))


def test_a_forward_that_begins_to_draw_lets_no_other_thread_draw():
    is_locked: list[bool] = []
    bnn = mean_field(nn.Sequential(nn.Dropout(0.0), nn.Linear(4, 3)), Categorical(30)).train()
    bnn.net.register_forward_hook(lambda *_: is_locked.append(exclusive()._is_owned()))
    for rate in (0.0, 0.0, 0.5, 0.5):
        bnn.net[0].p = rate
        bnn(X)
    assert is_locked == [True, False, True, True]


@pytest.mark.forks
def test_a_fork_has_the_lock_free_and_what_it_guards_whole():
    """A fork inside of the lock leaves it, and one beside it waits for the other thread."""
    with exclusive():
        child = os.fork()
    if child == 0:
        with ThreadPoolExecutor(1) as pool:  # another thread of the child can take it
            free = pool.submit(lambda: exclusive().acquire(timeout=10)).result()
        os._exit(0 if free else 1)
    assert os.waitpid(child, 0)[1] == 0
    inside, done = threading.Event(), []

    def other() -> None:
        with exclusive():
            inside.set()
            time.sleep(0.2)
            done.append(1)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if child == 0:
        os._exit(0 if done else 1)
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


# --------------------------------------------------------------------------- what all share


def others_work(work: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """Run a function, while another thread runs another again and again."""
    leave = threading.Event()

    def again() -> None:
        while not leave.is_set():
            meanwhile()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(again)
        try:
            work()
        finally:
            leave.set()
        other.result()


@pytest.mark.parametrize("meanwhile", ["forward", "guided_forward", "to_module"])
def test_rows_have_the_same_draws_next_to_draws_of_other_threads(meanwhile):
    bnn, other, rows = variational(), variational().eval(), X[:1].expand(8, -1).contiguous()

    def work() -> None:
        for _ in range(25):
            found = bnn.predict(rows, num_predictions=4, batch_size=2, aggregate=False)
            torch.testing.assert_close(found[:, 0], found[:, -1], rtol=1e-4, atol=1e-4)

    others_work(work, lambda: USES[meanwhile](other))


@pytest.mark.parametrize("kind", ["pieces", "loader", "grid", "first batch", "members"])
def test_no_draw_is_repeated_because_another_thread_sets_the_generators_back(kind):
    bnn, la, seen = variational(), laplace(), []
    small = mean_field(nn.Linear(1, 3), Categorical(1))
    members = tyxe.EnsembleBNN(lambda _: mean_field(net(), Categorical(30), HIDE_NORMS), 3)

    class Loader:
        def __iter__(self):
            time.sleep(0.01)
            yield X[:15], Y[:15]
            yield X[15:], Y[15:]

    how = {
        "pieces": lambda: bnn.predict(X, num_predictions=4, batch_size=5),
        "loader": lambda: bnn.predict(Loader(), num_predictions=4),
        "grid": lambda: la.optimize_prior_precision("grid", [(X, Y)], grid=[0.5, 1.0]),
        "first batch": lambda: variational(),
        "members": lambda: members.fit([(X, Y)], ADAM, 1),
    }

    def work() -> None:
        for _ in range(20):
            how[kind]()

    others_work(work, lambda: seen.append(tuple(small(torch.ones(1)).tolist())))
    assert len(set(seen)) == len(seen) > 5


def test_members_and_other_threads_do_not_draw_from_each_other():
    def run(draws):
        torch.manual_seed(0)
        found, ensemble = [], tyxe.EnsembleBNN(lambda _: variational(), 2)

        def callback(*_):
            if draws:
                thread = threading.Thread(target=lambda: found.append(torch.rand(3)))
                thread.start()
                thread.join()

        ensemble.fit([(X, Y)], ADAM, 2, callback=callback)
        return ensemble.state_dict(), found + [torch.rand(3) for _ in range(5 - len(found))]

    (state, found), (plain, expected) = run(True), run(False)
    assert all(map(torch.equal, found, expected))
    assert all(torch.equal(value, plain[name]) for name, value in state.items())


@pytest.mark.parametrize(
    "draws",
    [
        lambda: partial(tyxe.EnsembleBNN(lambda _: variational(), 2).fit, [(X, Y)], ADAM, 1),
        lambda: partial(tyxe.priors.SubnetworkPrior, HIDE_NORMS, 3, by="random"),
    ],
    ids=["members", "subnetwork"],
)
def test_seeds_are_not_drawn_while_another_thread_has_set_the_generators(draws):
    draw = draws()
    with tyxe.rng.torch_rng_kept(seed=1):
        before = torch.get_rng_state()
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join(timeout=0.3)
        assert thread.is_alive()
        assert torch.equal(torch.get_rng_state(), before)
    thread.join()


def test_predictions_never_meet_a_precision_of_the_search(monkeypatch):
    bnn, found = laplace(), []
    monkeypatch.setattr(bnn, "_set_prior_numbers", lambda _: None)
    predict = partial(bnn.predict, X, num_predictions=1, link="probit")
    search = partial(bnn.optimize_prior_precision, "grid", [(X, Y)], grid=[0.01, 0.1, 1.0, 100.0])
    expected = predict()
    others_work(lambda: [search() for _ in range(4)], lambda: found.append(predict()))
    assert found
    assert all(torch.equal(one, expected) for one in found)


# --------------------------------------------------------------------------- PytorchBNN


def test_the_kl_is_that_of_the_threads_own_forward():
    """Another thread predicts and holds samples between a forward and its backward."""
    bnn = pytorch()

    def serve() -> None:
        bnn.predict(X, num_predictions=2)
        with torch.no_grad(), bnn.hold_sample():
            bnn(X)

    def train() -> None:
        for _ in range(20):
            bnn.zero_grad()
            output, kl = bnn(X), bnn.cached_kl_loss
            (output.sum() + kl).backward()
            assert all(p.grad is not None for p in bnn.net_guide.parameters())

    others_work(train, serve)


def test_a_sample_is_held_for_its_own_thread():
    bnn = pytorch()
    with bnn.hold_sample(), ThreadPoolExecutor(1) as pool:
        first, second = (pool.submit(bnn, X).result() for _ in range(2))
        assert not torch.equal(first, second)
        held = bnn(X)
        assert not torch.equal(pool.submit(bnn, X).result(), held)
        assert torch.equal(bnn(X), held)


def test_a_sample_is_held_for_its_own_task():
    bnn = pytorch()

    async def holding(entered: asyncio.Event, done: asyncio.Event) -> bool:
        with bnn.hold_sample():
            first = bnn(X)
            entered.set()
            await done.wait()
            return torch.equal(bnn(X), first)

    async def beside() -> tuple[bool, bool]:
        entered, done = asyncio.Event(), asyncio.Event()
        holder = asyncio.create_task(holding(entered, done))
        await entered.wait()
        fresh = not torch.equal(bnn(X), bnn(X))
        done.set()
        return await holder, fresh

    assert asyncio.run(beside()) == (True, True)
    assert not bnn._held


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bnn: pickle.loads(pickle.dumps(bnn))])
def test_a_copy_has_the_kl_of_the_original(copied):
    bnn = pytorch()
    bnn(X)
    with bnn.hold_sample():
        bnn(X)
        other = copied(bnn)
    assert other.cached_kl_loss == bnn.cached_kl_loss.detach()
    assert not torch.equal(other(X), other(X))
    assert other.cached_kl_loss.requires_grad


# --------------------------------------------------------------------------- Pyro's settings


def test_settings_of_pyro_come_back_whatever_the_order_of_threads():
    before, entered, leave = pyro.settings.get(), threading.Event(), threading.Event()

    def first() -> None:
        with unvalidated(), module_local_params():
            entered.set()
            assert leave.wait(60)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(first)
        assert entered.wait(60)
        with unvalidated():
            leave.set()
            other.result()
            assert not pyro.settings.get("validate_distributions_torch")
            assert not pyro.settings.get("module_local_params")
    assert pyro.settings.get() == before
