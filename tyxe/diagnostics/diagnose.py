"""One check of a posterior for the most common problems."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from tyxe import check
from tyxe.bnn import EnsembleBNN
from tyxe.bnn.predict import SupervisedBNN
from tyxe.data import Unpack
from tyxe.diagnostics import held_out as of_predictions
from tyxe.diagnostics import inference
from tyxe.diagnostics.convergence import chains
from tyxe.diagnostics.errors import errors, members
from tyxe.diagnostics.report import Case, Line, Report, integral_transform
from tyxe.rng import RandomStream
from tyxe.threads import as_before
from tyxe.util import outside_inference


@as_before()
@outside_inference()
def diagnose(
    bnn: Any,
    train: Iterable[Any],
    held_out: Iterable[Any],
    *,
    plain: Any = None,
    beta: float | None = None,
    num_predictions: int | None = None,
    unpack: Unpack | None = None,
    **options: Any,
) -> Report:
    """Look for problems that raise no error, and say how to fix them.

    For all BNNs: points against `dataset_size`; training against held-out data; calibration against
    that of data drawn from the predictions; how many draws are needed; predictions that depend on
    their batch, or on outdated norm statistics; errors compared with those at the posterior's
    centre and of a plain fit; inputs that are not standardised, or in held-out data unlike those of
    training; sites that the net does not use; units that no data reach. For ensembles: members that
    differ from the others, or are all the same. For guides: KL against data, the gradient of the
    ELBO against its noise, scales and units that have collapsed or have not moved, k-hat of small
    sites. For `LaplaceBNN`: the gradient at the mode, its prior, eigenvalues. For chains: R-hat and
    effective samples of outputs and log joint, divergences, energy. The BNN is not changed, and the
    random generators are restored.

    Log-likelihoods are means over points, in nats. The "noise" of a gradient is its standard
    deviation over data sets of this size; at 1 the optimum is about one posterior standard
    deviation away. Expect the cost of a few epochs, and of a plain fit of 300 steps if points times
    weights are at most 10 million.

    Args:
        bnn: a fitted BNN with a likelihood, or an `EnsembleBNN`, whose members are checked one by
            one.
        train: the loader of the fit: all training data, once.
        held_out: held-out `(inputs, targets)`.
        plain: the net of maximum likelihood, as a fitted BNN, to compare with; by default one is
            fitted if that is cheap.
        beta: weight of the KL in the fit, by default that of the last epoch, or 1 after `load`.
        num_predictions: number of draws, by default as in `predict`.
        unpack: a function from a batch of a loader to `inputs, targets`, or with weights.
        options: options of `evaluate` and `predict`.

    Raises:
        TypeError: a BNN without likelihood; `plain` that is not a BNN.
        ValueError: no data.
        RuntimeError: there are no chains, curvature or snapshots yet.

    Reference:
        Vehtari et al. 2021, for R-hat and effective samples; Yao et al. 2018, for k-hat; Betancourt
        2016, for energy.

    Example:
        >>> import functools, torch, pyro.distributions as dist, tyxe
        >>> x = torch.randn(100, 1)
        >>> bnn = tyxe.VariationalBNN(
        ...     torch.nn.Linear(1, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        ...     tyxe.likelihoods.HomoskedasticGaussian(1, scale=0.1), tyxe.guides.AutoNormal)
        >>> report = diagnose(bnn, [(x, 3 * x)], [(x, 3 * x)])
        >>> report.flags[0].name
        'points in the loader over dataset_size'
    """
    expected = "a fitted BNN with a likelihood, or an EnsembleBNN"
    check.one_of("bnn", bnn, SupervisedBNN | EnsembleBNN, expected)
    besides = [] if plain is None else [of_predictions.beside(plain)]
    given = {"num_predictions": num_predictions, **options}
    with RandomStream():  # a loader's numbers are its own, and it may wait for other threads
        case = Case.of(bnn, train, held_out, unpack, given, beta, plain)
    with RandomStream():  # without a lock, since norms may have a loader of their own
        lines = [*inference.size(case)]
        for look in (*of_predictions.CHECKS, errors, *besides, members):
            lines += look(case)
        lines += _of_members(case)
        return Report(lines, _to_draw(case))


def _of_members(case: Case) -> list[Line]:
    """Return the lines of a posterior, or of an ensemble's members, of each the worst."""
    found: dict[str, dict[str, Line]] = {}
    for index, member in enumerate(case.bnn._bnns):
        one = dataclasses.replace(case, bnn=member)
        for look in (*inference.CHECKS, chains):
            for line in look(one):
                found.setdefault(line.name, {})[f"member {index}"] = line
    if len(case.bnn._bnns) == 1:
        return [line for lines in found.values() for line in lines.values()]
    return [
        dataclasses.replace(
            Line.worst(lines), parts={where: line.value for where, line in lines.items()}
        )
        for lines in found.values()
    ]


def _to_draw(case: Case) -> tuple[Tensor | None, ...]:
    judged = case.predicted
    if judged.kind == "numbers":
        return integral_transform(judged)
    return judged.classes() if judged.kind == "classes" else ()
