"""A Bayesian radiance field of a cow: images from all sides, and where they may be wrong.

A net maps points and directions to opacity and colour; a renderer sums these up along rays, and the
loss compares images. `PytorchBNN` replaces the net; a prior, a guide and the KL in the loss make it
Bayesian. A quarter is held out. For your own object docs/nerf.md says which arrays to have.

Needs the extra `examples`: pip install -e ".[examples]"; and cow/cow_views_equator.npz in the
folder TYXE_DATA. About 80 seconds. Prints errors, and draws results/radiance_field.png.
"""

import argparse
import os
from functools import partial
from pathlib import Path

import numpy as np
import pyro.distributions as dist
import torch
import torchvision
from torch import nn

import tyxe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--smoke-test", action="store_true", help="few steps, in seconds: no result")
steps = 2 if parser.parse_args().smoke_test else 2_000
torch.manual_seed(0)

local = Path(os.environ.get("TYXE_DATA", "data"), "cow", "cow_views_equator.npz")
if not local.exists():
    raise SystemExit(f"no {local}: TYXE_DATA names its folder, docs/nerf.md the arrays of your own")
arrays = np.load(local)
images = np.concatenate([arrays["images"], arrays["silhouettes"][..., None]], -1)[:39] / 255
pixels = nn.functional.avg_pool2d(torch.tensor(images).float().movedim(-1, 1), 2)  # 32 x 32
size, pixels = pixels.shape[-1], pixels.flatten(2).mT
# A ray through each pixel: X_cam = X_world @ R + T, with x to the left, y up and z ahead.
line = np.tan(np.radians(arrays["fov_deg"]) / 2).item() * (1 - (2 * torch.arange(size) + 1) / size)
ahead = nn.functional.pad(torch.cartesian_prod(line, line).flip(-1), (0, 1), value=1.0)
back = torch.from_numpy(arrays["R"][:39]).mT
directions = ahead @ back
origins = (-torch.from_numpy(arrays["T"][:39, None]) @ back).expand_as(directions)
depths = torch.linspace(1.65, 3.75, 28)[:, None]  # the cow is between them
train = [part[:30].flatten(0, 1) for part in (origins, directions, pixels)]


class Field(nn.Module):
    def __init__(self, width=64, harmonics=10):
        super().__init__()
        self.harmonics, inputs, bend = harmonics, 6 * harmonics, nn.Softplus(beta=10)
        self.trunk = nn.Sequential(nn.Linear(inputs, width), bend, nn.Linear(width, width), bend)
        self.density = nn.Sequential(nn.Linear(width, 1), bend)
        self.of_point, self.of_direction = nn.Linear(width, width), nn.Linear(inputs, width)
        self.colour = nn.Sequential(bend, nn.Linear(width, 3), nn.Sigmoid())
        nn.init.constant_(self.density[0].bias, -1.5)  # transparent at first, or nothing is seen

    def embed(self, x):
        angles = (x[..., None] * 0.1 * 2.0 ** torch.arange(self.harmonics)).flatten(-2)
        return torch.cat([angles.sin(), angles.cos()], -1)

    def forward(self, origins, directions):
        features = self.trunk(self.embed(origins[:, None] + depths * directions[:, None]))
        seen_from = self.of_direction(self.embed(nn.functional.normalize(directions)))
        colour = self.colour(self.of_point(features) + seen_from[:, None])
        opacity = 1 - (-self.density(features)).exp()
        left = (1 - opacity).cumprod(1)  # of the light, behind each point
        arriving = torch.cat([torch.ones_like(left[:, :1]), left[:, :-1]], 1)
        return torch.cat([(opacity * arriving * colour).sum(1), 1 - left[:, -1]], -1)


def fit(field, kl=lambda: 0.0):
    optimizer = torch.optim.Adam(field.parameters(), lr=3e-3)
    for step, some in enumerate(torch.randint(len(train[0]), (steps, 256))):
        origins, directions, target = (part[some] for part in train)
        loss = (field(origins, directions) - target).square().mean() / (2 * 0.2**2)  # nats a value
        loss = loss + min(1, 2 * step / steps) * kl() / train[2].numel()  # comes in slowly
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


net = Field()
fit(net)
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2)
bnn = tyxe.PytorchBNN(net, tyxe.priors.IIDPrior(dist.Normal(0, 1)), guide)
fit(bnn, kl=lambda: bnn.cached_kl_loss)

views, draws = [2, 7, 12, 19, 26, 30, 32, 34, 36, 38], []
for _ in range(8):
    with torch.no_grad(), bnn.hold_sample():  # all images by the same weights
        draws.append(torch.stack([bnn(origins[view], directions[view]) for view in views]))
mean, sd = torch.stack(draws).mean(0)[..., :3], torch.stack(draws)[..., :3].var(0).sum(-1).sqrt()
error = (mean - pixels[views, :, :3]).square().sum(-1).sqrt()
for name, part in {"training": slice(5), "held-out": slice(5, 10)}.items():
    cow = pixels[views[part], :, 3] > 0.5
    print(f"{name} views: error {error[part][cow].mean():.3f}, sd {sd[part][cow].mean():.3f}")
rows = torch.stack([pixels[views, :, :3], mean, (sd / sd.max())[..., None].expand_as(mean)])
picture = nn.functional.interpolate(rows.mT.reshape(-1, 3, size, size), scale_factor=4)
Path("results").mkdir(exist_ok=True)
torchvision.utils.save_image(picture, "results/radiance_field.png", nrow=len(views))
print("wrote results/radiance_field.png: truth, mean, sd; in the last five views held out")
