"""Figures of memory and traffic, as plotly figures that read in light and in dark themes.

Every function takes plain numbers (bytes, seconds) and returns a ``plotly.graph_objects.Figure``
for :func:`pleviz.show`. Axes carry units, hovering gives exact bytes, and each figure describes
itself in words (``fig.layout.meta["alt"]``). A figure of measurements says under its title where
they come from: ``source="live"`` or ``source=f"recorded: {record.provenance}"``.
"""

from pleviz.plots.bars import Bar, row_and_table, stacked_bars
from pleviz.plots.curves import intensity_chart, timeline
from pleviz.plots.style import PARTS

__all__ = ["PARTS", "Bar", "intensity_chart", "row_and_table", "stacked_bars", "timeline"]
