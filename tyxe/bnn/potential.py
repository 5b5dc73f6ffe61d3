"""The negative log joint as a plain function, and kernels of Pyro on it."""

from __future__ import annotations

import copy
import functools
import math
import multiprocessing
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
import torch.distributions as td
from pyro.infer.mcmc import HMC, NUTS
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.infer.mcmc.util import initialize_model
from pyro.poutine.runtime import am_i_wrapped
from torch import Size, Tensor
from torch.nn.functional import mse_loss

from tyxe.bnn.compiled import CompiledFunction
from tyxe.bnn.predict import SupervisedBNN
from tyxe.distributions import ParamBlocks
from tyxe.distributions.moments import is_real
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.util import Inputs, at_least_float32, call_with, unwrapped

__all__ = ["FlatKernel", "Potential", "functional_kernel"]

# Options of a kernel that need a model instead of a plain function.
_NEEDS_MODEL = {"jit_compile", "transforms", "max_plate_nesting"}

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


class Potential:
    """`-log p(D | w) - log p(w)`, in nats, as a function of unconstrained values by site.

    It equals the potential that Pyro derives from `bnn.model`, but needs no trace. Inside, all
    values are one vector, so that the gradient is one tensor, and the Normal priors of all sites
    are one dot product.

    Args:
        bnn: a BNN whose priors are distributions, not hierarchical.
        inputs: all inputs, as one batch.
        targets: all targets, in the same order.
        transforms: maps from each site's values to unconstrained ones.

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
        inputs: Inputs,
        targets: Tensor,
        transforms: Mapping[str, td.Transform],
    ) -> None:
        self.bnn, self.inputs = bnn, inputs
        prefix = bnn.likelihood.prefix
        self._latents = {name: f"{prefix}.{name}" for name in bnn.likelihood.latent_priors()}
        self._scale = bnn.likelihood.dataset_size / len(targets)
        priors = self._priors()
        # Without those of real supports, which are the identity.
        self.transforms = {n: transforms[n] for n, p in priors.items() if not is_real(p.support)}
        # Sorted by name, as in Pyro's mass matrix, so that the momentum of the vector is drawn from
        # the same random numbers as momenta of the sites.
        shapes = {name: self._shape(name, priors[name]) for name in sorted(priors)}
        self.blocks = ParamBlocks.of_sites(shapes)
        self._joints = bnn.net_prior.joints()
        coupled = {name for joint in self._joints for name in joint.names}
        self._others = {
            n: _unvalidated(p) for n, p in priors.items() if n not in coupled and _normal(p) is None
        }
        self._prepare_normals(priors)
        self._prepare_likelihood(targets)

    def __call__(self, unconstrained: Mapping[str, Tensor]) -> Tensor:
        """Return the potential energy."""
        return self.at(self.blocks.flatten(unconstrained))

    def at(self, flat: Tensor) -> Tensor:
        """Return the potential energy at a vector of unconstrained values."""
        values = self.blocks.unflatten(flat)
        terms = self._constrain(values)
        terms += [prior.log_prob(values[name]).sum() for name, prior in self._others.items()]
        terms += [joint.log_prob(joint.flatten(values)) for joint in self._joints]
        latents = {name: values[joint] for name, joint in self._latents.items()}
        predictions = at_least_float32(self.bnn.run_net(values, self.inputs))
        residual = flat if self._loc is None else flat - self._loc
        weighted = residual if self._relative is None else residual * self._relative
        energy = torch.addcmul(self._constant, (residual * weighted).sum(), self._precision)
        for term in terms:
            energy = energy - term
        return torch.sub(energy, self._log_likelihood(predictions, latents), alpha=self._scale)

    def _log_likelihood(self, predictions: Any, latents: Mapping[str, Tensor]) -> Tensor:
        if not self._one_noise:
            return self.bnn.likelihood.log_likelihood(predictions, self.targets, "sum", latents)
        constant, variance = self._noise or self._noise_terms(predictions, latents)
        distance = mse_loss(predictions, self.targets, reduction="sum")
        return torch.addcdiv(constant, distance, variance, value=-0.5)

    def _noise_terms(self, like: Tensor, latents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the normalising constant of all targets, and the variance."""
        likelihood = self.bnn.likelihood
        assert isinstance(likelihood, HomoskedasticGaussian)
        scale = likelihood.scale_of(latents, like).to(like.dtype)
        return -self.targets.numel() * (scale.log() + LOG_SQRT_2PI), scale.square()

    def _priors(self) -> dict[str, Any]:
        own = {self.bnn.net_prior.prefix + n: prior for n, prior in self.bnn.net_prior.priors()}
        latent = self.bnn.likelihood.latent_priors().items()
        return own | {self._latents[name]: prior for name, prior in latent}

    def _shape(self, name: str, prior: Any) -> Size:
        shape: Size = prior.shape()
        return self.transforms[name].forward_shape(shape) if name in self.transforms else shape

    @torch.no_grad()
    def _prepare_likelihood(self, targets: Tensor) -> None:
        """Check the targets at the net's own values, and compute what is the same in each call."""
        likelihood = self.bnn.likelihood
        predictions = at_least_float32(call_with(self.bnn.net, self.inputs))
        with pyro.validation_enabled(False):  # only shapes matter at the net's own values
            likelihood.log_likelihood(predictions, targets, "sum", likelihood.prior_means())
        self.targets = likelihood.prepare_targets(predictions, targets)
        # With one Gaussian noise, the log-likelihood is a distance and constants.
        self._noise: tuple[Tensor, Tensor] | None = None
        self._one_noise = (
            type(likelihood) is HomoskedasticGaussian
            and isinstance(predictions, Tensor)
            and not likelihood.scale.dim()
        )
        if self._one_noise and not self._latents:
            self._noise = self._noise_terms(predictions, {})

    def _prepare_normals(self, priors: Mapping[str, Any]) -> None:
        """Prepare `sum_i precision_i (w_i - loc_i)^2 + constant`; other sites have precision 0."""
        like = next(self.bnn.parameters())
        locs, precisions = {}, {}
        self._constant = like.new_zeros(())
        for block in self.blocks:
            name, shape = block.name, self._shape(block.name, priors[block.name])
            locs[name] = precisions[name] = like.new_zeros(shape)
            normal = _normal(priors[name])
            if normal is not None:
                locs[name], precisions[name] = normal.loc, 0.5 / normal.scale.square()
                self._constant = self._constant + (normal.scale.log() + LOG_SQRT_2PI).sum()
        loc, precision = self.blocks.flatten(locs), self.blocks.flatten(precisions)
        self._loc = loc if bool(loc.any()) else None
        # A number where all precisions are the same, else a vector.
        self._precision = precision[0]
        self._relative = None
        if bool((precision != precision[0]).any()):
            self._precision, self._relative = torch.ones_like(precision[0]), precision

    def _constrain(self, values: dict[str, Tensor]) -> list[Tensor]:
        """Replace values by constrained ones, in place, and return the logs of the Jacobians."""
        log_jacobians = []
        for name, transform in self.transforms.items():
            given = values[name]
            values[name] = transform.inv(given)
            log_jacobians.append(-transform.log_abs_det_jacobian(values[name], given).sum())
        return log_jacobians


def _normal(distribution: Any) -> td.Normal | None:
    """Return the Normal inside of `Independent`s, or None for other distributions."""
    while isinstance(distribution, td.Independent):
        distribution = distribution.base_dist
    return distribution if isinstance(distribution, td.Normal) else None


def _unvalidated(distribution: Any) -> Any:
    """Return a copy without validation, because transforms bring values into the support."""
    distribution = copy.copy(distribution)
    distribution._validate_args = False
    if isinstance(distribution, td.Independent | td.TransformedDistribution):
        distribution.base_dist = _unvalidated(distribution.base_dist)
    return distribution


# --------------------------------------------------------------------------- kernels

FLAT = "flat"  # the only site that Pyro's kernel sees


class _AtFlat:
    """A function of a vector as a function of the kernel's only site."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, values: Mapping[str, Tensor]) -> Tensor:
        return self.function(values[FLAT])


class _AtSites:
    """A function of a vector as a function of all sites."""

    def __init__(self, blocks: ParamBlocks, function: Callable[[Tensor], Tensor]) -> None:
        self.blocks, self.function = blocks, function

    def __call__(self, values: Mapping[str, Tensor]) -> Tensor:
        return self.function(self.blocks.flatten(values))


_OWN = {"kernel", "potential_fn", "transforms", "model", "initial_params", "_initial"}


class FlatKernel(MCMCKernel):
    """HMC or NUTS on one vector, with the interface of a kernel on sites.

    The arithmetic of a step is done once instead of once for each site, with the same random
    numbers. `function` is `potential.at`, or a compiled form of it.
    """

    def __init__(
        self,
        builder: Callable[..., Any],
        potential: Potential,
        function: Callable[[Tensor], Tensor],
        transforms: Mapping[str, td.Transform],
    ) -> None:
        self.kernel = builder(potential_fn=_AtFlat(function))
        self.potential_fn, self.transforms = potential, transforms
        self.model = None
        self._initial: Mapping[str, Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        # Step size, mass matrix and so on, for hooks and for users of `mcmc.kernel`.
        if name == "kernel":
            raise AttributeError(name)  # it is missing while unpickling
        return getattr(self.kernel, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Hooks that change the step size have to change that of the kernel inside.
        own = name in _OWN or "kernel" not in self.__dict__
        if own:
            object.__setattr__(self, name, value)
        else:
            setattr(self.kernel, name, value)

    @property
    def blocks(self) -> ParamBlocks:
        """The layout of the sites in the vector."""
        return self.potential_fn.blocks

    @property
    def initial_params(self) -> Mapping[str, Tensor] | None:
        """The start values of the chain, by site."""
        return self._initial

    @initial_params.setter
    def initial_params(self, params: Mapping[str, Tensor]) -> None:
        self._initial = params

    @property
    def inverse_mass_matrix(self) -> dict[tuple[str, ...], Tensor]:
        """The inverse mass matrix, under the names of all sites."""
        (matrix,) = self.kernel.inverse_mass_matrix.values()
        return {tuple(self.blocks.sites): matrix}

    def setup(self, warmup_steps: int, *args: Any, **kwargs: Any) -> None:
        assert self._initial is not None
        _drop_idle_device_mode()
        self.kernel.initial_params = {FLAT: self.blocks.flatten(self._initial)}
        self.kernel.setup(warmup_steps, *args, **kwargs)

    def sample(self, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        flat = self.kernel.sample({FLAT: self.blocks.flatten(params)})[FLAT]
        return self.blocks.unflatten(flat)

    def cleanup(self) -> None:
        self.kernel.cleanup()

    def logging(self) -> Any:
        return self.kernel.logging()

    def diagnostics(self) -> Any:
        return self.kernel.diagnostics()


def _drop_idle_device_mode() -> None:
    """Undo that Pyro sets torch's default device, to what it is, at the start of a chain's process.

    Every call of torch would pass through a mode, and steps of small nets take half as long again.
    """
    if multiprocessing.parent_process() and torch.get_default_device().type == "cpu":
        torch.set_default_device(None)


def functional_kernel(
    builder: Callable[..., Any],
    bnn: SupervisedBNN,
    data: tuple[Any, Tensor],
    num_chains: int,
    compiled: bool = False,
) -> tuple[Any, dict[str, Tensor]] | None:
    """Return a kernel on the plain potential, and start values as Pyro would choose them.

    Start values of several chains are stacked. The result is None where Pyro's model is needed: for
    a builder that is no class or partial of HMC or NUTS, or has options that need a model; for
    hierarchical priors; and inside of handlers.
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
    potential = Potential(bnn, *data, transforms)
    function = CompiledFunction(potential.at) if compiled else potential.at
    # A list of blocks for the mass matrix names sites, and subclasses may use them.
    if constructor in (HMC, NUTS) and isinstance(options.get("full_mass", False), bool):
        return FlatKernel(builder, potential, function, transforms), initial
    by_site = _AtSites(potential.blocks, function)
    return builder(potential_fn=by_site, transforms=transforms), initial
