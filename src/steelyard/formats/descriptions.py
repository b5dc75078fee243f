"""Types and schemes in words, for reports, tables and messages."""

from __future__ import annotations

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from steelyard.formats.scale_codes import is_exponents

__all__ = ["describe_args", "describe_scales", "scheme_label"]


def describe_args(args: QuantizationArgs) -> str:
    """Return a type and its strategy in a few words.

    >>> describe_args(QuantizationArgs(num_bits=4, strategy="group", group_size=128))
    'int4 group 128'
    """
    name = f"{'fp' if args.type == 'float' else 'int'}{args.num_bits}"
    if args.scale_dtype is not None and is_exponents(args.scale_dtype):
        return f"mx{name}"
    if args.strategy == "tensor_group":
        return f"nv{name}"
    words = [name] if args.symmetric else [name, "asymmetric"]
    words.append(_strategy(args))
    if args.strategy == "group":
        words.append(str(args.group_size))
    if args.strategy == "block":
        words.append("x".join(map(str, args.block_structure)))
    return " ".join(words)


def describe_scales(args: QuantizationArgs) -> str:
    """Return a type and the layout of its scales in words.

    >>> describe_scales(QuantizationArgs(num_bits=4, strategy="group", group_size=128))
    'int4, group of 128, symmetric'
    """
    strategy = _strategy(args)
    if args.group_size and args.group_size > 0:
        strategy += f" of {args.group_size}"
    if args.block_structure:
        strategy += " of " + " x ".join(map(str, args.block_structure))
    symmetry = "symmetric" if args.symmetric else "asymmetric"
    return f"{getattr(args.type, 'value', args.type)}{args.num_bits}, {strategy}, {symmetry}"


def scheme_label(scheme: QuantizationScheme) -> str:
    """Return a scheme's name in the usual shorthand: bits of weights and of activations.

    >>> scheme_label(preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]))
    'W8A8-FP'
    """
    sides = (scheme.weights, scheme.input_activations)
    bits = [16 if side is None else side.num_bits for side in sides]
    floats = any(side is not None and side.type == "float" for side in sides)
    return f"W{bits[0]}A{bits[1]}" + ("-FP" if floats else "")


def _strategy(args: QuantizationArgs) -> str:
    return str(getattr(args.strategy, "value", args.strategy) or "tensor").replace("_", " ")
