"""The one objective: data term and KL of any guide with any model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyro.distributions as dist
import pyro.poutine as poutine
import torch
import torch.distributions as td
from pyro.distributions.util import scale_and_mask
from pyro.poutine import Trace
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from tyxe.bnn.coupled import kl_of_coupled, not_in_model, site_value
from tyxe.distributions import (
    JointDistribution,
    JointPart,
    independent_moments,
    joins,
    joint_kl,
    known_entropy,
    log_density,
)
from tyxe.poutine import Draw

__all__ = ["ElboTerms", "check_gradients", "elbo_terms"]


class ElboTerms(NamedTuple):
    """One estimate of the two terms of the ELBO, `data - kl`.

    Attributes:
        data: expected log-likelihood, nats, scaled to the whole data set.
        kl: divergence of the guide from the prior, nats.
        points: number of data points of the batch that counted.
        values: the guide's draws by site.
    """

    data: Tensor
    kl: Tensor
    points: int
    values: dict[str, Tensor]


def elbo_terms(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    closed_form_kl: bool = True,
    **kwargs: Any,
) -> ElboTerms:
    r"""Estimate both terms of the ELBO from one draw of the guide.

    `sum_n E_q log p(y_n | f(x_n, w)) - KL(q || p)` [T 4.6, VL 10]. Scales and masks that plates
    and other handlers put on a site multiply its terms. For each latent site the KL is the closed
    form, if `torch.distributions.kl` knows the pair, else `log q(w) - log p(w)` at the draw; sites
    that a `JointDistribution` couples, as posterior or prior, have one KL together. Nothing is
    computed that is not used: the log-probability of a site with a closed form never is. The sum
    equals Pyro's `Trace_ELBO` (without closed forms) and `TraceMeanField_ELBO` on the same draws;
    but for deltas, whose log-density the latter forgets: Pyro's autoguides on constrained sites get
    the right Jacobian here.

    Args:
        model: a Pyro program with observed sites.
        guide: a Pyro program that samples the model's latent sites.
        args: passed to both.
        closed_form_kl: use closed forms at all.
        kwargs: passed to both.

    Returns:
        The terms; both differentiable in the parameters of model and guide.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model():
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(0.5))
        >>> def guide():
        ...     pyro.sample("w", dist.Normal(0.5, 0.5))
        >>> elbo_terms(model, guide).kl
        tensor(0.4431)
    """
    guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
    model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
    latents = _samples(guide_trace, observed=False)
    _check_guide(latents, closed_form_kl)
    data, count = _data_term(model_trace)
    pairs = {name: (site, model_trace.nodes.get(name)) for name, site in latents}
    kl = _sum_of_kls(pairs, closed_form_kl)
    for name, _ in _samples(model_trace, observed=False):
        if name not in guide_trace.nodes:
            raise ValueError(
                f"the guide does not sample {name!r}; it samples "
                f"{', '.join(n for n, _ in latents) or 'nothing'}"
            )
    values = {name: site["value"] for name, site in latents}
    check_gradients(values)
    return ElboTerms(data, torch.as_tensor(kl), count, values)


def _samples(trace: Trace, observed: bool) -> list[tuple[str, Any]]:
    return [
        (name, site)
        for name, site in trace.nodes.items()
        if site["type"] == "sample"
        and site["is_observed"] == observed
        and not site_is_subsample(site)
    ]


def _log_prob(site: Any) -> Tensor:
    log_prob = site["fn"].log_prob(site_value(site))
    return scale_and_mask(log_prob, site["scale"], site["mask"]).sum()


def _data_term(trace: Trace) -> tuple[Tensor, int]:
    total: Any = 0.0
    count = 0
    observed = _samples(trace, observed=True)
    for _, site in observed:
        total = total + _log_prob(site)
        # Without a batch it is the only datum, or a net's own factor or deterministic site.
        alone = 1 if len(observed) == 1 else 0
        rows = site["fn"].batch_shape[-1] if site["fn"].batch_shape else alone
        count += int(site["mask"].sum()) if isinstance(site["mask"], Tensor) else rows
    return torch.as_tensor(total), count


def check_gradients(values: Mapping[str, Tensor]) -> None:
    """Raise if gradients are recorded, and a lazy draw was made whose value has none.

    Args:
        values: draws by site, after the net has consumed them.

    Raises:
        ValueError: there is one.
    """
    for name, value in values.items():
        if torch.is_grad_enabled() and isinstance(value, Draw) and value.lost_its_gradient:
            raise ValueError(
                f"a value of {name!r} was drawn, and its distribution has no rsample, so no "
                "gradient reaches its parameters: only linear maps under tyxe.poutine."
                "local_reparameterization() spare the draw. For other uses of a binary weight "
                "(norms, embeddings, recurrent cells, hold_sample) train with "
                "AutoBernoulli(relaxed=0.5), or hide the parameter from the prior"
            )


def _check_guide(sites: list[tuple[str, Any]], closed_form_kl: bool) -> None:
    """Raise where the estimate would be wrong without a word."""
    for name, site in sites:
        q = site["fn"]
        if not (q.has_rsample or isinstance(site["value"], Draw)) and torch.is_grad_enabled():
            mend = "use one that has"
            if independent_moments(q) is not None:
                mend = "train inside `with tyxe.poutine.local_reparameterization():`"
            raise ValueError(
                f"the guide's distribution of {name!r}, {type(q).__name__}, has no rsample, so "
                f"no gradient reaches its parameters; {mend}"
            )
        if not closed_form_kl and q.support.is_discrete:
            raise ValueError(
                f"{name!r} is discrete, and its KL cannot be sampled with gradients; leave "
                "closed_form_kl=True"
            )
    joint = {n for _, site in sites if _is_joint(site) for n in (site["name"], *site["fn"].names)}
    rest = [site for name, site in sites if name not in joint]
    auxiliary = [site["scale"] for site in rest if site["infer"].get("is_auxiliary")]
    scales = [site["scale"] for site in rest]
    if auxiliary and any(scale is not scales[0] and scale != scales[0] for scale in scales):
        raise ValueError(
            "this guide draws its sites from a variable of its own, so their KL cannot be scaled "
            "one by one; use tyxe.guides.AutoNormal with selective_scale"
        )


def _is_joint(site: Any) -> bool:
    return isinstance(site["fn"], JointDistribution) and bool(site["infer"].get("is_auxiliary"))


def _closed_form(guide_site: Any, prior: Any) -> Tensor | None:
    """The KL of a pair that is known, or with a known entropy and a sampled cross-entropy."""
    q = guide_site["fn"]
    if isinstance(q, dist.Delta):
        # Pyro's closed form forgets the log-density: the Jacobian of a site's transform.
        return q.log_density - log_density(prior, site_value(guide_site))
    try:
        return td.kl_divergence(q, prior)
    except NotImplementedError:
        entropy = known_entropy(q)
        return None if entropy is None else -entropy - prior.log_prob(site_value(guide_site))


def _sum_of_kls(pairs: dict[str, tuple[Any, Any]], closed_form_kl: bool) -> Any:
    """The KL of all sites, those that can be taken together first."""
    joint: list[Any] = []
    total: Any = 0.0
    rest = dict(pairs)
    joint_sites = [site for site, _ in pairs.values() if _is_joint(site)]
    for names in _coupled(pairs):
        members = {name: rest.pop(name) for name in pairs if name in names}
        coupling = [site for site in joint_sites if names.issuperset(site["fn"].names)]
        for site in coupling:
            del rest[site["name"]]
        total = total + kl_of_coupled(coupling, members, closed_form_kl)
    for guide_site, model_site in rest.values():
        one = _joins(guide_site, model_site) if closed_form_kl else None
        if one is None:
            total = total + _site_kl(guide_site, model_site, closed_form_kl)
        else:
            joint.append((guide_site["fn"], one))
    return total + joint_kl(joint) if joint else total


def _coupled(pairs: dict[str, tuple[Any, Any]]) -> list[set[str]]:
    """Sites that a joint posterior or prior puts together, or one after the other."""
    found: list[set[str]] = []
    for site, model_site in pairs.values():
        names: set[str] = set()
        if _is_joint(site):
            names.update(site["fn"].names)
        if model_site is not None and isinstance(model_site["fn"], JointPart):
            names.update(model_site["fn"].joint.names)
        if names:
            met = [other for other in found if other & names]
            found = [other for other in found if not other & names]
            found.append(names.union(*met))
    return found


def _joins(guide_site: Any, model_site: Any) -> Any:
    scale, mask = guide_site["scale"], guide_site["mask"]
    counts_once = isinstance(scale, float) and scale == 1.0 and (mask is None or mask is True)
    return joins(guide_site["fn"], model_site["fn"]) if model_site and counts_once else None


def _site_kl(guide_site: Any, model_site: Any, closed_form_kl: bool) -> Tensor:
    if model_site is None:
        if not guide_site["infer"].get("is_auxiliary"):
            raise not_in_model(guide_site["name"])
        # An auxiliary variable of the guide, such as the joint vector of Pyro's autoguides.
        return _log_prob(guide_site)
    if closed_form_kl:
        kl = _closed_form(guide_site, model_site["fn"])
        if kl is not None:
            return scale_and_mask(kl, guide_site["scale"], guide_site["mask"]).sum()
    return _log_prob(guide_site) - _log_prob(model_site)
