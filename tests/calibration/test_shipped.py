"""Calibrated posteriors as plain modules and as files."""

from contextlib import nullcontext
from functools import partial

import pyro
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL
from tyxe.calibration import (
    Calibrated,
    CalibratedModule,
    ScaleFactor,
    SplitConformal,
    TemperatureScaling,
)
from tyxe.guides import AutoNormal

DRAWS = torch.Generator().manual_seed(0)
X, NOISE = torch.randn(60, 2, generator=DRAWS), torch.randn(60, 1, generator=DRAWS)
CLASSES = [(X, (X[:, 0] + NOISE[:, 0] > 0).long())]
NUMBERS = [(X, X[:, :1] + NOISE)]
COUNTS = [(X, X[:, :1].abs().round())]


def net(outputs):
    found = nn.Linear(2, outputs)
    found.weight.data[:, 0] = torch.linspace(-1, 1, outputs)  # better than by chance
    return found


def made(kind, outputs, **options):
    """Return what makes a BNN."""
    guide = partial(AutoNormal, init_scale=0.1)
    return lambda: tyxe.VariationalBNN(net(outputs), NORMAL, kind(60, **options), guide)


classifier = made(tyxe.likelihoods.Categorical, 2)
regression = made(tyxe.likelihoods.HomoskedasticGaussian, 1, scale=0.5)
predicted_noise = made(tyxe.likelihoods.HeteroskedasticGaussian, 2)
counts = made(tyxe.likelihoods.Poisson, 1)
INTERVALS = partial(SplitConformal, level=0.8)
CASES = {
    "temperature": (TemperatureScaling, classifier, CLASSES),
    "sets": (partial(SplitConformal, "aps", 0.8), classifier, CLASSES),
    "factor": (ScaleFactor, regression, NUMBERS),
    "factor of predicted noise": (ScaleFactor, predicted_noise, NUMBERS),
    "intervals": (INTERVALS, regression, NUMBERS),
    "intervals of predicted noise": (INTERVALS, predicted_noise, NUMBERS),
    "intervals of counts": (INTERVALS, counts, COUNTS),
    "quantiles": (partial(SplitConformal, "cqr", 0.8), predicted_noise, NUMBERS),
}


def leaves(found):
    return [found] if isinstance(found, torch.Tensor) else [t for one in found for t in leaves(one)]


def assert_close(found, expected, **tolerance):
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("name", CASES)
def test_an_ensemble_is_calibrated_as_the_bnn_is_and_exported(name):
    make, model, data = CASES[name]
    wrapped = make().wrap(model(), data, num_predictions=16)
    pyro.set_rng_seed(1)
    ensemble = wrapped.to_ensemble(5)
    program = torch.export.export(ensemble, (X,)).module()
    assert_close(program(X + 1), ensemble(X + 1))
    found = ensemble(X)
    pyro.set_rng_seed(1)
    expected = wrapped.predict(X, num_predictions=5)
    if not wrapped.calibrator.replaces:
        plain, found = found
        pyro.set_rng_seed(1)
        assert_close(plain, wrapped.bnn.predict(X, num_predictions=5))
    assert_close(found, expected)


def test_a_wrapped_deep_ensemble_is_exported():
    ensemble = tyxe.EnsembleBNN(lambda _: classifier(), 2)
    wrapped = TemperatureScaling().wrap(ensemble, CLASSES, num_predictions=4)
    assert isinstance(wrapped.to_ensemble(3), CalibratedModule)
    assert not any(part.training for part in wrapped.to_ensemble(3).modules())
    assert wrapped.to_ensemble(3)(X).shape == (60, 2)


def test_what_was_calibrated_without_draws_is_not_exported():
    laplace = tyxe.LaplaceBNN(net(2), NORMAL, tyxe.likelihoods.Categorical(60))
    laplace.fit_curvature(CLASSES)
    wrapped = TemperatureScaling().wrap(laplace, CLASSES)
    with pytest.raises(ValueError, match=r"by predictive='glm' and.*, predictive='bnn'\)"):
        wrapped.to_ensemble(4)
    draws = TemperatureScaling().wrap(laplace, CLASSES, predictive="bnn", num_predictions=4)
    assert draws.to_ensemble(4)(X).shape == (60, 2)


@pytest.mark.parametrize("name", CASES)
def test_one_file_holds_both(name, tmp_path):
    make, model, data = CASES[name]
    wrapped = make().wrap(model(), data, num_predictions=0)
    wrapped.save(tmp_path / "both.tyxe")
    loaded = Calibrated(model(), make()).load(tmp_path / "both.tyxe")
    assert_close(loaded.predict(X), wrapped.predict(X), rtol=0, atol=0)
    wrapped.calibrator.save(tmp_path / "alone.tyxe")
    assert vars(make().load(tmp_path / "alone.tyxe")) == vars(wrapped.calibrator)


def test_a_file_says_that_draws_had_statistics_of_norms_from_a_loader(tmp_path):
    def normed():
        parts = nn.Sequential(nn.BatchNorm1d(2), net(2))
        guide = partial(AutoNormal, init_scale=0.1)
        return tyxe.VariationalBNN(parts, NORMAL, tyxe.likelihoods.Categorical(60), guide)

    bnn = normed()
    bnn.update_norm_statistics(CLASSES)
    tempered = TemperatureScaling().wrap(bnn, CLASSES, num_predictions=2)
    SplitConformal().wrap(tempered, CLASSES).save(tmp_path / "bnn.tyxe")
    fresh = Calibrated(Calibrated(normed(), TemperatureScaling()), SplitConformal())
    with pytest.warns(tyxe.TyxeWarning, match="update_norm_statistics") as warned:
        fresh.load(tmp_path / "bnn.tyxe")
    assert len(warned) == 1


@pytest.mark.parametrize(
    ("score", "randomized", "is_other"),
    [("aps", False, True), ("aps", True, False), ("lac", False, False)],
)
def test_a_file_with_a_threshold_of_earlier_scores_gives_a_warning(
    score, randomized, is_other, tmp_path
):
    calibrator = SplitConformal(score, 0.8, randomized=randomized)
    wrapped = calibrator.wrap(classifier(), CLASSES, num_predictions=0)
    for saved in (calibrator, wrapped):
        fresh = SplitConformal() if saved is calibrator else Calibrated(classifier(), calibrator)
        saved.save(tmp_path / "new.tyxe")
        fresh.load(tmp_path / "new.tyxe")
        content = saved._content()
        del content["version"]
        tyxe.files.write(tmp_path / "old.tyxe", content)
        warns = pytest.warns(
            tyxe.TyxeWarning, match=r"old.tyxe is of an earlier version.*fit again"
        )
        with warns if is_other else nullcontext():
            fresh.load(tmp_path / "old.tyxe")


def test_files_of_others_change_nothing(tmp_path):
    wrapped = TemperatureScaling().wrap(classifier(), CLASSES, num_predictions=0)
    path = tmp_path / "one.tyxe"
    wrapped.save(path)
    for fresh, error, match in (
        (Calibrated(classifier(), ScaleFactor()), ValueError, "of a TemperatureScaling; expected"),
        (Calibrated(regression(), TemperatureScaling()), RuntimeError, "state"),
    ):
        before = [p.clone() for p in fresh.bnn.parameters()]
        with pytest.raises(error, match=match):
            fresh.load(path)
        assert all(map(torch.equal, before, fresh.bnn.parameters()))
        assert not any(v for n, v in vars(fresh.calibrator).items() if n == "temperature")
    with pytest.raises(ValueError, match=r"of a TemperatureScaling: call Calibrated\(bnn, Temp"):
        classifier().load(path)
    wrapped.calibrator.save(path)
    with pytest.raises(ValueError, match="is of a TemperatureScaling; expected"):
        ScaleFactor().load(path)
    with pytest.raises(ValueError, match="of a calibrator alone"):
        Calibrated(classifier(), TemperatureScaling()).load(path)


def test_a_last_layer_in_closed_form_is_calibrated():
    laplace = tyxe.LaplaceBNN(net(2), NORMAL, tyxe.likelihoods.Categorical(60))
    laplace.fit_curvature(CLASSES)
    wrapped = TemperatureScaling().wrap(laplace, CLASSES, predictive="glm", link="probit")
    module = wrapped.to_ensemble(closed_form=True)
    torch.testing.assert_close(module(X), wrapped.predict(X))
    with pytest.raises(ValueError, match=r"link='probit', and.*predictive='glm', link='bridge'\)"):
        wrapped.to_ensemble(closed_form=True, link="bridge")
    by_default = TemperatureScaling().wrap(laplace, CLASSES)
    with pytest.raises(ValueError, match=r"link='mc', and.*link='probit'\)"):
        by_default.to_ensemble(closed_form=True)


PAIRS_OF_CALIBRATORS = {
    "classes": (TemperatureScaling, partial(SplitConformal, "aps", 0.8), "sets"),
    "numbers": (ScaleFactor, partial(SplitConformal, "cqr", 0.8), "factor of predicted noise"),
}


def twice(kind, **options):
    """Return a BNN whose calibrated predictions are those that intervals or sets are of."""
    first, second, name = PAIRS_OF_CALIBRATORS[kind]
    _, model, data = CASES[name]
    tempered = first().wrap(model(), data, **options)
    return tempered, second().wrap(tempered, data), data


@pytest.mark.parametrize("kind", PAIRS_OF_CALIBRATORS)
def test_sets_are_of_predictions_that_another_calibrator_has_scaled(kind):
    tempered, both, [(x, y)] = twice(kind, num_predictions=0)
    found, likelihood = tempered.predict(x), tempered.likelihood
    own = PAIRS_OF_CALIBRATORS[kind][1]()
    own.fit(own.of(found, likelihood), y)
    assert both.calibrator.threshold == own.threshold
    assert_close(both.predict(x), own.predict(own.of(found, likelihood)), rtol=0, atol=0)
    held = tyxe.calibration.coverage(both.predict(x), y)
    assert 0.8 <= held <= 0.8 + 2 / len(x)


@pytest.mark.parametrize("kind", PAIRS_OF_CALIBRATORS)
def test_two_calibrators_are_exported_together_and_saved_in_one_file(kind, tmp_path):
    tempered, both, [(x, _)] = twice(kind, num_predictions=16)
    pyro.set_rng_seed(1)
    ensemble = both.to_ensemble(5)
    scaled, found = torch.export.export(ensemble, (x,)).module()(x)
    pyro.set_rng_seed(1)
    assert_close(scaled, tempered.predict(x, num_predictions=5))
    pyro.set_rng_seed(1)
    assert_close(found, both.predict(x, num_predictions=5))

    first, second, name = PAIRS_OF_CALIBRATORS[kind]
    path, model = tmp_path / "both.tyxe", CASES[name][1]
    both.save(path)
    loaded = Calibrated(Calibrated(model(), first()), second()).load(path)
    for each in (both, loaded):
        pyro.set_rng_seed(2)
        kept = each.predict(x)
        pyro.set_rng_seed(2)
        assert_close(kept, both.predict(x), rtol=0, atol=0)
    assert vars(loaded.bnn.calibrator) == vars(tempered.calibrator)


def test_files_of_one_calibrator_and_of_two_are_told_apart(tmp_path):
    tempered, both, _ = twice("classes", num_predictions=0)
    tempered.save(tmp_path / "one.tyxe")
    both.save(tmp_path / "two.tyxe")
    nested = Calibrated(Calibrated(classifier(), TemperatureScaling()), SplitConformal())
    with pytest.raises(ValueError, match="is of a TemperatureScaling; expected a SplitConformal"):
        nested.load(tmp_path / "one.tyxe")
    flat = Calibrated(classifier(), SplitConformal())
    with pytest.raises(
        ValueError, match=r"Calibrated\(Calibrated\(bnn, TemperatureScaling\(\)\), S"
    ):
        flat.load(tmp_path / "two.tyxe")
    alone = SplitConformal("aps", 0.8).wrap(classifier(), CLASSES, num_predictions=0)
    alone.save(tmp_path / "sets.tyxe")
    with pytest.raises(ValueError, match="is of no calibrator; expected a TemperatureScaling"):
        nested.load(tmp_path / "sets.tyxe")
    assert nested.bnn.calibrator.temperature is None
    assert nested.calibrator.threshold is None


def test_sets_are_no_predictions_to_calibrate_or_evaluate():
    sets = SplitConformal("aps", 0.8).wrap(classifier(), CLASSES, num_predictions=0)
    with pytest.raises(TypeError, match=r"SplitConformal does not return.*wrap its bnn"):
        TemperatureScaling().wrap(sets, CLASSES)
    with pytest.raises(TypeError, match="use coverage and size"):
        sets.evaluate(*CLASSES[0])


def test_the_options_of_the_first_calibrator_hold_for_the_second():
    laplace = tyxe.LaplaceBNN(net(2), NORMAL, tyxe.likelihoods.Categorical(60))
    laplace.fit_curvature(CLASSES)
    how = {"predictive": "glm", "link": "probit"}
    tempered = TemperatureScaling().wrap(laplace, CLASSES, **how)
    both = SplitConformal("lac", 0.8).wrap(tempered, CLASSES)
    scaled, found = both.to_ensemble(closed_form=True)(X)
    torch.testing.assert_close(scaled, tempered.predict(X))
    assert torch.equal(found, both.predict(X))
    with pytest.raises(ValueError, match=r"predictive='glm'.*predictive='bnn'"):
        both.to_ensemble(4)


WEIGHTS = torch.arange(60) % 3.0


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("name", ["temperature", "factor", "factor of predicted noise"])
def test_calibrated_predictions_are_evaluated_by_weights(name, reduction):
    make, model, [(x, y)] = CASES[name]
    wrapped = make().wrap(model(), [(x, y)], num_predictions=0)
    found, kept = wrapped.predict(x), WEIGHTS > 0
    if name == "temperature":
        logs = found.log_softmax(-1).gather(1, y[:, None])[:, 0]
        errors = (found.argmax(-1) != y).float()
    else:
        mean, scale = found
        logs = torch.distributions.Normal(mean, scale).log_prob(y)[:, 0]
        errors = (mean - y).square()[:, 0]
    expected = torch.stack([errors, logs])[:, kept]
    if reduction != "none":
        expected = (expected * WEIGHTS[kept]).sum(1)
    if reduction == "mean":
        expected = expected / WEIGHTS.sum()
    loader = [(x[:20], y[:20], WEIGHTS[:20]), (x[20:], y[20:], WEIGHTS[20:])]
    torch.testing.assert_close(wrapped.evaluate(loader, reduction=reduction), tuple(expected))


def test_calibrated_heavy_tails_are_evaluated_as_such():
    y = X.sum(1, keepdim=True) + torch.distributions.StudentT(3.0).sample((60, 1))
    noise = tyxe.likelihoods.StudentT(60, scale=0.5, df=3.0)
    bnn = tyxe.VariationalBNN(net(1), NORMAL, noise, AutoNormal)
    factor = ScaleFactor().wrap(bnn, [(X, y)], num_predictions=0)
    mean, std = factor.predict(X)
    expected = torch.distributions.StudentT(3.0, mean, std / 3**0.5).log_prob(y).sum()
    torch.testing.assert_close(factor.evaluate(X, y)[1], expected)
    factor.calibrator.factor = 1.0
    expected = bnn.evaluate(X, y, num_predictions=0)
    torch.testing.assert_close(factor.evaluate(X, y), expected)


@pytest.mark.parametrize("kind", ["Bernoulli", "Ordinal"])
def test_tempered_labels_are_evaluated_as_classes(kind):
    y = CLASSES[0][1] if kind == "Ordinal" else CLASSES[0][1].float()[:, None]
    likelihood = {
        "Bernoulli": lambda: tyxe.likelihoods.Bernoulli(60, event_dim=1),
        "Ordinal": lambda: tyxe.likelihoods.Ordinal(60, 2).requires_grad_(False),
    }[kind]()
    plain = net(1)
    plain.weight.data[:, 0] = 1.0
    bnn = tyxe.VariationalBNN(plain, NORMAL, likelihood, AutoNormal)
    tempered = TemperatureScaling().wrap(bnn, [(X, y)], num_predictions=0)
    temperature = tempered.calibrator.temperature
    logits = bnn.likelihood.class_logits(bnn.predict(X, num_predictions=0)) / temperature
    logits = logits.flatten(0, -2)
    expected = -nn.functional.cross_entropy(logits, CLASSES[0][1], reduction="sum")
    found = tempered.evaluate(X, y)
    torch.testing.assert_close(found[1], expected)
    assert found[0] == (logits.argmax(-1) != CLASSES[0][1]).sum()
    assert found[1] > bnn.evaluate(X, y, num_predictions=0)[1]


def test_a_mean_and_a_scale_may_come_as_a_list():
    mean, scale = torch.zeros(2), torch.ones(2)
    noise = tyxe.likelihoods.HomoskedasticGaussian(2, scale=1.0)
    assert_close(noise.mean_and_scale([mean, scale]), (mean, scale))


def test_a_plain_net_is_calibrated_and_exported():
    plain = net(2)
    with torch.no_grad():
        scaling = TemperatureScaling().fit(plain(X), CLASSES[0][1])
        sets = SplitConformal("lac", 0.8).fit(plain(X).softmax(-1), CLASSES[0][1])
    program = torch.export.export(CalibratedModule(plain, scaling), (X,)).module()
    torch.testing.assert_close(program(X + 1), scaling(plain(X + 1)))
    probs = nn.Sequential(plain, nn.Softmax(-1))
    found, held = CalibratedModule(probs, sets)(X)
    assert torch.equal(held, sets(found))
