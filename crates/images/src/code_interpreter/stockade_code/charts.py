"""Figures taken apart into data, by E2B's own package; box plots from what matplotlib drew them of.

The package guesses a box plot from lines and patches. It sees those without patches, which are the usual ones, as lines,
and gives up where a whisker has no length.
"""

import functools
import json
import math


def note_boxes(module):
    """Leaves with every box that is drawn what it stands for: all libraries draw them with `Axes.bxp`."""
    draw = module.Axes.bxp

    @functools.wraps(draw)
    def bxp(axes, bxpstats, *args, **kwargs):
        drawn = draw(axes, bxpstats, *args, **kwargs)
        for median, box in zip(drawn["medians"], bxpstats):
            median.stockade_box = box
        return drawn

    module.Axes.bxp = bxp


def chart_of(figure):
    """Type, axes and elements of a figure; None where they are not known."""
    from e2b_charts import main

    if not hasattr(main, "stockade_chart_from_ax"):
        main.stockade_chart_from_ax = main.get_chart_from_ax
        main.get_chart_from_ax = lambda axes: box_plot(axes) or main.stockade_chart_from_ax(axes)
    chart = main.chart_figure_to_chart(figure)
    return json.loads(json.dumps(chart.model_dump(warnings=False), default=plain)) if chart else None


def box_plot(axes):
    """The chart of axes with boxes; None for others."""
    from e2b_charts.charts.bars import BoxAndWhiskerChart, BoxAndWhiskerData, Chart2D

    drawn = [(line, line.stockade_box) for line in axes.get_lines() if hasattr(line, "stockade_box")]
    if not drawn:
        return None
    chart = BoxAndWhiskerChart()
    Chart2D._extract_info(chart, axes)
    # What was drawn of nothing has no median.
    drawn = [(line, box) for line, box in drawn if not math.isnan(box["med"])]
    # Of boxes that stand upright the medians lie flat.
    is_upright = all(len(set(line.get_ydata())) == 1 for line, _ in drawn)
    if not is_upright:
        chart._change_orientation()
    for line, box in drawn:
        ends = line.get_xdata() if is_upright else line.get_ydata()
        chart.elements.append(
            BoxAndWhiskerData(
                label=label_at(axes.xaxis if is_upright else axes.yaxis, sum(ends) / len(ends), box),
                min=box["whislo"],
                first_quartile=box["q1"],
                median=box["med"],
                third_quartile=box["q3"],
                max=box["whishi"],
                outliers=[float(value) for value in box.get("fliers", [])],
            )
        )
    return chart


def label_at(axis, place, box):
    """What an axis says at a place, or, where it has categories, near it: boxes of one stand side by side."""
    from matplotlib.category import StrCategoryLocator

    reach = 0.5 if isinstance(axis.get_major_locator(), StrCategoryLocator) else 1e-6
    labels = [(abs(tick - place), label.get_text()) for tick, label in zip(axis.get_ticklocs(), axis.get_ticklabels())]
    distance, text = min(labels, default=(math.inf, ""))
    return text if distance < reach else str(box.get("label", ""))


def plain(value):
    """A number of numpy's, or a date, as JSON can hold it."""
    return value.item() if hasattr(value, "item") else str(value)
