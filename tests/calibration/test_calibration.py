"""tyxe.calibration: known temperatures, coverage by simulation, wrapped BNNs, files, bad input."""

import copy
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, mean_field
from tests.oracles.nets import NetOf
from tyxe.calibration import ScaleFactor, SplitConformal, TemperatureScaling, coverage, size
from tyxe.data import Targets


def classified(n, temperature=1.0, classes=5, seed=0):
    """Return logits, and targets that are drawn from them at a temperature."""
    draw = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, classes, generator=draw, dtype=torch.float64)
    probs = (logits / temperature).softmax(-1)
    return logits, torch.multinomial(probs, 1, generator=draw)[:, 0]


# --- scaling ------------------------------------------------------------------------------------


def test_the_temperature_minimises_the_loss():
    logits, y = classified(200, 2.0)
    scaling = TemperatureScaling().fit(logits, y)

    def loss(log_temperature):
        return float(nn.functional.cross_entropy(logits / math.exp(log_temperature), y))

    best = optimize.minimize_scalar(loss, bounds=(-3, 3), method="bounded", options={"xatol": 1e-8})
    assert scaling.temperature == pytest.approx(math.exp(best.x), rel=1e-5)
    torch.testing.assert_close(scaling(logits), logits / scaling.temperature)
    assert torch.equal(scaling(logits).argmax(-1), logits.argmax(-1))


def test_shifted_logits_and_pixels_have_the_same_temperature():
    logits, y = classified(600)
    found = TemperatureScaling().fit(logits, y).temperature
    shifted = TemperatureScaling().fit(logits + torch.randn(600, 1), y).temperature
    pixels = TemperatureScaling().fit(logits.reshape(6, 10, 10, 5), y.reshape(6, 10, 10))
    assert found == pytest.approx(shifted) == pytest.approx(pixels.temperature)


@pytest.mark.parametrize("times", [1e-6, 1e6])
def test_logits_of_any_size_have_a_temperature(times):
    logits, y = classified(200, 2.0)
    found = TemperatureScaling().fit(times * logits, y).temperature
    assert found == pytest.approx(times * TemperatureScaling().fit(logits, y).temperature)


@pytest.mark.parametrize("soft", [False, True])
def test_a_class_that_the_net_masks_has_no_effect_on_the_temperature(soft):
    logits, y = classified(200, 2.0)
    masked = nn.functional.pad(logits, (0, 1), value=-math.inf)
    targets = nn.functional.one_hot(y, 6).double() if soft else y
    found = TemperatureScaling().fit(masked, targets).temperature
    assert found == pytest.approx(TemperatureScaling().fit(logits, y).temperature)


# --- conformal ----------------------------------------------------------------------------------


def probabilities(n):
    logits = torch.randn(n, 4, dtype=torch.float64)
    return (0.5 * logits).softmax(-1), torch.multinomial(logits.softmax(-1), 1)[:, 0]


def pairs(n):
    x = torch.randn(n, dtype=torch.float64)
    return (x, 0.2 + x.square()), x + torch.randn(n, dtype=torch.float64)


def quantiles(n):
    (mean, scale), y = pairs(n)
    return (mean - scale, mean + 0.3 * scale), y


randomized = functools.partial(SplitConformal, "aps", randomized=True)
SCORES = {"lac": probabilities, "aps": probabilities, "normalized": pairs, "cqr": quantiles}


@pytest.mark.parametrize(("score", "level"), [*((score, 0.7) for score in SCORES), ("aps", 0.9)])
def test_coverage_is_within_its_band(score, level):
    """Of a new point, over calibration sets: a binomial of so many independent ones."""
    calibration, new, simulations = 39, 1, 1_500
    covered = 0
    for _ in range(simulations):
        make = randomized if score == "aps" else functools.partial(SplitConformal, score)
        conformal = make(level=level).fit(*SCORES[score](calibration))
        predictions, y = SCORES[score](new)
        covered += coverage(conformal.predict(predictions), y)
    exact = math.ceil((calibration + 1) * level - 1e-9) / (calibration + 1)
    assert level <= exact <= level + 1 / (calibration + 1)
    low, high = stats.binom.interval(0.999, simulations, exact)
    assert low <= covered <= high


@pytest.mark.parametrize("level", [0.3, 0.7, 0.9])
def test_default_sets_of_classes_are_the_same_each_time_and_cover(level):
    covered = 0
    for _ in range(1_500):
        conformal = SplitConformal(level=level).fit(*probabilities(39))
        probs, y = probabilities(3)
        sets = conformal.predict(probs)
        assert torch.equal(sets, conformal.predict(probs))
        assert torch.equal(sets[1:2], conformal.predict(probs[1:2]))
        assert bool(sets.gather(1, probs.argmax(1, keepdim=True)).all())
        covered += coverage(sets[:1], y[:1])
    # More than the level, where the most likely class is right more often.
    assert covered >= stats.binom.ppf(0.001, 1_500, level)


def test_random_sets_differ_from_call_to_call():
    conformal = randomized(level=0.7).fit(*probabilities(200))
    probs, _ = probabilities(200)
    assert not torch.equal(conformal.predict(probs), conformal.predict(probs))


def test_thresholds_by_hand():
    probs = torch.tensor([[0.6, 0.3, 0.1]] * 9)
    y = torch.tensor([0] * 6 + [1] * 2 + [2])
    lac = SplitConformal("lac", 0.8).fit(probs, y)
    assert lac.threshold == pytest.approx(0.7)  # the 8th of 9: 6 of .4, 2 of .7, one of .9
    assert lac.predict(probs[:1]).tolist() == [[True, True, False]]
    assert size(lac.predict(probs)) == 2
    aps = SplitConformal(level=0.8).fit(probs, y)
    assert aps.score == "aps"
    assert aps.threshold == pytest.approx(0.6)  # 0, .6, .9
    assert aps.predict(torch.tensor([[0.1, 0.4, 0.5]])).tolist() == [[False, True, True]]
    assert aps.predict(torch.tensor([[0.1, 0.2, 0.7]])).tolist() == [[False, False, True]]
    mean, scale, targets = torch.zeros(4), torch.ones(4), torch.tensor([1.0, -2.0, 3.0, 0.5])
    conformal = SplitConformal(level=0.6).fit((mean, scale), targets)
    lower, upper = conformal.predict((mean, 2 * scale))
    assert conformal.score == "normalized"
    assert lower.tolist() == [-4.0] * 4
    assert upper.tolist() == [4.0] * 4
    # Of several numbers all have to be held.
    ends = torch.zeros(2, 2), torch.ones(2, 2)
    assert coverage(ends, torch.tensor([[0.5, 0.5], [0.5, 2.0]])) == 0.5


@pytest.mark.parametrize("score", ["normalized", "cqr"])
@pytest.mark.parametrize("of", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_targets", [torch.float64, torch.float32])
@given(seed=st.integers(0, 10**6), outputs=st.sampled_from([(), (3,)]))
@settings(max_examples=25, deadline=None)
def test_tied_targets_are_all_held(score, of, of_targets, seed, outputs):
    """Each of twenty points is the threshold's own, so that rounding an end would lose them all."""
    draw = torch.Generator().manual_seed(seed)
    first, width = torch.rand(2, 1, *outputs, generator=draw, dtype=torch.float64)
    second = first + width if score == "cqr" else width + 0.1
    predictions = tuple(part.expand(20, *outputs).to(of) for part in (first, second))
    ends = 3 * torch.rand(2, *outputs, generator=draw, dtype=torch.float64) - 1
    y = torch.stack([ends[0], ends[1]] * 10).to(of_targets)
    conformal = SplitConformal(score, 0.9).fit(predictions, y)
    found = conformal.predict(predictions)
    assert coverage(found, y) >= 0.9
    assert found[0].dtype == found[1].dtype == of
    exact = (ends.to(of_targets) - predictions[0][:2]).abs() / predictions[1][:2]
    if score == "normalized":
        tolerance = 64 * torch.finfo(of).eps
        assert conformal.threshold == pytest.approx(float(exact.max()), tolerance, tolerance)


@pytest.mark.parametrize("make", [ScaleFactor, lambda: SplitConformal("normalized", level=0.8)])
def test_targets_that_are_nan_do_not_count(make):
    mean, scale, y = torch.randn(30, 1), torch.rand(30, 1) + 0.1, torch.randn(30, 1)
    y[::4] = torch.nan
    kept = ~y[:, 0].isnan()
    found, expected = make().fit((mean, scale), y), make().fit((mean[kept], scale[kept]), y[kept])
    apart = torch.randn(5, 1), torch.rand(5, 1)
    torch.testing.assert_close(found.predict(apart), expected.predict(apart))
    with pytest.raises(ValueError, match=r"no point counts|points is 0"):
        make().fit((mean, scale), y * torch.nan)


def test_missing_numbers_are_left_out_of_coverage():
    ends, y = torch.ones(4, 2), torch.tensor([[0.0, 0.0], [torch.nan, 9.0], [torch.nan, 0.0]])
    y = torch.cat([y, torch.full((1, 2), torch.nan)])
    assert tyxe.calibration.coverage((-ends, ends), y) == pytest.approx(2 / 3)


# --- BNNs ---------------------------------------------------------------------------------------


def bnn(likelihood, outputs):
    torch.manual_seed(0)
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=0.1)
    return tyxe.VariationalBNN(nn.Linear(3, outputs), NORMAL, likelihood, guide)


def test_a_wrapped_ensemble_of_nets_with_two_arguments():
    def member(index):
        torch.manual_seed(index)
        net = NetOf(lambda net, a, b: net.layer(a + b), layer=nn.Linear(3, 3))
        return mean_field(net, tyxe.likelihoods.Categorical(60))

    model, x = tyxe.EnsembleBNN(member, 2), (torch.randn(60, 3), torch.randn(60, 3))
    y = model.predict(*x, num_predictions=0).argmax(-1)
    y[:20] = torch.randint(3, (20,))
    wrapped = TemperatureScaling().wrap(model, [(x, y)], num_predictions=0)
    own = TemperatureScaling().fit(model.predict(*x, num_predictions=0), y)
    assert wrapped.calibrator.temperature == pytest.approx(own.temperature)


def test_a_wrapped_classifier():
    model = bnn(tyxe.likelihoods.Categorical(60, ignore_index=-1), 3)
    x, y = torch.randn(60, 3), torch.randint(3, (60,))
    y[:5] = -1
    loader = list(zip(x.split(20), y.split(20), strict=True))
    torch.manual_seed(1)
    wrapped = TemperatureScaling().wrap(model, loader, num_predictions=4)
    torch.manual_seed(1)
    logits = model.predict(x, num_predictions=4)
    own = TemperatureScaling().fit(logits[5:], y[5:])
    assert wrapped.calibrator.temperature == pytest.approx(own.temperature)
    torch.manual_seed(1)
    torch.testing.assert_close(wrapped.predict(x), own(logits))
    sets = SplitConformal(level=0.8).wrap(model, loader, num_predictions=0).predict(x)
    assert sets.dtype == torch.bool
    assert sets.shape == (60, 3)


@pytest.mark.parametrize("score", ["normalized", "cqr"])
@pytest.mark.parametrize("is_predicted", [False, True])
def test_a_wrapped_regression_whose_noise_is_known_or_predicted(score, is_predicted):
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(60, scale=0.5)
    if is_predicted:
        likelihood = tyxe.likelihoods.HeteroskedasticGaussian(60)
    model = bnn(likelihood, 1 + is_predicted)
    x, y = torch.randn(60, 3), torch.randn(60, 1)
    mean, scale = likelihood.mean_and_scale(model.predict(x, num_predictions=0))
    wrapped = SplitConformal(score, 0.8).wrap(model, [(x, y)], num_predictions=0)
    ends = mean - 1.2815516 * scale, mean + 1.2815516 * scale  # of a normal's 80 %
    given = (mean, scale) if score == "normalized" else ends
    own = SplitConformal(score, 0.8).fit(given, y)
    torch.testing.assert_close(wrapped.predict(x), own.predict(given))
    assert coverage(wrapped.predict(x), y) >= 0.8
    factor = ScaleFactor().wrap(model, [(x, y)], num_predictions=0)
    exact = float(((y - mean) / scale).square().mean().sqrt())
    assert factor.calibrator.factor == pytest.approx(exact, rel=1e-5)
    torch.testing.assert_close(factor.predict(x), (mean, factor.calibrator.factor * scale))


def test_unpacked_batches_and_wrong_kinds():
    model = bnn(tyxe.likelihoods.Categorical(60), 3)
    x, y = torch.randn(60, 3), torch.randint(3, (60,))
    wrapped = SplitConformal("lac").wrap(
        model, [{"x": x, "y": y}], unpack=lambda batch: (batch["x"], batch["y"])
    )
    assert wrapped.predict(x).shape == (60, 3)
    for of_numbers in (SplitConformal("normalized"), ScaleFactor()):
        with pytest.raises(TypeError, match="classes: they have sets, and no intervals"):
            of_numbers.wrap(model, [(x, y)])
    with pytest.raises(TypeError, match=r"expected a BNN: for any other model call fit\(pre"):
        TemperatureScaling().wrap(torch.nn.Linear(3, 3), [(x, y)])
    number = tyxe.likelihoods.HomoskedasticGaussian(60, scale=1.0)
    likelihoods = tyxe.likelihoods.Joint(one=number), tyxe.likelihoods.Censored(number)
    for likelihood, message in zip(likelihoods, ("several outputs", "nobody knows"), strict=True):
        with pytest.raises(TypeError, match=message):
            SplitConformal().wrap(bnn(likelihood, 1), [(x, x[:, :1])])
    logits = (torch.nn.functional.one_hot(y, 3) + torch.randn(60, 3)).requires_grad_()
    assert TemperatureScaling().fit(logits, y).temperature > 0


def test_counts_may_be_integers():
    x, y = torch.randn(40, 3), torch.arange(40)[:, None] % 5
    poisson = bnn(tyxe.likelihoods.Poisson(40), 1)
    for calibrator in (ScaleFactor(), SplitConformal(level=0.9)):
        fitted = copy.deepcopy(calibrator).wrap(poisson, [(x, y)], num_predictions=0)
        same = calibrator.wrap(poisson, [(x, y.float())], num_predictions=0)
        assert vars(fitted.calibrator) == vars(same.calibrator)


# --- bad input ------------------------------------------------------------------------


@pytest.mark.parametrize("make", [TemperatureScaling, ScaleFactor, SplitConformal])
def test_nothing_is_predicted_before_fit(make):
    with pytest.raises(RuntimeError, match="is not fitted: call fit, or load"):
        make().predict(torch.zeros(2, 3))


def test_calibration_sets_that_are_too_small_say_how_many_are_needed():
    for level in (0.0, 1.0, 90):
        with pytest.raises(ValueError, match="expected a number above 0"):
            SplitConformal(level=level)
    for level, needed in ((0.9, 9), (0.95, 19), (0.5, 1)):
        if needed > 1:
            conformal = SplitConformal("lac", level)
            with pytest.raises(ValueError, match=f"expected a number of {needed} or more"):
                conformal.fit(*probabilities(needed - 1))
            assert conformal.threshold is None
        assert SplitConformal("lac", level).fit(*probabilities(needed)).threshold > 0
    mean, scale = torch.zeros(8, 2), torch.ones(8, 2)
    with pytest.raises(ValueError, match="points is 8"):  # points of two numbers each
        SplitConformal(level=0.9).fit((mean, scale), mean + 1)


def test_weights_of_calibration_sets_need_not_be_whole():
    probs, labels = probabilities(10)
    # (5.8 + 1) x .85 points are 5.78
    enough = Targets(labels, weights=torch.full((10,), 0.58))
    assert SplitConformal("lac", 0.85).fit(probs, enough).threshold > 0
    for weight in (0.5, 0.9 - 1e-7):
        few = Targets(labels, weights=torch.full((10,), weight))
        with pytest.raises(ValueError, match=r"for a level of 0\.9: take more"):
            SplitConformal("lac", 0.9).fit(probs, few)


PROBS, CLASSES = torch.full((10, 3), 1 / 3), torch.arange(10) % 3
MEAN, SCALE, RIGHT = torch.zeros(10), torch.ones(10), 3 * torch.eye(3)[CLASSES]
BAD = {
    "labels outside": (SplitConformal("lac"), PROBS, CLASSES + 1, "expected 0..2 for 3 classes"),
    "ignored labels": (TemperatureScaling(), PROBS, CLASSES - 1, "leave out ignored points"),
    "numbers as labels": (TemperatureScaling(), PROBS, CLASSES.float(), "expected integers"),
    "rows": (TemperatureScaling(), PROBS, CLASSES[:5], "expected .10,.: pass"),
    "logits": (SplitConformal("aps"), PROBS + 1, CLASSES, "pass logits.softmax"),
    "probabilities": (TemperatureScaling(), PROBS, CLASSES, "are probabilities; pass logits, or"),
    "a pair": (SplitConformal("aps"), (MEAN, SCALE), CLASSES, "is a tuple; expected a tensor"),
    "nan": (TemperatureScaling(), PROBS * math.nan, CLASSES, "30 NaN entries"),
    "scale": (ScaleFactor(), (MEAN, 0 * SCALE), MEAN, "expected positive and"),
    "shape": (ScaleFactor(), (MEAN, SCALE), MEAN[:, None], "that of `mean`"),
    "exact": (ScaleFactor(), (MEAN, SCALE), MEAN, "the targets themselves"),
    "all right": (TemperatureScaling(), RIGHT, CLASSES, "no temperature is the best"),
    "by chance": (TemperatureScaling(), -RIGHT, CLASSES, "no better than by chance"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit(name):
    calibrator, predictions, y, message = BAD[name]
    before = dict(vars(calibrator))
    with pytest.raises((TypeError, ValueError), match=message):
        calibrator.fit(predictions, y)
    assert vars(calibrator) == before
