"""Errors before a fit, messages when one goes wrong, warnings after it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributions as td
from torch import Tensor
from torch.optim import Optimizer

from tyxe.bnn.history import History
from tyxe.errors import TyxeWarning
from tyxe.poutine import masked_pointwise

if TYPE_CHECKING:
    from tyxe.bnn.elbo import ElboTerms
    from tyxe.bnn.predict import SupervisedBNN

__all__ = ["check_first_batch", "check_fit_arguments", "nonfinite_message", "warn_of_result"]

# A KL this many times the data term, in nats, says that the bound is about the prior.
KL_DWARFS = 10.0
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


def _brief(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"


def check_first_batch(
    bnn: SupervisedBNN, values: Mapping[str, Tensor], inputs: Any, targets: Tensor
) -> None:
    """Raise if targets do not fit the predictions, or the batch is larger than the data set.

    The net runs once, in eval mode and without gradients, so that nothing is changed.
    """
    counted = len(masked_pointwise(bnn.likelihood.data_name, targets.new_ones(len(targets))))
    if counted > bnn.likelihood.dataset_size:
        raise ValueError(
            f"the batch has {counted} points, but the likelihood was built with dataset_size="
            f"{bnn.likelihood.dataset_size}; pass the number of training points"
        )
    state = torch.get_rng_state()
    with bnn._predicting():
        predictions = bnn.run_net(values, inputs)
        if not isinstance(predictions, Tensor):
            raise TypeError(
                f"the net returns a {type(predictions).__name__}; the likelihood needs a tensor: "
                "wrap the net in a module that returns the one to be observed, or use PytorchBNN "
                "with a loss of your own"
            )
        if bool(predictions.isfinite().all()):
            bnn.likelihood.check_targets(predictions, targets)
    torch.set_rng_state(state)


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
        bad = [n for n, p in bnn.named_parameters() if p.grad is not None]
        where = (
            f"the gradient is not finite (of {len(bad)} parameters)"
            if bad
            else ("the gradient is not finite")
        )
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
        if isinstance(prior, td.Distribution):
            with torch.no_grad():
                value = q.rsample() if q.has_rsample else q.sample()
                if not bool(prior.log_prob(value).isfinite().all()):
                    bad.append(name)
    return f" at {', '.join(bad)}" if bad else ""


def warn_of_result(bnn: SupervisedBNN, history: History) -> None:
    """Warn if scales collapsed or exploded, or the KL dwarfs the data."""
    if not history.loss:
        return
    data = max(abs(history.log_likelihood[0]), abs(history.log_likelihood[-1]))
    weighted = history.loss[-1] + history.log_likelihood[-1]
    if weighted > KL_DWARFS * data:
        warnings.warn(
            f"the weighted KL ({weighted:.3g} nats) dwarfs the data term ({data:.3g} nats): the "
            "bound says more about the prior than about the data. Check dataset_size; train on, "
            "with lr_multipliers={'scale': 10} if scales started small; or pass beta < 1 "
            "knowingly",
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
    if not isinstance(prior, td.Distribution):
        return None
    try:
        ratio = q.variance.sqrt() / prior.variance.sqrt()
    except NotImplementedError:
        return None
    return float(ratio.median()) if bool(ratio.isfinite().any()) else None
