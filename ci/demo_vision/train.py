"""Trains the demo vision model: ``python -m ci.demo_vision.train --out DIR``.

The language model is the demo model, to which a small SigLIP tower and a projector are added (LLaVA's architecture).
First the tower learns to say of each patch which shape covers it, and in which colour: a model of this size does not
find that out from answers alone. Then all parts are trained together: mostly on conversations about pictures, and on
text of the demo model's corpus so that it keeps its words.
Pictures, texts and initial weights come from fixed seeds; an interrupted run goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from ci.demo_model import corpus
from ci.demo_model import train as train_text
from ci.demo_vision import pictures
from ci.demo_vision.pictures import Example, Shape, describe, draw
from mvllm.demo import demo_model_path

SEED = 26
IMAGE_PLACEHOLDER = "<image>"
PATCH = 4
NUM_IMAGE_TOKENS = (pictures.SIDE // PATCH) ** 2
PICTURES_PER_STEP = 48
EXAMPLES_PER_STEP = 24
TEXTS_PER_STEP = 2
TEXT_TOKENS = 128
PEAK_LEARNING_RATE = 1.5e-3
FINAL_LEARNING_RATE = 3e-5
WEIGHT_DECAY = 0.05
STEPS_PER_CHECKPOINT = 100
HELDOUT_EXAMPLES = 400
_IGNORED = -100

CHAT_TEMPLATE = (
    "{{- '" + corpus.BOS + "' -}}"
    "{%- for message in messages -%}"
    "{{- '" + corpus.TURN_START + "' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}{{- '" + IMAGE_PLACEHOLDER + "' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '" + corpus.TURN_END + "\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '" + corpus.TURN_START + "assistant\\n' -}}{%- endif -%}"
)


@dataclass
class Progress:
    """Where a run stands; the numbers a checkpoint keeps beside the tensors."""

    tower_step: int = 0
    step: int = 0
    seconds: float = 0.0
    loss: float = 0.0


@dataclass
class Figures:
    """What a training run reports, as written to ``figures.json``."""

    num_parameters: int = 0
    tower_steps: int = 0
    steps: int = 0
    wall_minutes: float = 0.0
    final_training_loss: float = 0.0
    heldout_exact: float = 0.0
    plain_pictures_exact: float = 0.0
    answers: dict[str, str] = field(default_factory=dict)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The demo model's tokenizer with one more token, the placeholder of an image."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [corpus.TURN_START, corpus.TURN_END, IMAGE_PLACEHOLDER]},
        replace_extra_special_tokens=True,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Any picture becomes 32 x 32 pixels, and 64 placeholders in the text."""
    side = {"height": pictures.SIDE, "width": pictures.SIDE}
    images = SiglipImageProcessorPil(size=side, resample=Image.Resampling.BILINEAR)
    return LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="full", chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """The untrained tower in front of the trained demo model, in float32."""
    torch.manual_seed(SEED)
    text = LlamaForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    text_config = LlamaConfig.from_pretrained(demo_model_path())
    text_config.vocab_size = -(-len(tokenizer) // 8) * 8
    config = LlavaConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=128,
            intermediate_size=320,
            num_hidden_layers=4,
            num_attention_heads=4,
            image_size=pictures.SIDE,
            patch_size=PATCH,
        ),
        text_config=text_config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_PLACEHOLDER),
        image_seq_length=NUM_IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    target = model.model.language_model.state_dict()
    with torch.no_grad():
        for name, tensor in text.model.state_dict().items():
            target[name][: len(tensor)].copy_(tensor)
    model.tie_weights()
    return model


def encode(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], int]:
    """The token ids of a conversation, with the placeholders of its images, and where the answer begins."""
    user = IMAGE_PLACEHOLDER * NUM_IMAGE_TOKENS * len(example.images) + example.question
    begin = f"{corpus.BOS}{corpus.TURN_START}user\n{user}{corpus.TURN_END}\n{corpus.TURN_START}assistant\n"
    prompt = tokenizer.encode(begin, add_special_tokens=False)
    answer = tokenizer.encode(f"{example.answer}{corpus.TURN_END}\n", add_special_tokens=False)
    return prompt + answer, len(prompt)


def pixels(images: list[Image.Image]) -> torch.Tensor:
    """[n, 3, side, side]: as the processor's, from -1 to 1."""
    values = np.stack([np.asarray(image, dtype=np.float32) for image in images])
    return torch.from_numpy(values / 127.5 - 1.0).permute(0, 3, 1, 2).contiguous()


def batch(tokenizer: PreTrainedTokenizerFast, step: int) -> dict[str, torch.Tensor]:
    """Token ids, mask and labels of one step, padded on the right, and the pictures."""
    rows: list[list[int]] = []
    labels: list[list[int]] = []
    images: list[Image.Image] = []
    for i in range(step * EXAMPLES_PER_STEP, (step + 1) * EXAMPLES_PER_STEP):
        each = pictures.example("train", i)
        ids, start = encode(tokenizer, each)
        rows.append(ids)
        labels.append([_IGNORED] * start + ids[start:])
        images += each.images
    for i in range(step * TEXTS_PER_STEP, (step + 1) * TEXTS_PER_STEP):
        ids = tokenizer.encode(corpus.document("train", 10_000_000 + i), add_special_tokens=False)[:TEXT_TOKENS]
        rows.append(ids)
        labels.append(ids)
    longest = max(map(len, rows))
    return {
        "input_ids": torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows]),
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
        "labels": torch.tensor([row + [_IGNORED] * (longest - len(row)) for row in labels]),
        "pixel_values": pixels(images),
    }


def learning_rate(step: int, num_steps: int) -> float:
    """As the demo model's, with other rates."""
    return train_text.learning_rate(step, step / num_steps, peak=PEAK_LEARNING_RATE, final=FINAL_LEARNING_RATE)


class PatchLabels(torch.nn.Module):
    """The tower with a linear layer for the shape of each patch and one for its colour."""

    def __init__(self, model: LlavaForConditionalGeneration) -> None:
        super().__init__()
        self.tower = model.model.vision_tower
        size = model.config.vision_config.hidden_size
        self.kinds = torch.nn.Linear(size, len(pictures.SHAPES) + 1)
        self.colours = torch.nn.Linear(size, len(pictures.COLOURS) + 1)

    def forward(self, images: torch.Tensor, kinds: torch.Tensor, colours: torch.Tensor) -> torch.Tensor:
        """The loss: images [n, 3, side, side], labels [n, patches]."""
        states = self.tower(images).last_hidden_state
        loss = torch.nn.functional.cross_entropy
        return loss(self.kinds(states).flatten(0, 1), kinds.flatten()) + loss(
            self.colours(states).flatten(0, 1), colours.flatten()
        )


def train_tower(model: LlavaForConditionalGeneration, out: Path, num_steps: int) -> int:
    """Trains the tower on labelled patches, or goes on with it. Returns the steps."""
    labels = PatchLabels(model)
    optimizer = train_text.make_optimizer(labels, WEIGHT_DECAY)
    checkpoint = train_text.Checkpoint(out / "tower.safetensors", Progress)
    progress = checkpoint.load(labels, optimizer)
    labels.train()
    bar = tqdm(total=num_steps, initial=progress.step, desc="tower", unit="step", mininterval=5.0)
    while progress.step < num_steps:
        first = progress.step * PICTURES_PER_STEP
        drawn = [pictures.labelled_picture("train", first + i, PATCH) for i in range(PICTURES_PER_STEP)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = pixels([picture for picture, _, _ in drawn])
            loss = labels(states, torch.tensor([kinds for _, kinds, _ in drawn]), torch.tensor([c for *_, c in drawn]))
        train_text.take_step(labels, optimizer, loss, learning_rate(progress.step, num_steps))
        progress.loss = train_text.smoothed(progress.loss, progress.step, loss)
        progress.step += 1
        bar.update()
        bar.set_postfix(loss=f"{progress.loss:.3f}", refresh=False)
        if progress.step % STEPS_PER_CHECKPOINT == 0 or progress.step == num_steps:
            checkpoint.save(labels, optimizer, progress)
    bar.close()
    return progress.step


def train(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    tower_steps: int,
    num_steps: int,
) -> Progress:
    """Runs the training loops, or goes on with them."""
    last = time.monotonic()
    optimizer = train_text.make_optimizer(model, WEIGHT_DECAY)
    checkpoint = train_text.Checkpoint(out / "checkpoint.safetensors", Progress)
    tower_steps = train_tower(model, out, tower_steps)
    progress = checkpoint.load(model, optimizer)
    progress.tower_step = tower_steps
    model.train()
    bar = tqdm(total=num_steps, initial=progress.step, desc="training", unit="step", mininterval=5.0)
    while progress.step < num_steps:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch(tokenizer, progress.step), use_cache=False).loss
        train_text.take_step(model, optimizer, loss, learning_rate(progress.step, num_steps))
        now = time.monotonic()
        progress.loss = train_text.smoothed(progress.loss, progress.step, loss)
        progress.step += 1
        progress.seconds += now - last
        last = now
        bar.update()
        bar.set_postfix(loss=f"{progress.loss:.3f}", refresh=False)
        if progress.step % STEPS_PER_CHECKPOINT == 0:
            checkpoint.save(model, optimizer, progress)
    bar.close()
    checkpoint.save(model, optimizer, progress)
    return progress


def save_model(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes config, bfloat16 weights, tokenizer, processor, chat template and generation defaults."""
    end_ids = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(corpus.TURN_END)]
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        do_sample=True,
        eos_token_id=end_ids,
        pad_token_id=tokenizer.eos_token_id,
        temperature=0.1,  # it names what it sees; at 1 some answers name another shape
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    for key in ("is_local", "local_files_only"):  # not properties of the model
        tokenizer.init_kwargs.pop(key, None)
    make_processor(tokenizer).save_pretrained(folder)


@torch.inference_mode()
def answer(
    model: LlavaForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    images: tuple[Image.Image, ...],
    question: str,
) -> str:
    """The greedy answer."""
    ids, start = encode(tokenizer, Example(images, question, ""))
    prompt = torch.tensor([ids[:start]])
    output = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        pixel_values=pixels(list(images)).to(model.dtype),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(corpus.TURN_END)],
    )
    return str(tokenizer.decode(output[0, start:], skip_special_tokens=True)).strip()


def measure(folder: Path, progress: Progress, num_examples: int = HELDOUT_EXAMPLES) -> Figures:
    """What the README tells about the saved model, measured in float32 on its files."""
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    right = 0
    for i in range(num_examples):
        each = pictures.example("heldout", i)
        right += answer(model, tokenizer, each.images, each.question) == each.answer
    plain = [Shape(kind, colour) for kind in pictures.SHAPES for colour in pictures.COLOURS if colour != "white"]
    answers = {str(shape): answer(model, tokenizer, (draw([shape]),), "What is in the picture?") for shape in plain}
    exact = sum(answers[str(shape)] == describe([shape]) for shape in plain)
    return Figures(
        num_parameters=model.num_parameters(),
        tower_steps=progress.tower_step,
        steps=progress.step,
        wall_minutes=round(progress.seconds / 60, 1),
        final_training_loss=round(progress.loss, 4),
        heldout_exact=right / num_examples,
        plain_pictures_exact=exact / len(plain),
        answers=answers,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.demo_vision.train", description="Train the demo vision model from the demo model."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the model, the checkpoint and figures.json")
    parser.add_argument("--tower-steps", type=int, default=1500, help="steps of the tower alone (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=900, help="steps of all parts (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="processor threads (default: %(default)s)")
    parser.add_argument("--heldout", type=int, default=HELDOUT_EXAMPLES, help="examples to measure with")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer):,} tokens in the vocabulary")
    progress = train(model, tokenizer, arguments.out, arguments.tower_steps, arguments.steps)
    save_model(model, tokenizer, arguments.out / "model")
    figures = json.dumps(asdict(measure(arguments.out / "model", progress, arguments.heldout)), indent=2)
    (arguments.out / "figures.json").write_text(figures + "\n")
    print(figures)


if __name__ == "__main__":
    main()
