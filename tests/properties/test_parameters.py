"""Properties of min-max parameters: accuracy, agreement with compressed-tensors, symmetries."""

from __future__ import annotations

import numpy as np
import numpy_oracle as oracle
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from nvfp4 import nvfp4

from steelyard.observers import Observer

INT_BITS = st.integers(2, 8)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
# fp16 holds these and the scales of ranges this wide, without denormals
NUMBERS = st.floats(-1000, 1000, width=16).map(lambda x: x if abs(x) > 0.25 else 0.0)


def matrices(rows: tuple[int, int] = (1, 4), columns: tuple[int, int] = (1, 12)):
    shapes = st.tuples(st.integers(*rows), st.integers(*columns))
    return shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=NUMBERS))


def minmax(value: torch.Tensor, args: QuantizationArgs, base_name: str = "weight", **kwargs):
    observer = Observer.load_from_registry("memoryless_minmax", base_name=base_name, args=args)
    return observer(value, **kwargs).get_qparams()


def channel_args(bits: int, symmetric: bool, kind: str = "int") -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, type=kind, symmetric=symmetric, strategy="channel")


@given(matrices(), INT_BITS, st.booleans(), DTYPES)
@example(np.array([[-1.0, 1.0]], np.float32), 8, True, torch.bfloat16)
def test_round_trip_error_is_half_a_scale(matrix, bits, symmetric, dtype) -> None:
    args = channel_args(bits, symmetric)
    value = torch.from_numpy(matrix).to(dtype)
    qparams = minmax(value, args)
    x = value.double().numpy()
    scale, zero_point = (qparams[k].double().numpy() for k in ("scale", "zero_point"))
    qmin, qmax = oracle.limits(args)
    error = np.abs(oracle.reconstruct(x, scale, zero_point, args) - x)

    low, high = (qmin - zero_point) * scale, (qmax - zero_point) * scale
    in_range = (x >= low) & (x <= high)
    excess = np.where(in_range, error - scale / 2, 0)
    assert (excess <= 1e-6 * scale).all(), f"{excess.max()} above half of {scale}"

    # Nearly everything is in range. What is not: half a step at the upper end of a symmetric
    # type or of a rounded zero point, and what the scale lost when it was rounded to be stored.
    lost = (qmax - qmin) * torch.finfo(dtype).eps / 2
    assert (error <= scale * (1 + lost) * (1 + 1e-6)).all(), f"{error.max()} with scale {scale}"


@given(matrices(), INT_BITS, st.booleans(), DTYPES)
def test_integers_as_in_compressed_tensors(matrix, bits, symmetric, dtype) -> None:
    args = channel_args(bits, symmetric)
    value = torch.from_numpy(matrix).to(dtype)
    qparams = minmax(value, args)
    low, high = value.float().amin(-1, keepdim=True), value.float().amax(-1, keepdim=True)
    zeros = (low == 0) & (high == 0)

    scale, _ = calculate_qparams(low, high, args)
    expected = torch.where(zeros, torch.finfo(dtype).eps, scale.to(dtype).float()).to(dtype)
    assert qparams["scale"].dtype == dtype
    torch.testing.assert_close(qparams["scale"], expected, rtol=0, atol=0)

    # the zero point is that of the scale as stored
    qmin, qmax = oracle.limits(args)
    below = np.minimum(low.numpy(), 0)
    position = np.float32(qmin) - below / qparams["scale"].float().numpy()
    zero_point = 0 * position if symmetric else np.rint(np.clip(position, qmin, qmax))
    np.testing.assert_array_equal(qparams["zero_point"].numpy(), zero_point)


@given(matrices(), DTYPES)
def test_fp8_as_in_compressed_tensors(matrix, dtype) -> None:
    args = channel_args(8, True, "float")
    value = torch.from_numpy(matrix).to(dtype)
    low, high = value.float().amin(-1, keepdim=True), value.float().amax(-1, keepdim=True)
    scale, zero_point = calculate_qparams(low, high, args)
    zeros = (low == 0) & (high == 0)
    expected = torch.where(zeros, torch.finfo(dtype).eps, scale.to(dtype).float()).to(dtype)
    qparams = minmax(value, args)
    torch.testing.assert_close(qparams["scale"], expected, rtol=0, atol=0)
    assert qparams["zero_point"].dtype == zero_point.dtype
    assert not qparams["zero_point"].float().any()


@given(
    arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=3), elements=NUMBERS),
    st.sampled_from([4, 8]),
    DTYPES,
)
def test_mx_as_in_compressed_tensors(groups, bits, dtype) -> None:
    """Each number is the largest magnitude of a group of 32."""
    args = QuantizationArgs(
        num_bits=bits, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8
    )
    absmax = torch.from_numpy(groups).to(dtype)
    value = absmax.unsqueeze(-1) * torch.linspace(0, 1, 32, dtype=dtype)
    expected, _ = calculate_qparams(-absmax.float().abs(), absmax.float().abs(), args)
    qparams = minmax(value.flatten(-2), args)
    torch.testing.assert_close(qparams["scale"], expected, rtol=0, atol=0)


@given(
    arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=3), elements=NUMBERS), DTYPES
)
def test_nvfp4_as_in_compressed_tensors(groups, dtype) -> None:
    """Each number is the largest magnitude of a group of 16."""
    args = nvfp4()
    absmax = torch.from_numpy(groups).to(dtype)
    value = absmax.unsqueeze(-1) * torch.linspace(0, 1, 16, dtype=dtype)
    qparams = minmax(value.flatten(-2), args)
    largest = absmax.double().abs().max().item()
    if largest > 0:
        np.testing.assert_allclose(qparams["global_scale"].item(), 2688 / largest, rtol=1e-6)
    limit = absmax.float().abs()
    expected, _ = calculate_qparams(-limit, limit, args, qparams["global_scale"])
    torch.testing.assert_close(qparams["scale"], expected, rtol=0, atol=0)


@given(matrices(), INT_BITS, st.booleans(), DTYPES, st.integers(-4, 4))
def test_power_of_two_scales_the_scale(matrix, bits, symmetric, dtype, exponent) -> None:
    args = channel_args(bits, symmetric)
    value = torch.from_numpy(matrix).to(dtype)
    scaled = value * 2.0**exponent
    torch.testing.assert_close(scaled * 2.0**-exponent, value, rtol=0, atol=0)
    before, after = minmax(value, args), minmax(scaled, args)
    zeros = (value == 0).all(-1, keepdim=True)  # such a row has a scale that means nothing
    expected = torch.where(zeros, before["scale"], before["scale"] * 2.0**exponent)
    torch.testing.assert_close(after["scale"], expected, rtol=0, atol=0)
    torch.testing.assert_close(after["zero_point"], before["zero_point"], rtol=0, atol=0)


@given(
    matrices(rows=(2, 5), columns=(8, 8)),
    st.sampled_from(["memoryless_minmax", "memoryless_mse"]),
    st.sampled_from(["channel", "group"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_permuting_rows_permutes_parameters(matrix, name, strategy, symmetric, random) -> None:
    group = {"group_size": 4} if strategy == "group" else {}
    args = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy=strategy, **group)
    # patience looks at the whole tensor, which is the same in any order
    observer = Observer.load_from_registry(name, base_name="weight", args=args)
    value = torch.from_numpy(matrix)
    order = list(range(len(value)))
    random.shuffle(order)
    before = observer(value).get_qparams()
    after = observer(value[order]).get_qparams()
    for key in ("scale", "zero_point"):
        torch.testing.assert_close(after[key], before[key][order], rtol=0, atol=0)


@given(
    matrices(rows=(1, 3), columns=(12, 12)),
    st.sampled_from(["memoryless_minmax", "memoryless_mse", "static_minmax"]),
    st.sampled_from(["group", "tensor_group"]),
    st.permutations([0, 1, 2] * 4),
)
def test_g_idx_is_a_permutation_by_hand(matrix, name, strategy, g_idx) -> None:
    """Columns of one group are brought together in their order, then grouped as usual."""
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy=strategy, group_size=4)
    value = torch.from_numpy(matrix)
    by_hand = [column for group in range(3) for column in range(12) if g_idx[column] == group]
    mapped = Observer.load_from_registry(name, base_name="weight", args=args)
    plain = Observer.load_from_registry(name, base_name="weight", args=args)
    actual = mapped(value, g_idx=torch.tensor(g_idx)).get_qparams()
    expected = plain(value[:, by_hand]).get_qparams()
    for key, wanted in expected.items():
        if wanted is not None:
            torch.testing.assert_close(actual[key], wanted, rtol=0, atol=0)
    # of the parameters of group g, those that belong to column c are at g_idx[c]
    if name != "memoryless_mse" and strategy == "group":
        for column, group in enumerate(g_idx):
            reach = actual["scale"][:, group] * 15  # of an unsigned 4-bit range
            assert bool((value[:, column].abs() <= reach * (1 + 1e-5)).all())


@given(
    matrices(rows=(1, 3), columns=(12, 12)),
    arrays(np.float32, (12,), elements=st.floats(0, 100, width=16)),
    st.permutations([0, 1, 2] * 4),
)
def test_g_idx_takes_importance_along(matrix, importance, g_idx) -> None:
    """Weights of the columns move with the columns."""
    args = QuantizationArgs(num_bits=3, strategy="group", group_size=4)
    value = torch.from_numpy(matrix)
    by_hand = [column for group in range(3) for column in range(12) if g_idx[column] == group]
    answers = []
    for order, mapping in ((list(range(12)), torch.tensor(g_idx)), (by_hand, None)):
        observer = Observer.load_from_registry("imatrix_mse", base_name="weight", args=args)
        module = torch.nn.Linear(12, 1, bias=False)
        observer.attach(module)
        module(torch.from_numpy(np.sqrt(importance) + 0.125)[order].reshape(1, 12))
        answers.append(observer(value[:, order], g_idx=mapping).get_qparams()["scale"])
    torch.testing.assert_close(answers[0], answers[1], rtol=0, atol=0)


@given(matrices(columns=(8, 8)), st.booleans())
def test_g_idx_that_is_not_set_means_the_stored_order(matrix, symmetric) -> None:
    args = QuantizationArgs(num_bits=4, symmetric=symmetric, strategy="group", group_size=4)
    value = torch.from_numpy(matrix)
    plain = minmax(value, args)
    for g_idx in (torch.full((8,), -1), torch.tensor([0] * 4 + [1] * 4)):
        mapped = minmax(value, args, g_idx=g_idx)
        for key in ("scale", "zero_point"):
            torch.testing.assert_close(mapped[key], plain[key], rtol=0, atol=0)
