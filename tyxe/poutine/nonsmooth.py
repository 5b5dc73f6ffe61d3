"""Functions without a second derivative, found in a graph of gradients and named by module."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

# Names of nodes in the graph, and the modules that create them.
NONSMOOTH: dict[str, tuple[type[nn.Module], ...]] = {
    "Relu": (nn.ReLU,),
    "LeakyRelu": (nn.LeakyReLU,),
    "Prelu": (nn.PReLU,),
    "Rrelu": (nn.RReLU,),
    "Hardtanh": (nn.Hardtanh, nn.ReLU6),
    "Threshold": (nn.Threshold,),
    "Softshrink": (nn.Softshrink,),
    "Hardshrink": (nn.Hardshrink,),
    "MaxPool2D": (nn.MaxPool1d, nn.MaxPool2d),
    "MaxPool3D": (nn.MaxPool3d,),
    "AdaptiveMaxPool2D": (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    "AdaptiveMaxPool3D": (nn.AdaptiveMaxPool3d,),
}
# Those whose gradient PyTorch does not differentiate at all.
WITHOUT_SECOND_DERIVATIVE: dict[str, tuple[type[nn.Module], ...]] = {
    "Hardsigmoid": (nn.Hardsigmoid,),
    "EmbeddingBag": (nn.EmbeddingBag,),
}


def nonsmooth_functions(
    result: Tensor,
    net: nn.Module | None,
    kinds: Mapping[str, tuple[type[nn.Module], ...]] = NONSMOOTH,
) -> list[str]:
    """Describe the functions of some kinds, piecewise linear ones, by which a result was computed.

    Those of a module of `net` have the module's name; others were called as functions.
    """
    found = sorted({kind for node in _nodes(result) if (kind := _kind(node)) in kinds})
    modules = [] if net is None else list(net.named_modules())
    described = []
    for kind in found:
        made = [
            f"{name or 'the net'} ({type(module).__name__})"
            for name, module in modules
            if isinstance(module, kinds[kind])
        ]
        described += made or [f"{kind} (called as a function)"]
    return sorted(described)


def _kind(node: str) -> str:
    return node.split("Backward")[0].split("With")[0].removesuffix("Kernel")


def _nodes(result: Tensor) -> set[str]:
    """Return the names of all operations by which a result was computed."""
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
