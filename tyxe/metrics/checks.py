"""Checks of inputs that all metrics share."""

import torch
from torch import Tensor


def check_real(name: str, value: Tensor) -> Tensor:
    """Return the tensor in float32 at least, if it is floating point, not empty, without NaNs."""
    if not isinstance(value, Tensor):
        raise TypeError(
            f"`{name}` is of type {type(value).__name__}, expected a tensor: "
            f"pass torch.as_tensor({name})"
        )
    if not value.is_floating_point():
        raise TypeError(
            f"`{name}` has dtype {value.dtype}, expected floating point: pass {name}.float()"
        )
    if value.numel() == 0:
        raise ValueError(
            f"`{name}` is empty, of shape {tuple(value.shape)}, expected at least one point: "
            "collect the batches with torch.cat(batches)"
        )
    if value.isnan().any():
        raise ValueError(
            f"`{name}` has {int(value.isnan().sum())} NaN entries, expected none: "
            f"find them with {name}.isnan().nonzero()"
        )
    return value.to(torch.promote_types(value.dtype, torch.float32))


def check_probs(probs: Tensor) -> Tensor:
    """Return class probabilities if they are `(n, C)` and their rows sum to one."""
    checked = check_real("probs", probs)
    if probs.dim() != 2 or probs.shape[-1] < 2:
        raise ValueError(
            f"`probs` has shape {tuple(probs.shape)}, expected (n, C) with C >= 2: pass "
            "probs.mean(0) for stacked draws, torch.stack([1 - p, p], -1) for probabilities `p` "
            "of one class"
        )
    if (checked < 0).any():
        raise ValueError(
            f"`probs` has negative entries, the smallest {checked.min():.4g}, expected "
            "probabilities: pass logits.softmax(-1), or log_probs.exp()"
        )
    sums = checked.sum(-1)
    # rounding to half precision alone moves a sum by up to eps / 2
    tolerance = max(1e-3, 4 * torch.finfo(probs.dtype).eps)
    if not ((sums - 1).abs() <= tolerance).all():
        raise ValueError(
            f"the rows of `probs` sum to between {sums.min():.4g} and {sums.max():.4g}, expected "
            "1: pass logits.softmax(-1), or probs / probs.sum(-1, keepdim=True)"
        )
    return checked


def check_targets(targets: Tensor, probs: Tensor) -> Tensor:
    """Return classes `(n,)` as int64 if they are those of predictions `(n, C)`."""
    if not isinstance(targets, Tensor):
        raise TypeError(
            f"`targets` is of type {type(targets).__name__}, expected an integer tensor: "
            "pass torch.as_tensor(targets)"
        )
    if targets.shape != probs.shape[:1]:
        raise ValueError(
            f"`targets` has shape {tuple(targets.shape)}, expected ({len(probs)},) for `probs` "
            f"of shape {tuple(probs.shape)}: pass targets.squeeze(-1), or targets.argmax(-1) if "
            "they are one-hot"
        )
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(
            f"`targets` has dtype {targets.dtype}, expected integer: pass targets.long()"
        )
    _check_device("targets", targets, "probs", probs)
    targets = targets.long()
    low, high, num_classes = int(targets.min()), int(targets.max()), probs.shape[-1]
    if low < 0 or high >= num_classes:
        raise ValueError(
            f"`targets` range over {low}..{high}, expected 0..{num_classes - 1} for "
            f"{num_classes} classes: pass targets - targets.min() if they start elsewhere, and "
            "leave out ignored points"
        )
    return targets


def check_classified(probs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return probabilities and targets if they fit each other."""
    probs = check_probs(probs)
    return probs, check_targets(targets, probs)


def check_weights(weights: Tensor, values: Tensor) -> Tensor:
    """Return how often each of some points counts, `(n,)`, in their dtype."""
    weights = check_real("weights", torch.as_tensor(weights).to(values))
    if weights.shape != values.shape[:1]:
        raise ValueError(
            f"`weights` has shape {tuple(weights.shape)}, expected one for each of {len(values)} "
            "points: pass mask.float() to leave some out"
        )
    if (weights < 0).any() or not weights.any():
        raise ValueError("`weights` has negative entries, or none above 0, expected counts")
    return weights


def average(values: Tensor, weights: Tensor | None) -> Tensor:
    """Return the mean of numbers `(n, ...)`, of points counted by their weights `(n,)` if given."""
    if weights is None:
        return values.mean()
    weights = check_weights(weights, values)
    kept = weights > 0  # a score of a point that does not count may be infinite
    each = values[kept].flatten(1).mean(1) if values.dim() > 1 else values[kept]
    return each @ weights[kept] / weights.sum()


def check_scores(in_scores: Tensor, out_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores of both kinds of points in one dtype if they are vectors."""
    for name, scores in (("in_scores", in_scores), ("out_scores", out_scores)):
        if check_real(name, scores).dim() != 1:
            raise ValueError(
                f"`{name}` has shape {tuple(scores.shape)}, expected (n,): "
                "pass probs.amax(-1), or -predictive_entropy(probs)"
            )
    _check_device("out_scores", out_scores, "in_scores", in_scores)
    in_scores, out_scores = _promoted(in_scores, out_scores)
    # searchsorted warns of strided scores, such as a column of `probs`
    return in_scores.contiguous(), out_scores.contiguous()


def check_regression(mean: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return means and targets in one dtype if they have one shape."""
    mean, targets = check_real("mean", mean), check_real("targets", targets)
    if mean.dim() == 0:
        raise ValueError("`mean` has shape (), expected (n, ...): pass mean.unsqueeze(0)")
    _check_same_shape("targets", targets, mean)
    return _promoted(mean, targets)


def check_scale(scale: Tensor | float, mean: Tensor) -> Tensor:
    """Return standard deviations if they are positive and fit the means."""
    if isinstance(scale, int | float):
        scale = torch.tensor(float(scale), dtype=mean.dtype)
    scale = check_real("scale", scale)
    if scale.dim() > 0:
        _check_same_shape("scale", scale, mean)
    else:
        scale = scale.to(mean.device)
    if not ((scale > 0) & scale.isfinite()).all():
        raise ValueError(
            f"`scale` ranges from {scale.min():.4g} to {scale.max():.4g}, expected positive and "
            "finite standard deviations: pass log_scale.exp(), or variance.sqrt()"
        )
    return scale


def _check_same_shape(name: str, value: Tensor, mean: Tensor) -> None:
    if value.shape != mean.shape:
        call = f"{name}.reshape(mean.shape)"
        if value.numel() != mean.numel():
            call = f"{name}.expand_as(mean), or as many {name} as predictions"
        raise ValueError(
            f"`{name}` has shape {tuple(value.shape)}, expected {tuple(mean.shape)}, that of "
            f"`mean`: pass {call}"
        )
    _check_device(name, value, "mean", mean)


def _check_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    if value.device != other.device:
        raise ValueError(
            f"`{name}` is on {value.device}, expected {other.device}, that of `{other_name}`: "
            f"pass {name}.to({other_name}.device)"
        )


def _promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both in their common dtype, float32 at least."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(dtype), b.to(dtype)
