"""The negative log joint as a plain function of one vector, of all data or of batches."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributions as td
from torch import Size, Tensor
from torch.nn.functional import mse_loss
from torch.utils._pytree import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from tyxe import check
from tyxe.bnn.batches import OwnBatches
from tyxe.bnn.checks import check_is_finite, check_one_batch, warn_of_size
from tyxe.bnn.elbo import MeanWeight
from tyxe.bnn.passes import NetOnBatch
from tyxe.bnn.predict import SupervisedBNN
from tyxe.data import alike_batches
from tyxe.distributions import ParamBlocks, as_gaussian
from tyxe.distributions.gaussian import LOG_SQRT_2PI
from tyxe.likelihoods import HomoskedasticGaussian
from tyxe.rng import fresh_seed
from tyxe.samplers.potential import gradients, in_turn
from tyxe.threads import exclusive, unvalidated
from tyxe.util import Inputs, at_least_float32, is_real


def points_of(bnn: SupervisedBNN, targets: Any) -> float:
    """Return the number of points that count, or raise a ValueError if there is none."""
    return check.points(float(bnn.likelihood.count(targets)))


class Potential:
    """`-log p(D | w) - log p(w)`, in nats, as a function of one vector of unconstrained values.

    It equals the potential that Pyro derives from `bnn.model`, but needs no trace, and the Normal
    priors of all sites are one dot product. The log-likelihood of all data, given as one batch, is
    divided by the temperature. A hierarchical prior is a ValueError.
    """

    def __init__(
        self, bnn: SupervisedBNN, inputs: Inputs, targets: Tensor, temperature: float = 1.0
    ) -> None:
        self.bnn, self.inputs, self.temperature = bnn, inputs, temperature
        self._net = NetOnBatch(bnn, inputs, keeps=True)
        prefix = bnn.likelihood.prefix
        self._latents = {name: f"{prefix}.{name}" for name in bnn.likelihood.latent_priors()}
        self._scale = bnn.likelihood.dataset_size / points_of(bnn, targets) / temperature
        self.priors = priors = self._priors()
        # Without those of real supports, which are the identity.
        self.transforms = {
            name: td.biject_to(prior.support).inv
            for name, prior in priors.items()
            if not is_real(prior.support)
        }
        shapes = {name: prior.shape() for name, prior in sorted(priors.items())}
        shapes |= {name: t.forward_shape(shapes[name]) for name, t in self.transforms.items()}
        self.blocks = ParamBlocks.of_sites(shapes)
        self._joints = bnn.net_prior.joints()
        coupled = {name for joint in self._joints for name in joint.names}
        self._others = {
            name: _unvalidated(prior)
            for name, prior in priors.items()
            if name not in coupled and as_gaussian(prior) is None
        }
        self._prepare_normals(shapes)
        self._prepare_likelihood(targets)

    def flatten(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector `(d,)` of sites' values."""
        like = self.bnn._like
        found = {n: self.transforms[n](v) if n in self.transforms else v for n, v in values.items()}
        return self.blocks.flatten({n: v.to(like) for n, v in found.items()})

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the sites' values `(..., *shape)` of vectors `(..., d)`."""
        values, moved = self.blocks.unflatten(flat), self.transforms
        return {n: moved[n].inv(v) if n in moved else v for n, v in values.items()}

    def loss(self, values: dict[str, Tensor], inputs: Inputs, targets: Any) -> Tensor:
        """Return the negative log-likelihood of some points at sites' values, in nats."""
        latents = {name: values[joint] for name, joint in self._latents.items()}
        predictions = at_least_float32(self.bnn._run_net(values, inputs))
        likelihood = self.bnn.likelihood
        targets = likelihood.observed(targets)
        found = likelihood.log_likelihood(predictions, targets, "sum", latents)
        if self._is_bounded:  # a target is found to be wrong where the potential is looked at
            support: Any = likelihood.predictive_distribution(predictions, latents).support
            given = likelihood.prepare_targets(predictions, targets.values)
            found = found.where(support.check(given).all(), -math.inf)
        return -found

    def estimate(
        self, flat: Tensor, inputs: Inputs, targets: Any, load: float | Tensor = 1.0
    ) -> Tensor:
        """Return the potential energy as a mini-batch tells it; for `load` see `MeanWeight`."""
        prior, values = self._prior_energy(flat)
        likelihood, targets = self.bnn.likelihood, self.bnn.likelihood.observed(targets)
        points = torch.as_tensor(likelihood.count(targets))
        # A batch of which nothing counts says nothing.
        points = points.where(points > 0, torch.ones_like(points))
        mean = self.loss(values, inputs, targets) / points
        return prior + likelihood.dataset_size / self.temperature * load * mean

    def look(self, starts: Tensor) -> None:
        """Run the net at two points, to see that what is kept of it is right, see `NetOnBatch`."""
        steps = torch.arange(starts.shape[1], dtype=starts.dtype, device=starts.device)
        with torch.no_grad():
            self._net.look(map(self.unflatten, (starts[0], starts[0] + 0.1 * torch.sin(steps))))

    def at(self, flat: Tensor) -> Tensor:
        """Return the potential energy at a vector of unconstrained values."""
        energy, values = self._prior_energy(flat)
        latents = {name: values[joint] for name, joint in self._latents.items()}
        predictions = at_least_float32(self._net(values))
        return torch.sub(energy, self._log_likelihood(predictions, latents), alpha=self._scale)

    def _prior_energy(self, flat: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return `-log p(w)` and the sites' constrained values."""
        values, terms = self.blocks.unflatten(flat), []
        for name, transform in self.transforms.items():
            given = values[name]
            values[name] = transform.inv(given)
            terms.append(-transform.log_abs_det_jacobian(values[name], given).sum())
        terms += [prior.log_prob(values[name]).sum() for name, prior in self._others.items()]
        terms += [joint.log_prob(joint.flatten(values)) for joint in self._joints]
        residual = flat if self._loc is None else flat - self._loc
        weighted = residual if self._relative is None else residual * self._relative
        energy = torch.addcmul(self._constant, (residual * weighted).sum(), self._precision)
        for term in terms:
            energy = energy - term
        return energy, values

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
        for name, prior in own.items():
            if not isinstance(prior, td.Distribution):
                raise ValueError(
                    f"the prior of {name!r} is hierarchical, a program of its own; these samplers "
                    "take distributions: use a kernel of pyro.infer.mcmc, such as its NUTS"
                )
        latent = self.bnn.likelihood.latent_priors().items()
        return own | {self._latents[name]: prior for name, prior in latent}

    @torch.no_grad()
    def _prepare_likelihood(self, targets: Tensor) -> None:
        """Check the targets at the net's own values, and compute what is the same in each call."""
        likelihood, means = self.bnn.likelihood, self.bnn.likelihood.prior_means()
        predictions = at_least_float32(self._net(self.bnn._own_values()))
        with unvalidated():  # only shapes matter at the net's own values
            likelihood.log_likelihood(predictions, targets, "sum", means)
            support = likelihood.predictive_distribution(predictions, means).support
        self._is_bounded = not (likelihood.is_zero_outside or is_real(support))
        found = likelihood.observed(targets)
        values = likelihood.prepare_targets(predictions, found.values)
        counts_once = found.weights is None and found.mask is None
        # With one Gaussian noise, the log-likelihood is a distance and constants.
        self._noise: tuple[Tensor, Tensor] | None = None
        self._one_noise = (
            type(likelihood) is HomoskedasticGaussian
            and counts_once
            and isinstance(predictions, Tensor)
            and not likelihood.scale.dim()
        )
        self.targets: Any = values if self._one_noise else replace(found, values=values)
        if self._one_noise and not self._latents:
            self._noise = self._noise_terms(predictions, {})

    def _prepare_normals(self, shapes: Mapping[str, Size]) -> None:
        """Prepare `sum_i precision_i (w_i - loc_i)^2 + constant`; other sites have precision 0."""
        like = self.bnn._like
        locs, precisions = {}, {}
        self._constant = like.new_zeros(())
        for name, shape in shapes.items():
            locs[name] = precisions[name] = like.new_zeros(shape)
            normal = as_gaussian(self.priors[name])
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


class BatchPotential:
    """The potentials of chains `(chains, d)`, each as its mini-batch of a step estimates it.

    Every chain goes through the loader in an order of its own, and moves batches to a device.
    """

    def __init__(
        self, potential: Potential, starts: Tensor, loader: Iterable[Any], device: Any
    ) -> None:
        count = potential.bnn.likelihood.count
        self._loaders = [OwnBatches(loader, device, fresh_seed(), count) for _ in starts]
        self._bnn, self._has_warned, self._step = potential.bnn, False, 0
        self._potential = potential
        self._weights = [MeanWeight(self._bnn.likelihood) for _ in self._loaders]
        self._batches = self._take()
        self._look(self._batches, starts)

    def take(self, step: int) -> None:
        """Take the batches of a step, which are the same for each try of it.

        The loader runs outside of what the step is in.
        """
        if step != self._step:
            self._batches, self._step = self._take(), step

    def _take(self) -> list[Any]:
        """Take a batch for each chain, with its `load` where points have weights."""
        batches = alike_batches([own.take() for own in self._loaders])
        for _, targets in batches:
            self._bnn.likelihood.check_rows(targets)
        pairs = zip(self._weights, batches, strict=True)
        loads = [own.load_of(targets) for own, (_, targets) in pairs]
        if all(load is None for load in loads):
            return batches
        device = self._bnn._like.device
        factors = (torch.tensor(1.0 if load is None else load, device=device) for load in loads)
        return [(*batch, one) for batch, one in zip(batches, factors, strict=True)]

    def close(self) -> None:
        """Let go of the loader's workers, when no further step is to come."""
        for own in self._loaders:
            own.close()

    def __call__(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Return potentials `(chains,)`, in nats, and gradients `(chains, d)`.

        A batch that is too large, or whose inputs or targets make these infinite, is a ValueError.
        """
        batches = self._batches
        if tree_structure(batches[0]) != self._place:  # the first with something missing, or none
            self._look(batches, position)
        gradient, value = self._every(position, *self._rows(batches))
        if not bool(can_move(value, gradient).all()):
            for batch in batches:
                check_is_finite(batch[0])
                check_one_batch(self._bnn, self._bnn.net_prior, *batch[:2])
        points = self._loaders[0].in_epoch
        if points is not None and not self._has_warned:
            self._has_warned = warn_of_size(points, self._bnn.likelihood.dataset_size)
        return value, gradient

    def _look(self, batches: list[Any], position: Tensor) -> None:
        """See how the potentials of all chains are computed, for batches of a structure."""
        leaves, place = tree_flatten(batches[0])
        self._place = place

        estimate = weakly(self._potential.estimate)

        def one(flat: Tensor, *leaves: Any) -> Tensor:
            return estimate(flat, *tree_unflatten(leaves, place))

        self._every = in_turn(one)
        # One chain has nothing to be stacked with, and graphs cannot be.
        self._stacks = len(position) > 1 and all(isinstance(leaf, Tensor) for leaf in leaves)
        if self._stacks:
            with exclusive_unvalidated():
                self._every = gradients(one, position, *self._rows(batches))

    def _rows(self, batches: list[Any]) -> Iterator[Any]:
        """Return what the batches of all chains are, leaf by leaf."""
        columns = zip(*map(tree_leaves, batches), strict=True)
        return map(torch.stack, columns) if self._stacks else columns


def can_move(value: Tensor, gradient: Tensor) -> Tensor:
    """Whether each chain can move from where it has a potential, and a gradient in a row."""
    return (value + gradient.sum(-1)).isfinite()


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a bound method that does not hold its object, since torch.func's are in cycles."""
    bound = weakref.WeakMethod(method)
    return lambda *given: bound()(*given)  # type: ignore[misc]


def _unvalidated(distribution: Any) -> Any:
    """Return a copy without validation, because transforms bring values into the support."""
    distribution = copy.copy(distribution)
    distribution._validate_args = False
    if isinstance(distribution, td.Independent | td.TransformedDistribution):
        distribution.base_dist = _unvalidated(distribution.base_dist)
    return distribution


@contextmanager
def exclusive_unvalidated() -> Iterator[None]:
    """Let no other thread draw numbers, and nothing validate, which is control flow on values."""
    with exclusive(), unvalidated():
        yield
