"""The contract of priors."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributions as td
from torch import nn

from tyxe.distributions import Gaussian, ParamBlocks, SignedBernoulli
from tyxe.linalg import LowRank
from tyxe.priors import BinaryPrior, DictPrior, IIDPrior, LambdaPrior, LayerwiseNormalPrior, Prior
from tyxe.priors.single_weights import SubnetworkPrior
from tyxe.priors.sites import SitePriors, part_of
from tyxe.testing.asserts import assert_close
from tyxe.util import is_discrete, pyro_sample_sites


def example_net() -> nn.Module:
    """Return a small net with a convolution, a norm, a buffer and a frozen parameter."""
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3), nn.Linear(3, 1)
    )
    net[4].bias.requires_grad_(False)
    return net


def _by_name() -> Prior:
    named = example_net().named_parameters()
    return DictPrior({name: dist.Laplace(0.0, 1.0).expand(p.shape) for name, p in named})


def _joint_normal() -> Prior:
    shapes = {f"net.{name}": p.shape for name, p in example_net().named_parameters()}
    blocks = ParamBlocks.of_sites(shapes)
    precision = LowRank(
        torch.ones(blocks.size, device="cpu"),
        torch.ones(blocks.size, 1, device="cpu") / blocks.size,
    )
    joint = Gaussian(blocks, torch.zeros(blocks.size, device="cpu"), precision)
    return DictPrior({name: joint.marginal(name) for name in joint.names}, expose=["*"])


# Each function makes a prior that fits `example_net()`.
PRIORS: dict[str, Callable[[], Prior]] = {
    "IIDPrior": lambda: IIDPrior(dist.Normal(0.0, 1.0)),
    "IIDPrior, heavy tails": lambda: IIDPrior(dist.StudentT(3.0, 0.0, 1.0)),
    "IIDPrior, no norms": lambda: IIDPrior(
        dist.Laplace(0.0, 1.0), hide_module_types=[nn.BatchNorm2d]
    ),
    "IIDPrior, last layer": lambda: IIDPrior(dist.Normal(0.0, 1.0), expose_modules=["4"]),
    "IIDPrior, nothing": lambda: IIDPrior(dist.Normal(0.0, 1.0), hide_all=True),
    "LayerwiseNormalPrior, radford": lambda: LayerwiseNormalPrior("radford"),
    "LayerwiseNormalPrior, xavier": lambda: LayerwiseNormalPrior("xavier"),
    "LayerwiseNormalPrior, kaiming": lambda: LayerwiseNormalPrior("kaiming"),
    "IIDPrior, two values": lambda: IIDPrior(SignedBernoulli(0.5)),
    "BinaryPrior": lambda: BinaryPrior(scale="radford", hide_module_types=[nn.BatchNorm2d]),
    "BinaryPrior, beta": lambda: BinaryPrior(delta=0.1),
    "DictPrior": _by_name,
    "DictPrior, a joint Normal": _joint_normal,
    "LambdaPrior": lambda: LambdaPrior(
        lambda name, module, param: dist.Normal(0.0, 1.0 + param.dim()).expand(param.shape)
    ),
    "SubnetworkPrior": lambda: SubnetworkPrior(LayerwiseNormalPrior("xavier"), 9, "random"),
}


def check_prior(prior: Prior, net: nn.Module | None = None) -> None:
    """Assert that a prior chooses parameters, fits them, and does not change the net.

    Args:
        prior: any prior.
        net: a net that it fits; a small convolutional one by default.

    Example:
        >>> check_prior(IIDPrior(dist.Normal(0, 1)), nn.Linear(2, 1))
    """
    net = example_net() if net is None else net
    _check_sites(prior, net)
    _check_net_untouched(prior, net)
    for dtype in (torch.float32, torch.float64):
        _check_program(prior, copy.deepcopy(net).to(dtype), dtype)
    _check_update(prior, net)


def _check_sites(prior: Prior, net: nn.Module) -> None:
    parameters, elements = dict(net.named_parameters()), prior.elements(net)
    for name, site in prior.sites(net).items():
        assert name in parameters, f"site {name!r} is no parameter of the net"
        if isinstance(site, td.Distribution):
            assert site.batch_shape == (), f"site {name!r} has batch shape {site.batch_shape}"
            shape = part_of(parameters[name], elements.get(name)).shape
            assert site.event_shape == shape, (
                f"site {name!r} has event shape {site.event_shape} for a parameter of shape {shape}"
            )


def _check_net_untouched(prior: Prior, net: nn.Module) -> None:
    applied = copy.deepcopy(net)
    before = {name: value.clone() for name, value in applied.state_dict().items()}
    gradients = [parameter.requires_grad for parameter in applied.parameters()]
    prior.apply_(applied)
    assert type(applied) is type(net), "apply_ changed the class of the net"
    assert "forward" not in vars(applied), "apply_ replaced the forward of the net"
    assert list(applied.state_dict()) == list(before), "apply_ changed the state dict's names"
    for name, value in applied.state_dict().items():
        assert torch.equal(value, before[name]), f"apply_ changed the value of {name!r}"
    assert gradients == [p.requires_grad for p in applied.parameters()], (
        "apply_ changed which parameters require a gradient"
    )


def _check_program(prior: Prior, net: nn.Module, dtype: torch.dtype) -> None:
    sites = prior.sites(net)
    program = SitePriors(sites, net, "net.", prior.elements(net))
    trace = poutine.trace(program).get_trace()
    trace.compute_log_prob()
    parameters = dict(net.named_parameters())
    for name in sites:
        node = trace.nodes.get(f"net.{name}")
        assert node is not None, f"the program does not sample net.{name}"
        value = node["value"]
        shape = program.part_of(name, parameters[name]).shape
        assert value.shape == shape, f"a draw of {name!r} has shape {value.shape}"
        assert value.dtype == dtype, f"a draw of {name!r} is {value.dtype} for a {dtype} net"
        assert value.device == parameters[name].device, f"a draw of {name!r} is on {value.device}"
        assert bool(node["log_prob"].isfinite().all()), f"log_prob of a draw of {name!r}"
        assert_close(node["log_prob"], node["fn"].log_prob(value), f"log_prob of {name!r}")


def _check_update(prior: Prior, net: nn.Module) -> None:
    applied = copy.deepcopy(net)
    sites = prior.sites(net)
    rules = {"expose": list(sites)} if sites else {"hide_all": True}
    # A discrete prior only replaces one over the same values, and a hierarchy one of its variables.
    own_kind = any(
        not isinstance(site, td.Distribution) or is_discrete(site.support)
        for site in sites.values()
    )
    same = LambdaPrior(lambda name, *_: sites[name], **rules)
    (same if own_kind else IIDPrior(dist.Normal(0.0, 2.0), **rules)).apply_(applied)
    before = pyro_sample_sites(applied)
    prior.update_(applied)
    assert pyro_sample_sites(applied) == before, "update_ changed which parameters are sites"
    applied = copy.deepcopy(net)
    prior.apply_(applied)
    assert pyro_sample_sites(applied) == list(prior.sites(net)), (
        "apply_ recorded other sites than the prior lists"
    )
