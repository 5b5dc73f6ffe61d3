"""Logits of two-valued weights, and all of their values."""

import torch

SHAPE = (3, 2)
SCALES = [1.0, 0.2]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def logits(*shape):
    return 2 * torch.randn(*shape).double()


def each_value(q):
    """Values and their probabilities, along the first dimension."""
    values = q.enumerate_support()
    return values, q.log_prob(values).exp()
