"""Ways to damage a finished checkpoint, each a function of its folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Damage = Callable[[Path], None]
Q, K = "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj"
GATE, UP = "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"
INDEX = "model.safetensors.index.json"
CODES = ("weight_packed", "weight")


def tensors(change: Callable[[Tensors], Any]) -> Damage:
    """Damage to tensors; the file is written anew by the library's own writer."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = load_file(path)
        change(content)
        path.unlink()  # it may be linked to the good one
        kept = {name: value.contiguous() for name, value in content.items()}
        save_file(kept, path, metadata={"format": "pt"})

    return damage


def config(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        content = json.loads(path.read_text())
        change(content)
        path.unlink()
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    return damage


def quantization(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return config(lambda c: change(c["quantization_config"]))


def group(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return quantization(lambda c: change(c["config_groups"]["group_0"]))


def weights(**fields: Any) -> Damage:
    return group(lambda g: g["weights"].update(fields))


def setting(key: str, value: Any) -> Damage:
    return config(lambda c: c.update({key: value}))


def codes_of(content: Tensors, module: str) -> str:
    """Return the name of the tensor that holds the codes of a module."""
    return next(f"{module}.{leaf}" for leaf in CODES if f"{module}.{leaf}" in content)


def raw(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(torch.uint8)


def codes(change: Callable[[torch.Tensor], torch.Tensor], module: str = Q) -> Damage:
    """Damage to the codes of a module, given as bytes (rows, bytes of a row)."""

    def apply(content: Tensors) -> None:
        name = codes_of(content, module)
        before = content[name]
        content[name] = change(raw(before).clone()).contiguous().view(before.dtype)

    return tensors(apply)


def value(leaf: str, change: Callable[[torch.Tensor], Any], module: str = Q) -> Damage:
    """Damage to one tensor; `change` returns the new one, or changes it in place."""

    def apply(content: Tensors) -> None:
        name = f"{module}.{leaf}"
        changed = change(content[name])
        if isinstance(changed, torch.Tensor):
            content[name] = changed

    return tensors(apply)


def first(leaf: str, number: float, module: str = Q) -> Damage:
    """Set the first value of a tensor; bytes are set as they are."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.clone() if tensor.dtype == torch.uint8 else tensor.float()
        wide.view(-1)[0] = number
        return wide.to(tensor.dtype)

    return value(leaf, change, module)


def times(leaf: str, factor: float, module: str = Q) -> Damage:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.uint8:  # exponents
            return tensor + round(factor).bit_length() - 1
        return (tensor.float() * factor).to(tensor.dtype)

    return value(leaf, change, module)


def flip(leaf: str, index: int, bit: int, module: str = Q) -> Damage:
    """Flip one bit of one byte of a tensor."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        flat = raw(tensor).clone().view(-1)
        flat[index] ^= 1 << bit
        return flat.view(tensor.dtype).reshape(tensor.shape)

    return value(leaf, change, module)


def drop(*names: str) -> Damage:
    return tensors(lambda content: [content.pop(name) for name in names])


def drop_leaf(leaf: str) -> Damage:
    def apply(content: Tensors) -> None:
        for name in [name for name in content if name.endswith(f".{leaf}")]:
            del content[name]

    return tensors(apply)


def add(name: str, tensor: torch.Tensor) -> Damage:
    return tensors(lambda content: content.update({name: tensor}))


def swap(first_name: str, second_name: str, only: str = "") -> Damage:
    """Exchange the tensors of two modules."""

    def apply(content: Tensors) -> None:
        for name in [n for n in content if n.startswith(f"{first_name}.") and n.endswith(only)]:
            other = name.replace(first_name, second_name, 1)
            content[name], content[other] = content[other], content[name]

    return tensors(apply)


def swap_codes(content: Tensors) -> None:
    one, two = codes_of(content, GATE), codes_of(content, UP)
    content[one], content[two] = content[two], content[one]


def copy_module(content: Tensors) -> None:
    """Give a module the weights of its neighbour in the layer before."""
    for name in [name for name in content if name.startswith(f"{Q}.")]:
        content[name] = content[name.replace("layers.1", "layers.0")].clone()


def cast(leaf: str, dtype: torch.dtype, module: str = Q) -> Damage:
    return value(leaf, lambda tensor: tensor.to(dtype), module)


def random_bytes(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    made = torch.randint(0, 256, tensor.shape, dtype=torch.uint8, generator=generator)
    made[(made & 0x7F) == 0x7F] = 0  # no NaN of 8-bit floats
    return made


def zero_half(tensor: torch.Tensor) -> torch.Tensor:
    tensor[: len(tensor) // 2] = 0
    return tensor


def reversed_words(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(len(tensor), -1, 4).flip(-1).reshape(tensor.shape)


def nibbles(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor >> 4) | (tensor << 4)


def cut(name: str, keep: float = 0.5) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return damage


def replace(name: str, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)

    return damage


def header_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[content.index(b"data_offsets") + 16] ^= 1  # a digit
    path.unlink()
    path.write_bytes(bytes(content))


def extra_shard(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(128)}, folder / "more.safetensors")


# -- several shards --------------------------------------------------------------------------------


def sharded(damage: Damage) -> Damage:
    """Split the checkpoint into two shards before it is damaged."""

    def apply(folder: Path) -> None:
        content = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(content)
        places = {}
        for number, part in enumerate((names[::2], names[1::2]), start=1):
            file = f"model-0000{number}-of-00002.safetensors"
            save_file({name: content[name] for name in part}, folder / file)
            places |= dict.fromkeys(part, file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        damage(folder)

    return apply


def index(change: Callable[[dict[str, str]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return sharded(damage)


def swap_shards(folder: Path) -> None:
    one, two = sorted(folder.glob("model-*.safetensors"))
    one.rename(folder / "other")
    two.rename(one)
    (folder / "other").rename(two)


def lose_shard(folder: Path) -> None:
    sorted(folder.glob("model-*.safetensors"))[0].unlink()


def wrong_shard(places: dict[str, str]) -> None:
    name = next(iter(places))
    places[name] = next(file for file in places.values() if file != places[name])
