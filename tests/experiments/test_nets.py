"""The nets of experiments have the sizes of their papers'."""

import binary
import image_laplace
import inducing_images
import mile
import nerf
import pytest
import sequence_data
import split_tasks
import torch
import variational_laplace_images as images

GREY, COLOURED = (2, 1, 28, 28), (2, 3, 32, 32)
WIDTHS = image_laplace.experiment.at("published").widths
# How each is made, its parameters layer by layer where they are few, and the shape of its inputs.
NETS = {
    "binary, cnn": (
        lambda: binary.NETS["cnn"]([64, 128, 2048]),
        9 * 64 + 9 * 64 * 128 + 49 * 128 * 2048 + 20_480,
        GREY,
    ),
    "binary, mlp": (lambda: binary.NETS["mlp"]([100, 100]), 78_400 + 10_000 + 1_000, GREY),
    "Laplace, mlp": (lambda: image_laplace.make_net("mlp", WIDTHS["mlp"]), 1_494_154, GREY),
    "Laplace, cnn": (lambda: image_laplace.make_net("cnn", WIDTHS["cnn"]), 892_010, GREY),
    "inducing": (lambda: inducing_images.make_net("16", 1), 77_754, GREY),
    "inducing, ResNet-50": (lambda: inducing_images.make_net("resnet50", 3), 23_520_842, COLOURED),
    "LeNet": (sequence_data.LeNet, 20 * 76 + 50 * 501 + 500 * 1_251 + 10 * 501, None),
    "split CIFAR": (  # [T fig. 5.4]'s
        lambda: split_tasks.FourConvolutions(32, 512),
        32 * 28 + 32 * 289 + 64 * 289 + 64 * 577 + 512 * 4_097 + 10 * 513,
        None,
    ),
    "VL, ResNet-18": (images.preact_resnet18, 11_172_170, COLOURED),
    "VL, grey": (images.cnn, 27_338, None),
    "VL, coloured": (lambda: images.cnn(32, 3), 27_914, COLOURED),
    "MILE on digits": (mile.small_cnn, 4_824, None),
    "radiance field": (  # 360-256-256, 256-1, and 256 + 360 - 256 - 3
        lambda: nerf.RadianceField(60, 256),
        360 * 256 + 256 + 256 * 256 + 256 + 257 + (256 + 360) * 256 + 256 + 256 * 3 + 3,
        None,
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_nets_have_their_sizes(name: str):
    make, count, shape = NETS[name]
    if "ResNet" in name:
        pytest.importorskip("torchvision", reason="these nets are torchvision's")
    net = make()
    assert sum(parameter.numel() for parameter in net.parameters()) == count
    if shape:
        assert net(torch.zeros(shape)).shape == (2, 10)
