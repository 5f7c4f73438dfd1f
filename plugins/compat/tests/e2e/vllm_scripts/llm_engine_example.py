"""Adds requests to a synchronous engine while it steps."""

import argparse

from mvllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from mvllm.utils import FlexibleArgumentParser


def create_test_prompts() -> list[tuple[str, SamplingParams]]:
    return [
        ("A robot may not", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        (
            "What is the meaning of life?",
            SamplingParams(n=2, best_of=5, temperature=0.8, top_p=0.95, frequency_penalty=0.1),
        ),
    ]


def process_requests(engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams]]):
    request_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, params)
            request_id += 1
        outputs: list[RequestOutput] = engine.step()
        for output in outputs:
            if output.finished:
                print(output)


def main(args: argparse.Namespace):
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    process_requests(engine, create_test_prompts())


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="Uses the LLMEngine class directly")
    parser = EngineArgs.add_cli_args(parser)
    main(parser.parse_args())
