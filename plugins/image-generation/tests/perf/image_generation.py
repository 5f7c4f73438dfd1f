"""Images per second beside transformers' loop on the same model.

    python plugins/image-generation/tests/perf/image_generation.py

A Janus model of about 120 million random weights (the language model of llama-160m without its vocabulary, the 16384
codes of Janus) generates 8 images of 576 codes at once, each from its own prompt, with guidance. Both sides use the
same checkpoint, dtype and threads, in this process, and decode the pixels. They take turns; the first round warms up
and is not counted. Prints the images per second of each, and the ratio of the medians.

`--grid 12` makes images of 144 codes, for a shorter run.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import JanusConfig, JanusForConditionalGeneration

from mvllm import LLM, ImageParams

VOCAB_SIZE, BOS, PAD, BEGIN_IMAGE, HIDDEN = 4096, 0, 1, 2, 768


def make_checkpoint(folder: Path, grid: int, dtype: torch.dtype) -> JanusForConditionalGeneration:
    """Writes the checkpoint, and returns the model."""
    torch.manual_seed(20260)
    config = JanusConfig(
        text_config={
            "model_type": "llama",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": HIDDEN,
            "intermediate_size": 2048,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 12,
            "max_position_embeddings": 1024,
            "bos_token_id": BOS,
            "pad_token_id": PAD,
            "tie_word_embeddings": False,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "image_size": 16 * grid,
            "patch_size": 16,
            "projection_dim": HIDDEN,
            "num_image_tokens": grid * grid,
        },
        vq_config={
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1, 1],
            "num_res_blocks": 1,
            "projection_dim": HIDDEN,
            "image_token_embed_dim": HIDDEN,
        },
        image_token_id=3,
        tie_word_embeddings=False,
    )
    model = JanusForConditionalGeneration(config).to(dtype).eval()
    model.generation_config.update(bos_token_id=BOS, eos_token_id=3, pad_token_id=PAD)
    model.generation_config.generation_kwargs = {"boi_token_id": BEGIN_IMAGE}
    model.save_pretrained(folder)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Time image generation beside transformers.")
    parser.add_argument("--images", type=int, default=8, help="images at once")
    parser.add_argument("--grid", type=int, default=24, help="codes along each side of an image")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    generator = torch.Generator().manual_seed(1)
    inner = torch.randint(4, VOCAB_SIZE, (args.images, args.prompt_tokens - 2), generator=generator)
    ends = [torch.full((args.images, 1), token) for token in (BOS, BEGIN_IMAGE)]
    prompts = torch.cat([ends[0], inner, ends[1]], dim=1)

    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(Path(folder), args.grid, getattr(torch, args.dtype))
        settings = {"dtype": args.dtype, "max_model_len": 1024, "kv_cache_memory_bytes": 1 << 30}
        with LLM(folder, skip_tokenizer_init=True, **settings) as llm:

            def engine() -> None:
                requests = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
                outputs = llm.generate_images(requests, ImageParams(guidance_scale=5.0), use_tqdm=False)
                assert all(output.images[0].pixels.shape == (16 * args.grid, 16 * args.grid, 3) for output in outputs)

            @torch.inference_mode()
            def transformers() -> None:
                codes = model.generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    generation_mode="image",
                    do_sample=True,
                    guidance_scale=5.0,
                )
                pixels = model.decode_image_tokens(codes)
                assert pixels.shape == (args.images, 16 * args.grid, 16 * args.grid, 3)

            sides: dict[str, Callable[[], None]] = {"mvllm": engine, "transformers": transformers}
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            for round_ in range(args.rounds + 1):
                for name, generate in sides.items():
                    start = time.perf_counter()
                    generate()
                    if round_:
                        seconds[name].append(time.perf_counter() - start)
    for name, measured in seconds.items():
        median = statistics.median(measured)
        print(f"{name:13} {args.images / median:7.3f} images/s   {median:7.2f} s for {args.images} at once")
    ratio = statistics.median(seconds["transformers"]) / statistics.median(seconds["mvllm"])
    print(f"mvllm / transformers: {ratio:.2f}")


if __name__ == "__main__":
    main()
