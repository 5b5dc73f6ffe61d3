"""Priors: the contract, and the distributions that each gives to parameters."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn

from tests.oracles.programs import NORMAL
from tyxe.priors import DictPrior, IIDPrior, LambdaPrior, LayerwiseNormalPrior
from tyxe.testing import PRIORS, check_prior


@pytest.mark.parametrize("make", PRIORS.values(), ids=PRIORS.keys())
def test_contract(make):
    check_prior(make())


@pytest.mark.parametrize(
    "net",
    [
        lambda: nn.Linear(2, 1),
        lambda: nn.MultiheadAttention(4, 2, kdim=3, add_bias_kv=True),
        lambda: nn.LSTM(2, 3, num_layers=2, bidirectional=True, proj_size=2),
        lambda: nn.ConvTranspose2d(4, 2, 3, groups=2),
        lambda: nn.Sequential(nn.Embedding(5, 3), nn.LayerNorm((2, 3)), nn.PReLU()),
    ],
    ids=["bare layer", "attention", "lstm", "transposed", "embedding"],
)
@pytest.mark.parametrize("prior", [IIDPrior(NORMAL), LayerwiseNormalPrior("xavier")])
def test_contract_on_other_nets(prior, net):
    check_prior(prior, net())


@pytest.mark.parametrize(
    "distribution",
    [NORMAL, dist.Laplace(0.0, 2.0), dist.StudentT(3.0, 0.0, 1.0), td.Cauchy(0.0, 1.0)],
)
def test_iid_priors_are_elementwise(distribution):
    (weight, _) = IIDPrior(distribution).sites(nn.Linear(3, 2)).values()
    value = torch.randn(2, 3)
    torch.testing.assert_close(weight.log_prob(value), distribution.log_prob(value).sum())


@pytest.mark.parametrize("spelled", ["", "net."])
def test_dict_priors_take_both_spellings(spelled):
    priors = {
        f"{spelled}weight": dist.Laplace(1.0, 2.0).expand([1, 2]).to_event(2),
        f"{spelled}bias": dist.Normal(torch.ones(1), 1.0),
    }
    found = DictPrior(priors).sites(nn.Linear(2, 1))
    assert list(found) == ["weight", "bias"]
    assert found["weight"].mean.unique() == 1.0
    assert found["bias"].event_shape == (1,)


WEIGHT = dist.Normal(0.0, 1.0).expand([1, 2])
VECTOR = dist.Normal(torch.zeros(2), 1.0)
ENTRIES = {"weight": WEIGHT}
REFUSED = [
    (lambda: IIDPrior(1.0), TypeError, "distribution is 1.0; expected one such"),
    (lambda: IIDPrior(VECTOR), ValueError, r"shape \(2,\); .*use DictPrior or LambdaPrior"),
    (lambda: of(DictPrior(ENTRIES)), ValueError, "no entry for 'bias'; .* Add one, or hide"),
    (lambda: of(DictPrior(ENTRIES), 3), ValueError, r"'weight' has shape \(1, 2\), but"),
    (lambda: DictPrior([WEIGHT]), TypeError, "a list; expected distributions by name"),
    (lambda: LambdaPrior(3), TypeError, "fn is 3; expected a function of"),
    (lambda: LambdaPrior(lambda a, b: 1), TypeError, r"function of \(name, module, param\)"),
    (lambda: of(LambdaPrior(lambda *_: None)), TypeError, "prior of 'weight' is None; expected"),
    (lambda: of(LambdaPrior(lambda *_: NORMAL)), ValueError, "expand the distribution to that"),
    (lambda: LayerwiseNormalPrior("he"), ValueError, "expected one of 'radford', 'xavier', 'ka"),
]


def of(prior, inputs=2):
    return prior.sites(nn.Linear(inputs, 1))


@pytest.mark.parametrize(("call", "error", "match"), REFUSED)
def test_what_is_no_prior_is_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_dict_priors_may_be_joint_over_a_parameter():
    joint = dist.MultivariateNormal(torch.zeros(2), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
    (site,) = DictPrior({"bias": joint}, expose=["bias"]).sites(nn.Linear(1, 2)).values()
    assert site.event_shape == (2,)
    assert site.covariance_matrix[0, 1] == 1.0


def test_lambda_priors_see_name_module_and_parameter():
    seen = []
    net = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))

    def fn(name, module, param):
        seen.append((name, module, param))
        return dist.Normal(0.0, 1.0).expand(param.shape)

    LambdaPrior(fn, expose_modules=["1"]).sites(net)
    assert seen == [("1.weight", net[1], net[1].weight), ("1.bias", net[1], net[1].bias)]


@pytest.mark.parametrize("method", ["radford", "xavier", "kaiming"])
def test_layerwise_scales_follow_the_fans_and_biases_their_layer(method):
    found = LayerwiseNormalPrior(method, nonlinearity="tanh").sites(nn.Linear(9, 3))
    gain = nn.init.calculate_gain("tanh")
    expected = {"radford": 1 / 3, "xavier": math.sqrt(2 / 12), "kaiming": gain / 3}[method]
    for site in found.values():
        torch.testing.assert_close(site.stddev, torch.full(site.event_shape, expected))
        assert not site.mean.any()
