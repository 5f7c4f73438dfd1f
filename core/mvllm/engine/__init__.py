"""The engine: from validated requests to outputs.

llm_engine.py, async_llm.py   the synchronous engine and the asyncio engine
frontend/                     input processing, output processing, detokenization
core/                         the engine core: scheduler, executor, KV cache sizing
process/                      engine cores in other processes: clients, sockets, data parallelism
metrics/                      statistics, Prometheus, tracing
tokenizer/                    the model's tokenizer
"""
