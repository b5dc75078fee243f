"""A checkpoint that is either complete or not there.

Everything is written to a hidden folder beside the output, and moved into place by one rename when
it is complete and on the disk. A run that fails leaves nothing behind and touches nothing; a server
that watches the output never sees half of it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.base import (
    COMPRESSION_VERSION_NAME,
    QUANTIZATION_METHOD,
    QUANTIZATION_METHOD_NAME,
    SPARSITY_CONFIG_NAME,
    TRANSFORM_CONFIG_NAME,
)
from compressed_tensors.quantization import QuantizationConfig

from steelyard.checkpoint.shard_file import ShardFile
from steelyard.checkpoint.shards import INDEX, SINGLE, Shards
from steelyard.errors import CheckpointError

__all__ = ["CheckpointWriter", "quantization_config_dict"]

CONFIG = "config.json"


class CheckpointWriter:
    """Write tensors, files and a config; use it as a context manager and end with `finish`.

    overwrite:       replace what `output_dir` holds, once the new checkpoint is complete
    max_shard_bytes: a shard holds at most this much, or one tensor that is larger
    source:          the checkpoint that is read meanwhile, and so must not be written over

    >>> with CheckpointWriter("out") as writer:
    ...     writer.add("model.norm.weight", torch.ones(8))
    ...     writer.finish({"model_type": "llama"})
    PosixPath('/home/me/out')
    """

    def __init__(
        self,
        output_dir: str | Path,
        *,
        overwrite: bool = False,
        max_shard_bytes: int = 5 * 10**9,
        source: Shards | str | Path | None = None,
    ) -> None:
        self.output_dir = Path(output_dir).resolve()
        self.overwrite = overwrite
        self.max_shard_bytes = max_shard_bytes
        self._check_output()
        if source is not None:
            folder = source.folder if isinstance(source, Shards) else Path(source)
            _check_apart(self.output_dir, folder.resolve())
        name = f".{self.output_dir.name}.partial-{secrets.token_hex(4)}"
        self.partial = self.output_dir.with_name(name)
        self._made: list[Path] = []  # parents that did not exist, the innermost first
        self._file: ShardFile | None = None  # the shard that is being written
        self._total_bytes = 0
        self._shards: list[list[str]] = []  # names per shard that is on the disk
        self._names: set[str] = set()
        self._complete = False

    def _check_output(self) -> None:
        out = self.output_dir
        if out.exists() and not out.is_dir():
            raise CheckpointError(f"{out} is a file; choose a folder for the output")
        if out.is_dir():
            if os.path.ismount(out):
                raise CheckpointError(
                    f"{out} is a mount point, and cannot be replaced in one step; choose a folder "
                    f"inside it, such as {out / 'model'}"
                )
            if any(out.iterdir()) and not self.overwrite:
                raise CheckpointError(
                    f"{out} is not empty; choose another folder, or replace what it holds with "
                    "overwrite=True"
                )
        parent = out.parent
        while not parent.exists():
            parent = parent.parent
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise CheckpointError(
                f"{parent} is not a folder that you may write to, so {out} cannot be made in it"
            )

    # -- lifecycle --------------------------------------------------------------------------

    def __enter__(self) -> CheckpointWriter:
        parents = [self.partial.parent, *self.partial.parent.parents]
        self._made = [parent for parent in parents if not parent.exists()]
        try:
            self.partial.mkdir(parents=True)
        except OSError as error:
            self._remove()
            raise CheckpointError(f"cannot write beside {self.output_dir}: {error}") from error
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if self._file is not None:
            self._file.abandon()
        if self._complete:  # in place; or if the last rename failed, kept for the user to move
            return
        self._remove()
        if kind is None:
            raise RuntimeError("the checkpoint was not finished: call finish(config) at the end")

    def _remove(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        for parent in self._made:
            with suppress(OSError):  # someone else may have put something there
                parent.rmdir()

    def _require_open(self) -> None:
        if self._complete or not self.partial.is_dir():
            raise RuntimeError("write inside `with CheckpointWriter(...)`, before finish")

    # -- tensors ----------------------------------------------------------------------------

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor."""
        self._require_open()
        if name in self._names:
            raise CheckpointError(f"{name} was added to {self.output_dir} twice")
        self._names.add(name)
        tensor = tensor.detach().cpu().contiguous()
        if self._file is not None and self._file.nbytes + tensor.nbytes > self.max_shard_bytes:
            self._close_shard()
        if self._file is None:
            self._file = ShardFile(self._shard(len(self._shards)))
        self._file.add(name, tensor)
        self._total_bytes += tensor.nbytes

    def _close_shard(self) -> None:
        assert self._file is not None
        self._file.close()
        self._shards.append(self._file.names)
        self._file = None

    def _shard(self, position: int) -> Path:
        """Where a shard lies until their number is known."""
        return self.partial / f"shard-{position:05d}.safetensors"

    # -- other files ------------------------------------------------------------------------

    def carry(self, shards: Shards) -> list[Path]:
        """Copy what is not weights; what was written already, and config.json, stay as they are."""
        self._require_open()
        carried = []
        for relative in shards.other_files():
            target = self.partial / relative
            if str(relative) == CONFIG or target.exists():
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(shards.folder / relative, target)
            carried.append(relative)
        return carried

    def write_text(self, name: str, text: str) -> None:
        """Write a file of its own; `name` is relative to the output."""
        self._require_open()
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or name in (CONFIG, INDEX):
            raise CheckpointError(
                f"{name} cannot be written here: {CONFIG} and {INDEX} come from "
                "finish, and all files lie inside the output"
            )
        target = self.partial / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")

    # -- the end ----------------------------------------------------------------------------

    def finish(self, config: dict[str, Any]) -> Path:
        """Write the config, name the shards, and move the checkpoint into place; return its path.

        From the moment that it is complete it is not removed again: if it cannot be moved into
        place, the error says where it is.
        """
        self._require_open()
        if self._file is not None:
            self._close_shard()
        if not self._shards:
            raise CheckpointError(f"no tensor was added to {self.output_dir}")
        (self.partial / CONFIG).write_text(_to_json(config), "utf-8")
        self._name_shards()
        for path in (*self.partial.rglob("*"), self.partial):
            _sync(path)
        self._complete = True
        try:
            old = self._move_into_place()
        except (OSError, CheckpointError) as error:
            raise CheckpointError(
                f"the checkpoint is complete, but could not be moved to {self.output_dir}: "
                f"{error}; it is kept at {self.partial}"
            ) from error
        if old is not None:
            shutil.rmtree(old)
        return self.output_dir

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            self._shard(0).rename(self.partial / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for position, names in enumerate(self._shards):
            file = f"model-{position + 1:05d}-of-{count:05d}.safetensors"
            self._shard(position).rename(self.partial / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.partial / INDEX).write_text(_to_json(index), "utf-8")

    def _move_into_place(self) -> Path | None:
        """Rename, and return where the old folder went; whenever this stops, one is complete."""
        self._check_output()  # hours may have passed since the first time
        out, aside = self.output_dir, None
        if out.exists():
            aside = out.with_name(f".{out.name}.old-{secrets.token_hex(4)}")
            out.rename(aside)
        try:
            self.partial.rename(out)
        except BaseException:
            if aside is not None:
                aside.rename(out)
            raise
        _sync(out.parent)
        return aside


def quantization_config_dict(config: QuantizationConfig) -> dict[str, Any]:
    """Return what stands under "quantization_config" in config.json, in JSON's own types."""
    content = {
        COMPRESSION_VERSION_NAME: compressed_tensors.__version__,
        QUANTIZATION_METHOD_NAME: QUANTIZATION_METHOD,
        SPARSITY_CONFIG_NAME: {},
        TRANSFORM_CONFIG_NAME: {},
        **config.model_dump(exclude={"quant_method"}),
    }
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


def _check_apart(out: Path, source: Path) -> None:
    if out == source:
        raise CheckpointError(f"{out} is the source itself; choose another folder for the output")
    if out in source.parents:
        raise CheckpointError(f"{out} contains the source {source}; choose another output folder")
    if source in out.parents:
        raise CheckpointError(f"{out} lies inside the source {source}; choose another output")


def _to_json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2, sort_keys=True) + "\n"


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
