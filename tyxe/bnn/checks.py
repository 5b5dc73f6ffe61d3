"""Errors before a fit, messages when one goes wrong, warnings after it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributions as td
from pyro.infer.autoguide import AutoDelta
from torch import Tensor
from torch.optim import Optimizer

from tyxe.bnn.history import History
from tyxe.curvature import check_is_tensor
from tyxe.distributions import JointMarginal, PrunedNormal, is_discrete
from tyxe.errors import TyxeWarning
from tyxe.likelihoods import Likelihood
from tyxe.poutine import masked_pointwise

if TYPE_CHECKING:
    from tyxe.bnn.elbo import ElboTerms
    from tyxe.bnn.predict import SupervisedBNN

__all__ = [
    "check_first_batch",
    "check_fit_arguments",
    "check_known",
    "check_options",
    "check_outputs",
    "nonfinite_message",
    "warn_of_result",
]

# A KL this many times the data term, in nats, says that the bound is about the prior.
KL_DWARFS = 100.0
# Scales outside of these multiples of the prior's are no posterior of anything.
COLLAPSED, EXPLODED = 1e-7, 10.0


def check_fit_arguments(optim: Any, num_epochs: Any, num_particles: Any) -> None:
    """Raise if `fit` was called with arguments swapped or out of range."""
    for name, count in (("num_epochs", num_epochs), ("num_particles", num_particles)):
        if not isinstance(count, int) or isinstance(count, bool):
            hint = ""
            if isinstance(optim, int | float) or isinstance(count, Optimizer):
                hint = "; the order is fit(data_loader, optim, num_epochs)"
            raise TypeError(f"{name} is {_brief(count)}; expected an integer{hint}")
    if num_epochs < 0 or num_particles < 1:
        raise ValueError(
            f"num_epochs is {num_epochs} and num_particles {num_particles}; expected at least 0 "
            "and 1"
        )


def check_known(name: str, given: str, known: Iterable[str]) -> None:
    """Raise for the name of something that there is not."""
    if given not in known:
        raise ValueError(f"{name} is {given!r}; expected one of {', '.join(map(repr, known))}")


def check_options(beta: Any, clip_norm: float | None) -> None:
    """Raise for a weight or a norm that is negative or not a number."""
    if not callable(beta) and not beta >= 0:
        raise ValueError(f"beta is {beta}; expected 0 or more, or a function of the epoch")
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm}; expected a positive number")


def _brief(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def check_first_batch(
    bnn: SupervisedBNN, draw: Callable[[], Mapping[str, Tensor]], inputs: Any, targets: Tensor
) -> None:
    """Raise if targets do not fit the predictions, or the batch is larger than the data set.

    The net runs once with a draw, in eval mode and without gradients, and the generators are set
    back, so that nothing is changed.
    """
    devices = [targets.device] if targets.is_cuda else []
    with torch.random.fork_rng(devices), bnn._predicting():
        predictions = bnn.run_net(draw(), inputs)
        check_is_tensor(predictions)
        predictions, targets = _counted(bnn.likelihood, predictions, targets)
        # Not through `check_outputs`: a warning points at the caller of `fit`, so many calls up.
        if len(targets):
            bnn.likelihood.check_targets(predictions, targets)


def check_outputs(likelihood: Likelihood, predictions: Tensor, targets: Tensor) -> None:
    """Raise as `check_first_batch`, for a forward that is made already.

    Args:
        likelihood: of the targets.
        predictions: the net's output.
        targets: of the batch.
    """
    predictions, targets = _counted(likelihood, predictions, targets)
    if len(targets):
        likelihood.check_targets(predictions, targets)


def _counted(likelihood: Likelihood, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What of a batch can be checked: nothing, where the net's output is not finite."""
    rows = masked_pointwise(likelihood.data_name, torch.arange(len(targets)))
    if len(rows) > likelihood.dataset_size:
        raise ValueError(
            f"the batch has {len(rows)} points, but the likelihood was built with dataset_size="
            f"{likelihood.dataset_size}; pass the number of training points"
        )
    if len(rows) < len(targets):
        # The others are not looked at: their labels may be -1 or NaN.
        rows = rows.to(targets.device)
        predictions, targets = predictions[rows], targets[rows]
    if not bool(predictions.isfinite().all()):
        return predictions[:0], targets[:0]
    return predictions, targets


def nonfinite_message(bnn: SupervisedBNN, terms: ElboTerms, inputs: Any, targets: Tensor) -> str:
    """Say where a loss or gradient stopped being finite."""
    name = bnn.likelihood.data_name
    if not bool(terms.data.isfinite()):
        where = f"the log-likelihood at site {name!r} is {terms.data.item()}"
        broken = [
            n for n, v in terms.values.items() if not bool(torch.as_tensor(v + 0).isfinite().all())
        ]
        if broken:
            where += f", with non-finite draws of {', '.join(broken)}"
        else:
            where += ": look for inputs or targets that are not finite, or outputs that overflow"
    elif not bool(terms.kl.isfinite()):
        where = "the KL is not finite" + _bad_kl_sites(bnn)
    else:
        bad = [
            name
            for name, p in bnn.named_parameters()
            if p.grad is not None and not bool(p.grad.isfinite().all())
        ]
        where = f"the gradient is not finite at {', '.join(bad)}"
    return (
        f"training stopped: {where}. The parameters are those before this step; a smaller "
        "learning rate, clip_norm, or smaller initial scales usually help"
    )


def _bad_kl_sites(bnn: SupervisedBNN) -> str:
    posterior = getattr(getattr(bnn, "net_guide", None), "posterior", None)
    if posterior is None:
        return ""
    priors = {bnn.net_prior.prefix + name: prior for name, prior in bnn.net_prior.priors()}
    bad = []
    for name, q in posterior().items():
        prior = priors.get(name)
        if isinstance(prior, td.Distribution) and not isinstance(prior, JointMarginal):
            with torch.no_grad():
                value = q.rsample() if q.has_rsample else q.sample()
                if not bool(prior.log_prob(value).isfinite().all()):
                    bad.append(name)
    return f" at {', '.join(bad)}" if bad else ""


def warn_of_result(bnn: SupervisedBNN, history: History) -> None:
    """Warn if scales collapsed or exploded, or the KL dwarfs the data."""
    if not history.loss:
        return
    # A net that fits its data has a data term near zero: a nat per point is the least that counts.
    size = float(bnn.likelihood.dataset_size)
    data = max(abs(history.log_likelihood[0]), abs(history.log_likelihood[-1]), size)
    weighted = history.loss[-1] + history.log_likelihood[-1]
    # A MAP's is minus a log-density, whose constants say nothing.
    is_map = isinstance(getattr(getattr(bnn, "net_guide", None), "guide", None), AutoDelta)
    if weighted > KL_DWARFS * data and not is_map:
        warnings.warn(
            f"the weighted KL ({weighted:.3g} nats) dwarfs the data ({data:.3g} nats): the bound "
            "says more about the prior than about them. Check dataset_size; train on, with "
            "lr_multipliers={'scale': 10} if scales started small; or weigh the KL by beta < 1",
            TyxeWarning,
            stacklevel=3,
        )
    _warn_of_scales(bnn)


def _warn_of_scales(bnn: SupervisedBNN) -> None:
    posterior = getattr(getattr(bnn, "net_guide", None), "posterior", None)
    if posterior is None:
        return
    priors = dict(bnn.net_prior.priors())
    with torch.no_grad():
        for name, q in posterior().items():
            prior = priors.get(name.removeprefix(bnn.net_prior.prefix))
            ratio = _relative_scale(q, prior)
            if ratio is not None and not COLLAPSED < ratio < EXPLODED:
                what = "collapsed" if ratio <= COLLAPSED else "exploded"
                warnings.warn(
                    f"the standard deviations of site {name!r} have {what}: their median is "
                    f"{ratio:.1e} of the prior's. A lower learning rate for scales "
                    "(lr_multipliers) or a cap (max_guide_scale) may help",
                    TyxeWarning,
                    stacklevel=4,
                )


def _relative_scale(q: td.Distribution, prior: Any) -> float | None:
    # Variances of a joint prior may take a dense matrix.
    joint = isinstance(prior, JointMarginal)
    if joint or not isinstance(prior, td.Distribution) or is_discrete(prior.support):
        return None
    try:
        ratio, scale = q.variance.sqrt() / prior.variance.sqrt(), prior.variance
    except NotImplementedError:
        return None
    if isinstance(q, PrunedNormal):
        ratio = ratio[q.kept]
        if not len(ratio):
            return None
    # A heavy-tailed prior has no scale to compare with.
    finite = bool(ratio.isfinite().all()) and bool(scale.isfinite().all())
    return float(ratio.median()) if finite else None
