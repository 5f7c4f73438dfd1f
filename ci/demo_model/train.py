"""Trains the demo model from scratch: ``python -m ci.demo_model.train --out DIR``.

The idea: the corpus is endless and free, so there are no epochs. Every step writes new documents, packs them into
rows, and takes one AdamW step under a cosine schedule. Documents and initial weights come from fixed seeds; a run that
was interrupted goes on from its last checkpoint with the same documents it would have seen.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ci.demo_model import corpus
from ci.demo_model.chats import Message

SEED = 20
VOCAB_SIZE = 2560
TOKENIZER_DOCUMENTS = 20_000
TOKENS_PER_STEP = 2048
# Row length and how often it is drawn: short rows are quick, long ones teach the far positions.
ROW_LENGTHS = ((256, 0.85), (512, 0.12), (1024, 0.03))
PEAK_LEARNING_RATE = 3e-3
FINAL_LEARNING_RATE = 1e-4
WARMUP_STEPS = 100
STEPS_PER_CHECKPOINT = 100
HELDOUT_DOCUMENTS = 400
HELDOUT_STORIES = 100

PROMPTS = (
    "The capital of France is",
    "The capital of",
    "Have you heard of paged attention?",
    "Once upon a time",
    "Hello, my name is",
    "The opposite of hot is",
    "What does a cow say?",
    "7 plus 5 is",
)
CHATS: tuple[tuple[Message, ...], ...] = (
    (Message("user", "What is the capital of Italy?"),),
    (Message("user", "What is 3 plus 4?"),),
    (Message("user", "What is paged attention?"),),
    (Message("system", "You are a helpful assistant."), Message("user", "Tell me a story about a fox named Nia.")),
    (
        Message("system", "You are a helpful assistant."),
        Message("user", "What is the capital of Japan?"),
        Message("assistant", "The capital of Japan is Tokyo."),
        Message("user", "And Norway?"),
    ),
)


@dataclass
class Figures:
    """What a training run reports, as written to ``figures.json``."""

    corpus_fingerprint: str = ""
    num_parameters: int = 0
    vocab_size: int = 0
    steps: int = 0
    tokens_seen: int = 0
    wall_minutes: float = 0.0
    final_training_loss: float = 0.0
    heldout_perplexity: float = 0.0
    heldout_story_perplexity: float = 0.0
    greedy_completions: dict[str, str] = field(default_factory=dict)
    greedy_replies: dict[str, str] = field(default_factory=dict)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer learnt from the corpus; it puts the beginning-of-text token before plain prompts."""
    tokenizer = Tokenizer(models.BPE())
    # Words keep the space before them, numbers stay whole up to three digits, punctuation is split off.
    pattern = Regex(r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(corpus.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.documents("train", TOKENIZER_DOCUMENTS), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A", special_tokens=[(corpus.BOS, tokenizer.token_to_id(corpus.BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=corpus.BOS,
        eos_token=corpus.EOS,
        pad_token=corpus.EOS,
        additional_special_tokens=[corpus.TURN_START, corpus.TURN_END],
        chat_template=corpus.CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def load_or_train_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer that an earlier leg of the same run left in ``folder``, else a new one, which is left there.

    A checkpoint is worth nothing under other token ids.
    """
    if not (folder / "tokenizer.json").exists():
        train_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The untrained model: grouped heads, tied embeddings, float32 weights from a fixed seed."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("eager")  # measured: for rows this short, a third quicker to train than the fused one
    return model


class RowPacker:
    """Packs training documents into rows of token ids; every row begins where a document begins."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, next_document: int = 0) -> None:
        self.tokenizer = tokenizer
        self.next_document = next_document

    def pack_row(self, num_tokens: int) -> tuple[list[int], list[int]]:
        """``num_tokens`` ids and their positions within their documents.

        The document that does not fit is cut off, since the stream has no end anyway.
        """
        row: list[int] = []
        positions: list[int] = []
        while len(row) < num_tokens:
            text = corpus.document("train", self.next_document)
            token_ids = self.tokenizer.encode(text, add_special_tokens=False)
            row += token_ids
            positions += range(len(token_ids))
            self.next_document += 1
        return row[:num_tokens], positions[:num_tokens]

    def pack_batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions of one step, each ``[rows, row length]``, ``TOKENS_PER_STEP`` in all.

        In short rows the positions begin anew with each document, which also keeps documents from attending to each
        other; long rows run through, so that the model meets every position it will be asked for.
        """
        lengths, weights = [length for length, _ in ROW_LENGTHS], [weight for _, weight in ROW_LENGTHS]
        length = random.Random(f"row length/{step}").choices(lengths, weights)[0]
        rows = [self.pack_row(length) for _ in range(TOKENS_PER_STEP // length)]
        positions = [positions if length == min(lengths) else list(range(length)) for _, positions in rows]
        return torch.tensor([token_ids for token_ids, _ in rows]), torch.tensor(positions)


@dataclass
class Progress:
    """Where a run stands; the numbers a checkpoint keeps beside the tensors."""

    step: int = 0
    next_document: int = 0
    seconds: float = 0.0
    loss: float = 0.0


_P = TypeVar("_P", bound=Any)  # a dataclass of numbers, such as Progress


class Checkpoint(Generic[_P]):
    """Weights, optimizer state and progress in one safetensors file, replaced atomically.

    Args:
        path: The file.
        kind: The class of the progress; its defaults are those of a run that begins.
    """

    def __init__(self, path: Path, kind: type[_P]) -> None:
        self.path, self.kind = path, kind

    def save(self, model: torch.nn.Module, optimizer: torch.optim.AdamW, progress: _P) -> None:
        """Replaces the file."""
        tensors = {}
        for name, parameter in model.named_parameters():
            tensors[f"weight.{name}"] = parameter.detach().contiguous()
            for key, value in optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        partial = self.path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"progress": json.dumps(asdict(progress))})
        partial.replace(self.path)

    def load(self, model: torch.nn.Module, optimizer: torch.optim.AdamW) -> _P:
        """Fill model and optimizer from the file; leave both as they are when there is none."""
        if not self.path.exists():
            return self.kind()
        with safe_open(self.path, "pt") as file:
            names = set(file.keys())
            for name, parameter in model.named_parameters():
                with torch.no_grad():
                    parameter.copy_(file.get_tensor(f"weight.{name}"))
                if f"step.{name}" in names:  # a parameter that took no part has no state
                    optimizer.state[parameter] = {
                        key: file.get_tensor(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")
                    }
            return self.kind(**json.loads(file.metadata()["progress"]))


def mixed_precision(model: LlamaForCausalLM) -> AbstractContextManager[Any]:
    """bfloat16 where it is safe, on whatever device the model lies."""
    return torch.autocast(device_type=model.device.type, dtype=torch.bfloat16)


def learning_rate(
    step: int, fraction_done: float, *, peak: float = PEAK_LEARNING_RATE, final: float = FINAL_LEARNING_RATE
) -> float:
    """Linear warm-up, then half a cosine from the peak to the final rate."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, fraction_done)))
    return (final + (peak - final) * cosine) * min(1.0, (step + 1) / WARMUP_STEPS)


def make_optimizer(model: torch.nn.Module, weight_decay: float = 0.1) -> torch.optim.AdamW:
    """AdamW with weight decay on the matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-8)


def take_step(model: torch.nn.Module, optimizer: torch.optim.AdamW, loss: torch.Tensor, rate: float) -> None:
    """One step of the optimizer along the gradients of a loss, which are clipped."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def smoothed(average: float, step: int, loss: torch.Tensor) -> float:
    """The running average of the losses, with the one of step number `step`, from 0."""
    return average + max(0.02, 1.0 / (step + 1)) * (float(loss.detach()) - average)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    num_steps: int,
    max_minutes: float,
    compiled: bool = False,
) -> Progress:
    """Run (or go on with) the training loop.

    The schedule ends after ``num_steps`` or after ``max_minutes``, whichever comes first; without the second the run
    depends on nothing but the seeds.
    """
    optimizer, checkpoint = make_optimizer(model), Checkpoint(out / "checkpoint.safetensors", Progress)
    progress = checkpoint.load(model, optimizer)
    packer = RowPacker(tokenizer, progress.next_document)
    forward = torch.compile(model, dynamic=False) if compiled else model
    model.train()
    last_time = time.monotonic()
    bar = tqdm(total=num_steps, initial=progress.step, desc="training", unit="step", mininterval=5.0)
    while progress.step < num_steps and progress.seconds < 60.0 * max_minutes:
        fraction_done = max(progress.step / num_steps, progress.seconds / (60.0 * max_minutes))
        token_ids, positions = packer.pack_batch(progress.step)
        with mixed_precision(model):
            loss = forward(input_ids=token_ids, position_ids=positions, labels=token_ids, use_cache=False).loss
        take_step(model, optimizer, loss, learning_rate(progress.step, fraction_done))

        now = time.monotonic()
        progress.loss = smoothed(progress.loss, progress.step, loss)
        progress.step += 1
        progress.next_document = packer.next_document
        progress.seconds += now - last_time
        last_time = now
        bar.update()
        bar.set_postfix(loss=f"{progress.loss:.3f}", refresh=False)
        if progress.step % STEPS_PER_CHECKPOINT == 0:
            checkpoint.save(model, optimizer, progress)
    bar.close()
    checkpoint.save(model, optimizer, progress)
    return progress


@torch.inference_mode()
def perplexity(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> float:
    """exp of the mean negative log-likelihood per token over ``texts``, each seen alone, in float32 arithmetic."""
    total_loss, total_tokens = 0.0, 0
    for text in texts:
        token_ids = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
        num_predicted = token_ids.shape[1] - 1
        total_loss += float(model(input_ids=token_ids, labels=token_ids).loss) * num_predicted
        total_tokens += num_predicted
    return math.exp(total_loss / total_tokens)


@torch.inference_mode()
def complete(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, token_ids: list[int], max_tokens: int = 256
) -> str:
    """The greedy continuation, special tokens left out."""
    prompt = torch.tensor([token_ids])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=tokenizer.eos_token_id,
    )
    return str(tokenizer.decode(output[0, prompt.shape[1] :], skip_special_tokens=True))


def _iterate_replies(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Iterator[tuple[str, str]]:
    for chat in CHATS:
        text = corpus.render_chat(list(chat), add_generation_prompt=True)
        title = " / ".join(message.content for message in chat)
        yield title, complete(model, tokenizer, tokenizer.encode(text, add_special_tokens=False))


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write config, bfloat16 weights, tokenizer, chat template and generation defaults."""
    end_ids = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(corpus.TURN_END)]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_ids, do_sample=True, temperature=0.7, top_k=50
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    for key in ("is_local", "local_files_only"):  # not properties of the model
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(folder)


def measure(folder: Path, progress: Progress, heldout_documents: int = HELDOUT_DOCUMENTS) -> Figures:
    """Everything the README tells about the saved model, measured on the files as a user will load them."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return Figures(
        corpus_fingerprint=corpus.fingerprint(),
        num_parameters=model.num_parameters(),
        vocab_size=len(tokenizer),
        steps=progress.step,
        tokens_seen=progress.step * TOKENS_PER_STEP,
        wall_minutes=round(progress.seconds / 60, 1),
        final_training_loss=round(progress.loss, 4),
        heldout_perplexity=round(perplexity(model, tokenizer, list(corpus.documents("heldout", heldout_documents))), 4),
        heldout_story_perplexity=round(perplexity(model, tokenizer, corpus.heldout_stories(HELDOUT_STORIES)), 4),
        greedy_completions={prompt: complete(model, tokenizer, tokenizer.encode(prompt)) for prompt in PROMPTS},
        greedy_replies=dict(_iterate_replies(model, tokenizer)),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.demo_model.train", description="Train the demo model from scratch."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, the checkpoint and figures.json")
    parser.add_argument(
        "--steps", type=int, default=7000, help=f"optimizer steps of {TOKENS_PER_STEP} tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--max-minutes", type=float, default=math.inf, help="end the schedule after this time (default: no limit)"
    )
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default: %(default)s)")
    parser.add_argument(
        "--compile", action="store_true", help="run through torch.compile: half the time, needs a C++ compiler"
    )
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_or_train_tokenizer(arguments.out / "tokenizer")
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens in the vocabulary")
    progress = train(model, tokenizer, arguments.out, arguments.steps, arguments.max_minutes, arguments.compile)
    save_model(model, tokenizer, arguments.out / "model")
    figures = json.dumps(asdict(measure(arguments.out / "model", progress)), indent=2)
    (arguments.out / "figures.json").write_text(figures + "\n")
    print(figures)


if __name__ == "__main__":
    main()
