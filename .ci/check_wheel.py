"""Install the wheel in dist/ into an environment of its own, and run the README's code there.

The package comes from the wheel alone. Its dependencies come from the environment that runs this
file, whose packages the new one is shown, so that nothing large is downloaded: whether an index
can resolve them is not seen. With --resolve pip installs them too, as it does for users, which
takes several GB.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXTRA = "vision"  # what the README's code needs
PROBE = """
import importlib, importlib.metadata, pathlib, pkgutil, sys, tyxe
place = pathlib.Path(tyxe.__file__).resolve()
assert place.is_relative_to(pathlib.Path(sys.prefix).resolve()), f"tyxe is imported from {place}"
assert tyxe.__version__ == importlib.metadata.version("tyxe-bnn"), tyxe.__version__
# integrations need other frameworks, and are imported by name
names = [m.name for m in pkgutil.walk_packages(tyxe.__path__, "tyxe.")]
names = [n for n in names if not n.startswith("tyxe.integrations.")]
for name in names:
    importlib.import_module(name)
print(f"{len(names)} modules of tyxe {tyxe.__version__}")
"""


def only(pattern: str) -> Path:
    """Return the one file in dist/ of this pattern."""
    found = sorted((ROOT / "dist").glob(pattern))
    if len(found) != 1:
        sys.exit(f"dist/ has {len(found)} files {pattern}; expected one: make dist")
    return found[0]


def check_files(wheel: Path) -> None:
    """Compare the package in the wheel with that of the checkout."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.startswith("tyxe_bnn-")}
        others = [name for name in archive.namelist() if name.startswith("tyxe_bnn-")]
    sources = [*(ROOT / "tyxe").rglob("*.py"), ROOT / "tyxe" / "py.typed"]
    wanted = {path.relative_to(ROOT).as_posix() for path in sources}
    if held != wanted:
        sys.exit(f"{wheel.name}: missing {sorted(wanted - held)}, unknown {sorted(held - wanted)}")
    if not any(name.endswith("/LICENSE") for name in others):
        sys.exit(f"{wheel.name} has no LICENSE")


def install(wheel: Path, place: Path, resolve: bool) -> Path:
    """Return the interpreter of a new environment that has the wheel."""
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    if resolve:
        subprocess.run([*pip, f"{wheel}[{EXTRA}]"], check=True)
        return python
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True)
    # A path in a .pth file is searched last, and .pth files in it are not read: the editable
    # installation that the other environment may hold is not seen.
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resolve", action="store_true", help="install dependencies by pip")
    wheel, resolve = only("*.whl"), parser.parse_args().resolve
    check_files(wheel)
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    if not blocks:
        sys.exit("README.md has no code")
    hidden = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    with tempfile.TemporaryDirectory() as folder:
        python = install(wheel, Path(folder, "env"), resolve)
        for number, code in enumerate([PROBE, *blocks]):
            done = subprocess.run([python, "-W", "ignore", "-c", code], cwd=folder, env=environment)
            if done.returncode:
                sys.exit(f"{'the probe' if not number else f'block {number} of README.md'} failed")
    how = "its own dependencies" if resolve else f"the dependencies of {sys.prefix}"
    print(f"{wheel.name}: all {len(blocks)} blocks of README.md run, with {how}")


if __name__ == "__main__":
    main()
