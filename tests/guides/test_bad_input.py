"""What guides refuse, with the remedy where there is one."""

import functools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import autoguide
from torch import nn

from tests.oracles.binary import Noise
from tests.oracles.binary import make as make_binary
from tests.oracles.inducing import SMALL, mlp, wide_net
from tests.oracles.inducing import program as sites_of
from tests.oracles.programs import program
from tests.soak.verdict import is_clear
from tyxe.guides import (
    AutoBernoulli,
    AutoInducing,
    AutoNormal,
    AutoRadial,
    PretrainedInitializer,
    PyroGuide,
    SWAGGuide,
    init_to_normal_radford,
    init_to_zero,
    prune_,
    prune_inducing_,
    scale_below_prior,
)
from tyxe.priors import BinaryPrior, IIDPrior, LambdaPrior

NORMAL, POSITIVE = dist.Normal(0.0, 1.0), dist.LogNormal(0.0, 1.0)
VALUE, TYPE = ValueError, TypeError


def normal(prior=NORMAL, guide=AutoNormal, **options):
    return guide(program(prior=prior), **options)


def inducing(*prior, **options):
    return AutoInducing(sites_of(mlp(), *prior), **{**SMALL, **options})


def bernoulli(**options):
    return make_binary(guide=functools.partial(AutoBernoulli, **options))


def at(value):
    """Return a net with an element that is this."""
    net = nn.Linear(3, 2)
    with torch.no_grad():
        net.bias[1] = value
    return program(net)


def of_hierarchy(guide=AutoNormal, **options):
    def prior(name, module, param):
        mean = dist.Normal(param.new_zeros(()), 1.0)
        return lambda: dist.Normal(pyro.sample(f"{name}_mean", mean), 1.0).expand(param.shape)

    return guide(sites_of(wide_net(), LambdaPrior(prior)), **options)


def one_of(prior):
    """Return a prior of which one bias has another distribution."""
    return LambdaPrior(
        lambda name, _, param: (prior if name == "2.bias" else NORMAL).expand(param.shape)
    )


def pruned(function, keep):
    guide = AutoInducing(sites_of(wide_net()), 4, 5)
    function(guide if function is prune_inducing_ else guide.rest, keep)


CAUCHY, ROW = dist.Cauchy(0.0, 1.0), torch.zeros(1, 3)
NO_BIAS = PretrainedInitializer({"weight": torch.zeros(2, 3)})
radial = functools.partial(normal, guide=AutoRadial)
STARTS = (
    (lambda: normal(prior=dist.Poisson(1.0)), VALUE, r"'net.weight' is discrete"),
    (lambda: AutoNormal(program(hide_all=True)), VALUE, "the prior exposes none: expose some, or "),
    (lambda: AutoNormal(nn.Linear(2, 1)), TYPE, r"a Linear \(missing .*'input'.*guide's clas"),
    (lambda: normal(init_scale=0.0), VALUE, "init_scale is 0; expected positive"),
    (lambda: normal(init_scale=math.nan), VALUE, "expected positive"),
    (
        lambda: radial(init_scale=0.5, max_guide_scale=0.5),
        VALUE,
        "below 0.5, which is max_guide_scale",
    ),
    (lambda: normal(init_loc_fn=3), TYPE, "init_loc_fn is 3; expected a function, such as tyxe"),
    (lambda: normal(max_guide_scale=0.0), VALUE, "max_guide_scale is 0.0"),
    (lambda: normal(init_loc_fn=lambda _: ROW), VALUE, r"\(1, 3\); expected \(2, 3\), that of "),
    (lambda: normal(POSITIVE, init_loc_fn=init_to_zero), VALUE, "not inside .*init_to_median"),
    (lambda: AutoNormal(at(math.nan)), VALUE, r"net's net\.bias .*; expected"),
    (lambda: PyroGuide.build(autoguide.AutoDelta, at(math.inf)), VALUE, "expected finite"),
    (lambda: normal(init_loc_fn=NO_BIAS), VALUE, "no .* value for 'net.bias'; there are weight"),
    (lambda: of_hierarchy(init_loc_fn=init_to_normal_radford), VALUE, "no layer, .* no fan-in"),
    (lambda: normal(CAUCHY, init_scale=scale_below_prior()), VALUE, "finite numbers to start"),
    (lambda: SWAGGuide(program(), rank=1), VALUE, "rank is 1"),
    (lambda: normal(POSITIVE, SWAGGuide), VALUE, "'net.weight' has the support .*; hide it"),
)

BINARY = (
    (lambda: bernoulli(init="trained"), VALUE, "init is 'trained'; expected one of 'pretrai"),
    (lambda: bernoulli(init=lambda site: torch.zeros(2)), VALUE, r"init gives has shape \(2,"),
    (lambda: bernoulli(init_gain=0.0), VALUE, "init_gain is 0.0"),
    (lambda: bernoulli(relaxed=0.0), VALUE, "relaxed is 0.0"),
    (lambda: make_binary().net_guide.pack(0), VALUE, "num_samples is 0"),
    (lambda: BinaryPrior(delta=-0.1), VALUE, r"delta is -0\.1"),
    (lambda: BinaryPrior(scale=0), VALUE, "scale is 0"),
    (lambda: BinaryPrior(scale="fan"), VALUE, "method is 'fan'; expected one of 'radford'"),
    (lambda: AutoBernoulli(Noise()), VALUE, "no parameter of a net.*init=tyxe.guides.init_to_zero"),
    (lambda: make_binary(IIDPrior(dist.Bernoulli(0.5))), VALUE, "has the support Boolean"),
    (lambda: make_binary(IIDPrior(NORMAL)), VALUE, r"support Real\(\), .* two values, -s and s"),
    (lambda: make_binary(guide=AutoNormal), VALUE, "'net.0.weight' is discrete.*tyxe.guides.AutoB"),
)

WIDE, FEW = sites_of(wide_net()), {"inducing_rows": 4, "inducing_cols": 5}
OTHER_COLS = {"0.weight": 2, "2.weight": 3}
ONE_LAYER = {
    "inducing_rows": {"0.weight": 2, "2.weight": None},
    "mean_field": autoguide.AutoDelta,
}
INDUCING = (
    (lambda: inducing(inducing_rows=0), VALUE, "rows of '0.weight' is 0; expected 1 or more"),
    (lambda: inducing(inducing_cols=1.5), VALUE, "is 1.5; expected a number above 0 and at"),
    (lambda: inducing(inducing_rows=True), TYPE, "inducing_rows of '0.weight' is True"),
    (lambda: inducing(inducing_rows="2"), TYPE, "expected an integer, a fraction of each lay"),
    (lambda: inducing(inducing_rows=None), TYPE, "inducing_rows is None; expected an integer"),
    (lambda: inducing(inducing_rows={"0.weight": 2}), VALUE, "has no size for 2.weight; give"),
    (lambda: inducing(inducing_rows={"1.weight": 2}), VALUE, "no site '1.weight'; expected one of"),
    (lambda: AutoInducing(WIDE, 30, 21), VALUE, "no layer .*: take smaller sizes, say every"),
    (lambda: inducing(q_inducing="low"), VALUE, "q_inducing is 'low'; expected one of 'diago"),
    (lambda: inducing(ensemble_size=0), VALUE, "ensemble_size is 0"),
    (lambda: inducing(dataset_size=0), VALUE, "dataset_size is 0"),
    (lambda: inducing(init_lambda=0.0), VALUE, "init_lambda is 0; expected positive"),
    (lambda: inducing(max_lambda=1e-4), VALUE, "below 0.0001, which is max_lambda"),
    (lambda: inducing(max_lambda=-1.0), VALUE, "max_lambda is -1.0"),
    (lambda: inducing(max_scale_u=0.0), VALUE, "max_scale_u is 0.0"),
    (lambda: inducing(max_scale_u=1e-3), VALUE, "below 0.001, which is max_scale_u"),
    (lambda: inducing(hierarchical=(1, 1), whitened=False), VALUE, "stack whitened ones"),
    (lambda: inducing(hierarchical=(5, 1)), VALUE, "expected 1 to 4, the stack's own size"),
    (lambda: inducing(hierarchical=(1, 1), inducing_cols=OTHER_COLS), VALUE, "as many columns"),
    (lambda: inducing(q_induced=3), TYPE, "q_induced"),
    (lambda: inducing(**ONE_LAYER), TYPE, "an AutoDelta"),
    (lambda: inducing(one_of(dist.Normal(0.1, 1.0))), VALUE, "which '2.bias' has not: use su"),
    (lambda: inducing(one_of(POSITIVE)), VALUE, "each site, which '2.bias' has not"),
    (lambda: of_hierarchy(AutoInducing, **FEW), VALUE, "one fixed .* which '0.weight' has not"),
)

PRUNING = (
    *(
        (functools.partial(pruned, function, keep), VALUE, "what keep=|keep is")
        for function in (prune_, prune_inducing_)
        for keep in (0.0, 1.1, 1e-9)
    ),
    (lambda: prune_(normal(guide=AutoRadial), 0.5), TYPE, "expected tyxe.guides.AutoNormal"),
    (lambda: prune_inducing_(normal(), 0.5), TYPE, "expected tyxe.guides.AutoInducing"),
)

BUILDERS = (
    (lambda module: 3, TYPE, "builder returned is 3; expected a module"),
    ("AutoNormal", TYPE, "builder is .AutoNormal.; expected a class of guides"),
    (AutoNormal(program()), TYPE, "builder is an AutoNormal; expected a class of guides"),
)


@pytest.mark.parametrize(("call", "error", "message"), [*STARTS, *BINARY, *INDUCING, *PRUNING])
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize(("builder", "error", "message"), BUILDERS)
def test_a_builder_that_fails_is_named(builder, error, message):
    with pytest.raises(error, match=message) as caught:
        PyroGuide.build(builder, program(prior=POSITIVE))
    assert is_clear(caught.value)


COUPLED = [autoguide.AutoMultivariateNormal, autoguide.AutoStructured, autoguide.AutoGaussian]


@pytest.mark.parametrize("builder", [autoguide.AutoNormal, autoguide.AutoDelta, *COUPLED])
def test_pyros_guides_of_discrete_sites_are_refused(builder):
    with pytest.raises(ValueError, match=r"'net.weight' is discrete; .*AutoBernoulli"):
        PyroGuide.build(builder, program(prior=dist.Poisson(1.0)))


def test_a_guide_that_draws_in_another_dtype_is_refused():
    double = program(nn.Linear(3, 2).double())
    message = "draws 'net.weight' in torch.float32, which is in torch.float64; .* net in"
    with pytest.raises(ValueError, match=message) as caught:
        PyroGuide.build(autoguide.AutoIAFNormal, double)
    assert is_clear(caught.value)
    assert PyroGuide.build(autoguide.AutoDelta, double)()["net.weight"].dtype == torch.float64
