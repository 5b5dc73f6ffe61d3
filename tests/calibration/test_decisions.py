"""What risk control and CV+ guarantee holds over many data sets, and they are not vacuous."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tyxe.calibration import CVPlus, RiskControl
from tyxe.calibration.risk import _binomial_tail, _log_odds

# --------------------------------------------------------------------------- risk control

GRID = torch.linspace(0, 12, 4001, dtype=torch.float64)


def points(n):
    """Draw logits of two classes and labels; the net is too certain, by a quarter."""
    odds = (3 * torch.randn(n, dtype=torch.float64)).abs().clamp_max(12)
    wrong = torch.rand(n) > (0.8 * odds).sigmoid()
    return torch.stack([odds, torch.zeros(n)], -1), wrong.long()


def risk_above(thresholds):
    """Return the error among answers at thresholds, by quadrature over the odds' half-normal."""
    density = torch.exp(-((GRID / 3) ** 2) / 2)
    density[-1] += math.erfc(12 / 3 / math.sqrt(2)) * math.sqrt(math.pi / 2) * 3 / 0.003
    error = (-0.8 * GRID).sigmoid()
    mass = density.flip(0).cumsum(0).flip(0)
    wrong = (density * error).flip(0).cumsum(0).flip(0)
    place = torch.searchsorted(GRID, thresholds).clamp_max(len(GRID) - 1)
    return wrong[place] / mass[place]


@pytest.mark.filterwarnings("ignore:nothing is answered")
def test_the_risk_is_kept_in_as_many_data_sets_as_said():
    torch.manual_seed(0)
    risk, delta, repetitions = 0.05, 0.1, 1_000
    fits = [RiskControl(risk, delta).fit(*points(1_000)).threshold for _ in range(repetitions)]
    thresholds = torch.tensor(fits, dtype=torch.float64)
    answers = thresholds < math.inf
    exceeded = answers & (risk_above(thresholds.clamp(0, 12)) > risk)
    error = math.sqrt(delta * (1 - delta) / repetitions)
    assert exceeded.double().mean() <= delta + 3 * error
    assert exceeded.any()  # the bound is not far from tight
    assert answers.double().mean() > 0.5
    # The best threshold would answer about as many again as are given up for the guarantee.
    best = GRID[risk_above(GRID) <= risk][0]
    assert best < thresholds[answers].mean() < best + 1


def test_it_is_the_first_threshold_before_a_bound_above_the_risk():
    """Compare with Clopper-Pearson bounds by bisection, at every threshold from the strictest."""
    torch.manual_seed(3)
    logits, y = points(400)
    control = RiskControl(0.1, 0.2).fit(logits, y)
    odds, wrong = logits[:, 0], y == 1
    expected = math.inf
    strictest_first = torch.linspace(30.0, 0.0, 1000, dtype=torch.float64).tolist()[:-1]
    for threshold in [*strictest_first, -math.inf]:
        kept = odds >= threshold
        count, errors = int(kept.sum()), int((wrong & kept).sum())
        if count < 80:
            continue
        if upper_bound(errors, count, 0.2) > 0.1:
            break
        expected = threshold
    assert control.threshold == expected < math.inf
    assert torch.equal(control(logits), odds >= expected)


def upper_bound(errors, count, delta):
    """Return the Clopper-Pearson bound: the share at which so few errors have probability delta."""
    low, high = errors / count, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        logs = [
            math.log(math.comb(count, e)) + e * math.log(middle) + (count - e) * math.log1p(-middle)
            for e in range(errors + 1)
        ]
        low, high = (middle, high) if sum(map(math.exp, logs)) > delta else (low, middle)
    return low


@pytest.mark.parametrize(("errors", "count", "risk"), [(0, 5, 0.3), (2, 40, 0.2), (30, 900, 0.05)])
def test_the_tail_is_that_of_a_binomial(errors, count, risk):
    terms = [math.comb(count, e) * risk**e * (1 - risk) ** (count - e) for e in range(errors + 1)]
    assert math.isclose(_binomial_tail(errors, count, risk), math.fsum(terms), rel_tol=1e-9)
    assert _binomial_tail(count, count, risk) == 1.0


def test_log_odds_of_certain_points_differ():
    logits = torch.tensor([[40.0, 0.0, 0.0], [50.0, 0.0, 0.0], [0.0, 0.0, 0.0]]).double()
    expected = torch.tensor([40 - math.log(2), 50 - math.log(2), -math.log(2)]).double()
    torch.testing.assert_close(_log_odds(logits), expected)


def test_everything_is_answered_by_a_net_that_is_right_and_nothing_by_one_that_is_wrong():
    logits = torch.tensor([[0.01, 0.0, 0.0]]).repeat(300, 1)
    right, wrong = torch.zeros(300, dtype=torch.long), torch.ones(300, dtype=torch.long)
    assert RiskControl(0.02).fit(logits, right)(torch.zeros(4, 5, 3)).all()
    with pytest.warns(tyxe.TyxeWarning, match="nothing is answered"):
        control = RiskControl(0.02).fit(logits, wrong)
    assert not control(100 * logits).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RiskControl(risk=0.0), "risk"),
        (lambda: RiskControl(delta=1.0), "delta"),
        (lambda: RiskControl().fit(*points(228)), "points is 228; expected 230 or more"),
        (
            lambda: RiskControl(0.5).fit(
                torch.zeros(9, 2), tyxe.data.Targets(torch.zeros(9).long(), 2 * torch.ones(9))
            ),
            "expected 1, for which the guarantee is",
        ),
    ],
)
def test_what_has_no_guarantee_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_it_wraps_a_bnn_and_goes_through_files(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(400, 2)
    y = (x[:, 0] + 0.3 * torch.randn(400) > 0).long()
    net = nn.Linear(2, 2)
    net.weight.data, net.bias.data = torch.tensor([[-4.0, 0.0], [4.0, 0.0]]), torch.zeros(2)
    nothing = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_all=True)
    bnn = tyxe.VariationalBNN(net, nothing, tyxe.likelihoods.Categorical(400))
    wrapped = RiskControl(0.1).wrap(bnn, [(x, y)])
    answered = wrapped.predict(x)
    assert 0 < answered.double().mean() < 1
    assert torch.equal(answered, wrapped.calibrator(bnn.predict(x)))
    wrong = bnn.predict(x).argmax(-1) != y
    assert wrong[answered].double().mean() < 0.1
    wrapped.calibrator.save(tmp_path / "risk")
    assert torch.equal(RiskControl().load(tmp_path / "risk")(bnn.predict(x)), answered)
    with pytest.raises(RuntimeError, match="not fitted"):
        RiskControl()(bnn.predict(x))


# --------------------------------------------------------------------------- jackknife+ and CV+


def least_squares(x, y):
    weights = torch.linalg.lstsq(x, y).solution
    return lambda x: x @ weights


def regression(n):
    x = torch.randn(n, 3, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + torch.randn(n, 1, dtype=torch.float64) ** 3


@pytest.mark.parametrize("folds", [None, 5])
def test_intervals_cover_as_often_as_they_say_with_few_points(folds):
    torch.manual_seed(0)
    level, n, repetitions = 0.8, 20, 150
    found = []
    for _ in range(repetitions):
        x, y = regression(n + 20)
        lower, upper = CVPlus(least_squares, level, folds).fit(x[:n], y[:n]).predict(x[n:])
        found.append(((lower <= y[n:]) & (y[n:] <= upper)).double().mean())
    mean = torch.stack(found).mean()
    error = torch.stack(found).std() / math.sqrt(repetitions)
    # What is proven is .6; what is usual is the level, and far from all.
    assert level - 3 * error - 0.02 < mean < 0.9


@pytest.mark.parametrize("has_scale", [False, True])
def test_ends_are_the_papers_formula(has_scale):
    torch.manual_seed(1)
    x, y = regression(12)

    def train(x, y):
        predict = least_squares(x, y)
        return (lambda x: (predict(x), 1 + x[:, :1] ** 2)) if has_scale else predict

    at = torch.randn(4, 3, dtype=torch.float64)
    lower, upper = CVPlus(train, 0.75, None).fit(x, y).predict(at)
    for point in range(4):
        lows, highs = [], []
        for i in range(12):
            others = torch.arange(12) != i
            mean = least_squares(x[others], y[others])
            unit = (1 + x[i, 0] ** 2) if has_scale else 1.0
            far = (y[i] - mean(x[i : i + 1])[0]).abs() / unit
            far = far * ((1 + at[point, 0] ** 2) if has_scale else 1.0)
            lows.append(float(mean(at)[point] - far))
            highs.append(float(mean(at)[point] + far))
        rank = math.ceil(0.75 * 13)
        assert math.isclose(float(upper[point]), sorted(highs)[rank - 1], rel_tol=1e-9)
        assert math.isclose(float(lower[point]), sorted(lows, reverse=True)[rank - 1], rel_tol=1e-9)


def of_columns(x, y):
    return least_squares(x, y[:, None])


X, Y = regression(8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: CVPlus(least_squares, 0.9, folds=None).fit(X, Y), "points is 8; expected 9 or"),
        (lambda: CVPlus(least_squares, 0.8).fit(X, Y), "expected 10 or more"),
        (lambda: CVPlus(of_columns, 0.5, 2).fit(X, Y[:, 0]), "shape"),
        (lambda: CVPlus(least_squares, 0.5, 2).fit(X, Y * torch.nan), r"fit\(x\[kept\], y"),
        (lambda: CVPlus(least_squares, folds=1), "folds"),
        (lambda: CVPlus(least_squares).predict(X), "not fitted"),
    ],
)
def test_too_few_points_and_wrong_shapes_are_refused(call, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()
