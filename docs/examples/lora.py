"""LoRA: requests of an adapter and of the base model share one batch.

`--adapter` is a folder as PEFT saves it. Without one, the script writes a random adapter for the demo model, which
shows the files and the call, and garbles the text.

    python docs/examples/lora.py [--model PATH_OR_NAME --adapter FOLDER]
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mvllm import LLM, LoRARequest, SamplingParams

RANK = 4
NUM_LAYERS, HIDDEN_SIZE = 5, 192  # of the demo model


def write_random_adapter(folder: Path) -> None:
    """Writes an adapter of the query projections: W + (lora_alpha / r) * B @ A, with random A and B."""
    rng = np.random.default_rng(0)
    tensors = {}
    for layer in range(NUM_LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = rng.normal(size=(RANK, HIDDEN_SIZE)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = rng.normal(size=(HIDDEN_SIZE, RANK)).astype(np.float32) * 0.1
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate with and without a LoRA adapter.")
    parser.add_argument("--model", default="demo", help="model folder, hub name, or 'demo' (default)")
    parser.add_argument("--adapter", type=Path, help="folder of a PEFT adapter (default: a random one)")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder, LLM(args.model, enable_lora=True, max_lora_rank=16) as llm:
        if args.adapter is None:
            write_random_adapter(Path(folder))
        adapter = LoRARequest("my-adapter", 1, str(args.adapter or folder))  # name, number of its own, folder
        prompts = ["Once upon a time", "Once upon a time"]
        params = SamplingParams(temperature=0, max_tokens=24)
        base, adapted = llm.generate(prompts, params, lora_request=[None, adapter])

    print(f"Base model:   {base.outputs[0].text!r}")
    print(f"With adapter: {adapted.outputs[0].text!r}")


if __name__ == "__main__":
    main()
