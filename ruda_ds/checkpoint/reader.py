"""Reading torch's zip files (``.pt``) by byte range: nothing but the pickle and what is asked for is ever in memory.

Plain reads, not a memory map: mapped pages count as resident memory, and a file of 100 GB would look like a leak.
"""

from __future__ import annotations

import os
import pickle
import struct
import threading
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint import pickles
from ruda_ds.checkpoint.pickles import StoredTensor
from ruda_ds.errors import CheckpointError

OPEN_FILES = 64
_LOCAL_HEADER = 30  # bytes of a zip local header before its name


def damaged(path: Path | str, expected: str, found: str) -> CheckpointError:
    """The error for a file that is not what it should be."""
    return CheckpointError(f"checkpoint {path}: found {found}, expected {expected}")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared with it."""
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


class Descriptors(threading.local):
    """File descriptors, the least recently used closed when there are too many: a job may have a thousand files.

    A descriptor outlives its file's name: one whose path has become another file since is opened anew. Each thread has
    its own, so that none closes what another reads.
    """

    def __init__(self, limit: int = OPEN_FILES) -> None:
        self._open: OrderedDict[Path, int] = OrderedDict()
        self._limit = limit

    def of(self, path: Path) -> int:
        """An open descriptor."""
        now = os.stat(path)
        if path in self._open and not os.path.samestat(os.fstat(self._open[path]), now):
            os.close(self._open.pop(path))
        if path not in self._open:
            if len(self._open) >= self._limit:
                os.close(self._open.popitem(last=False)[1])
            self._open[path] = os.open(path, os.O_RDONLY)
        self._open.move_to_end(path)
        return self._open[path]

    def read_into(self, path: Path, offset: int, target: torch.Tensor) -> None:
        """Fill a contiguous CPU tensor with the bytes from ``offset`` on.

        Raises:
            CheckpointError: the file ends before that.
        """
        view = bytes_of(target)
        done = 0
        while done < len(view):
            count = os.preadv(self.of(path), [view[done:]], offset + done)
            if count == 0:
                raise damaged(path, f"{offset + len(view)} bytes or more", f"the end at {offset + done}")
            done += count

    def close(self) -> None:
        """Close them all."""
        while self._open:
            os.close(self._open.popitem()[1])


FILES = Descriptors()


class PtFile:
    """A file that ``torch.save`` wrote; its tensors stay in it until they are read.

    Args:
        path: of the file.

    Raises:
        CheckpointError: not such a file, cut short, compressed, or a pickle that names what is not on the list.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            with zipfile.ZipFile(self.path) as archive:
                entries = archive.infolist()
                pickled = next(e for e in entries if e.filename.endswith("/data.pkl"))
                self._prefix = pickled.filename[: -len("data.pkl")]
                order = f"{self._prefix}byteorder"
                if order in archive.namelist() and archive.read(order) != b"little":
                    raise damaged(self.path, "little-endian tensors", "big-endian ones")
                data = archive.read(pickled)
        except (zipfile.BadZipFile, StopIteration, OSError, EOFError) as error:
            raise damaged(self.path, "a complete file of torch.save", f"{type(error).__name__}: {error}") from error
        self._entries = {e.filename: (e.header_offset, e.file_size, e.compress_type) for e in entries}
        self._begins: dict[str, int] = {}
        try:
            self.root: Any = pickles.load(data, self)
        except pickles.ForbiddenGlobalError as error:
            raise damaged(
                self.path, "only tensors, plain values and DeepSpeed's own classes", f"the global {error}"
            ) from error
        except (pickle.UnpicklingError, ValueError, TypeError, AttributeError, IndexError, KeyError, EOFError) as error:
            raise damaged(self.path, "a readable pickle", f"{type(error).__name__}: {error}") from error

    def _begin(self, key: str, needed: int) -> int:
        """Where a storage's bytes begin in the file."""
        name = f"{self._prefix}data/{key}"
        if name not in self._entries:
            raise damaged(self.path, f"a record {name}", "none")
        header, size, compression = self._entries[name]
        if compression != zipfile.ZIP_STORED or size < needed:
            raise damaged(self.path, f"{needed} uncompressed bytes or more in {name}", f"{size}")
        if key not in self._begins:
            local = os.pread(FILES.of(self.path), _LOCAL_HEADER, header)
            if len(local) < _LOCAL_HEADER or local[:4] != b"PK\x03\x04":
                raise damaged(self.path, f"a zip header of {name} at {header}", repr(local[:4]))
            self._begins[key] = header + _LOCAL_HEADER + sum(struct.unpack("<HH", local[26:30]))
        return self._begins[key]

    def read(self, tensor: StoredTensor, start: int = 0, count: int | None = None) -> torch.Tensor:
        """See StoredTensor.read. A tensor that is not contiguous is read whole for any part of it."""
        shape, stride = tensor.shape, tensor.stride
        whole = count is None
        if 0 in shape:
            return torch.empty(shape if whole else (0,), dtype=tensor.dtype)
        extent = sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1
        if not whole and not torch.empty(shape, device="meta").as_strided(shape, stride).is_contiguous():
            return self.read(tensor).reshape(-1)[start : start + (count or 0)]
        flat = torch.empty(extent if count is None else count, dtype=tensor.dtype)
        self._fill(tensor, flat, start, extent)
        return torch.as_strided(flat, shape, stride) if whole else flat

    def read_into(self, tensor: StoredTensor, target: torch.Tensor, start: int) -> None:
        """See StoredTensor.read_into."""
        if len(tensor.shape) == 1 and tensor.stride == (1,) and target.dtype == tensor.dtype:
            self._fill(tensor, target, start, tensor.numel)
        else:
            target.copy_(self.read(tensor, start, len(target)))

    def _fill(self, tensor: StoredTensor, flat: torch.Tensor, start: int, extent: int) -> None:
        """Read elements as they lie in the storage; the tensor has ``extent`` of them."""
        if start < 0 or start + len(flat) > extent:
            raise damaged(self.path, f"elements {start}..{start + len(flat)} in storage {tensor.key}", f"{extent}")
        begin = self._begin(tensor.key, (tensor.offset + extent) * tensor.dtype.itemsize)
        FILES.read_into(self.path, begin + (tensor.offset + start) * tensor.dtype.itemsize, flat)
