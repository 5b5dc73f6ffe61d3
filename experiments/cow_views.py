"""Write the views of PyTorch3D's tutorial, 40 of 128x128 pixels, as an archive for nerf.py.

    python experiments/cow_views.py pytorch3d/docs/tutorials data/cow_views_128.npz
    python experiments/run.py nerf --published --data data/cow_views_128.npz --over none

The first argument is a folder of a checkout of PyTorch3D, which has to be installed with its
compiled functions: utils/generate_cow_renders.py in that folder renders the cow, and downloads its
mesh. These are the images that [T 5.3.2] is of, with the cameras of cow_views_equator.npz.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from rendering import RECIPE


def archive(cameras, images, silhouettes):
    """Return the arrays that docs/nerf.md lists, of cameras in PyTorch3D's classes and images."""
    covered = silhouettes.clamp(0, 1)
    colour = images[..., :3].clamp(0, 1) * covered[..., None]  # black beside the object

    def in_bytes(x):
        return (255 * x).round().byte().cpu().numpy()

    fov = torch.as_tensor(cameras.fov).unique()
    if len(fov) != 1 or not bool(torch.as_tensor(cameras.degrees).all()):
        raise ValueError(f"cameras have angles {fov.tolist()}; expected one, in degrees")
    # From the camera's place, -T R^T: azimuth 0 is on +z, 90 on +x.
    x, _, z = torch.einsum("vi,vji->vj", -cameras.T, cameras.R).unbind(-1)
    return {
        "images": in_bytes(colour),
        "silhouettes": in_bytes(covered),
        "R": cameras.R.float().cpu().numpy(),
        "T": cameras.T.float().cpu().numpy(),
        "azimuth_deg": torch.atan2(x, z).rad2deg().remainder(360).float().cpu().numpy(),
        "fov_deg": np.float32(fov.item()),
    }


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tutorials", type=Path, help="docs/tutorials of a checkout of PyTorch3D")
    parser.add_argument("out", type=Path, help="the archive to write")
    given = parser.parse_args(arguments)
    if not (given.tutorials / "utils" / "generate_cow_renders.py").exists():
        sys.exit(f"{given.tutorials} has no utils/generate_cow_renders.py")
    sys.path.insert(0, str(given.tutorials / "utils"))
    try:
        from generate_cow_renders import generate_cow_renders
    except ImportError as error:
        missing = (error.name or "pytorch3d").partition(".")[0]
        how = RECIPE if missing == "pytorch3d" else f"pip install {missing}"
        sys.exit(f"rendering the cow needs {missing} ({error}): {how}")
    finally:
        sys.path.pop(0)
    found = archive(*generate_cow_renders(num_views=40, azimuth_range=180))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(given.out, **found)
    print(f"wrote {given.out}: {len(found['R'])} views of {found['images'].shape[1]} pixels a side")


if __name__ == "__main__":
    main()
