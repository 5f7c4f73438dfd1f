"""The transformers backend: runs a transformers model with core's attention, linear and embedding layers in it.

    transformers' class ──on the meta device──> MetaModel ──dry run──> parameters of each attention call; operations
    that a
                                                    │                  paged KV cache does not support: refused
                                                    └──replace──> core's Linear, VocabEmbedding, LMHead and Attention
                                                                  replace transformers' modules; others stay

The dry run is independent of model families: the model runs once without data, and each attention call is recorded with
its heads, scale, mask, soft cap and sinks.

Of models with encoders of items (`MetaMultiModalModel`), the language model is taken so. The encoders stay those of
transformers: its class merges the embeddings of an item, with a stub in place of the language model
(`TransformersEncoders`).
"""
