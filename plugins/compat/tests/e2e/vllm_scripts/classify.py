"""Class probabilities of prompts."""

from argparse import Namespace

from mvllm import LLM, EngineArgs
from mvllm.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="demo", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace):
    llm = LLM(**vars(args))
    outputs = llm.classify(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs):
        probs = output.outputs.probs
        print(f"Prompt: {prompt!r}\nClass Probabilities: {probs} (size={len(probs)})")


if __name__ == "__main__":
    main(parse_args())
