"""A net with blocks, a tied pair and a frozen parameter, to choose parameters from."""

import torch
import torch.nn as nn

HEAD = ["head.weight", "head.bias"]


class Block(nn.Module):
    """A convolution and a norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)


class Net(nn.Module):
    """Two blocks, a tied pair, a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([Block(), Block()])
        self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(3, 1)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
