"""Selection rules, distributions by parameter, hierarchies."""

import copy
import functools
import math

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.distributions as td
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

import tyxe
from tyxe.priors import DictPrior, IIDPrior, LambdaPrior, LayerwiseNormalPrior, Prior
from tyxe.testing import PRIORS, check_prior
from tyxe.util import named_pyro_samples, pyro_sample_sites

NORMAL = dist.Normal(0.0, 1.0)


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


# --- selection ----------------------------------------------------------------------------------


class Block(nn.Module):
    """A convolution and a norm."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)


class Net(nn.Module):
    """Two blocks, a tied pair, a frozen parameter."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList([Block(), Block()])
        self.encoder, self.decoder = nn.Linear(3, 3), nn.Linear(3, 3)
        self.decoder.weight = self.encoder.weight
        self.head = nn.Linear(3, 1)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def sites(net=None, **rules):
    return list(IIDPrior(NORMAL, **rules).sites(Net() if net is None else net))


ALL = [name for name, parameter in Net().named_parameters() if parameter.requires_grad]
NORMS = [name for name in ALL if ".norm." in name]
BIASES = [name for name in ALL if name.endswith("bias")]
HEAD = ["head.weight", "head.bias"]


def without(*names):
    return [name for name in ALL if name not in names]


RULES = {
    "nothing said": ({}, ALL),
    "hide all": ({"hide_all": True}, []),
    "expose nothing": ({"expose_all": False}, []),
    "hide": ({"hide": ["head.weight"]}, without("head.weight")),
    "hide, glob": ({"hide": ["body.*"]}, [n for n in ALL if not n.startswith("body")]),
    "hide, tied": ({"hide": ["decoder.weight"]}, without("encoder.weight")),
    "expose": ({"expose": ["head.bias", "encoder.weight"]}, ["encoder.weight", "head.bias"]),
    "expose, glob": ({"expose": ["*.conv.weight"]}, ["body.0.conv.weight", "body.1.conv.weight"]),
    "expose, tied": ({"expose": ["decoder.weight"]}, ["encoder.weight"]),
    "expose, frozen": ({"expose": ["frozen"]}, ["frozen"]),
    "expose all, frozen": ({"expose": ["*"]}, [n for n, _ in Net().named_parameters()]),
    "hide modules": ({"hide_modules": ["head"]}, without(*HEAD)),
    "hide modules, glob": ({"hide_modules": ["body.*.norm"]}, without(*NORMS)),
    "hide modules, inside": ({"hide_modules": ["body"]}, [n for n in ALL if "body" not in n]),
    "hide modules, tied": (
        {"hide_modules": ["decoder"]},
        without("encoder.weight", "decoder.bias"),
    ),
    "expose modules": ({"expose_modules": ["head"]}, HEAD),
    "expose the net": ({"expose_modules": [""]}, [n for n, _ in Net().named_parameters()]),
    "hide types": ({"hide_module_types": [nn.BatchNorm1d]}, without(*NORMS)),
    "hide base types": ({"hide_module_types": [nn.modules.batchnorm._BatchNorm]}, without(*NORMS)),
    "hide absent types": ({"hide_module_types": [nn.Conv3d]}, ALL),
    "expose types": (
        {"expose_module_types": (nn.Linear,)},
        ["encoder.weight", "encoder.bias", "decoder.bias", *HEAD],
    ),
    "hide parameters": ({"hide_parameters": ["bias"]}, without(*BIASES)),
    "expose parameters": ({"expose_parameters": ["bias"]}, BIASES),
    "expose parameters, glob": ({"expose_parameters": ["b*"]}, BIASES),
    "hide fn": (
        {"hide_fn": lambda module, name: isinstance(module, nn.Linear) and name.endswith(".bias")},
        without("encoder.bias", "decoder.bias", "head.bias"),
    ),
    "hide fn, tied": (
        {"hide_fn": lambda module, name: name == "decoder.weight"},
        without("encoder.weight"),
    ),
    "expose fn": (
        {"expose_fn": lambda module, name: module.__class__ is nn.Conv1d},
        [n for n in ALL if ".conv." in n],
    ),
    "expose, then hide": (
        {"expose_modules": ["head", "encoder"], "hide_parameters": ["bias"]},
        ["encoder.weight", "head.weight"],
    ),
    "two exposing rules": (
        {"expose": ["body.0.norm.bias"], "expose_modules": ["head"]},
        ["body.0.norm.bias", *HEAD],
    ),
    "two hiding rules": (
        {"hide": ["encoder.weight"], "hide_parameters": ["bias"]},
        without("encoder.weight", *BIASES),
    ),
    "none is no rule": ({"hide": None, "expose_modules": None}, ALL),
}


@pytest.mark.parametrize(("rules", "expected"), RULES.values(), ids=RULES.keys())
def test_rules_choose_the_sites(rules, expected):
    assert sites(**rules) == expected


def test_modules_may_be_those_of_the_net_that_goes_in():
    net = Net()
    prior = IIDPrior(NORMAL, expose_modules=[net.head, net.body[1].norm])
    bnn = tyxe.VariationalBNN(net, prior, tyxe.likelihoods.Bernoulli(3), tyxe.guides.AutoNormal)
    assert pyro_sample_sites(bnn.net) == ["body.1.norm.weight", "body.1.norm.bias", *HEAD]
    with pytest.raises(ValueError, match="a Linear module, which the net does not have"):
        prior.sites(Net())


@given(hidden=st.sets(st.sampled_from(ALL)))
def test_hiding_and_exposing_by_name_are_complements(hidden):
    shown = [name for name in ALL if name not in hidden]
    assert sites(hide=sorted(hidden)) == shown
    if shown:
        assert sites(expose=shown) == shown


@pytest.mark.parametrize(
    ("rules", "error", "match"),
    [
        ({"hide_layers": ["a"]}, TypeError, "unknown rule 'hide_layers'; the rules are hide"),
        ({"hide": "head.bias"}, TypeError, r"expected a list: hide=\[...\]"),
        ({"expose_modules": "head"}, TypeError, "expected a list"),
        ({"hide_module_types": nn.Linear}, TypeError, "expected a list"),
        ({"hide_fn": ["bias"]}, TypeError, "expected a function of"),
        ({"hide_all": True, "expose": ["head.bias"]}, ValueError, "contradicts expose"),
    ],
)
def test_wrong_rules_are_refused_at_once(rules, error, match):
    with pytest.raises(error, match=match):
        IIDPrior(NORMAL, **rules)


@pytest.mark.parametrize(
    ("rules", "match"),
    [
        ({"hide": ["head.wieght"]}, "hide names 'head.wieght', which the net does not have; it"),
        ({"expose": ["tail.*"]}, "expose names 'tail.*'"),
        ({"hide_modules": ["tail"]}, "hide_modules names 'tail'"),
        ({"expose_modules": [nn.Linear(1, 1)]}, "expose_modules names a Linear module"),
        ({"hide": ["head.*"], "expose": ["head.bias"]}, "hide and expose both name 'head.bias'"),
        (
            {"hide_modules": ["head"], "expose_modules": ["*"]},
            "hide_modules and expose_modules both name",
        ),
        (
            {"hide_parameters": ["bias"], "expose_parameters": ["b*"]},
            "hide_parameters and expose_parameters both name",
        ),
        (
            {"hide_module_types": [nn.Linear], "expose_module_types": [nn.Module]},
            "both name",
        ),
    ],
)
def test_rules_that_do_not_fit_the_net_are_refused(rules, match):
    net = Net()
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=match):
        IIDPrior(NORMAL, **rules).apply_(net)
    assert pyro_sample_sites(net) == []
    assert list(net.state_dict()) == list(before)


# --- distributions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "distribution",
    [NORMAL, dist.Laplace(0.0, 2.0), dist.StudentT(3.0, 0.0, 1.0), td.Cauchy(0.0, 1.0)],
)
def test_iid_priors_are_elementwise(distribution):
    (weight, _) = IIDPrior(distribution).sites(nn.Linear(3, 2)).values()
    value = torch.randn(2, 3)
    torch.testing.assert_close(weight.log_prob(value), distribution.log_prob(value).sum())


@pytest.mark.parametrize(
    ("distribution", "error", "match"),
    [
        (1.0, TypeError, "distribution is 1.0; expected one such as dist.Normal"),
        (dist.Normal, TypeError, "expected one such as"),
        (dist.Normal(torch.zeros(2), 1.0), ValueError, r"shape \(2,\); IIDPrior takes one over"),
        (dist.MultivariateNormal(torch.zeros(2), torch.eye(2)), ValueError, "DictPrior or Lambda"),
    ],
)
def test_iid_priors_take_one_scalar_distribution(distribution, error, match):
    with pytest.raises(error, match=match):
        IIDPrior(distribution)


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


def test_dict_priors_say_what_is_missing_or_misshapen():
    weight = dist.Normal(0.0, 1.0).expand([1, 2])
    with pytest.raises(ValueError, match=r"no entry for 'bias'; it has weight. Add one, or hide"):
        DictPrior({"weight": weight}).sites(nn.Linear(2, 1))
    assert list(DictPrior({"weight": weight}, hide=["bias"]).sites(nn.Linear(2, 1))) == ["weight"]
    with pytest.raises(
        ValueError, match=r"prior of 'weight' has shape \(1, 2\), but the parameter has"
    ):
        DictPrior({"weight": weight}, hide=["bias"]).sites(nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"has shape \(\), but"):
        DictPrior({"weight": NORMAL}, hide=["bias"]).sites(nn.Linear(3, 1))
    with pytest.raises(TypeError, match="dist_dict is a list; expected distributions by name"):
        DictPrior([weight])
    with pytest.raises(
        TypeError, match="the prior of 'weight' is a float; expected a distribution"
    ):
        DictPrior({"weight": 1.0}, hide=["bias"]).sites(nn.Linear(2, 1))


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
    with pytest.raises(TypeError, match="fn is 3; expected a function"):
        LambdaPrior(3)
    with pytest.raises(TypeError, match="is a NoneType; expected a distribution"):
        LambdaPrior(lambda name, module, param: None).sites(net)
    with pytest.raises(ValueError, match="expand the distribution to that shape"):
        LambdaPrior(lambda name, module, param: NORMAL).sites(net)


@pytest.mark.parametrize("method", ["radford", "xavier", "kaiming"])
def test_layerwise_scales_follow_the_fans_and_biases_their_layer(method):
    found = LayerwiseNormalPrior(method, nonlinearity="tanh").sites(nn.Linear(9, 3))
    gain = nn.init.calculate_gain("tanh")
    expected = {"radford": 1 / 3, "xavier": math.sqrt(2 / 12), "kaiming": gain / 3}[method]
    for site in found.values():
        torch.testing.assert_close(site.stddev, torch.full(site.event_shape, expected))
        assert not site.mean.any()


def test_unknown_methods_are_refused():
    with pytest.raises(
        ValueError, match="method is 'he'; expected one of radford, xavier, kaiming"
    ):
        LayerwiseNormalPrior("he")


# --- update_ ------------------------------------------------------------------------------------


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


def test_the_posterior_of_a_point_estimate_is_no_prior():
    net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    bnn = tyxe.VariationalBNN(
        net, IIDPrior(NORMAL), tyxe.likelihoods.Bernoulli(3), pyro.infer.autoguide.AutoDelta
    )
    before = bnn.prior
    with pytest.raises(ValueError, match=r"prior of '0\.weight' is a point"):
        bnn.update_prior(DictPrior(bnn.net_guide.get_detached_distributions()))
    assert bnn.prior is before
    assert dict(named_pyro_samples(bnn.net))["0.weight"].variance.unique() == 1.0


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


def test_a_posterior_over_other_sites_is_refused():
    def make(**rules):
        likelihood = tyxe.likelihoods.Bernoulli(3)
        return tyxe.VariationalBNN(
            nn.Linear(2, 1), IIDPrior(NORMAL, **rules), likelihood, tyxe.guides.AutoNormal
        )

    bnn = make(hide=["bias"])
    posterior = make().net_guide.get_detached_distributions()
    with pytest.raises(ValueError, match="an entry for 'bias', but the sites"):
        bnn.update_prior(DictPrior(posterior))
    bnn.update_prior(DictPrior({"weight": posterior["weight"]}))


def test_an_entry_may_have_either_name_of_a_tied_parameter():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    prior = NORMAL.expand([2, 2])
    entries = {"0.weight": prior, "1.weight": prior}
    assert list(DictPrior(entries, hide_parameters=["bias"]).sites(net)) == ["0.weight"]


def test_priors_move_with_the_bnn_and_survive_updates():
    bnn = tyxe.VariationalBNN(
        nn.Linear(2, 1), IIDPrior(NORMAL), tyxe.likelihoods.Bernoulli(3), tyxe.guides.AutoNormal
    )
    bnn.double()
    bnn.update_prior(DictPrior(bnn.net_guide.get_detached_distributions()))
    assert all(v.dtype == torch.float64 for v in bnn.net_prior().values())
    bnn.float()
    assert all(v.dtype == torch.float32 for v in bnn.net_prior().values())


# --- hierarchies --------------------------------------------------------------------------------


def horseshoe(name, module, param):
    def prior():
        local = dist.HalfCauchy(param.new_ones(param.shape)).to_event(param.dim())
        shared = pyro.sample(f"{name}_global", dist.HalfCauchy(param.new_ones(())))
        return dist.Normal(0.0, shared * pyro.sample(f"{name}_local", local))

    return prior


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("guide", [tyxe.guides.AutoNormal, tyxe.guides.AutoRadial])
def test_a_horseshoe_is_fitted_end_to_end(guide):
    x = torch.randn(40, 4)
    y = x[:, :1] * 3.0 + 0.1 * torch.randn(40, 1)
    bnn = tyxe.VariationalBNN(
        nn.Linear(4, 1, bias=False),
        LambdaPrior(horseshoe),
        tyxe.likelihoods.HomoskedasticGaussian(40, scale=0.1),
        functools.partial(guide, init_scale=0.05),
    )
    names = ["net.weight_global", "net.weight_local", "net.weight"]
    assert sorted(bnn.guide()) == sorted(names)
    history = bnn.fit([(x, y)], functools.partial(torch.optim.Adam, lr=0.05), 150)
    assert history.loss[-1] < history.loss[0]
    for _ in range(20):
        draw = bnn.guide()
        assert bool((draw["net.weight_local"] > 0).all())
        assert bool(draw["net.weight_global"] > 0)
    weight = bnn.net_guide.median()["net.weight"].squeeze()
    assert abs(weight[0] - 3) < 0.3
    assert bool((weight[1:].abs() < 0.3).all())
    assert pyro_sample_sites(bnn.net) == ["weight"]
    assert bnn.predict(x, num_predictions=2)[0].shape == (40, 1)
    assert copy.deepcopy(bnn)(x).shape == (40, 1)


def test_the_density_of_a_hierarchy_is_that_of_its_parts():
    net = nn.Linear(2, 1, bias=False).double()
    bnn = tyxe.VariationalBNN(
        net, LambdaPrior(horseshoe), tyxe.likelihoods.Bernoulli(3), tyxe.guides.AutoNormal
    )
    trace = poutine.trace(bnn.net_prior).get_trace()
    values = {name: trace.nodes[name]["value"] for name in trace.stochastic_nodes}
    cauchy = td.HalfCauchy(torch.ones((), dtype=torch.float64))
    scale = values["net.weight_global"] * values["net.weight_local"]
    expected = cauchy.log_prob(values["net.weight_global"])
    expected += cauchy.log_prob(values["net.weight_local"]).sum()
    expected += td.Normal(0.0, scale).log_prob(values["net.weight"]).sum()
    torch.testing.assert_close(trace.log_prob_sum(), expected)


def test_a_hierarchy_of_the_wrong_shape_is_refused():
    prior = LambdaPrior(lambda name, module, param: lambda: dist.Normal(0.0, 1.0))
    with pytest.raises(ValueError, match="the prior of 'weight' has shape"):
        tyxe.VariationalBNN(
            nn.Linear(2, 1), prior, tyxe.likelihoods.Bernoulli(3), tyxe.guides.AutoNormal
        )


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("distribution", [dist.Laplace(0.0, 1.0), dist.StudentT(4.0, 0.0, 1.0)])
def test_priors_beyond_the_normal_are_fitted(distribution):
    # One weight, no data worth speaking of: the posterior is the prior, whose median is 0 and
    # whose best Normal (in KL) has a finite scale.
    bnn = tyxe.VariationalBNN(
        nn.Linear(1, 1, bias=False),
        IIDPrior(distribution),
        tyxe.likelihoods.HomoskedasticGaussian(1, scale=1e3),
        functools.partial(
            tyxe.guides.AutoNormal, init_loc_fn=tyxe.guides.init_to_constant(constant=1.0)
        ),
    )
    data = [(torch.ones(1, 1), torch.zeros(1, 1))]
    bnn.fit(data, functools.partial(torch.optim.Adam, lr=0.02), 400, num_particles=4)
    assert abs(bnn.net_guide.get_loc("weight").item()) < 0.25
    assert 0.5 < bnn.net_guide.get_scale("weight").item() < 2.0


def test_custom_priors_need_one_method():
    class Half(Prior):
        def prior_dist(self, name, module, param):
            return dist.Normal(0.0, 0.5).expand(param.shape)

    check_prior(Half(hide_parameters=["bias"]))
    with pytest.raises(TypeError, match="abstract"):
        Prior()


# --- rules that name nothing, or too little -------------------------------------------------------


def encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    return nn.Sequential(
        nn.Linear(3, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    )


def test_types_take_all_that_is_inside():
    net = encoder()
    inside = [name for name, _ in net.named_parameters() if name.startswith("1.layers")]
    hidden = sites(net, hide_module_types=[nn.TransformerEncoderLayer])
    assert hidden == ["0.weight", "0.bias"]
    assert sites(net, expose_module_types=[nn.TransformerEncoderLayer]) == inside


NOTHING = {
    "types": {"expose_module_types": [nn.Conv2d]},
    "parameters": {"expose_parameters": ["gain"]},
    "function": {"expose_fn": lambda module, name: False},
    "empty list": {"expose": []},
    "several": {"expose_module_types": [nn.Conv2d], "expose_parameters": ["gain"]},
}


@pytest.mark.parametrize("case", NOTHING)
def test_expose_rules_that_match_nothing_are_errors(case):
    kinds = ", ".join(NOTHING[case])
    with pytest.raises(
        ValueError, match=f"{kinds} expose no parameter of the net; it has frozen, body"
    ):
        sites(**NOTHING[case])


def test_one_of_several_expose_rules_is_enough():
    assert sites(expose_module_types=[nn.Conv2d], expose=["head.bias"]) == ["head.bias"]


@pytest.mark.parametrize("rule", ["hide_module_types", "expose_module_types"])
@pytest.mark.parametrize(
    "given", [["Linear"], ["BatchNorm1d", nn.Linear], [nn.Linear(1, 1)], "Linear"]
)
def test_types_are_classes(rule, given):
    with pytest.raises(TypeError, match=f"{rule} is .*; expected (classes, such as|a list)"):
        IIDPrior(NORMAL, **{rule: given})
