"""Links from Gaussian outputs to class probabilities, `E[softmax(f)]` and `E[sigmoid(f)]`.

A link approximates the mean probabilities for outputs `f ~ N(mean, covariance)` [GLM 3].
`CLASS_LINKS` take class logits, `(n, ..., C)`, with a covariance of the classes at each position,
`(n, ..., C, C)`, and return log-probabilities. `BINARY_LINKS` take separate logits, `(n, ...)`,
with a variance for each, and return logits. Both results are in float32 at least, and stay finite
where a probability rounds to zero. The third argument is a number of samples from torch's
generator, which only `log_mc` draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tyxe import check
from tyxe.errors import warn
from tyxe.threads import exclusive
from tyxe.util import at_least_float32

Link = Callable[[Tensor, Tensor, int], Tensor]

NUM_SAMPLES = 100
NUM_NODES = 201  # of a grid of one number
# Numbers drawn or computed at a time, which bounds the memory for large outputs, as of pixels.
CHUNK = 2**22
# Classes that `log_probit` compares with all others at a time, which bounds its memory.
AT_A_TIME = 32


# --------------------------------------------------------------------------- class logits


def log_mc(mean: Tensor, covariance: Tensor, num_samples: int = NUM_SAMPLES) -> Tensor:
    """Average class probabilities over samples: `log 1/S sum_s softmax(f_s)`, `f_s ~ N(m, cov)`.

    The average is unbiased before the logarithm, and its standard error falls as `1/sqrt(S)`.
    """
    mean, covariance = _check_classes(mean, covariance)
    root = square_root(covariance)
    parts = [
        _correlated(mean, root, size).log_softmax(-1).logsumexp(0)
        for size in _sizes(mean, num_samples)
    ]
    return torch.stack(parts).logsumexp(0) - math.log(num_samples)


def log_probit(mean: Tensor, covariance: Tensor, num_samples: int = 0) -> Tensor:
    """Scale differences of logits by their standard deviations, and normalise.

    `p_i = 1 / sum_j exp((f_j - f_i) / sqrt(1 + pi/8 r Var(f_j - f_i)))`, over their sum, with
    `r = C / (2 C - 2)`. Variance that is common to all logits, often most of it, does not change
    probabilities. With two classes this is `logit_probit` of the difference. With more, `r` falls
    to a half, since the sum over the others has little variance; it was found by comparison with
    `log_mc`. Lu, Ie & Sha (2020), Mean-field approximation to Gaussian-softmax integral, for `r` of
    1; MacKay (1992), The evidence framework applied to classification networks.
    """
    mean, covariance = _check_classes(mean, covariance)
    is_masked = mean.isneginf()  # by the net
    mean = mean.clamp_min(torch.finfo(mean.dtype).min)
    own, size = covariance.diagonal(dim1=-2, dim2=-1), mean.shape[-1]
    ratio, parts = size / max(2 * size - 2, 1), []
    for start in range(0, size, AT_A_TIME):
        i = slice(start, start + AT_A_TIME)
        variance = own[..., i, None] + own[..., None, :] - 2 * covariance[..., i, :]
        differences = _shrunk(mean.unsqueeze(-2) - mean[..., i, None], ratio * variance)
        parts.append(-differences.logsumexp(-1))
    return torch.cat(parts, -1).masked_fill(is_masked, -math.inf).log_softmax(-1)


def log_bridge(mean: Tensor, covariance: Tensor, num_samples: int = 0) -> Tensor:
    """Match a Dirichlet to the logits and return the log of its mean, `alpha / sum(alpha)`.

    The approximation is rough at large variances. The logits are conditioned on a sum of zero, so
    adding a constant to all of them leaves the result unchanged only where the rows of the
    covariance have equal sums. Hobbhahn, Kristiadi & Hennig (2022), Fast predictive uncertainty for
    classification with Bayesian deep networks.
    """
    return bridge_log_concentration(mean, covariance).log_softmax(-1)


def bridge_log_concentration(mean: Tensor, covariance: Tensor) -> Tensor:
    """Return `log alpha`, `(n, ..., C)`, of the Laplace bridge's Dirichlet.

    `alpha_i = 1/Sigma'_ii (1 - 2/C + exp(mu'_i)/C^2 sum_k exp(-mu'_k))`, with the logits
    conditioned on a sum of zero: `mu' = mu - Sigma 1 (1^T mu) / (1^T Sigma 1)` and
    `Sigma' = Sigma - Sigma 1 1^T Sigma / (1^T Sigma 1)`. A Gaussian without variance along `1` is
    only centred. `alpha` itself overflows for logits far apart.
    """
    mean, covariance = _check_classes(mean, covariance)
    check.numbers("logits", mean, "finite ones by link='bridge': take link='probit' or 'mc'")
    mu, variances = zero_sum_projection(mean, covariance)
    num_classes = mean.shape[-1]
    spread = mu - 2 * math.log(num_classes) + (-mu).logsumexp(-1, keepdim=True)
    flat = mu.new_tensor(1 - 2 / num_classes).log()
    return torch.logaddexp(flat, spread) - variances.log()


def zero_sum_projection(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return `mu'` and the diagonal of `Sigma'` of `bridge_log_concentration`."""
    limits = torch.finfo(mean.dtype)
    rows = covariance.sum(-1)
    total = rows.sum(-1, keepdim=True)
    # A sum of C^2 numbers below its own rounding is noise, and counts as zero.
    rounding = mean.shape[-1] * limits.eps * covariance.abs().sum((-2, -1)).unsqueeze(-1)
    free = total > rounding
    weights = torch.where(free, rows / torch.where(free, total, 1), 1 / mean.shape[-1])
    mu = mean - weights * mean.sum(-1, keepdim=True)
    before = covariance.diagonal(dim1=-2, dim2=-1)
    after = before - weights * rows
    # Cancellation leaves no variance below its rounding, and a variance of zero has no logarithm.
    return mu, torch.maximum(after, limits.eps * before).clamp_min(limits.tiny)


CLASS_LINKS: dict[str, Link] = {"mc": log_mc, "probit": log_probit, "bridge": log_bridge}


# --------------------------------------------------------------------------- binary logits


def logit_integral(mean: Tensor, variance: Tensor, num_samples: int = 0) -> Tensor:
    """Average probabilities over a grid: `sum_i w_i sigmoid(f_i)`, `f_i = m + z_i sqrt(v)`.

    For variances below 600 the error is less than 1e-5, and for any less than 0.016.
    """
    mean, variance = _check_binary(mean, variance)
    scale = variance.clamp_min(0).sqrt()
    total = mean.new_full((2, *mean.shape), -math.inf)
    chunk = max(1, CHUNK // max(1, mean.numel()))
    for nodes, log_weights in zip(*(part.split(chunk) for part in normal_grid(mean)), strict=True):
        logits = mean + scale * nodes
        signed = torch.stack([logits, -logits])
        total = total.logaddexp((logsigmoid(signed) + log_weights).logsumexp(1))
    log_yes, log_no = total
    return log_yes - log_no


def normal_grid(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes of a standard normal, and logs of their weights, `(nodes, 1, ...)`.

    They have the dtype of a tensor, and as many dimensions after the first as it has.
    """
    nodes = torch.linspace(-8, 8, NUM_NODES, device=like.device, dtype=like.dtype)
    nodes = nodes.view(-1, *[1] * like.dim())
    return nodes, (-0.5 * nodes.square()).log_softmax(0)


def logit_probit(mean: Tensor, variance: Tensor, num_samples: int = 0) -> Tensor:
    """Scale each logit by its standard deviation: `f / sqrt(1 + pi/8 v)`.

    It is also used for `"bridge"`: with two classes the variances of the zero-sum logits cancel
    from `alpha / sum(alpha)`, which is `sigmoid(f)` for any uncertainty.
    """
    return _shrunk(*_check_binary(mean, variance))


BINARY_LINKS: dict[str, Link] = {
    "mc": logit_integral,
    "probit": logit_probit,
    "bridge": logit_probit,
}


# --------------------------------------------------------------------------- pieces


def sample_outputs(mean: Tensor, covariance: Tensor, num_samples: int = NUM_SAMPLES) -> Tensor:
    """Draw outputs from `N(mean, covariance)`, independently at every position.

    The covariance is `(n, ..., C, C)`, or `(n, 1, 1)` for a mean `(n,)`, and the samples
    `(S, *mean.shape)`, in float32 at least. No jitter is added.
    """
    if mean.dim() == 1 and covariance.shape == (len(mean), 1, 1):
        return sample_outputs(mean.unsqueeze(-1), covariance, num_samples).squeeze(-1)
    mean, covariance = _check_classes(mean, covariance)
    count = check.count("num_samples", num_samples)
    return _correlated(mean, square_root(covariance), count)


def _correlated(mean: Tensor, root: Tensor, num_samples: int) -> Tensor:
    return mean + (root @ _noise(mean, *mean.shape, num_samples)).movedim(-1, 0)


def _noise(like: Tensor, *shape: int) -> Tensor:
    with exclusive():  # another thread may have set the generators back for a while
        return like.new_empty(shape).normal_()


def square_root(covariance: Tensor) -> Tensor:
    """Return `L` with `L L^T = covariance`."""
    root, failed = torch.linalg.cholesky_ex(covariance)
    singular = failed > 0
    if not bool(singular.any()):
        return root
    eigenvalues, vectors = torch.linalg.eigh(covariance[singular])
    _warn_indefinite(eigenvalues)
    root = root.clone()
    root[singular] = vectors * eigenvalues.clamp_min(0).sqrt().unsqueeze(-2)
    return root


def _warn_indefinite(eigenvalues: Tensor) -> None:
    smallest, largest = eigenvalues[..., 0], eigenvalues.abs().amax(-1)
    if bool((smallest < -math.sqrt(torch.finfo(smallest.dtype).eps) * largest).any()):
        warn(
            f"a covariance of outputs has the eigenvalue {float(smallest.min()):.3g}, too negative "
            "for rounding; it counts as zero: compute the covariance in float64",
        )


def _shrunk(mean: Tensor, variance: Tensor) -> Tensor:
    return mean / (1 + math.pi / 8 * variance.clamp_min(0)).sqrt()


def _sizes(mean: Tensor, num_samples: int) -> Iterator[int]:
    """Yield the numbers of samples to draw at a time."""
    check.count("num_samples", num_samples)
    chunk = max(1, CHUNK // max(1, mean.numel()))
    for start in range(0, num_samples, chunk):
        yield min(chunk, num_samples - start)


def _check_classes(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    hint = ": pass torch.diag_embed(variance) for independent outputs"
    check.shape("covariance", covariance, (*mean.shape, mean.shape[-1]), hint)
    return _promoted(mean, covariance)


def _check_binary(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    hint = ", as of the mean: pass covariance.diagonal(dim1=-2, dim2=-1)"
    check.shape("variance", variance, mean.shape, hint)
    return _promoted(mean, variance)


def _promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return at_least_float32(a.to(dtype)), at_least_float32(b.to(dtype))
