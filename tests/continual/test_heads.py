"""Heads of tasks: what is switched, saved, moved and refused."""

import copy
import functools
import io
import warnings

import pytest
import torch
from torch import nn

import tyxe
from tests.oracles.bnns import mean_field
from tests.oracles.tasks import TASKS, WRAPPERS, N, Net, assert_equal, data, normal, variational
from tyxe.continual import Heads, TaskLoop
from tyxe.errors import TyxeWarning


@pytest.mark.parametrize("make", WRAPPERS.values(), ids=WRAPPERS.keys())
def test_every_wrapper_learns_and_keeps_heads(make):
    bnn = make()
    heads = Heads(bnn, modules=["head"])
    start = {name: value.clone() for name, value in bnn.net.head.state_dict().items()}
    after = {}
    for task in TASKS:
        heads.start(task)
        assert_equal(dict(bnn.net.head.state_dict()), start)
        bnn.fit([data(task)], functools.partial(torch.optim.Adam, lr=1e-2), 2, progress=False)
        after[task] = {name: value.clone() for name, value in bnn.net.head.state_dict().items()}
        assert not torch.equal(after[task]["1.weight"], start["1.weight"])
        assert int(after[task]["0.num_batches_tracked"]) == 2
    for task in (*TASKS, *reversed(TASKS)):
        heads.use(task)
        assert heads.current == task
        assert_equal(dict(bnn.net.head.state_dict()), after[task])


def numbered():
    """A BNN whose heads have the numbers of their tasks as biases."""
    bnn = variational()
    heads = Heads(bnn, modules=["head"])
    for value, task in enumerate(TASKS):
        heads.start(task)
        bnn.net.head[1].bias.data.fill_(value)
    return bnn, heads


def test_use_as_a_context_puts_the_head_back_even_after_an_error():
    bnn, heads = numbered()

    def breaks():
        with heads.use("first"):
            assert bnn.net.head[1].bias.item() == 0
            with heads.use("second"):
                assert bnn.net.head[1].bias.item() == 1
            assert bnn.net.head[1].bias.item() == 0
            bnn.net.head[1].bias.data.fill_(7.0)
            raise KeyError

    with pytest.raises(KeyError):
        breaks()
    assert (heads.current, bnn.net.head[1].bias.item()) == ("third", 2)
    heads.use("first")
    assert bnn.net.head[1].bias.item() == 7, "what is trained inside a context is kept"


def test_heads_of_a_bnn_that_was_moved():
    bnn = variational()
    heads = Heads(bnn, modules=["head"])
    bnn.to(torch.float64)  # which replaces the buffers of its norms
    start = bnn.net.head[0].running_mean.clone()
    before = {n: id(tensor) for n, tensor in bnn.net.head.state_dict(keep_vars=True).items()}
    heads.start("first")
    bnn.net.head[0].running_mean.fill_(3.0)
    heads.start("second")
    assert torch.equal(bnn.net.head[0].running_mean, start)
    heads.use("first")
    assert bnn.net.head[0].running_mean.tolist() == [3.0] * 5
    after = {n: id(tensor) for n, tensor in bnn.net.head.state_dict(keep_vars=True).items()}
    assert before == after, "switching is in place"


def test_heads_save_and_load():
    bnn, heads = numbered()
    heads.use("second")
    torch.save(heads.state_dict(), file := io.BytesIO())
    file.seek(0)
    fresh = variational()
    loaded = Heads(fresh, modules=["head"])
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert (loaded.current, loaded.tasks) == ("second", TASKS)
    assert fresh.net.head[1].bias.item() == 1
    with loaded.use("third"):
        assert fresh.net.head[1].bias.item() == 2
    # What is loaded is a copy.
    bnn.net.head[1].bias.data.fill_(9.0)
    loaded.use("second")
    assert fresh.net.head[1].bias.item() == 1


def test_heads_of_another_shape_change_nothing():
    heads = Heads(bnn := variational(), modules=["head"])
    other = Heads(variational(), modules=["head.0"])
    heads.start("first")
    before = copy.deepcopy(bnn.state_dict())
    with pytest.raises(ValueError, match=r"heads with head\.0\.weight \(5,\)"):
        heads.load_state_dict(other.state_dict())
    assert_equal(dict(bnn.state_dict()), dict(before))
    assert heads.tasks == ["first"]


LABEL = tyxe.likelihoods.Bernoulli(N, event_dim=1)


def tied():
    net = Net()
    net.head[1].bias = nn.Parameter(torch.zeros(1))
    net.tied = nn.Linear(3, 5)
    net.tied.weight = net.body[0].weight
    return mean_field(net, LABEL, normal(expose_modules=["body"]))


WRONG_HEADS = {
    "no BNN": (lambda: Heads(Net(), ["head"]), TypeError, "is a Net; expected a BNN"),
    "a string": (lambda: Heads(variational(), "head"), TypeError, r"modules=\['head'\]"),
    "a module": (
        lambda: Heads(variational(), [variational().net.head]),
        TypeError,
        r"modules is a Sequential; expected names.*modules=\[\"2\"\]",
    ),
    "no such part": (lambda: Heads(variational(), ["tail"]), ValueError, "'tail', which the net"),
    "nothing in it": (lambda: Heads(variational(), ["body.1"]), ValueError, "neither parameters"),
    "a site": (
        lambda: Heads(variational(), ["body"]),
        ValueError,
        r"'body.0.weight' is a site of the prior.*hide_modules=\['body.0'\]",
    ),
    "a site by another name": (lambda: Heads(tied(), ["tied"]), ValueError, "'tied.weight' is a"),
}


@pytest.mark.parametrize(("make", "kind", "message"), WRONG_HEADS.values(), ids=WRONG_HEADS.keys())
def test_wrong_heads(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def norm_in_the_body(**rules):
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, **rules), nn.Tanh(), nn.Linear(5, 1))
    return mean_field(net, LABEL, normal(hide_modules=["1", "3"]))


def test_shared_running_statistics_warn_and_those_of_each_task_do_not():
    message = r"statistics of 1 are shared.*modules=\[\.\.\., '1'\].*hide_modules=\[\.\.\., '1'\]"
    bnn = norm_in_the_body()
    with pytest.warns(TyxeWarning, match=message):
        Heads(bnn, ["3"])
    with pytest.warns(TyxeWarning, match=message):
        Heads(bnn.eval(), ["3"])  # a fit would put it into train mode
    assert not any(module.training for module in bnn.modules())
    bnn.train()
    heads = Heads(bnn, ["1", "3"])
    heads.start("first")
    bnn.fit([data("first")], torch.optim.Adam, 5)
    bnn.eval()
    x, _ = data("first")
    before = bnn.net(x)
    heads.start("second")
    bnn.fit([data("second")], torch.optim.Adam, 5)
    heads.use("first")
    assert torch.equal(bnn.net(x), before)  # at the values of the sites that the net came with


def test_statistics_that_nobody_updates_do_not_warn():
    kept = norm_in_the_body()
    kept.net[1].eval()
    frozen = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)).eval()
    frozen[:2].requires_grad_(False)
    bnn = tyxe.VariationalBNN(frozen, normal(hide_all=True), LABEL)
    of_own_batch = norm_in_the_body(track_running_stats=False)
    for each, head in ((of_own_batch, "3"), (kept, "3"), (bnn, "2"), (bnn.eval(), "2")):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            Heads(each, [head])
        assert not found


def test_heads_of_another_bnn_are_refused():
    bnn, heads = variational(), Heads(variational(), ["head"])
    with pytest.raises(ValueError, match=r"those of another BNN.*Heads\(bnn, modules="):
        TaskLoop(bnn, TASKS, lambda task: None, lambda task: 0.0, heads=heads)
    # Copied together they stay together.
    copied, switched = copy.deepcopy((heads._bnn, heads))
    switched.check_of(copied)


def test_a_missing_head_names_the_known_tasks():
    heads = Heads(bnn := variational(), modules=["head"])
    with pytest.raises(ValueError, match="those with one are: none"):
        heads.use("first")
    heads.start("first")
    heads.start("second")
    bnn.net.head[1].bias.data.fill_(5.0)
    with pytest.raises(ValueError, match=r"'third' has no head.*'first', 'second'.*start\('third'"):
        heads.use("third")
    with pytest.raises(ValueError, match=r"has a head already: go on with it by use\('first'\)"):
        heads.start("first")
    assert (heads.current, bnn.net.head[1].bias.item()) == ("second", 5)
