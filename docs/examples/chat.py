"""Chat: several turns of one conversation, rendered with the model's chat template.

python docs/examples/chat.py [--model PATH_OR_NAME]
"""

import argparse

from mvllm import LLM, SamplingParams

QUESTIONS = ["What is the capital of Japan?", "And Norway?", "What does a cow say?"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold a conversation of three turns.")
    parser.add_argument("--model", default="demo", help="model folder, hub name, or 'demo' (default)")
    args = parser.parse_args()

    params = SamplingParams(temperature=0, max_tokens=64)
    messages = [{"role": "system", "content": "You are a helpful assistant."}]

    with LLM(args.model) as llm:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            # Each turn sends the whole conversation. The prefix cache holds the KV of the earlier turns.
            [output] = llm.chat(messages, params, use_tqdm=False)
            answer = output.outputs[0].text.strip()
            messages.append({"role": "assistant", "content": answer})
            print(f"User:      {question}")
            print(f"Assistant: {answer}")
            print(f"           ({output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached)\n")


if __name__ == "__main__":
    main()
