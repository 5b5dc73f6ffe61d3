"""Have chains mixed, in what the net returns and in the log joint."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tyxe.bnn import MCMC_BNN
from tyxe.diagnostics.case import Case
from tyxe.diagnostics.report import Line, above, below
from tyxe.samplers.hamiltonian import Hamiltonian


def chains(case: Case) -> Iterator[Line]:
    """Look at the chains of an `MCMC_BNN`, in the net's outputs and the log joint."""
    bnn = case.bnn
    if not isinstance(bnn, MCMC_BNN):
        return
    bnn.get_samples()
    samples = dict(bnn.samples.items())
    moved = torch.stack([(v != v[:, :1]).flatten(1).any(1) for v in samples.values()]).any(0)
    yield Line(
        "chains that never moved",
        float((~moved).sum()),
        below(0.0),
        below(0.0),
        "every proposal was rejected: take a smaller step_size, or warm up longer",
    )
    count, length = next(iter(samples.values())).shape[:2]
    outputs = bnn.predict(case.held_out[:1], num_predictions=count * length, aggregate=False)
    if length >= 4:  # split chains have two halves of two
        parts = [t.unflatten(0, (count, length)).flatten(2).double() for t in tree_leaves(outputs)]
        every = torch.cat(parts, -1)
        is_masked = every.isneginf().flatten(0, 1).all(0)  # as logits of classes are by a net
        yield from _of_mixing("held-out outputs", every[..., ~is_masked])
    run = bnn._chains
    if run is None:
        return
    kernel, statistics = run.run.kernel, run.statistics
    if isinstance(kernel, Hamiltonian):
        yield Line(
            "share of divergent transitions",
            float(statistics["diverged"].double().mean()),
            below(0.0),
            below(0.01),
            "raise target_accept_prob, warm up longer, or take a prior that bounds scales away "
            "from zero",
        )
        size = sum(v[0, 0].numel() for v in samples.values())
        energy = size / (size / 2 + run.potentials.double().var(1))
        yield Line(
            "energy's Bayesian fraction of missing information",
            float(energy.min()),
            above(0.3),
            above(0.1),
            "momenta change the energy too little: reparametrise, or use lighter-tailed priors",
        )
    if not kernel.takes_batches and length >= 4:
        yield from _of_mixing("log joint", run.potentials.double()[..., None])


def _of_mixing(what: str, values: Tensor) -> Iterator[Line]:
    """Return the largest split R-hat and least effective sample size of `(chains, S, ...)`."""
    more = "take more samples and warm-up steps: fit(..., num_samples, warmup_steps=)"
    r_hat = split_gelman_rubin(values, chain_dim=0, sample_dim=1)
    worst = math.inf if not bool(r_hat.isfinite().all()) else float(r_hat.max())
    yield Line(f"R-hat of {what}", worst, below(1.01), below(1.1), more)
    effective = effective_sample_size(values, chain_dim=0, sample_dim=1)
    least = float(effective.nan_to_num(0.0).min())
    yield Line(f"effective samples of {what}", least, above(100.0), above(20.0), more)
