"""The contract of guides."""

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
from pyro.infer import autoguide
from torch import Tensor, nn

from tyxe.distributions.moments import is_discrete
from tyxe.guides import AutoNormal, AutoRadial, Guide, PyroGuide
from tyxe.priors import DictPrior, IIDPrior
from tyxe.priors.sites import SitePriors
from tyxe.rng import torch_rng_kept
from tyxe.testing.asserts import assert_close, assert_raises

AnyGuide = Guide | PyroGuide
Builder = Callable[[Callable[..., Any]], Any]


def _low_rank(module: Callable[..., Any]) -> Any:
    return autoguide.AutoLowRankMultivariateNormal(module, rank=2)


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
    "pyro AutoLowRankMultivariateNormal": _low_rank,
}


def check_guide(builder: Builder, program: SitePriors | None = None) -> None:
    """Assert that a guide is a module, a Pyro program and a posterior over the same sites.

    Args:
        builder: a BNN's `net_guide_builder`.
        program: the sites and their priors, in float64; those of a small net by default.

    Raises:
        AssertionError: with the rule that is broken.

    Example:
        >>> check_guide(AutoRadial)
    """
    if program is None:
        net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        program = SitePriors(IIDPrior(dist.Normal(0.0, 1.0)).sites(net), net)
    guide = PyroGuide.build(builder, program)
    _disturb(guide)
    _check_program(guide, program)
    # Discrete draws have no gradient; only the outputs of handlers do.
    if not _has_discrete_sites(program):
        _check_draws_differentiable(guide)
    _check_copies(guide, functools.partial(PyroGuide.build, builder, program))
    _check_kinds(guide)
    _check_median(guide, program)
    _check_detached(guide, program)
    store = sorted(pyro.get_param_store().keys())
    assert not store, f"the guide left {store} in Pyro's global parameter store"


def _disturb(guide: AnyGuide) -> None:
    """Move every parameter from its start, because means of 0 hide errors."""
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


def _draw(guide: AnyGuide, seed: int = 0) -> dict[str, Tensor]:
    with torch_rng_kept():
        torch.manual_seed(seed)
        trace = poutine.trace(guide).get_trace()
    return {
        name: trace.nodes[name]["value"]
        for name in trace.stochastic_nodes
        if not trace.nodes[name]["infer"].get("is_auxiliary")
    }


def _has_discrete_sites(program: SitePriors) -> bool:
    nodes = poutine.trace(program).get_trace().nodes
    return any(is_discrete(nodes[name]["fn"].support) for name in _joint_names(program))


def _joint_names(program: SitePriors) -> list[str]:
    return poutine.trace(program).get_trace().stochastic_nodes


def _check_program(guide: AnyGuide, program: SitePriors) -> None:
    names = set(_joint_names(program))
    prior = poutine.trace(program).get_trace()
    trace = poutine.trace(guide).get_trace()
    trace.compute_log_prob()
    sampled = {
        name
        for name in trace.stochastic_nodes
        if not trace.nodes[name]["infer"].get("is_auxiliary")
    }
    assert sampled == names, f"the guide samples {sorted(sampled)}, the prior {sorted(names)}"
    returned = guide()
    assert set(returned) >= names, f"forward returns {sorted(returned)}, expected {sorted(names)}"
    for name in names:
        node, expected = trace.nodes[name], prior.nodes[name]
        shape = expected["value"].shape
        assert node["value"].shape == shape, f"{name!r} has shape {node['value'].shape}"
        assert node["value"].dtype == expected["value"].dtype, f"{name!r} is {node['value'].dtype}"
        assert bool(node["log_prob"].isfinite().all()), f"log_prob of {name!r} is not finite"
        inside = expected["fn"].support.check(node["value"]).all()
        assert bool(inside), f"a draw of {name!r} lies outside the support of its prior"
    if isinstance(guide, Guide):
        posterior = guide.posterior()
        assert set(posterior) == names, f"posterior has {sorted(posterior)}"


def _objective(guide: AnyGuide) -> Tensor:
    draws = _draw(guide).values()
    return sum((d * torch.linspace(1, 2, d.numel()).to(d).view_as(d)).sum() for d in draws)  # type: ignore[return-value]


def _check_draws_differentiable(guide: AnyGuide, step: float = 1e-5) -> None:
    """Compare gradients through draws with central differences along a random direction."""
    parameters = [p for p in guide.parameters() if p.requires_grad]
    objective = _objective(guide) + 0 * sum(parameter.sum() for parameter in parameters)
    gradients = torch.autograd.grad(objective, parameters, allow_unused=True)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        direction = torch.randn_like(parameter)
        with torch.no_grad():
            parameter.add_(step * direction)
            above = _objective(guide)
            parameter.sub_(2 * step * direction)
            below = _objective(guide)
            parameter.add_(step * direction)
        expected = (above - below) / (2 * step)
        actual = torch.zeros(()) if gradient is None else (gradient * direction).sum()
        assert_close(actual.to(expected), expected, "gradient of a draw", rtol=1e-6)


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


def _check_kinds(guide: AnyGuide) -> None:
    kinds = guide.parameter_kinds()
    names = {name for name, p in guide.named_parameters() if p.requires_grad}
    missing = names - set(kinds)
    assert not missing, f"parameter_kinds leaves out {sorted(missing)}"


def _check_median(guide: AnyGuide, program: SitePriors) -> None:
    median = guide.median()
    prior = poutine.trace(program).get_trace()
    names = set(_joint_names(program))
    assert set(median) == names, f"median has {sorted(median)}, expected {sorted(names)}"
    for name, value in median.items():
        expected = prior.nodes[name]
        assert value.shape == expected["value"].shape, f"median of {name!r} has {value.shape}"
        assert not value.requires_grad, f"the median of {name!r} requires a gradient"
        shared = value.untyped_storage().data_ptr() in _storages(guide)
        assert not shared, f"the median of {name!r} shares storage with the guide"
        assert bool(expected["fn"].support.check(value).all()), f"median of {name!r} off support"


def _check_detached(guide: AnyGuide, program: SitePriors) -> None:
    try:
        found = guide.get_detached_distributions()
    except TypeError:
        # A guide that couples its sites has no distribution for each, and may raise.
        assert not isinstance(guide, Guide), "a Guide has a distribution for each site"
        return
    own = [name.removeprefix(program.prefix) for name in _joint_names(program)]
    assert sorted(found) == sorted(own), f"detached distributions of {sorted(found)}"
    storages = _storages(guide)
    for name, q in found.items():
        value = q.sample()
        assert not q.log_prob(value).requires_grad, f"the distribution of {name!r} has a gradient"
        for tensor in _tensors(q):
            shared = tensor.untyped_storage().data_ptr() in storages
            assert not shared, f"the distribution of {name!r} shares storage with the guide"
        joint = program.prefix + name
        spelled = guide.get_detached_distributions([joint])
        assert list(spelled) == [joint], f"asked for {joint!r}, got {list(spelled)}"
        assert_close(spelled[joint].log_prob(value), q.log_prob(value), "the two spellings")
    assert_raises(
        ValueError, lambda: guide.get_detached_distributions(["no.such"]), "an unknown site"
    )
    priors = {name: found[name] for name in program.names()}
    DictPrior(priors)


def _storages(guide: AnyGuide) -> set[int]:
    return {p.untyped_storage().data_ptr() for p in guide.parameters()}


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, torch.distributions.Distribution | torch.distributions.Transform):
        children = [v for k, v in vars(value).items() if k != "_inv"]
    elif isinstance(value, list | tuple):
        children = list(value)
    else:
        return []
    return [tensor for child in children for tensor in _tensors(child)]
