"""Draws of a posterior as one plain module, for export and for servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tyxe.likelihoods import Likelihood
from tyxe.util import at_least_float32

__all__ = ["Ensemble"]


class Ensemble(nn.Module):
    """Plain nets, one for each draw of the weights, whose predictions are aggregated.

    It runs neither Pyro nor a lock, so that threads may call it in parallel; it is made by
    `bnn.to_ensemble(num_draws)`, and works under `torch.export`, `torch.compile` and ONNX export.

    Args:
        members: the nets, in eval mode. They may share parts.
        likelihood: aggregates their outputs; None returns them stacked, `(S, ...)`.
        latents: values of the likelihood's own variables for each net, stacked.

    Example:
        >>> ensemble = Ensemble([nn.Linear(2, 3) for _ in range(4)])
        >>> ensemble(torch.zeros(5, 2)).shape
        torch.Size([4, 5, 3])
    """

    def __init__(
        self,
        members: Iterable[nn.Module],
        likelihood: Likelihood | None = None,
        latents: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.likelihood = likelihood
        self._latents = list(latents or {})
        for name, values in (latents or {}).items():
            self.register_buffer(f"draws_of_{name}", values)
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Ensemble:
        """Stay in eval mode, so that a parent in train mode changes no prediction."""
        return super().train(False)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the prediction for a batch: what the BNN's `predict` does for these draws."""
        outputs = torch.stack([member(*inputs, **kwargs) for member in self.members])
        if self.likelihood is None:
            return outputs
        latents = {name: getattr(self, f"draws_of_{name}") for name in self._latents}
        return self.likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)
