"""Covariances of outputs under a precision of low rank, against the dense Jacobian."""

import functools

import pytest
import torch
import torch.nn as nn

from tests.curvature.test_against_loops import made
from tests.oracles.curvature import dense_jacobian, low_rank_precision
from tyxe.curvature import Linearization, functional_covariance, gradients, output_covariance
from tyxe.curvature.linearize import Linearized
from tyxe.linalg import BlockDiagonal, LowRank

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def expected(rows, precision, outputs):
    """`J_n Lambda^-1 J_n^T` of each point, from a Jacobian `(n, outputs, P)`."""
    return (rows @ torch.linalg.inv(precision.to_dense()) @ rows.mT).reshape(*outputs.shape, -1)


def image_net():
    return nn.Sequential(
        *(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh()),
        *(nn.Conv2d(3, 4, 3, stride=3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
    )


@pytest.mark.parametrize("budget", [1, 200, 2**20])
@pytest.mark.parametrize("in_rows", [True, False])
def test_blocks_are_taken_by_whichever_way_is_shorter_in_pieces(monkeypatch, budget, in_rows):
    monkeypatch.setattr(output_covariance, "CACHED_ROWS", budget)
    monkeypatch.setattr(gradients, "BUDGET", budget)
    ways, plain = [], output_covariance._is_shorter_by_positions

    def looked(*given):
        ways.append(plain(*given))
        return ways[-1]

    monkeypatch.setattr(output_covariance, "_is_shorter_by_positions", looked)
    bnn, values, x, linearize = made((image_net, (5, 2, 6, 6)))
    linear = linearize(x)
    precision = low_rank_precision(linear.blocks, 7, "of sites")
    if not in_rows:
        precision = LowRank(precision.entries, precision.factor.contiguous())
    found = functional_covariance(linear, BlockDiagonal({"all": precision}))
    rows = dense_jacobian(bnn, values, x, linear.blocks)
    close(found.detach(), expected(rows, precision, linear.outputs))
    assert ways == [False, True, True]  # 36 positions, 4 and 1


def in_single_precision(bnn, values, x):
    values = {name: value.float() for name, value in values.items()}
    shapes = {name: value.shape for name, value in values.items()}
    return Linearization(bnn.float()._run_frozen, values, x.float(), shapes)


@pytest.mark.parametrize("kind", ["of sites", "of weights"])
def test_points_whose_gradients_are_explained_keep_their_digits(kind):
    """Of two points the posterior is 1e3 times narrower than the prior."""
    bnn, values, x, linearize = made((image_net, (5, 2, 6, 6)))
    linear = linearize(x)
    rows = dense_jacobian(bnn, values, x, linear.blocks)
    entries = low_rank_precision(linear.blocks, 1, kind).entries
    precision = LowRank(entries, 1e3 * rows[1:3].flatten(0, 1).mT)
    exact = expected(rows, precision, linear.outputs)
    assert float(exact[1].norm()) < 1e-5 * float(exact[0].norm())
    narrow = in_single_precision(bnn, values, x)
    found = functional_covariance(narrow, BlockDiagonal({"all": precision.to(torch.float32)}))
    error = (found.detach() - exact).flatten(1).norm(dim=1)
    assert bool((error < 1e-3 * exact.flatten(1).norm(dim=1)).all())


@pytest.mark.parametrize(("most", "backwards"), [({}, 3), ({"cpu": 2**20}, 1)])
def test_another_batch_of_a_kind_takes_few_backwards(monkeypatch, most, backwards):
    monkeypatch.setattr("tyxe.curvature.linearize.MOST_AT_ONCE", most)
    bnn, values, x, _ = made((image_net, (5, 2, 6, 6)))
    known, calls, plain = Linearized(), [], Linearization._gradients

    def counted(*given):
        calls.append(given)
        return plain(*given)

    monkeypatch.setattr(Linearization, "_gradients", counted)
    shapes = {name: value.shape for name, value in values.items()}
    for _ in range(2):
        linear = Linearization(bnn._run_frozen, values, x, shapes, known)
        precision = BlockDiagonal({"all": low_rank_precision(linear.blocks, 2, "of sites")})
        calls.clear()
        functional_covariance(linear, precision)
    assert len(calls) == backwards


def test_biases_without_curvature_do_not_enter_by_rounding():
    """A norm takes the bias of a convolution away again, and the prior leaves it wide."""

    def net():
        norm = nn.InstanceNorm1d(4)
        return nn.Sequential(nn.Conv1d(2, 4, 1), norm, nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))

    bnn, values, x, linearize = made((net, (5, 2, 3)))
    rows = dense_jacobian(bnn, values, x, linearize(x).blocks)
    entries = torch.ones(rows.shape[-1]).double()
    entries[:12].view(4, 3)[:, -1] = 1e-10  # a convolution's biases
    precision = LowRank(entries, 0.1 * torch.ones(len(entries), 1).double())
    linear = in_single_precision(bnn, values, x)
    found = functional_covariance(linear, BlockDiagonal({"all": precision.to(torch.float32)}))
    exact = expected(rows, precision, linear.outputs)
    assert float((found - exact).norm()) < 1e-3 * float(exact.norm())
