"""A diagnosis: the case, with predictions that are computed once, and the lines and their plot."""

from __future__ import annotations

import dataclasses
import math
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tyxe import plotting
from tyxe.bnn import EnsembleBNN
from tyxe.bnn.batches import all_batches, check_iterable, copied, device_for
from tyxe.bnn.scoring import Predicted, predicted, together, weights_of
from tyxe.data import Unpack
from tyxe.errors import TyxeWarning
from tyxe.likelihoods import Likelihood, StudentT
from tyxe.likelihoods.reductions import log_mean_exp
from tyxe.metrics import gaussian_pit
from tyxe.plotting.axes import pyplot
from tyxe.poutine import local_reparameterization

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)
VERDICTS = {"ok": "tab:green", "warn": "tab:orange", "fail": "tab:red"}


def below(value: float) -> Range:
    """Return the range up to a number."""
    return -math.inf, value


def above(value: float) -> Range:
    """Return the range from a number."""
    return value, math.inf


@dataclasses.dataclass(frozen=True)
class Line:
    """One number, its allowed range, and what to do if it is outside.

    Attributes:
        name: what the number is.
        value: the number; for several parts, such as layers, the worst.
        ok: lowest and highest good value.
        tolerable: beyond it the verdict is "fail" and not "warn".
        remedy: how to fix it.
        parts: the number of each part.
        where: the part that has this number.
    """

    name: str
    value: float
    ok: Range = ANY
    tolerable: Range = ANY
    remedy: str = ""
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    where: str = ""

    @classmethod
    def of_parts(
        cls, name: str, parts: Mapping[str, float], ok: Range, tolerable: Range, remedy: str
    ) -> Line:
        """Return the line of the worst part."""
        lines = {n: cls(name, value, ok, tolerable, remedy, parts) for n, value in parts.items()}
        return cls.worst(lines)

    @classmethod
    def worst(cls, lines: Mapping[str, Line]) -> Line:
        """Return the worst of several lines, which are given by where they are."""
        where, line = max(lines.items(), key=lambda item: item[1]._badness)
        of = ", ".join(filter(None, (where if len(lines) > 1 else "", line.where)))
        return dataclasses.replace(line, where=of)

    @property
    def _badness(self) -> tuple[int, float]:
        if math.isnan(self.value):
            return len(VERDICTS), math.inf
        low, high = self.ok
        # Where nothing is too much, the largest is told; one end may be infinite as the value is.
        outside = self.value if self.ok == ANY else max(low - self.value, self.value - high)
        return [*VERDICTS].index(self.verdict), -math.inf if math.isnan(outside) else outside

    @property
    def title(self) -> str:
        """The name, and where it is."""
        return f"{self.name} ({self.where})" if self.where else self.name

    @property
    def verdict(self) -> str:
        """`"ok"`, `"warn"` or `"fail"`."""
        if self.ok[0] <= self.value <= self.ok[1]:
            return "ok"
        return "warn" if self.tolerable[0] <= self.value <= self.tolerable[1] else "fail"

    @property
    def is_judged(self) -> bool:
        """Whether it has a verdict: a threshold, or a value that is not a number."""
        return self.ok != ANY or self.verdict != "ok"

    @property
    def threshold(self) -> str:
        """The good range, in words."""
        low, high = self.ok
        if high == math.inf:
            return "" if low == -math.inf else f">= {low:.3g}"
        return f"<= {high:.3g}" if low == -math.inf else f"{low:.3g} to {high:.3g}"

    def as_dict(self) -> dict[str, Any]:
        """Return value, threshold, verdict, remedy, place and parts."""
        names = ("value", "threshold", "verdict", "remedy", "where", "parts")
        return {name: getattr(self, name) for name in names}


class Report(dict[str, Line]):
    """The result of `diagnose`: lines by name, which print as a table.

    Attributes:
        predicted: probabilities of held-out classes and these, or the integral transform of
            held-out numbers, and how often each counts, None for once; empty of other targets.
    """

    def __init__(self, lines: Iterable[Line], predicted: tuple[Any, ...] = ()) -> None:
        super().__init__((line.name, line) for line in lines)
        self.predicted = predicted

    @property
    def flags(self) -> list[Line]:
        """The lines with a warning or a failure, failures first."""
        found = [line for line in self.values() if line.verdict != "ok"]
        return sorted(found, key=lambda line: line.verdict != "fail")

    @property
    def summary(self) -> str:
        """One line of text: how many numbers are good, and which are not."""
        flags = "; ".join(f"{x.verdict}: {x.title} {x.value:.3g}" for x in self.flags)
        judged = sum(line.is_judged for line in self.values())
        return f"{judged - len(self.flags)} of {judged} numbers well" + (flags and f"; {flags}")

    def __str__(self) -> str:
        width = max((len(line.title) for line in self.values()), default=0)
        rows = []
        for line in self.values():
            verdict = line.verdict if line.is_judged else "-"
            said = f"{verdict:4}  {line.title:{width}}  {line.value:9.3g}  {line.threshold}"
            rows.append(said.rstrip())
            if line.verdict != "ok" and line.remedy:
                rows += textwrap.wrap(
                    "-> " + line.remedy, 100, initial_indent=" " * 6, subsequent_indent=" " * 9
                )
        return "\n".join([*rows, self.summary])

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return all lines as dictionaries, by name."""
        return {name: line.as_dict() for name, line in self.items()}

    def plot(self) -> Any:
        """Return a figure: all verdicts, and the calibration of held-out data."""
        lines = list(self.values())[::-1]
        height = 1.2 + 0.22 * len(lines)
        figure, (left, right) = pyplot().subplots(
            1, 2, figsize=(10.5, max(height, 4)), width_ratios=(1, 1.2), constrained_layout=True
        )
        left.set(xlim=(0, 1), ylim=(-1, len(lines)), yticks=range(len(lines)), xticks=[])
        left.set_yticklabels([line.title for line in lines], fontsize=8)
        left.spines[:].set_visible(False)
        for row, line in enumerate(lines):
            said = f"{line.value:.3g}" + (f"   ({line.threshold})" if line.threshold else "")
            left.scatter([0.05], [row], color=VERDICTS[line.verdict])
            left.text(0.13, row, said, va="center", fontsize=8)
        if len(self.predicted) == 3:
            probs, y, weights = self.predicted
            plotting.calibration_curve(probs, y, right, weights=weights)
        elif self.predicted:
            pit, weights = self.predicted
            plotting.pit_histogram(pit, right, weights=weights)
        else:
            right.set_visible(False)
        return figure


@dataclass(eq=False)
class Case:
    """A BNN and its data.

    Attributes:
        bnn: the BNN.
        train: batches of training data, as evaluations take them: about as many as are held out.
        to_fit: all batches of training data, as fits take them.
        held_out: batches of held-out data.
        options: of `predict` and `evaluate`.
        beta: weight of the KL in the fit.
        plain: the net of maximum likelihood, as a fitted BNN, or None.
    """

    bnn: Any
    train: list[Any]
    to_fit: list[Any]
    held_out: list[Any]
    options: dict[str, Any]
    beta: float
    plain: Any = None

    @classmethod
    def of(
        cls,
        bnn: Any,
        train: Iterable[Any],
        held_out: Iterable[Any],
        unpack: Unpack | None,
        options: dict[str, Any],
        beta: float | None,
        plain: Any = None,
    ) -> Case:
        """Read loaders once, onto the BNN's device."""
        device = device_for(bnn)
        one = bnn._bnns[0]
        beta = one._runtime.beta if beta is None else beta
        for loader in (train, held_out):
            check_iterable(loader)
        data, unseen = ([*map(copied, own)] for own in (train, held_out))
        evaluated, fitted, seen = (
            all_batches(read(loader, unpack), device)
            for read, loader in (
                (bnn._to_evaluate, data),
                (one._to_fit, data),
                (bnn._to_evaluate, unseen),
            )
        )
        # Evaluations of all training data would be what takes the time.
        spaced = evaluated[:: max(len(evaluated) // max(len(seen), 1), 1)]
        return cls(bnn, spaced, fitted, seen, options, beta, plain)

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood, of all members."""
        found: Likelihood = self.bnn.likelihood
        return found

    @cached_property
    def fitted(self) -> Tensor:
        """Log-likelihoods of training data, those of `seen`."""
        return log_likelihoods(self.bnn, self.train, **self.options)

    @cached_property
    def seen(self) -> Tensor:
        """Log-likelihoods of held-out data, in nats: of points, or of points by draw `(S, n)`."""
        return log_likelihoods(self.bnn, self.held_out, **self.options)

    @cached_property
    def predicted(self) -> Predicted:
        """Predictions of held-out data, beside their targets."""
        return predicted(self.bnn, self.held_out, **self.options)

    def mean(self, logs: Tensor, batches: list[Any]) -> float:
        """Return the mean over points, by their weights, of the mixture over draws."""
        each, weights = mixed(logs), self.weights(batches)
        return float((each * weights.to(each)).sum() / weights.sum())

    def weights(self, batches: list[Any]) -> Tensor:
        """Return how often each point of batches counts, of those that do."""
        return torch.cat([weights_of(self.likelihood, targets) for _, targets in batches])


@contextmanager
def spared() -> Iterator[None]:
    """Use local reparameterisation without its warnings about other maps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TyxeWarning)
        with local_reparameterization():
            yield


def log_likelihoods(bnn: Any, batches: list[Any], **options: Any) -> Tensor:
    """Return log-likelihoods, in nats: of points by draw `(S, n)`, or of points `(n,)`."""
    if not isinstance(bnn, EnsembleBNN):
        options["aggregate"] = False
    _, found = bnn.evaluate(batches, reduction="none", **options)
    return together(found).double()


def mixed(logs: Tensor) -> Tensor:
    """Return the log-likelihoods of points under the mixture over draws."""
    return log_mean_exp(logs, 0) if logs.dim() == 2 else logs


def integral_transform(judged: Predicted) -> tuple[Tensor, Tensor | None]:
    """Return how probable it is to be below each number that counts, `(m,)`, and their counts."""
    mean, scale, y, counts = judged.numbers()
    if not isinstance(judged.likelihood, StudentT):
        return gaussian_pit(mean, scale, y), counts
    df = judged.likelihood.df
    # With t = sqrt(df) tan(a), the density of a is proportional to cos(a)^(df - 1).
    angles = torch.linspace(0, math.pi / 2, 4097, dtype=torch.float64, device=y.device)
    below = torch.cumulative_trapezoid(angles.cos() ** (df - 1), angles)
    below = torch.cat([torch.zeros_like(below[:1]), below / below[-1]])
    t = (y - mean).double() / scale * math.sqrt(df / (df - 2))
    places = (t.abs() / math.sqrt(df)).atan() / angles[1]
    index = places.long().clamp(max=len(below) - 2)
    shares = below[index].lerp(below[index + 1], places - index)
    return (0.5 + 0.5 * t.sign() * shares).to(mean), counts
