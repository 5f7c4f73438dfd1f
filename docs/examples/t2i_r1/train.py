"""T2I-R1 in small: GRPO over two levels, a text plan and the picture drawn from it (arXiv 2505.00703).

A tiny Janus model learns from a bad teacher to plan and draw coloured shapes. Then reinforcement learning improves it.
Each step

1. generates a group of 8 plans for each prompt, and a picture for each plan, with guidance, in the engine,
2. scores the pixels with a checker, and compares each score with the others of its group,
3. raises or lowers the probability of the tokens of both levels, in a trainer of plain torch,
4. writes the new weights into the running engine.

    python docs/examples/t2i_r1/train.py [--short] [--pictures FOLDER]

It needs a CPU, no data and no downloads. `--short` is a smaller run, for tests.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from plots import write_curve, write_gallery
from shapes import BEGIN_IMAGE, WORD_ID, Score, Task, all_tasks, check
from tiny_janus import log_probs, make_model, train_supervised, trained_modules

from mvllm import LLM, ImageParams, SamplingParams

GROUP = 8
GUIDANCE = 2.0
CLIP = 0.2  # of the ratio of probabilities, as in PPO
MAX_PLAN_TOKENS = 8


@dataclass
class Sample:
    """A plan and its picture, with their log-probabilities and score.

    Attributes:
        task: The prompt.
        plan: Ids of the plan. It ends with the token that begins the picture, or has no picture.
        codes: Codes of the picture.
        old: Log-probabilities of the tokens of both, without guidance, when they were sampled.
        pixels: The picture; None without one.
        score: The result of the checker.
    """

    task: Task
    plan: list[int]
    codes: list[int]
    old: list[float]
    pixels: np.ndarray | None
    score: Score


def rollout(llm: LLM, tasks: Sequence[Task], seed: int, group: int = GROUP) -> list[Sample]:
    """A group of samples for each task, one group after another.

    Sequence i of a request is drawn with `seed + i`, so requests have seeds that lie `group` apart.
    """
    prompts = [task.prompt() for task in tasks]
    begin = WORD_ID[BEGIN_IMAGE]
    plans = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        [
            SamplingParams(
                n=group,
                seed=seed + group * index,
                max_tokens=MAX_PLAN_TOKENS,
                stop_token_ids=[begin],
                logprobs=0,
                detokenize=False,
            )
            for index in range(len(tasks))
        ],
        use_tqdm=False,
    )
    samples = [
        Sample(
            task,
            list(plan.token_ids),
            [],
            [chosen[token].logprob for chosen, token in zip(plan.logprobs, plan.token_ids, strict=True)],
            None,
            Score(0.0, 0.0, 0.0),
        )
        for task, output in zip(tasks, plans, strict=True)
        for plan in sorted(output.outputs, key=lambda plan: plan.index)
    ]
    # The second pass continues the first: prompt, plan, and the token that begins the picture.
    drawn = [(index, sample) for index, sample in enumerate(samples) if sample.plan[-1] == begin]
    images = llm.generate_images(
        [{"prompt_token_ids": sample.task.prompt() + sample.plan} for _, sample in drawn],
        [ImageParams(guidance_scale=GUIDANCE, seed=seed + index, logprobs=0) for index, _ in drawn],
        use_tqdm=False,
    )
    for (_, sample), output in zip(drawn, images, strict=True):
        image = output.images[0]
        if image.error is not None:
            raise RuntimeError(f"A picture failed: {image.error}")
        sample.codes, sample.pixels = image.codes, image.pixels
        sample.old += image.conditional_logprobs
        sample.score = check(image.pixels, sample.task.scene)
    return samples


class Trainer:
    """Group relative policy optimization of one model.

    Args:
        model: The model; its language model, its embedding of codes and both heads are trained.
        lr: Learning rate.
    """

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        self.model = model
        modules = trained_modules(model)
        self._names = {id(p) for module in modules for p in module.parameters()}
        self._parameters = [p for module in modules for p in module.parameters()]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=lr, weight_decay=0.0)

    def weights(self) -> dict[str, torch.Tensor]:
        """The trained weights, with their names in the checkpoint."""
        return {name: p.detach() for name, p in self.model.named_parameters() if id(p) in self._names}

    def step(self, samples: Sequence[Sample], group: int = GROUP, updates: int = 2) -> float:
        """Makes `updates` updates, each with another part of the groups.

        Returns:
            The largest difference between a log-probability of the engine and the trainer's before the first update.
        """
        rewards = torch.tensor([sample.score.reward for sample in samples]).view(-1, group)
        spread = rewards.std(dim=1, keepdim=True)
        advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (spread + 0.02)
        difference = 0.0
        size = len(samples) // updates
        for number in range(updates):
            part = slice(number * size, (number + 1) * size)
            found = self._update(samples[part], advantages.view(-1, 1)[part])
            difference = found if number == 0 else difference
        return difference

    def _update(self, samples: Sequence[Sample], advantages: torch.Tensor) -> float:
        new, is_plan, is_code, _ = log_probs(self.model, [(s.task.prompt(), s.plan, s.codes) for s in samples])
        old = torch.zeros_like(new)
        old[is_plan | is_code] = torch.tensor([value for sample in samples for value in sample.old])
        ratio = (new - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
        loss = -gain[is_plan].mean() - gain[is_code].mean()  # both levels weigh the same
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        return (new - old).abs().max().item()


def mean_scores(samples: Sequence[Sample]) -> tuple[float, float, float, float, float]:
    """Means of the reward, of colour, shape and place, and the share of correct pictures."""
    scores = [sample.score for sample in samples]
    rows = [(score.reward, score.colour, score.shape, score.place, score.correct) for score in scores]
    return tuple(np.mean(rows, axis=0).tolist())


@dataclass(frozen=True)
class Settings:
    """The length of a run."""

    supervised: int = 700  # steps with the bad teacher
    steps: int = 100
    prompts: int = 8  # per step
    lr: float = 2e-4
    held_out: int = 40  # prompts that are scored before and after


SHORT = Settings(supervised=160, steps=12, prompts=4, held_out=8)


@dataclass
class Result:
    """What a run did.

    Attributes:
        before, after: Mean rewards of the held-out prompts.
        rewards: The mean reward of each step.
        difference: The largest difference of a log-probability between engine and trainer.
    """

    before: float
    after: float
    rewards: list[float]
    difference: float


def run(settings: Settings, pictures: Path | None = None) -> Result:
    """Trains, and writes the curve and the pictures to a folder."""
    train_tasks, held_out = all_tasks()
    held_out = held_out[: settings.held_out]
    model = make_model()
    start = time.perf_counter()
    loss = train_supervised(model, train_tasks, settings.supervised)
    print(f"Supervised: {settings.supervised} steps, loss {loss:.2f}, {time.perf_counter() - start:.0f} s", flush=True)

    rng = np.random.default_rng(0)
    rewards, differences = [], []
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=128,
            max_num_seqs=256,
            kv_cache_memory_bytes=1 << 27,
        ) as llm:
            before = rollout(llm, held_out, seed=0)
            print_scores("Before", before)
            trainer = Trainer(model, settings.lr)
            start = time.perf_counter()
            for step in range(settings.steps):
                chosen = [train_tasks[index] for index in rng.choice(len(train_tasks), settings.prompts, replace=False)]
                samples = rollout(llm, chosen, seed=1_000_000 + 1000 * step)
                difference = trainer.step(samples)
                llm.update_weights(tensors=trainer.weights())
                scores = mean_scores(samples)
                rewards.append(scores[0])
                differences.append(difference)
                if (step + 1) % max(1, settings.steps // 12) == 0:
                    print_scores(f"Step {step + 1:4}", samples, f", engine and trainer differ by {difference:.0e}")
            print(f"Reinforcement learning: {settings.steps} steps, {time.perf_counter() - start:.0f} s")
            after = rollout(llm, held_out, seed=0)
            print_scores("After", after)
    if pictures is not None:
        pictures.mkdir(parents=True, exist_ok=True)
        write_curve(pictures / "t2i_r1_reward.svg", rewards)
        write_gallery(pictures / "t2i_r1_before.png", [sample.pixels for sample in before], GROUP)
        write_gallery(pictures / "t2i_r1_after.png", [sample.pixels for sample in after], GROUP)
    return Result(mean_scores(before)[0], mean_scores(after)[0], rewards, max(differences))


def print_scores(title: str, samples: Sequence[Sample], more: str = "") -> None:
    """Prints a line with the mean scores."""
    reward, colour, shape, place, correct = mean_scores(samples)
    print(
        f"{title}: reward {reward:.3f} (colour {colour:.2f}, shape {shape:.2f}, place {place:.2f}), "
        f"{correct:.0%} correct{more}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny text-to-image model with GRPO over two levels.")
    parser.add_argument("--short", action="store_true", help="a smaller run, for tests")
    parser.add_argument("--pictures", type=Path, help="write the curve and the pictures to this folder")
    args = parser.parse_args()
    run(SHORT if args.short else Settings(), args.pictures)


if __name__ == "__main__":
    main()
