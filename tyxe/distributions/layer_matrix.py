"""Weight and bias of a layer as one matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Size, Tensor

__all__ = ["LayerMatrix"]


@dataclass(frozen=True)
class LayerMatrix:
    """How the sites of a layer lie in its matrix: the weight, flattened; the bias its last column.

    Attributes:
        weight: the weight's name in the joint model.
        weight_shape: `(rows, ...)`.
        weight_scale: standard deviation of the weight's prior.
        bias: the bias' name, if it is a site with as many entries as there are rows.
        bias_scale: standard deviation of the bias' prior.
    """

    weight: str
    weight_shape: Size
    weight_scale: float
    bias: str | None = None
    bias_scale: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """The sites' names."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        fan_in = self.weight_shape[1:].numel()
        return self.weight_shape[0], fan_in + (self.bias is not None)

    @property
    def prior_scales(self) -> dict[str, float]:
        """Standard deviations of the prior by site."""
        scales = (self.weight_scale, self.bias_scale)
        return dict(zip(self.names, scales, strict=False))

    def columns_of(self, name: str) -> slice:
        """Return the columns of a site."""
        fan_in = self.weight_shape[1:].numel()
        return slice(0, fan_in) if name == self.weight else slice(fan_in, fan_in + 1)

    def separate(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return the sites' values of `(..., rows, columns)`."""
        weight = matrix[..., self.columns_of(self.weight)]
        values = {self.weight: weight.reshape(*weight.shape[:-2], *self.weight_shape)}
        if self.bias is not None:
            values[self.bias] = matrix[..., -1]
        return values

    def as_columns(self, name: str, value: Tensor) -> Tensor:
        """Return a site's value as its columns of the matrix."""
        shape = self.weight_shape if name == self.weight else self.weight_shape[:1]
        batch = value.shape[: value.dim() - len(shape)]
        return value.reshape(*batch, self.weight_shape[0], -1)

    def scale_of_columns(self, like: Tensor) -> float | Tensor:
        """Return the prior's standard deviations by column, or the one of all."""
        if self.bias is None or self.bias_scale == self.weight_scale:
            return self.weight_scale
        fan_in = self.weight_shape[1:].numel()
        return torch.cat(
            [like.new_full((fan_in,), self.weight_scale), like.new_full((1,), self.bias_scale)]
        )
