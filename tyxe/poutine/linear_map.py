"""The one interception of linear maps.

`linear`, `conv1d/2d/3d`, their transposed forms, products of an input with one draw (`@`, `addmm`,
`bmm`, `einsum`, `tensordot`, ...) and the projections inside attention all raise one event, a
`LinearMap`, as a message of type `linear_map` on Pyro's stack of handlers. The innermost handler
that can answer it does; without one the map is computed at the drawn values.
"""

from __future__ import annotations

import functools
import math
import string
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import Message, effectful
from torch import Tensor

from tyxe.errors import warn
from tyxe.poutine.draw import RULES, Draw, use_values
from tyxe.threads import handlers, in_backward, only_handlers


class _Attention(NamedTuple):
    """What is known inside of attention, whose projections are on (sequence, batch, features)."""

    batch_dim: int
    points: int


# Of the thread: another may be in another layer.
_ATTENTION: ContextVar[_Attention | None] = ContextVar("attention", default=None)


# Of a forward that is watched for derivatives inside of it; the list is empty after its end.
_WATCHED: ContextVar[list[bool] | None] = ContextVar("watched", default=None)


@contextmanager
def watched_forward() -> Iterator[None]:
    """Let handlers look whether the net differentiates its outputs inside of its forward."""
    running = [True]
    token = _WATCHED.set(running)
    try:
        yield
    finally:
        running.clear()
        _WATCHED.reset(token)


def tell_of_derivatives(output: Tensor, tell: Callable[[], None]) -> None:
    """Call a function if an output of a map is differentiated before a watched forward ends."""
    running = _WATCHED.get()
    if running is None:
        return
    if torch._C._functorch.is_gradtrackingtensor(output):  # as in torch.func.grad
        tell()
    elif output.requires_grad:

        def hook(_: Tensor) -> None:
            if running:
                tell()

        output.register_hook(hook)


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

    @property
    def _named(self) -> dict[str, Any]:
        positional = zip(("stride", "padding", "dilation"), self.args, strict=False)
        return {**dict(positional), **self.kwargs}

    def steps(self) -> tuple[list[int], list[int]]:
        """Return stride and dilation in each spatial dimension of a convolution."""
        named, dims = self._named, self.spatial_dims
        return _each(named.get("stride", 1), dims), _each(named.get("dilation", 1), dims)

    def windows(self) -> Tensor:
        """Return a view of the input under the kernel, `(..., C, *kernel, *positions)`.

        For convolutions that are not transposed.
        """
        dims = self.spatial_dims
        kernel = self.weight.shape[-dims:]
        stride, dilation = self.steps()
        pads = _pads(self._named.get("padding", 0), kernel, dilation)
        x = F.pad(self.input, pads) if any(pads) else self.input
        first = x.dim() - dims
        for dim, (k, d, step) in enumerate(zip(kernel, dilation, stride, strict=True), first):
            x = x.unfold(dim, d * (k - 1) + 1, step)
            x = x[..., ::d] if d > 1 else x
        return x.movedim(tuple(range(-dims, 0)), tuple(range(first, first + dims)))


def _each(number: int | Sequence[int], dims: int) -> list[int]:
    """Return one number for each spatial dimension, however PyTorch was given them."""
    numbers = [number] if isinstance(number, int) else list(number)
    return numbers * dims if len(numbers) == 1 else numbers


def _pads(
    padding: int | str | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]
) -> list[int]:
    """Return the argument of `F.pad`: the last dimension first, before and after."""
    if isinstance(padding, str):  # "same" or "valid"
        is_same = padding == "same"
        totals = [is_same * d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    else:
        totals = [2 * pad for pad in _each(padding, len(kernel))]
    return [pad for total in reversed(totals) for pad in (total // 2, total - total // 2)]


@effectful(type="linear_map")
def _linear_map(event: LinearMap) -> Tensor:
    return event.at_values()


def _map_rule(
    kind: str,
    spatial_dims: int,
    func: Callable[..., Any],
    input: Any,
    weight: Any,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Raise the event of a linear map, unless one of its parts is repeated."""
    if any(isinstance(part, Draw) and part.copied_dims for part in (weight, bias)):
        return NotImplemented

    def function(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return func(x, weight, bias, *args, **kwargs)

    x = use_values(input, func)
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
            "draws other noise than in the forward: leave the handler out for this net, or call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
    # Perhaps by a thread of autograd's, or after the handlers were left.
    with only_handlers(answering):
        return _linear_map(event)


# --------------------------------------------------------------------------- products


def _einsum_rule(equation: str, *operands: Any, bias: Tensor | None = None) -> Any:
    """An input times a draw as one matrix is a linear map. Dimensions of `...` get digits."""
    left, _, output = equation.replace(" ", "").partition("->")
    terms = [
        (each, term.replace("...", "0123456789"[7 + len(term) - each.dim() :]))
        for each, term in zip(operands, left.split(","), strict=False)
    ]
    is_pair = len(operands) == len(terms) == left.count(",") + 1 == 2
    if not is_pair or any(len({*letters}) != each.dim() for each, letters in terms):
        return NotImplemented
    (x, of_x), (w, of_w) = sorted(terms, key=lambda term: isinstance(term[0], Draw))
    output = output.replace("...", "".join(sorted({c for c in of_x + of_w if c.isdigit()})))
    # Copies for each data point are one matrix.
    for letter in {*of_w} & {*of_x} & {*output} if isinstance(w, Draw) else ():
        dim, size = of_w.index(letter), x.shape[of_x.index(letter)]
        if w.shape[dim] == 1 or (w.shape[dim] == size and dim in w.copied_dims):
            w, of_w = w.select(dim, 0), of_w.replace(letter, "")
    sizes = {*zip(of_x, x.shape, strict=True), *zip(of_w, w.shape, strict=True)}
    is_map = {*of_x} ^ {*of_w} == {*output} and len(sizes) == len({*of_x, *of_w})
    is_map = is_map and not isinstance(x, Draw)
    return _product(x, of_x, w, of_w, output, bias) if is_map else NotImplemented


def _product(x: Tensor, of_x: str, w: Tensor, of_w: str, output: str, bias: Tensor | None) -> Any:
    """Return the product, by letters of dimensions, as `F.linear` of both rearranged."""
    summed, kept = ([c for c in of_x if (c in of_w) is among] for among in (True, False))
    new = [c for c in of_w if c not in summed]
    size = dict(zip(of_x + of_w, x.shape + w.shape, strict=True))
    inner, outer, rows = ([size[c] for c in letters] for letters in (summed, new, kept))
    x, w = _ordered(x, of_x, kept + summed), _ordered(w, of_w, new + summed)
    x = x if len(summed) == 1 else x.reshape(*rows, math.prod(inner))
    w = w if len(summed) == len(new) == 1 else w.reshape(math.prod(outer), math.prod(inner))
    if bias is not None and [*bias.shape] == outer and output == "".join(kept + new):
        return F.linear(x, w, bias)
    product = _ordered(F.linear(x, w).reshape(*rows, *outer), kept + new, output)
    return product if bias is None else bias + product


def _ordered(tensor: Tensor, letters: Sequence[str], order: Sequence[str]) -> Tensor:
    dims = [letters.index(letter) for letter in order]
    return tensor if dims == sorted(dims) else tensor.permute(dims)


def _matmul_rule(x: Any = None, w: Any = None, bias: Any = None, **kwargs: Any) -> Any:
    if kwargs or not (isinstance(x, Tensor) and isinstance(w, Tensor)):
        return NotImplemented
    is_usual = isinstance(w, Draw) and w.dim() == 2 and not isinstance(x, Draw)
    if is_usual and (bias is None or bias.shape == w.shape[1:]):
        return F.linear(x, w.t(), bias)  # in a third of the time
    row, column = "n" * (x.dim() > 1), "o" * (w.dim() > 1)
    return _einsum_rule(f"...{row}i,...i{column}->...{row}{column}", x, w, bias=bias)


def _added_product_rule(
    input: Any = None, x: Any = None, w: Any = None, beta: Any = 1, alpha: Any = 1, **out: Any
) -> Any:
    is_sum = alpha == beta == 1
    product = _matmul_rule(x, w, input if is_sum else None, **out)
    if product is NotImplemented or is_sum:
        return product
    return alpha * product + beta * input if beta else alpha * product


def _tensordot_rule(first: Tensor, second: Tensor, dims: Any = 2, out: Any = None) -> Any:
    of_first = string.ascii_lowercase[: first.dim()]
    of_second = [*string.ascii_uppercase[: second.dim()]]
    pairs = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    for i, j in zip(*pairs, strict=True):
        of_second[j] = of_first[i]
    output = [c for c in (*of_first, *of_second) if (c in of_first) != (c in of_second)]
    equation = "".join([*of_first, ",", *of_second, "->", *output])
    return NotImplemented if out is not None else _einsum_rule(equation, first, second)


RULES[F.linear] = functools.partial(_map_rule, "linear", 0, F.linear)
for _dims in (1, 2, 3):
    for _name in (f"conv{_dims}d", f"conv_transpose{_dims}d"):
        _func = getattr(F, _name)
        _rule = functools.partial(_map_rule, _name, _dims, _func)
        RULES[_func] = RULES[getattr(torch, _name)] = _rule
for _name in ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm"):
    _product_rule = _added_product_rule if "add" in _name else _matmul_rule
    RULES[getattr(torch, _name)] = RULES[getattr(Tensor, _name)] = _product_rule
RULES[Tensor.__matmul__] = _matmul_rule
RULES[torch.einsum], RULES[torch.tensordot] = _einsum_rule, _tensordot_rule
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


class LinearMapMessenger(Messenger):
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
        return None

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
                f"{name} had no effect: no site met inside it has a posterior that it treats "
                "(tyxe.guides.AutoNormal has one; for a distribution of your own, register "
                "tyxe.distributions.independent_moments or center) and enters a linear map",
            )
        return result
