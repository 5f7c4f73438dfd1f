"""Structured outputs: from a JSON schema, regex, choice list or grammar to the token mask of each step.

    InputProcessor      check_available: is the library installed (StructuredOutputsParams validates itself)
    EngineCore ── submit ──> StructuredOutputManager ── thread ──> GrammarSandbox     compiles in a killable process
        │                                        └──────> llguidance       then compiles in the engine, and caches
        └── pop_results ── SequenceGrammar ──> Scheduler  one per sequence: mask of the next token, accept(token)
                                    │
                                    └── MaskWorker        computes expensive masks on another thread

The engine core's thread never compiles. This package has no tensors and no batch rows.
"""
