"""A posterior as one plain module, for export and for servers: draws, or a Gaussian last layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tyxe import check
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Joint,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from tyxe.likelihoods.base import Predictions
from tyxe.linalg import Operator
from tyxe.predictive.forwards import OnePass
from tyxe.predictive.gaussian import LinkOptions, predict_from_gaussian
from tyxe.util import at_each, at_least_float32, named_tensors

# Those whose predictions have no samples, with a link that does not draw.
PREDICTED = (Categorical, Bernoulli, HomoskedasticGaussian, StudentT, Poisson, NegativeBinomial)


def no_closed_form(why: str) -> NoReturn:
    """Raise a TypeError, with what to do instead."""
    raise TypeError(f"{why}: leave closed_form out, for draws")


class _WithInputs(nn.Linear):
    """A linear layer that returns its inputs next to its outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], -1)


class ClosedForm(nn.Module):
    """A net whose last layer has a Gaussian posterior, and which predicts without draws.

    Outputs are Gaussian, with the mean of the net at the posterior's centre and the variance of
    `W x`. It is made by `bnn.to_ensemble(closed_form=True)`, and works under `torch.export`,
    `torch.compile` and ONNX export after a first call. The first call checks that the layer is the
    net's last operation, which an export cannot do. The `state_dict` has only the net: save the
    exported program, or the BNN.

    Args:
        net: at the posterior's centre, in eval mode.
        layer: name of its last layer, an `nn.Linear`.
        has_weight, has_bias: whether weight and bias have a posterior.
        precision: their precision, row by row of the weight, with the bias as its last column.
        likelihood: a likelihood of classes, binary labels, counts, or numbers with one noise.
        options: how predictions are made.

    Raises:
        RuntimeError: in an export before the first call.
        TypeError: another layer or likelihood; in the first call, if the layer is not the last.
        ValueError: a link that draws.
    """

    def __init__(
        self,
        net: nn.Module,
        layer: str,
        has_weight: bool,
        has_bias: bool,
        precision: Operator,
        likelihood: Likelihood,
        options: LinkOptions,
    ) -> None:
        super().__init__()
        if not isinstance(likelihood, PREDICTED):
            no_closed_form(f"{type(likelihood).__name__} has no prediction in closed form")
        check.choice("link", options.link, ("probit", "bridge"), ", or no closed_form for draws")
        self._whole: nn.Module | None = net
        tensors = (*net.parameters(), *net.buffers())
        self.net = copy.deepcopy(net, {id(tensor): tensor for tensor in tensors})
        head = self.net.get_submodule(layer)
        if type(head) is not nn.Linear:
            raise TypeError(f"{layer or 'the net'} is a {type(head).__name__}; expected nn.Linear")
        head.__class__ = _WithInputs
        self._sizes = [head.in_features, head.out_features]
        self._has = has_weight, has_bias
        self._precision, self.likelihood, self._options = precision, likelihood, options
        self.requires_grad_(False).eval()
        self._prepare()

    def train(self, mode: bool = True) -> ClosedForm:
        """Stay in eval mode, so that a parent in train mode does not change predictions."""
        return super().train(False)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return the prediction for a batch, that of the BNN's `predict` by `"glm"`."""
        both = self.net(*inputs, **kwargs)
        if self._whole is not None:
            self._look(both, self._whole, inputs, kwargs)
        features, mean = both.split(self._sizes, -1)
        covariance = self._covariance(features)
        options = self._options._asdict()
        return predict_from_gaussian(self.likelihood, mean, covariance, **options)

    def _covariance(self, features: Tensor) -> Tensor:
        """Return the covariance of the outputs of points with these inputs of the layer."""
        columns = [features] if self._has[0] else []
        columns += [features.new_ones(features.shape[0], 1)] if self._has[1] else []
        a = torch.cat(columns, -1).to(self._precision.dtype)
        identity = torch.eye(self._sizes[1], dtype=a.dtype, device=a.device)
        found = self._precision.inverse_quadratic_factored(a.unsqueeze(1), identity.unsqueeze(1))
        return found.to(features.dtype)

    def _prepare(self) -> None:
        """Factorise the precision once, and not in an export."""
        like = next(self.net.parameters())
        self._covariance(like.new_zeros(1, self._sizes[0]))

    def _look(self, both: Any, whole: nn.Module, inputs: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("call the module once before an export, to see that it is right")
        outputs, width = whole(*inputs, **kwargs), sum(self._sizes)
        is_last = both.dim() == 2 and both.shape[-1] == width
        if not is_last or not torch.equal(both[:, self._sizes[0] :], outputs):
            no_closed_form(
                "the layer with a posterior is not the last operation of the net, so that its "
                "outputs have no Gaussian in closed form"
            )
        self._whole = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._precision = self._precision.map(fn)
        self._prepare()
        return self


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


def _differing(nets: Iterable[nn.Module]) -> list[str]:
    """Return the names of what nets do not share, or none where one pass would not pay.

    It pays where most is shared, and the rest are linear maps.
    """
    members = [*nets]
    first, *others = map(named_tensors, members)
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
