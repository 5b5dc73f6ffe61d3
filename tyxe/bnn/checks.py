"""Checks before a fit, the message of one that fails, and warnings after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
import torch.distributions as td
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from tyxe import check
from tyxe.bnn.checkpoint import History
from tyxe.bnn.compiled import restore
from tyxe.bnn.reading import look_at_sites
from tyxe.curvature.linearize import check_is_tensor
from tyxe.distributions import JointMarginal, PrunedNormal
from tyxe.errors import warn
from tyxe.guides.base import AnyGuide
from tyxe.guides.normal import SWAGGuide
from tyxe.likelihoods.checks import check_batch
from tyxe.predictive.forwards import norms_of
from tyxe.rng import torch_rng_kept
from tyxe.util import Inputs, is_discrete, is_plain

if TYPE_CHECKING:
    from tyxe.bnn.elbo import ElboTerms
    from tyxe.bnn.predict import SupervisedBNN

# Ratio of KL and data term, in nats, above which the bound says more about the prior.
KL_DWARFS = 100.0
# Relative error of one addition in single precision.
ROUNDING = 2.0**-24
# Elements of a site whose scales are looked at.
LOOKED_AT = 10_000
# Distance of inputs from standard ones, see `distance_from_standard`, from which on fits suffer.
UNLIKE = 20.0
# Distance from which on they warn, which features of other nets stay below, and bytes do not; and
# the mean from which on they warn, see `distance_from_zero`. Measured with 250 rows of friedman,
# energy and breast cancer, two layers of 50 units, 150 epochs of Adam at 0.01, for MAP, mean field
# and Laplace. A mean of 5 of all columns multiplied squared errors, or error rates, by 1.7 to 12,
# of 10 by 2 to 13, of 20 by 4 to 23; of one column of 10 by 0.7 to 3. One column 20 times as large
# as others multiplied squared errors by 0.7 to 1.4, and 100 times as large by 0.9 to 7.
FAR, OFF_CENTRE = 100.0, 10.0
# Rows and columns of inputs that are looked at.
LOOKED_AT_ROWS, LOOKED_AT_COLUMNS = 256, 10_000
_DROP_POINTS = "drop points by torch.isfinite(x)"
# Scales outside of these multiples of the prior's are not plausible for a posterior.
COLLAPSED, EXPLODED = 1e-7, 10.0


def check_num_epochs(optim: Any, num_epochs: Any) -> int:
    """Return the number of epochs; raise if it is swapped with the optimiser, or out of range."""
    swapped = isinstance(optim, SupportsIndex | float) or isinstance(num_epochs, Optimizer)
    hint = "; the order is fit(data_loader, optim, num_epochs)" if swapped else ""
    return check.count("num_epochs", num_epochs, 0, hint)


def check_beta(beta: Any, epoch: int | None = None) -> float:
    """Return the KL's weight, of an epoch where it is a function of that; raise if it is none."""
    if epoch is not None:
        return check.number(f"beta({epoch})", beta, least=0)
    return check.number("beta", beta, least=0, hint=", or a function of the epoch")


def check_one_batch(
    bnn: SupervisedBNN, draw: Callable[[], Mapping[str, Tensor]], inputs: Inputs, targets: Tensor
) -> None:
    """Raise if targets do not fit the predictions, or the batch is larger than the data set.

    The net runs once with a draw, in eval mode and without gradients, and the random generators are
    set back afterwards. So are buffers and trained parameters that it changes in place, and what it
    sets on the net. Sites that it does not read are looked for.
    """
    trained = [p.detach() for p in bnn.net.parameters() if p.requires_grad]
    held = [*trained, *bnn.net.buffers()]
    before = [tensor.clone() for tensor in held]
    try:
        with torch_rng_kept(), bnn._predicting():
            predictions = bnn._stand_in(draw()).call_apart(inputs)
            check_is_tensor(predictions)
            check_batch(bnn.likelihood, predictions, targets)
        look_at_sites(bnn, inputs, needs_gradients=True)
    finally:
        # A forward may have given a cache another size.
        whole = [
            (t, value) for t, value in zip(held, before, strict=True) if t.shape == value.shape
        ]
        restore([t for t, _ in whole], [value for _, value in whole])
    _warn_of_inputs(bnn, inputs)


def _warn_of_inputs(bnn: SupervisedBNN, inputs: Inputs) -> None:
    """Warn once of inputs that priors, starts and learning rates are not for."""
    if bnn._runtime.has_met_inputs:
        return
    bnn._runtime.has_met_inputs = True
    columns = columns_of(bnn.net, inputs)
    distance, offset = distance_from_standard(columns), distance_from_zero(columns)
    if (distance > FAR or offset > OFF_CENTRE) and distance < math.inf:
        warn(
            f"inputs are not standardised: some columns are {distance:,.0f} times as large as "
            "others or as 1, and priors, starts and learning rates are for columns of mean 0 and "
            "standard deviation 1. Fit to (x - mean) / std with mean and std of the training data, "
            "to images divided by 255, or to a net that begins with nn.BatchNorm1d"
        )


def are_finite(inputs: Inputs) -> bool:
    """Whether all numbers in the tensors of a batch's inputs are finite."""
    plain = [
        leaf
        for leaf in tree_leaves(inputs)
        if is_plain(leaf)
        and (leaf.is_complex() or leaf.is_floating_point())
        and leaf.element_size() > 1
    ]
    # A sum is faster, and may be infinite where no number is.
    return all(bool(t.sum().isfinite()) or bool(t.isfinite().all()) for t in plain)


def check_exposes(bnn: Any, purpose: str) -> None:
    """Raise a ValueError if neither the net nor the likelihood has anything to be inferred."""
    if not len(bnn.net_prior) and not bnn.likelihood.latent_priors():
        raise ValueError(f"the prior exposes no parameters, so there is nothing to {purpose}")


def check_is_finite(inputs: Inputs) -> None:
    """Raise a ValueError for the inputs of a batch if a tensor among them is not finite."""
    if not are_finite(inputs):
        raise ValueError(f"a batch has inputs that are not finite: {_DROP_POINTS}")


def distance_from_standard(columns: Iterable[Tensor]) -> float:
    """Return how far `columns_of` inputs are from mean 0 and standard deviation 1, from 1 up.

    It is the largest root mean square of a column over the smallest, where that is below 1; of many
    the smallest twentieth is left out. It is 1 where there are none.
    """
    found = 1.0
    for x in columns:
        sizes = x.square().mean(0).sqrt().sort().values
        found = max(found, float(sizes[-1] / sizes[len(sizes) // 20].clamp(max=1.0)))
    return found


def distance_from_zero(columns: Iterable[Tensor]) -> float:
    """Return the largest mean of a column over its standard deviation, or over 1 if this is less.

    It is 0 where there are none.
    """
    found = 0.0
    for x in columns:
        # Rows of a batch may be in order, and so nearer to each other than those of all data.
        found = max(found, float((x.mean(0).abs() / x.std(0).clamp(min=1.0)).max()))
    return found


def columns_of(net: nn.Module, inputs: Inputs) -> list[Tensor]:
    """Return the columns of each of a net's inputs, `(rows, columns)`, that can be compared.

    Columns of which half is one number, such as codes and borders of images, are left out. There
    are none of fewer than ten rows, of what is no real number, and of a net that begins with a
    norm, or with buffers, which may be a mean and a scale.
    """
    norms, found = norms_of(net), []
    for part in net.modules():
        if part in norms or any(True for _ in part.buffers(recurse=False)):
            return []
        if not any(part.children()):
            break
    for leaf in tree_leaves(inputs):
        if not is_plain(leaf) or not leaf.is_floating_point() or leaf.dim() < 2:
            continue
        x = leaf.detach()[:LOOKED_AT_ROWS].flatten(1)
        x = x[:, :: max(1, x.shape[1] // LOOKED_AT_COLUMNS)].float()
        x = x[:, (x == x.median(0).values).float().mean(0) < 0.5] if len(x) >= 10 else x[:, :0]
        if x.numel():
            found.append(x)
    return found


def warn_of_size(points: float, size: float, num_terms: int = 1) -> bool:
    """Warn of an epoch with far fewer points than a data set, or more; return whether it is so.

    The points are a sum of so many terms, such as weights of batches, in single precision.
    """
    if not points:
        warn("no point of an epoch counts, so only the prior is fitted: look for NaN in targets")
        return True
    # Somewhat fewer points in an epoch may be intended, as with a sampler.
    if size / 20 <= points <= size * (1 + 1e-6 + num_terms * ROUNDING):
        return False
    much = "little" if points > size else "much"
    warn(
        f"an epoch had {round(points, 3):.10g} points, but the likelihood was built with "
        f"dataset_size={size}, so the data count for too {much} against the prior",
    )
    return True


def refuse_nonfinite(
    bnn: SupervisedBNN,
    terms: ElboTerms,
    batches: Sequence[tuple[Inputs, Any]],
    gradients: Mapping[str, Tensor] | None = None,
) -> None:
    """Raise for a loss or gradient that is not finite: targets that do not fit come first.

    Gradients are by default those that parameters have.
    """
    for inputs, targets in batches:
        check_one_batch(bnn, bnn._one_draw, inputs, targets)
    name = bnn.likelihood.data_name
    if not bool(terms.data.isfinite()):
        where = f"the log-likelihood at site {name!r} is {terms.data.item()}"
        if broken := _not_finite({name: value + 0 for name, value in terms.values.items()}):
            where += f", with non-finite draws of {broken}"
        else:
            where += ": look for inputs or targets that are not finite, or outputs that overflow"
    elif not bool(terms.kl.isfinite()):
        where = "the KL is not finite" + _bad_kl_sites(bnn)
    else:
        if gradients is None:
            gradients = {name: p.grad for name, p in bnn.named_parameters() if p.grad is not None}
        # Those of a captured step may have gone.
        names = _not_finite(gradients)
        where = "the gradient is not finite" + (f" at {names}" if names else "")
        if not all(are_finite(inputs) for inputs, _ in batches):
            where += f", and inputs are not: {_DROP_POINTS}"
    raise RuntimeError(
        f"training stopped: {where}. The parameters are those before this step; a smaller "
        "learning rate, clip_norm, or smaller initial scales usually help"
    )


def _not_finite(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(name for name, tensor in tensors.items() if not tensor.isfinite().all())


def _posterior_of(bnn: SupervisedBNN) -> dict[str, td.Distribution]:
    """Return the guide's posterior by joint name; empty where it has no closed form."""
    guide: AnyGuide | None = getattr(bnn, "net_guide", None)
    return {} if guide is None else guide.posterior() or {}


def _bad_kl_sites(bnn: SupervisedBNN) -> str:
    priors = {bnn.net_prior.prefix + name: prior for name, prior in bnn.net_prior.priors()}
    densities = {}
    for name, q in _posterior_of(bnn).items():
        prior = priors.get(name)
        if isinstance(prior, td.Distribution) and not isinstance(prior, JointMarginal):
            densities[name] = prior.log_prob(q.sample())
    bad = _not_finite(densities)
    return f" at {bad}" if bad else ""


def warn_of_result(bnn: SupervisedBNN, history: History) -> None:
    """Warn if scales have collapsed or exploded, or the KL is far larger than the data term."""
    if not history.loss:
        return
    # At least a nat for each point, because the data term of a net that fits well is near zero.
    size = float(bnn.likelihood.dataset_size)
    data = max(abs(history.log_likelihood[0]), abs(history.log_likelihood[-1]), size)
    weighted = history.loss[-1] + history.log_likelihood[-1]
    # The KL of a MAP estimate is minus a log-density, with arbitrary constants.
    guide = getattr(bnn, "net_guide", None)
    is_map = isinstance(getattr(guide, "guide", guide), AutoDelta | SWAGGuide)
    if weighted > KL_DWARFS * data and not is_map:
        warn(
            f"the weighted KL ({weighted:.3g} nats) dwarfs the data ({data:.3g} nats): the bound "
            "says more about the prior than about them. Check dataset_size; train on, with "
            "lr_multipliers={'scale': 10} if scales started small; or weigh the KL by beta < 1"
        )
    if not is_map:
        _warn_of_scales(bnn)


def _warn_of_scales(bnn: SupervisedBNN) -> None:
    priors = dict(bnn.net_prior.priors())
    with torch.no_grad():
        for name, q in _posterior_of(bnn).items():
            prior = priors.get(name.removeprefix(bnn.net_prior.prefix))
            ratio = relative_scale(q, prior)
            if ratio is not None and not COLLAPSED < ratio < EXPLODED:
                what = "collapsed" if ratio <= COLLAPSED else "exploded"
                warn(
                    f"the standard deviations of site {name!r} have {what}: their median is "
                    f"{ratio:.1e} of the prior's. A lower learning rate for scales "
                    "(lr_multipliers) or a cap (max_guide_scale) may help",
                )


def relative_scale(q: td.Distribution, prior: Any) -> float | None:
    """Return the median of a site's scales over the prior's; None where these have none.

    Of a large site some elements are looked at.
    """
    # The variances of a joint prior may need a dense matrix.
    joint = isinstance(prior, JointMarginal)
    if joint or not isinstance(prior, td.Distribution) or is_discrete(prior.support):
        return None
    try:
        variance, scale = q.variance, prior.variance
    except NotImplementedError:
        return None
    if isinstance(q, PrunedNormal):
        variance, scale = variance[q.kept], scale.expand_as(variance)[q.kept]
        if not len(variance):
            return None
    step = max(1, variance.numel() // LOOKED_AT)
    variance, scale = variance.flatten()[::step], scale.expand_as(variance).flatten()[::step]
    ratio = (variance / scale).sqrt()
    # A heavy-tailed prior has no scale to compare with.
    finite = bool(ratio.isfinite().all()) and bool(scale.isfinite().all())
    return float(ratio.median()) if finite else None
