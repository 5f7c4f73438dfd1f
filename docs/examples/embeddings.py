"""Embeddings: turn texts into vectors and rank documents by similarity to a query.

Any decoder gives embeddings by pooling its last hidden states; encoders (BERT, RoBERTa, ...) and their
sentence-transformers settings are supported, too.

    python docs/examples/embeddings.py [--model PATH_OR_NAME]
"""

import argparse

import numpy as np

from mvllm import LLM, PoolingParams

QUERY = "What is the capital of Italy?"
DOCUMENTS = ["The capital of Italy is Rome.", "A cow says moo.", "The opposite of hot is cold."]


def main() -> None:
    parser = argparse.ArgumentParser(description="Embed texts and rank documents.")
    parser.add_argument("--model", default="demo", help="model folder, hub name, or 'demo' (default)")
    args = parser.parse_args()

    with LLM(args.model) as llm:
        # pooling_type and normalize default to what the model's own files say.
        outputs = llm.embed([QUERY, *DOCUMENTS], PoolingParams(pooling_type="mean", normalize=True))

    query, *documents = (np.array(output.outputs.embedding) for output in outputs)
    print(f"{len(outputs)} vectors of {query.size} dimensions")

    # The dot product of vectors of length 1 is the cosine similarity.
    similarities = [float(query @ document) for document in documents]
    for similarity, text in sorted(zip(similarities, DOCUMENTS), reverse=True):
        print(f"{similarity:6.3f}  {text}")


if __name__ == "__main__":
    main()
