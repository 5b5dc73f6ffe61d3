"""Likelihoods: the contract, what bad input is told, numbers at the edges."""

import functools
import math

import numpy as np
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.distributions as td

import tyxe
from tyxe.errors import TyxeWarning
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    Censored,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Poisson,
    StudentT,
    output_hessian,
)
from tyxe.testing import LIKELIHOODS, LikelihoodCase, check_likelihood

EACH = {
    "Bernoulli": Bernoulli,
    "Categorical": Categorical,
    "HomoskedasticGaussian": lambda n=None, **k: HomoskedasticGaussian(n, scale=1.0, **k),
    "HeteroskedasticGaussian": HeteroskedasticGaussian,
    "Poisson": Poisson,
    "NegativeBinomial": NegativeBinomial,
    "Ordinal": lambda n=None, **k: Ordinal(n, 3, **k),
    "StudentT": StudentT,
    "Censored": lambda n=None, **k: Censored(HomoskedasticGaussian(n, 1.0, **k)),
}


@pytest.mark.parametrize("case", LIKELIHOODS.values(), ids=LIKELIHOODS.keys())
def test_contract(case):
    check_likelihood(case)


@pytest.mark.parametrize("case", LIKELIHOODS.values(), ids=LIKELIHOODS.keys())
def test_likelihoods_of_numbers_have_squared_errors(case):
    likelihood, predictions = case.build(6), torch.randn(6, *case.output_shape)
    latents = likelihood.prior_means()
    law = likelihood.predictive_distribution(predictions, latents)
    targets = likelihood.sample(predictions, latents=latents)
    error = likelihood.point_error(predictions, targets)
    numbers = targets[..., 0] if isinstance(likelihood, Censored) else targets  # of bounds
    is_square = error.shape == law.mean.shape and torch.allclose(error, (law.mean - numbers) ** 2)
    assert likelihood.has_squared_errors == is_square


@pytest.mark.parametrize(("points", "draws"), [(4, 1), (7, 2), (3, 20)])
def test_contract_at_other_sizes(points, draws):
    check_likelihood(LikelihoodCase(Categorical, (3,)), points, draws)
    check_likelihood(LikelihoodCase(HeteroskedasticGaussian, (4,), (2,)), points, draws)


def test_the_contract_finds_faults():
    class Halved(Poisson):
        def aggregate_predictions(self, predictions, dim=0, latents=None):
            return super().aggregate_predictions(predictions, dim, latents) - math.log(2)

    class Unscaled(Poisson):
        def forward(self, predictions, obs=None):
            return poutine.scale(super().forward, 0.5)(predictions, obs)

    class Scalar(Poisson):
        def point_error(self, predictions, targets):
            return super().point_error(predictions, targets).mean()

    for faulty in (Halved, Unscaled, Scalar):
        with pytest.raises((AssertionError, IndexError)):
            check_likelihood(LikelihoodCase(faulty, matches_variance=False))


class Angles(Likelihood):
    """Directions about the one that the net predicts."""

    concentration = 4.0

    def predictive_distribution(self, predictions, latents=None):
        return dist.VonMises(predictions, predictions.new_tensor(self.concentration))

    def point_error(self, predictions, targets):
        return 1 - (predictions - targets).cos()

    def aggregate_predictions(self, predictions, dim=0, latents=None):
        return torch.atan2(predictions.sin().mean(dim), predictions.cos().mean(dim))


class Turned(Angles):
    def sample(self, predictions, sample_shape=(), latents=None):
        return super().sample(predictions + 0.2, sample_shape, latents)


def test_angles_have_no_mean_of_numbers():
    check_likelihood(LikelihoodCase(Angles, (2,), (2,), matches_mean=False))
    with pytest.raises(AssertionError, match="mean of the mixture"):
        check_likelihood(LikelihoodCase(Angles, (2,), (2,)))
    with pytest.raises(AssertionError, match="mean gradient of log_prob at samples"):
        check_likelihood(LikelihoodCase(Turned, (2,), (2,), matches_mean=False))


class Doubled(Poisson):
    pass


class Uncoupled(Categorical):
    pass


@output_hessian.register
def _(likelihood: Doubled, predictions, latents=None):
    return 2 * predictions.exp()[..., None, None]


@output_hessian.register
def _(likelihood: Uncoupled, predictions, latents=None):
    probs = predictions.softmax(-1)
    return torch.diag_embed(probs * (1 - probs)).unsqueeze(1)


@pytest.mark.parametrize(
    "case", [LikelihoodCase(Doubled, (2,), (2,), False), LikelihoodCase(Uncoupled, (3,))]
)
def test_the_contract_finds_wrong_output_hessians(case):
    with pytest.raises(AssertionError, match="the registered output Hessian"):
        check_likelihood(case)


class Fixed(Likelihood):
    """Gaussian noise whose inferred scale has a prior of float32 numbers."""

    def latent_priors(self):
        return {"scale": dist.LogNormal(0.0, 0.5)}

    def predictive_distribution(self, predictions, latents=None):
        if not latents:
            raise ValueError("the scale has no value")
        return dist.Normal(predictions, latents["scale"].to(predictions.dtype))

    def point_error(self, predictions, targets):
        return (predictions - targets).square()

    def aggregate_predictions(self, predictions, dim=0, latents=None):
        if not latents:
            raise ValueError("the scale has no value")
        return predictions.mean(dim)


class Moving(Fixed):
    def __init__(self, dataset_size=None):
        super().__init__(dataset_size)
        self.register_buffer("spread", torch.tensor(0.5))

    def latent_priors(self):
        return {"scale": dist.LogNormal(0.0 * self.spread, self.spread)}


def test_a_latent_follows_the_dtype_by_buffers():
    check_likelihood(LikelihoodCase(Moving, (2,), (2,), matches_variance=False))
    with pytest.raises(AssertionError, match="keep the numbers of its prior by register_buffer"):
        check_likelihood(LikelihoodCase(Fixed, (2,), (2,), matches_variance=False))


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EACH)
def test_what_is_no_tensor_has_no_log_likelihood(name):
    for wrong in (None, "nonsense", -1, []):
        with pytest.raises(TypeError, match=r"predictions is .*; expected a tensor"):
            EACH[name]().log_likelihood(wrong, torch.ones(4))
        with pytest.raises(TypeError, match=r"targets is .*; expected a tensor"):
            EACH[name]().log_likelihood(torch.ones(4), wrong)


def test_the_dataset_size_is_needed_and_positive():
    for wrong in ("100", True, torch.ones(2)):
        with pytest.raises(TypeError, match=r"the sum of their weights: \w+\(len\(dataset"):
            Bernoulli(wrong)
    for bad in (0, -3, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"dataset_size is {bad}.*; expected a number"):
            Bernoulli(bad)
    for size in (5, 5.0, torch.tensor(5), np.int64(5)):
        assert isinstance(Bernoulli(size).dataset_size, int)
        assert Bernoulli(size).dataset_size == 5
    assert Bernoulli(torch.tensor([2.5, 0.25]).sum()).dataset_size == 2.75
    for missing in (None, -1):
        with pytest.raises(ValueError, match=r"bnn.likelihood.dataset_size = len\(dataset\)"):
            _ = Bernoulli(missing).dataset_size


@pytest.mark.parametrize("name", [name for name in EACH if name != "Ordinal"])  # of one number
@pytest.mark.parametrize(
    ("predictions", "dim", "weights", "message"),
    [
        ([1.0], 0, None, "predictions is a list; expected a tensor"),
        (torch.ones(0, 4, 2), 0, None, "draws in predictions is 0; expected 1"),
        (torch.ones(3, 4, 2), [], None, "dim is a list; expected an integer"),
        (torch.ones(3, 4, 2), 0, 1.0, "weights is 1.0; expected a tensor"),
        (torch.ones(3, 4, 2), 0, torch.ones(2), r"weights has shape \(2,\); expected \(3,\)"),
    ],
)
def test_what_is_no_stack_of_draws_is_refused(name, predictions, dim, weights, message):
    with pytest.raises((TypeError, ValueError), match=message):
        EACH[name]().aggregate_predictions(predictions, dim, weights=weights)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "hint"),
    [
        (Bernoulli(9), (4, 1), (4,), r"pass targets.unsqueeze\(-1\), or squeeze the net's output"),
        (Bernoulli(9), (4,), (4, 1), r"pass targets.squeeze\(-1\), or unsqueeze the net's output"),
        (Bernoulli(9), (4,), (1,), "they have to be the same"),
        (Categorical(9), (4, 3), (4, 1), r"pass targets.squeeze\(-1\)"),
        (Ordinal(9, 3), (4, 1), (4, 1), r"pass targets.squeeze\(-1\)"),
        (Categorical(9), (4, 3), (4, 3), r"targets.argmax\(-1\)"),
        (Categorical(9), (4, 3, 5, 5), (4, 5, 5), r"return logits.movedim\(1, -1\)"),
        (HomoskedasticGaussian(9, 1.0), (4, 1), (4,), r"pass targets.unsqueeze\(-1\)"),
        (HeteroskedasticGaussian(9), (4, 2), (4,), r"pass targets.unsqueeze\(-1\)"),
        (HeteroskedasticGaussian(9), (4, 2), (4, 2), "they have to be the same"),
        (Poisson(9), (4, 1), (4,), r"pass targets.unsqueeze\(-1\)"),
    ],
)
def test_targets_of_another_shape_are_refused(likelihood, outputs, targets, hint):
    dtype = torch.long if isinstance(likelihood, Categorical) else torch.float
    predictions, y = torch.zeros(outputs), torch.zeros(targets, dtype=dtype)
    for call in (likelihood.log_likelihood, likelihood.error, likelihood, likelihood.check_targets):
        with pytest.raises(ValueError, match=hint) as caught:
            call(predictions, y)
        assert f"{type(likelihood).__name__} got targets of shape {targets}" in str(caught.value)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets"),
    [
        (Bernoulli(9), (3,), [0.0, 1.0, 2.0]),
        (Bernoulli(9), (3,), [0.0, 1.0, 0.5]),
        (Categorical(9), (3, 2), [0, 1, 2]),
        (Categorical(9), (3, 2), [0, 1, -1]),
        (Poisson(9), (3,), [0.0, 1.0, -1.0]),
        (Poisson(9), (3,), [0.0, 1.0, 1.5]),
        (HomoskedasticGaussian(9, 1.0), (3,), [0.0, 1.0, float("nan")]),
    ],
)
def test_targets_outside_the_support_are_refused(likelihood, outputs, targets):
    bad = torch.tensor(targets)
    with pytest.raises(ValueError, match=r"outside the support of .* they range from"):
        likelihood.check_targets(torch.zeros(outputs), bad)
    likelihood.check_targets(torch.zeros(outputs)[:2], bad[:2])


# --- what each one says ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"scale": 0.1}, {"precision": 100.0}])
def test_the_noise_is_not_rounded(options):
    likelihood = HomoskedasticGaussian(9, **options)
    stddev = likelihood.predictive_distribution(torch.zeros(3, 1).double()).stddev
    expected = torch.full((3, 1), 0.1, dtype=torch.float64)
    torch.testing.assert_close(stddev, expected, rtol=1e-15, atol=0)
    assert likelihood.scale.item() == pytest.approx(0.1)
    assert likelihood.precision.item() == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("likelihood", "predictions", "targets", "expected"),
    [
        (Categorical(9), [[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 0, 1], [0.0, 1.0, 1.0]),
        (Bernoulli(9), [1.0, -1.0], [1, 1], [0.0, 1.0]),
        (HomoskedasticGaussian(9, 1.0), [[1.0, 2.0]], [[0.0, 4.0]], [5.0]),
        (HeteroskedasticGaussian(9), [[1.0, 2.0, 0.0, 0.0]], [[0.0, 4.0]], [5.0]),
        (Poisson(9), [math.log(2.0)], [5], [9.0]),
    ],
)
def test_errors_count_misclassifications_or_sum_squares(likelihood, predictions, targets, expected):
    found = likelihood.error(torch.tensor(predictions), torch.tensor(targets), "none")
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("likelihood", [Categorical, Bernoulli])
def test_probabilities_in_place_of_logits(likelihood):
    logits = torch.randn(6, 4, 3).double()
    squash = torch.sigmoid if likelihood is Bernoulli else (lambda t: t.softmax(-1))
    probs = squash(logits)
    by_logits, by_probs = likelihood(9), likelihood(9, logit_predictions=False)
    targets = by_logits.sample(logits[0])
    for method in ("log_likelihood", "error"):
        torch.testing.assert_close(
            getattr(by_probs, method)(probs[0], targets),
            getattr(by_logits, method)(logits[0], targets),
        )
    expected = squash(by_logits.aggregate_predictions(logits))
    torch.testing.assert_close(by_probs.aggregate_predictions(probs), expected)


def test_aggregation_survives_extreme_predictions():
    large = torch.tensor([[[800.0, -800.0]], [[-800.0, 800.0]]])
    torch.testing.assert_close(
        Categorical(9).aggregate_predictions(large).softmax(-1), torch.tensor([[0.5, 0.5]])
    )
    logits = Bernoulli(9).aggregate_predictions(torch.tensor([[500.0], [400.0]]))
    # The mean of the complements is exp(-400)/2: its logit is 400 + log 2.
    torch.testing.assert_close(logits, torch.tensor([400 + math.log(2)]))
    rates = Poisson(9).aggregate_predictions(torch.tensor([[200.0], [-200.0]]))
    torch.testing.assert_close(rates, torch.tensor([200 - math.log(2)]))
    narrow = torch.tensor([[[1.0, -18.0]]]).double()
    aggregated = HeteroskedasticGaussian(9).aggregate_predictions(narrow)
    torch.testing.assert_close(aggregated, narrow[0], rtol=1e-6, atol=0)


def test_a_vector_of_scales_may_be_inferred_and_draws_are_averaged():
    prior = dist.LogNormal(0.0, 1.0).expand([2]).to_event(1)
    likelihood = HomoskedasticGaussian(9, scale=prior)
    assert likelihood.scale.tolist() == pytest.approx([math.exp(0.5)] * 2, rel=1e-6)
    latents = {"scale": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}
    _, scale = likelihood.aggregate_predictions(torch.zeros(2, 5, 2), 0, latents)
    torch.testing.assert_close(scale, torch.tensor([5.0, 10.0]).sqrt().expand(5, 2))


def test_names_and_dtypes_follow():
    likelihood = HomoskedasticGaussian(9, scale=0.1, name="second").double()
    trace = poutine.trace(likelihood).get_trace(torch.zeros(3, 1).double(), torch.ones(3, 1))
    assert "second.data" in trace.nodes
    assert trace.nodes["second.data"]["fn"].mean.dtype == torch.float64
    assert trace.nodes["second.data"]["scale"] == 3.0


def test_a_noise_whose_prior_has_no_mean_in_closed_form():
    transforms = td.transforms
    shifted = [transforms.ExpTransform(), transforms.AffineTransform(0.1, 1.0)]
    prior = dist.TransformedDistribution(dist.Normal(0.0, 0.5), shifted)
    likelihood, before = HomoskedasticGaussian(6, scale=prior), torch.get_rng_state()
    scale = likelihood.scale
    assert likelihood.scale == scale
    assert torch.equal(torch.get_rng_state(), before)
    error = math.sqrt(math.expm1(0.25) * math.exp(0.25) / 1000)
    assert abs(scale - 0.1 - math.exp(0.125)) < 4 * error
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    guide = tyxe.guides.AutoNormal
    bnn = tyxe.VariationalBNN(
        torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)), likelihood, guide, guide
    )
    bnn.fit([(x, y)], torch.optim.Adam, 2, progress=False)
    assert bool(bnn.evaluate(x, y)[1].isfinite())


# --- half precision -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", LIKELIHOODS.values(), ids=LIKELIHOODS.keys())
def test_half_predictions_are_worth_what_they_are_upcast(case, dtype):
    likelihood = case.build(6)
    latents = likelihood.prior_means()
    predictions = torch.randn(6, *case.output_shape).to(dtype)
    targets = likelihood.sample(predictions.float(), latents=latents)
    likelihood.check_targets(predictions, targets)
    scores = functools.partial(likelihood.log_likelihood, latents=latents)
    for method in (scores, likelihood.error):
        found, expected = method(predictions, targets), method(predictions.float(), targets)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_counts_that_half_precision_cannot_hold_are_counts():
    Poisson(1).check_targets(torch.tensor([[11.0]]).half(), torch.tensor([[70_000.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_probabilities_in_any_precision_are_probabilities(dtype):
    probabilities = torch.randn(200, 10).softmax(-1).to(dtype)
    Categorical(200, logit_predictions=False).check_predictions(probabilities)
    Bernoulli(200, logit_predictions=False).check_predictions(probabilities)
    with pytest.warns(TyxeWarning, match="looks like probabilities, but is taken for logits"):
        Categorical(200).check_predictions(probabilities)


def test_class_logits_are_scored_as_by_pyros_categorical():
    logits = torch.randn(4, 5, 3).double().requires_grad_()
    targets = torch.randint(0, 3, (4, 5))
    ours = Categorical(4).predictive_distribution(logits)
    plain = dist.Categorical(logits=logits)
    for labels in (targets, targets[0], torch.randint(0, 3, (2, 4, 5)), torch.tensor(1)):
        for typed in (labels, labels.int(), labels.double()):
            torch.testing.assert_close(ours.log_prob(typed), plain.log_prob(labels))
    gradients = [torch.autograd.grad(d.log_prob(targets).sum(), logits)[0] for d in (ours, plain)]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(ours.probs, plain.probs)
    torch.testing.assert_close(ours.entropy(), plain.entropy())
    one, label = Categorical(4).predictive_distribution(logits[0, 0]), torch.tensor(1)
    torch.testing.assert_close(one.log_prob(label), plain.log_prob(label)[0, 0])
    assert ours.expand((2, 4, 5)).log_prob(targets).shape == (2, 4, 5)
    assert ours.expand((4, 5)) is ours
    assert ours.sample((6,)).shape == (6, 4, 5)


@pytest.mark.parametrize("label", [-100, -1, 3])
def test_no_label_is_left_out_of_the_likelihood(label):
    found = Categorical(2).log_likelihood(torch.zeros(2, 3), torch.tensor([0, label]))
    torch.testing.assert_close(found, torch.tensor([-math.log(3), -math.inf]))
