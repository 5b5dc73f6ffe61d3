"""Variational Laplace in two processes has the gradient that one process averages over batches."""

import functools
from pathlib import Path

import pyro.distributions as dist
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tyxe
from tyxe.bnn.elbo import elbo_terms
from tyxe.poutine import variational_laplace


class Objective(nn.Module):
    """What a process trains: minus the ELBO of its share of the batch."""

    def __init__(self, bnn):
        super().__init__()
        self.bnn = bnn

    def forward(self, x, y):
        terms = elbo_terms(self.bnn.model, self.bnn.guide, x, y)
        return terms.kl - terms.data


def parts():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 4), nn.Softplus(), nn.Linear(4, 3)).double()
    bnn = tyxe.VariationalBNN(
        net,
        tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0)),
        tyxe.likelihoods.Categorical(8),
        functools.partial(tyxe.guides.AutoNormal, init_scale=0.1),
    )
    return Objective(bnn), torch.randn(8, 2, dtype=torch.float64), torch.randint(3, (8,))


def share(rank, x, y):
    return x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4]


def gradients(objective, rank, x, y):
    torch.manual_seed(1 + rank)  # of the pseudo-labels
    objective.zero_grad()
    with variational_laplace():
        objective(*share(rank, x, y)).backward()
    return {n: p.grad.clone() for n, p in objective.named_parameters() if p.grad is not None}


def worker(rank, folder):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    objective, x, y = parts()
    found = gradients(DistributedDataParallel(objective), rank, x, y)
    if rank == 0:
        torch.save({n.removeprefix("module."): g for n, g in found.items()}, f"{folder}/found.pt")
    torch.distributed.destroy_process_group()


def test_two_processes_average_their_objectives(tmp_path: Path):
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=2)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    objective, x, y = parts()
    first, second = (gradients(objective, rank, x, y) for rank in (0, 1))
    assert found.keys() == first.keys()
    assert first
    for name, gradient in found.items():
        assert torch.allclose(gradient, (first[name] + second[name]) / 2, rtol=1e-12)
