"""Whether errors are too large, compared with the centre and with a plain fit."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDelta
from torch.utils._pytree import tree_leaves

from tyxe.bnn import EnsembleBNN, VariationalBNN
from tyxe.data import Picking
from tyxe.diagnostics.inference import has_spread, slope
from tyxe.diagnostics.report import Case, Line, above, below, log_likelihoods
from tyxe.errors import TyxeWarning
from tyxe.likelihoods import Categorical, Censored
from tyxe.priors import IIDPrior
from tyxe.util import reset_parameters_

# Steps of a plain fit, those between looks at held-out data, and points times weights up to which
# it is made.
STEPS, LOOK_EVERY, CHEAP = 300, 10, 10**7
# Share of the targets' standard deviation below which one error is as good as another.
SMALL = 0.03
# Nats per point of the weighted KL that leave a fit free to follow the data.
LIGHT = 0.1
# Share of the error without inputs, from which on a plain fit has learned nothing.
USELESS = 0.9
# Spread of outputs over members, as a share of that over points: well, and tolerable.
DIFFERENT, HARDLY = 1e-3, 1e-5
STUCK = (
    "a net that starts anew fits these data better, and this one has got stuck: start with "
    "tyxe.util.reset_parameters_(net) and a lower rate, and look for units that are never active"
)
TOO_WIDE = (
    "draws are worse than the net at the posterior's centre: predict with more of them, narrow the "
    "posterior (max_guide_scale, a narrower prior, optimize_prior_precision(loader=held_out)), or "
    "use predictive='glm' if there is a Gaussian"
)


def errors(case: Case) -> Iterator[Line]:
    """Compare errors of held-out data with those at the centre, and of a plain fit."""
    found = _error(case, case.bnn, **case.options)
    if found is None:
        return
    yield Line(f"{_name(case)} of held-out data", found)
    centre = _error(case, case.bnn, **case.options | {"num_predictions": 0})
    yield _beside(case, "that at the centre", found, centre, lambda: TOO_WIDE)
    plain = _plain_fit(case) if case.plain is None else case.plain
    if plain is not None:
        other, is_stuck = _error(case, plain, **case.options), False
        assert other is not None
        if case.plain is None and other > USELESS * _error_of_constant(case):
            # A net that is stuck at the centre, such as at units of which none is active.
            anew = _plain_fit(case, anew=True)
            again = other if anew is None else _error(case, anew, **case.options)
            assert again is not None
            if again < other:
                other, is_stuck = again, True
        yield _beside(
            case,
            "that of a plain fit",
            found,
            other,
            lambda: STUCK if is_stuck else _underfit(case),
        )


def members(case: Case) -> Iterator[Line]:
    """Compare an ensemble's members with each other."""
    if not isinstance(case.bnn, EnsembleBNN):
        return
    found = {
        f"member {index}": case.mean(
            log_likelihoods(member, case.held_out, **case.options), case.held_out
        )
        for index, member in enumerate(case.bnn._bnns)
    }
    middle = statistics.median(found.values())
    yield Line.of_parts(
        "log-likelihood of a member below their median",
        {name: middle - value for name, value in found.items()},
        below(0.5),
        below(2.0),
        "this member fits worse than the others: fit it again, or leave it out",
    )
    inputs = case.held_out[0][0]
    each = [tree_leaves(m.predict(inputs, num_predictions=0))[0] for m in case.bnn._bnns]
    outputs = torch.stack(each).double()
    if len(outputs) > 1 and len(outputs[0]) > 1:
        apart, wide = outputs.var(0).mean().sqrt(), outputs.mean(0).var(0).mean().sqrt()
        yield Line(
            "spread of outputs over members, over that of points",
            float(apart / wide.clamp_min(1e-12)),
            above(DIFFERENT),
            above(HARDLY),
            "members say the same: make_member has to start each anew, by "
            "tyxe.util.reset_parameters_(net). A net with one optimum, such as a linear one, gains "
            "nothing by an ensemble",
        )


def _name(case: Case) -> str:
    return "RMSE" if case.likelihood.has_squared_errors else "error"


def _beside(
    case: Case, what: str, found: float, other: float | None, remedy: Callable[[], str]
) -> Line:
    assert other is not None
    if case.likelihood.has_classes:
        variances = found * (1 - found) + other * (1 - other)
        chance = 2 * math.sqrt(variances / _num_targets(case))
        limit = max(chance, 0.02)
        line = Line(f"error above {what}", found - other, below(limit), below(limit + 0.1))
    else:
        ratio = found / max(other, SMALL * _spread(case), 1e-12)
        line = Line(f"{_name(case)} over {what}", ratio, below(1.3), below(2.5))
    return line if line.verdict == "ok" else dataclasses.replace(line, remedy=remedy())


def _error(case: Case, bnn: Any, **options: Any) -> float | None:
    """Return the mean error, or its root if errors are squares; None for mappings."""
    total, _ = bnn.evaluate(case.held_out, **options)
    if isinstance(total, dict):
        return None
    found = float(total) / _num_targets(case)
    return math.sqrt(found) if case.likelihood.has_squared_errors else found


def _num_targets(case: Case) -> float:
    """Return the number of held-out labels, or numbers, that count."""
    targets = [case.likelihood.observed(targets) for _, targets in case.held_out]
    if isinstance(case.likelihood, Categorical) and targets[0].values.is_floating_point():
        return float(case.weights(case.held_out).sum())  # probabilities of classes
    counts = [(each, each.counts_within()) for each in targets]
    found = sum(each.values.numel() if c is None else float(c.sum()) for each, c in counts)
    return found / 2 if isinstance(case.likelihood, Censored) else found  # of pairs


def _spread(case: Case) -> float:
    """Return the standard deviation of held-out targets about the means of their columns."""
    targets = [case.likelihood.observed(targets).values for _, targets in case.held_out]
    values = torch.cat(targets).double()
    return float(values.reshape(len(values), -1).std(0).square().mean().sqrt())


def _error_of_constant(case: Case) -> float:
    """Return the error of the best prediction without inputs; infinite where that is not known."""
    if case.likelihood.has_squared_errors:
        return _spread(case)
    if case.predicted.kind != "classes":
        return math.inf
    _, y, weights = case.predicted.classes()
    counts = torch.bincount(y, weights)
    return 1 - float(counts.max() / counts.sum())


def _plain_fit(case: Case, anew: bool = False) -> VariationalBNN | None:
    """Fit the net without a prior, from the posterior's centre or anew; None where it cannot be.

    That is where it takes long, and where a net cannot be initialised anew.
    """
    bnn = case.bnn._bnns[0]
    points = math.ceil(sum(float(case.likelihood.count(targets)) for _, targets in case.to_fit))
    if points * sum(p.numel() for p in bnn.net.parameters()) > CHEAP:
        return None
    with torch.no_grad():
        net = bnn._net_at(bnn._mean_values())
    if not any(p.requires_grad for p in net.parameters()):
        return None
    if anew:
        try:
            reset_parameters_(net)
        except ValueError:  # a module has no reset_parameters()
            return None
    outputs = [hook.output for hook in net._forward_hooks.values() if isinstance(hook, Picking)]
    likelihood = copy.deepcopy(case.likelihood)
    likelihood.dataset_size = points
    plain = VariationalBNN(
        net,
        IIDPrior(dist.Normal(0.0, 1.0), hide_all=True),
        likelihood,
        likelihood_guide_builder=AutoDelta if likelihood.latent_priors() else None,
        output=outputs[0] if outputs else None,
    )
    # Looks at held-out data, of which the best stays, take as long as several steps.
    batches = case.to_fit * math.ceil(LOOK_EVERY / len(case.to_fit))
    adam, epochs = partial(torch.optim.Adam, lr=1e-2), math.ceil(STEPS / len(batches))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TyxeWarning)
        plain.fit(batches, adam, epochs, validation=case.held_out, progress=False)
    return plain


def _underfit(case: Case) -> str:
    """Say what helps a posterior that fits the data less than a plain net does."""
    bnn, said = case.bnn._bnns[0], ""
    if has_spread(bnn) and (found := slope(dataclasses.replace(case, bnn=bnn), case.beta)):
        share = found.kl / float(bnn.likelihood.dataset_size)
        if case.beta * share > LIGHT:
            said = f"weigh the KL less, such as by beta={LIGHT / share:.1g}, "
    return (
        f"the same net fits these data better without a prior: {said}train on, start at the means "
        "of a trained net, or take a wider prior"
    )
