"""Reinforcement learning with TRL: GRPOTrainer samples from a server of mvllm, and gives it its weights.

Start a server whose log-probabilities are those after temperature and filters, as TRL's correction expects, then the
trainer, in an environment that has trl, datasets and requests beside mvllm. Weight updates need an administrator's key:

    export MVLLM_ADMIN_API_KEY=...
    mvllm serve demo --dtype float32 --logprobs-mode processed_logprobs
    python docs/examples/grpo_trl.py [--url http://127.0.0.1:8000] [--steps 30]

Both compute in float32, so that they agree on the log-probabilities of the samples. `grpo.py` is the same without TRL.
"""

import argparse
import os
import re

os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # of the trainer; remove it to use an accelerator

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer
from trl_client import use_mvllm

from mvllm.demo import demo_model_path

PROMPTS = ["Once upon a time", "Tell me a story.", "One day,", "This is the story of"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model with TRL's GRPOTrainer.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server's address")
    parser.add_argument("--group-port", type=int, default=51216, help="port on which the trainer waits for the server")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--group", type=int, default=8, help="stories per prompt")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--animal", default="owl")
    parser.add_argument("--last-word", default="friends")
    parser.add_argument("--output", default="grpo-trl", help="folder of the trainer's files")
    args = parser.parse_args()

    def reward(completions: list[str], **_: object) -> list[float]:
        """One half if the story mentions the animal, one half if its last word is the given one."""
        words = [re.findall(r"[a-z]+", text.lower()) for text in completions]
        return [0.5 * (args.animal in each) + 0.5 * (each[-1:] == [args.last_word]) for each in words]

    use_mvllm()
    folder = demo_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * args.steps}),
        args=GRPOConfig(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=len(PROMPTS) * args.group,
            num_generations=args.group,
            max_completion_length=args.max_tokens,
            learning_rate=3e-4,
            lr_scheduler_type="constant",
            beta=0.0,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url=args.url,
            vllm_group_port=args.group_port,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
        ),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "reward" in entry]
    for step, entry in enumerate(steps, start=1):
        difference = entry.get("sampling/sampling_logp_difference/max", float("nan"))
        print(f"step {step:2}  reward {entry['reward']:.3f}  difference {difference:.1e}")


if __name__ == "__main__":
    main()
