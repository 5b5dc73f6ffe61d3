"""Nets that several tests use, and BNNs whose posteriors are not at their starting point."""

import pyro.distributions as dist
import torch
from torch import nn

import tyxe


class NetOf(nn.Module):
    """A net of named parts, whose forward is a function of it and of its inputs."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs, **named):
        return self.function(self, *inputs, **named)


class ReadLast(nn.Module):
    """A recurrent layer and a head on its last output, for `(n, T)` numbers or `(n, T, D)`."""

    def __init__(self, cell, inputs, hidden, outputs, **options):
        super().__init__()
        self.cell = cell(inputs, hidden, batch_first=True, **options)
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x):
        x = x[..., None] if x.dim() < 3 else x
        return self.head(self.cell(x)[0][:, -1])


class Rounded(nn.Linear):
    """A layer of two inputs whose output is in another precision, as under autocast."""

    def __init__(self, outputs, dtype, then=None):
        super().__init__(2, outputs)
        self.dtype, self.then = dtype, then or dtype

    def forward(self, x):
        return super().forward(x).to(self.dtype).to(self.then)


class KindAndSize(nn.Linear):
    """Two logits and a number for each point, for `kind_and_size`."""

    def __init__(self, features):
        super().__init__(features, 3)

    def forward(self, x):
        found = super().forward(x)
        return {"kind": found[:, :2], "size": found[:, 2:]}


def kind_and_size(n, scale=0.5):
    size = tyxe.likelihoods.HomoskedasticGaussian(n, scale=scale)
    return tyxe.likelihoods.Joint(kind=tyxe.likelihoods.Categorical(n), size=size)


def bnn_of(net, x=None, *, dataset_size=10, guide=tyxe.guides.AutoNormal, likelihood=None, **rules):
    """Return a float64 BNN with a mean-field posterior whose means and scales all differ."""
    bnn = tyxe.VariationalBNN(
        net.double(),
        tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0), **rules),
        likelihood or tyxe.likelihoods.HomoskedasticGaussian(dataset_size, scale=1.0),
        guide,
    ).double()
    disturb_(bnn.net_guide)
    return bnn


def disturb_(guide):
    """Draw means about 0 and standard deviations about 0.4."""
    with torch.no_grad():
        for name, parameter in guide.named_parameters():
            if "scale" in name:
                parameter.copy_(0.4 * torch.randn_like(parameter) - 1.0)
            else:
                parameter.copy_(0.7 * torch.randn_like(parameter))


def posterior_moments(bnn, name):
    """`(mean, variance)` of a parameter; variance 0 where it is no site."""
    if name not in tyxe.util.pyro_sample_sites(bnn.net):
        parameter = dict(bnn.net.named_parameters()).get(name)
        return None if parameter is None else (parameter.detach(), torch.zeros_like(parameter))
    loc, scale = bnn.net_guide.get_loc(name), bnn.net_guide.get_scale(name)
    return loc.detach(), scale.detach().square()


def draws(bnn, x, count, handler=None):
    """Raw outputs `(count, ...)` of the net in train mode, for draws of the guide."""
    with torch.no_grad():
        if handler is None:
            return torch.stack([bnn.guided_forward(*_tuple(x)) for _ in range(count)])
        with handler:
            return torch.stack([bnn.guided_forward(*_tuple(x)) for _ in range(count)])


def _tuple(x):
    return x if isinstance(x, tuple) else (x,)
