"""Files that are whole or not there, and values as bytes for state dicts."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tyxe import check

# A file: the content as of `torch.save`, and a seal, which `torch.load` passes over: this, the
# number of the content's bytes, their SHA-256. In files of earlier versions it comes first.
_MAGIC = b"tyxe file 1\n"
_SEAL = len(_MAGIC) + 8 + 32


def write(path: str | os.PathLike[str], content: Any) -> None:
    """Write nested containers of tensors and plain values to a file.

    A process that is killed, or a disk that is full, leaves the file that was there before. Its
    mode is kept, and a link's target is written.
    """
    earlier, memory = _status(path), io.BytesIO()
    torch.save(tree_map(_whole, content), memory)
    payload = memory.getbuffer()
    seal = _MAGIC + len(payload).to_bytes(8, "little") + hashlib.sha256(payload).digest()
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A name of its own, since two processes may save to one place at once.
    partial = path.with_name(f".{path.name[:16]}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            if earlier is not None:
                _become(partial, earlier)
            file.write(payload)
            file.write(seal)
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
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is a folder, a device, a pipe or the like; name a file")
    return found


def _become(path: Path, earlier: os.stat_result) -> None:
    """Give a file the mode of another, and its owner as far as this process may."""
    path.chmod(stat.S_IMODE(earlier.st_mode))
    if os.name != "nt":
        with suppress(PermissionError):
            os.chown(path, earlier.st_uid, earlier.st_gid)


def _whole(value: Any) -> Any:
    """Return a tensor with memory for its numbers and no others; other values as they are."""
    return value.detach().clone() if _lack(value) else value  # which keeps the order of dimensions


def _lack(value: Any) -> int:
    """Return the bytes that a tensor's memory lacks for its numbers: less than 0 for a view."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return 0
    return value.nbytes - value.untyped_storage().nbytes()


def read(path: str | os.PathLike[str]) -> Any:
    """Read what `write` has written, onto the CPU, without running any code that it may contain."""
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
    """Return the content of a file, of which no more is read than its ends if it is another."""
    with path.open("rb") as file:
        size = max(0, os.fstat(file.fileno()).st_size - _SEAL)
        start, _, end = file.read(_SEAL), file.seek(size), file.read(_SEAL)
        is_first = start.startswith(b"tyxe file ")
        seal = start if is_first else end
        newer = re.match(rb"tyxe file (\d+)\n", seal)
        if newer and int(newer[1]) > 1:
            raise ValueError(
                f"{path} was written by a newer version (format {int(newer[1])}), or is damaged: "
                "update tyxe"
            )
        if not seal.startswith(_MAGIC):
            raise ValueError(
                f"{path} is no file of tyxe, or damaged: a BNN's state that was saved otherwise "
                "goes to load_state_dict"
            )
        file.seek(_SEAL if is_first else 0)
        has_all = size == int.from_bytes(seal[len(_MAGIC) : -32], "little")
        payload = file.read(size) if has_all else b""
    if not has_all or hashlib.sha256(payload).digest() != seal[-32:]:
        raise ValueError(f"{path} is damaged: it is not what was written; take an earlier file")
    return payload


def _unpickled(data: bytes) -> Any:
    """Return what `torch.save` has made these bytes of; others are an error of some kind.

    Records that unpack to more than there is, and tensors of more numbers than are stored, are
    found before they take memory.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as records:
        unpacked = sum(record.file_size for record in records.infolist())
    check.count("the number of bytes when unpacked", unpacked, 0, most=len(data))
    content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    for value in tree_leaves(content):
        if _lack(value) > 0 or (isinstance(value, Tensor) and value.is_meta):
            raise ValueError("a tensor has more numbers than are stored")
    return content


def as_bytes(value: Any) -> Tensor:
    """Return nested containers of plain values and tensors as one tensor of bytes.

    Example:
        >>> of_bytes(as_bytes({"kind": "Normal", "loc": torch.ones(2)}))
        {'kind': 'Normal', 'loc': tensor([1., 1.])}
    """
    if isinstance(value, str | int):
        data = json.dumps(value).encode()
    else:
        on_host = tree_map(lambda v: v.detach().cpu() if isinstance(v, Tensor) else v, value)
        torch.save(tree_map(_whole, on_host), memory := io.BytesIO())
        data = memory.getvalue()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def of_bytes(tensor: Any) -> Any:
    """Return what `as_bytes` was given; other tensors are a RuntimeError."""
    try:
        data = tensor.cpu().numpy().tobytes()
        if data.startswith(b"PK"):
            return _unpickled(data)
        return json.loads(data)
    except Exception:  # the kind depends on what is there
        raise RuntimeError("an entry of the state dict is damaged") from None


# --------------------------------------------------------------------------- dataclasses

# Classes with a form of their own in states: how it is made, and read.
FORMS: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    torch.Size: (list, torch.Size)
}


def as_state(value: Any) -> Any:
    """Return dataclasses as dictionaries and tuples as lists, at any depth, and others unchanged.

    `of_state` reads them. A class in `FORMS` has its own form, as the operators of `tyxe.linalg`.
    """
    for kind, (form, _) in FORMS.items():
        if isinstance(value, kind):
            return form(value)
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: as_state(part) for name, part in value.items()}
    return [as_state(part) for part in value] if isinstance(value, tuple | list) else value


def of_state(kind: Any, state: Any) -> Any:
    """Return the value of a declared type that has become a state by `as_state`.

    Of a union of dataclasses it is the first one that has all the state's fields.
    """
    arguments = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return None if state is None else of_state(_fitting(arguments, state), state)
    if get_origin(kind) is tuple:
        return tuple(of_state(arguments[0], part) for part in state)
    if not isinstance(kind, type):
        return state
    for known, (_, read_form) in FORMS.items():
        if issubclass(kind, known):
            return read_form(state)
    if dataclasses.is_dataclass(kind):
        types = get_type_hints(kind)
        parts = {name: of_state(types[name], part) for name, part in state.items()}
        return kind(**parts)  # type: ignore[operator]
    if issubclass(kind, tuple):  # a named one
        return kind(*map(of_state, get_type_hints(kind).values(), state))
    return state


def _fitting(kinds: tuple[Any, ...], state: Any) -> Any:
    for kind in kinds:
        if not dataclasses.is_dataclass(kind) or kind.__dataclass_fields__.keys() >= set(state):
            return kind
    return kinds[0]  # whose fields the error names
