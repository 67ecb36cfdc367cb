"""Writing so that a kill, a full disk or a power cut at any moment leaves the last complete tag loadable.

[Note: the order of a save]
Everything is written into DIR/TAG.incomplete and synced, the manifest last; then the folder gets its name; then
``latest`` is replaced by a rename. Each step begins only when all ranks have reported that the one before went well. A
folder cannot be renamed onto another that is not empty, so an earlier tag of the same name first steps aside as
DIR/TAG.replaced and is deleted at the very end; a load that finds no TAG takes it from there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ruda_ds.errors import CheckpointError

INCOMPLETE, REPLACED = ".incomplete", ".replaced"
LATEST = "latest"


def sync_file(path: Path) -> None:
    """Wait until a file's content is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until a folder's entries are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace a file so that a reader, or a power cut, finds the old content or the new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def check_tag(tag: object) -> str:
    """``tag`` as the name of a folder; raises CheckpointError where it is none."""
    name = str(tag)
    reserved = name.endswith((INCOMPLETE, REPLACED)) or name in ("", LATEST) or name.startswith(".")
    if reserved or "/" in name or os.sep in name or "\0" in name:
        raise CheckpointError(
            f"tag is {name!r}, expected the name of a folder, not {LATEST!r}, not ending in {INCOMPLETE} or {REPLACED}"
        )
    return name


class TagFolder:
    """One tag on its way to the disk; the methods run on one rank only.

    Args:
        root: folder of all tags.
        tag: name of this one.
    """

    def __init__(self, root: Path, tag: str) -> None:
        self.root, self.tag = root, tag
        self.final, self.incomplete, self.replaced = (root / f"{tag}{end}" for end in ("", INCOMPLETE, REPLACED))

    def begin(self) -> None:
        """An empty folder to write into; what an interrupted save left is put right first."""
        self.root.mkdir(parents=True, exist_ok=True)
        if self.replaced.exists():
            if self.final.exists():
                shutil.rmtree(self.replaced)
            else:
                os.rename(self.replaced, self.final)
        if self.incomplete.exists():
            shutil.rmtree(self.incomplete)
        self.incomplete.mkdir()
        sync_folder(self.root)

    def commit(self) -> None:
        """Give the folder, complete and synced, its name, and let ``latest`` say so."""
        sync_folder(self.incomplete)
        if self.final.exists():
            os.rename(self.final, self.replaced)
        os.rename(self.incomplete, self.final)
        sync_folder(self.root)
        write_atomic(self.root / LATEST, self.tag.encode())
        shutil.rmtree(self.replaced, ignore_errors=True)

    def abandon(self) -> None:
        """After a failure: free the space, and let an earlier tag of this name stand as before."""
        if self.replaced.exists() and not self.final.exists():
            os.rename(self.replaced, self.final)
        shutil.rmtree(self.incomplete, ignore_errors=True)


def locate(root: Path, tag: str | None) -> Path:
    """The folder of a tag, by default of the one that ``latest`` names.

    Raises:
        CheckpointError: there is no such tag, or only an interrupted save of it.
    """
    if tag is None:
        try:
            tag = (root / LATEST).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise CheckpointError(
                f"{root / LATEST}: cannot be read ({error.strerror}), expected the name of a complete tag; folders "
                f"there: {_folders(root) or 'none'}"
            ) from None
    name = check_tag(tag)
    for folder in (root / name, root / f"{name}{REPLACED}"):
        if folder.is_dir():
            return folder
    if (root / f"{name}{INCOMPLETE}").is_dir():
        raise CheckpointError(f"{root / name}{INCOMPLETE}: the save was interrupted, the tag is not complete")
    raise CheckpointError(f"{root / name}: no such tag; folders there: {_folders(root) or 'none'}")


def interrupted(root: Path) -> list[Path]:
    """Folders that interrupted saves left, sorted."""
    return sorted(path for path in root.glob(f"*{INCOMPLETE}") if path.is_dir())


def _folders(root: Path) -> str:
    return ", ".join(sorted(path.name for path in root.iterdir() if path.is_dir())) if root.is_dir() else ""
