"""A draw from a site's posterior that is made only when an operation needs its value.

A `Draw` replaces a parameter while the net runs. A linear map that uses it raises one event (see
`linear_map`), which a handler may answer from the posterior's moments; then the value is never
drawn. Every other operation gets the value, drawn once for all uses, and so do later linear maps.
So a mean is never used in place of a draw. Views that only rearrange elements (`split`, `chunk`,
`transpose`, ...) are draws again, whose moments are rearranged in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributions as td
from pyro.poutine.runtime import effectful
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from tyxe.distributions import center, deviation, independent_moments
from tyxe.distributions.param_blocks import Arrangement
from tyxe.rng import RandomStream

View = Callable[[Tensor], Tensor]


class _Source:
    """One site's posterior with what has been computed of it so far, shared by all its views.

    A checkpointed part of a net runs twice, and in the second run the results of the first are
    known. They are therefore computed independently of the checkpoint: with a seed and a gradient
    mode of their own, and without its hooks for saved tensors.
    """

    def __init__(
        self,
        name: str,
        distribution: td.Distribution | None,
        value: Tensor | None,
        like: Tensor,
        shape: torch.Size,
        moments: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.name, self.device = name, like.device
        self.shape, self.dtype = shape, like.dtype
        self.distribution = distribution
        # Set once an operation other than a linear map has read the value, or written into it: from
        # then on only the value is consistent with what the net has computed.
        self.value_only = distribution is None
        # Those that answer linear maps, where a backward runs the net again.
        self.handlers: Sequence[Any] = ()
        self._value = value
        self._deviation: Tensor | None = None
        self._moments = moments
        self._grad = torch.is_grad_enabled()
        self._seed = torch.randint(2**62, (), device="cpu") if value is None else None

    @functools.cached_property
    def outline(self) -> Tensor:
        """What views are tried on."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def value(self) -> Tensor:
        if self._value is None:
            assert self.distribution is not None
            reparameterized = self.distribution.has_rsample
            draw = self.distribution.rsample if reparameterized else self.distribution.sample
            with self._as_if_outside(), self._seeded():
                if self._deviation is None:
                    self._value = draw()
                else:
                    middle: Any = center(self.distribution)
                    self._value = self._deviation + middle
        return self._value

    @property
    def was_drawn(self) -> bool:
        return self._value is not None or self._deviation is not None

    @property
    def deviation(self) -> Tensor:
        """The value less the centre."""
        if self._deviation is None:
            assert self.distribution is not None
            with self._as_if_outside(), self._seeded():
                if self._value is None:
                    self._deviation = deviation(self.distribution)
                else:
                    middle: Any = center(self.distribution)
                    self._deviation = self._value - middle
        return self._deviation

    @property
    def moments(self) -> tuple[Tensor, Tensor] | None:
        if self.value_only:
            return None
        if self._moments is None:
            assert self.distribution is not None
            with self._as_if_outside():
                self._moments = independent_moments(self.distribution)
        return self._moments

    @property
    def center(self) -> Tensor | None:
        if self.value_only:
            return None
        assert self.distribution is not None
        with self._as_if_outside():
            middle: Tensor | None = center(self.distribution)
        return middle

    def refuse_gradient(self, gradient: Tensor) -> None:
        """Raise if a gradient that has reached the draw would be lost."""
        if self.value.requires_grad:
            raise RuntimeError(
                f"a custom autograd function, such as an adjoint solver's, was given {self.name} "
                "as a lazy draw, whose gradient would be lost: leave the handler out for this net, "
                "or hide the weight from the prior"
            )

    def _seeded(self) -> AbstractContextManager[Any]:
        assert self._seed is not None
        if get_proxy_mode() is not None:  # of a program, which draws anew in each run
            return nullcontext()
        return RandomStream(int(self._seed))

    def _as_if_outside(self) -> AbstractContextManager[None]:
        # Mostly there are no hooks; and within torch.func's transforms none may be set.
        watched = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if watched is None and torch.is_grad_enabled() == self._grad:
            return nullcontext()
        return self._unwatched()

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        allowed = torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
        hooks = saved_tensors_hooks(*[lambda tensor: tensor] * 2) if allowed else nullcontext()
        with torch.set_grad_enabled(self._grad), hooks:
            yield


class Draw(Tensor):
    """A lazy draw of one site, with the shape, dtype and device of the drawn tensor.

    Args:
        name: the site's name in the joint model.
        distribution: the site's posterior, or None if only a value is known.
        value: the value, if it has already been drawn.

    Example:
        >>> q = td.Independent(td.Normal(torch.zeros(3, 2), torch.ones(3, 2)), 2)
        >>> w = Draw("net.weight", q)
        >>> w.shape, w.was_drawn
        (torch.Size([3, 2]), False)
        >>> torch.equal(w + 0, w.value()), w.was_drawn
        (True, True)
    """

    _source: _Source
    _views: tuple[View, ...]

    def __new__(
        cls, name: str, distribution: td.Distribution | None, value: Tensor | None = None
    ) -> Draw:
        if value is not None:
            source = _Source(name, distribution, value, value, value.shape)
            return cls._make(source, (), source)
        assert distribution is not None
        draw = cls.where_treatable(name, distribution)
        assert draw is not None
        return draw

    @classmethod
    def where_treatable(cls, name: str, distribution: td.Distribution) -> Draw | None:
        """Return a draw, or None if the distribution has neither a centre nor moments."""
        like: Tensor | None = center(distribution)
        moments = None if like is not None else independent_moments(distribution)
        if moments is not None:
            like = moments[0]
        if like is None:
            return None
        shape = torch.Size(distribution.batch_shape + distribution.event_shape)
        source = _Source(name, distribution, None, like, shape, moments)
        return cls._make(source, (), source)

    @classmethod
    def _make(cls, source: _Source, views: tuple[View, ...], like: Tensor | _Source) -> Draw:
        # A custom autograd function takes the draw itself, not its value. That it is differentiated
        # has to be seen, because no gradient would reach the posterior.
        recorded = torch.is_grad_enabled() and like.dtype.is_floating_point
        draw: Draw = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=source.device, requires_grad=recorded
        )
        draw._source, draw._views = source, views
        if recorded:
            with torch._C.DisableTorchFunctionSubclass():
                draw.register_hook(source.refuse_gradient)  # type: ignore[no-untyped-call]
        return draw

    @property
    def name_of_site(self) -> str:
        """The site's name in the joint model."""
        return self._source.name

    @property
    def was_drawn(self) -> bool:
        """Whether the value exists, drawn here or given."""
        return self._source.was_drawn

    @property
    def lost_its_gradient(self) -> bool:
        """Whether a value was drawn here from a distribution whose draws have no gradient."""
        distribution = self._source.distribution
        return self.was_drawn and distribution is not None and not distribution.has_rsample

    @property
    def is_whole(self) -> bool:
        """Whether this is the site itself, and not a part or a rearrangement of it."""
        return not self._views

    @property
    def arrangement(self) -> Arrangement | None:
        """How the draw arranges all elements of the site; None for a part, or if unknown."""
        whole = before = outline = self._source.outline
        for view in self._views:
            if not _shares(outline, whole):
                return None
            before, outline = outline, view(outline)
        # A copy has the elements in the order of what it was made of.
        return Arrangement.of(outline if _shares(outline, whole) else before, whole.shape)

    @property
    def copied_dims(self) -> list[int]:
        """Dimensions along which a matrix is repeated, so that elements are not independent."""
        steps = self._rearrange(self._source.outline).stride() if self._views else ()
        return [dim for dim, step in enumerate(steps) if not step]

    def value(self) -> Tensor:
        """Return the value, drawing it at the first call."""
        return self._rearrange(self._source.value)

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Return elementwise `(mean, variance)` if a handler may use them, else None."""
        moments = self._source.moments
        if moments is None:
            return None
        return self._rearrange(moments[0]), self._rearrange(moments[1])

    def center(self) -> Tensor | None:
        """Return the centre of symmetry of independent elements, else None."""
        middle = self._source.center
        return None if middle is None else self._rearrange(middle)

    def deviation(self) -> Tensor:
        """Return the value minus its centre, for a draw that has one."""
        return self._rearrange(self._source.deviation)

    def _rearrange(self, tensor: Tensor) -> Tensor:
        for view in self._views:
            tensor = view(tensor)
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Draw({self.name_of_site!r}, shape={tuple(self.shape)}, drawn={self.was_drawn})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the value: a copy of a draw is not lazy."""
        return self.value().detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Handle metadata, views and functions with a rule; call all others with the value."""
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in VIEWS and args and isinstance(args[0], Draw):
            viewed = _view(args[0], func, args[1:], kwargs)
            if viewed is not None:
                return viewed
        rule = RULES.get(func)
        result = NotImplemented if rule is None else rule(*args, **kwargs)
        if result is NotImplemented:
            result = func(*use_values(args, func), **use_values(kwargs, func))
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Raise: below autograd the value would have no gradient."""
        raise RuntimeError(
            f"{func} met a lazily drawn weight where PyTorch no longer records gradients "
            "(scripted code, or a C++ extension); leave the handler out for this net, or hide the "
            "weight from the prior"
        )


def _shares(part: Tensor, whole: Tensor) -> bool:
    """Whether a tensor is a view of another, and no copy."""
    return bool(torch._C._is_alias_of(part, whole))  # type: ignore[attr-defined]


# Rules for functions that do more than read a value, such as linear maps.
RULES: dict[Callable[..., Any], Callable[..., Any]] = {}


def _getters(*names: str) -> list[Callable[..., Any]]:
    """Return the functions that PyTorch reports when properties of a tensor are read."""
    return [getattr(Tensor, name).__get__ for name in names]


_MEASURING = "size dim ndimension numel nelement element_size is_floating_point is_complex __len__"
METADATA = {
    *_getters("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta"),
    *_getters("is_sparse", "is_nested", "is_quantized"),
    *(getattr(Tensor, name) for name in _MEASURING.split()),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}

_REARRANGING = (
    "t transpose permute reshape flatten unflatten unsqueeze squeeze narrow select split chunk "
    "unbind movedim swapaxes"
)
VIEWS = {
    *_getters("T", "mT"),
    Tensor.__getitem__,
    Tensor.view,
    Tensor.contiguous,
    Tensor.expand,
    *(getattr(owner, name) for owner in (Tensor, torch) for name in _REARRANGING.split()),
}


def _only_rearranges(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    # Indexing with a tensor or a list may repeat elements, which are then not independent.
    index = args[0] if func is Tensor.__getitem__ else ()
    parts = index if isinstance(index, tuple) else (index,)
    return all(isinstance(part, int | slice | type(None) | type(...)) for part in parts)


def _view(draw: Draw, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    reinterprets = func is Tensor.view and isinstance(args[0], torch.dtype)
    if reinterprets or not _only_rearranges(func, args):
        return None
    outline = draw._rearrange(draw._source.outline)
    outlines = func(outline, *args, **kwargs)
    if func is Tensor.expand and outlines.shape[-2:] != draw.shape[-2:]:
        return None  # only copies of a matrix can be one again
    if draw.copied_dims and not (isinstance(outlines, Tensor) and _shares(outlines, outline)):
        return None

    def wrap(part: Tensor, view: View) -> Draw:
        return Draw._make(draw._source, (*draw._views, view), part)

    if isinstance(outlines, Tensor):
        return wrap(outlines, lambda tensor: func(tensor, *args, **kwargs))
    return tuple(
        wrap(part, lambda tensor, i=i: func(tensor, *args, **kwargs)[i])  # type: ignore[misc]
        for i, part in enumerate(outlines)
    )


@effectful(type="draw_value")
def _use_value(draw: Draw, func: Callable[..., Any]) -> Tensor:
    return draw.value()


def use_values(tree: Any, func: Callable[..., Any]) -> Any:
    """Replace draws in nested arguments by their values, with a message to handlers for each."""
    if isinstance(tree, Draw):
        tree._source.value_only = True
        return _use_value(tree, func)
    if type(tree) in (list, tuple):
        return type(tree)(use_values(item, func) for item in tree)
    if type(tree) is dict:
        return {key: use_values(item, func) for key, item in tree.items()}
    return tree


@effectful(type="substitute_site")
def substitute_site(name: str, value: Tensor) -> Tensor:
    """Return the tensor that the net uses for a site; handlers may replace it by a draw."""
    return value


@effectful(type="lazy")
def draws_are_lazy() -> bool:
    """Whether a handler is active that samples inside the net."""
    return False
