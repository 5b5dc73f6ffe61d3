"""Functions without a second derivative, found in a graph of gradients and named by module."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["kinks_of"]

# How a node of the graph is called, and the modules that make it.
KINKED: dict[str, tuple[type[nn.Module], ...]] = {
    "Relu": (nn.ReLU,),
    "LeakyRelu": (nn.LeakyReLU,),
    "Prelu": (nn.PReLU,),
    "Rrelu": (nn.RReLU,),
    "Hardtanh": (nn.Hardtanh, nn.ReLU6),
    "Hardsigmoid": (nn.Hardsigmoid,),
    "Threshold": (nn.Threshold,),
    "Softshrink": (nn.Softshrink,),
    "Hardshrink": (nn.Hardshrink,),
    "MaxPool2D": (nn.MaxPool1d, nn.MaxPool2d),
    "MaxPool3D": (nn.MaxPool3d,),
    "AdaptiveMaxPool2D": (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    "AdaptiveMaxPool3D": (nn.AdaptiveMaxPool3d,),
}


def kinks_of(result: Tensor, net: nn.Module | None) -> list[str]:
    """Describe the functions, linear in pieces, by which a result was computed.

    Args:
        result: with a graph of gradients.
        net: whose modules are named; what no module of it makes was called as a function.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.MaxPool1d(3))
        >>> kinks_of(net(torch.ones(1, 2)), net)
        ['1 (ReLU)', '2 (MaxPool1d)']
        >>> kinks_of(torch.relu(torch.ones(1, requires_grad=True)), None)
        ['Relu (called as a function)']
    """
    found = sorted({kind for node in _nodes(result) if (kind := _kind(node)) in KINKED})
    modules = [] if net is None else list(net.named_modules())
    described = []
    for kind in found:
        made = [
            f"{name or 'the net'} ({type(module).__name__})"
            for name, module in modules
            if isinstance(module, KINKED[kind])
        ]
        described += made or [f"{kind} (called as a function)"]
    return sorted(described)


def _kind(node: str) -> str:
    return node.split("Backward")[0].split("With")[0].removesuffix("Kernel")


def _nodes(result: Tensor) -> set[str]:
    """Names of all operations that a result was computed by."""
    names, seen = set(), set()
    left = [result.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name())
        left += [parent for parent, _ in node.next_functions]
    return names
