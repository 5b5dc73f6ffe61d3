"""Priors over several sites at once: densities, KLs, VCL on linear streams, programs, bad input."""

import copy
import functools
import itertools
import pickle

import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from pyro.infer import Trace_ELBO, autoguide
from pyro.infer.mcmc import NUTS
from pyro.infer.mcmc.util import initialize_model

import tyxe
from tyxe.bnn.elbo import elbo_terms
from tyxe.bnn.potential import Potential
from tyxe.distributions import (
    JointDistribution,
    JointMarginal,
    JointNormal,
    JointPart,
    NormalProduct,
    PlainGroup,
    SiteProduct,
    product_of,
)
from tyxe.linalg import Dense, Diagonal, Kronecker, Sum, average, plus, trace_of_solve
from tyxe.priors import DictPrior, IIDPrior, SitePriors
from tyxe.testing import GUIDES, JOINTS, OPERATORS, check_joint

EXACT = {"rtol": 1e-8, "atol": 1e-8}


pytestmark = pytest.mark.usefixtures("double")


# ------------------------------------------------------------------ distributions and operators


@pytest.mark.parametrize("make", JOINTS.values(), ids=JOINTS.keys())
def test_contract(make):
    check_joint(make)


@pytest.mark.parametrize("p", JOINTS)
@pytest.mark.parametrize("q", JOINTS)
def test_the_kl_between_two_joint_normals_is_that_of_dense_ones(q, p):
    first, second = JOINTS[q](), JOINTS[p]()
    dense = [
        td.MultivariateNormal(one.loc, precision_matrix=one.precision.to_dense())
        for one in (first, second)
    ]
    torch.testing.assert_close(td.kl_divergence(first, second), td.kl_divergence(*dense), **EXACT)
    if q == p:
        assert abs(float(td.kl_divergence(first, second))) < 1e-10


def test_a_product_of_normals_is_the_product_of_their_densities():
    factors = [JOINTS[name]() for name in ("blocks", "blocks, others", "Diagonal")]
    product = product_of(factors)
    v, w = torch.randn(2, 17)
    expected = sum(float(f.log_prob(v) - f.log_prob(w)) for f in factors)
    for joint in (product, NormalProduct(factors)):
        assert float(joint.log_prob(v) - joint.log_prob(w)) == pytest.approx(expected, rel=1e-9)
    assert isinstance(product, JointNormal)
    with pytest.raises(ValueError, match="over the same sites in the same order"):
        product_of(
            [factors[0], JointNormal([PlainGroup("a", torch.Size([17]))], v, Diagonal(v**2))]
        )


def test_the_kl_to_a_penalty_differs_by_its_constant_only():
    factors = [JOINTS[name]() for name in ("blocks", "blocks, others")]
    penalty, normal = NormalProduct(factors), product_of(factors)
    qs = [JOINTS[name]() for name in ("Dense", "covariance", "Diagonal")]
    found = [td.kl_divergence(q, penalty) - td.kl_divergence(q, normal) for q in qs]
    locs, scales = qs[0].separate(torch.randn(17)), qs[0].separate(torch.rand(17))
    sites = {n: dist.Normal(loc, scales[n]).to_event(loc.dim()) for n, loc in locs.items()}
    q = SiteProduct(sites)
    found.append(td.kl_divergence(q, penalty) - td.kl_divergence(q, normal))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], **EXACT)


SAME_SIZE = ["LowRank", "Inverse of LowRank", "Sum of structures"]
PAIRS = [*itertools.product(SAME_SIZE, SAME_SIZE), *((n, n) for n in OPERATORS)]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_sums_averages_and_traces_of_operators(first, second):
    a, b = OPERATORS[first]().to(torch.float64), OPERATORS[second]().to(torch.float64)
    dense = [operator.to_dense() for operator in (a, b)]
    torch.testing.assert_close(plus(a, b).to_dense(), sum(dense), **EXACT)
    expected = torch.trace(torch.linalg.solve(dense[1], dense[0]))
    torch.testing.assert_close(trace_of_solve(a, b), expected, **EXACT)
    if first == second:
        torch.testing.assert_close(average(a, b).to_dense(), sum(dense), **EXACT)


def test_an_average_keeps_one_product_and_a_sum_all():
    rows = torch.randn(2, 9, 3)
    products = [Kronecker.from_factors(r.mT @ r, torch.eye(2), scale=4.0) for r in rows]
    assert isinstance(average(*products), Kronecker)
    total = plus(plus(*products), products[0])
    assert isinstance(total, Sum)
    assert len(total.terms) == 3
    with pytest.raises(ValueError, match="have 6 and 4 rows; a sum has terms of one size"):
        plus(products[0], Kronecker.from_factors(torch.eye(2), torch.eye(2)))


# ------------------------------------------------------------------ VCL on linear streams

SCALE, NOISE = 1.3, 0.5
FULL = {
    "AutoMultivariateNormal": autoguide.AutoMultivariateNormal,
    "AutoLowRankMultivariateNormal": functools.partial(
        autoguide.AutoLowRankMultivariateNormal, rank=3
    ),
}


def normal_prior():
    return IIDPrior(dist.Normal(torch.tensor(0.0), torch.tensor(SCALE)))


def four_lines(bnn):
    sites = tyxe.util.pyro_sample_sites(bnn.net)
    posterior = bnn.net_guide.get_detached_distributions(sites)
    bnn.update_prior(DictPrior(posterior))
    return posterior


def vcl(builder=autoguide.AutoMultivariateNormal, net=None):
    net = nn.Linear(2, 1) if net is None else net
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(5, scale=NOISE)
    return tyxe.VariationalBNN(net, normal_prior(), likelihood, builder)


def guide_joint(bnn):
    trace = poutine.trace(bnn.net_guide).get_trace()
    (node,) = (n for n in trace.nodes.values() if isinstance(n.get("fn"), JointDistribution))
    return node["fn"]


def maximize_elbo(bnn, x, y):
    """Follow the ELBO with its data term exact: the log-likelihood is quadratic in the weights."""
    bnn.likelihood.dataset_size = len(x)
    parameters = list(bnn.net_guide.parameters())
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=2000,
        max_eval=4000,
        tolerance_grad=1e-13,
        tolerance_change=0.0,
        line_search_fn="strong_wolfe",
    )

    def closure():
        optimizer.zero_grad()
        q = guide_joint(bnn)
        kl = elbo_terms(bnn.net_prior, bnn.net_guide).kl
        root = q.precision.inverse_sqrt(torch.eye(3)) * 3**0.5
        data = 0.0
        for point in torch.cat([q.loc + root, q.loc - root]):
            output = bnn.run_net(q.separate(point), x)
            data = data + bnn.likelihood.log_likelihood(output, y, "sum") / 6
        loss = kl - data
        loss.backward()
        return loss

    optimizer.step(closure)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("sizes", [[5, 3], [2, 1, 5]])
@pytest.mark.parametrize("guide", FULL)
def test_full_covariance_vcl_of_a_linear_stream_is_the_batch_posterior(guide, sizes, order):
    torch.manual_seed(0)
    x = torch.randn(8, 2)
    y = x @ torch.tensor([[1.0], [-0.5]]) + 0.3 + NOISE * torch.randn(8, 1)
    bnn = vcl(FULL[guide])
    for part_x, part_y in list(zip(x.split(sizes), y.split(sizes), strict=True))[::order]:
        maximize_elbo(bnn, part_x, part_y)
        four_lines(bnn)
    design = torch.cat([x, torch.ones(8, 1)], 1)
    precision = design.mT @ design / NOISE**2 + torch.eye(3) / SCALE**2
    mean = torch.linalg.solve(precision, design.mT @ y[:, 0] / NOISE**2)
    (joint,) = bnn.net_prior.joints()
    torch.testing.assert_close(joint.loc, mean, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(joint.precision.to_dense(), precision, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------ the four lines

INDUCING = {
    f"AutoInducing, {q}": functools.partial(
        tyxe.guides.AutoInducing, inducing_rows=2, inducing_cols=2, q_inducing=q, everywhere=True
    )
    for q in ("diagonal", "full", "matrix", "ensemble")
}
INDUCING["AutoInducing, hierarchical"] = functools.partial(
    tyxe.guides.AutoInducing, inducing_rows=2, inducing_cols=2, everywhere=True, hierarchical=(1, 1)
)


# A point is no prior.
SPREAD = [name for name in GUIDES if name != "pyro AutoDelta"]


@pytest.mark.parametrize("closed_form_kl", [True, False])
@pytest.mark.parametrize("guide", [*SPREAD, *INDUCING])
def test_four_lines_leave_the_kl_at_zero(guide, closed_form_kl):
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))
    bnn = vcl((GUIDES | INDUCING)[guide], net)
    with torch.no_grad():
        for parameter in bnn.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    four_lines(bnn)
    for _ in range(3):
        kl = elbo_terms(bnn.net_prior, bnn.net_guide, closed_form_kl=closed_form_kl).kl
        # Radial: the entropy is known, the cross-entropy drawn. On average over draws it is zero.
        if guide == "AutoRadial" and closed_form_kl:
            continue
        assert abs(kl.item()) < 1e-7
    before = {name: p.detach().clone() for name, p in bnn.net_guide.named_parameters()}
    bnn.fit([(torch.randn(5, 4), torch.randn(5, 4))], torch.optim.Adam, 1, progress=False)
    assert any(not torch.equal(p, before[n]) for n, p in bnn.net_guide.named_parameters())


def test_the_marginals_of_one_posterior_know_one_copy():
    bnn = vcl()
    posterior = bnn.net_guide.get_detached_distributions()
    (joint,) = {id(q.joint): q.joint for q in posterior.values()}.values()
    assert all(isinstance(q, JointMarginal) for q in posterior.values())
    storages = {p.untyped_storage().data_ptr() for p in bnn.parameters()}
    state = [joint.loc, joint.precision.operator.lower]
    assert not any(t.untyped_storage().data_ptr() in storages or t.requires_grad for t in state)
    assert (
        bnn.net_guide.get_detached_distributions(["net.weight"])["net.weight"].site == "net.weight"
    )


# ------------------------------------------------------------------ programs


def joint_prior(net, seed=0):
    """A dense Normal over all sites of a net, by marginal."""
    torch.manual_seed(seed)
    groups = [PlainGroup(f"net.{n}", p.shape) for n, p in net.named_parameters()]
    size = sum(g.size for g in groups)
    rows = torch.randn(2 * size, size)
    joint = JointNormal(groups, torch.randn(size), Dense(rows.mT @ rows / size))
    return joint, DictPrior({name: joint.marginal(name) for name in joint.names})


def small_net():
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


def test_the_program_samples_sites_one_by_one_from_one_draw():
    net = small_net()
    joint, prior = joint_prior(net)
    program = SitePriors(prior.sites(net), net)
    trace = poutine.trace(program).get_trace()
    values = {name: trace.nodes[name]["value"] for name in joint.names}
    assert all(isinstance(trace.nodes[name]["fn"], JointPart) for name in joint.names)
    torch.testing.assert_close(trace.log_prob_sum(), joint.log_prob(joint.join(values)), **EXACT)
    # Conditioning and replay put other values in: the density is that of those.
    other = joint.separate(torch.randn(joint.event_shape))
    conditioned = poutine.trace(poutine.condition(program, other)).get_trace()
    expected = joint.log_prob(joint.join(other))
    torch.testing.assert_close(conditioned.log_prob_sum(), expected, **EXACT)
    draws = torch.stack([joint.join(program()) for _ in range(4000)])
    covariance = torch.linalg.inv(joint.precision.to_dense())
    error = torch.cov(draws.T) - covariance
    limit = 6 * covariance.diagonal().max() / 4000**0.5
    assert error.abs().max() < limit
    pickle.loads(pickle.dumps(trace.nodes["net.0.bias"]["fn"]))


@pytest.mark.parametrize(
    "guide", ["AutoNormal", "AutoRadial", "pyro AutoNormal", "pyro AutoMultivariateNormal"]
)
def test_the_elbo_without_closed_forms_is_pyros(guide):
    net = small_net()
    bnn = vcl(GUIDES[guide], net)
    bnn.update_prior(joint_prior(net)[1])
    x, y = torch.randn(5, 2), torch.randn(5, 1)
    torch.manual_seed(3)
    terms = elbo_terms(bnn.model, bnn.guide, x, y, closed_form_kl=False)
    torch.manual_seed(3)
    expected = Trace_ELBO().differentiable_loss(bnn.model, bnn.guide, x, y)
    torch.testing.assert_close(terms.kl - terms.data, expected, **EXACT)


@pytest.mark.parametrize("guide", ["AutoNormal", "pyro AutoMultivariateNormal"])
def test_closed_forms_are_what_draws_average_to(guide):
    net = small_net()
    bnn = vcl(GUIDES[guide], net)
    bnn.update_prior(joint_prior(net)[1])
    with torch.no_grad():
        exact = [float(elbo_terms(bnn.net_prior, bnn.net_guide).kl) for _ in range(2)]
        kls = torch.stack(
            [elbo_terms(bnn.net_prior, bnn.net_guide, closed_form_kl=False).kl for _ in range(600)]
        )
    assert exact[0] == pytest.approx(exact[1], rel=1e-12)  # not drawn
    assert abs(float(kls.mean()) - exact[0]) < 4 * float(kls.std()) / 600**0.5


def test_a_posterior_per_layer_with_a_prior_over_all_layers():
    # Of several joint posteriors under one joint prior the KL is estimated at the draw.
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 4))
    bnn = vcl(INDUCING["AutoInducing, diagonal"], net)
    joint, prior = joint_prior(net)
    bnn.update_prior(prior)
    torch.manual_seed(3)
    kl = elbo_terms(bnn.net_prior, bnn.net_guide).kl
    torch.manual_seed(3)
    trace = poutine.trace(bnn.net_guide).get_trace()
    values = {name: trace.nodes[name]["value"] for name in joint.names}
    expected = trace.log_prob_sum() - joint.log_prob(joint.join(values))
    torch.testing.assert_close(kl, expected, **EXACT)


def test_no_weight_is_drawn_where_the_kl_has_a_closed_form():
    net = small_net()
    bnn = vcl(GUIDES["AutoNormal"], net)
    bnn.update_prior(joint_prior(net)[1])
    with tyxe.poutine.local_reparameterization():
        terms = elbo_terms(bnn.model, bnn.guide, torch.randn(5, 2), torch.randn(5, 1))
        assert not any(draw.was_drawn for draw in terms.values.values())
        drawn = elbo_terms(
            bnn.model, bnn.guide, torch.randn(5, 2), torch.randn(5, 1), closed_form_kl=False
        )
        assert all(draw.was_drawn for draw in drawn.values.values())


def test_the_potential_of_mcmc_is_that_of_the_model():
    net = small_net()
    joint, prior = joint_prior(net)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(5, scale=NOISE)
    bnn = tyxe.MCMC_BNN(net, prior, likelihood, NUTS)
    data = torch.randn(5, 2), torch.randn(5, 1)
    values = joint.separate(torch.randn(joint.event_shape))
    _, potential, transforms, _ = initialize_model(bnn.model, data)
    torch.testing.assert_close(
        Potential(bnn, *data, transforms)(values), potential(values), **EXACT
    )
    bnn.fit([data], 3, warmup_steps=2, disable_progbar=True)


def test_a_new_bnn_may_start_with_a_joint_prior():
    net = small_net()
    joint, prior = joint_prior(net)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(5, scale=NOISE)
    below = tyxe.guides.scale_below_prior(0.0)
    builder = functools.partial(tyxe.guides.AutoNormal, init_scale=below)
    bnn = tyxe.VariationalBNN(net, prior, likelihood, builder)
    means = joint.separate(joint.mean)
    scales = joint.separate(joint.variance.sqrt())
    for name, q in bnn.net_guide.get_detached_distributions().items():
        torch.testing.assert_close(q.mean, means[f"net.{name}"])
        torch.testing.assert_close(q.stddev, scales[f"net.{name}"])
    other = copy.deepcopy(bnn)
    other.load_state_dict(bnn.state_dict())
    assert other.float().net_prior.joints()[0].loc.dtype == torch.float32


@pytest.mark.parametrize("guide", GUIDES)
def test_every_guide_may_be_built_on_a_joint_prior(guide):
    net = small_net()
    _, prior = joint_prior(net)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(5, scale=NOISE)
    data = [(torch.randn(5, 2), torch.randn(5, 1))]
    bnn = tyxe.VariationalBNN(net, prior, likelihood, GUIDES[guide])
    history = bnn.fit(data, torch.optim.Adam, 1, progress=False)
    assert torch.isfinite(torch.tensor(history.loss[0]))
    if guide in SPREAD:
        four_lines(bnn)


# ------------------------------------------------------------------ bad input


def rejects(bnn, prior, error, match):
    before = [id(entry) for entry in bnn.net_prior._entries]
    held = bnn.prior
    with pytest.raises(error, match=match):
        bnn.update_prior(prior)
    assert [id(entry) for entry in bnn.net_prior._entries] == before
    assert bnn.prior is held


def test_some_sites_of_a_joint_prior_name_the_missing_ones():
    net = small_net()
    bnn = vcl(GUIDES["AutoNormal"], net)
    joint, prior = joint_prior(net)
    some = {**prior.dist_dict, "net.2.bias": dist.Normal(0.0, 1.0).expand([1])}
    rejects(bnn, DictPrior(some), ValueError, r"2\.weight have it, and net\.2\.bias not")
    larger = JointNormal(
        [*joint.groups, PlainGroup("net.4.bias", torch.Size([1]))],
        torch.zeros(14),
        Diagonal(torch.ones(14)),
    )
    rejects(
        bnn,
        DictPrior({name: larger.marginal(name) for name in joint.names}),
        ValueError,
        r"and net\.4\.bias not. Ask for all of them: get_detached_distributions",
    )


def test_joint_posteriors_of_other_sites_or_shapes_are_refused():
    bnn = vcl(GUIDES["AutoNormal"], small_net())
    other = vcl(net=nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)))
    posterior = other.net_guide.get_detached_distributions()
    rejects(bnn, DictPrior(posterior), ValueError, r"'0\.weight' has shape \(4, 2\), but the param")
    one = vcl(net=nn.Linear(2, 1)).net_guide.get_detached_distributions()
    rejects(bnn, DictPrior(one), ValueError, r"no entry for '0\.weight'; it has weight, bias")
    joint, prior = joint_prior(small_net())
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(5, scale=NOISE)
    named = tyxe.VariationalBNN(
        small_net(), normal_prior(), likelihood, tyxe.guides.AutoNormal, name="a"
    )
    by_own_name = {n.removeprefix("net."): joint.marginal(n) for n in joint.names}
    rejects(named, DictPrior(by_own_name), ValueError, r"'a\.net\.0\.weight' is that of 'net\.0")
    swapped = {n.removeprefix("net."): q for n, q in prior.dist_dict.items()}
    square = vcl(GUIDES["AutoNormal"], nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    joint, _ = joint_prior(square.net)
    swapped = {n.removeprefix("net."): joint.marginal(n) for n in joint.names}
    swapped["0.weight"], swapped["1.weight"] = swapped["1.weight"], swapped["0.weight"]
    rejects(square, DictPrior(swapped), ValueError, "give the marginals by their own names")


@pytest.mark.parametrize("kind", ["variational", "laplace"])
def test_no_prior_update_within_a_fit(kind):
    net, data = small_net(), [(torch.randn(5, 2), torch.randn(5, 1))]
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(5, scale=NOISE)
    if kind == "laplace":
        bnn = tyxe.LaplaceBNN(net, normal_prior(), likelihood)
    else:
        bnn = tyxe.VariationalBNN(net, normal_prior(), likelihood, tyxe.guides.AutoNormal)
    copies = []

    def callback(bnn, epoch, loss):
        copies.append(copy.deepcopy(bnn))
        rejects(bnn, normal_prior(), RuntimeError, "cannot be updated within a fit")

    bnn.fit(data, torch.optim.Adam, 2, callback=callback, progress=False)
    assert len(copies) == 2
    # After it, and in a copy that a callback made, it can.
    for one in (bnn, *copies):
        one.update_prior(normal_prior())

    def fails(bnn, epoch, loss):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bnn.fit(data, torch.optim.Adam, 2, callback=fails, progress=False)
    bnn.update_prior(normal_prior())


def test_one_site_of_a_joint_prior_cannot_be_scaled():
    net = small_net()
    bnn = vcl(GUIDES["AutoNormal"], net)
    bnn.update_prior(joint_prior(net)[1])
    with (
        pytest.raises(ValueError, match="cannot be scaled one by one: expose all of them"),
        tyxe.poutine.selective_scale(scale=0.5, expose=["0.weight"]),
    ):
        elbo_terms(bnn.net_prior, bnn.net_guide)
    full = elbo_terms(bnn.net_prior, bnn.net_guide).kl.item()
    names = list(bnn.net_prior.names())
    with tyxe.poutine.selective_scale(scale=0.5, expose=names):
        assert elbo_terms(bnn.net_prior, bnn.net_guide).kl.item() == pytest.approx(full / 2)


def test_sizes_of_a_joint_normal_have_to_fit():
    group = PlainGroup("w", torch.Size([3]))
    with pytest.raises(ValueError, match="2 means for sites of 3 weights"):
        JointNormal([group], torch.zeros(2), Diagonal(torch.ones(3)))
    with pytest.raises(ValueError, match="2 rows of precision for sites of 3 weights"):
        JointNormal([group], torch.zeros(3), Diagonal(torch.ones(2)))


def test_the_density_of_one_large_site_alone_is_refused(monkeypatch):
    monkeypatch.setattr("tyxe.distributions.joint_normal.SMALL", 2)
    q = JOINTS["Dense"]().marginal("w")
    with pytest.raises(ValueError, match=r"ask for that of all sites, joint\.log_prob"):
        q.log_prob(q.mean)
