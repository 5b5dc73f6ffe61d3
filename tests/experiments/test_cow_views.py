"""experiments/cow_views.py: what PyTorch3D's tutorial returns, in the layout of the archives.

PyTorch3D is not on the package index, so the tutorial's function is a stand-in of the same name.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import cow_views
import numpy as np
import pytest
import rendering

from tests.oracles.cameras import FOV, cameras

STAND_IN = """
import types, torch
from tests.oracles.cameras import FOV, cameras

def generate_cow_renders(num_views, azimuth_range):
    azimuths = torch.linspace(-azimuth_range, azimuth_range, num_views) + 180.0
    R, T = cameras(azimuths)
    silhouettes = torch.zeros(num_views, 16, 16)
    silhouettes[:, 4:12, 6:10] = 1.0
    images = torch.full((num_views, 16, 16, 3), 0.6)
    found = types.SimpleNamespace(R=R.float(), T=T.float(), fov=torch.tensor([FOV] * num_views))
    found.degrees = True
    return found, images, silhouettes
"""


@pytest.fixture
def tutorials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder that has the tutorial's function."""
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "generate_cow_renders.py").write_text(STAND_IN)
    monkeypatch.delitem(sys.modules, "generate_cow_renders", raising=False)
    yield tmp_path
    sys.modules.pop("generate_cow_renders", None)


def test_the_archive_is_one_that_nerf_reads(tutorials: Path, capsys):
    path = tutorials / "out" / "views.npz"
    cow_views.main([str(tutorials), str(path)])
    assert capsys.readouterr().out == f"wrote {path}: 40 views of 16 pixels a side\n"
    views = rendering.load(str(path))
    azimuths = np.linspace(-180, 180, 40) + 180
    rotation, translation = cameras(azimuths)
    np.testing.assert_allclose(views.rotation, rotation, atol=1e-6)
    np.testing.assert_allclose(views.translation, translation, atol=1e-6)
    # the last stands where the first does
    distance = (views.azimuth.numpy() - azimuths + 180) % 360 - 180
    np.testing.assert_allclose(distance, 0, atol=1e-3)
    assert views.fov == pytest.approx(FOV)
    assert views.pixels.shape == (40, 4, 16, 16)
    inside = views.pixels[:, :, 4:12, 6:10]
    np.testing.assert_allclose(inside[:, :3], 0.6, atol=0.5 / 255)
    assert bool((inside[:, 3] == 1).all())
    # black beside the object, though the tutorial's images are not
    assert int((views.pixels > 0).sum()) == int((inside > 0).sum()) == inside.numel()


def test_what_is_missing_is_named(tutorials: Path):
    given = [str(tutorials), str(tutorials / "views.npz")]
    script = tutorials / "utils" / "generate_cow_renders.py"
    script.write_text("raise ModuleNotFoundError('No module named iopath', name='iopath.io')")
    with pytest.raises(SystemExit, match=r"rendering the cow needs iopath \(.*pip install iopath"):
        cow_views.main(given)
    script.unlink()
    with pytest.raises(SystemExit, match=r"has no utils/generate_cow_renders\.py"):
        cow_views.main(given)
    assert not (tutorials / "views.npz").exists()
