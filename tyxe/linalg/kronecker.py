"""A Kronecker product plus a multiple of the identity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tyxe import check
from tyxe.linalg.base import Operator, factorization
from tyxe.linalg.checks import (
    check_field,
    check_non_negative,
    check_positive_definite,
    check_symmetric,
)
from tyxe.linalg.matrices import pairs_are_fewer, variance_of_products


def _rotated(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return `left X right^T` for `X`, `(..., out, in)`: `(left kron right) vec(X)`, row-major."""
    return left @ (x @ right.mT)


def kron_rotate_summed(a: Tensor, g: Tensor, u_a: Tensor, u_g: Tensor) -> Tensor:
    """Return `U_g^T (sum_r g_cr a_r^T) U_a`, `(..., out, C, in)`.

    `a` is `(..., R, in)` and `g` `(..., C, R, out)`. Each side is rotated before or after the sum,
    whichever has fewer rows.
    """
    count, positions, rows = g.shape[-3:]
    a_first, g_first = positions <= count * rows, positions <= a.shape[-1]
    if a_first:
        # Few positions of all points have one product, which reads the basis once. Of more
        # each point has a product, with positions last in memory, as they are.
        few = 8 * positions <= a.shape[-1]
        a = a.contiguous() @ u_a if few else (u_a.mT @ a.mT).mT
    gradients = g.movedim(-1, -3).flatten(-2)
    if g_first:
        gradients = u_g.mT @ gradients
    sums = gradients.unflatten(-1, (count, positions)).flatten(-3, -2) @ a
    if not a_first:
        sums = sums @ u_a
    sums = sums.unflatten(-2, (rows, count))
    return sums if g_first else (u_g.mT @ sums.flatten(-2)).unflatten(-1, (count, -1))


def clipped_eigh(factor: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Return eigenvalues, and eigenvectors in columns, of a positive semi-definite matrix.

    Eigenvalues that are negative by rounding are set to 0; others raise a ValueError about `what`.
    """
    # float32 has errors of 1e-6 times the largest eigenvalue, in which the smallest are lost, and a
    # small prior precision is of their size: of a CNN's evidence it loses 2e-4 at a precision of
    # 1e-4. On a processor float64 takes about as long.
    values, vectors = torch.linalg.eigh(factor.double())
    # Elements are sums over thousands of points, whose rounding a small side has as well.
    steps, numbers = max(100, len(values)), torch.finfo(factor.dtype)
    least, most = torch.stack([values[0], values[-1]]).cpu().tolist()
    # Below the smallest normal number the spacing is no finer: factors of a net that died.
    if least < -steps * numbers.eps * max(-least, most, numbers.smallest_normal):
        raise ValueError(
            f"{what} is not positive semi-definite: its smallest eigenvalue is {least:.3g} (the "
            f"largest {most:.3g})"
        )
    # Contiguous, as after saving and loading, so that products round in the same way.
    return values.clamp_min(0).to(factor.dtype), vectors.to(factor.dtype).contiguous()


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
        for name in ("out_eigenvalues", "in_eigenvalues", "scale", "shift"):
            check_non_negative(self.__dict__[name], name)

    @classmethod
    def from_factors(
        cls, out_factor: Tensor, in_factor: Tensor, scale: float | Tensor = 1.0
    ) -> Kronecker:
        """Return `scale * (out_factor kron in_factor)`, without a gradient in the factors.

        These are symmetric positive semi-definite, such as `E[g g^T]`, `(out, out)`, and
        `E[a a^T]`, `(in, in)`, and the scale is the number of points; others are a ValueError. The
        gradient of eigenvectors does not exist where eigenvalues repeat, as they do in every factor
        of deficient rank.

        Example:
            >>> Kronecker.from_factors(torch.eye(2), torch.eye(3)).size
            6
        """
        check_symmetric(out_factor, "the output factor")
        check_symmetric(in_factor, "the input factor")
        with torch.no_grad():
            d_g, u_g = clipped_eigh(out_factor, "the output factor")
            d_a, u_a = clipped_eigh(in_factor, "the input factor")
        shift = d_g.new_zeros(())
        return cls(u_g, u_a, d_g, d_a, torch.ones_like(shift), shift).scaled(scale)

    def damped(self) -> Kronecker:
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

    def with_out_factor(self, out_factor: Tensor) -> Kronecker:
        """Return the product with another `G`, `(out, out)`, of which it has a first derivative.

        Example:
            >>> product = Kronecker.from_factors(torch.eye(1), torch.eye(2), scale=10.0)
            >>> product.with_out_factor(torch.tensor([[3.0]])).diagonal()
            tensor([30., 30.])
        """
        check_symmetric(out_factor, "the output factor")
        values, basis = clipped_eigh(out_factor.detach(), "the output factor")
        # Where eigenvalues repeat, any basis gives the derivatives of their symmetric functions.
        slopes = (basis * (out_factor @ basis)).sum(0)
        return self._like(out_basis=basis, out_eigenvalues=values + slopes - slopes.detach())

    @check.arguments
    def averaged(self, other: Kronecker) -> Kronecker:
        """Return one product that approximates the sum of two, without a gradient [T 3.60].

        Factors are averaged with the scales as weights; scales and shifts are added. The result is
        exact where the factors are equal. If the factors are averages over points and the scales
        numbers of points, the result has the averages over all points.

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
        return torch.outer(self.scale * self.out_eigenvalues, self.in_eigenvalues)

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
        return _rotated(x.unflatten(-1, self.shape), self.out_basis.mT, self.in_basis.mT)

    def _rotate_back(self, x: Tensor) -> Tensor:
        return _rotated(x, self.out_basis, self.in_basis).flatten(-2)

    def _matmul(self, x: Tensor) -> Tensor:
        # Half the work of multiplying in the eigenbases.
        product = _rotated(x.unflatten(-1, self.shape), *self._factors).flatten(-2)
        return self.scale * product + self.shift * x

    def _quadratic(self, x: Tensor) -> Tensor:
        return (self.eigenvalues * self._rotate(x).square()).sum((-2, -1))

    @factorization
    def _diagonal(self) -> Tensor:
        return self._diagonal_of(self.eigenvalues)

    def _diagonal_of(self, eigenvalues: Tensor) -> Tensor:
        """Return the diagonal of a matrix with the same eigenvectors."""
        return _rotated(eigenvalues, self.out_basis.square(), self.in_basis.square()).flatten()

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
        return self._diagonal_of(self.inverse_eigenvalues)

    def _inverse_sqrt(self, z: Tensor) -> Tensor:
        return self._rotate_back(z.unflatten(-1, self.shape) / self._root)

    def _whiten(self, x: Tensor) -> Tensor:
        return (self._rotate(x) / self._root).flatten(-2)

    @check.arguments
    def inverse_quadratic_factored(self, a: Tensor, g: Tensor) -> Tensor:
        rows, columns = self.shape
        check.shape("a", a, (*a.shape[:-2], "R", columns))
        check.shape("g", g, (*g.shape[:-3], "C", *a.shape[-2:-1], rows), ", of the positions of a")
        if pairs_are_fewer(a.shape[-2], g.shape[-3]):
            rotated = a.contiguous() @ self.in_basis, g.contiguous() @ self.out_basis
            return variance_of_products(*rotated, self.inverse_eigenvalues)
        sums = kron_rotate_summed(a, g, self.in_basis, self.out_basis)
        root = self._root.unsqueeze(-2)
        keeps_graph = sums.requires_grad or root.requires_grad
        white = sums / root if keeps_graph else sums.div_(root)
        return (white @ white.mT).sum(-3)

    def _scaled(self, c: Tensor) -> Kronecker:
        return self._like(scale=c * self.scale, shift=c * self.shift)

    def _add_diagonal(self, d: Tensor) -> Kronecker:
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
        if not has_derivative(d):
            return number
        variances = self._add_diagonal(number).inverse_diagonal().detach()
        return number + (d - d.detach()) @ (variances / variances.sum())


def has_derivative(d: Tensor) -> bool:
    """Whether what is computed of a tensor may be differentiated, backward or forward."""
    is_recorded = d.requires_grad and torch.is_grad_enabled()
    return is_recorded or forward_ad.unpack_dual(d).tangent is not None


def is_one_number(d: Tensor) -> bool:
    """Whether all elements of a diagonal are one number."""
    least, largest = d.detach().aminmax()
    return bool(least == largest)
