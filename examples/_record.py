"""What a result needs to be repeated: command, seed, versions and machine."""

import json
import os
import platform
import shlex
import sys
from pathlib import Path

import pyro
import torch

import tyxe


def environment(seed, earlier=None):
    """Return a dictionary for the JSON file that lies next to a figure.

    Args:
        seed: of the run, or None where there are several.
        earlier: commands whose results stay in the file; `commands` then has them and this one.
    """
    script = Path(sys.argv[0])
    command = shlex.join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]])
    about = {
        "command": command,
        "seed": seed,
        "versions": {
            "python": platform.python_version(),
            "tyxe": tyxe.__version__,
            "torch": torch.__version__,
            "pyro": pyro.__version__,
        },
        "machine": {
            "system": platform.system(),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
    }
    return (
        about if earlier is None else about | {"commands": list(dict.fromkeys([*earlier, command]))}
    )


def recorded(path, settings, seed=None):
    """Return what the JSON file of earlier runs holds, {} where there is none.

    Args:
        path: of the file.
        settings: of the run to come; the file has those of its own under "settings".
        seed: of the run to come, if all that the file holds is of one seed.

    Raises:
        SystemExit: if they differ. The file would be written over with a part of what it holds.
    """
    content = json.loads(path.read_text()) if path.exists() else {}
    if not content:
        return {}
    before = content["settings"] | {"seed": content["seed"]}
    now = json.loads(json.dumps(settings)) | {"seed": seed}
    if before != now:
        names = sorted(name for name in before | now if before.get(name) != now.get(name))
        raise SystemExit(
            f"{path} has results of other settings ({', '.join(names)}): give this run an --out "
            "of its own, or delete the file"
        )
    return content


def save(folder, name, figure, content):
    """Write `name`.png and `name`.json into a folder, and say so."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=120)
    (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {folder / name}.png and {folder / name}.json")
