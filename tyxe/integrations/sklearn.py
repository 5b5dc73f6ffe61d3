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
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from tyxe.bnn import MCMC_BNN, SWAG_BNN, DropoutBNN, EnsembleBNN, LaplaceBNN, VariationalBNN
from tyxe.errors import check_count, check_known
from tyxe.guides import AutoNormal
from tyxe.likelihoods import Categorical, HomoskedasticGaussian, Likelihood
from tyxe.poutine import local_reparameterization
from tyxe.priors import LambdaPrior, Prior
from tyxe.rng import torch_rng_kept
from tyxe.samplers import NUTS
from tyxe.util import calculate_prior_std, last_layer, layer_weight, reset_parameters_


class Method(NamedTuple):
    """How a BNN is made, the handler and the options of its fit, and whether its draws differ."""

    make: Callable[[nn.Module, Prior, Likelihood], Any]
    handler: Callable[[], AbstractContextManager[Any]] = nullcontext
    options: Mapping[str, Any] = {}
    has_draws: bool = True


def _last_layer(net: nn.Module, prior: Prior, likelihood: Likelihood) -> LaplaceBNN:
    prior = LambdaPrior(prior.prior_dist, expose_modules=[last_layer(net)])
    return LaplaceBNN(net, prior, likelihood, structure="full")


def _map(net: nn.Module, prior: Prior, likelihood: Likelihood) -> VariationalBNN:
    return VariationalBNN(net, prior, likelihood, AutoDelta)


def _ensemble(net: nn.Module, prior: Prior, likelihood: Likelihood) -> EnsembleBNN:
    nets = [reset_parameters_(copy.deepcopy(net)) for _ in range(5)]
    return EnsembleBNN(lambda index: _map(nets[index], prior, likelihood), len(nets))


def _nuts(net: nn.Module, prior: Prior, likelihood: Likelihood) -> MCMC_BNN:
    if isinstance(likelihood, HomoskedasticGaussian):  # whose noise is sampled, not trained
        noise = dist.LogNormal(likelihood.scale.detach().log() - 1, 1.0).to_event(1)
        likelihood = HomoskedasticGaussian(likelihood.dataset_size, scale=noise)
    return MCMC_BNN(net, prior, likelihood, NUTS)


EVIDENCE = {"evidence_every": 20}
METHODS = {
    "laplace": Method(LaplaceBNN, options=EVIDENCE),
    "last_layer_laplace": Method(_last_layer, options=EVIDENCE),
    "mean_field": Method(
        partial(VariationalBNN, net_guide_builder=AutoNormal), local_reparameterization
    ),
    "map": Method(_map, has_draws=False),
    "ensemble": Method(_ensemble, has_draws=False),
    "dropout": Method(lambda net, prior, likelihood: DropoutBNN(net, likelihood)),
    "swag": Method(SWAG_BNN),
    "nuts": Method(_nuts),
}


def _normal(times: float, name: str, module: nn.Module, param: nn.Parameter) -> Any:
    std = calculate_prior_std("radford", layer_weight(module, name.rpartition(".")[2]), module)
    return dist.Normal(0.0, times * std).expand(param.shape)


@dataclass(eq=False, repr=False, kw_only=True)
class _Estimator(BaseEstimator):
    """What both estimators share; a subclass has `_in_units`, from what the net sees to `y`."""

    hidden: Sequence[int] = (50, 50)
    net: Callable[[int, int], nn.Module] | None = None
    method: Any = "laplace"
    prior_scale: float = 1.0
    num_epochs: int = 300
    lr: float = 0.01
    batch_size: int = 200
    num_predictions: int = 32
    standardize: bool = True
    random_state: Any = None

    def _scaler(self, values: Any) -> StandardScaler:
        return StandardScaler(with_mean=self.standardize, with_std=self.standardize).fit(values)

    def _make_net(self, in_features: int, out_features: int) -> nn.Module:
        if self.net is not None:
            return self.net(in_features, out_features)
        sizes, drops = [in_features, *self.hidden], self.method == "dropout"
        layers: list[nn.Module] = []
        for size, following in itertools.pairwise(sizes):
            layers += [nn.Linear(size, following), nn.Tanh(), *[nn.Dropout(0.1)] * drops]
        # In float64 the other rows of a batch do not change what is predicted for one.
        return nn.Sequential(*layers, nn.Linear(sizes[-1], out_features)).double()

    def _fit(self, X: Any, y: Tensor, likelihood: Likelihood, num_outputs: int) -> None:
        if not callable(self.method):
            check_known("method", self.method, METHODS)
        if not self.prior_scale > 0:
            raise ValueError(f"prior_scale is {self.prior_scale}; expected a positive number")
        method = Method(self.method) if callable(self.method) else METHODS[self.method]
        num_epochs = check_count("num_epochs", self.num_epochs)
        batch_size = check_count("batch_size", self.batch_size)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        scaler, prior = self._scaler(X), LambdaPrior(partial(_normal, self.prior_scale))
        with torch_rng_kept():
            torch.manual_seed(seed)
            bnn = method.make(self._make_net(X.shape[1], num_outputs), prior, likelihood)
            like = next(bnn.parameters())
            x = torch.as_tensor(scaler.transform(X)).to(like)
            data = TensorDataset(x, y.to(like if y.is_floating_point() else like.device))
            batches = BatchSampler(RandomSampler(data), batch_size, drop_last=False)
            loader = DataLoader(data, sampler=batches, batch_size=None)
            with method.handler():
                if isinstance(bnn, MCMC_BNN):
                    bnn.fit(loader, -(-num_epochs // 2), progress=False)
                else:
                    adam = partial(torch.optim.Adam, lr=self.lr)
                    bnn.fit(loader, adam, num_epochs, progress=False, **method.options)
        self.bnn_, self.n_iter_, self._has_draws = bnn, num_epochs, method.has_draws
        self._x_scaler, self._seed = scaler, seed

    def _call(self, name: str, X: Any, seed: int, **options: Any) -> Any:
        X = validate_data(self, X, reset=False, dtype=np.float64)
        x = torch.as_tensor(self._x_scaler.transform(X)).to(next(self.bnn_.parameters()))
        with torch_rng_kept():
            torch.manual_seed(seed)
            return getattr(self.bnn_, name)(x, batch_size=self.batch_size, **options)

    def _predict(self, X: Any) -> Any:
        check_is_fitted(self)
        count = self.num_predictions if self._has_draws else 0
        return self._call("predict", X, self._seed + 1, num_predictions=count, link="probit")

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> Any:
        """Draw targets from the posterior predictive distribution, `(n, ..., n_samples)`.

        Args:
            X: inputs, `(n, n_features)`.
            n_samples: number of draws: of the weights, and of the targets given these.
            random_state: seed of the draws.
        """
        check_is_fitted(self)
        seed = int(check_random_state(random_state).randint(2**31 - 1))
        drawn = self._call("sample_predictive", X, seed, num_samples=n_samples).cpu().numpy()
        return np.stack([self._in_units(each) for each in drawn], -1)


class BayesianRegressor(RegressorMixin, _Estimator):
    """A Bayesian neural network that predicts numbers, with their standard deviations."""

    def fit(self, X: Any, y: Any) -> BayesianRegressor:
        """Fit to inputs `(n, n_features)` and numbers `(n,)` or `(n, n_outputs)`."""
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        columns = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        scaler, size = self._scaler(columns), columns.shape[1]
        noise = HomoskedasticGaussian(len(y), scale=torch.ones(size), learn_scale=True)
        self._fit(X, torch.as_tensor(scaler.transform(columns)), noise, size)
        self._y_scaler, self._y_shape = scaler, y.shape[1:]
        return self

    def _in_units(self, values: Any) -> Any:
        return self._y_scaler.inverse_transform(np.float64(values)).reshape(-1, *self._y_shape)

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Return means, and with `return_std` standard deviations, of observations."""
        mean, std = (part.double().cpu().numpy() for part in self._predict(X))
        mean, scale = self._in_units(mean), self._y_scaler.scale_
        return (
            (mean, (std if scale is None else std * scale).reshape(mean.shape))
            if return_std
            else mean
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class BayesianClassifier(ClassifierMixin, _Estimator):
    """A Bayesian neural network that predicts probabilities of classes."""

    def fit(self, X: Any, y: Any) -> BayesianClassifier:
        """Fit to inputs `(n, n_features)` and labels `(n,)` of any kind."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        classes, codes = np.unique(column_or_1d(y, warn=True), return_inverse=True)
        if len(classes) < 2:
            raise ValueError(f"y has only 1 class, {classes[0]!r}; expected two or more")
        self._fit(X, torch.as_tensor(codes), Categorical(len(y)), len(classes))
        self.classes_ = classes
        return self

    def _in_units(self, values: Any) -> Any:
        return self.classes_[values]

    def predict_proba(self, X: Any) -> Any:
        """Return probabilities, `(n, n_classes)`, in the order of `classes_`."""
        return self._predict(X).softmax(-1).double().cpu().numpy()

    def predict(self, X: Any) -> Any:
        """Return the most probable classes, `(n,)`."""
        return self._in_units(self.predict_proba(X).argmax(-1))
