"""Checks of inputs that all metrics share."""

import torch
from torch import Tensor

from tyxe import check


def check_real(name: str, value: Tensor, missing: bool = False) -> Tensor:
    """Return the tensor in float32 at least, if it is floating point, not empty, without NaNs.

    Where numbers may be missing, not all of them are NaN.
    """
    check.one_of(name, value, Tensor, f"a tensor: pass torch.as_tensor({name})")
    if not value.is_floating_point():
        raise TypeError(f"{name} is {value.dtype}; expected floating point: pass {name}.float()")
    if value.numel() == 0:
        raise ValueError(
            f"{name} is empty, of shape {tuple(value.shape)}; expected at least one point: "
            "collect the batches with torch.cat(batches)"
        )
    # An exported or compiled graph cannot read numbers.
    count = 0 if torch.compiler.is_compiling() else int(value.isnan().sum())
    if missing and count == value.numel():
        raise ValueError(f"{name} is all NaN, which stands for what is missing")
    if count and not missing:
        raise ValueError(
            f"{name} has {count} NaN entries; expected none: "
            f"find them with {name}.isnan().nonzero()"
        )
    return value.to(torch.promote_types(value.dtype, torch.float32))


def check_probs(probs: Tensor, name: str = "probs") -> Tensor:
    """Return class probabilities if they are `(n, C)` and their rows sum to one."""
    checked = check_real(name, probs)
    of_one = "torch.stack([1 - p, p], -1) for probabilities `p` of one class"
    hint = f": pass probs.mean(0) for stacked draws, {of_one}"
    check.shape(name, probs, ("n", "C"), hint)
    check.count(f"the number of classes in {name}", probs.shape[-1], 2, f": pass {of_one}")
    if torch.compiler.is_compiling():
        return checked
    sums = checked.sum(-1)
    # rounding to half precision alone moves a sum by up to eps / 2
    tolerance = max(1e-3, 4 * torch.finfo(probs.dtype).eps)
    if (checked < 0).any() or not ((sums - 1).abs() <= tolerance).all():
        raise ValueError(
            f"{name} are {checked.min():.4g} and more, in rows that sum to between "
            f"{sums.min():.4g} and {sums.max():.4g}; expected probabilities that sum to 1: pass "
            "logits.softmax(-1), or log_probs.exp()"
        )
    return checked


def check_targets(targets: Tensor, probs: Tensor) -> Tensor:
    """Return classes `(n,)` as int64 if they are those of predictions `(n, C)`."""
    check.one_of("targets", targets, Tensor, "an integer tensor: pass torch.as_tensor(targets)")
    hint = ": pass targets.squeeze(-1), or targets.argmax(-1) if they are one-hot"
    check.shape("targets", targets, probs.shape[:1], hint)
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"targets is {targets.dtype}; expected integers: pass targets.long()")
    targets = targets.long()
    most = probs.shape[-1] - 1
    expected = (
        f"0..{most} for {most + 1} classes: pass targets - targets.min() if they start elsewhere, "
        "and leave out ignored points"
    )
    return check.numbers("targets", targets, expected, least=0, most=most)


def check_classified(probs: Tensor, targets: Tensor, soft: bool = False) -> tuple[Tensor, Tensor]:
    """Return probabilities and targets if they fit each other.

    Targets are classes, `(n,)`, or where `soft` allows it probabilities of classes, `(n, C)`.
    """
    probs = check_probs(probs)
    if soft and isinstance(targets, Tensor) and targets.dim() == 2 and targets.is_floating_point():
        check.shape("targets", targets, probs.shape, ": probabilities of the same classes")
        return probs, check_probs(targets, "targets").to(probs)
    return probs, check_targets(targets, probs)


def check_weights(weights: Tensor, values: Tensor) -> Tensor:
    """Return the weights of points, `(n,)`, in their dtype."""
    weights = check_real("weights", check.tensor("weights", weights).to(values))
    hint = ", one for each point: pass mask.float() to leave some out"
    check.shape("weights", weights, values.shape[:1], hint)
    check.points(float(check.numbers("weights", weights, "counts", least=0).sum()))
    return weights


def average(values: Tensor, weights: Tensor | None, known: Tensor | None = None) -> Tensor:
    """Return the mean of numbers `(n, ...)`, of points counted by their weights `(n,)` if given.

    Numbers that are not known, by booleans or counts of the same shape, are left out.
    """
    if weights is None and known is None:
        return values.mean()
    counts = torch.ones_like(values)
    if weights is not None:
        weights = check_weights(weights, values)
        counts = counts * weights.view(-1, *[1] * (values.dim() - 1))
    if known is not None:
        counts = counts * known
    total = counts.sum()
    if not torch.compiler.is_compiling():
        check.points(float(total))
    # A score of a point that does not count may be infinite.
    return (values.where(counts > 0, 0.0) * counts).sum() / total


def check_scores(in_scores: Tensor, out_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores of both kinds of points in one dtype if they are vectors."""
    hint = ": pass probs.amax(-1), or -predictive_entropy(probs)"
    for name, scores in (("in_scores", in_scores), ("out_scores", out_scores)):
        check.shape(name, check_real(name, scores), ("n",), hint)
    in_scores, out_scores = _promoted(in_scores, out_scores)
    # searchsorted warns of strided scores, such as a column of `probs`
    return in_scores.contiguous(), out_scores.contiguous()


def check_regression(mean: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return means and targets in one dtype if they have one shape, and which targets are known.

    Those that are NaN are missing. The means stand in their places, so that gradients are finite.
    """
    mean, targets = check_real("mean", mean), check_real("targets", targets, missing=True)
    check.shape("mean", mean, ("n", ...), ": pass mean.unsqueeze(0)")
    _check_shape("targets", targets, mean)
    mean, targets = _promoted(mean, targets)
    known = ~targets.isnan()
    return mean, targets.where(known, mean.detach()), known


def check_scale(scale: Tensor | float, mean: Tensor) -> Tensor:
    """Return standard deviations if they are positive and fit the means."""
    if isinstance(scale, int | float):
        scale = torch.tensor(float(scale), dtype=mean.dtype, device=mean.device)
    scale = check_real("scale", scale)
    if scale.dim() > 0:
        _check_shape("scale", scale, mean)
    else:
        scale = scale.to(mean.device)
    expected = "positive and finite standard deviations: pass log_scale.exp(), or variance.sqrt()"
    return check.numbers("scale", scale, expected, above=0)


def _check_shape(name: str, value: Tensor, mean: Tensor) -> None:
    call = "reshape(mean.shape)" if value.numel() == mean.numel() else "expand_as(mean)"
    check.shape(name, value, mean.shape, f", that of `mean`: pass {name}.{call}")


def _promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in their common dtype, float32 at least."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(dtype), b.to(dtype)
