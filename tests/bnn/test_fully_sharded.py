"""Two processes, each with a part of every parameter, make the steps of one; and one that dies."""

import copy
import functools
import os
import time
from importlib.util import find_spec

import pytest
import torch
import torch.distributed
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tests.bnn import test_parallel
from tests.bnn.test_parallel import (
    CLASSES,
    WORLD,
    N,
    X,
    assert_equal,
    batches,
    make,
    mlp,
    parameters,
)
from tests.oracles import processes
from tyxe.likelihoods import Categorical
from tyxe.priors import IIDPrior

ADAM = functools.partial(torch.optim.Adam, lr=0.1)
STRUCTURES = ("diag", "lowrank")
NORMAL = IIDPrior(torch.distributions.Normal(0.0, 1.0))


class Watch(tyxe.Callback):
    """What a BNN is after each step, and after each epoch."""

    def __init__(self):
        self.kinds, self.predictions, self.states = [], [], []

    def on_batch(self, bnn, epoch, batch, terms):
        held = [p for p in bnn.parameters() if isinstance(p, DTensor)]
        self.kinds.append([(p.numel(), p.to_local().numel()) for p in held])

    def __call__(self, bnn, epoch, loss):
        self.predictions.append(bnn.predict(X[:2], num_predictions=0))
        self.states.append({n: copy.deepcopy(p) for n, p in bnn.state_dict().items()})


def watched(rank, **parallel):
    """A fit of two epochs and, from its checkpoint, of a third, with what was seen between."""
    bnn, watch = make(), Watch()
    before = {name: id(p) for name, p in bnn.named_parameters()}
    torch.manual_seed(7)
    bnn.fit(batches(CLASSES, rank), ADAM, 2, watch, **parallel)
    assert {name: id(p) for name, p in bnn.named_parameters()} == before
    assert all(type(p) is torch.nn.Parameter for p in bnn.parameters())
    resumed = make()
    resumed.load_checkpoint(bnn.checkpoint())
    resumed.fit(batches(CLASSES, rank), ADAM, 1, **parallel)
    return {
        "kinds": watch.kinds,
        "predictions": torch.stack(watch.predictions),
        "states": watch.states,
        "resumed": parameters(resumed),
    }


def losses_of(module, optimizer, rank, count):
    """The losses of steps in a loop of one's own, averaged over processes."""
    found = []
    for _ in range(count):
        x, y = batches(CLASSES, rank)[0]
        loss = module((x, y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if rank is not None:
            torch.distributed.all_reduce(mean)
            mean /= WORLD
        found.append(float(mean))
    return found


def trainable(bnn, rank):
    module = tyxe.Trainable(bnn)
    if rank is not None:
        fully_shard(module)
        register_fsdp_forward_method(module, "score_batch")
    return module, ADAM(module.parameters())


def loop(rank):
    module, optimizer = trainable(make(), rank)
    torch.manual_seed(7)
    found = {"losses": losses_of(module, optimizer, rank, 3)}
    torch.manual_seed(1)
    found["score"] = float(module.score_batch((X, CLASSES), "sum").log_likelihood)
    return module, optimizer, found


def saved(rank, folder):
    """A loop that goes on from a sharded state, and predictions by a whole one."""
    module, optimizer, found = loop(rank)
    state = dict(zip(("model", "optimizer"), get_state_dict(module, optimizer), strict=True))
    dcp.save(state, checkpoint_id=f"{folder}/checkpoint")
    other, its = trainable(make(), rank)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, its), strict=True))
    dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(other, its, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, one in {"went on": (module, optimizer), "loaded": (other, its)}.items():
        torch.manual_seed(9)
        found[name] = losses_of(*one, rank, 2)
    whole = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    plain = make()
    plain.load_state_dict({name.removeprefix("bnn."): p for name, p in whole.items()})
    found["whole"] = plain.predict(X[:2], num_predictions=0)
    module.unshard()
    found["unsharded"] = module.bnn.predict(X[:2], num_predictions=0)
    module.reshard()
    return found


def laplace(structure, rank, group=None):
    """A curvature at the mode of a loop of one's own."""
    torch.manual_seed(0)
    options = tyxe.LaplaceOptions(rank=5) if structure == "lowrank" else None
    bnn = tyxe.LaplaceBNN(mlp(3), NORMAL, Categorical(N), structure=structure, options=options)
    module, optimizer = trainable(bnn, rank)
    losses_of(module, optimizer, rank, 3)
    if rank is not None:
        module.unshard()
    bnn.fit_curvature(batches(CLASSES, rank), process_group=group)
    return {
        "precision": bnn.state.precision().diagonal(),
        "evidence": bnn.log_marginal_likelihood(),
        "variance": bnn.functional_variance(X[:2]),
    }


def by_lightning(rank):
    """The losses of Lightning's FSDP2 strategy."""
    import lightning.pytorch as lightning

    from tyxe.integrations.lightning import LightningBNN

    class Sharded(LightningBNN):
        def configure_model(self):
            fully_shard(self.trainable, mesh=self.device_mesh["data_parallel"])
            register_fsdp_forward_method(self.trainable, "score_batch")

        def on_train_batch_start(self, *batch):
            torch.manual_seed(self.global_step)

    class Losses(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, *rest):
            found.append(float(outputs["loss"]))

    found = []
    strategy = lightning.strategies.ModelParallelStrategy(
        data_parallel_size=WORLD, tensor_parallel_size=1, process_group_backend="gloo"
    )
    options = {"accelerator": "cpu", "devices": WORLD, "use_distributed_sampler": False}
    silent = ("checkpointing", "progress_bar", "model_summary")
    options |= {f"enable_{name}": False for name in silent} | {"logger": False}
    trainer = lightning.Trainer(strategy=strategy, max_epochs=3, callbacks=[Losses()], **options)
    data = DataLoader(TensorDataset(*batches(CLASSES, rank)[0]), test_parallel.BATCH)
    trainer.fit(Sharded(make(), ADAM), data, data)
    return found, float(trainer.callback_metrics["val_log_likelihood"])


def by_accelerate(rank):
    """The losses of a loop of one's own under Accelerate's FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    # On CPUs it would choose DistributedDataParallel.
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    module = tyxe.Trainable(make())
    module, optimizer = accelerator.prepare(module, ADAM(module.parameters()))
    assert all(isinstance(p, DTensor) for p in module.parameters())
    torch.manual_seed(7)
    return losses_of(module, optimizer, rank, 3)


def work(rank, folder):
    parallel = {"parallel": fully_shard}
    return {
        "watched": watched(rank, **parallel),
        "SWAG": averaged(rank, **parallel),
        "scalar": scalar(rank, **parallel),
        "layers": layers_first(rank, **parallel),
        "saved": saved(rank, folder),
        "laplace": {s: laplace(s, rank, torch.distributed.group.WORLD) for s in STRUCTURES},
        "lightning": by_lightning(rank) if find_spec("lightning") else None,
        "accelerate": by_accelerate(rank) if find_spec("accelerate") else None,
    }


def scalar(rank, **parallel):
    """The error of a fit of a noise, and whether nothing was changed."""
    parts, _ = test_parallel.SAME_DRAWS["inferred noise"]
    bnn = make(**parts)
    before = parameters(bnn)
    with pytest.raises(ValueError, match="scalar parameters"):
        bnn.fit(batches(X[:, :1], rank), ADAM, 1, **parallel)
    after = parameters(bnn)
    return all(torch.equal(before[name], after[name]) for name in before)


def layers_first(rank, **parallel):
    """Whether a fit that would divide layers one by one is refused, and is as it was."""

    def divide(module):
        for part in [part for part in module.modules() if isinstance(part, torch.nn.Linear)]:
            fully_shard(part)
        return fully_shard(module)

    bnn, other = make(), make()
    before = list(bnn.parameters())
    with pytest.raises(TypeError, match="as one unit: parallel=fully_shard"):
        bnn.fit(batches(CLASSES, rank), ADAM, 1, parallel=divide)
    assert all(held is own for held, own in zip(bnn.parameters(), before, strict=True))
    assert [type(part) for part in bnn.modules()] == [type(part) for part in other.modules()]
    for one in (bnn, other):
        torch.manual_seed(7)
        one.fit(batches(CLASSES, rank), ADAM, 1, **parallel)
    expected = parameters(other)
    return all(torch.equal(value, expected[name]) for name, value in parameters(bnn).items())


def averaged(rank, **parallel):
    """Snapshots of SGD."""
    torch.manual_seed(0)
    bnn = tyxe.SWAG_BNN(mlp(3), NORMAL, Categorical(N), rank=2)
    bnn.fit(batches(CLASSES, rank), functools.partial(torch.optim.SGD, lr=0.1), 8, **parallel)
    return {name: value for name, value in bnn.state_dict().items() if value.is_floating_point()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory):
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("sharded")
    return processes.run(work, WORLD, folder, folder)


def test_parameters_are_in_parts_in_steps_and_whole_between_epochs(found):
    expected = watched(None)
    assert expected.pop("kinds") == [[]] * 4
    for process in found:
        for step in process["watched"].pop("kinds"):
            # Weights and biases of two layers: of the net, their means and their scales.
            assert [whole for whole, _ in step] == [12, 4, 12, 3] * 3
            # By rows, of which the second process has one of three.
            assert [own for _, own in step] in ([6, 2, 8, 2] * 3, [6, 2, 4, 1] * 3)
        states, others = process["watched"].pop("states"), expected["states"]
        for state, other in zip(states, others, strict=True):
            assert_equal(state, other)
        torch.testing.assert_close(process["watched"]["predictions"], expected["predictions"])
        assert_equal(process["watched"]["resumed"], expected["resumed"])


def test_fits_that_cannot_be_divided_change_nothing(found):
    for process in found:
        assert process["scalar"]
        assert process["layers"]


def test_a_loop_of_ones_own_and_its_states(found):
    *_, expected = loop(None)
    for process in found:
        assert process["saved"]["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        assert process["saved"]["score"] == pytest.approx(expected["score"], rel=1e-12)
        assert process["saved"]["loaded"] == process["saved"]["went on"]
        torch.testing.assert_close(process["saved"]["whole"], process["saved"]["unsharded"])


def test_snapshots_are_those_of_one_process(found):
    expected = averaged(None)
    for process in found:
        assert_equal(process["SWAG"], expected)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_curvature_at_the_mode_of_a_loop(found, structure):
    expected = laplace(structure, None)
    for process in found:
        assert_equal(process["laplace"][structure], expected)


def test_accelerate(found):
    pytest.importorskip("accelerate")
    parts = trainable(make(), None)
    torch.manual_seed(7)
    expected = losses_of(*parts, None, 3)
    assert found[0]["accelerate"] == found[1]["accelerate"]
    assert found[0]["accelerate"] == pytest.approx(expected, rel=1e-12)


def test_lightning(found):
    pytest.importorskip("lightning")
    module, optimizer = trainable(make(), None)
    expected = []
    for step in range(3):
        torch.manual_seed(step)
        expected += losses_of(module, optimizer, None, 1)
    means = [sum(each) / WORLD for each in zip(*(p["lightning"][0] for p in found), strict=True)]
    assert means == pytest.approx(expected, rel=1e-12)
    assert found[0]["lightning"][1] == found[1]["lightning"][1]


# --- a process that dies --------------------------------------------------------------------------

EPOCHS, DIES_AFTER, SECONDS = 5, 2, 20


def fit(bnn, rank, epochs, callback=None):
    data = batches(CLASSES, rank)
    bnn.fit(data, ADAM, epochs, callback, parallel=DistributedDataParallel)
    return bnn.state_dict()


def whole(rank):
    bnn = make()
    torch.manual_seed(rank)
    return fit(bnn, rank, EPOCHS)


def dying(rank, folder):
    """Return after how many seconds the death of another process was an error."""

    def save(bnn, epoch, loss):
        if epoch < DIES_AFTER:
            bnn.save(f"{folder}/{rank}.fit", training=True)
        elif rank == 1:
            os._exit(0)

    bnn = make()
    torch.manual_seed(rank)
    start = time.monotonic()
    try:
        fit(bnn, rank, EPOCHS, save)
    except RuntimeError:
        return time.monotonic() - start


def resumed(rank, folder):
    """Return the state of a fit that nothing ended, and of one that goes on from a file."""
    expected, bnn = whole(rank), make()
    bnn.load(f"{folder}/{rank}.fit")
    return expected, fit(bnn, rank, EPOCHS - DIES_AFTER)


def test_the_others_raise_within_the_timeout_and_all_go_on_from_their_files(tmp_path):
    seconds, died = processes.run(dying, WORLD, tmp_path, tmp_path, seconds=SECONDS)
    assert died is None
    assert seconds < SECONDS + 10
    for expected, found in processes.run(resumed, WORLD, tmp_path, tmp_path):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
