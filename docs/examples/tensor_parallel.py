"""Tensor parallel: shard each layer over several workers, one process each.

The multi-process executor starts `--tensor-parallel-size` worker processes. On devices each takes the next device; on
the CPU platform the workers share the machine's cores.

    python docs/examples/tensor_parallel.py [--model PATH_OR_NAME] [--tensor-parallel-size N]
"""

import argparse

from mvllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate with tensor parallelism.")
    parser.add_argument("--model", default="demo", help="model folder, hub name, or 'demo' (default)")
    parser.add_argument("--tensor-parallel-size", type=int, default=2, help="number of workers (default: 2)")
    args = parser.parse_args()

    # pipeline_parallel_size=M would also split the layers into M stages: N * M workers in all.
    with LLM(args.model, tensor_parallel_size=args.tensor_parallel_size) as llm:
        print(f"Platform: {llm.llm_engine.platform_summary}, {args.tensor_parallel_size} workers")
        [output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16))

    print(f"Generated: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
