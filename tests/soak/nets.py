"""Nets of all kinds for the fuzz, each a function of the number of outputs, and their inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from tests.oracles import architectures
from tests.oracles.architectures import CLASSES, flat, sequence, tokens

Net = tuple[Callable[[int], nn.Module], Callable[[], Any]]


class Headed(nn.Module):
    """A net of three outputs, with a last layer for another number of them."""

    def __init__(self, body: nn.Module, outputs: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(CLASSES, outputs)

    def forward(self, *inputs: Any, **keywords: Any) -> Tensor:
        return self.head(self.body(*inputs, **keywords))


def _of_outputs(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda d: make() if d == CLASSES else Headed(make(), d)


class Then(nn.Module):
    """A layer, and a function of its outputs."""

    def __init__(self, layer: nn.Module, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self.layer(*inputs))


class Scaled(nn.Module):
    """A parameter without dimensions, as the temperature of CLIP."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, d)
        self.log_scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.log_scale.exp()


class Cells(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(2, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0])


class Branches(nn.Module):
    """A list and a dictionary of layers, one used twice, one never."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(2, d), "unused": nn.Linear(2, d)})

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = torch.relu(layer(x))
        return self.heads["a"](x)


class Checkpointed(nn.Module):
    def __init__(self, d: int, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        self.head, self.reentrant = nn.Linear(3, d), reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = (x + 0).requires_grad_() if torch.is_grad_enabled() else x
        return self.head(checkpoint(self.body, x, use_reentrant=self.reentrant))


class Pair(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(2, 3, d)

    def forward(self, left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
        return self.bilinear(left, right) * scale


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad


class Raw(nn.Module):
    """Products with parameters that no layer holds, one of them empty."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, d))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.nothing.sum()


def _mlp(d: int, *between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), *between, nn.Linear(4, d))


NETS: dict[str, Net] = {
    **{name: (_of_outputs(make), inputs) for name, (make, inputs) in architectures.NETS.items()},
    "0-dim parameter": (Scaled, flat),
    "LSTM cell": (Cells, sequence),
    "lists of layers": (Branches, flat),
    "checkpointed": (lambda d: Checkpointed(d, False), flat),
    "checkpointed, reentrant": (lambda d: Checkpointed(d, True), flat),
    "bilinear, several inputs": (Pair, lambda: (flat(), flat(3))),
    "keywords and a constant": (Pair, lambda: {"left": flat(), "right": flat(3), "scale": 0.5}),
    "custom function": (lambda d: Then(nn.Linear(2, d), _Cube.apply), flat),
    "raw parameters": (Raw, flat),
    "dropout": (lambda d: _mlp(d, nn.Dropout(0.5), nn.ReLU(inplace=True)), flat),
    "batch norm": (lambda d: _mlp(d, nn.BatchNorm1d(4), nn.Hardsigmoid()), flat),
    "spectral norm": (lambda d: nn.Sequential(spectral_norm(nn.Linear(2, d))), flat),
    "embedding bag": (lambda d: nn.EmbeddingBag(CLASSES, d), tokens),
    "outputs per position": (lambda d: nn.Linear(2, d), sequence),
    "one number per point": (lambda d: Then(nn.Linear(2, 1), lambda y: y.squeeze(-1)), flat),
    "double": (lambda d: _mlp(d, nn.Tanh()).double(), lambda: flat().double()),
    "bfloat16": (lambda d: _mlp(d, nn.Tanh()).bfloat16(), lambda: flat().bfloat16()),
    "eval mode": (lambda d: _mlp(d, nn.Dropout(0.5)).eval(), flat),
    "data parallel": (lambda d: nn.DataParallel(_mlp(d, nn.Tanh())), flat),
    "symbolic trace": (lambda d: torch.fx.symbolic_trace(_mlp(d, nn.Tanh())), flat),
}
