"""Potentials of all chains: against autograd row by row, and by a loop where vmap refuses."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tyxe.errors import TyxeWarning
from tyxe.samplers import batched

CHAINS, D = 5, 13


def net_energy(dtype=torch.double):
    """Return the energy of a net's 13 weights."""
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).to(dtype)
    x, y = torch.randn(7, 2, dtype=dtype), torch.randn(7, 1, dtype=dtype)
    shapes = {name: p.shape for name, p in net.named_parameters()}

    def energy(w):
        parts = w.split([shape.numel() for shape in shapes.values()])
        weights = {n: part.reshape(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}
        fits = (functional_call(net, weights, (x,)) - y).square().sum()
        return 0.5 * fits + 0.5 * w.square().sum()

    return energy


def by_autograd(energy, position):
    rows = [row.clone().requires_grad_() for row in position]
    values = [energy(row) for row in rows]
    gradients = [torch.autograd.grad(v, row)[0] for v, row in zip(values, rows, strict=True)]
    return torch.stack(values).detach(), torch.stack(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_chains_at_once_are_autograd_row_by_row(dtype):
    energy = net_energy(dtype)
    position = torch.randn(CHAINS, D, dtype=dtype)
    found = batched(energy, position[:1])(position)
    torch.testing.assert_close(found, by_autograd(energy, position))
    assert found[0].shape == (CHAINS,)
    assert all(one.dtype == dtype and not one.requires_grad for one in found)


def branches(w):
    return w.sin().square().sum() if bool(w.sum() < 1e9) else w.sum()


def counts_rows(w):
    # In a loop there is none of functorch's tensors.
    if torch._C._functorch.is_gradtrackingtensor(w):
        raise ValueError("this net counts rows\nand more")
    return w.square().sum()


@pytest.mark.parametrize(
    ("energy", "reason"), [(branches, ".*vmap"), (counts_rows, "this net counts rows$")]
)
def test_a_loop_takes_what_vmap_refuses_and_a_warning_says_why(energy, reason):
    position = torch.randn(CHAINS, D, dtype=torch.double)
    with pytest.warns(TyxeWarning, match=f"in a loop, .* does not take this net: {reason}"):
        looped = batched(energy, position)
    torch.testing.assert_close(looped(position), by_autograd(energy, position))


def test_what_a_loop_refuses_too_is_the_function_s_own_error():
    def energy(w):
        raise KeyError("no such site")

    with pytest.raises(KeyError, match="no such site"):
        batched(energy, torch.ones(2, 3))
