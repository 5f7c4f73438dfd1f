"""Profiles a batch."""

from mvllm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The capital of France is"]


def main():
    params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(
        model="demo",
        tensor_parallel_size=1,
        profiler_config={"profiler": "torch", "torch_profiler_dir": "./vllm_profile"},
    )
    llm.start_profile()
    outputs = llm.generate(PROMPTS, params)
    llm.stop_profile()
    for output in outputs:
        print(f"Prompt: {output.prompt!r}, Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
