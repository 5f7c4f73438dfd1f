"""Quantized load: quantize the weights of the linear layers to 8 or 4 bits while the model is loaded.

A checkpoint that is quantized already (AWQ, GPTQ, FP8, compressed-tensors, MXFP4) needs no setting: its config.json
names the method, and `LLM(path)` loads it.

    python docs/examples/quantized.py [--model PATH_OR_NAME]
"""

import argparse

from mvllm import LLM, SamplingParams

PROMPT = "The capital of France is"


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a model with its int8 and int4 forms.")
    parser.add_argument("--model", default="demo", help="model folder, hub name, or 'demo' (default)")
    args = parser.parse_args()

    params = SamplingParams(temperature=0, max_tokens=16, logprobs=0)  # logprobs=0: of the generated tokens only
    for quantization in (None, "int8", "int4"):
        with LLM(args.model, quantization=quantization) as llm:
            [output] = llm.generate(PROMPT, params, use_tqdm=False)
        completion = output.outputs[0]
        mean = completion.cumulative_logprob / len(completion.token_ids)
        print(f"{quantization or 'as stored':>9}: {completion.text!r}, mean log-probability {mean:.3f}")


if __name__ == "__main__":
    main()
