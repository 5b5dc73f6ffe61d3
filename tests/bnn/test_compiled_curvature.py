"""A compiled curvature is the uncompiled one, or says why it is none."""

import warnings
from contextlib import nullcontext

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.bnn.test_compiled_predict import Counting
from tyxe.bnn import compiled
from tyxe.samplers.program import has_compiler

POINTS, SIZE = 22, 44
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(POINTS, 3, generator=GENERATOR)
IMAGES = torch.randn(POINTS, 2, 4, 4, generator=GENERATOR)
LABELS = torch.arange(POINTS) % 3
REAL = torch.randn(POINTS, 2, generator=GENERATOR)
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm2d])


class Scaled(nn.Module):
    """Has a parameter outside of linear maps, and rows of several positions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(1, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return self.last((self.first(x[..., None]) * self.scale).tanh().mean(1))


def convolutions():
    body = nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(16, 3))


def mlp():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3))


NETS = {"mlp": (mlp, X), "convolutions": (convolutions, IMAGES), "scaled": (Scaled, X)}


def batches(x, *others):
    """Return three batches of eight and six points: 8, 8 and 6."""
    return [(*part,) for part in zip(*(each.split(8) for each in (x, *others)), strict=True)]


def both(loader, make_net=mlp, likelihood=None, prior=PRIOR, **options):
    """Return the posterior's precision and evidence, compiled and not, of a net and a seed."""
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        known = likelihood or tyxe.likelihoods.Categorical(SIZE)
        bnn = tyxe.LaplaceBNN(make_net(), prior, known, **options)
        bnn.fit_curvature(loader, compile=compiles)
        found.append((bnn.state.precision().to_dense(), bnn.log_marginal_likelihood()))
    return found


def assert_same(found):
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("curvature", ["ggn", "fisher", "empirical"])
@pytest.mark.parametrize("net", NETS)
def test_a_compiled_curvature_is_the_uncompiled_one(net, curvature, structure, traced):
    make, x = NETS[net]
    loader = batches(x, LABELS)
    assert_same(both([*loader, loader[0]], make, structure=structure, curvature=curvature))
    assert len(traced) == 1  # of the batches of eight: that of six comes once


@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("last_only", [False, True])
def test_weights_count_in_programs(structure, last_only, traced):
    weights = torch.rand(POINTS, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    loader = batches(X, LABELS, weights)

    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_modules=["0"] if last_only else None)
    assert_same(both([*loader, *loader], prior=prior, structure=structure))
    assert len(traced) == 2


@pytest.mark.parametrize("reduce", [False, True])
def test_options_are_those_of_uncompiled_curvatures(reduce, traced):
    options = tyxe.LaplaceOptions(reduce=reduce, num_passes=3)
    found = both(batches(IMAGES, LABELS), convolutions, structure="kron", options=options)
    assert_same(found)
    assert len(traced) == 2


def test_regression_has_programs(traced):
    likelihood = tyxe.likelihoods.HeteroskedasticGaussian(SIZE)

    def make():
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))

    assert_same(both(batches(X, REAL), make, likelihood, structure="full"))
    assert len(traced) == 1


def test_the_second_curvature_is_that_of_the_present_weights(traced):
    bnn = tyxe.LaplaceBNN(mlp(), PRIOR, tyxe.likelihoods.Categorical(SIZE), structure="diag")
    loader = batches(X, LABELS)
    bnn.fit_curvature(loader, compile=True)
    before = bnn.state.precision().diagonal()
    with torch.no_grad():
        for value in bnn.net_guide.values().values():
            value.mul_(2)
    bnn.fit_curvature(loader, compile=True)
    found = bnn.state.precision().diagonal()
    bnn.fit_curvature(loader)
    torch.testing.assert_close(found, bnn.state.precision().diagonal())
    assert not torch.allclose(found, before)


def test_labels_are_checked_before_a_program_reads_them(traced):
    bnn = tyxe.LaplaceBNN(
        mlp(), PRIOR, tyxe.likelihoods.Categorical(SIZE), structure="diag", curvature="empirical"
    )
    labels = LABELS.clone()
    labels[20] = 7
    loader = [*batches(X, LABELS), *batches(X, labels)]
    with pytest.raises(ValueError, match=r"7"):
        bnn.fit_curvature(loader, compile=True)
    assert bnn.net_guide.state is None


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Counting, r"replaces forwards, .* in place"),
        (lambda: Depends(3, 3), r"batches of the curvature are no program"),
    ],
)
def test_what_is_no_program_has_its_curvature_after_one_warning(net, reason, traced):
    loader = batches(X, LABELS)
    found = []
    for compiles in (True, False):
        torch.manual_seed(0)
        known = tyxe.likelihoods.Categorical(SIZE)
        bnn = tyxe.LaplaceBNN(net(), PRIOR, known, structure="diag")
        expected = pytest.warns(tyxe.TyxeWarning, match=reason)
        with expected if compiles else nullcontext() as caught:
            bnn.fit_curvature([*loader, *loader], compile=compiles)
        assert not compiles or len(caught) == 1
        found.append(bnn.state.precision().diagonal())
    assert not traced
    if net is not Counting:  # whose output depends on how often it ran
        torch.testing.assert_close(*found)


class Depends(nn.Linear):
    """Does one thing or another by the numbers it is given."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else super().forward(2 * x)


def test_many_outputs_run_uncompiled_after_one_warning(monkeypatch, traced):
    monkeypatch.setattr(compiled, "MOST_PASSES", 1)
    loader = batches(X, LABELS)
    with pytest.warns(
        tyxe.TyxeWarning, match=r"takes 2 backward passes.*programs have 1"
    ) as caught:
        assert_same(both([*loader, *loader], structure="kron"))
    assert len(caught) == 1
    assert not traced


@pytest.mark.skipif(not has_compiler(torch.device("cpu")), reason="programs need a C++ compiler")
@pytest.mark.parametrize("structure", ["full", "kron"])
def test_a_compiled_program_adds_in_place(structure):
    # Every second channel of larger images, which a program must not take for all of smaller ones.
    loader = batches(IMAGES.repeat_interleave(2, 1)[:, ::2], LABELS)
    assert not loader[0][0].is_contiguous()
    with warnings.catch_warnings():
        warnings.simplefilter("error", tyxe.TyxeWarning)
        found = both([*loader, *loader], convolutions, structure=structure)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
