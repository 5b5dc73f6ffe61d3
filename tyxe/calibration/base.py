"""Calibrators: fitted to predictions of held-out data, and applied to others."""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from textwrap import indent
from typing import Any

import torch
from torch import Tensor, nn

from tyxe import check, files
from tyxe.bnn.batches import all_batches
from tyxe.bnn.scoring import check_evaluation, predicted, reduced, weights_of
from tyxe.check import described
from tyxe.data import Targets, Unpack
from tyxe.likelihoods import Censored, HomoskedasticGaussian, Likelihood, StudentT
from tyxe.likelihoods.joint import check_is_one
from tyxe.metrics.checks import check_probs, check_real, check_regression, check_targets


class Calibrator(ABC):
    """Base of calibrators: `fit` to predictions with targets, then `predict` others.

    A subclass implements `fit`, which returns itself, and `predict`; fitted numbers are attributes.

    Attributes:
        replaces: whether `predict` returns predictions again, and not something else, such as sets.
    """

    replaces = True

    def __repr__(self) -> str:
        """Say the options, and the numbers that were fitted; None before `fit`."""
        known = (f"{n}={v!r}" for n, v in vars(self).items() if not isinstance(v, Tensor))
        return f"{type(self).__name__}({', '.join(known)})"

    @abstractmethod
    def fit(self, predictions: Any, y: Tensor | Targets) -> Any:
        """Fit to predictions of data that the net was not trained on, and return itself.

        `tyxe.data.Targets` have weights and masks too.
        """

    @abstractmethod
    def predict(self, predictions: Any) -> Any:
        """Return calibrated predictions, sets or intervals; a RuntimeError before `fit`."""

    def __call__(self, predictions: Any) -> Any:
        return self.predict(predictions)

    def of(self, predictions: Any, likelihood: Likelihood) -> Any:
        """Convert predictions of a BNN to the form that `fit` and `predict` take."""
        return predictions

    def back(self, found: Any, likelihood: Likelihood) -> Any:
        """Convert results of `predict` to predictions of the likelihood."""
        return found

    def wrap(
        self, bnn: Any, loader: Iterable[Any], *, unpack: Unpack | None = None, **options: Any
    ) -> Calibrated:
        """Fit to a BNN's predictions of held-out data, and return both as a `Calibrated`.

        Args:
            bnn: any BNN with a likelihood, an `EnsembleBNN`, or one that another calibrator has
                wrapped, such as a temperature for sets of tempered probabilities.
            loader: yields held-out `(inputs, targets)`, or with weights; missing and ignored
                targets are left out.
            unpack: a function from a batch of the loader to these.
            options: options of `predict`, such as `num_predictions=32`, for all predictions.

        Raises:
            TypeError: not a BNN, or one of several outputs, of censored targets, or with
                predictions that the calibrator does not take, such as sets.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     torch.nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.Categorical(50), tyxe.guides.AutoNormal)
            >>> held_out = [(torch.randn(50, 2), torch.arange(50) % 3)]
            >>> sets = tyxe.calibration.SplitConformal(level=0.8).wrap(bnn, held_out)
            >>> sets.predict(torch.zeros(5, 2)).shape
            torch.Size([5, 3])
        """
        plain = bnn
        if isinstance(bnn, Calibrated):
            bnn._check_replaces("wrap its bnn")
            options, plain = bnn._options | options, bnn._plain
        if not hasattr(plain, "_to_evaluate"):
            raise TypeError(
                f"bnn is {described(bnn)}; expected a BNN: for any other model call "
                "fit(predictions, y), or wrap a VariationalBNN with a prior that hides all"
            )
        check_is_one(bnn.likelihood, "calibrate the predictions of each apart")
        if isinstance(bnn.likelihood, Censored):
            raise TypeError(
                "the targets may be censored, so that nobody knows whether an interval holds them: "
                "call fit(predictions, y) with points that are known"
            )
        batches = all_batches(plain._to_evaluate(loader, unpack))
        judged = predicted(bnn, batches, **options)
        self.fit(self.of(judged.predictions, judged.likelihood), judged.targets)
        return Calibrated(bnn, self, options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted numbers to a file; an OSError leaves an earlier file."""
        files.write(path, self._content())

    def _content(self) -> dict[str, Any]:
        return {"calibrator": type(self).__name__, "state": dict(self.__dict__)}

    def load(self, path: str | os.PathLike[str]) -> Any:
        """Read what `save` has written, and return itself.

        Raises:
            ValueError: a damaged file, or one of another calibrator; nothing is changed.
        """
        self.__dict__.update(self._state_in(files.read(path), path))
        return self

    def _state_in(self, saved: Any, path: Any) -> dict[str, Any]:
        name = saved.get("calibrator") if isinstance(saved, dict) else None
        if name != type(self).__name__:
            given = f"a {name}" if name else "no calibrator"
            raise ValueError(f"{path} is of {given}; expected a {type(self).__name__}")
        found: dict[str, Any] = saved["state"]
        return found

    def _fitted(self, name: str) -> Any:
        hint = f"this {type(self).__name__} is not fitted: call fit, or load"
        return check.known(getattr(self, name), hint)


class Calibrated:
    """A BNN whose predictions go through a calibrator; `Calibrator.wrap` makes it.

    Args:
        bnn: the BNN, or a `Calibrated`, whose predictions go through both calibrators in turn.
        calibrator: a fitted calibrator, or one to load.
        options: options of `predict`, such as `num_predictions`; `load` replaces them.
    """

    def __init__(
        self, bnn: Any, calibrator: Calibrator, options: Mapping[str, Any] | None = None
    ) -> None:
        self.bnn, self.calibrator, self._options = bnn, calibrator, dict(options or {})

    def __repr__(self) -> str:
        """Say the calibrator, the options of predictions, and what the BNN is."""
        options = ", ".join(f"{name}={value!r}" for name, value in self._options.items())
        parts = (
            f"calibrator: {self.calibrator}\npredict: {options or 'as the BNN'}\n(bnn): {self.bnn}"
        )
        return f"Calibrated(\n{indent(parts, '  ')}\n)"

    @property
    def likelihood(self) -> Likelihood:
        """The likelihood of the BNN."""
        found: Likelihood = self.bnn.likelihood
        return found

    @property
    def _plain(self) -> Any:
        """The BNN without any calibrators."""
        return self.bnn._plain if isinstance(self.bnn, Calibrated) else self.bnn

    def predict(self, *inputs: Any, **options: Any) -> Any:
        """Return calibrated predictions, sets or intervals; arguments are those of the BNN."""
        options = self._options | options
        found = self.bnn.predict(*inputs, **options)
        likelihood = self.likelihood.with_gradients(bool(options.get("enable_grad")))
        return _through(self.calibrator, found, likelihood)

    def evaluate(
        self,
        input_data: Any,
        y: Tensor | None = None,
        *,
        reduction: str = "sum",
        unpack: Unpack | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Return error and log-likelihood of calibrated predictions on data with targets.

        For numbers, the log-likelihood is that of Normals with their means and scales, or with
        `StudentT` of Student ts with these moments.

        Args:
            input_data, y, reduction, unpack: as in `evaluate` of a BNN.
            options: of `predict`.

        Raises:
            TypeError: the calibrator makes sets or intervals, which have no likelihood.
            ValueError: as in `evaluate` of a BNN.
        """
        self._check_replaces("use coverage and size of tyxe.calibration")
        y = check_evaluation(self, input_data, y, reduction, None)
        loader = self._plain._to_evaluate(input_data, unpack) if y is None else [(input_data, y)]
        batches = all_batches(loader)
        likelihood, predictions, targets = predicted(self, batches, **options)
        if isinstance(predictions, tuple) and not isinstance(likelihood, StudentT):
            likelihood = HomoskedasticGaussian(scale=1.0, event_dim=likelihood.event_dim)
        error = likelihood.error(predictions, targets)
        log_likelihood = likelihood.log_likelihood(predictions, targets)
        parts = error, log_likelihood, weights_of(likelihood, targets)
        found: tuple[Tensor, Tensor] = reduced(likelihood, parts, reduction)
        return found

    def _check_replaces(self, hint: str) -> None:
        if not self.calibrator.replaces:
            name = type(self.calibrator).__name__
            raise TypeError(f"{name} does not return predictions, but sets or intervals: {hint}")

    def to_ensemble(
        self, num_draws: int | None = None, *, closed_form: bool = False, link: str = "probit"
    ) -> CalibratedModule:
        """Return the BNN and the calibrator as one plain module, for export and servers.

        Its forward returns calibrated predictions. If the calibrator makes sets or intervals, it
        returns a pair of the BNN's predictions and these.

        Args:
            num_draws, closed_form, link: of the BNN's `to_ensemble`. With another number of draws
                than was calibrated, predictions are calibrated only on average.

        Raises:
            RuntimeError: the calibrator is not fitted.
            ValueError: the module would make other predictions than were calibrated, such as those
                by `"glm"`, which have no draws.

        Example:
            >>> import pyro.distributions as dist, tyxe
            >>> bnn = tyxe.VariationalBNN(
            ...     torch.nn.Linear(2, 3), tyxe.priors.IIDPrior(dist.Normal(0, 1)),
            ...     tyxe.likelihoods.Categorical(50), tyxe.guides.AutoNormal)
            >>> held_out = [(torch.randn(50, 2), torch.arange(50) % 3)]
            >>> sets = tyxe.calibration.SplitConformal(level=0.8).wrap(bnn, held_out)
            >>> logits, found = sets.to_ensemble(8)(torch.zeros(5, 2))
            >>> found.dtype
            torch.bool
        """
        closed_form = check.flag("closed_form", closed_form)
        how = {"closed_form": True, "link": link} if closed_form else {}
        wanted = {"predictive": "glm", "link": link} if closed_form else {"predictive": "bnn"}
        for one in self._plain._bnns:
            own = {"predictive": one._default_predictive, "link": "mc"} | self._options
            given = {name: own[name] for name in wanted}
            if given != wanted:
                asked = ", ".join(f"{name}={value!r}" for name, value in wanted.items())
                raise ValueError(
                    f"what was calibrated are predictions by predictive={own['predictive']!r} and "
                    f"link={own['link']!r}, and the module makes others: wrap(bnn, loader, {asked})"
                )
        module = self.bnn.to_ensemble(num_draws, **how)
        return CalibratedModule(module, self.calibrator, self.likelihood).eval()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write BNN, calibrator and options to one file; an OSError leaves an earlier file."""
        files.write(path, self._content())

    def _content(self) -> dict[str, Any]:
        inner = self.bnn
        state = inner._content() if isinstance(inner, Calibrated) else dict(inner.state_dict())
        found = {**self.calibrator._content(), "bnn": state, "options": self._options}
        return found | self._plain._not_saved()

    def load(self, path: str | os.PathLike[str]) -> Calibrated:
        """Read what `save` has written, and return itself.

        Raises:
            RuntimeError: the state is of another BNN; nothing is changed.
            ValueError: a damaged file, or one of other calibrators; nothing is changed.
        """
        saved = files.read(path)
        self._restore(saved, path)
        self._plain._warn_of_not_saved(saved)
        return self

    def _restore(self, saved: Any, path: Any) -> None:
        state = self.calibrator._state_in(saved, path)
        if "bnn" not in saved:
            raise ValueError(f"{path} is of a calibrator alone: load it by calibrator.load(path)")
        first = saved["bnn"].get("calibrator")
        if isinstance(self.bnn, Calibrated):
            self.bnn._restore(saved["bnn"], path)
        elif first is not None:
            raise ValueError(
                f"{path} is of two calibrators: load it by "
                f"Calibrated(Calibrated(bnn, {first}()), {saved['calibrator']}())"
            )
        else:
            self.bnn.load_state_dict(saved["bnn"])
        self.calibrator.__dict__.update(state)
        self._options = saved["options"]


@check.arguments
class CalibratedModule(nn.Module):
    """A module and a calibrator of its predictions, as one module to export.

    The module is a plain net, or a BNN's `to_ensemble()`; see `Calibrated.to_ensemble`.

    Args:
        module: returns predictions.
        calibrator: the fitted calibrator.
        likelihood: likelihood of a BNN's predictions; those of a plain net are passed on unchanged.

    Example:
        >>> from tyxe.calibration import TemperatureScaling
        >>> net = nn.Linear(2, 3)  # stands for your trained net
        >>> x = torch.randn(90, 2)
        >>> y = torch.where(torch.rand(90) < 0.8, net(x).argmax(-1), 0)
        >>> scaling = TemperatureScaling().fit(net(x), y)
        >>> program = torch.export.export(CalibratedModule(net, scaling), (x,))
    """

    def __init__(
        self, module: nn.Module, calibrator: Calibrator, likelihood: Likelihood | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.calibrator = copy.deepcopy(calibrator)
        self._likelihood = None if likelihood is None else likelihood.with_gradients(False)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Return calibrated predictions, or predictions and the sets or intervals."""
        found = self.module(*inputs, **kwargs)
        if self._likelihood is None:
            made = self.calibrator.predict(found)
        else:
            made = _through(self.calibrator, found, self._likelihood)
        return made if self.calibrator.replaces else (found, made)


def _through(calibrator: Calibrator, predictions: Any, likelihood: Likelihood) -> Any:
    made = calibrator.predict(calibrator.of(predictions, likelihood))
    return calibrator.back(made, likelihood)


def check_logits(values: Any) -> Tensor:
    """Return logits or probabilities `(..., C)` as rows `(n, C)` in float64, or raise."""
    check.shape("predictions", values, ("n", ..., "C"), ", a row of classes each")
    return check_real("predictions", values).reshape(-1, values.shape[-1]).double()


def check_classes(values: Any, y: Any, soft: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows of logits or probabilities as `check_logits` does, targets and counts, `(n,)`.

    Targets are labels, `(n,)`, or where `soft` allows it probabilities of classes, `(n, C)`.
    """
    rows, found = check_logits(values), _targets(y)
    targets = found.values.flatten().to(rows.device)
    is_soft = targets.is_floating_point() and targets.numel() == rows.numel()
    if is_soft:
        if not soft:
            raise TypeError("targets are probabilities of classes; pass labels: targets.argmax(-1)")
        targets = targets.view_as(rows).to(rows)
        found = replace(found, values=found.values[..., 0])
    counts = found.counts_within()
    each = torch.ones_like(rows[:, 0]) if counts is None else counts.flatten().to(rows)
    if len(each) == len(rows) == len(targets):
        kept = each > 0
        rows, targets, each = rows[kept], targets[kept], each[kept]
    return rows, check_probs(targets) if is_soft else check_targets(targets, rows), each


def _targets(y: Any) -> Targets:
    return y if isinstance(y, Targets) else Targets(check.tensor("y", y))


def check_pair(values: Any) -> tuple[Tensor, Tensor]:
    """Return a pair of predictions `(n, ...)` in float64, or raise."""
    expected = (
        "a pair of tensors, such as mean and standard deviation of numbers (classes have sets, "
        "and no intervals)"
    )
    check.one_of("predictions", values, tuple | list, expected)
    first, second = (torch.as_tensor(part) for part in values)
    first, *_ = check_regression(first, first)
    second = check_real("predictions[1]", second.expand_as(first))
    return first.double(), second.double()


def check_numbers(values: Any, y: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a pair as `check_pair` does, targets, and how often each number counts, or raise.

    Targets that are NaN are missing, and do not count. Counts may be integers.
    """
    (first, second), found = check_pair(values), _targets(y)
    found = replace(found, values=found.values.double())
    missing = found.values.isnan()
    found = found.masked(~missing) if missing.any() else found
    _, targets, _ = check_regression(first, found.filled().values.to(first.device))
    counts = found.counts_within()
    each = torch.ones_like(first) if counts is None else counts.to(first)
    return first, second, targets, each
