"""Draws of a last layer, and chains on one: what comes before it runs once for a batch."""

from __future__ import annotations

from collections.abc import Callable

import pyro.distributions as dist
import torch
from _harness import Case, Contestant, laplace_torch, run
from _nets import images, resnet18
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tyxe
from tyxe.bnn.potential import Potential, exclusive_unvalidated
from tyxe.samplers import NUTS, Run, batched


def on_last(layer: nn.Module) -> tyxe.priors.Prior:
    """Return a standard normal prior of one layer alone."""
    return tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_all=False, expose_modules=[layer])


def forwards(net: nn.Module, x: Tensor, count: int = 1) -> Callable[[], None]:
    """Return so many forwards of the plain net."""

    def some() -> None:
        with torch.no_grad():
            for _ in range(count):
                net(x)

    return some


def draws(smoke_test: bool) -> Case:
    """Return 64 draws of ResNet-18's last layer."""
    count = 3 if smoke_test else 64
    net, (x, _) = resnet18(smoke_test).eval(), images(2 if smoke_test else 32, smoke_test)
    layer = tyxe.util.last_layer(net)
    likelihood = tyxe.likelihoods.Categorical(60_000)
    bnn = tyxe.VariationalBNN(net, on_last(layer), likelihood, tyxe.guides.AutoNormal)
    taken: list[Tensor] = []
    layer.register_forward_pre_hook(lambda _, args: taken.append(args[0]))

    def by_hand() -> None:
        taken.clear()
        with torch.no_grad():
            net(x)
            for _ in range(count):
                weight = layer.weight + 0.1 * torch.randn_like(layer.weight)
                bias = layer.bias + 0.1 * torch.randn_like(layer.bias)
                nn.functional.linear(taken[0], weight, bias)
        taken.clear()

    def ours(vectorize: bool) -> Callable[[], None]:
        def predict() -> None:
            bnn.predict(x, num_predictions=count, vectorize=vectorize)

        return predict

    title = f"Last layer of ResNet-18, 32 images of 32 x 32, {count} draws"
    found = [
        Contestant("one forward of the plain net", forwards(net, x), "plain"),
        Contestant("features once, by hand", by_hand, "by hand"),
        Contestant("predict, ours", ours(False), "ours", "features once, by hand"),
        Contestant("predict(vectorize=True), ours", ours(True), "ours", "features once, by hand"),
    ]
    return Case("draws", title, "prediction", 9, [*found, *of_laplace(net, layer, x, count)])


def of_laplace(net: nn.Module, layer: nn.Module, x: Tensor, count: int) -> list[Contestant]:
    """Return as many draws of a Laplace approximation, ours and laplace-torch's."""
    batch = (x, torch.arange(len(x)) % 10)
    bnn = tyxe.LaplaceBNN(net, on_last(layer), tyxe.likelihoods.Categorical(len(x)))
    bnn.fit_curvature([batch], progress=False)

    def predict() -> None:
        bnn.predict(x, num_predictions=count, predictive="bnn")

    found = [Contestant("Laplace by draws, ours", predict, "ours")]
    if (known := laplace_torch()) is not None:
        package, version = known
        theirs = package.Laplace(net, "classification")  # of the last layer, Kronecker-factored
        theirs.fit(DataLoader(TensorDataset(*batch), len(x)))

        def by_peer() -> None:
            theirs(x, pred_type="nn", link_approx="mc", n_samples=count)

        found.append(Contestant(f"Laplace by draws, {version}", by_peer, "laplace-torch"))
    return found


class Recurrent(nn.Module):
    """An LSTM and a linear head on its last output."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return predictions `(n, 1)` of sequences `(n, time, 4)`."""
        outputs: Tensor = self.head(self.lstm(x)[0][:, -1])
        return outputs


def stepping(
    net: nn.Module, layer: nn.Module, x: Tensor, y: Tensor, count: int
) -> Callable[[], int]:
    """Return what makes so many steps of four chains, without compilation."""
    likelihood = tyxe.likelihoods.HomoskedasticGaussian(len(x), scale=0.5)
    bnn = tyxe.MCMC_BNN(net, on_last(layer), likelihood, NUTS()).eval()
    with exclusive_unvalidated():
        one = Potential(bnn, x, y)
        start = one.flatten(bnn._in_places()).expand(4, -1)
        potential = batched(one.at, start)
    kernel = NUTS(step_size=0.05, adapt_step_size=False, adapt_mass_matrix=False)
    steps = Run(
        kernel, potential, start, 10**4, compile=False, inside=exclusive_unvalidated
    ).steps()
    next(steps)

    def some() -> int:
        for _ in range(count):
            next(steps)
        return count

    return some


def nuts(smoke_test: bool) -> Case:
    """Return NUTS on the last layer of an LSTM."""
    points, hidden, count = (8, 4, 3) if smoke_test else (200, 32, 300)
    net, x, y = Recurrent(hidden), torch.randn(points, 20, 4), torch.randn(points, 1)
    with torch.no_grad():
        features = net.lstm(x)[0][:, -1]
    head = nn.Sequential(net.head)
    first = "on its features alone"
    found = [
        Contestant(first, stepping(head, head[0], features, y, count), "plain"),
        Contestant("on the net", stepping(net, net.head, x, y, count), "ours"),
    ]
    title = f"NUTS on the last layer of an LSTM, {points} sequences of 20, 4 chains"
    return Case("nuts", title, "leapfrog step of all chains", 9, found)


if __name__ == "__main__":
    run(
        "Seconds of 64 draws of a last layer, and ratios to one forward; of a leapfrog step on a "
        "last layer, and ratio to its features alone.",
        {"draws": draws, "nuts": nuts},
    )
