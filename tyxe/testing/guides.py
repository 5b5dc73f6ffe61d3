"""The contracts of guides and of priors."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributions as td
from pyro.infer import autoguide
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from tyxe.distributions import Gaussian, JointMarginal, ParamBlocks, SignedBernoulli
from tyxe.guides import AutoNormal, AutoRadial, Guide, PyroGuide
from tyxe.guides.base import AnyGuide
from tyxe.linalg import LowRank
from tyxe.priors import BinaryPrior, DictPrior, IIDPrior, LambdaPrior, LayerwiseNormalPrior, Prior
from tyxe.priors.mapping import SubnetworkPrior
from tyxe.priors.sites import SitePriors
from tyxe.rng import torch_rng_kept
from tyxe.testing.asserts import assert_close, assert_raises, check_density
from tyxe.util import is_discrete, part_of, pyro_sample_sites


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


Builder = Callable[[Callable[..., Any]], Any]


GUIDES: dict[str, Builder] = {
    "AutoNormal": AutoNormal,
    "AutoNormal, capped": functools.partial(AutoNormal, max_guide_scale=0.5),
    "AutoNormal, means fixed": functools.partial(AutoNormal, train_loc=False),
    "AutoNormal, scales fixed": functools.partial(AutoNormal, train_scale=False),
    "AutoRadial": AutoRadial,
    "pyro AutoDelta": autoguide.AutoDelta,
    "pyro AutoNormal": autoguide.AutoNormal,
    "pyro AutoDiagonalNormal": autoguide.AutoDiagonalNormal,
    "pyro AutoMultivariateNormal": autoguide.AutoMultivariateNormal,
    "pyro AutoLowRankMultivariateNormal": functools.partial(
        autoguide.AutoLowRankMultivariateNormal, rank=2
    ),
}


def check_guide(builder: Builder, program: SitePriors | None = None) -> None:
    """Assert that a guide is a module, a Pyro program and a posterior over the same sites.

    Args:
        builder: a BNN's `net_guide_builder`.
        program: the sites and their priors, in float64; those of a small net by default.

    Example:
        >>> check_guide(AutoRadial)
    """
    if program is None:
        net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        program = SitePriors(IIDPrior(dist.Normal(0.0, 1.0)).sites(net), net)
    guide = PyroGuide.build(builder, program)
    _disturb(guide)
    prior = _nodes_of(program)
    _check_samples(guide, prior)
    # Discrete draws have no gradient; only the outputs of handlers do.
    if not any(is_discrete(node["fn"].support) for node in prior.values()):
        _check_draws_differentiable(guide)
    _check_copies(guide, functools.partial(PyroGuide.build, builder, program))
    trained = {name for name, p in guide.named_parameters() if p.requires_grad}
    missing = trained - set(guide.parameter_kinds())
    assert not missing, f"parameter_kinds leaves out {sorted(missing)}"
    _check_median(guide, prior)
    _check_detached(guide, program, prior)
    store = sorted(pyro.get_param_store().keys())
    assert not store, f"the guide left {store} in Pyro's global parameter store"


def _disturb(guide: AnyGuide) -> None:
    """Move every parameter from its start, because means of 0 hide errors."""
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def _nodes_of(program: Callable[..., Any]) -> dict[str, Any]:
    """Return what a program's trace has of its sites."""
    trace = poutine.trace(program).get_trace()
    trace.compute_log_prob()
    nodes = {name: trace.nodes[name] for name in trace.stochastic_nodes}
    return {n: node for n, node in nodes.items() if not node["infer"].get("is_auxiliary")}


def _draw(guide: AnyGuide) -> dict[str, Tensor]:
    with torch_rng_kept():
        torch.manual_seed(0)
        return {name: node["value"] for name, node in _nodes_of(guide).items()}


def _check_value(value: Tensor, node: Any, what: str) -> None:
    """Assert that a value is one of a prior's site."""
    expected = node["value"]
    assert value.shape == expected.shape, f"{what} has shape {value.shape}"
    assert value.dtype == expected.dtype, f"{what} is {value.dtype}"
    inside = node["fn"].support.check(value).all()
    assert bool(inside), f"{what} lies outside the support of its prior"


def _check_samples(guide: AnyGuide, prior: dict[str, Any]) -> None:
    nodes, names = _nodes_of(guide), prior.keys()
    assert nodes.keys() == names, f"the guide samples {sorted(nodes)}, the prior {sorted(names)}"
    returned = guide()
    assert set(returned) >= names, f"forward returns {sorted(returned)}, expected {sorted(names)}"
    for name, node in nodes.items():
        _check_value(node["value"], prior[name], f"a draw of {name!r}")
        assert bool(node["log_prob"].isfinite().all()), f"log_prob of {name!r} is not finite"
    if isinstance(guide, Guide):
        posterior = guide.posterior()
        assert set(posterior) == names, f"posterior has {sorted(posterior)}"


class _FirstSamples(TorchDispatchMode):
    """Moves the first samples of Gamma and Dirichlet along PyTorch's derivative of a sample.

    Their samplers reject, so with one seed a sample jumps where its parameters move a little.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._first: list[tuple[Tensor, Tensor]] = []
        self.count = 0  # of samples in this draw of the guide

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_gamma = func.overloadpacket is torch.ops.aten._standard_gamma
        if not is_gamma and func.overloadpacket is not torch.ops.aten._sample_dirichlet:
            return func(*args, **(kwargs or {}))
        if self.count == len(self._first):
            self._first.append((args[0].clone(), func(*args, **(kwargs or {}))))
        start, value = self._first[self.count]
        self.count += 1
        if is_gamma:
            return value + torch._standard_gamma_grad(start, value) * (args[0] - start)
        total = start.sum(-1, keepdim=True).expand_as(start)
        change = torch._dirichlet_grad(value, start, total) * (args[0] - start)
        return value + change - value * change.sum(-1, keepdim=True)


def _check_draws_differentiable(guide: AnyGuide) -> None:
    """Compare gradients through draws with central differences along random directions."""
    parameters = [p for p in guide.parameters() if p.requires_grad]
    samples = _FirstSamples()

    def objective(*moved: Tensor) -> Any:  # the guide's own parameters, in place
        samples.count = 0
        draws = [
            d * torch.linspace(1, 2, d.numel(), device="cpu").to(d).view_as(d)
            for d in _draw(guide).values()
        ]
        return sum(map(torch.sum, draws)) + 0 * sum(map(torch.sum, moved))

    near = functools.partial(gradcheck, eps=1e-5, atol=1e-6, rtol=1e-6, fast_mode=True)
    with samples:
        objective()
        right = near(objective, parameters, raise_exception=False)
    assert right, "the gradient of a draw is not that of central differences"


def _assert_same_draws(guide: AnyGuide, other: AnyGuide, what: str) -> None:
    draws = _draw(guide)
    for name, value in _draw(other).items():
        assert torch.equal(value, draws[name]), f"{what}: other draws of {name!r}"


def _check_copies(guide: AnyGuide, build: Callable[[], AnyGuide]) -> None:
    fresh = build()
    fresh.load_state_dict(guide.state_dict())
    _assert_same_draws(guide, fresh, "a state dict loaded into a fresh guide")
    copied = copy.deepcopy(guide)
    _assert_same_draws(guide, copied, "deepcopy")
    _assert_same_draws(guide, pickle.loads(pickle.dumps(guide)), "pickle")
    _disturb(copied)
    _assert_same_draws(guide, fresh, "disturbing a deepcopy changed the original")
    for dtype in (torch.float32, torch.float64):
        for name, value in _draw(copied.to(dtype)).items():
            assert value.dtype == dtype, f".to({dtype}) draws {name!r} in {value.dtype}"


def _check_median(guide: AnyGuide, prior: dict[str, Any]) -> None:
    guide = copy.deepcopy(guide)
    median, names = guide.median(), prior.keys()
    assert set(median) == names, f"median has {sorted(median)}, expected {sorted(names)}"
    for name, value in median.items():
        _check_value(value, prior[name], f"the median of {name!r}")
        assert not value.requires_grad, f"the median of {name!r} requires a gradient"
    before = {name: value.clone() for name, value in median.items()}
    _disturb(guide)
    for name, value in median.items():
        assert torch.equal(value, before[name]), f"the median of {name!r} moves with the guide"


def _check_detached(guide: AnyGuide, program: SitePriors, prior: dict[str, Any]) -> None:
    guide = copy.deepcopy(guide)
    try:
        found = guide.get_detached_distributions()
    except TypeError:
        # A guide that couples its sites has no distribution for each, and may raise.
        assert not isinstance(guide, Guide), "a Guide has a distribution for each site"
        return
    own = [name.removeprefix(program.prefix) for name in prior]
    assert sorted(found) == sorted(own), f"detached distributions of {sorted(found)}"
    values = {name: q.sample() for name, q in found.items()}
    before = {name: q.log_prob(values[name]) for name, q in found.items()}
    for name, log_prob in before.items():
        assert not log_prob.requires_grad, f"the distribution of {name!r} has a gradient"
        joint = program.prefix + name
        spelled = guide.get_detached_distributions([joint])
        assert list(spelled) == [joint], f"asked for {joint!r}, got {list(spelled)}"
        assert_close(spelled[joint].log_prob(values[name]), log_prob, "the two spellings")
    _disturb(guide)
    for name, q in found.items():
        same = torch.equal(q.log_prob(values[name]), before[name])
        assert same, f"the distribution of {name!r} moves with the guide"
    assert_raises(
        ValueError, lambda: guide.get_detached_distributions(["no.such"]), "an unknown site"
    )
    DictPrior({name: found[name] for name in program.names()})
    # Not the KLs of joint distributions, which may be those of more variables than the sites.
    joints = {id(q.joint): q.joint for q in found.values() if isinstance(q, JointMarginal)}
    for joint in joints.values():
        check_density(joint, joint.name)
    for name, q in found.items():
        check_density(q, repr(name), prior[program.prefix + name]["fn"])
