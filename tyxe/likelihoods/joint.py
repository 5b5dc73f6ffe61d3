"""Several likelihoods for a net with several outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyro.distributions as dist
import torch
from torch import Size, Tensor, nn
from torch.distributions import constraints
from torch.nn.functional import one_hot

from tyxe import check
from tyxe.check import described
from tyxe.data import Targets, filled, read_targets, trailing
from tyxe.likelihoods.base import Latents, Likelihood
from tyxe.likelihoods.output_hessian import hessian_blocks, output_hessian
from tyxe.likelihoods.reductions import log_mean_exp, reduce_points
from tyxe.poutine.selective import masked_within
from tyxe.util import at_least_float32, is_real


class _Layout(dict[str, Any]):
    """Shapes of outputs, and shapes and dtypes of targets, by part: one for all copies."""

    def __deepcopy__(self, memo: Any) -> _Layout:
        return self


def check_is_one(likelihood: Likelihood, instead: str) -> None:
    """Raise a TypeError for the likelihood of several outputs, with what to do instead."""
    if isinstance(likelihood, Joint):
        raise TypeError(f"the BNN has several outputs: {instead}")


class Joint(Likelihood):
    """A likelihood for each of several outputs, which are independent given the net.

    The net returns a mapping with the names of the parts, or a tuple in their order, and loaders
    yield targets in the same form. Predictions, samples and errors are mappings by part. So are
    log-likelihoods, where `"joint"` is that of all parts together. Inside, and for handlers, the
    outputs of a point are one vector.

    Args:
        weights: how much the log-likelihoods of parts count in fits and their curvatures, by name;
            1 for those left out. Evaluations do not use them.
        parts: likelihoods by name, with the same `dataset_size`.

    Raises:
        TypeError: a part that is not a likelihood; an output or target that is not a tensor.
        ValueError: no part, one named "joint", or parts with different sizes of the data set;
            weights that are negative, all 0, or for an unknown part; outputs or targets whose parts
            are not these.

    Example:
        >>> from tyxe.likelihoods import Categorical, HomoskedasticGaussian
        >>> joint = Joint(kind=Categorical(10), size=HomoskedasticGaussian(10, scale=0.1))
        >>> packed = joint.from_net((torch.zeros(5, 3), torch.zeros(5, 1)))
        >>> {name: found.shape for name, found in joint.outputs_of(packed).items()}
        {'kind': torch.Size([5, 3]), 'size': torch.Size([5, 1])}
    """

    has_order = False
    is_zero_outside = True
    prepares_outputs = prepares_targets = True

    def __init__(self, *, weights: Mapping[str, float] | None = None, **parts: Likelihood) -> None:
        if not parts or "joint" in parts:
            raise ValueError(
                'Joint needs parts by name, none of them "joint": Joint(kind=Categorical(n), ...)'
            )
        for name, part in parts.items():
            check.one_of(name, part, Likelihood, "a likelihood")
        given = {} if weights is None else weights
        weights = dict(check.one_of("weights", given, Mapping, "numbers by part"))
        for name, weight in weights.items():
            check.choice("a part of weights", name, parts)
            check.number(f"the weight of {name}", weight, least=0)
        sizes = {name: part._dataset_size for name, part in parts.items()}
        known = {size for size in sizes.values() if size is not None}
        if len(known) > 1:
            raise ValueError(f"the parts have different dataset_size: {sizes}")
        super().__init__(known.pop() if known else None)
        self.parts = nn.ModuleDict(parts)
        self.weights = {name: float(weights.get(name, 1.0)) for name in parts}
        check.number("the sum of weights", sum(self.weights.values()), above=0)
        self.has_target_hessian = any(part.has_target_hessian for part in parts.values())
        self._layout = _Layout()

    @property
    def bounded_outputs(self) -> str:
        found = (self._part(name).bounded_outputs for name in self.parts)
        return next(filter(None, found), "")

    # ------------------------------------------------------------------ vectors and parts

    def _of(self, what: str, given: Any) -> dict[str, Any]:
        """Return what there is for each part."""
        if isinstance(given, tuple | list) and len(given) == len(self.parts):
            given = dict(zip(self.parts, given, strict=True))
        if not isinstance(given, Mapping) or any(name not in given for name in self.parts):
            has = f"of {', '.join(map(str, given))}" if isinstance(given, Mapping) else ""
            has = f"of {len(given)}" if isinstance(given, tuple | list) else has
            raise ValueError(
                f"{what} are {described(given)} {has}; expected a mapping with "
                f"{', '.join(self.parts)}, or a tuple in this order"
            )
        for name in self.parts:
            check.one_of(f"{name} of the {what}", given[name], Tensor, "a tensor")
        return {name: given[name] for name in self.parts}

    def from_net(self, outputs: Any) -> Tensor:
        given = {n: self._part(n).from_net(v) for n, v in self._of("outputs", outputs).items()}
        self._layout["outputs"] = {name: value.shape[1:] for name, value in given.items()}
        return torch.cat([value.reshape(len(value), -1) for value in given.values()], -1)

    def from_loader(self, targets: Any) -> Any:
        if isinstance(targets, Tensor | Targets):  # packed already
            return targets
        given = self._of("targets", targets)
        self._layout["targets"] = {n: (v.shape[1:], v.dtype) for n, v in given.items()}
        # What a part ignores is known here, and has a value that the part knows.
        read = {
            n: self._part(n).known(Targets.of(read_targets(v))).filled() for n, v in given.items()
        }
        packed = self._packed({n: part.values for n, part in read.items()})
        if all(part.mask is None for part in read.values()):
            return packed
        masks = [
            torch.ones_like(part.values, dtype=torch.bool)
            if part.mask is None
            else trailing(part.mask, part.values.dim()).expand_as(part.values)
            for part in read.values()
        ]
        return Targets(packed, mask=torch.cat([m.reshape(len(m), -1) for m in masks], -1))

    def with_fit_weights(self, targets: Any) -> Any:
        weigh = [part for part in self.parts.values() if part.prepares_targets]
        if not weigh and set(self.weights.values()) == {1.0}:
            return targets
        given, values, masks = Targets.of(targets), {}, []
        # A part sees labels that count: one of -1 in a point that is left out would be no class.
        for name, own in self._by_part(self.observed(given)).items():
            found = Targets.of(self._part(name).with_fit_weights(own))
            counts, values[name] = found.counts_within(), found.values
            each = torch.ones_like(found.values) if counts is None else counts
            masks.append(self.weights[name] * each.reshape(len(each), -1))
        return replace(given, values=self._packed(values), mask=torch.cat(masks, -1))

    def _filled(self, targets: Targets) -> Targets:
        # Numbers within points have been filled by their part.
        counts = targets.counts()
        if counts is None:
            return targets
        return replace(targets, values=filled(targets.values, counts > 0))

    def _packed(self, targets: Mapping[str, Tensor], lead: int = 1) -> Tensor:
        # Integers up to 2^53 are themselves in double precision.
        flat = [v.reshape(*v.shape[:lead], -1).double() for v in targets.values()]
        return torch.cat(flat, -1)

    def outputs_of(self, packed: Any) -> Any:
        return packed if isinstance(packed, Mapping) else _split(packed, self._layout["outputs"])

    def targets_of(self, packed: Tensor) -> Any:
        return {n: self._part(n).targets_of(v) for n, v in self._unpacked(packed).items()}

    def _unpacked(self, packed: Tensor) -> dict[str, Tensor]:
        known = self._layout["targets"]
        found = _split(packed, {n: shape for n, (shape, _) in known.items()})
        return {n: v.to(known[n][1]) for n, v in found.items()}

    def _part(self, name: str) -> Likelihood:
        part = self.parts[name]
        assert isinstance(part, Likelihood)
        return part

    def _each(self, predictions: Any, targets: Any, latents: Latents, function: Any) -> list[Any]:
        """Return a function's values of each part, its predictions, targets and variables."""
        outputs, found = self.outputs_of(predictions), self.observed(targets)
        if "targets" not in self._layout:  # those of another Joint with the same parts
            self._layout["targets"] = {n: self._natural(n, f) for n, f in outputs.items()}
        each = self._by_part(found)
        return [
            function(self._part(n), outputs[n], each[n], of_part(latents, n)) for n in self.parts
        ]

    def _by_part(self, targets: Targets) -> dict[str, Targets]:
        """Return the targets of each part, without weights of points."""
        given, mask = self._unpacked(targets.values), targets.mask
        if mask is None or mask.dim() == 1:
            masks = dict.fromkeys(self.parts, mask)
        else:
            masks = _split(mask, {n: v.shape[1:] for n, v in given.items()})
        found = {n: self._part(n).known(Targets(v, None, masks[n])) for n, v in given.items()}
        return {n: replace(own, is_observed=True) for n, own in found.items()}

    def _natural(self, name: str, outputs: Tensor) -> tuple[Size, torch.dtype]:
        """Return the shape and dtype of a part's targets, as its outputs tell them."""
        part = self._part(name)
        found, _ = part._distribution_for(outputs, None, part.prior_means())
        shape = found.batch_shape[1:] + found.event_shape
        return shape, torch.long if found.support.is_discrete else outputs.dtype

    def score_counts(self, kept: Targets) -> Tensor:
        whole = super().score_counts(kept)
        each = (own.counts() for own in self._by_part(kept).values())
        return torch.stack([whole if own is None else whole * own for own in each] + [whole])

    def output_counts(self, targets: Any, outputs: Any) -> Tensor | None:
        return self._counts("output_counts", targets, outputs)

    def hessian_counts(self, targets: Any, outputs: Any) -> Tensor | None:
        return self._counts("hessian_counts", targets, outputs)

    def _counts(self, method: str, targets: Any, outputs: Any) -> Tensor | None:
        found = self.observed(targets)
        if found.has_whole_points and not self.has_target_hessian:
            return found.counts_within(outputs.shape)

        def one(part: Likelihood, f: Tensor, own: Targets, _: Latents) -> Tensor:
            counts = getattr(part, method)(own, f)
            return (torch.ones_like(f) if counts is None else counts).reshape(len(f), -1)

        counts = torch.cat(self._each(outputs, found, None, one), -1)
        return counts if found.weights is None else counts * found.weights[:, None]

    # ------------------------------------------------------------------ a likelihood

    def latent_priors(self) -> dict[str, Any]:
        return {
            f"{name}.{own}": prior
            for name in self.parts
            for own, prior in self._part(name).latent_priors().items()
        }

    def predictive_distribution(self, predictions: Any, latents: Latents = None) -> Any:
        return _Product(self, self.outputs_of(predictions), latents)

    def prepare_targets(self, predictions: Any, targets: Tensor) -> Tensor:
        return targets

    def point_error(self, predictions: Any, targets: Tensor) -> Tensor:
        return self.errors(predictions, targets).mT

    def aggregate_predictions(
        self, predictions: Any, dim: int = 0, latents: Latents = None, weights: Any = None
    ) -> dict[str, Any]:
        how: dict[str, Any] = {} if weights is None else {"weights": weights}
        return {
            n: self._part(n).aggregate_predictions(value, dim, of_part(latents, n), **how)
            for n, value in self.outputs_of(predictions).items()
        }

    def mean_and_scale(self, predictions: Any, latents: Latents = None) -> Any:
        raise TypeError(
            "a Joint has several targets: call likelihood.parts[name].mean_and_scale(found[name])"
        )

    def check_targets(self, predictions: Tensor, targets: Any) -> None:
        self._each(predictions, targets, None, lambda part, f, y, _: part.check_targets(f, y))

    def errors(self, predictions: Any, targets: Any) -> Tensor:
        found = self._each(predictions, targets, None, lambda part, f, y, _: part.error(f, y))
        return torch.stack(found)

    def error(self, predictions: Any, targets: Any, reduction: str = "none") -> Tensor:
        total = self.errors(predictions, targets).sum(0)
        return reduce_points(total, reduction, self.observed(targets).counts())

    def mixture_log_likelihood(
        self, predictions: Tensor, targets: Any, latents: Latents = None
    ) -> Tensor:
        """Return `(parts + 1, n)`, for each part and for all together."""
        each = self._each(
            predictions, targets, latents, lambda p, f, y, own: p.mixture_log_likelihood(f, y, own)
        )
        return torch.stack([*each, super().mixture_log_likelihood(predictions, targets, latents)])

    def _of_mixture(
        self, logs: Tensor, prediction: Any, targets: Targets, weights: Tensor | None
    ) -> Tensor:
        rows = iter(logs.unbind(1))

        def one(part: Likelihood, f: Any, own: Targets, _: Latents) -> Tensor:
            return part._of_mixture(next(rows), f, own, weights)

        each = self._each(prediction, targets, None, one)
        return torch.stack([*each, log_mean_exp(next(rows), 0, weights)])

    def named(self, scores: Tensor, dim: int) -> Any:
        return dict(zip((*self.parts, "joint"), scores.unbind(dim), strict=False))


def of_part(latents: Latents, name: str) -> dict[str, Tensor]:
    """Return the variables of a part by their own names."""
    found = (latents or {}).items()
    return {n.removeprefix(f"{name}."): v for n, v in found if n.startswith(f"{name}.")}


class _Product(dist.TorchDistribution):
    """The distribution of packed targets, for the outputs of each part."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 1)

    def __init__(
        self,
        joint: Joint,
        outputs: Mapping[str, Any],
        latents: Latents,
        mask: Tensor | None = None,
    ) -> None:
        self._joint, self._outputs, self._latents, self._mask = joint, outputs, latents, mask
        self._parts = {
            n: joint._part(n)._distribution_for(outputs[n], None, of_part(latents, n))[0]
            for n in joint.parts
        }
        shapes = [d.batch_shape[1:] + d.event_shape for d in self._parts.values()]
        if "targets" in joint._layout:
            shapes = [shape for shape, _ in joint._layout["targets"].values()]
        rows = next(iter(self._parts.values())).batch_shape[:1]
        size = Size([sum(shape.numel() for shape in shapes)])
        super().__init__(rows, size, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        return self

    def log_prob(self, value: Tensor) -> Tensor:
        def one(part: Likelihood, outputs: Any, targets: Targets, latents: Any) -> Tensor:
            found = part.log_likelihood(outputs, targets, "none", latents)
            distribution = part.predictive_distribution(at_least_float32(outputs), latents)
            support: Any = distribution.support
            if part.is_zero_outside or is_real(support):
                return found
            inside = support.check(part.prepare_targets(outputs, targets.values))
            return found.where(inside.reshape(len(found), -1).all(1), -torch.inf)

        targets = Targets(value, None, self._mask, is_observed=True)
        each: list[Tensor] = self._joint._each(self._outputs, targets, self._latents, one)
        return torch.stack(each).sum(0)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        drawn = {
            n: self._joint._part(n).sample(outputs, sample_shape, of_part(self._latents, n))
            for n, outputs in self._outputs.items()
        }
        lead = len(Size(sample_shape)) + 1
        known = {n: (v.shape[lead:], v.dtype) for n, v in drawn.items()}
        layout = self._joint._layout.setdefault("targets", known)
        for n, (shape, _) in layout.items():
            if known[n][0] != shape:  # labels, where targets are probabilities of classes
                drawn[n] = one_hot(drawn[n], shape[-1])
        return self._joint._packed(drawn, lead)


@masked_within.register
def _(distribution: _Product, mask: Tensor) -> _Product:
    return _Product(distribution._joint, distribution._outputs, distribution._latents, mask)


def _split(packed: Tensor, shapes: Mapping[str, Size]) -> dict[str, Tensor]:
    """Return the parts of vectors `(..., K)`, with their shapes by name."""
    check.one_of("packed", packed, Tensor, "a tensor, or a mapping of the parts'")
    sizes, lead = [shape.numel() for shape in shapes.values()], packed.shape[:-1]
    check.shape("packed", packed, (*lead, sum(sizes)), ", the parts' sizes together")
    pieces = packed.split(sizes, -1)
    return {n: p.reshape(lead + shapes[n]) for n, p in zip(shapes, pieces, strict=True)}


@output_hessian.register
def _(likelihood: Joint, predictions: Tensor, latents: Any = None) -> Tensor:
    outputs = likelihood.outputs_of(predictions)
    size = predictions.shape[-1]
    found = at_least_float32(predictions).new_zeros(len(predictions), 1, size, size)
    place = 0
    for name, value in outputs.items():
        blocks = hessian_blocks(likelihood._part(name), value, of_part(latents, name))
        side = blocks.shape[-1]
        for block in blocks.unbind(1):
            found[:, 0, place : place + side, place : place + side] = block
            place += side
    return found
