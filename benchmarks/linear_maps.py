"""Time of blocks that write linear maps in two ways: GPT-2 by `addmm`, BERT by `nn.Linear`."""

from __future__ import annotations

import functools

import pyro.distributions as dist
import torch
import torch.nn.functional as F
from _harness import Case, Contestant, Numbers, ratio, run
from torch import Tensor, nn
from training_step import HANDLERS, SCALE, our_step, plain_step

import tyxe

CLASSES = 10


class Conv1D(nn.Module):
    """The linear layer of GPT-2, with its weight as `(in, out)`."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1)


def attend(query: Tensor, key: Tensor, value: Tensor, heads: int, causal: bool) -> Tensor:
    """Return the attention's output, `(n, steps, features)`."""
    each = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in (query, key, value))
    found = F.scaled_dot_product_attention(*each, is_causal=causal)
    return found.transpose(1, 2).flatten(2)


class GPT2Block(nn.Module):
    """A block of GPT-2: norms first, one map to queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.c_fc, self.mlp_proj = Conv1D(width, 4 * width), Conv1D(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.c_attn(self.ln_1(x)).chunk(3, -1)
        x = x + self.c_proj(attend(query, key, value, self.heads, causal=True))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class BertBlock(nn.Module):
    """A block of BERT: norms last, a map each to queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.intermediate, self.output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.output_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        found = attend(self.query(x), self.key(x), self.value(x), self.heads, causal=False)
        x = self.norm(x + self.dense(found))
        return self.output_norm(x + self.output(F.gelu(self.intermediate(x))))


class Classifier(nn.Sequential):
    """A block, and a linear layer on the mean of its positions."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__(block, nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self[1](self[0](x).mean(1))


BLOCKS = {"GPT-2": GPT2Block, "BERT": BertBlock}


def sizes(smoke_test: bool) -> tuple[int, int, int, int]:
    """Return the width, the heads, the positions and the points of a batch."""
    return (8, 2, 3, 4) if smoke_test else (256, 4, 64, 16)


def make_net(name: str, smoke_test: bool) -> nn.Module:
    """Return a classifier over one block."""
    width, heads, _, _ = sizes(smoke_test)
    return Classifier(BLOCKS[name](width, heads), width)


def batch(smoke_test: bool) -> tuple[Tensor, Tensor]:
    """Return random embeddings, `(n, positions, width)`, and labels."""
    width, _, positions, points = sizes(smoke_test)
    return torch.randn(points, positions, width), torch.randint(CLASSES, (points,))


def settings() -> tuple[tyxe.priors.IIDPrior, tyxe.likelihoods.Categorical]:
    """Return a prior over all linear maps, and the likelihood."""
    prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), hide_module_types=[nn.LayerNorm])
    return prior, tyxe.likelihoods.Categorical(10_000)


def step_case(name: str, smoke_test: bool) -> Case:
    """Return the case of a training step of one block."""
    x, y = batch(smoke_test)
    guide = functools.partial(tyxe.guides.AutoNormal, init_scale=SCALE)
    found = [Contestant("plain PyTorch", plain_step(make_net(name, smoke_test), x, y), "plain")]
    for way, handler in HANDLERS.items():
        bnn = tyxe.VariationalBNN(make_net(name, smoke_test), *settings(), guide)
        found.append(Contestant(f"{way}, ours", our_step(bnn, handler, x, y), "ours"))
    title = f"Training step of a {name} block, 256 features, 16 x 64 positions"
    return Case(f"{name.lower()}-step", title, "step", 15, found)


def kron_case(smoke_test: bool) -> Case:
    """Return the case of a Kronecker-factored curvature of both blocks."""
    data = [batch(smoke_test)]
    found = []
    for name in BLOCKS:
        net, plain = make_net(name, smoke_test), f"{name}, plain step"
        bnn = tyxe.LaplaceBNN(make_net(name, smoke_test), *settings(), structure="kron")
        fit = functools.partial(bnn.fit_curvature, data, progress=False)
        found.append(Contestant(plain, plain_step(net, *data[0]), "plain", plain=plain))
        found.append(
            Contestant(f"{name}, Kronecker fit", lambda f=fit: void(f()), "ours", plain=plain)
        )

    def findings(numbers: Numbers) -> dict[str, dict[str, float]]:
        both = "GPT-2, Kronecker fit", "BERT, Kronecker fit"
        return {"Kronecker fit of GPT-2's block to that of BERT's": ratio(numbers, *both)}

    title = "Kronecker factors of a block, 256 features, 16 x 64 positions, 10 classes"
    return Case("kron", title, "pass", 7, found, findings=findings)


def void(_: object) -> None:
    """Drop a result."""


if __name__ == "__main__":
    run(
        "Seconds of a training step and of a Kronecker-factored curvature of a GPT-2 and a BERT "
        "block of the same sizes, and ratios to the plain net's step.",
        {
            "gpt-2-step": functools.partial(step_case, "GPT-2"),
            "bert-step": functools.partial(step_case, "BERT"),
            "kron": kron_case,
        },
    )
