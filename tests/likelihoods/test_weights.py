"""Weights are repetitions, what is ignored is not there, and masks go within points."""

import functools

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tyxe.bnn.elbo import elbo_terms
from tyxe.curvature import collect_curvature
from tyxe.data import Targets
from tyxe.poutine import selective_mask

WEIGHTS = torch.tensor([2.0, 1.0, 0.0, 3.0, 1.0, 1.0], dtype=torch.float64)
REPEATED = torch.tensor([0, 0, 1, 3, 3, 3, 4, 5])
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
LIKELIHOODS = {
    "Categorical": (lambda n: tyxe.likelihoods.Categorical(n), CLASSES),
    "Bernoulli": (
        lambda n: tyxe.likelihoods.Bernoulli(n, event_dim=1),
        torch.arange(18).view(6, 3).double() % 2,
    ),
    "Poisson": (lambda n: tyxe.likelihoods.Poisson(n), torch.arange(18).view(6, 3).double() % 4),
    "Gaussian": (
        lambda n: tyxe.likelihoods.HomoskedasticGaussian(n, scale=0.5),
        torch.linspace(-1, 1, 18).view(6, 3).double(),
    ),
}


def net(outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def data():
    return torch.linspace(-2, 2, 12).view(6, 2).double()


def prior():
    return tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0))


def guide(init_scale=1e-3):
    return functools.partial(tyxe.guides.AutoNormal, init_scale=init_scale)


def variational(likelihood, init_scale=1e-3, seed=0):
    return tyxe.VariationalBNN(net(seed=seed), prior(), likelihood, guide(init_scale))


def fit(likelihood, loader):
    bnn = variational(likelihood)
    history = bnn.fit(loader, functools.partial(torch.optim.SGD, lr=0.1), 5)
    return torch.tensor(history.loss), bnn._mean_values()


def evaluate(likelihood, loader, reduction="sum"):
    return variational(likelihood, 0.3).evaluate(loader, num_predictions=3, reduction=reduction)


def sample(likelihood, loader):
    kernel = tyxe.samplers.HMC(adapt_step_size=False, adapt_mass_matrix=False, step_size=0.1)
    bnn = tyxe.MCMC_BNN(net(), prior(), likelihood, kernel)
    run = bnn.fit(loader, 3, warmup_steps=2, num_chains=1, compile=False)
    return run.get_samples()["net.0.weight"]


def sample_by_mini_batches(likelihood, loader):
    sgld = functools.partial(tyxe.samplers.SGLD, lr=1e-2)
    bnn = tyxe.MCMC_BNN(net(), prior(), likelihood, sgld)
    return bnn.fit(loader, 3, warmup_steps=2, num_chains=2).get_samples()["net.0.weight"]


def train_members(likelihood, loader):
    members = tyxe.EnsembleBNN(lambda i: variational(likelihood, seed=i), 2)
    members.fit(loader, torch.optim.SGD, 3, vectorize=True)
    return members.members[1]._mean_values()


USES = [fit, evaluate, functools.partial(evaluate, reduction="mean"), sample]


@pytest.mark.parametrize(
    ("use", "name"),
    [(use, name) for use in USES for name in LIKELIHOODS]
    + [(use, "Categorical") for use in (sample_by_mini_batches, train_members)],
)
def test_a_weight_counts_its_point_so_often(use, name):
    make, y = LIKELIHOODS[name]
    found = []
    for loader in ([(data(), y, WEIGHTS)], [(data()[REPEATED], y[REPEATED])]):
        torch.manual_seed(1)
        found.append(use(make(8), loader))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["full", "diag", "kron"])
@pytest.mark.parametrize("curvature", ["ggn", "empirical"])
def test_a_weight_counts_its_point_so_often_in_a_curvature(name, structure, curvature):
    make, y = LIKELIHOODS[name]
    bnn = tyxe.LaplaceBNN(net(), prior(), make(8), structure=structure)
    matrices = []
    for batch in ((data(), Targets(y, WEIGHTS)), (data()[REPEATED], y[REPEATED])):
        found = collect_curvature(bnn._linearize, bnn.likelihood, [batch], structure, curvature)
        matrices.append(found.operator.to_dense())
        numbers = (found.log_likelihood, found.error, found.num_targets)
        matrices.append(torch.tensor(numbers))
    if curvature == "ggn" or name != "Categorical":
        torch.testing.assert_close(matrices[1], matrices[3])
    torch.testing.assert_close(matrices[0], matrices[2])


def ignoring(n=4, **options):
    return tyxe.likelihoods.Categorical(n, ignore_index=-100, **options)


def test_what_is_ignored_is_not_there():
    x, y = data(), CLASSES.clone()
    y[[1, 4]] = -100
    kept = y != -100
    results = []
    for batch in ((x, y), (x[kept], y[kept])):
        torch.manual_seed(1)
        bnn = tyxe.VariationalBNN(net(), prior(), ignoring(), guide())
        history = bnn.fit([batch], torch.optim.Adam, 5)
        scores = bnn.evaluate([batch], num_predictions=4)
        laplace = tyxe.LaplaceBNN(net(), prior(), ignoring())
        laplace.fit_curvature([batch])
        results.append((history.loss, scores, laplace.state.precision().to_dense()))
    assert results[0][0] == pytest.approx(results[1][0])
    torch.testing.assert_close(results[0][1:], results[1][1:])


def tokens():
    torch.manual_seed(3)
    y = torch.randint(3, (6, 4))
    ignored = torch.zeros(6, 4, dtype=torch.bool)
    ignored[0, 2:] = ignored[2] = ignored[5, 0] = True
    return y, ignored


class Tokens(nn.Module):
    """Logits of three classes for each of four tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(2, 12).double()

    def forward(self, x):
        return self.inner(x).view(-1, 4, 3)


def test_ignored_tokens_leave_sums_over_the_others_and_rows_without_any_do_not_count():
    y, ignored = tokens()
    bnn = tyxe.VariationalBNN(Tokens(), prior(), ignoring(5), guide())
    logits = bnn.net(data())
    each = logits.log_softmax(-1).gather(-1, y[..., None])[..., 0]
    expected = (each * ~ignored).sum(1)
    marked = y.masked_fill(ignored, -100)
    torch.testing.assert_close(bnn.likelihood.log_likelihood(logits, marked), expected)
    terms = elbo_terms(lambda: bnn.likelihood(logits, marked), lambda: None)
    torch.testing.assert_close(terms.data, expected.sum())
    assert terms.points == 5
    wrong = ((logits.argmax(-1) != y) & ~ignored).sum()
    error, log_likelihood = bnn.evaluate(data(), marked, num_predictions=0)
    assert error == wrong
    torch.testing.assert_close(log_likelihood, expected.sum())


def test_a_mask_within_points_is_ignoring_its_numbers():
    y, ignored = tokens()
    found = []
    for likelihood, targets, mask in (
        (ignoring(5), y.masked_fill(ignored, -100), torch.ones(6, dtype=torch.bool)),
        (tyxe.likelihoods.Categorical(5), y.masked_fill(ignored, -7), ~ignored),
    ):
        torch.manual_seed(1)
        bnn = tyxe.VariationalBNN(Tokens(), prior(), likelihood, guide())
        with selective_mask(mask=mask, expose=["likelihood.data"]):
            history = bnn.fit([(data(), targets)], torch.optim.Adam, 4)
            found.append((torch.tensor(history.loss), bnn.evaluate(data(), targets)))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("predictive", ["glm", "bnn"])
def test_a_gaussian_leaves_numbers_of_a_point_out(predictive):
    _, y = LIKELIHOODS["Gaussian"]
    mask = torch.ones(6, 3, dtype=torch.bool)
    mask[:, 1] = False
    found = []
    for outputs, targets, masks in ((3, y, mask), (2, y[:, [0, 2]], torch.ones(6).bool())):
        inner = net()
        if outputs == 2:
            last = inner[2]
            inner[2] = nn.Linear(4, 2).double()
            with torch.no_grad():
                inner[2].weight.copy_(last.weight[[0, 2]])
                inner[2].bias.copy_(last.bias[[0, 2]])
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.5)
        bnn = tyxe.LaplaceBNN(inner, prior(), likelihood, structure="diag")
        with selective_mask(mask=masks, expose=["likelihood.data"]):
            bnn.fit_curvature([(data(), targets)])
            torch.manual_seed(0)
            options = {"num_predictions": 0} if predictive == "bnn" else {"num_predictions": 10}
            found.append(bnn.evaluate(data(), targets, predictive=predictive, **options))
    torch.testing.assert_close(found[0], found[1])


def test_masked_points_are_left_out_of_a_curvature():
    make, y = LIKELIHOODS["Categorical"]
    mask = torch.tensor([True, False, True, True, False, True])
    found = []
    for batch, masked in (((data(), y), mask), ((data()[mask], y[mask]), torch.ones(4).bool())):
        bnn = tyxe.LaplaceBNN(net(), prior(), make(4))
        with selective_mask(mask=masked, expose=["likelihood.data"]):
            bnn.fit_curvature([batch])
        found.append(bnn.state.precision().to_dense())
    torch.testing.assert_close(found[0], found[1])


def test_the_curvature_of_a_fit_has_the_weights_of_classes():
    batch, weights = (data(), CLASSES), torch.tensor([2.0, 0.5, 1.0])
    likelihood = tyxe.likelihoods.Categorical(20, class_weights=weights)
    bnn = tyxe.LaplaceBNN(net(), prior(), likelihood)
    bnn.fit([batch], torch.optim.Adam, 2)
    found = bnn.state.precision().to_dense()
    bnn.fit_curvature([batch])
    torch.testing.assert_close(found, bnn.state.precision().to_dense())


def test_class_weights_are_weights_of_points_in_fits_and_not_in_evaluations():
    x, y = data(), CLASSES
    weights = torch.tensor([2.0, 0.5, 1.0])
    found = []
    for likelihood, batch in (
        (tyxe.likelihoods.Categorical(7, class_weights=weights), (x, y)),
        (tyxe.likelihoods.Categorical(7), (x, y, weights[y])),
    ):
        torch.manual_seed(1)
        bnn = tyxe.VariationalBNN(net(), prior(), likelihood, guide())
        history = bnn.fit([batch], torch.optim.Adam, 4)
        found.append((torch.tensor(history.loss), bnn.evaluate(x, y)))
    torch.testing.assert_close(found[0], found[1])


def test_class_weights_count_each_pixel_as_the_weighted_cross_entropy_does():
    y, ignored = tokens()
    weights = torch.tensor([2.0, 0.5, 1.0])
    likelihood = ignoring(6, class_weights=weights)
    logits = Tokens()(data())
    marked = y.masked_fill(ignored, -100)
    expected = -nn.functional.cross_entropy(
        logits.movedim(-1, 1), marked, weights.double(), reduction="sum"
    )
    actual = likelihood.log_likelihood(logits, likelihood.with_fit_weights(marked), "sum")
    torch.testing.assert_close(actual, expected)


def test_classes_may_come_first():
    x = torch.randn(2, 3, 5, 5)
    y = torch.randint(4, (2, 5, 5))
    conv = nn.Conv2d(3, 4, 3, padding=1)
    likelihood = tyxe.likelihoods.Categorical(2, class_dim=1)
    bnn = tyxe.VariationalBNN(conv, prior(), likelihood, guide())
    bnn.fit([(x, y)], torch.optim.Adam, 1)
    assert bnn.predict(x, num_predictions=2).shape == (2, 5, 5, 4)
    assert bnn.to_ensemble(2)(x).shape == (2, 5, 5, 4)
    assert bnn.to_module()(x).shape == (2, 4, 5, 5)
    torch.testing.assert_close(
        bnn.predict(x, num_predictions=0, aggregate=False)[0].movedim(-1, 1), bnn.to_module()(x)
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(5), r"weights, has shape \(5,\); expected \(6,\)"),
        (torch.ones(6, 1), r"weights, has shape \(6, 1\); expected \(6,\)"),
        (-torch.ones(6), "negative or not finite"),
        (torch.full((6,), float("nan")), "negative or not finite"),
        (torch.full((6,), 3.0), "18 points.*dataset_size=8.*sum of their weights"),
    ],
)
def test_bad_weights(weights, message):
    make, y = LIKELIHOODS["Categorical"]
    with pytest.raises(ValueError, match=message):
        variational(make(8)).fit([(data(), y, weights)], torch.optim.Adam, 1)


def test_bad_masks():
    make, y = LIKELIHOODS["Gaussian"]
    wrong = selective_mask(mask=torch.ones(6, 2, dtype=torch.bool), expose=["likelihood.data"])
    with pytest.raises(ValueError, match=r"mask has shape \(6, 2\)"), wrong:
        variational(make(6)).fit([(data(), y)], torch.optim.Adam, 1)
    vl = tyxe.poutine.variational_laplace()
    with pytest.raises(ValueError, match="counts each point once"), vl:
        variational(make(8)).fit([(data(), y, WEIGHTS)], torch.optim.Adam, 1)


def test_a_batch_of_which_nothing_counts_has_no_data_term():
    make, y = LIKELIHOODS["Categorical"]
    bnn = tyxe.VariationalBNN(net(), prior(), make(8), guide())
    terms = elbo_terms(bnn.model, bnn.guide, data(), Targets(y, torch.zeros(6)))
    assert terms.data == 0
    assert terms.points == 0
    laplace = tyxe.LaplaceBNN(net(), prior(), make(8))
    with pytest.raises(ValueError, match="no point of the loader counts"):
        laplace.fit_curvature([(data(), y, torch.zeros(6))])
