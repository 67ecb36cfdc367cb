"""Writing files that ``torch.load`` reads, tensor by tensor, hashed on the way."""

from __future__ import annotations

import hashlib
import io
import os
import queue
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ruda_ds.checkpoint.manifest import FileEntry
from ruda_ds.checkpoint.pickles import LazyTensor, dump
from ruda_ds.checkpoint.reader import bytes_of

ALIGNMENT = 64  # bytes, as torch.save aligns storages
_LOCAL_HEADER, _ZIP64_EXTRA, _PAD_HEADER = 30, 20, 4


class _Consumer(threading.Thread):
    """A thread that takes one piece of data after another."""

    def __init__(self, take: Callable[[Any], object]) -> None:
        super().__init__(daemon=True)
        self._take = take
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=4)
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Until the end, also after an error: nobody is to wait for a full queue."""
        while (data := self._queue.get()) is not None:
            if self._error is None:
                try:
                    self._take(data)
                except BaseException as error:
                    self._error = error

    def check(self) -> None:
        """Raise what an earlier piece raised."""
        if self._error is not None:
            raise self._error

    def put(self, data: Any) -> None:
        """Hand over; see check."""
        self.check()
        self._queue.put(data)

    def end(self) -> None:
        """Wait until all is taken."""
        if self.is_alive():
            self._queue.put(None)
            self.join()


class HashedFile(io.RawIOBase):
    """A file that is only appended to; one thread writes it, another computes its sha256 meanwhile.

    Args:
        path: of a new file.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by close)
        self._digest = hashlib.sha256()
        self._hashing, self._writing = _Consumer(self._digest.update), _Consumer(self._write)
        self._size = 0

    def _write(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += self._file.write(view[done:])

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """No: what is written is hashed."""
        return False

    def tell(self) -> int:
        """Bytes written."""
        return self._size

    def write(self, data: Any) -> int:
        """Append; ``data`` must not change afterwards. May raise what an earlier call did wrong."""
        view = memoryview(data).cast("B")
        kept = view if len(view) > 1 << 16 else memoryview(bytes(view))
        self._hashing.put(kept)
        self._writing.put(kept)
        self._size += len(view)
        return len(view)

    def finish(self) -> FileEntry:
        """Sync the file; its size and checksum."""
        for consumer in (self._hashing, self._writing):
            consumer.end()
            consumer.check()
        os.fsync(self._file.fileno())
        self.close()
        return FileEntry(self._size, self._digest.hexdigest())

    def close(self) -> None:
        """Close the file."""
        if not self.closed:
            self._hashing.end()
            self._writing.end()
            self._file.close()
        super().close()


def chunks_of(tensor: LazyTensor | torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's flattened values in pieces."""
    if isinstance(tensor, LazyTensor):
        yield from tensor.chunks()
    else:
        yield tensor.detach().contiguous().reshape(-1)


def write_pt(path: Path, value: Any, advance: Callable[[int], None]) -> FileEntry:
    """Write a value (plain values, tensors, LazyTensors, Foreigns) as ``torch.save`` would.

    Args:
        advance: told the bytes of tensors as they are written.

    Returns:
        Size and checksum of the file.
    """
    pickled, tensors = dump(value)
    stream = HashedFile(path)
    try:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[arg-type]
            _record(archive, stream, f"{path.stem}/data.pkl", len(pickled), iter([pickled]))
            _record(archive, stream, f"{path.stem}/byteorder", 6, iter([b"little"]))
            for key, tensor in enumerate(tensors):
                nbytes = torch.Size(tensor.shape).numel() * tensor.dtype.itemsize
                _record(archive, stream, f"{path.stem}/data/{key}", nbytes, _bytes(tensor, advance))
            _record(archive, stream, f"{path.stem}/version", 2, iter([b"3\n"]))
        return stream.finish()
    finally:
        stream.close()


def _bytes(tensor: LazyTensor | torch.Tensor, advance: Callable[[int], None]) -> Iterator[memoryview]:
    for chunk in chunks_of(tensor):
        if chunk.numel():
            yield bytes_of(chunk.to(tensor.dtype).contiguous())
            advance(chunk.numel() * tensor.dtype.itemsize)


def _record(archive: zipfile.ZipFile, stream: HashedFile, name: str, size: int, data: Iterator[Any]) -> None:
    """One uncompressed, aligned record."""
    info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    info.file_size = size
    begin = stream.tell() + _LOCAL_HEADER + len(name.encode()) + _ZIP64_EXTRA + _PAD_HEADER
    padding = -begin % ALIGNMENT
    info.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as record:
        for piece in data:
            record.write(piece)
