"""States of the random generators: put back, saved and loaded, and of PyTorch alone."""

import io
import random

import numpy as np
import torch

from tyxe.rng import random_state, set_random_state, set_torch_rng, torch_rng


def numbers():
    # An odd number of normals: NumPy and Python keep the second of a pair for the next call.
    drawn = [torch.rand(()).item(), torch.randn(()).item(), np.random.rand()]
    return [*drawn, np.random.standard_normal(), random.random(), random.gauss(0, 1)]


def test_numbers_are_the_same_after_a_state_is_put_back():
    numbers()
    state = random_state()
    expected = [numbers(), numbers()]
    set_random_state(state)
    assert [numbers(), numbers()] == expected


def test_a_state_is_loaded_with_weights_only():
    numbers()
    torch.save(random_state(), file := io.BytesIO())
    expected = numbers()
    file.seek(0)
    set_random_state(torch.load(file, weights_only=True))
    assert numbers() == expected


def test_a_state_is_a_copy_that_draws_do_not_change():
    state = random_state()
    first = numbers()
    assert numbers() != first
    set_random_state(state)
    assert numbers() == first


def test_a_state_of_pytorch_alone_leaves_the_other_generators():
    state, rest = {"rng": torch_rng()}, (np.random.get_state()[1].copy(), random.getstate())
    expected = torch.rand(3)
    set_random_state(state)
    assert torch.equal(torch.rand(3), expected)
    assert np.array_equal(np.random.get_state()[1], rest[0])
    assert random.getstate() == rest[1]
    set_torch_rng(state["rng"])
    assert torch.equal(torch.rand(3), expected)
