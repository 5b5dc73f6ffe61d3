"""A radiance field of a cow, deterministic and Bayesian, with a quarter of the views held out.

A net maps a point and a direction to opacity and colour; a renderer makes an image of it, by
emission and absorption along rays; and the net is trained on images of an object from all sides: a
NeRF [T 5.3.2, fig. 5.3]. `PytorchBNN` takes the net's place, with the same renderer, the same torch
optimiser and the same loss, of colours and of silhouettes, plus the KL over the number of values
that are fitted. All of an image is rendered by one draw of the weights, in however many pieces it
is computed: that is what `hold_sample` is for.

40 views from all around (the last repeats the first, and is left out): 30 to train, and the 9
after them, a gap of 92 degrees, held out. Three phases: the deterministic net; the same trained for
as long again, for the third is, too; and the Bayesian net, from the first one's weights with
standard deviations of 0.01, a N(0, 1) prior, and the weight of the KL rising to 1 / (4 views
pixels) in the first half. What is finished is kept in nerf.pt in --out, and not run again by a run
with the same settings. Then 8 draws: errors of their mean, and where they differ.

By default a small net: 10 of the 60 harmonics, width 64 for 256, 360 rays for 4,500 and 40 depths
for 128 a step, 8,000 steps for 20,000, at a rate of 3e-3 for 1e-3; depths from 1.65 to 3.75, which
hold the object, for 0.1 to 3, which end a little behind its middle. About a quarter of an hour on a
CPU. `--published` is the paper's setting, for a GPU (--device cuda).
"""

import argparse
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path

import _extras  # noqa: F401
import _nerf as tools
import pyro.distributions as dist
import torch
from _nerf import RadianceField, image_loss
from _record import environment, save
from _render import RENDERERS
from _views import load

import tyxe
from tyxe.guides import AutoNormal, PretrainedInitializer

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
    "--data", default="cow/cow_views_equator.npz", help="an archive of views (default: the cow)"
)
parser.add_argument(
    "--renderer", choices=RENDERERS, default="torch", help="what makes images (default: torch)"
)
parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="(default: cpu)")
parser.add_argument("--published", action="store_true", help="the paper's setting, see above")
parser.add_argument(
    "--kl-factors",
    type=float,
    nargs="+",
    default=[1.0],
    metavar="F",
    help="a Bayesian net for "
    "each, with F times that weight of the KL; pictures are of the first (default: 1)",
)
parser.add_argument("--seed", type=int, default=0, help="of net and draws (default: 0)")
parser.add_argument("--out", type=Path, default=Path("results"), help="folder of the results")
parser.add_argument("--smoke-test", action="store_true", help="a few steps, coarsely: no result")
args = parser.parse_args()
if args.device == "cuda" and not torch.cuda.is_available():
    parser.error("--device cuda, but torch finds no GPU")
if min(args.kl_factors) <= 0:
    parser.error(f"--kl-factors has {min(args.kl_factors):g}; expected positive numbers")
settings = {
    **{"harmonics": 10, "width": 64, "steps": 8_000, "rate": 3e-3, "views": 6, "rays": 60},
    **{"depths": 40, "near": 1.65, "far": 3.75, "first sd": 1e-2, "draws": 8},
}
if args.published:
    settings |= {"harmonics": 60, "width": 256, "steps": 20_000, "rate": 1e-3, "rays": 750}
    settings |= {"depths": 128, "near": 0.1, "far": 3.0}
if args.smoke_test:
    settings |= {"harmonics": 4, "width": 8, "steps": 8, "rays": 10, "depths": 6, "draws": 2}
settings |= {"renderer": args.renderer, "data": args.data, "seed": args.seed}

try:
    views = load(args.data).to(args.device)
    size = views.pixels.shape[-1]
    # On a CPU, pieces that fit into its cache.
    pieces = {"chunk": 2**14 if views.pixels.device.type == "cpu" else 2**21}
    along = {name: settings[name] for name in ("depths", "near", "far")}
    renderer = RENDERERS[args.renderer](size, **along, **pieces)
except (FileNotFoundError, ModuleNotFoundError, ValueError) as error:
    raise SystemExit(str(error)) from None
if len(views) < 5:
    raise SystemExit(f"{args.data} has {len(views)} views; expected at least 5, to hold some out")
views = views[torch.arange(len(views) - 1)]
is_train = torch.arange(len(views)) < 3 * (len(views) + 1) // 4
parts = {"train": views[is_train], "held out": views[~is_train]}
train = parts["train"]


def fit(net, one_draw=nullcontext, kl_weight=0.0):
    """Train on random rays through random views; return the curve of the loss, without the KL."""
    steps, every, losses, curve = settings["steps"], max(1, settings["steps"] // 100), [], []
    for step in range(steps):
        if step in (0, 3 * steps // 4):
            rate = settings["rate"] * (0.1 if step else 1)
            optimizer = torch.optim.Adam(net.parameters(), rate)
        some = train[torch.randperm(len(train))[: settings["views"]]]
        with one_draw():
            rendered, xy = renderer.random_rays(some, net, settings["rays"])
        loss = error = image_loss(rendered, some.at(xy))
        if kl_weight:
            loss = error + kl_weight * min(1, 2 * step / steps) * net.cached_kl_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(error.detach())
        if (step + 1) % every == 0:
            curve.append([step + 1, torch.stack(losses).mean().item()])
            losses.clear()
            if len(curve) % 10 == 0:
                print(f"  step {step + 1}: error {curve[-1][1]:.5f}", flush=True)
    return {"curve": curve, "KL": net.cached_kl_loss.item()} if kl_weight else {"curve": curve}


@torch.no_grad()
def render(field):
    """Return images of all views, `(V, 4, size, size)`."""
    one_by_one = torch.arange(len(views)).split(1)
    return torch.cat([renderer.images(views[i], field) for i in one_by_one]).cpu()


def render_draws(bnn):
    """Return images of all views by some draws, `(S, V, 4, size, size)`."""
    torch.manual_seed(args.seed)
    found = []
    for _ in range(settings["draws"]):
        with bnn.hold_sample():  # every piece of every image by the same weights
            found.append(render(bnn))
    return torch.stack(found)


name = "nerf_published" if args.published else "nerf"
phases, records = tools.Phases(args.out / f"{name}.pt", settings), {}


def train_phase(phase, seed, net, *how):
    """Train a net, unless an earlier run has, and return it."""
    net, records[phase] = phases.run(phase, args.seed + seed, net, partial(fit, net, *how))
    return net


torch.manual_seed(args.seed)
net = RadianceField(settings["harmonics"], settings["width"]).to(args.device)
net = train_phase("deterministic", 1, net)
longer = train_phase("deterministic, twice as long", 2, deepcopy(net))
images = {"deterministic": render(net), "deterministic, twice as long": render(longer)}

# What makes it Bayesian: a prior, a guide, the wrapper, and the KL in the loss.
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
guide = partial(
    AutoNormal,
    init_loc_fn=PretrainedInitializer.from_net(net),
    init_scale=settings["first sd"],
)
kl_weight, sds = 1 / (4 * len(train) * size**2), {}
for factor in args.kl_factors:
    method = "Bayesian" if factor == 1 else f"Bayesian, KL x {factor:g}"
    bnn = tyxe.PytorchBNN(net, prior, guide)
    bnn = train_phase(method, 3, bnn, bnn.hold_sample, factor * kl_weight)
    draws = render_draws(bnn)
    images[method], sds[method] = draws.mean(0), tools.uncertainty(draws)

views, where = views.to("cpu"), {"train": is_train, "held out": ~is_train}
scores, spread = tools.scores(images, sds, views, where)
table = tools.table(scores)
print(table)
content = {
    **environment(args.seed),
    "settings": settings,
    "errors": scores,
    "published error on held-out views": tools.PUBLISHED,
    "uncertainty": spread,
    "weights": sum(parameter.numel() for parameter in net.parameters()),
    "weight of the KL": kl_weight,
    "phases": records,
}
method, sd = next(iter(sds.items()))
columns = [i * len(views) // 39 for i in (2, 12, 19, 26, 30, 32, 34, 36, 38)]
rows = {"truth": views.pixels, "deterministic": images["deterministic"]}
rows[f"{method}, mean"] = images[method]
save(args.out, name, tools.panels(rows, sd, views, columns, is_train), content)
(args.out / f"{name}.md").write_text(f"{table}\n")
curves = {phase: record["curve"] for phase, record in records.items()}
figure = tools.reliability_figure(spread[method], curves)
figure.savefig(args.out / f"{name}_uncertainty.png", dpi=120)
tools.turntable(args.out / f"{name}.gif", views.pixels, images[method], sd, is_train)
