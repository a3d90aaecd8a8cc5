"""Metrics: names, labels per adapter with a bounded count, series that vanish after unload."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from mstar.conductor.metrics import Metrics


def series(metrics: Metrics, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The samples of one name, by their labels."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {tuple(sorted(sample.labels.items())): sample.value for family in families for sample in family.samples if sample.name == name}


def labelled(metrics: Metrics, name: str, **labels: str) -> Any:
    return metrics.registry.get_sample_value(name, labels)


def traffic(metrics: Metrics, adapter: str) -> None:
    metrics.request_started(adapter)
    metrics.first_token(adapter, 0.5)
    metrics.inter_token(adapter, 0.01)
    metrics.tokens(adapter, "prompt", 7)
    metrics.tokens(adapter, "output", 3)
    metrics.request_ended(adapter, "stop")


def adapters_of(metrics: Metrics) -> set[str]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.labels["adapter"] for family in families for sample in family.samples if "adapter" in sample.labels}


def test_c97_requests_tokens_and_latency_are_counted_by_adapter():
    metrics = Metrics("base")
    traffic(metrics, "pirate")
    traffic(metrics, "pirate")
    traffic(metrics, "base")
    assert labelled(metrics, "mstar_requests_started_total", adapter="pirate") == 2
    assert labelled(metrics, "mstar_requests_ended_total", adapter="pirate", reason="stop") == 2
    assert labelled(metrics, "mstar_request_tokens_total", adapter="pirate", kind="prompt") == 14
    assert labelled(metrics, "mstar_request_tokens_total", adapter="base", kind="output") == 3
    assert labelled(metrics, "mstar_time_to_first_token_seconds_sum", adapter="pirate") == 1.0
    assert labelled(metrics, "mstar_inter_token_seconds_count", adapter="pirate") == 2


def test_c97_the_number_of_labels_is_bounded():
    metrics = Metrics("base", max_adapter_labels=200)
    for at in range(300):
        traffic(metrics, f"a{at}")
    traffic(metrics, "base")
    names = adapters_of(metrics)
    assert len(names) == 202 and {"base", "other", "a0", "a199"} <= names and "a200" not in names
    assert labelled(metrics, "mstar_requests_started_total", adapter="other") == 100


def test_c97_series_vanish_after_unload_and_late_samples_do_not_bring_them_back():
    metrics = Metrics("base", max_adapter_labels=1)
    traffic(metrics, "pirate")
    metrics.set_residency(device=["pirate"], host=["pirate"])
    traffic(metrics, "second")
    assert adapters_of(metrics) == {"pirate", "other"}
    metrics.forget("pirate")
    assert adapters_of(metrics) == {"other"}
    metrics.inter_token("pirate", 0.1)
    metrics.request_ended("pirate", "length")
    assert adapters_of(metrics) == {"other"}
    traffic(metrics, "third")  # the place is free again
    assert adapters_of(metrics) == {"other", "third"}
    metrics.forget("base")
    traffic(metrics, "base")
    assert "base" in adapters_of(metrics)


def test_lora_info_is_one_series_with_the_true_sets():
    metrics = Metrics("base")
    metrics.set_lora_info(4, running={"b", "a"}, waiting=set())
    metrics.set_lora_info(4, running=["a"], waiting=["c"])
    ((labels, value),) = series(metrics, "vllm:lora_requests_info").items()
    assert dict(labels) == {"max_lora": "4", "running_lora_adapters": "a", "waiting_lora_adapters": "c"}
    assert value > 1e9  # seconds since the epoch: gateways take the newest


def test_residency_is_1_or_0_per_tier():
    metrics = Metrics("base")
    metrics.set_residency(device=["a"], host=["a", "b"])
    metrics.set_residency(device=["b"], host=["b"])
    assert {
        (dict(labels)["adapter"], dict(labels)["tier"]): value for labels, value in series(metrics, "mstar_lora_adapter_resident").items()
    } == {
        ("a", "device"): 0,
        ("a", "host"): 0,
        ("b", "device"): 1,
        ("b", "host"): 1,
    }


def test_every_promised_name_is_there():
    metrics = Metrics("base")
    traffic(metrics, "a")
    metrics.set_requests(waiting=1, running=2)
    metrics.set_slots(held=1, idle=2, free=3)
    metrics.set_kv_pages(used=1, cached=2, free=3)
    metrics.set_residency(["a"], [])
    metrics.set_lora_info(1, [], [])
    metrics.slot_wait(0.1)
    metrics.read_seconds(0.1)
    metrics.read_failed()
    metrics.eviction(2)
    metrics.unknown_model()
    metrics.restarts.inc()
    metrics.dropped_frames.inc()
    names = {sample.name for family in text_string_to_metric_families(metrics.render().decode()) for sample in family.samples}
    assert {
        *("vllm:lora_requests_info", "mstar_lora_adapter_resident", "mstar_lora_slots", "mstar_lora_slot_wait_seconds_count"),
        *(
            "mstar_lora_read_seconds_count",
            "mstar_lora_read_failures_total",
            "mstar_lora_evictions_total",
            "mstar_kv_pages",
            "mstar_requests",
        ),
        *("mstar_request_tokens_total", "mstar_time_to_first_token_seconds_count", "mstar_inter_token_seconds_count"),
        *("mstar_instance_restarts_total", "mstar_wire_dropped_frames_total", "mstar_unknown_model_requests_total"),
    } <= names
    assert not any(name.endswith("_created") for name in names)
    assert labelled(metrics, "mstar_lora_slots", state="idle") == 2
    assert labelled(metrics, "mstar_kv_pages", state="cached") == 2
    assert labelled(metrics, "mstar_requests", state="running") == 2
    assert labelled(metrics, "mstar_lora_evictions_total") == 2


def test_two_instances_of_metrics_share_nothing():
    first, second = Metrics("base"), Metrics("base")
    traffic(first, "a")
    assert labelled(second, "mstar_requests_started_total", adapter="a") is None
