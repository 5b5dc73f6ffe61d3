"""The terms of the ELBO, expected log-likelihood and KL, for any guide and model."""

from __future__ import annotations

import math
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

from tyxe.distributions import (
    IndependentSites,
    JointDistribution,
    independent_moments,
    known_entropy,
)
from tyxe.distributions.joint import JointSite
from tyxe.distributions.normal_kl import fusable, fused_kl, log_density
from tyxe.poutine import Draw

# A site of the guide, and the model's site of the same name.
Pair = tuple[Any, Any]


class ElboTerms(NamedTuple):
    """One estimate of the two terms of the ELBO, `data - kl`.

    Attributes:
        data: expected log-likelihood, in nats, scaled to the whole data set.
        kl: divergence of the guide from the prior, in nats.
        points: number of data points of the batch that count: a sum, where there are weights.
        values: the guide's draws by site.
    """

    data: Tensor
    kl: Tensor
    points: int | Tensor
    values: dict[str, Tensor]


def elbo_terms(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    closed_form_kl: bool = True,
    **kwargs: Any,
) -> ElboTerms:
    """Estimate both terms of the ELBO from one draw of the guide.

    `sum_n E_q log p(y_n | f(x_n, w)) - KL(q || p)` [T 4.6, VL 10]. The terms of a site are scaled
    and masked as by plates and other handlers. The KL of a latent site is in closed form where
    `torch.distributions.kl` knows the pair, else `log q(w) - log p(w)` at the draw; sites that a
    `JointDistribution` couples, as posterior or prior, have one KL together. The result equals that
    of Pyro's `Trace_ELBO` (without closed forms) and `TraceMeanField_ELBO` on the same draws,
    except that the latter leaves out the log-density of deltas, which has the Jacobians of Pyro's
    autoguides on constrained sites.

    The terms are differentiable in the parameters of model and guide.

    Args:
        model: a Pyro program with observed sites, called with `args` and `kwargs`.
        guide: a Pyro program that samples the model's latent sites, called with the same.
        closed_form_kl: use closed forms of the KL where they exist.

    Raises:
        ValueError: guide and model have different sites; a distribution lacks the rsample that
            gradients need; a sampled KL of a discrete site; coupled sites with different scales.

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
    # A program that is wrapped in a trace raises other errors than its own, with a table of shapes.
    with poutine.trace() as guide_messenger:
        guide(*args, **kwargs)
    guide_trace = guide_messenger.trace
    with poutine.trace() as model_messenger, poutine.replay(trace=guide_trace):
        model(*args, **kwargs)
    model_trace = model_messenger.trace
    latents = _samples(guide_trace, observed=False)
    _check_guide(latents, closed_form_kl)
    data, count = data_term(model_trace)
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


def _log_prob(site: Any, is_bounded: bool = False) -> Tensor:
    """Return a site's log-density; with `is_bounded`, minus infinity outside of its support."""
    fn, value = site["fn"], _value(site)
    log_prob = fn.log_prob(value)
    if is_bounded:  # a target is found to be wrong where the loss is looked at, not sooner
        log_prob = log_prob.where(fn.support.check(value), -math.inf)
    return scale_and_mask(log_prob, site["scale"], site["mask"]).sum()


def data_term(trace: Trace) -> tuple[Tensor, int | Tensor]:
    """Return the log-density of a trace's observed sites, and the number of their points."""
    total: Any = 0.0
    count: Any = 0
    observed = _samples(trace, observed=True)
    for _, site in observed:
        total = total + _log_prob(site, site["infer"].get("is_bounded", False))
        # Without a batch, a site is the only data point, or a factor or deterministic site.
        alone = 1 if len(observed) == 1 else 0
        rows = site["fn"].batch_shape[-1] if site["fn"].batch_shape else alone
        rows = site["mask"].sum() if isinstance(site["mask"], Tensor) else rows
        count = count + site["infer"].get("points", rows)
    return torch.as_tensor(total), count


def check_gradients(values: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if gradients are recorded and the value of a lazy draw has none.

    `values` are draws by site, after the net has used them.
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
    """Raise where the estimate, or its gradient, would be silently wrong."""
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
    """Return the KL in closed form, or from a known entropy and a sampled cross-entropy."""
    q = guide_site["fn"]
    if isinstance(q, dist.Delta):
        # Pyro's closed form leaves out the log-density, the Jacobian of a site's transform.
        return q.log_density - log_density(prior, _value(guide_site))
    try:
        return td.kl_divergence(q, prior)
    except NotImplementedError:
        entropy = known_entropy(q)
        return None if entropy is None else -entropy - prior.log_prob(_value(guide_site))


def _sum_of_kls(pairs: dict[str, tuple[Any, Any]], closed_form_kl: bool) -> Any:
    """Return the KL of all sites, with the fusable ones computed together."""
    fused: list[Any] = []
    total: Any = 0.0
    rest = dict(pairs)
    joint_sites = [site for site, _ in pairs.values() if _is_joint(site)]
    for names in _coupled(pairs):
        members = {name: rest.pop(name) for name in pairs if name in names}
        coupling = [site for site in joint_sites if names.issuperset(site["fn"].names)]
        for site in coupling:
            del rest[site["name"]]
        total = total + _kl_of_coupled(coupling, members, closed_form_kl)
    for guide_site, model_site in rest.values():
        one = _fusable(guide_site, model_site) if closed_form_kl else None
        if one is None:
            total = total + _site_kl(guide_site, model_site, closed_form_kl)
        else:
            fused.append((guide_site["fn"], one))
    return total + fused_kl(fused) if fused else total


def _coupled(pairs: dict[str, tuple[Any, Any]]) -> list[set[str]]:
    """Return sets of sites that joint posteriors or priors couple, directly or by other sites."""
    found: list[set[str]] = []
    for site, model_site in pairs.values():
        names: set[str] = set()
        if _is_joint(site):
            names.update(site["fn"].names)
        if model_site is not None and isinstance(model_site["fn"], JointSite):
            names.update(model_site["fn"].joint.names)
        if names:
            met = [other for other in found if other & names]
            found = [other for other in found if not other & names]
            found.append(names.union(*met))
    return found


def _fusable(guide_site: Any, model_site: Any) -> Any:
    scale, mask = guide_site["scale"], guide_site["mask"]
    counts_once = isinstance(scale, float) and scale == 1.0 and (mask is None or mask is True)
    return fusable(guide_site["fn"], model_site["fn"]) if model_site and counts_once else None


def _site_kl(guide_site: Any, model_site: Any, closed_form_kl: bool) -> Tensor:
    if model_site is None:
        if not guide_site["infer"].get("is_auxiliary"):
            raise _not_in_model(guide_site["name"])
        # Such as the joint vector of Pyro's autoguides.
        return _log_prob(guide_site)
    if closed_form_kl:
        kl = _closed_form(guide_site, model_site["fn"])
        if kl is not None:
            return scale_and_mask(kl, guide_site["scale"], guide_site["mask"]).sum()
    return _log_prob(guide_site) - _log_prob(model_site)


# --------------------------------------------------------------------------- coupled sites


def _value(site: Any) -> Tensor:
    """Return the value of a traced site."""
    # Drawn without telling handlers, because this is not a use of the weight in the net.
    value: Tensor = site["value"]
    return value.value() if isinstance(value, Draw) else value


def _not_in_model(name: str) -> ValueError:
    """Return the error for a site that only the guide has."""
    return ValueError(
        f"the guide samples {name!r}, which the model does not have; after a change of prior that "
        "adds or drops variables, build the BNN anew"
    )


def _kl_of_coupled(
    coupling: list[Any], members: Mapping[str, Pair], closed_form_kl: bool
) -> Tensor:
    """Return the one KL of sites that a joint posterior or prior couples, in nats.

    A closed form, which leaves lazy draws lazy, needs one posterior of all sites, joint or a
    product, and likewise one prior. Otherwise the KL is estimated at the draw. `coupling` are the
    guide's auxiliary sites with joint distributions.
    """
    for name, (_, model_site) in members.items():
        if model_site is None:
            raise _not_in_model(name)
    scale, mask = _common_scale(members)
    kl = None
    if closed_form_kl:
        q, p = _posterior(coupling, members), _prior(members)
        try:
            kl = None if q is None or p is None else td.kl_divergence(q, p)
        except NotImplementedError:
            kl = None
    if kl is None:
        kl = _log_posterior(coupling, members, closed_form_kl) - _log_prior(members)
    return scale_and_mask(kl, scale, mask).sum()


def _common_scale(members: Mapping[str, Pair]) -> tuple[Any, Any]:
    sites = [site for site, _ in members.values()]
    scale, mask = sites[0]["scale"], sites[0]["mask"]
    if any(other["scale"] != scale or other["mask"] is not mask for other in sites):
        raise ValueError(
            f"the posterior or the prior of {', '.join(members)} is one, so their KL cannot be "
            "scaled one by one: expose all of them, or use tyxe.guides.AutoNormal with "
            "selective_scale, and a prior over each site"
        )
    return scale, mask


def _joint_priors(members: Mapping[str, Pair]) -> dict[int, JointDistribution]:
    parts = [model_site["fn"] for _, model_site in members.values()]
    return {id(part.joint): part.joint for part in parts if isinstance(part, JointSite)}


def _whole(
    joints: list[JointDistribution], sites: dict[str, Any]
) -> JointDistribution | IndependentSites | None:
    """Return the distribution of all sites if it is one joint, or a product over sites."""
    if not joints:
        return IndependentSites({name: site["fn"] for name, site in sites.items()})
    one = joints[0]
    return one if len(joints) == 1 and set(one.names) == set(sites) else None


def _posterior(coupling: list[Any], members: Mapping[str, Pair]) -> Any:
    sites = {name: site for name, (site, _) in members.items()}
    return _whole([site["fn"] for site in coupling], sites)


def _prior(members: Mapping[str, Pair]) -> Any:
    sites = {name: site for name, (_, site) in members.items()}
    return _whole(list(_joint_priors(members).values()), sites)


def _log_posterior(
    coupling: list[Any], members: Mapping[str, Pair], known_entropies: bool
) -> Tensor:
    held = {name for site in coupling for name in site["fn"].names}
    terms = [site["fn"].log_prob(_value(site)).sum() for site in coupling]
    for name, (site, _) in members.items():
        if name not in held:
            entropy = known_entropy(site["fn"]) if known_entropies else None
            density = site["fn"].log_prob(_value(site)) if entropy is None else -entropy
            terms.append(density.sum())
    return torch.stack(terms).sum()


def _log_prior(members: Mapping[str, Pair]) -> Tensor:
    joints = _joint_priors(members).values()
    held = {name for joint in joints for name in joint.names}
    values = {name: _value(site) for name, (site, _) in members.items()}
    terms = [joint.log_prob(joint.flatten(values)).sum() for joint in joints]
    for name, (_, site) in members.items():
        if name not in held:
            terms.append(site["fn"].log_prob(values[name]).sum())
    return torch.stack(terms).sum()
