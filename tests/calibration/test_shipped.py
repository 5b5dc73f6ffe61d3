"""Calibrated posteriors as plain modules and as files."""

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
    "sets": (partial(SplitConformal, "aps", 0.8, False), classifier, CLASSES),
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
