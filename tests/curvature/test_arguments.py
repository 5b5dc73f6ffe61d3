"""Arguments of a net without rows, and those that cannot be taken apart."""

import copy

import pytest
import torch
import torch.nn as nn

from tests.oracles.curvature import laplace


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
    x, y = torch.randn(5, 3).double(), torch.zeros(5).long()
    bnn.fit_curvature([(given(x[:3]), y[:3]), (given(x[3:]), y[3:])], progress=False)

    class Fixed(nn.Module):
        """The same net with its arguments inside."""

        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(net)

        def forward(self, x):
            arguments = given(x)
            if isinstance(arguments, dict):
                return self.inner(**arguments)
            return self.inner(*arguments)

    fixed = laplace(Fixed(), structure)
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
    x, y = torch.randn(5, 3).double(), torch.zeros(5).long()
    batches = [((x[:3], 1), y[:3]), ((x[3:], 2), y[3:])]
    bnn.fit_curvature(batches, progress=False)
    with pytest.raises(ValueError, match="is 1 in one batch and something else in another"):
        bnn.fit_gp(batches)


def test_arguments_that_cannot_be_taken_apart_are_refused():
    class OfPoints(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 2)

        def forward(self, points):
            return self.head(self.norm(points.x))

    class Points:
        def __init__(self, x):
            self.x = x

    bnn = laplace(OfPoints())
    with pytest.raises(TypeError, match="a Points has no rows to take apart: pass the net tensors"):
        bnn.fit_curvature([(Points(torch.randn(5, 3).double()), torch.zeros(5).long())])
