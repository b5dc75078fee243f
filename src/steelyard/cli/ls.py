"""`steelyard ls`: lists observers, schemes and strategies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from steelyard.cli import options
from steelyard.cli.known import KINDS, completing, one_of
from steelyard.cli.terminal import Column, print_document, print_line, print_table

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationScheme

__all__ = ["STRATEGIES", "ls"]

STRATEGIES = {
    "tensor": "one scale for the whole tensor",
    "channel": "one scale for each row of a weight",
    "group": "one scale for each run of group_size columns in a row",
    "tensor_group": "groups, whose scales are stored relative to one global scale (NVFP4)",
    "block": "one scale for each rectangle of a weight",
    "token": "one scale for each token of an activation",
    "attn_head": "one scale for each attention head",
}


def _kind(value: str | None) -> str | None:
    return None if value is None else one_of("list", value, KINDS)


def ls(
    kind: Annotated[
        str | None,
        typer.Argument(
            metavar="observers|schemes|strategies",
            callback=_kind,
            autocompletion=completing(lambda: KINDS),
            help="What to list; everything by default.",
            show_default=False,
        ),
    ] = None,
    plugins: options.Plugins = None,
    json: options.Json = False,
) -> None:
    """List observers, schemes and strategies.

    \b
    Examples:
      steelyard ls schemes
      steelyard ls observers --json
    """
    found: dict[str, Any] = {}
    if kind in (None, "observers"):
        found["observers"] = _observers()
    if kind in (None, "schemes"):
        found["schemes"] = _schemes()
    if kind in (None, "strategies"):
        found["strategies"] = STRATEGIES
    if json:
        print_document("ls", found)
        return
    for i, (name, content) in enumerate(found.items()):
        if i:
            print_line()
        if name == "schemes":
            print_table(
                [Column("scheme"), Column("weights"), Column("activations"), Column("data")],
                [
                    [
                        each,
                        facts["weights"],
                        facts["activations"],
                        "needed" if facts["needs_data"] else "",
                    ]
                    for each, facts in content.items()
                ],
            )
        else:
            title = {"observers": "observer", "strategies": "strategy"}[name]
            print_table([Column(title), Column("description")], [list(p) for p in content.items()])


def _observers() -> dict[str, str]:
    from steelyard.observers import Observer

    return Observer.registry.describe()


def _schemes() -> dict[str, dict[str, Any]]:
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

    return {
        name: describe_scheme(preset_name_to_scheme(name, ["Linear"]))
        for name in sorted(PRESET_SCHEMES)
        if name != "UNQUANTIZED"
    }


def describe_scheme(scheme: QuantizationScheme) -> dict[str, Any]:
    """Describe the weights and activations of a scheme, and whether it needs calibration data."""
    from steelyard.formats import describe_args

    inputs = scheme.input_activations
    activations = "not quantized"
    if inputs is not None:
        when = {True: "dynamic", False: "static"}.get(
            inputs.dynamic, "dynamic, static global scale"
        )
        activations = f"{describe_args(inputs)}, {when}"
    return {
        "weights": describe_args(scheme.weights) if scheme.weights is not None else "not quantized",
        "activations": activations,
        "needs_data": inputs is not None and inputs.dynamic is not True,
    }
