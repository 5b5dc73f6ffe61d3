"""Programs: pure functions of tensors, traced once for a structure and shapes of what they take.

A program runs as it was traced, compiled, or captured in a CUDA graph. It is the same tensor
operations in each run: what its function does in Python, it does once.
"""

from __future__ import annotations

import functools
import linecache
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch
import torch._inductor
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from tyxe.errors import warn
from tyxe.threads import exclusive

# Where torch.fx keeps the source of all that it has traced, for tracebacks, and lets none go.
_SOURCES = torch.fx.graph_module._loader
# Operations with one of these tags may differ between calls, and a trace does not show it.
_VARYING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_DRAWING = torch.Tag.nondeterministic_seeded
# Take lengths of packed sequences as their second argument, or states of recurrent layers.
_OF_SEQUENCES = (
    torch._VF.lstm,
    torch._VF.gru,
    torch._VF.rnn_tanh,
    torch._VF.rnn_relu,
    torch._VF._pack_padded_sequence,
    torch._VF._pad_packed_sequence,
)
_REMEDY = "pass compile=False"
# Checks of shapes at each call cost a tenth of a small program. The hyperbolic tangent by exp, off
# by a rounding error of 1 and not of itself, takes half of the time.
_OPTIONS: dict[str, Any] = {
    "size_asserts": False,
    "alignment_asserts": False,
    "cpp.use_decompose_tanh": True,
}
# Random numbers are those of what runs uncompiled, in their order; on CPUs those of compiled code
# are slow.
_OPTIONS_OF_DRAWS: dict[str, Any] = {
    "fallback_random": True,
    "reorder_for_locality": False,
    "reorder_for_peak_memory": False,
    "size_asserts": False,
}
# All of a program in one file of C++, and no headers compiled for further ones: a third of the time
# that a file for each kernel takes. The first compilation on a machine would spend half of its time
# on trial compilations for each set of vector instructions that the processor has.
_OPTIONS_OF_CPUS: dict[str, Any] = {
    "cpp_wrapper": True,
    "cpp_cache_precompile_headers": False,
    "cpp.vec_isa_ok": True,
}
# Shapes of batches that are compiled, such as a full one and the last of an epoch.
MOST_PROGRAMS = 4


def has_compiler(device: torch.device) -> bool:
    """Whether programs for a device can be compiled here."""
    if device.type == "cpu":
        return any(shutil.which(name) for name in ("g++", "clang++", "c++", "cl"))
    return bool(torch.utils._triton.has_triton())


def has_programs(device: torch.device) -> bool:
    """Whether programs for a device can be compiled or captured here."""
    return has_compiler(device) or has_graphs(device)


def has_graphs(device: torch.device) -> bool:
    """Whether what runs on a device can be captured in a graph."""
    return device.type == "cuda"


class Capture:
    """What a function launches on a CUDA device, recorded once in a graph and launched as one.

    A call reads and writes the places in memory that the function read and wrote when it was
    recorded, and returns the same tensors, with new values. Recording runs nothing: what is to be
    made once, such as compiled kernels, has to be made by an earlier run of the function.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device) -> None:
        # `torch.cuda.graph` would collect garbage first, which takes longer than a small capture.
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.device(device), torch.cuda.stream(stream):
            # Other threads may allocate meanwhile.
            self._graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._returned = function()
            except BaseException:
                with suppress(RuntimeError):  # which says only that there was an error
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)

    def __call__(self) -> Any:
        """Launch the graph, and return what the function returned."""
        self._graph.replay()
        return self._returned


class Program:
    """A function of nested containers of tensors, as one of their leaves, `at_leaves`.

    It takes and returns nested containers of tensors; what else it returns is constant. A program
    has no guards: arguments have to be of the same structure, shapes and types as those that it was
    traced with, and those of `at_leaves` of the same strides, such as `dense` ones.

    `how="eager"` runs the function itself, `"traced"` its operations, and `"compiled"` what a
    compiler makes of these, if there is one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        how: str = "eager",
        draws: bool = False,
    ) -> None:
        self._function = function
        leaves, self._given = pytree.tree_flatten(arguments)
        self._returned: tuple[Any, list[Any]] | None = None
        self.is_compiled = how == "compiled"
        self._strides: list[tuple[int, ...]] | None = None
        self._graph: Callable[..., Sequence[Tensor]] | None = None
        if how == "eager":
            return
        # Copies, because a tensor that is given twice would be one argument of the trace, and a run
        # may change what it is given, such as the statistics of norms.
        leaves = [leaf.clone() for leaf in dense(leaves)]
        self._strides = [leaf.stride() for leaf in leaves]
        # Without streams of random numbers, whose generators would be a part of the program.
        with _disable_current_modes():
            self._graph = graph = _traced(self._eager, leaves, draws)
            del self._function  # with what it holds
            if self.is_compiled and has_compiler(leaves[0].device):
                # Not by torch.compile, whose guards cost more at each call than a small program.
                options = dict(_OPTIONS_OF_DRAWS if draws else _OPTIONS)
                options |= _OPTIONS_OF_CPUS if leaves[0].device.type == "cpu" else {}
                known = torch._inductor.list_options()  # older versions lack some
                options = {name: value for name, value in options.items() if name in known}
                self._graph = torch._inductor.compile(graph, leaves, options=options)

    @property
    def at_leaves(self) -> Callable[..., Sequence[Tensor]]:
        """The function of leaves, which returns leaves."""
        return self._eager if self._graph is None else self._graph

    def __call__(self, *arguments: Any) -> Any:
        """Return what the function returns."""
        return self.returned(self.at_leaves(*self._leaves_of(arguments)))

    def capture(self, *arguments: Any) -> None:
        """Run as one launch of a graph from now on.

        Raises:
            RuntimeError: it cannot be captured, or its graph gives other numbers.
        """
        self._graph = captured(self.at_leaves, self._leaves_of(arguments))

    def _leaves_of(self, arguments: tuple[Any, ...]) -> list[Any]:
        leaves = pytree.tree_leaves(arguments)
        if self._strides is None:
            return leaves
        pairs = zip(leaves, self._strides, strict=True)
        return [leaf if leaf.stride() == s else _strided(leaf, s) for leaf, s in pairs]

    def returned(self, leaves: Sequence[Tensor]) -> Any:
        """Return the containers that the function returns from their leaves."""
        assert self._returned is not None
        place, known = self._returned
        found = iter(leaves)
        filled = [next(found) if one is Tensor else one for one in known]
        return pytree.tree_unflatten(filled, place)

    def _eager(self, *leaves: Tensor) -> list[Tensor]:
        found = self._function(*pytree.tree_unflatten(leaves, self._given))
        flat, place = pytree.tree_flatten(found)
        self._returned = place, [Tensor if isinstance(one, Tensor) else one for one in flat]
        # Programs take and give fixed strides, so that what one gives can be given to it.
        return [one.contiguous() for one in flat if isinstance(one, Tensor)]


class Programs:
    """The compiled programs of a function, one for each structure and shape of its arguments.

    What is no program, and shapes beyond the first few of a run, `most`, are to run uncompiled,
    after one warning. `what` is compiled, in the plural, for that warning.
    """

    def __init__(self, what: str, most: int | None = None) -> None:
        self._what, self._most = what, most or MOST_PROGRAMS
        # None for what is no program.
        self._programs: dict[Any, Program | None] = {}
        self._used: set[Any] = set()
        self.seconds = 0.0  # that compilation has taken
        self._said: set[str] = set()

    @property
    def are_none(self) -> bool:
        """Whether all that was asked for so far is no program."""
        return bool(self._programs) and not any(self._programs.values())

    def _say(self, why: str) -> None:
        """Warn once."""
        if why not in self._said:
            self._said.add(why)
            warn(f"compile=True: {why}")

    def begin(self) -> None:
        """Begin a run, for whose shapes programs of earlier runs may go."""
        self._used = set()

    def find(self, key: Any, make: Callable[[], Program]) -> Program | None:
        """Return the program of a key, made where it is new, or None if there is none."""
        is_new = key not in self._programs
        if is_new and len(self._used) == self._most:
            self._say(
                f"{self._what} of further shapes than the first {self._most} run uncompiled: give "
                "batches one size"
            )
            return None
        if is_new:
            if len(self._programs) == self._most:
                del self._programs[next(old for old in self._programs if old not in self._used)]
            start = time.perf_counter()
            try:
                self._programs[key] = make()
            except Exception as error:  # of the user's net, the tracer or the compiler
                self._programs[key] = None
                reason = reason_of(error)
                self._say(f"{self._what} are no program, and run uncompiled: {reason}")
            self.seconds += time.perf_counter() - start
        self._used.add(key)
        return self._programs[key]


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has no gaps or overlaps in memory, as those that a program takes."""
    # What a copy would have, without one.
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride()


def dense(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors without gaps and overlaps in memory, copies where there are any."""
    return [leaf if is_dense(leaf) else leaf.contiguous() for leaf in leaves]


def _strided(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


def captured(
    function: Callable[..., Sequence[Tensor]], leaves: Sequence[Tensor]
) -> Callable[..., Sequence[Tensor]]:
    """Return a function of leaves that launches a graph, and keeps none of its memory.

    Raises:
        RuntimeError: it cannot be captured, or its graph gives other numbers.
    """
    expected = function(*leaves)  # which also makes what is made once
    places = [leaf.clone() for leaf in leaves]
    run = Capture(lambda: function(*places), places[0].device)

    def launched(*given: Tensor) -> list[Tensor]:
        with exclusive():  # another thread's would take the same places
            copy_into(places, given)
            found = run()
            copies = [torch.empty_like(one) for one in found]
            copy_into(copies, found)
        return copies

    pairs = zip(launched(*leaves), expected, strict=True)
    check_equal("a graph of them", functools.partial(torch.allclose, equal_nan=True), pairs)
    return launched


def check_equal(
    what: str, is_close: Callable[[Tensor, Tensor], bool], pairs: Iterable[tuple[Tensor, Tensor]]
) -> None:
    """Raise a RuntimeError if what a faster way gives is not what the plain one does."""
    if not all(is_close(found, expected) for found, expected in pairs):
        raise RuntimeError(f"{what} gives other numbers")


def copy_into(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy tensors by as few kernels as they have types."""
    by_type: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for pair in zip(places, values, strict=True):
        for chosen, one in zip(by_type.setdefault(pair[0].dtype, ([], [])), pair, strict=True):
            chosen.append(one)
    for some, others in by_type.values():
        torch._foreach_copy_(some, others)


def _traced(
    function: Callable[..., Any], leaves: list[Any], draws: bool = False
) -> torch.fx.GraphModule:
    # What the tracer leaves is a cycle, which is not to hold the function.
    held, sources = [function], {*_SOURCES.eval_cache}
    try:
        with _Unread():
            graph = make_fx(lambda *given: held[0](*given))(*leaves)
    except RuntimeError as error:
        _refuse(reason_of(error), error)
    finally:
        held.clear()
        for name in _SOURCES.eval_cache.keys() - sources:
            _SOURCES.eval_cache.pop(name, None)
            linecache.cache.pop(name, None)
    for node in graph.graph.nodes:
        tags = (_VARYING if draws else {*_VARYING, _DRAWING}).intersection(
            getattr(node.target, "tags", ())
        )
        if tags and not _is_of_places(node):
            _refuse(
                f"what {node.target} returns depends on more than the shapes of its inputs "
                f"({', '.join(tag.name for tag in tags)})"
            )
    _drop_by_memory(graph.graph)
    _widen(graph.graph)
    for node in graph.graph.nodes:
        node.meta.clear()  # of the tracer, and not what the compiler expects
    return graph


class _Unread(TorchFunctionMode):
    """Refuses to hand numbers to NumPy or Python, which a trace would take for constants."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.numpy, Tensor.__array__, Tensor.tolist, Tensor.__dlpack__):
            raise RuntimeError("its forward takes numbers out of PyTorch, as by numpy or tolist")
        if (
            func in _OF_SEQUENCES
            and len(args) > 1
            and getattr(args[1], "dtype", None) == torch.long
        ):
            raise RuntimeError("its forward reads the lengths of packed sequences")
        return func(*args, **(kwargs or {}))


def _is_of_places(node: torch.fx.Node) -> bool:
    """Whether an index has integers alone, whose number is that of what is found."""
    is_index = node.target is torch.ops.aten.index.Tensor
    masks = torch.bool, torch.uint8
    places: Any = node.args[1] if is_index else ()
    return is_index and not any(at is not None and at.meta["val"].dtype in masks for at in places)


def _refuse(reason: str, cause: Exception | None = None) -> NoReturn:
    raise RuntimeError(f"this net cannot be compiled: {reason}; {_REMEDY}") from cause


def reason_of(error: Exception) -> str:
    """Return the first line of an error of the tracer, the compiler or a capture."""
    if "data-dependent control flow" in str(error):
        return "its control flow depends on numbers"
    # What follows is advice on the tracer, which is ours.
    text = str(error).partition(" It may be possible")[0].strip().split("\n")[0].rstrip(".")
    return text.removeprefix("this net cannot be compiled: ").removesuffix(f"; {_REMEDY}")


def _drop_by_memory(graph: torch.fx.Graph) -> None:
    """Let dropout of a transposed input be that of its memory, whose order the draws have.

    A compiler makes new tensors instead of drawing in place, and fills them by rows.
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.bernoulli_.float):
        strides = node.meta["val"].stride()
        order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
        if order == sorted(order):
            continue
        place, *chance = node.args
        with graph.inserting_before(node):
            view = graph.call_function(aten.permute.default, (place, order))
            graph.call_function(node.target, (view, *chance), node.kwargs)
        node.replace_all_uses_with(place)
        graph.erase_node(node)


def _widen(graph: torch.fx.Graph) -> None:
    """Compute products of few columns transposed, since MKL takes up to five times as long."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        rows, columns = node.meta["val"].shape[1:]
        if not 1 < columns < min(rows, 16):
            continue
        with graph.inserting_before(node):
            left, right = (
                graph.call_function(aten.transpose.int, (one, 1, 2)) for one in reversed(node.args)
            )
            product = graph.call_function(aten.bmm.default, (left, right))
            back = graph.call_function(aten.transpose.int, (product, 1, 2))
            # What follows was traced for these strides.
            how: dict[str, Any] = {"memory_format": torch.contiguous_format}
            back = graph.call_function(aten.clone.default, (back,), how)
        node.replace_all_uses_with(back)
        graph.erase_node(node)


@torch.no_grad()
def check_repeatable(function: Callable[[Tensor], Iterable[Tensor]], position: Tensor) -> None:
    """Compare a trace with a function at two points: state of Python's own does not show in one."""
    graph = _traced(function, [position])
    steps = torch.arange(position.numel(), dtype=position.dtype, device=position.device)
    for at in (position, position + 0.1 * torch.sin(steps).reshape(position.shape)):
        for found, expected in zip(graph(at), function(at), strict=True):
            tolerance = torch.finfo(expected.dtype).eps ** 0.5
            error, size = (found - expected).norm(), expected.norm()
            if size.isfinite() and not error <= tolerance * size:
                _refuse("its forward depends on more than weights and inputs")
