# %% [markdown]
# # A radiance field and its uncertainty
#
# A net maps points and directions to opacity and colour, a renderer sums these up along rays, and
# the loss compares images. `PytorchBNN` replaces the net, and the rest of the code does not change.
# The images show a cow, in 32 x 32 pixels, from 39 places around it. The last nine, a quarter of
# the circle, are held out. There the field has to guess, and its uncertainty should show that.

# %%
import os
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pyro.distributions as dist
import torch
from torch import nn

import tyxe

small = "TYXE_SMOKE_TEST" in os.environ  # few steps: the tests look whether this runs
torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams["figure.dpi"] = 70
steps = 2 if small else 1_200

local = Path(os.environ.get("TYXE_DATA", "data"), "cow", "cow_views_equator.npz")
if not local.exists():
    raise SystemExit(f"no {local}: TYXE_DATA names its folder, docs/nerf.md the arrays of your own")
arrays = np.load(local)
images = np.concatenate([arrays["images"], arrays["silhouettes"][..., None]], -1)[:39] / 255
pixels = nn.functional.avg_pool2d(torch.tensor(images).float().movedim(-1, 1), 2)
size, pixels = pixels.shape[-1], pixels.flatten(2).mT
# A ray through each pixel: X_cam = X_world @ R + T, with x to the left, y up and z ahead.
line = np.tan(np.radians(arrays["fov_deg"]) / 2).item() * (1 - (2 * torch.arange(size) + 1) / size)
ahead = nn.functional.pad(torch.cartesian_prod(line, line).flip(-1), (0, 1), value=1.0)
back = torch.from_numpy(arrays["R"][:39]).mT
directions = ahead @ back
origins = (-torch.from_numpy(arrays["T"][:39, None]) @ back).expand_as(directions)
depths = torch.linspace(1.65, 3.75, 24)[:, None]  # the cow is between them
train = [part[:30].flatten(0, 1) for part in (origins, directions, pixels)]

# %% [markdown]
# ## Net and renderer


# %%
class Field(nn.Module):
    def __init__(self, width=64, harmonics=10):
        super().__init__()
        self.harmonics, inputs, act = harmonics, 6 * harmonics, nn.Softplus(beta=10)
        self.trunk = nn.Sequential(nn.Linear(inputs, width), act, nn.Linear(width, width), act)
        self.density = nn.Sequential(nn.Linear(width, 1), act)
        self.colour = nn.Sequential(nn.Linear(width, width), act, nn.Linear(width, 3), nn.Sigmoid())
        nn.init.constant_(self.density[0].bias, -1.5)  # transparent at first, or nothing is seen

    def forward(self, origins, directions):
        points = origins[:, None] + depths * directions[:, None]
        angles = (points[..., None] * 0.1 * 2.0 ** torch.arange(self.harmonics)).flatten(-2)
        features = self.trunk(torch.cat([angles.sin(), angles.cos()], -1))
        opacity = 1 - (-self.density(features)).exp()
        left = (1 - opacity).cumprod(1)  # of the light, behind each point
        arriving = torch.cat([torch.ones_like(left[:, :1]), left[:, :-1]], 1)
        colour = (opacity * arriving * self.colour(features)).sum(1)
        return torch.cat([colour, 1 - left[:, -1]], -1)


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

# %% [markdown]
# ## What makes it Bayesian
#
# A prior, a guide, the wrapper, and the KL in the loss.

# %%
prior = tyxe.priors.IIDPrior(dist.Normal(0, 1))
guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2)
bnn = tyxe.PytorchBNN(net, prior, guide)
fit(bnn, kl=lambda: bnn.cached_kl_loss)

# %% [markdown]
# ## Truth, mean, and where it may be wrong
#
# Each of eight draws of the weights renders all views (`hold_sample`). The third row is the
# standard deviation of the colours, and the fourth the error of their mean, on the same scale. The
# last five views show the side that was held out. Both are larger there, but the standard deviation
# less so than the error.

# %%
views, draws = [2, 7, 12, 19, 26, 30, 32, 34, 36, 38], []
for _ in range(2 if small else 8):
    with torch.no_grad(), bnn.hold_sample():
        draws.append(torch.stack([bnn(origins[view], directions[view]) for view in views]))
mean, sd = torch.stack(draws).mean(0)[..., :3], torch.stack(draws)[..., :3].var(0).sum(-1).sqrt()
error = (mean - pixels[views, :, :3]).square().sum(-1).sqrt()
for name, part in {"training": slice(5), "held-out": slice(5, 10)}.items():
    cow = pixels[views[part], :, 3] > 0.5
    print(f"{name} views: error {error[part][cow].mean():.3f}, sd {sd[part][cow].mean():.3f}")

rows = {"truth": pixels[views, :, :3], "mean": mean, "sd": sd, "error": error}
figure, axes = plt.subplots(4, 10, figsize=(11, 4.6), layout="constrained")
for row, (name, values) in zip(axes, rows.items(), strict=True):
    for ax, image in zip(row, values, strict=True):
        ax.imshow(image.reshape(size, size, -1).numpy(), vmin=0, vmax=0.6, cmap="magma")
        ax.set(xticks=[], yticks=[])
    row[0].set_ylabel(name)
for column, ax in enumerate(axes[0]):
    ax.set_title("training" if column < 5 else "held out", fontsize=9)

# %% [markdown]
# ## Change this line
#
# Each of these replaces the statement above that assigns to the same name:
#
# ```python
# # the prior: standard deviations by the layers' fan-in
# prior = tyxe.priors.LayerwiseNormalPrior("radford")
# # the part that is random: opacity alone
# prior = tyxe.priors.IIDPrior(dist.Normal(0, 1), expose=["density.*"])
# # the guide: a cap on standard deviations
# guide = partial(tyxe.guides.AutoNormal, init_scale=1e-2, max_guide_scale=0.05)
# ```
