"""Offline generation with sampling parameters."""

from mvllm import LLM, SamplingParams

PROMPTS = ["Once upon a time", "The capital of France is", "7 plus 5 is", "My name is"]


def main():
    params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model="demo", tensor_parallel_size=1)
    for output in llm.generate(PROMPTS, params):
        text = output.outputs[0].text
        print(f"Prompt: {output.prompt!r}, Generated text: {text!r}")


if __name__ == "__main__":
    main()
