"""Reinforcement learning: GRPO on the demo model, in plain torch.

The reward can be checked: a story mentions a given animal and ends with a given word. Each step samples groups of
stories with the engine, scores them, changes the weights of the trainer's model, and gives these to the engine.

    python docs/examples/grpo.py [--steps 30] [--plot curve.svg]
"""

import argparse
import re
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mvllm import LLM, SamplingParams
from mvllm.config.hub import find_model

PROMPTS = ["Once upon a time", "Tell me a story.", "One day,", "This is the story of"]
CLIP = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model with GRPO.")
    parser.add_argument("--model", default="demo", help="model folder, or 'demo' (default)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--group", type=int, default=8, help="stories per prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--animal", default="owl")
    parser.add_argument("--last-word", default="friends")
    parser.add_argument("--plot", type=Path, help="write the rewards to this SVG file")
    args = parser.parse_args()

    policy = AutoModelForCausalLM.from_pretrained(find_model(args.model), dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)
    start, curve = time.perf_counter(), []

    # float32 in the engine, too, so that both compute the same log-probabilities.
    settings = {"dtype": "float32", "max_model_len": args.max_tokens + 32, "kv_cache_memory_bytes": 64 << 20}
    with LLM(args.model, **settings) as llm:
        stories_a_step = len(PROMPTS) * args.group
        print(f"{llm}: {stories_a_step} stories of at most {args.max_tokens} tokens a step", flush=True)
        for step in range(1, args.steps + 1):
            # 1. Rollouts: story i of a prompt is drawn with `seed + i`, so the seeds of prompts lie `group` apart.
            params = [
                SamplingParams(
                    n=args.group,
                    temperature=1.0,
                    logprobs=0,
                    max_tokens=args.max_tokens,
                    seed=1_000_000 * step + args.group * i,
                )
                for i in range(len(PROMPTS))
            ]
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            stories = [(output.prompt_token_ids, story) for output in outputs for story in output.outputs]

            # 2. Rewards, and advantages over the group of the same prompt.
            rewards = torch.tensor([reward(story.text, args.animal, args.last_word) for _, story in stories])
            groups = rewards.view(len(PROMPTS), args.group)
            advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)

            # 3. A step of the trainer.
            loss, difference = train(policy, optimizer, stories, advantages.flatten())

            # 4. The new weights, in place, between two steps of the engine.
            llm.update_weights(tensors=policy.state_dict())
            version = llm.weight_info()["weight_version"]

            curve.append(float(rewards.mean()))
            print(
                f"step {step:2}  reward {curve[-1]:.3f}  loss {loss:+.4f}  difference {difference:.1e}  "
                f"weights {version}  {time.perf_counter() - start:.0f} s",
                flush=True,
            )

        greedy = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=args.max_tokens), use_tqdm=False)
    few = max(1, len(curve) // 6)
    print(f"\nMean reward of the first {few} steps: {sum(curve[:few]) / few:.3f}")
    print(f"Mean reward of the last {few} steps:  {sum(curve[-few:]) / few:.3f}")
    print(f"Greedy: {PROMPTS[0]}{greedy[0].outputs[0].text}")
    if args.plot is not None:
        args.plot.write_text(svg(curve), encoding="utf-8")


def reward(text: str, animal: str, last_word: str) -> float:
    """One half if the story mentions the animal, one half if its last word is the given one."""
    words = re.findall(r"[a-z]+", text.lower())
    return 0.5 * (animal in words) + 0.5 * (words[-1:] == [last_word])


def train(
    policy: torch.nn.Module, optimizer: torch.optim.Optimizer, stories: list, advantages: torch.Tensor
) -> tuple[float, float]:
    """One step of policy gradient with a clipped ratio.

    Returns:
        The loss, and the largest difference between the log-probabilities of the policy and those of the engine. They
        are of the same weights, so it is rounding.
    """
    sequences = [[*prompt, *story.token_ids] for prompt, story in stories]
    longest = max(map(len, sequences))
    token_ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    sampled = torch.zeros(len(sequences), longest - 1)  # log-probability of token i + 1, as sampled
    mask = torch.zeros(len(sequences), longest - 1)
    for row, (sequence, (prompt, story)) in enumerate(zip(sequences, stories, strict=True)):
        token_ids[row, : len(sequence)] = torch.tensor(sequence)
        chosen = [position[token].logprob for token, position in zip(story.token_ids, story.logprobs, strict=True)]
        generated = slice(len(prompt) - 1, len(sequence) - 1)
        sampled[row, generated] = torch.tensor(chosen)
        mask[row, generated] = 1.0

    # Teacher forcing. Padding stands behind the tokens, so causal attention needs no mask.
    logits = policy(token_ids).logits[:, :-1].float()
    logprobs = logits.log_softmax(-1).gather(2, token_ids[:, 1:, None]).squeeze(2)
    difference = float(((logprobs.detach() - sampled).abs() * mask).max())

    ratio = (logprobs - sampled).exp()
    weighted = torch.minimum(ratio * advantages[:, None], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, None])
    loss = -(weighted * mask).sum() / mask.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach()), difference


def svg(curve: list[float]) -> str:
    """The mean reward of each step, as an SVG image."""
    width, height, left, top = 480, 200, 40, 20
    right, bottom = width - 20, height - 40
    x = [left + (right - left) * i / max(1, len(curve) - 1) for i in range(len(curve))]
    y = [bottom - (bottom - top) * value for value in curve]
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    grid = "".join(
        f'<path d="M{left} {bottom - (bottom - top) * v:.0f}H{right}" stroke="#ddd"/>'
        f'<text x="{left - 6}" y="{bottom - (bottom - top) * v + 4:.0f}" text-anchor="end">{v:.1f}</text>'
        for v in (0.0, 0.5, 1.0)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{width}" height="{height}" fill="#fff"/>{grid}'
        f'<text x="{left}" y="{bottom + 16}">1</text>'
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{len(curve)}</text>'
        f'<text x="{(left + right) // 2}" y="{bottom + 28}" text-anchor="middle">step</text>'
        f'<text x="{left}" y="{top - 6}">mean reward</text>'
        f'<polyline points="{points}" fill="none" stroke="#1b6ac9" stroke-width="2"/></svg>\n'
    )


if __name__ == "__main__":
    main()
