"""What is given in the place of a loader or its batches, and embeddings with sparse gradients."""

from functools import partial
from typing import Any

import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.utils.data import TensorDataset

import tyxe
from tyxe.likelihoods import Categorical

N = 12
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
PRIOR = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
ADAM = partial(torch.optim.Adam, lr=1e-2)


def bnn_of(net: nn.Module, guide: Any = tyxe.guides.AutoNormal, prior: Any = PRIOR) -> Any:
    return tyxe.VariationalBNN(net, prior, Categorical(N), guide)


def linear() -> Any:
    return bnn_of(nn.Linear(3, 2))


def ensemble() -> tyxe.EnsembleBNN:
    return tyxe.EnsembleBNN(lambda k: linear(), 2)


USES = {
    "fit": lambda data: linear().fit(data, ADAM, 1),
    "validation": lambda data: linear().fit([(X, Y)], ADAM, 1, validation=data),
    "predict": lambda data: linear().predict(data),
    "evaluate": lambda data: linear().evaluate(data),
    "fit_curvature": lambda data: tyxe.LaplaceBNN(
        nn.Linear(3, 2), PRIOR, Categorical(N)
    ).fit_curvature(data),
    "vectorize": lambda data: ensemble().fit(data, ADAM, 1, vectorize=True),
    "update_norm_statistics": lambda data: bnn_of(
        nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    ).update_norm_statistics(data),
    "diagnose": lambda data: tyxe.diagnostics.diagnose(linear(), data, data),
    "wrap": lambda data: tyxe.calibration.TemperatureScaling().wrap(linear(), data),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_dataset_is_told_of_its_loader(use: Any) -> None:
    with pytest.raises(TypeError, match=r"TensorDataset yields points.*DataLoader\(dataset"):
        use(TensorDataset(X, Y))


def test_a_generator_for_several_members_is_told_so() -> None:
    with pytest.raises(TypeError, match=r"generator, which can be used once only.*each member"):
        ensemble().fit((batch for batch in [(X, Y)]), ADAM, 1, vectorize=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_chains_say_that_inputs_are_not_finite(bad: float) -> None:
    inputs = X.clone()
    inputs[0, 0] = bad
    bnn = tyxe.MCMC_BNN(nn.Linear(3, 2), PRIOR, Categorical(N), tyxe.samplers.NUTS)
    with pytest.raises(ValueError, match="inputs that are not finite: drop points"):
        bnn.fit([(inputs, Y)], 2, warmup_steps=300)
    assert not len(bnn.samples)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.bag = nn.Embedding(4, 3, sparse=True), nn.EmbeddingBag(4, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(words).mean(1) + self.bag(words))


class Mean(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return super().forward(rows.mean(1))


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(4, 3, sparse=True), Mean())


WORDS = torch.arange(2 * N).reshape(N, 2) % 4
HEAD = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.Embedding, nn.EmbeddingBag])
SPARSE = {
    "hidden": lambda: bnn_of(Bag(), prior=HEAD).fit([(WORDS, Y)], ADAM, 1, clip_norm=1.0),
    "map": lambda: bnn_of(Bag(), AutoDelta).fit([(WORDS, Y)], ADAM, 1),
    "Laplace": lambda: tyxe.LaplaceBNN(words(), PRIOR, Categorical(N)).fit([(WORDS, Y)], ADAM, 1),
    "chains": lambda: tyxe.MCMC_BNN(Bag(), PRIOR, Categorical(N), tyxe.samplers.SGLD(1e-4)).fit(
        [(WORDS, Y)], 2, warmup_steps=2
    ),
    "ensemble": lambda: tyxe.EnsembleBNN(lambda k: bnn_of(words()), 2).fit(
        [(WORDS, Y)], ADAM, 1, vectorize=True
    ),
}


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("fit", SPARSE.values(), ids=SPARSE.keys())
def test_embeddings_with_sparse_gradients_are_fitted(fit: Any) -> None:
    fit()


def test_the_embedding_that_was_given_stays_sparse() -> None:
    net = Bag()
    bnn_of(net)
    assert net.table.sparse
    assert net.bag.sparse


def test_swag_unpacks_batches_for_statistics_of_norms() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    bnn = tyxe.SWAG_BNN(net, PRIOR, Categorical(N), rank=2)
    batches = [{"inputs": X, "label": Y}]
    bnn.fit(batches, ADAM, 8, unpack=lambda batch: (batch["inputs"], batch["label"]))
    assert bnn._averages_norms
    assert bnn.predict(X, num_predictions=2).isfinite().all()
