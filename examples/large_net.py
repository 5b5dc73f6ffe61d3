"""A net whose activations do not fit: checkpoints, several batches a step, half precision.

A deep residual net on scikit-learn's digits is trained three times by `fit`: plainly; with blocks
that keep no activations but run again in the backward, with the draws of the forward; and also with
steps of four batches (`accumulate_steps`) in bfloat16 (`autocast`), where linear maps are in half
precision, and the KL and variances in float32. The errors are about the same, as expected: the
first two take the same steps. On a CPU, bfloat16 is slower and not faster. There are 200 weights
for each image, so the KL counts a thousandth (`beta`).

For your own net wrap its blocks as `Checkpointed` does, with use_reentrant=False, and give `fit`
batches that fit. Steps of k batches of n points are those of one batch of k n points.

Needs the extra `examples`: pip install -e ".[examples]". About 30 seconds.
"""

import argparse
import time
from functools import partial

import pyro.distributions as dist
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import tyxe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="one epoch, in seconds: no result")
epochs, train = (1, 200) if parser.parse_args().smoke_test else (20, 1200)
torch.set_num_threads(1)  # such a net is too small to share

bunch = load_digits()
x, y = torch.tensor(bunch.data).float() / 16, torch.tensor(bunch.target)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def kept(bnn, x):
    """Return the MB of activations that a forward keeps for its backward, each tensor once."""
    sizes = {}
    held = {p.data_ptr() for p in bnn.parameters()}

    def look(tensor):
        if tensor.data_ptr() not in held:
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(look, lambda tensor: tensor):
        outputs = bnn(x)
    assert outputs.requires_grad
    return sum(sizes.values()) / 1e6


rows = {
    "as it is": (Block, 400, {}),
    "checkpointed": (Checkpointed, 400, {}),
    "checkpointed, 4 batches, bfloat16": (
        *(Checkpointed, 100),
        {"accumulate_steps": 4, "autocast": torch.bfloat16},
    ),
}
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.LayerNorm])
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2)
print(f"{'a step':36}{'MB kept':>10}{'seconds':>10}{'errors, %':>12}")
for name, (block, batch, options) in rows.items():
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(x[:train], y[:train]), batch_size=batch, shuffle=True)
    net = nn.Sequential(nn.Linear(64, 64), *(block(64) for _ in range(8)), nn.Linear(64, 10))
    bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Categorical(train), guide)
    start = time.perf_counter()
    bnn.fit(loader, partial(torch.optim.Adam, lr=3e-3), epochs, beta=1e-3, **options)
    seconds = time.perf_counter() - start
    error, _ = bnn.evaluate(x[train:], y[train:], num_predictions=8, reduction="mean")
    print(f"{name:36}{kept(bnn, x[:batch]):10.1f}{seconds:10.1f}{100 * error:12.1f}")
