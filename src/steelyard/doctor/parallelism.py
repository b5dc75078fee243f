"""Over how many processes vLLM can split a checkpoint by tensor parallelism."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from steelyard.checkpoint.config_file import text_config
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.errors import CheckpointError
from steelyard.formats.tensor_parallel import Split, split_of
from steelyard.kernels.scale_blocks import divides

__all__ = ["MOST", "Parallelism"]

MOST = 8
_KEYS_AND_VALUES = ("k_proj", "v_proj")


class Parallelism:
    """How the weights of a checkpoint can be split."""

    def __init__(self, written: WrittenCheckpoint) -> None:
        self._written = written
        self._heads, self._kv_heads = _heads(written)
        self._splits: dict[str, Split] = {}
        for module, scheme in written.schemes.items():
            if scheme.weights is None:
                continue
            with suppress(CheckpointError, ValueError):  # named by other checks
                self._splits[module] = split_of(module, scheme.weights, written.shape(module))

    def possible(self) -> list[int]:
        """Return the numbers of processes up to 8 that the model and its scales divide over."""
        return [n for n in range(1, MOST + 1) if not any(True for _ in self.indivisible(n))]

    def indivisible(self, processes: int) -> Iterator[str]:
        """Yield what does not divide over this number of processes."""
        if not divides(processes, self._heads):
            yield f"{self._heads} attention heads do not divide over {processes} processes"
            return
        if self._written.config["quantization_config"].get("transform_config") and processes > 1:
            yield "transform_config: vLLM applies online rotations in one process only"
        for module, split in self._splits.items():
            keys = module.rpartition(".")[2] in _KEYS_AND_VALUES
            shares = min(processes, self._kv_heads) if keys else processes  # heads are repeated
            if split.breaks(shares):
                units = f" in units of {split.unit}" if split.unit > 1 else ""
                yield (
                    f"{module}: {split.size} {split.side}{units} do not divide over {shares} "
                    "processes"
                )


def _heads(written: WrittenCheckpoint) -> tuple[int, int]:
    """Return the numbers of attention heads, and of those of keys and values."""
    text = text_config(written.config)
    heads = text.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        return 840, 840  # unknown: divides over any number
    kv_heads = text.get("num_key_value_heads")
    return heads, kv_heads if isinstance(kv_heads, int) and kv_heads > 0 else heads
