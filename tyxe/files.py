"""Files that are whole or not there, and values packed into tensors for state dicts."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

# A file: this, the number of the content's bytes, their SHA-256, the content as of `torch.save`.
_MAGIC = b"tyxe file 1\n"
_HEADER = len(_MAGIC) + 8 + 32


def write(path: str | os.PathLike[str], content: Any) -> None:
    """Write nested containers of tensors and plain values to a file.

    It is written beside its place, brought to the disk, and then put there: a process that is
    killed, or a disk that is full, leaves the file that was there before.

    Raises:
        OSError: the file cannot be written; a file that was there is left.
    """
    path, memory = Path(path), io.BytesIO()
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    torch.save(content, memory)
    payload = memory.getbuffer()
    header = _MAGIC + len(payload).to_bytes(8, "little") + hashlib.sha256(payload).digest()
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, since two processes may save to one place at once.
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(header)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if os.name != "nt":  # there, folders are not opened
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: str | os.PathLike[str]) -> Any:
    """Read what `write` has written, onto the CPU, without running any code that it may contain.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: the file is damaged, or not from `write`.
    """
    data = Path(path).read_bytes()
    if not data.startswith(_MAGIC):
        raise ValueError(
            f"{path} is no file of tyxe, or damaged: a BNN's state that was saved otherwise goes "
            "to load_state_dict"
        )
    size, digest = data[len(_MAGIC) : _HEADER - 32], data[_HEADER - 32 : _HEADER]
    payload = memoryview(data)[_HEADER:]
    expected = int.from_bytes(size, "little")
    if len(payload) != expected:
        raise ValueError(
            f"{path} is damaged: it has {len(payload)} bytes of content, and {expected} were "
            "written; take an earlier file"
        )
    if hashlib.sha256(payload).digest() != digest:
        raise ValueError(f"{path} is damaged: its checksum is wrong; take an earlier file")
    return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)


def packed(value: Any) -> Tensor:
    """Return nested containers of plain values and tensors as one tensor of bytes.

    Example:
        >>> unpacked(packed({"kind": "Normal", "loc": torch.ones(2)}))
        {'kind': 'Normal', 'loc': tensor([1., 1.])}
    """
    if isinstance(value, str | int):
        data = json.dumps(value).encode()
    else:
        on_host = tree_map(lambda v: v.detach().cpu() if isinstance(v, Tensor) else v, value)
        torch.save(on_host, memory := io.BytesIO())
        data = memory.getvalue()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def unpacked(tensor: Any) -> Any:
    """Return what was packed.

    Raises:
        RuntimeError: nothing that `packed` returned.
    """
    try:
        data = tensor.cpu().numpy().tobytes()
        if data.startswith(b"PK"):
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return json.loads(data)
    except Exception as error:  # the kind depends on what is there
        raise RuntimeError(f"an entry of the state dict is damaged: {error}") from None
