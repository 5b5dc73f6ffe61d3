"""Threads and tasks: the numbers of one thread, handlers that act where they were entered."""

import asyncio
import copy
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import mean_field
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical
from tyxe.priors import IIDPrior
from tyxe.threads import exclusive, handlers, module_local_params, unvalidated

X, Y = torch.randn(30, 4), torch.randint(3, (30,))
ADAM = partial(torch.optim.Adam, lr=1e-2)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def prior() -> IIDPrior:
    return IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])


def variational() -> tyxe.VariationalBNN:
    bnn = tyxe.VariationalBNN(net(), prior(), Categorical(30), AutoNormal)
    bnn.fit([(X, Y)], ADAM, 2)
    return bnn


def laplace() -> tyxe.LaplaceBNN:
    bnn = tyxe.LaplaceBNN(net().eval(), prior(), Categorical(30))
    bnn.fit_curvature([(X, Y)])
    return bnn


def pytorch() -> tyxe.PytorchBNN:
    return tyxe.PytorchBNN(net().eval(), prior(), AutoNormal)


def in_threads(work: Callable[[int], object], threads: int, calls: int) -> list:
    """Return what calls of a function return in several threads, switched as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(work, range(threads * calls)))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
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


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
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


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
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

    def other() -> None:
        with tyxe.poutine.report() as found:
            started.set()
            assert leave.wait(60)
        reports.append(found)

    reports: list = []
    thread = threading.Thread(target=other)
    thread.start()
    assert started.wait(60)
    with tyxe.poutine.report() as mine, tyxe.poutine.local_reparameterization():
        bnn.predict(X)
    leave.set()
    thread.join()
    assert len(list(mine))
    assert not list(reports[0])
    assert bnn.predict(X, num_predictions=2).shape == (30, 3)


def test_a_handler_belongs_to_its_task():
    """Held over an `await`, it acts in no other task, and tasks may leave in any order."""
    bnn, depths = variational().eval(), []

    def used() -> list[object]:
        with tyxe.poutine.report() as report:
            bnn.predict(X)
        return [row.treatment for row in report]

    async def held(handler: Callable[[], object], seconds: float) -> list[object]:
        with handler():
            await asyncio.sleep(seconds)
            found = used()
            await asyncio.sleep(seconds)
        return found

    async def plain() -> list[object]:
        await asyncio.sleep(0.015)
        return used()

    async def every() -> list[list[object]]:
        local = held(tyxe.poutine.local_reparameterization, 0.02)
        found = await asyncio.gather(local, held(tyxe.poutine.flipout, 0.01), plain())
        depths.append(len(handlers()))
        return found

    local, flipped, other = asyncio.run(every())
    assert set(local) == {"moments"}
    assert set(flipped) == {"flipped"}
    assert set(other) == {"drawn"}
    assert depths == [0]


USES = {
    "predict": lambda bnn: bnn.predict(X, num_predictions=1),
    "forward": lambda bnn: bnn(X),
    "guided_forward": lambda bnn: bnn.guided_forward(X),
    "to_module": lambda bnn: bnn.to_module(sample=True)(X),
}


@pytest.mark.parametrize("meanwhile", ["predict", "forward", "to_module"])
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


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("meanwhile", ["forward", "guided_forward", "to_module"])
def test_rows_have_the_same_draws_next_to_draws_of_other_threads(meanwhile):
    bnn, other, rows = variational(), variational().eval(), X[:1].expand(8, -1).contiguous()

    def work() -> None:
        for _ in range(100):
            found = bnn.predict(rows, num_predictions=4, batch_size=2, aggregate=False)
            torch.testing.assert_close(found[:, 0], found[:, -1], rtol=1e-4, atol=1e-4)

    others_work(work, lambda: USES[meanwhile](other))


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("kind", ["pieces", "loader", "grid", "first batch"])
def test_no_draw_is_repeated_because_another_thread_sets_the_generators_back(kind):
    bnn, la, seen = variational(), laplace(), []
    small = mean_field(nn.Linear(1, 3), Categorical(1))

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
    }

    def work() -> None:
        for _ in range(30):
            how[kind]()

    others_work(work, lambda: seen.append(tuple(small(torch.ones(1)).tolist())))
    assert len(set(seen)) == len(seen)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
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
        lambda: partial(tyxe.priors.SubnetworkPrior, prior(), 3, by="random"),
    ],
    ids=["members", "subnetwork"],
)
@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
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


def test_draws_beside_fits_of_an_ensemble_never_come_again():
    def make(_: int) -> tyxe.VariationalBNN:
        return tyxe.VariationalBNN(net(), prior(), Categorical(30), AutoNormal)

    ensemble, bnn, found = tyxe.EnsembleBNN(make, 3), variational(), []

    def work() -> None:
        for _ in range(5):
            ensemble.fit([(X, Y)], ADAM, 2)

    def predict() -> None:
        found.append(tuple(bnn.predict(X[:1], num_predictions=1).flatten().tolist()))

    others_work(work, predict)
    assert len(set(found)) == len(found) > 5


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_predictions_never_meet_a_precision_of_the_search(monkeypatch):
    bnn, found = laplace(), []
    monkeypatch.setattr(bnn, "_set_prior_numbers", lambda _: None)

    def predict() -> torch.Tensor:
        return bnn.predict(X, num_predictions=1, link="probit")

    expected = predict()
    grid = [0.01, 0.1, 1.0, 10.0, 100.0]
    others_work(
        lambda: [bnn.optimize_prior_precision("grid", [(X, Y)], grid=grid) for _ in range(5)],
        lambda: found.append(predict()),
    )
    assert found
    assert all(torch.equal(one, expected) for one in found)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("what", ["predict", "grid"])
def test_a_loader_may_wait_for_predictions_of_another_thread(what):
    teacher, bnn = variational(), laplace()

    class Taught:
        def __iter__(self):
            for _ in range(2):
                labels = pool.submit(teacher.predict, X).result(20).argmax(-1)
                yield X, labels

    with ThreadPoolExecutor(1) as pool:
        if what == "predict":
            assert bnn.predict(Taught(), num_predictions=2).shape == (60, 3)
        else:
            assert bnn.optimize_prior_precision("grid", Taught(), grid=[0.5, 1.0]) > 0


# --------------------------------------------------------------------------- PytorchBNN


def test_the_kl_is_that_of_the_threads_own_forward():
    """Other threads predict, run the net, and hold samples between a forward and its backward."""
    bnn, leave = pytorch(), threading.Event()

    def serve(_: int) -> None:
        while not leave.is_set():
            bnn.predict(X, num_predictions=2)
            with torch.no_grad(), bnn.hold_sample():
                bnn(X)

    def train() -> None:
        for _ in range(50):
            bnn.zero_grad()
            output, kl = bnn(X), bnn.cached_kl_loss
            (output.sum() + kl).backward()
            assert all(p.grad is not None for p in bnn.net_guide.parameters())

    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(serve, i) for i in range(2)]
        try:
            train()
        finally:
            leave.set()
        for other in others:
            other.result()


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

    async def holding(entered, done):
        with bnn.hold_sample():
            first = bnn(X)
            entered.set()
            await done.wait()
            return torch.equal(bnn(X), first)

    async def beside():
        entered, done = asyncio.Event(), asyncio.Event()
        holder = asyncio.create_task(holding(entered, done))
        await entered.wait()
        fresh = not torch.equal(bnn(X), bnn(X))
        done.set()
        return await holder, fresh

    assert asyncio.run(beside()) == (True, True)
    assert not bnn._held


def test_predictions_do_not_use_the_held_sample():
    bnn = pytorch()
    with bnn.hold_sample():
        held = bnn(X)
        first, second = bnn.predict(X, num_predictions=2)
        assert not torch.equal(first, second)
        assert torch.equal(bnn(X), held)


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
