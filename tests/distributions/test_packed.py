"""Samples of two values are packed to a bit each."""

import functools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tyxe.distributions import SignedBernoulli
from tyxe.distributions.signed_bernoulli import PackedSigns


@given(
    count=st.integers(1, 5),
    shape=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    scale=st.sampled_from([1.0, 0.2, 3.0]),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
def test_packing_is_exact_to_the_bit(count, shape, scale, dtype):
    values = SignedBernoulli(torch.randn(shape).to(dtype), scale).sample((count,))
    packed = PackedSigns.of(values, scale)
    unpacked = packed.values()
    assert unpacked.dtype == dtype
    assert torch.equal(unpacked, values)
    assert packed.num_bytes == packed.bits.nbytes == count * math.ceil(math.prod(shape) / 8)
    again = pickle.loads(pickle.dumps(packed))
    assert torch.equal(again[count - 1], values[-1])


def test_only_two_values_can_be_packed():
    with pytest.raises(ValueError, match=r"values of -1 and 1 can be packed, but there is 0\.5"):
        PackedSigns.of(torch.tensor([[1.0, 0.5]]))
    functools.partial(PackedSigns.of, scale=0.5)(torch.tensor([[-0.5, 0.5]]))
