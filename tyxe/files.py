"""Files that are whole or not there, and values packed into tensors for state dicts."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import stat
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# A file: this, the number of the content's bytes, their SHA-256, the content as of `torch.save`.
_MAGIC = b"tyxe file 1\n"
_HEADER = len(_MAGIC) + 8 + 32


def write(path: str | os.PathLike[str], content: Any) -> None:
    """Write nested containers of tensors and plain values to a file.

    It is written beside its place, brought to the disk, and then put there: a process that is
    killed, or a disk that is full, leaves the file that was there before. An earlier file's mode is
    kept, and a link's target is written.

    Raises:
        OSError: the file cannot be written, or is a folder, a device or the like; what was there is
            left.
    """
    earlier, memory = _status(path), io.BytesIO()
    torch.save(tree_map(_whole, content), memory)
    payload = memory.getbuffer()
    header = _MAGIC + len(payload).to_bytes(8, "little") + hashlib.sha256(payload).digest()
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, since two processes may save to one place at once.
    partial = path.with_name(f".{path.name[:16]}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            if earlier is not None:
                _become(partial, earlier)
            file.write(header)
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if os.name != "nt":  # there, folders are not opened
        with suppress(PermissionError):  # of a folder that may be written to and not read
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _status(path: str | os.PathLike[str]) -> os.stat_result | None:
    """Return what is known of a file, or None where there is none; others are an OSError."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(f"{path} is a folder; name a file in it")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is a device, a pipe or the like; name a file")
    return found


def _become(path: Path, earlier: os.stat_result) -> None:
    """Give a file the mode of another, and its owner as far as this process may."""
    path.chmod(stat.S_IMODE(earlier.st_mode))
    if os.name != "nt":
        with suppress(PermissionError):
            os.chown(path, earlier.st_uid, earlier.st_gid)


def _whole(value: Any) -> Any:
    """Return a tensor with a place in memory for each number, and others as they are."""
    return value.detach().contiguous() if _is_expanded(value) else value


def _is_expanded(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return value.nbytes > value.untyped_storage().nbytes()


def read(path: str | os.PathLike[str]) -> Any:
    """Read what `write` has written, onto the CPU, without running any code that it may contain.

    Raises:
        FileNotFoundError: there is no file.
        OSError: it is a folder, a device or the like.
        ValueError: the file is damaged, not from `write`, or from a newer version's.
    """
    _status(path)
    payload = _payload(Path(path))
    try:
        return _unpickled(payload)
    except Exception as error:  # the kind depends on what is there
        raise ValueError(
            f"{path} has other things in it than what tyxe writes, tensors and plain values, or "
            f"does not fit into memory ({type(error).__name__}); no code of it was run"
        ) from None


def _payload(path: Path) -> bytes:
    """Return the content of a file, of which no more is read than its start if it is another."""
    with path.open("rb") as file:
        header = file.read(_HEADER)
        newer = re.match(rb"tyxe file (\d+)\n", header)
        if newer and int(newer[1]) > 1:
            raise ValueError(
                f"{path} was written by a newer version (format {int(newer[1])}), or is damaged: "
                "update tyxe"
            )
        if not header.startswith(_MAGIC):
            raise ValueError(
                f"{path} is no file of tyxe, or damaged: a BNN's state that was saved otherwise "
                "goes to load_state_dict"
            )
        expected = int.from_bytes(header[len(_MAGIC) : _HEADER - 32], "little")
        size = max(0, os.fstat(file.fileno()).st_size - _HEADER)
        if size != expected:
            raise ValueError(
                f"{path} is damaged: it has {size} bytes of content, and {expected} were written; "
                "take an earlier file"
            )
        payload = file.read()
    if hashlib.sha256(payload).digest() != header[_HEADER - 32 :]:
        raise ValueError(f"{path} is damaged: its checksum is wrong; take an earlier file")
    return payload


def _unpickled(data: bytes) -> Any:
    """Return what `torch.save` has made these bytes of; others are an error of some kind.

    Records that unpack to more than there is, and tensors of more numbers than are stored, are
    found before they take memory.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as records:
        unpacked = sum(record.file_size for record in records.infolist())
    if unpacked > len(data):
        raise ValueError(f"{len(data)} bytes unpack to {unpacked}")
    content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for value in tree_leaves(content):
        if _is_expanded(value) or (isinstance(value, Tensor) and value.is_meta):
            raise ValueError("a tensor has more numbers than are stored")
    return content


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
        torch.save(tree_map(_whole, on_host), memory := io.BytesIO())
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
            return _unpickled(data)
        return json.loads(data)
    except Exception:  # the kind depends on what is there
        raise RuntimeError("an entry of the state dict is damaged") from None
