"""Flipout's signs belong to data points, whatever rows a linear map sees."""

from collections.abc import Callable

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

import tyxe
from tyxe.poutine import flipout

pytestmark = pytest.mark.usefixtures("double")
# Norms are no linear maps, and would be drawn plainly.
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.LayerNorm])
POINTS, POSITIONS, FEATURES = 5, 7, 4


class SelfAttention(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x)[0]
        return out


def of_net(net: nn.Module) -> tyxe.VariationalBNN:
    start = tyxe.guides.PretrainedInitializer.from_net(net)
    return tyxe.VariationalBNN(
        net,
        PRIOR,
        tyxe.likelihoods.HomoskedasticGaussian(POINTS, scale=1.0),
        lambda model: tyxe.guides.AutoNormal(model, init_loc_fn=start, init_scale=0.3),
    )


def outputs(net: nn.Module, x: Tensor, batch_dim: int, draws: int = 1) -> Tensor:
    bnn = of_net(net)
    with flipout(batch_dim):
        found: Tensor = bnn.predict(x, num_predictions=draws, aggregate=False)
    return found


def alike_at_all_positions(batch_dim: int) -> Tensor:
    """Points that have the same features at each of their positions."""
    x = torch.randn(POINTS, 1, FEATURES).expand(-1, POSITIONS, -1)
    return x if batch_dim == 0 else x.transpose(0, 1)


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "attention, batch first": (lambda: SelfAttention(True), 0),
    "attention, sequence first": (lambda: SelfAttention(False), 1),
    "a whole layer, batch first": (
        lambda: nn.TransformerEncoderLayer(FEATURES, 2, 8, 0.0, batch_first=True),
        0,
    ),
    "a whole layer, sequence first": (lambda: nn.TransformerEncoderLayer(FEATURES, 2, 8, 0.0), 1),
    "linear, sequence first": (lambda: nn.Linear(FEATURES, 3), 1),
    "linear, batch first": (lambda: nn.Linear(FEATURES, 3), 0),
}


@pytest.mark.parametrize("name", NETS)
def test_positions_of_a_point_meet_one_draw(name: str) -> None:
    make, batch_dim = NETS[name]
    found = outputs(make(), alike_at_all_positions(batch_dim), batch_dim)[0]
    found = found if batch_dim == 0 else found.transpose(0, 1)
    torch.testing.assert_close(found, found[:, :1].expand_as(found))


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_points_have_signs_of_their_own(batch_dim: int) -> None:
    x = torch.ones(POINTS, POSITIONS, FEATURES)
    found = outputs(nn.Linear(FEATURES, 6), x if batch_dim == 0 else x.transpose(0, 1), batch_dim)
    at_points = found[0].select(1 - batch_dim, 0)
    assert len(at_points.unique(dim=0)) == POINTS


def test_a_sequence_without_a_batch_is_one_point() -> None:
    x = torch.randn(1, FEATURES).expand(POSITIONS, -1)
    found = outputs(SelfAttention(True), x, 0)[0]
    torch.testing.assert_close(found, found[:1].expand_as(found))


@pytest.mark.parametrize("batch_first", [True, False])
def test_pooled_outputs_have_the_variance_of_plain_draws(batch_first: bool) -> None:
    net = SelfAttention(batch_first)
    x = alike_at_all_positions(0 if batch_first else 1)
    positions = 2 if batch_first else 1
    draws = 1200
    flipped = outputs(net, x, 0 if batch_first else 1, draws).mean(positions)
    bnn = of_net(net)
    plain = bnn.predict(x, num_predictions=draws, aggregate=False).mean(positions)
    # Variances of some ten numbers a point, each with a relative error of sqrt(2 / draws).
    ratio = flipped.var(0).sum() / plain.var(0).sum()
    assert float(ratio) == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("given", [-1, "first"])
def test_a_batch_dim_that_is_none(given: object) -> None:
    with pytest.raises((TypeError, ValueError), match=r"batch_dim is .*; expected"):
        flipout(given)  # type: ignore[arg-type]
