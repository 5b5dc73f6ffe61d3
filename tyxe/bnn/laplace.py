"""The Laplace approximation of a net: a Gaussian about its fitted weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor, nn

from tyxe import check
from tyxe.bnn.batches import all_batches, batches_of, device_for
from tyxe.bnn.checkpoint import History
from tyxe.bnn.checks import check_num_epochs, warn_of_size
from tyxe.bnn.laplace_posterior import LaplacePosterior
from tyxe.bnn.runtime import fitting
from tyxe.bnn.scoring import together
from tyxe.bnn.trained import TrainedBNN
from tyxe.bnn.training import FitOptions, progress_bar
from tyxe.curvature import Curvature, CurvatureProducts, collect_curvature
from tyxe.curvature.collect import check_blocks
from tyxe.curvature.products import low_rank_curvature
from tyxe.data import Unpack
from tyxe.errors import warn
from tyxe.laplace import LaplaceState, search
from tyxe.laplace.precision import PriorPrecision, with_precision
from tyxe.laplace.state import warn_of_rounding, with_noise
from tyxe.likelihoods import Likelihood
from tyxe.linalg import NotPositiveDefiniteError
from tyxe.linalg.functions import logdet_by_quadrature
from tyxe.priors import DictPrior, Prior
from tyxe.priors.mapping import diagonal_posterior
from tyxe.processes import all_or_none, check_group, shared
from tyxe.rng import RandomStream, fresh_seed
from tyxe.threads import as_before, exclusive
from tyxe.util import on_error, outside_inference


class LaplaceBNN(LaplacePosterior, TrainedBNN):
    """Any net with a Gaussian about its fitted weights, `N(w*, (lambda G / T + P0)^-1)`.

    `w*` maximises the posterior, `G` is the curvature of the likelihood there and `P0` the prior's
    precision [T 3.1, GLM 2], over the weights that the prior exposes. In online Laplace the prior
    is an earlier posterior, whose precision is `P0` [T 3.54-3.56].

    Args:
        net: any module; its values are `w*` until `fit` changes them.
        prior: a prior with Normal distributions, of each site or of all sites together.
        likelihood: a likelihood without variables of its own.
        structure: structure of `G`: `"kron"`, one Kronecker product for each linear map; `"diag"`;
            `"full"`; or `"lowrank"`, its largest eigenpairs, by a few passes for each through data
            that must not be shuffled.
        curvature: `"ggn"`, with exact output Hessians; `"fisher"`, with one sampled label for each
            point; `"empirical"`, by true labels; or for `"lowrank"`, at a minimum, `"hessian"`.
        temperature: `T`; values below 1 concentrate the posterior.
        options: further options, such as damping.

    Raises:
        TypeError: options that are not `LaplaceOptions`; a temperature that is not a number.
        ValueError: an unknown structure or curvature; options that the structure does not use; a
            temperature that is not positive; a prior that is not Gaussian, or exposes nothing; a
            likelihood with variables of its own; a matrix too large for memory.

    Reference:
        [T] 3.1-3.2; [GLM]; [LA].

    Example:
        >>> import pyro.distributions as dist, torch, tyxe
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> net = torch.nn.Linear(1, 1)
        >>> bnn = LaplaceBNN(
        ...     net, tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.5), structure="full")
        >>> _ = bnn.fit([(x, 2 * x)], torch.optim.Adam, 10)
        >>> mean, scale = bnn.predict(torch.tensor([[0.0], [10.0]]))
        >>> bool(scale[1] > scale[0])
        True
    """

    _chosen_prior: Any = None  # the last that data chose

    @as_before()
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
        scheduler: Any = None,
        schedule_by: str = "epoch",
        validation: Iterable[Any] | None = None,
        patience: int | None = None,
        restore_best: bool = True,
    ) -> History:
        """Maximise the posterior, then compute the curvature at its mode.

        Arguments and errors that are not listed are those of `VariationalBNN.fit`. The history's
        `kl` is the negative log-density of the prior.

        Args:
            evidence_every: every so many epochs, compute the curvature and set the prior's
                precision to the maximum of the evidence; 0 for never.

        Raises:
            ValueError: with `evidence_every`, the weights of a site have different precisions.
        """
        num_epochs = check_num_epochs(optim, num_epochs)
        evidence_every = check.count("evidence_every", evidence_every, 0)
        if evidence_every:
            search.check_one_number(self._gaussian_prior(self.net_prior))
        options = FitOptions(
            self.temperature,  # the mode is that of log p(D|w) / T + log p(w)
            clip_norm,
            lr_multipliers,
            accumulate_steps=accumulate_steps,
            autocast=autocast,
            compile=compile,
            nan_check=nan_check,
            scheduler=scheduler,
            schedule_by=schedule_by,
            validation=validation,
            patience=patience,
            restore_best=restore_best,
        )
        batches = self._to_fit(data_loader, unpack)

        def after_epoch(epoch: int) -> None:
            if (epoch + 1) % evidence_every == 0:
                self._take_curvature(batches, device)
                self._set_prior_numbers(search.most_evidence(self.state, False, 100))
                self.net_guide.state = None

        before, self.net_guide.state = self.net_guide.state, None

        def keep_curvature() -> None:
            if before is not None and torch.equal(self._mode(before.curvature), before.loc):
                self.net_guide.state = before  # no step was made

        given = batches, optim, num_epochs, callback, device, progress
        with on_error(keep_curvature):
            history = self._train(*given, options, after_epoch if evidence_every else None)
        try:
            self._take_curvature(batches, device, progress)
        except ValueError as error:
            if self.net_guide.structure != "lowrank":
                raise
            raise ValueError(
                f"{error}. The net is trained, and only its curvature is missing: call "
                "bnn.fit_curvature(list(loader)), or with another loader that does not shuffle"
            ) from error
        return history

    @as_before()
    def fit_curvature(
        self,
        data_loader: Iterable[Any],
        device: Any = None,
        *,
        progress: bool | None = None,
        unpack: Unpack | None = None,
        process_group: Any = None,
    ) -> None:
        """Compute the curvature at the present weights, for a net that is already trained.

        Args:
            data_loader: yields `(inputs, targets)`, or `(inputs, targets, weights)`.
            device: where batches are moved to; by default where the parameters are.
            progress: show a bar for several passes; by default on a terminal only.
            unpack: a function from a batch of the loader to one of these.
            process_group: processes of `torch.distributed`, such as `group.WORLD`, each with the
                same weights and a loader of its part of the data. All get the whole curvature.

        Raises:
            RuntimeError: another process has failed.
            ValueError: the data do not fit the likelihood; weights, the log-likelihood or the
                curvature are not finite, or the curvature does not fit the prior.
        """
        loader = self._to_fit(data_loader, unpack)
        found = self._take_curvature(loader, device, progress, check_group(process_group))
        # Fewer are as good, since what they sum up to is scaled.
        each, size = found.points / self.options.num_passes, self.likelihood.dataset_size
        if each > size:
            warn_of_size(each, size)

    def _take_curvature(
        self,
        loader: Iterable[Any],
        device: Any,
        progress: bool | None = False,
        process_group: Any = None,
    ) -> Curvature:
        for name, value in self.net_guide.values().items():
            check.numbers(name, value, "finite numbers, which a mode has")
        if isinstance(device, Tensor):
            raise TypeError("device is a tensor; pass data as [(x, y)], or as another loader")
        device = device_for(self, device)

        def batches(progress: bool | None = False) -> Iterable[Any]:
            for _ in progress_bar(range(self.options.num_passes), "curvature", "pass", progress):
                yield from batches_of(loader, device)

        remedy = "take smaller batches, or another structure"
        with fitting(self, train=False), check.memory_remedy("the curvature", remedy):
            if (structure := self.net_guide.structure) == "lowrank":
                with progress_bar(None, "curvature", "pass", progress) as bar:

                    def counted() -> Iterable[Any]:
                        bar.update()
                        return batches()

                    products = self._products(counted, process_group)
                    found = low_rank_curvature(products, self.options.rank, self.options.tolerance)
            else:
                data = self._linearize, self.likelihood, batches(progress)
                options = self._curvature, self.options.reduce, process_group
                found = collect_curvature(*data, structure, *options)
        with exclusive():
            self.net_guide.state = state = self._state_of(found)
        warn_of_rounding(state, self.options)
        if state.prior.absorbed == state.key:
            warn(
                "the prior holds the curvature of these data already, so they count twice: take "
                "that of a next task's data"
            )
        return found

    def _products(
        self, batches: Callable[[], Iterable[Any]], group: Any = None
    ) -> CurvatureProducts:
        """Return products with the curvature at the present weights, in the order of its blocks."""
        with all_or_none(group):
            linear = self._linearize(next(iter(batches()))[0])
            linear.find_batch_dims()  # which refuses points that influence each other
            blocks = linear.blocks
        net = self._run_frozen, self._mean_values(), self.likelihood
        return CurvatureProducts(*net, batches, self._curvature, blocks=blocks, group=group)

    # ------------------------------------------------------------------ evidence

    @outside_inference()
    def log_marginal_likelihood(
        self, prior_precision: PriorPrecision | None = None, noise: float | Tensor | None = None
    ) -> Tensor:
        """Return the evidence at the present mode, in nats, differentiable in its arguments.

        Args:
            prior_precision: precision instead of the prior's: a number for all weights, or by the
                name of each site a number or a tensor of its shape.
            noise: standard deviation of a homoskedastic Gaussian instead of the likelihood's: a
                number, or, if the likelihood's `scale` has several numbers, such as one for each
                output, a tensor of its shape. With several, `"kron"` has first derivatives only;
                its output factor is a sum over outputs, as in a net with these noises.

        Raises:
            TypeError: `noise` for another likelihood.
            ValueError: `noise` of another shape; several noises with `curvature="fisher"` or
                `"empirical"`, which couple outputs, or with curvatures that do not fit into
                memory; a site missing in `prior_precision`.

        Reference:
            [LA]; [T] 3.1.
        """
        state = self.state
        if noise is not None:
            is_empirical = self._curvature == "empirical"
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
        predictive: str | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """Choose the prior's precision, and make it the prior.

        Args:
            method: `"grid"`, by the log-likelihood of held-out data, the default with a loader; or
                `"evidence"`, by MacKay's fixed-point iteration, damped to converge from any start.
            loader: yields the held-out `(inputs, targets)` for `"grid"`, once; they are kept in
                memory.
            per_site: choose one precision for each weight with its bias, instead of one for all.
            num_steps: largest number of iterations; usually about 30 are needed.
            grid: precisions to try; by default 21 from 1e-4 to 1e4.
            predictive: for `"grid"`, how held-out data are predicted, as in `predict`; with many
                classes use `"bnn"`.

        Returns:
            The precision, or with `per_site` one for each block, by its name in the net.

        Raises:
            ValueError: an unknown method; weights of a site with different precisions; for
                `"grid"`, no loader or no finite score. The prior is not changed.
        """
        state = self.state
        method = method or ("evidence" if loader is None else "grid")
        check.choice("method", method, ("evidence", "grid"), "; held-out data are loader=")
        num_steps = check.count("num_steps", num_steps)
        search.check_one_number(state.prior)
        if method == "evidence":
            numbers = search.most_evidence(state, per_site, num_steps)
        elif loader is None or per_site:
            raise ValueError(
                "method='grid' finds one precision for all weights, by held-out data: "
                "optimize_prior_precision('grid', loader)"
            )
        else:
            batches = all_batches(self._to_evaluate(loader))
            best = search.best_of_grid(
                grid, lambda precision: self._held_out(precision, batches, predictive)
            )
            numbers = {"": state.loc.new_tensor(best)}
        self._set_prior_numbers(numbers)
        if method == "evidence" and self.likelihood.has_classes:
            search.warn_of_certainty(self.state)
        if not per_site:
            return numbers[""]
        return {key.removeprefix(self.net_prior.prefix): number for key, number in numbers.items()}

    def _set_prior_numbers(self, numbers: Mapping[str, Tensor]) -> None:
        """Set the prior's precisions, by block or for all under `""`, and keep its means."""
        normals = search.with_numbers(self.state, numbers).by_site().items()
        prefix = self.net_prior.prefix
        self.update_prior(DictPrior({site.removeprefix(prefix): n for site, n in normals}))
        self._chosen_prior = self.state.prior

    def _held_out(self, precision: float, batches: list[Any], predictive: str | None) -> float:
        """Return the log-likelihood of held-out data, with the same random numbers each time."""
        number = {"": self.state.loc.new_tensor(precision)}
        device = device_for(self)
        with RandomStream(seed=0):
            try:
                bnn = self._under(self.state.replace(prior=search.with_numbers(self.state, number)))
                data = batches_of(batches, device)
                found = (bnn.evaluate(x, y, predictive=predictive)[1] for x, y in data)
                return sum(float(together(each)) for each in found)
            except NotPositiveDefiniteError:
                return -math.inf  # the precision is below the curvature's rounding

    def _under(self, state: LaplaceState) -> LaplaceBNN:
        """Return a BNN with another state, which other threads do not meet, and all else shared."""
        other, guide = copy.copy(self), copy.copy(self.net_guide)
        other._modules = {**self._modules, "net_guide": guide}
        guide.state = state
        return other


@diagonal_posterior.register
def _(
    likelihood: Likelihood, net: nn.Module, prior: Prior, loader: Any
) -> Mapping[str, td.Distribution]:
    bnn = LaplaceBNN(net, prior, likelihood, structure="diag")
    bnn.fit_curvature(loader)
    return bnn.net_guide.get_detached_distributions()


@check.arguments
@as_before()
@outside_inference()
def estimate_evidence(
    bnn: LaplaceBNN,
    data_loader: Iterable[Any],
    *,
    num_probes: int = 16,
    num_steps: int = 32,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return the evidence by the whole curvature, in nats, and its standard error.

    `bnn.log_marginal_likelihood()` uses the curvature in its structure, and for `"lowrank"` is too
    large. The missing part of `log det (lambda G / T + P0)` is the log-determinant of
    `S^T (lambda G / T + P0) S`, where `S S^T` is the posterior's covariance in its structure. It is
    estimated by stochastic Lanczos quadrature; the closer the structure, the better. With
    `curvature="fisher"` labels are sampled anew, so `G` differs from that of the structure.

    Args:
        bnn: a BNN with a curvature.
        data_loader: yields the data of the curvature, in the same batches in each pass.
        num_probes: number of random vectors; the error is proportional to `1 / sqrt(num_probes)`.
        num_steps: number of Lanczos steps, each a pass through the data with all probes; with too
            few, for a structure far from the curvature, the estimate is too small.
        process_group: processes of `torch.distributed`, each with a part of the data.

    Raises:
        RuntimeError: there is no curvature yet.
        ValueError: a loader that shuffles, or has other data than the curvature; a curvature that
            the prior already contains; a prior that is a penalty without a normaliser.

    Example:
        >>> import pyro.distributions as dist, tyxe
        >>> x, likelihood = torch.randn(9, 3), tyxe.likelihoods.HomoskedasticGaussian(9, scale=0.5)
        >>> bnn = LaplaceBNN(
        ...     torch.nn.Linear(3, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)), likelihood,
        ...     structure="lowrank", options=tyxe.LaplaceOptions(rank=2))
        >>> bnn.fit_curvature([(x, x[:, :1])])
        >>> estimate, error = estimate_evidence(bnn, [(x, x[:, :1])])
        >>> bool(estimate < bnn.log_marginal_likelihood())
        True
    """
    num_probes = check.count("num_probes", num_probes, 2)
    num_steps = check.count("num_steps", num_steps)
    check_group(process_group)
    state, loader, device = bnn.state, bnn._to_fit(data_loader), device_for(bnn)
    if state.curvature.is_empty:
        raise ValueError(
            "the prior holds the curvature already, and there is no other yet: call fit_curvature "
            "on the next task's data, or estimate the evidence before update_prior"
        )
    evidence, precision, prior = state.evidence(), state.precision(), state.prior.precision
    known, targets = float(state.curvature.log_likelihood), state.curvature.num_targets
    with fitting(bnn, train=False):
        products = bnn._products(lambda: batches_of(loader, device), process_group)
        check_blocks(state.blocks, products.blocks)

        def relative(vectors: Tensor) -> Tensor:
            w = precision.inverse_sqrt(vectors)
            image = products @ w
            # That of the same data may differ by rounding, since other batches are allowed.
            given = float(products.numbers[0])
            if abs(given - known) > torch.finfo(torch.float32).eps ** 0.5 * (abs(known) + targets):
                raise ValueError(
                    f"the loader's data have a log-likelihood of {given:.6g}, and those of the "
                    f"curvature one of {known:.6g}: give the data of fit_curvature, all of them"
                )
            return precision.whiten(state.weight * image + prior.matmul(w))

        # Independent signs have the smallest variance.
        seed = fresh_seed()
        if process_group is not None:
            seed = shared(seed, 0, process_group)
        generator = torch.Generator(device="cpu").manual_seed(seed)
        size = num_probes, len(state.loc)
        probes = torch.randn(size, generator=generator, device="cpu").to(state.loc).sign()
        found = logdet_by_quadrature(relative, probes, num_steps)
    error = found.std() / (2 * math.sqrt(num_probes))
    return (evidence - found.mean() / 2).detach(), error.detach()
