"""transformers' runner: run_transformers.py FOLDER --threads N PICTURE ... prints the seconds of each as JSON."""

from __future__ import annotations

import argparse
import json
import time

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int)
    parser.add_argument("pictures", nargs="+")
    args = parser.parse_args()
    import torch
    from PIL import Image
    from transformers import AutoProcessor, LlavaForConditionalGeneration

    torch.set_num_threads(args.threads)
    model = LlavaForConditionalGeneration.from_pretrained(args.folder, dtype=torch.bfloat16).eval()
    processor = AutoProcessor.from_pretrained(args.folder)
    image_id, num_rows = model.config.image_token_id, model.config.image_seq_length
    seconds = []
    for i, name in enumerate([args.pictures[-1], *args.pictures[:-1]]):
        text = [5 + (7 * i + j) % 200 for j in range(32)]
        start = time.perf_counter()
        with torch.inference_mode():
            pixels = processor.image_processor(Image.open(name).convert("RGB"), return_tensors="pt")["pixel_values"]
            ids = torch.tensor([[*text[:8], *[image_id] * num_rows, *text[8:]]])
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pixel_values=pixels.to(torch.bfloat16),
                max_new_tokens=1,
                do_sample=False,
            )
        seconds.append(time.perf_counter() - start)
    print(json.dumps(seconds[2:]))
