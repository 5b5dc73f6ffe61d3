"""Draws of a posterior as one plain module, for export and for servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tyxe import check
from tyxe.likelihoods import HeteroskedasticGaussian, Joint, Likelihood
from tyxe.likelihoods.base import Predictions
from tyxe.predictive.one_pass import OnePass
from tyxe.util import at_each, at_least_float32


class Ensemble(nn.Module):
    """Plain nets, one for each draw of the weights, whose predictions are aggregated.

    It uses neither Pyro nor a lock, so threads may call it in parallel. It is made by
    `bnn.to_ensemble(num_draws)`, and works under `torch.export`, `torch.compile` and ONNX export.

    If draws differ only in linear maps, such as a last layer or adapters, all nets run in one pass,
    and what they share runs once. The first call compares this with the nets one by one. Call it
    once before an export, which cannot compare.

    Args:
        members: the nets, in eval mode. They may share parts.
        likelihood: aggregates their outputs; None returns them stacked, `(S, ...)`.
        latents: values of the likelihood's own variables for each net, stacked.

    Example:
        >>> ensemble = Ensemble([nn.Linear(2, 3) for _ in range(4)])
        >>> ensemble(torch.zeros(5, 2)).shape
        torch.Size([4, 5, 3])
    """

    @check.arguments
    def __init__(
        self,
        members: Iterable[nn.Module],
        likelihood: Likelihood | None = None,
        latents: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        check.count("the number of members", len(self.members))
        self.likelihood = likelihood
        self._differing = _differing(self.members)
        self._one_pass = OnePass()
        self._latents = list(latents or {})
        for name, values in (latents or {}).items():
            self.register_buffer(_buffer(name), values)
        self.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Ensemble:
        """Stay in eval mode, so that a parent in train mode does not change predictions."""
        return super().train(False)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the prediction for a batch, that of the BNN's `predict` for these draws."""
        outputs = self._outputs(inputs, kwargs)
        if self.likelihood is None:
            return outputs
        latents = {name: getattr(self, _buffer(name)) for name in self._latents}
        return self.likelihood.aggregate_predictions(at_least_float32(outputs), 0, latents)

    def _outputs(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Return the nets' outputs, `(S, ...)`, in one pass where this is known to be right."""

        def in_turn() -> Tensor:
            return torch.stack([member(*inputs, **kwargs) for member in self.members])

        if not self._differing:
            return in_turn()
        return self._one_pass(partial(self._in_one_pass, inputs, kwargs), in_turn)

    def _in_one_pass(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        members: Any = self.members
        draws = {n: torch.stack([one.get_parameter(n) for one in members]) for n in self._differing}

        def one(values: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(self.members[0], values, inputs, dict(kwargs))

        return at_each(one, draws)


def _tensors_of(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def _differing(nets: Iterable[nn.Module]) -> list[str]:
    """Return the names of what nets do not share, or none where one pass would not pay.

    It pays where most is shared, and the rest are linear maps.
    """
    members = [*nets]
    first, *others = map(_tensors_of, members)
    parameters = dict(members[0].named_parameters())
    differing = [n for n, one in first.items() if any(own[n] is not one for own in others)]
    is_linear = all(n in parameters and first[n].dim() <= 2 for n in differing)
    size = sum(first[n].numel() for n in differing)
    return differing if is_linear and 2 * size < sum(t.numel() for t in first.values()) else []


def _buffer(name: str) -> str:
    return f"draws_of_{name.replace('.', '_')}"


class Mixture(nn.Module):
    """Ensembles of several posteriors, whose aggregated predictions are mixed with weights."""

    def __init__(self, parts: Iterable[Ensemble], weights: Tensor | None = None) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.register_buffer("weights", weights)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the prediction for a batch."""
        likelihood: Any = self.parts[0].likelihood
        found = [part(*inputs, **kwargs) for part in self.parts]
        return mixed(likelihood, found, self.weights)  # type: ignore[arg-type]


def mixed(
    likelihood: Likelihood, predictions: Sequence[Predictions], weights: Tensor | None = None
) -> Predictions:
    """Return the mixture of aggregated predictions, in the likelihood's parametrisation.

    The noise of each counts, and not the likelihood's own. Weights sum to one; None is equal ones.

    Example:
        >>> from tyxe.likelihoods import HomoskedasticGaussian
        >>> one, other = (torch.zeros(1), torch.tensor([0.3])), (torch.ones(1), torch.tensor([0.4]))
        >>> mixed(HomoskedasticGaussian(10, scale=0.3), [one, other])
        (tensor([0.5000]), tensor([0.6124]))
    """
    if isinstance(likelihood, Joint):
        return {
            n: mixed(likelihood._part(n), [one[n] for one in predictions], weights)
            for n in likelihood.parts
        }
    how: dict[str, Any] = {} if weights is None else {"weights": weights}
    if not isinstance(predictions[0], tuple):
        parts: Any = predictions
        return likelihood.aggregate_predictions(torch.stack([*parts]), 0, **how)
    # Means and scales are those of Gaussians with a scale of each point.
    pairs = torch.stack([torch.stack([*pair], -1) for pair in predictions])
    found = HeteroskedasticGaussian(positive_scale=True).aggregate_predictions(pairs, 0, **how)
    mean, scale = found.unbind(-1)
    return mean, scale
