"""The pickles inside DeepSpeed's files, read and written without running anything that they name.

A pickle may name any function of any module and have it called. Here a name is looked up in a list; what is on it
becomes a plain value (an OrderedDict, a dtype), a StoredTensor, or a Foreign: a stand-in that holds the name and the
arguments, and that `dump` writes back as it was. Any other name is refused, and nothing is imported.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_STORAGE_NAMES = {dtype: name for name, dtype in STORAGES.items()}

# Values that cannot do anything; they are what they are.
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "Counter"): Counter,  # the milestones of torch's MultiStepLR
    ("torch", "Size"): torch.Size,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
    ("__builtin__", "set"): set,
    ("__builtin__", "frozenset"): frozenset,
    ("__builtin__", "complex"): complex,
}

# Classes and functions that are kept by name and never called.
_FOREIGN = {
    "deepspeed.runtime.fp16.loss_scaler": {"LossScaler", "DynamicLossScaler"},
    "deepspeed.runtime.zero.config": {"ZeroStageEnum"},
    "deepspeed.utils.tensor_fragment": {"fragment_address"},
    "torch": {"device"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "datetime": {"datetime", "date", "timedelta", "timezone"},
    "argparse": {"Namespace"},
    "types": {"SimpleNamespace"},
}


class ForbiddenGlobalError(Exception):
    """A pickle names something that is not on the list."""


class Foreign:
    """A stand-in for an object of a class that is not imported; subclasses carry the class's module and name."""

    module = ""
    name = ""

    def __new__(cls, *args: Any) -> Foreign:
        """Keep the arguments."""
        made = super().__new__(cls)
        made.args, made.state, made.called = args, None, False
        return made

    def __init__(self, *args: Any) -> None:
        self.args: tuple = args
        self.state: Any = None
        self.called = True  # by REDUCE; NEWOBJ skips this

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (self.args, self.state) == (other.args, other.state)

    def __hash__(self) -> int:
        return hash((self.module, self.name))

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name} {self.args} {self.state}>"


_KNOWN: dict[tuple[str, str], type[Foreign]] = {}


def foreign(module: str, name: str) -> type[Foreign]:
    """The stand-in class for ``module.name``; the same one every time."""
    if (module, name) not in _KNOWN:
        _KNOWN[module, name] = type(name, (Foreign,), {"module": module, "name": name})
    return _KNOWN[module, name]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies in a file and has not been read.

    Attributes:
        file: whose it is; see reader.PtFile.
        key: of its storage in the file.
        dtype: of its elements.
        offset: of its first element in the storage.
        shape, stride: in elements.
    """

    file: Any
    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()

    def read(self, start: int = 0, count: int | None = None) -> torch.Tensor:
        """``count`` flattened elements from ``start``, 1-D; all of it, in its shape, without arguments."""
        return self.file.read(self, start, count)

    def read_into(self, target: torch.Tensor, start: int) -> None:
        """Fill a 1-D contiguous tensor with the flattened elements from ``start``."""
        self.file.read_into(self, target, start)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor to be written whose values are made when its turn comes.

    Attributes:
        shape, dtype: of the tensor.
        chunks: gives its flattened values, in order, in pieces of any length.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Callable[[], Iterator[torch.Tensor]]


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, file: Any) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self.file = file
        self.rebuilds = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): lambda data, requires_grad, hooks: data,
            ("torch._tensor", "_rebuild_from_type_v2"): self._typed,
            ("torch.nn.parameter", "Parameter"): foreign("torch.nn.parameter", "Parameter"),
            ("torch", "Tensor"): foreign("torch", "Tensor"),
            ("_codecs", "encode"): _encode,
        }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if (module, name) in self.rebuilds:
            return self.rebuilds[module, name]
        if module == "torch" and name in STORAGES:
            return foreign(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _FOREIGN.get(module, ()):
            return foreign(module, name)
        raise ForbiddenGlobalError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        kind, storage, key, _, count = pid
        if kind != "storage" or getattr(storage, "name", None) not in STORAGES:
            raise ForbiddenGlobalError(f"persistent id {pid!r}")
        return STORAGES[storage.name], str(key), int(count)

    def _tensor(self, storage: tuple, offset: int, shape: tuple, stride: tuple, *rest: Any) -> StoredTensor:
        dtype, key, count = storage
        shape, stride = tuple(shape), tuple(stride)
        if shape == (0,) and stride == (1,) and not offset:  # ZeRO-3's placeholders: by far the most
            return StoredTensor(self.file, key, dtype, 0, shape, stride)
        extent = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if 0 not in shape else 0
        if min((offset, *shape, *stride)) < 0 or extent > count:
            raise pickle.UnpicklingError(f"a tensor of {shape} strides {stride} at {offset} of {count} elements")
        return StoredTensor(self.file, key, dtype, offset, shape, stride)

    def _typed(self, function: Any, kind: Any, args: tuple, state: Any) -> Any:
        if function not in (self._tensor, self.rebuilds["torch._utils", "_rebuild_parameter"]):
            raise ForbiddenGlobalError(f"a tensor made by {function!r}")
        return function(*args)


def _encode(text: str, encoding: str) -> bytes:
    """How protocol 2 writes bytes."""
    if encoding != "latin1":
        raise ForbiddenGlobalError(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")


def load(data: bytes, file: Any) -> Any:
    """The value of a pickle of torch's format, its tensors as StoredTensor of ``file``.

    Raises:
        ForbiddenGlobalError: it names something that is not on the list.
        pickle.UnpicklingError and others: it is damaged.
    """
    return _Reader(data, file).load()


# Only the pickler that is written in Python lets names be written that are not imported.
_PythonPickler: Any = pickle._Pickler  # type: ignore[attr-defined]


class _Storage:
    def __init__(self, key: str, dtype: torch.dtype, count: int) -> None:
        self.key, self.dtype, self.count = key, dtype, count


class _Writer(_PythonPickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=2)
        self.tensors: list[LazyTensor | torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return "storage", foreign("torch", _STORAGE_NAMES[obj.dtype]), obj.key, "cpu", obj.count
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (LazyTensor, torch.Tensor)):
            storage = _Storage(str(len(self.tensors)), obj.dtype, torch.Size(obj.shape).numel())
            self.tensors.append(obj)
            strides = tuple(torch.empty(tuple(obj.shape), device="meta").stride())
            arguments: tuple = (storage, 0, tuple(obj.shape), strides, False, OrderedDict())
            return foreign("torch._utils", "_rebuild_tensor_v2"), arguments
        if isinstance(obj, Foreign):
            # A class that was called may refuse to be made without the call, and the other way round.
            made = (type(obj), obj.args) if obj.called else (copyreg.__newobj__, (type(obj), *obj.args))  # type: ignore[attr-defined]
            return made if obj.state is None else (*made, obj.state)
        return NotImplemented

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, Foreign):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)


def dump(value: Any) -> tuple[bytes, list[LazyTensor | torch.Tensor]]:
    """A pickle of torch's format, and the tensors that it refers to as storages "0", "1" and so on."""
    stream = io.BytesIO()
    writer = _Writer(stream)
    writer.dump(value)
    return stream.getvalue(), writer.tensors
