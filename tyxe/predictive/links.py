r"""From Gaussian outputs to class probabilities: `E[softmax(f)]` and `E[sigmoid(f)]`.

A link takes the mean and the covariance of the outputs `f ~ N(mean, covariance)` and approximates
the probabilities that they give on average [GLM 3]. `CLASS_LINKS` are for class logits, which come
with a covariance between classes at each position; `BINARY_LINKS` for outputs that are logits each
on their own, which come with a variance each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tyxe.errors import TyxeWarning

__all__ = [
    "BINARY_LINKS",
    "BINARY_LOGITS",
    "CLASS_LINKS",
    "CLASS_LOGITS",
    "Link",
    "bridge",
    "bridge_log_concentration",
    "mc",
    "mc_binary",
    "probit",
    "probit_binary",
    "sample_outputs",
]

Link = Callable[[Tensor, Tensor, int], Tensor]

NUM_SAMPLES = 100
# Numbers drawn at once: enough to keep the machine busy, bounded for outputs per pixel.
CHUNK = 2**22


# --------------------------------------------------------------------------- class logits


def mc(mean: Tensor, covariance: Tensor, num_samples: int = NUM_SAMPLES) -> Tensor:
    r"""Average class probabilities over samples: `1/S sum_s softmax(f_s)`, `f_s ~ N(mean, cov)`.

    Unbiased; the standard error falls as `1/sqrt(S)`. Samples come from torch's generator.

    Args:
        mean: mean of the class logits, `(n, ..., C)`.
        covariance: their covariance at each position, `(n, ..., C, C)`; it may be singular.
        num_samples: number `S` of samples; the links in closed form take it and need none.

    Returns:
        Class probabilities `(n, ..., C)`, in float32 at least.

    Raises:
        ValueError: shapes that do not fit; no samples.

    References:
        [GLM] section 3.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> mc(torch.tensor([[2.0, 0.0]]), torch.zeros(1, 2, 2), num_samples=3)
        tensor([[0.8808, 0.1192]])
    """
    return _log_mc(mean, covariance, num_samples).exp()


def _log_mc(mean: Tensor, covariance: Tensor, num_samples: int) -> Tensor:
    # In logarithms, so that a class which no sample expects has a finite one.
    mean, covariance = _check_classes(mean, covariance)
    root = _root(covariance)
    parts = [
        _correlated(mean, root, size).log_softmax(-1).logsumexp(0)
        for size in _sizes(mean, num_samples)
    ]
    return torch.stack(parts).logsumexp(0) - math.log(num_samples)


def probit(mean: Tensor, covariance: Tensor, num_samples: int = 0) -> Tensor:
    r"""Scale logits by their standard deviations: `softmax(f / sqrt(1 + pi/8 diag(cov)))`.

    Args:
        mean: as in `mc`.
        covariance: as in `mc`.
        num_samples: not used.

    Returns:
        As `mc`.

    Raises:
        ValueError: shapes that do not fit.

    References:
        [GLM] section 3; MacKay (1992), The evidence framework applied to classification networks.

    Example:
        >>> probit(torch.tensor([[2.0, 0.0]]), 8 * torch.eye(2).unsqueeze(0))
        tensor([[0.7277, 0.2723]])
    """
    return _log_probit(mean, covariance, num_samples).exp()


def _log_probit(mean: Tensor, covariance: Tensor, num_samples: int) -> Tensor:
    mean, covariance = _check_classes(mean, covariance)
    return _shrunk(mean, covariance.diagonal(dim1=-2, dim2=-1)).log_softmax(-1)


def bridge(mean: Tensor, covariance: Tensor, num_samples: int = 0) -> Tensor:
    r"""Match a Dirichlet to the logits and return its mean `alpha / sum(alpha)`.

    Rough at large variance, and as the logits' common part is fixed by conditioning on a sum of
    zero, adding a constant to all logits leaves the result as it is only where the rows of the
    covariance have equal sums.

    Args:
        mean: as in `mc`.
        covariance: as in `mc`.
        num_samples: not used.

    Returns:
        As `mc`.

    Raises:
        ValueError: shapes that do not fit.

    References:
        Hobbhahn, Kristiadi & Hennig (2022), Fast predictive uncertainty for classification with
        Bayesian deep networks.

    Example:
        >>> bridge(torch.tensor([[2.0, 0.0, 0.0]]), torch.eye(3).unsqueeze(0))
        tensor([[0.6464, 0.1768, 0.1768]])
    """
    return _log_bridge(mean, covariance, num_samples).exp()


def _log_bridge(mean: Tensor, covariance: Tensor, num_samples: int) -> Tensor:
    return bridge_log_concentration(mean, covariance).log_softmax(-1)


def bridge_log_concentration(mean: Tensor, covariance: Tensor) -> Tensor:
    r"""Return `log alpha` of the Laplace bridge's Dirichlet.

    On the plane of logits with sum zero, `mu' = mu - Sigma 1 (1^T mu) / (1^T Sigma 1)` and
    `Sigma' = Sigma - Sigma 1 1^T Sigma / (1^T Sigma 1)` (a Gaussian that has no variance along `1`
    is only centred), `alpha_i = 1/Sigma'_ii (1 - 2/C + exp(mu'_i)/C^2 sum_k exp(-mu'_k))`. The
    logarithm, because logits far apart overflow `alpha`.

    Args:
        mean: as in `mc`.
        covariance: as in `mc`.

    Returns:
        Logarithms of concentrations, `(n, ..., C)`.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> bridge_log_concentration(torch.zeros(1, 3), torch.eye(3).unsqueeze(0)).exp()
        tensor([[1., 1., 1.]])
    """
    mean, covariance = _check_classes(mean, covariance)
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
    # A sum of C^2 numbers below its own rounding is zero: its direction is noise.
    rounding = mean.shape[-1] * limits.eps * covariance.abs().sum((-2, -1)).unsqueeze(-1)
    free = total > rounding
    weights = torch.where(free, rows / torch.where(free, total, 1), 1 / mean.shape[-1])
    mu = mean - weights * mean.sum(-1, keepdim=True)
    before = covariance.diagonal(dim1=-2, dim2=-1)
    after = before - weights * rows
    # What is left of a variance by cancellation, or of none, is not below this.
    return mu, torch.maximum(after, limits.eps * before).clamp_min(limits.tiny)


# The logarithms, which stay finite where a probability rounds to zero.
CLASS_LOGITS: dict[str, Link] = {"mc": _log_mc, "probit": _log_probit, "bridge": _log_bridge}
CLASS_LINKS: dict[str, Link] = {"mc": mc, "probit": probit, "bridge": bridge}


# --------------------------------------------------------------------------- binary logits


def mc_binary(mean: Tensor, variance: Tensor, num_samples: int = NUM_SAMPLES) -> Tensor:
    r"""Average probabilities over samples: `1/S sum_s sigmoid(f_s)`, `f_s ~ N(mean, variance)`.

    Args:
        mean: mean of each logit, `(n, ...)`.
        variance: its variance, `(n, ...)`.
        num_samples: number `S` of samples; the links in closed form take it and need none.

    Returns:
        Probabilities `(n, ...)`, in float32 at least.

    Raises:
        ValueError: shapes that do not fit; no samples.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> mc_binary(torch.tensor([2.0]), torch.zeros(1), num_samples=3)
        tensor([0.8808])
    """
    return _logit_mc(mean, variance, num_samples).sigmoid()


def _logit_mc(mean: Tensor, variance: Tensor, num_samples: int) -> Tensor:
    mean, variance = _check_binary(mean, variance)
    scale = variance.clamp_min(0).sqrt()
    sums = []
    for size in _sizes(mean, num_samples):
        logits = mean + scale * mean.new_empty(size, *mean.shape).normal_()
        signed = torch.stack([logits, -logits])
        sums.append(logsigmoid(signed).logsumexp(1))
    log_yes, log_no = torch.stack(sums).logsumexp(0)
    return log_yes - log_no


def probit_binary(mean: Tensor, variance: Tensor, num_samples: int = 0) -> Tensor:
    r"""Scale each logit by its standard deviation: `sigmoid(f / sqrt(1 + pi/8 v))`.

    It is also the binary bridge: with two classes the variances of the zero-sum logits are equal,
    cancel from `alpha / sum(alpha)`, and leave `sigmoid(f)` whatever the uncertainty.

    Args:
        mean: as in `mc_binary`.
        variance: as in `mc_binary`.
        num_samples: not used.

    Returns:
        As `mc_binary`.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> probit_binary(torch.tensor([2.0]), torch.tensor([8.0]))
        tensor([0.7277])
    """
    return _logit_probit(mean, variance, num_samples).sigmoid()


def _logit_probit(mean: Tensor, variance: Tensor, num_samples: int) -> Tensor:
    return _shrunk(*_check_binary(mean, variance))


# The same as logits, which stay finite where a probability rounds to zero or one.
BINARY_LOGITS: dict[str, Link] = {
    "mc": _logit_mc,
    "probit": _logit_probit,
    "bridge": _logit_probit,
}
BINARY_LINKS: dict[str, Link] = {"mc": mc_binary, "probit": probit_binary, "bridge": probit_binary}


# --------------------------------------------------------------------------- pieces


def sample_outputs(mean: Tensor, covariance: Tensor, num_samples: int = NUM_SAMPLES) -> Tensor:
    """Draw outputs from `N(mean, covariance)`, independently at every position.

    A functional covariance is often singular, where Cholesky's factorisation stops; such matrices
    are factorised through their eigenvectors, eigenvalues that rounding made negative set to zero.
    Nothing is ever added to a covariance.

    Args:
        mean: `(n, ..., C)`; or `(n,)`, of nets with one output for a point.
        covariance: `(n, ..., C, C)`; or `(n, 1, 1)`.
        num_samples: number `S` of samples.

    Returns:
        Samples `(S, *mean.shape)`, in float32 at least.

    Raises:
        ValueError: shapes that do not fit; no samples.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> together = torch.ones(1, 2, 2)  # two outputs that are one
        >>> a, b = sample_outputs(torch.zeros(1, 2), together, 5).unbind(-1)
        >>> torch.allclose(a, b)
        True
    """
    if mean.dim() == 1 and covariance.shape == (len(mean), 1, 1):
        return sample_outputs(mean.unsqueeze(-1), covariance, num_samples).squeeze(-1)
    mean, covariance = _check_classes(mean, covariance)
    _check_count(num_samples)
    return _correlated(mean, _root(covariance), num_samples)


def _correlated(mean: Tensor, root: Tensor, num_samples: int) -> Tensor:
    noise = mean.new_empty(*mean.shape, num_samples).normal_()
    return mean + (root @ noise).movedim(-1, 0)


def _root(covariance: Tensor) -> Tensor:
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
        warnings.warn(
            f"a covariance of outputs has the eigenvalue {float(smallest.min()):.3g}, too negative "
            "for rounding; it counts as zero: compute the covariance in float64",
            TyxeWarning,
            stacklevel=4,
        )


def _shrunk(mean: Tensor, variance: Tensor) -> Tensor:
    return mean / (1 + math.pi / 8 * variance.clamp_min(0)).sqrt()


def _sizes(mean: Tensor, num_samples: int) -> Iterator[int]:
    """Yield how many samples to draw at once."""
    _check_count(num_samples)
    chunk = max(1, CHUNK // max(1, mean.numel()))
    for start in range(0, num_samples, chunk):
        yield min(chunk, num_samples - start)


def _check_count(num_samples: int) -> None:
    if num_samples < 1:
        raise ValueError(f"num_samples is {num_samples}; expected at least 1")


def _check_classes(mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    if mean.dim() < 1 or covariance.shape != mean.shape + mean.shape[-1:]:
        raise ValueError(
            f"mean has shape {tuple(mean.shape)} and covariance {tuple(covariance.shape)}; expected"
            " (n, ..., C) and (n, ..., C, C): pass torch.diag_embed(variance) for independent ones"
        )
    return _promoted(mean, covariance)


def _check_binary(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    if mean.shape != variance.shape:
        raise ValueError(
            f"mean has shape {tuple(mean.shape)} and variance {tuple(variance.shape)}; expected the"
            " same: pass covariance.diagonal(dim1=-2, dim2=-1)"
        )
    return _promoted(mean, variance)


def _promoted(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    return a.to(dtype), b.to(dtype)
