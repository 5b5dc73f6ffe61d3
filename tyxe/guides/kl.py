"""The KL of a guide's sites from those of a model, one by one or together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pyro.distributions as dist
import torch
import torch.distributions as td
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from tyxe.distributions import IndependentSites, JointDistribution, known_entropy
from tyxe.distributions.joint import JointSite
from tyxe.distributions.normal import PrunedNormal, gaussian_event
from tyxe.distributions.normal_kl import fusable, fused_kl, log_density
from tyxe.poutine import Draw
from tyxe.poutine.selective import masked_within
from tyxe.util import without_events

# A site of the guide, and the model's site of the same name.
Pair = tuple[Any, Any]


def value_of(site: Any) -> Tensor:
    """Return the value of a traced site."""
    # Drawn without telling handlers, because this is not a use of the weight in the net.
    value: Tensor = site["value"]
    return value.value() if isinstance(value, Draw) else value


def log_prob_of(site: Any) -> Tensor:
    """Return a site's log-density; if it `is_bounded`, minus infinity outside of its support."""
    fn, value = site["fn"], value_of(site)
    log_prob = fn.log_prob(value)
    if site["infer"].get("is_bounded"):
        # A target is found to be wrong where the loss is looked at, not sooner.
        log_prob = log_prob.where(fn.support.check(value), -math.inf)
    return scale_and_mask(log_prob, site["scale"], site["mask"]).sum()


def is_joint(site: Any) -> bool:
    """Whether a site of the guide is a draw of several sites together."""
    return isinstance(site["fn"], JointDistribution) and bool(site["infer"].get("is_auxiliary"))


def _closed_form(guide_site: Any, prior: Any) -> Tensor | None:
    """Return the KL in closed form, or from a known entropy and a sampled cross-entropy.

    Distributions that are registered as Gaussians have the closed form of these.
    """
    q = guide_site["fn"]
    if isinstance(q, dist.Delta):
        # Pyro's closed form leaves out the log-density, the Jacobian of a site's transform.
        return q.log_density - log_density(prior, value_of(guide_site))
    try:
        return td.kl_divergence(q, prior)
    except NotImplementedError:
        dims = max(len(q.event_shape), len(prior.event_shape))
        mine, theirs = gaussian_event(q, dims), gaussian_event(prior, dims)
        if mine is not None and theirs is not None:
            return td.kl_divergence(mine, theirs)
        entropy = known_entropy(q)
        return None if entropy is None else -entropy - prior.log_prob(value_of(guide_site))


def sum_of_kls(pairs: dict[str, Pair], closed_form_kl: bool) -> Any:
    """Return the KL of all sites, the fusable ones together."""
    fused: list[Any] = []
    total: Any = 0.0
    for name, (guide_site, model_site) in pairs.items():
        if model_site is None and not guide_site["infer"].get("is_auxiliary"):
            raise ValueError(
                f"the guide samples {name!r}, which the model does not have; after a change of "
                "prior that adds or drops variables, build the BNN anew"
            )
    rest = dict(pairs)
    joint_sites = [site for site, _ in pairs.values() if is_joint(site)]
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


def _coupled(pairs: dict[str, Pair]) -> list[set[str]]:
    """Return sets of sites that joint posteriors or priors couple, directly or by other sites."""
    found: list[set[str]] = []
    for site, model_site in pairs.values():
        names: set[str] = set()
        if is_joint(site):
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
    if model_site is None:  # such as the joint vector of Pyro's autoguides
        return log_prob_of(guide_site)
    if closed_form_kl:
        kl = _closed_form(guide_site, model_site["fn"])
        if kl is not None:
            return scale_and_mask(kl, guide_site["scale"], guide_site["mask"]).sum()
    q, p = guide_site["fn"], model_site["fn"]
    if isinstance(q, PrunedNormal) and without_events(p).batch_shape == q.kept.shape:
        model_site = {**model_site, "fn": masked_within(p, q.kept)}
    return log_prob_of(guide_site) - log_prob_of(model_site)


# --------------------------------------------------------------------------- coupled sites


def _kl_of_coupled(
    coupling: list[Any], members: Mapping[str, Pair], closed_form_kl: bool
) -> Tensor:
    """Return the one KL of sites that a joint posterior or prior couples, in nats.

    A closed form, which leaves lazy draws lazy, needs one posterior of all sites, joint or a
    product, and likewise one prior. Otherwise the KL is estimated at the draw. `coupling` are the
    guide's auxiliary sites with joint distributions.
    """
    scale, mask = _common_scale(members)
    priors = [model_site["fn"] for _, model_site in members.values()]
    joint_priors = {id(p.joint): p.joint for p in priors if isinstance(p, JointSite)}
    q = _parts(
        [site["fn"] for site in coupling], {n: site["fn"] for n, (site, _) in members.items()}
    )
    p = _parts([*joint_priors.values()], dict(zip(members, priors, strict=True)))
    kl = None
    if closed_form_kl and len(q) == len(p) == 1:
        try:
            kl = td.kl_divergence(q[0], p[0])
        except NotImplementedError:
            kl = None
    if kl is None:
        values = {name: value_of(site) for name, (site, _) in members.items()}
        draws = {id(site["fn"]): value_of(site) for site in coupling}
        kl = _log_density(q, values, draws, closed_form_kl) - _log_density(p, values, {}, False)
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


Part = JointDistribution | IndependentSites


def _parts(joints: list[JointDistribution], sites: Mapping[str, td.Distribution]) -> list[Part]:
    """Return joint distributions, and one of all sites that none of them has."""
    held = {name for joint in joints for name in joint.names}
    rest = {name: fn for name, fn in sites.items() if name not in held}
    return [*joints, IndependentSites(rest)] if rest else [*joints]


def _log_density(
    parts: list[Part],
    values: Mapping[str, Tensor],
    draws: Mapping[int, Tensor],
    known_entropies: bool,
) -> Tensor:
    """Return the log-density at values by site, or at the `draws` of joint posteriors.

    With `known_entropies` minus the entropy stands for that of a site that has one.
    """
    terms = []
    for part in parts:
        if isinstance(part, JointDistribution):
            draw = draws[id(part)] if draws else part.flatten(values)
            terms.append(part.log_prob(draw).sum())
            continue
        for name, fn in part.distributions.items():
            entropy = known_entropy(fn) if known_entropies else None
            density = fn.log_prob(values[name]) if entropy is None else -entropy
            terms.append(density.sum())
    return torch.stack(terms).sum()
