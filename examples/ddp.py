"""Data-parallel training: the loss curve of one process, by several.

    python examples/ddp.py
    torchrun --nproc_per_node=2 examples/ddp.py

Each process has its part of every batch, and PyTorch's DistributedDataParallel averages gradients:
`VariationalBNN.fit(..., parallel=DistributedDataParallel)` in the first half of the example, in the
second a loop of one's own on a `PytorchBNN`. All else is PyTorch's recipe as well: a process group,
a DistributedSampler, and batches of the global size over the number of processes. Processes talk
by NCCL where there is a GPU for each, else by gloo, on CPUs.

A small MLP on 1,536 of scikit-learn's digits, mean field, in float64, so that what differs between
one process and two is rounding. With `--draws same` (the default) every process has the same seed,
draws the same weights, and the steps are those of one process. With `--draws independent` each has
a seed of its own: the gradient is right on average, and its noise, averaged over processes, less.

Curves are kept in ddp.json by number of processes, so that the second of the commands above
compares its curves with the first's: the largest relative difference of an epoch's loss.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch
import torch.distributed
from _record import environment, recorded, save
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import tyxe

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--batch", type=int, default=64, help="of all processes together (default: 64)")
parser.add_argument("--epochs", type=int, default=20, help="number of epochs (default: 20)")
parser.add_argument("--draws", choices=["same", "independent"], default="same", help="see above")
parser.add_argument("--seed", type=int, default=0, help="of net and draws (default: 0)")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of figure and JSON")
parser.add_argument("--smoke-test", action="store_true", help="two epochs on 256 digits")
args = parser.parse_args()
torch.set_num_threads(1)  # each process: such a net is too small to share
torch.set_default_dtype(torch.float64)

# ------------------------------------------------------------------ as in any data-parallel program

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
count, epochs = (256, 2) if args.smoke_test else (1_536, args.epochs)
if not 1 <= args.batch <= count:
    parser.error(f"--batch is {args.batch}; expected a number from 1 to {count:,}, all points")
if epochs < 1:
    parser.error(f"--epochs is {epochs}; expected a positive number")
if args.batch % world:
    parser.error(
        f"a batch of {args.batch} cannot be shared out evenly among {world} processes, and its "
        f"points would count unequally; choose a --batch that {world} divides"
    )
on_gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpus else "cpu"
if on_gpus:
    torch.cuda.set_device(device)
parallel = None
if world > 1:
    torch.distributed.init_process_group("nccl" if on_gpus else "gloo")
    parallel = DistributedDataParallel

bunch = load_digits()
digits = TensorDataset(torch.tensor(bunch.data / 16)[:count], torch.tensor(bunch.target)[:count])
sampler = DistributedSampler(digits, world, rank, drop_last=True)
loader = DataLoader(digits, args.batch // world, sampler=sampler, drop_last=True)


def seed_draws():
    """Seed what comes after the nets are made, which all processes have alike."""
    torch.manual_seed(args.seed + (rank if args.draws == "independent" else 0))


# ------------------------------------------------------------------ VariationalBNN

torch.manual_seed(args.seed)
net = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10)).to(device)
prior = tyxe.priors.LayerwiseNormalPrior("radford")
guide = partial(tyxe.guides.AutoNormal, init_scale=0.05)
adam = partial(torch.optim.Adam, lr=5e-3)

bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(count), guide)
seed_draws()
history = bnn.fit(loader, adam, epochs, device=device, progress=False, parallel=parallel)
curves = {"VariationalBNN": history.loss}

# ------------------------------------------------------------------ PytorchBNN, in one's own loop

bnn = tyxe.PytorchBNN(net, prior, guide)
model = bnn if parallel is None else parallel(bnn)
optimizer = adam(model.parameters())
losses = torch.zeros(epochs, device=device)
seed_draws()
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        # A mean over this process's points, and the KL per point: both are averaged again.
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss = loss + bnn.cached_kl_loss / count
        loss.backward()
        optimizer.step()
        losses[epoch] += loss.detach() * count / len(loader)
if world > 1:
    torch.distributed.all_reduce(losses)
curves["PytorchBNN"] = (losses / world).tolist()

# ------------------------------------------------------------------ the first process reports


def difference(name, other):
    """Return the largest relative difference of an epoch's loss."""
    return max(abs(a / b - 1) for a, b in zip(curves[name], other["curves"][name], strict=True))


def plot(runs):
    """Draw the loss curves of all numbers of processes and kinds of draws."""
    figure, axes = plt.subplots(1, len(curves), figsize=(9, 3.5), layout="constrained")
    for ax, name in zip(axes, curves, strict=True):
        for (key, content), style in zip(runs.items(), ("-", "--", ":", "-.") * 9, strict=False):
            ax.plot(range(1, epochs + 1), content["curves"][name], style, label=key)
        ax.set(title=name, xlabel="epoch", ylabel="loss (nats)")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend()
    return figure


def report():
    """Print and keep the curves, next to those of other numbers of processes."""
    about = environment(args.seed)
    if world > 1:
        launcher = f"torchrun --nproc_per_node={world}"
        about["command"] = about["command"].replace("python", launcher, 1)
    path = args.out / "ddp.json"
    settings = {"points": count, "batch": args.batch, "epochs": epochs}
    runs = recorded(path, settings, args.seed).get("runs", {})
    key = f"{world} process" + ("es" if world > 1 else "")
    key += f", {args.draws} draws" if world > 1 else ""
    content = {"command": about["command"], "curves": curves}
    if world > 1 and "1 process" in runs:
        content["difference"] = {name: difference(name, runs["1 process"]) for name in curves}
    runs = {**runs, key: content}
    for name, curve in curves.items():
        compared = content.get("difference", {}).get(name)
        told = "" if compared is None else f"; from one process's at most {compared:.1e}"
        print(f"{key}, {name}: loss {curve[0]:.1f}, at the end {curve[-1]:.1f}{told}")
    save(args.out, "ddp", plot(runs), {**about, "settings": settings, "runs": runs})


if rank == 0:
    report()
if world > 1:
    torch.distributed.destroy_process_group()
