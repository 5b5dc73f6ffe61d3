"""Arguments without rows, parameters of no dimension, and batches of no point."""

import copy

import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.bnns import mean_field
from tests.oracles.curvature import jacobian_of, laplace
from tests.oracles.nets import NetOf
from tyxe.curvature import jacobian

pytestmark = pytest.mark.usefixtures("double")


class Flagged(nn.Module):
    """Takes a tensor and arguments that are none; its norm has no factors."""

    def __init__(self, recurrent):
        super().__init__()
        self.cell = nn.GRU(3, 3, batch_first=True) if recurrent else None
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 2)

    def forward(self, x, power, offset=None, how="tanh", scale=1.0):
        if self.cell is not None:
            x = self.cell(x[:, None])[0][:, 0]
        x = self.norm(x) ** power * scale
        x = x if offset is None else x + offset
        return self.head(x.tanh() if how == "tanh" else x)


ARGUMENTS = {
    "an int": lambda x: (x, 3),
    "None and a string": lambda x: (x, 1, None, "plain"),
    "by name": lambda x: {"x": x, "power": 2, "how": "plain", "offset": None},
    "a tensor that is a number": lambda x: {"x": x, "power": 1, "scale": torch.tensor(0.7)},
}


@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
@pytest.mark.parametrize(
    ("arguments", "recurrent"), [*((name, False) for name in ARGUMENTS), ("by name", True)]
)
def test_arguments_without_rows_are_the_same_for_all_points(arguments, structure, recurrent):
    torch.manual_seed(0)
    net, given = Flagged(recurrent), ARGUMENTS[arguments]
    bnn = laplace(net, structure)
    x, y = torch.randn(5, 3), torch.zeros(5).long()
    bnn.fit_curvature([(given(x[:3]), y[:3]), (given(x[3:]), y[3:])], progress=False)

    def inside(held, x):
        """The same net with its arguments inside."""
        arguments = given(x)
        if isinstance(arguments, dict):
            return held.inner(**arguments)
        return held.inner(*arguments)

    fixed = laplace(NetOf(inside, inner=copy.deepcopy(net)), structure)
    fixed.fit_curvature([(x, y)], progress=False)
    found, expected = (b.state.curvature.operator.to_dense() for b in (bnn, fixed))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    inputs = given(x)
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    bnn.fit_gp([(given(x[:3]), y[:3]), (given(x[3:]), y[3:])])
    fixed.fit_gp([(x, y)])
    for predictive in ("glm", "gp"):
        options = {"link": "probit", "predictive": predictive}
        found = bnn.predict(*arguments, batch_size=2, **options)
        torch.testing.assert_close(found, fixed.predict(x, **options), rtol=1e-9, atol=1e-12)


def test_batches_with_different_constants_do_not_make_one():
    bnn = laplace(Flagged(False))
    x, y = torch.randn(5, 3), torch.zeros(5).long()
    batches = [((x[:3], 1), y[:3]), ((x[3:], 2), y[3:])]
    bnn.fit_curvature(batches, progress=False)
    with pytest.raises(ValueError, match="is 1 in one batch and something else in another"):
        bnn.fit_gp(batches)


def test_arguments_that_cannot_be_taken_apart_are_refused():
    parts = {"norm": nn.LayerNorm(3), "head": nn.Linear(3, 2)}
    bnn = laplace(NetOf(lambda net, points: net.head(net.norm(points.x)), **parts))

    class Points:
        x = torch.randn(5, 3)

    with pytest.raises(TypeError, match="a Points has no rows to take apart: pass the net tensors"):
        bnn.fit_curvature([(Points(), torch.zeros(5).long())])


SITES = ["logit_scale", "encoder.weight", "encoder.bias", "head.weight", "head.bias"]
X, Y = torch.linspace(-1, 1, 10).double().view(5, 2), torch.arange(5) % 3


class Scaled(nn.Module):
    """Logits times the exponential of one number."""

    def __init__(self, looped=False):
        super().__init__()
        self.encoder, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        self.logit_scale, self.looped = nn.Parameter(torch.tensor(0.5)), looped

    def forward(self, x):
        if self.looped:  # torch.vmap takes no branch on a value
            assert bool(x.isfinite().all())
        return self.head(self.encoder(x).tanh()) * self.logit_scale.exp()


def fitted(structure):
    torch.manual_seed(0)
    bnn = laplace(Scaled(), structure)
    bnn.fit_curvature([(X[:2], Y[:2]), (X[2:], Y[2:])], progress=False)
    bnn.fit_gp([(X, Y)])
    return bnn


@pytest.mark.parametrize("looped", [False, True])
def test_gradients_of_a_scalar(looped):
    bnn = laplace(Scaled(looped))
    linear = bnn._linearize(X)
    found = linear.blocks.unflatten(jacobian(linear))
    expected = jacobian_of(bnn.to_module(), X, SITES)
    rows = torch.cat([found[f"net.{name}"].flatten(2) for name in SITES[1:]], 2)
    assert found["net.logit_scale"].shape == (5, 3)
    torch.testing.assert_close(found["net.logit_scale"], expected[..., 0])
    torch.testing.assert_close(rows, expected[..., 1:])


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_a_scalar_in_every_linearised_path(structure):
    bnn = fitted(structure)
    exact = bnn.net_guide.precision.diagonal().split(bnn.state.blocks.sizes)
    at = bnn.state.blocks.names.index("net.logit_scale")
    full = fitted("full").net_guide.precision.diagonal()
    torch.testing.assert_close(exact[at], full.split(bnn.state.blocks.sizes)[at])
    assert bnn.predict(X).shape == bnn.predict(X, predictive="gp").shape == (5, 3)
    assert bnn.predict(X, predictive="bnn", num_predictions=3).shape == (5, 3)
    assert bnn.refine([(X, Y)]).predict(X).shape == (5, 3)
    assert set(bnn.optimize_prior_precision(per_site=True)) == {*SITES[:2], "head.weight"}


@pytest.mark.parametrize("predictive", ["glm", "gp", "refined", "bnn"])
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
def test_no_point(structure, predictive):
    bnn = fitted(structure)
    by = bnn.refine([(X, Y)]).outputs if predictive == "refined" else predictive
    assert bnn.predict(X[:0], predictive=by).shape == (0, 3)
    assert [float(s) for s in bnn.evaluate(X[:0], Y[:0], predictive=by)] == [0.0, 0.0]
    assert bnn.functional_variance(X[:0]).shape == (0, 3, 3)
    assert bnn.functional_variance(X[:0], joint=True).shape == (0, 3, 0, 3)


@pytest.mark.parametrize(
    "likelihood",
    [
        tyxe.likelihoods.HomoskedasticGaussian(5, scale=0.5),
        tyxe.likelihoods.HeteroskedasticGaussian(5),
    ],
)
def test_no_point_of_a_normal_guide(likelihood):
    bnn = mean_field(nn.Linear(2, 2), likelihood)
    for predictive in ("bnn", "glm"):  # warnings are errors
        found = bnn.predict(X[:0], num_predictions=3, predictive=predictive)
        parts = found if isinstance(found, tuple) else (found,)
        assert all(part.shape == (0, 2) for part in parts)
