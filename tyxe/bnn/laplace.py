"""The Laplace approximation of a net: a Gaussian about its fitted weights."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

from tyxe import check
from tyxe.bnn.base import fitting, prior_fixed
from tyxe.bnn.batches import all_batches, batches_of, copied, is_loader
from tyxe.bnn.checkpoint import History, Resumable
from tyxe.bnn.checks import check_fit_arguments, check_options, warn_of_size
from tyxe.bnn.function_space import GPOnSubset, RefinedPosterior, refined
from tyxe.bnn.predict import SupervisedBNN, Values
from tyxe.bnn.training import EpochEnd, FitOptions, Trainer, Validation, progress_bar
from tyxe.check import described
from tyxe.curvature import Curvature, Linearization, collect_curvature, functional_covariance
from tyxe.curvature.accumulators import ACCUMULATORS, check_size
from tyxe.curvature.collect import CURVATURES, check_blocks
from tyxe.curvature.output_covariance import joint_covariance
from tyxe.data import Output, Unpack, unpacked
from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.errors import warn
from tyxe.laplace import LaplaceGuide, LaplaceOptions, LaplaceState
from tyxe.laplace.gaussian_prior import PriorPrecision, gaussian_prior, with_precision
from tyxe.laplace.precision import check_damping
from tyxe.laplace.search import (
    best_of_grid,
    check_one_number,
    most_evidence,
    warn_of_certainty,
    with_numbers,
)
from tyxe.laplace.state import with_noise
from tyxe.likelihoods import Bernoulli, Categorical, Likelihood
from tyxe.linalg import NotPositiveDefiniteError
from tyxe.predictive.gaussian import Outputs
from tyxe.priors import DictPrior, Prior
from tyxe.priors.sites import SitePriors
from tyxe.rng import RandomStream
from tyxe.threads import as_before, exclusive
from tyxe.util import Inputs, outside_inference

SLOW = 5.0  # seconds from which on a linearised batch gives a warning


def _option(name: str, doc: str) -> Any:
    """Return a property for one of a BNN's options."""

    def of(bnn: LaplaceBNN) -> Any:
        return getattr(bnn.options, name)

    def change(bnn: LaplaceBNN, value: Any) -> None:
        bnn.options = dataclasses.replace(bnn.options, **{name: value})

    return property(of, change, doc=doc)


class LaplaceBNN(Resumable, SupervisedBNN):
    """Any net with a Gaussian about its fitted weights, `N(w*, (lambda G / T + P0)^-1)`.

    `w*` maximises the posterior, `G` is the curvature of the likelihood there and `P0` the prior's
    precision [T 3.1, GLM 2], for the weights that the prior exposes. In online Laplace the prior is
    an earlier posterior, with its precision as `P0` [T 3.54-3.56].

    Args:
        net: any module; its values are `w*` until `fit` changes them.
        prior: a prior with Normal distributions, of each site or of all sites together.
        likelihood: a likelihood without variables of its own.
        structure: structure of `G`: `"kron"`, one Kronecker product for each linear map; `"diag"`;
            or `"full"`.
        curvature: `"ggn"`, with exact output Hessians; `"fisher"`, with one sampled label for each
            point; or `"empirical"`, with the true labels.
        temperature: `T`; values below 1 concentrate the posterior.
        options: further options, such as damping.

    Raises:
        TypeError: options that are no `LaplaceOptions`; a temperature that is no number.
        ValueError: an unknown structure or curvature; a temperature that is not positive; a prior
            that is not Gaussian, or exposes nothing; a likelihood with variables of its own; a
            matrix too large for memory.

    Reference:
        [T] 3.1-3.2; [GLM]; [LA].

    Example:
        >>> import pyro.distributions as dist, torch, tyxe
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

    @outside_inference()
    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        likelihood: Likelihood,
        *,
        structure: str = "kron",
        curvature: str = "ggn",
        temperature: float = 1.0,
        name: str = "",
        options: LaplaceOptions | None = None,
        output: Output | None = None,
    ) -> None:
        super().__init__(net, prior, likelihood, name, output=output)
        check.choice("structure", structure, ACCUMULATORS)
        check.choice("curvature", curvature, CURVATURES)
        options = _checked(temperature, LaplaceOptions() if options is None else options)
        if not len(self.net_prior):
            raise ValueError(
                "the prior exposes no parameters, so there is nothing to approximate: hide less, "
                "such as by expose_modules=[net.last_layer] without expose_all=False"
            )
        if likelihood.latent_priors():
            raise ValueError(
                "the Laplace approximation takes a likelihood without variables of its own: pass "
                "the noise as a number, and choose it by log_marginal_likelihood(noise=...)"
            )
        self.structure, self.curvature = structure, curvature
        self._temperature, self._options = temperature, options
        gaussian = self._gaussian_prior(self.net_prior)
        check_damping(options.damping, gaussian)
        check_size(structure, gaussian.blocks.size)
        self.net_guide = LaplaceGuide(self.net_prior, structure)
        self.register_load_state_dict_post_hook(_take_loaded)  # type: ignore[no-untyped-call]
        self.gp: GPOnSubset | None = None

    # ------------------------------------------------------------------ the posterior

    @property
    def state(self) -> LaplaceState:
        """The approximation: mode, curvature and prior.

        Raises:
            RuntimeError: there is no curvature yet; all methods that need one raise this as well.
        """
        _take_loaded(self, None)  # where the guide's own state dict was loaded
        if self.net_guide.state is None:
            raise RuntimeError(
                "there is no curvature yet: call fit(data_loader, optim, num_epochs), or for a "
                "net that is trained fit_curvature(data_loader)"
            )
        return self.net_guide.state

    @property
    def temperature(self) -> float:
        """`T`, which divides the curvature; setting it updates the posterior, but not the mode.

        Raises:
            ValueError: a temperature that is not positive is set.
        """
        return self._temperature

    @temperature.setter
    def temperature(self, temperature: float) -> None:
        self._set(temperature, self._options)

    @property
    def options(self) -> LaplaceOptions:
        """Further options; each is an attribute as well.

        Setting one updates the posterior, but for `num_passes` and `reduce`, which are those of the
        next curvature.

        Raises:
            ValueError: options that do not fit the prior are set.
        """
        return self._options

    @options.setter
    def options(self, options: LaplaceOptions) -> None:
        self._set(self._temperature, options)

    num_passes = _option("num_passes", "How often `fit_curvature` goes through its loader.")
    damping = _option("damping", "Whether the prior's precision is spread over both factors.")
    curvature_weight = _option("curvature_weight", "What multiplies the curvature [T 3.56].")
    accumulate = _option("accumulate", "How the curvatures of tasks add up.")
    reduce = _option("reduce", "Whether positions are summed before a Kronecker product.")

    @outside_inference()
    def _set(self, temperature: float, options: LaplaceOptions) -> None:
        _checked(temperature, options)
        state = self.net_guide.state
        if state is None:
            check_damping(options.damping, self._gaussian_prior(self.net_prior))
        else:
            changed = {"temperature": temperature, **options.of_state()}
            if any(value != getattr(state, name) for name, value in changed.items()):
                state = _formed(state.replace(**changed))
        self._temperature, self._options, self.net_guide.state = temperature, options, state

    def _gaussian_prior(self, priors: SitePriors, blocks: ParamBlocks | None = None) -> Gaussian:
        named = {priors.prefix + name: prior for name, prior in priors.priors()}
        blocks = ParamBlocks.of_sites(self.site_shapes()) if blocks is None else blocks
        return gaussian_prior(named, blocks, self.like)

    def _state_of(self, curvature: Curvature) -> LaplaceState:
        return _formed(
            LaplaceState(
                self._mode(curvature),
                curvature,
                self._gaussian_prior(self.net_prior, curvature.blocks),
                temperature=self._temperature,
                **self._options.of_state(),
            )
        )

    def _mode(self, curvature: Curvature) -> Tensor:
        loc = curvature.blocks.flatten(self.net_guide.values()).detach()
        return loc.to(curvature.operator.dtype)

    def _follow_prior(self, priors: SitePriors) -> None:
        state = self.net_guide.state
        if state is None:
            check_damping(self.damping, self._gaussian_prior(priors))
            return
        prior = self._gaussian_prior(priors, state.blocks)
        if state.curvature.is_empty and state.prior.absorbed is not None and prior.absorbed is None:
            self.net_guide.state = None  # the data leave with the prior that held them
            return
        if priors is self.net_prior:  # after a state dict, whose mode may be another
            state = state.replace(loc=self._mode(state.curvature))
        self.net_guide.state = _formed(state.under(prior))

    # ------------------------------------------------------------------ draws

    def before_step(self) -> None:
        self.net_guide.state = None

    def guide(self, inputs: Inputs = None, obs: Tensor | None = None) -> Values:
        """The posterior (a Pyro program); a delta as long as there is no curvature."""
        values: Values = self.net_guide()
        return values

    def draws(self, num_predictions: int) -> Iterator[Values]:
        _ = self.state
        for _ in range(num_predictions):
            yield self.net_guide.draw()

    def one_draw(self) -> Values:
        """Return a single draw, which is the mode as long as there is no curvature."""
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
        unpack: Unpack | None = None,
        accumulate_steps: int = 1,
        autocast: torch.dtype | None = None,
        compile: bool = False,
        nan_check: str = "step",
        validation: Iterable[Any] | None = None,
        patience: int | None = None,
        restore_best: bool = True,
    ) -> History:
        """Maximise the posterior, then take the curvature at its mode.

        Arguments and errors that are not listed are those of `VariationalBNN.fit`. The history's
        `kl` is the negative log-density of the prior.

        Args:
            evidence_every: number of epochs after which, each time, the curvature is taken and the
                prior's precision set to the maximum of the evidence; 0 for never.

        Raises:
            ValueError: for `evidence_every`, the weights of a site have different precisions.
        """
        num_epochs, _ = check_fit_arguments(optim, num_epochs)
        evidence_every = check.count("evidence_every", evidence_every, 0)
        check_options(1.0, clip_norm)
        if evidence_every:
            check_one_number(self._gaussian_prior(self.net_prior))
        data_loader = unpacked(data_loader, unpack)
        batches = self.to_fit(data_loader)
        held_out = Validation(unpacked(validation, unpack), patience, restore_best)
        before, self.net_guide.state = self.net_guide.state, None
        history, trainer = History(), None
        try:
            with fitting(self, train=True):
                # With T as the KL's weight, the mode is that of log p(D|w) / T + log p(w).
                how = FitOptions(
                    self.temperature,
                    clip_norm,
                    lr_multipliers,
                    accumulate_steps=accumulate_steps,
                    autocast=autocast,
                    compile=compile,
                    nan_check=nan_check,
                )
                trainer = Trainer(self, optim, how)
                epoch_end = EpochEnd(self, callback, held_out, device, trainer.processes)
                with self._resumed(trainer, epoch_end) as first:
                    left = epoch_end.epochs_left(num_epochs)
                    for epoch in trainer.epochs(first, left, progress):
                        with prior_fixed(self):
                            trainer.run_epoch(batches, epoch, device, history, callback)
                        if evidence_every and (epoch + 1) % evidence_every == 0:
                            self._take_curvature(batches, device)
                            self._set_prior_numbers(most_evidence(self.state, False, 100))
                            self.net_guide.state = None
                        with prior_fixed(self):
                            if epoch_end.ends(epoch, history):
                                break
                epoch_end.restore_best()
        except BaseException:
            if trainer is None or not trainer.steps:
                self.net_guide.state = before
            raise
        self._take_curvature(batches, device, progress)
        return history

    def fit_curvature(
        self,
        data_loader: Iterable[Any],
        device: Any = None,
        *,
        progress: bool | None = None,
        unpack: Unpack | None = None,
        process_group: Any = None,
    ) -> None:
        """Take the curvature at the present weights, for a net that is trained already.

        Args:
            data_loader: yields `(inputs, targets)`, or `(inputs, targets, weights)`.
            device: device that batches are moved to.
            progress: show a bar for several passes; by default on a terminal only.
            unpack: from what the loader yields to one of these.
            process_group: processes of `torch.distributed`, such as `group.WORLD`, each with the
                same weights and a loader of its part of the data, over all of which the curvature
                is taken; all have it then.

        Raises:
            RuntimeError: another process has failed.
            ValueError: the data do not fit the likelihood; weights, the log-likelihood or the
                curvature are not finite, or the curvature does not fit the prior.
        """
        loader = self.to_fit(data_loader, unpack)
        found = self._take_curvature(loader, device, progress, process_group)
        # Fewer are as good, since what they sum up to is scaled.
        each, size = int(found.points / self.num_passes), self.likelihood.dataset_size
        if each > size:
            warn_of_size(each, size)

    def _take_curvature(
        self,
        loader: Iterable[Any],
        device: Any,
        progress: bool | None = False,
        process_group: Any = None,
    ) -> Curvature:
        weights = self.net_guide.values().items()
        bad = [name for name, value in weights if not bool(value.isfinite().all())]
        if bad:
            raise ValueError(f"weights of {', '.join(bad)} are not finite, and so no mode")
        passes = progress_bar(range(self.num_passes), "curvature", "pass", progress)
        with fitting(self, train=False):
            found = collect_curvature(
                self.linearize,
                self.likelihood,
                (batch for _ in passes for batch in batches_of(loader, device)),
                self.structure,
                self.curvature,
                self.reduce,
                process_group,
            )
        with exclusive():
            self.net_guide.state = state = self._state_of(found)
        if state.prior.absorbed == state.key:
            warn(
                "the prior holds the curvature of these data already, so they count twice: take "
                "that of a next task's data"
            )
        return found

    # ------------------------------------------------------------------ outputs

    def gaussian_predictives(self) -> Mapping[str, Outputs]:
        """Return `"glm"` and `"gp"`."""
        return {"glm": self._glm, "gp": self._gp}

    def _glm(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        linear = self._linearized_as_fitted(inputs)
        _warn_of_time(linear)
        covariance = functional_covariance(linear, self.state.precision())
        return linear.result(linear.outputs), linear.result(covariance)

    def _gp(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if self.gp is None:
            raise RuntimeError(
                "predictive='gp' needs some of the data: call fit_gp(loader, num_points) first"
            )
        return self.gp.outputs(self, self.state, inputs)

    def _linearized_as_fitted(self, inputs: Inputs) -> Linearization:
        """Linearise the net on a batch, and check that its blocks are those of the curvature."""
        # A batch of one point does not show which maps have rows of no point.
        whole = [block for block in self.state.blocks if not isinstance(block, LinearBlock)]
        self._runtime.linearized.exact.update(site for block in whole for site in block.sites)
        linear = self.linearize(inputs, differentiable=torch.is_grad_enabled())
        check_blocks(self.state.blocks, linear.blocks)
        return linear

    def functional_variance(
        self, *inputs: Any, joint: bool = False, enable_grad: bool = False
    ) -> Tensor:
        """Return the covariance of each point's outputs in the linearised net, `(n, ..., C, C)`.

        With `joint`, it is that of all outputs of all points, `(n, ..., n, ...)`. `enable_grad`
        records gradients in the inputs.

        Raises:
            TypeError: a loader; the inputs are one batch.
        """
        if is_loader(given := inputs[0] if len(inputs) == 1 else inputs):
            raise TypeError(
                "a list is a loader, and functional_variance takes one batch: pass several "
                "arguments of the net in a tuple"
            )
        covariance = joint_covariance if joint else functional_covariance
        with self.predicting(enable_grad):
            linear = self._linearized_as_fitted(given)
            return linear.result(covariance(linear, self.state.precision()))

    # ------------------------------------------------------------------ back to the data

    def fit_gp(
        self, data_loader: Iterable[Any], num_points: int | None = None, factor: float = 1.0
    ) -> None:
        """Keep a random part of the data for `predict(..., predictive="gp")` [GLM 15, A.7].

        With all of the data this is `"glm"` with the full curvature. The points move with the BNN
        by `.to`, and are not in its `state_dict`.

        Args:
            data_loader: yields `(inputs, targets)`, or with weights; of targets only what of them
                counts is used.
            num_points: number of points to keep, `M`; all by default.
            factor: the prior's precision is multiplied by `N / M` times this, to be tuned on
                held-out data.

        Raises:
            ValueError: more points than there are, or none; a factor that is not positive.
        """
        _ = self.state
        loader = self.to_fit(data_loader)
        self.gp = GPOnSubset(self.likelihood, loader, num_points, factor)

    @outside_inference()
    def refine(
        self,
        data_loader: Iterable[Any],
        method: str = "laplace",
        structure: str = "full",
        device: Any = None,
        **options: Any,
    ) -> RefinedPosterior:
        """Return a refined posterior, by inference inside the linearised net [GLM 3.3].

        It predicts and evaluates as this BNN does, which is not changed.

        Args:
            data_loader: yields `(inputs, targets)`, without augmentation.
            method: `"laplace"`, about the linearised net's own mode, or `"variational"`.
            structure: structure of the precision, `"full"` or `"diag"`.
            device: device that batches are moved to.
            options: options of `tyxe.predictive.refine_laplace` or `refine_variational`, such as
                `num_steps`, `rate` and `num_draws`.

        Raises:
            RuntimeError: the refinement diverges.
            TypeError: an unknown option.
            ValueError: an unknown method or structure; a `curvature_weight` other than 1; a prior
                that holds the data already, or couples weights; targets that do not fit the
                likelihood; Jacobians that do not fit into memory.
        """
        batches = map(copied, batches_of(self.to_fit(data_loader), device))
        return refined(self, self.state, batches, method, structure, options)

    # ------------------------------------------------------------------ evidence

    @outside_inference()
    def log_marginal_likelihood(
        self, prior_precision: PriorPrecision | None = None, noise: float | Tensor | None = None
    ) -> Tensor:
        """Return the evidence at the present mode, in nats, differentiable in its arguments.

        Args:
            prior_precision: precision instead of the prior's: a number for all weights, or a number
                or a tensor of the site's shape for each site, by its name.
            noise: standard deviation of a homoskedastic Gaussian instead of the likelihood's.

        Raises:
            ValueError: `noise` for another likelihood; a site missing in `prior_precision`.

        Reference:
            [LA]; [T] 3.1.
        """
        state = self.state
        if noise is not None:
            is_empirical = self.curvature == "empirical"
            found = with_noise(state.curvature, self.likelihood, noise, is_empirical)
            state = state.replace(curvature=found)
        if prior_precision is not None:
            prior = with_precision(state.prior, prior_precision, self.net_prior.prefix)
            state = state.replace(prior=prior)
        return state.evidence()

    @as_before()
    @outside_inference()
    def optimize_prior_precision(
        self,
        method: str | None = None,
        loader: Iterable[Any] | None = None,
        *,
        per_site: bool = False,
        num_steps: int = 100,
        grid: Iterable[float] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Choose the prior's precision, and make it the prior.

        Args:
            method: `"grid"`, by the log-likelihood of held-out data, the default with a loader; or
                `"evidence"`, by MacKay's fixed point, damped so that it converges from any start.
            loader: yields the held-out `(inputs, targets)` for `"grid"`, once; they are kept in
                memory.
            per_site: choose a precision for each weight with its bias, instead of one for all.
            num_steps: largest number of steps to the fixed point; it usually takes about 30.
            grid: precisions to try; by default 21 from 1e-4 to 1e4.

        Returns:
            The precision, or with `per_site` one for each block by its name in the net.

        Raises:
            ValueError: an unknown method; weights of a site with different precisions; for
                `"grid"`, no loader or no finite score. The prior is not changed.
        """
        state = self.state
        method = method or ("evidence" if loader is None else "grid")
        if method not in ("evidence", "grid"):
            hint = "" if isinstance(method, str) else ", and data as loader="
            raise ValueError(f"method is {described(method)}; expected 'evidence' or 'grid'{hint}")
        num_steps = check.count("num_steps", num_steps)
        if method == "grid" and loader is None:
            raise ValueError(
                "method='grid' needs held-out data: optimize_prior_precision('grid', loader)"
            )
        if method == "grid" and per_site:
            raise ValueError("method='grid' finds one precision for all weights, not per_site")
        check_one_number(state.prior)
        if loader is not None and method == "grid":
            batches = all_batches(self.to_evaluate(loader))
            best = best_of_grid(grid, lambda precision: self._held_out(precision, batches))
            numbers = {"": state.loc.new_tensor(best)}
        else:
            numbers = most_evidence(state, per_site, num_steps)
        self._set_prior_numbers(numbers)
        if method == "evidence" and isinstance(self.likelihood, Categorical | Bernoulli):
            warn_of_certainty(self.state)
        if not per_site:
            return numbers[""]
        return {key.removeprefix(self.net_prior.prefix): number for key, number in numbers.items()}

    def _set_prior_numbers(self, numbers: Mapping[str, Tensor]) -> None:
        """Set the prior's precisions, by block or for all under `""`, and keep its means."""
        prior = with_numbers(self.state, numbers)
        locs = prior.unflatten(prior.loc)
        scales = prior.unflatten(prior.precision.diagonal().rsqrt())
        normals = {
            site.removeprefix(self.net_prior.prefix): dist.Normal(loc, scales[site]).to_event()
            for site, loc in locs.items()
        }
        self.update_prior(DictPrior(normals))

    def _held_out(self, precision: float, batches: list[Any]) -> float:
        """Return the log-likelihood of held-out data, with the same random numbers each time."""
        number = {"": self.state.loc.new_tensor(precision)}
        device = next(self.parameters()).device
        with RandomStream(seed=0):
            try:
                bnn = self._under(self.state.replace(prior=with_numbers(self.state, number)))
                found = (bnn.evaluate(x, y)[1] for x, y in batches_of(batches, device))
                return sum(
                    float(each["joint"] if isinstance(each, Mapping) else each) for each in found
                )
            except NotPositiveDefiniteError:
                return -math.inf  # the precision is below the curvature's rounding

    def _under(self, state: LaplaceState) -> LaplaceBNN:
        """Return a BNN with another state, which other threads do not meet, and all else shared."""
        other, guide = copy.copy(self), copy.copy(self.net_guide)
        other._modules = {**self._modules, "net_guide": guide}
        guide.state = state
        return other


def _take_loaded(bnn: LaplaceBNN, _: Any) -> None:
    """Make a state of a curvature that was loaded, also where the BNN is a part of a module."""
    found, bnn.net_guide.loaded = bnn.net_guide.loaded, None
    if found is not None:
        bnn.net_guide.state = bnn._state_of(found)


def _checked(temperature: float, options: LaplaceOptions) -> LaplaceOptions:
    if not isinstance(options, LaplaceOptions):
        raise TypeError(
            f"options is a {type(options).__name__}; expected tyxe.LaplaceOptions, such as "
            "options=tyxe.LaplaceOptions(damping=True)"
        )
    check.number("temperature", temperature, above=0)
    return options


def _warn_of_time(linear: Linearization) -> None:
    if (passes := linear.outputs.shape[1:].numel()) < 256:
        return  # of more, two more passes are no loss
    linear.gradients(one := torch.ones_like(linear.outputs))
    start = time.perf_counter()
    linear.gradients(one)
    if (seconds := passes * (time.perf_counter() - start)) > SLOW:
        warn(
            f"predictive='glm' takes {passes:,} backward passes of this batch, one for each of a "
            f"point's outputs, and {seconds:.0f} s: predictive='bnn' takes a forward for each draw"
        )


@torch.no_grad()
def _formed(state: LaplaceState) -> LaplaceState:
    """Return a state after its precision is computed, so that errors come before assignments."""
    state.precision()
    return state
