"""The fused experts as one of DeepSpeed's operators: built at first use, or ahead of time, and loaded.

A binary is loaded only where it belongs: its record (torch, CUDA, compiler, CPU, flags, sources) is compared first.
Builds at first use lie in torch's folder of extensions, one folder for each kind of machine, so that a home folder that
several kinds share serves all of them; ranks that start together build once.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import CUDAOpBuilder, OpBuilder
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder

from ruda_ds.errors import BuildError
from ruda_ds.ops import build_flags, build_folder, build_record, build_tools
from ruda_ds.ops.build_lock import build_lock, say

CSRC = Path(__file__).resolve().parent / "csrc"


class BuildMixin:
    """What both of our op builders add to DeepSpeed's: tool checks, a build record, and one build at a time.

    Attributes:
        NAME: the operator's name in DeepSpeed's table.
        BUILD_VAR: DeepSpeed's name of the switch that builds it ahead of time.
        OPERATORS: names in torch.ops that it registers.
        DURATION: how long a build takes, for the message.
    """

    NAME = "ruda_fused_experts"
    BUILD_VAR = "RUDA_BUILD_OPS"
    OPERATORS: tuple[str, ...] = ("ruda::fused_experts", "ruda::fused_experts_backward")
    DURATION = "about a minute"
    error_log: str | None

    def __init__(self) -> None:
        super().__init__(name=self.NAME)  # type: ignore[call-arg]

    @property
    def with_cuda(self) -> bool:
        """Whether CUDA sources are part of it."""
        return isinstance(self, CUDAOpBuilder)

    def absolute_name(self) -> str:
        """The module that an ahead-of-time build makes."""
        return f"ruda_ds.ops._{self.NAME}"

    def sources(self) -> list[str]:
        """Absolute source files."""
        found = [CSRC / "register.cpp", *sorted((CSRC / "cpu").glob("*.cpp"))]
        if self.with_cuda:
            found += [*sorted((CSRC / "cuda").glob("*.cu")), *sorted((CSRC / "cuda").glob("*.cpp"))]
        return [str(path) for path in found]

    def include_paths(self) -> list[str]:
        """Absolute folders of headers."""
        return [str(CSRC)]

    def cxx_args(self) -> list[str]:
        """Flags of the C++ compiler, for this CPU."""
        return build_flags.cpu_flags(build_record.cpu_features())

    def nvcc_args(self) -> list[str]:
        """Flags of nvcc, for the cards at hand; none on a CPU."""
        if not self.with_cuda:
            return []
        return build_flags.NVCC_FLAGS + build_flags.gencode(build_flags.cuda_archs())

    def problem(self) -> str | None:
        """What this machine lacks for a build; None if nothing."""
        absent = [path for path in self.sources() if not Path(path).is_file()]
        if absent:
            return f"source files are missing from the installation: {', '.join(absent)}"
        found = build_tools.compiler_problem() or build_tools.ninja_problem()
        return found or (build_tools.nvcc_problem() if self.with_cuda else None)

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it can be built here; `error_log` says why not."""
        self.error_log = self.problem()
        if verbose and self.error_log:
            say(f"{self.NAME}: {self.error_log}")
        return self.error_log is None

    def record(self) -> dict[str, Any]:
        """The record that a build made here and now would have."""
        archs = build_flags.cuda_archs() if self.with_cuda else []
        tools = {
            "compiler": build_tools.compiler_version(),
            "nvcc": build_tools.cuda_release() if self.with_cuda else None,
        }
        flags = self.cxx_args() + (build_flags.NVCC_FLAGS if self.with_cuda else [])
        return {
            **build_record.collect(self.NAME, flags, archs, tools),
            build_record.SOURCES: build_record.digests(self.sources(), self.include_paths()),
        }

    def ahead_of_time(self) -> tuple[Path | None, str | None]:
        """(the binary built ahead of time, why it cannot be used); (None, None) if there is none."""
        spec = importlib.util.find_spec(self.absolute_name())
        if spec is None or spec.origin is None:
            return None, None
        binary = Path(spec.origin)
        return binary, build_record.difference(build_record.read(ahead_record(binary)), self.record())

    def cached(self) -> tuple[Path, str | None]:
        """(where the binary built at first use lies, why it cannot be used now: None if it can)."""
        record = self.record()
        folder = self._folder(record)
        binary = folder / f"{folder.name}.so"
        if not binary.exists():
            return binary, "it has not been built yet"
        return binary, build_record.difference(build_record.read(folder / "record.json"), record)

    def load(self, verbose: bool = False) -> Any:
        """The loaded extension module; its operators are registered.

        Raises:
            BuildError: it cannot be built or loaded here.
        """
        if self.NAME not in OpBuilder._loaded_ops:
            OpBuilder._loaded_ops[self.NAME] = self._checked(self._load_ahead() or self._load_cached(verbose))
        return OpBuilder._loaded_ops[self.NAME]

    def _checked(self, module: Any) -> Any:
        """The module, once every operator is found registered."""
        for operator in self.OPERATORS:
            space, name = operator.split("::")
            if not hasattr(getattr(torch.ops, space), name):
                raise BuildError(f"{self.NAME} was loaded from {module.__file__} but does not register {operator}")
        return module

    def _load_ahead(self) -> Any:
        binary, reason = self.ahead_of_time()
        if binary is None:
            return None
        if reason is None:
            try:
                return importlib.import_module(self.absolute_name())
            except ImportError as error:
                reason = str(error)
        say(f"{self.NAME}: not using {binary}: {reason}")
        return None

    def _folder(self, record: dict[str, Any]) -> Path:
        from torch.utils.cpp_extension import _get_build_directory

        try:
            return Path(_get_build_directory(f"{self.NAME}_{build_record.key(record)}", False))
        except OSError as error:
            raise BuildError(f"{self.NAME}: torch's folder of extensions cannot be written: {error}") from error

    def _load_cached(self, verbose: bool) -> Any:
        """Load what was built before, or build it while no other process does."""
        binary, reason = self.cached()
        if reason is None and (module := build_folder.import_binary(binary)):
            return module
        with build_lock(binary.parent.with_suffix(".lock"), self.NAME) as (token, waited_for):
            failed = build_record.read(binary.parent / "failed.json")
            if failed and failed["token"] in waited_for:
                raise BuildError(failed["reason"])
            binary, reason = self.cached()
            if reason is None and (module := build_folder.import_binary(binary)):
                return module
            try:
                return self._build(binary, verbose)
            except BuildError as error:
                # Ranks that waited for this build are not to fail by building again, one after another.
                build_record.write(binary.parent / "failed.json", {"token": token, "reason": str(error)})
                raise

    def _build(self, binary: Path, verbose: bool) -> Any:
        """Build with DeepSpeed's jit_load in our folder, whose lock we hold."""
        if not self.is_compatible():
            raise BuildError(f"{self.NAME} cannot be built: {self.error_log}")
        folder, record = binary.parent, self.record()
        build_folder.clean(folder, record)
        build_record.write(folder / "building.json", record)
        say(f"building {self.NAME} for this machine (once; {self.DURATION}) ...")
        begun = time.monotonic()
        self.name = folder.name
        try:
            module = self.jit_load(verbose)  # type: ignore[attr-defined]
        except (RuntimeError, ImportError, OSError) as error:
            raise BuildError(f"{self.NAME} cannot be built: {build_folder.first_error(error, folder)}") from error
        finally:
            self.name = self.NAME
        build_record.write(folder / "record.json", record)
        say(f"built {self.NAME} in {time.monotonic() - begun:.0f} s ({folder})")
        return module


class CPUFusedExpertsBuilder(BuildMixin, CPUOpBuilder):
    """The fused experts for the CPU."""


class CUDAFusedExpertsBuilder(BuildMixin, CUDAOpBuilder):
    """The fused experts for CUDA cards of sm_80 and newer, and for the CPU beside them."""


# DeepSpeed's accelerators find their own operators only, by name: choose by the accelerator at hand.
FusedExpertsBuilder: type[CPUFusedExpertsBuilder] | type[CUDAFusedExpertsBuilder] = (
    CUDAFusedExpertsBuilder if get_accelerator().device_name() == "cuda" else CPUFusedExpertsBuilder
)


def ahead_record(binary: Path) -> Path:
    """Where the record of an ahead-of-time build lies."""
    return binary.with_name(f"{binary.name.split('.')[0]}.json")


@dataclass(frozen=True)
class BuildState:
    """Whether the compiled operator can be called, and why not.

    Attributes:
        ready: its operators are registered in torch.ops.
        reason: where it was loaded from, or why it could not be.
    """

    ready: bool
    reason: str


_STATES: dict[str, BuildState] = {}


def load_fused_experts(explicit: bool = False, builder: Any = None) -> BuildState:
    """Load the compiled fused experts, building them if need be; tried once a process.

    Args:
        explicit: whether the caller asked for this backend by name. If not ("auto"), a failure gives one warning that
            says why, and the caller takes another backend.
        builder: another op builder than `FusedExpertsBuilder()`.

    Raises:
        BuildError: ``explicit``, and they cannot be built or loaded.
    """
    builder = builder or FusedExpertsBuilder()
    if builder.NAME not in _STATES:
        try:
            state = BuildState(True, str(builder.load().__file__))
        except BuildError as error:
            state = BuildState(False, str(error))
            if not explicit:
                warnings.warn(f"ruda_ds runs without its compiled operator: {error}", stacklevel=2)
        _STATES[builder.NAME] = state
    state = _STATES[builder.NAME]
    if explicit and not state.ready:
        raise BuildError(state.reason)
    return state
