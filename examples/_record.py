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


def save(folder, name, figure, content):
    """Write `name`.png and `name`.json into a folder, and say so."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=120)
    (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {folder / name}.png and {folder / name}.json")
