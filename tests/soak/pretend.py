"""A pretend accelerator with real numbers, to find faults of devices on a machine without one.

A `DeviceTensor` holds a tensor of the CPU and says that it is elsewhere. An operation of the two
raises a `DeviceMismatch`, as CUDA would, and each number that the host reads is counted by the line
of the package that asked. The device has a random generator of its own, and no autocast. A process
that has registered it can no longer differentiate on a GPU: tests of it have the marker `device`.

    register()
    with pretend() as device:
        net = make_net().to(DEVICE)
        ...
    print(device.reads)
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import tyxe
from tyxe.distributions import normal_kl

__all__ = ["DEVICE", "DeviceMismatch", "Host", "pretend", "register"]

NAME = "pretend"
PACKAGE = Path(tyxe.__file__).resolve().parent

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
# A number for Python, or a shape that depends on numbers.
READS = {
    aten._linalg_check_errors.default,
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.item.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten._unique2.default,
}
NUMBERS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
# Indices may be on the host.
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
# Not pointwise, yet CUDA takes a number that is on the host.
TAKES_NUMBERS = {"fill", "fill_", "masked_fill", "masked_fill_", "pow", "where"}


class DeviceMismatch(RuntimeError):
    """Tensors of two devices met."""


class Generator:
    """The device's random numbers, which are those of a generator of the CPU."""

    def __init__(self) -> None:
        self._own = torch._C.Generator()

    def manual_seed(self, seed: int) -> None:
        """Start anew."""
        self._own.manual_seed(seed)

    def get_state(self) -> Tensor:
        """Return the state."""
        return self._own.get_state()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let the CPU's operations draw from this generator."""
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(self._own.get_state())
        try:
            yield
        finally:
            self._own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)


class Module:
    """What stands at `torch.pretend`: one device, whose generator has states; no autocast."""

    def __init__(self) -> None:
        self.generator = Generator()
        self.in_use = False

    def is_available(self) -> bool:
        return self.in_use

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        self.generator.manual_seed(seed)

    def get_rng_state(self, device: Any = 0) -> Tensor:
        return self.generator.get_state()

    def set_rng_state(self, state: Tensor, device: Any = 0) -> None:
        self.generator._own.set_state(state)


# The oldest torch of the ranges has no devices that are written in Python: `pretend` skips there.
_set_up = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)


class Hook(torch._C._acc.PrivateUse1Hooks if _set_up else object):  # type: ignore[misc,name-defined]
    """Says that the device is there for as long as it is in use, and not in other tests."""

    def is_available(self) -> bool:
        return MODULE.in_use

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


MODULE = Module()
DEVICE = torch.device("privateuseone", 0)  # its name from `register` on is that of the module


def register() -> None:
    """Tell PyTorch that there is such a device, before autograd first runs."""
    if _set_up:
        _set_up(NAME, MODULE, Hook())


class DeviceTensor(Tensor):
    """A tensor of the CPU that says it is elsewhere."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            layout=inner.layout,
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.inner})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self.detach().clone().requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True  # type: ignore[attr-defined]
        memo[id(self)] = copied
        return copied

    def __getitem__(self, index: Any) -> Tensor:
        # PyTorch makes a tensor of a list below what a dispatch sees.
        return super().__getitem__(torch.tensor(index) if isinstance(index, list) else index)

    def tolist(self) -> Any:
        """Return plain numbers, which PyTorch refuses for a subclass."""
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {}, None)


class Host(TorchDispatchMode):
    """Makes tensors on the device where they are asked for, and counts what the host reads.

    Attributes:
        device: where they are.
        reads: how often each line of the package asked for numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = DEVICE
        self.reads: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation where its tensors are."""
        return _run(func, args, kwargs or {}, self.reads)


@contextlib.contextmanager
def pretend() -> Iterator[Host]:
    """Let the device be in use; yield what counts the reads."""
    if _set_up is None:
        pytest.skip(f"torch {torch.__version__} has no devices that are written in Python")
    with (
        mock.patch.object(MODULE, "in_use", True),
        mock.patch.object(normal_kl, "_is_readable", _is_readable),
        mock.patch.object(torch, "tensor", _on_device(torch.tensor)),
        mock.patch.object(torch, "as_tensor", _on_device(torch.as_tensor)),
        mock.patch.object(torch, "Generator", _AnyGenerator),
        mock.patch.object(torch, "rand", _drawn(torch.rand)),
        mock.patch.object(torch, "randn", _drawn(torch.randn)),
        mock.patch.object(torch.amp, "is_autocast_available", lambda kind: kind != NAME),
        mock.patch.object(DeviceTensor, "new_tensor", _new_tensor, create=True),
        Host() as host,
    ):
        yield host


_is_plain = normal_kl._is_readable


def _is_readable(tensor: Tensor) -> bool:
    return type(tensor) is DeviceTensor or _is_plain(tensor)


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _on_device(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # These copy Python's numbers below what a dispatch mode sees.
    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if _is_ours(device):
            return function(data, *args, **kwargs).to(device)
        return function(data, *args, device=device, **kwargs)

    return made


def _drawn(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    # PyTorch looks at a generator's device before it comes to ours.
    def made(*size: Any, generator: Any = None, device: Any = None, **kwargs: Any) -> Tensor:
        if generator is not None and _is_ours(device):
            return function(*size, generator=generator, **kwargs).to(device)
        return function(*size, generator=generator, device=device, **kwargs)

    return made


_tensor, _generator = torch.tensor, torch.Generator


def _new_tensor(
    self: Tensor, data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False
) -> Tensor:
    made = _tensor(data, dtype=dtype or self.dtype)
    return made.to(device or self.device).requires_grad_(requires_grad)


class _Kind(type):
    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, _generator)


class _AnyGenerator(metaclass=_Kind):
    """Stands at `torch.Generator`; a generator of the device is one that operations take."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _generator("cpu" if _is_ours(device) else device)


def _asking_line() -> str:
    frame = sys._getframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if PACKAGE in path.parents:
            return f"{path.relative_to(PACKAGE).as_posix()}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _check(func: Any, args: Sequence[Any], tensors: list[Tensor]) -> None:
    ours = [t for t in tensors if isinstance(t, DeviceTensor)]
    others = [t for t in tensors if not isinstance(t, DeviceTensor)]
    if func in INDEXING:
        others = [t for t in others if t is args[0]]
    shapes = [tuple(t.shape) for t in ours], [tuple(t.shape) for t in others]
    if any(t.dim() for t in others):
        raise DeviceMismatch(f"{func}: {shapes[0]} on the device, {shapes[1]} on the host")
    name = func.__name__.split(".")[0]
    if others and torch.Tag.pointwise not in func.tags and name not in TAKES_NUMBERS:
        raise DeviceMismatch(f"{func}: a number of the host, which is not pointwise, {shapes[0]}")


def _is_read(func: Any, args: Sequence[Any]) -> bool:
    masks = func in INDEXING and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )
    return func in READS or masks


def _goes_to_device(func: Any, args: Sequence[Any], has_ours: bool, wanted: Any) -> bool:
    if func is aten.copy_.default:
        return isinstance(args[0], DeviceTensor)
    return has_ours if wanted is None else _is_ours(wanted)


def _run(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    reads: collections.Counter[str] | None,
) -> Any:
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    ours = [t for t in tensors if isinstance(t, DeviceTensor)]
    wanted = kwargs.get("device")
    on_device = _goes_to_device(func, args, bool(ours), wanted)
    if reads is not None and ours and (not on_device or _is_read(func, args)):
        reads[_asking_line()] += 1
    if ours and func not in COPIES:
        _check(func, args, tensors)
    if _is_ours(wanted):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    plain_args, plain_kwargs = tree_map_only(DeviceTensor, lambda t: t.inner, (args, kwargs))
    draws = on_device and torch.Tag.nondeterministic_seeded in func.tags
    with MODULE.generator.used() if draws else contextlib.nullcontext():
        out = func(*plain_args, **plain_kwargs)
    return _wrapped(func, args, kwargs, ours, out) if on_device and func not in NUMBERS else out


def _wrapped(func: Any, args: Any, kwargs: Any, ours: list[DeviceTensor], out: Any) -> Any:
    written = {id(t.inner): t for t in ours}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DeviceTensor):
            return value
        known = written.get(id(value))
        return DeviceTensor(value) if known is None else known

    out = tree_map(wrap, out)
    if not ours or func in COPIES:
        return out
    return return_and_correct_aliasing(func, args, kwargs, out)
