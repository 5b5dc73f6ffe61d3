"""A Gaussian about the weights of a net: its state, its draws, and its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tyxe import check
from tyxe.bnn.batches import batches_of, copied, device_for, is_loader, on_device
from tyxe.bnn.checks import check_exposes
from tyxe.bnn.function_space import GPOnSubset, RefinedPosterior, refined
from tyxe.bnn.outputs import Values
from tyxe.bnn.predict import SupervisedBNN
from tyxe.curvature import Curvature, Linearization, functional_covariance
from tyxe.curvature.accumulators import ACCUMULATORS, check_size
from tyxe.curvature.collect import CURVATURES, check_blocks
from tyxe.curvature.output_covariance import joint_covariance
from tyxe.curvature.products import KINDS
from tyxe.data import Output, Unpack
from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.laplace import LaplaceGuide, LaplaceOptions, LaplaceState
from tyxe.laplace.precision import check_damping, gaussian_prior
from tyxe.likelihoods import Likelihood
from tyxe.linalg import Operator
from tyxe.predictive.gaussian import Outputs
from tyxe.priors import Prior
from tyxe.priors.sites import SitePriors
from tyxe.util import Inputs, outside_inference


class LaplacePosterior(SupervisedBNN):
    """The posterior of a `LaplaceBNN`, which lists the arguments."""

    _default_predictive = "glm"

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
        unpack: Unpack | None = None,
    ) -> None:
        super().__init__(net, prior, likelihood, name, output=output, unpack=unpack)
        check.choice("structure", structure, (*ACCUMULATORS, "lowrank"))
        check.choice("curvature", curvature, KINDS if structure == "lowrank" else CURVATURES)
        options = LaplaceOptions() if options is None else options
        _check_settings(temperature, options, structure)
        if likelihood.latent_priors():
            raise ValueError(
                "the Laplace approximation takes a likelihood without variables of its own: pass "
                "the noise as a number, and choose it by log_marginal_likelihood(noise=...)"
            )
        less = "hide less, such as by expose_modules=[net.last_layer] without expose_all=False"
        check_exposes(self, f"approximate: {less}")
        self._curvature = curvature
        self._temperature, self._options = temperature, options
        gaussian = self._gaussian_prior(self.net_prior)
        check_damping(options.damping, gaussian)
        check_size(structure, gaussian.blocks.size)
        self.net_guide = LaplaceGuide(self.net_prior, structure)
        self.register_load_state_dict_post_hook(_take_loaded)  # type: ignore[no-untyped-call]
        self._gp_on_subset: GPOnSubset | None = None

    def _described(self) -> dict[str, Any]:
        guide = self.net_guide
        has_curvature = guide.state is not None or guide.loaded is not None
        state = "fitted, with its curvature" if has_curvature else f"{self._stage}, no curvature"
        return {
            **super()._described(),
            "guide": f"a Gaussian about the mode, structure={guide.structure!r}",
            "state": state,
        }

    @property
    def state(self) -> LaplaceState:
        """The approximation: mode, curvature and prior.

        Raises:
            RuntimeError: there is no curvature yet; all methods that need one raise this as well.
        """
        _take_loaded(self, None)  # where the guide's own state dict was loaded
        return check.known(
            self.net_guide.state,
            "there is no curvature yet: call fit(data_loader, optim, num_epochs), or for a net "
            "that is trained fit_curvature(data_loader)",
        )

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
        """Further options.

        Setting others, such as `dataclasses.replace(bnn.options, damping=True)`, updates the
        posterior, except for `num_passes`, `reduce`, `rank` and `tolerance`, which apply to the
        next curvature.

        Raises:
            ValueError: options that do not fit the prior or the structure are set.
        """
        return self._options

    @options.setter
    def options(self, options: LaplaceOptions) -> None:
        self._set(self._temperature, options)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LaplaceOptions.__dataclass_fields__:
            raise AttributeError(
                f"{name} is an option: set bnn.options = dataclasses.replace(bnn.options, "
                f"{name}=...), since an attribute of this name would do nothing"
            )
        super().__setattr__(name, value)

    @outside_inference()
    def _set(self, temperature: float, options: LaplaceOptions) -> None:
        _check_settings(temperature, options, self.net_guide.structure)
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
        blocks = ParamBlocks.of_sites(self._site_shapes()) if blocks is None else blocks
        return gaussian_prior(named, blocks, self._like)

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
            check_damping(self.options.damping, self._gaussian_prior(priors))
            return
        prior = self._gaussian_prior(priors, state.blocks)
        if state.curvature.is_empty and state.prior.absorbed is not None and prior.absorbed is None:
            self.net_guide.state = None  # the data leave with the prior that held them
            return
        if priors is self.net_prior:  # after a state dict, whose mode may be another
            state = state.replace(loc=self._mode(state.curvature))
        self.net_guide.state = _formed(state.under(prior))

    def _before_step(self) -> None:
        self.net_guide.state = None

    @property
    def _guide(self) -> LaplaceGuide:
        """The posterior (a Pyro program); a delta as long as there is no curvature."""
        return self.net_guide

    def _draws(self, num_predictions: int) -> Iterator[Values]:
        _ = self.state
        for _ in range(num_predictions):
            yield self.net_guide.draw()

    def _sampler(self) -> Callable[[int], Values]:
        _ = self.state
        return self.net_guide.draw

    def _one_draw(self) -> Values:
        """Return a single draw, which is the mode as long as there is no curvature."""
        return self.net_guide.draw()

    def _mean_values(self) -> Values:
        """Return the fitted weights."""
        return self.net_guide.median()

    def _layer_precision(self, block: LinearBlock) -> Operator:
        precision = self.state.precision()
        check_blocks(self.state.blocks, ParamBlocks((block,)))
        (found,) = precision.blocks.values()
        return found

    def _gaussian_predictives(self) -> Mapping[str, Outputs]:
        """Return `"glm"` and `"gp"`."""
        return {"glm": self._glm, "gp": self._gp}

    def _glm(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        linear = self._linearized_as_fitted(inputs)
        covariance = functional_covariance(linear, self.state.precision())
        return linear.result(linear.outputs), linear.result(covariance)

    def _gp(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        hint = "predictive='gp' needs some of the data: call fit_gp(loader, num_points) first"
        return check.known(self._gp_on_subset, hint).outputs(self, self.state, inputs)

    def _linearized_as_fitted(self, inputs: Inputs) -> Linearization:
        """Linearise the net on a batch, and check that its blocks are those of the curvature."""
        # A batch of one point does not show which maps have rows of no point.
        whole = [block for block in self.state.blocks if not isinstance(block, LinearBlock)]
        sites = {site for block in whole for site in block.sites}
        parts = {self.net_prior.prefix + name for name in self.net_prior.elements}
        self._runtime.linearized.exact.update(sites - parts)
        linear = self._linearize(inputs, torch.is_grad_enabled())
        check_blocks(self.state.blocks, linear.blocks)
        return linear

    def functional_variance(
        self, *inputs: Any, joint: bool = False, enable_grad: bool = False
    ) -> Tensor:
        """Return the covariance of each point's outputs in the linearised net, `(n, ..., C, C)`.

        With `joint`, it is that of all outputs of all points, `(n, ..., n, ...)`. `enable_grad`
        records gradients with respect to the inputs.

        Raises:
            TypeError: a loader; the inputs are one batch.
        """
        if is_loader(given := inputs[0] if len(inputs) == 1 else inputs):
            raise TypeError(
                "a list is a loader, and functional_variance takes one batch: pass several "
                "arguments of the net in a tuple"
            )
        covariance = joint_covariance if joint else functional_covariance
        remedy = check.memory_remedy("the covariance", "pass fewer points at a time")
        with self._predicting(enable_grad), remedy:
            linear = self._linearized_as_fitted(on_device(given, device_for(self)))
            return linear.result(covariance(linear, self.state.precision()))

    def fit_gp(
        self, data_loader: Iterable[Any], num_points: int | None = None, factor: float = 1.0
    ) -> None:
        """Keep a random part of the data for `predict(..., predictive="gp")` [GLM 15, A.7].

        With all of the data this is `"glm"` with the full curvature. The points move with the BNN
        by `.to`, and are not in its `state_dict`.

        Args:
            data_loader: yields `(inputs, targets)`, or with weights; of the targets only what
                counts is used.
            num_points: number of points to keep, `M`; all by default.
            factor: multiplies the prior's precision, besides `N / M`; tune it on held-out data.

        Raises:
            ValueError: more points than there are, or none; a factor that is not positive.
        """
        _ = self.state
        loader = self._to_fit(data_loader)
        self._gp_on_subset = GPOnSubset(self.likelihood, loader, num_points, factor)

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

        It predicts and evaluates like this BNN, which is not changed.

        Args:
            data_loader: yields `(inputs, targets)`, without augmentation.
            method: `"laplace"`, about the linearised net's own mode, or `"variational"`.
            structure: structure of the precision, `"full"` or `"diag"`.
            device: where batches are moved to; by default where the parameters are.
            options: options of `tyxe.predictive.refine_laplace` or `refine_variational`, such as
                `num_steps`, `rate` and `num_draws`.

        Raises:
            RuntimeError: the refinement diverges.
            TypeError: an unknown option.
            ValueError: an unknown method or structure; a `curvature_weight` other than 1; a prior
                that holds the data already, or couples weights; targets that do not fit the
                likelihood; Jacobians that do not fit into memory.
        """
        loader = self._to_fit(data_loader)
        batches = map(copied, batches_of(loader, device_for(self, device)))
        return refined(self, self.state, batches, method, structure, options)


def _take_loaded(bnn: LaplacePosterior, _: Any) -> None:
    """Make a state of a curvature that was loaded, also where the BNN is a part of a module."""
    found, bnn.net_guide.loaded = bnn.net_guide.loaded, None
    if found is not None:
        bnn.net_guide.state = bnn._state_of(found)


def _check_settings(temperature: Any, options: Any, structure: str) -> None:
    expected = "tyxe.LaplaceOptions, such as options=tyxe.LaplaceOptions(damping=True)"
    check.one_of("options", options, LaplaceOptions, expected).check_used(structure)
    check.number("temperature", temperature, above=0)


@torch.no_grad()
def _formed(state: LaplaceState) -> LaplaceState:
    """Return a state after its precision is computed, so that errors come before assignments."""
    state.precision()
    return state
