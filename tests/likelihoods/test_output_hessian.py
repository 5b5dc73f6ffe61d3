"""Output Hessians against enumeration and quadrature; their roots; gradients."""

import math
import re

import numpy as np
import pyro.distributions as dist
import pytest
import torch

from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
)
from tyxe.likelihoods.output_hessian import (
    OutputHessians,
    output_hessian,
    output_hessian_product,
    output_hessian_sqrt,
    sampled_gradient,
    true_gradient,
)

N = 4
EACH_SCALE = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)

# A likelihood and the shape of one point's output.
EVERY = {
    "classes": (Categorical(N), (5,)),
    "two classes": (Categorical(N), (2,)),
    "segmentation": (Categorical(N), (2, 3, 4)),
    "segmentation, event_dim": (Categorical(N, event_dim=2), (2, 3, 4)),
    "binary, flat": (Bernoulli(N), ()),
    "binary, column": (Bernoulli(N), (1,)),
    "labels": (Bernoulli(N), (6,)),
    "binary image": (Bernoulli(N, event_dim=2), (2, 3)),
    "counts": (Poisson(N), (3,)),
    "counts, flat": (Poisson(N), ()),
    "regression": (HomoskedasticGaussian(N, scale=0.3), (1,)),
    "regression, flat": (HomoskedasticGaussian(N, precision=4.0), ()),
    "scale each": (HomoskedasticGaussian(N, scale=EACH_SCALE), (3,)),
    "scale each, matrix": (HomoskedasticGaussian(N, scale=EACH_SCALE), (2, 3)),
    "precision each": (HomoskedasticGaussian(N, precision=EACH_SCALE), (3,)),
    "inferred": (HomoskedasticGaussian(N, scale=dist.LogNormal(0.0, 0.5)), (2,)),
    # Those whose Hessian depends on the targets: the Fisher information.
    "class probabilities": (Categorical(N, logit_predictions=False), (4,)),
    "probabilities per pixel": (Categorical(N, logit_predictions=False), (3, 2)),
    "binary probabilities": (Bernoulli(N, logit_predictions=False), (3,)),
    "predicted scale": (HeteroskedasticGaussian(N), (2,)),
    "predicted positive scale": (HeteroskedasticGaussian(N, positive_scale=True), (2,)),
    "predicted scales": (HeteroskedasticGaussian(N), (2, 6)),
    "predicted positive scales": (HeteroskedasticGaussian(N, positive_scale=True), (3, 4)),
    "heavy tails": (StudentT(N, scale=0.3), (3,)),
    "heavy tails, scale each": (StudentT(N, scale=EACH_SCALE, df=7.0), (2, 3)),
    "dispersed counts": (NegativeBinomial(N, total_count=2.5), (3,)),
    "dispersed counts, each": (NegativeBinomial(N, total_count=EACH_SCALE), (2, 3)),
    "grades": (Ordinal(N, 4), (1,)),
    "two grades": (Ordinal(N, 2), (1,)),
}


def outputs_of(likelihood: Likelihood, shape: tuple[int, ...], n: int = N) -> torch.Tensor:
    values = torch.randn(n, *shape, dtype=torch.float64)
    if getattr(likelihood, "logit_predictions", True) is False:
        return values.softmax(-1) if isinstance(likelihood, Categorical) else values.sigmoid()
    if getattr(likelihood, "positive_scale", False):
        loc, scale = values.chunk(2, -1)
        return torch.cat([loc, scale.exp()], -1)
    return values


def dense(blocks: torch.Tensor) -> torch.Tensor:
    """`(n, K, K)` over all outputs of each point."""
    return torch.stack([torch.block_diag(*point) for point in blocks])


def dense_of_columns(columns) -> torch.Tensor:
    flat = torch.stack([column.reshape(len(column), -1) for column in columns], -1)
    return flat @ flat.mT


# --- Hessians -----------------------------------------------------------------------------------


def quadrature(likelihood, predictions):
    """Yield targets of one shape with their probabilities at each target, both `(n, ...)`."""
    distribution = likelihood.predictive_distribution(predictions, likelihood.prior_means())
    while isinstance(distribution, torch.distributions.Independent):
        distribution = distribution.base_dist
    if isinstance(distribution, torch.distributions.Normal):
        nodes, weights = np.polynomial.hermite_e.hermegauss(12)
        for node, weight in zip(nodes, weights / weights.sum(), strict=True):
            target = distribution.mean + distribution.stddev * float(node)
            yield target, torch.full_like(target, float(weight))
        return
    if isinstance(distribution, torch.distributions.StudentT):
        nodes, weights = np.polynomial.legendre.leggauss(200)
        for node, weight in zip(nodes, weights, strict=True):
            far = math.tan(math.pi / 2 * node)
            width = math.pi / 2 * (1 + far**2) * distribution.scale * float(weight)
            target = distribution.loc + distribution.scale * far
            yield target, distribution.log_prob(target).exp() * width
        return
    if isinstance(distribution, torch.distributions.Poisson | torch.distributions.NegativeBinomial):
        values = torch.arange(600, dtype=torch.float64)
    else:
        values = distribution.enumerate_support(expand=False).flatten()
    for value in values:
        target = torch.full(distribution.batch_shape, value.item()).to(values.dtype)
        yield target, distribution.log_prob(target).exp()


def expected_fisher(likelihood, predictions, positions, coupled):
    """Sum of `p(y) r r^T` at each position, of whose coupled outputs one target decides."""
    fisher = 0
    for targets, probabilities in quadrature(likelihood, predictions):
        r = true_gradient(likelihood, predictions, targets, likelihood.prior_means())
        if isinstance(likelihood, HeteroskedasticGaussian):
            r = torch.stack(r.chunk(2, -1), -1)
        r = r.reshape(len(r), positions, coupled)
        weights = probabilities.reshape(len(r), positions, 1, 1)
        fisher = fisher + weights * r.unsqueeze(-1) * r.unsqueeze(-2)
    return fisher


@pytest.mark.parametrize(("likelihood", "shape"), EVERY.values(), ids=EVERY.keys())
def test_hessian_is_the_fisher_information(likelihood, shape):
    predictions = outputs_of(likelihood, shape)
    actual = output_hessian(likelihood, predictions, likelihood.prior_means())
    if isinstance(likelihood, HeteroskedasticGaussian):
        size = math.prod(shape) // 2
        fisher = expected_fisher(likelihood, predictions, size, 2)
        # Mean and scale of one target are not coupled: the blocks are of one output each.
        torch.testing.assert_close(fisher[..., 0, 1], torch.zeros(N, size).double())
        parts = fisher.diagonal(dim1=-2, dim2=-1).reshape(N, *shape[:-1], shape[-1] // 2, 2)
        expected = torch.cat(parts.unbind(-1), -1).reshape(N, 2 * size, 1, 1)
    else:
        expected = expected_fisher(likelihood, predictions, *actual.shape[1:3])
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("parameter", ["scale", "precision"])
def test_inferred_noise_takes_its_value(parameter):
    likelihood = HomoskedasticGaussian(N, **{parameter: dist.Gamma(4.0, 2.0)})
    predictions = torch.randn(N, 2, dtype=torch.float64)
    value = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    expected, latents = value if parameter == "precision" else value**-2, {parameter: value}
    blocks = output_hessian(likelihood, predictions, latents)
    torch.testing.assert_close(blocks, expected.expand(N, 2, 1, 1))
    slopes = [torch.autograd.grad(total, value)[0] for total in (blocks.sum(), 2 * N * expected)]
    torch.testing.assert_close(*slopes)
    latents = {parameter: value.detach()}
    columns = output_hessian_sqrt(likelihood, predictions, latents)
    torch.testing.assert_close(dense_of_columns(columns), dense(blocks).detach())
    r = true_gradient(likelihood, predictions, predictions + 1, latents)
    torch.testing.assert_close(r, expected.detach().expand(N, 2))
    with pytest.raises(ValueError, match="the noise is inferred"):
        output_hessian(likelihood, predictions)


# --- square roots -------------------------------------------------------------------------------


@pytest.mark.parametrize(("likelihood", "shape"), EVERY.values(), ids=EVERY.keys())
def test_columns_are_a_square_root(likelihood, shape):
    predictions = outputs_of(likelihood, shape)
    blocks = output_hessian(likelihood, predictions, likelihood.prior_means())
    columns = output_hessian_sqrt(likelihood, predictions, likelihood.prior_means())
    listed = list(columns)
    assert len(listed) == len(columns) == columns.num_positions * columns.rank
    assert all(column.shape == predictions.shape for column in listed)
    torch.testing.assert_close(dense_of_columns(listed), dense(blocks), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "logits",
    [[500.0, 0.0, -500.0], [-500.0, 0.0, 500.0], [0.0, -math.inf, 1.0], [0.0, 1.0, -math.inf]],
    ids=str,
)
def test_certain_classes_are_finite(logits):
    logits = torch.tensor([logits])
    blocks = output_hessian(Categorical(1), logits)
    root = dense_of_columns(output_hessian_sqrt(Categorical(1), logits))
    assert bool(root.isfinite().all())
    torch.testing.assert_close(root, dense(blocks))


def test_small_curvature_keeps_its_digits():
    # In float32 `1 - p` is zero here, and the curvature is about exp(-20).
    logits = torch.tensor([[20.0, 0.0]])
    root = dense_of_columns(output_hessian_sqrt(Categorical(1), logits))
    exact = output_hessian(Categorical(1), logits.double())
    torch.testing.assert_close(root.double(), dense(exact), rtol=1e-5, atol=0)
    bernoulli = output_hessian(Bernoulli(1), torch.tensor([[20.0], [-20.0]]))
    both = exact[:, :, :1, :1].expand(2, 1, 1, 1)
    torch.testing.assert_close(bernoulli.double(), both, rtol=1e-5, atol=0)


def test_positions_are_told_apart():
    columns = list(output_hessian_sqrt(Categorical(2), torch.randn(2, 3, 4)))
    positions = [column.abs().sum((0, 2)).nonzero().flatten().tolist() for column in columns]
    assert sorted(positions) == [[0]] * 3 + [[1]] * 3 + [[2]] * 3


# --- gradients ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("likelihood", "shape"), EVERY.values(), ids=EVERY.keys())
def test_sampled_gradients_have_the_fisher_information(likelihood, shape):
    num_draws = 4_000
    point = outputs_of(likelihood, shape, n=1)
    r = sampled_gradient(likelihood, point.expand(num_draws, *shape), likelihood.prior_means())
    assert r.shape == (num_draws, *shape)
    assert not r.requires_grad
    flat = r.reshape(num_draws, -1)
    products = flat.unsqueeze(-1) * flat.unsqueeze(-2)
    expected = dense(output_hessian(likelihood, point, likelihood.prior_means()))[0]
    error = products.std(0) / math.sqrt(num_draws)
    # Five standard errors: over all cases some 2,000 numbers are compared. Where every draw
    # gives the same product (p = 1/2) only rounding is left.
    assert bool(((products.mean(0) - expected).abs() <= 5 * error + 1e-9).all())
    assert bool((flat.mean(0).abs() <= 5 * flat.std(0) / math.sqrt(num_draws)).all())


def test_true_gradients_by_hand():
    # Under no_grad, as in a pass that collects curvature, and without touching the predictions.
    predictions = torch.zeros(1, 2, requires_grad=True)
    with torch.no_grad():
        r = true_gradient(Bernoulli(9), predictions, torch.tensor([[1.0, 0.0]]))
    assert r.tolist() == [[0.5, -0.5]]
    assert predictions.grad is None


# --- types and registration ---------------------------------------------------------------------


@pytest.mark.parametrize(("likelihood", "shape"), EVERY.values(), ids=EVERY.keys())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_promoted(likelihood, shape, dtype):
    predictions = outputs_of(likelihood, shape).to(dtype)
    exact = output_hessian(likelihood, predictions.double(), likelihood.prior_means())
    blocks = output_hessian(likelihood, predictions, likelihood.prior_means())
    columns = list(output_hessian_sqrt(likelihood, predictions, likelihood.prior_means()))
    assert blocks.dtype == columns[0].dtype == torch.float32
    torch.testing.assert_close(blocks.double(), exact, rtol=1e-5, atol=1e-5)
    gradient = sampled_gradient(likelihood, predictions, likelihood.prior_means())
    assert gradient.dtype == torch.float32


class Geometric(Likelihood):
    """Counts of failures; logits."""

    def predictive_distribution(self, predictions, latents=None):
        return dist.Geometric(logits=predictions, validate_args=False)

    def point_error(self, predictions, targets):
        return (predictions - targets).square()

    def aggregate_predictions(self, predictions, dim=0, latents=None):
        return predictions.mean(dim)


def test_a_missing_hessian_names_the_registration():
    likelihood, predictions = Geometric(9), torch.zeros(5, 2)
    for call in (output_hessian, output_hessian_sqrt):
        with pytest.raises(TypeError, match=r"output_hessian\.register\(Geometric\)"):
            call(likelihood, predictions)
    # Gradients need no registration: y log(1 - p) + log p in the logit of p.
    r = true_gradient(likelihood, predictions, torch.ones(5, 2))
    torch.testing.assert_close(r, torch.zeros(5, 2))
    assert sampled_gradient(likelihood, predictions).shape == (5, 2)


@pytest.mark.parametrize("shape", [(5, 2), (5, 2, 1), (5, 2, 2), (5, 1, 2, 1), (1, 2, 1, 1)])
def test_blocks_of_another_shape_name_the_function(shape):
    class Misshapen(Geometric):
        pass

    @output_hessian.register(Misshapen)
    def of_a_geometric(likelihood, predictions, latents=None):
        return torch.ones(shape)

    likelihood, predictions = Misshapen(9), torch.zeros(5, 2)
    found = re.escape(f"registered for Misshapen, returned shape {shape}")
    message = rf"of_a_geometric, .*{found}.*\(5, 2, 1, 1\) .*\(5, 1, 2, 2\)"
    for call in (
        lambda: output_hessian_sqrt(likelihood, predictions),
        lambda: output_hessian_product(likelihood, predictions, predictions),
        OutputHessians(likelihood, predictions).total,
        OutputHessians(likelihood, predictions).diagonals,
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_users_register_their_own():
    class Coupled(Geometric):
        pass

    class Tempered(Categorical):
        """Its Hessian is not that of its base, and neither is the root."""

    matrix = torch.tensor([[2.0, 1.0, 0.0], [1.0, 2.0, 0.0], [0.0, 0.0, 0.0]])

    @output_hessian.register(Coupled)
    def _(likelihood, predictions, latents=None):
        return matrix.expand(len(predictions), 1, 3, 3)

    @output_hessian.register(Tempered)
    def _(likelihood, predictions, latents=None):
        return 4 * output_hessian.dispatch(Categorical)(likelihood, predictions, latents)

    columns = output_hessian_sqrt(Coupled(9), torch.zeros(2, 3))
    assert len(columns) == 3
    torch.testing.assert_close(dense_of_columns(columns), matrix.expand(2, 3, 3))
    logits = torch.randn(2, 4, dtype=torch.float64)
    root = dense_of_columns(output_hessian_sqrt(Tempered(9), logits))
    torch.testing.assert_close(root, 4 * dense(output_hessian(Categorical(9), logits)))
