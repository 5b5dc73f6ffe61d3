"""Online Laplace: posteriors of linear streams, penalties written out, four lines, bad input."""

import copy
import functools
import io

import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.infer.mcmc import NUTS

import tyxe
from tyxe.bnn.elbo import elbo_terms
from tyxe.bnn.online import reordered
from tyxe.curvature import joined, separated
from tyxe.distributions import GaussianJoint, JointNormal, NormalProduct
from tyxe.linalg import Kronecker, Sum

EXACT = {"rtol": 1e-8, "atol": 1e-8}


pytestmark = pytest.mark.usefixtures("double")


NORMAL = dist.Normal(*torch.tensor([0.0, 1.3], dtype=torch.float64))
NOISE = 0.5
LBFGS = functools.partial(
    torch.optim.LBFGS,
    max_iter=300,
    tolerance_grad=1e-12,
    tolerance_change=0.0,
    line_search_fn="strong_wolfe",
)


def four_lines(bnn):
    sites = tyxe.util.pyro_sample_sites(bnn.net)
    posterior = bnn.net_guide.get_detached_distributions(sites)
    bnn.update_prior(tyxe.priors.DictPrior(posterior))
    return posterior


def maximize(bnn, x, y):
    """Find the mode to rounding, which Adam would not, and take the curvature there."""
    bnn.likelihood.dataset_size = len(x)
    bnn._forget()
    optimizer = LBFGS(list(bnn.net_guide.parameters()))

    def closure():
        optimizer.zero_grad()
        terms = elbo_terms(bnn.model, bnn.guide, x, y)
        loss = bnn.temperature * terms.kl - terms.data
        loss.backward()
        return loss

    optimizer.step(closure)
    bnn.fit_curvature([(x, y)])


def stream(sizes, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(sum(sizes), 3)
    y = x @ torch.tensor([[1.0], [-0.5], [0.2]]) + 0.3 + NOISE * torch.randn(len(x), 1)
    return list(zip(x.split(sizes), y.split(sizes), strict=True))


def linear_bnn(structure="full", **options):
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(5, scale=NOISE)
    prior = tyxe.priors.IIDPrior(NORMAL)
    return tyxe.LaplaceBNN(nn.Linear(3, 1), prior, likelihood, structure=structure, **options)


def batch_posterior(tasks):
    x, y = (torch.cat(parts) for parts in zip(*tasks, strict=True))
    design = torch.cat([x, torch.ones(len(x), 1)], 1)
    precision = design.mT @ design / NOISE**2 + torch.eye(4) / NORMAL.scale**2
    return torch.linalg.solve(precision, design.mT @ y[:, 0] / NOISE**2), precision


def mode(bnn):
    return joined(bnn.net_guide.curvature.groups, bnn.mean_values())


# ------------------------------------------------------------------ linear streams


@pytest.mark.parametrize("sizes", [[12], [5, 7], [2, 9, 1], [1] * 6])
@pytest.mark.parametrize("order", [1, -1])
def test_a_linear_stream_ends_in_the_batch_posterior(sizes, order):
    tasks, bnn = stream(sizes)[::order], linear_bnn()
    for x, y in tasks:
        maximize(bnn, x, y)
        four_lines(bnn)
    mean, precision = batch_posterior(tasks)
    torch.testing.assert_close(mode(bnn), mean, **EXACT)
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), precision, **EXACT)
    (joint,) = bnn.net_prior.joints()
    torch.testing.assert_close(joint.precision.to_dense(), precision, **EXACT)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_the_evidences_of_a_linear_stream_add_up(structure):
    # log p(y_1) + log p(y_2 | y_1) + ... = log p(y). One output: kron is exact for each task.
    tasks, bnn, total = stream([5, 3, 4]), linear_bnn(structure), 0.0
    for x, y in tasks:
        maximize(bnn, x, y)
        total = total + bnn.log_marginal_likelihood()
        four_lines(bnn)
        assert abs(float(bnn.log_marginal_likelihood())) < 1e-9  # no data since
    x, y = (torch.cat(parts) for parts in zip(*tasks, strict=True))
    design = torch.cat([x, torch.ones(len(x), 1)], 1)
    covariance = NOISE**2 * torch.eye(len(x)) + NORMAL.scale**2 * design @ design.mT
    exact = td.MultivariateNormal(torch.zeros(len(x)), covariance).log_prob(y[:, 0])
    torch.testing.assert_close(total, exact, **EXACT)


def test_predictions_after_several_tasks_are_those_of_the_batch():
    tasks, bnn = stream([5, 3, 4]), linear_bnn("kron")
    for x, y in tasks:
        maximize(bnn, x, y)
        four_lines(bnn)
    mean, precision = batch_posterior(tasks)
    rows = torch.cat([tasks[0][0], torch.ones(5, 1)], 1)
    variance = (rows @ torch.linalg.inv(precision) * rows).sum(1, keepdim=True) + NOISE**2
    got_mean, got_scale = bnn.predict(tasks[0][0])
    torch.testing.assert_close(got_mean, rows @ mean[:, None], **EXACT)
    torch.testing.assert_close(got_scale, variance.sqrt(), **EXACT)
    draws = bnn.predict(tasks[0][0], predictive="bnn", num_predictions=3, aggregate=False)
    assert draws.shape == (3, 5, 1)


# ------------------------------------------------------------------ classifiers


def classifier(structure="kron", net=None, **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)) if net is None else net
    likelihood = tyxe.likelihoods.Categorical(15)
    prior = tyxe.priors.IIDPrior(NORMAL)
    return tyxe.LaplaceBNN(net, prior, likelihood, structure=structure, **options)


def labels(points=15, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(points, 3, generator=generator), torch.randint(
        0, 3, (points,), generator=generator
    )


def energy(bnn, values):
    """Minus the log-density of the prior at weights, by the traced program."""
    trace = poutine.trace(poutine.condition(bnn.net_prior, values)).get_trace()
    return -trace.log_prob_sum()


def penalty_of(bnn, vector):
    """The quadratic penalty at weights, less that at the mode."""
    groups = bnn.net_guide.curvature.groups
    centre = mode(bnn)
    return energy(bnn, separated(groups, centre + vector)) - energy(bnn, separated(groups, centre))


def dense_blocks(operator):
    """What a Kronecker posterior is by `torch.kron`, written out."""
    blocks = []
    for block in operator.blocks.values():
        terms = block.terms.values() if isinstance(block, Sum) else [block]
        total = 0.0
        for term in terms:
            assert isinstance(term, Kronecker)
            g = term.out_basis @ term.out_eigenvalues.diag() @ term.out_basis.mT
            a = term.in_basis @ term.in_eigenvalues.diag() @ term.in_basis.mT
            total = total + term.scale * torch.kron(g, a) + term.shift * torch.eye(term.size)
        blocks.append(total)
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("accumulate", ["sum", "average"])
def test_the_kronecker_penalty_is_the_dense_quadratic_form(accumulate):
    # [T 3.62-3.70]: tr(D^T Hb D Qb) summed over layers and tasks, and the prior's term.
    bnn = classifier(accumulate=accumulate, multiplier=3.0)
    for task in range(3):
        bnn.fit_curvature([labels(seed=task)])
        four_lines(bnn)
    dense = dense_blocks(bnn.net_guide.precision)
    for seed in range(3):
        torch.manual_seed(seed)
        step = torch.randn(len(dense))
        torch.testing.assert_close(penalty_of(bnn, step), step @ dense @ step / 2, **EXACT)


def test_the_sum_is_that_of_the_tasks_curvatures():
    bnn, total = classifier(multiplier=2.5, temperature=0.5), 0.0
    for task in range(3):
        bnn.fit_curvature([labels(seed=task)])
        total = total + 2.5 / 0.5 * bnn.net_guide.curvature.operator.to_dense()
        four_lines(bnn)
    expected = total + torch.eye(len(total)) / NORMAL.scale**2
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), expected, **EXACT)


def test_tasks_of_equal_factors_have_the_same_average_and_sum():
    found = {}
    for accumulate in ("sum", "average"):
        bnn = classifier(accumulate=accumulate)
        for _ in range(3):
            bnn.fit_curvature([labels()])
            four_lines(bnn)
        found[accumulate] = bnn.net_guide.precision
    torch.testing.assert_close(found["average"].to_dense(), found["sum"].to_dense(), **EXACT)
    assert all(isinstance(block, Kronecker) for block in found["average"].blocks.values())


def test_the_average_weighs_tasks_by_their_points():
    # [T 3.60] as it has to be: factors averaged over all points of both tasks.
    bnn = classifier(accumulate="average", multiplier=2.0)
    tasks = [labels(10, seed=0), labels(40, seed=1)]
    for x, y in tasks:
        bnn.likelihood.dataset_size = len(x)
        bnn.fit_curvature([(x, y)])
        four_lines(bnn)
    together = classifier(multiplier=2.0)
    together.likelihood.dataset_size = 50
    together.fit_curvature(tasks)
    expected = together.net_guide.precision.to_dense()
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), expected, **EXACT)


def test_a_diagonal_penalty_per_task_is_elastic_weight_consolidation():
    # sum_t lambda / 2 F_t (w - w_t)^2, and the prior's own term [T 3.71, Kirkpatrick 2017].
    bnn = classifier("diag", accumulate="modes", multiplier=4.0)
    known = []
    for task in range(3):
        bnn.fit([labels(seed=task)], functools.partial(torch.optim.Adam, lr=0.1), 5, progress=False)
        curvature = bnn.net_guide.curvature
        known.append((mode(bnn), 4.0 * curvature.operator.diagonal()))
        four_lines(bnn)
    for seed in range(3):
        torch.manual_seed(seed)
        first, second = torch.randn(2, len(known[0][0]))
        values = [separate(bnn, v) for v in (first, second)]
        expected = [
            sum((f * (v - m).square()).sum() for m, f in known) / 2
            + v.square().sum() / 2 / NORMAL.scale**2
            for v in (first, second)
        ]
        found = energy(bnn, values[0]) - energy(bnn, values[1])
        torch.testing.assert_close(found, expected[0] - expected[1], **EXACT)


def separate(bnn, vector):
    return separated(bnn.net_guide.curvature.groups, vector)


@pytest.mark.parametrize("small", [True, False])
def test_kronecker_penalties_about_each_mode(monkeypatch, small):
    if not small:
        monkeypatch.setattr("tyxe.linalg.sum.SMALL", 5)
    bnn = classifier(accumulate="modes")
    known = []
    for task in range(3):
        bnn.fit([labels(seed=task)], functools.partial(torch.optim.Adam, lr=0.1), 5, progress=False)
        known.append((mode(bnn), bnn.net_guide.curvature.operator.to_dense()))
        posterior = four_lines(bnn)
    (joint,) = bnn.net_prior.joints()
    assert isinstance(joint, JointNormal if small else NormalProduct)
    v, w = torch.randn(2, len(known[0][0]))

    def expected(u):
        own = u.square().sum() / 2 / NORMAL.scale**2
        return own + sum((u - m) @ f @ (u - m) for m, f in known) / 2

    found = energy(bnn, separate(bnn, v)) - energy(bnn, separate(bnn, w))
    torch.testing.assert_close(found, expected(v) - expected(w), **EXACT)
    if not small:
        with pytest.raises(ValueError, match="neither moments nor draws: it is a penalty"):
            posterior["0.bias"].sample()


# ------------------------------------------------------------------ the four lines


@pytest.mark.parametrize("accumulate", ["sum", "average"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_four_lines_leave_posterior_and_prior_the_same(structure, accumulate):
    bnn = classifier(structure, accumulate=accumulate, multiplier=2.0)
    for task in range(3):
        bnn.fit([labels(seed=task)], functools.partial(torch.optim.Adam, lr=0.1), 3, progress=False)
        before = bnn.net_guide.precision.to_dense()
        mean, _ = bnn.predict(labels()[0]), four_lines(bnn)
        torch.testing.assert_close(bnn.net_guide.precision.to_dense(), before, **EXACT)
        groups = bnn.net_guide.curvature.groups
        prior = bnn._prior_over(groups)
        kl = td.kl_divergence(bnn.net_guide.joint(), prior)
        assert abs(float(kl)) < 1e-8
        assert bnn.predict(labels()[0]).shape == mean.shape
        # Twice is once: what is taken up is not taken up again.
        four_lines(bnn)
        torch.testing.assert_close(bnn.net_guide.precision.to_dense(), before, **EXACT)


def test_the_next_task_starts_at_the_means():
    bnn = classifier()
    bnn.fit([labels()], functools.partial(torch.optim.Adam, lr=0.1), 3, progress=False)
    before = bnn.mean_values()
    four_lines(bnn)
    bnn.fit([labels(seed=1)], functools.partial(torch.optim.SGD, lr=0.0), 1, progress=False)
    for name, value in bnn.mean_values().items():
        assert torch.equal(value, before[name])


def test_a_multiplier_assigned_after_the_fit():
    bnn, other = classifier(), classifier(multiplier=7.0)
    for one in (bnn, other):
        one.fit_curvature([labels()])
    bnn.multiplier = 7.0
    expected = other.net_guide.precision.to_dense()
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), expected, **EXACT)


def test_another_prior_than_the_posterior_keeps_the_curvature():
    bnn = classifier("full")
    bnn.fit_curvature([labels()])
    curvature = bnn.net_guide.curvature.operator.to_dense()
    posterior = bnn.net_guide.get_detached_distributions()
    (joint,) = {id(q.joint): q.joint for q in posterior.values()}.values()
    doubled = JointNormal(joint.groups, joint.loc, joint.precision.scaled(2.0))
    marginals = {name.removeprefix("net."): doubled.marginal(name) for name in doubled.names}
    bnn.update_prior(tyxe.priors.DictPrior(marginals))
    expected = curvature + 2 * joint.precision.to_dense()
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), expected, **EXACT)


def test_structures_may_follow_one_another():
    # A diagonal task after a full one, and back: sums are exact whatever holds them.
    full, diag = classifier("full"), classifier("diag")
    full.fit_curvature([labels()])
    diag.update_prior(tyxe.priors.DictPrior(full.net_guide.get_detached_distributions()))
    diag.fit_curvature([labels(seed=1)])
    added = diag.net_guide.curvature.operator.diagonal().diag()
    expected = full.net_guide.precision.to_dense() + added
    torch.testing.assert_close(diag.net_guide.precision.to_dense(), expected, **EXACT)


def test_a_posterior_of_pyros_guide_is_a_prior_in_another_order():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    likelihood, prior = tyxe.likelihoods.Categorical(15), tyxe.priors.IIDPrior(NORMAL)
    vcl = tyxe.VariationalBNN(net, prior, likelihood, AutoMultivariateNormal)
    with torch.no_grad():
        for parameter in vcl.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    posterior = vcl.net_guide.get_detached_distributions()
    bnn = classifier("full", net)
    bnn.update_prior(tyxe.priors.DictPrior(posterior))
    bnn.fit_curvature([labels()])
    own = bnn.net_guide.curvature.operator.to_dense()
    covariance = torch.linalg.inv(bnn.net_guide.precision.to_dense() - own)
    groups = bnn.net_guide.curvature.groups
    variances = joined(groups, {f"net.{n}": q.variance for n, q in posterior.items()})
    torch.testing.assert_close(covariance.diagonal(), variances, rtol=1e-6, atol=1e-8)


@pytest.fixture(scope="module")
def two_tasks():
    """Return a logistic regression's two tasks, and NUTS's draws given both."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(120, 2, dtype=torch.double)
        logits = x @ torch.tensor([1.0, -0.7], dtype=torch.double) + 0.3
        y = (logits.sigmoid() > torch.rand(120)).double()[:, None]
        net, likelihood = nn.Linear(2, 1).double(), tyxe.likelihoods.Bernoulli(120, event_dim=1)
        mcmc = tyxe.MCMC_BNN(net, standard_normal(), likelihood, NUTS)
        samples = mcmc.fit([(x, y)], 600, warmup_steps=200, disable_progbar=True).get_samples()
    vectors = torch.cat([samples["net.weight"].flatten(1), samples["net.bias"]], 1)
    return list(zip(x.split(60), y.split(60), strict=True)), vectors


def standard_normal():
    return tyxe.priors.IIDPrior(dist.Normal(torch.zeros((), dtype=torch.double), 1.0))


def check_against_mcmc(mean, scales, vectors):
    # The tolerance: a quarter of a standard deviation for the skewness that a Normal ignores, and
    # three standard errors of some 300 independent draws.
    assert bool(((vectors.mean(0) - mean).abs() < scales * (0.25 + 3 / 300**0.5)).all())
    ratio = vectors.std(0) / scales
    assert bool((ratio.log().abs() < 0.1 + 3 / (2 * 300) ** 0.5).all())


def test_laplace_over_two_tasks_against_mcmc_on_all_data(two_tasks):
    tasks, vectors = two_tasks
    likelihood = tyxe.likelihoods.Bernoulli(60, event_dim=1)
    bnn = tyxe.LaplaceBNN(nn.Linear(2, 1), standard_normal(), likelihood, structure="full")
    for x, y in tasks:
        maximize(bnn, x, y)
        four_lines(bnn)
    check_against_mcmc(mode(bnn), bnn.net_guide.precision.inverse_diagonal().sqrt(), vectors)


def test_vcl_over_two_tasks_against_mcmc_on_all_data(two_tasks):
    tasks, vectors = two_tasks
    torch.manual_seed(0)
    likelihood = tyxe.likelihoods.Bernoulli(60, event_dim=1)
    prior, guide = standard_normal(), AutoMultivariateNormal
    bnn = tyxe.VariationalBNN(nn.Linear(2, 1), prior, likelihood, guide)
    for x, y in tasks:
        optimizer = torch.optim.Adam(bnn.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        lower = {"callback": lambda *_, schedule=schedule: schedule.step(), "progress": False}
        bnn.fit([(x, y)], optimizer, 400, num_particles=4, **lower)
        four_lines(bnn)
    (joint,) = bnn.net_prior.joints()
    check_against_mcmc(joint.loc, joint.variance.sqrt(), vectors)


# ------------------------------------------------------------------ state


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("accumulate", ["sum", "average", "modes"])
def test_saved_copied_and_moved_between_tasks(structure, accumulate):
    bnn = classifier(structure, accumulate=accumulate)
    for task in range(2):
        bnn.fit_curvature([labels(seed=task)])
        posterior = four_lines(bnn)
    file = io.BytesIO()
    torch.save(bnn.state_dict(), file)
    file.seek(0)
    # What has the prior of a first task takes that of a later one, and not the other way round.
    fresh = classifier(structure, accumulate=accumulate)
    with pytest.raises(RuntimeError, match="call update_prior with that kind of prior first"):
        copy.deepcopy(bnn).load_state_dict(fresh.state_dict())
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for other in (fresh, copy.deepcopy(bnn)):
        other.fit_curvature([labels(seed=2)])
        found = four_lines(other)
        assert sorted(found) == sorted(posterior)
    bnn.fit_curvature([labels(seed=2)])
    four_lines(bnn)
    torch.testing.assert_close(
        fresh.net_guide.precision.to_dense(), bnn.net_guide.precision.to_dense()
    )
    single = bnn.float()
    (joint,) = single.net_prior.joints()
    assert joint.precision.dtype == torch.float32
    single.fit([(labels()[0].float(), labels()[1])], torch.optim.Adam, 1, progress=False)
    assert single.net_guide.precision.dtype == torch.float32


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_multiplier_has_to_be_positive(value):
    with pytest.raises(ValueError, match=r"multiplier is .*; expected a positive number"):
        classifier(multiplier=value)
    bnn = classifier()
    with pytest.raises(ValueError, match=r"multiplier is .*; expected a positive number"):
        bnn.multiplier = value
    assert bnn.multiplier == 1.0


def test_unknown_accumulation():
    with pytest.raises(ValueError, match="accumulate is 'max'; expected one of 'sum', 'average'"):
        classifier(accumulate="max")


def test_a_large_sum_has_no_inverse_and_names_the_average(monkeypatch):
    monkeypatch.setattr("tyxe.linalg.cost.SMALL", 5)
    monkeypatch.setattr("tyxe.linalg.sum.SMALL", 5)
    bnn = classifier()
    for task in range(2):
        bnn.fit([labels(seed=task)], functools.partial(torch.optim.Adam, lr=0.1), 3, progress=False)
        four_lines(bnn)
    x, _ = labels()
    for use in (
        lambda: bnn.predict(x),
        lambda: bnn.predict(x, predictive="bnn"),
        lambda: bnn.functional_variance(x),
    ):
        with pytest.raises(ValueError, match='accumulate="average"'):
            use()
    with pytest.raises(ValueError, match=r'normaliser is not known.*accumulate="average"'):
        bnn.log_marginal_likelihood()
    # What needs no inverse is there.
    assert bnn.predict(x, predictive="bnn", num_predictions=0).shape == (15, 3)
    (joint,) = bnn.net_prior.joints()
    assert isinstance(joint, GaussianJoint)


@pytest.mark.parametrize(
    "use",
    [
        lambda bnn: bnn.optimize_prior_precision(),
        lambda bnn: bnn.log_marginal_likelihood(1.0),
        lambda bnn: bnn.refine([labels()]),
        lambda bnn: bnn.fit([labels()], torch.optim.Adam, 1, evidence_every=1),
    ],
)
def test_what_takes_a_prior_for_each_site_says_so(use):
    bnn = classifier()
    bnn.fit_curvature([labels()])
    four_lines(bnn)
    before = bnn.state_dict()
    with pytest.raises(ValueError, match="the prior is one over all sites"):
        use(bnn)
    assert before.keys() == bnn.state_dict().keys()


def test_damping_does_not_load_the_prior_of_a_second_task():
    second = classifier()
    second.fit_curvature([labels()])
    four_lines(second)
    second.fit_curvature([labels(seed=1)])
    damped = classifier(damping=True)
    damped.fit_curvature([labels(seed=2)])
    before = damped.net_guide.precision.to_dense()
    with pytest.raises(RuntimeError, match=r"left as it was; .*damping spreads .*damping=False"):
        damped.load_state_dict(second.state_dict())
    assert damped.net_prior.joints() == []
    torch.testing.assert_close(damped.net_guide.precision.to_dense(), before)
    damped.damping = False
    damped.load_state_dict(second.state_dict())
    torch.testing.assert_close(
        damped.net_guide.precision.to_dense(), second.net_guide.precision.to_dense()
    )


@pytest.mark.parametrize("accumulated", ["curvature", "next fit"])
@pytest.mark.parametrize(
    "use",
    [
        lambda bnn: bnn.optimize_prior_precision(),
        lambda bnn: bnn.optimize_prior_precision("grid", [labels()]),
        lambda bnn: bnn.fit([labels()], torch.optim.Adam, 1, evidence_every=1),
    ],
)
def test_one_number_does_not_replace_a_posterior(use, accumulated):
    """Of a diagonal structure, whose posterior is a prior of each site like any other."""
    bnn = classifier("diag")
    bnn.fit_curvature([labels()])
    four_lines(bnn)
    if accumulated == "next fit":
        bnn.fit_curvature([labels(seed=1)])
    before = [prior.base_dist.scale for _, prior in bnn.net_prior.priors()]
    with pytest.raises(ValueError, match=r"precision for each weight.*on the first task"):
        use(bnn)
    after = [prior.base_dist.scale for _, prior in bnn.net_prior.priors()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


def test_damping_is_for_a_first_task():
    bnn = classifier(damping=True)
    bnn.fit_curvature([labels()])
    before = bnn.net_guide.precision.to_dense()
    posterior = bnn.net_guide.get_detached_distributions()
    with pytest.raises(ValueError, match="set damping=False before the second task"):
        bnn.update_prior(tyxe.priors.DictPrior(posterior))
    assert not bnn.net_prior.joints()
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), before)
    bnn = classifier()
    bnn.fit_curvature([labels()])
    four_lines(bnn)
    with pytest.raises(ValueError, match="set damping=False"):
        bnn.damping = True
    assert bnn.damping is False


def test_damping_with_a_joint_prior_is_refused_before_a_fit():
    first = classifier()
    first.fit_curvature([labels()])
    posterior = tyxe.priors.DictPrior(first.net_guide.get_detached_distributions())
    second = classifier(damping=True)
    with pytest.raises(ValueError, match="set damping=False"):
        second.update_prior(posterior)
    assert not second.net_prior.joints()
    second.damping = False
    second.update_prior(posterior)
    with pytest.raises(ValueError, match="set damping=False"):
        second.damping = True
    assert second.damping is False


def test_a_temperature_without_a_posterior_is_not_kept():
    bnn = classifier()
    bnn.fit_curvature([labels()])
    before = bnn.net_guide.precision.to_dense()
    with pytest.raises(ValueError, match="not finite"):
        bnn.temperature = 5e-324
    assert bnn.temperature == 1.0
    torch.testing.assert_close(bnn.net_guide.precision.to_dense(), before)


def test_a_joint_prior_that_is_no_normal_is_refused():
    net = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    likelihood, prior = tyxe.likelihoods.Categorical(15), tyxe.priors.IIDPrior(dist.Normal(0, 1))
    builder = functools.partial(tyxe.guides.AutoInducing, inducing_rows=2, inducing_cols=2)
    posterior = tyxe.VariationalBNN(
        net, prior, likelihood, builder
    ).net_guide.get_detached_distributions()
    bnn = tyxe.LaplaceBNN(net, prior, likelihood)
    with pytest.raises(ValueError, match=r"needs Gaussian priors.*InducingWeights over"):
        bnn.update_prior(tyxe.priors.DictPrior(posterior))
    assert not bnn.net_prior.joints()


def test_orders_of_large_joint_priors_have_to_agree(monkeypatch):
    bnn, other = classifier("full"), classifier("full")
    bnn.fit_curvature([labels()])
    joint = bnn.net_guide.joint()
    shuffled = reordered(joint, joint.groups[::-1])
    marginals = {n.removeprefix("net."): shuffled.marginal(n) for n in shuffled.names}
    other.update_prior(tyxe.priors.DictPrior(marginals))
    monkeypatch.setattr("tyxe.bnn.online.SMALL", 5)
    with pytest.raises(ValueError, match="31 weights in another order than the curvature's"):
        other.fit_curvature([labels()])
    assert other.net_guide.curvature is None
