"""Tools for modules: names of sites, fans, activations, containers of named tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributions as td
from pyro.nn.module import PyroModule
from pyro.nn.module import to_pyro_module_ as to_pyro_module_  # offered from here
from torch import Tensor, nn
from torch.distributions import constraints
from torch.overrides import BaseTorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from tyxe import check

T = TypeVar("T", Tensor, tuple[Tensor, ...])

# What a net takes of a batch: a tensor or graph, a tuple of arguments, or a mapping of keywords.
Inputs = Any

SITE_PRIORS = "_tyxe_site_priors"  # where `Prior.apply_` records a net's sites
NET = "_tyxe_net"  # where a BNN says which of its parts is the net
_ALIGNMENT = 16  # bytes that kernels of GPUs read at once


# --------------------------------------------------------------------------- sites of a net


def last_layer(net: nn.Module) -> nn.Module:
    """Return the layer that a net names last among those with a matrix of weights.

    In most nets this layer computes the outputs; for others, name that layer yourself.

    Raises:
        ValueError: no part of the net has a weight of two dimensions or more.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> last_layer(net)
        Linear(in_features=4, out_features=1, bias=True)
        >>> prior = tyxe.priors.IIDPrior(
        ...     dist.Normal(0, 1), expose_all=False, expose_modules=[last_layer(net)])
        >>> list(prior.sites(net))
        ['2.weight', '2.bias']
    """
    found = [
        module
        for module in net.modules()
        if any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))
    ]
    if not found:
        raise ValueError(f"{type(net).__name__} has no layer with a matrix of weights")
    return found[-1]


def named_pyro_samples(net: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield `(name, prior)` for every parameter of a net that is a site.

    Sites are those that `Prior.apply_` recorded, and the `PyroSample` attributes of modules that
    were written for Pyro.

    Args:
        net: a BNN or `bnn.net`, a net that went through `prior.apply_`, or a `PyroModule`.

    Yields:
        The site's name in the net, such as `0.weight`, and its distribution (or the function of
        Pyro statements that returns it, for a hierarchical prior).

    Example:
        >>> import tyxe, pyro.distributions as dist
        >>> net = nn.Linear(2, 1)
        >>> tyxe.priors.IIDPrior(dist.Normal(0, 1)).apply_(net)
        >>> [name for name, _ in named_pyro_samples(net)]
        ['weight', 'bias']
    """
    net = net.__dict__.get(NET, net)
    recorded = net.__dict__.get(SITE_PRIORS)
    if recorded is not None:
        yield from recorded.priors()
    for prefix, module in net.named_modules():
        if isinstance(module, PyroModule):
            for name, prior in module._pyro_samples.items():
                yield (f"{prefix}.{name}" if prefix else name), prior


def pyro_sample_sites(net: nn.Module) -> list[str]:
    """Return the names of a net's sites, in the order of its parameters, also for its BNN.

    Example:
        >>> import tyxe, pyro.distributions as dist
        >>> prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_parameters=["bias"])
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> prior.apply_(net)
        >>> pyro_sample_sites(net)
        ['0.weight', '1.weight']
    """
    return [name for name, _ in named_pyro_samples(net)]


def site_spellings(site: str) -> tuple[str, ...]:
    """Return how a joint model's site may be called: in full, after its BNN's name, in the net."""
    # Before `net.` comes the name of a BNN; after it, parts of the net may be called `net` too.
    joint = site if site.startswith("net.") else site[site.find(".net.") + 1 :]
    return site, joint, joint.removeprefix("net.")


def resolve_site_name(name: str, known: Iterable[str], prefix: str = "net.") -> str:
    """Return the member of `known` that is `name` with or without the joint model's prefix."""
    check.one_of("a site's name", name, str, "a string")
    members = list(known)
    for candidate in (name, prefix + name, name.removeprefix(prefix)):
        if candidate in members:
            return candidate
    raise ValueError(f"there is no site {name!r}; expected one of {', '.join(members) or 'none'}")


# --------------------------------------------------------------------------- fans


def fan_in_fan_out(weight: Tensor, module: nn.Module | None = None) -> tuple[float, float]:
    """Return how many inputs feed one output of a weight, and how many outputs one input feeds.

    For a matrix `(out, in)` these are `in` and `out`; a convolution multiplies both by its kernel's
    size. The module is needed for what the tensor's shape does not say: transposed convolutions
    have shape `(in, out / groups, ...)`; grouped ones feed `out / groups` channels from one input;
    an output of a transposed convolution reads one in `stride` of the kernel's positions in each
    direction, on average over outputs;
    the stacked matrices of attention (3) and of recurrent cells (3 or 4 gates) are several maps in
    one tensor; a row of an embedding and a norm's scale have fan-in 1.

    Args:
        weight: the parameter, of any shape; vectors have fans `(1, 1)`.
        module: the module that owns it.

    Returns:
        `(fan_in, fan_out)`.

    Example:
        >>> conv = nn.ConvTranspose2d(8, 4, 3, groups=2)
        >>> fan_in_fan_out(conv.weight, conv)
        (36.0, 18.0)
    """
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return 1.0, 1.0
    if weight.dim() < 2 or isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return 1.0, float(weight.shape[-1]) if weight.dim() > 1 else 1.0
    groups = int(getattr(module, "groups", 1))
    kernel = math.prod(weight.shape[2:])
    if getattr(module, "transposed", False):
        strides = math.prod(getattr(module, "stride", (1,)))
        fan_in, fan_out = weight.shape[0] / groups / strides, float(weight.shape[1])
    else:
        fan_in, fan_out = float(weight.shape[1]), weight.shape[0] / groups
    stacked = _stacked_maps(weight, module)
    return float(fan_in * kernel), float(fan_out * kernel) / stacked


def _stacked_maps(weight: Tensor, module: nn.Module | None) -> int:
    if isinstance(module, nn.MultiheadAttention) and weight is module.in_proj_weight:
        return 3
    if isinstance(module, nn.RNNBase | nn.RNNCellBase) and weight.shape[0] != getattr(
        module, "proj_size", 0
    ):
        return weight.shape[0] // module.hidden_size
    return 1


def layer_weight(module: nn.Module, name: str) -> Tensor:
    """Return the weight whose fans a parameter has: for a `bias`, the layer's `weight`."""
    parameters = dict(module.named_parameters(recurse=False))
    sibling = parameters.get(name.replace("bias", "weight"))
    return parameters[name] if sibling is None else sibling


def calculate_prior_std(
    method: str,
    weight: Tensor,
    module: nn.Module | None = None,
    nonlinearity: str = "relu",
) -> float:
    r"""Return a layer-wise standard deviation.

    `radford`: `1 / sqrt(fan_in)`; `xavier`: `sqrt(2 / (fan_in + fan_out))`; `kaiming`:
    `gain / sqrt(fan_in)`, with PyTorch's gain of the nonlinearity (`sqrt(2)` for ReLU).

    Args:
        method: `"radford"`, `"xavier"` or `"kaiming"`.
        weight: the layer's weight.
        module: the layer, for `fan_in_fan_out`.
        nonlinearity: the one after the layer, by its name in `torch.nn.init.calculate_gain`.

    Raises:
        ValueError: an unknown method.

    Example:
        >>> calculate_prior_std("radford", torch.zeros(10, 25))
        0.2
    """
    return std_from_fans(method, *fan_in_fan_out(weight, module), nonlinearity)


def std_from_fans(method: str, fan_in: float, fan_out: float, nonlinearity: str = "relu") -> float:
    """Return the standard deviation of `calculate_prior_std` for given fans.

    Raises:
        ValueError: an unknown method.
    """
    formulas: dict[str, Callable[[], float]] = {
        "radford": lambda: fan_in**-0.5,
        "xavier": lambda: math.sqrt(2.0 / (fan_in + fan_out)),
        "kaiming": lambda: nn.init.calculate_gain(nonlinearity) * fan_in**-0.5,  # type: ignore[arg-type]
    }
    check.choice("method", method, formulas)
    return formulas[method]()


# --------------------------------------------------------------------------- nets and inputs


def named_tensors(net: nn.Module) -> dict[str, Tensor]:
    """Return a net's parameters and buffers by name."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def reset_parameters_(net: nn.Module, names: Iterable[str] | None = None) -> nn.Module:
    """Reset a net in place: call `reset_parameters()` of every module that has it.

    Members of an ensemble need different starts. For a trained body and a new head, pass the head.

    Args:
        net: the net, or a part of it.
        names: the parameters that have to be reset; all by default.

    Returns:
        The net.

    Raises:
        ValueError: a parameter of a module without `reset_parameters()`.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> before = net.weight.clone()
        >>> bool((reset_parameters_(net).weight != before).any())
        True
    """
    parameters = dict(net.named_parameters())
    before = {name: p.detach().clone() for name, p in parameters.items()}
    reached: set[int] = set()
    # Parts before the whole, which may set some of what they have drawn, as attention does.
    for module in reversed([*net.modules()]):
        # That of attention is private.
        reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if callable(reset):
            reset()
            reached |= {id(p) for p in module.parameters(recurse=False)}
    for name in parameters if names is None else names:
        p = parameters[name]
        if id(p) not in reached and torch.equal(p.detach(), before[name]):
            raise ValueError(
                f"the module of {name!r} has no reset_parameters() to initialise it anew: give it "
                "one, or make the net, or the starts, yourself"
            )
    return net


def replace_activations_(
    net: nn.Module, old: type[nn.Module], new: Callable[[], nn.Module]
) -> nn.Module:
    """Replace every submodule of one type, at any depth and in place, and return the net.

    Args:
        net: the module.
        old: the type to replace, such as `nn.ReLU`.
        new: makes the replacement, such as `nn.Softplus`.

    Raises:
        ValueError: the net has no such submodule (functional calls such as `F.relu` cannot be
            replaced from outside).

    Example:
        >>> replace_activations_(nn.Sequential(nn.Linear(1, 2), nn.ReLU()), nn.ReLU, nn.Tanh)
        Sequential(
          (0): Linear(in_features=1, out_features=2, bias=True)
          (1): Tanh()
        )
    """
    places = [
        (parent, name)
        for parent in net.modules()
        for name, child in parent.named_children()
        if isinstance(child, old)
    ]
    if not places:
        raise ValueError(
            f"the net has no submodule of type {old.__name__}; a functional call such as "
            "torch.nn.functional.relu has to be changed in the net's own forward"
        )
    for parent, name in places:
        setattr(parent, name, new())
    return net


def call_with(function: Callable[..., Any], inputs: Inputs) -> Any:
    """Call a function with a batch's inputs: a tuple or list by position, a mapping by keyword."""
    try:
        if isinstance(inputs, Mapping):
            return function(**inputs)
        if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
            return function(*inputs)
        return function(inputs)
    except TypeError as error:
        if isinstance(inputs, tuple | list) and "positional argument" in str(error):
            raise TypeError(
                f"{error}; each of the {len(inputs)} is an argument of the net: options go by "
                "name, such as num_predictions=32, and targets to evaluate; a net that takes one "
                "list or tuple gets a tuple of it, unpack=lambda batch: ((batch[0],), batch[1])"
            ) from error
        raise


def unwrapped(builder: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function or class inside nested partials, and the keywords that they bind."""
    keywords: dict[str, Any] = {}
    while isinstance(builder, functools.partial):
        keywords = {**builder.keywords, **keywords}
        builder = builder.func
    return builder, keywords


def is_constant(argument: Any) -> bool:
    """Whether all points share an argument of the net: a number, a string or None."""
    if isinstance(argument, Tensor):
        return argument.dim() == 0
    return isinstance(argument, bool | int | float | str | None)


def is_plain(leaf: Any) -> bool:
    """Whether an object is a tensor that is neither sparse nor nested."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested


def kind_of_batch(inputs: Inputs) -> Any:
    """Return the structure of a batch, and the layout of its tensors, or the types of others."""
    leaves, place = tree_flatten(inputs)
    # Sparse tensors of some layouts have no strides.
    kinds = (
        (leaf.shape, leaf.dtype, leaf.device, leaf.layout == torch.strided and leaf.stride())
        if isinstance(leaf, Tensor)
        else type(leaf)
        for leaf in leaves
    )
    return str(place), *kinds


def tree_map_tensors(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to every leaf with a `.to` method (tensors, graphs) of nested containers."""
    if isinstance(tree, Mapping):
        return {key: tree_map_tensors(function, value) for key, value in tree.items()}
    if hasattr(tree, "to"):  # before the tuples: a PackedSequence is one
        return function(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map_tensors(function, value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(tree_map_tensors(function, value) for value in tree)
    return tree


# --------------------------------------------------------------------------- tensors


def at_least_float32(tensors: T) -> T:
    """Return a tensor, or a tuple of them, in float32 at least; in half precision sums overflow."""
    if isinstance(tensors, tuple):
        return tuple(map(at_least_float32, tensors))
    return tensors.to(torch.promote_types(tensors.dtype, torch.float32))


def precise(tensor: Tensor) -> Tensor:
    """Return a tensor in double precision, except on Apple's GPUs, which have none."""
    return tensor if tensor.device.type == "mps" else tensor.double()


def with_float32(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `fn` with float32 for half precision, where matrices cannot be factorised."""

    def moved(tensor: Tensor) -> Tensor:
        found = fn(tensor)
        return tensor.to(found.device, torch.float32) if found.dtype.itemsize < 4 else found

    return moved


@contextmanager
def on_error(undo: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """Call a function where what is inside fails, before the error goes on."""
    try:
        yield
    except BaseException:
        undo(*arguments)
        raise


@contextmanager
def outside_inference(gradients: bool | None = None) -> Iterator[None]:
    """Leave `torch.inference_mode`, whose tensors cannot be in a graph; also a decorator.

    Gradients are recorded inside as outside, or as `gradients` says.
    """
    recorded = torch.is_grad_enabled() if gradients is None else gradients
    with torch.inference_mode(False), torch.set_grad_enabled(recorded):
        yield


def outside_of_inference(tree: Any) -> Any:
    """Return nested containers with copies of tensors that were made in `torch.inference_mode`."""
    if not any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in tree_leaves(tree)):
        return tree
    with outside_inference():
        return tree_map_only(Tensor, lambda t: t.clone() if t.is_inference() else t, tree)


def part_of(tensor: Tensor, elements: Tensor | None) -> Tensor:
    """Return elements of a flattened tensor, as a vector, or the tensor itself for None."""
    return tensor if elements is None else tensor.take(elements.to(tensor.device))


def graph_nodes(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """Yield each node once of the graph by which tensors were computed."""
    seen: set[Any] = {None}
    waiting: list[Any] = [output.grad_fn for output in outputs]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [parent for parent, _ in node.next_functions]


def same_numbers(one: Any, other: Any) -> bool:
    """Whether nested containers are of one structure, and have the same tensors, NaN included."""
    (leaves, place), (others, other_place) = tree_flatten(one), tree_flatten(other)
    return place == other_place and all(
        a.shape == b.shape and torch.allclose(a, b, 0, 0, equal_nan=True)
        for a, b in zip(leaves, others, strict=True)
        if isinstance(a, Tensor)
    )


def in_function_transform() -> bool:
    """Whether a `torch.func` transform is active, which custom autograd nodes do not take."""
    # PyTorch has no public name for it.
    return torch._C._are_functorch_transforms_active()


def vmapped(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `torch.vmap` of a function, without its warnings of what runs row by row.

    These advise the authors of PyTorch, and a user has not asked for it.
    """
    functorch: Any = torch._C._functorch

    def call(*args: Any) -> Any:
        functorch._set_vmap_fallback_warning_enabled(False)
        try:
            return torch.vmap(function, **options)(*args)
        finally:
            functorch._set_vmap_fallback_warning_enabled(True)

    return call


def at_each(
    function: Callable[[dict[str, Tensor]], Tensor],
    stacked: Mapping[str, Tensor],
    chunk_size: int | None = None,
) -> Tensor:
    """Return a function of the rows of stacked tensors, by passes of so many rows at a time.

    PyTorch's fused layers are not used. They take one row at a time, and a row may start where they
    take no parameter, see `aligned`. Any active mode turns them off.
    """
    with BaseTorchFunctionMode():
        found: Tensor = vmapped(function, chunk_size=chunk_size)(dict(stacked))
    return found


def aligned(tensor: Any) -> Any:
    """Return a tensor that starts at an address at which a parameter may start.

    A part of a longer vector may not. Fused kernels of GPUs, such as that of a transformer layer,
    then fail.
    """
    if tensor.device.type == "cpu" or type(tensor) is not Tensor or torch.compiler.is_compiling():
        return tensor
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return tensor if is_wrapped or tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


# --------------------------------------------------------------------------- containers


class SiteTensors(nn.Module):
    """Parameters or buffers under dotted names, as in the net that they belong to.

    The names are those of the `state_dict`: `guide.locs` has `0.weight` where the net has it.
    Looking up a tensor costs two dictionary reads.

    Args:
        tensors: initial values by dotted name.
        trainable: parameters (with gradient, or without it for `False`); buffers for `None`.

    Example:
        >>> locs = SiteTensors({"0.weight": torch.zeros(2, 1), "0.bias": torch.zeros(2)})
        >>> list(locs.state_dict())
        ['0.weight', '0.bias']
        >>> locs["0.bias"].shape
        torch.Size([2])
    """

    def __init__(self, tensors: Mapping[str, Tensor], trainable: bool | None = True) -> None:
        super().__init__()
        self._places: dict[str, tuple[nn.Module, str]] = {}
        for name, tensor in tensors.items():
            self.put(name, tensor.detach().clone(), trainable)

    def put(self, name: str, value: Tensor, trainable: bool | None = None) -> None:
        """Add or replace a tensor, by default a buffer, as in the constructor."""
        *path, leaf = name.split(".")
        owner: nn.Module = self
        # Without `register_parameter` and its like, which refuse names that a module already has:
        # a site `0.weight` may have a hyperparameter `0.weight.local`.
        for part in path:
            child = owner._modules.setdefault(part, nn.Module())
            assert child is not None
            owner = child
        if trainable is None:
            owner._buffers[leaf] = value
        else:
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=trainable)
        self._places[name] = (owner, leaf)

    def __getitem__(self, name: str) -> Tensor:
        owner, leaf = self._places[name]
        tensor = owner._parameters.get(leaf)
        found = owner._buffers[leaf] if tensor is None else tensor
        assert found is not None
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield `(name, tensor)` in order."""
        return ((name, self[name]) for name in self._places)


# --------------------------------------------------------------------------- supports


def elementwise(support: constraints.Constraint) -> constraints.Constraint:
    """Return the constraint that a support puts on each element."""
    while isinstance(support, _WRAPPERS):
        support = support.base_constraint
    return support


_MIXTURE = constraints.MixtureSameFamilyConstraint
_WRAPPERS = (type(constraints.independent(constraints.real, 1)), _MIXTURE)


@td.transform_to.register(_MIXTURE)
@td.biject_to.register(_MIXTURE)
def _(support: Any) -> td.Transform:
    # PyTorch has none, and a mixture of Normals is a common prior.
    return td.biject_to(support.base_constraint)


def name_of(distribution: Any) -> str:
    """Return the name of a distribution's class, or of the public one that it is made of."""
    return next(kind.__name__ for kind in type(distribution).__mro__ if kind.__name__[0] != "_")


def is_discrete(support: constraints.Constraint | None) -> bool:
    """Whether a support is discrete; no support is not."""
    return support is not None and bool(support.is_discrete)


def same_support(one: constraints.Constraint | None, other: constraints.Constraint | None) -> bool:
    """Whether a posterior over one support can have a prior over another.

    Continuous supports have to be both real or both constrained, discrete ones have to be equal.
    """
    if one is not None and other is not None and (one.is_discrete or other.is_discrete):
        return bool(elementwise(one) == elementwise(other))
    return is_real(one) == is_real(other)


def is_real(support: constraints.Constraint | None) -> bool:
    """Whether a support is unconstrained, elementwise."""
    # Copies and pickles of a support are other objects.
    return support is not None and isinstance(elementwise(support), type(constraints.real))


def without_events(distribution: Any) -> Any:
    """Return the distribution inside of `Independent`s."""
    while isinstance(distribution, td.Independent):
        distribution = distribution.base_dist
    return distribution
