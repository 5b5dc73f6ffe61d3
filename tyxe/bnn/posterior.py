"""The Gaussian about a net's weights that a `LaplaceBNN` has, and what follows without data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tyxe.bnn.checks import check_known
from tyxe.bnn.evidence import posterior_precision, prior_moments
from tyxe.bnn.linearized import linearize
from tyxe.bnn.online import (
    ACCUMULATE,
    emptied,
    factorized_joint,
    is_same,
    joint_precision,
    next_penalty,
    reordered,
)
from tyxe.bnn.predict import SupervisedBNN, Values
from tyxe.curvature import (
    ACCUMULATORS,
    Curvature,
    Group,
    LaplaceGuide,
    Linearization,
    check_groups,
    check_size,
    check_structure,
    functional_covariance,
    joint_covariance,
)
from tyxe.distributions import GaussianJoint
from tyxe.distributions.normal import wide
from tyxe.guides import PretrainedInitializer
from tyxe.likelihoods import Likelihood
from tyxe.linalg import BlockDiagonal, is_diagonal
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

    _temperature, _multiplier, _damping, _accumulate = 1.0, 1.0, False, "sum"

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
        self._check_prior()
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
        self._form_with("_temperature", temperature)

    @property
    def multiplier(self) -> float:
        """`lambda`, which multiplies the curvature in the posterior, and not in the fit [T 3.56].

        Above 1 the next task forgets less; the posterior follows it.

        Raises:
            ValueError: a multiplier that is not positive is set.
        """
        return self._multiplier

    @multiplier.setter
    def multiplier(self, multiplier: float) -> None:
        if not 0 < multiplier < math.inf:
            raise ValueError(f"multiplier is {multiplier}; expected a positive number")
        self._form_with("_multiplier", multiplier)

    @property
    def accumulate(self) -> str:
        """How curvatures add up over tasks: `"sum"`, `"average"` or `"modes"`.

        Raises:
            ValueError: another is set.
        """
        return self._accumulate

    @accumulate.setter
    def accumulate(self, accumulate: str) -> None:
        check_known("accumulate", accumulate, ACCUMULATE)
        self._form_with("_accumulate", accumulate)

    @property
    def _curvature_temperature(self) -> float:
        """What divides the curvature in the posterior, `T / lambda`."""
        return self.temperature / self.multiplier

    @property
    def damping(self) -> bool:
        """Whether the prior's precision is spread over both factors; the posterior follows it."""
        return self._damping

    @damping.setter
    def damping(self, damping: bool) -> None:
        self._form_with("_damping", damping)

    def _form_with(self, attribute: str, value: Any) -> None:
        """Assign, and form the posterior anew; where there is none, the old value stays."""
        before = getattr(self, attribute)
        setattr(self, attribute, value)
        try:
            self._check_damping()
            self._refresh()
        except ValueError:
            setattr(self, attribute, before)
            raise

    def update_prior(self, prior: Prior) -> None:
        """Replace the prior; the curvature stays, and the posterior follows.

        Unless the new prior is the posterior itself, as `net_guide.get_detached_distributions`
        gives it: then it has taken the curvature up, the posterior stays what it is, and the next
        `fit` adds the curvature of new data [T 3.56].

        Args:
            prior: as in `BNN.update_prior`.

        Raises:
            TypeError: as there.
            ValueError: as there; or a prior that is not Gaussian, or that the structure does not
                take.
            RuntimeError: as there.
        """
        before, priors = self.prior, self.net_prior.snapshot()
        super().update_prior(prior)
        try:
            self._check_prior()
            curvature = self.net_guide.curvature
            if curvature is not None:
                self._take(emptied(curvature) if self._has_taken_up(curvature) else curvature)
        except ValueError:
            self.prior = before
            self.net_prior.restore(priors)
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
        self.net_guide.next_prior = None

    def _check_prior(self) -> None:
        if not self.net_prior.joints():
            self._prior_moments()
        else:
            self._joint_prior()
        self._check_damping()

    def _check_damping(self) -> None:
        """Raise if damping is asked of a joint prior: now, and not after a fit."""
        if self.damping and self.net_prior.joints():
            raise ValueError(
                "damping spreads the prior's precision over both factors, and a joint prior "
                "has no one precision: set damping=False before the second task"
            )

    def _joint_prior(self) -> GaussianJoint | None:
        """The prior over all sites at once, or None where each has its own.

        Raises:
            ValueError: a joint prior that is not Gaussian, or over some sites only.
        """
        joints = self.net_prior.joints()
        if not joints:
            return None
        if not isinstance(joints[0], GaussianJoint) or set(joints[0].names) != set(self._shapes):
            kinds = ", ".join(f"{type(j).__name__} over {', '.join(j.names)}" for j in joints)
            raise ValueError(
                "the Laplace approximation needs Gaussian priors, of each site or of all of them "
                f"together, but there is {kinds}"
            )
        return joints[0]

    def _prior_over(self, groups: list[Group]) -> GaussianJoint:
        """The prior over all sites at once, in the order of groups."""
        joint = self._joint_prior()
        if joint is not None:
            return reordered(joint, groups)
        return factorized_joint(groups, *self._prior_moments())

    def _has_taken_up(self, curvature: Curvature) -> bool:
        """Whether the prior is what the posterior is to a next task."""
        posterior = self.net_guide.next_prior or self.net_guide.joint()
        prior = self._joint_prior()
        if prior is None and not is_diagonal(posterior.precision):
            return False
        like = next(iter(self.net_guide.parameters()))
        return is_same(self._prior_over(curvature.groups), posterior, like.dtype)

    def _prior_moments(self) -> tuple[Values, Values]:
        prefix = self.net_prior.prefix
        priors = [(prefix + name, prior) for name, prior in self.net_prior.priors()]
        return prior_moments(priors, self._shapes)

    def _squared_deviations(self) -> Values:
        means = self._prior_moments()[0]
        values = self.net_guide.values()
        return {name: (wide(values[name].detach()) - m).square() for name, m in means.items()}

    def _refresh(self) -> None:
        """Form the posterior's precision anew, where there is a curvature."""
        if self.net_guide.curvature is not None:
            self._take(self.net_guide.curvature)

    @torch.no_grad()
    def _take(self, curvature: Curvature) -> None:
        """Let the posterior be that of a curvature and the prior; on an error nothing changes."""
        temperature = self._curvature_temperature
        joint = self._joint_prior()
        if joint is None:
            precisions = self._prior_moments()[1]
            found = posterior_precision(curvature, precisions, temperature, self.damping)
        else:
            self._check_damping()
            prior = reordered(joint, curvature.groups)
            found = joint_precision(curvature, prior, 1 / temperature, self.accumulate)
        self.net_guide.curvature, self.net_guide.precision = curvature, found.detach()
        self.net_guide.next_prior = None
        if self.accumulate == "modes":
            prior, loc = self._prior_over(curvature.groups), self.net_guide.loc_vector()
            self.net_guide.next_prior = next_penalty(prior, curvature, loc, 1 / temperature)

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

    def _after_loading(self) -> None:
        self._check_damping()
        self._refresh()
