"""Second-order terms of a batch's log-likelihood about a guide's means [VL 4, GR 4]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributions as td
from pyro import distributions as dist
from pyro.distributions.util import scale_and_mask
from torch import Tensor, nn
from torch.distributions import constraints

from tyxe import check
from tyxe.util import graph_nodes

CURVATURES = ("fisher", "hessian", "empirical")
# Weights up to which the Hessian's exact diagonal is computed, with a backward pass for each.
HESSIAN_LIMIT = 20_000
# Rows of the Hessian that are computed at a time.
HESSIAN_CHUNK = 64


class Expansion(NamedTuple):
    """One site at its mean (a leaf of the graph or a node in it), with its elementwise variance."""

    name: str
    loc: Tensor
    variance: Tensor


def gradients_at_means(
    fn: Any, value: Tensor, mask: Any, sites: Sequence[Expansion]
) -> list[Tensor]:
    """Return differentiable gradients of a batch's log-likelihood, zeros for sites not used.

    The distribution `fn` is that of the targets, `value`, of which a mask leaves some out.
    """
    log_prob = scale_and_mask(fn.log_prob(value), 1.0, mask).sum()
    locs = [site.loc for site in sites]
    if not log_prob.requires_grad:
        return [torch.zeros_like(loc) for loc in locs]
    return [*torch.autograd.grad(log_prob, locs, create_graph=True, materialize_grads=True)]


def minus_half_of_squares(gradients: Sequence[Tensor], sites: Sequence[Expansion]) -> Tensor:
    """Return `-1/2 sum sigma^2 g^2` of each site [VL 26, 28, 29].

    At pseudo-labels this is an estimate by the Fisher information: scores of labels that the model
    itself draws are independent with mean zero, so that the square of their sum has the expectation
    of the sum of squares. At the true labels it is biased.
    """
    pairs = zip(sites, gradients, strict=True)
    # Variances are in float32 at least, gradients in the type of the weights.
    parts = [(s.variance * g.to(s.variance.dtype).square()).sum() for s, g in pairs]
    return -0.5 * torch.stack(parts)


def pseudo_labels(fn: Any) -> Tensor:
    """Draw targets from the model, or raise a TypeError if it cannot be sampled."""
    try:
        labels: Tensor = fn.sample()
    except NotImplementedError:
        inner = fn.base_dist if isinstance(fn, td.Independent) else fn
        raise TypeError(
            f"variational_laplace draws pseudo-labels, but {type(inner).__name__}, the "
            "likelihood's predictive distribution, has no sample(): implement it, or pass "
            'curvature="empirical" (the true labels, a biased estimate)'
        ) from None
    return labels


def hessian_diagonals(gradients: Sequence[Tensor], sites: Sequence[Expansion]) -> list[Tensor]:
    """Return `d gradient_l / d loc_l` of each site, the Hessian's diagonal, differentiable."""
    count = sum(site.loc.numel() for site in sites)
    hint = ', for each of which curvature="hessian" takes a backward pass: use curvature="fisher"'
    check.count("the number of weights", count, hint=hint, most=HESSIAN_LIMIT)
    return [_diagonal(g, site.loc) for g, site in zip(gradients, sites, strict=True)]


def _diagonal(gradient: Tensor, loc: Tensor) -> Tensor:
    if not gradient.requires_grad:
        return torch.zeros_like(loc)
    size, parts = loc.numel(), []
    for start in range(0, size, HESSIAN_CHUNK):
        rows = torch.arange(start, min(start + HESSIAN_CHUNK, size), device=loc.device)
        basis = torch.zeros(len(rows), size, dtype=gradient.dtype, device=loc.device)
        basis[torch.arange(len(rows), device=loc.device), rows] = 1.0
        vectors = basis.view(-1, *loc.shape)
        how = {"create_graph": True, "allow_unused": True, "is_grads_batched": True}
        (columns,) = torch.autograd.grad(gradient, loc, vectors, **how)
        if columns is None:
            return torch.zeros_like(loc)
        parts.append(columns.reshape(len(rows), size).gather(1, rows[:, None])[:, 0])
    return torch.cat(parts).view(loc.shape)


class Shifted(dist.TorchDistribution):
    """A distribution with a `shift` added to its log-density, in nats, per element of its batch.

    It is not normalised: an observed site carries another term of an objective with it. Draws are
    those of `base_dist`.
    """

    arg_constraints: ClassVar[dict[str, constraints.Constraint]] = {}

    def __init__(self, base_dist: td.Distribution, shift: Tensor) -> None:
        self.base_dist, self.shift = base_dist, shift
        super().__init__(base_dist.batch_shape, base_dist.event_shape, validate_args=False)

    @property
    def has_rsample(self) -> bool:
        return self.base_dist.has_rsample

    @property
    def support(self) -> constraints.Constraint | None:
        return self.base_dist.support

    def sample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        return self.base_dist.sample(torch.Size(sample_shape))

    def rsample(self, sample_shape: torch.Size | tuple[int, ...] = ()) -> Tensor:
        return self.base_dist.rsample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        return self.base_dist.log_prob(value) + self.shift


# --------------------------------------------------------------------------- smoothness

# Names of nodes in the graph, and the modules that create them.
NONSMOOTH: dict[str, tuple[type[nn.Module], ...]] = {
    "Relu": (nn.ReLU,),
    "LeakyRelu": (nn.LeakyReLU,),
    "Prelu": (nn.PReLU,),
    "Rrelu": (nn.RReLU,),
    "Hardtanh": (nn.Hardtanh, nn.ReLU6),
    "Threshold": (nn.Threshold,),
    "Softshrink": (nn.Softshrink,),
    "Hardshrink": (nn.Hardshrink,),
    "MaxPool2D": (nn.MaxPool1d, nn.MaxPool2d),
    "MaxPool3D": (nn.MaxPool3d,),
    "AdaptiveMaxPool2D": (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    "AdaptiveMaxPool3D": (nn.AdaptiveMaxPool3d,),
}
# Those whose gradient PyTorch does not differentiate at all.
WITHOUT_SECOND_DERIVATIVE: dict[str, tuple[type[nn.Module], ...]] = {
    "Hardsigmoid": (nn.Hardsigmoid,),
    "EmbeddingBag": (nn.EmbeddingBag,),
}


def functions_of(
    kinds: Mapping[str, tuple[type[nn.Module], ...]], result: Tensor, net: nn.Module | None
) -> list[str]:
    """Describe the functions of some kinds by which a result was computed.

    Those of a module of `net` have the module's name; others were called as functions.
    """
    modules = [] if net is None else list(net.named_modules())
    found = []
    nodes = (node.name().split("Backward")[0].split("With")[0] for node in graph_nodes([result]))
    for kind in kinds.keys() & {name.removesuffix("Kernel") for name in nodes}:
        made = [
            f"{name or 'the net'} ({type(module).__name__})"
            for name, module in modules
            if isinstance(module, kinds[kind])
        ]
        found += made or [f"{kind} (called as a function)"]
    return sorted(found)
