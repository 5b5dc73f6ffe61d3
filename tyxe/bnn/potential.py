"""The negative log joint as a plain function, for kernels that differentiate it many times."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributions as td
from pyro.infer.mcmc import HMC
from pyro.infer.mcmc.util import initialize_model
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor

from tyxe.bnn.predict import SupervisedBNN
from tyxe.distributions import is_real, log_density
from tyxe.util import unwrapped

__all__ = ["Potential", "functional_kernel"]

# What a kernel's builder may ask of the model that a plain function does not offer.
_NEEDS_MODEL = {"jit_compile", "transforms", "max_plate_nesting"}


class Potential:
    """`-log p(D | w) - log p(w)`, in nats, as a function of unconstrained values by site.

    Equal to what Pyro derives from `bnn.model`, without a trace: from the same priors, the same
    net and the same likelihood.

    Args:
        bnn: its priors have to be distributions (no hierarchical ones).
        inputs: all inputs, as a batch.
        targets: all targets.
        transforms: maps each site's values to unconstrained ones.

    Example:
        >>> import torch, tyxe, pyro.distributions as dist
        >>> from pyro.infer.mcmc import NUTS
        >>> bnn = tyxe.MCMC_BNN(
        ...     torch.nn.Linear(1, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(1, scale=1.0), NUTS)
        >>> zero = {"net.weight": torch.zeros(1, 1), "net.bias": torch.zeros(1)}
        >>> potential = Potential(bnn, torch.zeros(1, 1), torch.zeros(1, 1), {})
        >>> round(potential(zero).item(), 4)  # three standard normals at zero
        2.7568
    """

    def __init__(
        self,
        bnn: SupervisedBNN,
        inputs: Any,
        targets: Tensor,
        transforms: Mapping[str, td.Transform],
    ) -> None:
        self.bnn, self.inputs, self.targets = bnn, inputs, targets
        self.transforms = transforms
        prefix = bnn.likelihood.prefix
        self._latents = {name: f"{prefix}.{name}" for name in bnn.likelihood.latent_priors()}
        self._scale = bnn.likelihood.dataset_size / len(targets)
        priors = self._priors()
        self._densities = [(name, log_density(prior)) for name, prior in priors]
        # The identity need not be applied to each site at each step.
        self._constrained = [name for name, prior in priors if not is_real(prior.support)]

    def __call__(self, unconstrained: Mapping[str, Tensor]) -> Tensor:
        """Return the potential energy."""
        values, log_jacobian = self._constrain(unconstrained)
        latents = {name: values[joint] for name, joint in self._latents.items()}
        predictions = self.bnn.run_net(values, self.inputs)
        likelihood = self.bnn.likelihood
        log_joint = self._scale * likelihood.log_likelihood(
            predictions, self.targets, "sum", latents
        )
        for name, density in self._densities:
            log_joint = log_joint + density(values[name])
        return -(log_joint + log_jacobian)

    def _priors(self) -> list[tuple[str, Any]]:
        own = [(self.bnn.net_prior.prefix + n, prior) for n, prior in self.bnn.net_prior.priors()]
        latent = self.bnn.likelihood.latent_priors().items()
        return own + [(self._latents[name], prior) for name, prior in latent]

    def _constrain(self, unconstrained: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        values, log_jacobian = dict(unconstrained), 0.0
        for name in self._constrained:
            transform, given = self.transforms[name], unconstrained[name]
            values[name] = transform.inv(given)
            log_jacobian = log_jacobian - transform.log_abs_det_jacobian(values[name], given).sum()
        return values, log_jacobian

    def __getstate__(self) -> dict[str, Any]:
        # Chains in processes of their own build the densities again.
        return {**self.__dict__, "_densities": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._densities = [(name, log_density(prior)) for name, prior in self._priors()]


def functional_kernel(
    builder: Callable[..., Any], bnn: SupervisedBNN, data: tuple[Any, Tensor], num_chains: int
) -> tuple[Any, dict[str, Tensor]] | None:
    """Build a kernel on the plain potential, with starting points as Pyro would choose them.

    Returns:
        The kernel and its initial parameters; None where the general way through the model is
        needed: a builder that is no class or partial of HMC or NUTS, or asks for what only a
        model has; hierarchical priors; a handler around the call.
    """
    constructor, options = unwrapped(builder)
    plain = isinstance(constructor, type) and issubclass(constructor, HMC)
    positional = isinstance(builder, functools.partial) and builder.args
    priors = [prior for _, prior in bnn.net_prior.priors()]
    if not plain or positional or _NEEDS_MODEL & set(options) or am_i_wrapped():
        return None
    if not all(isinstance(prior, td.Distribution) for prior in priors):
        return None
    start = {"init_strategy": options["init_strategy"]} if "init_strategy" in options else {}
    initial, _, transforms, _ = initialize_model(bnn.model, data, num_chains=num_chains, **start)
    return builder(potential_fn=Potential(bnn, *data, transforms), transforms=transforms), initial
