"""The Laplace approximation: a fitted net with a Gaussian about it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from tyxe.bnn.base import modes_restored, set_train_mode
from tyxe.bnn.batches import batches_of
from tyxe.bnn.checks import check_first_batch, check_fit_arguments, check_options
from tyxe.bnn.evidence import (
    gaussian_log_likelihood,
    log_evidence,
    logdet_of_numbers,
    posterior_precision,
    prior_moments,
)
from tyxe.bnn.history import History
from tyxe.bnn.linearized import PREDICTIVES, linearize
from tyxe.bnn.predict import SupervisedBNN, Values
from tyxe.bnn.prior_precision import PriorPrecision, ascent, spread
from tyxe.bnn.refined import GPOnSubset, RefinedPosterior, gp_outputs, refined
from tyxe.bnn.training import FitOptions, Trainer, progress_bar
from tyxe.curvature import (
    ACCUMULATORS,
    CURVATURES,
    Curvature,
    LaplaceGuide,
    Linearization,
    check_groups,
    check_size,
    collect_curvature,
    functional_covariance,
    jacobian,
)
from tyxe.guides import PretrainedInitializer
from tyxe.likelihoods import HomoskedasticGaussian, Likelihood
from tyxe.priors import DictPrior, Prior

__all__ = ["LaplaceBNN"]

# Bytes that a dense matrix of all weights may take.
DENSE_LIMIT = 8 * 2**30


class LaplaceBNN(SupervisedBNN):
    r"""Any net with a Gaussian about its fitted weights, `N(w*, (G / T + P0)^-1)`.

    `w*` maximises the posterior, `G` is the curvature of the likelihood there and `P0` the prior's
    precision [T 3.1, GLM 2]. Which weights: those that the prior exposes.

    Args:
        net: any module; it is copied. Its own values are `w*` until `fit` changes them.
        prior: one of `tyxe.priors`, with Normal distributions.
        likelihood: one of `tyxe.likelihoods`, without variables of its own.
        structure: of `G`: `"kron"`, one Kronecker product for each linear map; `"diag"`; `"full"`.
        curvature: `"ggn"`, exact; `"fisher"`, one sampled label a point; `"empirical"`, the true
            labels.
        num_passes: how often `fit_curvature` goes through its loader, for augmented data.
        temperature: `T`; below 1 it concentrates the posterior.
        damping: spread the prior's precision over both Kronecker factors [T 3.41].
        reduce: for `"kron"`: sum over positions that share weights before the product.
        name: prefix of all site names.

    Raises:
        TypeError: as in `BNN`.
        ValueError: an unknown structure or curvature; a prior that is not Gaussian; a likelihood
            with variables of its own; a matrix too large for memory.

    Reference:
        [T] 3.1-3.2; [GLM]; [LA].

    Example:
        >>> import tyxe
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = nn.Linear(1, 1)
        >>> bnn = LaplaceBNN(
        ...     net, tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.5), structure="full")
        >>> _ = bnn.fit([(x, 2 * x)], torch.optim.Adam, 10)
        >>> mean, scale = bnn.predict(torch.tensor([[0.0], [10.0]]))
        >>> bool(scale[1] > scale[0])
        True
    """

    default_predictive = "glm"
    predictives = PREDICTIVES | {"gp": gp_outputs}

    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        likelihood: Likelihood,
        *,
        structure: str = "kron",
        curvature: str = "ggn",
        num_passes: int = 1,
        temperature: float = 1.0,
        damping: bool = False,
        reduce: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(net, prior, likelihood, name)
        _check_known("structure", structure, ACCUMULATORS)
        _check_known("curvature", curvature, CURVATURES)
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}; expected a positive number")
        if num_passes < 1:
            raise ValueError(f"num_passes is {num_passes}; expected a positive number")
        if likelihood.latent_priors():
            raise ValueError(
                "the Laplace approximation takes a likelihood without variables of its own: pass "
                "the noise as a number, and choose it by log_marginal_likelihood(noise=...)"
            )
        self.structure, self.curvature, self.num_passes = structure, curvature, num_passes
        self.temperature, self.damping, self.reduce = temperature, damping, reduce
        self._shapes = {
            name: slots[0][0]._parameters[slots[0][1]].shape  # type: ignore[union-attr]
            for name, slots in self._slots.items()
        }
        self._prior_moments()
        self.gp: GPOnSubset | None = None
        check_size(structure, sum(s.numel() for s in self._shapes.values()), DENSE_LIMIT)
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

    # ------------------------------------------------------------------ fit

    def fit(
        self,
        data_loader: Iterable[Any],
        optim: Any,
        num_epochs: int,
        callback: Callable[[LaplaceBNN, int, float], Any] | None = None,
        device: Any = None,
        *,
        clip_norm: float | None = None,
        lr_multipliers: Mapping[str, float] | None = None,
        evidence_every: int = 0,
        progress: bool | None = None,
    ) -> History:
        """Maximise the posterior, then take the curvature at its mode.

        Args:
            data_loader: as in `VariationalBNN.fit`, like `optim`, `num_epochs`, `callback`,
                `device`, `clip_norm`, `lr_multipliers` and `progress`.
            optim: as there.
            num_epochs: as there.
            callback: as there.
            device: as there.
            clip_norm: as there.
            lr_multipliers: as there.
            evidence_every: after so many epochs, again and again, take the curvature and move the
                prior's precision to the maximum of the evidence; 0 leaves the prior alone.
            progress: as there.

        Returns:
            The history; its `kl` is the negative log-density of the prior.

        Raises:
            TypeError: as in `VariationalBNN.fit`.
            ValueError: likewise.
            RuntimeError: likewise.
        """
        check_fit_arguments(optim, num_epochs, 1)
        check_options(1.0, clip_norm)
        self._forget()
        history = History()
        with modes_restored(self):
            if not any(module.training for module in self.modules()):
                set_train_mode(self)
            # T never touches the prior: the mode is that of log p(D|w) / T + log p(w).
            trainer = Trainer(self, optim, FitOptions(self.temperature, clip_norm, lr_multipliers))
            for epoch in trainer.epochs(0, num_epochs, progress):
                trainer.run_epoch(data_loader, epoch, device, history)
                if evidence_every and (epoch + 1) % evidence_every == 0:
                    self.fit_curvature(data_loader, device, progress=False)
                    self.optimize_prior_precision()
                    self._forget()
                if callback is not None and callback(self, epoch, history.loss[-1]):
                    break
        self.fit_curvature(data_loader, device, progress=progress)
        return history

    def fit_curvature(
        self, data_loader: Iterable[Any], device: Any = None, *, progress: bool | None = None
    ) -> None:
        """Take the curvature at the weights as they are: for a net that is trained already.

        Args:
            data_loader: yields `(inputs, targets)`.
            device: batches are moved there.
            progress: show a bar; by default on a terminal only.

        Raises:
            ValueError: data that do not fit the likelihood; a curvature that is not finite.
        """
        with modes_restored(self):
            self.eval()
            found = collect_curvature(
                functools.partial(linearize, self),
                self.likelihood,
                self._curvature_batches(data_loader, device, progress),
                self.structure,
                self.curvature,
                self.reduce,
            )
        self.net_guide.curvature = found
        self._refresh()

    def _curvature_batches(
        self, loader: Iterable[Any], device: Any, progress: bool | None
    ) -> Iterator[tuple[Any, Tensor]]:
        bar = progress_bar(range(self.num_passes), "curvature", "pass", progress)
        checked = False
        for _ in bar:
            for inputs, targets in batches_of(loader, device):
                if not checked:
                    check_first_batch(self, self.net_guide.values, inputs, targets)
                    checked = True
                yield inputs, targets

    # ------------------------------------------------------------------ posterior

    def _forget(self) -> None:
        self.net_guide.curvature = self.net_guide.precision = None

    def _fitted(self) -> Curvature:
        if self.net_guide.curvature is None:
            raise RuntimeError(
                "there is no curvature yet: call fit(data_loader, optim, num_epochs), or for a "
                "net that is trained fit_curvature(data_loader)"
            )
        return self.net_guide.curvature

    def _prior_moments(self) -> tuple[Values, Values]:
        prefix = self.net_prior.prefix
        priors = [(prefix + name, prior) for name, prior in self.net_prior.priors()]
        return prior_moments(priors, self._shapes)

    @torch.no_grad()
    def _refresh(self) -> None:
        """Form the posterior's precision anew: the prior or the curvature has changed."""
        found = posterior_precision(
            self._fitted(), self._prior_moments()[1], self.temperature, self.damping
        )
        self.net_guide.precision = found.detach()

    def update_prior(self, prior: Prior) -> None:
        """Replace the prior; the curvature stays, and the posterior follows.

        Args:
            prior: as in `BNN.update_prior`.

        Raises:
            TypeError: as there.
            ValueError: as there; or a prior that is not Gaussian.
        """
        before = self.prior
        super().update_prior(prior)
        try:
            self._prior_moments()
        except ValueError:
            super().update_prior(before)
            raise
        if self.net_guide.curvature is not None:
            self._refresh()

    def output_covariance(self, linear: Linearization) -> Tensor:
        """Return `J Lambda^-1 J^T`, `(n, ..., C, C)`.

        Args:
            linear: the net linearised on a batch.

        Raises:
            RuntimeError: there is no curvature yet.
        """
        check_groups(self._fitted().groups, linear.groups)
        assert self.net_guide.precision is not None
        return functional_covariance(linear, self.net_guide.precision)

    def functional_variance(self, *inputs: Any, joint: bool = False) -> Tensor:
        """Return the covariance of each point's outputs in the linearised net, `(n, ..., C, C)`.

        Args:
            inputs: the net's arguments.
            joint: of all outputs of all points instead, `(n, ..., n, ...)`.

        Raises:
            RuntimeError: there is no curvature yet.
        """
        groups = self._fitted().groups
        with self._predicting():
            linear = linearize(self, inputs[0] if len(inputs) == 1 else inputs)
            if not joint:
                return self.output_covariance(linear).detach()
            check_groups(groups, linear.groups)
            assert self.net_guide.precision is not None
            rows = jacobian(linear).detach().flatten(0, 1)
            shape = linear.outputs.shape
            return self.net_guide.precision.inverse_quadratic(rows).reshape(shape + shape)

    # ------------------------------------------------------------------ back to the data

    def fit_gp(
        self, data_loader: Iterable[Any], num_points: int | None = None, factor: float = 1.0
    ) -> None:
        """Keep a random part of the data for `predict(..., predictive="gp")` [GLM 15, A.7].

        With all of them that is `"glm"` under the full curvature. The points are no part of
        `state_dict`.

        Args:
            data_loader: yields `(inputs, targets)`; the targets are not used.
            num_points: how many to keep, `M`; all by default.
            factor: the prior's precision is multiplied by `N / M` times this, to be tuned on
                held-out data.

        Raises:
            RuntimeError: there is no curvature yet.
            ValueError: more points than there are, or none; a factor that is not positive.
        """
        self._fitted()
        self.gp = GPOnSubset(data_loader, num_points, factor)

    def refine(
        self,
        data_loader: Iterable[Any],
        method: str = "laplace",
        structure: str = "full",
        device: Any = None,
        **options: Any,
    ) -> RefinedPosterior:
        """Go on with the inference inside the linearised net [GLM 3.3].

        Args:
            data_loader: yields `(inputs, targets)`, without augmentation.
            method: `"laplace"` about the linearised net's own mode, or `"variational"`.
            structure: of the precision, `"full"` or `"diag"`.
            device: batches are moved there.
            options: of `tyxe.predictive.refine_laplace` or `refine_variational`: `num_steps`,
                `rate`, `num_draws`, ...

        Returns:
            What predicts and evaluates as this BNN does, with the refined Gaussian. The BNN itself
            stays as it is.

        Raises:
            RuntimeError: there is no curvature yet; the refinement diverged.
            ValueError: an unknown method or option; Jacobians that do not fit into memory.
        """
        self._fitted()
        return refined(self, batches_of(data_loader, device), method, structure, options)

    # ------------------------------------------------------------------ evidence

    def log_marginal_likelihood(
        self, prior_precision: PriorPrecision | None = None, noise: float | Tensor | None = None
    ) -> Tensor:
        """Return the evidence of the approximation, in nats, differentiable in its arguments.

        The mode stays where it is.

        Args:
            prior_precision: instead of the prior's: a number for all weights, or a number or a
                tensor (of the site's shape) for each site, by its name.
            noise: standard deviation of a homoskedastic Gaussian, instead of the likelihood's.

        Raises:
            RuntimeError: there is no curvature yet.
            ValueError: `noise` for another likelihood; a site missing in `prior_precision`.

        Reference:
            [LA]; [T] 3.1.
        """
        curvature = self._fitted()
        precisions = self._prior_moments()[1]
        if prior_precision is not None:
            precisions = spread(prior_precision, precisions, self.net_prior.prefix)
        log_likelihood: float | Tensor = curvature.log_likelihood
        if noise is not None:
            curvature, log_likelihood = self._with_noise(curvature, noise)
        posterior = posterior_precision(curvature, precisions, self.temperature, self.damping)
        squares = self._squared_deviations()
        return log_evidence(log_likelihood, squares, precisions, posterior, self.temperature)

    def _squared_deviations(self) -> Values:
        means = self._prior_moments()[0]
        values = self.net_guide.values()
        return {name: (values[name].detach() - mean).square() for name, mean in means.items()}

    def _with_noise(self, curvature: Curvature, noise: float | Tensor) -> tuple[Curvature, Tensor]:
        likelihood = self.likelihood
        if not isinstance(likelihood, HomoskedasticGaussian):
            raise ValueError(
                f"noise is that of a HomoskedasticGaussian, not of a {type(likelihood).__name__}"
            )
        like = self.net_guide.loc_vector()
        scale = torch.as_tensor(noise, dtype=like.dtype, device=like.device)
        if scale.dim() or not bool(scale > 0):
            raise ValueError(f"noise is {noise}; expected one positive number")
        ratio = (likelihood.scale_of(like=like) / scale).square()
        scaled = dataclasses.replace(curvature, operator=curvature.operator.scaled(ratio))
        # A Gaussian's error is the sum of squares.
        return scaled, gaussian_log_likelihood(curvature.error, curvature.num_targets, scale)

    def optimize_prior_precision(
        self,
        method: str = "evidence",
        loader: Iterable[Any] | None = None,
        *,
        per_site: bool = False,
        num_steps: int = 100,
        lr: float = 0.1,
        grid: Iterable[float] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Choose the prior's precision, and make it the prior.

        Args:
            method: `"evidence"`, by gradient ascent on the log-precision; `"grid"`, by the
                log-likelihood of held-out data.
            loader: of held-out data, for `"grid"`.
            per_site: a precision for each weight and its bias, instead of one for all.
            num_steps: of the ascent.
            lr: of the ascent, in the log-precision.
            grid: precisions to try; by default 21 from 1e-4 to 1e4.

        Returns:
            The precision; `per_site`, one for each weight, by its name in the net.

        Raises:
            RuntimeError: there is no curvature yet.
            ValueError: an unknown method; for `"grid"`, no loader, or no precision with a finite
                score. The prior then stays as it was.
        """
        self._fitted()
        if method == "evidence":
            return self._ascend(per_site, num_steps, lr)
        if method != "grid":
            raise ValueError(f"method is {method!r}; expected 'evidence' or 'grid'")
        if loader is None:
            raise ValueError(
                "method='grid' needs held-out data: optimize_prior_precision('grid', loader)"
            )
        if per_site:
            raise ValueError("method='grid' finds one precision for all weights, not per_site")
        before = self.prior
        try:
            best = self._search(
                torch.logspace(-4, 4, 21).tolist() if grid is None else grid, loader
            )
        except BaseException:
            self.update_prior(before)
            raise
        self._set_precision(dict.fromkeys(self._shapes, best))
        return best

    def _search(self, grid: Iterable[float], loader: Iterable[Any]) -> Tensor:
        """The precision of the best held-out log-likelihood."""
        scores = {float(precision): self._held_out(float(precision), loader) for precision in grid}
        finite = {precision: score for precision, score in scores.items() if math.isfinite(score)}
        if not finite:
            raise ValueError("no precision of the grid gives a finite held-out log-likelihood")
        return next(iter(self._prior_moments()[1].values())).new_tensor(
            max(finite, key=finite.__getitem__)
        )

    def _held_out(self, precision: float, loader: Iterable[Any]) -> float:
        """The log-likelihood of held-out data, from the same random numbers every time."""
        self._set_precision(dict.fromkeys(self._shapes, torch.tensor(precision)))
        device = next(self.parameters()).device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            return sum(float(self.evaluate(x, y)[1]) for x, y in batches_of(loader, device))

    def _ascend(self, per_site: bool, num_steps: int, lr: float) -> Tensor | dict[str, Tensor]:
        curvature = self._fitted()
        owner = {site: g.name if per_site else "" for g in curvature.groups for site in g.sites}
        logdet = logdet_of_numbers(curvature, owner, self.temperature, self.damping)
        precisions = self._prior_moments()[1]
        found = ascent(owner, self._squared_deviations(), precisions, logdet, num_steps, lr)
        self._set_precision({site: found[key] for site, key in owner.items()})
        prefix = self.net_prior.prefix
        by_name = {key.removeprefix(prefix): value for key, value in found.items()}
        return by_name if per_site else found[""]

    def _set_precision(self, precisions: Mapping[str, Tensor]) -> None:
        means, before = self._prior_moments()
        prefix = self.net_prior.prefix
        scales = {name: precisions[name].to(before[name]).rsqrt() for name in before}
        self.update_prior(
            DictPrior(
                {
                    name.removeprefix(prefix): dist.Normal(
                        means[name], scales[name].expand(means[name].shape)
                    ).to_event(means[name].dim())
                    for name in before
                }
            )
        )


def _check_known(name: str, given: str, known: Iterable[str]) -> None:
    if given not in known:
        raise ValueError(f"{name} is {given!r}; expected one of {', '.join(map(repr, known))}")
