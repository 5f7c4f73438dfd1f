"""Trains an EAGLE-3 head, or an MTP module, for a small Llama on text that the model itself writes.

    python -m ci.draft_heads.train --model FOLDER --out FOLDER [--tokens 200000] [--epochs 3] [--threads 1]
    python -m ci.draft_heads.train --model demo --out FOLDER --draft-vocab-size 1024 --layers 1 2 4
    python -m ci.draft_heads.train --model demo --method mtp --out FOLDER

    prompts ──mvllm──> texts ──transformers──> states before three layers, most likely next tokens
                                               └ AdamW over several passes, as in drafting (EagleHead) ──> a checkpoint

One prompt in twenty is held out; the log says how often the first, second, third draft token of held-out texts is
right if those before it are. `--out` then holds a checkpoint in the published layout, for
`speculative_config={"method": "eagle3", "model": OUT}`; with `--method mtp` it holds the model and the module, as a
checkpoint of MiMo, for `LLM(OUT, speculative_config={"method": "mtp"})`. A GGUF file is converted to a folder first
(`python tests/published/convert.py FILE FOLDER`), and named by `--text-model`: it has the tokenizer.

Texts and states are kept in OUT/work and are not made again if the run is repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from ci.demo_model.chats import draw_chat
from ci.draft_heads.head import EagleHead, HeadConfig, MTPModule
from ci.draft_heads.prompts import HELD_OUT, SEED, prompts
from mvllm.config.hub import DEMO, find_model

TEXTS_AT_ONCE = 32
TEXTS_PER_FILE = 16
MAX_PROMPT_TOKENS = 96
NUM_PASSES = 3
PASS_WEIGHT = 0.8
"""The loss of each pass counts so much of the one before."""
HIDDEN_WEIGHT = 4.0
"""The relative squared distance of hidden states counts so much of the cross-entropy."""
WARM_UP = 0.03
IGNORED = -100
FIRST_USUAL_POSITION = 8
"""States of the positions before it are unusually large in many models."""


@dataclass(frozen=True)
class Batch:
    """Positions of some texts, see `write_states`."""

    next_tokens: torch.Tensor
    labels: torch.Tensor
    states: torch.Tensor
    next_hidden: torch.Tensor


@dataclass(frozen=True)
class Text:
    """A prompt and the model's answer.

    Attributes:
        token_ids: Of both.
        num_prompt_tokens: Of the prompt.
        is_held_out: It is not trained on.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    is_held_out: bool


def demo_prompts(rng: random.Random) -> Iterator[str]:
    """What people say to the demo model, without end."""
    while True:
        yield next(message.content for message in draw_chat(rng) if message.role == "user")


def write_texts(
    model: str, asked: Iterator[str], file: Path, *, num_tokens: int, length: int, platform: str, dtype: str
) -> None:
    """Lets the model answer what is asked, one half greedily, until the answers have `num_tokens` tokens."""
    from mvllm import LLM, SamplingParams  # starts its own threads, before those of training

    made = 0
    with (
        LLM(
            model=model,
            platform=platform,
            max_model_len=length + MAX_PROMPT_TOKENS,
            dtype=dtype,
            max_num_seqs=TEXTS_AT_ONCE,
        ) as llm,
        file.with_suffix(".part").open("w") as lines,
        tqdm(total=num_tokens, unit="token", desc="texts") as bar,
    ):
        numbered = enumerate(asked)
        while made < num_tokens and (batch := list(itertools.islice(numbered, 4 * TEXTS_AT_ONCE))):
            params = [
                SamplingParams(temperature=0.8 * (number % 2), seed=number, max_tokens=length) for number, _ in batch
            ]
            chats = [[{"role": "user", "content": prompt}] for _, prompt in batch]
            for (number, _), output in zip(batch, llm.chat(chats, params, use_tqdm=False), strict=True):
                answer = list(output.outputs[0].token_ids)
                ids = [*output.prompt_token_ids, *answer]
                lines.write(json.dumps([ids, len(ids) - len(answer), number % HELD_OUT == 0]) + "\n")
                made += len(answer)
                bar.update(len(answer))
    file.with_suffix(".part").rename(file)


def read_texts(file: Path) -> list[Text]:
    """What `write_texts` has written, the longest texts first, so that those of a batch are about as long."""
    texts = [Text(*json.loads(line)) for line in file.read_text().splitlines()]
    return sorted((text for text in texts if len(text.token_ids) > 4), key=lambda text: -len(text.token_ids))


@torch.inference_mode()
def write_states(model: PreTrainedModel, texts: list[Text], layers: tuple[int, ...], folder: Path) -> list[Path]:
    """Runs the model over the texts, and stores what the head reads and predicts.

    Returns:
        Files with `next_tokens` [B, T], `labels` [B, T] (the most likely token two positions ahead, IGNORED in prompts
        and padding), `states` [B, T, layers * hidden_size] and `next_hidden` [B, T, hidden_size], bfloat16: the model's
        last hidden state one position ahead, behind its norm, which gives the logits of the label.
    """
    files = []
    for number, begin in enumerate(tqdm(range(0, len(texts), TEXTS_PER_FILE), desc="states")):
        files.append(file := folder / f"states-{number:05}.safetensors")
        if file.exists():
            continue
        batch = texts[begin : begin + TEXTS_PER_FILE]
        width = len(batch[0].token_ids)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, text in enumerate(batch):
            ids[row, : len(text.token_ids)] = torch.tensor(text.token_ids)
        found = model(ids, output_hidden_states=True)  # padding is behind the text: causal attention ignores it
        best = found.logits.argmax(-1)
        labels = best.roll(-1, dims=1)
        for row, text in enumerate(batch):
            labels[row, : text.num_prompt_tokens - 1] = IGNORED
            labels[row, len(text.token_ids) - 1 :] = IGNORED
        states = torch.cat([found.hidden_states[layer] for layer in layers], dim=-1)
        part = file.with_suffix(".part")
        save_file(
            {
                "next_tokens": ids.roll(-1, dims=1)[:, :-1].to(torch.int32).contiguous(),
                "labels": labels[:, :-1].to(torch.int32).contiguous(),
                "states": states[:, :-1].to(torch.bfloat16).contiguous(),
                "next_hidden": found.hidden_states[-1][:, 1:].to(torch.bfloat16).contiguous(),
                "is_held_out": torch.tensor([text.is_held_out for text in batch]),
            },
            part,
        )
        part.rename(file)
    return files


def choose_vocabulary(texts: list[Text], vocab_size: int, size: int) -> torch.Tensor:
    """[size], rising: the most frequent tokens of the answers."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for text in texts:
        counts += torch.bincount(torch.tensor(text.token_ids[text.num_prompt_tokens :]), minlength=vocab_size)
    return counts.topk(min(size, vocab_size)).indices.sort().values


def batches(
    files: list[Path], rng: random.Random | None, *, held_out: bool, size: int = TEXTS_PER_FILE
) -> Iterator[Batch]:
    """Positions of `size` texts, in random order with `rng`."""
    order = list(files)
    if rng is not None:
        rng.shuffle(order)
    for file in order:
        values = load_file(file)
        rows = (values["is_held_out"] == held_out).nonzero()[:, 0].tolist()
        if rng is not None:
            rng.shuffle(rows)
        for begin in range(0, len(rows), size):
            chosen = rows[begin : begin + size]
            yield Batch(
                values["next_tokens"][chosen].long(),
                values["labels"][chosen].long(),
                values["states"][chosen].float(),
                values["next_hidden"][chosen].float(),
            )


def to_draft_tokens(labels: torch.Tensor, draft_ids: torch.Tensor) -> torch.Tensor:
    """Labels in the draft vocabulary; IGNORED for tokens that it lacks."""
    return torch.where(labels == IGNORED, IGNORED, draft_ids[labels.clamp(min=0)])


def loss_of(head: EagleHead | MTPModule, batch: Batch, draft_ids: torch.Tensor) -> torch.Tensor:
    """The loss over the passes: cross-entropy with the model's most likely tokens, and how far the head's last hidden
    state is from the model's, which a few hundred thousand tokens teach much sooner than the tokens themselves."""
    targets, total = to_draft_tokens(batch.labels, draft_ids), torch.zeros(())
    scale = batch.next_hidden.square().mean()
    for number, (hidden, logits) in enumerate(head.draft(batch.next_tokens, batch.states, NUM_PASSES)):
        valid = targets[:, number:].flatten()
        is_valid = valid != IGNORED
        if is_valid.any():
            loss = functional.cross_entropy(logits[:, number:].flatten(0, 1), valid, ignore_index=IGNORED)
            away = (hidden - batch.next_hidden)[:, number:].flatten(0, 1)[is_valid].square().mean()
            total = total + PASS_WEIGHT**number * (loss + HIDDEN_WEIGHT * away / scale)
    return total


@torch.inference_mode()
def acceptance(head: EagleHead | MTPModule, files: list[Path], draft_ids: torch.Tensor) -> list[float]:
    """How often each draft token of held-out texts is right, if those before it are."""
    right, tried = [0] * NUM_PASSES, [0] * NUM_PASSES
    for batch in batches(files, None, held_out=True):
        targets = to_draft_tokens(batch.labels, draft_ids)
        so_far = torch.ones_like(targets, dtype=torch.bool)
        for number, (_, logits) in enumerate(head.draft(batch.next_tokens, batch.states, NUM_PASSES)):
            if number:
                so_far = so_far.roll(1, dims=1)
                so_far[:, :number] = False
            counted = so_far & (batch.labels != IGNORED)
            so_far = counted & (logits.argmax(-1) == targets)
            right[number] += int(so_far.sum())
            tried[number] += int(counted.sum())
    return [a / max(b, 1) for a, b in zip(right, tried, strict=True)]


def save(head: EagleHead, vocabulary: torch.Tensor, folder: Path) -> None:
    """Writes the checkpoint in the published layout."""
    config = head.config
    chosen = torch.zeros(config.vocab_size, dtype=torch.bool)
    chosen[vocabulary] = True
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.published().items()}
    tensors |= {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": chosen}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config.published(), indent=1) + "\n")


def save_with_module(module: MTPModule, model: PreTrainedModel, folder: Path) -> None:
    """Writes a checkpoint of MiMo: the Llama with biases of 0, and the module."""
    tensors = {
        **model.state_dict(),
        **{f"model.mtp_layers.0.{name}": tensor for name, tensor in module.state_dict().items()},
    }
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name, tensor in list(tensors.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[f"{name.removesuffix('weight')}bias"] = torch.zeros(len(tensor))
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def make_eagle(
    model: PreTrainedModel, vocabulary: torch.Tensor, layers: tuple[int, ...], states: torch.Tensor
) -> EagleHead:
    """A head that begins with the model's output matrix and last norm.

    Args:
        states: [..., layers * hidden_size]: some of what the head reads.
    """
    head = EagleHead(HeadConfig.of_target(model.config, len(vocabulary), layers), embedding_of(model))
    with torch.no_grad():
        head.lm_head.weight.copy_(model.get_output_embeddings().weight[vocabulary])
        head.norm.weight.copy_(model.model.norm.weight)
        head.scale.copy_(states.flatten(0, -2).float().square().mean(0).add(1e-6).rsqrt())
    return head


def embedding_of(model: PreTrainedModel) -> torch.Tensor:
    """float32 [vocab_size, hidden_size]."""
    return model.get_input_embeddings().weight.detach().float()


def train(args: Any) -> list[float]:
    """Makes what is missing, and trains. Returns the acceptance of each draft token."""
    work = args.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    texts_file = args.texts or work / "texts.jsonl"
    if not texts_file.exists():
        rng = random.Random(SEED)
        write_texts(
            str(args.text_model or args.model),
            demo_prompts(rng) if args.model == DEMO else prompts(rng),
            texts_file,
            num_tokens=args.tokens,
            length=args.length,
            platform=args.platform,
            dtype=args.dtype,
        )
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    texts, folder = read_texts(texts_file), find_model(args.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    num_layers, vocab_size = model.config.num_hidden_layers, model.config.vocab_size
    if args.method == "mtp":
        files = write_states(model, texts, (num_layers,), work)  # the last ones, behind the norm
        vocabulary = torch.arange(vocab_size)
        module = MTPModule(HeadConfig.of_target(model.config, vocab_size, ()), embedding_of(model))
        head: EagleHead | MTPModule = module
        save_head = partial(save_with_module, module, model, args.out)
        for file in folder.glob("*token*.json"):
            shutil.copy(file, args.out)
    else:
        layers = tuple(args.layers or sorted({2, num_layers // 2, num_layers - 3}))
        files = write_states(model, texts, layers, work)
        trained_on = [text for text in texts if not text.is_held_out]
        vocabulary = choose_vocabulary(trained_on, vocab_size, args.draft_vocab_size)
        some = load_file(files[0])["states"][:, FIRST_USUAL_POSITION:]
        head = eagle = make_eagle(model, vocabulary, layers, some)
        save_head = partial(save, eagle, vocabulary, args.out)
        del model
    draft_ids = torch.full((vocab_size,), IGNORED)
    draft_ids[vocabulary] = torch.arange(len(vocabulary))
    with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
        fit(
            head,
            files,
            draft_ids,
            save_head,
            epochs=args.epochs,
            texts_per_step=args.texts_per_step,
            learning_rate=args.learning_rate,
        )
        return acceptance(head, files, draft_ids)


def fit(
    head: EagleHead | MTPModule,
    files: list[Path],
    draft_ids: torch.Tensor,
    save_head: Callable[[], None],
    *,
    epochs: int,
    texts_per_step: int,
    learning_rate: float,
) -> None:
    """Trains the head in place, and calls `save_head` after each epoch."""
    rng, start = random.Random(SEED), time.monotonic()
    steps = epochs * sum(1 for _ in batches(files, None, held_out=False, size=texts_per_step))
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    warm_up = max(1, int(WARM_UP * steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / warm_up) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    with tqdm(total=steps, desc="training") as bar:
        for epoch in range(epochs):
            for batch in batches(files, rng, held_out=False, size=texts_per_step):
                loss = loss_of(head, batch, draft_ids)
                if loss.requires_grad:
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                schedule.step()
                bar.update()
                bar.set_postfix(loss=f"{float(loss):.3f}")
            save_head()
            rates = ", ".join(f"{rate:.3f}" for rate in acceptance(head, files, draft_ids))
            tqdm.write(f"epoch {epoch + 1}: acceptance {rates}; {time.monotonic() - start:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model, a Llama, or demo")
    parser.add_argument("--text-model", type=Path, help="model that writes the texts, if not --model: its GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--method", choices=("eagle3", "mtp"), default="eagle3")
    parser.add_argument("--texts", type=Path, help="texts of an earlier run, OUT/work/texts.jsonl by default")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of all answers")
    parser.add_argument("--length", type=int, default=192, help="most tokens of an answer")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--texts-per-step", type=int, default=4, help=f"at most {TEXTS_PER_FILE}")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="the highest one")
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--layers", type=int, nargs="*", help="layers before which the head reads states")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--platform", default="cpu")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the model's hidden states, and of the products in training",
    )
    rates = train(parser.parse_args())
    expected = 1 + sum(math.prod(rates[: i + 1]) for i in range(len(rates)))
    print(f"acceptance by position: {', '.join(f'{rate:.3f}' for rate in rates)}; {expected:.2f} tokens a step")


if __name__ == "__main__":
    main()
