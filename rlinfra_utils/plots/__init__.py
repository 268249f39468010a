"""Pictures of the series: one style, colours safe for the colour-blind, alt text with every figure.

Models: a timeline of spans, shares of a total, the dataflow of one step, per-token bars. Leaves out:
interaction and any computation; each function draws a table that another module made. Use:
`plots.show(plots.timeline(trace.frame()), alt="...")`.
"""

from rlinfra_utils.plots.charts import dataflow, shares, stacked, timeline, token_bars, verdict_map
from rlinfra_utils.plots.style import PALETTE, STAGE_COLORS, STYLE, WAITING, figure, show, styled, title
