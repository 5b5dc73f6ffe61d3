"""A radiance field of a cow, deterministic and Bayesian, a quarter of the views held out [T 5.3.2].

A net maps a point and a direction to opacity and colour, a renderer makes an image of it, and the
net is trained on images of an object from all sides [T fig. 5.3]. `PytorchBNN` takes the net's
place, with the same renderer, optimiser and loss, plus the KL over the number of values that are
fitted. All of an image is rendered by one draw of the weights, in however many pieces it is
computed: that is what `hold_sample` is for.

The deterministic net; the Bayesian net, from the first one's weights with a N(0, 1) prior, the
weight of the KL rising to its last in the first half; and an ensemble, of the first net and of
others from other weights, whose images are averaged and scored as draws are. With "level
directions" the first net is told that rays are level. Parts of the views: those to train; held out,
in a gap; and from a path over and under the object (--over). What is trained and rendered is kept
in files (.pt) beside the record. pages/nerf.md explains the tables and figures.
"""

import sys
from contextlib import nullcontext
from functools import cache, partial

import common
import nerf_scores
import runner
import tables
import torch
from rendering import Renderer, load
from torch import nn

import tyxe

FORMATS = {"colour": ".5f", "colour + silhouette": ".5f", "PSNR": ".2f"}
GAPS = {"quarter": 1 / 4, "half": 1 / 2}
LEVEL = "deterministic, level directions"
METHODS = ["deterministic", LEVEL, "Bayesian", "ensemble"]


def check(s):
    if (least := min(s.kl_factors)) <= 0:
        raise ValueError(f"--kl-factors has {least:g}; expected positive numbers")
    if s.device == "cuda" and not torch.cuda.is_available():
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


@cache
def problem(s):
    """Return views, masks of the parts that they are in by name, and the renderer."""
    try:
        views = load(s.data)
        if len(views) < 5:
            sys.exit(f"{s.data} has {len(views)} views; expected at least 5, to hold some out")
        around, count = len(views) - 1, int((1 - GAPS[s.gap]) * len(views))
        views = views[torch.arange(around)]
        if s.over != "none":
            over = load(s.over)
            if (over.fov, over.pixels.shape[1:]) != (views.fov, views.pixels.shape[1:]):
                found = f"{s.over} has cameras or images of another size than {s.data}"
                sys.exit(f"{found}: name another, or --over none")
            views = views + over[torch.arange(0, len(over) - 1, 3)]
        # On a CPU, pieces that fit into its cache.
        chunk = 2**14 if s.device == "cpu" else 2**21
        renderer = Renderer(views.pixels.shape[-1], s.depths, s.near, s.far, chunk)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    i = torch.arange(len(views))
    parts = {"train": i < count, "held out": (i >= count) & (i < around)}
    if s.over != "none":
        parts["over and under"] = i >= around
    return views.to(s.device), parts, renderer


def fit(s, net, one_draw=nullcontext, kl_weight=0.0):
    """Train on random rays through random views; return the curve of the loss, without the KL."""
    (views, parts, renderer), every = problem(s), max(1, s.steps // 100)
    train, losses, curve = views[parts["train"].to(s.device)], [], []
    for step in range(s.steps):
        if step in (0, 3 * s.steps // 4):
            optimizer = torch.optim.Adam(net.parameters(), s.rate * (0.1 if step else 1))
        some = train[torch.randperm(len(train))[: s.views]]
        with one_draw():
            rendered, xy = renderer.random_rays(some, net, s.rays)
        loss = error = nerf_scores.image_loss(rendered, some.at(xy))
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


def scored(s, record, name, seed, draws, state=None):
    """Score images `(S, V, 4, size, size)` of one net or of draws, and keep them in a file."""
    views, parts, _ = problem(s)
    pictures = {"state": state or {}, "images": draws.mean(0)}
    if len(draws) > 1:
        pictures["sd"] = nerf_scores.uncertainty(draws)
        pictures["coverage sd"] = draws[:, :, 3].std(0)
    s.out.mkdir(parents=True, exist_ok=True)
    torch.save(pictures, file_of(record, name, seed))
    return nerf_scores.by_part(draws, views.to("cpu"), parts)


@torch.no_grad()
def rendered(s, net):
    views, _, renderer = problem(s)
    one_by_one = torch.arange(len(views)).split(1)
    return torch.cat([renderer.images(views[i], net) for i in one_by_one]).cpu()


def start(s, seed):
    torch.manual_seed(seed)
    return RadianceField(s.harmonics, s.width).to(s.device)


def saved(s, name, seed):
    return torch.load(file_of(experiment.record(s), name, seed), s.device, weights_only=True)


def run_net(s, name, seed):
    """Train a deterministic net; each further member of an ensemble has a start of its own."""
    member = int(name.removeprefix("member ")) - 1 if name.startswith("member") else 0
    net = start(s, seed + 100 * member)
    torch.manual_seed(seed + 100 * member + 1)
    found, weights = fit(s, net), sum(parameter.numel() for parameter in net.parameters())
    images = rendered(s, net)[None]
    found |= scored(s, experiment.record(s), name, seed, images, net.state_dict())
    return found | {"weights": weights}


def run_bayesian(s, name, seed, factor):
    """Train the Bayesian net from where the deterministic one stopped, and render its draws."""
    (views, parts, _), net = problem(s), start(s, seed)
    net.load_state_dict(saved(s, "deterministic", seed)["state"])
    kl_weight = 1 / (4 * int(parts["train"].sum()) * views.pixels.shape[-1] ** 2)
    # What makes it Bayesian: a prior, a guide, the wrapper, and the KL in the loss.
    guide = common.mean_field(net, init_scale=s.first_sd)
    bnn = tyxe.PytorchBNN(net, common.normal(), guide)
    torch.manual_seed(seed + 3)
    found = fit(s, bnn, bnn.hold_sample, factor * kl_weight)
    torch.manual_seed(seed)
    draws = []
    for _ in range(s.draws):
        with bnn.hold_sample():  # all images by the same weights
            draws.append(rendered(s, bnn))
    draws = torch.stack(draws)
    found |= scored(s, experiment.record(s), name, seed, draws, bnn.state_dict())
    return found | {"weight of the KL": kl_weight}


def run_level(s, name, seed):
    """Score the deterministic net told that rays are level, as those that it knows nearly are."""
    net = start(s, seed)
    net.load_state_dict(saved(s, "deterministic", seed)["state"])

    def level(points, directions):
        along = directions * directions.new_tensor([1.0, 0.0, 1.0])
        return net(points, nn.functional.normalize(along, dim=-1))

    return scored(s, experiment.record(s), name, seed, rendered(s, level)[None])


def run_ensemble(s, name, seed, members):
    images = torch.stack([saved(s, member, seed)["images"].cpu() for member in members])
    return scored(s, experiment.record(s), name, seed, images)


def cells(s, found):
    for seed in s.seeds:
        members = ["deterministic", *(f"member {i + 1}" for i in range(1, s.members))]
        factors = s.kl_factors if "Bayesian" in s.methods else []
        yield ("deterministic", seed), partial(run_net, s, "deterministic", seed)
        if LEVEL in s.methods:
            yield (LEVEL, seed), partial(run_level, s, LEVEL, seed)
        for factor in factors:
            name = "Bayesian" if factor == 1 else f"Bayesian, KL x {factor:g}"
            yield (name, seed), partial(run_bayesian, s, name, seed, factor)
        if "ensemble" in s.methods:
            for name in members[1:]:
                yield (name, seed), partial(run_net, s, name, seed)
            name = f"ensemble of {s.members}"
            yield (name, seed), partial(run_ensemble, s, name, seed, members)


def table(record):
    """Return a page of errors, and one of standard deviations beside them, a column for a part."""
    found = next(iter(record.cells.values()))["errors"]
    parts = [part for part in ("held out", "train", "over and under") if part in found]
    scores = {"error": ".3f", "sd": ".3f", "rank correlation": ".2f", "gain": ".2f"}
    errors, uncertainty = {}, {}
    for key, cell in record.cells.items():
        errors[key] = flat(cell["errors"])
        if "uncertainty" in cell:
            uncertainty[key] = flat(cell["uncertainty"])
            for part, own in cell["uncertainty"].items():
                for name in ("error", "sd"):
                    uncertainty[key][f"{part}: {name}"] = own[f"{name} on the object"]
                uncertainty[key][f"{part}: gain"] = own["sparsification"]["gain"]
    pages = {"": (errors, FORMATS)} | (
        {"_uncertainty": (uncertainty, scores)} if uncertainty else {}
    )
    return {
        ending: tables.score_table(tables.rows(cells), flat(dict.fromkeys(parts, forms)))
        for ending, (cells, forms) in pages.items()
    }


def flat(parts):
    return {f"{part}: {name}": value for part, row in parts.items() for name, value in row.items()}


def figure(record):
    """Draw images of some views and where draws differ [T fig. 5.3], and the scores."""
    seed = next(iter(record.cells))[1]
    own = {name: cell for (name, other), cell in record.cells.items() if other == seed}
    drawn = [name for name in sorted(own) if "uncertainty" in own[name]]
    shown = [*drawn[:1], *(name for name in drawn[1:] if name.startswith("ensemble"))]
    if not shown:
        return {}
    files = {name: file_of(record, name, seed) for name in ("deterministic", *shown)}
    if missing := [str(file) for file in files.values() if not file.exists()]:
        sys.exit(f"there is no {missing[0]}, which has the pictures: run without --figure")
    given = record.content["settings"]
    data = {name: given[name] for name in ("data", "over", "gap")}
    views, parts, _ = problem(experiment.at(**data))
    pictures = {name: torch.load(file, "cpu", weights_only=True) for name, file in files.items()}
    around = ~parts.get("over and under", torch.zeros(len(views), dtype=torch.bool))
    count = int(around.sum())
    titles = {
        view: f"{'train' if parts['train'][view] else 'held out'}\n{views.azimuth[view]:.0f}°"
        for view in (i * count // 39 for i in (12, 19, 32, 34, 38))
    }
    drawn = {"": nerf_scores.images_of_views(views, titles, pictures)}
    held_out = next(view for view in titles if not parts["train"][view])
    drawn["_view"] = nerf_scores.one_view(views, held_out, pictures[shown[0]])
    if titles := {i: f"{round(views.height[i].item())}°" for i in range(count, len(views), 2)}:
        del pictures["deterministic"]
        drawn["_over_images"] = nerf_scores.images_of_views(views, titles, pictures)
    return drawn | curves(own, shown)


def curves(own, shown):
    """Return the figures that the record alone has, of the methods that have draws."""
    seen = {name: own[name]["views"] for name in shown}
    scores = {name: own[name]["uncertainty"] for name in shown}
    losses = {name: cell["curve"] for name, cell in own.items() if "curve" in cell}
    found = {"_around": nerf_scores.around(seen)}
    if "over and under" in seen[shown[0]]:
        found["_over"] = nerf_scores.over_and_under(seen)
    found["_sparsification"] = nerf_scores.sparsifications(scores)
    return found | {"_uncertainty": nerf_scores.reliabilities(scores, losses)}


how = {"name": "nerf_{0.gap}", "choices": {"methods": METHODS}, "check": check}
experiment = runner.Experiment("nerf", cells, table, figure, ("method", "seed"), **how)
