"""Forwards of a net at many draws of its weights: what they share, and one pass for all of them.

What is computed once for all draws is seen right before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tyxe.rng import torch_rng
from tyxe.threads import exclusive
from tyxe.util import Inputs, is_constant

_INSTANCE = nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *_INSTANCE

# The buffers of some layers.
Statistics = Mapping[Any, Mapping[str, Tensor]]


def norms_of(net: nn.Module) -> list[Any]:
    """Return the layers of a net that keep running statistics."""
    return [norm for norm in _norms_of(net) if norm.track_running_stats]


def fewest_rows(net: nn.Module, train: bool) -> int:
    """Return how many rows a batch of a net needs: norms take no statistics of one."""
    norms = [norm for norm in _norms_of(net) if train or not norm.track_running_stats]
    return 2 if any(train or not isinstance(norm, _INSTANCE) for norm in norms) else 1


def _norms_of(net: nn.Module) -> list[Any]:
    return [module for module in net.modules() if isinstance(module, _NORMS)]


def put_statistics(statistics: Statistics) -> None:
    """Let layers have these statistics."""
    for norm, buffers in statistics.items():
        norm._buffers.update(buffers)


def averaged_statistics(
    norms: Mapping[Any, Any], run: Callable[[Any], Any], batches: Iterable[Any]
) -> Statistics:
    """Return averages over batches of the statistics of layers.

    `norms` has for each layer a copy with buffers of its own, and `run` runs the net of these
    copies on a batch.
    """
    for norm in norms.values():
        norm.train().reset_running_stats()
    for count, batch in enumerate(batches, 1):
        for norm in norms.values():  # None is the average of all calls, if not in an InstanceNorm
            norm.momentum = 1 / count if isinstance(norm, _INSTANCE) else None
        run(batch)
    return {norm: dict(copy.named_buffers()) for norm, copy in norms.items()}


# Types of devices on which all draws run faster in one pass than one after the other, by what is
# random. On CPUs that is a last layer, whose inputs are the same for all draws: of other maps one
# product for many draws takes longer. Convolutions of many draws are grouped ones, which are
# faster than a loop on some cards only. From benchmarks/last_layer.py and gpu_predict.py.
FASTER: dict[str, tuple[str, ...]] = {
    "last layer": ("cpu", "cuda"),
    "linear maps": ("cuda",),
    "convolutions": (),
}
# Those on which the draws of a site are made by one call. Processors would gain by it in small nets
# alone, and a seed would have other draws there.
DRAWS_AT_ONCE: tuple[str, ...] = ("cuda",)
# Most numbers of stacked draws, and of the inputs of one pass, each counted for every draw: they
# bound the memory that is taken beyond that of one draw after the other.
MOST_DRAWN: dict[bool, int] = {True: 2**24, False: 2**28}  # on a CPU, and elsewhere
MOST_GIVEN = 2**26
_NOT_FINITE = (torch.isnan, torch.isposinf, torch.isneginf)


def is_faster(random: Iterable[Tensor], device: torch.device, are_last: bool) -> bool:
    """Whether one pass is faster on a device for a net of which these tensors are random.

    `are_last`: they are those of one linear map, after which nothing with parameters runs.
    """
    kind = "convolutions" if any(one.dim() > 2 for one in random) else "linear maps"
    return device.type in FASTER["last layer" if are_last else kind]


class OnePass:
    """Passes at many draws at once, which are compared with passes one by one."""

    def __init__(self) -> None:
        # Whether no pass has been seen to differ, nor was refused by `torch.vmap`.
        self.is_right = True
        self._known: set[Any] = set()

    def knows(self, kind: Any) -> bool:
        """Whether passes for batches of a kind were compared, and are right."""
        return self.is_right and kind in self._known

    def __call__(
        self, together: Callable[[], Tensor], in_turn: Callable[[], Tensor], kind: Any = None
    ) -> Tensor:
        """Return outputs of all draws, `(S, ...)`, for a kind of batch.

        `together` makes one pass. `in_turn` makes them one by one, and may set `is_right` to False.
        """
        is_known = self.knows(kind)
        if is_known:
            try:
                return together()
            except torch.OutOfMemoryError:
                pass  # here its traceback would keep the memory that `in_turn` needs
            except Exception:  # such as of a branch that numbers of other batches did not take
                self.is_right = False
        outputs = in_turn()
        if is_known or not self.is_right or torch.compiler.is_compiling():
            return outputs
        try:
            found = together()
        except torch.OutOfMemoryError:
            return outputs
        except Exception:  # torch.vmap does not take such a net, which has run without it
            self.is_right = False
            return outputs
        self.is_right = are_alike(found, outputs)
        if self.is_right:
            self._known.add(kind)
            return found
        return outputs


def are_alike(found: Tensor, outputs: Tensor) -> bool:
    """Whether outputs `(S, ...)` are those of the same draws but for rounding.

    On GPUs two ways may round to half precision inside. Then they differ by less than draws do.
    """
    if found.shape != outputs.shape or found.dtype != outputs.dtype:
        return False
    if not (outputs.is_floating_point() or outputs.is_complex()):
        return torch.equal(found, outputs)
    if not all(torch.equal(is_so(found), is_so(outputs)) for is_so in _NOT_FINITE):
        return False
    found, outputs = (one.nan_to_num(0.0, 0.0, 0.0) for one in (found, outputs))
    error, spread = (found - outputs).norm(), (outputs - outputs.mean(0)).norm()
    least = torch.finfo(outputs.dtype).eps ** 0.5 * outputs.norm()
    return bool(error <= torch.maximum(least, 0.02 * spread))


def has_hooks(net: nn.Module, allowed: type) -> bool:
    """Whether a net has hooks, which expect tensors of one draw, but for those of a type."""
    if of_all._global_forward_hooks or of_all._global_forward_pre_hooks:
        return True
    return any(
        part._forward_pre_hooks
        or (
            part._forward_hooks
            and not all(isinstance(h, allowed) for h in part._forward_hooks.values())
        )
        for part in net.modules()
    )


class SiteFreePrefix:
    """Passes of a net on one batch, in which modules without sites run once.

    The first pass keeps what the outermost of them return that are called with constants, and with
    tensors of the batch or of each other; later ones take it. What the forward of a module with
    sites does itself, and what follows from it, runs each time. No gradients are kept.

    A module of which a part is in train mode or has hooks is not kept, but those that it calls may
    be; its own hooks run each time. Nor is one that draws random numbers, or returns more than
    tensors and constants. That the net does the same in each pass is for the caller to see.

    `owners` are the modules that hold the net's sites. The attribute `runs_after` says whether
    modules with parameters have run on what follows from these.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).eval()
        >>> prefix = SiteFreePrefix(net, [net[1]], x := torch.ones(4, 2))
        >>> prefix(lambda: net(x)).shape
        torch.Size([4, 1])
    """

    def __init__(
        self,
        net: nn.Module,
        owners: Iterable[nn.Module],
        inputs: Inputs,
        may_draw: bool = True,
    ) -> None:
        self._owners, self._may_draw = {*owners}, may_draw
        self._is_free: dict[nn.Module, bool] = {}
        self._look(net)
        self._modules = [module for module, is_free in self._is_free.items() if is_free]
        if not any(next(module.parameters(), None) is not None for module in self._modules):
            self._modules = []  # activations alone are not worth a look
        # What is the same in each pass, by `id`, which another would have afterwards, and how often
        # it has been written into by modules that are kept. What others write into is not the same.
        self._known: dict[int, tuple[Tensor, int]] = {}
        self._know(tree_leaves(inputs))
        self._kept: dict[Any, tuple[list[Any], Any]] = {}
        self._records, self._inside, self.runs_after = True, False, False

    def _look(self, module: nn.Module) -> bool:
        """See of a module and its parts which of them may be kept."""
        if module not in self._is_free:
            self._is_free[module] = True  # of one that is a part of itself
            parts = [part for part in module._modules.values() if part is not None]
            are_free = [self._look(part) for part in parts]
            hooks = any(part._forward_hooks or part._forward_pre_hooks for part in parts)
            is_own = module not in self._owners and not module.training
            self._is_free[module] = is_own and not hooks and all(are_free)
        return self._is_free[module]

    @property
    def has_kept(self) -> bool:
        """Whether there is anything that later passes do not run again."""
        return bool(self._kept)

    def __call__(self, forward: Callable[[], Any]) -> Any:
        """Return what a function returns that runs the net on the batch once."""
        self._counts = dict.fromkeys(self._modules, 0)
        try:
            with _having("forward", {m: partial(self._call, m, m.forward) for m in self._modules}):
                return forward()
        finally:
            self._records = False

    def _call(self, module: nn.Module, plain: Any, *args: Any, **kwargs: Any) -> Any:
        if self._inside:
            return plain(*args, **kwargs)
        forward = partial(plain, *args, **kwargs)
        given, how = tree_flatten((args, kwargs))
        marks = [self._mark(leaf) for leaf in given]
        if None in marks:
            self.runs_after |= next(module.parameters(), None) is not None
            return forward()
        self._counts[module] += 1
        key = (module, self._counts[module], how, *marks)
        if key in self._kept:
            outputs, structure = self._kept[key]
            if all(self._mark(one) is not None for one in outputs):
                return tree_unflatten(outputs, structure)
            return forward()  # since what follows writes into it
        return self._first(key, forward, given) if self._records else forward()

    def _first(self, key: Any, forward: Callable[[], Any], given: list[Any]) -> Any:
        """Run a module, and keep what it returns if that is the same in each pass."""
        # What may draw lets no other thread take random numbers.
        with exclusive() if self._may_draw else nullcontext():
            numbers, self._inside = torch_rng() if self._may_draw else [], True
            try:
                found = forward()
            finally:
                self._inside = False
            draws = self._may_draw and not all(map(torch.equal, numbers, torch_rng()))
        leaves, how = tree_flatten(found)
        outputs = [t.detach() if isinstance(t, Tensor) and t.requires_grad else t for t in leaves]
        if draws or not all(map(_is_fixed, outputs)):
            return found
        self._know([*given, *outputs])  # an activation in place has written into what it was given
        self._kept[key] = outputs, how
        return tree_unflatten(outputs, how)

    def _know(self, leaves: Iterable[Any]) -> None:
        for leaf in leaves:
            if isinstance(leaf, Tensor) and _is_fixed(leaf):
                self._known[id(leaf)] = leaf, _version(leaf)

    def _mark(self, leaf: Any) -> Any:
        """Return what an argument is in every pass, or None where that is not known."""
        if isinstance(leaf, Tensor):
            known, version = self._known.get(id(leaf), (None, 0))
            return id(leaf) if known is not None and version == _version(leaf) else None
        return (type(leaf), leaf) if is_constant(leaf) else None


@contextmanager
def _having(name: str, values: Mapping[nn.Module, Any]) -> Iterator[None]:
    before = [(module.__dict__, module.__dict__.get(name)) for module in values]
    try:
        for module, value in values.items():
            module.__dict__[name] = value
        yield
    finally:
        for attributes, value in before:
            attributes[name] = value
            if value is None:
                del attributes[name]


def _version(tensor: Tensor) -> int:
    """Return how often a tensor has been written into, which those of inference do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _is_fixed(leaf: Any) -> bool:
    """Whether a leaf is a constant, or a tensor that can be the same in each pass."""
    if not isinstance(leaf, Tensor):
        return is_constant(leaf)
    is_plain = type(leaf) in (Tensor, nn.Parameter)
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(leaf)
