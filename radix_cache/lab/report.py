"""Reports: one HTML file with its pictures in it. No script, no style sheet, nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import accumulate

from radix_cache.lab.compare import Comparison
from radix_cache.lab.curve import Curve
from radix_cache.lab.info import TraceInfo
from radix_cache.lab.plot import Line, line_chart
from radix_cache.lab.requests import Request
from radix_cache.lab.sampling import SampledCurve

__all__ = ["comparison_report", "curve_line", "info_report", "page", "sampled_line"]

_NUM_POINTS = 200
_NUM_BINS = 60
_STYLE = """body{font-family:sans-serif;max-width:60em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .7em;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}svg{max-width:100%;height:auto}"""


def page(title: str, sections: Iterable[str]) -> str:
    """Return an HTML document; ``sections`` are HTML already."""
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"/><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{chr(10).join(sections)}\n</body>\n</html>\n"
    )


def comparison_report(comparisons: Sequence[Comparison], metric: str, part: str) -> str:
    """Return a chart and a table for each trace."""
    sections = [f"<p>{escape(metric.capitalize())} hit rate over {escape(part)}, by capacity in blocks.</p>"]
    for comparison in comparisons:
        lines = []
        for policy in comparison.policies:
            points = [point for point in comparison.points if point.policy == policy]
            errors = [200 * p.error for p in points if p.error is not None]
            rates = [100 * p.rate for p in points]
            band = errors if len(errors) == len(rates) else ()
            lines.append(Line(policy, [p.num_blocks for p in points], rates, band))
        title = f"{comparison.trace}, {comparison.num_trace_blocks:,} different blocks"
        chart = line_chart(title, "capacity, blocks", f"{metric} hit rate, %", lines, is_log_x=True)
        sections += [f"<h2>{escape(comparison.trace)}</h2>", chart, _comparison_table(comparison)]
    return page("Policies by capacity", sections)


def curve_line(name: str, curve: Curve, metric: str) -> Line:
    """Return LRU's hit rate, over the whole trace, at capacities that are evenly spread on a logarithmic axis."""
    capacities = _spread_out(curve.num_blocks)
    rates = [getattr(curve.whole.at(num_blocks), f"{metric}_hit_rate") or 0.0 for num_blocks in capacities]
    return Line(name, capacities, [100 * rate for rate in rates])


def sampled_line(name: str, sampled: SampledCurve) -> Line:
    """Return the estimated block hit rate, with two standard errors on both sides."""
    capacities = _spread_out(sampled.num_blocks)
    found = [sampled.at(num_blocks) for num_blocks in capacities]
    return Line(name, capacities, [100 * at.block_hit_rate for at in found], [200 * at.block_error for at in found])


def info_report(title: str, info: TraceInfo, requests: Sequence[Request]) -> str:
    """Return pictures of a trace: LRU's curve, how far apart uses are, arrivals, and lengths of prompts."""
    hits = info.curve.whole.hit_blocks
    depths = _spread_out(info.num_blocks)
    reuse = Line("blocks found", depths, [100 * hits[depth] / (hits[-1] or 1) for depth in depths])
    arrivals = _histogram("requests", [request.timestamp_ms / 1000 for request in requests])
    per_bin = f"requests in {arrivals.xs[1] - arrivals.xs[0]:.3g} s"
    lengths = [float(request.num_prompt_tokens) for request in requests]
    charts = [
        line_chart(
            "LRU", "capacity, blocks", "hit rate, %", [curve_line("blocks", info.curve, "block")], is_log_x=True
        ),
        line_chart(
            "Reuse distance", "at most so many blocks apart", "share of blocks found, %", [reuse], is_log_x=True
        ),
        line_chart("Arrivals", "time, s", per_bin, [arrivals]),
        line_chart("Prompt lengths", "tokens", "share of requests, %", [_distribution("requests", lengths)]),
    ]
    figures = _table(("", ""), [(name, f"{value:,.6g}") for name, value in _figures(info)])
    return page(title, [figures, *charts])


def _figures(info: TraceInfo) -> list[tuple[str, float]]:
    return [
        ("requests", info.num_requests),
        ("conversations", info.num_conversations),
        ("different blocks", info.num_blocks),
        ("looked up blocks", info.num_prompt_blocks),
        ("ideal block hit rate", info.ideal.block_hit_rate or 0.0),
        ("seconds", info.seconds),
    ]


def _spread_out(largest: int) -> list[int]:
    """Return up to ``_NUM_POINTS`` numbers from 1 to ``largest``, evenly spread as logarithms."""
    if largest < 1:
        return []
    return sorted({round(largest ** (step / _NUM_POINTS)) for step in range(_NUM_POINTS + 1)})


def _histogram(name: str, values: Sequence[float]) -> Line:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    width = (high - low) / _NUM_BINS or 1.0
    counts = [0] * _NUM_BINS
    for value in values:
        counts[min(int((value - low) / width), _NUM_BINS - 1)] += 1
    return Line(name, [low + width * (number + 0.5) for number in range(_NUM_BINS)], counts)


def _distribution(name: str, values: Sequence[float]) -> Line:
    line = _histogram(name, values)
    shares = [100 * count / (len(values) or 1) for count in accumulate(line.ys)]
    return Line(name, line.xs, shares)


def _comparison_table(comparison: Comparison) -> str:
    heads = ["policy", *(f"{num_blocks:,}" for num_blocks in comparison.capacities)]
    rows = []
    for policy in comparison.policies:
        points = [comparison.at(policy, num_blocks) for num_blocks in comparison.capacities]
        rows.append([policy, *("" if point is None else str(point) for point in points)])
    caption = (
        "<p>Percent; of several seeds the mean, ± its standard error (two in the picture). In brackets, the share of "
        "what lies between LRU and the optimum.</p>"
    )
    return caption + _table(heads, rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "<table>" + line(heads, "th") + "".join(line(row, "td") for row in rows) + "</table>"
