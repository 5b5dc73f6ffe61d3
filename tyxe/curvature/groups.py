"""Groups of sites that share a block of the curvature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Size, Tensor

from tyxe.curvature.uses import Use, patches
from tyxe.distributions import Group, LinearGroup, PlainGroup

__all__ = ["find_groups", "inputs_of"]


def inputs_of(group: LinearGroup, use: Use, points: int) -> Tensor:
    """Return what multiplies a group's columns in a map, `(n, R, groups, columns)`: patches, a one.

    Args:
        group: weight and bias, or one of them.
        use: one of the group's maps.
        points: number `n` of data points.
    """
    found = patches(use, points, group.bias is not None)
    return found[..., -1:] if group.weight is None else found


def find_groups(
    shapes: Mapping[str, Size], uses: Iterable[Use], elsewhere: Iterable[str]
) -> list[Group]:
    """Put sites into groups: weight and bias that enter the same linear maps, and single ones.

    Args:
        shapes: of all sites, in the order that the groups follow.
        uses: the linear maps of one forward.
        elsewhere: sites that something else uses, so that no factors exist.

    Returns:
        Groups that hold every site once.
    """
    candidates: dict[str, set[LinearGroup]] = {}
    for use in uses:
        whole = [site for site in (use.weight_site, use.bias_site) if site is not None]
        group = LinearGroup(
            use.weight_site, use.bias_site, use.event.weight.shape, use.groups, use.is_transposed
        )
        for site in use.sites:
            # A part of a site has no group: it cannot be told from what the site's rest does.
            candidates.setdefault(site, set()).update([group] if site in whole else [])
            if site not in whole:
                candidates[site].add(_part_of(site, shapes[site]))
    other = set(elsewhere)
    groups: dict[str, Group] = {}
    for site, shape in shapes.items():
        found = list(candidates.get(site, ()))
        chosen: Group = PlainGroup(site, shape)
        if len(found) == 1 and all(
            name not in other and candidates.get(name) == {found[0]} for name in found[0].sites
        ):
            chosen = found[0]
        groups.setdefault(chosen.name, chosen)
    return list(groups.values())


def _part_of(site: str, shape: Size) -> LinearGroup:
    """What no other site is in a group with."""
    return LinearGroup(f"a part of {site}", None, shape, 1, False)
