"""Weights are repetitions, what is ignored is not there, and masks go within points."""

import functools

import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL
from tests.oracles.nets import NetOf
from tyxe.bnn.elbo import elbo_terms
from tyxe.calibration import SplitConformal, coverage
from tyxe.data import Targets
from tyxe.likelihoods import Bernoulli, Categorical, HomoskedasticGaussian, Poisson
from tyxe.poutine import selective_mask

X = torch.linspace(-2, 2, 12).view(6, 2).double()
WEIGHTS = torch.tensor([2.0, 1.0, 0.0, 3.0, 1.0, 1.0], dtype=torch.float64)
REPEATED = torch.tensor([0, 0, 1, 3, 3, 3, 4, 5])
CLASSES = torch.tensor([0, 1, 2, 0, 1, 2])
OF_CLASSES = torch.tensor([2.0, 0.5, 1.0])
LIKELIHOODS = {
    "Categorical": (Categorical, CLASSES),
    "Bernoulli": (
        functools.partial(Bernoulli, event_dim=1),
        torch.arange(18).view(6, 3).double() % 2,
    ),
    "Poisson": (Poisson, torch.arange(18).view(6, 3).double() % 4),
    "Gaussian": (
        functools.partial(HomoskedasticGaussian, scale=0.5),
        torch.linspace(-1, 1, 18).view(6, 3).double(),
    ),
}
ignoring = functools.partial(Categorical, ignore_index=-100)


def net(outputs=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def variational(likelihood, init_scale=1e-3, inner=None):
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=init_scale)
    return tyxe.VariationalBNN(inner or net(), NORMAL, likelihood, guide)


def masked(mask):
    return selective_mask(mask=mask, expose=["likelihood.data"])


# --- what is equal in two cases -----------------------------------------------------------------


def fit(likelihood, loader, inner=None):
    bnn = variational(likelihood, inner=inner)
    history = bnn.fit(loader, functools.partial(torch.optim.SGD, lr=0.1), 5)
    return torch.tensor(history.loss), bnn._mean_values()


def evaluate(likelihood, loader, inner=None, reduction="sum"):
    bnn = variational(likelihood, 0.3, inner)
    return bnn.evaluate(loader, num_predictions=3, reduction=reduction)


def sample(likelihood, loader):
    kernel = tyxe.samplers.HMC(adapt_step_size=False, adapt_mass_matrix=False, step_size=0.1)
    bnn = tyxe.MCMC_BNN(net(), NORMAL, likelihood, kernel)
    run = bnn.fit(loader, 3, warmup_steps=2, num_chains=1, compile=False)
    return run.get_samples()["net.0.weight"]


def sample_by_mini_batches(likelihood, loader):
    sgld = functools.partial(tyxe.samplers.SGLD, lr=1e-2)
    bnn = tyxe.MCMC_BNN(net(), NORMAL, likelihood, sgld)
    return bnn.fit(loader, 3, warmup_steps=2, num_chains=2).get_samples()["net.0.weight"]


def train_members(likelihood, loader):
    bnn = tyxe.EnsembleBNN(lambda i: variational(likelihood, inner=net(seed=i)), 2)
    bnn.fit(loader, torch.optim.SGD, 3, vectorize=True)
    return bnn.members[1]._mean_values()


def curvature_of_fit(likelihood, loader):
    bnn = tyxe.LaplaceBNN(net(), NORMAL, likelihood)
    bnn.fit_curvature(loader)
    return bnn.state.precision().to_dense()


def assert_same(use, *cases):
    """Assert that a use comes to the same in two cases, at the same draws."""
    found = []
    for case in cases:
        torch.manual_seed(1)
        found.append(use(*case))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("use", "name"),
    [
        *((use, name) for use in (fit, evaluate) for name in LIKELIHOODS),
        (functools.partial(evaluate, reduction="mean"), "Poisson"),
        (sample, "Gaussian"),
        (sample_by_mini_batches, "Categorical"),
        (train_members, "Categorical"),
    ],
)
def test_a_weight_counts_its_point_so_often(use, name):
    make, y = LIKELIHOODS[name]
    assert_same(use, (make(8), [(X, y, WEIGHTS)]), (make(8), [(X[REPEATED], y[REPEATED])]))


@pytest.mark.parametrize("use", [fit, evaluate])
def test_class_weights_are_weights_of_points_in_fits_and_not_in_evaluations(use):
    weighted = (X, CLASSES, OF_CLASSES[CLASSES]) if use is fit else (X, CLASSES)
    by_class = Categorical(7, class_weights=OF_CLASSES)
    assert_same(use, (by_class, [(X, CLASSES)]), (Categorical(7), [weighted]))


# --- within points ------------------------------------------------------------------------------


def tokens():
    """Return labels of four tokens for each point, and which of them are ignored."""
    y = torch.randint(3, (6, 4), generator=torch.Generator().manual_seed(3))
    ignored = torch.zeros(6, 4, dtype=torch.bool)
    ignored[0, 2:] = ignored[2] = ignored[5, 0] = True
    return y, ignored


def of_tokens():
    torch.manual_seed(0)
    inner = nn.Linear(2, 12).double()
    return NetOf(lambda net, x: net.inner(x).view(-1, 4, 3), inner=inner)


def test_ignored_tokens_leave_sums_over_the_others_and_rows_without_any_do_not_count():
    y, ignored = tokens()
    bnn = variational(ignoring(5), inner=of_tokens())
    logits = bnn.net(X)
    each = logits.log_softmax(-1).gather(-1, y[..., None])[..., 0]
    expected = (each * ~ignored).sum(1)
    marked = y.masked_fill(ignored, -100)
    torch.testing.assert_close(bnn.likelihood.log_likelihood(logits, marked), expected)
    terms = elbo_terms(lambda: bnn.likelihood(logits, marked), lambda: None)
    torch.testing.assert_close(terms.data, expected.sum())
    assert terms.points == 5
    wrong = ((logits.argmax(-1) != y) & ~ignored).sum()
    error, log_likelihood = bnn.evaluate(X, marked, num_predictions=0)
    assert error == wrong
    torch.testing.assert_close(log_likelihood, expected.sum())


@pytest.mark.parametrize("use", [fit, evaluate])
def test_a_mask_within_points_is_ignoring_its_numbers(use):
    y, ignored = tokens()

    def of(likelihood, filled, mask):
        with masked(mask):
            return use(likelihood, [(X, y.masked_fill(ignored, filled))], of_tokens())

    every = torch.ones(6, dtype=torch.bool)
    assert_same(of, (ignoring(5), -100, every), (Categorical(5), -7, ~ignored))


@pytest.mark.parametrize("predictive", ["glm", "bnn"])
def test_a_gaussian_leaves_numbers_of_a_point_out(predictive):
    _, y = LIKELIHOODS["Gaussian"]
    mask, kept = torch.ones(6, 3, dtype=torch.bool), [0, 2]
    mask[:, 1] = False
    smaller = net(2)
    with torch.no_grad():
        for part, whole in zip(smaller[2].parameters(), net()[2].parameters(), strict=True):
            part.copy_(whole[kept])

    def use(inner, targets, mask):
        likelihood = HomoskedasticGaussian(6, scale=0.5)
        bnn = tyxe.LaplaceBNN(inner, NORMAL, likelihood, structure="diag")
        with masked(mask):
            bnn.fit_curvature([(X, targets)])
            count = 0 if predictive == "bnn" else 10
            return bnn.evaluate(X, targets, predictive=predictive, num_predictions=count)

    assert_same(use, (net(), y, mask), (smaller, y[:, kept], mask[:, 0]))


def test_labels_may_be_bytes():
    x, y = torch.randn(60, 3), torch.arange(60) % 3
    made = []
    for labels in (y, y.to(torch.uint8)):
        torch.manual_seed(1)
        likelihood = Categorical(60, class_weights=torch.tensor([0.5, 1.0, 1.5]))
        bnn = variational(likelihood, inner=nn.Linear(3, 3))
        # As many points in a batch as there are classes: a mask of them has the right shape.
        history = bnn.fit([*zip(x.split(3), labels.split(3), strict=True)], torch.optim.SGD, 2)
        report = str(tyxe.diagnostics.diagnose(bnn, [(x, labels)], [(x, labels)]))
        sets = SplitConformal().wrap(bnn, [(x, labels)]).predict(x)
        made.append((history.loss, report, coverage(sets, labels)))
    assert made[0] == made[1]


def test_class_weights_count_each_pixel_as_the_weighted_cross_entropy_does():
    y, ignored = tokens()
    likelihood = ignoring(6, class_weights=OF_CLASSES)
    logits, marked = of_tokens()(X), y.masked_fill(ignored, -100)
    expected = -nn.functional.cross_entropy(
        logits.movedim(-1, 1), marked, OF_CLASSES.double(), reduction="sum"
    )
    actual = likelihood.log_likelihood(logits, likelihood.with_fit_weights(marked), "sum")
    torch.testing.assert_close(actual, expected)


# --- others -------------------------------------------------------------------------------------


def test_the_curvature_of_a_fit_has_the_weights_of_classes():
    batch = (X, CLASSES)
    bnn = tyxe.LaplaceBNN(net(), NORMAL, Categorical(20, class_weights=OF_CLASSES))
    bnn.fit([batch], torch.optim.Adam, 2)
    found = bnn.state.precision().to_dense()
    bnn.fit_curvature([batch])
    torch.testing.assert_close(found, bnn.state.precision().to_dense())


def test_classes_may_come_first():
    x, y = torch.randn(2, 3, 5, 5), torch.randint(4, (2, 5, 5))
    bnn = variational(Categorical(2, class_dim=1), inner=nn.Conv2d(3, 4, 3, padding=1))
    bnn.fit([(x, y)], torch.optim.Adam, 1)
    assert bnn.predict(x, num_predictions=2).shape == (2, 5, 5, 4)
    assert bnn.to_ensemble(2)(x).shape == (2, 5, 5, 4)
    centre = bnn.predict(x, num_predictions=0, aggregate=False)[0]
    torch.testing.assert_close(centre.movedim(-1, 1), bnn.to_module()(x))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.ones(5), r"weights, has shape \(5,\); expected \(6,\)"),
        (torch.ones(6, 1), r"weights, has shape \(6, 1\); expected \(6,\)"),
        (-torch.ones(6), "expected finite counts from 0"),
        (torch.full((6,), float("nan")), "expected finite counts from 0"),
        (torch.full((6,), 3.0), "18 points.*dataset_size=8.*sum of their weights"),
    ],
)
def test_bad_weights(weights, message):
    with pytest.raises(ValueError, match=message):
        variational(Categorical(8)).fit([(X, CLASSES, weights)], torch.optim.Adam, 1)


def test_bad_masks():
    make, y = LIKELIHOODS["Gaussian"]
    wrong = masked(torch.ones(6, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask has shape \(6, 2\)"), wrong:
        variational(make(6)).fit([(X, y)], torch.optim.Adam, 1)
    vl = tyxe.poutine.variational_laplace()
    with pytest.raises(ValueError, match="counts each point once"), vl:
        variational(make(8)).fit([(X, y, WEIGHTS)], torch.optim.Adam, 1)


def test_a_batch_of_which_nothing_counts_has_no_data_term():
    bnn = variational(Categorical(8))
    terms = elbo_terms(bnn.model, bnn.guide, X, Targets(CLASSES, torch.zeros(6)))
    assert terms.data == 0
    assert terms.points == 0
    with pytest.raises(ValueError, match="no point counts"):
        curvature_of_fit(Categorical(8), [(X, CLASSES, torch.zeros(6))])
