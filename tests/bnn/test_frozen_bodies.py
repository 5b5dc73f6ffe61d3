"""Bodies in other types than the sites: inference is in the sites' type."""

import functools

import pytest
import torch
from pyro.infer.autoguide import AutoDiagonalNormal
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, NOTHING, mean_field
from tests.oracles.nets import NetOf
from tyxe.diagnostics.inference import slope
from tyxe.diagnostics.report import Case
from tyxe.likelihoods import HomoskedasticGaussian

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
N = 8
X = torch.linspace(-1, 1, 3 * N).view(N, 3)
Y = X[:, :1].sin()
ADAM = functools.partial(torch.optim.Adam, lr=1e-2)


def half(dtype):
    """A frozen body, of numbers that all types have, and a head in float32."""

    def forward(self, x):
        kind = torch.float32 if self.body.dtype == torch.int8 else self.body.dtype
        h = torch.tanh(x.to(kind) @ self.body.to(kind))
        return self.head((h.real if h.is_complex() else h).float())

    numbers = torch.tensor([[1, -1, 2, 0], [0, 1, -2, 1], [2, 1, 0, -1]]).to(dtype)
    return NetOf(forward, body=nn.Parameter(numbers, requires_grad=False), head=nn.Linear(4, 1))


def spectral():
    """A Fourier layer, whose complex weights are trained, before a head in float32."""

    def forward(self, x):
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.w, n=x.shape[-1]))

    return NetOf(forward, w=nn.Parameter(torch.ones(2, dtype=torch.cfloat)), head=nn.Linear(3, 1))


def variational(net, guide=tyxe.guides.AutoNormal):
    bnn = tyxe.VariationalBNN(net, NORMAL, LIKELIHOOD, guide)
    bnn.fit([(X, Y)], ADAM, 2, clip_norm=0.1)
    return bnn.predict(X, num_predictions=2)


def laplace(net, structure):
    bnn = tyxe.LaplaceBNN(net, NORMAL, LIKELIHOOD, structure=structure)
    bnn.fit([(X, Y)], ADAM, 2)
    bnn.optimize_prior_precision()
    bnn.fit_gp([(X, Y)], 6)
    evidence, refined = bnn.log_marginal_likelihood(), bnn.refine([(X, Y)]).predict(X)
    return *bnn.predict(X), *bnn.predict(X, predictive="gp"), evidence, *refined


def chains(net, kernel, **options):
    bnn = tyxe.MCMC_BNN(net, NORMAL, LIKELIHOOD, kernel)
    bnn.fit([(X, Y)], num_samples=4, **options)
    return bnn.predict(X, num_predictions=2)


LIKELIHOOD = HomoskedasticGaussian(N, scale=0.5)
SAMPLER = tyxe.samplers.HMC(step_size=0.05, num_steps=2)
FITS = {
    "mean field": variational,
    "Pyro's": functools.partial(variational, guide=AutoDiagonalNormal),
    "full": functools.partial(laplace, structure="full"),
    "kron": functools.partial(laplace, structure="kron"),
    "diag": functools.partial(laplace, structure="diag"),
    "HMC": functools.partial(chains, kernel=SAMPLER, warmup_steps=2, compile=False),
    "SGLD": functools.partial(chains, kernel=tyxe.samplers.SGLD(0.001)),
}
TYPES = [torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.complex64]


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_frozen_body_may_be_of_another_type(dtype, fit):
    found = []
    for kind in (dtype, torch.float32):
        torch.manual_seed(0)
        found.append(fit(half(kind)))
    # What half precision rounds of the features, which are between -1 and 1.
    is_exact = not dtype.is_floating_point or dtype == torch.float64
    tolerance = 1e-3 if is_exact else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(*found, rtol=tolerance, atol=tolerance)
    assert all(one.dtype == torch.float32 for one in found[0])


@pytest.mark.parametrize("fit", FITS.values(), ids=FITS)
def test_complex_weights_are_trained_along(fit):
    torch.manual_seed(0)
    assert all(bool(part.isfinite().all()) for part in fit(spectral()))


def test_the_gradient_in_complex_weights_is_diagnosed():
    bnn, data = mean_field(spectral(), LIKELIHOOD), [(X, Y)]
    assert tyxe.diagnostics.diagnose(bnn, data, data, num_predictions=2)
    at_end = slope(Case.of(bnn, data, data, None, {}, 1.0), 1.0).mean["net.w"]
    assert float(at_end.norm()) > 0


def test_the_norm_of_a_complex_gradient_is_clipped():
    net = spectral()
    bnn = tyxe.VariationalBNN(net, NOTHING, LIKELIHOOD)
    sgd = functools.partial(torch.optim.SGD, lr=1.0)
    before = [p.detach().clone() for p in bnn.net.parameters()]
    bnn.fit([(X, Y + 100)], sgd, 1, clip_norm=1e-2)
    moved = [(now - old).abs() for now, old in zip(bnn.net.parameters(), before, strict=True)]
    norm = torch.cat([each.flatten() for each in moved]).norm().detach()
    assert abs(float(norm) - 1e-2) < 1e-5
