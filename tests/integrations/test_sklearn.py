"""scikit-learn's estimators: its own checks, and plain use of the wrappers with equal seeds."""

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the estimators are scikit-learn's, extra `sklearn`")

from sklearn.utils.estimator_checks import parametrize_with_checks

from tyxe.integrations.sklearn import BayesianClassifier, BayesianRegressor

# Fewer epochs than by default, because the checks fit some sixty times.
ESTIMATORS = [BayesianRegressor(num_epochs=100), BayesianClassifier(num_epochs=100)]


@parametrize_with_checks(ESTIMATORS)
def test_checks_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_same_seed_predicts_the_same_and_global_generators_stay(estimator):
    x, y = np.random.randn(20, 3), np.arange(20) % 2
    before, numbers = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = estimator.set_params(random_state=3).fit(x, y).predict(x)
    assert (estimator.fit(x, y).predict(x) == first).all()
    assert torch.equal(torch.get_rng_state(), before)
    assert (np.random.get_state()[1] == numbers).all()
