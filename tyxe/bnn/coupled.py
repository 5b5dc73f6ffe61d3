"""The KL of sites that a joint posterior or a joint prior couples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributions as td
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from tyxe.distributions import JointDistribution, JointPart, SiteProduct, known_entropy
from tyxe.poutine import Draw

__all__ = ["kl_of_coupled", "not_in_model", "site_value"]

# A site of the guide, and that of the model under the same name.
Pair = tuple[Any, Any]


def site_value(site: Any) -> Tensor:
    """Return the value of a traced site, drawing a lazy one without telling handlers.

    Args:
        site: a node of a trace.
    """
    # Not a use of the weight in the net.
    value: Tensor = site["value"]
    return value.value() if isinstance(value, Draw) else value


def not_in_model(name: str) -> ValueError:
    """Return the error for a site that only the guide has."""
    return ValueError(
        f"the guide samples {name!r}, which the model does not have; after a change of prior that "
        "adds or drops variables, build the BNN anew"
    )


def kl_of_coupled(coupling: list[Any], members: Mapping[str, Pair], closed_form_kl: bool) -> Tensor:
    """Return the one KL of sites that are coupled on either side, in nats.

    A closed form is asked for a joint posterior of all of them, or the product of their
    posteriors, and the same of the priors; lazy draws then stay lazy. Else it is estimated at the
    draw, from whatever posteriors and priors there are.

    Args:
        coupling: the guide's auxiliary sites whose distributions are joint over some of them.
        members: the sites.
        closed_form_kl: whether to ask.

    Raises:
        ValueError: a site that the model does not have; scales or masks that differ.
    """
    for name, (_, model_site) in members.items():
        if model_site is None:
            raise not_in_model(name)
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
    return {id(part.joint): part.joint for part in parts if isinstance(part, JointPart)}


def _whole(
    joints: list[JointDistribution], sites: dict[str, Any]
) -> JointDistribution | SiteProduct | None:
    """What all sites follow together, if it is one distribution or a product over sites."""
    if not joints:
        return SiteProduct({name: site["fn"] for name, site in sites.items()})
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
    terms = [site["fn"].log_prob(site_value(site)).sum() for site in coupling]
    for name, (site, _) in members.items():
        if name not in held:
            entropy = known_entropy(site["fn"]) if known_entropies else None
            density = site["fn"].log_prob(site_value(site)) if entropy is None else -entropy
            terms.append(density.sum())
    return torch.stack(terms).sum()


def _log_prior(members: Mapping[str, Pair]) -> Tensor:
    joints = _joint_priors(members).values()
    held = {name for joint in joints for name in joint.names}
    values = {name: site_value(site) for name, (site, _) in members.items()}
    terms = [joint.log_prob(joint.join(values)).sum() for joint in joints]
    for name, (_, site) in members.items():
        if name not in held:
            terms.append(site["fn"].log_prob(values[name]).sum())
    return torch.stack(terms).sum()
