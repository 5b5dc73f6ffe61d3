"""Bodies in other types than the sites: inference is in the sites' type."""

import functools
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import nn

import tyxe
from tyxe.diagnostics.case import Case
from tyxe.diagnostics.inference import slope
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.priors import IIDPrior

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
N = 8
X = torch.linspace(-1, 1, 3 * N).view(N, 3)
Y = X[:, :1].sin()
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


class Net(nn.Module):
    """A frozen body, of numbers that all types have, and a head in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        numbers = torch.tensor([[1, -1, 2, 0], [0, 1, -2, 1], [2, 1, 0, -1]])
        self.body = nn.Parameter(numbers.to(dtype), requires_grad=False)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        kind = torch.float32 if self.body.dtype == torch.int8 else self.body.dtype
        h = torch.tanh(x.to(kind) @ self.body.to(kind))
        return self.head((h.real if h.is_complex() else h).float())


class Spectral(nn.Module):
    """A Fourier layer, whose complex weights are trained, before a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.ones(2, dtype=torch.cfloat)), nn.Linear(3, 1)

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.w, n=x.shape[-1]))


def variational(guide: Any) -> Any:
    def fit(net: nn.Module) -> Any:
        bnn = tyxe.VariationalBNN(net, IIDPrior(dist.Normal(0, 1)), LIKELIHOOD, guide)
        bnn.fit([(X, Y)], ADAM, 2, clip_norm=0.1)
        return bnn.predict(X, num_predictions=2)

    return fit


def laplace(structure: str) -> Any:
    def fit(net: nn.Module) -> Any:
        bnn = tyxe.LaplaceBNN(net, IIDPrior(dist.Normal(0, 1)), LIKELIHOOD, structure=structure)
        bnn.fit([(X, Y)], ADAM, 2)
        bnn.optimize_prior_precision()
        bnn.fit_gp([(X, Y)], 6)
        evidence, refined = bnn.log_marginal_likelihood(), bnn.refine([(X, Y)]).predict(X)
        return *bnn.predict(X), *bnn.predict(X, predictive="gp"), evidence, *refined

    return fit


def chains(kernel: Any, **options: Any) -> Any:
    def fit(net: nn.Module) -> Any:
        bnn = tyxe.MCMC_BNN(net, IIDPrior(dist.Normal(0, 1)), LIKELIHOOD, kernel)
        bnn.fit([(X, Y)], num_samples=4, progress=False, **options)
        return bnn.predict(X, num_predictions=2)

    return fit


LIKELIHOOD = HomoskedasticGaussian(N, scale=0.5)
FITS = {
    "mean field": variational(tyxe.guides.AutoNormal),
    "Pyro's": variational(AutoDiagonalNormal),
    "full": laplace("full"),
    "kron": laplace("kron"),
    "diag": laplace("diag"),
    "HMC": chains(tyxe.samplers.HMC(step_size=0.05, num_steps=2), warmup_steps=2, compile=False),
    "SGLD": chains(tyxe.samplers.SGLD(0.001)),
}
TYPES = [torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.complex64]


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_frozen_body_may_be_of_another_type(dtype: torch.dtype, fit: Any) -> None:
    found = []
    for kind in (dtype, torch.float32):
        torch.manual_seed(0)
        found.append(fit(Net(kind)))
    for one, other in zip(*found, strict=True):
        assert one.dtype == torch.float32
        # What half precision rounds of the features, which are between -1 and 1.
        exact = not dtype.is_floating_point or dtype == torch.float64
        tolerance = 1e-3 if exact else 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_complex_weights_are_trained_along(fit: Any) -> None:
    torch.manual_seed(0)
    assert all(bool(part.isfinite().all()) for part in fit(Spectral()))


def test_the_gradient_in_complex_weights_is_diagnosed() -> None:
    prior = IIDPrior(dist.Normal(0, 1))
    bnn = tyxe.VariationalBNN(Spectral(), prior, LIKELIHOOD, tyxe.guides.AutoNormal)
    lines = tyxe.diagnostics.diagnose(bnn, [(X, Y)], [(X, Y)], num_predictions=2)
    at_end = float(slope(Case.of(bnn, [(X, Y)], [(X, Y)], None, {}, 1.0), 1.0).mean["net.w"].norm())
    assert lines
    assert at_end > 0


def test_the_norm_of_a_complex_gradient_is_clipped() -> None:
    net = Spectral()
    bnn = tyxe.VariationalBNN(net, IIDPrior(dist.Normal(0, 1), hide_all=True), LIKELIHOOD)
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    before = [p.detach().clone() for p in bnn.net.parameters()]
    bnn.fit([(X, Y + 100)], sgd, 1, clip_norm=1e-2)
    moved = [(now - old).abs() for now, old in zip(bnn.net.parameters(), before, strict=True)]
    norm = torch.cat([each.flatten() for each in moved]).norm().detach()
    assert abs(float(norm) - 1e-2) < 1e-5
