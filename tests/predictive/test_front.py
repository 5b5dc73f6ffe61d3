"""`Front`: passes that run what no site reaches once, and are those of the net bit for bit."""

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from tests.oracles.front_nets import (
    ChangesBuffers,
    ChangesInPlace,
    ChangesInput,
    Counted,
    Drops,
    IgnoresReturn,
    Net,
    ReadsBetween,
    Recurrent,
    Residual,
    Sparse,
    Tied,
    Twice,
    ViewsAfter,
    ViewsBetween,
)
from tyxe.poutine.draw import substituted
from tyxe.predictive.front import Front

PASSES = 4


NETS = (Net, *(kind for one in (Net, Residual, Drops) for kind in one.__subclasses__()))


def make(kind: type[Net] = Net) -> tuple[Net, dict[str, list[tuple[nn.Module, str]]], Tensor]:
    torch.manual_seed(0)
    net = kind().eval()
    return net, places(net), torch.randn(5, 3)


def places(net: Net) -> dict[str, list[tuple[nn.Module, str]]]:
    return {name: [(net.head, name)] for name in ("weight", "bias")}


def draws(net: Net) -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    names = ("weight", "bias")
    return [{n: torch.randn_like(getattr(net.head, n)) for n in names} for _ in range(PASSES)]


def passes(net: Net, x: Tensor, front: Front | None) -> list[Tensor]:
    found = []
    for draw in draws(net):
        with substituted(places(net), draw):
            found.append(net(x) if front is None else front(lambda: net(x)))
    return found


def alike(net: Net, x: Tensor) -> None:
    """Compare all passes with those of the net, in numbers, bit for bit."""
    y, state = x.clone(), copy.deepcopy(net.state_dict())
    torch.manual_seed(2)
    expected = passes(net, y, None)
    net.load_state_dict(state)
    torch.manual_seed(2)
    found = passes(net, x, Front(net, places(net), x))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(x.to_dense(), y.to_dense())


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_passes_are_those_of_the_net(kind: type[Net]) -> None:
    net, _, x = make(kind)
    state = copy.deepcopy(net.state_dict())
    with torch.no_grad():
        alike(net, x)
    same = {name: torch.equal(value, state[name]) for name, value in net.state_dict().items()}
    assert all(same.values()) == (kind is not ChangesBuffers)
    assert all("forward" not in vars(module) for module in net.modules())


CALLS = {
    Net: 1,
    Residual: 1,
    IgnoresReturn: 1,
    Twice: PASSES + 1,
    ReadsBetween: 1,
    ViewsBetween: 1,
    ViewsAfter: 1,
    ChangesInput: PASSES,
    Tied: PASSES,
    Drops: PASSES,
    ChangesBuffers: PASSES,
    ChangesInPlace: PASSES,
}


@pytest.mark.parametrize(("kind", "calls"), CALLS.items(), ids=[kind.__name__ for kind in CALLS])
def test_what_can_be_kept_is_run_once(kind: type[Net], calls: int) -> None:
    net, slots, x = make(kind)
    with torch.no_grad():
        passes(net, x, Front(net, slots, x))
    assert net.front.calls == calls


@pytest.mark.parametrize("part", [nn.Dropout(0.5), nn.BatchNorm1d(3, affine=False)])
def test_a_front_in_train_mode_is_run_each_time(part: nn.Module) -> None:
    net, slots, x = make()
    net.front = nn.Sequential(part.train(), counted := net.front)
    with torch.no_grad():
        passes(net, x, Front(net, slots, x))
    assert counted.calls == PASSES
    if isinstance(part, nn.BatchNorm1d):
        assert part.num_batches_tracked == PASSES


def test_train_mode_without_anything_random_is_the_same_too() -> None:
    for part in (nn.Dropout(0.5), nn.BatchNorm1d(3)):
        net, _, x = make()
        net.front = nn.Sequential(part, net.front)
        net.train()
        with torch.no_grad():
            alike(net, x)


def test_changed_parameters_and_buffers_are_met() -> None:
    net, slots, x = make(Residual)
    front = Front(net, slots, x)
    with torch.no_grad():
        before = front(lambda: net(x))
        net.norm.running_mean.add_(1.0)
        assert torch.equal(changed := front(lambda: net(x)), net(x))
        assert not torch.equal(before, changed)
        net.front.weight = nn.Parameter(torch.ones(4, 3))
        assert torch.equal(front(lambda: net(x)), net(x))


def test_other_inputs_are_met() -> None:
    net, slots, x = make()
    front = Front(net, slots, x)
    with torch.no_grad():
        front(lambda: net(x))
        assert torch.equal(front(lambda: net(2 * x)), net(2 * x))
        x.add_(1.0)
        assert torch.equal(front(lambda: net(x)), net(x))


def test_hooks_inside_of_a_front_run_each_time() -> None:
    net, slots, x = make()
    net.front = nn.Sequential(first := Counted(3, 3), last := Counted(3, 4)).eval()
    seen, outside = [], []
    last.register_forward_hook(lambda *args: seen.append(args[2].clone()))
    net.front.register_forward_hook(lambda module, args, output: outside.append(1) or 2 * output)
    front = Front(net, slots, x)
    with torch.no_grad():
        found = passes(net, x, front)
        assert (first.calls, last.calls) == (1, 1)
        assert len(seen) == len(outside) == PASSES
        assert all(torch.equal(one, seen[0]) for one in seen)
        assert all(map(torch.equal, found, passes(net, x, None)))


def test_a_hook_that_changes_what_the_front_takes_is_heeded() -> None:
    net, _, x = make()
    net.front.register_forward_pre_hook(lambda module, args: (args[0] * net.head.bias.sum(),))
    with torch.no_grad():
        alike(net, x)


def test_other_threads_run_the_net_itself() -> None:
    net, slots, x = make()
    front = Front(net, slots, x)

    def pass_with_another_thread() -> Tensor:
        found = net(x)
        thread = threading.Thread(target=net, args=(x,))
        thread.start()
        thread.join()
        return found

    with torch.no_grad():
        for _ in range(PASSES):
            front(pass_with_another_thread)
    assert net.front.calls == PASSES + 1


def test_an_error_leaves_the_net_as_it_was() -> None:
    net, slots, x = make()
    front, plain = Front(net, slots, x), net.front.forward
    vars(net.front)["forward"] = plain

    def fails() -> None:
        net(x)
        raise KeyError

    with torch.no_grad(), pytest.raises(KeyError):
        front(fails)
    assert vars(net.front)["forward"] is plain
    with torch.no_grad():
        assert torch.equal(front(lambda: net(x)), net(x))


def test_gradients_of_sites_are_those_of_the_net_and_can_be_taken_often() -> None:
    net, slots, x = make(Residual)
    front = Front(net, slots, x)
    for _ in range(PASSES):
        for parameter in net.head.parameters():
            parameter.grad = None
        front(lambda: net(x)).square().sum().backward()
        found = [parameter.grad for parameter in net.head.parameters()]
        expected = torch.autograd.grad(net(x).square().sum(), [*net.head.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert net.front.weight.grad is None


@pytest.mark.parametrize("kind", [Net, Residual, Recurrent])
def test_under_transforms(kind: type[Net]) -> None:
    net, slots, x = make(kind)
    front = Front(net, slots, x)
    weights = torch.randn(3, 2, 4)

    def total(weight: Tensor) -> Tensor:
        with substituted({"weight": slots["weight"]}, {"weight": weight}):
            return front(lambda: net(x)).square().sum()

    with torch.no_grad():
        front(lambda: net(x))
    for _ in range(2):
        found = torch.vmap(torch.func.grad(total))(weights)
        for weight, one in zip(weights, found, strict=True):
            weight = weight.clone().requires_grad_()
            with substituted({"weight": slots["weight"]}, {"weight": weight}):
                expected = torch.autograd.grad(net(x).square().sum(), weight)[0]
            torch.testing.assert_close(one, expected)


def test_a_copy_keeps_nothing_of_the_other() -> None:
    net, slots, x = make()
    front = Front(net, slots, x)
    with torch.no_grad():
        front(lambda: net(x))
        other, y, copied = copy.deepcopy((net, x, front))
        assert torch.equal(copied(lambda: other(y)), other(y))


def test_sparse_batches() -> None:
    net, _, x = make()
    net.front = nn.Sequential(Sparse(5, 4)).eval()
    with torch.no_grad():
        alike(net, (x @ x.mT).relu().to_sparse())


def test_inference_tensors_are_not_kept() -> None:
    net, _, x = make()
    with torch.inference_mode():
        alike(net, x)
        alike(net, x.clone())
