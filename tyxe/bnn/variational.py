"""Variational inference: a guide fitted to the posterior by the ELBO."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyro.poutine as poutine
import torch
import torch.distributions as td
from torch import Tensor, nn

from tyxe.bnn.checkpoint import History
from tyxe.bnn.checks import check_num_epochs, warn_of_result
from tyxe.bnn.outputs import Values
from tyxe.bnn.trained import TrainedBNN
from tyxe.bnn.training import FitOptions
from tyxe.curvature import Linearization, functional_covariance
from tyxe.curvature.output_covariance import covariance_through
from tyxe.data import Output, Unpack
from tyxe.distributions import ParamBlocks
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.guides import Guide, PyroGuide
from tyxe.guides.base import AnyGuide, weight_covariance
from tyxe.likelihoods import Likelihood
from tyxe.linalg import BlockDiagonal, Dense, Diagonal, Inverse, Operator
from tyxe.predictive.gaussian import Outputs
from tyxe.priors import Prior
from tyxe.priors.sites import SitePriors
from tyxe.processes import Parallel
from tyxe.threads import exclusive, handlers
from tyxe.util import Inputs, outside_inference

GuideBuilder = Callable[[Callable[..., Any]], Any]


class VariationalBNN(TrainedBNN):
    """Any net with a variational posterior over its weights.

    Arguments that are not listed are those of `BNN` and `SupervisedBNN`.

    Args:
        net_guide_builder: makes the guide from the prior's program: `tyxe.guides.AutoNormal`, a
            `functools.partial` of it, or a class of `pyro.infer.autoguide` (`AutoDelta` is MAP);
            None for maximum likelihood, if the prior hides everything.
        likelihood_guide_builder: makes the guide of the likelihood's variables, or None.

    Raises:
        ValueError: a guide without sites, or sites without a guide.

    Example:
        >>> import torch, pyro, pyro.distributions as dist, tyxe
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 20)[:, None]
        >>> y = 2 * x + 0.1 * torch.randn(20, 1)
        >>> bnn = VariationalBNN(
        ...     nn.Linear(1, 1),
        ...     tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.1),
        ...     tyxe.guides.AutoNormal,
        ... )
        >>> history = bnn.fit([(x, y)], pyro.optim.Adam({"lr": 1e-1}), num_epochs=200)
        >>> mean, scale = bnn.predict(torch.ones(1, 1), num_predictions=32)
        >>> abs(mean.item() - 2) < 0.2
        True
    """

    @outside_inference()
    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        likelihood: Likelihood,
        net_guide_builder: GuideBuilder | None = None,
        likelihood_guide_builder: GuideBuilder | None = None,
        name: str = "",
        *,
        output: Output | None = None,
        unpack: Unpack | None = None,
    ) -> None:
        super().__init__(net, prior, likelihood, name, output=output, unpack=unpack)
        self.net_guide = build_guide(
            "net_guide_builder", net_guide_builder, self.net_prior, len(self.net_prior) > 0
        )
        self.likelihood_guide = build_guide(
            "likelihood_guide_builder",
            likelihood_guide_builder,
            _LikelihoodProgram(self.likelihood),
            bool(likelihood.latent_priors()),
        )

    # ------------------------------------------------------------------ programs

    def guide(self, inputs: Inputs = None, obs: Tensor | None = None) -> Values:
        """The posterior (a Pyro program): a draw for each site; the batch is not used."""
        return {name: value for part in self._guides() for name, value in part().items()}

    @property
    def _guide(self) -> Callable[..., Values]:
        """The program that fits run."""
        return self.guide

    def _guides(self) -> list[AnyGuide]:
        return [part for part in (self.net_guide, self.likelihood_guide) if part is not None]

    def guided_forward(self, *inputs: Any, guide_tr: Any = None) -> Any:
        """Return the net's output for one draw of the guide, or for the values of its trace."""
        with exclusive():  # other threads set the generators back for a while
            trace = poutine.trace(self.guide).get_trace(inputs) if guide_tr is None else guide_tr
        return self._run_net(values_of(trace), inputs)

    def _draws(self, num_predictions: int) -> Iterator[Values]:
        """Yield draws of the guide, whose posterior is computed once for all of them."""
        posteriors = [part.posterior() for part in self._guides()]
        joined = _joined(posteriors)
        if joined is not None and not handlers():
            yield from (Guide.draw_from(joined) for _ in range(num_predictions))
            return
        programs = [
            part if posterior is None else functools.partial(Guide.sample_from, posterior)
            for part, posterior in zip(self._guides(), posteriors, strict=True)
        ]
        for _ in range(num_predictions):
            with poutine.trace() as trace:
                for program in programs:
                    program()
            yield values_of(trace.trace)

    def _sampler(self) -> Callable[[int], Values] | None:
        """Return what draws from the guides' posteriors, where these have closed forms."""
        joined = _joined([part.posterior() for part in self._guides()])
        return None if joined is None else functools.partial(Guide.draw_from, joined)

    def _one_draw(self) -> Values:
        return next(iter(self._draws(1)))

    def _mean_values(self) -> Values:
        """Return the guide's median, which for Normal posteriors is the mean."""
        return {name: value for part in self._guides() for name, value in part.median().items()}

    def _gaussian_predictives(self) -> Mapping[str, Outputs]:
        """Return `"glm"`, which needs a Normal guide; maximum likelihood has none."""
        if self.net_guide is None:
            return {}
        # Raises for others at once, and for joint draws as well.
        weight_covariance(self.net_guide, ParamBlocks.of_sites(self._site_shapes()))

        def glm(inputs: Inputs) -> tuple[Tensor, Tensor]:
            linear = self._linearize(inputs, torch.is_grad_enabled())
            return glm_outputs(self.net_guide, linear)

        return {"glm": glm}

    def _layer_precision(self, block: LinearBlock) -> Operator:
        assert self.net_guide is not None  # there are sites
        covariance = weight_covariance(self.net_guide, ParamBlocks((block,)))
        if isinstance(covariance, Diagonal):
            return Diagonal(covariance.inverse_diagonal())
        return Inverse(Dense(covariance.to_dense()))

    def _follow_prior(self, priors: SitePriors) -> None:
        """Do nothing, because only the objective depends on the prior."""

    # ------------------------------------------------------------------ fit

    def fit(
        self,
        data_loader: Iterable[Any],
        optim: Any,
        num_epochs: int,
        callback: Callable[[VariationalBNN, int, float], Any] | None = None,
        num_particles: int = 1,
        closed_form_kl: bool = True,
        device: Any = None,
        *,
        beta: float | Callable[[int], float] = 1.0,
        clip_norm: float | None = None,
        lr_multipliers: Mapping[str, float] | None = None,
        progress: bool | None = None,
        parallel: Parallel | None = None,
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
        """Fit the guide, deterministic parameters and the likelihood's variables by the ELBO.

        The objective is `(beta KL - E_q log p(D | w)) / N`, in nats per data point, so that
        learning rates mean the same as for the plain net.

        Args:
            data_loader: yields `(inputs, targets)`, where inputs are a tensor, a tuple of arguments
                or a mapping of keyword arguments; or `(inputs, targets, weights)`, where a weight
                of 2 counts the point twice, and `dataset_size` is the sum of all weights.
            optim: a Pyro optimiser or scheduler, a torch optimiser class or partial, or an instance
                over `bnn.parameters()`, or a torch scheduler of one, which you step in `callback`.
                The `weight_decay` of a class applies to hidden parameters, not to those of guides.
            num_epochs: number of passes through the loader.
            callback: called as `callback(bnn, epoch, loss)` after each epoch; training stops when
                it returns True. A `tyxe.Callback` is also called after batches.
            num_particles: number of draws that are averaged in a step.
            closed_form_kl: use closed forms of the KL where they exist.
            device: where batches are moved to; by default where the parameters are.
            beta: weight of the KL, or a function of the epoch that returns it.
            clip_norm: largest norm of the gradient; a larger one is scaled down.
            lr_multipliers: factors of the learning rate by kind of parameter, such as
                `{"scale": 10}`; the kinds are `loc`, `scale` and `deterministic`.
            progress: show a bar; by default on a terminal only.
            parallel: `torch.nn.parallel.DistributedDataParallel`, or
                `torch.distributed.fsdp.fully_shard`, which gives each process its part of
                parameters and optimiser, or a partial of one of them. Each process has a loader of
                its part of every batch, and may have one of its part of the held-out data.
            unpack: a function from a batch of the loader to one of these, such as
                `lambda batch: (batch["x"], batch["y"])`.
            accumulate_steps: number of batches for each step, with the gradient of all their
                points.
            autocast: `torch.bfloat16` runs linear maps in half precision; the KL and variances keep
                the dtype of the parameters.
            compile: compile each step into one program, for every shape of a batch (this takes
                seconds to a minute). Steps that cannot be compiled run uncompiled, with a warning.
                On a CUDA device the whole step is one graph, with Adam, AdamW and fused SGD.
            nan_check: `"step"` checks each loss and gradient before it is used. `"epoch"` checks
                once at the end and keeps a copy of parameters and optimiser, so the host never
                waits for an accelerator.
            scheduler: a class of `torch.optim.lr_scheduler`, a `functools.partial` of one, or a
                scheduler of the optimiser that is given as `optim`. Checkpoints have its state.
            schedule_by: whether it steps after each `"epoch"` or each `"batch"`. By epochs,
                `ReduceLROnPlateau` gets the loss.
            validation: held-out data, as in `data_loader`, whose log-likelihood per point is
                computed after each epoch.
            patience: stop after so many epochs without an improvement.
            restore_best: go back to the best epoch.

        Returns:
            Loss, expected log-likelihood and KL of each epoch, in nats for the whole data set.

        Raises:
            TypeError: arguments are swapped, or of a wrong type.
            ValueError: the loader is empty, or yields something else; targets do not fit the
                likelihood; a batch is larger than `dataset_size`; batches, or settings that have to
                agree, differ between processes.
            RuntimeError: the loss or its gradient is not finite; the parameters stay as they were
                before the step, or before the epoch.
        """
        num_epochs = check_num_epochs(optim, num_epochs)
        options = FitOptions(
            beta,
            clip_norm,
            lr_multipliers,
            num_particles,
            closed_form_kl,
            parallel,
            accumulate_steps,
            autocast,
            compile,
            nan_check,
            scheduler,
            schedule_by,
            validation,
            patience,
            restore_best,
        )
        loader = self._to_fit(data_loader, unpack)
        history = self._train(loader, optim, num_epochs, callback, device, progress, options)
        warn_of_result(self, history)
        return history


def glm_outputs(guide: Any, linear: Linearization) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of outputs in the linearised net, `(n, ...)`, `(n, ..., C, C)`.

    It is linearised about the means of a guide that `weight_covariance` takes.
    """
    blocks = linear.blocks
    with torch.no_grad():
        covariance = weight_covariance(guide, blocks)
    outputs = linear.result(linear.outputs)
    # A pruned weight has variance zero, and so no precision.
    if not isinstance(covariance, Diagonal) or not bool(covariance.entries.all()):
        return outputs, linear.result(covariance_through(linear, covariance))
    precisions = covariance.inverse_diagonal().split(blocks.sizes)
    operators = {n: Diagonal(p) for n, p in zip(blocks.names, precisions, strict=True)}
    return outputs, linear.result(functional_covariance(linear, BlockDiagonal(operators)))


class _LikelihoodProgram:
    """The program of the likelihood's own variables, from which their guide is built."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.prefix = f"{likelihood.prefix}."

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        return self.likelihood.sample_latents()


def build_guide(
    argument: str, builder: GuideBuilder | None, program: Callable[..., Any], has_sites: bool
) -> AnyGuide | None:
    """Build a guide, which has to be there just where its program has sites, else a ValueError."""
    what = "the likelihood has" if argument.startswith("likelihood") else "the prior exposes"
    if builder is None:
        if has_sites:
            raise ValueError(
                f"{what} variables, but there is no {argument}: pass tyxe.guides.AutoNormal, or "
                "for maximum likelihood a prior with hide_all=True and a likelihood with a number"
            )
        return None
    if not has_sites:
        raise ValueError(f"{what} no variables, so the {argument} has nothing to do: leave it out")
    return PyroGuide.build(builder, program)


def _joined(posteriors: Iterable[Mapping[str, Any] | None]) -> dict[str, td.Distribution] | None:
    """Return guides' posteriors by site, or None if one of them has no closed form."""
    found: dict[str, td.Distribution] = {}
    for posterior in posteriors:
        if posterior is None:
            return None
        found |= posterior
    return found


def values_of(trace: Any) -> Values:
    """Return a trace's draws, without auxiliary variables, whose memory each would keep."""
    nodes = ((name, trace.nodes[name]) for name in trace.stochastic_nodes)
    return {name: node["value"] for name, node in nodes if not node["infer"].get("is_auxiliary")}
