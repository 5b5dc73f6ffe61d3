"""A Gaussian posterior over a net's last layer, with its predictions, as one plain module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from tyxe import check
from tyxe.likelihoods import (
    Bernoulli,
    Categorical,
    HomoskedasticGaussian,
    Likelihood,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from tyxe.linalg import Operator
from tyxe.predictive.gaussian import LinkOptions, predict_from_gaussian

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
