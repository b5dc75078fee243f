import torch

class Format:
    def __init__(
        self,
        *,
        is_int: bool,
        symmetric: bool,
        qmin: float,
        qmax: float,
        mantissa: int,
        min_exponent: int,
        scale: int,
        global_scale: float | None,
        mx_offset: int,
        mx_round_bit: int,
    ) -> None: ...

def range(
    values: torch.Tensor, low: torch.Tensor, high: torch.Tensor, isa: str, threads: int
) -> None: ...
def qparams(
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    format: Format,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    isa: str,
    threads: int,
) -> None: ...
def search(
    values: torch.Tensor,
    format: Format,
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    factors: list[float],
    norm: float,
    patience: int,
    weights: torch.Tensor | None,
    best_min: torch.Tensor,
    best_max: torch.Tensor,
    isa: str,
    threads: int,
) -> None: ...
def optimal(
    values: torch.Tensor,
    format: Format,
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    weights: torch.Tensor | None,
    norm: float,
    negative: bool,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    isa: str,
    threads: int,
) -> None: ...
def sum_squares(values: torch.Tensor, sums: torch.Tensor, isa: str, threads: int) -> None: ...
def histogram(
    values: torch.Tensor, rows: torch.Tensor | None, counts: torch.Tensor, isa: str, threads: int
) -> None: ...
def range_costs(
    counts: torch.Tensor,
    format: Format,
    unit: torch.Tensor,
    zero_point: torch.Tensor,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
    norm: float,
    costs: torch.Tensor,
    isa: str,
    threads: int,
) -> None: ...
def pack(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    format: Format,
    block_rows: int,
    block_columns: int,
    num_bits: int,
    layout: int,
    round_quotient: bool,
    out: torch.Tensor | None,
    errors: torch.Tensor | None,
    isa: str,
    threads: int,
) -> None: ...
def gptq_block(
    weight: torch.Tensor,
    lower: torch.Tensor | None,
    sums: torch.Tensor | None,
    added: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    group: torch.Tensor,
    format: Format,
    type: int,
    round_quotient: bool,
    tight: bool,
    values: torch.Tensor | None,
    errors: torch.Tensor,
    losses: torch.Tensor,
    isa: str,
    threads: int,
) -> None: ...
def refine_block(
    hessian: torch.Tensor,
    sums: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    group: torch.Tensor,
    format: Format,
    type: int,
    round_quotient: bool,
    tight: bool,
    fit: bool,
    values: torch.Tensor,
    errors: torch.Tensor,
    isa: str,
    threads: int,
) -> None: ...
def instruction_sets() -> list[str]: ...
def cpu_features() -> list[str]: ...
def compiler() -> str: ...
