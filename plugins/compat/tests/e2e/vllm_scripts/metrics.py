"""Reads the engine's metrics after a batch."""

from mvllm import LLM, SamplingParams
from mvllm.engine.metrics.reader import Counter, Gauge, Histogram, Vector

PROMPTS = ["Once upon a time", "The capital of France is"]


def main():
    llm = LLM(model="demo", disable_log_stats=False)
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.8, top_p=0.95)):
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}")
    for metric in llm.get_metrics():
        if isinstance(metric, Gauge):
            print(f"{metric.name} (gauge) = {metric.value}")
        elif isinstance(metric, Counter):
            print(f"{metric.name} (counter) = {metric.value}")
        elif isinstance(metric, Vector):
            print(f"{metric.name} (vector) = {metric.values}")
        elif isinstance(metric, Histogram):
            print(f"{metric.name} (histogram)\n    sum = {metric.sum}\n    count = {metric.count}")
            for bucket_le, value in metric.buckets.items():
                print(f"    {bucket_le} = {value}")


if __name__ == "__main__":
    main()
