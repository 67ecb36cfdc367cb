"""The op builder where something is missing, broken, stale, or built elsewhere. Every build here is real."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import builder_helpers as helpers
import forked
import pytest
import torch

from ruda_ds.errors import BuildError
from ruda_ds.ops import build_lock, build_record, build_tools, builder, self_check

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module", autouse=True)
def _server():
    """Before a test says where to build, and with what."""
    forked.ready()


@pytest.fixture
def place(tmp_path, monkeypatch, request):
    """A folder of sources, with a name of its own, and a fresh folder of extensions."""
    folder = tmp_path / f"{abs(hash(request.node.nodeid)):x}"
    folder.mkdir()
    (folder / "tiny.cpp").write_text(helpers.BARE)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("CXX", str(helpers.counting_compiler(folder)))
    return folder


def forget(folder: Path) -> None:
    """Let the next load of this process look at the folder of extensions again."""
    name = f"ruda_tiny_{folder.name}"
    builder._STATES.pop(name, None)
    builder.OpBuilder._loaded_ops.pop(name, None)


def built_folder(folder: Path) -> Path:
    """Where the tiny operator was built."""
    (found,) = (path for path in Path(os.environ["TORCH_EXTENSIONS_DIR"]).iterdir() if path.is_dir())
    assert found.name.startswith(f"ruda_tiny_{folder.name}_")
    return found


def only_on_path(folder: Path, monkeypatch, *tools: str) -> None:
    """Leave nothing on the PATH but these tools, and no ninja beside the interpreter."""
    bare = folder / "bin"
    bare.mkdir()
    for tool in tools:
        found = subprocess.run(["which", tool], capture_output=True, text=True, check=True).stdout.strip()
        (bare / tool).symlink_to(found)
    monkeypatch.setenv("PATH", str(bare))
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))


def refused(folder: Path, word: str) -> None:
    """Auto: one warning with the reason and no error, however often. By name: an error with the same reason."""
    tiny = helpers.tiny_builder(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = builder.load_fused_experts(False, tiny)
        assert builder.load_fused_experts(False, tiny) == state
    assert [one.category for one in caught] == [UserWarning]
    assert "without its compiled operator" in str(caught[0].message)
    assert not state.ready
    assert word in state.reason
    assert word in str(caught[0].message)
    with pytest.raises(BuildError, match="ruda_tiny") as error:
        builder.load_fused_experts(True, tiny)
    assert str(error.value) == state.reason


def test_it_is_built_once_announced_and_later_loaded_without_a_compiler(place, monkeypatch, capfd):
    state = builder.load_fused_experts(True, helpers.tiny_builder(place))
    assert state.ready
    assert state.reason == str(built_folder(place) / f"{built_folder(place).name}.so")
    printed = capfd.readouterr().err
    assert f"building ruda_tiny_{place.name} for this machine (once; a second)" in printed
    assert f"built ruda_tiny_{place.name} in" in printed
    assert helpers.compiled(place) == 1
    record = json.loads((built_folder(place) / "record.json").read_text())
    assert record["torch"] == torch.__version__
    assert record["cpu"] == build_record.cpu_features()
    assert record["compiler"] == build_tools.compiler_version()
    only_on_path(place, monkeypatch)
    forget(place)
    assert builder.load_fused_experts(True, helpers.tiny_builder(place)).ready
    assert capfd.readouterr().err == ""
    assert helpers.compiled(place) == 1


@pytest.mark.slow
def test_the_real_operator_is_built_and_right():
    state = builder.load_fused_experts(True)
    assert Path(state.reason).suffix == ".so"
    assert self_check.check_operator(torch.device("cpu"), (torch.float32, torch.bfloat16)) is None


def test_a_module_that_registers_nothing_is_refused(place):
    with pytest.raises(BuildError, match="does not register ruda_nothing::absent"):
        helpers.tiny_builder(place, ("ruda_nothing::absent",)).load()


def test_no_compiler(place, monkeypatch):
    only_on_path(place, monkeypatch, "ninja")
    refused(place, "no C++ compiler: 'c++' is not on the PATH")


def test_a_compiler_named_in_cxx_that_is_not_there(place, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-g++ -pipe")
    refused(place, "no C++ compiler: 'no-such-g++' is not on the PATH")


def test_a_broken_compiler(place, monkeypatch):
    monkeypatch.setenv("CXX", str(helpers.executable(place / "g++", "echo 'cc1plus: out of order' >&2; exit 4\n")))
    refused(place, "does not compile an empty C++20 program: cc1plus: out of order")


def test_a_compiler_that_breaks_in_the_middle(place, monkeypatch):
    script = 'case "$*" in *" -c "*) echo "internal compiler error: Killed" >&2; exit 4;; esac\nexec c++ "$@"\n'
    monkeypatch.setenv("CXX", str(helpers.executable(place / "g++", script)))
    refused(place, "internal compiler error: Killed")


def test_a_source_that_does_not_compile(place):
    (place / "tiny.cpp").write_text("#include <no_such_header.h>\n")
    refused(place, "fatal error: no_such_header.h")
    log = built_folder(place) / "build.log"
    assert "no_such_header.h" in log.read_text()


def test_no_ninja(place, monkeypatch):
    only_on_path(place, monkeypatch, "c++")
    refused(place, "ninja is missing (pip install ninja)")


def test_the_ninja_beside_the_interpreter_is_found(place, monkeypatch):
    only_on_path(place, monkeypatch, "c++", "sh", "as", "ld")
    helpers.executable(place / "ninja", 'test "$1" = --version && echo 1.13\n')
    assert helpers.tiny_builder(place).problem() is None


def test_a_source_file_that_was_not_installed(place, monkeypatch):
    monkeypatch.setattr(builder, "CSRC", place / "absent")
    assert "source files are missing from the installation" in builder.CPUFusedExpertsBuilder().problem()


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        (None, "nvcc is missing (install the CUDA 13.0 toolkit, or set CUDA_HOME)"),
        ("exit 1", "nvcc is missing"),
        ("echo Cuda compilation tools, release 11.8, V11.8.89", "nvcc is of CUDA 11.8, torch of CUDA 13.0"),
        ("echo Cuda compilation tools, release 13.1, V13.1.2", None),
    ],
)
def test_no_nvcc_or_the_wrong_one(place, monkeypatch, release, reason):
    from torch.utils import cpp_extension

    (place / "bin").mkdir()
    if release:
        helpers.executable(place / "bin" / "nvcc", release + "\n")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(place))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = builder.CUDAFusedExpertsBuilder().problem()
    assert found is None if reason is None else reason in found


def test_a_torch_without_cuda_or_for_other_cards(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert builder.CUDAFusedExpertsBuilder().problem() == "this torch was built without CUDA"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "ROCm" in builder.CUDAFusedExpertsBuilder().problem()


def test_the_flags_of_a_cuda_build(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;8.6 9.0+PTX;9.0a")
    flags = builder.CUDAFusedExpertsBuilder().nvcc_args()
    assert [flag for flag in flags if "gencode" in flag] == [
        "-gencode=arch=compute_86,code=sm_86",
        "-gencode=arch=compute_90a,code=sm_90a",
    ]
    assert "--use_fast_math" not in flags
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0")
    with pytest.raises(BuildError, match=r"need compute capability 8.0 or newer; found 7.0"):
        builder.CUDAFusedExpertsBuilder().nvcc_args()


@pytest.mark.parametrize(("level", "flag"), [("default", "-DCPU_CAPABILITY_DEFAULT"), ("avx9", None)])
def test_a_lower_cpu_level_can_be_asked_for(monkeypatch, level, flag):
    monkeypatch.setenv("RUDA_CPU_LEVEL", level)
    if flag is None:
        with pytest.raises(BuildError, match="RUDA_CPU_LEVEL is 'avx9'; this CPU has"):
            builder.CPUFusedExpertsBuilder().cxx_args()
    else:
        assert flag in builder.CPUFusedExpertsBuilder().cxx_args()


# --- binaries made elsewhere, or from other sources -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("torch", "2.6.0", "its torch is 2.6.0, here it is"),
        ("cpu", ["x86_64", "none_such"], "it was built on another kind of CPU (only there: none_such; only here: "),
        ("compiler", "g++ 4.8", "its compiler is g++ 4.8, here it is"),
        ("sources", {}, "its sources have changed (headers, tiny.cpp)"),
        (None, None, "it has no build record"),
    ],
)
def test_a_binary_with_another_record_is_rebuilt_never_loaded(place, field, value, reason):
    assert builder.load_fused_experts(True, helpers.tiny_builder(place)).ready
    record = built_folder(place) / "record.json"
    if field is None:
        record.unlink()
    else:
        record.write_text(json.dumps({**json.loads(record.read_text()), field: value}))
    binary, found = helpers.tiny_builder(place).cached()
    assert reason in found
    before = binary.stat().st_mtime_ns
    assert helpers.load(place, dict(os.environ))["ready"]
    assert binary.stat().st_mtime_ns > before
    assert helpers.tiny_builder(place).cached() == (binary, None)


def test_only_changed_sources_are_compiled_again(place):
    (place / "other.cpp").write_text("int other() { return 1; }\n")
    assert builder.load_fused_experts(True, helpers.tiny_builder(place)).ready
    assert helpers.compiled(place) == 2
    (place / "other.cpp").write_text("int other() { return 2; }\n")
    old = time.time() - 1e6
    os.utime(place / "other.cpp", (old, old))  # as a package that is installed over another one may be
    assert helpers.load(place, dict(os.environ))["ready"]
    assert helpers.compiled(place) == 3
    (place / "new.h").write_text("// a header that all may include\n")
    assert helpers.load(place, dict(os.environ))["ready"]
    assert helpers.compiled(place) == 5


def test_machines_that_cannot_share_a_binary_do_not_share_a_folder(monkeypatch):
    record = builder.CPUFusedExpertsBuilder().record()
    assert build_record.key({**record, "compiler": None, "sources": {}}) == build_record.key(record)
    others = [{**record, "torch": "2.6.0"}, {**record, "cpu": ["x86_64"]}, {**record, "flags": []}]
    assert len({build_record.key(one) for one in [record, *others]}) == 4


@pytest.mark.parametrize(
    ("built", "wanted", "fits"),
    [(["80", "90a"], ["90a"], True), (["80"], ["86"], True), (["86"], ["80"], False), (["90a"], ["90a", "80"], False)],
)
def test_a_binary_for_several_cards_serves_each_of_them(built, wanted, fits):
    assert (build_record.difference({"archs": built}, {"archs": wanted}) is None) == fits


# --- locks, killed builds, several ranks ----------------------------------------------------------------------------


def start_ranks(folder: Path, count: int) -> list[multiprocessing.Process]:
    """Ranks that load the operator at once; returns when one builds, which waits for `let_go`, and all others wait."""
    ranks = [
        forked.start(helpers.command(folder), folder / f"log{rank}", dict(os.environ), ROOT) for rank in range(count)
    ]
    end = time.monotonic() + 120
    while helpers.compiled(folder) == 0 or printed_by(folder).count("waiting for process") < count - 1:
        assert time.monotonic() < end, printed_by(folder)
        time.sleep(0.1)
    return ranks


def printed_by(folder: Path) -> str:
    """What all ranks have said so far."""
    return "".join(path.read_text() for path in sorted(folder.glob("log*")))


def let_go(folder: Path, ranks: list[multiprocessing.Process]) -> list[dict]:
    """What each rank found."""
    (folder / "go").touch()
    assert [forked.wait(rank, 120) for rank in ranks] == [0] * len(ranks), printed_by(folder)
    return [json.loads((folder / f"log{rank}").read_text().splitlines()[-1]) for rank in range(len(ranks))]


HOLD = "while [ ! -e {}/go ]; do sleep 0.1; done"


def test_four_ranks_at_once_build_once(place, monkeypatch):
    monkeypatch.setenv("CXX", str(helpers.counting_compiler(place, HOLD.format(place))))
    found = let_go(place, start_ranks(place, 4))
    assert [(one["ready"], one["warnings"]) for one in found] == [(True, [])] * 4
    assert helpers.compiled(place) == 1
    assert printed_by(place).count("for this machine (once; a second)") == 1


def test_ranks_that_waited_for_a_failed_build_do_not_repeat_it(place, monkeypatch):
    failing = HOLD.format(place) + "; echo 'error: no luck' >&2; exit 1"
    monkeypatch.setenv("CXX", str(helpers.counting_compiler(place, failing)))
    found = let_go(place, start_ranks(place, 3))
    assert helpers.compiled(place) == 1
    assert [len(one["warnings"]) for one in found] == [1] * 3
    assert all("error: no luck" in one["reason"] for one in found)


def test_a_build_that_was_killed_is_taken_over(place, monkeypatch):
    monkeypatch.setenv("CXX", str(helpers.counting_compiler(place, HOLD.format(place))))
    (rank,) = start_ranks(place, 1)
    os.killpg(rank.pid, signal.SIGKILL)
    rank.join()
    (place / "go").touch()  # should its compiler have outlived it
    monkeypatch.setenv("CXX", str(helpers.counting_compiler(place)))
    result = helpers.load(place, dict(os.environ), explicit=True)
    assert result["ready"]
    folder = built_folder(place)
    assert f"removed the lock {folder}.lock: process {rank.pid} on" in result["printed"]
    assert f"removed {folder / 'lock'}: left by a build that was killed" in result["printed"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert not (folder / "lock").exists()


def plant(path: Path, **changes: object) -> Path:
    """A lock file with another owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**json.loads(build_lock.owner_text()), **changes}))
    return path


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"started": "1"}])
def test_a_lock_whose_owner_is_gone_is_named_and_removed(tmp_path, capfd, changes):
    lock = plant(tmp_path / "x.lock", **changes)
    with build_lock.build_lock(lock, "x", limit_s=5):
        assert build_lock.read_owner(lock)["pid"] == os.getpid()
    assert not lock.exists()
    assert f"removed the lock {lock}: process" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_a_living_owner_is_waited_for_with_a_limit(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(build_lock, "ANNOUNCE_S", 0.1)
    lock = plant(tmp_path / "x.lock")
    with (
        pytest.raises(
            BuildError, match=rf"waited 0 s for the lock {lock} of process {os.getpid()} on .* delete the file"
        ),
        build_lock.build_lock(lock, "x", limit_s=0.4),
    ):
        pass
    assert lock.exists()
    assert f"waiting for process {os.getpid()} on" in capfd.readouterr().err


@pytest.mark.parametrize("text", [None, "not ours"])
def test_a_silent_lock_of_another_machine_is_removed_a_lively_one_is_not(tmp_path, monkeypatch, text):
    monkeypatch.setattr(build_lock, "SILENT_S", 0.6)
    lock = plant(tmp_path / "x.lock", machine="another boot")
    if text:
        lock.write_text(text)
    begun = time.monotonic()
    with build_lock.build_lock(lock, "x", limit_s=30):
        assert time.monotonic() - begun >= 0.6
    plant(lock, machine="another boot")
    monkeypatch.setattr(build_lock, "_mtime", lambda path: time.monotonic())  # touched at every look
    with pytest.raises(BuildError, match="of process"), build_lock.build_lock(lock, "x", limit_s=1.2):
        pass


def test_a_holder_touches_its_lock_and_leaves_a_successors_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(build_lock, "BEAT_S", 0.05)
    lock = tmp_path / "x.lock"
    with build_lock.build_lock(lock, "x"):
        os.utime(lock, (1, 1))
        time.sleep(0.3)
        assert lock.stat().st_mtime > 1e6
        plant(lock)
    assert lock.exists()


def test_the_limit_of_a_wait_comes_from_the_environment(tmp_path, monkeypatch):
    lock = plant(tmp_path / "x.lock")
    monkeypatch.setenv("RUDA_BUILD_WAIT_S", "0.2")
    with pytest.raises(BuildError, match="raise RUDA_BUILD_WAIT_S"), build_lock.build_lock(lock, "x"):
        pass
    monkeypatch.setenv("RUDA_BUILD_WAIT_S", "long")
    with (
        pytest.raises(BuildError, match="RUDA_BUILD_WAIT_S is 'long', expected seconds"),
        build_lock.build_lock(lock, "x"),
    ):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BuildError, match="file cannot be written"), build_lock.build_lock(tmp_path / "file" / "x", "x"):
        pass


# --- ahead of time --------------------------------------------------------------------------------------------------

SEE = """
import json, sys
from ruda_ds.ops.builder import FusedExpertsBuilder
from ruda_ds.errors import BuildError
builder = FusedExpertsBuilder()
binary, reason = builder.ahead_of_time()
try:
    builder.load()
except BuildError as error:
    print(json.dumps([str(binary), reason, str(error)]))
"""


def test_an_ahead_of_time_build_is_used_where_it_belongs_only(place, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    subprocess.run(["cp", "-r", *(ROOT / n for n in ("setup.py", "README.md", "ruda_ds")), copy], check=True)
    csrc = copy / "ruda_ds" / "ops" / "csrc"
    subprocess.run(["rm", "-rf", csrc / "cpu", csrc / "cuda"], check=True)
    (csrc / "register.cpp").write_text(helpers.BARE)
    environment = {**os.environ, "RUDA_BUILD_OPS": "1", "DS_ACCELERATOR": "cpu"}
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=copy, env=environment, check=True, capture_output=True, timeout=120)

    def see() -> tuple[str, str | None, str]:
        done = subprocess.run([sys.executable, "-c", SEE], cwd=copy, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return (*json.loads(done.stdout.splitlines()[-1]), done.stderr)

    binary, reason, error, _ = see()
    assert Path(binary).parent == copy / "ruda_ds" / "ops"
    assert reason is None
    # It is this bare module that was loaded, and it registers nothing.
    assert f"loaded from {binary} but does not register ruda::fused_experts" in error
    assert not (tmp_path / "extensions").exists()
    record = builder.ahead_record(Path(binary))
    record.write_text(json.dumps({**json.loads(record.read_text()), "cpu": ["x86_64", "none_such"]}))
    _, reason, error, printed = see()
    assert "another kind of CPU (only there: none_such" in reason
    assert f"not using {binary}: it was built on another kind of CPU" in printed
    assert str(tmp_path / "extensions") in error


def test_an_ahead_of_time_build_that_lacks_a_tool_fails_and_says_so(place):
    environment = {**os.environ, "RUDA_BUILD_OPS": "1", "DS_ACCELERATOR": "cpu", "CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "RUDA_BUILD_OPS is set, but ruda_fused_experts cannot be built: no C++ compiler" in done.stderr


def test_setup_loads_torch_only_when_asked_to_build():
    code = "import sys, runpy; sys.argv[0:] = ['setup.py', '--version']; runpy.run_path('setup.py'); "
    code += "print('torch' in sys.modules)"
    environment = {name: value for name, value in os.environ.items() if name != "RUDA_BUILD_OPS"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.split()[-1] == "False", done.stderr
