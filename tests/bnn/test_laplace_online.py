"""`LaplaceBNN` from task to task: hand-overs, references by MCMC, state, bad input."""

import copy
import dataclasses
import functools
import io

import pytest
import torch
import torch.distributions as td
import torch.nn as nn

import tyxe
from tests.oracles.bnns import NORMAL
from tests.oracles.streams import ADAM, EXACT, classifier, fitted, four_lines, labels
from tyxe.distributions import Gaussian, ParamBlocks

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("accumulate", ["sum", "average"])
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_four_lines_leave_posterior_and_prior_the_same(structure, accumulate):
    bnn = classifier(structure, accumulate=accumulate, curvature_weight=2.0)
    for task in range(3):
        bnn.fit([labels(seed=task)], ADAM, 3)
        before = bnn.net_guide.precision.to_dense()
        four_lines(bnn)
        torch.testing.assert_close(bnn.net_guide.precision.to_dense(), before, **EXACT)
        kl = td.kl_divergence(bnn.state.posterior(), bnn.state.prior)
        assert abs(float(kl)) < 1e-8
        # Twice is once: what is taken up is not taken up again.
        four_lines(bnn)
        torch.testing.assert_close(bnn.net_guide.precision.to_dense(), before, **EXACT)


def test_the_next_task_starts_at_the_means():
    bnn = classifier()
    bnn.fit([labels()], ADAM, 3)
    before = bnn._mean_values()
    four_lines(bnn)
    bnn.fit([labels(seed=1)], functools.partial(torch.optim.SGD, lr=0.0), 1)
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


def saved(bnn):
    file = io.BytesIO()
    torch.save(bnn.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("structure", ["full", "kron", "lowrank"])
@pytest.mark.parametrize("accumulate", ["sum", "average", "per_task"])
def test_saved_copied_and_moved_between_tasks(structure, accumulate):
    bnn = classifier(structure, accumulate=accumulate)
    for task in range(2):
        bnn.fit_curvature([labels(seed=task)])
        four_lines(bnn)
    # What has the prior of a first task takes that of a later one, and not the other way round.
    fresh = classifier(structure, accumulate=accumulate)
    with pytest.raises(RuntimeError, match="call update_prior with that kind of prior first"):
        copy.deepcopy(bnn).load_state_dict(fresh.state_dict())
    fresh.load_state_dict(saved(bnn))
    found = []
    for other in (bnn, fresh, copy.deepcopy(bnn)):
        other.fit_curvature([labels(seed=2)])
        four_lines(other)
        found.append(other.net_guide.precision.to_dense())
    torch.testing.assert_close(found[1:], found[:1] * 2)
    single = bnn.float()
    (joint,) = single.net_prior.joints()
    assert joint.precision.dtype == torch.float32
    x, y = labels()
    single.fit([(x.float(), y)], torch.optim.Adam, 1)
    assert single.net_guide.precision.dtype == torch.float32


def test_a_large_sum_has_no_inverse_and_names_the_average(monkeypatch):
    monkeypatch.setattr("tyxe.linalg.checks.SMALL", 5)
    bnn = classifier()
    for task in range(2):
        bnn.fit([labels(seed=task)], ADAM, 3)
        four_lines(bnn)
    x, _ = labels()
    by_draws = functools.partial(bnn.predict, predictive="bnn")
    for use in (bnn.predict, by_draws, bnn.functional_variance):
        with pytest.raises(ValueError, match='accumulate="average"'):
            use(x)
    with pytest.raises(ValueError, match=r'normaliser is not known.*accumulate="average"'):
        bnn.log_marginal_likelihood()
    # What needs no inverse is there.
    assert bnn.predict(x, predictive="bnn", num_predictions=0).shape == (15, 3)
    (joint,) = bnn.net_prior.joints()
    assert isinstance(joint, Gaussian)


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


USES = {
    "evidence": lambda bnn: bnn.optimize_prior_precision(),
    "grid": lambda bnn: bnn.optimize_prior_precision("grid", [labels()]),
    "training": lambda bnn: bnn.fit([labels()], torch.optim.Adam, 1, evidence_every=1),
    "another precision": lambda bnn: bnn.log_marginal_likelihood(1.0),
    "refined": lambda bnn: bnn.refine([labels()]),
}
EACH = r"precision for each weight.*on the first task"
JOINT = "the prior is one over all sites"
# A diagonal posterior is a prior of each site like any other; one number does not replace it.
REFUSED = [("diag", use, EACH) for use in ("evidence", "grid", "training")]
REFUSED += [("kron", use, JOINT) for use in ("evidence", "training", "another precision")]
REFUSED += [("kron", "refined", f"{JOINT}|the prior has absorbed the data")]


@pytest.mark.parametrize("is_second_fit", [True, False])
@pytest.mark.parametrize(("structure", "use", "message"), REFUSED)
def test_a_posterior_as_prior_is_not_replaced(structure, use, message, is_second_fit):
    bnn = fitted(structure)
    four_lines(bnn)
    if is_second_fit:
        bnn.fit_curvature([labels(seed=1)])
    before = [prior.variance for _, prior in bnn.net_prior.priors()]
    with pytest.raises(ValueError, match=message):
        USES[use](bnn)
    after = [prior.variance for _, prior in bnn.net_prior.priors()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("make", [classifier, fitted])
def test_damping_is_for_a_first_task(make):
    damped = make(damping=True)
    posterior = tyxe.priors.DictPrior(fitted().net_guide.get_detached_distributions())
    before = damped.net_guide.state
    with pytest.raises(ValueError, match="set damping=False before the second task"):
        damped.update_prior(posterior)
    assert not damped.net_prior.joints()
    assert damped.net_guide.state is before
    damped.options = tyxe.LaplaceOptions()
    damped.update_prior(posterior)
    with pytest.raises(ValueError, match="set damping=False"):
        damped.options = dataclasses.replace(damped.options, damping=True)
    assert damped.options.damping is False


def test_a_joint_prior_that_is_no_normal_is_refused():
    parts = nn.Linear(30, 30), NORMAL, tyxe.likelihoods.Categorical(15)
    builder = functools.partial(tyxe.guides.AutoInducing, inducing_rows=2, inducing_cols=2)
    vcl, bnn = tyxe.VariationalBNN(*parts, builder), tyxe.LaplaceBNN(*parts)
    posterior = vcl.net_guide.get_detached_distributions()
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
