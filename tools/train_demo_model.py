"""Train the small language models of the package and of its tests, from scratch, on a CPU.

The text is Python's standard library as it is installed (see `steelyard.demo.texts` for the files
and for the split into training and held-out ones). A byte-level BPE is trained on it, then a Llama
of 2.6 million parameters in fp32 with AdamW, warm-up and a cosine. With `--experts` it is a
mixture of experts, a Qwen3-MoE with two active experts per token, trained with the usual loss
that balances its router. Every size that is quantized is a multiple of 128, so that groups of 128
and FP8 blocks fit.

    python tools/train_demo_model.py
    torchrun --nproc-per-node 2 tools/train_demo_model.py          # the shipped one; half an hour
    python tools/train_demo_model.py --experts 8                   # the one in tests/support
    python tools/train_demo_model.py --steps 50 --work try --output try --report try/report.json

The state is saved every few minutes, and the same command resumes. Batches depend only on the seed
and the step, so a resumed run trains on the same batches as an uninterrupted one. The same seed,
Python, torch and number of processes give the same model; several processes split each batch and
differ from a single one only in the order of sums.

At the end it writes the folder (weights in bf16), and measures the written model and a bigram model
on the held-out files.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path

import torch
import torch.distributed as dist
from bigram import Bigram
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func
from transformers.utils import logging

from steelyard.demo.texts import Part, library_files

ROOT = Path(__file__).parents[1]
END_OF_TEXT = "<|endoftext|>"  # id 0: between files, and at the end of generated text
LENGTH = 512  # tokens in a window; the model has not seen longer ones
BALANCE = 0.01  # weight of the loss that balances the tokens of experts


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--experts", type=int, default=0, help="experts in a layer; 0 trains a dense model")
    add("--output", type=Path, help="model folder; by default that of the package or of its tests")
    add("--work", type=Path, help="tokenizer and state; by default a folder in build")
    add("--report", type=Path, help="by default a file in benchmarks/results")
    add("--seed", type=int, default=0)
    add("--vocab", type=int, default=2048)
    add("--layers", type=int, default=3)
    add("--steps", type=int, default=3600)
    add("--batch", type=int, default=2, help=f"windows of {LENGTH} tokens in a step")
    add("--rate", type=float, default=2e-3, help="highest learning rate")
    add("--warmup", type=int, default=200, help="steps")
    add("--save-every", type=int, default=250, help="steps")
    add("--threads", type=int, default=1, help="of each process")
    opt = parser.parse_args()
    name = "expert-model" if opt.experts else "demo-model"
    folder = "tests/support/expert_model" if opt.experts else "src/steelyard/demo/model"
    opt.output = opt.output or ROOT / folder
    opt.work = opt.work or ROOT / "build" / name
    opt.report = opt.report or ROOT / f"benchmarks/results/{name}.json"
    return opt


def rank_and_world() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def texts_of(part: Part) -> list[str]:
    return [path.read_text("utf-8") for path in library_files(part).values()]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokens_of(texts: list[str], tokenizer: Tokenizer) -> torch.Tensor:
    """Return all texts as one row of ids, each ended by END_OF_TEXT."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch(texts)
    return torch.tensor([id for text in encoded for id in (*text.ids, end)])


def new_model(vocab_size: int, layers: int, seed: int, experts: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    if not experts:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    routing = {"num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **routing, moe_intermediate_size=128))


def batch_at(step: int, tokens: torch.Tensor, batch: int, seed: int) -> torch.Tensor:
    """Return the (batch, LENGTH + 1) windows of a step; each epoch shifts and shuffles them."""
    steps_per_epoch = (len(tokens) - 2 * LENGTH) // LENGTH // batch
    epoch, place = divmod(step, steps_per_epoch)
    chance = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    shift = int(torch.randint(LENGTH, (), generator=chance))
    order = torch.randperm(steps_per_epoch * batch, generator=chance)
    starts = shift + LENGTH * order[place * batch : (place + 1) * batch]
    return torch.stack([tokens[start : start + LENGTH + 1] for start in starts.tolist()])


def rate_at(step: int, highest: float, warmup: int, steps: int) -> float:
    """Return the learning rate: a linear warm-up, then a cosine down to zero."""
    if step < warmup:
        return highest * (step + 1) / warmup
    return highest * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def loss_of(model: PreTrainedModel, windows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def losses_of(model: PreTrainedModel, windows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of the text, and the loss to train on: with experts, it balances them."""
    config = model.config
    if not isinstance(config, Qwen3MoeConfig):
        loss = loss_of(model, windows)
        return loss, loss
    found = model(input_ids=windows[:, :-1], use_cache=False, output_router_logits=True)
    loss = cross_entropy(found.logits.flatten(0, 1), windows[:, 1:].flatten())
    routing = (found.router_logits, config.num_experts, config.num_experts_per_tok)
    return loss, loss + BALANCE * load_balancing_loss_func(*routing)


def new_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), fused=True)


def average_gradients(model: PreTrainedModel, world: int) -> None:
    gradients = [p.grad for p in model.parameters()]
    together = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(together)
    for gradient, mean in zip(
        gradients, (together / world).split([g.numel() for g in gradients]), strict=True
    ):
        gradient.copy_(mean.view_as(gradient))


def train(model: PreTrainedModel, tokens: torch.Tensor, opt: argparse.Namespace) -> None:
    rank, world = rank_and_world()
    if opt.batch % world:
        raise SystemExit(f"--batch {opt.batch} does not divide among {world} processes")
    optimizer = new_optimizer(model)
    saved = opt.work / "state.pt"
    asked = {name: getattr(opt, name) for name in ("seed", "steps", "batch", "rate", "warmup")}
    asked |= {"tokens": len(tokens), "parameters": model.num_parameters()}
    first = 0
    if saved.exists():
        state = torch.load(saved)
        if state["asked"] != asked:
            raise SystemExit(f"{saved} is of another run, {state['asked']}: remove it")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        print(f"resuming at step {first}", flush=True)
    model.train()
    began, mean = time.monotonic(), 0.0
    for step in range(first, opt.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, opt.rate, opt.warmup, opt.steps)
        windows = batch_at(step, tokens, opt.batch, opt.seed)[rank::world]
        loss, trained = losses_of(model, windows)
        trained.backward()
        if world > 1:
            average_gradients(model, world)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.item() if step == first else 0.98 * mean + 0.02 * loss.item()
        done = step + 1
        if rank > 0:
            continue
        if done % 100 == 0:
            speed = (done - first) * opt.batch * LENGTH / (time.monotonic() - began)
            left = (opt.steps - done) * opt.batch * LENGTH / speed / 60
            print(
                f"step {done}/{opt.steps}  loss {mean:.3f}  {speed:.0f} tokens/s  "
                f"{left:.0f} minutes left",
                flush=True,
            )
        if done % opt.save_every == 0 or done == opt.steps:
            state = {"asked": asked, "step": done, "model": model.state_dict()}
            state["optimizer"] = optimizer.state_dict()
            torch.save(state, saved.with_suffix(".new"))
            saved.with_suffix(".new").replace(saved)


def write(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a Hugging Face folder with the weights in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": LENGTH,
    }
    text = json.dumps(described, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, "utf-8")


@torch.no_grad()
def measure(folder: Path, train_tokens: torch.Tensor, held_out: torch.Tensor) -> dict[str, float]:
    """Return perplexities of the written model and of a bigram model, on held-out tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    windows = held_out[: len(held_out) // LENGTH * LENGTH].reshape(-1, LENGTH)
    loss = sum(float(loss_of(model, part)) * len(part) for part in windows.split(16)) / len(windows)
    before, after = windows[:, :-1].flatten(), windows[:, 1:].flatten()
    bigram = Bigram(train_tokens, tokenizer.get_vocab_size()).loss(before, after)
    # In byte-level BPE a token's name has one character for each byte.
    sizes = [len(tokenizer.id_to_token(i)) for i in range(tokenizer.get_vocab_size())]
    sizes[tokenizer.token_to_id(END_OF_TEXT)] = 0
    bytes_per_token = float(torch.tensor(sizes)[after].double().mean())
    return {
        "held_out_tokens": after.numel(),
        "bytes_per_token": round(bytes_per_token, 3),
        "perplexity": round(math.exp(loss), 3),
        "bits_per_byte": round(loss / math.log(2) / bytes_per_token, 3),
        "bigram_perplexity": round(math.exp(bigram), 3),
        "bigram_bits_per_byte": round(bigram / math.log(2) / bytes_per_token, 3),
    }


def main() -> None:
    opt = options()
    logging.disable_progress_bar()
    torch.set_num_threads(opt.threads)
    torch.set_flush_denormal(True)
    opt.work.mkdir(parents=True, exist_ok=True)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    rank, world = rank_and_world()
    texts = texts_of("train")
    kept = opt.work / "tokenizer.json"
    if rank == 0 and not kept.exists():
        train_tokenizer(texts, opt.vocab).save(str(kept))
    if world > 1:
        dist.barrier()
    tokenizer = Tokenizer.from_file(str(kept))
    tokens = tokens_of(texts, tokenizer)
    held_out = tokens_of(texts_of("held_out"), tokenizer)
    model = new_model(opt.vocab, opt.layers, opt.seed, opt.experts)
    print(
        f"process {rank} of {world}: {len(texts)} files, "
        f"{len(tokens):,} tokens to train on, {len(held_out):,} held out; "
        f"{model.num_parameters():,} parameters, "
        f"{opt.steps * opt.batch * LENGTH / len(tokens):.1f} epochs",
        flush=True,
    )
    train(model, tokens, opt)
    if world > 1:
        dist.destroy_process_group()
    if rank > 0:
        return
    write(model, tokenizer, opt.output)
    found = measure(opt.output, tokens, held_out)
    settings = {name: value for name, value in vars(opt).items() if not isinstance(value, Path)} | {
        "processes": world,
        "length": LENGTH,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    report = {
        "parameters": model.num_parameters(),
        "train_tokens": len(tokens),
        **found,
        "settings": settings,
    }
    opt.report.parent.mkdir(parents=True, exist_ok=True)
    opt.report.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
