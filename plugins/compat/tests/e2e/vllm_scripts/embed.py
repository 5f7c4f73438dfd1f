"""Embeddings of prompts."""

from argparse import Namespace

from mvllm import LLM, EngineArgs
from mvllm.utils.argparse_utils import FlexibleArgumentParser
from mvllm.utils.print_utils import print_embeddings

PROMPTS = ["The capital of Brazil is Brasilia.", "The capital of France is Paris."]


def parse_args():
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="demo", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace):
    llm = LLM(**vars(args))
    outputs = llm.embed(PROMPTS)
    for prompt, output in zip(PROMPTS, outputs):
        print(f"Prompt: {prompt!r}")
        print_embeddings(output.outputs.embedding)


if __name__ == "__main__":
    main(parse_args())
