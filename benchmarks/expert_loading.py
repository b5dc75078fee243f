"""Does vLLM's weight loader take every tensor of quantized experts, and put it in its place?

vLLM for a CPU has no kernel for most quantized experts, so they cannot be served here. What a
server does before its first kernel can be tried: this quantizes small models of each family with
experts, builds vLLM's own class for each checkpoint, and lets it load the tensors.

    python benchmarks/expert_loading.py --server PYTHON [--json FILE] [FAMILY ...]

PYTHON is that of an environment with vLLM. A checkpoint is "ok" if

- every tensor of the files was copied into a parameter, whole, and none was repeated to fit;
- every element of every parameter was written, but for those that vLLM registers and never reads;
- all weights, decoded from the parameters, are those of the model in bf16 as vLLM loads it, within
  rounding, and all that is not quantized is equal to it: nothing is swapped, shifted or under a
  wrong scale.

As a control, each checkpoint is loaded again without a tensor of an expert, with one under another
name, and with the weights of two projections exchanged; each must be found.

No name and no shape is patched. What vLLM decides by the platform is: which kernel runs W4A16,
W8A8 and NVFP4, and that a CPU has none for experts without a gate.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

import torch

SCHEMES = ("W4A16", "W8A8", "FP8_DYNAMIC", "FP8", "NVFP4A16", "NVFP4")
WITH_DATA = ("FP8", "NVFP4")
REST = "the rest"  # FP8_DYNAMIC, with all experts ignored
GROUP = 32  # columns in W4A16: every width of the small models divides
SOURCE = "bf16"
# Relative error of a weight that is in its place; another one's is above 1.
TOLERANCE = {"W4A16": 0.2, "W8A8": 0.02, "FP8_DYNAMIC": 0.05, "FP8": 0.05, REST: 0.05}
TOLERANCE |= {"NVFP4A16": 0.15, "NVFP4": 0.15}
ENGINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}
# Parameters that vLLM registers, and does not read unless the checkpoint has them.
UNREAD = re.compile(r"\.attn\.[qkv]_(scale|zero_point)$")
UNREAD_INPUTS = re.compile(r"\.w(13|2)_input_global_scale$")  # in NVFP4A16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# ---- in the server's environment ----


def take_the_platform_for_granted() -> None:
    """Override what vLLM decides by the platform; the parameters are left to it."""
    from importlib import import_module

    layers = "vllm.model_executor.layers"
    tensors = f"{layers}.quantization.compressed_tensors"
    oracle = f"{layers}.fused_moe.oracle"
    experts = {
        "wna16": ("select_wna16_moe_backend", f"{oracle}.int_wna16", "WNA16MoEBackend", "TRITON"),
        "w8a8_int8": ("select_int8_moe_backend", f"{oracle}.int8", "Int8MoeBackend", "TRITON"),
        "w4a4_nvfp4": (
            "select_nvfp4_moe_backend",
            f"{oracle}.nvfp4",
            "NvFp4MoeBackend",
            "EMULATION",
        ),
    }
    for kind, (function, module, enum, member) in experts.items():
        user = import_module(f"{tensors}.compressed_tensors_moe.compressed_tensors_moe_{kind}")
        backend = getattr(import_module(module), enum)[member]
        override(user, function, lambda *_, backend=backend, **__: (backend, None))

    class NoKernel:
        def __init__(self, *_, **__) -> None:
            pass

        def input_quant_key(self) -> None:
            return None

    schemes = f"{tensors}.schemes.compressed_tensors"
    override(
        import_module(f"{schemes}_wNa16"), "choose_mp_linear_kernel", lambda *_, **__: NoKernel
    )
    override(import_module(f"{schemes}_w4a4_nvfp4"), "init_nvfp4_linear_kernel", NoKernel)

    dense = import_module(f"{layers}.fused_moe.unquantized_fused_moe_method")
    backend = import_module(f"{oracle}.unquantized").UnquantizedMoeBackend.TRITON
    override(dense, "select_unquantized_moe_backend", lambda *_, **__: (backend, None))
    config = import_module(f"{layers}.fused_moe.config").FusedMoEConfig
    check = config.__post_init__

    def without_gate_too(self) -> None:
        try:
            check(self)
        except NotImplementedError as error:  # its last statement
            if "is_act_and_mul=False" not in str(error):
                raise

    override(config, "__post_init__", without_gate_too)


def import_vision_classes() -> None:
    """Import vLLM's classes for images without torchvision, which loads no weight.

    torchvision of the registry does not load with torch for a CPU.
    """
    import types

    from transformers.utils import is_torchvision_available
    from vllm import ModelRegistry

    if not is_torchvision_available():
        path = "torchvision"
        parent = sys.modules[path] = types.ModuleType(path)
        for name in ("transforms", "v2", "functional"):
            path = f"{path}.{name}"
            parent.__path__ = []
            sys.modules[path] = types.ModuleType(path)
            setattr(parent, name, sys.modules[path])
            parent = sys.modules[path]
    from vllm.model_executor.models.qwen3_5 import Qwen3_5MoeForCausalLM
    from vllm.model_executor.models.qwen3_vl_moe import Qwen3VLMoeForConditionalGeneration

    # by itself vLLM would import them in a process of its own, to look at them
    for found in (Qwen3_5MoeForCausalLM, Qwen3VLMoeForConditionalGeneration):
        ModelRegistry.register_model(found.__name__, found)


def override(owner, name: str, value) -> None:
    if not hasattr(owner, name):
        raise SystemExit(f"{owner.__name__} of this vLLM has no {name}")
    setattr(owner, name, value)


def build(folder: str):
    """Return vLLM's config and model for a checkpoint, with nothing loaded."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64}
    config = EngineArgs(model=folder, dtype="bfloat16", **options).create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            place = tempfile.mkdtemp()
            init_distributed_environment(1, 0, f"file://{place}/group", 0, "gloo")
            initialize_model_parallel(1, 1)
        with set_default_torch_dtype(torch.bfloat16):
            return config, initialize_model(vllm_config=config)


def tensors_of(folder: str) -> dict:
    from safetensors.torch import load_file

    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def follower(tensors: dict, model):
    """Return a mode that follows tensors of the files into parameters of the model.

    taken:    tensor of the files -> number of elements that were copied into a parameter
    repeated: tensors that a copy repeated to fit
    """
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode

    def place(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    class Follow(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.origin = {place(t): name for name, t in tensors.items()}
            self.owned = {place(p) for p in model.parameters()}
            self.kept = []  # a storage that is freed would give its place to another
            self.number = None  # the tensor that was last read as a number
            self.taken = dict.fromkeys(tensors, 0)
            self.repeated = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            given = [place(a) for a in args if isinstance(a, Tensor)]
            sources = [self.origin[key] for key in given if key in self.origin]
            name = function.overloadpacket.__name__
            if name == "_local_scalar_dense" and sources:
                self.number = sources[0]
            elif name == "fill_" and given[0] in self.owned and self.number is not None:
                self.taken[self.number] += 1
                self.number = None
            elif name == "copy_" and given[0] in self.owned and sources:
                self.taken[sources[-1]] += args[1].numel()
                if args[1].numel() != args[0].numel():
                    self.repeated.add(sources[-1])
            elif sources and isinstance(result, Tensor) and place(result) not in self.origin:
                self.origin[place(result)] = sources[0]
                self.kept.append(result)
            return result

    return Follow()


def load(config, model, tensors: dict, byte: int):
    """Fill all parameters with a byte, let vLLM load tensors, and return what it did.

    vLLM takes an `input_scale` of 1 for none yet, and compares others; so these are filled with 1.
    """
    from vllm.config import set_current_vllm_config

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("_input_scale"):
                parameter.fill_(1)
            else:
                as_bytes(parameter.data).fill_(byte)
        with set_current_vllm_config(config), follower(tensors, model) as followed:
            model.load_weights(iter(tensors.items()))
    return followed, {name: p.data.clone() for name, p in model.named_parameters()}


def as_bytes(tensor):
    return tensor.view(-1).view(torch.uint8)


def unfilled(first: dict, second: dict, scheme: str) -> list[str]:
    """Return parameters with an element that two loads over different bytes left different."""
    found = []
    for name, value in first.items():
        if UNREAD.search(name) or (scheme == "NVFP4A16" and UNREAD_INPUTS.search(name)):
            continue
        if name.endswith("_input_scale"):
            left = value == 1
        else:
            left = as_bytes(value) != as_bytes(second[name])
        if left.any():
            found.append(name)
    return found


def decoded(stem: str, values: dict, model):
    """Return a weight as numbers, (..., out, in), from the parameters that its name begins."""
    packed = values.get(f"{stem}weight_packed")
    if packed is None:
        codes = values[f"{stem}weight"].float()
    elif packed.dtype == torch.int32:
        nibbles = (packed[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 15
        codes = nibbles.flatten(-2).float() - 8
    else:
        nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()
        codes = torch.tensor([*E2M1, *(-x for x in E2M1)])[nibbles]
    scale = spread(values[f"{stem}weight_scale"].float(), codes, stem, model)
    total = values.get(f"{stem}weight_global_scale")
    return codes * scale if total is None else codes * scale / spread(total, codes, stem, model)


def spread(scale, codes, stem: str, model):
    """Return scales as one for each element: of groups, of rows, or of the layers that are fused.

    A scale of a tensor is (..., parts), one for each of the fused layers, or (...).
    """
    rows, columns = codes.shape[-2:]
    if scale.ndim == codes.ndim:
        return scale.repeat_interleave(columns // scale.shape[-1], -1)
    if scale.ndim == codes.ndim - 2:
        scale = scale[..., None]
    parts = scale.shape[-1]
    sizes = [rows // parts] * parts
    if stem.endswith(".") and parts > 1:
        sizes = model.get_submodule(stem[:-1]).output_partition_sizes
    return scale.repeat_interleave(torch.tensor(sizes), -1)[..., None]


def misplaced(values: dict, dense: dict, scheme: str, model) -> list[str]:
    """Return weights that differ from the dense model's by more than rounding."""
    found, seen = [], set()
    for name in values:
        stem = re.sub(r"weight(_packed)?$", "", name)
        if stem == name or f"{stem}weight_scale" not in values:
            continue
        other, own = dense[f"{stem}weight"].float(), decoded(stem, values, model)
        error = (own - other).flatten(-2).norm(dim=-1) / other.flatten(-2).norm(dim=-1)
        if own.shape != other.shape or not bool((error < TOLERANCE[scheme]).all()):
            found.append(f"{name}: off by {float(error.max()):.2f}")
        seen.add(f"{stem}weight")
    for name in values.keys() & dense.keys() - seen:
        if not UNREAD.search(name) and not torch.equal(values[name], dense[name]):
            found.append(name)
    return found


def faults(config, model, tensors: dict, dense: dict, scheme: str) -> list[str]:
    """Load tensors; return all that is wrong."""
    followed, first = load(config, model, tensors, 0x35)
    _, second = load(config, model, tensors, 0x4A)
    lost = [n for n, count in followed.taken.items() if count < tensors[n].numel()]
    found = {
        "not copied": [n for n in lost if not followed.taken[n]],
        "copied in part": [n for n in lost if followed.taken[n]],
        "repeated": sorted(followed.repeated),
        "not filled": unfilled(first, second, scheme),
    }
    if scheme != SOURCE and not any(found.values()):
        found["another weight"] = misplaced(first, dense, scheme, model)
    return [
        f"{kind}: {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        for kind, names in found.items()
        if names
    ]


def damaged(tensors: dict) -> dict[str, dict]:
    """Return copies with a tensor of an expert missing, misnamed, and exchanged for another."""
    own = re.compile(r"\.experts\.1\.(gate_proj|w1|up_proj)\.weight(_packed)?$")
    first = next(name for name in tensors if own.search(name))
    other = first.replace(".gate_proj.", ".up_proj.").replace(".w1.", ".w3.")
    if other == first:  # there is no gate
        other = first.replace(".experts.1.", ".experts.2.")
    missing = {name: t for name, t in tensors.items() if name != first}
    return {
        "missing": missing,
        "misnamed": {**missing, first.replace(".weight", ".weigth"): tensors[first]},
        "exchanged": {**tensors, first: tensors[other], other: tensors[first]},
    }


def try_family(folders: dict[str, str]) -> dict[str, dict]:
    """Return for each scheme of a family what became of its checkpoint; bf16 comes first."""
    answers: dict[str, dict] = {}
    dense: dict = {}
    for scheme, folder in folders.items():
        tensors = tensors_of(folder)
        try:
            config, model = build(folder)
            found = faults(config, model, tensors, dense, scheme)
            if scheme == SOURCE:
                dense = load(config, model, tensors, 0)[1]
            elif scheme != REST and not found:
                damages = missed(config, model, tensors, dense, scheme)
                found = [f"a tensor {damage} is not found" for damage in damages]
        except Exception as error:  # the table says which one, and why
            found = [f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"]
            if scheme == SOURCE:
                return {each: {"not built": found[0]} for each in folders}
        experts = [name for name in tensors if ".experts." in name]
        answers[scheme] = {"tensors": len(tensors), "of experts": len(experts), "faults": found}
    return answers


def missed(config, model, tensors: dict, dense: dict, scheme: str) -> list[str]:
    """Return the damages that were not found for what they are."""
    kinds = {"missing": "not filled", "misnamed": "not copied", "exchanged": "another weight"}
    found = []
    for damage, changed in damaged(tensors).items():
        try:
            noticed = faults(config, model, changed, dense, scheme)
        except (AttributeError, KeyError, ValueError):
            if damage != "misnamed":  # which some loaders refuse
                raise
            continue
        if not any(text.startswith(kinds[damage]) for text in noticed):
            found.append(damage)
    return found


def answer(asked: str, answered: str) -> None:
    """Try each family that the file `asked` names; write to the file `answered`."""
    os.environ.update(ENGINE)
    from vllm import __version__

    take_the_platform_for_granted()
    import_vision_classes()
    question = json.loads(Path(asked).read_text())
    answers = {family: try_family(folders) for family, folders in question.items()}
    Path(answered).write_text(json.dumps({"version": __version__, "answers": answers}))


# ---- in Steelyard's ----

FAMILIES = (
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "deepseek_v3",
    "glm4_moe",
    "granitemoe",
    "llama4",
    "minimax_m2",
    "gpt_oss",
    "ernie4_5_moe",
    "qwen3_next",
    "nemotron_h",
    "granitemoehybrid",
    "jamba",
    "qwen3_vl_moe",
)
# More than the small models of the tests have: class, config class, its options.
SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
OTHERS = {
    "phimoe": ("Phimoe", {"num_local_experts": 4}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 64,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"],
        },
    ),
    "granitemoeshared": (
        "GraniteMoeShared",
        {"num_local_experts": 4, "shared_intermediate_size": 64},
    ),
    "deepseek_v2": ("DeepseekV2", {**ROUTED, **LATENT}),
    "glm4_moe_lite": ("Glm4MoeLite", {**ROUTED, **LATENT}),
    "flex_olmo": ("FlexOlmo", {"num_experts": 4}),
    "exaone_moe": (
        "ExaoneMoe",
        {
            "num_experts": 4,
            "num_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "head_dim": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            "num_experts": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}
# Keys that vLLM reads and published files have, but transformers' classes do not write.
PUBLISHED = {
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen3_vl_moe": {"text_config": {"norm_topk_prob": True}},
}
# Published with experts as (experts, in, out); transformers saves (experts, out, in).
TURNED = {"qwen3_vl_moe"}
WIDTH = 96  # of an expert there, so that no stack is square
# Layers that vLLM does not quantize.
IGNORED = {"jamba": (r"re:.*\.mamba\..*",)}


def write_source(family: str, folder: Path) -> None:
    """Write a small model of a family, as published ones are."""
    import transformers
    from model_matrix import MATRIX, decoder, matrix_model
    from safetensors.torch import load_file, save_file

    if family in OTHERS:
        stem, options = OTHERS[family]
        MATRIX[family] = decoder("experts", stem, **{**SMALL, **options})
        if hasattr(transformers, f"{stem}TextConfig"):  # of a model for images, the part for text
            MATRIX[family] = replace(MATRIX[family], config=f"{stem}TextConfig")
    if family in TURNED:
        MATRIX[family].options["text_config"]["moe_intermediate_size"] = WIDTH
    matrix_model(family).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    for key, value in PUBLISHED.get(family, {}).items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    if family in TURNED:
        file = folder / "model.safetensors"
        tensors = {
            name: t.transpose(1, 2).contiguous() if ".experts." in name else t
            for name, t in load_file(file).items()
        }
        save_file(tensors, file, {"format": "pt"})


def write(family: str, folder: Path) -> dict[str, dict]:
    """Write a model of a family, and its checkpoints; return folders or refusals by scheme."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
    from model_matrix import MATRIX, matrix_samples

    from steelyard import oneshot
    from steelyard.errors import SteelyardError
    from steelyard.modifiers import QuantizationModifier

    source = folder / SOURCE
    write_source(family, source)
    found: dict[str, dict] = {SOURCE: {"folder": str(source)}}
    for scheme in (*SCHEMES, REST):
        preset = "FP8_DYNAMIC" if scheme == REST else scheme
        ignore = ["lm_head", *IGNORED.get(family, MATRIX[family].ignore)]
        ignore += [r"re:.*\.experts\..*"] if scheme == REST else []
        group = {"group_size": GROUP} if scheme == "W4A16" else {}
        recipe = QuantizationModifier(targets="Linear", scheme=preset, ignore=ignore, **group)
        data = matrix_samples(family) if scheme in WITH_DATA else None
        target = folder / scheme
        try:
            oneshot(source, recipe, data, target, show_progress=False)
        except SteelyardError as error:
            found[scheme] = {"refused": str(error).rpartition("\n  - ")[2]}
        else:
            found[scheme] = {"folder": str(target)}
    return found


def run(options: argparse.Namespace, scratch: Path) -> dict:
    from importlib.metadata import version

    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    written = {}
    for family in options.families or (*FAMILIES, *OTHERS):
        print(f"quantizing: {family}", file=sys.stderr)
        written[family] = write(family, scratch / family)
    question, answers = scratch / "question.json", scratch / "answer.json"
    folders = {
        family: {scheme: w["folder"] for scheme, w in row.items() if "folder" in w}
        for family, row in written.items()
    }
    question.write_text(json.dumps(folders))
    print("loading", file=sys.stderr)
    with (scratch / "log").open("w+") as log:
        command = [options.server, __file__, "load", str(question), str(answers)]
        if subprocess.run(command, stdout=log, stderr=log).returncode:
            log.seek(0)
            raise SystemExit(log.read())
    answered = json.loads(answers.read_text())
    results = []
    for family, row in written.items():
        for scheme, made in row.items():
            result = {"family": family, "scheme": scheme}
            if "refused" in made:
                result |= {"result": "refused", "reason": made["refused"]}
            else:
                found = answered["answers"][family][scheme]
                reason = "; ".join(found.pop("faults", ()))
                if "not built" in found:
                    result |= {"result": "not built", "reason": found["not built"]}
                elif reason:
                    result |= {"result": "mismatch", "reason": reason, **found}
                else:
                    result |= {"result": "ok", **found}
            results.append(result)
    return {
        "versions": {
            "vllm": answered["version"],
            **{n: version(n) for n in ("torch", "transformers", "compressed-tensors")},
        },
        "results": results,
    }


def print_table(outcome: dict) -> None:
    columns = (SOURCE, *SCHEMES, REST)
    print(f"{'':<18}" + "".join(f"{scheme:>13}" for scheme in columns))
    for family in dict.fromkeys(r["family"] for r in outcome["results"]):
        rows = [r for r in outcome["results"] if r["family"] == family]
        print(f"{family:<18}" + "".join(f"{r['result']:>13}" for r in rows))
    for r in outcome["results"]:
        if "reason" in r:
            print(f"{r['family']}, {r['scheme']}: {r['reason']}")


def main() -> None:
    if sys.argv[1:2] == ["load"]:
        answer(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="else all of them")
    parser.add_argument("--server", required=True, help="python of an environment with vLLM")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(options, Path(folder))
    print_table(outcome)
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")
    if any(r["result"] in ("mismatch", "not built") for r in outcome["results"]):
        raise SystemExit("vLLM does not load all of it")


if __name__ == "__main__":
    main()
