"""Time of a prediction from 32 posterior draws: the plain net, by hand, and ours."""

from __future__ import annotations

from collections.abc import Callable

import torch
from _by_hand import Predictor
from _harness import Case, Contestant, run
from _nets import images, mlp, resnet18, vectors
from torch import Tensor, nn
from training_step import SCALE, make_bnn

NUM_PREDICTIONS = 32
OURS = {
    "vectorize=False": {"vectorize": False},
    "vectorize=True": {"vectorize": True},
    "compile=True": {"compile": True},
    "default": {},
}


def plain_forwards(net: nn.Module, x: Tensor, count: int) -> Callable[[], None]:
    """Return as many forwards of the plain net as there are draws."""
    net = net.eval()

    def forwards() -> None:
        with torch.no_grad():
            for _ in range(count):
                net(x)

    return forwards


def contestants(net: nn.Module, x: Tensor, count: int) -> list[Contestant]:
    """Return the plain forwards, the loop and vmap by hand, and our ways."""
    by_hand = Predictor(net, SCALE, count)
    bnn = make_bnn(net, num_points=60_000)

    def run_with(function: Callable[..., Tensor], **keywords: object) -> Callable[[], None]:
        def predict() -> None:
            function(x, **keywords)

        return predict

    found = [
        Contestant("plain PyTorch", plain_forwards(net, x, count), "plain"),
        Contestant("loop, by hand", run_with(by_hand.loop), "by hand"),
        Contestant("vmap, by hand", run_with(by_hand.vmapped), "by hand"),
    ]
    for name, options in OURS.items():
        ours = run_with(bnn.predict, num_predictions=count, **options)
        limit = "vmap, by hand" if options.get("vectorize") else "loop, by hand"
        found.append(Contestant(f"{name}, ours", ours, "ours", limit))
    return found


def small_case(smoke_test: bool) -> Case:
    """Return the case of a net that takes less time than Python does."""
    net = nn.Sequential(
        nn.Linear(8, 50), nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 10)
    )
    found = contestants(net, torch.randn(10, 8), 3 if smoke_test else NUM_PREDICTIONS)
    return Case("small", "MLP 8-50-50-10, 10 rows, 32 draws", "prediction", 25, found)


def mlp_case(smoke_test: bool) -> Case:
    """Return the MLP's case."""
    x, _ = vectors(8 if smoke_test else 2000, smoke_test)
    found = contestants(mlp(smoke_test), x, 3 if smoke_test else NUM_PREDICTIONS)
    return Case("mlp", "MLP 784-400-400-10, 2,000 rows, 32 draws", "prediction", 9, found)


def resnet_case(smoke_test: bool) -> Case:
    """Return the ResNet's case."""
    x, _ = images(2 if smoke_test else 32, smoke_test)
    found = contestants(resnet18(smoke_test), x, 3 if smoke_test else NUM_PREDICTIONS)
    title = "ResNet-18 on 32 images of 32 x 32, 32 draws"
    return Case("resnet18", title, "prediction", 3, found, warm_up=False)


if __name__ == "__main__":
    run(
        "Seconds of one prediction from 32 posterior draws, and ratios to 32 plain forwards and "
        "to the same by hand.",
        {"small": small_case, "mlp": mlp_case, "resnet18": resnet_case},
    )
