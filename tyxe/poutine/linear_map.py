"""The one interception of linear maps.

`linear`, `conv1d/2d/3d`, their transposed forms, `x @ w` with a matrix, and the projections
inside attention all raise one event, a `LinearMap`, as a message of type `linear_map` on Pyro's
stack of handlers. The innermost handler that can answer it does; without one the map is computed
at the drawn values.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pyro.poutine.runtime import Message, effectful
from torch import Tensor

from tyxe.errors import warn
from tyxe.poutine.draw import RULES, Draw, use_values
from tyxe.threads import Handler, handlers, in_backward, only_handlers


class _Attention(NamedTuple):
    """What is known inside of attention, whose projections are on (sequence, batch, features)."""

    batch_dim: int
    points: int


# Of the thread: another may be in another layer.
_ATTENTION: ContextVar[_Attention | None] = ContextVar("attention", default=None)


@dataclass(frozen=True)
class LinearMap:
    """One call of a linear map whose weight or bias is a draw.

    Attributes:
        kind: `linear`, `conv1d`, ..., `conv_transpose3d`.
        function: the map as `function(input, weight, bias)`, hyperparameters bound.
        input: the input, a plain tensor.
        weight: the weight, a draw or a plain tensor.
        bias: the bias, a draw, a plain tensor or None.
        spatial_dims: number of trailing spatial dimensions (0 for `linear`).
        batch_dim: which dimension of a batched input counts data points.
        rows_of_points_are_apart: whether rows are (sequence, batch) flattened, as inside attention,
            so that the rows of one of `n` points are `n` apart.
        points: the number `n` of data points inside of attention, None elsewhere.
        args: positional hyperparameters after weight and bias.
        kwargs: hyperparameters by name.
    """

    kind: str
    function: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    spatial_dims: int
    batch_dim: int
    rows_of_points_are_apart: bool = False
    points: int | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def draws(self) -> list[Draw]:
        """The draws that the map uses."""
        return [part for part in (self.weight, self.bias) if isinstance(part, Draw)]

    def at_values(self) -> Tensor:
        """Compute the map at the draws' values."""
        weight, bias = (
            part.value() if isinstance(part, Draw) else part for part in (self.weight, self.bias)
        )
        assert weight is not None
        return self.function(self.input, weight, bias)

    def windows(self) -> Tensor:
        """Return a view of the input under the kernel, `(..., C, *kernel, *positions)`.

        For convolutions that are not transposed.
        """
        dims = self.spatial_dims
        kernel = self.weight.shape[-dims:]
        positional = zip(("stride", "padding", "dilation"), self.args, strict=False)
        named = {**dict(positional), **self.kwargs}
        stride, dilation = (_each(named.get(name, 1), dims) for name in ("stride", "dilation"))
        x = F.pad(self.input.detach(), _pads(named.get("padding", 0), kernel, dilation))
        covered = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
        counts = [
            (size - cover) // step + 1
            for size, cover, step in zip(x.shape[-dims:], covered, stride, strict=True)
        ]
        steps = x.stride()
        along_kernel = [s * d for s, d in zip(steps[-dims:], dilation, strict=True)]
        along_output = [s * step for s, step in zip(steps[-dims:], stride, strict=True)]
        return x.as_strided(
            (*x.shape[:-dims], *kernel, *counts), (*steps[:-dims], *along_kernel, *along_output)
        )


def _each(number: int | Sequence[int], dims: int) -> list[int]:
    """Return one number for each spatial dimension, however PyTorch was given them."""
    numbers = [number] if isinstance(number, int) else list(number)
    return numbers * dims if len(numbers) == 1 else numbers


def _pads(
    padding: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Return the argument of `F.pad`: the last dimension first, before and after."""
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        pairs = [(total // 2, total - total // 2) for total in totals]
    elif padding == "valid":
        pairs = [(0, 0)] * len(kernel)
    else:
        assert not isinstance(padding, str)
        pairs = [(pad, pad) for pad in _each(padding, len(kernel))]
    return [pad for pair in reversed(pairs) for pad in pair]


@effectful(type="linear_map")
def _linear_map(event: LinearMap) -> Tensor:
    return event.at_values()


def _raise_event(
    kind: str,
    spatial_dims: int,
    func: Callable[..., Any],
    x: Any,
    weight: Any,
    bias: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    def function(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = func(x, weight, bias, *args, **kwargs)
        return result

    x = use_values(x, func)
    inside = _ATTENTION.get()
    batch_dim = inside.batch_dim if inside is not None and x.dim() == 3 else 0
    # Attention flattens (sequence, batch) before its last projection.
    apart = inside is not None and inside.batch_dim == 1 and x.dim() == 2
    points = None if inside is None else inside.points
    event = LinearMap(
        kind, function, x, weight, bias, spatial_dims, batch_dim, apart, points, args, kwargs
    )
    answering = next((d._source.handlers for d in event.draws if d._source.handlers), None)
    if answering is None or not in_backward():
        return _linear_map(event)
    # Checkpoints, which set the generator back, watch what is saved.
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        raise RuntimeError(
            "a custom autograd function, such as that of an adjoint solver or a reentrant "
            f"checkpoint, runs a part of the net again in the backward, where {answering[-1].name} "
            "draws other noise than in the forward: leave the handler for this net, or call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
    # Perhaps by a thread of autograd's, or after the handlers were left.
    with only_handlers(answering):
        return _linear_map(event)


def _rule(kind: str, spatial_dims: int, func: Callable[..., Any]) -> Callable[..., Any]:
    def rule(input: Any, weight: Any, bias: Any = None, *args: Any, **kwargs: Any) -> Any:
        return _raise_event(kind, spatial_dims, func, input, weight, bias, *args, **kwargs)

    return rule


def _matmul_rule(input: Any = None, other: Any = None, **kwargs: Any) -> Any:
    """`x @ w` is a linear map with weight `w.T`; other products of draws use the values."""
    if kwargs or isinstance(input, Draw) or not isinstance(other, Draw) or other.dim() != 2:
        return NotImplemented
    return F.linear(input, other.t())


RULES[F.linear] = _rule("linear", 0, F.linear)
for _dims in (1, 2, 3):
    for _name in (f"conv{_dims}d", f"conv_transpose{_dims}d"):
        _func = getattr(F, _name)
        RULES[_func] = RULES[getattr(torch, _name)] = _rule(_name, _dims, _func)
for _func in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__):
    RULES[_func] = _matmul_rule
RULES[Tensor.__rmatmul__] = lambda self, other: _matmul_rule(other, self)


# --------------------------------------------------------------------------- attention


@functools.cache
def _open_attention() -> Callable[..., Any]:
    """Return PyTorch's attention function without its own dispatch to `__torch_function__`."""
    original = F.multi_head_attention_forward
    answers_no = {"has_torch_function": lambda arguments: False}
    return types.FunctionType(
        original.__code__,
        {**original.__globals__, **answers_no},
        original.__name__,
        original.__defaults__,
        original.__closure__,
    )


def _attention_rule(query: Tensor, *args: Any, **kwargs: Any) -> Any:
    batched = query.dim() == 3
    token = _ATTENTION.set(_Attention(int(batched), query.shape[1] if batched else 1))
    try:
        return _open_attention()(query, *args, **kwargs)
    finally:
        _ATTENTION.reset(token)


RULES[F.multi_head_attention_forward] = _attention_rule


# --------------------------------------------------------------------------- handlers


class LinearMapMessenger(Handler):
    """Base of handlers that change how linear maps are sampled.

    While it is active, samples of sites whose posterior factorises are lazy (`Draw`). A subclass
    implements `answer`. On exit, a warning names the sites that it could have treated but that some
    other operation used.
    """

    name = ""
    treatment = ""

    def __init__(self) -> None:
        super().__init__()
        self._missed: dict[str, str] = {}
        self._met = self._answered = False

    def answer(self, event: LinearMap) -> Tensor | None:
        """Return the map's output, or None to leave the event to the next handler."""
        raise NotImplementedError

    def _pyro_sample(self, msg: Message) -> None:
        if msg["done"] or msg["is_observed"] or msg["value"] is not None:
            return
        if msg["infer"].get("is_auxiliary") or msg["fn"].batch_shape:
            return
        self._met = True
        draw = Draw.where_treatable(msg["name"], msg["fn"])
        if draw is not None:
            draw._source.handlers = [h for h in handlers() if isinstance(h, LinearMapMessenger)]
            msg["value"], msg["done"] = draw, True

    def _pyro_lazy(self, msg: Message) -> None:
        msg["value"] = True

    def _pyro_substitute_site(self, msg: Message) -> None:
        name, value = msg["args"]
        if msg["value"] is None and not isinstance(value, Draw):
            msg["value"] = Draw(name, None, value)

    def _pyro_linear_map(self, msg: Message) -> None:
        if msg["done"]:
            return
        output = self.answer(msg["args"][0])
        if output is not None:
            self._answered = True
            msg["value"], msg["done"] = output, True
            msg["infer"]["treatment"] = self.treatment

    def _pyro_post_draw_value(self, msg: Message) -> None:
        draw, func = msg["args"]
        if draw._source.distribution is not None:
            self._missed.setdefault(draw.name_of_site, getattr(func, "__name__", str(func)))

    def __exit__(self, exc_type: Any, exc_value: Any, traceback: Any) -> Any:
        """Warn of sites that were sampled plainly, unless there is an error."""
        missed, had_no_effect = self._missed, self._met and not self._answered
        self._missed, self._met, self._answered = {}, False, False
        result = super().__exit__(exc_type, exc_value, traceback)
        if exc_type is not None:
            return result
        name = self.name
        if missed:
            listed = ", ".join(f"{site} (used by {func})" for site, func in missed.items())
            warn(
                f"{name} treats linear maps only; these sites were sampled plainly: {listed}. "
                "tyxe.poutine.report() lists every site",
            )
        elif had_no_effect:
            warn(
                f"{name} had no effect: no site met inside it has a posterior that factorises "
                "(a guide such as tyxe.guides.AutoNormal has one) and enters a linear map",
            )
        return result
