"""For binary.py and binary_continual.py: nets, batches, and straight-through training."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset


def batches(x, y, size):
    """Return a loader of shuffled batches."""
    dataset = TensorDataset(x, y)
    sampler = BatchSampler(RandomSampler(dataset), size, drop_last=False)
    return DataLoader(dataset, sampler=sampler, batch_size=None)


def fully_connected(sizes):
    """Return layers of tanh units without biases: every parameter can be binary."""
    layers = [
        module
        for columns, rows in pairwise([784, *sizes])
        for module in (nn.Linear(columns, rows, bias=False), nn.Tanh())
    ]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(sizes[-1], 10, bias=False))


def convolutional(sizes):
    """Return [T 4.1.3]'s net: two convolutions, each max-pooled, and two linear maps."""
    a, b, c = sizes
    return nn.Sequential(
        *(nn.Conv2d(1, a, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.Tanh()),
        *(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.Tanh()),
        *(nn.Flatten(), nn.Linear(49 * b, c, bias=False), nn.Tanh()),
        nn.Linear(c, 10, bias=False),
    )


NETS = {"cnn": convolutional, "mlp": fully_connected}


class Sign(nn.Module):
    """A weight `s sign(u)` whose gradient passes straight through to the real number `u`.

    Args:
        scale: `s`.
    """

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, real):
        """Return the two values; as far as gradients know, `s u`."""
        signs = torch.where(real < 0, -1.0, 1.0)
        return self.scale * (real + (signs - real).detach())

    def right_inverse(self, weight):
        """Return where `u` starts: at a net's own weights, in units of the scale."""
        return (weight / self.scale).clamp(-1, 1)


def by_sign_(net):
    """Make every weight of a net one of two values, `1 / sqrt(fan_in)` and its negative."""
    for module in net:
        if isinstance(module, nn.Linear | nn.Conv2d):
            sign = Sign(module.weight[0].numel() ** -0.5)
            parametrize.register_parametrization(module, "weight", sign)
    return net


def fit(net, loader, epochs, rate, decays=(), clip=False):
    """Minimise the cross-entropy by Adam.

    Args:
        net: a plain net, or one of `by_sign_`.
        loader: batches.
        epochs: how often to go through it.
        rate: Adam's first; a tenth of it after each of the decays.
        decays: as shares of the epochs.
        clip: keep what `by_sign_` takes the sign of in [-1, 1].
    """
    adam = torch.optim.Adam(net.parameters(), lr=rate)
    schedule = stepwise(adam, epochs, decays)
    net.train()
    for _ in range(epochs):
        for x, y in loader:
            adam.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            adam.step()
            if clip:
                with torch.no_grad():
                    for parameter in net.parameters():
                        parameter.clamp_(-1, 1)
        schedule.step()
    return net


def stepwise(optimizer, epochs, decays):
    """Return a schedule that divides the rate by ten after these shares of the epochs."""
    milestones = [max(1, round(share * epochs)) for share in decays]
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)


@torch.no_grad()
def probabilities(net, x):
    """Return a plain net's class probabilities."""
    return torch.cat([net(part).softmax(-1) for part in x.split(500)])


def weight_entropy(bnn):
    """Return the mean entropy of a weight in nats, of all sites and of each; log 2 is a coin's."""
    posteriors = bnn.net_guide.get_detached_distributions()
    sums = {name: q.entropy().item() for name, q in posteriors.items()}
    counts = {name: q.event_shape.numel() for name, q in posteriors.items()}
    by_site = {name: sums[name] / counts[name] for name in sums}
    return sum(sums.values()) / sum(counts.values()), by_site
