"""Data-parallel training: the loss curve of one process, by several.

    python experiments/run.py ddp
    torchrun --nproc_per_node=2 experiments/run.py ddp

Each process has its part of every batch, and PyTorch's DistributedDataParallel averages gradients:
`VariationalBNN.fit(..., parallel=DistributedDataParallel)`, and a loop of one's own on a
`PytorchBNN`. Mean field in float64, so that what differs between one process and two is rounding.
With `--draws same` every process draws the same weights; with `independent` each has a seed of its
own: the gradient is right on average.
"""

import os
from functools import partial

import common
import runner
import tables
import torch
import torch.distributed
from runner import RANK, WORLD
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tyxe

KINDS = ["VariationalBNN", "PytorchBNN"]


def check(s):
    if s.batch > s.points or s.batch % WORLD:
        message = f"expected at most --points {s.points}, and a number that {WORLD} divides"
        raise ValueError(f"--batch is {s.batch}; {message}")


def run(s, seed):
    """Return the loss curves of both kinds; every process calls this, and the first keeps them."""
    on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpus else "cpu"
    if on_gpus:
        torch.cuda.set_device(device)
    if WORLD > 1:
        torch.distributed.init_process_group("nccl" if on_gpus else "gloo")
    parallel = DistributedDataParallel if WORLD > 1 else None
    x, y = common.first(common.all_digits(), s.points)
    digits = TensorDataset(x.flatten(1), y)
    sampler = DistributedSampler(digits, WORLD, RANK, drop_last=True)
    loader = DataLoader(digits, s.batch // WORLD, sampler=sampler, drop_last=True)
    # The nets are made alike by all processes; draws come after.
    seed_of_draws = seed + (RANK if s.draws == "independent" else 0)
    torch.manual_seed(seed)
    net = common.mlp(64, 50, 10).to(device)
    prior = tyxe.priors.LayerwiseNormalPrior("radford")
    median = tyxe.guides.init_to_median
    guide = partial(tyxe.guides.AutoNormal, init_loc_fn=median, init_scale=0.05)
    adam, losses = partial(torch.optim.Adam, lr=5e-3), torch.zeros(s.epochs, device=device)
    bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(s.points), guide)
    torch.manual_seed(seed_of_draws)
    how = {"device": device, "progress": False, "parallel": parallel}
    history = bnn.fit(loader, adam, s.epochs, **how)
    bnn = tyxe.PytorchBNN(net, prior, guide)
    model = bnn if parallel is None else parallel(bnn)
    optimizer = adam(model.parameters())
    torch.manual_seed(seed_of_draws)
    for epoch in range(s.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            # A mean over this process's points, and the KL per point: both are averaged again.
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss = loss + bnn.cached_kl_loss / s.points
            loss.backward()
            optimizer.step()
            losses[epoch] += loss.detach() * s.points / len(loader)
    if WORLD > 1:
        torch.distributed.all_reduce(losses)
        torch.distributed.destroy_process_group()
    return {"curves": {KINDS[0]: history.loss, KINDS[1]: (losses / WORLD).tolist()}}


def cells(s, found):
    def in_float64(seed):
        torch.set_default_dtype(torch.float64)
        try:
            return run(s, seed)
        finally:
            torch.set_default_dtype(torch.float32)

    name = "1 process" if WORLD == 1 else f"{WORLD} processes, {s.draws} draws"
    for seed in s.seeds:
        yield (name, seed), partial(in_float64, seed)


def table(record):
    lines = []
    for (name, seed), cell in record.cells.items():
        one = record.cells.get(("1 process", seed), cell)
        for kind, curve in cell["curves"].items():
            pairs = zip(curve, one["curves"][kind], strict=True)
            far = "" if one is cell else f"{max(abs(a / b - 1) for a, b in pairs):.1e}"
            lines.append([name, kind, f"{curve[0]:.1f}", f"{curve[-1]:.1f}", far])
    columns = ["", "wrapper", "first epoch", "last epoch", "from one process's, at most"]
    return tables.markdown(columns, lines)


def figure(record):
    drawn, axes = tables.subplots(1, 2, figsize=(9, 3.5))
    for ax, kind in zip(axes, KINDS, strict=True):
        for index, ((name, _), cell) in enumerate(record.cells.items()):
            curve, style = cell["curves"][kind], ("-", "--", ":", "-.")[index % 4]
            ax.plot(range(1, len(curve) + 1), curve, style, label=name)
        ax.set(title=kind, xlabel="epoch", ylabel="loss (nats)")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend()
    return drawn


by = ("processes", "seed")
experiment = runner.Experiment("ddp", cells, table, figure, by, check=check)
