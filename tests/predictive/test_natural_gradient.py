"""Steps over outputs are the steps over weights: the same Gaussian, the same law of draws."""

import dataclasses

import pytest
import torch

import tyxe
from tests.oracles import linear_models
from tyxe.linalg import Dense, Diagonal, LowRank
from tyxe.predictive import refine_variational
from tyxe.predictive.natural_gradient import OutputIterate, WeightIterate, started

TIGHT = {"rtol": 1e-8, "atol": 1e-8}


pytestmark = pytest.mark.usefixtures("double")


def at_the_mean(model, mean, precision, num_draws):
    yield model.predict(mean)


def around_the_mean(model, mean, precision, num_draws):
    """Outputs that depend on mean and precision, and on no random number."""
    sd = precision.inverse_quadratic(model.jacobian).diagonal(dim1=1, dim2=2).sqrt()
    for z in (-1.3, 0.4, 1.1):
        yield model.predict(mean) + z * sd.view_as(model.outputs)


def after_some_steps(model):
    """An iterate whose `D`, `c` and `a` are no longer those of the start."""
    iterate = started(model, "full")
    for _ in range(5):
        iterate = iterate.moved(*model.local(iterate._center()), 0.2)
    return iterate


# ------------------------------------------------------------------ the same Gaussian


@pytest.mark.parametrize("draws", [at_the_mean, around_the_mean])
@pytest.mark.parametrize("weights", [5, 80])
@pytest.mark.parametrize("name", linear_models.LIKELIHOODS)
def test_fifty_steps_are_those_of_the_formula(monkeypatch, name, weights, draws):
    model = linear_models.made(name, weights, weight=2.5)
    mean, precision = linear_models.refined(monkeypatch, draws, model, rate=0.1, num_steps=50)
    expected_mean, expected_precision = linear_models.natural_gradient(model, draws, 0.1, 50)
    assert isinstance(precision, LowRank if weights == 80 else Dense)
    torch.testing.assert_close(mean, expected_mean, **TIGHT)
    torch.testing.assert_close(precision.to_dense(), expected_precision, **TIGHT)
    rows = model.jacobian
    torch.testing.assert_close(
        precision.inverse_quadratic(rows),
        rows @ torch.linalg.inv(expected_precision) @ rows.mT,
        **TIGHT,
    )


@pytest.mark.parametrize(("weights", "kind"), [(36, WeightIterate), (37, OutputIterate)])
def test_outputs_are_chosen_where_they_are_fewer(weights, kind):
    model = linear_models.made("categorical", weights)
    assert isinstance(started(model, "full"), kind)
    assert isinstance(started(model, "diag"), WeightIterate)
    assert isinstance(refine_variational(model, "diag", num_steps=1)[1], Diagonal)
    # Without a prior on every weight there is no kernel.
    free = dataclasses.replace(model, prior_precision=torch.eye(weights)[0])
    assert isinstance(started(free, "full"), WeightIterate)


# ------------------------------------------------------------------ the same draws, in law


@pytest.mark.parametrize("weights", [5, 80])
@pytest.mark.parametrize("name", ["categorical", "pixels", "bernoulli"])
def test_draws_have_the_moments_of_the_posterior(name, weights):
    model = linear_models.made(name, weights, weight=2.5)
    iterate = after_some_steps(model)
    mean, precision = iterate.posterior()
    rows = model.jacobian.flatten(0, 1)
    joint = rows @ torch.linalg.inv(precision.to_dense()) @ rows.mT
    pairs = 5000
    outputs = torch.stack(list(iterate.draws(2 * pairs))).flatten(1)
    # Mirrored pairs have the mean exactly, and a draw each of the covariance.
    torch.testing.assert_close(outputs.mean(0), model.predict(mean).flatten(), **TIGHT)
    deviations = outputs[::2] - outputs.mean(0)
    found = deviations.mT @ deviations / pairs
    # The variance of x_i x_j for normal x of mean zero is S_ii S_jj + S_ij^2.
    variances = joint.diagonal()
    error = ((variances[:, None] * variances + joint.square()) / pairs).sqrt()
    assert float(((found - joint).abs() / error).max()) < 5.5


def test_mirrored_draws_come_in_pairs():
    iterate = after_some_steps(linear_models.made("categorical", 80))
    outputs, center = list(iterate.draws(3)), iterate._center()
    assert len(outputs) == 3
    torch.testing.assert_close(outputs[0] + outputs[1], 2 * center, **TIGHT)
    assert float((outputs[2] - outputs[0]).abs().max()) > 0.1


# ------------------------------------------------------------------ the square root


@pytest.mark.parametrize("probabilities", [False, True])
def test_what_classes_leave_open_costs_nothing(probabilities):
    # The Hessian of logits has no say along (1, ..., 1); a mean of those of probabilities has.
    likelihood = tyxe.likelihoods.Categorical(12, logit_predictions=not probabilities)
    outputs = torch.randn(2, 12, 3)
    outputs = outputs.softmax(-1) if probabilities else outputs
    blocks = torch.stack([tyxe.likelihoods.output_hessian(likelihood, one) for one in outputs])
    rows = torch.randn(36, 80)
    iterate = OutputIterate(None, None, rows @ rows.mT, blocks.mean(0), None)
    assert iterate.root.shape == (12, 3, 3 if probabilities else 2)
    torch.testing.assert_close(iterate.root @ iterate.root.mT, iterate.hessians[:, 0], **TIGHT)


def test_data_that_say_nothing_leave_the_prior(monkeypatch):
    model = linear_models.made("categorical", 80)
    saturated = torch.tensor([2000.0, 0.0, -2000.0]).expand(12, 3)
    model = dataclasses.replace(model, outputs=saturated, targets=torch.zeros(12).long())
    mean, precision = linear_models.refined(monkeypatch, at_the_mean, model, rate=1.0, num_steps=1)
    torch.testing.assert_close(mean, model.prior_mean, **TIGHT)
    torch.testing.assert_close(precision.to_dense(), model.prior_precision.diag(), **TIGHT)


@pytest.mark.parametrize("name", linear_models.LIKELIHOODS)
def test_points_that_are_given_twice(monkeypatch, name):
    # Their kernel is singular, and nothing takes a root of it.
    model = linear_models.made(name, 80)
    first = torch.arange(12) % 6
    model = dataclasses.replace(
        model,
        jacobian=model.jacobian[first],
        outputs=model.outputs[first],
        targets=model.targets[first],
    )
    mean, precision = linear_models.refined(
        monkeypatch, around_the_mean, model, rate=0.1, num_steps=50
    )
    expected_mean, expected_precision = linear_models.natural_gradient(
        model, around_the_mean, 0.1, 50
    )
    torch.testing.assert_close(mean, expected_mean, **TIGHT)
    torch.testing.assert_close(precision.to_dense(), expected_precision, **TIGHT)
    assert bool(torch.stack(list(started(model, "full").draws(2))).isfinite().all())


# ------------------------------------------------------------------ numbers


def test_single_precision_stays_close(monkeypatch):
    model = linear_models.made("categorical", 80)
    single = linear_models.in_single_precision(model)
    mean, precision = linear_models.refined(monkeypatch, around_the_mean, single, num_steps=50)
    assert mean.dtype == precision.dtype == torch.float32
    assert precision.factor.shape == (80, 36)
    expected_mean, expected = linear_models.refined(
        monkeypatch, around_the_mean, model, num_steps=50
    )
    torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        precision.to_dense().double(), expected.to_dense(), rtol=1e-4, atol=1e-3
    )
    # The library's own draws are in double precision, where the zero of classes is seen as one.
    _, precision = refine_variational(single, num_steps=5)
    assert precision.dtype == torch.float32
    assert precision.factor.shape == (80, 24)


def test_pieces_of_the_jacobian_add_up(monkeypatch):
    model = linear_models.made("pixels", 80)
    whole = linear_models.refined(monkeypatch, at_the_mean, model, num_steps=3)
    monkeypatch.setattr("tyxe.predictive.natural_gradient.CHUNK", 7 * 72)
    mean, precision = linear_models.refined(monkeypatch, at_the_mean, model, num_steps=3)
    torch.testing.assert_close(mean, whole[0], **TIGHT)
    torch.testing.assert_close(precision.to_dense(), whole[1].to_dense(), **TIGHT)


def test_divergence_is_told():
    # Where exp(f) is far too small for the counts, a full step goes far too high.
    model = linear_models.made("poisson", 80)
    far = dataclasses.replace(model, outputs=model.outputs - 12.0)
    for structure in ("full", "diag"):
        with pytest.raises(RuntimeError, match=r"diverged at step \d+ of 20 with rate=1.0: use a"):
            refine_variational(far, structure, rate=1.0, num_steps=20)
    mean, _ = refine_variational(far, rate=0.02, num_steps=20)
    assert bool(mean.isfinite().all())


def test_what_is_not_finite_at_the_start():
    model = linear_models.made("poisson", 80)
    with pytest.raises(ValueError, match=r"the output Hessian has 12 elements that are not finite"):
        refine_variational(dataclasses.replace(model, outputs=model.outputs + 1000.0))
    model.jacobian[3, 0, 7] = torch.nan
    # Of its row and of its column.
    with pytest.raises(ValueError, match=r"the kernel of the outputs has 23 elements that are not"):
        refine_variational(model)
