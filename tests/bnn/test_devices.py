"""Devices that are not there, are left in a fit, or run out of memory."""

import pytest
import torch
from torch import nn

import tyxe
from tests.oracles import bnns
from tests.oracles.rejections import ADAM, LIKELIHOOD, X, Y, make, rejects

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


def members(net):
    return tyxe.EnsembleBNN(lambda _: make(Hungry(2, 1)), 2)


CALLS = {
    "fit": (make, lambda bnn: bnn.fit(BATCHES, ADAM, 1), r"accumulate_steps.*2\.00 GiB"),
    "predict": (make, lambda bnn: bnn.predict(X), "smaller batch_size, or vectorize=False"),
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


@pytest.mark.parametrize("make", [make, laplace])
@pytest.mark.parametrize(
    ("device", "error"),
    [("cuda:77", (AssertionError, RuntimeError)), (3.5, TypeError)],  # PyTorch's, of its build
)
def test_a_device_that_is_not_there(make, device, error):
    bnn = make(nn.Linear(2, 1))
    rejects(bnn, error, None, lambda: bnn.fit(BATCHES, ADAM, 1, device=device))


def test_a_bnn_that_is_moved_during_a_fit():
    bnn = make(nn.Linear(2, 1))
    with pytest.raises(RuntimeError, match="was on cpu when the fit began, and is on meta"):
        bnn.fit(BATCHES, ADAM, 2, lambda bnn, epoch, loss: bnn.to("meta") and None)
