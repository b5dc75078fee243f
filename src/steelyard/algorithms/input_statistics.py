"""Statistics of one input for balancing: max|x| of each channel, and a sample of tokens.

Both are kept apart for even and odd batches: a factor that is chosen by its error on odd batches
is made from even ones alone.

The sample holds the tokens with the smallest pseudo-random numbers, which depend on the batch and
the place in it alone. So the samples of several ranks join to that of one process.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["InputStatistics"]


class InputStatistics:
    """Largest magnitude of each channel, and at most `limit` tokens.

    device: keeps the sample; None for that of the input
    """

    def __init__(self, limit: int, device: torch.device | None = None) -> None:
        self.limit = limit
        self.device = device
        self._peaks: torch.Tensor | None = None  # (2, channels), of even and of odd batches
        self._rows: torch.Tensor | None = None  # (tokens, channels)
        self._order = torch.empty(0, dtype=torch.float64)  # (tokens,), ascending
        self._batch = torch.empty(0, dtype=torch.int64)

    @property
    def is_empty(self) -> bool:
        return self._peaks is None

    def add(self, x: torch.Tensor, batch: int) -> None:
        """Add the tokens of one batch; x: (..., channels)."""
        rows = x.detach().reshape(-1, x.shape[-1])
        if not len(rows):
            return
        generator = torch.Generator().manual_seed(batch)
        order = torch.rand(len(rows), dtype=torch.float64, generator=generator)
        chosen = order.argsort()[: self.limit]
        sample = rows[chosen.to(rows.device)].to(self.device or rows.device)
        numbers = torch.full((len(chosen),), batch)
        peaks = torch.zeros(2, rows.shape[-1], dtype=rows.dtype, device=rows.device)
        peaks[batch % 2] = torch.maximum(rows.amax(0), -rows.amin(0))
        self._join(peaks, sample.clone(), order[chosen], numbers)

    def state(self) -> tuple[Any, ...] | None:
        """Return the statistics to send to other ranks; None without tokens."""
        if self._peaks is None or self._rows is None:
            return None
        return self._peaks, self._rows, self._order, self._batch

    def restore(self, states: list[tuple[Any, ...] | None], device: torch.device) -> None:
        """Replace the statistics by those of all ranks."""
        kept = self.device or device
        self.__init__(self.limit, self.device)  # type: ignore[misc]
        for state in states:
            if state is not None:
                peaks, rows, order, batch = state
                self._join(peaks.to(device), rows.to(kept), order, batch)

    def _join(
        self,
        peaks: torch.Tensor,
        rows: torch.Tensor,
        order: torch.Tensor,
        batch: torch.Tensor,
    ) -> None:
        if self._peaks is None or self._rows is None:
            self._peaks, self._rows = peaks, rows
            self._order, self._batch = order, batch
            return
        self._peaks = torch.maximum(self._peaks, peaks)
        all_orders = torch.cat([self._order, order])
        kept = all_orders.argsort(stable=True)[: self.limit]
        self._rows = torch.cat([self._rows, rows])[kept.to(rows.device)]
        self._batch = torch.cat([self._batch, batch])[kept]
        self._order = all_orders[kept]

    # -- results ------------------------------------------------------------------------------

    def magnitudes(self, even: bool = False) -> torch.Tensor:
        """Return max|x| of each channel; even: of even batches alone, if there are any."""
        assert self._peaks is not None
        one_half = even and bool(self._peaks[0].any())
        return (self._peaks[0] if one_half else self._peaks.amax(0)).float()

    def halves(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sampled tokens of even and of odd batches; of one batch, every other token."""
        assert self._rows is not None
        rows = self._rows.to(device).float()
        odd = self._batch % 2 == 1
        if not odd.any() or odd.all():
            odd = torch.arange(len(rows)) % 2 == 1
        return rows[~odd.to(device)], rows[odd.to(device)]
