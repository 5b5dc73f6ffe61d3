"""BoTorch: a BNN as the model of Bayesian optimisation (extra `botorch`)."""

from __future__ import annotations

from typing import Any

from botorch.models.ensemble import EnsembleModel
from torch import Tensor

from tyxe import check
from tyxe.bnn import DropoutBNN
from tyxe.rng import torch_rng_kept


class BoTorchBNN(EnsembleModel):
    """A BNN as a model for BoTorch's acquisition functions.

    Its posterior has one sample for each draw of the weights: the targets' means at that draw. All
    calls use the same draws, so an acquisition function is smooth in the candidates and can be
    maximised by gradients. Candidates are converted to the net's dtype and device, and samples
    back. Prefer float64, in which line searches see no rounding. After another fit of the BNN the
    model uses the new posterior.

    Args:
        bnn: a BNN of real numbers or counts, with any wrapper except `DropoutBNN`, whose masks are
            other ones for each candidate. BoTorch maximises: fit to `-y` to find a minimum.
        num_draws: number of draws; for an ensemble, of each member.
        num_outputs: number of targets.
        seed: the seed of the draws.
        options: those of `bnn.predict`, such as `predictive="glm"`.

    Raises:
        TypeError: a `DropoutBNN`; the targets are classes, or those of a `Joint` (from the first
            call).
        RuntimeError: the net has another number of outputs (from the first call).

    Example:
        >>> import pyro.distributions as dist, torch, tyxe
        >>> from botorch.acquisition import qLogExpectedImprovement
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1), tyxe.guides.AutoNormal)
        >>> acquisition = qLogExpectedImprovement(BoTorchBNN(bnn, num_draws=8), best_f=0.0)
        >>> acquisition(torch.zeros(5, 3, 2)).shape  # 5 sets of 3 candidates
        torch.Size([5])
    """

    def __init__(
        self, bnn: Any, num_draws: int = 64, num_outputs: int = 1, seed: int = 0, **options: Any
    ) -> None:
        if any(isinstance(one, DropoutBNN) for one in bnn._bnns):
            raise TypeError(
                "bnn has dropout, whose masks are other ones for each candidate, so that a sample "
                "is no function: take an EnsembleBNN, a LaplaceBNN or a VariationalBNN"
            )
        num_draws = check.count("num_draws", num_draws)
        super().__init__(bnn._weights_of(num_draws * len(bnn._bnns)))
        self._num_outputs = check.count("num_outputs", num_outputs)
        # In a tuple, since BoTorch calls eval() of submodules, and the BNN keeps its mode.
        self._held, self._seed = (bnn,), check.count("seed", seed, least=0)
        self._options = {**options, "num_predictions": num_draws, "aggregate": False, "joint": True}

    def forward(self, X: Tensor) -> Tensor:
        """Return the means at each draw, `(..., num_draws, q, outputs)`, at `X` `(..., q, d)`."""
        (bnn,) = self._held
        like = next(bnn.parameters())
        rows = X.reshape(-1, X.shape[-1]).to(like)
        with torch_rng_kept(self._seed):
            found = bnn.predict(rows, enable_grad=True, **self._options)
        means, _ = bnn.likelihood.mean_and_scale(found, bnn.likelihood.prior_means())
        shape = (len(means), *X.shape[:-1], self._num_outputs)
        samples: Tensor = means.reshape(shape).movedim(0, -3)
        return samples.to(X)
