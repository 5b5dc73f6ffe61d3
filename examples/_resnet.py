"""For resnet.py: settings, images, torchvision's net of any width, and training that resumes."""

import itertools
import sys
import time
from functools import partial
from typing import NamedTuple

import torch
from _data import colour
from torch import nn

# What each inference starts from.
STARTS = {"ml": None, "map": None, "mean-field": "ml", "mean-field-sd-only": "ml"}
STARTS |= {"last-layer-mean-field": "ml", "last-layer-low-rank": "ml", "last-layer-laplace": "map"}
STARTS |= {"laplace-kron": "map", "variational-laplace": "ml", "inducing": None}

# Epochs of what starts at random; others take the first two thirds, before the rate is cut.
PUBLISHED = {
    "stem": "cifar",
    "width": 64,
    "training images": None,
    "epochs": 300,
    "batch": 100,
    "rate": 1e-3,
    "beta": {"variational-laplace": 0.1},
    "scale multiplier": 1,
    "max scale": {"mean-field": 0.1, "mean-field-sd-only": 0.1},
    "draws": 32,
    "rank": 10,
    "M": 64,
    "max lambda": 0.03,
    "max scale of U": 0.1,
}
CPU = PUBLISHED | {"stem": "strided", "width": 16, "epochs": 48, "M": 16}
CPU |= {"scale multiplier": 10, "beta": {"variational-laplace": 0.02}}
CPU |= {"max scale": {"mean-field": 0.05, "mean-field-sd-only": 0.03}}
SMOKE = PUBLISHED | {"width": 2, "epochs": 3, "batch": 20, "draws": 2, "rank": 2, "M": 2}
KINDS = {"resnet": PUBLISHED, "resnet_cpu": CPU, "resnet_smoke": SMOKE}

# Settings that not every inference depends on.
SCALED = ["mean-field", "mean-field-sd-only", "last-layer-mean-field", "last-layer-low-rank"]
SCALED += ["variational-laplace", "inducing"]
OWN = {"rank": ["last-layer-low-rank"], "M": ["inducing"], "max lambda": ["inducing"]}
OWN |= {"scale multiplier": SCALED, "max scale": SCALED[:2], "max scale of U": ["inducing"]}


def own(settings, name):
    """Return what an inference depends on: its schedule, and the settings that it reads."""
    found = {key: value for key, value in settings.items() if name in OWN.get(key, [name])}
    epochs, cut = settings["epochs"], round(settings["epochs"] * 2 / 3)
    found |= {"epochs": cut if STARTS[name] else epochs, "cut": cut}
    found["beta"] = settings["beta"].get(name, 1.0)
    if name in settings["max scale"]:
        found["max scale"] = settings["max scale"][name]
    if name == "inducing":
        found |= {"epochs without KL": epochs // 3, "epochs of growing KL": epochs // 6}
    return found


def chosen(args, parser):
    """Return the name of the results and the settings, or leave with what is wrong with them."""
    kind = "resnet_smoke" if args.smoke_test else "resnet_cpu" if args.cpu else "resnet"
    numbers = {"width": args.width, "epochs": args.epochs, "training images": args.subset}
    given = {name: value for name, value in numbers.items() if value is not None}
    for option in ("width", "epochs", "subset", "seeds", "stop_after"):
        value = getattr(args, option)
        if value is not None and value < 1:
            name = option.replace("_", "-")
            parser.error(f"--{name} is {value}; expected a positive number")
    try:
        torch.zeros(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {args.device}: {str(error).splitlines()[0]}")
    # By default in low precision where that is fast.
    args.amp = args.amp or ("on" if torch.device(args.device).type == "cuda" else "off")
    return kind, KINDS[kind] | given | {"stem": args.stem or KINDS[kind]["stem"]}


# --------------------------------------------------------------------------- images


class Images(NamedTuple):
    """Training and test pairs, and images of another set, all normalised."""

    train: tuple
    test: tuple
    unknown: torch.Tensor


def load(settings, device):
    """Return CIFAR-10's first training and test images and SVHN, each by its own statistics.

    Raises:
        ValueError: fewer images than asked for.
        FileNotFoundError: there are none.
    """
    (x, y), (x_test, y_test) = (colour("cifar10_subset", "CIFAR10", s) for s in ("train", "test"))
    unknown = colour("svhn_subset", "SVHN", "test")[0]
    if len(unknown) < 1_000:  # of a local subset, all
        unknown = torch.cat([unknown, colour("svhn_subset", "SVHN", "train")[0]])
    count = settings["training images"] or len(x)
    if count > len(x):
        raise ValueError(f"--subset is {count:,}, but there are {len(x):,} training images")
    x, y = x[:count], y[:count]
    mean, scale = x.mean((0, 2, 3), keepdim=True), x.std((0, 2, 3), keepdim=True)
    its_mean, its_scale = (part((0, 2, 3), keepdim=True) for part in (unknown.mean, unknown.std))
    parts = (x - mean) / scale, (x_test - mean) / scale, (unknown - its_mean) / its_scale
    x, x_test, unknown = (part.to(device) for part in parts)
    return Images((x, y.to(device)), (x_test, y_test.to(device)), unknown)


def noise():
    """Return a few random images in the places of all."""
    own = torch.Generator().manual_seed(0)
    sets = [(torch.randn(n, 3, 32, 32, generator=own), torch.arange(n) % 10) for n in (40, 30, 20)]
    return Images(*sets[:2], sets[2][0])


# --------------------------------------------------------------------------- nets


def make_net(width, stem, device="cpu", channels_last=False):
    """Return torchvision's `resnet18` for ten classes, or a narrower net of its blocks.

    Args:
        width: number of channels of the first stage; 64 is ResNet-18 itself.
        stem: `"cifar"`, a 3x3 convolution and no max-pooling; `"strided"`, the same at every
            other pixel; `"imagenet"`, torchvision's own, 7x7 at every other pixel and max-pooling.
        device: where it goes.
        channels_last: in that format, which convolutions pass on.

    Raises:
        SystemExit: torchvision is missing.
    """
    try:
        from torchvision.models import resnet18
    except ImportError as error:
        sys.exit(f'the nets are torchvision\'s ({error}): pip install -e ".[vision]"')
    net = resnet18(num_classes=10)
    if width != 64:
        net.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        net.bn1 = nn.BatchNorm2d(width)
        sizes = [width, width, 2 * width, 4 * width, 8 * width]
        for i, (before, channels) in enumerate(itertools.pairwise(sizes), 1):
            setattr(net, f"layer{i}", make_stage(before, channels))
        net.fc = nn.Linear(8 * width, 10)
    if stem != "imagenet":
        stride = {"cifar": 1, "strided": 2}[stem]
        net.conv1 = nn.Conv2d(3, width, 3, stride, padding=1, bias=False)
        net.maxpool = nn.Identity()
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    kept = torch.channels_last if channels_last else torch.preserve_format
    return net.to(device, memory_format=kept)


def make_stage(before, channels):
    """Return two of torchvision's blocks, the first of which halves the image if it widens it."""
    from torchvision.models.resnet import BasicBlock

    if before == channels:
        return nn.Sequential(BasicBlock(channels, channels), BasicBlock(channels, channels))
    shortcut = nn.Conv2d(before, channels, 1, stride=2, bias=False)
    first = BasicBlock(before, channels, 2, nn.Sequential(shortcut, nn.BatchNorm2d(channels)))
    return nn.Sequential(first, BasicBlock(channels, channels))


# --------------------------------------------------------------------------- training


class Clock:
    """Seconds of CPU time, or on a GPU of real time, of this run and of those it goes on from."""

    def __init__(self, device, before=0.0):
        self.on_gpu, self.before = torch.device(device).type == "cuda", before
        self.start = self.now()

    def now(self):
        """Return the time, when what was asked of the device is done."""
        if self.on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() if self.on_gpu else time.process_time()

    def __call__(self):
        """Return the seconds so far."""
        return self.before + self.now() - self.start


def fit(bnn, handler, batches, settings, path, *, stop_after=None, amp=False):
    """Fit from the last checkpoint on, making one after each epoch.

    Args:
        bnn: a `VariationalBNN`.
        handler: makes the context to fit in.
        batches: a loader.
        settings: what `own` returned.
        path: of the checkpoint.
        stop_after: leave so many epochs from here.
        amp: in bfloat16 where autocast takes it.

    Returns:
        The losses of all epochs, nats for all images, and the seconds that they took.

    Raises:
        SystemExit: the checkpoint is of other settings; or stopped as asked.
    """
    device = next(bnn.parameters()).device
    found, clock = {"losses": [], "train s": 0.0}, Clock(device)
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        if saved["settings"] != settings:
            sys.exit(f"{path} is of other settings: name other --checkpoints, or remove it")
        bnn.load_checkpoint(saved["bnn"])
        found, clock.before = saved["found"], saved["found"]["train s"]
    first, last = len(found["losses"]), settings["epochs"]
    free, growing = (settings.get(f"epochs {kind} KL", 0) for kind in ("without", "of growing"))

    def save(bnn, epoch, loss):
        if epoch + 1 == settings["cut"]:
            for group in bnn.optimizer.param_groups:
                group["lr"] /= 10
        found["losses"].append(loss)
        found["train s"] = clock()
        content = {"settings": settings, "found": found, "bnn": bnn.checkpoint()}
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)  # a run may be killed while it writes
        return epoch + 1 == first + (stop_after or last)

    def beta(epoch):
        return settings["beta"] * min(max((epoch - free + 1) / (growing + 1), 0.0), 1.0)

    if first < last:
        adam = partial(torch.optim.Adam, lr=settings["rate"])
        scales = {"scale": settings.get("scale multiplier", 1)}
        with handler(), torch.autocast(device.type, torch.bfloat16, enabled=amp):
            bnn.fit(batches, adam, last - first, save, beta=beta, lr_multipliers=scales)
    if len(found["losses"]) < last:
        sys.exit(f"{path.stem}: stopped after {len(found['losses'])} of {last} epochs")
    return found
