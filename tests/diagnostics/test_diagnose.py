"""Posteriors that are broken on purpose are found to be, and healthy ones are not."""

import copy
import functools
import math
import threading
from collections import OrderedDict

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal
from torch import nn

import tyxe
from tests.oracles.bnns import NORMAL, mean_field
from tests.oracles.nets import KindAndSize, NetOf, kind_and_size
from tyxe import likelihoods
from tyxe.diagnostics import Line, diagnose
from tyxe.diagnostics.report import ANY, below

NOTHING = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)
NOISE = 0.5
ADAM = functools.partial(torch.optim.Adam, lr=2e-2)


def seeded(seed):
    return {"generator": torch.Generator().manual_seed(seed)}


def numbers(count, seed):
    x = 4 * torch.rand(count, 1, **seeded(seed)) - 2
    return x, x.sin() + NOISE * torch.randn(count, 1, **seeded(seed + 1))


def classes(count, seed):
    x = torch.randn(count, 2, **seeded(seed))
    return x, (torch.rand(count, **seeded(seed + 1)) < (2 * x[:, 0]).sigmoid()).long()


TRAIN, HELD_OUT = numbers(200, 0), numbers(400, 2)
ALL = {"num_predictions": 128}


def net(outputs=1, inputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def gaussian(size=200, scale=NOISE):
    return likelihoods.HomoskedasticGaussian(size, scale=scale)


def annealed(bnn, data, epochs):
    """Fit with a rate that falls to nothing."""
    optimizer = ADAM(bnn.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    bnn.fit(data, optimizer, epochs, lambda *_: schedule.step())
    return bnn


@functools.cache  # a diagnosis changes nothing
def variational(epochs=600, size=200, scale=NOISE, **guide):
    builder = functools.partial(tyxe.guides.AutoNormal, **guide)
    bnn = tyxe.VariationalBNN(net(), NORMAL, gaussian(size, scale), builder)
    with tyxe.poutine.local_reparameterization():
        return annealed(bnn, [TRAIN], epochs)


def report_of(bnn, **options):
    return diagnose(bnn, [TRAIN], [HELD_OUT], **ALL | options)


def verdicts(report):
    return {line.name: line.verdict for line in report.flags}


@pytest.fixture
def plain_fit():
    """Have a plain fit made, which takes long, in a test of it or of unusual nets and data."""


@pytest.fixture(autouse=True)
def no_other_plain_fit(request, monkeypatch):
    if "plain_fit" not in request.fixturenames:
        monkeypatch.setattr("tyxe.diagnostics.errors.CHEAP", 0)


# ----------------------------------------------------------------------------------------- healthy


def full_covariance():
    guide = functools.partial(AutoMultivariateNormal, init_scale=0.05)
    return annealed(tyxe.VariationalBNN(net(), NORMAL, gaussian(), guide), [TRAIN], 600)


def mode():
    return annealed(tyxe.VariationalBNN(net(), NORMAL, gaussian(), AutoDelta), [TRAIN], 500)


@functools.cache
def laplace():
    return annealed(tyxe.LaplaceBNN(net(), NORMAL, gaussian()), [TRAIN], 500)


def chains():
    kernel = tyxe.samplers.HMC(num_steps=3)
    bnn = tyxe.MCMC_BNN(nn.Linear(1, 1), NORMAL, gaussian(scale=0.58), kernel)
    bnn.fit([TRAIN], 500, warmup_steps=200, num_chains=4)
    return bnn


@functools.cache
def ensemble():
    def member(index):
        start = net()
        torch.manual_seed(index)
        tyxe.util.reset_parameters_(start)
        return annealed(tyxe.VariationalBNN(start, NOTHING, gaussian()), [TRAIN], 500)

    return tyxe.EnsembleBNN(member, 3)


def classifier():
    bnn = mean_field(net(2, 2), likelihoods.Categorical(300))
    with tyxe.poutine.local_reparameterization():
        return annealed(bnn, [classes(300, 0)], 800)


HEALTHY = [variational, full_covariance, mode, laplace, chains, ensemble, classifier]


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__name__)
def test_a_healthy_posterior_is_quiet(make, plain_fit):
    torch.manual_seed(0)
    data = [classes(300, 0)], [classes(600, 2)]
    report = diagnose(make(), *data, **ALL) if make is classifier else report_of(make())
    assert report.flags == [], str(report)
    judged = [line for line in report.values() if line.threshold]
    assert len(judged) < len(report)
    assert report.summary == f"{len(judged)} of {len(judged)} numbers well"
    assert all(row.startswith("- ") for row in str(report).splitlines() if "k-hat" in row)


# ------------------------------------------------------------------------------------------ broken


def normed(scale=NOISE, **norm):
    layers = nn.Linear(1, 16), nn.BatchNorm1d(16, **norm), nn.Tanh(), nn.Linear(16, 1)
    guide = tyxe.guides.AutoNormal
    bnn = tyxe.VariationalBNN(nn.Sequential(*layers), NORMAL, gaussian(scale=scale), guide)
    bnn.fit([TRAIN], ADAM, 300)
    return bnn


def no_mode():
    bnn = tyxe.LaplaceBNN(net(), NORMAL, gaussian())
    bnn.fit_curvature([TRAIN])
    return bnn


CALIBRATION, SLOPE = "quantile calibration error", "gradient over its noise"
# Each with a line that finds it, its verdict, and how its remedy begins.
BROKEN = {
    "scales are stuck": (
        lambda: variational(200, init_scale=1e-5),
        ("scale over the prior's", "warn", ""),
        ("spread of a layer's log scales", "fail", ""),
    ),
    "scales are not trained": (
        lambda: variational(200, init_scale=1e-4, train_scale=False),
        (f"{SLOPE}, scale", "fail", ""),
    ),
    "no epoch": (lambda: mean_field(net(), gaussian()), (f"{SLOPE}, loc", "fail", "")),
    "too few epochs": (lambda: variational(5), (f"{SLOPE}, scale", "fail", "")),
    "noise too small": (
        lambda: variational(150, scale=0.1),
        (CALIBRATION, "fail", "too certain"),
    ),
    "noise too large": (
        lambda: variational(150, scale=2.0),
        (CALIBRATION, "fail", "too uncertain"),
    ),
    "no mode": (no_mode, ("gradient at the mode over its noise", "fail", "")),
    "norms of the batch": (
        lambda: normed(track_running_stats=False),
        ("change of predictions by their batch", "warn", ""),
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_found(case):
    make, *expected = BROKEN[case]
    report = report_of(make())
    for name, verdict, remedy in expected:
        assert report[name].verdict == verdict
        assert report[name].remedy.startswith(remedy)


@pytest.mark.parametrize("size", [2, 20_000])
def test_a_wrong_number_of_points(size):
    pairs = list(zip(*(part.split(2) for part in TRAIN), strict=True))
    bnn = mean_field(net(), gaussian(size))
    with pytest.warns(tyxe.TyxeWarning, match="an epoch had 200 points"):
        bnn.fit(pairs, ADAM, 2)
    report = report_of(bnn)
    assert report.flags[0].name == "points in the loader over dataset_size"
    assert report.flags[0].value == pytest.approx(200 / size)
    assert report.flags[0].verdict == "fail"
    assert "dataset_size=200" in report.flags[0].remedy


@pytest.mark.parametrize("kind", ["ml", "laplace"])
def test_units_that_are_never_active(kind):
    torch.manual_seed(0)
    relu = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 1))
    with torch.no_grad():
        relu[0].bias[1:] -= 50
    bnn = tyxe.VariationalBNN(relu, NOTHING, gaussian())
    if kind == "laplace":
        bnn = tyxe.LaplaceBNN(relu, NORMAL, gaussian())
        bnn.fit_curvature([TRAIN])
    line = report_of(bnn)["share of units that no data reach"]
    assert (line.value, line.verdict, line.where) == (15 / 16, "fail", "0.weight")


def test_tables_and_maps_of_guides_have_no_units():
    name, codes = "share of units that no data reach", torch.arange(40).reshape(20, 2)
    table = nn.Sequential(nn.Embedding(400, 4), nn.Flatten(), nn.Linear(8, 1))
    bag = nn.Sequential(OrderedDict(bag=nn.EmbeddingBag(400, 4), net=nn.Linear(4, 1)))
    data = [(codes, torch.zeros(20, 1))]
    for some, last in ((table, "2.weight"), (bag, "net.weight")):
        report = diagnose(mean_field(some, gaussian(20)), data, data, num_predictions=2)
        assert list(report[name].parts) == [last]
    maps = functools.partial(
        tyxe.guides.AutoInducing, inducing_rows=2, inducing_cols=2, everywhere=True
    )
    bnn = tyxe.VariationalBNN(net(), NORMAL, gaussian(), maps)
    assert name not in report_of(bnn, num_predictions=2)


def test_a_net_that_cannot_get_away_from_where_it_is(plain_fit):
    x, y = classes(300, 0)
    stuck = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    nn.init.constant_(stuck[0].bias, -50.0)
    bnn = tyxe.VariationalBNN(stuck, NOTHING, likelihoods.Categorical(300))
    line = diagnose(bnn, [(x, y)], [classes(600, 2)])["error above that of a plain fit"]
    assert line.verdict == "fail"
    assert "reset_parameters_" in line.remedy


def test_held_out_data_from_elsewhere():
    name = "spread of held-out inputs over that of training ones"
    x, y = HELD_OUT
    for shift, verdict in ((0.0, "ok"), (2.0, "warn"), (10.0, "fail")):
        report = diagnose(variational(2), [TRAIN], [(x + shift, y)], num_predictions=2)
        assert report[name].verdict == verdict
    assert report[name].value == pytest.approx(10 / (4 / 3) ** 0.5, rel=0.05)
    few = torch.tensor([[-0.6], [0.1], [0.8]]), y[:3]  # three are this near each other by chance
    line = diagnose(variational(2), [TRAIN], [few], num_predictions=2)[name]
    assert (line.value < 0.6, line.verdict) == (True, "ok")


class OnAGraph(nn.Linear):
    def forward(self, x, graph):
        return graph @ super().forward(x)


@pytest.mark.parametrize(
    "graph", [torch.eye(30), torch.eye(30).to_sparse()], ids=["dense", "sparse"]
)
def test_inputs_may_be_the_matrix_of_a_graph(graph):
    x, y = torch.randn(30, 4), torch.arange(30) % 3
    bnn = mean_field(OnAGraph(4, 3), likelihoods.Categorical(30))
    data = [((x, graph), y)]
    bnn.fit(data, torch.optim.Adam, 2)
    report = diagnose(bnn, data, data)
    assert "log-likelihood of held-out data" in report
    assert "gradient over its noise, loc" not in report  # its noise is that of parts


def test_norms_with_statistics_of_other_weights():
    bnn = normed(0.2, momentum=1e-4)
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    found = verdicts(report_of(bnn))
    assert "log-likelihood gained by new norm statistics" in found
    after = bnn.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_the_prior_of_the_mode():
    """The log-likelihood's pull at a mode is that of the decay it was trained with."""
    bnn = tyxe.LaplaceBNN(net(), NORMAL, gaussian())
    bnn.fit([TRAIN], functools.partial(torch.optim.Rprop, lr=1e-2), 1000)
    first = diagnose(bnn, [TRAIN], [HELD_OUT])
    name = "weight decay of the mode over the prior's precision"
    assert first[name].value == pytest.approx(1, rel=0.05)
    bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0, 0.01)))
    second = diagnose(bnn, [TRAIN], [HELD_OUT])
    assert second[name].value == pytest.approx(1e-4, rel=0.05)
    assert second[name].verdict == "warn"
    assert second["gradient at the mode over its noise"].verdict == "ok"
    # Data may choose one that is far from the decay.
    bnn._set_prior_numbers({"": torch.tensor(1e6)})
    third = diagnose(bnn, [TRAIN], [HELD_OUT])
    assert third[name].value == pytest.approx(1e-6, rel=0.05)
    assert not third[name].is_judged
    assert not third["share of eigenvalues below the prior's"].is_judged


def test_a_chain_that_never_moved():
    kernel = tyxe.samplers.HMC(step_size=1e4, adapt_step_size=False, adapt_mass_matrix=False)
    bnn = tyxe.MCMC_BNN(net(), NORMAL, gaussian(), kernel)
    with pytest.warns(tyxe.TyxeWarning, match="diverged"):
        bnn.fit([TRAIN], 20, warmup_steps=0, num_chains=2)
    report = diagnose(bnn, [TRAIN], [HELD_OUT], num_predictions=8)
    assert report["chains that never moved"].value == 2
    assert report["chains that never moved"].verdict == "fail"
    assert report["R-hat of held-out outputs"].verdict == "fail"
    assert report["share of divergent transitions"].verdict == "fail"


class Masked(nn.Linear):
    """The last of three classes is never there."""

    def forward(self, x):
        return super().forward(x) + torch.tensor([0.0, 0.0, -torch.inf])


def test_classes_that_a_net_masks_are_no_sign_of_chains_that_disagree():
    x = torch.randn(60, 2, **seeded(0))
    data = [(x, (x[:, 0] > 0).long())]
    bnn = tyxe.MCMC_BNN(Masked(2, 3), NORMAL, likelihoods.Categorical(60), tyxe.samplers.NUTS)
    bnn.fit(data, 100, warmup_steps=150, num_chains=2, progress=False, compile=False)
    report = diagnose(bnn, data, data)
    assert report["R-hat of held-out outputs"].value < 1.1  # it was infinite
    assert report["effective samples of held-out outputs"].value > 20


def test_a_posterior_beside_its_plain_net():
    plain = annealed(tyxe.VariationalBNN(net(), NOTHING, gaussian()), [TRAIN], 500)
    name = "log-likelihood above the plain net's"
    assert report_of(variational(), plain=plain)[name].verdict == "ok"
    assert report_of(variational(2), plain=plain)[name].verdict == "fail"


def test_units_that_the_posterior_gave_up():
    wide = nn.Sequential(nn.Linear(1, 400), nn.Tanh(), nn.Linear(400, 1))
    bnn = mean_field(wide, gaussian())
    with torch.no_grad():  # two units are of use
        for name, loc in bnn.net_guide.named_parameters():
            if "scale" in name:
                loc.zero_()
            else:
                loc[2:].zero_()
    line = diagnose(bnn, [TRAIN], [HELD_OUT])["share of units whose weights are the prior's"]
    assert line.value == pytest.approx(0.99, abs=0.01)
    assert line.verdict == "warn"


# ------------------------------------------------------------------- errors, inputs, sites, members


def wiggles(count, seed):
    """Return rows of five inputs, and a function of them with hardly any noise."""
    x = torch.randn(count, 5, **seeded(seed))
    noise = torch.randn(count, 1, **seeded(seed + 1))
    return x, (2 * x[:, :1]).sin() + x[:, 1:2] * x[:, 2:3] + 0.05 * noise


@functools.cache
def of_wiggles(beta, epochs=400):
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(5, 50), nn.Tanh(), nn.Linear(50, 1))
    likelihood = likelihoods.HomoskedasticGaussian(100, scale=1.0, learn_scale=True)
    bnn = mean_field(wide, likelihood)
    with tyxe.poutine.local_reparameterization():
        bnn.fit([wiggles(100, 0)], ADAM, epochs, beta=beta)
    return bnn


def report_of_wiggles(beta, **options):
    # By default the weight is that of the fit.
    return diagnose(of_wiggles(beta), [wiggles(100, 0)], [wiggles(300, 7)], **options)


@pytest.mark.parametrize("vectorize", [False, True])
def test_the_weight_of_the_kl_is_that_of_the_fit(vectorize):
    data, weights = [wiggles(100, 0)], [0.3, 0.7]

    def member(_):
        return mean_field(nn.Linear(5, 1), likelihoods.HomoskedasticGaussian(100, scale=1.0))

    ensemble = tyxe.EnsembleBNN(member, 2)
    ensemble.fit(data, ADAM, 2, beta=lambda epoch: weights[epoch], vectorize=vectorize)
    name = "KL over the data term"
    found = diagnose(ensemble, data, data)[name].value
    assert found == pytest.approx(diagnose(ensemble, data, data, beta=0.7)[name].value)
    assert found != pytest.approx(diagnose(ensemble, data, data, beta=1.0)[name].value, rel=0.05)


def test_a_fit_that_the_kl_keeps_from_the_data_and_the_weight_that_frees_it(plain_fit):
    name = "RMSE over that of a plain fit"
    line = report_of_wiggles(1.0)[name]
    assert line.verdict != "ok"
    assert line.value > 2
    assert "weigh the KL less, such as by beta=0.1," in line.remedy
    better = report_of_wiggles(0.1)
    assert better[name].verdict == "ok"
    assert better["RMSE of held-out data"].value < 0.6
    # A plain fit that is given is compared with, and none is made.
    given = report_of_wiggles(1.0, plain=of_wiggles(0.1))
    assert given[name].value == pytest.approx(1.016 / 0.497, rel=0.1)


def test_errors_are_those_of_evaluate():
    bnn = of_wiggles(0.1)
    report = report_of_wiggles(0.1, num_predictions=0)
    error, _ = bnn.evaluate([wiggles(300, 7)], num_predictions=0, reduction="mean")
    assert report["RMSE of held-out data"].value == pytest.approx(float(error) ** 0.5)
    assert report["RMSE over that at the centre"].value == pytest.approx(1)


IN_A_HANDLER = "log-likelihood in a handler less that out of it"


def test_a_handler_that_draws_for_all_rows_is_not_compared():
    builder = functools.partial(AutoMultivariateNormal, init_scale=0.1)
    bnn = tyxe.VariationalBNN(net(), NORMAL, gaussian(), builder)
    bnn.fit([TRAIN], ADAM, 5)
    assert IN_A_HANDLER not in report_of(bnn, num_predictions=4)


class Total(nn.Conv1d):
    """The sum over positions of products with one weight, which a handler draws for each."""

    def __init__(self):
        super().__init__(1, 1, 1, bias=False)

    def forward(self, x):
        return super().forward(x[:, None])[:, 0].sum(-1, keepdim=True)


def test_a_handler_is_compared_up_to_the_error_of_the_draws():
    x = torch.randn(200, 1, **seeded(0)).expand(200, 8)
    y = 8 * x[:, :1] + torch.randn(200, 1, **seeded(1))
    builder = functools.partial(tyxe.guides.AutoNormal, init_scale=0.3)
    bnn = tyxe.VariationalBNN(Total(), NORMAL, gaussian(scale=1.0), builder)
    bnn.net_guide.locs["weight"].data.fill_(1.0)

    def line(count):
        torch.manual_seed(0)
        return diagnose(bnn, [(x, y)], [(x, y)], num_predictions=count)[IN_A_HANDLER]

    few, many = line(4), line(300)
    assert few.ok[1] > 2 * many.ok[1] > 0.2
    assert many.verdict != "ok"
    same = mean_field(net(), gaussian())
    for num_predictions in (2, 8, 32):
        torch.manual_seed(0)
        assert report_of(same, num_predictions=num_predictions)[IN_A_HANDLER].verdict == "ok"


class DoubleExponential(tyxe.likelihoods.Likelihood):
    """A likelihood of one's own, whose errors are no squares."""

    def predictive_distribution(self, predictions, latents=None):
        return dist.Laplace(predictions, 0.5).to_event(self.event_dim)

    def point_error(self, predictions, targets):
        return (predictions - targets).abs()

    def aggregate_predictions(self, predictions, dim=0, latents=None):
        return predictions.mean(dim)


def test_errors_that_are_no_squares_have_no_root():
    bnn = mean_field(net(), DoubleExponential(200, event_dim=1))
    report = report_of(bnn, num_predictions=0)
    error, _ = bnn.evaluate([HELD_OUT], num_predictions=0, reduction="mean")
    assert report["error of held-out data"].value == pytest.approx(float(error))
    assert report["error over that at the centre"].value == pytest.approx(1)
    assert not any("RMSE" in name for name in report)


def test_errors_of_censored_numbers_are_those_of_their_points(plain_fit):
    (x, y), likelihood = HELD_OUT, likelihoods.Censored(gaussian())
    pairs = torch.stack([y, y.where(y < 1, math.inf)], -1)
    bnn = mean_field(net(), likelihood)
    report = diagnose(bnn, [(x[:200], pairs[:200])], [(x, pairs)], num_predictions=0)
    error, _ = bnn.evaluate([(x, pairs)], num_predictions=0, reduction="mean")
    assert report["RMSE of held-out data"].value == pytest.approx(float(error) ** 0.5)


def hierarchy(name, module, param):
    def prior():
        ones = param.new_ones(param.shape)
        scale = pyro.sample(f"{name}.scale", dist.HalfCauchy(ones).to_event(param.dim()))
        return dist.Normal(0, scale)

    return prior


def test_sites_whose_prior_is_itself_random_have_no_scale_to_compare_with():
    prior = tyxe.priors.LambdaPrior(hierarchy, hide_parameters=["bias"])
    bnn = tyxe.VariationalBNN(net(), prior, gaussian(), tyxe.guides.AutoNormal)
    bnn.fit([TRAIN], ADAM, 5)
    report = report_of(bnn, num_predictions=4)
    assert "log-likelihood of held-out data" in report
    assert "scale over the prior's" not in report


@pytest.mark.parametrize(
    ("outputs", "make"),
    [(1, functools.partial(likelihoods.Ordinal, num_classes=2)), (2, likelihoods.Categorical)],
)
def test_classes_that_are_not_fitted(outputs, make, plain_fit):
    train, held_out = classes(300, 0), classes(600, 2)
    bnn = mean_field(net(outputs, 2), make(300))
    report = diagnose(bnn, [train], [held_out], num_predictions=0)
    error, _ = bnn.evaluate([held_out], num_predictions=0, reduction="mean")
    assert report["error of held-out data"].value == pytest.approx(float(error))
    assert report["error above that at the centre"].value == 0
    assert report["error above that of a plain fit"].verdict == "fail"


def test_labels_of_positions_are_counted_one_by_one(plain_fit):
    """Also where most of a point's are wrong, and some are not there."""
    x, y = torch.randn(40, 3, 2), torch.randint(4, (40, 3))
    y[:, 2] = -1
    likelihood = likelihoods.Categorical(40, ignore_index=-1)
    bnn = mean_field(nn.Linear(2, 4), likelihood)
    report = diagnose(bnn, [(x, y)], [(x, y)], num_predictions=0)
    wrong = (bnn.predict(x, num_predictions=0).argmax(-1) != y)[:, :2].float().mean()
    assert report["error of held-out data"].value == pytest.approx(float(wrong))


def test_draws_that_are_worse_than_the_centre():
    bnn = copy.deepcopy(laplace())
    bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0, 30)))
    line = report_of(bnn, predictive="bnn")["RMSE over that at the centre"]
    assert line.verdict == "fail"
    assert "predictive='glm'" in line.remedy
    assert report_of(bnn)["RMSE over that at the centre"].verdict == "ok"


def test_inputs_that_are_not_standardised():
    name = "size of inputs over that of standardised ones"
    x, y = wiggles(100, 0)
    bnn = mean_field(nn.Linear(5, 1), gaussian(100))
    raw = x * torch.tensor([1.0, 500.0, 1.0, 1.0, 1.0])
    line = diagnose(bnn, [(raw, y)], [(raw, y)], num_predictions=2)[name]
    assert line.verdict == "warn"
    assert line.value == pytest.approx(500, rel=0.3)
    assert diagnose(bnn, [(x, y)], [(x, y)], num_predictions=2)[name].verdict == "ok"


def test_sites_that_the_outputs_do_not_depend_on():
    parts = {"used": nn.Linear(1, 1), "unused": nn.Linear(1, 1)}
    bnn = mean_field(NetOf(lambda net, x: net.used(x), **parts), gaussian())
    with pytest.warns(tyxe.TyxeWarning, match="on site net.unused.bias, net.unused.weight"):
        line = report_of(bnn)["sites that the outputs do not depend on"]
    assert (line.value, line.verdict) == (2.0, "fail")
    assert "draws of unused.bias, unused.weight have no effect" in line.remedy


def test_an_ensembles_members_are_told_apart():
    """The mixture hides one that was not fitted."""
    bnn = copy.deepcopy(ensemble())
    with torch.no_grad():
        for parameter in bnn.members[1].net.parameters():
            parameter.mul_(-3)
    report = report_of(bnn)
    line = report["log-likelihood of a member below their median"]
    assert (line.where, line.verdict) == ("member 1", "fail")
    assert list(line.parts) == ["member 0", "member 1", "member 2"]
    slopes = report["gradient over its noise, deterministic"]
    assert slopes.where == "member 1"
    assert slopes.parts["member 1"] == slopes.value > slopes.parts["member 0"]


def test_members_that_are_all_the_same():
    bnn, name = copy.deepcopy(ensemble()), "spread of outputs over members, over that of points"
    assert report_of(bnn)[name].verdict == "ok"
    for member in bnn.members[1:]:
        member.load_state_dict(bnn.members[0].state_dict())
    assert report_of(bnn)[name].verdict == "fail"


# --------------------------------------------------------------------------------- numbers, report


def test_the_draws_that_are_needed():
    """As many draws as the report says have the error that it says."""
    bnn = variational(100, init_scale=0.2)
    with torch.no_grad():  # as a user may have it
        found = diagnose(bnn, [TRAIN], [HELD_OUT], num_predictions=500)
    needed = int(found["draws for an error of 0.01 nats"].value)
    exact = float(bnn.evaluate([HELD_OUT], num_predictions=4_000, reduction="mean")[1])
    errors = [
        float(bnn.evaluate([HELD_OUT], num_predictions=needed, reduction="mean")[1]) - exact
        for _ in range(40)
    ]
    root = math.sqrt(sum(error**2 for error in errors) / len(errors))
    assert 0.006 < root < 0.015


def test_k_hat_is_that_of_the_density():
    """It is nothing for an exact posterior, and far from it for one that is too narrow."""
    x = torch.randn(100, 8, **seeded(0))
    data, name = [(x, x.sum(1, keepdim=True))], "k-hat, below 0.7 for a good density"
    rprop = functools.partial(torch.optim.Rprop, lr=0.1)
    exact = tyxe.LaplaceBNN(nn.Linear(8, 1), NORMAL, gaussian(100), structure="full")
    exact.fit(data, rprop, 100)
    assert diagnose(exact, data, data)[name].value < 0.2
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=5e-3, train_scale=False)
    narrow = tyxe.VariationalBNN(exact.to_module(), NORMAL, gaussian(100), guide)
    found = diagnose(narrow, data, data)[name]
    assert found.value > 0.7
    assert set(found.parts) == {"weight", "bias"}
    assert found.where == "weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exact_posterior_does_not_fail(dtype):
    """A regression's, whose log ratios are one number but for rounding."""
    name = "k-hat, below 0.7 for a good density"
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(20, 1, dtype=torch.float64)
        y = x + NOISE * torch.randn(20, 1, dtype=torch.float64)
        precision = float(x.square().sum()) / NOISE**2 + 1
        net = nn.Linear(1, 1, bias=False).to(dtype)
        nn.init.constant_(net.weight, float((x * y).sum()) / NOISE**2 / precision)
        guide = functools.partial(tyxe.guides.AutoNormal, init_scale=precision**-0.5)
        bnn = tyxe.VariationalBNN(net, NORMAL, gaussian(20), guide)
        data = [(x.to(dtype), y.to(dtype))]
        line = diagnose(bnn, data, data)[name]
        assert line.verdict == "ok"
        assert line.value < 0.7


def exact(x, y, size, prior=NORMAL, seen=()):
    """Return a regression's exact posterior of some data, and of those that the prior has seen."""
    every = torch.cat([*(x for x, _ in seen), x]), torch.cat([*(y for _, y in seen), y])
    inputs, count = torch.cat([every[0], torch.ones_like(every[0])], 1), size / len(x)
    precision = count * inputs.T @ inputs / NOISE**2 + torch.eye(2)
    mode = torch.linalg.solve(precision, count * inputs.T @ every[1] / NOISE**2)
    net = nn.Linear(1, 1).double()
    net.load_state_dict({"weight": mode[:1], "bias": mode[1]})
    bnn = tyxe.LaplaceBNN(net, prior, gaussian(size), structure="full")
    bnn.fit([(x, y)], functools.partial(torch.optim.SGD, lr=1e-14), 1)
    return bnn


@pytest.mark.filterwarnings("ignore:an epoch had")
@pytest.mark.parametrize("case", ["a joint prior", "points that count often"])
def test_k_hat_is_of_the_joint_density_that_was_fitted(case):
    """Without the correlations of the prior it is 1.2, and of the points as they are 0.6."""
    x = 5 + torch.randn(100, 1, **seeded(0)).double()
    first, second = ((half, half + NOISE) for half in x.split(95))
    if case == "a joint prior":
        posterior = exact(*first, 95).state.posterior()
        names = {name: posterior.marginal(f"net.{name}") for name in ("weight", "bias")}
        bnn = exact(*second, 5, tyxe.priors.DictPrior(names), [first])
    else:
        bnn = exact(*second, 500)
    found = diagnose(bnn, [second], [second])["k-hat, below 0.7 for a good density"]
    assert found.value < 0.5


def test_nothing_changes_and_a_seed_gives_the_same_report():
    bnn = variational(5)
    before = {name: value.clone() for name, value in bnn.state_dict().items()}
    state = torch.get_rng_state()
    first, second = (diagnose(bnn, [TRAIN], [HELD_OUT]) for _ in range(2))
    assert torch.equal(state, torch.get_rng_state())
    assert str(first) == str(second)
    after = bnn.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_the_report_is_a_dictionary_a_table_and_a_figure():
    bnn = mean_field(net(), gaussian(20_000))
    report = diagnose(bnn, [TRAIN], [HELD_OUT])
    one = report["points in the loader over dataset_size"]
    assert report.as_dict()[one.name] == {
        "value": 0.01,
        "threshold": "0.9 to 1.1",
        "verdict": "fail",
        "remedy": one.remedy,
        "where": "",
        "parts": {},
    }
    text = str(report)
    assert "      -> an epoch has 200 points: build the likelihood with dataset_size=200" in text
    assert max(map(len, text.splitlines()[:-1])) <= 100
    assert text.splitlines()[-1] == report.summary
    figure = report.plot()
    assert len(figure.axes) == 2
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][-1] == one.name


@pytest.mark.parametrize("kind", ["numbers", "classes"])
def test_the_figure_counts_points_by_their_weights(kind):
    torch.manual_seed(0)
    x, y = classes(200, 0) if kind == "classes" else HELD_OUT
    likelihood = likelihoods.Categorical(200) if kind == "classes" else gaussian()
    bnn = mean_field(net(2, 2) if kind == "classes" else net(), likelihood)
    weights = torch.arange(len(x)) % 3.0
    again = weights.long().nonzero()[:, 0].repeat_interleave(weights[weights > 0].long())
    given = [(x, tyxe.data.Targets(y, weights))], [(x[again], y[again])]
    weighted, repeated = (
        diagnose(bnn, [(x, y)], data, num_predictions=0).plot().axes[1] for data in given
    )
    if kind == "classes":
        found, expected = (ax.lines[-1].get_xydata() for ax in (weighted, repeated))
    else:
        found, expected = (ax.patches[0].get_path().vertices for ax in (weighted, repeated))
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_line_of_parts_is_the_worst():
    line = Line.of_parts("n", {"a": 1.0, "b": math.nan, "c": 9.0}, (0, 2), (0, 5), "mend")
    assert (line.where, line.verdict, line.title) == ("b", "fail", "n (b)")
    assert Line.of_parts("n", {"a": 1.0, "c": 3.0}, (0, 2), (0, 5), "").verdict == "warn"
    # Without a threshold the largest.
    parts = {"a": -math.inf, "b": 0.3, "c": 1.5}
    assert Line.of_parts("k-hat", parts, ANY, ANY, "").where == "c"
    assert Line.of_parts("k-hat", {**parts, "d": math.nan}, ANY, ANY, "").where == "d"
    assert Line.of_parts("n", {"a": -math.inf, "b": 1.0}, below(2), below(5), "").where == "b"


def test_counts_and_several_targets(plain_fit):
    """Likelihoods without classes or one number have the lines that they can have."""
    y = torch.poisson(torch.ones(50, 1))
    bnn = mean_field(nn.Linear(1, 1), likelihoods.Poisson(50))
    data = [(torch.randn(50, 1), y)]
    report = diagnose(bnn, data, data)
    assert "log-likelihood of held-out data" in report
    assert len(report.plot().axes) == 2

    bnn = mean_field(nn.Sequential(nn.Linear(1, 1), nn.Flatten(0)), likelihoods.Poisson(50, 0))
    data = [(x, y[:, 0]) for x, y in data]
    assert diagnose(bnn, data, data)["RMSE of held-out data"].value > 0

    bnn = mean_field(KindAndSize(1), kind_and_size(50))
    data = [(torch.randn(50, 1), {"kind": torch.arange(50) % 2, "size": y})]
    report = diagnose(bnn, data, data, num_predictions=0)
    exact = bnn.evaluate(data, num_predictions=0, reduction="mean")[1]["joint"]
    assert report["log-likelihood of held-out data"].value == pytest.approx(float(exact))


def test_rows_that_cannot_be_dealt_leave_lines_out(plain_fit):
    """A graph has edges, and all nodes are one batch: there is no noise to compare with."""

    def mixed(net, x, edges):
        return net.linear(x + x[edges[0]].mean())

    bnn = mean_field(NetOf(mixed, linear=nn.Linear(1, 1)), gaussian())
    edges = torch.zeros(2, 7, dtype=torch.long)
    data = [((TRAIN[0], edges), TRAIN[1])]
    bnn.fit(data, ADAM, 100)
    report = diagnose(bnn, data, data)
    assert "gradient over its noise, loc" not in report
    assert "KL over the data term" in report
    assert "quantile calibration error" in report


def test_a_mask_is_of_whole_batches(plain_fit):
    x = torch.randn(24, 2)
    y = x[:, :1]
    bnn = mean_field(nn.Linear(2, 1), gaussian(16))
    with tyxe.poutine.selective_mask(mask=torch.arange(24) < 16, expose=["likelihood.data"]):
        report = diagnose(bnn, [(x, y)], [(x, y)])
    assert report["points in the loader over dataset_size"].value == 1.0
    assert math.isfinite(report["KL over the data term"].value)


def fitted_norm(rows, **norm):
    x = torch.randn(rows, 2)
    inner = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4, **norm), nn.Linear(4, 1))
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
    bnn = mean_field(inner, gaussian(rows), prior)
    bnn.fit([(x, x[:, :1])], ADAM, 4)
    return bnn, x, x[:, :1]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("rows", [3, 17])
def test_norms_take_no_single_points(rows, keeps, plain_fit):
    bnn, *pair = fitted_norm(rows, track_running_stats=keeps)
    report = diagnose(bnn, [pair], [pair])
    assert math.isfinite(report["KL over the data term"].value)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
def test_a_loader_of_norms_may_wait_for_another_thread():
    bnn, x, y = fitted_norm(24)
    other = copy.deepcopy(bnn)

    class Loader:
        def __iter__(self):
            thread = threading.Thread(target=other.sample_predictive, args=(x,), daemon=True)
            thread.start()
            thread.join(30)
            assert not thread.is_alive()
            yield x, y

    bnn.update_norm_statistics(Loader())
    report = diagnose(bnn, [(x, y)], [(x, y)], num_predictions=2)
    assert math.isfinite(report["KL over the data term"].value)


def test_what_is_refused():
    with pytest.raises(TypeError, match="a fitted BNN with a likelihood, or an EnsembleBNN"):
        diagnose(nn.Linear(1, 1), [TRAIN], [HELD_OUT])
    bnn = variational(2)
    with pytest.raises(TypeError, match="plain is a Linear; expected the net trained"):
        diagnose(bnn, [TRAIN], [HELD_OUT], plain=nn.Linear(1, 1))
    with pytest.raises(RuntimeError, match="there is no curvature yet"):
        diagnose(tyxe.LaplaceBNN(net(), NORMAL, gaussian()), [TRAIN], [HELD_OUT])
    with pytest.raises(RuntimeError, match="there are no samples yet"):
        diagnose(tyxe.MCMC_BNN(net(), NORMAL, gaussian(), tyxe.samplers.NUTS), [TRAIN], [HELD_OUT])
    with pytest.raises(ValueError, match="the loader is empty"):
        diagnose(bnn, [TRAIN], [])
