"""Pictures of a run: the curve of rewards as SVG, and a table of generated pictures as PNG, without libraries."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

ZOOM, GAP = 3, 6  # pixels of the file per pixel of a picture, and between pictures


def write_curve(path: Path, rewards: Sequence[float]) -> None:
    """Writes the reward of each step (dots) and the mean of the last ten (line)."""
    width, height, left, bottom = 640, 260, 50, 40
    plot_width, plot_height = width - left - 15, height - bottom - 15

    def point(step: float, reward: float) -> tuple[float, float]:
        return left + plot_width * step / len(rewards), 15 + plot_height * (1 - reward)

    means = [float(np.mean(rewards[max(0, i - 9) : i + 1])) for i in range(len(rewards))]
    points = [point(step + 1, reward) for step, reward in enumerate(rewards)]
    line = " ".join("{:.1f},{:.1f}".format(*point(step + 1, mean)) for step, mean in enumerate(means))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="13"><rect width="{width}" height="{height}" fill="#ffffff"/>'
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        x, y = point(0, tick)
        parts.append(f'<path d="M{x} {y:.1f}h{plot_width}" stroke="#dddddd"/>')
        parts.append(f'<text x="{x - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#555555">{tick:g}</text>')
    for step in range(0, len(rewards) + 1, max(1, len(rewards) // 6)):
        x, y = point(step, 0)
        parts.append(f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle" fill="#555555">{step}</text>')
    parts.append(f'<text x="{left + plot_width / 2}" y="{height - 5}" text-anchor="middle">step</text>')
    parts.append(
        f'<text x="{left + 8}" y="12" fill="#222222">mean reward of a step, and its mean over ten steps</text>'
    )
    parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="#9db7dd"/>' for x, y in points]
    parts.append(f'<polyline points="{line}" fill="none" stroke="#1f4e9c" stroke-width="2"/></svg>')
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def write_gallery(path: Path, pictures: Sequence[np.ndarray | None], columns: int, rows: int = 6) -> None:
    """Writes the first `rows` rows of pictures (uint8 [height, width, 3]); an absent one is grey."""
    shown = pictures[: rows * columns]
    side = next(picture for picture in shown if picture is not None).shape[0]
    step = side * ZOOM + GAP
    sheet = np.full((len(shown) // columns * step + GAP, columns * step + GAP, 3), 190, dtype=np.uint8)
    for index, picture in enumerate(shown):
        if picture is not None:
            row, column = (GAP + step * place for place in divmod(index, columns))
            zoomed = picture.repeat(ZOOM, axis=0).repeat(ZOOM, axis=1)
            sheet[row : row + side * ZOOM, column : column + side * ZOOM] = zoomed
    path.write_bytes(png(sheet))


def png(pixels: np.ndarray) -> bytes:
    """uint8 [height, width, 3] as a PNG file."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # 0: no filter
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(rows, 9),
        b"IEND": b"",
    }
    data = b"\x89PNG\r\n\x1a\n"
    for name, content in chunks.items():
        data += struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
    return data
