"""Products with curvatures, against their dense matrices; eigenpairs and log-determinants."""

import functools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn as nn

import tyxe
from tests.curvature.test_against_loops import attends
from tests.oracles.curvature import curvature_of, dense_products, linearizing
from tests.oracles.nets import NetOf
from tyxe.curvature import CurvatureProducts
from tyxe.curvature.products import low_rank_curvature
from tyxe.data import Targets
from tyxe.linalg.functions import largest_eigenpairs, logdet_by_quadrature

close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


def products_of(net, batches, likelihood, curvature="ggn", **options):
    def forward(values, inputs):
        return torch.func.functional_call(net, values, (inputs,))

    values = dict(net.eval().named_parameters())
    return CurvatureProducts(forward, values, likelihood, lambda: batches, curvature, **options)


def mlp(inputs=3, outputs=3):
    torch.manual_seed(0)
    last = [] if outputs else [nn.Flatten(0)]  # one number for each point, `(n,)`
    return nn.Sequential(
        nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, outputs or 1), *last
    ).double()


LIKELIHOODS = {
    "classes": (tyxe.likelihoods.Categorical(12), 3, lambda n: torch.randint(3, (n,))),
    "two classes": (tyxe.likelihoods.Bernoulli(12), 2, lambda n: torch.rand(n, 2).round()),
    "a label": (tyxe.likelihoods.Bernoulli(12), 0, lambda n: torch.rand(n).round()),
    "counts": (tyxe.likelihoods.Poisson(12), 1, lambda n: torch.ones(n, 1)),
    "noises": (
        tyxe.likelihoods.HomoskedasticGaussian(12, scale=torch.tensor([0.5, 2.0]).double()),
        2,
        lambda n: torch.randn(n, 2).double(),
    ),
    "scales": (tyxe.likelihoods.HeteroskedasticGaussian(12), 2, lambda n: torch.randn(n, 1)),
    "Student": (tyxe.likelihoods.StudentT(12, df=4.0, scale=0.5), 1, lambda n: torch.randn(n, 1)),
}


@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_of_any_likelihood_they_count_weights_and_masks(name, curvature):
    likelihood, outputs, make = LIKELIHOODS[name]
    torch.manual_seed(1)
    x, y = torch.randn(6, 3).double(), make(6)
    weights, mask = torch.tensor([2.0, 1.0, 0.0, 0.5, 1.0, 3.0]), torch.ones_like(y).bool()
    mask[1] = False
    given = Targets(y, weights, mask)
    bnn, values, x, linearize = linearizing(mlp(outputs=outputs), x)
    options = {"likelihood": likelihood, "targets": given, "curvature": curvature}
    full = curvature_of(bnn, linearize, x, "full", **options)
    products = CurvatureProducts(
        bnn._run_frozen, values, likelihood, lambda: [(x, given)], curvature, blocks=full.blocks
    )
    close(dense_products(products), full.operator.to_dense())
    assert products._numbers.tolist()[0] == pytest.approx(full.points)


def test_the_hessian_is_that_of_autograd_and_has_weights():
    net, x = mlp(), torch.randn(5, 3).double()
    y, weights = torch.tensor([0, 1, 2, 1, 0]), torch.tensor([1.0, 2.0, 0.0, 1.0, 0.5])
    names, values = zip(*net.named_parameters(), strict=True)

    def loss(*values):
        logits = torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x,))
        return (weights * nn.functional.cross_entropy(logits, y, reduction="none")).sum()

    rows = torch.autograd.functional.hessian(loss, values)
    sizes = [value.numel() for value in values]
    blocks = [
        torch.cat([block.reshape(size, -1) for block in row], 1)
        for row, size in zip(rows, sizes, strict=True)
    ]
    expected = torch.cat(blocks) * 9 / 4.5
    likelihood = tyxe.likelihoods.Categorical(9)
    products = products_of(net, [(x, Targets(y, weights))], likelihood, "hessian")
    close(dense_products(products), expected)
    with pytest.raises(ValueError, match=r"eigenvalue of -.*curvature='ggn'"):
        low_rank_curvature(products, 5)


def test_sampled_labels_are_the_same_in_all_products_and_the_fisher_on_average():
    torch.manual_seed(0)
    x, y = torch.randn(4, 3).double(), torch.zeros(4).long()
    likelihood, traces = tyxe.likelihoods.Categorical(4), []
    net = mlp()
    exact = dense_products(products_of(net, [(x, y)], likelihood))
    for _ in range(36):
        sampled = products_of(net, [(x[:2], y[:2]), (x[2:], y[2:])], likelihood, "fisher")
        matrix = dense_products(sampled)
        close(sampled @ torch.eye(31).double()[3], matrix[3])
        traces.append(matrix.trace())
    found = torch.stack(traces)
    assert abs(float(found.mean() - exact.trace())) < 3 * float(found.std()) / 6
    assert torch.linalg.matrix_rank(matrix) <= 4


def test_float32_is_close_to_float64_also_where_classes_are_certain():
    x, y = torch.randn(6, 3), torch.zeros(6).long()
    found = []
    for dtype in (torch.float32, torch.float64):
        net = mlp().to(dtype)
        with torch.no_grad():
            net[2].weight.mul_(8)
        found.append(
            dense_products(products_of(net, [(x.to(dtype), y)], tyxe.likelihoods.Categorical(6)))
        )
    torch.testing.assert_close(found[0].double(), found[1], rtol=1e-4, atol=1e-6)


def distances():
    """Distances to rows, for which PyTorch has no forward mode."""
    return NetOf(
        lambda net, x: net.last(torch.cdist(x, net.rows)),
        rows=nn.Parameter(torch.randn(4, 3)),
        last=nn.Linear(4, 2),
    )


@pytest.mark.parametrize("make", [distances, attends])
def test_without_a_forward_mode_they_are_the_same_and_it_is_said_once(make):
    torch.manual_seed(0)
    net = make()
    x = torch.randn(5, 3).double() if make is distances else torch.randn(3, 4, 4).double()
    y = torch.zeros(len(x), 2).double()
    bnn, values, x, linearize = linearizing(net, x)
    full = curvature_of(bnn, linearize, x, "full")
    given = bnn._run_frozen, values, bnn.likelihood, lambda: [(x, y)]
    products = CurvatureProducts(*given, blocks=full.blocks)
    if make is distances:
        with pytest.warns(tyxe.TyxeWarning, match=r"no forward mode.*cdist"):
            products @ torch.zeros(2, full.blocks.size).double()
    close(dense_products(products), full.operator.to_dense())  # warnings are errors


def test_the_first_product_of_a_process_does_not_warn_of_what_pytorch_deprecates():
    code = (
        "import torch, tyxe, warnings\n"
        "from tests.curvature.test_matrix_free import mlp, products_of\n"
        "data = [(torch.ones(2, 3).double(), torch.zeros(2).long())]\n"
        "products = products_of(mlp(), data, tyxe.likelihoods.Categorical(2))\n"
        "with warnings.catch_warnings():\n"
        "    warnings.simplefilter('error')\n"
        "    products @ torch.ones(31).double()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_loader_that_shuffles_is_refused_and_names_the_remedy():
    data = torch.utils.data.TensorDataset(torch.randn(8, 3).double(), torch.zeros(8).long())
    likelihood = tyxe.likelihoods.Categorical(8)
    for batch_size in (4, 8):  # of one batch, only the order is another
        loader = torch.utils.data.DataLoader(data, batch_size, shuffle=True)
        products = products_of(mlp(), loader, likelihood)
        with pytest.raises(ValueError, match=r"batch 1 of the .* another one.*shuffle=False"):
            low_rank_curvature(products, 5)


def test_a_loader_that_shuffles_later_batches_only_is_refused():
    class Loader:
        def __iter__(self):
            for rows in (torch.arange(4), *(4 + torch.randperm(8)).split(4)):
                yield torch.ones(4, 3).double() * rows[:, None], rows % 3

    torch.manual_seed(0)
    products = products_of(mlp(), Loader(), tyxe.likelihoods.Categorical(12))
    with pytest.raises(ValueError, match=r"batch [23] of the loader is another one"):
        low_rank_curvature(products, 5)


def test_bad_input_is_refused():
    x, y, likelihood = (
        torch.randn(4, 3).double(),
        torch.zeros(4).long(),
        tyxe.likelihoods.Categorical(4),
    )
    with pytest.raises(ValueError, match=r"'0.weight' is torch.float16; .*\.float\(\)"):
        products_of(mlp().half(), [(x.half(), y)], likelihood)
    for batches in ([], [(x, Targets(y, torch.zeros(4)))]):
        with pytest.raises(ValueError, match="no point counts"):
            dense_products(products_of(mlp(), batches, likelihood))
    with pytest.raises(ValueError, match=r"curvature is 'gauss'; expected .*'hessian'"):
        products_of(mlp(), [(x, y)], likelihood, "gauss")
    products = products_of(mlp(), [(x, y)], likelihood)
    with pytest.raises(ValueError, match=r"vectors has shape \(2, 30\); expected \(2, 31\)"):
        products @ torch.zeros(2, 30).double()
    x[0, 0] = math.inf
    with pytest.raises(ValueError, match="expected finite numbers"):
        low_rank_curvature(products_of(mlp(), [(x, y)], likelihood), 3)


# --- eigenpairs and log-determinants --------------------------------------------------------------

SPECTRA = {
    "decaying": torch.arange(1, 201).double() ** -1.5,
    "slow": torch.exp(-torch.arange(200).double() / 20),
    "few": torch.cat([torch.ones(4), 0.1 * torch.ones(4), torch.zeros(192)]).double(),
    "multiple": torch.cat(
        [3 * torch.ones(4), 2 * torch.ones(4), torch.linspace(0, 1, 192)]
    ).double(),
    "copies": torch.cat([5 * torch.ones(9), 4 * torch.ones(6), torch.linspace(0, 1, 185)]).double(),
    "zero": torch.zeros(200).double(),
}


def with_spectrum(values):
    generator = torch.Generator().manual_seed(0)
    size = len(values)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator).double())
    return (basis * values) @ basis.mT


@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [6, 200])
@pytest.mark.parametrize("name", SPECTRA)
def test_the_largest_eigenpairs_are_those_of_eigh(name, count, dtype, block):
    matrix, taken = with_spectrum(SPECTRA[name]).to(dtype), []
    expected = torch.linalg.eigvalsh(matrix.double()).flip(0)[:count]

    def product(vectors):
        taken.append(len(vectors))
        return vectors @ matrix

    start = torch.randn(block, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    values, vectors = largest_eigenpairs(product, start, count, tolerance=1e-3)
    determined = int((SPECTRA[name][:].sort(descending=True).values[:count] > 1e-4).sum())
    assert len(values) >= determined
    tolerance = 1e-5 if dtype == torch.float32 else 1e-10
    # Ritz values are not above, and below by the square of the tolerance, or of a cluster's width.
    below = (expected[: len(values)] - values.double()) / expected[0].clamp_min(1e-300)
    assert bool(((below > -tolerance) & (below < 2e-3)).all())
    if name not in ("multiple", "copies"):
        # The square of a residual over the distance to the next eigenvalue, a twentieth of it.
        assert bool((below < 20 * 1e-3**2 + tolerance).all())
    residuals = (vectors @ matrix - values[:, None] * vectors).norm(dim=1)
    assert bool((residuals <= 2e-3 * values + 10 * tolerance * expected[0]).all())
    identity = torch.eye(len(values), dtype=dtype)
    torch.testing.assert_close(vectors @ vectors.mT, identity, rtol=0, atol=tolerance)
    if name == "decaying":
        assert sum(taken) <= max(200, 4 * count + 20)


def test_eigenpairs_that_have_not_converged_are_those_of_the_last_basis():
    matrix, identity = with_spectrum(1 + torch.linspace(0, 1e-3, 200).double()), torch.eye(9)
    start = torch.randn(4, 200, generator=torch.Generator().manual_seed(1)).double()
    for count in range(3, 10):
        with pytest.warns(tyxe.TyxeWarning, match="have not converged"):
            values, vectors = largest_eigenpairs(lambda v: v @ matrix, start, count, 1e-12)
        close(vectors @ vectors.mT, identity[:count, :count].double())
        close((vectors @ matrix * vectors).sum(1), values)


def test_quadrature_has_the_log_determinant_within_its_standard_error():
    matrix = with_spectrum(torch.linspace(0.5, 4, 200).double())
    probes = torch.randn(64, 200, generator=torch.Generator().manual_seed(2)).double().sign()
    found = logdet_by_quadrature(lambda v: v @ matrix, probes, 20)
    exact = torch.linspace(0.5, 4, 200).double().log().sum()
    assert abs(float(found.mean() - exact)) < 2 * float(found.std()) / 8
    # A probe inside of an invariant subspace has the quadrature of that subspace.
    one = torch.eye(200).double()[:1] * 3
    close(logdet_by_quadrature(lambda v: 2 * v, one, 5), 9 * torch.tensor([2.0]).double().log())
