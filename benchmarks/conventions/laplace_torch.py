"""Compare curvature, evidence and functional variance with laplace-torch and curvlinops.

Both sides compute in float64. Nothing is timed: every row is the largest difference between our
numbers and theirs, divided by theirs' largest, on a small net and random data in two batches.
Install the peers in an environment of their own (`benchmarks/requirements-peers.txt`).

- laplace-torch: the full and the diagonal GGN, the evidence and the functional variance under
  them; likewise its Kronecker posterior, on nets without biases: it has a block of its own for each
  bias, where ours has a column in the block of the weight.
- curvlinops: the full GGN, and Kronecker blocks of weight and bias together, for positions that
  share weights expanded and reduced.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, nn

import tyxe

PEERS = ("laplace-torch", "curvlinops-for-pytorch")
POINTS, CLASSES, NOISE, PRECISION = 12, 3, 0.7, 2.0
# Both sides are float64; eigendecompositions and inverses lose the rest.
TOLERANCE = 1e-8


def mlp(bias: bool) -> nn.Sequential:
    """Return a net of linear layers."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(36, 5, bias=bias),
        nn.Tanh(),
        nn.Linear(5, 4, bias=bias),
        nn.Tanh(),
        nn.Linear(4, CLASSES, bias=bias),
    )


def cnn(bias: bool) -> nn.Sequential:
    """Return a net with two convolutions, one of them strided."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1, bias=bias),
        nn.Tanh(),
        nn.Conv2d(3, 2, 2, stride=2, bias=bias),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(18, CLASSES, bias=bias),
    )


NETS: dict[str, Callable[[bool], nn.Sequential]] = {"mlp": mlp, "cnn": cnn}


@dataclass(frozen=True)
class Problem:
    """A net and data; the likelihood is `classification` or `regression`."""

    net: nn.Sequential
    kind: str
    batches: list[tuple[Tensor, Tensor]]

    @property
    def x(self) -> Tensor:
        """All inputs."""
        return torch.cat([x for x, _ in self.batches])

    def bnn(self, structure: str, reduce: bool = False) -> tyxe.LaplaceBNN:
        """Return ours, with its curvature."""
        likelihood = (
            tyxe.likelihoods.Categorical(POINTS)
            if self.kind == "classification"
            else tyxe.likelihoods.HomoskedasticGaussian(POINTS, scale=NOISE)
        )
        scale = torch.tensor(1 / math.sqrt(PRECISION))
        prior = tyxe.priors.IIDPrior(dist.Normal(torch.zeros(()), scale))
        options = tyxe.LaplaceOptions(reduce=reduce)
        bnn = tyxe.LaplaceBNN(self.net, prior, likelihood, structure=structure, options=options)
        bnn.fit_curvature(self.batches, progress=False)
        return bnn

    def peer(self, structure: str) -> Any:
        """Return laplace-torch's, fitted likewise."""
        from laplace import Laplace
        from laplace.curvature import CurvlinopsGGN

        noise = {"sigma_noise": NOISE} if self.kind == "regression" else {}
        found = Laplace(
            self.net,
            self.kind,
            subset_of_weights="all",
            hessian_structure=structure,
            prior_precision=PRECISION,
            backend=CurvlinopsGGN,
            **noise,
        )
        dataset = torch.utils.data.TensorDataset(self.x, torch.cat([y for _, y in self.batches]))
        found.fit(torch.utils.data.DataLoader(dataset, batch_size=POINTS // 2))
        return found

    def linear_operator(self, kind: str, **options: Any) -> Tensor:
        """Return curvlinops' matrix, in the order of the parameters."""
        import curvlinops

        loss: nn.Module = nn.CrossEntropyLoss(reduction="sum")
        if self.kind == "regression":
            loss = HalfSquares()
            assert kind == "GGNLinearOperator", "its Kronecker factors know PyTorch's losses only"
        parameters = list(self.net.parameters())
        operator = getattr(curvlinops, kind)(self.net, loss, parameters, self.batches, **options)
        found: Tensor = operator @ torch.eye(operator.shape[1])
        return found


class HalfSquares(nn.MSELoss):
    """The negative log-likelihood of a Gaussian, but for a constant."""

    def __init__(self) -> None:
        super().__init__(reduction="sum")

    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over all targets."""
        found: Tensor = super().forward(predictions, targets) / (2 * NOISE**2)
        return found


def problem(net: str, kind: str, bias: bool) -> Problem:
    """Return a net with weights of a usual size, and random data."""
    torch.manual_seed(0)
    x = torch.randn(POINTS, 1, 6, 6)
    y = torch.randn(POINTS, CLASSES)
    if kind == "classification":
        y = torch.randint(CLASSES, (POINTS,))
    half = POINTS // 2
    batches = list(zip(x.split(half), y.split(half), strict=True))
    return Problem(NETS[net](bias), kind, batches)


def in_parameters_order(bnn: tyxe.LaplaceBNN, net: nn.Module, matrix: Tensor) -> Tensor:
    """Rearrange a matrix over our blocks to that over the net's parameters one after another."""
    indices, start = {}, 0
    for name, parameter in net.named_parameters():
        stop = start + parameter.numel()
        indices[f"net.{name}"] = torch.arange(start, stop).reshape(parameter.shape)
        start = stop
    order = bnn.state.blocks.flatten(indices).argsort()
    return matrix[order][:, order]


def curvature_of(bnn: tyxe.LaplaceBNN, net: nn.Module) -> Tensor:
    """Return our curvature as a matrix."""
    return in_parameters_order(bnn, net, bnn.state.curvature.operator.to_dense())


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference over the largest number."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    return float((ours - theirs).abs().max() / theirs.abs().max())


def posterior_rows(given: Problem, structure: str) -> Iterator[tuple[str, str, float]]:
    """Yield what is compared with laplace-torch: curvature, evidence, functional variance."""
    bnn, peer = given.bnn(structure), given.peer(structure)
    name = f"{structure} GGN"
    if structure == "kron":
        name = "kron GGN, expand, without biases"
    else:
        # It keeps the noise apart from the curvature.
        scaled = peer.H * peer._H_factor
        dense = torch.diag(scaled) if structure == "diag" else scaled
        yield name, PEERS[0], difference(curvature_of(bnn, given.net), dense)
    evidence = peer.log_marginal_likelihood().detach().reshape(())
    yield (
        f"evidence, {name}",
        PEERS[0],
        difference(bnn.log_marginal_likelihood().detach(), evidence),
    )
    _, variance = peer._glm_predictive_distribution(given.x)
    ours = bnn.functional_variance(given.x)
    yield f"functional variance, {name}", PEERS[0], difference(ours, variance.detach())


def operator_rows(given: Problem) -> Iterator[tuple[str, str, float]]:
    """Yield what is compared with curvlinops."""
    full = given.linear_operator("GGNLinearOperator")
    yield "full GGN", PEERS[1], difference(curvature_of(given.bnn("full"), given.net), full)
    if given.kind == "regression":
        return
    for approximation in ("expand", "reduce"):
        theirs = given.linear_operator(
            "KFACLinearOperator",
            fisher_type="type-2",
            kfac_approx=approximation,
            separate_weight_and_bias=False,
        )
        ours = curvature_of(given.bnn("kron", approximation == "reduce"), given.net)
        yield f"kron GGN, {approximation}", PEERS[1], difference(ours, theirs)


def rows() -> Iterator[dict[str, Any]]:
    """Yield every comparison."""
    for net in NETS:
        for kind in ("classification", "regression"):
            with_bias = problem(net, kind, bias=True)
            found = [
                *operator_rows(with_bias),
                *posterior_rows(with_bias, "full"),
                *posterior_rows(with_bias, "diag"),
                *posterior_rows(problem(net, kind, bias=False), "kron"),
            ]
            for what, peer, number in found:
                yield {
                    "net": net,
                    "likelihood": kind,
                    "what": what,
                    "peer": peer,
                    "difference": float(f"{number:.2g}"),
                    "agrees": number < TOLERANCE,
                }


def versions() -> dict[str, str]:
    """Return the peers' versions and ours.

    Raises:
        SystemExit: a peer is not installed.
    """
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for peer in PEERS:
        try:
            found[peer] = importlib.metadata.version(peer)
        except importlib.metadata.PackageNotFoundError:
            raise SystemExit(
                f"{peer} is not installed: pip install -r benchmarks/requirements-peers.txt in an "
                "environment of its own"
            ) from None
    return found | {"tyxe": tyxe.__version__}


def main() -> None:
    """Print the comparisons, write them as JSON, and fail if one does not agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the results go; printed only without it")
    path = parser.parse_args().json
    found = {"versions": versions(), "tolerance": TOLERANCE}
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore")  # the peers'
    found["rows"] = list(rows())
    found["command"] = (
        f"python benchmarks/conventions/laplace_torch.py {' '.join(sys.argv[1:])}".strip()
    )
    for row in found["rows"]:
        print("{net:4s} {likelihood:15s} {what:50s} {peer:23s} {difference:8.1e}".format(**row))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    if not all(row["agrees"] for row in found["rows"]):
        raise SystemExit("some of our numbers are not the peers'")


if __name__ == "__main__":
    main()
