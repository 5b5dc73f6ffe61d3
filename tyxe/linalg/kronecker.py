"""A Kronecker product plus a multiple of the identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tyxe.linalg.base import Operator
from tyxe.linalg.caching import factorization
from tyxe.linalg.checks import (
    check_field,
    check_non_negative,
    check_positive_definite,
    check_same_kind,
    check_symmetric,
)
from tyxe.linalg.kron_formulas import (
    clipped_eigh,
    kron_diagonal,
    kron_eigenvalues,
    kron_rotate,
    kron_rotate_summed,
    kron_variance,
)

KroneckerT = TypeVar("KroneckerT", bound="Kronecker")


@dataclass(frozen=True, eq=False, repr=False)
class Kronecker(Operator):
    r"""`A = scale * (G kron A') + shift * I`, by the eigenbases of the two factors.

    It acts on row-major `vec(X)` of matrices `X: (out, in)`, such as weights. With
    `G = U_g diag(d_g) U_g^T` and `A' = U_a diag(d_a) U_a^T`, the eigenvalues are
    `E = scale * d_g d_a^T + shift` [GLM A.3] and `S vec(Z) = vec(U_g [Z / sqrt(E)] U_a^T)`. Scale,
    diagonal and log-determinant take time of `out * in`, and no `P x P` matrix is formed.

    Args:
        out_basis: `U_g`, `(out, out)`, eigenvectors in columns.
        in_basis: `U_a`, `(in, in)`, eigenvectors in columns.
        out_eigenvalues: `d_g`, `(out,)`, not negative.
        in_eigenvalues: `d_a`, `(in,)`, not negative.
        scale: a tensor without dimensions, not negative.
        shift: a tensor without dimensions, not negative.

    Raises:
        ValueError: shapes that do not fit, elements not finite, or negative eigenvalues.

    Example:
        >>> gradients, inputs = torch.diag(torch.tensor([1.0, 2.0])), torch.eye(3)
        >>> precision = Kronecker.from_factors(gradients, inputs, scale=100.0).add_diagonal(1.0)
        >>> precision.inverse_diagonal().unflatten(0, (2, 3))
        tensor([[0.0099, 0.0099, 0.0099],
                [0.0050, 0.0050, 0.0050]])
    """

    out_basis: Tensor
    in_basis: Tensor
    out_eigenvalues: Tensor
    in_eigenvalues: Tensor
    scale: Tensor
    shift: Tensor

    def __post_init__(self) -> None:
        rows, columns = self.out_eigenvalues.numel(), self.in_eigenvalues.numel()
        check_field(self.out_basis, "the basis of the output factor", rows, rows)
        check_field(self.in_basis, "the basis of the input factor", columns, columns)
        shapes = {
            "out_eigenvalues": (rows,),
            "in_eigenvalues": (columns,),
            "scale": (),
            "shift": (),
        }
        for name, shape in shapes.items():
            check_non_negative(check_field(self.__dict__[name], name, *shape), name)
            check_same_kind(self.out_basis, self.__dict__[name], f"out_basis and {name}")
        check_same_kind(self.out_basis, self.in_basis, "out_basis and in_basis")

    @classmethod
    def from_factors(
        cls: type[KroneckerT], out_factor: Tensor, in_factor: Tensor, scale: float | Tensor = 1.0
    ) -> KroneckerT:
        """Return `scale * (out_factor kron in_factor)`, without a gradient in the factors.

        The gradient of eigenvectors does not exist where eigenvalues repeat, as they do in every
        factor of deficient rank.

        Args:
            out_factor: `(out, out)`, symmetric positive semi-definite, such as `E[g g^T]`.
            in_factor: `(in, in)`, symmetric positive semi-definite, such as `E[a a^T]`.
            scale: multiplies the product, such as the number of points.

        Raises:
            ValueError: a factor is not square, finite, symmetric or positive semi-definite.

        Example:
            >>> Kronecker.from_factors(torch.eye(2), torch.eye(3)).size
            6
        """
        factors = {"the output factor": out_factor, "the input factor": in_factor}
        for what, factor in factors.items():
            check_symmetric(factor, what)
        check_same_kind(out_factor, in_factor, "the output factor and the input factor")
        with torch.no_grad():
            (d_g, u_g), (d_a, u_a) = (
                clipped_eigh(factor, what) for what, factor in factors.items()
            )
        shift = d_g.new_zeros(())
        product = cls(u_g, u_a, d_g, d_a, torch.ones_like(shift), shift)
        return product.scaled(scale)

    def damped(self: KroneckerT) -> KroneckerT:
        """Return the product with its shift spread over the factors [T 3.41].

        `(sqrt(scale) G + sqrt(shift) I) kron (sqrt(scale) A' + sqrt(shift) I)`: this adds
        `sqrt(scale * shift) (d_g + d_a)` to the eigenvalues, so that a posterior is more
        concentrated. The result depends on how constants are divided between factors and scale: in
        [T 3.41] both factors are averages over points, and the scale is the number of points.

        Example:
            >>> product = Kronecker.from_factors(torch.eye(1), torch.eye(1), scale=4.0)
            >>> product.add_diagonal(9.0).damped().to_dense()
            tensor([[25.]])
        """
        scale, shift = self.scale.sqrt(), self.shift.sqrt()
        return self._like(
            out_eigenvalues=scale * self.out_eigenvalues + shift,
            in_eigenvalues=scale * self.in_eigenvalues + shift,
            scale=torch.ones_like(scale),
            shift=torch.zeros_like(shift),
        )

    def averaged(self: KroneckerT, other: KroneckerT) -> KroneckerT:
        """Return one product that approximates the sum of two, without a gradient [T 3.60].

        Factors are averaged with the scales as weights; scales and shifts are added. The result is
        exact where the factors are equal. If the factors are averages over points and the scales
        numbers of points, the result has the averages over all points.

        Args:
            other: a product of the same shape.

        Example:
            >>> first = Kronecker.from_factors(torch.eye(1), torch.eye(1), scale=3.0)
            >>> second = Kronecker.from_factors(5 * torch.eye(1), torch.eye(1), scale=1.0)
            >>> first.averaged(second).to_dense()  # (3 + 1) x ((3 x 1 + 1 x 5) / 4)
            tensor([[8.]])
        """
        scale = self.scale + other.scale
        # With scales of zero any factors are right.
        share = self.scale / scale if scale > 0 else scale
        pairs = zip(self._factors, other._factors, strict=True)
        factors = [share * mine + (1 - share) * theirs for mine, theirs in pairs]
        symmetric = [(factor + factor.mT) / 2 for factor in factors]
        product = type(self).from_factors(symmetric[0], symmetric[1], scale.detach())
        return product.add_diagonal((self.shift + other.shift).detach())

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)`, the shape of the matrices that it acts on."""
        return self.out_eigenvalues.shape[0], self.in_eigenvalues.shape[0]

    @property
    def size(self) -> int:
        rows, columns = self.shape
        return rows * columns

    @factorization
    def _factors(self) -> tuple[Tensor, Tensor]:
        """`G` and `A'`."""
        out_factor = (self.out_basis * self.out_eigenvalues) @ self.out_basis.mT
        return out_factor, (self.in_basis * self.in_eigenvalues) @ self.in_basis.mT

    @factorization
    def _products(self) -> Tensor:
        return kron_eigenvalues(self.out_eigenvalues, self.in_eigenvalues, self.scale)

    @factorization
    def eigenvalues(self) -> Tensor:
        """All `P` eigenvalues, `(out, in)`."""
        return self._products + self.shift

    @factorization
    def _positive(self) -> Tensor:
        # The product's own eigenvalues are >= 0, so that a positive shift needs no check.
        if not self.shift.item() > 0:
            check_positive_definite(self.eigenvalues, "the Kronecker product")
        return self.eigenvalues

    @factorization
    def _root(self) -> Tensor:
        return self._positive.sqrt()

    def _rotate(self, x: Tensor) -> Tensor:
        return kron_rotate(x.unflatten(-1, self.shape), self.out_basis.mT, self.in_basis.mT)

    def _rotate_back(self, x: Tensor) -> Tensor:
        return kron_rotate(x, self.out_basis, self.in_basis).flatten(-2)

    def _matmul(self, x: Tensor) -> Tensor:
        # Half the work of multiplying in the eigenbases.
        product = kron_rotate(x.unflatten(-1, self.shape), *self._factors).flatten(-2)
        return self.scale * product + self.shift * x

    def _quadratic(self, x: Tensor) -> Tensor:
        return (self.eigenvalues * self._rotate(x).square()).sum((-2, -1))

    @factorization
    def _diagonal(self) -> Tensor:
        return kron_diagonal(self.out_basis, self.in_basis, self.eigenvalues).flatten()

    @property
    def inverse_eigenvalues(self) -> Tensor:
        """All `P` eigenvalues of the inverse, `(out, in)`."""
        return self._positive.reciprocal()

    def diagonal(self) -> Tensor:
        return self._diagonal

    def to_dense(self) -> Tensor:
        product = self.scale * torch.kron(*self._factors)
        return product.diagonal_scatter(product.diagonal() + self.shift)

    def logdet(self) -> Tensor:
        return self._positive.log().sum()

    def inverse_diagonal(self) -> Tensor:
        return kron_diagonal(self.out_basis, self.in_basis, self.inverse_eigenvalues).flatten()

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return self._rotate_back(z.unflatten(-1, self.shape) / self._root)

    def _whiten(self, x: Tensor) -> Tensor:
        return (self._rotate(x) / self._root).flatten(-2)

    def inverse_quadratic_factored(self, a: Tensor, g: Tensor) -> Tensor:
        """Return `inverse_quadratic` of the rows `J_c = vec(g_c a^T)`, without forming them.

        The Jacobians of a net in the weight of a linear map that it uses once have this form.

        Args:
            a: inputs of the map, `(..., in)`.
            g: gradients of `C` outputs of the net in the map's output, `(..., C, out)`.

        Returns:
            `(..., C, C)`.

        Example:
            >>> precision = Kronecker.from_factors(torch.eye(2), torch.eye(3)).add_diagonal(1.0)
            >>> a, g = torch.rand(5, 3), torch.rand(5, 4, 2)
            >>> rows = (g.unsqueeze(-1) * a[:, None, None]).flatten(-2)
            >>> torch.allclose(precision.inverse_quadratic_factored(a, g),
            ...                precision.inverse_quadratic(rows))
            True
        """
        rows, columns = self.shape
        if a.shape[-1:] != (columns,) or g.dim() < 2 or g.shape[-1] != rows:
            raise ValueError(
                f"expected inputs (..., {columns}) and gradients (..., C, {rows}); "
                f"got {tuple(a.shape)} and {tuple(g.shape)}"
            )
        return kron_variance(a @ self.in_basis, g @ self.out_basis, self._positive)

    def inverse_quadratic_summed(self, a: Tensor, g: Tensor) -> Tensor:
        """Return `inverse_quadratic` of the rows `J_c = sum_r vec(g_cr a_r^T)`.

        The Jacobians of a net in a weight that it uses at `R` positions have this form.

        Args:
            a: inputs of the map, `(..., R, in)`.
            g: gradients of `C` outputs of the net in the map's outputs, `(..., C, R, out)`.

        Returns:
            `(..., C, C)`.

        Example:
            >>> precision = Kronecker.from_factors(torch.eye(2), torch.eye(3)).add_diagonal(1.0)
            >>> a, g = torch.rand(5, 7, 3), torch.rand(5, 4, 7, 2)
            >>> rows = torch.einsum("ncro,nri->ncoi", g, a).flatten(-2)
            >>> torch.allclose(precision.inverse_quadratic_summed(a, g),
            ...                precision.inverse_quadratic(rows))
            True
        """
        rows, columns = self.shape
        if a.shape[-1:] != (columns,) or g.dim() < 3 or g.shape[-2:] != (a.shape[-2], rows):
            raise ValueError(
                f"expected inputs (..., R, {columns}) and gradients (..., C, R, {rows}); "
                f"got {tuple(a.shape)} and {tuple(g.shape)}"
            )
        white = kron_rotate_summed(a, g, self.in_basis, self.out_basis) / self._root
        flat = white.flatten(-2)
        return flat @ flat.mT

    def _scaled(self: KroneckerT, c: Tensor) -> KroneckerT:
        return self._like(scale=c * self.scale, shift=c * self.shift)

    def _add_diagonal(self: KroneckerT, d: Tensor) -> KroneckerT:
        number = self._number(d) if d.dim() else d
        # A search adds many prior precisions to one curvature: they share its products.
        return self._like(shift=self.shift + number, _products=self._products)

    def _number(self, d: Tensor) -> Tensor:
        """Return the one number of a constant diagonal, with a gradient in each of its elements.

        An element's share of the gradient is that of its variance, which is exact for `logdet`.
        """
        if not is_one_number(d):
            raise ValueError(
                "a Kronecker product takes one number for its whole diagonal: its eigenbases are "
                "lost under any other. Give all weights of the block one prior precision, or use "
                'structure "full" or "diag"'
            )
        number = d[0].detach()
        if not (d.requires_grad and torch.is_grad_enabled()):
            return number
        variances = self._add_diagonal(number).inverse_diagonal().detach()
        return number + (d - d.detach()) @ (variances / variances.sum())


def is_one_number(d: Tensor) -> bool:
    """Whether all elements of a diagonal are one number."""
    least, largest = d.detach().aminmax()
    return bool(least == largest)
