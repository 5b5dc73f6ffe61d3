"""A radiance field of a cow, deterministic and Bayesian, a quarter of the views held out [T 5.3.2].

A net maps a point and a direction to opacity and colour; a renderer makes an image of it, by
emission and absorption along rays; and the net is trained on images of an object from all sides
[T fig. 5.3]. `PytorchBNN` takes the net's place, with the same renderer, the same torch optimiser
and the same loss, of colours and of silhouettes, plus the KL over the number of values that are
fitted. All of an image is rendered by one draw of the weights, in however many pieces it is
computed: that is what `hold_sample` is for.

40 views from all around (the last repeats the first, and is left out): 30 to train, and the 9 after
them, a gap of 92 degrees, held out. The deterministic net; the same trained for as long again, for
the third is, too; and the Bayesian net, from the first one's weights with standard deviations of
0.01, a N(0, 1) prior, and the weight of the KL rising to 1 / (4 views pixels) in the first half:
one over the number of values that are fitted. The original divides by 4 x 30 x 128^2, the same rule
for images of 128x128; of 64x64 pixels, as here, it gives four times the original's weight, which is
--kl-factors 0.25. cow_views.py makes the original's images where PyTorch3D is installed.
What is trained and rendered is kept in files (.pt) beside the record. Columns: means of Huber's
function of colours, and of colours and silhouettes, and the peak signal-to-noise ratio of colours
(dB). Reduced: the net, rays, depths and steps, at a higher rate; depths hold the object, where the
published ones end a little behind its middle.
"""

import sys
from contextlib import nullcontext
from functools import cache, partial
from itertools import product

import common
import runner
import tables
import torch
from rendering import RENDERERS, load
from runner import how, setting, settings, which
from torch import nn

import tyxe

# [T 5.3.2]: error on held-out views; whether of colours or of silhouettes as well is not said.
PUBLISHED = {"deterministic": 9.4e-3, "Bayesian": 8.1e-3}
FORMATS = {"colour": ".5f", "colour + silhouette": ".5f", "PSNR": ".2f"}
COW, LONGER = "cow/cow_views_equator.npz", "deterministic, twice as long"


@settings
class Settings(runner.Settings):
    seeds: list[int] = which([0], "of net and draws")
    kl_factors: list[float] = which([1.0], "times its weight; pictures are of the first")
    device: str = how("cpu", "where to compute", choices=["cpu", "cuda"])
    harmonics: int = setting(10, "frequencies", published=60, smoke=4)
    width: int = setting(64, "of the net", published=256, smoke=8)
    steps: int = setting(8_000, "of Adam, of each net", published=20_000, smoke=8)
    rate: float = setting(3e-3, "of Adam", published=1e-3)
    views: int = setting(6, "in a step")
    rays: int = setting(60, "through each of these", published=750, smoke=10)
    depths: int = setting(40, "on a ray", published=128, smoke=6)
    near: float = setting(1.65, "the first depth", published=0.1)
    far: float = setting(3.75, "the last depth", published=3.0)
    first_sd: float = setting(1e-2, "standard deviations at the start")
    draws: int = setting(8, "in predictions", smoke=2)
    renderer: str = setting("torch", "what makes images", choices=[*RENDERERS])
    data: str = setting(COW, "an archive of views")

    def __post_init__(self):
        if (least := min(self.kl_factors)) <= 0:
            raise ValueError(f"--kl-factors has {least:g}; expected positive numbers")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda, but torch finds no GPU")


def embedded(x, count):
    """Return sines and cosines of each coordinate at frequencies `0.1 * 2^k`: 6 * count of 3."""
    angles = (x[..., None] * (0.1 * 2.0 ** torch.arange(count, device=x.device))).flatten(-2)
    return torch.cat([angles.sin(), angles.cos()], -1)


class RadianceField(nn.Module):
    """Opacity at points, and their colour as seen in a direction."""

    def __init__(self, harmonics, width):
        super().__init__()
        self.harmonics, inputs, bend = harmonics, 6 * harmonics, nn.Softplus(beta=10)
        self.trunk = nn.Sequential(nn.Linear(inputs, width), bend, nn.Linear(width, width), bend)
        self.density = nn.Sequential(nn.Linear(width, 1), bend)
        # A linear map of both, in two parts: what is the same along a ray is computed once.
        self.of_point = nn.Linear(width, width)
        self.of_direction = nn.Linear(inputs, width, bias=False)
        self.colour = nn.Sequential(bend, nn.Linear(width, 3), nn.Sigmoid())
        # Nearly transparent at first: else the first points of a ray hide all others.
        nn.init.constant_(self.density[0].bias, -1.5)

    def forward(self, points, directions):
        features = self.trunk(embedded(points, self.harmonics))
        opacity = 1 - (-self.density(features)[..., 0]).exp()
        seen_from = self.of_direction(embedded(directions, self.harmonics))[:, None]
        return opacity, self.colour(self.of_point(features) + seen_from)


def huber(prediction, target):
    """Return the mean of a smooth absolute error, `0.1 (sqrt(1 + d^2 / 0.01) - 1)`."""
    return (0.1 * ((1 + (prediction - target).square() / 0.01).sqrt() - 1)).mean()


def image_loss(rendered, target):
    """Return the error of colours plus that of coverage; both are `(..., 4)`."""
    return huber(rendered[..., :3], target[..., :3]) + huber(rendered[..., 3], target[..., 3])


def errors(images, views):
    """Return errors of images `(V, 4, size, size)`, colours' peak signal-to-noise ratio in dB."""
    pixels, found = (part.movedim(1, -1) for part in (views.pixels, images))
    return {
        "colour": huber(found[..., :3], pixels[..., :3]).item(),
        "colour + silhouette": image_loss(found, pixels).item(),
        "PSNR": -10 * (found - pixels)[..., :3].square().mean().log10().item(),
    }


def uncertainty(draws):
    """Return `sqrt(sum of the variances of colours)` of draws `(S, V, 4, ...)`: `(V, ...)`."""
    return draws[:, :, :3].var(0).sum(1).sqrt()


def reliability(sd, images, views, bins=10):
    """Return how standard deviations of the object's pixels go with errors of the mean.

    The mean sd of all pixels and of the object's, the rank correlation of sd and error on the
    object, and root mean squares of both in bins of the same number of pixels.
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


@cache
def problem(s):
    try:
        views = load(s.data).to(s.device)
        # On a CPU, pieces that fit into its cache.
        chunk = 2**14 if s.device == "cpu" else 2**21
        renderer = RENDERERS[s.renderer](views.pixels.shape[-1], s.depths, s.near, s.far, chunk)
    except (FileNotFoundError, ImportError, ValueError) as error:
        sys.exit(str(error))
    if len(views) < 5:
        sys.exit(f"{s.data} has {len(views)} views; expected at least 5, to hold some out")
    views = views[torch.arange(len(views) - 1)]
    return views, torch.arange(len(views)) < 3 * (len(views) + 1) // 4, renderer


def fit(s, net, one_draw=nullcontext, kl_weight=0.0):
    """Train on random rays through random views; return the curve of the loss, without the KL."""
    (views, is_train, renderer), every = problem(s), max(1, s.steps // 100)
    train, losses, curve = views[is_train], [], []
    for step in range(s.steps):
        if step in (0, 3 * s.steps // 4):
            optimizer = torch.optim.Adam(net.parameters(), s.rate * (0.1 if step else 1))
        some = train[torch.randperm(len(train))[: s.views]]
        with one_draw():
            rendered, xy = renderer.random_rays(some, net, s.rays)
        loss = error = image_loss(rendered, some.at(xy))
        if kl_weight:
            loss = error + kl_weight * min(1, 2 * step / s.steps) * net.cached_kl_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(error.detach())
        if (step + 1) % every == 0:
            curve.append([step + 1, torch.stack(losses).mean().item()])
            losses.clear()
    return {"curve": curve, "KL": net.cached_kl_loss.item()} if kl_weight else {"curve": curve}


def file_of(record, name, seed):
    words = name.replace(",", "").replace(" ", "_")
    return record.path.with_name(f"{record.path.stem}_{words}_{seed}.pt")


def run(s, name, seed, factor):
    """Train a net from where another stopped, render and score it; its pictures are in a file."""
    (views, is_train, renderer), record = problem(s), experiment.record(s)
    torch.manual_seed(seed)
    net = RadianceField(s.harmonics, s.width).to(s.device)
    if name != "deterministic":
        first = torch.load(file_of(record, "deterministic", seed), s.device, weights_only=True)
        net.load_state_dict(first["state"])
    bnn, how, weights = net, (), sum(parameter.numel() for parameter in net.parameters())
    kl_weight = 1 / (4 * int(is_train.sum()) * views.pixels.shape[-1] ** 2)
    if is_bayesian := name.startswith("Bayesian"):
        # What makes it Bayesian: a prior, a guide, the wrapper, and the KL in the loss.
        guide = common.mean_field(net, init_scale=s.first_sd)
        bnn = tyxe.PytorchBNN(net, common.normal(), guide)
        how = bnn.hold_sample, factor * kl_weight
    torch.manual_seed(seed + (1 if name == "deterministic" else 2 if name == LONGER else 3))
    found = fit(s, bnn, *how)

    @torch.no_grad()
    def rendered():
        one_by_one = torch.arange(len(views)).split(1)
        return torch.cat([renderer.images(views[i], bnn) for i in one_by_one]).cpu()

    torch.manual_seed(seed)
    draws = []
    for _ in range(s.draws if is_bayesian else 1):
        with bnn.hold_sample() if is_bayesian else nullcontext():  # all images by the same weights
            draws.append(rendered())
    draws, views = torch.stack(draws), views.to("cpu")
    pictures = {"state": bnn.state_dict(), "images": (mean := draws.mean(0))}
    where = {"train": is_train, "held out": ~is_train}
    found["errors"] = {part: errors(mean[some], views[some]) for part, some in where.items()}
    if is_bayesian:
        pictures["sd"] = sd = uncertainty(draws)
        parts = {part: (sd[some], mean[some], views[some]) for part, some in where.items()}
        found["uncertainty"] = {part: reliability(*three) for part, three in parts.items()}
    s.out.mkdir(parents=True, exist_ok=True)
    torch.save(pictures, file_of(record, name, seed))
    return found | {"weights": weights, "weight of the KL": kl_weight}


def cells(s, found):
    factors = {"deterministic": 0.0, LONGER: 0.0}
    factors |= {"Bayesian" if f == 1 else f"Bayesian, KL x {f:g}": f for f in s.kl_factors}
    for seed, (name, factor) in product(s.seeds, factors.items()):
        yield (name, seed), partial(run, s, name, seed, factor)


def table(record):
    def flat(parts):
        return {f"{part}: {name}": v for part, row in parts.items() for name, v in row.items()}

    cells = {key: flat(cell["errors"]) for key, cell in record.cells.items()}
    forms = flat({"held out": FORMATS, "train": FORMATS})
    return tables.score_table(tables.rows(cells), forms)


def figure(record):
    """Draw images of some views and where draws differ [T fig. 5.3], and a turn around all."""
    seed = next(iter(record.cells))[1]
    own = {name: cell for (name, other), cell in record.cells.items() if other == seed}
    method = next(name for name in sorted(own) if name.startswith("Bayesian"))
    files = [file_of(record, name, seed) for name in ("deterministic", method)]
    if missing := [str(file) for file in files if not file.exists()]:
        sys.exit(f"there is no {missing[0]}, which has the pictures: run without --figure")
    first, found = (torch.load(file, "cpu", weights_only=True) for file in files)
    views, is_train, _ = problem(Settings(data=record.content["settings"]["data"]))
    mean, sd = found["images"], found["sd"]
    turntable(record.path.with_suffix(".gif"), views.pixels, mean, sd, is_train)

    columns = [i * len(views) // 39 for i in (2, 12, 19, 26, 30, 32, 34, 36, 38)]
    rows = {"truth": views.pixels, "deterministic": first["images"], f"{method}, mean": mean}
    ticks = {"xticks": [], "yticks": []}
    panels, axes = tables.subplots(4, 9, figsize=(12.6, 5.6), subplot_kw=ticks)
    for line, view in zip(axes.T, columns, strict=True):
        for ax, images in zip(line, rows.values(), strict=False):
            ax.imshow(images[view, :3].movedim(0, -1).clamp(0, 1).numpy())
        shown = line[-1].imshow(sd[view].numpy(), vmin=0, vmax=sd[columns].quantile(0.999).item())
        kind = "train" if is_train[view] else "held out"
        line[0].set_title(f"{kind}\n{views.azimuth[view]:.0f}°", fontsize=8)
    for ax, title in zip(axes[:, 0], [*rows, "Bayesian, sd"], strict=True):
        ax.set_ylabel(title, fontsize=8)
    panels.colorbar(shown, ax=axes[-1])

    drawn, (left, right) = tables.subplots(1, 2, figsize=(9, 3.6))
    for name, part in own[method]["uncertainty"].items():
        left.plot(*zip(*part["bins"], strict=True), "o-", label=name)
    limit = max(left.get_xlim()[1], left.get_ylim()[1])
    left.plot([0, limit], [0, limit], color="black", linestyle="dashed", linewidth=0.8)
    left.set(xlabel="standard deviation of a pixel's colour", ylabel="error of the mean (rms)")
    for name, cell in own.items():
        right.plot(*zip(*cell["curve"], strict=True), label=name, linewidth=0.8)
    right.set(xlabel="step", ylabel="error of colours and silhouettes", yscale="log")
    for ax in (left, right):
        ax.legend()
    return {"": panels, "_uncertainty": drawn}


def turntable(path, truth, mean, sd, is_train):
    """Write a GIF of all views: truth, mean and standard deviation; held-out ones have a frame."""
    from PIL import Image, ImageDraw

    scale, frames = sd.quantile(0.999).clamp(min=1e-12), []
    for view, seen in enumerate(is_train):
        grey = (sd[view] / scale).expand(3, -1, -1)
        strip = torch.cat([truth[view, :3], mean[view, :3], grey], -1).clamp(0, 1)
        pixels = (255 * strip).byte().movedim(0, -1).numpy()
        frame = Image.fromarray(pixels).resize([2 * n for n in pixels.shape[1::-1]])
        if not seen:
            edges = (0, 0, frame.width - 1, frame.height - 1)
            ImageDraw.Draw(frame).rectangle(edges, outline=(255, 160, 0), width=2)
        frames.append(frame)
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=120, loop=0)
    print(f"wrote {path}")


by, facts = ("method", "seed"), {"published error on held-out views": PUBLISHED}
experiment = runner.Experiment("nerf", Settings, cells, by, table, figure, facts)

if __name__ == "__main__":
    experiment.main()
