"""States and copies that one thread takes while another has draws in the net."""

import copy
import threading
import time

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe
from tyxe.threads import exclusive


@pytest.mark.parametrize("take", [tyxe.VariationalBNN.state_dict, copy.deepcopy])
def test_what_is_taken_beside_another_threads_draws_has_none_of_them(take):
    bnn = tyxe.VariationalBNN(
        nn.Linear(2, 1),
        tyxe.priors.IIDPrior(dist.Normal(0, 1)),
        tyxe.likelihoods.HomoskedasticGaussian(10, scale=0.1),
        tyxe.guides.AutoNormal,
    )
    alone, at_rest = bnn.state_dict(), bnn.in_places()["net.weight"].clone()
    inside = threading.Event()

    def predict_slowly():
        with bnn.predicting(), bnn.substituted(bnn.one_draw()):
            inside.set()
            time.sleep(0.3)

    other = threading.Thread(target=predict_slowly)
    other.start()
    assert inside.wait(60)
    taken = take(bnn)
    other.join()
    if isinstance(taken, tyxe.VariationalBNN):
        assert taken.training
        assert torch.equal(taken.in_places()["net.weight"], at_rest)
        taken = taken.state_dict()
    assert taken.keys() == alone.keys()


def test_the_centre_of_a_module_is_taken_when_no_other_thread_is_inside():
    bnn = tyxe.PytorchBNN(
        nn.Linear(2, 1), tyxe.priors.IIDPrior(dist.Normal(0, 1)), tyxe.guides.AutoNormal
    )
    is_left, inside = [], threading.Event()
    of_guide = bnn.net_guide.median
    bnn.net_guide.median = lambda: (is_left.append(not other.is_alive()), of_guide())[1]

    def be_inside():
        with exclusive():
            inside.set()
            time.sleep(0.3)

    other = threading.Thread(target=be_inside)
    other.start()
    assert inside.wait(60)
    bnn.to_module()
    assert is_left == [True]
