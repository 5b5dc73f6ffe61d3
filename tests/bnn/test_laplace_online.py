"""`LaplaceBNN` from task to task: hand-overs, references by MCMC, state, bad input."""

import copy
import dataclasses
import functools
import io

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from pyro.infer.autoguide import AutoMultivariateNormal
from pyro.infer.mcmc import NUTS

import tyxe
from tests.oracles import streams
from tests.oracles.streams import ADAM, EXACT, classifier, fitted, four_lines, labels
from tyxe.distributions import Gaussian, ParamBlocks

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("accumulate", ["sum", "average"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_four_lines_leave_posterior_and_prior_the_same(structure, accumulate):
    bnn = classifier(structure, accumulate=accumulate, curvature_weight=2.0)
    for task in range(3):
        bnn.fit([labels(seed=task)], ADAM, 3, progress=False)
        before = bnn.net_guide.precision.to_dense()
        mean, _ = bnn.predict(labels()[0]), four_lines(bnn)
        torch.testing.assert_close(bnn.net_guide.precision.to_dense(), before, **EXACT)
        kl = td.kl_divergence(bnn.state.posterior(), bnn.state.prior)
        assert abs(float(kl)) < 1e-8
        assert bnn.predict(labels()[0]).shape == mean.shape
        # Twice is once: what is taken up is not taken up again.
        four_lines(bnn)
        torch.testing.assert_close(bnn.net_guide.precision.to_dense(), before, **EXACT)


def test_the_next_task_starts_at_the_means():
    bnn = classifier()
    bnn.fit([labels()], ADAM, 3, progress=False)
    before = bnn._mean_values()
    four_lines(bnn)
    bnn.fit([labels(seed=1)], functools.partial(torch.optim.SGD, lr=0.0), 1, progress=False)
    for name, value in bnn._mean_values().items():
        assert torch.equal(value, before[name])


def test_structures_may_follow_one_another():
    # A diagonal task after a full one, and back: sums are exact whatever holds them.
    full, diag = classifier("full"), classifier("diag")
    full.fit_curvature([labels()])
    diag.update_prior(tyxe.priors.DictPrior(full.net_guide.get_detached_distributions()))
    diag.fit_curvature([labels(seed=1)])
    added = diag.state.curvature.operator.diagonal().diag()
    expected = full.net_guide.precision.to_dense() + added
    torch.testing.assert_close(diag.net_guide.precision.to_dense(), expected, **EXACT)


def test_a_posterior_of_pyros_guide_is_a_prior_in_another_order():
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    likelihood, prior = tyxe.likelihoods.Categorical(15), tyxe.priors.IIDPrior(streams.NORMAL)
    vcl = tyxe.VariationalBNN(net, prior, likelihood, AutoMultivariateNormal)
    with torch.no_grad():
        for parameter in vcl.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    posterior = vcl.net_guide.get_detached_distributions()
    bnn = classifier("full", net)
    bnn.update_prior(tyxe.priors.DictPrior(posterior))
    bnn.fit_curvature([labels()])
    own = bnn.state.curvature.operator.to_dense()
    covariance = torch.linalg.inv(bnn.net_guide.precision.to_dense() - own)
    blocks = bnn.state.curvature.blocks
    variances = blocks.flatten({f"net.{n}": q.variance for n, q in posterior.items()})
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


@pytest.mark.parametrize("kind", ["Laplace", "VCL"])
def test_two_tasks_against_mcmc_on_all_data(two_tasks, kind):
    tasks, vectors = two_tasks
    torch.manual_seed(0)
    net, likelihood = nn.Linear(2, 1), tyxe.likelihoods.Bernoulli(60, event_dim=1)
    if kind == "Laplace":
        bnn = tyxe.LaplaceBNN(net, standard_normal(), likelihood, structure="full")
    else:
        bnn = tyxe.VariationalBNN(net, standard_normal(), likelihood, AutoMultivariateNormal)
    for x, y in tasks:
        if kind == "Laplace":
            streams.maximize(bnn, x, y)
        else:
            optimizer = torch.optim.Adam(bnn.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
            bnn.fit([(x, y)], optimizer, 150, num_particles=4, scheduler=schedule, progress=False)
        four_lines(bnn)
    (joint,) = bnn.net_prior.joints()
    # The tolerance: a quarter of a standard deviation for the skewness that a Normal ignores, and
    # three standard errors of some 300 independent draws.
    mean, scales = joint.loc, joint.variance.sqrt()
    assert bool(((vectors.mean(0) - mean).abs() < scales * (0.25 + 3 / 300**0.5)).all())
    ratio = vectors.std(0) / scales
    assert bool((ratio.log().abs() < 0.1 + 3 / (2 * 300) ** 0.5).all())


@pytest.mark.parametrize("structure", ["full", "kron", "lowrank"])
@pytest.mark.parametrize("accumulate", ["sum", "average", "per_task"])
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


def test_a_large_sum_has_no_inverse_and_names_the_average(monkeypatch):
    monkeypatch.setattr("tyxe.linalg.checks.SMALL", 5)
    bnn = classifier()
    for task in range(2):
        bnn.fit([labels(seed=task)], ADAM, 3, progress=False)
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
    assert isinstance(joint, Gaussian)


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
    bnn = fitted()
    four_lines(bnn)
    bnn.fit_curvature([labels(seed=1)])
    before = bnn.state_dict()
    with pytest.raises(ValueError, match="the prior is one over all sites"):
        use(bnn)
    assert before.keys() == bnn.state_dict().keys()


def test_damping_does_not_load_the_prior_of_a_second_task():
    second = fitted()
    four_lines(second)
    second.fit_curvature([labels(seed=1)])
    damped = classifier(damping=True)
    damped.fit_curvature([labels(seed=2)])
    before = damped.net_guide.precision.to_dense()
    with pytest.raises(RuntimeError, match=r"left as it was; .*damping spreads .*damping=False"):
        damped.load_state_dict(second.state_dict())
    assert damped.net_prior.joints() == []
    torch.testing.assert_close(damped.net_guide.precision.to_dense(), before)
    damped.options = tyxe.LaplaceOptions()
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
    bnn = fitted("diag")
    four_lines(bnn)
    if accumulated == "next fit":
        bnn.fit_curvature([labels(seed=1)])
    before = [prior.base_dist.scale for _, prior in bnn.net_prior.priors()]
    with pytest.raises(ValueError, match=r"precision for each weight.*on the first task"):
        use(bnn)
    after = [prior.base_dist.scale for _, prior in bnn.net_prior.priors()]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("is_fitted", [True, False])
def test_damping_is_for_a_first_task(is_fitted):
    first, damped = classifier(), classifier(damping=True)
    first.fit_curvature([labels()])
    posterior = tyxe.priors.DictPrior(first.net_guide.get_detached_distributions())
    if is_fitted:
        damped.fit_curvature([labels()])
        before = damped.net_guide.precision.to_dense()
    with pytest.raises(ValueError, match="set damping=False before the second task"):
        damped.update_prior(posterior)
    assert not damped.net_prior.joints()
    if is_fitted:
        torch.testing.assert_close(damped.net_guide.precision.to_dense(), before)
    damped.options = tyxe.LaplaceOptions()
    damped.update_prior(posterior)
    with pytest.raises(ValueError, match="set damping=False"):
        damped.options = dataclasses.replace(damped.options, damping=True)
    assert damped.options.damping is False


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
    joint = bnn.state.posterior()
    shuffled = joint.reordered(ParamBlocks(joint.blocks.blocks[::-1]))
    marginals = {n.removeprefix("net."): shuffled.marginal(n) for n in shuffled.names}
    other.update_prior(tyxe.priors.DictPrior(marginals))
    monkeypatch.setattr("tyxe.distributions.gaussian.SMALL", 5)
    with pytest.raises(ValueError, match="31 weights in another order than the curvature's"):
        other.fit_curvature([labels()])
    assert other.net_guide.state is None
