"""Inference in the linearised net: stationarity, conjugacy, and the ELBO's own optimum."""

import copy
import functools

import pyro.distributions as dist
import pytest
import torch

import tyxe
from tests.oracles import linear_models
from tyxe.curvature import jacobian
from tyxe.linalg import Dense, Diagonal
from tyxe.predictive import refine_laplace, refine_variational
from tyxe.predictive.linear_model import LinearModel
from tyxe.predictive.links import log_probit

TIGHT = {"rtol": 1e-9, "atol": 1e-9}


pytestmark = pytest.mark.usefixtures("double")


def slope(model, w):
    """The gradient of the log joint by autograd."""
    at = w.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model.log_joint(at), at)
    return gradient


# ------------------------------------------------------------------ Laplace


@pytest.mark.parametrize("weight", [1.0, 2.5])
@pytest.mark.parametrize("name", linear_models.LIKELIHOODS)
def test_laplace_is_at_the_mode_with_the_curvature_there(name, weight):
    model = linear_models.made(name, weight=weight)
    mode, full = refine_laplace(model, tolerance=1e-24)
    assert float(slope(model, mode).abs().max()) < 1e-8
    expected = linear_models.dense_precision(model, model.predict(mode))
    torch.testing.assert_close(full.to_dense(), expected, **TIGHT)
    same, diagonal = refine_laplace(model, "diag", tolerance=1e-24)
    assert isinstance(full, Dense)
    assert isinstance(diagonal, Diagonal)
    assert torch.equal(mode, same)
    torch.testing.assert_close(diagonal.diagonal(), expected.diagonal(), **TIGHT)


@pytest.mark.parametrize("name", linear_models.LIKELIHOODS)
def test_the_curvature_is_the_hessian_of_the_log_joint(name):
    # In natural parameters a linear model's generalised Gauss-Newton matrix is exact.
    model = linear_models.made(name, weight=1.7)
    w = torch.randn(5)
    hessian = -torch.autograd.functional.hessian(model.log_joint, w)
    residuals, blocks = model.local(model.predict(w))
    torch.testing.assert_close(model.curvature(blocks, "full"), hessian, **TIGHT)
    torch.testing.assert_close(model.gradient(w, residuals), slope(model, w), **TIGHT)
    v = torch.randn(5)
    torch.testing.assert_close(model.curvature_matmul(blocks, v), hessian @ v, **TIGHT)


def test_pieces_of_the_data_add_up(monkeypatch):
    model = linear_models.made("pixels")
    _, blocks = model.local(model.outputs)
    whole = [model.curvature(blocks, kind) for kind in ("full", "diag")]
    monkeypatch.setattr("tyxe.predictive.linear_model.CHUNK", 5 * model.jacobian[0].numel())
    for kind, expected in zip(("full", "diag"), whole, strict=True):
        torch.testing.assert_close(model.curvature(blocks, kind), expected, **TIGHT)


def test_far_from_the_mode_newton_takes_shorter_steps():
    # Where exp(f) is far too small for the counts, a full step goes far too high.
    model = linear_models.made("poisson")
    far = LinearModel(**{**vars(model), "outputs": model.outputs - 12.0})
    start = slope(far, far.loc)
    full = far.loc + torch.linalg.solve(
        linear_models.dense_precision(far, far.predict(far.loc)), start
    )
    assert float(far.log_joint(full)) < float(far.log_joint(far.loc))
    mode, precision = refine_laplace(far)
    left = slope(far, mode)
    assert float(left @ precision.solve(left)) < 1e-8


def test_single_precision_converges():
    model = linear_models.made("categorical", weights=40)
    single = linear_models.in_single_precision(model)
    mode, precision = refine_laplace(single)
    assert mode.dtype == precision.dtype == torch.float32
    expected, _ = refine_laplace(model)
    torch.testing.assert_close(mode.double(), expected, rtol=1e-3, atol=1e-3)


def test_too_few_steps_are_told():
    with pytest.warns(tyxe.TyxeWarning, match=r"not converged in num_steps=1"):
        refine_laplace(linear_models.made("categorical"), num_steps=1)


# ------------------------------------------------------------------ variational


# With 80 weights there are fewer outputs than weights, and the steps are taken over outputs.
@pytest.mark.parametrize("weights", [5, 80])
@pytest.mark.parametrize("weight", [1.0, 2.5])
def test_one_natural_step_solves_linear_regression(weight, weights):
    model = linear_models.made("gaussian", weights, weight)
    mean, precision = refine_variational(model, rate=1.0, num_steps=1)
    expected_mean, expected_precision = linear_models.conjugate(model)
    torch.testing.assert_close(mean, expected_mean, **TIGHT)
    torch.testing.assert_close(precision.to_dense(), expected_precision, **TIGHT)
    mode, laplace = refine_laplace(model, tolerance=1e-24)
    torch.testing.assert_close(mode, expected_mean, **TIGHT)
    torch.testing.assert_close(laplace.to_dense(), expected_precision, **TIGHT)


# Points that stand for a standard normal: its quantiles, scaled to unit variance.
QUANTILES = torch.special.ndtri((torch.arange(200, dtype=torch.float64) + 0.5) / 200)
QUANTILES = QUANTILES / QUANTILES.square().mean().sqrt()


def by_quantiles(model, mean, precision, num_draws):
    scale = precision.inverse_quadratic(model.jacobian)[:, 0, 0].sqrt()
    for z in QUANTILES:
        yield model.predict(mean) + (z * scale).view_as(model.outputs)


# Of 15 outputs in all, by 3 weights or by 20.
@pytest.mark.parametrize(("structure", "weights"), [("full", 3), ("full", 20), ("diag", 3)])
def test_it_finds_the_optimum_of_the_elbo(monkeypatch, structure, weights):
    model, mean, precision = linear_models.best_gaussian(structure, weights)
    found, operator = linear_models.refined(
        monkeypatch, by_quantiles, model, structure, rate=0.7, num_steps=15
    )
    # What is left is the quantiles' error in E[r] and E[H]: here of two parts in a thousand.
    z = 0.5 + 1.5 * QUANTILES, 0.5 + 1.5 * linear_models.NODES
    for function in (torch.sigmoid, lambda f: f.sigmoid() * (-f).sigmoid()):
        exact = float(linear_models.WEIGHTS @ function(z[1]))
        assert float(function(z[0]).mean()) == pytest.approx(exact, rel=2e-3)
    torch.testing.assert_close(found, mean, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(operator.to_dense(), precision, rtol=5e-3, atol=5e-3)
    # It is not the Laplace approximation.
    mode, _ = refine_laplace(model)
    assert float((mode - mean).abs().max()) > 0.03


@pytest.mark.parametrize("weights", [5, 80])
def test_a_seed_gives_the_same_numbers(weights):
    model = linear_models.made("categorical", weights)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(refine_variational(model, num_steps=5, num_draws=1)[0])
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# ------------------------------------------------------------------ for users


PRIOR = tyxe.priors.IIDPrior(dist.Normal(0.1, 0.8))


def fitted(structure="full", positions=()):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
    x, y = torch.randn(10, *positions, 3), torch.randint(0, 3, (10, *positions))
    bnn = tyxe.LaplaceBNN(net, PRIOR, tyxe.likelihoods.Categorical(10), structure=structure)
    bnn.fit_curvature([(x, y)])
    return bnn, x, y


@pytest.mark.parametrize("structure", ["full", "diag"])
@pytest.mark.parametrize("positions", [(), (2,)])
@pytest.mark.parametrize("method", ["laplace", "variational"])
def test_a_refined_bnn_predicts_with_its_gaussian(method, positions, structure):
    bnn, x, y = fitted("kron", positions)
    refined = bnn.refine([(x[:3], y[:3]), (x[3:], y[3:])], method, structure, num_steps=30)
    test = torch.randn(4, *positions, 3)
    linear = bnn._linearize(test)
    rows, precision = jacobian(linear), refined.precision.to_dense()
    start = linear.blocks.flatten(bnn._mean_values())
    mean = linear.outputs + (rows @ (refined.mean - start)).view_as(linear.outputs)
    joint = rows @ torch.linalg.inv(precision) @ rows.mT
    blocks = [joint[:, i : i + 3, i : i + 3] for i in range(0, joint.shape[1], 3)]
    covariance = torch.stack(blocks, 1).reshape(4, *positions, 3, 3)
    expected = log_probit(mean, covariance)
    found = refined.predict(test, link="probit", batch_size=3)
    torch.testing.assert_close(found, expected, **TIGHT)
    error, log_likelihood = refined.evaluate([(x, y)].__iter__(), link="probit")
    scores = refined.predict(x, link="probit")
    assert float(error) == float((scores.argmax(-1) != y).sum())
    exact = scores.log_softmax(-1).gather(-1, y[..., None]).sum()
    torch.testing.assert_close(log_likelihood, exact, **TIGHT)
    assert refined.predict(x, num_predictions=5, aggregate=False).shape == (5, 10, *positions, 3)


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("method", ["laplace", "variational"])
def test_refining_what_is_exact_changes_nothing(method, temperature):
    # A linear net under Gaussian noise: the exact posterior, wherever the net's weights are.
    x, y = torch.randn(10, 3), torch.randn(10, 1)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(20, scale=0.5)
    options = {"structure": "full", "temperature": temperature}
    bnn = tyxe.LaplaceBNN(torch.nn.Linear(3, 1), PRIOR, likelihood, **options)
    bnn.fit_curvature([(x, y)])
    options = {"num_steps": 1, "rate": 1.0} if method == "variational" else {}
    refined = bnn.refine([(x, y)], method, **options)
    design, weight = torch.cat([x, torch.ones(10, 1)], 1), 2.0 / temperature / 0.25
    precision = weight * design.mT @ design + torch.eye(4) / 0.64
    torch.testing.assert_close(refined.precision.to_dense(), precision, **TIGHT)
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), precision, **TIGHT)
    right = weight * design.mT @ y[:, 0] + 0.1 / 0.64
    torch.testing.assert_close(refined.mean, torch.linalg.solve(precision, right), **TIGHT)


def test_weights_of_1_and_a_label_that_could_be_ignored_are_none():
    ignoring = tyxe.likelihoods.Categorical(10, ignore_index=-100)
    bnn, x, y = fitted()
    bnn.likelihood = ignoring
    found = [bnn.refine(data).mean for data in ([(x, y)], [(x, y, torch.ones(10))])]
    bnn.likelihood = tyxe.likelihoods.Categorical(10)
    expected = bnn.refine([(x, y)]).mean
    assert all(torch.equal(mean, expected) for mean in found)
    bnn.likelihood = ignoring
    with pytest.raises(ValueError, match="counts ranges from 0 to 1; expected 1 for refine"):
        bnn.refine([(x, y.index_fill(0, torch.tensor([3]), -100))])


def test_inside_of_autocast_only_the_net_is_in_half_precision():
    bnn, x, y = fitted()
    bnn, x = bnn.float(), x.float()
    expected = bnn.refine([(x, y)])
    with torch.autocast("cpu", torch.bfloat16):
        found = bnn.refine([(x, y)])
        predicted = found.predict(x, link="probit")
    near = {"rtol": 0.03, "atol": 0.03}
    torch.testing.assert_close(found.mean, expected.mean, **near)
    torch.testing.assert_close(predicted, expected.predict(x, link="probit"), **near)


def test_weights_that_have_changed_since():
    bnn, x, y = fitted()
    refined = bnn.refine([(x, y)], structure="diag")
    before = refined.predict(x, link="probit")
    single = copy.deepcopy(refined)
    single.bnn.float()
    torch.testing.assert_close(
        single.predict(x.float(), link="probit").double(), before, rtol=1e-4, atol=1e-4
    )
    bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=0.1), 2)
    with pytest.raises(RuntimeError, match=r"have changed since they were refined"):
        refined.predict(x)


def test_what_cannot_be_refined(monkeypatch):
    bnn, x, y = fitted()
    with pytest.raises(
        ValueError, match=r"method is 'vi'; expected one of 'laplace', 'variational'"
    ):
        bnn.refine([(x, y)], "vi")
    with pytest.raises(ValueError, match=r"the loader is empty"):
        bnn.refine([])
    bnn.options = tyxe.LaplaceOptions(curvature_weight=3.0)
    with pytest.raises(ValueError, match=r"curvature_weight is 3: .* no one objective to refine"):
        bnn.refine([(x, y)])
    bnn.options = tyxe.LaplaceOptions()
    monkeypatch.setattr("tyxe.check.MEMORY_LIMIT", 1000)
    with pytest.raises(ValueError, match=r"the Jacobians of 10 points would take 0.0 GiB"):
        bnn.refine([(x, y)])
    with pytest.raises(ValueError, match=r"the Jacobians of 6 points would take 0.0 GiB"):
        bnn.refine([(x[:6], y[:6]), (x[6:], y[6:])])  # as soon as it is too much
    bnn.net_guide.state = None
    with pytest.raises(RuntimeError, match=r"no curvature yet"):
        bnn.refine([(x, y)])


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"structure": "kron"}, r"structure is 'kron'; expected one of 'full', 'diag'"),
        ({"rate": 0.0}, r"rate is 0.0; expected a number above 0 and at most 1"),
        ({"num_draws": 0}, r"num_draws is 0; expected 1 or more"),
    ],
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(ValueError, match=message):
        refine_variational(linear_models.made("gaussian"), **options)
    if "structure" in options:
        with pytest.raises(ValueError, match=message):
            refine_laplace(linear_models.made("gaussian"), **options)
