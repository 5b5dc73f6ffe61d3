"""Rules that choose the parameters under a prior, and rules that choose none."""

import pytest
import torch
import torch.nn as nn

import tyxe
from tests.oracles.blocks import HEAD, Net
from tests.oracles.programs import NORMAL
from tyxe.priors import IIDPrior
from tyxe.util import pyro_sample_sites


def sites(net=None, **rules):
    return list(IIDPrior(NORMAL, **rules).sites(Net() if net is None else net))


ALL = [name for name, parameter in Net().named_parameters() if parameter.requires_grad]
NORMS = [name for name in ALL if ".norm." in name]
CONVOLUTIONS = [name for name in ALL if ".conv." in name]
BIASES = [name for name in ALL if name.endswith("bias")]


def without(*names):
    return [name for name in ALL if name not in names]


TIED = "encoder.weight"  # of which "decoder.weight" is another name
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
    "hide modules, tied": ({"hide_modules": ["decoder"]}, without(TIED, "decoder.bias")),
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
    "hide fn, tied": ({"hide_fn": lambda _, name: name == "decoder.weight"}, without(TIED)),
    "expose fn": ({"expose_fn": lambda module, _: module.__class__ is nn.Conv1d}, CONVOLUTIONS),
    "expose, then hide": (
        {"expose_modules": ["head", "encoder"], "hide_parameters": ["bias"]},
        ["encoder.weight", "head.weight"],
    ),
    "two exposing rules": (
        {"expose": ["body.0.norm.bias"], "expose_modules": ["head"]},
        ["body.0.norm.bias", *HEAD],
    ),
    "one that exposes nothing": (
        {"expose_module_types": [nn.Conv2d], "expose": ["head.bias"]},
        ["head.bias"],
    ),
    "two hiding rules": ({"hide": [TIED], "hide_parameters": ["bias"]}, without(TIED, *BIASES)),
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


WRONG = [
    ({"hide_layers": ["a"]}, ValueError, "a rule is 'hide_layers'; expected one of"),
    ({"hide": "head.bias"}, TypeError, r"expected a list: hide=\['head.bias'\]"),
    ({"hide_module_types": nn.Linear}, TypeError, "is the class Linear; expected"),
    ({"hide": nn.Linear(1, 1)}, TypeError, "hide is a Linear; expected a list"),
    ({"expose_module_types": ["Norm", nn.Linear]}, TypeError, "expected a class, such as"),
    ({"hide_fn": ["bias"]}, TypeError, "expected a function of"),
    ({"hide_all": True, "expose": ["head.bias"]}, ValueError, "hide_all=True contradicts expose"),
]


@pytest.mark.parametrize(("rules", "error", "match"), WRONG)
def test_wrong_rules_are_refused_at_once(rules, error, match):
    with pytest.raises(error, match=match):
        IIDPrior(NORMAL, **rules)


NOT_OF_THE_NET = [
    ({"hide": ["head.wieght"]}, "hide names 'head.wieght', which the net does not have; it"),
    ({"expose": ["tail.*"]}, r"expose names 'tail\.\*'"),
    ({"hide_modules": ["tail"]}, "hide_modules names 'tail'"),
    ({"expose_modules": [nn.Linear(1, 1)]}, "expose_modules names a Linear module"),
    ({"expose_modules": nn.Linear(1, 1)}, "expose_modules names a Linear module"),
    ({"hide_parameters": ["biass"]}, "hide_parameters names 'biass', .*; it has frozen, weight, b"),
    ({"expose_parameters": ["bias", "gain"]}, "expose_parameters names 'gain', which"),
    ({"hide": ["head.*"], "expose": ["head.bias"]}, "hide and expose both name 'head.bias'"),
    ({"hide_modules": ["head"], "expose_modules": ["*"]}, "_modules and expose_modules both name"),
    (
        {"hide_module_types": [nn.Linear], "expose_module_types": [nn.Module]},
        "hide_module_types and expose_module_types both name",
    ),
    (
        {"expose_module_types": [nn.Conv2d], "expose_fn": lambda module, name: False},
        "expose_module_types, expose_fn expose no parameter of the net; it has frozen, body",
    ),
    ({"expose": []}, "expose expose no parameter of the net"),
]


@pytest.mark.parametrize(("rules", "match"), NOT_OF_THE_NET)
def test_rules_that_do_not_fit_the_net_are_refused(rules, match):
    net = Net()
    with pytest.raises(ValueError, match=match):
        IIDPrior(NORMAL, **rules).apply_(net)
    assert pyro_sample_sites(net) == []


def test_types_take_all_that_is_inside():
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    net = nn.Sequential(
        nn.Linear(3, 4), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    )
    inside = [name for name, _ in net.named_parameters() if name.startswith("1.layers")]
    hidden = sites(net, hide_module_types=[nn.TransformerEncoderLayer])
    assert hidden == ["0.weight", "0.bias"]
    assert sites(net, expose_module_types=[nn.TransformerEncoderLayer]) == inside


class Gated(nn.Sequential):
    """Layers, and a parameter of their own."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.gate = nn.Parameter(torch.ones(()))


def test_one_module_in_a_lists_place_is_taken_with_its_own_parameters():
    net = nn.Sequential(Gated(nn.Linear(2, 2)), nn.Linear(2, 1))
    assert sites(net, expose_modules=net[0]) == ["0.gate", "0.0.weight", "0.0.bias"]
    assert sites(net, hide_modules=net[0]) == ["1.weight", "1.bias"]
    assert sites(net[1], expose_modules=net[1]) == ["weight", "bias"]


def test_a_module_without_parameters_hides_nothing():
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with pytest.raises(ValueError, match=r"hide_modules hide no parameter .*; it has 0.weight, "):
        sites(net, hide_modules=["1"])
    assert sites(net, hide_modules=["1", "0"]) == sites(net, hide_all=True) == []
    assert sites(net, hide_modules=[], hide_parameters=[]) == ["0.weight", "0.bias"]
    with pytest.raises(ValueError, match="does not have; it has no parts, and is one itself"):
        sites(nn.Linear(2, 1), expose_modules=["0"])
