"""Curvature, evidence and evaluation over the data of three processes are those of one."""

import functools
import os

import pytest
import torch
import torch.distributed
from torch import nn

import tyxe
from tests.oracles import processes
from tests.oracles.bnns import NORMAL, mean_field
from tests.oracles.nets import KindAndSize
from tyxe.likelihoods import Categorical, HomoskedasticGaussian

N, WORLD = 20, 3
SEED = torch.Generator().manual_seed(0)
X = torch.randn(N, 1, 4, 4, generator=SEED, dtype=torch.float64)
Y = torch.randint(3, (N,), generator=SEED)
WEIGHTS = torch.randint(1, 3, (N,), generator=SEED).double()
CASES = {
    "full": {"structure": "full"},
    "kron": {"structure": "kron"},
    "kron, positions summed": {
        "structure": "kron",
        "options": tyxe.LaplaceOptions(reduce=True, damping=True),
    },
    "diag": {"structure": "diag"},
    "empirical": {"structure": "kron", "curvature": "empirical"},
    "lowrank": {"structure": "lowrank", "options": tyxe.LaplaceOptions(rank=60)},
}

ESTIMATED = ("diag", "lowrank")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)).double()


def shard(rank, *parts):
    """Return uneven batches of what a process has, or of all."""
    rows = torch.arange(N) if rank is None else torch.arange(rank, N, WORLD)
    return list(zip(*(part[rows].split(3) for part in parts), strict=True))


def curvature(name, rank, **group):
    bnn = tyxe.LaplaceBNN(net(), NORMAL, Categorical(int(WEIGHTS.sum())), **CASES[name])
    bnn.fit_curvature(shard(rank, X, Y, WEIGHTS), **group)
    state = bnn.state
    # Of the first process: the others draw other probes.
    torch.manual_seed(0 if rank is None else rank)
    batches, how = shard(rank, X, Y, WEIGHTS), {"num_probes": 4, "num_steps": 4}
    estimate = tyxe.estimate_evidence(bnn, batches, **how, **group) if name in ESTIMATED else ()
    return {
        "estimate": torch.tensor(estimate),
        "precision": state.precision().to_dense(),
        "evidence": state.evidence(),
        "numbers": torch.tensor([state.curvature.error, state.curvature.num_targets]),
        "key": torch.tensor(state.curvature.key),
    }


def evaluated(rank, **group):
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=0.1)
    bnn = tyxe.VariationalBNN(net(), NORMAL, Categorical(N), guide)
    found = []
    for reduction in ("sum", "mean"):
        torch.manual_seed(1)
        found += bnn.evaluate(
            shard(rank, X, Y, WEIGHTS), num_predictions=4, reduction=reduction, **group
        )
    ignored = {"kind": (Y % 2).where(torch.arange(N) % 3 > 0, -100), "size": X[:, 0, 0, :1]}
    parts = Categorical(N, ignore_index=-100), HomoskedasticGaussian(N, scale=0.5)
    likelihood = tyxe.likelihoods.Joint(**dict(zip(ignored, parts, strict=True)))
    both = tyxe.VariationalBNN(KindAndSize(16).to(X), NORMAL, likelihood, guide)
    rows = torch.arange(N) if rank is None else torch.arange(rank, N, WORLD)
    batch = X[rows].flatten(1), {name: values[rows] for name, values in ignored.items()}
    torch.manual_seed(1)
    for scores in both.evaluate([batch], num_predictions=4, reduction="mean", **group):
        found += scores.values()
    return torch.stack([each.double() for each in found])


def ensemble(**group):
    """Four members, of which each process trains one or two."""

    def member(index):
        start = net()
        torch.manual_seed(index)
        tyxe.util.reset_parameters_(start)
        return mean_field(start, Categorical(N))

    bnn = tyxe.EnsembleBNN(member, 4)
    torch.manual_seed(5 if not group else 5 + torch.distributed.get_rank())
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    histories = bnn.fit(shard(None, X, Y), sgd, 2, **group)
    losses = torch.tensor([history.loss for history in histories])
    return {"losses": losses, **{n: p.detach() for n, p in bnn.named_parameters()}}


FIXED = {"adapt_step_size": False, "adapt_mass_matrix": False}


def chains(num_chains=3, seed=5, **options):
    bnn = tyxe.MCMC_BNN(net(), NORMAL, Categorical(N), tyxe.samplers.HMC(step_size=0.1, **FIXED))
    torch.manual_seed(seed)
    bnn.fit([(X, Y)], 4, warmup_steps=0, num_chains=num_chains, compile=False, **options)
    return dict(bnn.samples.items())


def started(**options):
    """Chains that start where each is told."""
    values = {f"net.{name}": p.detach() for name, p in net().named_parameters()}
    return chains(init={n: torch.stack([v, v + 20, v - 20]) for n, v in values.items()}, **options)


def uneven(group):
    with pytest.raises(ValueError, match="processes") as error:
        chains(4, process_group=group)
    return str(error.value)


def failing(rank, group):
    """One process has a class that there is not."""
    bnn = tyxe.LaplaceBNN(net(), NORMAL, Categorical(N))
    y = Y.clone()
    y[1] = 3 if rank == 1 else 0
    try:
        bnn.fit_curvature(shard(rank, X, y), process_group=group)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", bnn.net_guide.state is None
    return "", False


def dying(rank):
    """One process ends without a word."""
    group = torch.distributed.group.WORLD
    bnn = tyxe.LaplaceBNN(net(), NORMAL, Categorical(N))
    if rank == 1:
        os._exit(0)
    try:
        bnn.fit_curvature(shard(rank, X, Y), process_group=group)
    except RuntimeError as error:
        return type(error).__name__
    return ""


def work(rank):
    group = torch.distributed.group.WORLD
    found = {name: curvature(name, rank, process_group=group) for name in CASES}
    found["evaluated"] = evaluated(rank, process_group=group)
    found["ensemble"] = ensemble(process_group=group)
    found["chains"] = chains(process_group=group)
    found["started"] = started(process_group=group)
    found["uneven"] = uneven(group)
    found["failing"] = failing(rank, group)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    """What each of the processes found."""
    return processes.run(work, WORLD, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", CASES)
def test_the_curvature_of_all_data(found, name):
    whole = curvature(name, None)
    for process in found:
        for key in ("precision", "evidence", "numbers", "estimate"):
            torch.testing.assert_close(process[name][key], whole[key], rtol=1e-10, atol=1e-12)
        assert process[name]["key"] == found[0][name]["key"]


def test_the_evaluation_of_all_data(found):
    whole = evaluated(None)
    for process in found:
        torch.testing.assert_close(process["evaluated"], whole, rtol=1e-10, atol=1e-12)


def test_members_are_shared_out(found):
    whole = ensemble()
    for process in found:
        assert process["ensemble"].keys() == whole.keys()
        assert all(torch.equal(process["ensemble"][n], value) for n, value in whole.items())


def test_chains_are_shared_out(found):
    first, name = found[0]["chains"], "net.3.weight"
    for process in found:
        assert all(torch.equal(process["chains"][n], value) for n, value in first.items())
    assert first[name].shape == (3, 4, 3, 8)
    torch.manual_seed(5)
    seed = int(torch.randint(2**62, ()))
    for rank in range(WORLD):
        torch.testing.assert_close(chains(1, seed + rank)[name][0], first[name][rank])
    assert found[0]["uneven"].startswith("4 chains cannot be shared out evenly to 3 processes")


def test_chains_start_where_each_is_told(found):
    samples = found[0]["started"]["net.3.weight"][:, 0]
    means = samples.flatten(1).mean(1)
    assert abs(means[0]) < 2
    assert means[1] > 5
    assert means[2] < -5


def test_the_error_of_one_is_one_of_all(found):
    first, second, third = (process["failing"] for process in found)
    assert second[0].startswith("ValueError: targets lie outside the support of Categorical")
    for message, is_unchanged in (first, third):
        assert message.startswith("RuntimeError: 1 of 3 processes failed, and so do all")
        assert is_unchanged
    assert second[1]


def test_a_process_that_dies_is_an_error_of_all(tmp_path):
    first, second, third = processes.run(dying, WORLD, tmp_path)
    assert second is None
    assert "Error" in first
    assert "Error" in third


def test_each_point_is_of_one_process():
    group = torch.distributed.ProcessGroup(0, 1)
    with pytest.raises(ValueError, match="reduction='none' is of one process"):
        mean_field(net(), Categorical(N)).evaluate(X, Y, reduction="none", process_group=group)
