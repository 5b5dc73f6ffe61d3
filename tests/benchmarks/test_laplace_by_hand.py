"""Curvature, evidence and predictions by hand are ours, and those of the peers."""

import json
import math
from typing import Any

import pytest
import torch

from tests.benchmarks.places import BENCHMARKS, Helper


def laplace_pair(helper: Helper, structure: str, last: bool = False) -> tuple[Any, Any, Any]:
    """Return Laplace by hand and ours on the small CNN, and its data, in float64."""
    script, by_hand = helper("laplace"), helper("_laplace_by_hand")
    net = script.cnn(True).double()
    batches = [(x.double(), y) for x, y in script.data(True)]
    batches = [(x[half], y[half]) for x, y in batches for half in (slice(5), slice(5, None))]
    bnn = script.make_bnn(net, script.points_in(batches), structure, last=last)
    bnn.fit_curvature(batches, progress=False)
    return by_hand.HandLaplace(net), bnn, batches


def blocks_of(bnn: Any) -> list[torch.Tensor]:
    return [block.to_dense() for block in bnn.state.curvature.operator.blocks.values()]


def by_eigen(eigen: Any) -> torch.Tensor:
    basis = torch.kron(eigen.gradient_basis, eigen.input_basis)
    return (basis * eigen.values.flatten()) @ basis.mT


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_kron_by_hand_is_ours(helper: Helper) -> None:
    hand, bnn, batches = laplace_pair(helper, "kron")
    hand.kron(batches, helper("_laplace_by_hand").softmax_roots)
    for eigen, block in zip(hand.eigen.values(), blocks_of(bnn), strict=True):
        torch.testing.assert_close(by_eigen(eigen), block, rtol=1e-8, atol=1e-10)
    x = batches[0][0]
    predicted = bnn.predict(x, link="probit").exp()
    torch.testing.assert_close(hand.predict(x).detach(), predicted, rtol=1e-8, atol=1e-10)
    hand.ascend(1_000)
    assert hand.precision == pytest.approx(float(bnn.optimize_prior_precision()), rel=1e-4)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_diag_by_hand_is_ours(helper: Helper) -> None:
    hand, bnn, batches = laplace_pair(helper, "diag")
    hand.diag(batches, helper("_laplace_by_hand").softmax_roots)
    for diagonal, block in zip(hand.diagonal.values(), blocks_of(bnn), strict=True):
        torch.testing.assert_close(diagonal.flatten(), block.diagonal(), rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("structure", ["kron", "full"])
def test_last_layer_by_hand_is_ours(helper: Helper, structure: str) -> None:
    hand, bnn, batches = laplace_pair(helper, structure, last=True)
    x = batches[0][0]
    (block,) = blocks_of(bnn)
    if structure == "kron":
        hand.head_kron(batches)
        torch.testing.assert_close(by_eigen(hand.head_eigen), block, rtol=1e-8, atol=1e-10)
        predicted = hand.head_predict_kron(x)
    else:
        hand.head_full(batches)
        torch.testing.assert_close(hand.head_matrix, block, rtol=1e-8, atol=1e-10)
        hand.head_factorize()
        predicted = hand.head_predict_full(x)
    torch.testing.assert_close(
        predicted, bnn.predict(x, link="probit").exp(), rtol=1e-8, atol=1e-10
    )


def test_sampled_residuals_by_hand_have_the_fisher_as_their_second_moment(helper: Helper) -> None:
    by_hand = helper("_laplace_by_hand")
    torch.manual_seed(0)
    count = 20_000
    logits = torch.tensor([[0.3, -1.0, 2.0]]).double().expand(count, 3)
    (residuals,) = by_hand.sampled_residuals(logits)
    each = residuals.unsqueeze(2) * residuals.unsqueeze(1)
    roots = torch.stack([column[0] for column in by_hand.softmax_roots(logits)], 1)
    error = each.std(0) / math.sqrt(count)
    assert bool(((each.mean(0) - roots @ roots.mT).abs() <= 5 * error).all())


def test_conventions_were_compared_with_the_peers() -> None:
    """What is recorded covers every structure and agrees; peers are not part of this project."""
    path = BENCHMARKS / "results" / "conventions" / "laplace_torch.json"
    found = json.loads(path.read_text())
    assert {"laplace-torch", "curvlinops-for-pytorch", "torch", "tyxe"} <= set(found["versions"])
    assert all(row["difference"] < found["tolerance"] for row in found["rows"])
    what = {(row["net"], row["what"]) for row in found["rows"]}
    for net in ("mlp", "cnn"):
        for name in ("full GGN", "diag GGN", "kron GGN, expand", "kron GGN, reduce"):
            assert (net, name) in what
        for structure in ("full GGN", "diag GGN", "kron GGN, expand, without biases"):
            assert (net, f"evidence, {structure}") in what
            assert (net, f"functional variance, {structure}") in what
