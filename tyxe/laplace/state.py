"""A Laplace approximation as one immutable state, and the guide that reads it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.utils._pytree import tree_map

from tyxe import check
from tyxe.curvature import Curvature
from tyxe.distributions import Gaussian, ParamBlocks
from tyxe.distributions.normal import Point
from tyxe.distributions.param_blocks import LinearBlock
from tyxe.errors import warn
from tyxe.files import as_bytes, as_state, of_bytes, of_state
from tyxe.guides.base import AnyGuide, Guide, check_real, refuse_another_kind, sites_of
from tyxe.guides.init import init_to_net
from tyxe.laplace.precision import KNOWN, POSITIVE, LaplaceOptions, posterior_precision
from tyxe.likelihoods import HomoskedasticGaussian, Likelihood
from tyxe.linalg import BlockDiagonal, LowRank
from tyxe.linalg.base import factorization
from tyxe.linalg.functions import invertible
from tyxe.util import SiteTensors, at_least_float32, with_float32


@dataclasses.dataclass(frozen=True, eq=False)
class LaplaceState:
    """`N(w*, Lambda^-1)` with `Lambda = lambda G / T + P0`, and the parts that it consists of.

    It is immutable; `replace` and `under` return other states.

    Attributes:
        loc: `w*`, `(P,)`, in the order of `blocks`.
        curvature: `G`, with its blocks and the log-likelihood of the data.
        prior: `N(m0, P0^-1)` over the same blocks.
        temperature: `T`.
        curvature_weight: `lambda` of online Laplace.
        damping: whether the prior's precision is spread over both Kronecker factors [T 3.41].
        accumulate: how the curvatures of tasks are combined, `"sum"`, `"average"` or `"per_task"`.

    Raises:
        ValueError: a temperature or weight that is not positive; an unknown `accumulate`.

    Reference:
        [T] 3.1-3.3; [LA].

    Example:
        One weight with the prior N(0, 1), and data with the log-likelihood `-3/2 (w - 2)^2`:

        >>> from tyxe.linalg import Diagonal
        >>> blocks = ParamBlocks.of_sites({"w": torch.Size([1])})
        >>> prior = Gaussian(blocks, torch.zeros(1), Diagonal(torch.ones(1)))
        >>> operator = BlockDiagonal({"w": Diagonal(torch.tensor([3.0]))})
        >>> curvature = Curvature(operator, blocks, -0.375, 0.0, 1.0, key=1)
        >>> state = LaplaceState(torch.tensor([1.5]), curvature, prior)
        >>> state.precision().diagonal()
        tensor([4.])
        >>> state.evidence()  # -3/2 2^2 / 4 - log(4) / 2
        tensor(-2.1931)
    """

    loc: Tensor
    curvature: Curvature
    prior: Gaussian
    temperature: float = check.field(1.0, **POSITIVE)
    curvature_weight: float = check.field(1.0, **POSITIVE)
    damping: bool = check.field(False, check.flag)
    accumulate: str = check.field("sum", **KNOWN)

    def __post_init__(self) -> None:
        check.fields(self)

    @property
    def blocks(self) -> ParamBlocks:
        """The layout of the weights in one vector."""
        return self.curvature.blocks

    @property
    def weight(self) -> float:
        """The factor of the curvature, `lambda / T`."""
        return self.curvature_weight / self.temperature

    @property
    def key(self) -> int:
        """Identifies the weighted curvature in posteriors that contain it, as their `absorbed`."""
        weighted = struct.pack("qd", self.curvature.key, self.weight)
        return int.from_bytes(hashlib.blake2b(weighted, digest_size=7).digest(), "big")

    def precision(self) -> BlockDiagonal:
        """Return `Lambda`, which is computed once.

        Raises:
            ValueError: the curvature's structure, or damping, does not fit the prior.
        """
        return self._precision

    @factorization
    def _precision(self) -> BlockDiagonal:
        return posterior_precision(
            self.prior, self.curvature, self.weight, self.damping, self.accumulate
        )

    def evidence(self) -> Tensor:
        """Return the log marginal likelihood, in nats, differentiable in the prior and the noise.

        `log p(D|w*)/T - 1/2 (w* - m0)^T P0 (w* - m0) + 1/2 log det P0 - 1/2 log det Lambda` [LA].
        If the prior is the posterior of earlier data, it is that of the new data given those.

        Raises:
            ValueError: the prior is a penalty whose normaliser is not known.
        """
        if len(self.prior.terms) > 1 or not invertible(self.prior.precision):
            raise ValueError(
                "the prior is a penalty whose normaliser is not known, so there is no evidence: "
                'keep one term for all tasks, with accumulate="average"'
            )
        ((mean, precision),) = self.prior.terms
        penalty = precision.quadratic(self.loc - mean) - precision.logdet()
        log_likelihood = self.curvature.log_likelihood / self.temperature
        return log_likelihood - (penalty + self.precision().logdet()) / 2

    def posterior(self) -> Gaussian:
        """Return `N(w*, Lambda^-1)`."""
        return Gaussian(self.blocks, self.loc, self.precision(), self.key)

    def next_prior(self) -> Gaussian:
        """Return the prior of a next task, with the key of the curvature that it contains.

        It is the posterior, or with `accumulate="per_task"` the prior times a term about `w*`, that
        is a penalty for each task [T 3.71]; for diagonals this is elastic weight consolidation.
        """
        if self.accumulate != "per_task":
            return self.posterior()
        terms = [*self.prior.terms]
        if not self.curvature.is_empty:
            terms.append((self.loc, self.curvature.operator.scaled(self.weight)))
        return Gaussian.product(self.blocks, terms, self.key)

    def replace(self, **changes: Any) -> LaplaceState:
        """Return the state with other values of some attributes."""
        return dataclasses.replace(self, **changes)

    def under(self, prior: Gaussian) -> LaplaceState:
        """Return the state under another prior.

        If the prior is this state's `next_prior`, it contains the curvature, which is emptied: the
        posterior stays the same, and the next curvature is added to it [T 3.56]. A copy of its
        numbers, which does not say so, gives a warning.

        Raises:
            ValueError: the prior has other sites, or too many coupled weights in another order.
        """
        found = prior.reordered(self.blocks)
        if prior.absorbed == self.key:
            return self.replace(prior=found, curvature=self.curvature.emptied())
        _warn_of_copy(self.prior, found, self.loc)
        return self.replace(prior=found)

    @torch.no_grad()
    def sample(self, *count: int) -> dict[str, Tensor]:
        """Return one draw of `w - w*` by site, or so many of them, `(count, ...)`."""
        return self.blocks.unflatten(self.precision().sample(count))

    def map(self, function: Callable[[Tensor], Tensor]) -> LaplaceState:
        """Return the state with a function of each of its tensors, such as a move to a device."""
        return self.replace(
            loc=function(self.loc),
            curvature=self.curvature.map(function),
            prior=self.prior.map(function),
        )


def _warn_of_copy(old: Gaussian, new: Gaussian, loc: Tensor) -> None:
    """Warn if a new prior is about the mode, and does not say that it holds the curvature there."""
    if new.absorbed is not None or len(new.terms) > 1:
        return
    mean = new.terms[0][0]
    # A prior may be about the mode from the start, and only its precisions be tuned.
    if torch.equal(mean, loc.to(mean)) and not torch.equal(mean, old.terms[0][0].to(mean)):
        warn(
            "the new prior's means are the posterior's own, but it does not say that it holds "
            "these data, which count twice then: pass what net_guide.get_detached_distributions() "
            "returns, not copies of its numbers"
        )


def warn_of_rounding(state: LaplaceState, options: LaplaceOptions) -> None:
    """Warn where eigenvalues below a low-rank curvature's rounding matter next to the prior."""
    operator = state.curvature.operator.blocks.get("all")
    if not isinstance(operator, LowRank):
        return
    factor = operator.factor
    # The largest is the first. Where all pairs asked for were found, rounding has left out none.
    floor = state.weight * float(factor[:, :1].square().sum()) * torch.finfo(factor.dtype).eps
    smallest = float(state.prior.precision.diagonal().min())
    is_short = factor.shape[1] < min(options.rank, len(factor))
    if is_short and floor > max(smallest, state.weight * options.tolerance):
        warn(
            f"eigenvalues of the curvature below {floor:.2g} are lost in the rounding of "
            f"{factor.dtype}, and the prior's smallest precision is {smallest:.2g}, so variances "
            "and evidence may be too large: convert the net and its data with .double()"
        )


def with_noise(
    curvature: Curvature, likelihood: Likelihood, noise: float | Tensor, is_empirical: bool
) -> Curvature:
    """Return the curvature and its log-likelihood under another noise, a standard deviation.

    Where it is that of the true labels, `is_empirical`, it is proportional to `noise^-4`, otherwise
    to `noise^-2`. Where the likelihood has several noises, it is a sum over them, and `noise` is
    one number or one for each.
    """
    expected = "a HomoskedasticGaussian, which noise is of"
    gaussian: Any = check.one_of("the likelihood", likelihood, HomoskedasticGaussian, expected)
    like, apart = curvature.operator, curvature.by_noise
    given = check.tensor("noise", noise, dtype=like.dtype, device=like.device)
    own = gaussian.scale_of(like=given).detach().to(given)
    scales = _for_each(given, own).flatten()
    if len(scales) > 1 and apart is None and not curvature.is_empty:
        raise ValueError(
            f"the curvature of each of {len(scales)} noises is not known: it is kept with "
            f"curvature='ggn' where {1 + len(scales)} times its size fit into memory, and never "
            "with structure='lowrank'; take structure='kron' or 'diag', or build the likelihood "
            "with the scales to be tried"
        )
    ratios = (own.flatten() / scales).square()
    # A homoskedastic Gaussian's error is the sum of squared residuals.
    known = (curvature.error, curvature.num_targets)
    errors, counts = map(scales.new_tensor, (apart.errors, apart.num_targets) if apart else known)
    constants = counts * (2 * scales.log() + math.log(2 * math.pi))
    return dataclasses.replace(
        curvature,
        operator=curvature.at_noise(ratios.square() if is_empirical else ratios),
        log_likelihood=-0.5 * (errors / scales.square() + constants).sum(),
        by_noise=None,
    )


def _for_each(noise: Tensor, own: Tensor) -> Tensor:
    """Return a noise for each of the likelihood's own, or raise where they do not fit."""
    for each in noise.detach().flatten():
        check.number("noise", each, above=0)
    hint = ", as the likelihood's scale, or one number"
    if not own.dim():
        hint = (
            ", one number, as the likelihood's scale; for one of each output build it with "
            f"several, HomoskedasticGaussian(..., scale=torch.full({tuple(noise.shape)}, 1.0))"
        )
    if noise.dim():
        check.shape("noise", noise, own.shape, hint)
    return noise.expand(own.shape)


_NUMBERS = ("log_likelihood", "error", "num_targets", "key")


class LaplaceGuide(AnyGuide):
    """The Gaussian of a `LaplaceState` over all sites, or a delta at the mode without a state.

    Without a state it is the guide of a maximum a posteriori fit.

    Args:
        module: the program that samples the sites from their prior.
        structure: the structure of its states' curvatures, which is saved with them.

    Attributes:
        state: the approximation, or None.
        loaded: a loaded curvature, to make a state of with the present mode and prior; else None.

    Raises:
        ValueError: a site has a constrained support.
    """

    def __init__(self, module: Callable[..., Any], structure: str) -> None:
        super().__init__()
        self.structure = structure
        self.sites, messages = sites_of(module)
        check_real(self.sites, "the Laplace approximation")
        starts = {s.own_name: init_to_net(messages[s.name]) for s in self.sites}
        self.locs = SiteTensors(starts, trainable=True)
        self.state: LaplaceState | None = None
        self.loaded: Curvature | None = None

    @property
    def precision(self) -> BlockDiagonal:
        """The posterior's precision.

        Raises:
            RuntimeError: there is no posterior yet.
        """
        return self._fitted().precision()

    def _fitted(self) -> LaplaceState:
        return check.known(self.state, "there is no posterior yet; call fit, or fit_curvature")

    def values(self) -> dict[str, Tensor]:
        """Return the mode by the sites' joint names."""
        return {site.name: self.locs[site.own_name] for site in self.sites}

    def draw(self, *count: int) -> dict[str, Tensor]:
        """Return one draw of all sites, or so many of them, `(count, ...)`."""
        values = self.values()
        if self.state is None:
            return {name: value.expand((*count, *value.shape)) for name, value in values.items()}
        deviation = self.state.sample(*count)
        return {name: value + deviation[name].to(value.dtype) for name, value in values.items()}

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample all sites (a Pyro program); arguments are ignored."""
        return Guide.sample_from({name: Point(value) for name, value in self.draw().items()})

    def posterior(self) -> dict[str, td.Distribution]:
        """Return the Gaussian's marginals by joint name, or points at the mode without a state."""
        if self.state is None:
            return {name: Point(value) for name, value in self.values().items()}
        return self.state.posterior().by_site()

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return a copy of the mode, by the sites' joint names."""
        return {name: value.detach().clone() for name, value in self.values().items()}

    def as_priors(self) -> Mapping[str, td.Distribution]:
        """Return those of `LaplaceState.next_prior`, which know the curvature they contain."""
        return self._fitted().next_prior().by_site()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LaplaceGuide:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.state is not None:
            self.state = self.state.map(with_float32(fn))
        return self

    def get_extra_state(self) -> Tensor:
        """Return the curvature, packed; the BNN saves the prior."""
        if self.state is None:
            return as_bytes({})
        numbers = as_state(self.state.curvature)
        found = {
            "structure": self.structure,
            "curvature": numbers.pop("operator"),
            **numbers.pop("blocks"),
            "numbers": {name: numbers[name] for name in _NUMBERS},
            "by_noise": numbers["by_noise"],
        }
        return as_bytes(found)

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the curvature of `get_extra_state`; another structure is a RuntimeError."""
        self.state = self.loaded = None
        if not isinstance(saved := of_bytes(state), dict):
            refuse_another_kind("that of a LaplaceBNN", saved)
        if not saved:
            return
        found, layout = saved["structure"], {"blocks": saved["blocks"]}
        blocks = of_state(ParamBlocks, layout)
        # Without linear maps, "kron" and "diag" are the same.
        is_linear = any(isinstance(block, LinearBlock) for block in blocks)
        if found != self.structure and (is_linear or {found, self.structure} != {"kron", "diag"}):
            raise RuntimeError(
                f"the state dict holds a curvature of structure={found!r}, but this BNN has "
                f"structure={self.structure!r}: build it with structure={found!r}, or on the "
                "other's to_module(), and call fit_curvature(data_loader)"
            )
        known, own = set(blocks.sites), {site.name for site in self.sites}
        if known != own:
            raise RuntimeError(
                f"the state dict holds a curvature of {min(known)!r} and others, but this BNN has "
                f"{min(own)!r} and others: give it the same net and name"
            )
        like = at_least_float32(next(iter(self.parameters())))
        # States of earlier versions have nothing by noise.
        given = {"operator": saved["curvature"], "by_noise": saved.get("by_noise")}
        given = tree_map(lambda leaf: leaf.to(like) if isinstance(leaf, Tensor) else leaf, given)
        self.loaded = of_state(Curvature, {**given, "blocks": layout, **saved["numbers"]})
