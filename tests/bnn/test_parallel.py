"""Two local processes, each with half of every batch, make the step that one makes on all of it."""

import functools
import warnings
from contextlib import nullcontext

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tyxe
from tests.oracles import bnns, processes
from tests.oracles.bnns import NORMAL as PRIOR
from tests.oracles.bnns import NOTHING
from tests.oracles.fits import trainable as parameters
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical, HomoskedasticGaussian
from tyxe.poutine import flipout, local_reparameterization, variational_laplace

N, BATCH, WORLD = 16, 8, 2
SEED = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, generator=SEED, dtype=torch.float64)
CLASSES = torch.randint(3, (N,), generator=SEED)
VALUES = torch.randn(N, 1, generator=SEED, dtype=torch.float64)
SGD = functools.partial(torch.optim.SGD, lr=0.1)
STUDENT = tyxe.priors.IIDPrior(dist.StudentT(3.0))  # no closed form: the KL is sampled
HEAD = tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), expose=["2.*"])
FEW = tyxe.priors.SubnetworkPrior(PRIOR, 9, "last")
NORMAL = functools.partial(AutoNormal, init_scale=0.3)
LOW_RANK = functools.partial(AutoLowRankMultivariateNormal, rank=2)
UNIT = torch.ones((), dtype=torch.float64)
NOISE = functools.partial(HomoskedasticGaussian, scale=dist.LogNormal(0 * UNIT, UNIT))


def mlp(outputs, *middle):
    return bnns.two_layers(3, 4, outputs, *middle).double()


def make(prior=PRIOR, guide=NORMAL, likelihood=Categorical, noise=None, middle=()):
    torch.manual_seed(0)
    net = mlp(1 if likelihood is NOISE else 3, *middle)
    return tyxe.VariationalBNN(net, prior, likelihood(N), guide, noise)


def rows(rank):
    """Return what a process sees: all of each batch, or every second row of it."""
    return slice(None) if rank is None else slice(rank, None, WORLD)


def batches(targets, rank=None, *more):
    parts = (part.split(BATCH) for part in (X, targets, *more))
    return [tuple(part[rows(rank)] for part in batch) for batch in zip(*parts, strict=True)]


# By name: how a BNN is made, and how it is fitted.
SAME_DRAWS = {
    "mean field": ({}, {}),
    "sampled KL": ({"prior": STUDENT}, {}),
    "closed form refused": ({}, {"closed_form_kl": False}),
    "two particles": ({}, {"num_particles": 2}),
    "beta and clipping": ({}, {"beta": lambda e: 0.5 + e, "clip_norm": 0.1}),
    "the head, the rest deterministic": ({"prior": HEAD}, {"lr_multipliers": {"scale": 3.0}}),
    "maximum likelihood": ({"prior": NOTHING, "guide": None}, {}),
    "MAP": ({"guide": AutoDelta}, {}),
    "low rank": ({"guide": LOW_RANK}, {}),
    "single weights": ({"prior": FEW}, {}),
    "inferred noise": ({"likelihood": NOISE, "noise": NORMAL}, {}),
}
# These sample within the net, or normalise by batch: what a row meets depends on its process.
OWN_DRAWS = {
    "mean field": ({}, nullcontext),
    "sampled KL": ({"prior": STUDENT}, nullcontext),
    "local reparameterisation": ({}, local_reparameterization),
    "flipout": ({}, flipout),
    "variational Laplace": ({}, variational_laplace),  # its pseudo-labels are drawn
    "dropout": ({"middle": (nn.Dropout(0.5),)}, nullcontext),
    "BatchNorm": ({"middle": (nn.BatchNorm1d(4), nn.Tanh())}, nullcontext),
}


def fit_same(name, rank, **parallel):
    """Two epochs of two batches, each process with the same generator."""
    parts, options = SAME_DRAWS[name]
    bnn = make(**parts)
    targets = VALUES if parts.get("likelihood") is NOISE else CLASSES
    torch.manual_seed(7)
    history = bnn.fit(batches(targets, rank), SGD, 2, **options, **parallel)
    return parameters(bnn), vars(history)


def step_own(name, rank, **parallel):
    """One step, each process with its own generator."""
    parts, handler = OWN_DRAWS[name]
    bnn = make(**parts)
    torch.manual_seed(7 + rank)
    with handler():
        bnn.fit(batches(CLASSES, rank)[:1], SGD, 1, **parallel)
    return parameters(bnn)


def loop(rank, wrapper):
    """A loop of one's own, with `PytorchBNN` as a part of the net."""
    torch.manual_seed(0)
    bnn = tyxe.PytorchBNN(nn.Linear(4, 3).double(), PRIOR, NORMAL)
    model = nn.Sequential(nn.Linear(3, 4).double(), nn.Tanh(), bnn)
    forward, optimizer = wrapper(model), SGD(model.parameters())
    torch.manual_seed(7)
    for x, y in batches(CLASSES, rank):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(forward(x), y) + bnn.cached_kl_loss / N
        loss.backward()
        optimizer.step()
    return parameters(model)


def counted_apart(kind, rank, **parallel):
    """Fits on points of which other numbers count in each process, by weights or a mask."""
    weights = torch.ones(N, dtype=torch.float64) if kind == "mask" else UNIT * (torch.arange(N) % 5)
    ignored = CLASSES if kind == "weights" else CLASSES.where(torch.arange(N) % 4 != 0, -1)
    size = int(weights.sum())
    bnn = make(likelihood=lambda _: Categorical(size, ignore_index=-1))
    torch.manual_seed(7)
    loader = batches(ignored, rank, weights)
    history = bnn.fit(loader, SGD, 2, accumulate_steps=2 if kind == "both" else 1, **parallel)
    return parameters(bnn), vars(history)


def held_out(rank, only_first=False, **options):
    """A fit that goes back to an epoch which is best for all, and not for a process alone."""
    part = [(X, CLASSES), (X, (CLASSES + 1) % 3), (X[:8], (CLASSES[:8] + 2) % 3)]
    own = part if rank is None else [part[rank]] if rank else part[::2]
    bnn = make(NOTHING, None)
    fast = functools.partial(torch.optim.SGD, lr=3.0)
    torch.manual_seed(7)
    given = None if only_first and rank else part if only_first else own
    history = bnn.fit(batches(CLASSES, rank), fast, 12, validation=given, **options)
    return parameters(bnn), vars(history)


def stopped(rank, **parallel):
    """The epochs of a fit that the last process's callback ends."""
    callback = (lambda bnn, epoch, loss: epoch == 1) if rank else None
    return len(make().fit(batches(CLASSES, rank), SGD, 5, callback, **parallel).loss)


DIFFERENT = {
    "dataset_size": ({"likelihood": lambda rank: Categorical(N + rank)}, {}),
    "beta": ({}, {"beta": lambda rank: lambda epoch: 1.0 + rank * epoch}),
    "optim": ({}, {"optim": lambda rank: functools.partial(torch.optim.SGD, lr=0.1 + rank)}),
    "num_epochs": ({}, {"num_epochs": lambda rank: 2 + rank}),
    "options": ({}, {"clip_norm": lambda rank: 1.0 + rank}),
    "checksum of weights": ({}, {}),
    "first epoch": ({}, {}),
}


def differing(name, rank, parallel):
    """What is said where processes differ, and whether their parameters are the same."""
    parts, own = ({n: of(rank) for n, of in given.items()} for given in DIFFERENT[name])
    bnn = make(likelihood=lambda _: parts.get("likelihood", Categorical(N)))
    if name == "checksum of weights":
        if parallel is DistributedDataParallel:
            parallel = functools.partial(parallel, init_sync=False)
        if rank:
            nn.init.zeros_(next(p for p in bnn.parameters() if p.requires_grad))
    if name == "first epoch" and rank:
        bnn.fit(batches(CLASSES), SGD, 1)
        bnn.load_checkpoint(bnn.checkpoint())
    options = {"optim": SGD, "num_epochs": 2, "parallel": parallel, **own}
    with pytest.raises(ValueError, match="processes differ") as error:
        bnn.fit(batches(CLASSES, rank), **options)
    return str(error.value)


def failing(rank, where, **parallel):
    """The error of a fit in which the last process's loader, held-out data or callback raise."""

    def bad(*given):
        raise ArithmeticError("mine")

    def loader(what):
        first, *rest = batches(CLASSES, rank)
        yield first
        yield from bad() if rank and what == where else rest

    callback = bad if rank and where == "callback" else None
    try:
        make().fit(loader("loader"), SGD, 1, callback, validation=loader("validation"), **parallel)
    except (ArithmeticError, RuntimeError) as error:
        return type(error).__name__


def refused(loader, **parallel):
    """The error of a fit, and whether its parameters stayed as they were."""
    bnn = make()
    before = parameters(bnn)
    with pytest.raises(ValueError, match="processes") as error:
        bnn.fit(loader, SGD, 1, **parallel)
    after = parameters(bnn)
    return str(error.value), all(torch.equal(before[n], after[n]) for n in before)


def sampled(rank, **parallel):
    """The history of PyTorch's recipe: a loader whose sampler shuffles, apart for each process."""
    dataset = TensorDataset(X, CLASSES)
    world = WORLD if parallel else 1
    sampler = DistributedSampler(dataset, world, rank if parallel else 0)
    bnn = make()
    torch.manual_seed(7)
    loader = DataLoader(dataset, BATCH // world, sampler=sampler)
    return vars(bnn.fit(loader, SGD, 3, **parallel))


def padded(rank):
    """The warnings of a fit on 15 points, of which the sampler makes 16."""
    dataset = TensorDataset(X[:-1], CLASSES[:-1])
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, WORLD, rank))
    bnn = make(likelihood=lambda _: Categorical(15))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        bnn.fit(loader, SGD, 1, parallel=DistributedDataParallel)
    return [str(warning.message) for warning in found]


COUNTED = ("weights", "mask", "both")
FOLLOWED = {
    "best": {},
    "patience": {"patience": 2},
    "no way back": {"patience": 2, "restore_best": False},
    "one process": {"only_first": True},
}
FAILING = ("loader", "validation", "callback")


KINDS = {"DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard}
# PyTorch shards no parameter without dimensions, such as that of a noise.
SAME = [(k, n) for k in KINDS for n in SAME_DRAWS if (k, n) != ("fully_shard", "inferred noise")]
EACH = pytest.mark.parametrize("kind", KINDS)


def work(rank, kind):
    parallel = {"parallel": KINDS[kind]}
    uneven = [(X[:4], CLASSES[:4]) if rank else (X[:3], CLASSES[:3])]
    more = more_work(rank) if kind == "DistributedDataParallel" else {}
    return {
        **more,
        "same": {name: fit_same(name, rank, **parallel) for own, name in SAME if own == kind},
        "own": {name: step_own(name, rank, **parallel) for name in OWN_DRAWS},
        "sizes": refused(uneven, **parallel),
        "held out": {n: held_out(rank, **options, **parallel) for n, options in FOLLOWED.items()},
        "stopped": stopped(rank, **parallel),
        "differing": {name: differing(name, rank, KINDS[kind]) for name in DIFFERENT},
        "failing": {where: failing(rank, where, **parallel) for where in FAILING},
    }


def more_work(rank):
    parallel = {"parallel": DistributedDataParallel}
    ours = batches(CLASSES, rank)
    different = make()
    if rank:
        nn.init.zeros_(next(p for p in different.parameters() if p.requires_grad))
    different.fit(ours, SGD, 0, **parallel)
    alone = make()
    alone.fit(ours, SGD, 1, **parallel)
    if rank == 0:  # nothing of the first fit waits for the other process
        alone.fit(batches(CLASSES), SGD, 1)
    return {
        "loop": loop(rank, DistributedDataParallel),
        "sampled": sampled(rank, **parallel),
        "padded": padded(rank),
        "counts": refused(ours[: 2 - rank], **parallel),
        "start": parameters(different),
        "counted": {kind: counted_apart(kind, rank, **parallel) for kind in COUNTED},
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    """What each of two processes found, by the way in which they work together."""
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    return {kind: processes.run(work, WORLD, folder, kind) for kind, folder in folders.items()}


@pytest.fixture
def found_more(found):
    return found["DistributedDataParallel"]


def assert_equal(left, right):
    """Up to the order of sums in float64."""
    assert left.keys() == right.keys()
    assert left
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-12, atol=1e-14, msg=name)


def assert_history(left, right):
    for term, values in left.items():
        assert values == pytest.approx(right[term], rel=1e-12)


def assert_is_that_of_one(processes, expected):
    """Compare parameters and history of each process with those of one that sees all."""
    parameters, history = expected
    for found, told in processes:
        assert_equal(found, parameters)
        assert_history(told, history)
    assert processes[0][1] == processes[1][1]


@pytest.mark.parametrize(("kind", "name"), SAME)
def test_the_same_draws_make_the_step_of_one_process(found, kind, name):
    assert_is_that_of_one([p["same"][name] for p in found[kind]], fit_same(name, None))


@pytest.mark.parametrize("kind", COUNTED)
def test_points_count_alike_in_every_process(found_more, kind):
    assert_is_that_of_one([p["counted"][kind] for p in found_more], counted_apart(kind, None))


def test_loops_and_samplers_of_pytorch_are_those_of_one_process(found_more):
    model, history = loop(None, lambda model: model), sampled(0)
    for process in found_more:
        assert_equal(process["loop"], model)
        assert_history(process["sampled"], history)


def test_points_that_the_sampler_repeats_are_warned_of(found_more):
    for process in found_more:
        (message,) = process["padded"]
        assert "an epoch had 16 points" in message
        assert "dataset_size=15" in message


def test_all_start_where_the_first_does_and_stop_where_one_has_no_batch_left(found_more):
    start = parameters(make())
    for process in found_more:
        assert_equal(process["start"], start)
        assert "no batch left" in process["counts"][0]


@pytest.mark.parametrize("name", OWN_DRAWS)
@EACH
def test_own_draws_make_the_average_of_the_steps(found, kind, name):
    """As a step of SGD is linear in the gradient."""
    ends = [step_own(name, rank) for rank in range(WORLD)]
    mean = {n: torch.stack([end[n] for end in ends]).mean(0) for n in ends[0]}
    assert any(not torch.equal(ends[0][n], ends[1][n]) for n in mean)
    for process in found[kind]:
        assert_equal(process["own"][name], mean)


@EACH
def test_batches_of_other_sizes_are_refused_by_all(found, kind):
    for process in found[kind]:
        message, unchanged = process["sizes"]
        assert "3, 4 points" in message
        assert "that 2 divides" in message
        assert unchanged


@pytest.mark.parametrize("name", FOLLOWED)
@EACH
def test_held_out_data_are_those_of_all_processes(found, kind, name):
    parameters, history = held_out(None, **FOLLOWED[name])
    for process in found[kind]:
        assert_equal(process["held out"][name][0], parameters)
        assert process["held out"][name][1]["validation"] == pytest.approx(history["validation"])


@pytest.mark.parametrize("name", DIFFERENT)
@EACH
def test_what_has_to_be_the_same_is_compared(found, kind, name):
    for rank, process in enumerate(found[kind]):
        assert f"process {rank} has {name}" in process["differing"][name]


@EACH
def test_an_end_or_an_error_of_one_process_is_one_of_all(found, kind):
    assert [process["stopped"] for process in found[kind]] == [2, 2]
    for error, process in zip(("RuntimeError", "ArithmeticError"), found[kind], strict=True):
        assert process["failing"] == dict.fromkeys(FAILING, error)


def test_each_epoch_is_shuffled_anew():
    dataset = TensorDataset(X, CLASSES)
    sampler = DistributedSampler(dataset, 1, 0)
    orders = []

    def see(bnn, epoch, loss):
        orders.append(list(sampler))

    make().fit(DataLoader(dataset, BATCH, sampler=sampler), SGD, 2, see)
    assert orders[0] != orders[1]
    sampler.set_epoch(0)
    assert orders[0] == list(sampler)


def test_a_part_of_the_data_without_averaging_is_warned_of():
    dataset = TensorDataset(X, CLASSES)
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, WORLD, 0))
    with pytest.warns(tyxe.TyxeWarning, match="parallel=DistributedDataParallel"):
        make().fit(loader, SGD, 1)


@pytest.mark.parametrize("given", [True, lambda objective: objective, nn.Linear(1, 1)])
def test_parallel_is_the_class(given):
    with pytest.raises(TypeError, match="parallel=DistributedDataParallel"):
        make().fit(batches(CLASSES), SGD, 1, parallel=given)
