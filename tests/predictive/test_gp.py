"""The Gaussian-process predictive against the dense Laplace covariance."""

import functools

import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.bnns import NORMAL, mean_field
from tests.oracles.laplace import STRUCTURES, laplace_bnn
from tests.oracles.nets import NetOf
from tyxe.curvature import jacobian
from tyxe.laplace.precision import independent_terms
from tyxe.likelihoods import output_hessian
from tyxe.predictive.linear_model import Features, GPPredictive, Part, hessian_root, output_features

TIGHT = {"rtol": 1e-8, "atol": 1e-8}
LIKELIHOODS = {
    "gaussian": (lambda: tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.3), (3,)),
    "categorical": (lambda: tyxe.likelihoods.Categorical(6), (3,)),
    "pixels": (lambda: tyxe.likelihoods.Categorical(6), (2, 3)),
    "bernoulli": (lambda: tyxe.likelihoods.Bernoulli(6), (2,)),
    "poisson": (lambda: tyxe.likelihoods.Poisson(6), ()),
    "heteroskedastic": (lambda: tyxe.likelihoods.HeteroskedasticGaussian(6), (2,)),
}


pytestmark = pytest.mark.usefixtures("double")


def dense_covariance(jacobian, hessians, prior, test):
    """`J* (sum J^T H J + P0)^-1 J*^T` of all outputs of all points, by a loop over points."""
    precision = prior.diag()
    for j, blocks in zip(jacobian, hessians, strict=True):
        precision = precision + j.mT @ torch.block_diag(*blocks) @ j
    rows = test.flatten(0, 1)
    full = rows @ torch.linalg.inv(precision) @ rows.mT
    return full.view(*test.shape[:2], *test.shape[:2])


def within(joint):
    """Each point's own block of a joint covariance."""
    return torch.stack([joint[n, :, n] for n in range(len(joint))])


def features_of(jacobian, prior):
    return Features((Part(jacobian * prior.rsqrt()),))


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_on_all_data_it_is_the_full_laplace_covariance(name, factor):
    make, shape = LIKELIHOODS[name]
    likelihood, outputs = make(), torch.randn(6, *shape)
    size = outputs[0].numel()
    train, test, prior = torch.randn(6, size, 9), torch.randn(4, size, 9), 0.1 + torch.rand(9)
    gp = GPPredictive(features_of(train, prior), hessian_root(likelihood, outputs), factor)
    expected = dense_covariance(train, output_hessian(likelihood, outputs), factor * prior, test)
    torch.testing.assert_close(gp.covariance(features_of(test, prior)), within(expected), **TIGHT)


def test_single_precision_survives_the_cancellation():
    # Prior variances of about 1e6, posterior ones of about 1e-4.
    train, prior = torch.randn(50, 1, 4).float(), torch.full((4,), 1e-6).float()
    root = torch.full((50, 1, 1), 10.0).float()
    features = features_of(train, prior)
    found = GPPredictive(features, root).covariance(features).flatten()
    rows = train[:, 0].double()
    precision = 100.0 * rows.mT @ rows + 1e-6 * torch.eye(4)
    expected = (rows @ torch.linalg.inv(precision) * rows).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.0)


# ------------------------------------------------------------------ features of nets


def conv():
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3)
    )


NETS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (6, 3)),
    "conv": (conv, (6, 1, 4, 4)),
    "pixels": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), (6, 2, 3)),
}


def by_parameter(scales):
    """A prior whose standard deviations are a function of name and parameter."""

    def make(net):
        named = net.named_parameters()
        return tyxe.priors.DictPrior(
            {n: dist.Normal(0 * p.detach(), scales(n, p)).to_event(p.dim()) for n, p in named}
        )

    return make


PRIORS = {
    "one": lambda net: tyxe.priors.IIDPrior(dist.Normal(0.0, 1.3)),
    "by parameter": by_parameter(lambda name, p: 0.5 + torch.rand(p.shape)),
    "bias": by_parameter(lambda name, p: torch.full(p.shape, 2.0 if "bias" in name else 0.5)),
}


def made(net="mlp", prior="one", likelihood=None, **options):
    make, shape = NETS[net]
    module, x = make().eval(), torch.randn(shape)
    y = torch.randint(0, 3, module(x).shape[:-1])
    if likelihood is None:
        likelihood = tyxe.likelihoods.Categorical(len(x))
    else:
        y = torch.randn(module(x).shape)
    options = {"structure": "full", **options}
    bnn = laplace_bnn(module, PRIORS[prior](module), likelihood, **options)
    return bnn.eval(), x, y


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("net", NETS)
def test_features_of_nets_are_those_of_the_jacobian(net, prior):
    bnn, x, _ = made(net, prior)
    linear, other = bnn._linearize(x[:4]), bnn._linearize(x[4:])
    _, precision = independent_terms(bnn._gaussian_prior(bnn.net_prior, linear.blocks))
    pieces = [output_features(part, precision) for part in (linear, other)]
    factored = sum(part.a is not None for part in pieces[0].parts)
    # A prior that differs between the rows of a weight leaves no outer product.
    expected = {"mlp": 2, "conv": 1, "pixels": 0}[net] if prior != "by parameter" else 0
    assert factored == expected
    both = Features.cat(pieces)
    outputs = linear.outputs[0].numel()
    dense = features_of(torch.cat([jacobian(linear), jacobian(other)]), precision)
    root, kernel = torch.randn(6, outputs, 2), dense.kernel(dense)
    torch.testing.assert_close(both.kernel(pieces[1]), kernel[:, 4 * outputs :], **TIGHT)
    blocks = within(kernel.view(6, outputs, 6, outputs))
    torch.testing.assert_close(both.blocks(), blocks, **TIGHT)
    torch.testing.assert_close(
        both.mixed(root).kernel(both), dense.mixed(root).kernel(dense), **TIGHT
    )


# ------------------------------------------------------------------ for users


@pytest.mark.parametrize("temperature", [1.0, 0.4])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("gaussian", [True, False])
def test_all_points_give_glm_with_the_full_curvature(net, gaussian, temperature):
    noise = tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.3) if gaussian else None
    bnn, x, y = made(net, "bias", noise, temperature=temperature)
    bnn.fit_curvature([(x, y)])
    bnn.fit_gp([(x[:2], y[:2]), (x[2:], y[2:])])
    test = torch.randn(5, *x.shape[1:])
    options = {"link": "probit", "batch_size": 3}
    found = bnn.predict(test, predictive="gp", **options)
    expected = bnn.predict(test, predictive="glm", **options)
    torch.testing.assert_close(found, expected, **TIGHT)
    torch.testing.assert_close(
        bnn.evaluate(x, y, predictive="gp", link="probit"),
        bnn.evaluate(x, y, predictive="glm", link="probit"),
        **TIGHT,
    )


def test_a_subset_scales_the_prior():
    bnn, x, y = made(likelihood=tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.3))
    bnn.fit_curvature([(x, y)])
    torch.manual_seed(3)
    bnn.fit_gp([(x, y)], num_points=2, factor=5.0)
    torch.manual_seed(3)
    chosen = torch.randperm(6)[:2]
    linear, train = bnn._linearize(x), bnn._linearize(x[chosen])
    _, prior = independent_terms(bnn.state.prior)
    prior = prior * 3 * 5.0
    hessians = output_hessian(bnn.likelihood, train.outputs.detach())
    joint = dense_covariance(jacobian(train), hessians, prior, jacobian(linear))
    _, scale = bnn.predict(x, predictive="gp")
    variance = within(joint).diagonal(dim1=-2, dim2=-1) + 0.09
    torch.testing.assert_close(scale, variance.sqrt(), **TIGHT)


def test_an_argument_without_rows_stays_whole_in_a_subset():
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(6, scale=0.3)
    x, y, shift = torch.randn(6, 2), torch.randn(6, 1), torch.tensor(0.5)
    net = NetOf(lambda net, x, shift: net.layer(x) + shift, layer=nn.Linear(2, 1))
    bnn = tyxe.LaplaceBNN(net, NORMAL, likelihood)
    bnn.fit_curvature([((x, shift), y)])
    bnn.fit_gp([((x, shift), y)], num_points=4)
    assert [len(bnn._gp_on_subset.inputs[0]), bnn._gp_on_subset.inputs[1]] == [4, shift]
    mean, scale = bnn.predict(x, shift, predictive="gp")
    assert mean.shape == scale.shape == y.shape


def test_it_follows_prior_and_weights():
    bnn, x, y = made()
    bnn.fit_curvature([(x, y)])
    bnn.fit_gp([(x, y)])
    draws = bnn.predict(x, predictive="gp", num_predictions=7, aggregate=False)
    assert draws.shape == (7, 6, 3)
    before = bnn.predict(x, predictive="gp", link="probit")
    assert torch.equal(bnn.predict(x, predictive="gp", link="probit"), before)
    bnn.update_prior(tyxe.priors.IIDPrior(dist.Normal(0.0, 0.4)))
    after = bnn.predict(x, predictive="gp", link="probit")
    assert not torch.allclose(after, before)
    torch.testing.assert_close(after, bnn.predict(x, link="probit"), **TIGHT)
    bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=0.1), 3)
    torch.testing.assert_close(
        bnn.predict(x, predictive="gp", link="probit"), bnn.predict(x, link="probit"), **TIGHT
    )


def test_the_net_in_half_precision_is_another_one():
    bnn, x, y = made()
    bnn, x = bnn.float(), x.float()
    bnn.fit_curvature([(x, y)])
    bnn.fit_gp([(x, y)])
    with torch.autocast("cpu", torch.bfloat16):
        half = bnn.predict(x, predictive="gp", link="probit")
    found = bnn.predict(x, predictive="gp", link="probit")
    bnn.fit_gp([(x, y)])
    assert torch.equal(found, bnn.predict(x, predictive="gp", link="probit"))
    assert not torch.equal(found, half)
    torch.testing.assert_close(half, found, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("net", NETS)
def test_the_joint_covariance_of_outputs(net, structure):
    bnn, x, y = made(net, structure=structure)
    bnn.fit_curvature([(x, y)])
    rows = jacobian(bnn._linearize(x)).flatten(0, 1)
    dense = rows @ torch.linalg.inv(bnn.net_guide.precision.to_dense()) @ rows.mT
    found = bnn.functional_variance(x, joint=True)
    shape = bnn.to_module()(x).shape
    assert found.shape == shape + shape
    torch.testing.assert_close(found.view_as(dense), dense, **TIGHT)
    if net != "pixels":
        torch.testing.assert_close(within(found), bnn.functional_variance(x), **TIGHT)


# ------------------------------------------------------------------ bad input


def test_bad_input():
    bnn, x, y = made()
    with pytest.raises(RuntimeError, match=r"no curvature yet"):
        bnn.fit_gp([(x, y)])
    bnn.fit_curvature([(x, y)])
    with pytest.raises(RuntimeError, match=r"needs some of the data: call fit_gp"):
        bnn.predict(x, predictive="gp")
    with pytest.raises(ValueError, match=r"num_points is 7; expected 1 to 6"):
        bnn.fit_gp([(x, y)], 7)
    with pytest.raises(ValueError, match=r"factor is -1.0; expected a number above 0"):
        bnn.fit_gp([(x, y)], factor=-1.0)
    with pytest.raises(RuntimeError, match=r"call fit_gp"):
        bnn.predict(x, predictive="gp")
    with pytest.raises(ValueError, match=r"predictive is 'gp'; expected one of 'bnn', 'glm', or"):
        mean_field(nn.Linear(3, 3), bnn.likelihood).predict(x, predictive="gp")


def test_a_kernel_matrix_too_large_is_refused_before_it_is_made():
    features = features_of(torch.ones(1, 1, 1).expand(50_000, 1, 1), torch.ones(1))
    with pytest.raises(ValueError, match=r"50,000 points with 1 columns each would take 18.6 GiB"):
        GPPredictive(features, torch.ones(1, 1, 1).expand(50_000, 1, 1))
