"""Devices that are not there, are left in a fit, or run out of memory."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tests.oracles import bnns
from tests.oracles.rejections import ADAM, LIKELIHOOD, PRIOR, X, Y, make, rejects
from tyxe.bnn.batches import batches_of, device_for

BATCHES = [(X[:4], Y[:4]), (X[4:], Y[4:])]


class Hungry(nn.Linear):
    """A net that has no memory for some of its forwards."""

    left = 1000

    def forward(self, x):
        if not self.left:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.\nGPU 0 has less")
        return super().forward(x)


def laplace(net):
    return bnns.laplace(net, LIKELIHOOD, BATCHES)


def chains(net):
    return bnns.chains(net, LIKELIHOOD)


def any_loss(net):
    return tyxe.PytorchBNN(net, PRIOR, tyxe.guides.AutoNormal)


def members(net):
    return tyxe.EnsembleBNN(lambda _: make(Hungry(2, 1)), 2)


CALLS = {
    "fit": (make, lambda bnn: bnn.fit(BATCHES, ADAM, 1), r"accumulate_steps.*2\.00 GiB"),
    "predict": (make, lambda bnn: bnn.predict(X), "smaller batch_size, or vectorize=False"),
    "outputs": (any_loss, lambda bnn: bnn.predict(X), "pass a loader of smaller batches"),
    "curvature": (laplace, lambda bnn: bnn.fit_curvature(BATCHES), "smaller batches"),
    "variance": (laplace, lambda bnn: bnn.functional_variance(X), "pass fewer points"),
    "chains": (chains, lambda bnn: bnn.fit(BATCHES, 1, warmup_steps=0), "chains: take fewer"),
    "members": (
        members,
        lambda bnn: bnn.fit(BATCHES, ADAM, 1, vectorize=True),
        r"at once.*leave vectorize out",
    ),
}


def tensors(bnn):
    state = bnn.state_dict().items()
    return {name: value.clone() for name, value in state if isinstance(value, torch.Tensor)}


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("case", CALLS)
def test_a_call_without_memory_says_what_takes_less(case):
    make_one, call, message = CALLS[case]
    bnn = make_one(Hungry(2, 1))
    call(bnn)
    before = tensors(bnn)
    for net in bnn.modules():
        net.left = 0
    with pytest.raises(torch.OutOfMemoryError, match=message):
        call(bnn)
    torch.testing.assert_close(tensors(bnn), before, rtol=0, atol=0)


class NoMemoryBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")


class HungryForward(Hungry):
    """A net that has memory for so many forwards."""

    def forward(self, x):
        found = super().forward(x)
        type(self).left -= 1
        return found


class HungryBackward(HungryForward):
    """A net that has memory for the backwards of so many forwards."""

    def forward(self, x):
        return super().forward(x) if self.left else NoMemoryBackward.apply(x @ self.weight.mT)


class HungryAdam(torch.optim.Adam):
    """An optimiser that has no memory for some of its steps."""

    left = 1000

    def step(self, closure=None):
        if not self.left:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        return super().step(closure)


@pytest.mark.filterwarnings("ignore::tyxe.TyxeWarning")
@pytest.mark.parametrize("options", [{}, {"accumulate_steps": 2}, {"nan_check": "epoch"}], ids=str)
@pytest.mark.parametrize("part", [HungryForward, HungryBackward, HungryAdam])
def test_a_step_without_memory_changes_nothing(part, options, monkeypatch):
    """Parameters and statistics are those after the steps before it, which were two."""
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.BatchNorm1d])
    each = options.get("accumulate_steps", 1)

    def batches(has_memory):
        yield from BATCHES * each
        if not has_memory:
            # Of several batches the first has memory.
            monkeypatch.setattr(part, "left", 0 if part is HungryAdam else each - 1)
            yield from BATCHES

    def made():
        torch.manual_seed(0)
        last = nn.Linear(2, 1) if part is HungryAdam else part(2, 1)
        return make(nn.Sequential(nn.BatchNorm1d(2), last), prior)

    monkeypatch.setattr(part, "left", 1000)
    expected, bnn = made(), made()
    torch.manual_seed(0)
    expected.fit(batches(True), HungryAdam, 1, **options)
    torch.manual_seed(0)
    with pytest.raises(torch.OutOfMemoryError, match=r"a step: .*accumulate_steps"):
        bnn.fit(batches(False), HungryAdam, 1, **options)
    torch.testing.assert_close(tensors(bnn), tensors(expected), rtol=0, atol=0)
    assert all(p.grad is None for p in bnn.parameters())


ELSEWHERE = {
    "fit": (make, lambda bnn, device: bnn.fit(BATCHES, ADAM, 1, device=device)),
    "Laplace": (laplace, lambda bnn, device: bnn.fit(BATCHES, ADAM, 1, device=device)),
    "curvature": (laplace, lambda bnn, device: bnn.fit_curvature(BATCHES, device=device)),
    "chains": (chains, lambda bnn, device: bnn.fit(BATCHES, 1, warmup_steps=0, device=device)),
}
# The errors are PyTorch's, of its build.
NOT_THERE = [("cuda:77", (AssertionError, RuntimeError)), (3.5, TypeError)]


@pytest.mark.parametrize("case", ELSEWHERE)
@pytest.mark.parametrize(("device", "error"), NOT_THERE)
def test_a_device_that_is_not_there(case, device, error):
    make_one, call = ELSEWHERE[case]
    bnn = make_one(nn.Linear(2, 1))
    rejects(bnn, error, None, lambda: call(bnn, device))


@pytest.mark.parametrize("vectorize", [False, True])
@pytest.mark.parametrize(("device", "error"), NOT_THERE)
def test_a_device_that_is_not_there_for_members(vectorize, device, error):
    ensemble = tyxe.EnsembleBNN(lambda _: make(nn.Linear(2, 1)), 2)
    before = tensors(ensemble)
    with pytest.raises(error):
        ensemble.fit(BATCHES, ADAM, 1, device=device, vectorize=vectorize)
    torch.testing.assert_close(tensors(ensemble), before, rtol=0, atol=0)


def test_a_bnn_that_is_moved_during_a_fit():
    bnn = make(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="was on cpu when the fit began, and is on meta"):
        bnn.fit(BATCHES, ADAM, 2, lambda bnn, epoch, loss: bnn.to("meta") and None)


class Pinned(torch.Tensor):
    """A tensor that says that its memory is pinned, and notes how it was moved."""

    waits = None

    def is_pinned(self):
        return True

    def to(self, *args, non_blocking=False):
        Pinned.waits = not non_blocking
        return super().to(*args)


def test_pinned_batches_are_moved_without_a_wait(monkeypatch):
    monkeypatch.setattr(Pinned, "waits", None)
    (moved,) = batches_of([(X.as_subclass(Pinned), Y)], "meta")
    assert moved[0].device.type == "meta"
    assert Pinned.waits is False


def test_a_net_on_several_devices_gets_batches_as_they_are():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, device="meta"))
    assert device_for(net) is None
    ((inputs, targets),) = batches_of([(X, Y)], device_for(net))
    assert inputs is X
    assert targets is Y
    assert device_for(net, "meta").type == "meta"
    assert device_for(net[1]).type == "meta"
