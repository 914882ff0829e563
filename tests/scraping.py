"""Reading a server's metrics as Prometheus does."""

from __future__ import annotations

import urllib.request
from urllib.error import HTTPError

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families


def read_text(address: str | None) -> str:
    """Return what a scrape of the address brings."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return answer.read().decode()


def read_metrics(address: str | None) -> dict[str, Metric]:
    """Return the metrics of a scrape by name; of another one, where a machine that stood still let the first fail."""
    try:
        text = read_text(address)
    except HTTPError as failed:
        failed.close()
        text = read_text(address)
    return {metric.name: metric for metric in text_string_to_metric_families(text)}


def samples(address: str | None) -> dict[tuple[str, ...], float]:
    """Return the samples of a scrape, by name and then the values of the labels in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for metric in read_metrics(address).values()
        for sample in metric.samples
    }
