"""States and copies that one thread takes while another has draws in the net."""

import copy
import threading
import time

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import tyxe


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
