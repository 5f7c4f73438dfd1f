"""Runner of transformers: `generate` on one static batch."""

from __future__ import annotations

import argparse

from protocol import Generate, serve


def load(args: argparse.Namespace) -> tuple[Generate, str, str]:
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: list, output: int, shared: int) -> list:
        ids = torch.tensor(prompts)
        config = transformers.GenerationConfig(
            max_new_tokens=output, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
        )
        result = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        return result[:, ids.shape[1] :].tolist()

    return generate, transformers.__version__, "static batch"


if __name__ == "__main__":
    serve(load)
