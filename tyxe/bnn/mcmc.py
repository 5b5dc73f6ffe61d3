"""Markov chain Monte Carlo over the weights of a net."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed
from pyro.infer.mcmc import HMC
from pyro.infer.mcmc.api import MCMC
from pyro.infer.mcmc.mcmc_kernel import MCMCKernel
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn

from tyxe import check
from tyxe.bnn.batches import OwnBatches, collect, device_for
from tyxe.bnn.chains import (
    MCMCRun,
    RunOptions,
    SampleFile,
    Samples,
    check_continuous,
    make_run,
)
from tyxe.bnn.checks import check_exposes, check_is_finite, check_one_batch
from tyxe.bnn.potential import BatchPotential, Potential, points_of
from tyxe.bnn.runtime import fitting, prior_fixed
from tyxe.bnn.sample_posterior import SamplePosterior
from tyxe.bnn.starts import starts_of
from tyxe.data import Output, Targets, Unpack, masked_targets
from tyxe.errors import warn
from tyxe.likelihoods import Likelihood
from tyxe.priors import Prior
from tyxe.processes import all_or_none, check_group, shared
from tyxe.rng import RandomStream, fresh_seed
from tyxe.samplers import Kernel, WarmStart
from tyxe.threads import as_before
from tyxe.util import outside_inference, unwrapped


class MCMC_BNN(SamplePosterior):
    """Any net with posterior samples of its weights, from several chains at once.

    The net runs in eval mode, and in train mode for kernels that take mini-batches. The
    likelihood's own variables are sampled too; trainable parameters that the prior hides are not
    fitted, which gives a warning. Arguments that are not listed are those of `BNN` and
    `SupervisedBNN`.

    Args:
        kernel_builder: `tyxe.samplers.NUTS`, `HMC` or `MCLMC`, or for mini-batches `SGLD` or
            `SGHMC`, with options by calling it or by `functools.partial`; or a function from a
            model to a Pyro kernel, such as `pyro.infer.mcmc.NUTS`.

    Raises:
        TypeError: `kernel_builder` is not a kernel, has unknown options, or is a built Pyro kernel.
        ValueError: nothing to sample, or discrete or half-precision sites; the likelihood has
            parameters to train.

    Example:
        >>> import torch, pyro.distributions as dist, tyxe
        >>> bnn = MCMC_BNN(
        ...     nn.Linear(1, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(4, scale=0.5),
        ...     tyxe.samplers.NUTS)
        >>> data = torch.ones(4, 1), torch.ones(4, 1)
        >>> run = bnn.fit([data], num_samples=20, warmup_steps=150, num_chains=2)
        >>> run.get_samples()["net.weight"].shape
        torch.Size([40, 1, 1])
    """

    def _described(self) -> dict[str, Any]:
        builder = self.kernel if self.kernel is not None else unwrapped(self.kernel_builder)[0]
        shapes = [samples.shape for _, samples in self.samples.items()]
        found = f"{shapes[0][0]} chains of {shapes[0][1]} samples" if shapes else self._stage
        kernel = builder.__name__ if isinstance(builder, type) else type(builder).__name__
        return super()._described() | {"kernel": kernel, "state": found}

    @outside_inference()
    def __init__(
        self,
        net: nn.Module,
        prior: Prior,
        likelihood: Likelihood,
        kernel_builder: Callable[..., Any],
        name: str = "",
        *,
        output: Output | None = None,
        unpack: Unpack | None = None,
    ) -> None:
        super().__init__(net, prior, likelihood, name, output=output, unpack=unpack)
        if not callable(kernel_builder) or isinstance(kernel_builder, MCMCKernel):
            pyro = "or a class or functools.partial of one of pyro.infer.mcmc"
            expected = f"a kernel such as tyxe.samplers.NUTS(), {pyro}"
            check.one_of("kernel_builder", kernel_builder, Kernel, expected)
        check_exposes(self, "sample")
        kind, _ = unwrapped(kernel_builder)
        of_class = kind if isinstance(kind, type) else type(kind)
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            raise TypeError(f"{kind.__name__} is a guide; use it with tyxe.VariationalBNN")
        trained = [name for name, p in self.likelihood.named_parameters() if p.requires_grad]
        if trained:
            raise ValueError(
                f"MCMC trains no parameters, and the likelihood has {', '.join(trained)}: pass its "
                "scale as a number, or as a distribution, which is sampled"
            )
        self.kernel: Kernel | None = None
        if issubclass(of_class, Kernel):
            given: Any = kernel_builder
            self.kernel = given() if isinstance(kind, type) else given
        if issubclass(of_class, Kernel | HMC):
            check_continuous(of_class.__name__, likelihood, self.net_prior, self._in_places())
        self.kernel_builder = kernel_builder
        self.samples = Samples({})
        self._chains = None

    @as_before()
    def fit(
        self,
        data_loader: Iterable[Any],
        num_samples: int,
        device: Any = None,
        batch_data: bool = False,
        *,
        warmup_steps: int | None = None,
        num_chains: int | None = None,
        progress: bool | None = None,
        unpack: Unpack | None = None,
        process_group: Any = None,
        **options: Any,
    ) -> Any:
        """Run the chains on the whole data set, or on its mini-batches.

        Args:
            data_loader: yields `(inputs, targets)`, or with weights. All batches are concatenated,
                except by `SGLD` and `SGHMC`, whose transitions are steps on one batch.
            num_samples: number of samples to keep of each chain.
            device: where the data are moved to; by default where the parameters are.
            batch_data: whether `data_loader` is itself one batch, the pair `(inputs, targets)`.
            warmup_steps: transitions before, to adapt the kernel; by default as many as are
                sampled.
            num_chains: by default 4, or the number of starts; 1 for Pyro's kernels and for
                mini-batches.
            progress: show a bar; by default on a terminal only.
            unpack: a function from a batch of the loader to `inputs, targets`, or with weights.
            process_group: processes of `torch.distributed`, each with all data, among which the
                chains are divided. All get all samples, and keep their own chains in the run.
            options: for a kernel of `tyxe.samplers`:

                - `thinning` (1): number of transitions for each kept sample;
                - `init`: where chains start: at draws from the "prior" (the default), at the "net"
                  (the default for mini-batches), at draws of a fitted BNN, at a
                  `tyxe.samplers.warm_start(...)`, or at the values `(num_chains, ...)` of a mapping
                  by joint name;
                - `compile` (None): whether steps are compiled; by default if there is a compiler
                  and the run is long. A compiled net has to do the same tensor operations for all
                  weights, and its hooks do not run;
                - `resume` (False): continue the last run where an interrupt has stopped it;
                - `dtype`, `file`: the dtype of the samples, and a file for them instead of memory.

                For a Pyro kernel: the arguments of `pyro.infer.MCMC`.

        After an interrupt or an error the BNN keeps the samples that a kernel of `tyxe.samplers`
        has made until then, except for the last ones of a chain that diverged.

        Returns:
            The run: `MCMCRun`, or Pyro's `MCMC`; `get_samples()` has keys `net.<parameter>`.

        Raises:
            TypeError: `num_samples` is not an integer; an unknown option.
            ValueError: the data do not fit the likelihood; samples that do not fit into memory; bad
                starts; hierarchical priors with a kernel of `tyxe.samplers`.
            RuntimeError: a net that cannot be compiled; nothing to resume; a chain diverges.
            OSError: no room on the disk for the file of samples.
        """
        hint = ": fit(data_loader, num_samples, warmup_steps=...)"
        num_samples = check.count("num_samples", num_samples, hint=hint)
        check.flags(progress=progress, batch_data=batch_data)
        if check_group(process_group) is not None:
            options |= {"warmup_steps": warmup_steps, "progress": progress, "unpack": unpack}
            own = data_loader, num_samples, device, batch_data
            return self._fit_shares(process_group, num_chains, *own, **options)
        if warmup_steps is not None:
            check.count("warmup_steps", warmup_steps, 0)
        if num_chains is not None:
            check.count("num_chains", num_chains)
        known = [field.name for field in dataclasses.fields(RunOptions)]
        if wrong := [name for name in options if (name in known) == (self.kernel is None)]:
            usual = "warmup_steps, num_chains, progress"
            ours = f"tyxe.samplers; expected {', '.join([usual, *known])}"
            whose = ours if self.kernel else "Pyro; expected those of pyro.infer.MCMC"
            raise TypeError(f"fit has no option {', '.join(wrong)} for kernels of {whose}")
        loader = self._to_fit([data_loader] if batch_data else data_loader, unpack)
        device = device_for(self, device)
        by_batch = self.kernel is not None and self.kernel.takes_batches
        data = collect(loader, device) if not by_batch else OwnBatches(loader, device, 0).take()
        targets = Targets.of(data[1])
        is_masked = masked_targets(self.likelihood.data_name, targets) is not targets
        if is_masked and not by_batch:
            data = data[0], self.likelihood.observed(targets)
        remedy = check.memory_remedy("the chains", "take fewer, or smaller batches of data")
        with fitting(self, train=by_batch), prior_fixed(self), remedy:
            check_one_batch(self, self.net_prior, *data)
            points = None if by_batch else points_of(self, data[1])
            self._warn_of_setting(points, is_masked)
            if self.kernel is None:
                given = {"warmup_steps": warmup_steps, "num_chains": num_chains, **options}
                given = {name: value for name, value in given.items() if value is not None}
                if progress is not None:
                    given["disable_progbar"] = not progress
                return self._fit_by_pyro(data, num_samples, given)
            told, length = RunOptions(**options), (num_samples, warmup_steps, num_chains)
            whole = loader if by_batch else data
            chains = self._to_resume(whole, length, options) if told.resume else None
            batches = (loader, device) if by_batch else None
            chains = chains or self._new_run(data, length, told, progress, batches)
            self._fit_by_kernel(chains, progress)
        if by_batch:  # of chains of several weights the running ones are nobody's
            self.update_norm_statistics(loader)
        return chains

    def _fit_shares(
        self, group: Any, num_chains: int | None, *arguments: Any, **options: Any
    ) -> Any:
        """Run this process's share of the chains, and take the samples of the others'."""
        rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        init = options.get("init")
        if num_chains is None:
            known = len(next(iter(init.values()))) if isinstance(init, Mapping) else None
            num_chains = known or (self.kernel.default_chains if self.kernel else 1)
        if num_chains % world:
            raise ValueError(
                f"{num_chains} chains cannot be shared out evenly to {world} processes: pass "
                f"num_chains={world * max(round(num_chains / world), 1)}"
            )
        each = num_chains // world
        if isinstance(init, Mapping):
            options["init"] = {n: v[rank * each : (rank + 1) * each] for n, v in init.items()}
        seed = shared(fresh_seed(), 0, group)
        with all_or_none(group), RandomStream(seed + rank):  # for chains of its own
            run = self.fit(*arguments, num_chains=each, **options)
        every = [shared(dict(self.samples.items()), owner, group) for owner in range(world)]
        self._take({name: torch.cat([part[name] for part in every]) for name in every[0]})
        return run

    def _to_resume(self, data: Any, length: tuple[Any, ...], options: dict[str, Any]) -> MCMCRun:
        """Return the run that was stopped, if it is what is asked for."""
        chains = check.known(
            self._chains,
            "there is no run to resume: call fit without resume=True, or with init=bnn to start at "
            "the samples of this BNN",
        )
        new = [name for name in options if name not in ("resume", "thinning")]
        asked = dict(zip(("num_samples", "num_warmup", "num_chains"), length, strict=True))
        chains.check_same(data, {**asked, "thinning": options.get("thinning")}, new)
        return chains

    def _new_run(
        self,
        data: tuple[Any, Tensor],
        length: tuple[Any, ...],
        options: RunOptions,
        progress: bool | None,
        batches: tuple[Iterable[Any], Any] | None,
    ) -> MCMCRun:
        assert self.kernel is not None
        num_samples, num_warmup, num_chains = length
        kernel = self.kernel.for_points(self.likelihood.dataset_size)
        init = kernel.default_init if options.init is None else options.init
        if batches is not None and isinstance(init, WarmStart):
            raise ValueError(
                "a warm start takes all data at once, and this kernel mini-batches: pass "
                "init=bnn.starts(data_loader, tyxe.samplers.warm_start(...))"
            )
        if num_chains is None and not isinstance(init, Mapping):
            num_chains = kernel.default_chains
        if num_warmup is None:
            num_warmup = kernel.default_warmup(num_samples, options.thinning)
        self._chains = None
        # Of a shallow copy, since a run that holds what holds it would not go with it.
        potential = Potential(copy.copy(self), *data, kernel.temperature)
        starts = starts_of(potential, init, num_chains, progress)
        estimates = None if batches is None else BatchPotential(potential, starts, *batches)
        if (short := kernel.check(num_warmup)) is not None:
            warn(short)
        run = make_run(kernel, potential, starts, num_samples, num_warmup, options, estimates)
        file = SampleFile.of(run.kept.positions)
        self._chains = MCMCRun(run, potential, data if batches is None else batches[0], file)
        return self._chains

    def _fit_by_kernel(self, chains: MCMCRun, progress: bool | None) -> None:
        try:
            chains.go(progress)
        except (KeyboardInterrupt, Exception) as error:
            kept, what, how = chains.run.num_kept, "interrupted", "; fit(..., resume=True) goes on"
            if not isinstance(error, KeyboardInterrupt):
                self._chains, what, how = None, "stopped", ""
                chains.close()
                if chains.file is not None and not kept:  # in the way of the next try
                    os.remove(chains.file.path)
            if kept:
                self._take(chains.get_samples(group_by_chain=True), chains.file)
            each = f"samples of each of {chains.num_chains} chains"
            warn(f"{what}: the BNN keeps {kept or 'no new'} {each}{how}")
            raise
        chains.close()
        self._take(chains.get_samples(group_by_chain=True), chains.file)
        chains.warn_of_result()

    def starts(
        self,
        data_loader: Iterable[Any],
        init: Any,
        num_chains: int | None = None,
        *,
        progress: bool | None = None,
    ) -> dict[str, Tensor]:
        """Return the starts of chains, such as the members that a `warm_start` trains.

        Args:
            data_loader, init, num_chains, progress: those of `fit`, which takes the result as
                `init`.

        Returns:
            Values `(num_chains, ...)` by joint name.

        Raises:
            ValueError: `init` is not one of those that `fit` takes; the number of starts is not
                `num_chains`; the start of a site is missing, has another shape, is not finite, or
                has no density.
        """
        data = collect(self._to_fit(data_loader), device_for(self))
        with fitting(self, train=False):
            check_one_batch(self, self.net_prior, *data)
            potential = Potential(self, *data)
            found = starts_of(potential, init, num_chains, progress)
        return potential.unflatten(found)

    def _fit_by_pyro(
        self, data: tuple[Any, Tensor], num_samples: int, options: dict[str, Any]
    ) -> MCMC:
        expected = "a kernel of Pyro's MCMC, such as pyro.infer.mcmc.NUTS(model)"
        kernel = self.kernel_builder(self.model)
        check.one_of("what kernel_builder made", kernel, MCMCKernel, expected)
        mcmc = MCMC(kernel, num_samples, **options)
        try:
            mcmc.run(*data)
        except ValueError as error:
            if "initial params" in str(error):  # which Pyro has not found
                check_is_finite(data[0])
            raise
        self._take(mcmc.get_samples(group_by_chain=True))
        return mcmc

    def _warn_of_setting(self, points: float | None, is_masked: bool) -> None:
        if am_i_wrapped() and not is_masked:
            warn("MCMC shields its model from handlers: those around fit have no effect")
        size = self.likelihood.dataset_size
        # A sum of weights is rounded.
        if points is not None and not math.isclose(points, size, rel_tol=1e-6):
            warn(
                f"the likelihood was built with dataset_size={size}, but there are {points:g} "
                f"points: each counts {size / points:.3g} times"
            )
        hidden = ", ".join(n for n, p in self.net.named_parameters() if p.requires_grad)
        if hidden:
            warn(f"MCMC does not fit {hidden}, which the prior hides; they stay as they were")
