"""Initial values: their moments, medians, pre-trained ones, and what does not fit."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn as nn
from pyro.infer import autoguide
from scipy import stats

import tyxe
from tests.oracles.programs import program
from tyxe import guides
from tyxe.guides.init import init_to_median
from tyxe.util import fan_in_fan_out

LARGE = nn.Sequential(nn.Conv2d(16, 24, 5, groups=2), nn.Linear(100, 120))


def started(initializer, net=None, **options):
    return guides.AutoNormal(program(net, **options), init_loc_fn=initializer)


@pytest.mark.parametrize(
    ("initializer", "std_of"),
    [
        (guides.init_to_normal_radford, lambda fan_in, fan_out: fan_in**-0.5),
        (guides.init_to_normal_xavier, lambda fan_in, fan_out: (2 / (fan_in + fan_out)) ** 0.5),
        (guides.init_to_normal_kaiming, lambda fan_in, fan_out: (2 / fan_in) ** 0.5),
        (
            guides.init_to_normal_kaiming(nonlinearity="tanh"),
            lambda fan_in, fan_out: nn.init.calculate_gain("tanh") * fan_in**-0.5,
        ),
        (guides.init_to_normal(std=0.3), lambda fan_in, fan_out: 0.3),
        (guides.init_to_normal(), lambda fan_in, fan_out: 1.0),
        (guides.init_to_sample, lambda fan_in, fan_out: 1.0),
        (guides.init_to_sample(), lambda fan_in, fan_out: 1.0),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_initial_draws_have_their_standard_deviation(initializer, std_of, index):
    guide = started(initializer, LARGE)
    loc = guide.get_loc(f"{index}.weight").detach()
    expected = std_of(*fan_in_fan_out(LARGE[index].weight, LARGE[index]))
    n = loc.numel()
    assert abs(loc.mean()) < 6 * expected / math.sqrt(n)
    assert abs(loc.std() / expected - 1) < 6 / math.sqrt(2 * n)
    # A bias takes its layer's: pooled over both, there are enough.
    bias = guide.get_loc(f"{index}.bias").detach() / expected
    assert abs(bias.std() - 1) < 6 / math.sqrt(2 * len(bias))


@pytest.mark.parametrize(
    ("initializer", "value"),
    [
        (guides.init_to_zero, 0.0),
        (guides.init_to_zero(), 0.0),
        (guides.init_to_constant, 0.0),
        (guides.init_to_constant(constant=2.0), 2.0),
    ],
)
def test_fixed_initial_values(initializer, value):
    assert started(initializer).get_loc("weight").unique().tolist() == [value]


@pytest.mark.parametrize(
    ("prior", "median"),
    [
        (dist.Normal(1.5, 2.0), 1.5),
        (dist.Laplace(-1.0, 1.0), -1.0),
        (dist.StudentT(3.0, 0.5, 1.0), 0.5),
        (dist.Cauchy(2.0, 1.0), 2.0),
        (dist.LogNormal(0.7, 1.0), math.exp(0.7)),
        (dist.HalfCauchy(1.0), 1.0),
        (dist.Exponential(1.0), math.log(2.0)),
    ],
)
def test_medians_in_closed_form(prior, median):
    found = started(init_to_median, prior=prior).median()["net.weight"]
    torch.testing.assert_close(found, torch.full((2, 3), median), rtol=1e-5, atol=1e-6)


def test_medians_of_samples_where_there_is_no_closed_form():
    guide = started(init_to_median(num_samples=4000), prior=dist.Gamma(4.0, 2.0))
    reference = stats.gamma(4.0, scale=0.5)
    # The standard error of a sample median is 1 / (2 f(m) sqrt(n)).
    error = 1 / (2 * reference.pdf(reference.median()) * math.sqrt(4000))
    found = guide.median()["net.weight"]
    assert bool(((found - reference.median()).abs() < 6 * error).all())


def tied():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, second)


@pytest.mark.parametrize("prefix", ["net", ""])
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), tied])
def test_pretrained_values_in_either_spelling(prefix, make):
    net = make()
    guide = started(guides.PretrainedInitializer.from_net(net, prefix=prefix), make())
    for name, parameter in net.named_parameters():
        assert torch.equal(guide.get_loc(name), parameter)
        assert guide.get_loc(name).data_ptr() != parameter.data_ptr()


def test_pretrained_values_follow_the_site_and_not_the_net():
    net = nn.Linear(3, 2).double()
    start = guides.PretrainedInitializer.from_net(net)
    before = net.weight.detach().clone()
    with torch.no_grad():
        net.weight.zero_()
    found = started(start).get_loc("weight")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), before, rtol=1e-6, atol=1e-7)


def test_pretrained_values_of_single_weights_are_parts_of_the_whole_tensors():
    net, trained = nn.Linear(4, 3), nn.Linear(4, 3)
    prior = tyxe.priors.SubnetworkPrior(tyxe.priors.IIDPrior(dist.Normal(0.0, 1.0)), 6, "random")
    start = guides.PretrainedInitializer.from_net(trained)
    noise = tyxe.likelihoods.HomoskedasticGaussian(1, scale=1.0)
    for guide in (guides.AutoNormal, autoguide.AutoNormal):
        builder = functools.partial(guide, init_loc_fn=start)
        found = tyxe.VariationalBNN(net, prior, noise, builder).net_guide.median()
        for name, elements in prior.elements(net).items():
            expected = trained.get_parameter(name).take(elements)
            torch.testing.assert_close(found[f"net.{name}"], expected)


def test_pretrained_values_of_constrained_sites_are_values():
    value = torch.rand(2, 3) + 0.5
    start = guides.PretrainedInitializer({"weight": value})
    guide = started(start, nn.Linear(3, 2, bias=False), prior=dist.Gamma(1.0, 1.0))
    torch.testing.assert_close(guide.median()["net.weight"], value)


@pytest.mark.parametrize(
    "builder",
    [
        guides.AutoNormal,
        guides.AutoRadial,
        autoguide.AutoDelta,
        autoguide.AutoLowRankMultivariateNormal,
        functools.partial(autoguide.AutoNormal, init_scale=0.2),
    ],
)
def test_guides_start_at_the_net(builder):
    net = nn.Linear(3, 2)
    guide = guides.PyroGuide.build(builder, program(net))
    for name, value in net.named_parameters():
        torch.testing.assert_close(guide.median()[f"net.{name}"], value.detach())


@pytest.mark.parametrize("builder", [guides.AutoNormal, autoguide.AutoNormal])
def test_what_the_net_has_no_allowed_value_for_starts_at_the_median(builder):
    net = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        for row, value in zip(net.weight, [0.3, -0.3, 0.0], strict=True):  # 0 is the bound
            row.fill_(value)
    guide = guides.PyroGuide.build(builder, program(net, dist.HalfCauchy(1.0)))
    expected = torch.tensor([[0.3], [1.0], [1.0]]).expand(3, 3)
    torch.testing.assert_close(guide.median()["net.weight"], expected)


def test_a_site_outside_of_the_net_starts_at_the_median():
    precision = guides.AutoNormal(lambda: pyro.sample("precision", dist.LogNormal(0.7, 1.0)))
    assert precision.median()["precision"].item() == pytest.approx(math.exp(0.7))
    assert precision.get_scale("precision").item() == pytest.approx(0.1)


def test_scales_start_below_the_weights():
    net = nn.Sequential(nn.Linear(100, 120), nn.Linear(120, 5), nn.Embedding(9, 4))
    with torch.no_grad():
        net[1].weight.mul_(0.1)
        net[1].bias.zero_()
        net[2].weight.fill_(0.02)
    guide = guides.AutoNormal(program(net))
    expected = {
        "0.weight": 0.05 * net[0].weight.square().mean().sqrt().item(),
        "1.weight": 0.05 * net[1].weight.square().mean().sqrt().item(),
        "1.bias": 0.05 / 120**0.5,
        "2.weight": 0.05 * 0.02,
    }
    for name, scale in expected.items():
        found = guide.get_scale(name).detach()
        torch.testing.assert_close(found, torch.full_like(found, scale))
    capped = guides.AutoNormal(program(net), max_guide_scale=1e-3)
    torch.testing.assert_close(capped.get_scale("1.bias").detach(), torch.full((5,), 5e-4))
