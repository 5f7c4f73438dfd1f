"""Generation with every engine argument on the command line, sampling defaults of the model included."""

from mvllm import LLM, EngineArgs
from mvllm.utils.argparse_utils import FlexibleArgumentParser

PROMPTS = ["Once upon a time", "The capital of France is"]


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="demo")
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    group.add_argument("--top-p", type=float)
    group.add_argument("--top-k", type=int)
    return parser


def main(args: dict):
    given = {name: args.pop(name) for name in ("max_tokens", "temperature", "top_p", "top_k")}
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    for name, value in given.items():
        if value is not None:
            setattr(params, name, value)
    for output in llm.generate(PROMPTS, params):
        print(f"Prompt: {output.prompt!r}")
        print(f"Generated text: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
