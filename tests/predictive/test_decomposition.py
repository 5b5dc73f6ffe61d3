"""Parts of the uncertainty add up."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tyxe.predictive import entropy_decomposition, regression_decomposition, variance_decomposition

PROBS = {
    "spread": lambda: torch.randn(9, 5, 3).double().softmax(-1),
    "nearly certain": lambda: (40 * torch.randn(9, 5, 3).double()).softmax(-1),
    "certain": lambda: torch.eye(3).double()[torch.randint(3, (9, 5))],
    "one draw": lambda: torch.randn(1, 5, 3).double().softmax(-1),
    "equal draws": lambda: torch.randn(5, 3).double().softmax(-1).expand(9, 5, 3),
    "pixels": lambda: torch.randn(4, 2, 3, 3, 5).double().softmax(-1),
    "single prediction": lambda: torch.randn(9, 4).double().softmax(-1),
}


@pytest.mark.parametrize("make", PROBS.values(), ids=PROBS.keys())
def test_covariances_add_up(make):
    probs = make()
    aleatoric, epistemic = variance_decomposition(probs)
    mean = probs.mean(0)
    expected = torch.diag_embed(mean) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    torch.testing.assert_close(aleatoric + epistemic, expected, rtol=0, atol=1e-12)
    assert torch.equal(variance_decomposition(probs).total, aleatoric + epistemic)
    by_draw = torch.stack([torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2) for p in probs])
    torch.testing.assert_close(aleatoric, by_draw.mean(0), rtol=0, atol=1e-12)
    outer = torch.stack([p.unsqueeze(-1) * p.unsqueeze(-2) for p in probs]).mean(0)
    by_formula = outer - mean.unsqueeze(-1) * mean.unsqueeze(-2)
    torch.testing.assert_close(epistemic, by_formula, rtol=0, atol=1e-12)
    for part in (aleatoric, epistemic):
        assert torch.linalg.eigvalsh(part).min() > -1e-12


@pytest.mark.parametrize("make", PROBS.values(), ids=PROBS.keys())
def test_entropies_add_up(make):
    probs = make()
    parts = entropy_decomposition(probs)
    torch.testing.assert_close(
        parts.total, parts.expected + parts.mutual_information, rtol=0, atol=1e-12
    )
    # The mutual information is the mean divergence of a draw from the average.
    ratio = torch.special.xlogy(probs, probs) - torch.special.xlogy(probs, probs.mean(0))
    torch.testing.assert_close(
        parts.mutual_information, ratio.sum(-1).mean(0), rtol=1e-9, atol=1e-12
    )
    assert bool((parts.mutual_information >= 0).all())
    assert bool((parts.expected >= 0).all())
    assert bool((parts.total <= math.log(probs.shape[-1]) + 1e-12).all())


@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    draws=st.integers(1, 6),
    points=st.integers(1, 4),
    classes=st.integers(2, 5),
    spread=st.floats(0, 300),
)
def test_float32_parts_are_never_negative(dtype, draws, points, classes, spread):
    probs = (spread * torch.randn(draws, points, classes)).softmax(-1).to(dtype)
    parts = entropy_decomposition(probs)
    assert parts.total.dtype == variance_decomposition(probs).total.dtype == torch.float32
    assert all(bool((part >= 0).all()) for part in parts)
    variances = variance_decomposition(probs).epistemic.diagonal(dim1=-2, dim2=-1)
    assert bool((variances >= 0).all())


@pytest.mark.parametrize(
    "bad",
    [torch.randn(4, 5, 3), torch.ones(3), torch.rand(4, 5), torch.tensor([[1.5, -0.5]])],
    ids=["logits", "one dimension", "of one class", "negative"],
)
def test_what_is_no_probability_is_refused(bad):
    for split in (variance_decomposition, entropy_decomposition):
        with pytest.raises(ValueError, match="are no class probabilities"):
            split(bad)


@pytest.mark.parametrize("weights", [torch.ones(3), torch.ones(1, 4), -1, [0.25] * 4])
def test_weights_are_one_for_each_draw(weights):
    for split in (variance_decomposition, entropy_decomposition):
        with pytest.raises((TypeError, ValueError), match=r"weights (is|has) .*; expected "):
            split(torch.full((4, 5, 2), 0.5), weights)


def test_regression_parts_are_the_mixtures_moments():
    means, noise = torch.randn(6, 5, 2).double(), torch.rand(6, 5, 2).double()
    parts = regression_decomposition(means, noise)
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(torch.ones(6).double()),
        torch.distributions.Normal(means.movedim(0, -1), noise.sqrt().movedim(0, -1)),
    )
    torch.testing.assert_close(parts.total, mixture.variance, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(parts.aleatoric, noise.mean(0))
    torch.testing.assert_close(parts.epistemic, means.var(0, correction=0))


def test_regression_noise_broadcasts_or_is_refused():
    means = torch.randn(6, 5, 2)
    for noise in (0.25, torch.tensor(0.25), torch.full((2,), 0.25), torch.full((6, 1, 1), 0.25)):
        parts = regression_decomposition(means, noise)
        torch.testing.assert_close(parts.aleatoric, torch.full((5, 2), 0.25))
    with pytest.raises(ValueError, match="expected variances"):
        regression_decomposition(means, -1.0)
