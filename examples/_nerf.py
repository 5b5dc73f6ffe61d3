"""For nerf.py: the net, its loss, phases that are kept, what is scored, and pictures."""

import math
import time

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import torch
from PIL import Image, ImageDraw
from torch import nn

# [T 5.3.2]: error on held-out views; whether of colours or of silhouettes as well is not said.
PUBLISHED = {"deterministic": 9.4e-3, "Bayesian": 8.1e-3}
FORMATS = {"colour": ".5f", "colour + silhouette": ".5f", "PSNR": ".2f"}

# --------------------------------------------------------------------------- net and loss


class Harmonics(nn.Module):
    """Sines and cosines of each coordinate at frequencies `0.1 * 2^k`: of 3 numbers, 6 * count."""

    def __init__(self, count):
        super().__init__()
        self.register_buffer("frequencies", 0.1 * 2.0 ** torch.arange(count), persistent=False)

    def forward(self, x):
        angles = (x[..., None] * self.frequencies).flatten(-2)
        return torch.cat([angles.sin(), angles.cos()], -1)


class RadianceField(nn.Module):
    """Opacity at points, and their colour as seen in a direction: a field as in `_render.py`."""

    def __init__(self, harmonics, width):
        super().__init__()
        inputs, bend = 6 * harmonics, nn.Softplus(beta=10)
        self.embed = Harmonics(harmonics)
        self.trunk = nn.Sequential(nn.Linear(inputs, width), bend, nn.Linear(width, width), bend)
        self.density = nn.Sequential(nn.Linear(width, 1), bend)
        # A linear map of both, in two parts: what is the same along a ray is computed once.
        self.of_point = nn.Linear(width, width)
        self.of_direction = nn.Linear(inputs, width, bias=False)
        self.colour = nn.Sequential(bend, nn.Linear(width, 3), nn.Sigmoid())
        # Nearly transparent at first: else the first points of a ray hide all others.
        nn.init.constant_(self.density[0].bias, -1.5)

    def forward(self, points, directions):
        features = self.trunk(self.embed(points))
        opacity = 1 - (-self.density(features)[..., 0]).exp()
        seen_from = self.of_direction(self.embed(directions))[:, None]
        return opacity, self.colour(self.of_point(features) + seen_from)


def huber(prediction, target):
    """Return the mean of a smooth absolute error, `0.1 (sqrt(1 + d^2 / 0.01) - 1)`."""
    return (0.1 * ((1 + (prediction - target).square() / 0.01).sqrt() - 1)).mean()


def image_loss(rendered, target):
    """Return the error of colours plus that of coverage; both are `(..., 4)`."""
    return huber(rendered[..., :3], target[..., :3]) + huber(rendered[..., 3], target[..., 3])


# --------------------------------------------------------------------------- phases


class Phases:
    """Trained nets in a file: what an earlier run has finished is not done again.

    Args:
        path: of the file; it is begun anew if its settings are others.
        settings: of all phases.
    """

    def __init__(self, path, settings):
        self.path, self.content = path, {"settings": settings, "done": {}}
        if path.exists():
            found = torch.load(path, map_location="cpu", weights_only=True)
            self.content = found if found["settings"] == settings else self.content

    def run(self, name, seed, net, fit):
        """Train a net, or load what an earlier run made of it.

        Args:
            name: of the phase.
            seed: of its draws, so that a run in two parts is the same as one.
            net: what is trained.
            fit: trains it; returns what is to be recorded.

        Returns:
            The net and the record, the CPU seconds in it.
        """
        done = self.content["done"]
        if name in done:
            print(f"{name}: trained before, taken from {self.path}", flush=True)
        else:
            print(name, flush=True)
            torch.manual_seed(seed)
            start = time.process_time()
            record = {**fit(), "CPU seconds": time.process_time() - start}
            done[name] = {"state": net.state_dict(), "record": record}
            self.path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.content, self.path)
        net.load_state_dict(done[name]["state"])
        return net, done[name]["record"]


# --------------------------------------------------------------------------- scores


def errors(images, views):
    """Return errors of images `(V, 4, size, size)`, colours' peak signal-to-noise ratio in dB."""
    pixels, found = (part.movedim(1, -1) for part in (views.pixels, images))
    squared = (found - pixels)[..., :3].square().mean().item()
    return {
        "colour": huber(found[..., :3], pixels[..., :3]).item(),
        "colour + silhouette": image_loss(found, pixels).item(),
        "PSNR": -10 * math.log10(squared),
    }


def uncertainty(draws):
    """Return `sqrt(sum of the variances of colours)` of draws `(S, V, 4, ...)`: `(V, ...)`."""
    return draws[:, :, :3].var(0).sum(1).sqrt()


def reliability(sd, images, views, bins=10):
    """Return how standard deviations of the object's pixels go with errors of the mean.

    Args:
        sd: standard deviations, `(V, size, size)`.
        images: means, `(V, 4, size, size)`.
        views: what was there.
        bins: as many, with the same number of pixels each.

    Returns:
        The mean sd of all pixels and of the object's, the rank correlation of sd and error on the
        object, and root mean squares of both in each bin.
    """
    on_object = views.pixels[:, 3] > 0.5
    error = (images - views.pixels)[:, :3].square().sum(1).sqrt()[on_object]
    found = sd[on_object]
    ranks = torch.stack([x.argsort().argsort().double() for x in (found, error)])
    order = found.argsort().tensor_split(bins)
    return {
        "sd": sd.mean().item(),
        "sd on the object": found.mean().item(),
        "error on the object": error.square().mean().sqrt().item(),
        "rank correlation": ranks.corrcoef()[0, 1].item(),
        "bins": [[x[part].square().mean().sqrt().item() for x in (found, error)] for part in order],
    }


def scores(images, sds, views, where):
    """Return errors and the reliability of standard deviations, by method and part.

    Args:
        images: `(V, 4, size, size)`, by method.
        sds: standard deviations, `(V, size, size)`, by method, where it has any.
        views: what was there.
        where: masks of the views, `(V,)`, by part.
    """
    return (
        {
            method: {part: errors(found[some], views[some]) for part, some in where.items()}
            for method, found in images.items()
        },
        {
            method: {
                part: reliability(sd[some], images[method][some], views[some])
                for part, some in where.items()
            }
            for method, sd in sds.items()
        },
    )


def table(scores):
    """Return the errors of all methods as a Markdown table."""
    names = [(part, key) for part in ("held out", "train") for key in FORMATS]
    titles = [f"{part}: {key}" for part, key in names]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for method, row in scores.items():
        cells = [format(row[part][key], FORMATS[key]) for part, key in names]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


# --------------------------------------------------------------------------- pictures


def panels(rows, sd, views, columns, is_train):
    """Return figure 5.3 of [T]: images of some views, with standard deviations below.

    Args:
        rows: images `(V, 4, size, size)` by title.
        sd: standard deviations, `(V, size, size)`.
        views: of the azimuths in titles.
        columns: which views.
        is_train: which of all views were trained on, `(V,)`.
    """
    shape = len(rows) + 1, len(columns)
    figure, axes = plt.subplots(
        *shape, figsize=(1.3 * shape[1] + 0.9, 1.3 * shape[0] + 0.4), layout="constrained"
    )
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
    limit = sd[columns].quantile(0.999).item()
    for column, view in enumerate(columns):
        for ax, images in zip(axes[:, column], rows.values(), strict=False):
            ax.imshow(images[view, :3].movedim(0, -1).clamp(0, 1).numpy())
        shown = axes[-1, column].imshow(sd[view].numpy(), vmin=0, vmax=limit)
        kind = "train" if is_train[view] else "held out"
        axes[0, column].set_title(f"{kind}\n{views.azimuth[view]:.0f}°", fontsize=8)
    for ax, title in zip(axes[:, 0], [*rows, "Bayesian, sd"], strict=True):
        ax.set_ylabel(title, fontsize=8)
    figure.colorbar(shown, ax=axes[-1])
    return figure


def reliability_figure(found, curves):
    """Return a figure: error against standard deviation, and losses while training.

    Args:
        found: what `reliability` returns, by the name of the part.
        curves: pairs of step and loss, by the name of the phase.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, part in found.items():
        left.plot(*zip(*part["bins"], strict=True), "o-", label=name)
    limit = max(left.get_xlim()[1], left.get_ylim()[1])
    left.plot([0, limit], [0, limit], color="black", linestyle="dashed", linewidth=0.8)
    left.set(xlabel="standard deviation of a pixel's colour", ylabel="error of the mean (rms)")
    for name, curve in curves.items():
        right.plot(*zip(*curve, strict=True), label=name, linewidth=0.8)
    right.set(xlabel="step", ylabel="error of colours and silhouettes", yscale="log")
    for ax in (left, right):
        ax.legend()
    return figure


def turntable(path, truth, mean, sd, is_train, zoom=2):
    """Write a GIF of all views: truth, mean and standard deviation; held-out ones have a frame."""
    scale, frames = sd.quantile(0.999).clamp(min=1e-12), []
    for view, seen in enumerate(is_train):
        grey = (sd[view] / scale).expand(3, -1, -1)
        strip = torch.cat([truth[view, :3], mean[view, :3], grey], -1).clamp(0, 1)
        pixels = (255 * strip).byte().movedim(0, -1).numpy()
        frame = Image.fromarray(pixels).resize([zoom * n for n in pixels.shape[1::-1]])
        if not seen:
            corner = (frame.width - 1, frame.height - 1)
            ImageDraw.Draw(frame).rectangle([(0, 0), corner], outline=(255, 160, 0), width=2)
        frames.append(frame)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=120, loop=0)
    print(f"wrote {path}")
