"""Guides: the contract, mean-field parameters, initial values, the radial posterior."""

import functools
import itertools
import math
import pickle
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from pyro.infer import autoguide
from scipy import integrate, stats

import tyxe
from tyxe.guides import (
    AutoNormal,
    AutoRadial,
    Guide,
    PretrainedInitializer,
    PyroGuide,
    Radial,
    init_to_constant,
    init_to_median,
    init_to_normal,
    init_to_normal_kaiming,
    init_to_normal_radford,
    init_to_normal_xavier,
    init_to_sample,
    init_to_zero,
)
from tyxe.priors import IIDPrior, SitePriors
from tyxe.testing import GUIDES, check_guide
from tyxe.util import fan_in_fan_out

NORMAL = dist.Normal(0.0, 1.0)


def program(net=None, prior=NORMAL, **rules):
    net = nn.Linear(3, 2) if net is None else net
    return SitePriors(IIDPrior(prior, **rules).sites(net), net)


@pytest.mark.parametrize("builder", GUIDES.values(), ids=GUIDES.keys())
def test_contract(builder):
    check_guide(builder)


@pytest.mark.parametrize("builder", GUIDES.values(), ids=GUIDES.keys())
def test_contract_on_positive_sites(builder):
    # Their transforms: every guide is a density on the support.
    check_guide(builder, program(nn.Linear(3, 2).double(), dist.Gamma(2.0, 2.0)))


class AutoLaplace(Guide):
    """Laplaces of scale 1."""

    def __init__(self, module):
        super().__init__(module)
        self.locs = tyxe.util.SiteTensors(
            {site.own_name: torch.zeros(site.shape) for site in self.sites}
        )

    def site_distribution(self, site):
        loc = self.locs[site.own_name]
        return dist.Laplace(loc, torch.ones_like(loc)).to_event(loc.dim())


def build_double(module):
    return AutoLaplace(module).double()


class Silent(AutoNormal):
    """Draws that Pyro does not hear of."""

    def forward(self, *args, **kwargs):
        return {name: q.rsample() for name, q in self.posterior().items()}


class Attached(AutoNormal):
    """Distributions that move on with the guide."""

    def get_detached_distributions(self, site_names=None):
        return {site.own_name: self.site_distribution(site) for site in self.sites}


class Unkind(AutoNormal):
    """No kinds of parameters."""

    def parameter_kinds(self):
        return {}


def test_contract_of_a_guide_of_ones_own():
    check_guide(build_double)


@pytest.mark.parametrize(
    ("faulty", "match"),
    [
        (Silent, "the guide samples"),
        (Attached, "has a gradient"),
        (Unkind, "parameter_kinds leaves out"),
    ],
)
def test_the_contract_finds_faults(faulty, match):
    with pytest.raises(AssertionError, match=match):
        check_guide(faulty)


def test_guides_need_sites():
    with pytest.raises(ValueError, match="the prior exposes none: expose some, or pass no guide"):
        AutoNormal(program(hide_all=True))


def test_discrete_sites_are_refused():
    with pytest.raises(ValueError, match=r"'net.weight' is discrete"):
        AutoNormal(program(prior=dist.Poisson(1.0)))


def test_a_builder_has_to_build_a_guide():
    with pytest.raises(TypeError, match="builder returned a int; expected a module"):
        PyroGuide.build(lambda module: 3, program())


# --- AutoNormal ---------------------------------------------------------------------------------


def test_one_mean_and_scale_for_each_weight_in_either_spelling():
    guide = AutoNormal(program(), init_loc_fn=init_to_constant(constant=0.5), init_scale=0.2)
    for name in ("weight", "net.weight"):
        assert torch.equal(guide.get_loc(name), torch.full((2, 3), 0.5))
        torch.testing.assert_close(guide.get_scale(name), torch.full((2, 3), 0.2))
    with pytest.raises(ValueError, match="no site 'wieght'; the sites are weight, bias"):
        guide.get_loc("wieght")
    q = guide.posterior()["net.weight"]
    assert isinstance(q.base_dist, td.Normal)
    assert guide.parameter_kinds() == {
        "locs.weight": "loc",
        "locs.bias": "loc",
        "unconstrained_scales.weight": "scale",
        "unconstrained_scales.bias": "scale",
    }


@pytest.mark.parametrize("cap", [None, 0.5])
def test_what_is_not_trained_has_no_gradient(cap):
    fixed = AutoNormal(program(), train_loc=False, max_guide_scale=cap)
    assert [n for n, p in fixed.named_parameters() if p.requires_grad] == [
        "unconstrained_scales.weight",
        "unconstrained_scales.bias",
    ]
    fixed = AutoNormal(program(), train_scale=False, max_guide_scale=cap)
    assert [n for n, p in fixed.named_parameters() if p.requires_grad] == [
        "locs.weight",
        "locs.bias",
    ]


def scale_of(unconstrained, cap):
    """The scale at a value of its unconstrained parameter."""
    guide = AutoNormal(
        program(nn.Linear(1, 1, bias=False).double()), init_scale=1e-3, max_guide_scale=cap
    )
    parameter = guide.unconstrained_scales["weight"]
    with torch.no_grad():
        parameter.fill_(unconstrained)
    scale = guide.get_scale("weight")
    (gradient,) = torch.autograd.grad(scale.sum(), [parameter])
    return scale.item(), gradient.item()


def test_the_cap_is_smooth_and_has_a_gradient_everywhere():
    cap = 0.3
    grid = torch.linspace(-30.0, 12.0, 200).tolist()
    scales, gradients = zip(*(scale_of(r, cap) for r in grid), strict=True)
    assert all(0 < scale <= cap for scale in scales)
    assert all(a < b for a, b in itertools.pairwise(scales))
    assert all(gradient > 0 for gradient in gradients)
    step = 1e-6
    for r in (-5.0, 0.0, 3.0):
        slope = (scale_of(r + step, cap)[0] - scale_of(r - step, cap)[0]) / (2 * step)
        assert slope == pytest.approx(scale_of(r, cap)[1], rel=1e-7)
    # Just below the cap the gradient is what is left of the room, not zero.
    r = math.log(999.0)
    assert scale_of(r, cap)[0] == pytest.approx(0.999 * cap)
    assert scale_of(r, cap)[1] == pytest.approx(cap * 0.999 * 0.001)
    # Far below it the scale is an exponential.
    assert scale_of(-20.0, cap)[0] / scale_of(-21.0, cap)[0] == pytest.approx(math.e, rel=1e-6)


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("scale", [1e-8, 1e-4, 0.1, 0.49])
def test_scales_start_where_they_are_told(cap, scale):
    guide = AutoNormal(program(nn.Linear(3, 2).double()), init_scale=scale, max_guide_scale=cap)
    torch.testing.assert_close(
        guide.get_scale("weight").detach(), torch.full((2, 3), scale).double(), rtol=1e-6, atol=0
    )


def test_scales_may_start_by_site():
    def by_fan_in(site):
        return 0.1 * site["infer"]["fans"][0] ** -0.5

    guide = AutoNormal(program(nn.Linear(4, 2)), init_scale=by_fan_in)
    for name in ("weight", "bias"):
        torch.testing.assert_close(guide.get_scale(name).unique(), torch.tensor([0.05]))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"init_scale": 0.0}, "init_scale is 0.0; expected positive"),
        ({"init_scale": -1.0}, "expected positive"),
        ({"init_scale": float("nan")}, "expected positive"),
        ({"init_scale": 0.5, "max_guide_scale": 0.5}, "is not below max_guide_scale 0.5"),
        ({"init_scale": 1.0, "max_guide_scale": 0.5}, "is not below max_guide_scale 0.5"),
    ],
)
@pytest.mark.parametrize("guide", [AutoNormal, AutoRadial])
def test_impossible_scales_are_refused(guide, options, match):
    with pytest.raises(ValueError, match=match):
        guide(program(), **options)


@pytest.mark.parametrize(
    "prior", [dist.LogNormal(0.0, 1.0), dist.Gamma(2.0, 1.0), dist.Beta(2.0, 2.0)]
)
@pytest.mark.parametrize("guide", [AutoNormal, AutoRadial])
def test_constrained_posteriors_are_densities(guide, prior):
    guide = guide(program(nn.Linear(1, 1, bias=False).double(), prior), init_scale=0.4)
    q = guide.posterior()["net.weight"]
    upper = 1.0 if isinstance(prior, td.Beta) else math.inf
    mass, _ = integrate.quad(
        lambda w: q.log_prob(torch.full((1, 1), w, dtype=torch.float64)).exp().item(),
        0.0,
        upper,
        limit=200,
    )
    assert mass == pytest.approx(1.0, abs=1e-6)


def test_constrained_sites_over_several_weights_have_the_jacobian_once_each():
    guide = AutoNormal(program(nn.Linear(3, 2).double(), dist.Gamma(2.0, 1.0)))
    q = guide.posterior()["net.weight"]
    value = q.sample()
    loc, scale = guide.get_loc("weight"), guide.get_scale("weight")
    expected = td.LogNormal(loc, scale).log_prob(value).sum()
    torch.testing.assert_close(q.log_prob(value), expected)
    assert q.event_shape == (2, 3)
    torch.testing.assert_close(guide.median()["net.weight"], loc.detach().exp())


def test_detached_distributions_stay_when_the_guide_moves_on():
    guide = AutoNormal(program())
    before = guide.get_detached_distributions(["weight"])["weight"]
    mean = before.mean.clone()
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(1.0)
    assert torch.equal(before.mean, mean)
    assert not torch.equal(guide.get_loc("weight"), mean)
    pickle.loads(pickle.dumps(before))


# --- Pyro's guides ------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [NORMAL, dist.LogNormal(0.5, 1.0)])
def test_pyros_mean_field_guide_gives_its_posterior_and_not_a_draw(prior):
    ours = AutoNormal(program(prior=prior), init_scale=0.2)
    theirs = PyroGuide.build(
        functools.partial(autoguide.AutoNormal, init_scale=0.2, init_loc_fn=init_to_median),
        program(prior=prior),
    )
    expected = ours.get_detached_distributions()
    for name, q in theirs.get_detached_distributions().items():
        value = q.sample()
        torch.testing.assert_close(q.log_prob(value), expected[name].log_prob(value))


def test_a_guide_that_is_no_normal_has_no_distribution_for_one_site():
    guide = PyroGuide.build(autoguide.AutoIAFNormal, program())
    with pytest.raises(TypeError, match=r"no distribution per site; use tyxe.guides.AutoNormal"):
        guide.get_detached_distributions()


def test_any_module_is_a_guide_and_a_function_is_none():
    net = nn.Linear(1, 1, bias=False)
    fixed = program(net)

    class Fixed(nn.Module):
        def forward(self):
            q = dist.Normal(torch.ones(1, 1), 0.1).to_event(2)
            return {"net.weight": pyro.sample("net.weight", q)}

    guide = PyroGuide.build(lambda module: Fixed(), fixed)
    assert guide()["net.weight"].shape == (1, 1)
    with pytest.raises(TypeError, match="Fixed has no median; predict with num_predictions >= 1"):
        guide.median()
    # A function's pyro.param would live in the global store, where nothing trains it.
    with pytest.raises(TypeError, match="builder returned a function; expected a module"):
        PyroGuide.build(lambda module: Fixed().forward.__func__, fixed)


# --- initial values -------------------------------------------------------------------------------

LARGE = nn.Sequential(nn.Conv2d(16, 24, 5, groups=2), nn.Linear(100, 120))


@pytest.mark.parametrize(
    ("initializer", "std_of"),
    [
        (init_to_normal_radford, lambda fan_in, fan_out: fan_in**-0.5),
        (init_to_normal_xavier, lambda fan_in, fan_out: (2 / (fan_in + fan_out)) ** 0.5),
        (init_to_normal_kaiming, lambda fan_in, fan_out: (2 / fan_in) ** 0.5),
        (
            init_to_normal_kaiming(nonlinearity="tanh"),
            lambda fan_in, fan_out: nn.init.calculate_gain("tanh") * fan_in**-0.5,
        ),
        (init_to_normal(std=0.3), lambda fan_in, fan_out: 0.3),
        (init_to_normal(), lambda fan_in, fan_out: 1.0),
        (init_to_sample, lambda fan_in, fan_out: 1.0),
        (init_to_sample(), lambda fan_in, fan_out: 1.0),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_initial_draws_have_their_standard_deviation(initializer, std_of, index):
    guide = AutoNormal(program(LARGE), init_loc_fn=initializer)
    loc = guide.get_loc(f"{index}.weight").detach()
    expected = std_of(*fan_in_fan_out(LARGE[index].weight, LARGE[index]))
    n = loc.numel()
    assert abs(loc.mean()) < 6 * expected / math.sqrt(n)
    assert abs(loc.std() / expected - 1) < 6 / math.sqrt(2 * n)
    # A bias takes its layer's: pooled over both, there are enough.
    bias = guide.get_loc(f"{index}.bias").detach() / expected
    assert abs(bias.std() - 1) < 6 / math.sqrt(2 * len(bias))


def test_fixed_initial_values():
    for initializer, value in (
        (init_to_zero, 0.0),
        (init_to_zero(), 0.0),
        (init_to_constant(constant=2.0), 2.0),
    ):
        guide = AutoNormal(program(), init_loc_fn=initializer)
        assert guide.get_loc("weight").unique().tolist() == [value]
    assert AutoNormal(program(), init_loc_fn=init_to_constant).get_loc("bias").unique() == 0.0


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
    guide = AutoNormal(program(prior=prior))
    torch.testing.assert_close(
        guide.median()["net.weight"], torch.full((2, 3), median), rtol=1e-5, atol=1e-6
    )


def test_medians_of_samples_where_there_is_no_closed_form():
    guide = AutoNormal(
        program(prior=dist.Gamma(4.0, 2.0)), init_loc_fn=init_to_median(num_samples=4000)
    )
    reference = stats.gamma(4.0, scale=0.5)
    # The standard error of a sample median is 1 / (2 f(m) sqrt(n)).
    error = 1 / (2 * reference.pdf(reference.median()) * math.sqrt(4000))
    found = guide.median()["net.weight"]
    assert bool(((found - reference.median()).abs() < 6 * error).all())


def test_layerwise_starts_need_a_layer():
    def prior(name, module, param):
        return lambda: dist.Normal(
            pyro.sample("m", dist.Normal(param.new_zeros(()), 1.0)), 1.0
        ).expand(param.shape)

    net = nn.Linear(2, 1, bias=False)
    hierarchy = SitePriors(tyxe.priors.LambdaPrior(prior).sites(net), net)
    with pytest.raises(ValueError, match=r"'net.m' belongs to no layer, so it has no fan-in"):
        AutoNormal(hierarchy, init_loc_fn=init_to_normal_radford)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("prefix", ["net", ""])
@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), Tied])
def test_pretrained_values_in_either_spelling(prefix, make):
    net = make()
    start = PretrainedInitializer.from_net(net, prefix=prefix)
    guide = AutoNormal(program(make()), init_loc_fn=start)
    for name, parameter in net.named_parameters():
        assert torch.equal(guide.get_loc(name), parameter)
        assert guide.get_loc(name).data_ptr() != parameter.data_ptr()


def test_pretrained_values_follow_the_site_and_not_the_net():
    net = nn.Linear(3, 2)
    start = PretrainedInitializer.from_net(net.double())
    before = start.values["net.weight"].clone()
    with torch.no_grad():
        net.weight.zero_()
    guide = AutoNormal(program(nn.Linear(3, 2)), init_loc_fn=start)
    assert guide.get_loc("weight").dtype == torch.float32
    torch.testing.assert_close(guide.get_loc("weight").double(), before, rtol=1e-6, atol=1e-7)


def test_pretrained_values_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"no pre-trained value for 'net.bias'; there are weight"):
        AutoNormal(program(), init_loc_fn=PretrainedInitializer({"weight": torch.zeros(2, 3)}))
    start = PretrainedInitializer.from_net(nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=r"'net.weight' has shape \(2, 2\), but the site .* \(2, 3\)"
    ):
        AutoNormal(program(), init_loc_fn=start)


def test_pretrained_values_of_constrained_sites_are_values():
    value = torch.rand(2, 3) + 0.5
    start = PretrainedInitializer({"weight": value})
    guide = AutoNormal(
        program(nn.Linear(3, 2, bias=False), dist.Gamma(1.0, 1.0)), init_loc_fn=start
    )
    torch.testing.assert_close(guide.median()["net.weight"], value)


@pytest.mark.parametrize(
    "builder", [autoguide.AutoNormal, autoguide.AutoDelta, autoguide.AutoDiagonalNormal]
)
def test_pyros_guides_take_our_initial_values(builder):
    net = nn.Linear(3, 2)
    start = PretrainedInitializer.from_net(net)
    guide = PyroGuide.build(functools.partial(builder, init_loc_fn=start), program())
    torch.testing.assert_close(guide.median()["net.weight"], net.weight.detach())


# --- the radial posterior -------------------------------------------------------------------------


def radial(*shape):
    loc = torch.randn(shape).double()
    return Radial(loc, torch.rand(shape).double() + 0.5)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_density_integrates_to_one_in_one_dimension(shape):
    q = radial(*shape)
    centre = q.loc.item()

    def density(w):
        return q.log_prob(torch.full(shape, w, dtype=torch.float64)).exp().item()

    mass = sum(
        integrate.quad(density, *ends)[0] for ends in ((-math.inf, centre), (centre, math.inf))
    )
    assert mass == pytest.approx(1.0, abs=1e-7)
    # In one dimension it is the Normal, also at its centre.
    for value in (q.sample(), q.loc):
        expected = td.Normal(q.loc, q.scale).log_prob(value).sum()
        torch.testing.assert_close(q.log_prob(value), expected)


def test_the_density_integrates_to_one_in_two_dimensions():
    q = Radial(torch.tensor([0.3, -0.2]).double(), torch.tensor([0.5, 1.5]).double())

    def density(radius, angle):
        u = torch.tensor([math.cos(angle), math.sin(angle)]).double() * radius
        # In coordinates (w - loc) / scale the volume has the factor prod scale.
        return q.log_prob(q.loc + q.scale * u).exp().item() * q.scale.prod().item() * radius

    mass, _ = integrate.dblquad(density, 0, 2 * math.pi, 1e-12, 8, epsabs=1e-6)
    assert mass == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (2, 1, 3)])
def test_the_density_integrates_to_one_in_few_dimensions(shape):
    q = radial(*shape)
    size = q.loc.numel()
    # The importance weights p / q of a radial law and a spherical t of the same centre are
    # bounded near the centre by a proposal with a denser middle: a radius of |N(0, 2)|.
    count = 40000
    direction = torch.randn(count, size).double()
    direction /= direction.norm(dim=-1, keepdim=True)
    radius = 2 * torch.randn(count, 1).double().abs()
    values = q.loc + q.scale * (direction * radius).reshape(count, *shape)
    log_area = math.log(2) + size / 2 * math.log(math.pi) - math.lgamma(size / 2)
    log_proposal = (
        td.HalfNormal(torch.tensor(2.0).double()).log_prob(radius).squeeze(-1)
        - log_area
        - (size - 1) * radius.squeeze(-1).log()
        - q.scale.log().sum()
    )
    weights = (q.log_prob(values) - log_proposal).exp()
    assert abs(weights.mean() - 1) < 6 * weights.std() / math.sqrt(count)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 4), (50,)])
def test_entropy_and_moments_of_the_radial_posterior(shape):
    q = radial(*shape)
    samples = q.sample((20000,))
    assert samples.shape == (20000, *shape)
    logs = -q.log_prob(samples)
    assert logs.shape == (20000,)
    assert abs(logs.mean() - q.entropy()) < 6 * logs.std() / math.sqrt(len(logs))
    torch.testing.assert_close(q.variance, q.scale.square() / q.loc.numel())
    error = (q.variance / len(samples)).sqrt()
    assert bool(((samples.mean(0) - q.mean).abs() < 6 * error).all())
    squares = (samples - q.mean).square()
    error = squares.std(0) / math.sqrt(len(samples))
    assert bool(((squares.mean(0) - q.variance).abs() < 6 * error).all())
    # The distance from the centre is half-normal, whatever the dimension.
    distance = (
        ((samples - q.loc) / q.scale).flatten(1).norm(dim=1)
        if shape
        else ((samples - q.loc) / q.scale).abs()
    )
    error = distance.std() / math.sqrt(len(samples))
    assert abs(distance.mean() - math.sqrt(2 / math.pi)) < 6 * error


def test_radial_directions_are_uniform():
    q = Radial(torch.zeros(3).double(), torch.ones(3).double())
    directions = nn.functional.normalize(q.sample((20000,)), dim=-1)
    moments = directions.T @ directions / len(directions)
    # Variance of a product of coordinates on the sphere is below 1/5.
    assert bool(((moments - torch.eye(3) / 3).abs() < 6 * math.sqrt(0.2 / 20000)).all())


def test_radial_draws_have_exact_gradients():
    loc = torch.zeros(2, 2, dtype=torch.float64, requires_grad=True)
    scale = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)

    def draw(loc, scale):
        torch.manual_seed(0)
        return Radial(loc, scale).rsample((3,))

    assert torch.autograd.gradcheck(draw, (loc, scale))

    def density(loc, scale):
        return Radial(loc, scale).log_prob(torch.arange(4.0).double().reshape(2, 2) + 0.5)

    assert torch.autograd.gradcheck(density, (loc, scale))
    with pytest.raises(NotImplementedError, match="one joint event"):
        Radial(loc, scale).expand((2,))


# --- starts that do not fit -----------------------------------------------------------------------


@pytest.mark.parametrize("guide", [AutoNormal, AutoRadial])
@pytest.mark.parametrize("start", [torch.zeros(()), torch.zeros(1, 3), torch.zeros(3, 2)])
def test_a_start_of_another_shape_is_refused(guide, start):
    message = re.escape(
        f"init_loc_fn gives 'net.weight' a start of shape {tuple(start.shape)}; "
        "the site has shape (2, 3)"
    )
    with pytest.raises(ValueError, match=message):
        guide(program(), init_loc_fn=lambda site: start)


@pytest.mark.parametrize("guide", [AutoNormal, AutoRadial])
@pytest.mark.parametrize("cap", [0, -1.0, 0.0, math.nan])
def test_a_cap_is_positive(guide, cap):
    with pytest.raises(ValueError, match=f"max_guide_scale is {cap}; expected a positive number"):
        guide(program(), max_guide_scale=cap)
