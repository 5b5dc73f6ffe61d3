"""Data of every shape and loaders of every kind mean the same to `fit`."""

from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tests.oracles.fits import ADAM, PRIOR, X, Y, assert_equal, make, trainable
from tyxe.bnn.batches import batches_of, collect
from tyxe.likelihoods import Categorical

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(1, 3), nn.Linear(1, 3)

    def forward(self, left, right):
        return self.left(left) - self.right(right)


STRUCTURES = {
    "tuple": lambda x: (x[:, :1], x[:, 1:]),
    "list": lambda x: [x[:, :1], x[:, 1:]],
    "mapping": lambda x: {"right": x[:, 1:], "left": x[:, :1]},
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_inputs_of_every_structure_mean_the_same(structure):
    def run(inputs):
        pyro.set_rng_seed(6)
        bnn = make(Two())
        pyro.set_rng_seed(7)
        bnn.fit([(inputs, Y)], ADAM, 2, device="cpu")
        pyro.set_rng_seed(8)
        # A list by itself is a loader, in every method; inside of a batch it is arguments.
        asked = [(inputs, Y)] if isinstance(inputs, list) else inputs
        return trainable(bnn), bnn.predict(asked, num_predictions=2)

    reference, output = run(STRUCTURES["tuple"](X))
    found, same = run(STRUCTURES[structure](X))
    assert_equal(found, reference)
    assert torch.equal(output, same)


@pytest.mark.parametrize(
    "as_loader",
    [
        lambda: [(X, Y)],
        lambda: [[X, Y]],
        lambda: ((X, Y),),
        lambda: iter([(X, Y)]),
        lambda: (batch for batch in [(X, Y)]),
        lambda: DataLoader(TensorDataset(X, Y), batch_size=10),
    ],
)
def test_loaders_of_every_kind_mean_the_same(as_loader):
    bnn = make()
    loader = as_loader()
    generator = torch.Generator().manual_seed(0)
    if isinstance(loader, DataLoader):
        loader.generator = generator  # else it draws its seed from the global one
    pyro.set_rng_seed(7)
    bnn.fit(loader, ADAM, 1)
    reference = make()
    pyro.set_rng_seed(7)
    reference.fit([(X, Y)], ADAM, 1)
    assert_equal(trainable(bnn), trainable(reference))


def test_device_moves_batches():
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 2), [5, 3])
    inputs, targets = next(iter(batches_of([((X, {"a": X}, packed), Y)], "meta")))
    assert targets.is_meta
    assert inputs[0].is_meta
    assert inputs[1]["a"].is_meta
    assert inputs[2].data.is_meta
    assert inputs[2].batch_sizes.device.type == "cpu"  # whatever the device


class OfPacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(2, 4), nn.Linear(4, 3)

    def forward(self, packed):
        assert isinstance(packed, nn.utils.rnn.PackedSequence)
        return self.head(self.cell(packed)[1][0])


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_is_one_argument(enforce_sorted):
    lengths = [5, 3, 3, 1]
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.randn(5, 4, 2), lengths, enforce_sorted=enforce_sorted
    )
    bnn = make(OfPacked(), PRIOR, likelihood=Categorical(4))
    bnn.fit([(packed, Y[:4])], ADAM, 1, device="cpu")
    assert bnn(packed).shape == (4, 3)
    assert bnn.predict(packed, num_predictions=2).shape == (4, 3)
    _, log_likelihood = bnn.evaluate(packed, Y[:4], num_predictions=2)
    assert log_likelihood.isfinite()
    pyro.set_rng_seed(1)
    alone = bnn.predict(packed, num_predictions=2)
    pyro.set_rng_seed(1)
    torch.testing.assert_close(bnn.predict([(packed, Y[:4])].__iter__(), num_predictions=2), alone)


class Points(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class OfPoints(Two):
    def forward(self, points):
        return super().forward(points.left, points.right)


def test_named_tuples_are_cut_and_joined_as_such():
    points = Points(X[:, :1], X[:, 1:])
    bnn = make(OfPoints(), PRIOR)
    bnn.fit([(points, Y)], ADAM, 1, device="cpu")

    def predict(**options):
        pyro.set_rng_seed(1)
        return bnn.predict(points, num_predictions=2, **options)

    torch.testing.assert_close(predict(batch_size=3), predict())
    halves = [(Points(X[r, :1], X[r, 1:]), Y[r]) for r in (slice(0, 4), slice(4, 10))]
    joined, labels = collect(halves)
    assert isinstance(joined, Points)
    assert torch.equal(joined.left, points.left)
    assert torch.equal(joined.right, points.right)
    assert torch.equal(labels, Y)


def test_rows_of_a_packed_sequence_are_not_cut():
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 2, 2), [5, 3], enforce_sorted=False)
    bnn = make(OfPacked(), PRIOR, likelihood=Categorical(2))
    with pytest.raises(TypeError, match="batch_size cannot cut a PackedSequence; pass a loader"):
        bnn.predict(packed, batch_size=1)


def test_inputs_of_every_structure_are_joined():
    halves = [
        (({"left": X[r, :1], "right": [X[r, 1:], None]}, "mode", 2), Y[r])
        for r in (slice(0, 4), slice(4, 10))
    ]
    (mapping, *constants), labels = collect(halves)
    assert torch.equal(mapping["left"], X[:, :1])
    assert torch.equal(mapping["right"][0], X[:, 1:])
    assert mapping["right"][1] is None
    assert constants == ["mode", 2]
    assert torch.equal(labels, Y)


@pytest.mark.parametrize(
    ("first", "second", "error", "message"),
    [
        (1, 2, ValueError, "is 1 in one batch and something else in another"),
        (object(), object(), TypeError, "inputs of type object cannot be concatenated"),
    ],
)
def test_inputs_that_cannot_be_joined_are_refused(first, second, error, message):
    with pytest.raises(error, match=message):
        collect([((X[:4], first), Y[:4]), ((X[4:], second), Y[4:])])


def test_a_loader_to_predict_yields_pairs_and_weights_at_most():
    with pytest.raises(ValueError, match="the loader yields 4 elements; expected"):
        make().predict(iter([(X, X, X, Y)]), num_predictions=1)


class Bag(nn.Module):
    """Embeddings with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table, self.bag = nn.Embedding(4, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True)
        self.head = nn.Linear(2, 3)

    def forward(self, words):
        return self.head(self.table(words).mean(1) + self.bag(words))


class Mean(nn.Linear):
    def forward(self, rows):
        return super().forward(rows.mean(1))


def words():
    return nn.Sequential(nn.Embedding(4, 2, sparse=True), Mean(2, 3))


WORDS = [(torch.arange(20).reshape(10, 2) % 4, Y)]
HEAD = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose=["head.*"])
SPARSE = {
    "hidden": lambda: make(Bag(), HEAD).fit(WORDS, ADAM, 1, clip_norm=1.0),
    "map": lambda: make(Bag(), PRIOR, AutoDelta).fit(WORDS, ADAM, 1),
    "Laplace": lambda: tyxe.LaplaceBNN(words(), PRIOR, Categorical(10)).fit(WORDS, ADAM, 1),
    "chains": lambda: tyxe.MCMC_BNN(Bag(), PRIOR, Categorical(10), tyxe.samplers.SGLD(1e-4)).fit(
        WORDS, 2, warmup_steps=2
    ),
    "ensemble": lambda: tyxe.EnsembleBNN(lambda k: make(words(), PRIOR), 2).fit(
        WORDS, ADAM, 1, vectorize=True
    ),
}


@pytest.mark.parametrize("fit", SPARSE.values(), ids=SPARSE.keys())
def test_embeddings_with_sparse_gradients_are_fitted(fit):
    fit()


def test_the_embedding_that_was_given_stays_sparse():
    net = Bag()
    make(net, PRIOR)
    assert net.table.sparse
    assert net.bag.sparse
