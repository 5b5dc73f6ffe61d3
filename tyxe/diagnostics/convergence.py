"""Whether an inference has found the posterior: the tail of importance ratios; mixed chains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributions as td
from pyro.ops.stats import effective_sample_size, split_gelman_rubin
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tyxe import check
from tyxe.bnn import MCMC_BNN, LaplaceBNN
from tyxe.diagnostics.report import ANY, Case, Line, above, below
from tyxe.distributions import JointDistribution
from tyxe.guides import Guide
from tyxe.metrics.checks import check_real
from tyxe.samplers.hamiltonian import Hamiltonian

FEWEST = 5
# Points times weights times parts up to which log-ratios of draws are computed.
AFFORDABLE = 10**8
# Weights of a site up to which k-hat can say something, and draws for it.
TELLING, NUM_RATIOS = 300, 100


def pareto_k(log_ratios: Tensor) -> float:
    """Return the shape of the generalised Pareto distribution that the largest ratios follow.

    Above 1/2 the ratios have no variance, above 1 no mean. Below 0.7 importance sampling by the
    approximation works with a usual number of draws. In hundreds of dimensions it is above 0.7 for
    nearly every approximation, which then says nothing about its predictions. It is minus infinity
    if the largest ratios differ only by rounding, as for an exact posterior, and infinity if fewer
    than five do not vanish next to the largest.

    Args:
        log_ratios: `log p(w_s, D) - log q(w_s)` of draws from `q`, up to a constant, `(S,)`.

    Raises:
        ValueError: fewer than 25 ratios, or ratios that are not finite.

    References:
        Yao, Vehtari, Simpson, Gelman 2018, Yes, but did it work?; Vehtari et al. 2024, Pareto
        smoothed importance sampling; Zhang and Stephens 2009, for the estimate.

    Example:
        >>> pareto_k(torch.arange(1, 1000) / 1000 * 0) < 0.1
        True
    """
    ratios = check_real("log_ratios", log_ratios).double()
    check.shape("log_ratios", ratios, ("S",))
    check.numbers("log_ratios", ratios, "finite numbers")
    size = check.count("the number of log_ratios", len(ratios), 25, ", better 1,000")
    tail = math.ceil(min(0.2 * size, 3 * size**0.5))
    # As logarithms below the largest.
    values = (ratios - ratios.max()).sort().values
    threshold = float(values[-tail - 1])
    rounding = 8 * torch.finfo(log_ratios.dtype).eps * max(1.0, float(ratios.abs().max()))
    if -threshold <= rounding:
        return -math.inf
    excess = (values[-tail:].exp() - math.exp(threshold)).clamp_min(0)
    smallest = torch.finfo(excess.dtype).tiny
    excess = excess[excess > smallest]
    is_underflow = threshold < math.log(smallest)
    return math.inf if is_underflow and len(excess) < FEWEST else _shape(excess / excess[-1])


def _shape(excess: Tensor) -> float:
    """Return the shape by the quasi-Bayesian estimate of Zhang and Stephens, shrunk to 1/2.

    Args:
        excess: what ratios have above a threshold, increasing up to 1.
    """
    count = len(excess)
    points = 30 + int(count**0.5)
    grid = torch.arange(1, points + 1, dtype=torch.float64, device=excess.device)
    quartile = excess[(count + 2) // 4 - 1]
    theta = 1 + (1 - (points / (grid - 0.5)).sqrt()) / (3 * quartile)
    shapes = torch.log1p(-theta[:, None] * excess).mean(1)
    # Its limit where theta is 0, of exponential tails.
    rate = torch.where(theta == 0, 1 / excess.mean(), -theta / shapes)
    profile = count * (rate.log() - shapes - 1)
    best = (profile.softmax(0) * theta).sum()
    shape = float(torch.log1p(-best * excess).mean())
    return (shape * count + 0.5 * 10) / (count + 10)


# ------------------------------------------------------------------- the check of a diagnosis


def tails(case: Case) -> Iterator[Line]:
    """Take k-hat of each part of the posterior that is small enough, others at their centre."""
    bnn = case.bnn
    guide = getattr(bnn, "net_guide", None)
    size = sum(shape.numel() for shape in bnn._site_shapes().values())
    if guide is None or bnn.likelihood.latent_priors():
        return
    prefix = bnn.net_prior.prefix
    priors = {prefix + name: prior for name, prior in bnn.net_prior.priors()}
    if not all(isinstance(prior, td.Distribution) for prior in priors.values()):
        return
    parts = {n: q for n, q in _parts(bnn).items() if q.event_shape.numel() <= TELLING}
    if len(parts) * size * bnn.likelihood.dataset_size > AFFORDABLE:
        return
    found = {
        name.removeprefix(prefix): pareto_k(_log_ratios(case, name, q, priors))
        for name, q in parts.items()
    }
    if found:
        # Without a verdict: above .7, as for most guides, it says nothing about predictions.
        yield Line.of_parts("k-hat, below 0.7 for a good density", found, ANY, ANY, "")


def _parts(bnn: Any) -> dict[str, td.Distribution]:
    """Return a posterior's independent parts, by site's joint name, or one over all."""
    guide = bnn.net_guide
    if isinstance(bnn, LaplaceBNN):
        return {"all": bnn.state.posterior()}
    if isinstance(guide, Guide):
        joints = {joint.name: joint for joint in guide.joints()}
        coupled = {name for joint in joints.values() for name in joint.names}
        alone = {n: q for n, q in guide.posterior().items() if n not in coupled}
        return {**joints, **alone}
    joint = guide.joint_normal()
    if joint is not None:
        return {"all": joint}
    return dict(guide.independent_normals() or {})


@torch.no_grad()
def _log_ratios(case: Case, name: str, q: td.Distribution, priors: Mapping[str, Any]) -> Tensor:
    """Return `log p(D, w) - log q(w)` at draws of a part, up to a constant, in nats."""
    centre, joints, ratios = case.bnn._mean_values(), case.bnn.net_prior.joints(), []
    for _ in range(NUM_RATIOS):
        drawn = q.sample()
        values = q.unflatten(drawn) if isinstance(q, JointDistribution) else {name: drawn}
        whole = {**centre, **values}
        # A prior over several sites takes the others' values too.
        couples = [p for p in joints if not values.keys().isdisjoint(p.names)]
        alone = values.keys() - {n for p in couples for n in p.names}
        prior = sum(float(priors[n].log_prob(values[n]).sum()) for n in alone)
        prior += sum(float(p.log_prob(p.flatten(whole))) for p in couples)
        ratio = _log_likelihood(case, whole) + prior
        ratios.append(ratio - float(q.log_prob(drawn).sum()))
    return torch.tensor(ratios, dtype=drawn.dtype, device="cpu")


def _log_likelihood(case: Case, values: dict[str, Tensor]) -> float:
    """Return the log-likelihood of the training data at weights, as fits scale it, in nats."""
    bnn, total, points = case.bnn, 0.0, 0.0
    factor = bnn.likelihood.dataset_size / getattr(bnn, "temperature", 1.0)
    with bnn._predicting():
        for inputs, targets in case.to_fit:
            outputs = bnn._run_net(values, inputs)
            total += float(bnn.likelihood.log_likelihood(outputs, targets, reduction="sum"))
            points += float(bnn.likelihood.count(targets))
    return factor * total / points


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
