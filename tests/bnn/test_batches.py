"""Data of every shape and loaders of every kind mean the same to `fit`."""

from typing import NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import tyxe
from tests.oracles.fits import ADAM, PRIOR, X, Y, make
from tests.oracles.nets import NetOf
from tests.oracles.predictions import seeded
from tyxe.bnn.batches import batches_of, collect
from tyxe.likelihoods import Categorical

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
LEFT, RIGHT = X[:, :1], X[:, 1:]
ROWS = slice(0, 4), slice(4, 10)


def two(function=lambda self, left, right: self.left(left) - self.right(right)):
    pyro.set_rng_seed(6)
    return NetOf(function, left=nn.Linear(1, 3), right=nn.Linear(1, 3))


def test_device_moves_batches():
    packed = pack_padded_sequence(torch.randn(5, 2, 2), [5, 3])
    inputs, targets = next(iter(batches_of([((X, {"a": X}, packed), Y)], "meta")))
    assert targets.is_meta
    assert inputs[0].is_meta
    assert inputs[1]["a"].is_meta
    assert inputs[2].data.is_meta
    assert inputs[2].batch_sizes.device.type == "cpu"  # whatever the device


def of_packed(lengths, enforce_sorted=True):
    """Return a packed sequence, and a BNN that takes it as one argument."""

    def forward(self, packed):
        assert isinstance(packed, PackedSequence)
        return self.head(self.cell(packed)[1][0])

    x = torch.randn(5, len(lengths), 2)
    net = NetOf(forward, cell=nn.GRU(2, 4), head=nn.Linear(4, 3))
    packed = pack_padded_sequence(x, lengths, enforce_sorted=enforce_sorted)
    return packed, make(net, PRIOR, likelihood=Categorical(len(lengths)))


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_a_packed_sequence_is_one_argument(enforce_sorted):
    packed, bnn = of_packed([5, 3, 3, 1], enforce_sorted)
    bnn.fit([(packed, Y[:4])], ADAM, 1, device="cpu")
    assert bnn(packed).shape == (4, 3)
    _, log_likelihood = bnn.evaluate(packed, Y[:4], num_predictions=2)
    assert log_likelihood.isfinite()
    alone = seeded(bnn.predict, packed, num_predictions=2)
    assert alone.shape == (4, 3)
    loader = iter([(packed, Y[:4])])
    torch.testing.assert_close(seeded(bnn.predict, loader, num_predictions=2), alone)


def test_rows_of_a_packed_sequence_are_not_cut():
    packed, bnn = of_packed([5, 3])
    with pytest.raises(TypeError, match="batch_size cannot cut a PackedSequence; pass a loader"):
        bnn.predict(packed, batch_size=1)


class Points(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def test_named_tuples_are_cut_and_joined_as_such():
    points = Points(LEFT, RIGHT)
    bnn = make(two(lambda self, points: self.left(points.left) - self.right(points.right)), PRIOR)
    bnn.fit([(points, Y)], ADAM, 1, device="cpu")
    whole, pieces = (
        seeded(bnn.predict, points, num_predictions=2, batch_size=size) for size in (None, 3)
    )
    torch.testing.assert_close(pieces, whole)
    joined, labels = collect([(Points(LEFT[r], RIGHT[r]), Y[r]) for r in ROWS])
    assert isinstance(joined, Points)
    torch.testing.assert_close((*joined, labels), (*points, Y))


def test_inputs_of_every_structure_are_joined():
    halves = [(({"left": LEFT[r], "right": [RIGHT[r], None]}, "mode", 2), Y[r]) for r in ROWS]
    (mapping, *constants), labels = collect(halves)
    assert torch.equal(mapping["left"], LEFT)
    assert torch.equal(mapping["right"][0], RIGHT)
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


def words():
    """Return a net of embeddings with sparse gradients."""
    return NetOf(
        lambda self, words: self.head(self.table(words).mean(1) + self.bag(words)),
        table=nn.Embedding(4, 2, sparse=True),
        bag=nn.EmbeddingBag(4, 2, sparse=True),
        head=nn.Linear(2, 3),
    )


def of_table():
    return NetOf(
        lambda self, words: self.head(self.table(words).mean(1)),
        table=nn.Embedding(4, 2, sparse=True),
        head=nn.Linear(2, 3),
    )


WORDS = [(torch.arange(20).reshape(10, 2) % 4, Y)]
HEAD = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose=["head.*"])
SGLD = tyxe.samplers.SGLD(1e-4)
SPARSE = {
    "hidden": lambda: make(words(), HEAD).fit(WORDS, ADAM, 1, clip_norm=1.0),
    "map": lambda: make(words(), PRIOR, AutoDelta).fit(WORDS, ADAM, 1),
    "Laplace": lambda: tyxe.LaplaceBNN(of_table(), PRIOR, Categorical(10)).fit(WORDS, ADAM, 1),
    "chains": lambda: tyxe.MCMC_BNN(words(), PRIOR, Categorical(10), SGLD).fit(WORDS, 2),
    "ensemble": lambda: tyxe.EnsembleBNN(lambda k: make(of_table(), PRIOR), 2).fit(
        WORDS, ADAM, 1, vectorize=True
    ),
}


@pytest.mark.parametrize("fit", SPARSE.values(), ids=SPARSE.keys())
def test_embeddings_with_sparse_gradients_are_fitted(fit):
    assert fit() is not None


def test_the_embedding_that_was_given_stays_sparse():
    net = words()
    make(net, PRIOR)
    assert net.table.sparse
    assert net.bag.sparse
