"""Whether inference has found the posterior: its data, gradients, scales, curvature."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributions as td
from pyro.infer.autoguide import AutoDelta
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tyxe.bnn import LaplaceBNN, VariationalBNN
from tyxe.bnn.checks import KL_DWARFS, UNLIKE, columns_of, distance_from_standard, relative_scale
from tyxe.bnn.elbo import Objective
from tyxe.bnn.reading import unread_sites
from tyxe.bnn.runtime import fitting
from tyxe.diagnostics.convergence import tails
from tyxe.diagnostics.report import ANY, Case, Line, above, below, spared
from tyxe.distributions import PrunedNormal
from tyxe.guides.normal import MeanField, SWAGGuide
from tyxe.laplace.search import spectrum
from tyxe.poutine import selective_mask
from tyxe.predictive.forwards import fewest_rows
from tyxe.threads import handlers
from tyxe.util import is_constant

# Batches below which the rows of an epoch are dealt into parts, for a variance over these.
FEWEST, PARTS = 8, 16
_TABLES = nn.Embedding | nn.EmbeddingBag  # whose rows are each of some points
ROUNDING = 1e-9  # variance of a gradient, as a share of the largest, that is none
T = TypeVar("T")


def size(case: Case) -> Iterator[Line]:
    """Compare the points of an epoch with `dataset_size`."""
    points = sum(float(case.likelihood.count(targets)) for _, targets in case.to_fit)
    yield Line(
        "points in the loader over dataset_size",
        points / float(case.likelihood.dataset_size),
        (0.9, 1.1),
        (0.5, 2.0),
        f"an epoch has {points:g} points: build the likelihood with dataset_size={points:g}, or "
        "pass the whole training data",
    )


# ----------------------------------------------------------------------- the objective's gradient


@dataclass
class Slope:
    """Mean and variance of the mean of the gradient, by parameter, with the terms of the ELBO."""

    mean: dict[str, Tensor]
    variance: dict[str, Tensor]
    data: float
    kl: float
    kinds: dict[str, str]

    def distance(self, names: list[str]) -> float:
        """Return the norm of some parameters' gradient over its noise's; NaN without a noise."""
        norm = sum(float(self.mean[name].square().sum()) for name in names)
        noise = sum(float(self.variance[name].sum()) for name in names)
        return math.sqrt(norm / noise) if noise else math.nan


def slope(case: Case, beta: float) -> Slope | None:
    """Return the gradient of an epoch, on a copy of the BNN; None with batches it cannot take."""
    # Without a curvature, in whose place draws would be.
    state = case.bnn.net_guide.state if isinstance(case.bnn, LaplaceBNN) else None
    bnn = copy.deepcopy(case.bnn, {} if state is None else {id(state): None})
    if isinstance(guide := getattr(bnn, "net_guide", None), MeanField):
        guide.unconstrained_scales.requires_grad_(True)  # also where they stay as they start
    parts = case.to_fit if len(case.to_fit) >= FEWEST else _dealt(case) or case.to_fit
    found = {name: p for name, p in bnn.named_parameters() if p.requires_grad}
    most = max(float(bnn.likelihood.count(targets)) for _, targets in parts)
    if not found or most > float(bnn.likelihood.dataset_size):
        return None
    objective = Objective(bnn, closed_form_kl=True, num_particles=1)
    like = {name: _real(parameter.detach()) for name, parameter in found.items()}
    first, second, squares = ({n: torch.zeros_like(p) for n, p in like.items()} for _ in range(3))
    total, points, data, kl = 0.0, 0.0, 0.0, 0.0
    spares = am_i_wrapped() or not isinstance(guide, MeanField)
    with fitting(bnn, train=True), torch.enable_grad(), nullcontext() if spares else spared():
        for inputs, targets in parts:
            count = float(bnn.likelihood.count(targets))
            loss = objective(inputs, targets, beta)
            terms = objective.take_terms()
            gradients = torch.autograd.grad(loss, list(found.values()), allow_unused=True)
            for name, gradient in zip(found, gradients, strict=True):
                if gradient is not None:
                    g = _real(gradient)
                    first[name] += count * g
                    second[name] += count**2 * g
                    squares[name] += count**2 * g.square()
            total, points = total + count**2, points + count
            data, kl = data + count * terms.data.item(), kl + count * terms.kl.item()
    mean = {name: g / points for name, g in first.items()}
    scale = len(parts) / (len(parts) - 1) / points**2 if len(parts) > 1 else 0.0
    spread = {n: squares[n] - 2 * m * second[n] + m.square() * total for n, m in mean.items()}
    variance = {name: (scale * value).clamp_min(0) for name, value in spread.items()}
    return Slope(mean, variance, data / points, kl / points, bnn._parameter_kinds())


def _real(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values


def _dealt(case: Case) -> list[Any]:
    """Return the rows of batches, in chance order, as more batches; none where rows are not all.

    A mask is of whole batches.
    """
    batches, parts = case.to_fit, list[Any]()
    if any(isinstance(handler, selective_mask) for handler in handlers()):
        return parts
    fewest = fewest_rows(case.bnn.net, train=True)
    for batch in batches:
        rows = len(batch[1])
        leaves = [leaf for leaf in tree_leaves(batch) if not is_constant(leaf)]
        if any(not isinstance(leaf, Tensor) or len(leaf) != rows for leaf in leaves):
            return []  # such as the edges of a graph
        inputs = [leaf for leaf in tree_leaves(batch[0]) if not is_constant(leaf)]
        if len(inputs) > 1 and any(leaf.shape[:2] == (rows, rows) for leaf in inputs):
            return []  # a graph's matrix, of which rows alone are no graph
        count = math.ceil(rows / math.ceil(rows * len(batches) / PARTS))
        count = min(count, max(rows // fewest, 1))
        for some in torch.randperm(rows, device="cpu").tensor_split(count):
            parts.append(tree_map(partial(_at, some), batch))
    return parts


def _at(rows: Tensor, leaf: Any) -> Any:
    return leaf if is_constant(leaf) else leaf[rows.to(leaf.device)]


def has_spread(bnn: Any) -> bool:
    """Whether a BNN has a guide whose KL says how much it knows, unlike that of a delta."""
    guide = getattr(bnn, "net_guide", None)
    own = getattr(guide, "guide", guide)
    is_variational = isinstance(bnn, VariationalBNN) and guide is not None
    return is_variational and not isinstance(own, AutoDelta | SWAGGuide)


NOT_THERE = "train on, with a decaying rate; for a tempered posterior pass beta="
TO_SCALES = ", or lr_multipliers={'scale': 10}, for a guide with train_scale=True"


def fit(case: Case) -> Iterator[Line]:
    """Look at the terms of the ELBO and the distance from its optimum."""
    bnn = case.bnn
    guide = getattr(bnn, "net_guide", None)
    own = getattr(guide, "guide", guide)
    if not isinstance(bnn, VariationalBNN) or isinstance(own, SWAGGuide):
        return
    found = slope(case, case.beta)
    if found is None:
        return
    if has_spread(bnn):
        data = max(abs(found.data), float(bnn.likelihood.dataset_size))
        yield Line(
            "KL over the data term",
            case.beta * found.kl / data,
            below(KL_DWARFS / 10),
            below(KL_DWARFS),
            "the ELBO is mostly the KL: check dataset_size, narrow the prior, take weights of a "
            "trained net as means, or weigh the KL by beta < 1",
        )
    most = 2.0 if has_spread(bnn) else 4.0  # nets without a spread are stopped early
    for kind in ("loc", "scale", "deterministic"):
        names = [name for name in found.mean if found.kinds[name] == kind]
        if names and not math.isnan(distance := found.distance(names)):
            remedy = NOT_THERE + (TO_SCALES if kind == "scale" else "")
            what = f"gradient over its noise, {kind}"
            yield Line(what, distance, below(most), below(2.5 * most), remedy)
    yield from _unreached(case, found)


def _unreached(case: Case, found: Slope) -> Iterator[Line]:
    """Look for rows of weights whose gradient is the same, nothing or the prior's, for all data."""
    noise = {name: v for name, v in found.variance.items() if found.kinds[name] != "scale"}
    most = max((float(v.max()) for v in noise.values() if v.numel()), default=0.0)
    net = case.bnn.net
    modules = net.named_modules()
    tables = {f"{name}.weight" for name, module in modules if isinstance(module, _TABLES)}
    units = {name for name, p in net.named_parameters() if p.dim() > 1 and p.numel()} - tables
    shares = {}
    for name, variance in noise.items():
        part = "net_guide.locs." if name.startswith("net_guide.") else "net."
        own = name.removeprefix(part)
        if own in units:
            shares[own] = float((variance.flatten(1).amax(1) <= ROUNDING * most).double().mean())
    if shares and most:
        yield Line.of_parts(
            "share of units that no data reach",
            shares,
            below(0.5),
            below(0.9),
            "the gradient of these rows is 0 for all data, as that of a ReLU below 0: start anew, "
            "with a lower rate, or with biases about 0",
        )


def laplace(case: Case) -> Iterator[Line]:
    """Look at the distance from a mode, the prior of that mode, and what data determine."""
    bnn = case.bnn
    if not isinstance(bnn, LaplaceBNN) or (found := slope(case, 0.0)) is None:
        return
    state, guide = bnn.state, bnn.net_guide
    # Of the log-likelihood, in nats, at temperature T.
    factor = -float(bnn.likelihood.dataset_size) / bnn.temperature
    names = {site.name: f"net_guide.locs.{site.own_name}" for site in guide.sites}
    mean, variance = (
        state.blocks.flatten({site: part[name] for site, name in names.items()}).to(state.loc)
        for part in (found.mean, found.variance)
    )
    pull, noise = factor * mean, factor**2 * variance
    decay = -_score(state.prior, state.loc)
    # The mode's own decay, so that a precision that was chosen later is no distance.
    ratio = float(pull @ decay / decay.square().sum()) if bool(decay.any()) else 0.0
    if scatter := float(noise.sum().sqrt()):
        yield Line(
            "gradient at the mode over its noise",
            float((pull - ratio * decay).norm()) / scatter,
            below(2.0),
            below(5.0),
            "the weights are not a mode: train on by fit, or with decaying rate and weight decay",
        )
    # A precision that data have chosen may be far from the decay, and leave nothing of the data's.
    is_chosen = state.prior is bnn._chosen_prior
    if bool(decay.any()):
        yield Line(
            "weight decay of the mode over the prior's precision",
            ratio,
            ANY if is_chosen else (1e-3, 1e3),
            ANY,
            "the mode belongs to another prior: train by fit, or with weight_decay of the prior's "
            "precision over the number of points",
        )
    values = spectrum(state.curvature.operator) * state.weight
    precisions = torch.stack([operator.diagonal() for _, operator in state.prior.terms]).sum(0)
    share = float((values < precisions.median()).double().mean())
    yield from _unreached(case, found)
    yield Line(
        "share of eigenvalues below the prior's",
        share,
        ANY if is_chosen else below(0.9999),
        ANY,
        "the posterior equals the prior: check dataset_size, and whether the net is certain of "
        "all points; call optimize_prior_precision(loader=held_out)",
    )


def _score(prior: Any, loc: Tensor) -> Tensor:
    """Return the gradient of the prior's log-density."""
    with torch.enable_grad():
        at = loc.detach().clone().requires_grad_()
        return torch.autograd.grad(prior.log_prob(at), at)[0]


# ------------------------------------------------------------------------------ inputs, and the net


def inputs(case: Case) -> Iterator[Line]:
    """Compare the net's inputs with standardised ones, and look for sites that it does not read."""
    columns = (columns_of(case.bnn.net, inputs) for inputs, _ in case.to_fit)
    found = [*map(distance_from_standard, columns)]
    yield Line(
        "size of inputs over that of standardised ones",
        max(found),
        below(UNLIKE),
        ANY,
        "columns are of very different sizes, or far from 0: pass (x - mean) / std, of the columns "
        "of the training data, unless the net does so itself",
    )
    prefix = case.bnn.net_prior.prefix
    unread = [n.removeprefix(prefix) for n in unread_sites(case.bnn, case.to_fit[0][0])]
    yield Line(
        "sites that the outputs do not depend on",
        float(len(unread)),
        below(0.0),
        below(0.0),
        f"draws of {', '.join(sorted(unread)[:5])} have no effect: hide them from the prior, or "
        "let the net's forward use its own modules",
    )


# ------------------------------------------------------------------------------- the guide's sites


def scales(case: Case) -> Iterator[Line]:
    """Look for scales that have not moved, or have collapsed, and for units like the prior."""
    guide = getattr(case.bnn, "net_guide", None)
    if not isinstance(guide, MeanField):
        return
    with torch.no_grad():
        posterior = {site.own_name: guide.site_distribution(site) for site in guide.sites}
        priors = dict(case.bnn.net_prior.priors())
        known = _known({n: relative_scale(q, priors.get(n)) for n, q in posterior.items()})
        spread = _known({name: _spread(guide, name, known[name]) for name in known})
        pruned = _known({name: _like_prior(posterior[name], priors[name]) for name in known})
    if known:
        yield Line.of_parts(
            "scale over the prior's",
            known,
            (1e-4, 1.5),
            (1e-6, 10.0),
            "if scales collapse, check dataset_size; if they are wider than the prior, lower "
            "their learning rate, or cap them by max_guide_scale",
        )
    if spread:
        yield Line.of_parts(
            "spread of a layer's log scales",
            spread,
            above(0.02),
            above(0.002),
            "scales have hardly moved from their start, as where early stopping ends a fit soon: "
            "they are those of init_scale, so choose that on held-out data, or train on, with "
            "lr_multipliers={'scale': 10}",
        )
    if pruned:
        rows = sum(units for units, _ in pruned.values())
        share = sum(units * part for units, part in pruned.values()) / rows
        yield Line(
            "share of units whose weights are the prior's",
            share,
            below(0.8),
            ANY,
            "most units are back at the prior: take a narrower prior, a smaller net, or beta < 1",
            {name: part for name, (_, part) in pruned.items()},
        )


def _known(values: dict[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in values.items() if value is not None}


def _spread(guide: MeanField, name: str, relative: float) -> float | None:
    """Return the standard deviation of a site's log scales, of sites where it says something."""
    scale = guide.get_scale(name)
    cap = guide.max_guide_scale
    at_cap = cap is not None and bool(scale.median() > 0.99 * cap)
    is_matrix = scale.dim() > 1 and scale.numel() >= FEWEST
    is_trained = guide.unconstrained_scales[name].requires_grad
    is_telling = is_matrix and is_trained and not at_cap and not 0.8 < relative < 1.25
    return float(scale.log().std()) if is_telling else None


def _like_prior(q: td.Distribution, prior: td.Distribution) -> tuple[int, float] | None:
    """Return the number of a matrix's rows, and the share of those that are the prior's."""
    if q.mean.dim() < 2:
        return None
    if isinstance(q, PrunedNormal):
        dead = ~q.kept.flatten(1).any(1)
    else:
        ratio = q.variance / prior.variance
        shift = (q.mean - prior.mean).square() / prior.variance
        dead = (0.5 * (ratio + shift - 1 - ratio.log())).flatten(1).mean(1) < 0.01
    return len(dead), float(dead.double().mean())


CHECKS = (inputs, fit, laplace, scales, tails)
