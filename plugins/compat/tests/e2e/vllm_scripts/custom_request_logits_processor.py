"""A logits processor that is made of one function per request: it allows one token only."""

import torch

from mvllm import LLM, SamplingParams
from mvllm.extension_api import AdapterLogitsProcessor, RequestLogitsProcessor


class OnlyOneToken:
    def __init__(self, target_token: int) -> None:
        self.target_token = target_token

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        kept = logits[self.target_token].item()
        logits[:] = float("-inf")
        logits[self.target_token] = kept
        return logits


class WrappedLogitsProcessor(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        if not params.extra_args or "target_token" not in params.extra_args:
            return None
        return OnlyOneToken(params.extra_args["target_token"])


def main():
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, extra_args={"target_token": 100}),
        SamplingParams(temperature=0.0, max_tokens=4),
    ]
    llm = LLM(model="demo", logits_processors=[WrappedLogitsProcessor])
    for output in llm.generate(["The capital of France is", "The capital of France is"], params):
        print(f"Output: {output.outputs[0].token_ids} {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
