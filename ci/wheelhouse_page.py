"""The index page and the list of components of a wheelhouse; see ci/wheelhouse.py."""

from __future__ import annotations

import html
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

from wheelhouse_contents import TARGETS, Target, Wheel

TORCH_SELECTOR = "https://download.pytorch.org/whl"

STYLE = """
body { max-width: 56rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; color: #222; }
h1 { margin-bottom: 0 } pre, code { font: 14px/1.5 ui-monospace, monospace; background: #f3f3f3; }
pre { padding: .7rem 1rem; overflow-x: auto } code { padding: .1rem .3rem }
table { border-collapse: collapse; width: 100% } td, th { border-bottom: 1px solid #ddd; padding: .3rem .5rem;
text-align: left; vertical-align: top }
"""


def page(own: Sequence[Wheel], torch: str, with_torch: bool, source_url: str) -> str:
    """The page: how to install for each platform, and links to all wheels with their hashes, which pip reads.

    Args:
        own: The project's wheels.
        torch: The version of the torch for processors.
        with_torch: Whether the requirements files of processors have it.
        source_url: The address of the repository; empty if there is none.
    """
    version = own[0].version
    source = f' Source: <a href="{html.escape(source_url)}">{html.escape(source_url)}</a>.' if source_url else ""
    commands = "\n".join(_commands(each, torch, with_torch) for each in TARGETS)
    rows = "\n".join(_row(each) for each in own)
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>mvllm {version}: wheelhouse</title><style>{STYLE}</style></head>
<body>
<h1>mvllm {version}</h1>
<p>All distributions of this release, and one requirements file for each platform.{source}</p>
<h2>Install</h2>
<p>Python 3.11 to 3.14. Linux on x86-64 or 64-bit Arm with glibc 2.31 or newer (Debian 11, Ubuntu 20.04); macOS 14 or
newer on Apple silicon has all packages, without compiled kernels, and was not run; on Windows use WSL 2.
<code>WHEELHOUSE</code> is the folder with this page. Create an environment first:</p>
<pre>python3 -m venv .venv &amp;&amp; . .venv/bin/activate      # or: uv venv &amp;&amp; . .venv/bin/activate</pre>
{commands}
<p>Use the files as they are. The project does not own its names on package indexes: a command such as
<code>pip install --find-links WHEELHOUSE NAME</code> takes a higher version from there if somebody offers one.
The files pin each package by version and hash, so nothing else is accepted.</p>
<h2>Check</h2>
<pre>cd WHEELHOUSE &amp;&amp; sha256sum --check --quiet SHA256SUMS
mvllm doctor
mvllm generate demo --prompt "Once upon a time"</pre>
<h2>Wheels</h2>
<table><tr><th>file</th><th>what it is</th></tr>
{rows}
</table>
<p><a href="SHA256SUMS">SHA256SUMS</a>, <a href="sbom.cdx.json">components (CycloneDX)</a>, source archives in
<code>source/</code>.</p>
</body>
</html>
"""


def _commands(file: Target, torch: str, with_torch: bool) -> str:
    """A heading and the commands of one requirements file."""
    release = torch.split("+")[0]
    in_file = file.torch == "index" or (file.torch == "cpu" and with_torch)
    no_deps = "" if in_file else "--no-deps "
    first = ""
    if not in_file and file.parts:
        build = f"torch{'' if file.name == 'tpu' else f'=={release}'}"
        if file.name == "tpu":
            build = "torch==2.9.1"
        first = f"pip install {build} --index-url {TORCH_SELECTOR}/{file.backend}\n"
    uv_first = f"uv {first.replace('--index-url ' + TORCH_SELECTOR + '/', '--torch-backend=')}" if first else ""
    return (
        f'<h3 id="{file.name}">{html.escape(file.device[0].upper() + file.device[1:])}</h3>\n<pre>'
        + html.escape(
            f"{first}pip install --require-hashes {no_deps}-r WHEELHOUSE/{file.file}\n"
            f"\n{uv_first}uv pip install --require-hashes {no_deps}-r WHEELHOUSE/{file.file}"
        )
        + "</pre>"
    )


def _row(wheel: Wheel) -> str:
    link = f"{quote(wheel.path.name)}#sha256={wheel.sha256}"
    return f'<tr><td><a href="{link}">{html.escape(wheel.path.name)}</a></td><td>{html.escape(wheel.summary)}</td></tr>'


def components(own: Sequence[Wheel], pins: Mapping[str, Iterable[tuple[str, str]]]) -> str:
    """A CycloneDX document, version 1.6: the project's wheels with their hashes, and what the files pin.

    The project's packages have no package URL of an index, since the names there are not the project's.
    """
    version = own[0].version
    entries: list[dict[str, object]] = []
    references: dict[str, str] = {}
    for wheel in own:
        references.setdefault(wheel.name, wheel.path.name)
        entries.append(
            {
                "type": "library",
                "bom-ref": wheel.path.name,
                "name": wheel.name,
                "version": wheel.version,
                "description": wheel.summary,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
                "hashes": [{"alg": "SHA-256", "content": wheel.sha256}],
                "purl": f"pkg:generic/{wheel.name}@{wheel.version}?checksum=sha256:{wheel.sha256}",
            }
        )
        if "manylinux" in wheel.path.name:
            entries[-1]["components"] = [
                {
                    "type": "library",
                    "bom-ref": f"libstdc++ in {wheel.path.name}",
                    "name": "libstdc++",
                    "description": "GCC's C++ library, linked statically",
                    "licenses": [{"expression": "GPL-3.0-or-later WITH GCC-exception-3.1"}],
                }
            ]
    used: dict[tuple[str, str], list[str]] = {}
    for file, pairs in pins.items():
        for pair in pairs:
            used.setdefault(pair, []).append(file)
    for (name, pinned), files in sorted(used.items()):
        normal = re.sub(r"[-_.]+", "-", name).lower()
        references.setdefault(normal, f"{normal}=={pinned}")
        entries.append(
            {
                "type": "library",
                "bom-ref": f"{normal}=={pinned}",
                "name": normal,
                "version": pinned,
                "purl": f"pkg:pypi/{normal}@{quote(pinned)}",
                "properties": [
                    {"name": "mvllm:requirements-file", "value": f"{file}.txt"} for file in sorted(set(files))
                ],
            }
        )
    dependencies = []
    for wheel in own:
        names = (re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", text)[0]).lower() for text in wheel.requires)
        depends = sorted({references[name] for name in names if name in references} - {wheel.path.name})
        dependencies.append({"ref": wheel.path.name, "dependsOn": depends})
    moment = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, ''.join(wheel.sha256 for wheel in own))}",
        "version": 1,
        "metadata": {
            "timestamp": moment,
            "component": {"type": "application", "bom-ref": "wheelhouse", "name": "mvllm", "version": version},
        },
        "components": entries,
        "dependencies": dependencies,
    }
    return json.dumps(document, indent=1) + "\n"
