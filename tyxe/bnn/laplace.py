"""The Laplace approximation: a fitted net with a Gaussian about it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from tyxe.bnn.base import modes_restored, prior_fixed, set_train_mode
from tyxe.bnn.batches import batches_of
from tyxe.bnn.checks import check_fit_arguments, check_known, check_options, check_outputs
from tyxe.bnn.evidence import log_evidence, posterior_precision, with_noise
from tyxe.bnn.history import History
from tyxe.bnn.linearized import PREDICTIVES, linearize
from tyxe.bnn.online import joint_evidence, joint_precision, reordered
from tyxe.bnn.posterior import LaplacePosterior
from tyxe.bnn.prior_precision import (
    PriorPrecision,
    check_numbers,
    maximize_evidence,
    maximize_held_out,
    spread,
)
from tyxe.bnn.refined import GPOnSubset, RefinedPosterior, gp_outputs, refined
from tyxe.bnn.training import FitOptions, Trainer, progress_bar
from tyxe.curvature import CURVATURES, collect_curvature
from tyxe.likelihoods import Likelihood
from tyxe.priors import Prior
from tyxe.util import tree_map_tensors

__all__ = ["LaplaceBNN"]


class LaplaceBNN(LaplacePosterior):
    r"""Any net with a Gaussian about its fitted weights, `N(w*, (lambda G / T + P0)^-1)`.

    `w*` maximises the posterior, `G` is the curvature of the likelihood there and `P0` the prior's
    precision [T 3.1, GLM 2]. Which weights: those that the prior exposes. The prior may be an
    earlier posterior, whose precision takes the place of `P0`: online Laplace [T 3.54-3.56].

    Args:
        net: any module; it is copied. Its own values are `w*` until `fit` changes them.
        prior: one of `tyxe.priors`, with Normal distributions, of each site or of all together.
        likelihood: one of `tyxe.likelihoods`, without variables of its own.
        structure: of `G`: `"kron"`, one Kronecker product for each linear map; `"diag"`; `"full"`.
        curvature: `"ggn"`, exact; `"fisher"`, one sampled label a point; `"empirical"`, the true
            labels.
        num_passes: how often `fit_curvature` goes through its loader, for augmented data.
        temperature: `T`; below 1 it concentrates the posterior.
        damping: spread the prior's precision over both Kronecker factors [T 3.41].
        multiplier: `lambda` of online Laplace, on the curvature in the posterior; the fit is as
            without it.
        accumulate: what becomes of the prior's precision and a new curvature: their `"sum"`, which
            for `"kron"` keeps a product for each task [T 3.59]; one product of `"average"` factors
            [T 3.60]; or for each task a penalty about its own mode, `"modes"` [T 3.71].
        reduce: for `"kron"`: sum over positions that share weights before the product.
        name: prefix of all site names.

    Raises:
        TypeError: as in `BNN`.
        ValueError: an unknown structure, curvature or accumulation; a multiplier or temperature
            that is not positive; a prior that is not Gaussian; a likelihood with variables of its
            own; a matrix too large for memory.

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
        multiplier: float = 1.0,
        accumulate: str = "sum",
        reduce: bool = False,
        name: str = "",
    ) -> None:
        super().__init__(net, prior, likelihood, structure, name)
        check_known("curvature", curvature, CURVATURES)
        if num_passes < 1:
            raise ValueError(f"num_passes is {num_passes}; expected a positive number")
        self.curvature, self.num_passes, self.reduce = curvature, num_passes, reduce
        self.temperature, self.damping = temperature, damping
        self.multiplier, self.accumulate = multiplier, accumulate
        self.gp: GPOnSubset | None = None

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
        if evidence_every:
            check_numbers(self)
        self._forget()
        history = History()
        with modes_restored(self):
            if not any(module.training for module in self.modules()):
                set_train_mode(self)
            # T never touches the prior: the mode is that of log p(D|w) / T + log p(w).
            trainer = Trainer(self, optim, FitOptions(self.temperature, clip_norm, lr_multipliers))
            for epoch in trainer.epochs(0, num_epochs, progress):
                with prior_fixed(self):
                    trainer.run_epoch(data_loader, epoch, device, history)
                if evidence_every and (epoch + 1) % evidence_every == 0:
                    self.fit_curvature(data_loader, device, progress=False)
                    self.optimize_prior_precision()
                    self._forget()
                with prior_fixed(self):
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
        passes = progress_bar(range(self.num_passes), "curvature", "pass", progress)
        with modes_restored(self):
            self.eval()
            found = collect_curvature(
                functools.partial(linearize, self),
                self.likelihood,
                (batch for _ in passes for batch in batches_of(data_loader, device)),
                self.structure,
                self.curvature,
                self.reduce,
                functools.partial(check_outputs, self.likelihood),
            )
        self._take(found)

    # ------------------------------------------------------------------ back to the data

    def fit_gp(
        self, data_loader: Iterable[Any], num_points: int | None = None, factor: float = 1.0
    ) -> None:
        """Keep a random part of the data for `predict(..., predictive="gp")` [GLM 15, A.7].

        With all of them that is `"glm"` under the full curvature. The points move with the BNN, by
        `.to`, and are no part of `state_dict`.

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
            ValueError: an unknown method or option; a `multiplier` other than 1; Jacobians that do
                not fit into memory.
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
        log_likelihood: float | Tensor = curvature.log_likelihood
        like, temperature = self.net_guide.loc_vector().detach(), self._curvature_temperature
        if noise is not None:
            curvature, log_likelihood = with_noise(
                curvature, self.likelihood, noise, like, self.curvature == "empirical"
            )
        joint = self._joint_prior()
        if joint is not None and prior_precision is None:
            prior = reordered(joint, curvature.groups)
            precision = joint_precision(curvature, prior, 1 / temperature, self.accumulate)
            return joint_evidence(log_likelihood, prior, like, precision, self.temperature)
        precisions = self._prior_moments()[1]
        if prior_precision is not None:
            precisions = spread(prior_precision, precisions, self.net_prior.prefix)
        posterior = posterior_precision(curvature, precisions, temperature, self.damping)
        squares = self._squared_deviations()
        return log_evidence(log_likelihood, squares, precisions, posterior, self.temperature)

    def optimize_prior_precision(
        self,
        method: str = "evidence",
        loader: Iterable[Any] | None = None,
        *,
        per_site: bool = False,
        num_steps: int = 100,
        grid: Iterable[float] | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Choose the prior's precision, and make it the prior.

        Args:
            method: `"evidence"`, by MacKay's fixed point, damped so that it converges from any
                start; `"grid"`, by the log-likelihood of held-out data.
            loader: of held-out data, for `"grid"`.
            per_site: a precision for each weight and its bias, instead of one for all.
            num_steps: at most, towards the fixed point; 30 are usual.
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
            return maximize_evidence(self, per_site, num_steps)
        if method != "grid":
            raise ValueError(f"method is {method!r}; expected 'evidence' or 'grid'")
        if loader is None:
            raise ValueError(
                "method='grid' needs held-out data: optimize_prior_precision('grid', loader)"
            )
        if per_site:
            raise ValueError("method='grid' finds one precision for all weights, not per_site")
        return maximize_held_out(self, loader, grid)

    # ------------------------------------------------------------------ state

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LaplaceBNN:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.net_guide.next_prior is not None:
            self._refresh()
        if self.gp is not None:
            # What is given to predict has the net's new type and device, and so has the subset.
            self.gp.inputs = tree_map_tensors(
                lambda x: fn(x) if isinstance(x, Tensor) else x, self.gp.inputs
            )
        return self
