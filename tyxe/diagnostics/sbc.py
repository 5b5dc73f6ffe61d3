"""Simulation-based calibration: how often posteriors of simulated data contain the truth."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from tyxe import check, files
from tyxe.bnn.batches import device_for, on_device
from tyxe.bnn.checks import check_exposes
from tyxe.bnn.predict import SupervisedBNN
from tyxe.bnn.training import progress_bar
from tyxe.plotting.axes import axes
from tyxe.rng import torch_rng_kept
from tyxe.util import Inputs

# From outputs `(n, ...)` and targets to a number.
Function = Callable[[Tensor, Tensor], Tensor]
LOG_LIKELIHOOD = "log likelihood"
# Sets of uniform ranks by which p-values and bands are found.
SIMULATED = 2_000


@dataclass(frozen=True)
class SBC:
    """The ranks of true values among draws from posteriors, which should be uniform.

    Attributes:
        ranks: of each function, `(num_simulations,)`, from 0 to `num_draws`.
        num_draws: the number `L` of draws.
    """

    ranks: Mapping[str, Tensor]
    num_draws: int

    @property
    def _sizes(self) -> tuple[int, int]:
        return len(next(iter(self.ranks.values()))), self.num_draws

    def p_values(self) -> dict[str, float]:
        """Return the p-value of uniform ranks, for each function by itself.

        The statistic is the smallest probability, over levels and both tails, of the number of
        ranks below a level.
        """
        law = _law(*self._sizes)
        return {
            name: float((law.simulated <= law.statistic(ranks[None])).double().mean())
            for name, ranks in self.ranks.items()
        }

    def band(self, level: float = 0.95) -> tuple[Tensor, Tensor, Tensor]:
        """Return levels `k / (L + 1)`, and the smallest and largest shares of ranks below each.

        For uniform ranks, all shares are inside at once with a probability of `level`.
        """
        law = _law(*self._sizes)
        gamma = law.simulated.quantile(1 - level)
        inside = 2 * torch.minimum(law.below, law.above) >= gamma
        counts = torch.arange(law.size + 1, dtype=torch.float64, device="cpu")
        lowest = inside.double().argmax(1)
        highest = law.size - inside.flip(1).double().argmax(1)
        return law.levels, counts[lowest] / law.size, counts[highest] / law.size

    def plot(self, ax: Any = None, level: float = 0.95) -> Any:
        """Draw how far the ranks' distribution functions are from the uniform one, with the band.

        Returns:
            The axes.
        """
        ax = axes(ax)
        levels, low, high = self.band(level)
        ax.fill_between(levels, low - levels, high - levels, color="0.85", linewidth=0)
        p_values = self.p_values()
        for name, ranks in self.ranks.items():
            shares = _below(ranks[None], self.num_draws)[0] / len(ranks)
            ax.plot(levels, shares - levels, label=f"{name} (p = {p_values[name]:.2g})")
        ax.set(xlabel="rank / draws", ylabel="share of ranks below, less a uniform's", xlim=(0, 1))
        ax.legend(frameon=False)
        return ax


class _Binomials:
    """The law of numbers of uniform ranks below each level [Säilynoja et al. 2022, eq. 6 to 11]."""

    def __init__(self, size: int, draws: int) -> None:
        self.size = size
        self.levels = torch.arange(1, draws + 1, dtype=torch.float64, device="cpu") / (draws + 1)
        counts = torch.arange(self.size + 1, dtype=torch.float64, device="cpu")
        each = torch.distributions.Binomial(self.size, self.levels[:, None]).log_prob(counts).exp()
        self.below, self.above = each.cumsum(1), each.flip(1).cumsum(1).flip(1)
        uniform = torch.Generator().manual_seed(0)
        ranks = torch.randint(draws + 1, (SIMULATED, self.size), generator=uniform, device="cpu")
        self.simulated = torch.cat([self.statistic(part) for part in ranks.split(100)])

    def statistic(self, ranks: Tensor) -> Tensor:
        """Return the least probability, in both tails, over levels, of each row of ranks."""
        counts = _below(ranks, len(self.levels)).T
        tails = torch.minimum(self.below.gather(1, counts), self.above.gather(1, counts))
        return 2 * tails.amin(0)


_law = lru_cache(8)(_Binomials)


def _below(ranks: Tensor, draws: int) -> Tensor:
    """Return the numbers of ranks below 1, ..., `draws` in each row."""
    counts = torch.zeros(len(ranks), draws + 1, dtype=torch.long, device="cpu")
    counts.scatter_add_(1, ranks, torch.ones_like(ranks))
    return counts.cumsum(1)[:, :-1]


@check.arguments
def sbc(
    make_bnn: Callable[[], SupervisedBNN],
    fit: Callable[[Any, list[tuple[Any, Tensor]]], Any],
    inputs: Inputs,
    functions: Mapping[str, Function] | None = None,
    num_simulations: int = 500,
    *,
    num_draws: int = 99,
    predictive: str | None = None,
    seed: int = 0,
    num_workers: int = 1,
    path: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> SBC:
    """Rank true values among draws from the posteriors of data that the model itself has drawn.

    Weights are drawn from the prior, targets from the likelihood, and the posterior of these is
    fitted. The rank of a function of the outputs at the true weights, among its values at draws
    from the posterior, is uniform if inference is exact and the draws are independent.

    Args:
        make_bnn: makes the BNN, the same each time.
        fit: `fit(bnn, [(inputs, y)])` fits it; a BNN that it returns is used instead. Thin the
            samples of chains, so that draws are independent.
        inputs: the inputs of all simulated data sets, one batch.
        functions: functions from outputs `(n, ...)` and targets to a number, by name; by default
            the outputs' mean. The log-likelihood of the targets is always added, since it detects
            more than single outputs do [Modrak et al. 2023].
        num_simulations: number of simulations.
        num_draws: number `L` of draws from each posterior.
        predictive: `"bnn"`, drawn weights, the default, or `"glm"`, the linearised net at them.
        seed: simulation `i` has the seed `seed + i`, so results do not depend on workers.
        num_workers: processes; for more than one, `make_bnn`, `fit` and `functions` must be
            picklable.
        path: a file that keeps the ranks; simulations that it has are not repeated.
        progress: show a bar; by default on a terminal only.

    Raises:
        NotImplementedError: a prior that cannot be sampled.
        ValueError: nothing to sample; a file of other settings; another predictive, whose draws
            are independent between points.

    References:
        Talts et al. 2018; Säilynoja, Bürkner, Vehtari 2022, for bands and p-values.

    Example:
        >>> import pyro.distributions as dist, torch.nn as nn, tyxe
        >>> def make():
        ...     return tyxe.LaplaceBNN(
        ...         nn.Linear(1, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...         tyxe.likelihoods.HomoskedasticGaussian(20, scale=0.5), structure="full")
        >>> def fit(bnn, data):
        ...     bnn.fit(data, torch.optim.Adam, 10)
        >>> found = sbc(make, fit, torch.linspace(-1, 1, 20)[:, None], num_simulations=4)
        >>> found.ranks["log likelihood"].shape
        torch.Size([4])
    """
    num_simulations = check.count("num_simulations", num_simulations)
    num_draws = check.count("num_draws", num_draws)
    check.count("num_workers", num_workers)
    functions = {"mean output": _mean_output} if functions is None else dict(functions)
    if LOG_LIKELIHOOD in functions:
        raise ValueError(f"{LOG_LIKELIHOOD!r} is among the functions always; choose another name")
    names = (*functions, LOG_LIKELIHOOD)
    through = None if predictive == "bnn" else predictive
    told = {"functions": [*names], "num_draws": num_draws, "seed": seed, "predictive": through}
    done = _kept(path, told)
    one = partial(_simulate, make_bnn, fit, inputs, functions, num_draws, predictive, seed)
    left = [index for index in range(num_simulations) if index not in done]
    with progress_bar(None, "sbc", "simulation", progress) as bar:
        bar.total = len(left)
        for index, ranks in _each(one, left, num_workers):
            done[index] = ranks
            if path is not None:
                files.write(path, {**told, "ranks": done})
            bar.update()
    rows = torch.tensor([done[index] for index in range(num_simulations)], device="cpu")
    return SBC(dict(zip(names, rows.unbind(1), strict=True)), num_draws)


def _mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.double().mean()


def _kept(path: Any, told: Mapping[str, Any]) -> dict[int, list[int]]:
    if path is None or not Path(path).exists():
        return {}
    found = files.read(path)
    saved = found if isinstance(found, dict) else {}
    other = [name for name, value in told.items() if saved.get(name) != value]
    if other:
        raise ValueError(
            f"{path} has no ranks of these settings ({', '.join(other)}): take another file, or "
            "those that sbc has written there"
        )
    return dict(saved["ranks"])


def _each(one: Any, indices: list[int], num_workers: int) -> Iterator[tuple[int, list[int]]]:
    if num_workers == 1:
        for index in indices:
            yield index, one(index)
        return
    # A process that is forked has the locks of threads that it lacks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        running = {pool.submit(one, index): index for index in indices}
        for future in as_completed(running):
            yield running[future], future.result()


def _simulate(
    make_bnn: Any,
    fit: Any,
    inputs: Inputs,
    functions: Mapping[str, Function],
    num_draws: int,
    predictive: str | None,
    seed: int,
    index: int,
) -> list[int]:
    """Return the ranks of one simulation."""
    with torch_rng_kept(seed + index):
        bnn = make_bnn().eval()
        bnn._drawing(predictive or "bnn")  # raises before a fit
        inputs = on_device(inputs, device_for(bnn))
        true, outputs, targets = _from_prior(bnn, inputs)
        fitted = fit(bnn, [(inputs, targets)])
        bnn = bnn if fitted is None else fitted
        with bnn._predicting():
            drawn, latents = bnn._drawing(predictive or "bnn")(inputs, num_draws)

        def values(f: Tensor, own: Mapping[str, Tensor]) -> list[float]:
            found = [float(function(f, targets)) for function in functions.values()]
            each = bnn.likelihood.mixture_log_likelihood(f[None], targets, own)
            return [*found, float(each.double().sum())]

        truth = torch.tensor(values(outputs, true), dtype=torch.float64, device="cpu")
        every = torch.tensor(
            [values(f, {n: v[s : s + 1] for n, v in latents.items()}) for s, f in enumerate(drawn)],
            dtype=torch.float64,
            device="cpu",
        )
        ties = (
            (every == truth)
            & (torch.rand(len(every), 1, device="cpu") < torch.rand(1, device="cpu"))
        ).sum(0)
        return ((every < truth).sum(0) + ties).tolist()


def _from_prior(bnn: SupervisedBNN, inputs: Inputs) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Draw weights, outputs and targets; return the likelihood's own variables of the draw too."""
    check_exposes(bnn, "look at")
    with torch.no_grad(), poutine.trace() as messenger:
        outputs = bnn.model(inputs)
    nodes = messenger.trace.nodes
    own = bnn.likelihood.latent_priors()
    prefix = bnn.likelihood.prefix
    true = {name: nodes[f"{prefix}.{name}"]["value"][None] for name in own}
    return true, outputs, nodes[bnn.likelihood.data_name]["value"]
