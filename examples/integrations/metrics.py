"""Metrics of rounds in TensorBoard, Prometheus or OpenTelemetry: functions for `log_metrics`.

    DiLoCo(comm, model, optimizer, inner_steps=50, log_metrics=tensorboard("runs/1"))

Weights & Biases needs none of these: pass log_metrics=wandb.log, after wandb.init(). The same
applies to mlflow.log_metrics, to `log` of an Accelerator and to `log_metrics` of Lightning's
loggers.
"""

import re
from collections.abc import Callable
from typing import Any, TypeAlias

LogMetrics: TypeAlias = Callable[[dict[str, Any], int], None]


def tensorboard(folder: str) -> LogMetrics:
    """Scalars in the event files of a folder; needs `tensorboard`."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)

    def log(metrics: dict[str, Any], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def prometheus(port: int) -> LogMetrics:
    """Gauges at http://localhost:port/metrics; 0: no server. Needs `prometheus-client`."""
    from prometheus_client import Gauge, start_http_server

    if port:
        start_http_server(port)
    gauges: dict[str, Gauge] = {}

    def log(metrics: dict[str, Any], step: int) -> None:
        for name, value in {**metrics, "pccl/step": step}.items():
            if name not in gauges:
                gauges[name] = Gauge(re.sub(r"\W", "_", name), f"{name} after the last round")
            gauges[name].set(value)

    return log


def opentelemetry() -> LogMetrics:
    """Gauges of the program's MeterProvider; needs `opentelemetry-api`."""
    from opentelemetry.metrics import get_meter

    meter = get_meter("pccl")
    gauges: dict[str, Any] = {}

    def log(metrics: dict[str, Any], step: int) -> None:
        for name, value in {**metrics, "pccl/step": step}.items():
            if name not in gauges:
                gauges[name] = meter.create_gauge(name.replace("/", "."))
            gauges[name].set(value)

    return log
