"""Samples of weights of two values, stored with one bit per weight."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tyxe.distributions.signed_bernoulli import Signs

_BYTE = 8


@dataclass(frozen=True)
class PackedSigns:
    """`S` samples of one tensor of `P` elements, each of which is `-scale` or `scale`.

    `bits` has the shape `(S, ceil(P / 8))`, with the first element of a byte in its lowest bit.
    """

    bits: Tensor
    shape: torch.Size
    scale: float
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor, scale: float = 1.0) -> PackedSigns:
        """Pack samples, `(S, ...)`.

        Raises:
            ValueError: an element is neither `-scale` nor `scale`.
        """
        inside = Signs(scale).check(values)
        if not bool(inside.all()):
            raise ValueError(
                f"only values of -{scale:g} and {scale:g} can be packed, but there is "
                f"{values[~inside][0].item():g}; pass the scale of the distribution they are from"
            )
        positive = (values > 0).flatten(1) if values.dim() > 1 else (values > 0)[:, None]
        missing = -positive.shape[1] % _BYTE
        padded = torch.nn.functional.pad(positive, (0, missing)).unflatten(1, (-1, _BYTE))
        bits = (padded << _places(values.device)).sum(-1).to(torch.uint8)
        return cls(bits, values.shape[1:], scale, values.dtype)

    def values(self) -> Tensor:
        """Return all samples, `(S, ...)`."""
        return torch.stack([self[s] for s in range(len(self.bits))])

    def __getitem__(self, sample: int) -> Tensor:
        positive = (self.bits[sample][:, None] >> _places(self.bits.device)) & 1
        signs = positive.flatten()[: math.prod(self.shape)].reshape(self.shape).to(self.dtype)
        return signs.mul_(2 * self.scale).sub_(self.scale)

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the samples take."""
        return self.bits.numel()


def _places(device: torch.device) -> Tensor:
    return torch.arange(_BYTE, device=device)


@dataclass(frozen=True)
class PackedSamples:
    """Samples of all sites of a net, by joint name; iterate for values by site."""

    sites: Mapping[str, PackedSigns]

    def __len__(self) -> int:
        return len(next(iter(self.sites.values())).bits)

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        return {name: packed[sample] for name, packed in self.sites.items()}

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self[sample] for sample in range(len(self)))

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the samples take."""
        return sum(packed.num_bytes for packed in self.sites.values())
