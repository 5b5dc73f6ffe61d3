"""One table of scores, of every likelihood, against the metrics themselves."""

import functools

import pytest
import torch
from scipy import stats
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, mean_field
from tests.oracles.nets import KindAndSize, NetOf, kind_and_size
from tyxe import likelihoods, metrics
from tyxe.diagnostics import scores

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))


def bnn(likelihood, outputs, net=None):
    torch.manual_seed(0)
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=0.1)
    return tyxe.VariationalBNN(net or nn.Linear(3, outputs), NORMAL, likelihood, guide)


def halves(*parts):
    return list(zip(*(part.split(20) for part in parts), strict=True))


def test_of_a_net_with_two_arguments():
    """Their pair is no pair of inputs and targets."""
    y = torch.arange(40) % 3
    net = NetOf(lambda net, a, b: net.linear(a + b), linear=nn.Linear(3, 3))
    model = bnn(likelihoods.Categorical(40), 3, net)
    found = scores(model, [((X[:20], X[:20]), y[:20]), ((X[20:], X[20:]), y[20:])], 4)
    assert found["Brier score"] > 0


def test_of_classes():
    y = torch.arange(40) % 3
    model = bnn(likelihoods.Categorical(40), 3)
    torch.manual_seed(1)
    found = scores(model, halves(X, y), 4)
    torch.manual_seed(1)
    probs = model.predict(X, num_predictions=4).softmax(-1)
    assert found["log-likelihood"] == pytest.approx(-float(metrics.nll(probs, y)), rel=1e-5)
    assert found["error"] == pytest.approx(1 - float(metrics.accuracy(probs, y)))
    expected = {
        "Brier score": metrics.brier_score,
        "expected calibration error": metrics.expected_calibration_error,
        "adaptive calibration error": metrics.adaptive_calibration_error,
        "AURC": metrics.aurc,
    }
    for name, metric in expected.items():
        assert found[name] == pytest.approx(float(metric(probs, y)), rel=1e-4), name
    lines = str(found).splitlines()
    assert len(lines) == len(found) == 6
    assert lines[0].startswith("log-likelihood")


@pytest.mark.parametrize("is_predicted", [False, True])
def test_of_numbers(is_predicted):
    y = X[:, :1] + 0.1
    noise = likelihoods.HomoskedasticGaussian(40, scale=0.5)
    likelihood = likelihoods.HeteroskedasticGaussian(40) if is_predicted else noise
    model = bnn(likelihood, 1 + is_predicted)
    found = scores(model, halves(X, y), 0)
    mean, scale = likelihood.mean_and_scale(model.predict(X, num_predictions=0))
    assert found["RMSE"] == pytest.approx(float(metrics.rmse(mean, y)), rel=1e-5)
    assert found["CRPS"] == pytest.approx(float(metrics.crps_gaussian(mean, scale, y)), rel=1e-5)
    inside = float(metrics.interval_coverage(mean, scale, y, 0.9))
    assert found["coverage of 90 %"] == pytest.approx(inside)
    assert found["quantile calibration error"] >= 0


@pytest.mark.parametrize("df", [2.1, 4.0, 100.0])
def test_numbers_with_heavy_tails_have_the_calibration_of_their_own_distribution(df):
    model = bnn(likelihoods.StudentT(40, scale=0.5, df=df), 1).double()
    x, y = X.double(), 2.0 * X[:, :1].double()
    found = scores(model, halves(x, y), 0)
    shares = stats.t.cdf(y.numpy(), df, model.predict(x, num_predictions=0)[0].numpy(), 0.5)
    pit = torch.from_numpy(shares)
    expected = float(metrics.quantile_calibration_error(pit))
    assert found["quantile calibration error"] == pytest.approx(expected, rel=1e-4)
    inside = float(((pit - 0.5).abs() < 0.45).double().mean())
    assert found["coverage of 90 %"] == pytest.approx(inside)


def test_of_an_ensemble():
    y = torch.arange(40) % 3

    def member(index):
        net = tyxe.util.reset_parameters_(nn.Linear(3, 3))
        return mean_field(net, likelihoods.Categorical(40))

    model = tyxe.EnsembleBNN(member, 3)
    found = scores(model, halves(X, y), 0)
    probs = model.predict(X, num_predictions=0).softmax(-1)
    assert found["Brier score"] == pytest.approx(float(metrics.brier_score(probs, y)))


@pytest.mark.parametrize(
    ("likelihood", "y", "count"),
    [
        (likelihoods.Bernoulli(40), (torch.arange(40) % 2).float()[:, None], 6),
        (likelihoods.Poisson(40), (torch.arange(40) % 4).float()[:, None], 2),
    ],
)
def test_other_likelihoods_have_what_they_can(likelihood, y, count):
    found = scores(bnn(likelihood, 1), halves(X, y), 4)
    assert len(found) >= count
    assert all(value == value for value in found.values())


def test_of_several_outputs():
    y = {"kind": torch.arange(40) % 2, "size": X[:, :1]}
    found = scores(bnn(kind_and_size(40), 3, KindAndSize(3)), [(X, y)], 4)
    assert {"log-likelihood, joint", "log-likelihood, kind", "error, size"} <= found.keys()
