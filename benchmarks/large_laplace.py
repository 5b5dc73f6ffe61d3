"""Laplace where it is large: last layers of many classes, all of ResNet-50 and of ViT-B/16."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pyro.distributions as dist
import torch
from _harness import Case, Contestant, Numbers, run
from _nets import one_block
from laplace import Batches, epoch
from memory import recorded, rounded
from torch import nn
from torchvision.models import resnet50
from torchvision.models.vision_transformer import VisionTransformer

import tyxe

PEAK = "peak, MB"
FEW, MORE = 4, 12
STRUCTURES = "diag", "kron"
DATA = 50_000  # points of the data set that a curvature is scaled to


def batches_of(count: int, side: int, classes: int) -> Batches:
    """Return random images in batches of four, and labels."""
    x, y = torch.randn(count, 3, side, side), torch.randint(classes, (count,))
    return list(zip(x.split(FEW), y.split(FEW), strict=True))


def curvature(net: nn.Module, structure: str) -> tyxe.LaplaceBNN:
    """Return a Laplace approximation of all linear maps, by one sampled label for each image."""
    prior = tyxe.priors.IIDPrior(
        dist.Normal(0, 1),
        hide_module_types=[nn.LayerNorm, nn.BatchNorm2d],
        hide=[n for n, _ in net.named_parameters() if n.endswith(("class_token", "pos_embedding"))],
    )
    likelihood = tyxe.likelihoods.Categorical(DATA)
    return tyxe.LaplaceBNN(net, prior, likelihood, structure=structure, curvature="fisher")


def contestant(name: str, work: Callable[[], None], who: str) -> Contestant:
    """Return some work, and the peak of the bytes that it allocates, found by doing it once."""
    return Contestant(name, work, who, facts={PEAK: rounded(recorded(work)[0] / 1e6)})


def per_image(numbers: Numbers) -> dict[str, float]:
    """Return seconds for each further image, and seconds that a call takes once."""

    def median(name: str) -> float:
        return sorted(numbers[name])[len(numbers[name]) // 2]

    each = {
        name: (median(f"{name}, {MORE} images") - median(f"{name}, {FEW} images")) / (MORE - FEW)
        for name in ("training", *STRUCTURES)
    }
    found = {f"seconds for each image: {name}": rounded(value) for name, value in each.items()}
    for name in STRUCTURES:
        found[f"epochs of training: a pass, {name}"] = rounded(each[name] / each["training"])
        once = median(f"{name}, {FEW} images") - FEW * each[name]
        found[f"seconds once: {name}"] = rounded(once)
    return found


def whole_net(name: str, title: str, make: Callable[[bool], nn.Module], smoke_test: bool) -> Case:
    """Return the case of all layers of a net."""
    side, classes = (8, 10) if smoke_test else (224, 1000)
    bnns = {structure: curvature(make(smoke_test), structure) for structure in STRUCTURES}
    net, found = make(smoke_test), []
    for count in (FEW, MORE):
        batches = batches_of(count, side, classes)
        found.append(Contestant(f"training, {count} images", epoch(net, batches), "plain"))
        for structure, bnn in bnns.items():
            take = functools.partial(bnn.fit_curvature, batches, progress=False)
            what = f"{structure}, {count} images"
            # The peak is that of the factors, whatever the number of images.
            is_first = count == FEW
            found.append(
                contestant(what, take, "ours") if is_first else Contestant(what, take, "ours")
            )
    return Case(name, title, "call", 1, found, False, findings=per_image)


def vit(smoke_test: bool) -> VisionTransformer:
    """Return ViT-B/16."""
    if smoke_test:
        return VisionTransformer(8, 4, 1, 2, 8, 16, num_classes=10)
    return VisionTransformer(224, 16, 12, 12, 768, 3072)


def head_case(smoke_test: bool) -> Case:
    """Return the case of a last layer of 10,000 classes on 512 features: data of 2,000 points."""
    classes, features, points = (20, 8, 40) if smoke_test else (10_000, 512, 2_000)
    net = nn.Sequential(nn.Linear(64, features), nn.ReLU(), nn.Linear(features, classes))
    x, y = torch.randn(points, 64), torch.randint(classes, (points,))
    batches = list(zip(x.split(500), y.split(500), strict=True))
    found = [contestant("training, 2,000 points", epoch(net, batches), "plain")]
    for structure in STRUCTURES:
        prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose_all=False, expose_modules=[net[2]])
        likelihood = tyxe.likelihoods.Categorical(DATA)
        bnn = tyxe.LaplaceBNN(net, prior, likelihood, structure=structure)
        take = functools.partial(bnn.fit_curvature, batches, progress=False)

        def draw(bnn: tyxe.LaplaceBNN = bnn) -> None:
            bnn.predict(x[:500], num_predictions=4, predictive="bnn")

        found += [
            contestant(f"{structure}, exact curvature of 2,000 points", take, "ours"),
            contestant(f"{structure}, 4 draws for 500 points", draw, "ours"),
        ]
    return Case("head", "Last layer of 10,000 classes, 512 features", "call", 1, found, False)


if __name__ == "__main__":
    run(
        "Seconds and peak of the bytes allocated, for nets with many weights and classes.",
        {
            "head": head_case,
            "resnet50": functools.partial(
                whole_net,
                "resnet50",
                "ResNet-50, all convolutions and the last layer, 224 x 224 images",
                lambda smoke_test: one_block() if smoke_test else resnet50(),
            ),
            "vit": functools.partial(
                whole_net,
                "vit",
                "ViT-B/16, all linear maps, 224 x 224 images",
                vit,
            ),
        },
    )
