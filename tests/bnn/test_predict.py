"""`predict`, `evaluate` and `sample_predictive` against what they are by hand."""

import copy
import math
from functools import partial

import pyro.distributions as dist
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import tyxe
from tests.oracles.nets import Rounded
from tests.oracles.predictions import (
    GUIDE,
    LIKELIHOODS,
    NORMAL,
    N,
    S,
    inputs,
    log_mean_exp,
    make,
    net,
    seeded,
)
from tyxe.bnn.passes import ReplayedDraws
from tyxe.guides import AutoNormal, init_to_zero
from tyxe.likelihoods import Categorical, HomoskedasticGaussian


def test_outputs_are_the_net_at_the_guides_draws():
    bnn, x, plain = make(), inputs(), net()
    outputs = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    draws = seeded(lambda: [*ReplayedDraws().over(bnn._draws(S))])
    for output, values in zip(outputs, draws, strict=True):
        own = {name.removeprefix("net."): value for name, value in values.items()}
        by_hand = torch.func.functional_call(plain, own, (x,))
        torch.testing.assert_close(output, by_hand, rtol=1e-12, atol=1e-14)


def test_empty_loader():
    for call in (make().predict, make().evaluate):
        with pytest.raises(ValueError, match="loader is empty"):
            call(iter([]))


def test_handlers_are_active_in_predict():
    bnn, x = make(), inputs()[:1].expand(3, -1)
    with tyxe.poutine.report() as report, tyxe.poutine.local_reparameterization():
        outputs = bnn.predict(x, num_predictions=2, aggregate=False)
        means = bnn.predict(x, num_predictions=0, aggregate=False)
    assert {row.treatment for row in report} == {"moments", "drawn"}  # drawn: at the mean
    assert (outputs[:, 0] - outputs[:, 1]).abs().min() > 0  # noise of its own for each row
    torch.testing.assert_close(means[:, 0], means[:, 1])
    with (
        pytest.raises(ValueError, match="vectorize=True needs drawn weights"),
        tyxe.poutine.local_reparameterization(),
    ):
        bnn.predict(x, vectorize=True)


@pytest.mark.parametrize("modes", ["train", "eval", "mixed"])
def test_predict_is_in_eval_mode_and_gives_modes_back(modes):
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))
    bnn, x = make(net.double()), inputs()
    bnn.train(modes != "eval")
    if modes == "mixed":
        bnn.net[1].eval()
    before = {name: module.training for name, module in bnn.named_modules()}
    state = copy.deepcopy(bnn.state_dict())
    first, second = (seeded(bnn.predict, x, num_predictions=2) for _ in range(2))
    seeded(bnn.evaluate, x, torch.zeros(N).long())
    assert torch.equal(first, second)  # no dropout
    assert {name: module.training for name, module in bnn.named_modules()} == before
    for name, value in bnn.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, state[name]), name


class Jittered(Dataset):
    """Data whose transform draws from torch's global generator, and keeps what it gave."""

    def __init__(self):
        self.given = []

    def __len__(self):
        return 6

    def __getitem__(self, index):
        x = 1.0 + torch.rand(1).double()
        self.given.append(x)
        return x, 0.0


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_loaders_randomness_goes_on_while_the_draws_are_the_same(vectorize):
    bnn = make(nn.Linear(1, 1, bias=False), HomoskedasticGaussian(6, scale=0.1))
    dataset = Jittered()
    outputs = bnn.predict(
        DataLoader(dataset, batch_size=2), num_predictions=3, aggregate=False, vectorize=vectorize
    )
    x = torch.stack(dataset.given)
    assert len(x.unique()) == len(x) == 6
    weights = outputs / x
    torch.testing.assert_close(weights, weights[:, :1].expand_as(weights))
    assert len(weights[:, 0].unique()) == 3


@pytest.mark.parametrize("handler", ["local_reparameterization", "flipout"])
def test_noise_of_a_handler_is_not_repeated_in_the_next_chunk(handler):
    bnn = make(nn.Linear(4, 1, bias=False), HomoskedasticGaussian(6, scale=0.1))
    x = torch.ones(6, 4).double()

    def noise(**options):
        with getattr(tyxe.poutine, handler)():
            return bnn.predict(x, num_predictions=3, aggregate=False, **options)

    for outputs in (noise(batch_size=2), noise(batch_size=1)):
        pieces = outputs.flatten(1).T  # equal rows, of three draws
        distances = torch.cdist(pieces, pieces)[~torch.eye(6, dtype=torch.bool)]
        assert bool((distances > 0).all())


class Signed(nn.Linear):
    """Takes a tensor, a number, a flag and maybe another tensor."""

    def forward(self, x, sign, flag, other=None):
        assert flag == "on"
        return sign * super().forward(x if other is None else x + other)


@pytest.mark.parametrize("batch_size", [1, 4, 2 * N])
def test_arguments_without_rows_go_into_every_piece(batch_size):
    bnn, x = make(Signed(2, 3).double()), inputs()
    for arguments in ((x, -1, "on"), (x, torch.tensor(-1.0).double(), "on", x), (x, 2, "on", None)):
        whole = seeded(bnn.predict, *arguments, num_predictions=S)
        found = seeded(bnn.predict, *arguments, num_predictions=S, batch_size=batch_size)
        torch.testing.assert_close(found, whole, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="the inputs have 10 and 11 rows; batch_size cuts"):
        bnn.predict(x, 1, "on", x[1:], batch_size=4)
    with pytest.raises(ValueError, match="the inputs have no rows"):
        bnn.predict(1, batch_size=4)


def test_samples_of_gaussian_outputs_are_others_for_other_batch_sizes():
    """As documented: each row has samples of its own, so they agree within their error."""
    bnn, x = make(likelihood=Categorical(N)), inputs()
    count = 4_000
    options = {"predictive": "glm", "num_predictions": count}
    whole = seeded(bnn.predict, x, **options).exp()
    pieces = seeded(bnn.predict, x, batch_size=4, **options).exp()
    outputs = bnn.predict(x, aggregate=False, **options)
    error = outputs.softmax(-1).std(0) * math.sqrt(2 / count)
    assert not torch.equal(whole, pieces)
    assert bool(((whole - pieces).abs() <= 6 * error).all())
    for link in ("probit", "bridge"):
        found = bnn.predict(x, predictive="glm", link=link, batch_size=4)
        torch.testing.assert_close(found, bnn.predict(x, predictive="glm", link=link))


# --- scores ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("how", [{}, {"batch_size": 4}, {"vectorize": True}, "loader"])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_evaluate_is_the_computation_by_hand(name, how, reduction):
    likelihood, outputs, y, by_hand = LIKELIHOODS[name]
    bnn, x = make(net(outputs), likelihood), inputs()
    raw = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    reduce = {"sum": torch.sum, "mean": torch.mean, "none": lambda t: t}[reduction]
    expected = tuple(reduce(values) for values in by_hand(raw, y))
    options = {"num_predictions": S, "reduction": reduction}
    if how == "loader":
        loader = DataLoader(TensorDataset(x, y), batch_size=4)
        found = seeded(bnn.evaluate, loader, **options)
    else:
        found = seeded(bnn.evaluate, x, y, **options, **how)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # scale 0.4 in float32


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_evaluate_without_aggregation_has_a_row_for_each_draw(name):
    likelihood, outputs, y, by_hand = LIKELIHOODS[name]
    bnn, x = make(net(outputs), likelihood), inputs()
    raw = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    options = {"num_predictions": S, "reduction": "none", "batch_size": 4}
    found = seeded(bnn.evaluate, x, y, aggregate=False, **options)
    each = [by_hand(raw[s : s + 1], y) for s in range(S)]
    expected = tuple(torch.stack(rows) for rows in zip(*each, strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_inferred_noise_is_drawn_with_the_weights():
    likelihood = HomoskedasticGaussian(N, scale=dist.LogNormal(-1.0, 0.5))
    bnn = make(net(1), likelihood, likelihood_guide=GUIDE)
    x, y = inputs(), torch.arange(1.0 * N)[:, None].double() / N
    raw = seeded(bnn.predict, x, num_predictions=S, aggregate=False)
    draws = seeded(lambda: [*ReplayedDraws().over(bnn._draws(S))])
    scales = torch.stack([values["likelihood.scale"] for values in draws]).detach()
    assert len(set(scales.tolist())) == S
    mean, scale = seeded(bnn.predict, x, num_predictions=S, batch_size=4)
    expected = raw.var(0, correction=0) + scales.square().mean()
    torch.testing.assert_close(scale**2, expected)
    torch.testing.assert_close(mean, raw.mean(0))
    each = dist.Normal(raw, scales[:, None, None]).log_prob(y).sum(-1)
    _, log_likelihood = seeded(bnn.evaluate, x, y, num_predictions=S, reduction="none")
    torch.testing.assert_close(log_likelihood, log_mean_exp(each))


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_evaluation_of_half_predictions_does_not_overflow(dtype, aggregate):
    x, y = torch.randn(3000, 2), torch.full((3000, 1), 20.0)

    def evaluate(then):
        likelihood = HomoskedasticGaussian(3000, scale=0.5)
        module = Rounded(1, dtype, then)
        module.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.zeros(1)})
        bnn = tyxe.VariationalBNN(module, NORMAL, likelihood, AutoNormal)
        return seeded(bnn.evaluate, x, y, num_predictions=4, aggregate=aggregate)

    found = evaluate(dtype)
    torch.testing.assert_close(found, evaluate(torch.float32), rtol=0, atol=0)
    assert all(bool((one.abs() > 1e6).all()) for one in found)


# --- samples and intervals ------------------------------------------------------------------------


X = torch.tensor([[0.5, 1.0], [-1.0, 2.0], [0.0, 0.0]])


def bnn_of(likelihood, outputs: int = 1, **guides) -> tyxe.VariationalBNN:
    """A linear net without a bias, whose weights have N(0, 0.3^2) in the guide."""
    guide = partial(AutoNormal, init_loc_fn=init_to_zero, init_scale=0.3)
    net = nn.Linear(2, outputs, bias=False)
    return tyxe.VariationalBNN(net, NORMAL, likelihood, guide, **guides)


@pytest.mark.parametrize("predictive", ["bnn", "glm"])
def test_samples_of_inferred_noise_are_of_the_posterior_s_draws(predictive: str):
    """And not of the prior's mean, which is e^1.125 here; the guide says 0.1, and a bit."""
    likelihood = HomoskedasticGaussian(10, scale=dist.LogNormal(1.0, 0.5))
    bnn = bnn_of(likelihood, likelihood_guide_builder=noise_guide)
    zero = torch.zeros(1, 2)
    how = {"num_samples": 8_000, "predictive": predictive, "vectorize": predictive == "bnn"}
    samples = bnn.sample_predictive(zero, **how)[:, 0, 0]
    scales = torch.exp(math.log(0.1) + 0.4 * torch.randn(200_000))
    expected = scales.square().mean().sqrt()
    assert samples.std() == pytest.approx(expected.item(), rel=0.05)
    # Heavier tails than a Gaussian's: the scale is drawn, and not averaged.
    kurtosis = (samples / samples.std()).pow(4).mean()
    assert kurtosis > 3.5


def noise_guide(program):
    return AutoNormal(program, init_loc_fn=lambda site: torch.tensor(0.1), init_scale=0.4)


@pytest.mark.parametrize("predictive", ["bnn", "glm"])
def test_an_interval_has_the_normal_s_quantiles(predictive: str):
    bnn = bnn_of(HomoskedasticGaussian(10, scale=0.5))
    how = {"num_samples": 12_000, "predictive": predictive, "vectorize": predictive == "bnn"}
    lower, upper = bnn.interval(X, level=0.8, **how)
    scale = (0.3**2 * X.square().sum(1, keepdim=True) + 0.25).sqrt()
    torch.testing.assert_close(upper, 1.2816 * scale, rtol=0.04, atol=0.01)
    torch.testing.assert_close(lower, -1.2816 * scale, rtol=0.04, atol=0.01)


@pytest.mark.parametrize(("level", "num_samples"), [(0.9, 10), (0.9, 24), (0.5, 2), (0.99, 1)])
def test_an_interval_of_few_samples_holds_a_target_as_often_as_said(level: float, num_samples: int):
    bnn = bnn_of(HomoskedasticGaussian(10, scale=0.5))
    rows = torch.randn(2000, 2)
    lower, upper = bnn.interval(rows, level=level, num_samples=num_samples, predictive="glm")
    scale = (0.3**2 * rows.square().sum(1, keepdim=True) + 0.25).sqrt()
    normal = dist.Normal(0, scale)
    held = (normal.cdf(upper) - normal.cdf(lower)).flatten()
    assert held.mean() > level - 4 * held.std() / math.sqrt(len(held))


ORDERED = {
    "Bernoulli": (tyxe.likelihoods.Bernoulli(10), 1),
    "HeteroskedasticGaussian": (tyxe.likelihoods.HeteroskedasticGaussian(10), 2),
    "Poisson": (tyxe.likelihoods.Poisson(10), 1),
    "HomoskedasticGaussian": (HomoskedasticGaussian(10, precision=4.0), 2),
}


@pytest.mark.parametrize("name", ORDERED)
def test_intervals_of_every_likelihood_with_an_order(name: str):
    likelihood, outputs = ORDERED[name]
    bnn = bnn_of(likelihood, outputs)
    lower, upper = bnn.interval(X, num_samples=200)
    samples = bnn.sample_predictive(X, num_samples=50)
    assert lower.shape == upper.shape == samples.shape[1:]
    assert (lower <= upper).all()
    inside = ((samples >= lower) & (samples <= upper)).float().mean()
    assert inside > 0.7


def test_batches_have_the_same_weights_and_other_noise():
    bnn = bnn_of(HomoskedasticGaussian(10, scale=1e-6))
    rows = X[:1].expand(4, 2)
    samples = bnn.sample_predictive(rows, num_samples=5, batch_size=1)
    torch.testing.assert_close(samples, samples[:, :1].expand(5, 4, 1), rtol=0, atol=1e-4)
    assert not torch.equal(samples[:, 0], samples[:, 1])


def test_what_has_no_interval_says_so():
    with pytest.raises(TypeError, match="classes, which have no order"):
        bnn_of(tyxe.likelihoods.Categorical(10), 3).interval(X)
    bnn = bnn_of(HomoskedasticGaussian(10, scale=1.0))
    with pytest.raises(ValueError, match="level is 90"):
        bnn.interval(X, level=90)
    with pytest.raises(ValueError, match="num_samples is 0"):
        bnn.sample_predictive(X, num_samples=0)


def test_scores_are_numbers():
    bnn = bnn_of(tyxe.likelihoods.Bernoulli(10))
    for predictive in ("bnn", "glm"):
        with pytest.raises(ValueError, match="3 of 3 points is not a number"):
            bnn.evaluate(X * torch.nan, torch.ones(3, 1), predictive=predictive)


def test_a_number_of_noise_is_trained_if_asked():
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = x @ torch.tensor([[1.0], [-1.0]]) + 0.3 * torch.randn(200, 1)
    for how in ({"scale": 1.0, "learn_scale": True}, {"scale": nn.Parameter(torch.tensor(1.0))}):
        bnn = bnn_of(HomoskedasticGaussian(200, **how))
        bnn.fit([(x, y)], partial(torch.optim.Adam, lr=5e-2), 200)
        assert bnn.likelihood.scale.item() == pytest.approx(0.3, rel=0.15)
    fixed = bnn_of(HomoskedasticGaussian(200, scale=1.0))
    fixed.fit([(x, y)], partial(torch.optim.Adam, lr=3e-2), 5)
    assert fixed.likelihood.scale.item() == 1.0
