"""The accelerator of a rank is that of its LOCAL_RANK."""

from __future__ import annotations

import pytest
import torch

from steelyard.distributed import local_index
from steelyard.errors import RanksError


def test_more_ranks_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("LOCAL_RANK", str(torch.accelerator.device_count()))
    with pytest.raises(RanksError, match="as many ranks as there are"):
        local_index()
