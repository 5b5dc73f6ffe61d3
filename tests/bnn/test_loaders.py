"""Loaders are the user's code: without length, of one buffer, and never inside of a lock."""

import functools
import multiprocessing
import queue
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import tyxe
from tests.oracles import bnns
from tests.oracles.bnns import ADAM, HIDE_NORMS, NORMAL, chains, mean_field, mlp, two_layers
from tests.oracles.nets import NetOf
from tyxe.data import Unpacked
from tyxe.threads import exclusive

pytestmark = pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")

N, SIZE = 24, 6
X = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
W = torch.arange(N) % 3 + 0.5
WEIGHED = W / W.mean()


class Loader:
    """Fills the same tensors anew for each batch, and looks at where it runs."""

    def __init__(self, reuses=True):
        self.reuses, self.runs, self.wrong = reuses, 0, set()
        self.buffer = torch.empty(SIZE, 3), torch.empty(SIZE, dtype=torch.long), torch.empty(SIZE)

    def __iter__(self):
        for start in range(0, N, SIZE):
            self.look()
            rows = slice(start, start + SIZE)
            batch = [part[rows].clone() for part in (X, Y, WEIGHED)]
            if self.reuses:
                batch = [held.copy_(part) for held, part in zip(self.buffer, batch, strict=True)]
            yield tuple(batch)
        self.look()

    def look(self):
        self.runs += 1
        if not torch.is_grad_enabled():
            self.wrong.add("no_grad")
        if torch.is_inference_mode_enabled():
            self.wrong.add("inference mode")
        thread = threading.Thread(target=self.take_the_lock, daemon=True)
        thread.start()
        thread.join(0.5)
        if thread.is_alive():
            self.wrong.add("lock")

    def take_the_lock(self):
        with exclusive():
            pass


def net(*layers):
    torch.manual_seed(0)
    return two_layers(3, 4, 2, *layers)


LIKELIHOOD = tyxe.likelihoods.Categorical(N)


def variational(*layers):
    return mean_field(net(*layers), LIKELIHOOD, HIDE_NORMS)


def laplace(*data):
    return bnns.laplace(net(), LIKELIHOOD, *data, prior=HIDE_NORMS)


def mcmc(kernel):
    return chains(net(), LIKELIHOOD, kernel, HIDE_NORMS)


def ensemble():
    def make(index):
        torch.manual_seed(index)
        return mean_field(mlp(3, 4, 2), LIKELIHOOD)

    return tyxe.EnsembleBNN(make, 3)


def fitted(bnn, loader, *arguments, **options):
    torch.manual_seed(1)
    bnn.fit(loader, *arguments, **options)
    return bnn.state_dict()


def predicted(bnn, loader):
    """Predictions by statistics of norms from a loader, for each draw, within other calls too."""
    bnn.update_norm_statistics(loader)
    torch.manual_seed(1)
    found = bnn.predict(X, num_predictions=2), bnn.evaluate(X, Y, num_predictions=2)
    torch.manual_seed(1)
    found += bnn.to_ensemble(2)(X), bnn.to_module(sample=True)(X)
    return found, bnn.fit([(X, Y)], ADAM, 1, validation=[(X, Y)]).validation


def from_gp(loader):
    bnn = laplace(ONE)
    bnn.fit_gp(loader)
    return bnn.predict(X, predictive="gp")


def diagnosed(bnn, loader):
    return tyxe.diagnostics.diagnose(bnn, loader, loader, num_predictions=4)


SGD = functools.partial(torch.optim.SGD, lr=0.1)
SGHMC = functools.partial(tyxe.samplers.SGHMC, lr=1e-3)
NUTS = tyxe.samplers.NUTS(max_tree_depth=2)
ONE = [(X, Y)]
USES = {
    "fit": lambda loader: fitted(variational(), loader, ADAM, 2),
    "accumulated": lambda loader: fitted(variational(), loader, ADAM, 2, accumulate_steps=3),
    "validation": lambda loader: variational().fit(ONE, ADAM, 2, validation=loader).validation,
    "vectorize": lambda loader: fitted(ensemble(), loader, ADAM, 2, vectorize=True),
    "vectorize, validation": lambda loader: fitted(
        ensemble(), ONE, ADAM, 2, vectorize=True, validation=loader
    ),
    "members": lambda loader: fitted(ensemble(), loader, ADAM, 2),
    "SWAG": lambda loader: fitted(
        bnns.swag(net(nn.BatchNorm1d(4)), LIKELIHOOD, HIDE_NORMS), loader, SGD, 8
    ),
    "Laplace": lambda loader: fitted(laplace(), loader, ADAM, 2),
    "SGHMC": lambda loader: fitted(mcmc(SGHMC), loader, 4, warmup_steps=2),
    "SGHMC, chains": lambda loader: fitted(mcmc(SGHMC), loader, 4, warmup_steps=2, num_chains=2),
    "NUTS": lambda loader: fitted(mcmc(NUTS), loader, 2, warmup_steps=2, num_chains=1),
    "starts": lambda loader: mcmc(NUTS).starts(loader, "net", 2),
    "predict": lambda loader: variational().predict(loader),
    "evaluate": lambda loader: variational().evaluate(loader),
    "curvature": lambda loader: laplace(loader).predict(X),
    "glm": lambda loader: laplace(ONE).evaluate(loader),
    "precision": lambda loader: laplace(ONE).optimize_prior_precision(loader=loader),
    "refine": lambda loader: (
        laplace(ONE).refine(Unpacked(loader, lambda batch: batch[:2])).predict(X)
    ),
    "gp": from_gp,
    "norms": lambda loader: predicted(variational(nn.BatchNorm1d(4)), loader),
    "diagnose": lambda loader: {
        name: line.value for name, line in diagnosed(variational(), loader).items()
    },
    "scores": lambda loader: dict(tyxe.diagnostics.scores(variational(), loader)),
    "calibration": lambda loader: (
        tyxe.calibration.SplitConformal(level=0.8).wrap(variational(), loader).predict(X)
    ),
    "PytorchBNN": lambda loader: tyxe.PytorchBNN(net(), HIDE_NORMS, tyxe.guides.AutoNormal).predict(
        ((x,) for x, *_ in loader)
    ),
}


@pytest.mark.parametrize("use", USES)
def test_loaders_run_outside_of_locks_and_grad_modes_and_may_reuse_their_memory(use):
    found = []
    for loader in (Loader(reuses=False), Loader()):
        torch.manual_seed(2)
        found.append(USES[use](loader))
        assert loader.runs
        assert not loader.wrong
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0, equal_nan=True)


class Waiting(Loader):
    """Takes its batches from a thread that predicts with another BNN."""

    def __iter__(self):
        other, batches = variational(), queue.Queue(1)

        def work():
            for rows in torch.arange(N).split(SIZE):
                other.predict(X[rows], num_predictions=2)
                batches.put((X[rows], Y[rows], WEIGHED[rows]))
            batches.put(None)

        threading.Thread(target=work, daemon=True).start()
        while (batch := batches.get(timeout=10)) is not None:
            yield batch


@pytest.mark.parametrize("use", ["fit", "validation", "SGHMC", "SGHMC, chains", "norms"])
def test_a_loader_may_wait_for_a_thread_that_predicts(use):
    USES[use](Waiting())


AS_DATASET = "fit validation predict evaluate curvature vectorize norms diagnose calibration"


@pytest.mark.parametrize("use", AS_DATASET.split())
def test_a_dataset_is_told_of_its_loader(use):
    with pytest.raises(TypeError, match=r"TensorDataset yields points.*DataLoader\(dataset"):
        USES[use](TensorDataset(X, Y))


def test_a_generator_for_several_members_is_told_so():
    with pytest.raises(TypeError, match=r"generator, which can be used once only.*each member"):
        USES["vectorize"](batch for batch in [(X, Y)])


class Stream(IterableDataset):
    """Rows, of which nobody knows how many there are."""

    def __iter__(self):
        return zip(X, Y, WEIGHED, strict=True)


class Unsized:
    """An iterable whose length is not known, and which says so in its own way."""

    def __init__(self, error):
        self.error = error

    def __iter__(self):
        return zip(X.split(SIZE), Y.split(SIZE), WEIGHED.split(SIZE), strict=True)

    def __len__(self):
        raise self.error


@pytest.mark.parametrize("use", ["fit", "validation", "Laplace", "SGHMC", "curvature", "NUTS"])
def test_a_target_of_a_later_batch_that_is_one_number(use):
    with pytest.raises(ValueError, match="one number; expected one row for each point"):
        USES[use]([(X, Y), (X[0], Y[0])])


UNSIZED = {
    "a stream": lambda: DataLoader(Stream(), SIZE),
    "TypeError": lambda: Unsized(TypeError("no length")),
    "NotImplementedError": lambda: Unsized(NotImplementedError()),
}


@pytest.mark.parametrize("kind", UNSIZED)
@pytest.mark.parametrize("use", ["fit", "accumulated", "members", "SWAG", "Laplace", "SGHMC"])
def test_a_loader_may_have_no_length(use, kind):
    USES[use](UNSIZED[kind]())


@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.parametrize("unpack", [None, tuple])
@pytest.mark.parametrize("class_weights", [None, torch.tensor([1.0, 2.0])])
def test_a_generator_may_be_gone_through_once(class_weights, unpack, progress):
    likelihood = tyxe.likelihoods.Categorical(N, class_weights=class_weights)
    bnn = mean_field(net(), likelihood)
    once = (batch for batch in zip(X.split(SIZE), Y.split(SIZE), strict=True))
    assert len(bnn.fit(once, ADAM, 1, unpack=unpack, progress=progress).loss) == 1


@pytest.mark.parametrize("num_chains", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_no_worker_outlives_a_run_of_chains(persistent, num_chains):
    rows, before = TensorDataset(X, Y), set(multiprocessing.active_children())
    loader = DataLoader(rows, SIZE, num_workers=1, persistent_workers=persistent)
    bnn = mcmc(SGHMC)
    bnn.fit(loader, 5, warmup_steps=0, num_chains=num_chains)
    assert not set(multiprocessing.active_children()) - before


def of_two():
    """Return a net of two arguments."""
    layers = {"one": nn.Linear(2, 1), "two": nn.Linear(1, 1)}
    return NetOf(lambda self, one, two: self.one(one) + self.two(two), **layers)


@pytest.mark.parametrize("use", ["validation", "curvature", "diagnosis"])
def test_what_reads_held_out_data_takes_arguments_in_a_list_as_loaders_collate_them(use):
    def found(held_out):
        torch.manual_seed(0)
        likelihood = tyxe.likelihoods.HomoskedasticGaussian(N, scale=0.5)
        make = tyxe.LaplaceBNN if use == "curvature" else mean_field
        bnn = make(of_two(), prior=NORMAL, likelihood=likelihood)
        if use == "diagnosis":
            return diagnosed(bnn, held_out).summary
        return bnn.fit(held_out, ADAM, 2, validation=held_out).validation

    y = X.sum(1, keepdim=True)
    rows = [((one, two), target) for one, two, target in zip(X[:, :2], X[:, 2:], y, strict=True)]
    loader = DataLoader(rows, SIZE)
    assert isinstance(next(iter(loader))[0], list)
    assert found(loader) == found(Unpacked(loader, lambda batch: (tuple(batch[0]), batch[1])))
