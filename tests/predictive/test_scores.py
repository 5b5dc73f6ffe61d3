"""Scores of unfamiliar inputs are the formulas, by a loop over draws, on what `predict` returns."""

import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, mean_field
from tests.oracles.nets import KindAndSize, NetOf, kind_and_size
from tyxe.predictive import scores

X = torch.linspace(-2, 2, 14).view(7, 2)
WEIGHTS = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)


def by_hand(logits, weights):
    """Return each score of class logits `(S, n, C)`, one draw and one class at a time."""
    probs = [[[float(p) for p in row.softmax(-1)] for row in one] for one in logits]
    shares = [float(w) for w in weights]
    found = {name: [] for name in scores.SCORES}
    for point in range(logits.shape[1]):
        rows = [one[point] for one in probs]
        mean = [sum(w * p for w, p in zip(shares, c, strict=True)) for c in zip(*rows, strict=True)]
        total = entropy(mean)
        expected = sum(w * entropy(row) for w, row in zip(shares, rows, strict=True))
        spread = [
            sum(w * (p - m) ** 2 for w, p in zip(shares, column, strict=True))
            for m, column in zip(mean, zip(*rows, strict=True), strict=True)
        ]
        found["mutual_information"].append(total - expected)
        found["bald"].append(total - expected)
        found["predictive_entropy"].append(total)
        found["max_probability"].append(max(mean))
        found["expected_variance"].append(sum(spread) / len(spread))
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}


def entropy(probs):
    return -sum(p * math.log(p) for p in probs if p)


@pytest.mark.parametrize("name", scores.SCORES)
@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weights"])
def test_a_score_is_its_formula(name, weights):
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 5, 3, dtype=torch.float64)
    shares = torch.full((4,), 0.25) if weights is None else weights
    found = scores.SCORES[name](logits, weights)
    torch.testing.assert_close(found, by_hand(logits, shares)[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", scores.SCORES)
def test_probabilities_and_binary_labels_have_the_scores_of_their_logits(name):
    torch.manual_seed(0)
    function, logits = scores.SCORES[name], torch.randn(4, 5, 2, dtype=torch.float64)
    expected = function(logits)
    likelihood = tyxe.likelihoods.Categorical(10, logit_predictions=False)
    torch.testing.assert_close(function(logits.softmax(-1), likelihood=likelihood), expected)
    binary = logits[..., 1] - logits[..., 0]
    found = function(binary, likelihood=tyxe.likelihoods.Bernoulli(10))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", scores.SCORES)
def test_ordered_classes_have_the_scores_of_their_probabilities(name):
    likelihood, draws = tyxe.likelihoods.Ordinal(10, 4), torch.randn(4, 5, 1).double()
    logits = likelihood.class_logits(draws).detach()
    found = scores.SCORES[name](draws, WEIGHTS, likelihood).detach()
    torch.testing.assert_close(found, by_hand(logits, WEIGHTS)[name])


@pytest.mark.parametrize(
    ("likelihood", "mean_of"),
    [
        (tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.3), lambda f: f),
        (tyxe.likelihoods.HeteroskedasticGaussian(10), lambda f: f[..., :1]),
        (tyxe.likelihoods.Poisson(10), torch.exp),
        (
            tyxe.likelihoods.HomoskedasticGaussian(10, scale=dist.LogNormal(0.0, 1.0)),
            lambda f: f,
        ),
    ],
)
def test_numbers_have_the_variance_of_their_means(likelihood, mean_of):
    draws = torch.randn(4, 5, 2, dtype=torch.float64)
    found = scores.expected_variance(draws, WEIGHTS, likelihood)
    means = mean_of(draws)
    centre = (WEIGHTS[:, None, None] * means).sum(0)
    expected = (WEIGHTS[:, None, None] * (means - centre) ** 2).sum(0)
    torch.testing.assert_close(found, expected)
    for name in ("mutual_information", "predictive_entropy", "max_probability"):
        with pytest.raises(TypeError, match="are not classes"):
            scores.SCORES[name](draws, likelihood=likelihood)


def classifier(index=0):
    torch.manual_seed(index)
    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 3))
    return mean_field(net, tyxe.likelihoods.Categorical(7))


def laplace():
    bnn = tyxe.LaplaceBNN(nn.Linear(2, 3), NORMAL, tyxe.likelihoods.Categorical(7))
    bnn.fit_curvature([(X, torch.arange(7) % 3)])
    return bnn


def chain():
    likelihood, kernel = tyxe.likelihoods.Categorical(7), tyxe.samplers.SGLD(0.01)
    bnn = tyxe.MCMC_BNN(nn.Linear(2, 3), NORMAL, likelihood, kernel)
    bnn.fit([(X, torch.arange(7) % 3)], 6)
    return bnn


WRAPPERS = {
    "variational": classifier,
    "dropout": lambda: tyxe.DropoutBNN(classifier().net, tyxe.likelihoods.Categorical(7)),
    "Laplace": laplace,
    "chain": chain,
    "ensemble": lambda: tyxe.EnsembleBNN(classifier, 2, weights=[3.0, 1.0]),
}


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_of_a_wrapper_it_is_the_score_of_its_draws(make):
    bnn = make()

    def seeded(call):
        torch.manual_seed(1)
        return call()

    draws = seeded(lambda: bnn.predict(X, num_predictions=4, aggregate=False))
    is_weighted = isinstance(bnn, tyxe.EnsembleBNN)
    weights = bnn.draw_weights(len(draws)) if is_weighted else torch.full((4,), 0.25)
    expected = by_hand(draws.double(), weights)
    for name, found in expected.items():
        score = seeded(lambda n=name: bnn.ood_score(X, n, num_predictions=4))
        found = 1 - found if name == "max_probability" else found
        torch.testing.assert_close(score.double(), found, rtol=1e-4, atol=1e-6)


def test_of_a_regression_it_is_the_variance_of_the_draws():
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(7, scale=0.1)
    bnn = mean_field(nn.Linear(2, 1), likelihood)
    torch.manual_seed(1)
    draws = bnn.predict(X, num_predictions=8, aggregate=False)
    torch.manual_seed(1)
    found = bnn.ood_score(X, "expected_variance", num_predictions=8)
    torch.testing.assert_close(found, draws.var(0, correction=0))
    with pytest.raises(TypeError, match="are not classes"):
        bnn.ood_score(X)
    with pytest.raises(ValueError, match="score is 'entropy'; expected one of"):
        bnn.ood_score(X, "entropy")


def test_a_loader_and_several_arguments_are_inputs_too():
    net = NetOf(lambda net, a, b: net.linear(a + b), linear=nn.Linear(2, 3))
    bnn = mean_field(net, tyxe.likelihoods.Categorical(7))
    found = []
    for inputs in ((X, X), [((X[:4], X[:4]), None), ((X[4:], X[4:]), None)]):
        torch.manual_seed(1)
        found.append(bnn.ood_score(inputs))
    torch.testing.assert_close(*found)


def test_several_outputs_are_refused():
    bnn = mean_field(KindAndSize(2), kind_and_size(7))
    with pytest.raises(TypeError, match="several outputs"):
        bnn.ood_score(X)
    draws = bnn.predict(X, num_predictions=4, aggregate=False)
    assert scores.mutual_information(draws["kind"]).shape == (7,)


# --------------------------------------------------------------------------- batches


@pytest.mark.parametrize("power", [0.0, 1.0, 2.5])
def test_a_batch_is_drawn_in_proportion_to_powers_of_scores(power):
    """Draw pairs one after the other, and compare with all pairs' probabilities."""
    torch.manual_seed(0)
    given = torch.tensor([0.1, 0.4, 0.2, 0.8])
    shares = [float(s) ** power for s in given]
    count = 4_000
    drawn = [tuple(scores.batch(given, 2, power).tolist()) for _ in range(count)]
    for first, second in itertools.permutations(range(4), 2):
        left = sum(shares) - shares[first]
        expected = shares[first] / sum(shares) * shares[second] / left
        error = math.sqrt(expected * (1 - expected) / count)
        assert abs(drawn.count((first, second)) / count - expected) < 4.5 * error


def test_a_batch_of_all_is_a_permutation_in_which_scores_of_zero_come_last():
    given = torch.tensor([0.0, 0.3, 0.0, 0.1])
    for _ in range(20):
        found = scores.batch(given, 4).tolist()
        assert (sorted(found), set(found[:2])) == ([0, 1, 2, 3], {1, 3})


@pytest.mark.parametrize(
    ("given", "size", "message"),
    [
        (torch.tensor([0.1, 0.2]), 3, "the number of scores is 2; expected 3"),
        (torch.tensor([0.1, -0.2]), 1, "from -0.2"),
        (torch.tensor([0.1, math.nan]), 1, "expected numbers of 0 or more"),
        (torch.zeros(2, 2), 1, "shape"),
    ],
)
def test_batches_that_cannot_be_drawn_are_refused(given, size, message):
    with pytest.raises(ValueError, match=message):
        scores.batch(given, size)
