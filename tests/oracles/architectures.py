"""Nets that have to work unmodified, and inputs and targets for each."""

import contextlib
import functools
import warnings

import pyro.distributions as dist
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import tyxe
from tyxe.guides import AutoNormal, PretrainedInitializer
from tyxe.likelihoods import Categorical

N, CLASSES = 6, 3
NORMS = [nn.BatchNorm1d, nn.BatchNorm2d]
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=NORMS)


HANDLERS = {
    "plain": contextlib.nullcontext,
    "local reparameterisation": tyxe.poutine.local_reparameterization,
    "flipout": tyxe.poutine.flipout,
}


class Recurrent(nn.Module):
    """A recurrent net's mean output, classified."""

    def __init__(self, cell, **options):
        super().__init__()
        self.cell = cell(2, 4, batch_first=True, **options)
        self.head = nn.Linear(4 * (2 if options.get("bidirectional") else 1), CLASSES)

    def forward(self, x):
        return self.head(self.cell(x)[0].mean(1))


class Encoder(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class CrossAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, query, memory):
        return self.head(self.attention(query, memory, memory)[0].mean(1))


class TiedLanguageModel(nn.Module):
    """The head reads the embedding's matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embedding(tokens).mean(1))))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, CLASSES), nn.Linear(3, CLASSES)

    def forward(self, left, right):
        return self.left(left) * self.right(right)


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, CLASSES)
        self.register_buffer("shift", torch.tensor([0.5, -0.5]))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x):
        self.calls += 1
        return self.layer(x + self.shift)


class ListOfParameters(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrices = nn.ParameterList([torch.randn(2, 4), torch.randn(4, CLASSES)])
        self.named = nn.ParameterDict({"bias": torch.zeros(CLASSES), "scale": torch.ones(())})

    def forward(self, x):
        hidden = torch.tanh(x @ self.matrices[0]) @ self.matrices[1]
        return hidden * self.named["scale"] + self.named["bias"]


class Graph(nn.Module):
    """Sums over neighbours in a graph, given or its own."""

    def __init__(self, matrix=None):
        super().__init__()
        self.register_buffer("matrix", matrix)
        self.layer, self.head = nn.Linear(2, 4), nn.Linear(4, CLASSES)

    def forward(self, x, matrix=None):
        matrix = self.matrix if matrix is None else matrix
        return self.head(matrix @ torch.tanh(self.layer(x)))


def frozen_backbone():
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, CLASSES))
    return net.requires_grad_(False).append(nn.Linear(CLASSES, CLASSES))


def hooked():
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, CLASSES))
    net[0].register_forward_hook(lambda module, args, output: torch.tanh(output))
    net[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return net


def flat(n=2):
    return torch.randn(N, n)


def adjacency():
    return (torch.rand(N, N) > 0.5).float()


def adjacency_by_rows():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return adjacency().to_sparse_csr()


def image():
    return torch.randn(N, 1, 6, 6)


def sequence():
    return torch.randn(N, 5, 2)


def wide_sequence():
    return torch.randn(N, 5, 4)


def tokens():
    return torch.randint(0, CLASSES, (N, 4))


NETS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, CLASSES)), flat),
    "bare layer": (lambda: nn.Linear(2, CLASSES), flat),
    "CNN": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, stride=2, groups=2, dilation=2, padding=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4, CLASSES),
        ),
        image,
    ),
    "transposed convolution": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(1, 3, 2, stride=2), nn.Flatten(), nn.Linear(432, CLASSES)
        ),
        image,
    ),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(5, 3, 2), nn.Flatten(), nn.Linear(3, CLASSES)),
        sequence,
    ),
    "LSTM": (lambda: Recurrent(nn.LSTM), sequence),
    "deep bidirectional LSTM": (
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        sequence,
    ),
    "GRU": (lambda: Recurrent(nn.GRU), sequence),
    "TransformerEncoder": (Encoder, wide_sequence),
    "cross-attention": (CrossAttention, lambda: (wide_sequence(), torch.randn(N, 3, 3))),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(CLASSES, 4), nn.Flatten(), nn.Linear(16, CLASSES)),
        tokens,
    ),
    "tied embedding and head": (TiedLanguageModel, tokens),
    "LayerNorm": (
        lambda: nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES)),
        flat,
    ),
    "GroupNorm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, CLASSES)
        ),
        image,
    ),
    "several inputs, a tuple": (TwoInputs, lambda: (flat(), flat(3))),
    "several inputs, a mapping": (TwoInputs, lambda: {"right": flat(3), "left": flat()}),
    "buffers": (WithBuffers, flat),
    "frozen parameters": (frozen_backbone, flat),
    "weight_norm": (
        lambda: nn.Sequential(
            weight_norm(nn.Linear(2, 4)), nn.Tanh(), weight_norm(nn.Linear(4, CLASSES))
        ),
        flat,
    ),
    "hooks": (hooked, flat),
    "lists and dictionaries of parameters": (ListOfParameters, flat),
}
# Apart, since PyTorch has few operations for their tensors, such as comparisons.
SPARSE = {
    "a sparse buffer": (lambda: Graph(adjacency().to_sparse()), flat),
    "a sparse input": (Graph, lambda: (flat(), adjacency().to_sparse())),
    "a sparse input by rows": (Graph, lambda: (flat(), adjacency_by_rows())),
}


def targets():
    return torch.arange(N) % CLASSES


def make(net, guide=None, prior=PRIOR, likelihood=None):
    # Means start at the net's own values: at zero a product of layers has no gradient.
    start = PretrainedInitializer.from_net(net)
    guide = guide or functools.partial(AutoNormal, init_loc_fn=start, init_scale=0.05)
    return tyxe.VariationalBNN(net, prior, likelihood or Categorical(N), guide)
