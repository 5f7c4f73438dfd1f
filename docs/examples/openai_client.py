"""OpenAI client: talk to `mvllm serve` with the openai package (`pip install openai`).

Start the server in one terminal and this script in another:

    mvllm serve demo
    python docs/examples/openai_client.py [--model NAME] [--url http://127.0.0.1:8000/v1]
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a running server.")
    parser.add_argument("--model", default="demo", help="name of the model on the server (default: demo)")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL of the server's API")
    parser.add_argument("--api-key", default="none", help="key, if the server was started with --api-key")
    args = parser.parse_args()

    client = OpenAI(base_url=args.url, api_key=args.api_key)
    print("Models:", [model.id for model in client.models.list()])

    answer = client.chat.completions.create(
        model=args.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
    )
    print("Answer:", answer.choices[0].message.content)
    print("Tokens:", answer.usage.prompt_tokens, "in,", answer.usage.completion_tokens, "out")

    print("Stream:", end="")
    stream = client.completions.create(
        model=args.model,
        prompt="Once upon a time",
        max_tokens=24,
        temperature=0,
        stream=True,
        extra_body={"top_k": 20},  # parameters of mvllm beyond OpenAI's
    )
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
    print()

    embedding = client.embeddings.create(model=args.model, input="A cow says moo.").data[0].embedding
    print("Embedding:", len(embedding), "dimensions")


if __name__ == "__main__":
    main()
