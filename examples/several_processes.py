"""Data-parallel training by several processes: PyTorch's recipe, and one argument of `fit`.

    python examples/several_processes.py
    torchrun --standalone --nproc_per_node=2 examples/several_processes.py

Each process has its part of every batch, and DistributedDataParallel averages gradients. Here a
small net learns scikit-learn's digits on CPUs, by gloo: it shows what to write, and saves no time.
Each process draws its own weights, so gradients are less noisy; one process and two end at equally
good but not identical results.

For your own net change data and net. For GPUs take the backend "nccl", call `torch.cuda.set_device`
with LOCAL_RANK, move the BNN by `.to("cuda")`, and pass `device="cuda"` to `fit`.

Needs the extra `examples`: pip install -e ".[examples]". About 10 seconds.
"""

import argparse
import os
from functools import partial

import pyro.distributions as dist
import torch
import torch.distributed
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tyxe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="one epoch, in seconds: no result")
epochs = 1 if parser.parse_args().smoke_test else 60
torch.set_num_threads(1)  # processes share the processors

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # by torchrun
parallel = None
if world > 1:
    torch.distributed.init_process_group("gloo")
    parallel = DistributedDataParallel

torch.manual_seed(0)  # the same split everywhere
bunch = load_digits()
order = torch.randperm(len(bunch.target))
x, y = torch.tensor(bunch.data).float()[order] / 16, torch.tensor(bunch.target)[order]
train = TensorDataset(x[:1_280], y[:1_280])
# drop_last: batches of different sizes would count their points unequally.
sampler = DistributedSampler(train, world, rank, drop_last=True)
loader = DataLoader(train, batch_size=64 // world, sampler=sampler, drop_last=True)

net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
likelihood = tyxe.likelihoods.Categorical(len(train))  # all points, not those of this process
guide = partial(tyxe.guides.AutoNormal, init_scale=0.05)
bnn = tyxe.VariationalBNN(net, prior, likelihood, guide)
torch.manual_seed(rank)  # from here on draws of its own for each process
with tyxe.poutine.local_reparameterization():
    history = bnn.fit(loader, partial(torch.optim.Adam, lr=5e-3), epochs, parallel=parallel)

if rank == 0:  # the posterior is the same in every process; predict and save in one
    error, log_likelihood = bnn.evaluate(x[1_280:], y[1_280:], reduction="mean")
    print(f"processes: {world}, points in a process's batch: {64 // world}")
    print(f"loss from {history.loss[0]:.0f} to {history.loss[-1]:.0f} nats")
    print(f"test digits: error {100 * error:.1f} %, log-likelihood {log_likelihood:.3f}")
if world > 1:
    torch.distributed.destroy_process_group()
