"""Priors: the contract, what each gives to parameters, and updates of the same sites."""

import math

import pyro.distributions as dist
import pytest
import torch
import torch.distributions as td
import torch.nn as nn

import tyxe
from tests.oracles.blocks import HEAD, Net
from tests.oracles.bnns import mean_field
from tests.oracles.programs import NORMAL
from tyxe.priors import DictPrior, IIDPrior, LambdaPrior, LayerwiseNormalPrior
from tyxe.testing import PRIORS, check_prior
from tyxe.util import named_pyro_samples


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
    found = of(DictPrior(priors))
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


def test_update_keeps_the_sites_and_replaces_their_priors():
    net = Net()
    IIDPrior(NORMAL, expose_modules=["head"]).apply_(net)
    IIDPrior(dist.Normal(1.0, 2.0), hide_all=True).update_(net)
    found = dict(named_pyro_samples(net))
    assert list(found) == HEAD
    assert found["head.bias"].mean.item() == 1.0


def test_an_update_that_does_not_fit_changes_nothing():
    net = Net()
    with pytest.raises(ValueError, match=r"call prior\.apply_"):
        IIDPrior(NORMAL).update_(net)
    IIDPrior(NORMAL, expose_modules=["head"]).apply_(net)
    bad = {"head.weight": dist.Normal(1.0, 1.0).expand([1, 3]), "head.bias": NORMAL}
    with pytest.raises(ValueError, match=r"'head\.bias' has shape"):
        DictPrior(bad).update_(net)
    assert dict(named_pyro_samples(net))["head.weight"].mean.unique() == 0.0


POINT = dist.Delta(torch.zeros(1, 2))


@pytest.mark.parametrize(
    "point", [POINT, POINT.to_event(1), POINT.to_event(2), dist.Delta(torch.zeros(1, 2), 0.0, 1)]
)
def test_a_point_is_no_prior(point):
    message = r"prior of 'weight' is a point.*AutoNormal, or tyxe\.LaplaceBNN; or hide"
    with pytest.raises(ValueError, match=message):
        DictPrior({"weight": point}, hide=["bias"]).sites(nn.Linear(2, 1))


def test_entries_for_what_is_not_there_are_refused():
    entries = {"weight": NORMAL.expand([1, 2]), "net.bias": NORMAL.expand([1])}
    net, prior = nn.Linear(2, 1), DictPrior(entries, hide=["bias"])
    assert list(prior.sites(net)) == ["weight"]
    message = r"an entry for '1\.weight', but the sites of the net are weight, bias: take"
    with pytest.raises(ValueError, match=message):
        DictPrior({**entries, "1.weight": NORMAL.expand([2, 2])}).sites(net)
    prior.apply_(net)
    before = dict(named_pyro_samples(net))
    with pytest.raises(ValueError, match=r"entry for 'net\.bias', but the sites .* are weight:"):
        DictPrior(entries).update_(net)
    assert dict(named_pyro_samples(net))["weight"] is before["weight"]
    DictPrior({"net.weight": entries["weight"]}).update_(net)
    prior.update_(net)  # its own rules leave the bias aside


def test_an_entry_may_have_either_name_of_a_tied_parameter():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    prior = NORMAL.expand([2, 2])
    entries = {"0.weight": prior, "1.weight": prior}
    assert list(DictPrior(entries, hide_parameters=["bias"]).sites(net)) == ["0.weight"]


def test_priors_move_with_the_bnn_and_survive_updates():
    bnn = mean_field(nn.Linear(2, 1), tyxe.likelihoods.Bernoulli(3))
    bnn.double()
    bnn.update_prior(DictPrior(bnn.net_guide.get_detached_distributions()))
    assert all(v.dtype == torch.float64 for v in bnn.net_prior().values())
    bnn.float()
    assert all(v.dtype == torch.float32 for v in bnn.net_prior().values())
