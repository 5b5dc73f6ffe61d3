"""The protocol of symmetric positive semi-definite matrices with a known structure."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from tyxe import check
from tyxe.autocast import full_precision
from tyxe.linalg.checks import check_dtype, check_non_negative

OperatorT = TypeVar("OperatorT", bound="Operator")
T = TypeVar("T")


def factorization(method: Callable[[Any], T]) -> functools.cached_property[T]:
    """Compute a property once, with a graph of gradients even where gradients are off.

    Otherwise a value that is first used without gradients would be kept, and later derivatives
    would be wrong without an error.
    """

    @functools.wraps(method)
    def compute(self: Any) -> T:
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return method(self)
        with torch.inference_mode(False), torch.enable_grad():
            return method(self)

    return functools.cached_property(compute)


def _without_autocast(structure: type) -> None:
    """Let an operator's public methods run in its own precision, also inside of autocast.

    An inverse would magnify the rounding of half precision, and factorisations would keep it.
    """

    def in_own_precision(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: Operator, *args: Any, **kwargs: Any) -> Any:
            with full_precision(self._first_tensor()):
                return method(self, *args, **kwargs)

        return run

    for name, method in list(vars(structure).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(structure, name, in_own_precision(method))


@dataclass(frozen=True, eq=False, repr=False)
class Operator(ABC):
    r"""A symmetric positive semi-definite `P x P` matrix `A`, in float32 or float64.

    It acts on the last dimension of its arguments, of size `P`; dimensions before it are batch
    dimensions. A curvature without a prior may be singular: products, scales and diagonals are
    available all the same, and methods that need an inverse raise. As the precision of a Gaussian,
    `A^-1 = S S^T` is the covariance; every structure has one root `S`, its `inverse_sqrt`.

    All is computed in the operator's own type, also inside of autocast.

    Operators are immutable: `scaled`, `add_diagonal`, `to` and `detach` return new ones, and all
    results are differentiable in the scale and the diagonal. Factorisations are computed once.
    Copies, pickles and saved states hold tensors without their gradients' history.

    Vectors of another size are a ValueError, vectors of another type a TypeError.

    A structure is a frozen dataclass whose fields are tensors, operators or mappings of operators.
    It implements the abstract methods; arguments of those with an underscore are checked here.

    Example:
        >>> from tyxe.linalg import Dense
        >>> precision = Dense(torch.tensor([[3.0, 2.0], [2.0, 4.0]])).add_diagonal(1.0)
        >>> precision @ torch.tensor([1.0, 0.0])
        tensor([4., 2.])
        >>> precision.solve(torch.tensor([4.0, 2.0]))
        tensor([1., 0.])
        >>> precision.sample((5,)).shape
        torch.Size([5, 2])
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _without_autocast(cls)

    @property
    @abstractmethod
    def size(self) -> int:
        """The number `P` of rows and of columns."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of all tensors inside."""
        return self._first_tensor().dtype

    @property
    def device(self) -> torch.device:
        """The device of all tensors inside."""
        return self._first_tensor().device

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor inside has a gradient."""
        return any(tensor.requires_grad for tensor in self._tensors())

    # ------------------------------------------------------------------ products and parts of A

    def matmul(self, x: Tensor) -> Tensor:
        """Return `A x` for vectors `x`, `(..., P)`; also spelled `A @ x`."""
        return self._matmul(self._vectors(x))

    def __matmul__(self, x: Tensor) -> Tensor:
        return self.matmul(x)

    def quadratic(self, x: Tensor) -> Tensor:
        """Return `x^T A x`, `(...)`, for vectors `x`, `(..., P)`."""
        return self._quadratic(self._vectors(x))

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Return the diagonal of `A`, `(P,)`."""

    @abstractmethod
    def to_dense(self) -> Tensor:
        """Return the matrix, `(P, P)`, of `P^2` elements."""

    # ------------------------------------------------------------------ the inverse

    @abstractmethod
    def logdet(self) -> Tensor:
        """Return `log det A`, a tensor without dimensions.

        Raises:
            ValueError: `A` is not positive definite; so do all methods from here to `sample`.
        """

    @factorization
    def known_logdet(self) -> Tensor:
        """`logdet()`, computed once, for use where no tensor inside has a gradient."""
        return self.logdet()

    @abstractmethod
    def inverse_diagonal(self) -> Tensor:
        """Return the diagonal of `A^-1`, `(P,)`: the marginal variances under precision `A`."""

    def inverse_sqrt(self, z: Tensor) -> Tensor:
        """Return `S z` for vectors `z`, `(..., P)`, where `S S^T = A^-1`.

        For standard normal `z` this is a draw of precision `A`.
        """
        return self._inverse_sqrt(self._vectors(z))

    def whiten(self, x: Tensor) -> Tensor:
        """Return `S^T x` for vectors `x`, `(..., P)`: the transpose of `inverse_sqrt`.

        `whiten(x) @ whiten(y).mT` is the covariance of `x w` and `y w` for `w` of precision `A`.
        """
        return self._whiten(self._vectors(x))

    def solve(self, x: Tensor) -> Tensor:
        """Return `A^-1 x = S S^T x` for vectors `x`, `(..., P)`."""
        return self._inverse_sqrt(self.whiten(x))

    def inverse_quadratic(self, x: Tensor) -> Tensor:
        """Return `X A^-1 X^T = (X S) (X S)^T`, the covariance of `X w` for `w` of precision `A`.

        `x` are matrices `(..., C, P)`, such as Jacobians. The result is `(..., C, C)`, symmetric
        and positive semi-definite up to rounding of its own size.
        """
        white = self.whiten(x)
        return white @ white.mT

    def inverse_quadratic_factored(self, a: Tensor, g: Tensor) -> Tensor:
        """Return `inverse_quadratic` of the rows `J_c = sum_r vec(g_cr a_r^T)`, `(..., C, C)`.

        The Jacobians of a net in a weight that it uses at `R` positions have this form. Structures
        with a shorter way do not form them.

        Args:
            a: inputs of the map, `(..., R, in)`.
            g: gradients of `C` outputs of the net in the map's outputs, `(..., C, R, out)`.

        Example:
            >>> from tyxe.linalg import Kronecker
            >>> precision = Kronecker.from_factors(torch.eye(2), torch.eye(3)).add_diagonal(1.0)
            >>> a, g = torch.rand(5, 7, 3), torch.rand(5, 4, 7, 2)
            >>> rows = torch.einsum("ncro,nri->ncoi", g, a).flatten(-2)
            >>> torch.allclose(precision.inverse_quadratic_factored(a, g),
            ...                precision.inverse_quadratic(rows))
            True
        """
        return self.inverse_quadratic((g.mT @ a.unsqueeze(-3)).flatten(-2))

    @check.arguments
    def sample(self, sample_shape: Sequence[int] = (), noise: Tensor | None = None) -> Tensor:
        """Return draws `(*sample_shape, P)` of `N(0, A^-1)`.

        They are a differentiable function of standard normal noise of their shape, by default from
        torch's generator.
        """
        shape = torch.Size([*sample_shape, self.size])
        if noise is None:
            noise = torch.randn(shape, dtype=self.dtype, device=self.device)
        return self._inverse_sqrt(check.shape("noise", noise, shape))

    # ------------------------------------------------------------------ other operators

    @check.arguments
    def scaled(self: OperatorT, c: float | Tensor) -> OperatorT:
        """Return `c A`, of the same structure.

        `c` is a number or a tensor without dimensions, finite and not negative.
        """
        scale = check.shape("the scale", self._tensor(c), ())
        return self._scaled(check_non_negative(scale, "the scale"))

    @check.arguments
    def add_diagonal(self: OperatorT, d: float | Tensor) -> OperatorT:
        """Return `A + diag(d)`, of the same structure, such as a posterior precision.

        `d` is a number or a tensor without dimensions, for `d I`, or the diagonal, `(P,)`; finite
        and not negative. A Kronecker product takes only `d I`; anything else is a ValueError.
        """
        diagonal = self._tensor(d)
        if diagonal.dim():
            check.shape("the diagonal to add", diagonal, (self.size,), ", or one number")
        return self._add_diagonal(check_non_negative(diagonal, "the diagonal to add"))

    def to(self: OperatorT, *args: Any, **kwargs: Any) -> OperatorT:
        """Return the operator on another device or in another precision, as `Tensor.to`."""
        moved = self.map(lambda tensor: tensor.to(*args, **kwargs))
        check_dtype(moved.dtype, type(self).__name__)
        # As `Tensor.to` does, and factorisations are kept.
        same = (moved.dtype, moved.device) == (self.dtype, self.device)
        return self if same else moved

    def detach(self: OperatorT) -> OperatorT:
        """Return the operator without its gradients' history."""
        return self.map(Tensor.detach)

    def map(self: OperatorT, function: Callable[[Tensor], Tensor]) -> OperatorT:
        """Return the operator with a function of each of its tensors in their places."""

        def changed(part: Tensor | Operator) -> Tensor | Operator:
            return part.map(function) if isinstance(part, Operator) else function(part)

        return self._like(**tree_map(changed, self._fields()))

    # ------------------------------------------------------------------ what a structure implements

    @abstractmethod
    def _matmul(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _quadratic(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _inverse_sqrt(self, z: Tensor) -> Tensor: ...

    @abstractmethod
    def _whiten(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _scaled(self: OperatorT, c: Tensor) -> OperatorT: ...

    @abstractmethod
    def _add_diagonal(self: OperatorT, d: Tensor) -> OperatorT: ...

    # ------------------------------------------------------------------ fields and arguments

    def _fields(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def _tensors(self) -> Iterator[Tensor]:
        for value in self._fields().values():
            parts = value.values() if isinstance(value, Mapping) else (value,)
            for part in parts:
                yield from part._tensors() if isinstance(part, Operator) else (part,)

    def _first_tensor(self) -> Tensor:
        return next(self._tensors())

    def _tensor(self, value: float | Tensor) -> Tensor:
        """Return a number or tensor in the operator's type and on its device, differentiably."""
        return torch.as_tensor(value, dtype=self.dtype, device=self.device)

    def _identity(self) -> Tensor:
        return torch.eye(self.size, dtype=self.dtype, device=self.device)

    def _vectors(self, x: Tensor) -> Tensor:
        """Return `x` if the operator can act on its last dimension."""
        check.one_of("what an operator acts on", x, Tensor, "a tensor of vectors")
        check.shape("a tensor of vectors", x, (*x.shape[:-1], self.size), " for this operator")
        if x.dtype != self.dtype:
            raise TypeError(
                f"an operator in {self.dtype} got a tensor in {x.dtype}; "
                "convert one of them with .to(dtype)"
            )
        return x

    def _like(self: OperatorT, **fields: Any) -> OperatorT:
        """Return an operator of this class with other fields, without checking them again."""
        other = object.__new__(type(self))
        other.__dict__.update(self._fields() | fields)
        return other

    def __getstate__(self) -> dict[str, Any]:
        # Without factorisations, which can be computed again, and without the graph of gradients.
        return self.detach()._fields()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(size={self.size}, dtype={self.dtype}, device={self.device})"


_without_autocast(Operator)
