"""Chains of a BNN, by the kernels of `tyxe.samplers`."""

from __future__ import annotations

import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pyro.ops.stats import split_gelman_rubin
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tyxe import check
from tyxe.bnn.checks import check_is_finite
from tyxe.bnn.potential import BatchPotential, Potential, can_move, exclusive_unvalidated, weakly
from tyxe.bnn.training import progress_bar
from tyxe.errors import warn
from tyxe.likelihoods import Likelihood
from tyxe.priors.sites import SitePriors
from tyxe.program import has_programs
from tyxe.rng import fresh_seed
from tyxe.samplers import Kernel, Length, Run, batched
from tyxe.util import SiteTensors, is_discrete


@dataclass(frozen=True)
class SampleFile:
    """A file that samples are mapped from; if it was truncated, a read would end the process.

    It was made at `path`, may have been deleted there, and has the inode `number`.
    """

    path: str
    number: tuple[int, int]
    size: int

    @classmethod
    def of(cls, positions: Tensor) -> SampleFile | None:
        """Return the file that a tensor has just been mapped from, or None of one in memory."""
        storage = positions.untyped_storage()
        if storage.filename is None:
            return None
        found = os.stat(storage.filename)
        return cls(storage.filename, (found.st_dev, found.st_ino), storage.nbytes())

    def check(self) -> None:
        """Raise a RuntimeError if the file was cut."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return
        if (found.st_dev, found.st_ino) == self.number and found.st_size < self.size:
            raise RuntimeError(
                f"{self.path} was cut to {found.st_size:,} of {self.size:,} bytes, and the samples "
                "in it are lost: fit again with another file=, or load a saved state into a new BNN"
            )


class Samples(SiteTensors):
    """Posterior samples by site, `(chains, samples, ...)`: buffers that load any number of them.

    They are in memory, or in a `file`; copies are in memory.
    """

    def __init__(self, samples: Mapping[str, Tensor]) -> None:
        super().__init__(samples, trainable=None)
        self.file: SampleFile | None = None
        self.register_state_dict_post_hook(_each_its_own)  # type: ignore[no-untyped-call]

    def __getitem__(self, name: str) -> Tensor:
        self.check()
        return super().__getitem__(name)

    def check(self) -> None:
        """Raise a RuntimeError if the samples were in a file that was cut."""
        if self.file is not None:
            self.file.check()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        found = {
            name.removeprefix(prefix): value.detach().clone()
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        if found:  # else all that there are is missing
            self.replace(found)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def replace(self, samples: dict[str, Tensor], file: SampleFile | None = None) -> None:
        """Replace all tensors by these, which are in memory or in a file."""
        self._modules.clear()
        self._buffers.clear()
        self._places = {}
        self.file = file
        for name, tensor in samples.items():
            self.put(name, tensor.detach())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Samples:
        self.check()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not any(value.untyped_storage().filename for value in self.buffers()):
            self.file = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        self.check()
        return {**self.__dict__, "file": None}


def _each_its_own(samples: Samples, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Copy what shares its memory with other sites, as chains' samples do; files have each once."""
    samples.check()
    for name in samples:
        value = state[prefix + name]
        if value.untyped_storage().nbytes() > value.nbytes:
            state[prefix + name] = value.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class RunOptions:
    """The options of `MCMC_BNN.fit` for kernels of `tyxe.samplers`; they are explained there."""

    thinning: int = check.field(1, check.count)
    init: Any = None
    compile: bool | None = check.field(None, check.choice, known=(None, True, False))
    resume: bool = check.field(False, check.choice, known=(True, False))
    dtype: torch.dtype | None = None
    file: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        check.fields(self)
        known = (None, torch.float16, torch.bfloat16, torch.float32, torch.float64)
        check.choice("dtype", self.dtype, known)
        if self.file is not None and os.path.lexists(self.file):
            raise FileExistsError(
                f"{self.file} is there, perhaps with another BNN's samples: pass a new name, or "
                "delete it"
            )


@dataclass(frozen=True, repr=False)
class MCMCRun:
    """The chains that `MCMC_BNN.fit` returns for a kernel of `tyxe.samplers`.

    Attributes:
        run: the sampler's run, with the state of its chains.
        potential: its target.
        data: inputs and targets of the potential, or the loader of its mini-batches.
        file: where the samples are, if they are not in memory.
    """

    run: Run
    potential: Potential
    data: Any
    file: SampleFile | None = None

    def __repr__(self) -> str:
        return f"MCMCRun({self.run!r})"

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return len(self.run.starts)

    @property
    def statistics(self) -> dict[str, Tensor]:
        """Statistics of the kept transitions, such as `acceptance`, each `(chains, samples)`."""
        found = self.run.kept.statistics[:, : self.run.num_kept].unbind(-1)
        return dict(zip(self.run.kernel.statistics, found, strict=True))

    @property
    def potentials(self) -> Tensor:
        """Negative log joints, `(chains, samples)`, in nats; estimates for mini-batches."""
        return self.run.kept.potentials[:, : self.run.num_kept]

    def get_samples(self, group_by_chain: bool = False) -> dict[str, Tensor]:
        """Return samples by joint name, `(chains * samples, ...)`, or `(chains, samples, ...)`.

        Raises:
            RuntimeError: they were in a file that was truncated.
        """
        self._check_file()
        found = self.potential.unflatten(self.run.kept.positions[:, : self.run.num_kept])
        return found if group_by_chain else {n: v.flatten(0, 1) for n, v in found.items()}

    def check_same(self, data: Any, asked: dict[str, Any], new: list[str]) -> None:
        """Raise a ValueError, with what differs, for a fit that is not the one to go on with.

        `asked` is what the run is to be, by the names of its attributes; None for anything. `new`
        are options of new runs alone.
        """
        others = [*new]
        for name, value in asked.items():
            known = self.num_chains if name == "num_chains" else getattr(self.run, name)
            if value not in (None, known):
                others.append(f"{name}={value} in place of {known}")
        ours, given = tree_leaves(self.data), tree_leaves(data)
        if not (len(ours) == len(given) and all(map(_is_same, ours, given))):
            others.append("other data")
        if self.potential.bnn._like.dtype != self.run.starts.dtype:
            others.append("another dtype")
        if others:
            raise ValueError(
                f"resume=True goes on with the run that was stopped, and takes no "
                f"{', '.join(others)}: leave resume out for a new one"
            )

    def _check_file(self) -> None:
        if self.file is not None:
            self.file.check()

    def go(self, progress: bool | None) -> None:
        """Run to the end, with a bar."""
        self._check_file()
        total = self.run.num_transitions
        recent: deque[tuple[Tensor, Tensor]] = deque(maxlen=100)
        with progress_bar(range(total), "sample", "transition", progress) as bar:
            bar.update(int(self.run.transitions.min()))
            shown = 0.0
            for transition in self.run.steps():
                self._check_file()
                recent.append((transition.done, transition.statistics))  # positions may be large
                # Rarely, because it reads numbers.
                if not bar.disable and time.monotonic() > shown + 0.5:
                    done = min(int(self.run.transitions.min()), total)
                    what = "warm up" if done < self.run.num_warmup else "sample"
                    how = ", compiled" if self.run.is_compiled else ""
                    bar.set_description(what + how, refresh=False)
                    bar.update(done - bar.n)
                    bar.set_postfix(self._told(recent))
                    shown = time.monotonic()
            bar.update(total - bar.n)

    def close(self) -> None:
        """Let go of the loader's workers, after the last step."""
        if isinstance(self.run.potential, BatchPotential):
            self.run.potential.close()

    def _told(self, recent: deque[tuple[Tensor, Tensor]]) -> dict[str, str]:
        rows = torch.cat([statistics[done] for done, statistics in recent])
        found = {"step size": float(self.run.settings.step_size.mean())}
        if len(rows):
            kernel = self.run.kernel
            found |= kernel.progress(dict(zip(kernel.statistics, rows.unbind(-1), strict=True)))
        return {name: f"{value:.2g}" for name, value in found.items()}

    def warn_of_result(self) -> None:
        """Warn, with the remedy, if the samples have a problem.

        Mini-batches: noise would hide from R-hat that chains disagree; see `MCMC_BNN.summary`.
        """
        for advice in self.run.kernel.advice(self.statistics):
            warn(advice)
        # Of fewer samples it says little, and of potentials with the noise of batches.
        is_telling = self.run.num_kept >= 50 and not self.run.kernel.takes_batches
        if self.num_chains > 1 and is_telling:
            found = float(split_gelman_rubin(self.potentials.double()))
            if not found < 1.1:
                warn(
                    f"the chains disagree: R-hat of the log joint is {found:.2f}, where 1.01 is "
                    "wanted; take more samples and warm-up steps, and look at summary(inputs)"
                )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


def make_run(
    kernel: Kernel,
    potential: Potential,
    starts: Tensor,
    num_samples: int,
    num_warmup: int,
    options: RunOptions,
    batches: BatchPotential | None = None,
) -> Run:
    """Return a run of a BNN's potential, or of estimates by `batches`, that has not started."""
    if options.compile and not has_programs(starts.device):
        raise ValueError("compile=True needs a C++ compiler, and none is found; leave compile out")
    every: Any = batches
    if batches is None:
        every = _of_all_data(potential, starts)
    elif options.compile:
        raise ValueError("a kernel of mini-batches is not compiled: leave compile out")
    positions = _room(kernel, starts, Length(num_warmup, num_samples, options.thinning), options)
    seed = fresh_seed()
    return Run(
        kernel,
        every,
        starts,
        num_samples,
        num_warmup,
        options.thinning,
        seed,
        compile=options.compile if batches is None else False,
        positions=positions,
        inside=exclusive_unvalidated,
        before=None if batches is None else batches.take,
    )


def _of_all_data(potential: Potential, starts: Tensor) -> Any:
    """Return the potential of all chains, after it has been seen to be a function of weights."""
    with exclusive_unvalidated():
        potential.look(starts)
        every = batched(weakly(potential.at), starts)
        (first, gradient), (again, _) = every(starts), every(starts)
    if not bool((movable := can_move(first, gradient)).all()):
        check_is_finite(potential.inputs)
        bad = (~movable).nonzero().flatten().tolist()
        raise ValueError(
            f"the log joint, or its gradient, is not finite at the starts of chains {bad}, so that "
            'they could not move: pass starts of another kind, init="prior", "net" or values'
        )
    if not torch.allclose(first, again, rtol=1e-3):
        raise ValueError(
            "the net gives other outputs for the same weights and inputs: a forward that draws "
            "random numbers, or that counts its calls, has no posterior to sample"
        )
    return every


def _room(kernel: Kernel, starts: Tensor, length: Length, options: RunOptions) -> Tensor:
    """Return a tensor of zeros for samples, in memory or in a new file."""
    shape = torch.Size([len(starts), length.num_samples, starts.shape[1]])
    dtype = options.dtype or starts.dtype
    if options.file is None:
        return torch.zeros(shape, dtype=dtype, device=starts.device)
    path, size = os.path.abspath(options.file), shape.numel() * dtype.itemsize
    # A disk that is full where a sample is written to would end the process.
    free = shutil.disk_usage(os.path.dirname(path)).free
    if size > free:
        chains, num_samples, d = shape
        raise ValueError(
            f"{chains} chains x {num_samples} samples x {d} numbers in {dtype} take {size:,} bytes "
            f"of file, and {free:,} are free: raise thinning, pass dtype=torch.float16, or another "
            "file="
        )
    kernel.kept(length)  # an error of a run that is too short comes before its file
    with open(path, "xb") as file:
        file.truncate(size)
    return torch.from_file(path, True, shape.numel(), dtype=dtype).view(shape)


def check_continuous(
    kernel: str, likelihood: Likelihood, priors: SitePriors, values: Mapping[str, Tensor]
) -> None:
    """Raise a ValueError for sites that are discrete, or in half precision."""
    for name, prior in (*likelihood.latent_priors().items(), *priors.priors()):
        if is_discrete(getattr(prior, "support", None)):
            raise ValueError(
                f"{kernel} samples no discrete variables, which {name!r} has; use "
                "tyxe.VariationalBNN with tyxe.guides.AutoBernoulli, or a continuous prior"
            )
    for name, _ in priors.priors():
        known, hint = (torch.float32, torch.float64), f" for {kernel}: use net.float()"
        check.choice(f"the dtype of {name!r}", values[priors.prefix + name].dtype, known, hint)
