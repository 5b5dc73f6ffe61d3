"""The linearised predictive: the net's first-order expansion under a Gaussian posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributions as td
from pyro.infer.autoguide import (
    AutoContinuous,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
)
from torch import Tensor

from tyxe.bnn.batches import check_has_targets
from tyxe.curvature import Group, Linearization, joined, linearized
from tyxe.distributions import center, independent_moments, is_real
from tyxe.guides import Guide, PyroGuide
from tyxe.linalg import Diagonal, LowRank, Operator
from tyxe.poutine import masked_pointwise
from tyxe.predictive import check_link, predict_from_gaussian, sample_outputs

__all__ = [
    "PREDICTIVES",
    "Outputs",
    "glm_outputs",
    "guide_covariance",
    "linearize",
    "linearized_evaluations",
    "linearized_predictions",
]

# From a batch of inputs to mean and covariance of its outputs, `(n, ...)` and `(n, ..., C, C)`.
Outputs = Callable[[Any], tuple[Tensor, Tensor]]

# Samples of outputs cost next to nothing.
FEWEST_SAMPLES = 100


def linearize(bnn: Any, inputs: Any) -> Linearization:
    """Linearise a BNN's net about its posterior's centre, on one batch.

    Args:
        bnn: a `SupervisedBNN`, like all here.
        inputs: a batch.
    """
    values = bnn.mean_values()
    shapes = {name: values[name].shape for name in values if name in bnn.site_names()}
    return linearized(bnn.net, bnn.run_net, values, inputs, shapes, bnn.substituted)


def linearized_predictions(
    bnn: Any,
    gaussian: Outputs,
    batches: Iterable[tuple[Any, Any]],
    link: str,
    count: int,
    aggregate: bool,
) -> list[Any]:
    """Return the prediction of each batch, or samples of its outputs `(count, n, ...)`."""
    check_link(link)
    samples = max(count, FEWEST_SAMPLES)
    latents = bnn.point_latents() if aggregate else {}
    found = []
    for inputs, _ in batches:
        mean, covariance = gaussian(inputs)
        if not aggregate:
            found.append(sample_outputs(mean, covariance, count) if count else mean[None])
        elif count:
            found.append(
                predict_from_gaussian(bnn.likelihood, mean, covariance, link, samples, latents)
            )
        else:
            once = {name: value[None] for name, value in latents.items()}
            found.append(bnn.likelihood.aggregate_predictions(mean[None], 0, once))
    return found


def linearized_evaluations(
    bnn: Any, gaussian: Outputs, batches: Iterable[tuple[Any, Any]], link: str, count: int
) -> tuple[Tensor, Tensor]:
    """Return error and log-likelihood of each point."""
    errors, log_likelihoods = [], []
    latents = bnn.point_latents()
    for inputs, targets in batches:
        check_has_targets(targets)
        (prediction,) = linearized_predictions(bnn, gaussian, [(inputs, None)], link, count, True)
        rows = masked_pointwise(
            bnn.likelihood.data_name, torch.arange(len(targets), device=targets.device)
        )
        if len(rows) < len(targets):
            parts = prediction if isinstance(prediction, tuple) else (prediction,)
            kept = tuple(part[rows] for part in parts)
            prediction, targets = (kept if len(kept) > 1 else kept[0]), targets[rows]
        errors.append(bnn.likelihood.error(prediction, targets))
        log_likelihoods.append(bnn.likelihood.log_likelihood(prediction, targets, "none", latents))
    return torch.cat(errors), torch.cat(log_likelihoods)


def guide_covariance(guide: Any, groups: list[Group]) -> Operator:
    """Return the covariance of a Normal guide, over the weights of all groups in their order.

    Args:
        guide: a mean-field guide, or one of Pyro's with a joint Normal.
        groups: of the linearised net.

    Raises:
        TypeError: it is no Normal guide.
    """
    inner = guide.guide if isinstance(guide, PyroGuide) else guide
    if isinstance(inner, AutoContinuous):
        _check_support(inner)
    if isinstance(inner, AutoDiagonalNormal):
        return Diagonal(_in_order(inner, groups, inner.get_posterior().variance))
    if isinstance(inner, AutoLowRankMultivariateNormal | AutoMultivariateNormal):
        joint = inner.get_posterior()
        root = joint.cov_factor if isinstance(joint, td.LowRankMultivariateNormal) else None
        factor = joint.scale_tril if root is None else root
        spread = torch.zeros_like(joint.mean) if root is None else joint.cov_diag
        columns = [_in_order(inner, groups, column) for column in factor.mT]
        return LowRank(_in_order(inner, groups, spread), torch.stack(columns, 1))
    variances = {}
    for name, q in _factorized(guide).items():
        moments = independent_moments(q)
        if moments is None or center(q) is None:
            raise TypeError(
                f"the posterior of {name!r} is no Normal, so the net cannot be linearised under "
                "it: predict with predictive='bnn', or use tyxe.guides.AutoNormal"
            )
        variances[name] = moments[1].to(moments[0].dtype)
    return Diagonal(joined(groups, variances))


def _check_support(guide: AutoContinuous) -> None:
    """Raise where the joint Normal is one of transformed weights."""
    for name, node in guide.prototype_trace.iter_stochastic_nodes():
        if not is_real(node["fn"].support):
            raise TypeError(
                f"the posterior of {name!r} is no Normal, but one transformed to the support "
                f"{node['fn'].support}: predict with predictive='bnn'"
            )


def _factorized(guide: Any) -> dict[str, td.Distribution]:
    if isinstance(guide, Guide):
        return guide.posterior()
    prefix: str = guide.prefix
    found: dict[str, td.Distribution] = guide.get_detached_distributions()
    return {prefix + name: q for name, q in found.items()}


def _in_order(guide: Any, groups: list[Group], vector: Tensor) -> Tensor:
    """Rearrange a vector over a Pyro guide's joint variable."""
    values = {site["name"]: part for site, part in guide._unpack_latent(vector)}
    return joined(groups, values)


def glm_outputs(bnn: Any, inputs: Any) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of outputs under the posterior, in the linearised net.

    Args:
        bnn: a `SupervisedBNN`.
        inputs: a batch.
    """
    linear = linearize(bnn, inputs)
    with torch.no_grad():
        return linear.outputs.detach(), bnn.output_covariance(linear).detach()


# Predictives other than draws of the weights, by name.
PREDICTIVES: dict[str, Callable[[Any, Any], tuple[Tensor, Tensor]]] = {"glm": glm_outputs}
