"""The states of the global random generators of PyTorch, NumPy and Python."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode_temporarily,
)

from tyxe.threads import exclusive

T = TypeVar("T")

# --------------------------------------------------------------------------- PyTorch


def _generators(device: torch.device) -> tuple[Any, list[tuple[int, ...]]]:
    """Return the module that has the generators of a kind of device, and what it calls each."""
    if device.type == "cpu":
        return torch, [()]
    module = torch.get_device_module(device)
    count = module.device_count()
    # Of a device that is the only one of its kind, older versions of PyTorch take no index.
    return module, [()] if count == 1 else [(index,) for index in range(count)]


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def current_stream() -> RandomStream | None:
    """Return the stream that random numbers come from here, or None for PyTorch's generators."""
    if not torch._C._len_torch_dispatch_stack():
        return None
    modes = _get_current_dispatch_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, RandomStream)), None)


def _devices() -> list[torch.device]:
    """Return the CPU, then each accelerator if they are in use."""
    found, accelerator = [torch.device("cpu")], _accelerator()
    if accelerator is not None:
        module, places = _generators(accelerator)
        # To ask for its state would start a device that is not.
        if getattr(module, "is_initialized", module.is_available)():
            found += [torch.device(accelerator.type, index) for index in range(len(places))]
    return found


def torch_rng() -> list[Tensor]:
    """Return the state of the CPU's generator, then of each accelerator's that is in use.

    Inside of a `RandomStream` they are those of the stream, here and below.
    """
    stream = current_stream()
    return [
        _state_of(device) if stream is None else stream.state_of(device) for device in _devices()
    ]


def _state_of(device: torch.device) -> Tensor:
    module, places = _generators(device)
    state: Tensor = module.get_rng_state(*places[device.index or 0])
    return state


def set_torch_rng(states: Sequence[Tensor]) -> None:
    """Set PyTorch's generators to what `torch_rng` returned; the tensors may be on any device.

    States of accelerators that are not there are left out.
    """
    stream = current_stream()
    if stream is not None:
        stream.set_states(states)
        return
    cpu, *others = states
    # Operations of a tensor of torch.func's transforms return one without memory to read.
    torch.set_rng_state(cpu if cpu.device.type == "cpu" else cpu.cpu())
    accelerator = _accelerator()
    if others and accelerator is not None:
        module, places = _generators(accelerator)
        for place, state in zip(places, others, strict=False):
            module.set_rng_state(state.cpu(), *place)


def fresh_seed() -> int:
    """Return a seed drawn from PyTorch's generator while no other thread has set it."""
    with exclusive():
        return int(torch.randint(2**62, (), device="cpu"))


def _start_from(seed: int) -> None:
    stream = current_stream()
    for generator in () if stream is None else stream.generators.values():
        generator.manual_seed(seed)
    if stream is None:
        # `torch.manual_seed` notes a traceback for each kind of device that is not in use.
        torch.default_generator.manual_seed(seed)
        for device in _devices()[1:2]:
            module, _ = _generators(device)
            seed_all = getattr(module, "manual_seed_all", None) or module.manual_seed
            seed_all(seed)


@contextmanager
def torch_rng_kept(seed: int | None = None) -> Iterator[None]:
    """Set PyTorch's generators back at the end, and let no other thread draw from them before."""
    with exclusive():
        before = torch_rng()
        try:
            if seed is not None:
                _start_from(seed)
            yield
        finally:
            set_torch_rng(before)


class RandomStream(TorchDispatchMode):
    """Random numbers of a thread's own, for what runs inside.

    They start from the state of PyTorch's generators, or from a seed, and go on where they stopped
    when the stream is entered again. The generators themselves are not touched, so that no other
    thread has to wait. Not reached are fused kernels that take no generator. Each operation inside
    takes some microseconds longer, except `by_generators`.

    Example:
        >>> stream, before = RandomStream(seed=1), torch.get_rng_state()
        >>> with stream:
        ...     first = torch.rand(2)
        >>> torch.equal(torch.get_rng_state(), before)
        True
        >>> torch.equal(first, torch.rand(2, generator=torch.Generator().manual_seed(1)))
        True
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed, self.generators = seed, {torch.device("cpu"): torch.Generator()}
        if seed is None:
            self.generators[torch.device("cpu")].set_state(torch.get_rng_state())
        else:
            self.generators[torch.device("cpu")].manual_seed(seed)

    @classmethod
    def branch(cls) -> RandomStream:
        """Return the numbers that PyTorch's generator would give next, which goes on elsewhere."""
        with exclusive():  # another thread may have set it back for a while
            before, *_ = torch_rng()
            found, seed = fresh_seed(), fresh_seed()
            _start_from(seed)
        stream = cls(found)
        stream.generators[torch.device("cpu")].set_state(before)
        return stream

    def copy(self) -> RandomStream:
        """Return a stream that goes on from where this one is."""
        other = RandomStream(self._seed)
        for device, generator in self.generators.items():
            other.generators[device] = generator.clone_state()
        return other

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Some operators take the generator by position, as from a stream inside this one.
        if torch.Tag.nondeterministic_seeded in func.tags and not any(
            isinstance(one, torch.Generator) for one in (*args, *kwargs.values())
        ):
            named = _taking_generator(func)
            if named is not None:
                kwargs = {**kwargs, "generator": self._of(_device_of(args, kwargs))}
                func = named
        return func(*args, **kwargs)

    def state_of(self, device: torch.device) -> Tensor:
        """Return the state of a device's numbers."""
        return self._of(device).get_state()

    def set_states(self, states: Sequence[Tensor]) -> None:
        """Go on from states in the order of `torch_rng`."""
        for device, state in zip(_devices(), states, strict=False):
            self._of(device).set_state(state)

    @contextmanager
    def as_generators(self) -> Iterator[None]:
        """Have PyTorch's generators go on from the stream inside, and no other thread draw."""
        with torch_rng_kept():
            set_torch_rng([self.state_of(device) for device in _devices()])
            try:
                yield
            finally:
                self.set_states(torch_rng())

    def _of(self, device: torch.device) -> torch.Generator:
        if device.index is None and device.type != "cpu":
            device = torch.empty(0, device=device).device  # "cuda" is "cuda:0"
        if device not in self.generators:
            self.generators[device] = made = torch.Generator(device)
            if self._seed is None:
                made.set_state(_state_of(device))
            else:
                made.manual_seed(self._seed)
        return self.generators[device]


@contextmanager
def by_generators() -> Iterator[None]:
    """Let what a stream does not reach, such as a compiled program, draw from it all the same."""
    stream = current_stream()
    if stream is None:
        yield
    else:
        with ExitStack() as stack:
            # The modes around it stay, such as one that counts operations.
            for mode in reversed(_get_current_dispatch_mode_stack()):
                stack.enter_context(_pop_mode_temporarily())
                if mode is stream:
                    break
            stack.enter_context(stream.as_generators())
            yield


def drawing_from(stream: RandomStream, items: Iterable[T]) -> Iterator[T]:
    """Yield items that are each made with the random numbers of a stream."""
    with stream:
        iterator = iter(items)
    while True:
        with stream:
            item = next(iterator, stream)
        if item is stream:
            return
        yield item  # type: ignore[misc]


@functools.cache
def _taking_generator(func: Any) -> Any:
    """Return the operator, or the overload of it, that takes a generator; None if there is none."""
    schema = func._schema
    if any(argument.name == "generator" for argument in schema.arguments):
        return func
    name = {"default": "generator"}.get(func._overloadname, f"{func._overloadname}_generator")
    return getattr(func.overloadpacket, name, None)


def _device_of(args: Any, kwargs: Mapping[str, Any]) -> torch.device:
    tensor = next((one for one in args if isinstance(one, Tensor)), None)
    device = kwargs.get("device") or (torch.device("cpu") if tensor is None else tensor.device)
    return torch.device(device)


# --------------------------------------------------------------------------- all of them


def random_state() -> dict[str, Any]:
    """Return the states of all global generators, as tensors and plain containers."""
    state = np.random.get_state(legacy=False)
    # As lists, because `torch.load(weights_only=True)` refuses NumPy arrays.
    inner = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in state["state"].items()}
    return {
        "rng": torch_rng(),
        "numpy": {**state, "state": inner},
        "python": random.getstate(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to a `random_state`, or PyTorch's alone where it has no others."""
    set_torch_rng(state["rng"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
