"""The tail of importance ratios, which tests an approximation as a density."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor

from tyxe import check
from tyxe.bnn import LaplaceBNN
from tyxe.diagnostics.case import Case
from tyxe.diagnostics.report import ANY, Line
from tyxe.distributions import JointDistribution
from tyxe.guides import Guide
from tyxe.metrics.checks import check_real

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
