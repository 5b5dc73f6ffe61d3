"""experiments/ddp.py: several processes make the curves of one."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import ddp
import pytest
import runner
import torch

ROOT = Path(__file__).resolve().parents[2]


def test_ddp_makes_the_curves_of_one_process(smoke, monkeypatch, capsys):
    found = smoke(ddp.experiment)
    assert torch.get_default_dtype() == torch.float32
    options = ["--smoke-test", "--out", str(found.record.path.parent)]
    # What torchrun tells the processes that it starts; the first of them is this one.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = os.environ | told | {"RANK": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "experiments/run.py", "ddp", *options]
    how = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    for name, value in (told | {"RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    for module in (ddp, runner):
        monkeypatch.setattr(module, "WORLD", 2)
    with subprocess.Popen(command, text=True, **how) as other:
        try:
            ddp.experiment.main(options)
            printed, of_other = capsys.readouterr().out, other.communicate()[0]
        finally:
            other.kill()
    # Gloo of torch 2.8 prints whom a process has found.
    of_other = re.sub(r"^\[Gloo\] Rank \d+ is connected to .*\n", "", of_other, flags=re.MULTILINE)
    assert (other.returncode, of_other) == (0, "")
    record = runner.Record(found.record.path, ddp.experiment.by).read()
    one, two = record.cells["1 process", "0"], record.cells["2 processes, same draws", "0"]
    first, second = record.content["commands"]
    assert first.startswith("python experiments/run.py ddp --smoke-test")
    assert second.startswith("torchrun --nproc_per_node=2 experiments/run.py ddp --smoke-test")
    for name, curve in one["curves"].items():
        assert len(curve) == record.content["settings"]["epochs"]
        assert curve[-1] < curve[0]
        # float64, but for the order of sums
        assert two["curves"][name] == pytest.approx(curve, rel=1e-12)
        assert f"| 2 processes, same draws | {name} | {curve[0]:.1f} |" in printed
    differences = [line.split(" | ")[-1].rstrip(" |") for line in printed.splitlines()[-2:]]
    assert all(float(difference) < 1e-12 for difference in differences)
