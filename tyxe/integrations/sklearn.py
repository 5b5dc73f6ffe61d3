"""Bayesian neural networks as estimators of scikit-learn (extra `sklearn`)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoDelta
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    MultiOutputMixin,
    RegressorMixin,
    is_classifier,
)
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from tyxe import check, guides, metrics, poutine, samplers, util
from tyxe.bnn import MCMC_BNN, SWAG_BNN, DropoutBNN, EnsembleBNN, LaplaceBNN, VariationalBNN
from tyxe.errors import warn
from tyxe.likelihoods import (
    Categorical,
    HeteroskedasticGaussian,
    HomoskedasticGaussian,
    Likelihood,
)
from tyxe.predictive import quantile
from tyxe.priors import LambdaPrior, Prior
from tyxe.rng import torch_rng_kept


class Method(NamedTuple):
    """How a BNN is made, fitted and turned into another, and how long.

    With `beta`, its KL has a weight; with `returns` as well, held-out rows may choose the epoch.
    """

    make: Callable[[nn.Module, Prior, Likelihood], Any]
    handler: Callable[[], AbstractContextManager[Any]] = nullcontext
    options: Mapping[str, Any] = {}
    finish: Callable[[Any, DataLoader[Any]], Any] = lambda bnn, loader: bnn
    fewest_epochs: int = 1
    beta: bool = False
    returns: bool = False
    dropout: float = 0.0


def _only_last_layer(bnn: LaplaceBNN, loader: DataLoader[Any]) -> LaplaceBNN:
    net = bnn.to_module()
    prior = LambdaPrior(bnn.prior.prior_dist, expose_modules=[util.last_layer(net)])
    last = LaplaceBNN(net, prior, bnn.likelihood, structure="full")
    last.fit_curvature(loader, progress=False)
    return last


def _ensemble(net: nn.Module, *parts: Any) -> EnsembleBNN:
    return EnsembleBNN(lambda _: _MAP(util.reset_parameters_(copy.deepcopy(net)), *parts), 5)


def _dropout(net: nn.Module, prior: Prior, likelihood: Likelihood) -> DropoutBNN:
    return DropoutBNN(net, likelihood)


def _nuts(net: nn.Module, prior: Prior, likelihood: Likelihood) -> MCMC_BNN:
    if isinstance(likelihood, HomoskedasticGaussian):  # whose noise is sampled, not trained
        noise = dist.LogNormal(likelihood.scale.detach().log() - 1, 1.0).to_event(1)
        likelihood = HomoskedasticGaussian(likelihood.dataset_size, scale=noise)
    return MCMC_BNN(net, prior, likelihood, samplers.NUTS)


# From the number of targets to that of outputs, and the likelihood.
Noise = Callable[[int], tuple[int, Likelihood]]


def _one_noise(size: int) -> tuple[int, Likelihood]:
    scale = torch.ones(size, device="cpu")
    return size, HomoskedasticGaussian(scale=scale, learn_scale=True)


_MAP: Any = partial(VariationalBNN, net_guide_builder=AutoDelta)
_MEAN_FIELD = partial(VariationalBNN, net_guide_builder=partial(guides.AutoNormal, init_scale=0.01))
_BY_EVIDENCE = Method(LaplaceBNN, options={"evidence_every": 20})
METHODS = {
    "laplace": _BY_EVIDENCE,
    "last_layer_laplace": _BY_EVIDENCE._replace(finish=_only_last_layer),
    "mean_field": Method(_MEAN_FIELD, poutine.local_reparameterization, beta=True, returns=True),
    "map": Method(_MAP, beta=True, returns=True),
    "ensemble": Method(_ensemble, beta=True, returns=True),
    "swag": Method(SWAG_BNN, fewest_epochs=80, beta=True),  # 20 snapshots in the last quarter
    "dropout": Method(_dropout, returns=True, dropout=0.1),
    "nuts": Method(_nuts),
}
NOISES: dict[str, Noise] = {
    "homoskedastic": _one_noise,
    "heteroskedastic": lambda size: (2 * size, HeteroskedasticGaussian()),
}

# The KL's weight for classes where nothing is held out, and the one from which it rises to 1 if
# rows are held out, after a first part of the epochs. For numbers it is 1, since with less the
# noise that is learned becomes too small (the NLL of SWAG on friedman was 13 instead of 1.2).
SMALL_BETA, FIRST_BETA, UNTIL = 0.1, 0.01, 0.25


def _rising(num_epochs: int, epoch: int) -> float:
    """Return the KL's weight in an epoch of a fit that ends with 1."""
    done = max(0.0, (epoch + 1) / num_epochs - UNTIL) / (1 - UNTIL)
    return float(FIRST_BETA ** (1 - done))


# Fewer held-out rows say nothing. In a table of numbers with `SMALL` rows or more, as many are
# held out anyway: with the whole KL from the first epoch, a fit may predict the mean of its rows.
FEWEST_HELD_OUT, SMALL = 10, 50
SPREAD_OF_TEMPERATURE = 0.35  # of its logarithm, which has a Normal prior


def _temperature(logits: Tensor, y: Tensor, weights: Any = 1.0) -> float:
    """Return the most probable temperature by held-out data, which may be few or all right."""
    logs = torch.linspace(-3, 3, 241, dtype=torch.float64, device="cpu")
    each = (cross_entropy(logits / float(t), y, reduction="none") for t in logs.exp())
    losses = [(weights * loss).sum() for loss in each]
    before = (logs / SPREAD_OF_TEMPERATURE).square() / 2
    return float(logs[(torch.stack(losses).cpu() + before).argmin()].exp())


def _normal(times: float, name: str, module: nn.Module, param: nn.Parameter) -> Any:
    weight = util.layer_weight(module, name.rpartition(".")[2])
    std = times * util.calculate_prior_std("radford", weight, module)
    return dist.Normal(0.0, std).expand(param.shape)


@dataclass(eq=False, repr=False, kw_only=True)
class _Estimator(BaseEstimator):
    """What both estimators share.

    A subclass has `_checked` and `_targets`, from `y` to what the net sees, and `_in_units` back.
    """

    hidden: Sequence[int] = (50, 50)
    net: Callable[[int, int], nn.Module] | None = None
    method: Any = "laplace"
    prior_scale: float = 1.0
    beta: float | None = None
    num_epochs: int = 300
    lr: float = 0.01
    batch_size: int = 200
    num_predictions: int | None = None
    standardize: bool = True
    validation_fraction: float = 0.1
    device: Any = None
    random_state: Any = None

    def _moments(self, values: Any, weights: Any) -> tuple[Any, Any]:
        scaler = StandardScaler().fit(values, sample_weight=weights)
        on = float(self.standardize)
        return on * scaler.mean_, scaler.scale_**on

    def _make_net(self, in_features: int, out_features: int, dropout: float) -> nn.Module:
        if self.net is not None:
            return self.net(in_features, out_features)
        sizes = itertools.pairwise([in_features, *self.hidden, out_features])
        drops = [nn.Dropout(dropout)] if dropout else []
        layers = [layer for ends in sizes for layer in (nn.Linear(*ends), nn.Tanh(), *drops)]
        # In float64 the other rows of a batch do not change what is predicted for one.
        return nn.Sequential(*layers[: -1 - len(drops)]).double()

    def _place(self) -> Any:
        if self.device != "auto":
            return self.device
        return "cuda" if torch.cuda.is_available() else "cpu"

    def _method(self) -> Method:
        check.number("prior_scale", self.prior_scale, above=0)
        if callable(self.method):
            method = Method(self.method)
        else:
            check.choice("method", self.method, METHODS)
            method = METHODS[self.method]
        hint = f", which method={self.method!r} takes"
        check.count("num_epochs", self.num_epochs, method.fewest_epochs, hint)
        return method

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
        """Fit to inputs `(n, n_features)` and numbers `(n,)` or `(n, n_outputs)`, or labels.

        Args:
            X: inputs.
            y: targets.
            sample_weight: how often each row counts, `(n,)`: 2 is the row twice, 0 its absence.
                Divide weights that sum to one by their mean.

        Raises:
            ValueError: weights that are negative, or not one for each row.
        """
        method = self._method()
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        X, y = self._checked(X, y)
        weights = None
        if sample_weight is not None:
            weights = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
            X, y, weights = (each[weights > 0] for each in (X, y, weights))
            if weights.sum() < 2 <= len(weights):
                warn(
                    f"sample_weight sums to {weights.sum():.3g} over {len(weights)} rows. It is "
                    "how often each row counts, so that all rows count like so few, and "
                    "predictions are nearly those of the prior: divide it by its mean"
                )
        y, size, likelihood, fitted = self._targets(y, weights)
        held_out = self._held_out(y, self._fraction(method), seed)
        seen = torch.ones(len(y), dtype=torch.bool, device="cpu").index_fill_(0, held_out, False)
        counts = seen if weights is None else torch.as_tensor(weights)[seen]
        likelihood.dataset_size = counts.sum().item()
        mean, scale = self._moments(X, weights)
        prior = LambdaPrior(partial(_normal, self.prior_scale))
        with torch_rng_kept(seed):
            net = self._make_net(X.shape[1], size, method.dropout)
            if self.device is not None:  # starts are drawn on the CPU, the same for all devices
                net, likelihood = net.to(self._place()), likelihood.to(self._place())
            bnn = method.make(net, prior, likelihood)
            like = next(bnn.parameters())
            columns = [torch.as_tensor((X - mean) / scale).to(like)]
            columns.append(y.to(like if y.is_floating_point() else like.device))
            columns += [] if weights is None else [torch.as_tensor(weights).to(like)]
            rows, kept = ([each[part] for each in columns] for part in (seen, ~seen))
            bnn = self._trained(method, bnn, rows, kept)
        fitted |= {"bnn_": bnn, "n_iter_": self.num_epochs}
        fitted |= self._calibration(bnn, kept, seed)
        self.__dict__.update(fitted, _x=(mean, scale), _seed=seed)
        return self

    def _trained(self, method: Method, bnn: Any, rows: list[Tensor], kept: list[Tensor]) -> Any:
        """Return a BNN fitted to rows; others, which are kept from it, may choose the epoch."""
        data = TensorDataset(*rows)
        batches = BatchSampler(RandomSampler(data), self.batch_size, drop_last=False)
        loader = DataLoader(data, sampler=batches, batch_size=None)
        options = dict(method.options)
        if method.beta:
            default = SMALL_BETA if is_classifier(self) else 1.0
            options["beta"] = default if self.beta is None else self.beta
        if self._chooses(method) and len(kept[0]):
            options |= {"beta": partial(_rising, self.num_epochs), "validation": [tuple(kept)]}
        adam, half = partial(torch.optim.Adam, lr=self.lr), -(-self.num_epochs // 2)
        length: Any = (half,) if isinstance(bnn, MCMC_BNN) else (adam, self.num_epochs)
        with method.handler():
            bnn.fit(loader, *length, progress=False, **options)
        return method.finish(bnn, loader)

    def _fraction(self, method: Method) -> float:
        """Return the part of rows that are kept from the fit, where they have a use."""
        fraction = check.number("validation_fraction", self.validation_fraction, least=0, most=0.5)
        return fraction if self._chooses(method) or is_classifier(self) else 0.0

    def _chooses(self, method: Method) -> bool:
        """Whether held-out rows may choose the epoch: no `beta` is given that the method heeds."""
        return method.returns and (self.beta is None or not method.beta)

    def _held_out(self, y: Tensor, fraction: float, seed: int) -> Tensor:
        """Return the places of rows that are kept from the fit, as large a part of each class."""
        if y.is_floating_point():
            y = y.new_zeros(len(y), dtype=torch.long)
            if fraction and len(y) >= SMALL:
                fraction = max(fraction, FEWEST_HELD_OUT / len(y))
        draws = torch.Generator("cpu").manual_seed(seed)
        order = torch.randperm(len(y), generator=draws, device="cpu")
        order = order[y[order].argsort(stable=True)]
        until = (torch.arange(len(y) + 1, device="cpu") * fraction + 0.5).long()
        held_out = order[until.diff() > 0]
        held_out = held_out[y.bincount()[y[held_out]] > 1]
        return held_out if len(held_out) >= FEWEST_HELD_OUT else held_out[:0]

    def _calibration(self, bnn: Any, kept: list[Tensor], seed: int) -> dict[str, Any]:
        return {}

    def _call(self, name: str, X: Any, seed: int, **options: Any) -> Any:
        X = validate_data(self, X, reset=False, dtype=np.float64)
        x = torch.as_tensor((X - self._x[0]) / self._x[1]).to(next(self.bnn_.parameters()))
        with torch_rng_kept(seed):
            return getattr(self.bnn_, name)(x, batch_size=self.batch_size, **options)

    def _predict(self, X: Any) -> Any:
        check_is_fitted(self)
        return self._call("predict", X, self._seed + 1, **self._how())

    def _how(self) -> dict[str, Any]:
        return {"num_predictions": self.num_predictions, "link": "probit"}

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Any:
        """Draw targets from the posterior predictive, `(n, ..., n_samples)`, from a seed."""
        check_is_fitted(self)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        drawn = self._call("sample_predictive", X, seed, num_samples=n_samples).cpu().numpy()
        return np.stack([self._in_units(each) for each in drawn], -1)


@dataclass(eq=False, repr=False, kw_only=True)
class BayesianRegressor(MultiOutputMixin, RegressorMixin, _Estimator):
    """A Bayesian neural network for numbers, with Gaussian noise that is learned.

    Args:
        hidden: widths of the layers of tanh units; with none it is Bayesian linear regression.
        net: makes another net, `net(in_features, out_features)`, such as `nn.Linear`.
        method: `"laplace"` (training maximises the evidence over the prior's precision),
            `"last_layer_laplace"`, `"mean_field"`, `"map"`, `"ensemble"` of five, `"swag"`,
            `"dropout"` of a tenth of the units, or `"nuts"`; or a function
            `method(net, prior, likelihood)` that makes `bnn_`. A `net` needs its own dropout.
        prior_scale: standard deviation of priors, times `sqrt(fan_in)`; with Laplace a start.
        beta: weight of the KL; for `"map"`, `"ensemble"` and `"swag"` of the prior's log-density.
            By default it rises from .01 to 1, and the fit goes back to the epoch at which held-out
            rows were most probable. For `"swag"`, and if no rows are held out, it is 1, and .1 for
            classes. The Laplace methods, `"dropout"`, `"nuts"` and your own method ignore it.
        num_epochs: passes through the data; with MCMC transitions, half of which only adapt.
        lr: learning rate of Adam.
        batch_size: rows at a time, in training and in predictions.
        num_predictions: draws of the weights in a prediction, by default as in `predict` of a BNN.
        standardize: scale inputs and targets of the net to mean 0 and standard deviation 1.
        validation_fraction: share of rows that are held out to choose `beta`, or with `"dropout"`
            the epoch; at most a half. If they are fewer than ten, ten are held out of fifty rows or
            more, and none of fewer.
        device: where to fit and predict, such as `"cuda:1"`; `"auto"` is CUDA if there is one, else
            the CPU; by default where the net is. Results are NumPy arrays.
        random_state: seed of fit and predictions; the global generators stay as they are.
        noise: `"homoskedastic"`, one scale for each target, or `"heteroskedastic"`, which the net
            predicts from the inputs, with twice as many outputs as targets.

    Raises:
        ValueError: from `fit`, an unknown method, and numbers that are out of range.

    Example:
        >>> X = np.random.randn(50, 3)
        >>> mean, std = BayesianRegressor(num_epochs=40).fit(X, X[:, 0]).predict(X, return_std=True)
        >>> mean.shape, std.shape
        ((50,), (50,))
    """

    noise: str = "homoskedastic"

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any]:
        check.choice("noise", self.noise, NOISES)
        return validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)

    def _targets(self, y: Any, weights: Any) -> tuple[Tensor, int, Likelihood, dict[str, Any]]:
        columns = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        mean, scale = self._moments(columns, weights)
        outputs, likelihood = NOISES[self.noise](len(mean))
        fitted = {"_y": (mean, scale), "_y_shape": y.shape[1:]}
        return torch.as_tensor((columns - mean) / scale), outputs, likelihood, fitted

    def _in_units(self, values: Any) -> Any:
        return (self._y[0] + self._y[1] * values).reshape(-1, *self._y_shape)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return means, or also standard deviations of observations, noise included, as `y`."""
        aggregated = self._predict(X)
        found = self.bnn_.likelihood.predictive_distribution(aggregated)
        mean, std = (part.double().cpu().numpy() for part in (found.mean, found.stddev))
        mean, std = self._in_units(mean), (std * self._y[1]).reshape(-1, *self._y_shape)
        return (mean, std) if return_std else mean

    def predict_interval(self, X: Any, level: float = 0.9) -> Any:
        """Return ends `(lower, upper)` that hold observations with a probability, each as `y`.

        They are quantiles of the predictive distribution whose moments `predict` returns.

        Args:
            X: inputs, `(n, n_features)`.
            level: the probability, for each number of a target, between 0 and 1.

        Raises:
            ValueError: a level that is not a probability.

        Example:
            >>> X = np.random.randn(50, 3)
            >>> model = BayesianRegressor(num_epochs=40).fit(X, X[:, 0])
            >>> lower, upper = model.predict_interval(X, level=0.5)
            >>> lower.shape, (lower < upper).all()
            ((50,), np.True_)
        """
        check_is_fitted(self)
        tail = (1 - check.number("level", level, above=0, below=1)) / 2
        found = self._call("predictive", X, self._seed + 1, **self._how())
        ends = (quantile(found, below).double().cpu().numpy() for below in (tail, 1 - tail))
        lower, upper = map(self._in_units, ends)
        return lower, upper


@dataclass(eq=False, repr=False, kw_only=True)
class BayesianClassifier(ClassifierMixin, _Estimator):
    """A Bayesian neural network for classes, whose probabilities are averages over the posterior.

    Other arguments are those of `BayesianRegressor`; `classes_` are the labels.

    Args:
        validation_fraction: share of each class that is held out, also for the temperature of
            probabilities; at most a half. If they are fewer than ten rows, none are held out.

    Attributes:
        temperature_: it divides the logits of predictions; 1 if no rows were held out.

    Example:
        >>> X, y = np.random.randn(50, 3), np.array(["no", "yes"] * 25)
        >>> BayesianClassifier(num_epochs=5, random_state=0).fit(X, y).predict_proba(X).shape
        (50, 2)
    """

    def _checked(self, X: Any, y: Any) -> tuple[Any, Any]:
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        return X, column_or_1d(y, warn=True)

    def _targets(self, y: Any, weights: Any) -> tuple[Tensor, int, Likelihood, dict[str, Any]]:
        classes, codes = np.unique(y, return_inverse=True)
        named = ", ".join(map(str, classes[:2]))
        hint = f": y has only {len(classes)} class, {named}"
        check.count("the number of classes in y", len(classes), 2, hint)
        return torch.as_tensor(codes), len(classes), Categorical(), {"classes_": classes}

    def _calibration(self, bnn: Any, kept: list[Tensor], seed: int) -> dict[str, Any]:
        x, y, *weights = kept
        if not len(y):
            return {"temperature_": 1.0}
        with torch_rng_kept(seed + 1):
            logits = bnn.predict(x, batch_size=self.batch_size, **self._how())
        return {"temperature_": _temperature(logits, y, *weights)}

    def _in_units(self, values: Any) -> Any:
        return self.classes_[values]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Any:
        """Draw labels with the probabilities of `predict_proba`, `(n, n_samples)`, from a seed."""
        probs = torch.as_tensor(self.predict_proba(X))
        count = check.count("n_samples", n_samples)
        with torch_rng_kept(int(check_random_state(random_state).randint(2**31 - 1))):
            return self._in_units(probs.multinomial(count, replacement=True).numpy())

    def predict_proba(self, X: Any) -> Any:
        """Return probabilities, `(n, n_classes)`, in the order of `classes_`."""
        return (self._predict(X) / self.temperature_).softmax(-1).double().cpu().numpy()

    def predict(self, X: Any) -> Any:
        """Return the most probable classes, `(n,)`."""
        return self._in_units(self.predict_proba(X).argmax(-1))


# --------------------------------------------------------------------------- scorers


def _of_normal(metric: Any, estimator: Any, X: Any, y: Any, sample_weight: Any) -> float:
    values = (*estimator.predict(X, return_std=True), y)
    # Copies, since PyTorch warns of arrays that cannot be written to, such as those of pandas.
    mean, std, y = (torch.as_tensor(np.array(v, dtype=np.float64)) for v in values)
    weights = None if sample_weight is None else torch.as_tensor(np.array(sample_weight))
    return -float(metric(mean, std, y, weights))


def neg_nll(estimator: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
    """Return minus the negative log-likelihood of held-out data, in nats: a scorer.

    For a classifier, it is minus the log loss of `predict_proba`, per point. For a regressor, it is
    that of Normals with the means and standard deviations of `predict(X, return_std=True)`, per
    number of `y`. It works for any estimator with these methods, or a pipeline that ends in one.

    Args:
        estimator: a fitted estimator.
        X: inputs, `(n, n_features)`.
        y: labels or numbers.
        sample_weight: how often each point counts, `(n,)`.

    Example:
        >>> from sklearn.model_selection import cross_val_score
        >>> X = np.random.randn(60, 3)
        >>> cross_val_score(BayesianRegressor(num_epochs=40), X, X[:, 0], scoring=neg_nll).shape
        (5,)
    """
    if is_classifier(estimator):
        # The labels in `y` are not all, where a part of the data lacks a class.
        labels, probs = estimator.classes_, estimator.predict_proba(X)
        return -float(log_loss(y, probs, labels=labels, sample_weight=sample_weight))
    return _of_normal(metrics.gaussian_nll, estimator, X, y, sample_weight)


def neg_crps(estimator: Any, X: Any, y: Any, sample_weight: Any = None) -> float:
    """Return minus the continuous ranked probability score, in the units of `y`: a scorer.

    It is that of the Normals in `neg_nll`, per number of `y`, with the same arguments.

    Raises:
        TypeError: for a classifier.

    Example:
        >>> X = np.random.randn(60, 3)
        >>> neg_crps(BayesianRegressor(num_epochs=40).fit(X, X[:, 0]), X, X[:, 0]) < 0
        True
    """
    return _of_normal(metrics.crps_gaussian, estimator, X, y, sample_weight)
