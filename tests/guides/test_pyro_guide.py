"""Guides of Pyro's and modules of one's own."""

import functools

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn
from pyro.infer import autoguide

import tyxe
from tests.oracles.programs import NORMAL, program
from tyxe.guides import AutoNormal, PyroGuide
from tyxe.guides.init import init_to_median


@pytest.mark.parametrize("prior", [NORMAL, dist.LogNormal(0.5, 1.0)])
def test_pyros_mean_field_guide_gives_its_posterior_and_not_a_draw(prior):
    ours = AutoNormal(program(prior=prior), init_loc_fn=init_to_median, init_scale=0.2)
    theirs = PyroGuide.build(
        functools.partial(autoguide.AutoNormal, init_scale=0.2, init_loc_fn=init_to_median),
        program(prior=prior),
    )
    expected = ours.get_detached_distributions()
    for name, q in theirs.get_detached_distributions().items():
        value = q.sample()
        torch.testing.assert_close(q.log_prob(value), expected[name].log_prob(value))


MIXTURE = dist.MixtureSameFamily(
    dist.Categorical(torch.ones(2)), dist.Normal(torch.zeros(2), torch.tensor([0.1, 1.0]))
)


@pytest.mark.parametrize("prior", [NORMAL, MIXTURE, dist.LogNormal(0.5, 1.0)])
@pytest.mark.parametrize(
    "builder", [autoguide.AutoGaussian, autoguide.AutoStructured, autoguide.AutoMultivariateNormal]
)
def test_pyros_guides_draw_from_any_support(builder, prior):
    sites = program(prior=prior)
    guide = PyroGuide.build(builder, sites)
    draw, median = guide(), guide.median()
    for name, value in sites().items():
        assert draw[name].shape == value.shape
        assert bool(torch.as_tensor(prior.support.check(median[name])).all())


def test_any_module_is_a_guide_and_a_function_is_none():
    class Fixed(nn.Module):
        def forward(self):
            q = dist.Normal(torch.ones(1, 1), 0.1).to_event(2)
            return {"net.weight": pyro.sample("net.weight", q)}

    sites = program(nn.Linear(1, 1, bias=False))
    guide = PyroGuide.build(lambda module: Fixed(), sites)
    assert guide()["net.weight"].shape == (1, 1)
    with pytest.raises(TypeError, match=r"Fixed has no median, .*: predict with num_predictions"):
        guide.median()
    # A function's pyro.param would live in the global store, where nothing trains it.
    with pytest.raises(TypeError, match="builder returned is a function; expected a module"):
        PyroGuide.build(lambda module: Fixed().forward.__func__, sites)


COUPLED = [autoguide.AutoIAFNormal, autoguide.AutoStructured, autoguide.AutoGaussian]


def variational(guide):
    prior = tyxe.priors.IIDPrior(NORMAL)
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(4, scale=0.5)
    return tyxe.VariationalBNN(nn.Linear(2, 1), prior, likelihood, guide)


@pytest.mark.parametrize("guide", COUPLED)
def test_guides_that_couple_sites_in_their_own_way_are_trained(guide):
    bnn = variational(guide)
    bnn.fit([(torch.ones(4, 2), torch.ones(4, 1))], torch.optim.Adam, 2)
    assert bnn.predict(torch.ones(3, 2), num_predictions=2, aggregate=False).shape == (2, 3, 1)
    with pytest.raises(TypeError, match=r"no distribution per site; use tyxe.guides.AutoNormal"):
        bnn.net_guide.get_detached_distributions()
    with pytest.raises(TypeError, match=r"has no (distribution|median)"):
        bnn.predict(torch.ones(3, 2), predictive="glm")


@pytest.mark.parametrize(
    "call",
    [
        lambda bnn: bnn.predict(torch.ones(3, 2), num_predictions=0),
        lambda bnn: bnn.evaluate(torch.ones(3, 2), torch.ones(3, 1), num_predictions=0),
        lambda bnn: bnn.to_module(),
        lambda bnn: bnn._mean_values(),
    ],
)
def test_a_guide_without_a_median_has_no_centre(call):
    bnn = variational(autoguide.AutoIAFNormal)
    with pytest.raises(TypeError, match=r"AutoIAFNormal has no median.*to_module\(sample=True\)"):
        call(bnn)
    assert bnn.to_module(sample=True)(torch.ones(3, 2)).shape == (3, 1)
