"""scikit-learn's estimators: its own checks, and plain use of the wrappers with equal seeds."""

import copy
import pickle
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise, product

import numpy as np
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import tyxe
from tyxe.likelihoods import Categorical, HomoskedasticGaussian
from tyxe.priors import LayerwiseNormalPrior

pytest.importorskip("sklearn", minversion="1.6", reason="the extra `sklearn`")

import common
import joblib
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    load_iris,
    load_wine,
    make_classification,
    make_friedman1,
    make_moons,
)
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from tyxe.integrations.sklearn import (
    METHODS,
    BayesianClassifier,
    BayesianRegressor,
    _temperature,
    neg_crps,
    neg_nll,
)

# Fewer epochs than by default, because the checks fit some sixty times.
ESTIMATORS = [BayesianRegressor(num_epochs=40), BayesianClassifier(num_epochs=40)]
SHORT = {"hidden": (5,), "num_epochs": 40, "batch_size": 16, "random_state": 0}
SEED = int(np.random.RandomState(0).randint(2**31 - 1))


@parametrize_with_checks(ESTIMATORS)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


def regression(n=40):
    return make_friedman1(n, n_features=5, noise=1.0, random_state=0)


def classes(n=40):
    x, y = make_moons(n, noise=0.2, random_state=0)
    return x, np.array(["no", "yes"])[y]


# --------------------------------------------------------------------------- plain use


EPOCHS = 40


def trained(bnn, loader, handler=nullcontext, epochs=EPOCHS, **options):
    with handler():
        bnn.fit(loader, partial(torch.optim.Adam, lr=0.01), epochs, **options)
    return bnn


def laplace(*parts, loader):
    return trained(tyxe.LaplaceBNN(*parts), loader, evidence_every=20)


def last_layer(*parts, loader):
    whole = laplace(*parts, loader=loader)
    found = dict(whole.net_prior.priors())
    last = tyxe.priors.DictPrior({n: found[n] for n in ("2.weight", "2.bias")}, expose=["2.*"])
    bnn = tyxe.LaplaceBNN(whole.to_module(), last, whole.likelihood, structure="full")
    bnn.fit_curvature(loader)
    return bnn


def swag(*parts, loader, beta):
    return trained(tyxe.SWAG_BNN(*parts), loader, epochs=80, beta=beta)


def most_probable(*parts, loader, beta):
    return trained(tyxe.VariationalBNN(*parts, AutoDelta), loader, beta=beta)


def mean_field(*parts, loader, beta, **options):
    bnn = tyxe.VariationalBNN(*parts, partial(tyxe.guides.AutoNormal, init_scale=0.01))
    return trained(bnn, loader, tyxe.poutine.local_reparameterization, beta=beta, **options)


def dropout(net, prior, likelihood, loader):
    return trained(tyxe.DropoutBNN(net, likelihood), loader)


def ensemble(net, *parts, loader, beta):
    def member(index):
        own = tyxe.util.reset_parameters_(copy.deepcopy(net))
        return tyxe.VariationalBNN(own, *parts, AutoDelta)

    return trained(tyxe.EnsembleBNN(member, 5), loader, epochs=10, beta=beta)


def nuts(net, prior, likelihood, loader):
    if isinstance(likelihood, HomoskedasticGaussian):
        noise = dist.LogNormal(torch.tensor([-1.0]), 1.0).to_event(1)
        likelihood = HomoskedasticGaussian(likelihood.dataset_size, scale=noise)
    bnn = tyxe.MCMC_BNN(net, prior, likelihood, tyxe.samplers.NUTS)
    bnn.fit(loader, 4, warmup_steps=4)
    return bnn


PLAIN = {
    "laplace": laplace,
    "last_layer_laplace": last_layer,
    "mean_field": mean_field,
    "map": most_probable,
    "ensemble": ensemble,
    "swag": swag,
    "dropout": dropout,
    "nuts": nuts,
}
# Chains that are as short as these are long enough to be compared; SWAG needs 20 snapshots.
SETTINGS = {"nuts": {"hidden": (), "num_epochs": 8}, "swag": {"num_epochs": 80}}
SETTINGS["ensemble"] = {"num_epochs": 10}


def batches(*parts):
    data = TensorDataset(*parts)
    sampler = BatchSampler(RandomSampler(data), 16, drop_last=False)
    return DataLoader(data, sampler=sampler, batch_size=None)


def plain(method, x, y, likelihood, outputs):
    """Return what a wrapper predicts that is used by itself, on standardised inputs."""
    x = torch.as_tensor((x - x.mean(0)) / x.std(0))
    prior = LayerwiseNormalPrior("radford")  # whose constructor draws numbers
    torch.manual_seed(SEED)
    ends = (x.shape[1], outputs) if method == "nuts" else (x.shape[1], 5, outputs)
    drops = [nn.Dropout(0.1)] if method == "dropout" else []
    layers = [layer for pair in pairwise(ends) for layer in (nn.Linear(*pair), nn.Tanh(), *drops)]
    net = nn.Sequential(*layers[: -1 - len(drops)]).double()
    weight = {"beta": 0.1 if likelihood.has_classes else 1.0} if METHODS[method].beta else {}
    bnn = PLAIN[method](net, prior, likelihood, loader=batches(x, y), **weight)
    torch.manual_seed(SEED + 1)
    count = 0 if method in ("map", "ensemble") else 32
    return bnn.predict(x, num_predictions=count, batch_size=16, link="probit")


def assert_of_each_row(model, x):
    """Deviations and intervals are functions of the row, with the same draws for all."""
    for predicts in (lambda x: model.predict(x, return_std=True), model.predict_interval):
        for one, among in zip(predicts(x[3:4]), predicts(x), strict=True):
            np.testing.assert_allclose(one, among[3:4], rtol=1e-9)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_regressor_is_the_wrapper_in_units_of_y(method):
    x, y = regression()
    model = BayesianRegressor(method=method, **SHORT | SETTINGS.get(method, {})).fit(x, y)
    mean, std = model.predict(x, return_std=True)
    targets = torch.as_tensor((y - y.mean()) / y.std())[:, None]
    likelihood = HomoskedasticGaussian(len(x), scale=torch.ones(1), learn_scale=True)
    expected = plain(method, x, targets, likelihood, 1)
    np.testing.assert_allclose(mean, y.mean() + y.std() * expected[0][:, 0].numpy(), rtol=1e-9)
    np.testing.assert_allclose(std, y.std() * expected[1][:, 0].numpy(), rtol=1e-9)
    assert (pickle.loads(pickle.dumps(model)).predict(x) == mean).all()
    # A prediction is a function of its row, with the same draws for all. Masks are of each row.
    if method != "dropout":
        np.testing.assert_allclose(model.predict(x[30:2:-7]), mean[30:2:-7], rtol=1e-9)
        assert_of_each_row(model, x)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_classifier_is_the_wrapper(method):
    x, y = classes()
    model = BayesianClassifier(method=method, **SHORT | SETTINGS.get(method, {})).fit(x, y)
    codes = torch.as_tensor(y == "yes").long()
    expected = plain(method, x, codes, Categorical(len(x)), 2).softmax(-1).numpy()
    np.testing.assert_allclose(model.predict_proba(x), expected, rtol=1e-9)
    assert model.classes_.tolist() == ["no", "yes"]
    assert (model.predict(x) == model.classes_[expected.argmax(-1)]).all()
    assert (pickle.loads(pickle.dumps(model)).predict_proba(x) == model.predict_proba(x)).all()
    if method != "dropout":
        np.testing.assert_allclose(model.predict_proba(x[30:2:-7]), expected[30:2:-7], rtol=1e-9)


def test_a_method_of_ones_own_gets_net_prior_and_likelihood():
    given = []

    def method(net, prior, likelihood):
        given.extend([dict(prior.sites(net)), likelihood.dataset_size])
        return tyxe.LaplaceBNN(net, prior, likelihood, structure="diag")

    x, y = regression()
    model = BayesianRegressor(method=method, prior_scale=3.0, **SHORT).fit(x, y)
    scales = {name: float(site.base_dist.scale.max()) for name, site in given[0].items()}
    ends = {"0.weight": 5, "0.bias": 5, "2.weight": 5, "2.bias": 5}
    assert scales == pytest.approx({name: 3 / n**0.5 for name, n in ends.items()})
    assert given[1] == len(x)
    assert model.bnn_.net_guide.structure == "diag"
    assert model.n_iter_ == 40


# --------------------------------------------------------------------------- what is held out


def test_held_out_rows_choose_the_epoch_while_the_kl_comes_in():
    x, y = regression(200)
    model = BayesianRegressor(method="mean_field", **SHORT).fit(x, y)
    inputs, targets = (torch.as_tensor((v - v.mean(0)) / v.std(0)) for v in (x, y[:, None]))
    kept = torch.zeros(200, dtype=torch.bool)
    kept[model._held_out(targets, 0.1, SEED)] = True
    assert kept.sum() == 20

    def beta(epoch):  # .01 for a quarter of the 40 epochs, and 1 at their end
        return 0.01 ** (1 - max(0, epoch - 9) / 30)

    prior = LayerwiseNormalPrior("radford")
    likelihood = HomoskedasticGaussian(180, scale=torch.ones(1), learn_scale=True)
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    options = {"beta": beta, "validation": [(inputs[kept], targets[kept])]}
    options["loader"] = batches(inputs[~kept], targets[~kept])
    expected = mean_field(net, prior, likelihood, **options).state_dict()
    for name, value in model.bnn_.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-12)


def test_ten_rows_of_a_small_table_are_held_out():
    def held_out(count, fraction=0.1):
        return len(BayesianRegressor()._held_out(torch.zeros(count, 1), fraction, seed=0))

    assert [held_out(count) for count in (49, 50, 99, 120)] == [0, 10, 10, 12]
    assert [held_out(20, 0.5), held_out(60, 0.0)] == [10, 0]


@pytest.mark.parametrize("method", ["map", "mean_field"])
def test_a_small_table_is_not_explained_by_noise(method):
    x, y = make_friedman1(200, noise=1.0, random_state=0)
    model = BayesianRegressor(method=method, random_state=0).fit(x[:60], y[:60])
    assert model.score(x[60:], y[60:]) > 0.5  # with all of the KL from the first epoch it was 0


@pytest.mark.parametrize("method", ["map", "mean_field", "swag"])
def test_a_weight_of_the_kl_of_ones_own_is_that_of_the_whole_fit(method):
    x, y = classes()
    settings = {"method": method, **SHORT, "num_epochs": 80}
    by_default, weak, strong = (
        BayesianClassifier(beta=beta, **settings).fit(x, y).predict_proba(x)
        for beta in (None, 0.1, 100.0)
    )
    np.testing.assert_array_equal(by_default, weak)  # of so few rows none is held out
    assert np.abs(strong - 0.5).max() < 0.1 < np.abs(weak - 0.5).max()
    bnn = BayesianRegressor(beta=1.0, **settings).fit(*regression(200)).bnn_
    assert bnn.likelihood.dataset_size == 200  # held-out rows would have nothing to choose


def test_a_weight_of_the_kl_changes_no_method_without_one():
    settings = {"method": "dropout", **SHORT}
    found = [BayesianRegressor(beta=b, **settings).fit(*regression(200)) for b in (None, 1.0)]
    assert [model.bnn_.likelihood.dataset_size for model in found] == [180, 180]
    np.testing.assert_array_equal(*(model.predict(regression()[0]) for model in found))


# --------------------------------------------------------------------------- weights


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("method", METHODS)
def test_a_weight_of_two_is_the_row_twice_and_of_none_its_absence(method):
    settings = SHORT | SETTINGS.get(method, {}) | {"batch_size": 1000, "method": method}
    weights = np.arange(30) % 4
    x, y = regression(30)
    labels = np.where(weights > 0, np.array(["a", "b", "c"])[np.arange(30) % 3], "never")
    repeated = [np.repeat(each, weights, 0) for each in (x, y, labels)]
    model = BayesianRegressor(beta=1, **settings)
    found, expected, other = (
        clone(model).fit(*given).predict(x)
        for given in ((x, y, weights), repeated[:2], (x[weights > 0], y[weights > 0]))
    )
    assert np.abs(found - other).max() > 1e-3
    model = BayesianClassifier(validation_fraction=0, **settings)
    probs = clone(model).fit(x, labels, sample_weight=weights).predict_proba(x)
    if method not in ("dropout", "mean_field"):  # whose noise is drawn for each row
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        by_rows = model.fit(repeated[0], repeated[2]).predict_proba(x)
        np.testing.assert_allclose(probs, by_rows, rtol=1e-6)
    assert probs.shape == (30, 3)


def test_held_out_rows_have_weights_in_the_choice_and_the_temperature():
    x, y = classes(200)
    model = BayesianClassifier(method="map", **SHORT)
    weights = np.ones(200)
    same = clone(model).fit(x, y, weights)
    assert same.temperature_ == pytest.approx(model.fit(x, y).temperature_, rel=1e-9)
    kept = model._held_out(torch.as_tensor(y == "yes").long(), 0.1, SEED)
    wrong = [i for i in kept if model.predict(x[i, None]) != y[i]]
    assert wrong
    weights[wrong] = 50.0
    assert clone(model).fit(x, y, weights).temperature_ > 1 > model.temperature_
    assert same.bnn_.likelihood.dataset_size == 180


# --------------------------------------------------------------------------- noise


@pytest.mark.parametrize("method", ["laplace", "mean_field"])
def test_noise_that_the_net_predicts_follows_the_inputs(method):
    rng = np.random.RandomState(0)
    x = rng.uniform(-1, 1, (400, 1))
    scale = np.exp(1.5 * x[:, 0])
    targets = np.stack([x[:, 0] + scale * rng.randn(400), 100 * scale * rng.randn(400) - 7], 1)
    settings = SHORT | {"num_epochs": 100, "batch_size": 100}
    model = BayesianRegressor(method=method, noise="heteroskedastic", **settings).fit(x, targets)
    ends = np.array([[-0.9], [0.9]])
    mean, std = model.predict(ends, return_std=True)
    assert mean.shape == std.shape == (2, 2)
    assert (std[1] > 4 * std[0]).all()  # in truth 15 times, and once with one noise for all
    lower, upper = model.predict_interval(ends, 0.9)
    np.testing.assert_allclose((upper - lower) / std, 2 * 1.645, rtol=0.15)
    samples = model.sample_y(ends, 1000)
    np.testing.assert_allclose(samples.std(-1), std, rtol=0.15)
    assert_of_each_row(model, x)


# --------------------------------------------------------------------------- quality
# Of all methods on all sets it is recorded by experiments/sklearn_methods.py.


def archive(name):
    """Return 400 rows of a table from the folder of data, or skip the test."""
    if (path := common.find(f"{name}.npz")) is None:
        pytest.skip(f"{name}.npz is not there")
    with np.load(path) as found:
        x, y = found["X"].astype(float), found["y"].reshape(len(found["X"]), -1)[:, 0]
    rows = np.random.RandomState(0).permutation(len(x))[:400]
    return x[rows], y[rows]


NUMBERS = {
    "friedman": partial(make_friedman1, 400, noise=1.0, random_state=0),
    "diabetes": partial(load_diabetes, return_X_y=True),
    **{
        n: partial(archive, f"regression/{n}") for n in ("airfoil", "concrete", "energy", "protein")
    },
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in NUMBERS if name != "friedman"]


@pytest.mark.parametrize("name", ["friedman", *SLOW])
def test_mean_field_predicts_numbers_as_well_as_laplace(name):
    (x, y), errors = NUMBERS[name](), {"laplace": 0.0, "mean_field": 0.0}
    for seed, method in product(range(2), errors):
        parts = train_test_split(x, y, train_size=200, random_state=seed)
        model = BayesianRegressor(method=method, random_state=seed).fit(parts[0], parts[2])
        errors[method] += np.square(model.predict(parts[1]) - parts[3]).mean() ** 0.5
    assert errors["mean_field"] <= 1.3 * errors["laplace"]


SETS = {
    "iris": partial(load_iris, return_X_y=True),
    "wine": partial(load_wine, return_X_y=True),
    "breast cancer": partial(load_breast_cancer, return_X_y=True),
    "digits": partial(load_digits, return_X_y=True),
    "moons": partial(make_moons, 3000, noise=0.3, random_state=0),
    "clusters": partial(make_classification, 3000, n_informative=8, n_classes=3, random_state=0),
    **{name: partial(archive, f"uci/{name}") for name in ("australian", "ionosphere", "vehicle")},
}


def calibration_error(model, x, y):
    probs = torch.as_tensor(model.predict_proba(x))
    return float(tyxe.metrics.expected_calibration_error(probs, torch.as_tensor(y)))


def mean_error(name, make):
    """Return the calibration error of two splits: with few rows, a single one is luck."""
    (x, y), errors = SETS[name](), []
    for seed in range(2):
        how = {"train_size": min(len(x) * 6 // 10, 300), "random_state": seed, "stratify": y}
        x_fit, x_test, y_fit, y_test = train_test_split(x, y, **how)
        errors.append(calibration_error(make(random_state=seed).fit(x_fit, y_fit), x_test, y_test))
    return np.mean(errors)


@cache
def error_of_logistic_regression(name):
    logistic = CalibratedClassifierCV(LogisticRegression(max_iter=1000), cv=5)
    return mean_error(name, lambda **_: make_pipeline(StandardScaler(), logistic))


MAP = [
    pytest.param("map", name, marks=pytest.mark.slow)
    for name in ("iris", "wine", "breast cancer", "digits", "clusters")
]


@pytest.mark.parametrize(("method", "name"), [*product(["laplace"], SETS), ("map", "moons"), *MAP])
def test_probabilities_are_as_calibrated_as_those_of_a_calibrated_regression(method, name):
    own = mean_error(name, partial(BayesianClassifier, method=method))
    assert own <= 1.3 * error_of_logistic_regression(name)


@pytest.mark.parametrize("method", ["map", "laplace"])
def test_a_temperature_divides_what_the_wrapper_predicts(method):
    x, y = classes(200)
    model = BayesianClassifier(method=method, **SHORT).fit(x, y)
    assert model.temperature_ != 1
    assert model.bnn_.likelihood.dataset_size == 180
    inputs = torch.as_tensor((x - x.mean(0)) / x.std(0))
    torch.manual_seed(SEED + 1)
    logits = model.bnn_.predict(inputs, batch_size=16, link="probit")
    expected = (logits / model.temperature_).softmax(-1).numpy()
    np.testing.assert_allclose(model.predict_proba(x), expected, rtol=1e-9)
    whole = clone(model).set_params(validation_fraction=0).fit(x, y)
    assert whole.temperature_ == 1
    assert whole.bnn_.likelihood.dataset_size == 200


@pytest.mark.parametrize("fraction", [0.1, 0.37, 0.5])
def test_each_class_is_held_out_by_its_part_and_fitted(fraction):
    y = torch.tensor([0] * 100 + [1] * 50 + [2] * 2 + [3])[torch.randperm(153)]
    model = BayesianClassifier()
    held_out = model._held_out(y, fraction, seed=3)
    assert len(held_out.unique()) == len(held_out)
    first, second, third, last = y[held_out].bincount(minlength=4).tolist()
    assert [first, second] == pytest.approx([100 * fraction, 50 * fraction], abs=1)
    assert (third <= 1, last) == (True, 0)
    assert torch.equal(held_out, model._held_out(y, fraction, seed=3))
    assert not torch.equal(held_out, model._held_out(y, fraction, seed=4))
    assert not len(model._held_out(y[:9], fraction, seed=3))


def test_a_temperature_of_few_rows_is_no_extreme():
    right = torch.tensor([[2.0, 0.0], [0.0, 2.0]]).repeat(5, 1)
    y = torch.tensor([0, 1]).repeat(5)
    assert 0.2 < _temperature(right, y) < 1
    assert 1 < _temperature(right, 1 - y) < 5
    # With many rows it is that of the largest likelihood.
    torch.manual_seed(0)
    logits = 3 * torch.randn(20_000, 3)
    y = (logits / 2).softmax(-1).multinomial(1)[:, 0]
    assert _temperature(logits, y) == pytest.approx(2.0, rel=0.05)


# --------------------------------------------------------------------------- seeds and units


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_same_seed_predicts_the_same_and_global_generators_stay(estimator):
    x, y = np.random.randn(20, 3), np.arange(20) % 2
    model = clone(estimator).set_params(hidden=(3,), method="mean_field", random_state=3)
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = model.fit(x, y).predict(x)
    assert (model.predict(x) == first).all()
    assert (clone(model).fit(x, y).predict(x) == first).all()
    assert (model.sample_y(x, 3) == model.sample_y(x, 3)).all()
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numbers).all()


def test_without_standardising_the_net_sees_what_is_given():
    x, y = regression()
    model = BayesianRegressor(method="map", standardize=False, **SHORT).fit(x, y)
    mean, scale = model.bnn_.predict(torch.as_tensor(x), num_predictions=0)
    found = model.predict(x, return_std=True)
    np.testing.assert_allclose(found[0], mean[:, 0].numpy(), rtol=1e-12)
    np.testing.assert_allclose(found[1], scale[:, 0].numpy(), rtol=1e-12)


def test_samples_have_the_moments_of_the_prediction():
    model = BayesianRegressor(**SHORT).fit(*regression())
    x, count = regression()[0][:5], 4000
    mean, std = model.predict(x, return_std=True)
    samples = model.sample_y(x, count)
    assert samples.shape == (5, count)
    # Four standard errors of the mean, and of the variance, of a Normal's samples.
    assert (np.abs(samples.mean(1) - mean) < 4 * std / count**0.5).all()
    assert (np.abs(samples.var(1) / std**2 - 1) < 4 * (2 / count) ** 0.5).all()


def test_samples_of_classes_have_their_probabilities():
    model = BayesianClassifier(method="map", **SHORT).fit(*classes())
    x, count = classes()[0][:5], 1000
    probability, samples = model.predict_proba(x)[:, 1], model.sample_y(x, count)
    assert set(samples.ravel()) == {"no", "yes"}
    error = (probability * (1 - probability) / count) ** 0.5
    assert (np.abs((samples == "yes").mean(1) - probability) < 4 * error).all()
    assert model.sample_y(x).shape == (5, 1)


def test_intervals_are_quantiles_of_the_prediction_in_units_of_y():
    x, y = regression()
    model = BayesianRegressor(method="map", **SHORT).fit(x, np.stack([y, 100 * y - 7], 1))
    mean, std = model.predict(x, return_std=True)
    for level, quantile in ((0.9, 1.644854), (0.5, 0.674490)):
        lower, upper = model.predict_interval(x, level)
        assert lower.shape == upper.shape == mean.shape
        for end in (upper - mean, mean - lower):
            np.testing.assert_allclose(end / std, quantile, rtol=1e-5)
    with pytest.raises(ValueError, match="level is 90; expected a number above 0 and below 1"):
        model.predict_interval(x, 90)


def test_intervals_know_the_spread_of_the_weights():
    x, y = regression()
    model = BayesianRegressor(**SHORT | {"hidden": ()}).fit(x, y)
    near, far = (np.subtract(*model.predict_interval(at)[::-1]) for at in (x, x + 100))
    assert far.mean() > 2 * near.mean()


# --------------------------------------------------------------------------- devices


def test_auto_is_cuda_where_there_is_one(monkeypatch):
    moved = []

    class Net(nn.Linear):
        def to(self, device):
            moved.append(device)
            return self

    model = BayesianRegressor(net=Net, device="auto", method="map", **SHORT)
    for available, expected in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=available: found)
        assert model._place() == expected
    for device in ("auto", None):
        clone(model).set_params(device=device).fit(*regression())
        assert moved == ["cpu"]


# --------------------------------------------------------------------------- in scikit-learn


@pytest.mark.parametrize("backend", ["loky", "threading"])
def test_a_grid_search_in_processes_and_threads_is_that_of_one(backend):
    x, y = classes()
    pipeline = make_pipeline(PolynomialFeatures(), BayesianClassifier(**SHORT | {"num_epochs": 5}))
    grid = {
        "bayesianclassifier__method": ["laplace", "map"],
        "polynomialfeatures__degree": [1, 2],
    }
    one = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss").fit(x, y)
    with joblib.parallel_backend(backend, n_jobs=2):
        two = GridSearchCV(pipeline, grid, cv=2, scoring="neg_log_loss", n_jobs=2).fit(x, y)
    assert two.best_params_ == one.best_params_
    scores = [search.cv_results_["mean_test_score"] for search in (one, two)]
    assert len(set(scores[0])) == 4
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-9)


def assert_weights_repeat(scorer, model, x, y):
    """A score with weights is that of repeated rows, and another than without them."""
    weights = np.arange(len(x))
    found = scorer(model, x, y, sample_weight=weights)
    expected = scorer(model, np.repeat(x, weights, 0), np.repeat(y, weights, 0))
    assert found == pytest.approx(expected)
    assert found != pytest.approx(scorer(model, x, y))


def test_scores_of_regressors_are_those_of_their_normals():
    x, y = regression()
    for targets in (y, np.stack([y, 3 - 100 * y], 1)):
        pipeline = make_pipeline(PolynomialFeatures(1), BayesianRegressor(method="map", **SHORT))
        pipeline.fit(x, targets)
        mean, std = map(torch.as_tensor, pipeline.predict(x, return_std=True))
        each = -torch.distributions.Normal(mean, std).log_prob(torch.as_tensor(targets))
        assert neg_nll(pipeline, x, targets) == pytest.approx(-float(each.mean()))
        crps = float(tyxe.metrics.crps_gaussian(mean, std, torch.as_tensor(targets)))
        assert neg_crps(pipeline, x, targets) == pytest.approx(-crps)
        for scorer in (neg_nll, neg_crps, type(pipeline).score):
            assert_weights_repeat(scorer, pipeline, x, targets)


def test_scorers_take_arrays_that_nobody_may_write_to():
    x, y = regression()
    model, weights = BayesianRegressor(method="map", **SHORT).fit(x, y), np.arange(len(y))
    expected = neg_nll(model, x, y, weights)
    for part in (x, y, weights):
        part.flags.writeable = False  # as those of pandas
    assert neg_nll(model, x, y, weights) == expected


def test_the_score_of_a_classifier_is_its_log_loss():
    x, y = classes()
    model = BayesianClassifier(method="map", **SHORT).fit(x, y)
    probs, codes = torch.as_tensor(model.predict_proba(x)), torch.as_tensor(y == "yes").long()
    assert neg_nll(model, x, y) == pytest.approx(-float(tyxe.metrics.nll(probs, codes)))
    for scorer in (neg_nll, BayesianClassifier.score):
        assert_weights_repeat(scorer, model, x, y)


def test_the_score_of_data_that_lack_a_class_is_that_of_the_others():
    x, _ = classes(60)
    y = np.array(["a", "b", "c"])[np.digitize(x[:, 0], [-0.5, 1.0])]
    model = BayesianClassifier(method="map", **SHORT).fit(x, y)
    for part in (y != "b", y == "c"):
        own = model.predict_proba(x[part])[
            np.arange(part.sum()), np.searchsorted(model.classes_, y[part])
        ]
        assert neg_nll(model, x[part], y[part]) == pytest.approx(np.log(own).mean())


def test_scorers_go_with_cross_validation_of_any_regressor_with_a_standard_deviation():
    x, y = regression(60)
    for model in (BayesianRegressor(method="map", **SHORT), BayesianRidge()):
        for scorer in (neg_nll, neg_crps):
            found = cross_val_score(model, x, y, scoring=scorer, cv=2, error_score="raise")
            assert found.shape == (2,)
            assert (found < 0).all()
    search = GridSearchCV(BayesianRidge(), {"alpha_1": [1e-6, 1e9]}, scoring=neg_crps)
    assert search.fit(x, y).best_params_ == {"alpha_1": 1e-6}  # the other expects no noise


def test_a_net_of_ones_own_in_its_dtype():
    x, y = regression()
    model = clone(BayesianRegressor(net=nn.Linear, **SHORT)).fit(x, y)
    assert isinstance(model.bnn_.net, nn.Linear)
    found = pickle.loads(pickle.dumps(model)).predict(x)
    assert next(model.bnn_.parameters()).dtype == torch.float32
    assert found.dtype == model.sample_y(x).dtype == np.float64
    assert model.score(x, y) > 0.5


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"method": "lapalce"}, ValueError, "'lapalce'; expected one of 'laplace'"),
        ({"prior_scale": 0}, ValueError, "prior_scale is 0; expected a number above 0"),
        ({"num_epochs": 2.5}, TypeError, "num_epochs is 2.5; expected an integer"),
        ({"num_epochs": 3, "method": "swag"}, ValueError, "num_epochs is 3; expected 80 or more"),
        ({"device": "cdua"}, RuntimeError, "device type at start of device string: cdua"),
        ({"batch_size": 0}, ValueError, "batch_size"),
        ({"validation_fraction": 0.6}, ValueError, r"fraction is 0\.6; expected .* at most 0\.5"),
        ({"noise": "poisson"}, ValueError, "'poisson'; expected one of 'homoskedastic'"),
        ({"net": lambda *sizes: torch.tanh}, TypeError, "expected a torch.nn.Module"),
        ({"net": lambda *sizes: nn.Linear(5, 3)}, ValueError, "shape"),
    ],
)
def test_a_fit_that_fails_leaves_the_earlier_one(settings, error, message):
    x, y = regression()
    model = BayesianRegressor(method="map", **SHORT).fit(x, y)
    before = model.predict(x)
    with pytest.raises(error, match=message):
        model.set_params(**settings).fit(x, y)
    model.set_params(batch_size=16)
    assert (model.predict(x) == before).all()


def test_weights_that_are_no_weights_are_errors():
    with pytest.raises(ValueError, match="Negative values in data passed to `sample_weight`"):
        BayesianRegressor(**SHORT).fit(*regression(), -np.ones(40))
    x, y = classes()
    with pytest.raises(ValueError, match="is 1; expected 2 or more: y has only 1 class, no"):
        BayesianClassifier(**SHORT).fit(x, y, y == "no")


def test_weights_that_sum_to_one_are_almost_no_data():
    x, y = classes()
    weights = np.full(len(y), 1 / len(y))
    with pytest.warns(tyxe.TyxeWarning, match=r"sums to 1 over 40 rows.*divide it by its mean"):
        BayesianClassifier(**SHORT).fit(x, y, weights)
    BayesianClassifier(**SHORT).fit(x, y, weights / weights.mean())
    BayesianClassifier(**SHORT).fit(x, y, np.where(np.arange(len(y)) % 20, 0.0, 1.0))
