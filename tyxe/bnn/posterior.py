"""The Gaussian about a net's weights that a `LaplaceBNN` has, and what follows without data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tyxe.bnn.checks import check_known
from tyxe.bnn.evidence import posterior_precision, prior_moments
from tyxe.bnn.linearized import linearize
from tyxe.bnn.predict import SupervisedBNN, Values
from tyxe.curvature import (
    ACCUMULATORS,
    Curvature,
    LaplaceGuide,
    Linearization,
    check_groups,
    check_size,
    check_structure,
    functional_covariance,
    joint_covariance,
)
from tyxe.guides import PretrainedInitializer
from tyxe.likelihoods import Likelihood
from tyxe.linalg import BlockDiagonal
from tyxe.priors import Prior

__all__ = ["LaplacePosterior"]


class LaplacePosterior(SupervisedBNN):
    r"""Any net with `N(w*, (G / T + P0)^-1)` about its weights, once there is a curvature `G`.

    A base of `LaplaceBNN`, which finds `w*` and `G`. The precision is formed anew whenever the
    prior, `temperature` or `damping` change.

    Args:
        net: as in `LaplaceBNN`, like all that follow.
        prior: as there.
        likelihood: as there.
        structure: as there.
        name: as there.

    Raises:
        TypeError: as there.
        ValueError: as there.
    """

    _temperature, _damping = 1.0, False

    def __init__(
        self, net: nn.Module, prior: Prior, likelihood: Likelihood, structure: str, name: str
    ) -> None:
        super().__init__(net, prior, likelihood, name)
        check_known("structure", structure, ACCUMULATORS)
        if likelihood.latent_priors():
            raise ValueError(
                "the Laplace approximation takes a likelihood without variables of its own: pass "
                "the noise as a number, and choose it by log_marginal_likelihood(noise=...)"
            )
        self.structure = structure
        self._shapes = {
            name: slots[0][0]._parameters[slots[0][1]].shape  # type: ignore[union-attr]
            for name, slots in self._slots.items()
        }
        self._prior_moments()
        check_size(structure, sum(s.numel() for s in self._shapes.values()))
        self.net_guide = LaplaceGuide(self.net_prior, PretrainedInitializer.from_net(net))

    # ------------------------------------------------------------------ draws

    def guide(self, inputs: Any = None, obs: Tensor | None = None) -> Values:
        """The posterior (a Pyro program); a delta while there is no curvature."""
        values: Values = self.net_guide()
        return values

    def draws(self, num_predictions: int) -> Iterator[Values]:
        """Yield draws of the weights.

        Raises:
            RuntimeError: there is no curvature yet.
        """
        self._fitted()
        for _ in range(num_predictions):
            yield self.net_guide.draw()

    def one_draw(self) -> Values:
        """Return a single draw: of the delta, while there is no curvature."""
        return self.net_guide.draw()

    def mean_values(self) -> Values:
        """Return the fitted weights."""
        return self.net_guide.median()

    # ------------------------------------------------------------------ what it is formed of

    @property
    def temperature(self) -> float:
        """`T`, which divides the curvature; the posterior follows it, and the mode stays.

        Raises:
            ValueError: a temperature that is not positive is set.
        """
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; expected a positive number")
        self._temperature = temperature
        self._refresh()

    @property
    def damping(self) -> bool:
        """Whether the prior's precision is spread over both factors; the posterior follows it."""
        return self._damping

    @damping.setter
    def damping(self, damping: bool) -> None:
        self._damping = damping
        self._refresh()

    def update_prior(self, prior: Prior) -> None:
        """Replace the prior; the curvature stays, and the posterior follows.

        Args:
            prior: as in `BNN.update_prior`.

        Raises:
            TypeError: as there.
            ValueError: as there; or a prior that is not Gaussian, or that the structure does not
                take.
        """
        before = self.prior
        super().update_prior(prior)
        try:
            self._prior_moments()
            self._refresh()
        except ValueError:
            super().update_prior(before)
            raise

    def _fitted(self) -> Curvature:
        if self.net_guide.curvature is None:
            raise RuntimeError(
                "there is no curvature yet: call fit(data_loader, optim, num_epochs), or for a "
                "net that is trained fit_curvature(data_loader)"
            )
        return self.net_guide.curvature

    def _forget(self) -> None:
        self.net_guide.curvature = self.net_guide.precision = None

    def _prior_moments(self) -> tuple[Values, Values]:
        prefix = self.net_prior.prefix
        priors = [(prefix + name, prior) for name, prior in self.net_prior.priors()]
        return prior_moments(priors, self._shapes)

    def _squared_deviations(self) -> Values:
        means = self._prior_moments()[0]
        values = self.net_guide.values()
        return {name: (values[name].detach() - mean).square() for name, mean in means.items()}

    def _refresh(self) -> None:
        """Form the posterior's precision anew, where there is a curvature."""
        if self.net_guide.curvature is not None:
            self._take(self.net_guide.curvature)

    @torch.no_grad()
    def _take(self, curvature: Curvature) -> None:
        """Let the posterior be that of a curvature and the prior; on an error nothing changes."""
        precisions = self._prior_moments()[1]
        found = posterior_precision(curvature, precisions, self.temperature, self.damping)
        self.net_guide.curvature, self.net_guide.precision = curvature, found.detach()

    # ------------------------------------------------------------------ outputs

    def _precision_for(self, linear: Linearization) -> BlockDiagonal:
        """The precision, for a net that uses its weights as it did for the curvature."""
        check_groups(self._fitted().groups, linear.groups)
        assert self.net_guide.precision is not None
        return self.net_guide.precision

    def output_covariance(self, linear: Linearization) -> Tensor:
        """Return `J Lambda^-1 J^T`, `(n, ..., C, C)`.

        Args:
            linear: the net linearised on a batch.

        Raises:
            RuntimeError: there is no curvature yet.
        """
        return functional_covariance(linear, self._precision_for(linear))

    def functional_variance(self, *inputs: Any, joint: bool = False) -> Tensor:
        """Return the covariance of each point's outputs in the linearised net, `(n, ..., C, C)`.

        Args:
            inputs: the net's arguments.
            joint: of all outputs of all points instead, `(n, ..., n, ...)`.

        Raises:
            RuntimeError: there is no curvature yet.
        """
        self._fitted()
        covariance = joint_covariance if joint else functional_covariance
        with self._predicting():
            linear = linearize(self, inputs[0] if len(inputs) == 1 else inputs)
            return covariance(linear, self._precision_for(linear)).detach()

    # ------------------------------------------------------------------ state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict, or raise one error and change nothing.

        Raises:
            RuntimeError: the state is that of another architecture, or of another structure.
        """
        check_structure(state_dict.get("net_guide._extra_state", {}), self.structure)
        return super().load_state_dict(state_dict, strict, assign)
