"""Draw the README's figure from the records: GPU memory with the table on the GPU and off it.

Run it after new records: ``python scripts/headline_figure.py``. Standard library and pleviz only.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

from pleviz import SPECS, load_records

OUT = Path(__file__).resolve().parent.parent / "book" / "images" / "headline.svg"
WIDTH, LEFT, RIGHT, BAR, GAP, GROUP = 860, 150, 90, 20, 4, 22
# blue and orange of Okabe and Ito: told apart with any kind of colour vision
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #24292f }
.note { font-size: 12px; fill: #57606a }
.gpu { fill: #D55E00 } .mapped { fill: #0072B2 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9da7b1 } .gpu { fill: #E69F00 } .mapped { fill: #56B4E9 }
}"""
LABELS = {"bf16": "bfloat16", "nf4": "NF4 (4-bit)"}


def measured() -> tuple[dict[tuple[str, str, str], int], str]:
    """Resident bytes by (model, precision, home), and the provenance of the newest record."""
    found: dict[tuple[str, str, str], int] = {}
    provenance = ""
    for record in load_records():
        if record.kind != "speed" or not record.hardware.get("gpu"):
            continue
        if record.arguments.get("compiled") or record.arguments.get("scale") != "real":
            continue
        for row in record.rows:
            if row.get("resident_bytes") and row["home"] in ("gpu", "mapped"):
                found[row["model"], row["precision"], row["home"]] = row["resident_bytes"]
                provenance = record.provenance
    return found, provenance


def draw(found: dict[tuple[str, str, str], int], provenance: str) -> str:
    """The SVG text: two bars for each model and precision, in GB (10⁹ bytes)."""
    largest = max(found.values()) / 1e9
    scale = (WIDTH - LEFT - RIGHT) / largest
    parts: list[str] = []
    y = 64.0
    for precision, label in LABELS.items():
        groups = [name for name in SPECS if (name, precision, "mapped") in found]
        if groups:
            parts.append(f'<text x="12" y="{y + 4}" font-weight="600">{label}</text>')
            y += 16
        for name in groups:
            parts.append(f'<text x="{LEFT - 10}" y="{y + BAR + 6}" text-anchor="end">{name}</text>')
            for home in ("gpu", "mapped"):
                gigabytes = found[name, precision, home] / 1e9
                width = gigabytes * scale
                value = f"{gigabytes:.1f} GB"
                if home == "mapped":
                    ratio = found[name, precision, home] / found[name, precision, "gpu"]
                    value += f" ({ratio:.0%})"
                parts.append(
                    f'<rect class="{home}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}"/>'
                    f'<text x="{LEFT + width + 6:.1f}" y="{y + 15}">{value}</text>'
                )
                y += BAR + GAP
            y += GROUP - GAP
    height = y + 34
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img">
<title>GPU memory of Gemma E2B and E4B with the PLE table on the GPU and in host memory</title>
<style>{STYLE}</style>
<text x="12" y="22" font-weight="600">GPU memory that the loaded model holds</text>
<rect class="gpu" x="12" y="34" width="14" height="14"/><text x="32" y="46">PLE table on the GPU</text>
<rect class="mapped" x="200" y="34" width="14" height="14"/><text x="220" y="46">table in host memory</text>
{"".join(parts)}
<text class="note" x="12" y="{y + 14}">{escape(provenance)}</text>
</svg>
"""


def main() -> None:
    """Write the figure, or say that there is nothing to draw yet."""
    found, provenance = measured()
    if not found:
        sys.exit("There are no GPU records to draw: run `python -m pleviz measure` first.")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(draw(found, provenance), encoding="utf-8")
    print(OUT)


if __name__ == "__main__":
    main()
