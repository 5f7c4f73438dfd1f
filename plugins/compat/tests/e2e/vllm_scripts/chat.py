"""One conversation, then a batch of conversations, then another chat template."""

from mvllm import LLM, EngineArgs
from mvllm.outputs import RequestOutput
from mvllm.utils.argparse_utils import FlexibleArgumentParser


def create_parser():
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="demo")
    group = parser.add_argument_group("Sampling parameters")
    group.add_argument("--max-tokens", type=int)
    group.add_argument("--temperature", type=float)
    parser.add_argument("--chat-template-path", type=str)
    return parser


def show(outputs: list[RequestOutput]):
    for output in outputs:
        print(f"Generated text: {output.outputs[0].text!r}")
    print("-" * 40)


def main(args: dict):
    max_tokens, temperature = args.pop("max_tokens"), args.pop("temperature")
    template_path = args.pop("chat_template_path")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if temperature is not None:
        params.temperature = temperature
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I help?"},
        {"role": "user", "content": "What is the capital of Japan?"},
    ]
    show(llm.chat(conversation, params, use_tqdm=False))
    conversations = [conversation for _ in range(3)]
    show(llm.chat(conversations, params, use_tqdm=True))
    if template_path is not None:
        with open(template_path) as file:
            template = file.read()
        show(llm.chat(conversations, params, use_tqdm=False, chat_template=template))


if __name__ == "__main__":
    main(vars(create_parser().parse_args()))
