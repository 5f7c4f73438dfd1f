"""mvllm's runner: run_mvllm.py FOLDER --threads N PICTURE ... prints the seconds of each picture as JSON."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--breakdown", action="store_true", help="print what the parts take")
    parser.add_argument("--enforce-eager", action="store_true", help="record nothing")
    parser.add_argument("pictures", nargs="+")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from mvllm import LLM, SamplingParams

    breakdown = None
    if args.breakdown:
        from tests.perf.images_first_token.breakdown import Breakdown, time_processor

        breakdown = Breakdown()
    llm = LLM(
        args.folder,
        platform="cpu",
        dtype="bfloat16",
        max_model_len=1024,
        kv_cache_memory_bytes=256 << 20,
        enforce_eager=args.enforce_eager,
    )
    image_id = llm.llm_engine.config.model.multimodal.placeholders["image"]
    params = SamplingParams(temperature=0, max_tokens=1)
    seconds = []
    for i, name in enumerate([args.pictures[-1], *args.pictures[:-1], args.pictures[-1]]):
        text = [5 + (7 * i + j) % 200 for j in range(32)]
        start = time.perf_counter()
        data = Path(name).read_bytes()
        prompt = {"prompt_token_ids": [*text[:8], image_id, *text[8:]], "multi_modal_data": {"image": data}}
        llm.generate([prompt], params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        if breakdown is not None:
            breakdown.next_picture(seconds[-1], keep=2 <= i <= len(args.pictures))
    if breakdown is not None:
        print(breakdown.report(), time_processor(llm.llm_engine.config, args.pictures), sep="\n")
    print(json.dumps(seconds[2:-1]))  # the first two start processes and caches; the last picture was seen before
